"""The contract of a source format, what it says of a weight, and how a weight may be handed on undecoded."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from ktinject.checkpoints.files import DOWNLOAD_AGAIN
from ktinject.checkpoints.reader import Reader
from ktinject.errors import CheckpointError, shown

FLOATS = {"BF16": "bf16", "F16": "fp16", "F32": "fp32"}  # dtype → format
_CHECK_ELEMENTS = 1 << 22
_GGUF_BLOCK = 256  # inputs of the longest
_TITLES: list[str] = []  # of all formats that are read


@dataclass(frozen=True)
class Format:
    """How one weight is stored.

    name        for people; "float" if only an index is there, which does not tell the dtype
    companions  the tensors that belong to the weight; without the weight's own where it has that name
    block       outputs and inputs that share a scale in fp8, else None
    shape       of the weight where no tensor has it; None if only an index is there, too
    group_size  inputs that share a scale, in codes of integers; else 0; -1 if only an index is there
    has_zeros   codes have zero points other than the middle
    encoding    what `stored` gives, as operators' `native_formats` name it; "" for what is read decoded only
    exact_in    weight formats of operators that hold all values that `decode` gives
    is_ordered  a table says the group of each input, which may be any
    scales      dtype of the scales of codes, as headers name it; "" where that says nothing
    is_divided  what is for all of a matrix divides its scales
    by_slice    of a stack, `stored_slice` gives one matrix
    """

    name: str
    companions: tuple[str, ...] = ()
    block: tuple[int, int] | None = None
    shape: tuple[int, ...] | None = None
    group_size: int = 0
    has_zeros: bool = False
    encoding: str = ""
    exact_in: tuple[str, ...] = ()
    is_ordered: bool = False
    scales: str = ""
    is_divided: bool = False
    by_slice: bool = False

    def is_taken(self, native_formats: Collection[str]) -> bool:
        """Whether this is one of these encodings; "int4" are all groups, "int4/64" and "int4/64 zeros" some."""
        if not self.encoding or self.encoding in native_formats:
            return bool(self.encoding)
        zeros = " zeros" if self.has_zeros else ""
        return not self.is_ordered and f"{self.encoding}/{self.group_size}{zeros}" in native_formats

    def is_whole_in(self, dim: int, length: int) -> bool:
        """Whether parts of so many outputs (0) or inputs (1) leave together what shares a scale."""
        if not self.encoding or (self.encoding == "fp8_channel" and dim == 1):
            return True
        if self.encoding == "fp8" and self.block is not None:
            return length % self.block[dim] == 0
        return dim == 0 or length % (self.group_size or _GGUF_BLOCK) == 0

    @property
    def is_plain(self) -> bool:
        """The tensor holds the values themselves."""
        return self.name in FLOATS.values()


@dataclass(frozen=True)
class Codes:
    """A weight [..., n, k] in integers of 4 or 8 bits, or [..., k, n] where a parameter is so; then all of it is.

    codes       [..., n, k] uint8, 0 to 15 or 255
    scales      [..., n, groups], float
    zeros       [n, groups] uint8, as codes; None: the middle everywhere, 8 or 128
    group_of    [k] int64, the group of each input; None: groups are equal and in order
    bits        4 or 8
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    group_of: Tensor | None = None
    bits: int = 4

    def narrow(self, dim: int, start: int, length: int) -> Codes:
        """A copy of some of its outputs (0) or inputs (1). Raises ValueError if that would divide a group."""
        codes = self.codes.narrow(dim, start, length).clone()
        if dim == 1 and self.group_of is not None:
            return Codes(
                codes, self.scales, self.zeros, self.group_of[start : start + length].clone(), self.bits
            )
        if dim == 1:
            size = self.codes.shape[1] // self.scales.shape[1]
            start, length = _blocks(start, length, size, "inputs")
        scales = self.scales.narrow(dim, start, length).clone()
        zeros = None if self.zeros is None else self.zeros.narrow(dim, start, length).clone()
        return Codes(codes, scales, zeros, self.group_of, self.bits)

    def values(self) -> Tensor:
        """[n, k] fp32, each the fp32 product of scale and difference; exact for 4 bits and scales of 16 bits."""
        n, k = self.codes.shape
        groups, middle = self.scales.shape[1], 1 << (self.bits - 1)
        if self.group_of is not None:
            offset = middle if self.zeros is None else self.zeros[:, self.group_of].float()
            return (self.codes.float() - offset) * self.scales.float()[:, self.group_of]
        steps = self.codes.view(n, groups, k // groups).float()
        steps -= middle if self.zeros is None else self.zeros[:, :, None].float()
        return steps.mul_(self.scales.float()[:, :, None]).view(n, k)


@dataclass(frozen=True)
class Fp8Blocks:
    """A weight [n, k] in fp8 with a scale a block, by which the values are multiplied.

    values  [n, k] float8_e4m3fn
    scales  [ceil(n / block n), ceil(k / block k)] fp32, positive
    block   (n, k); (1, k) where an output has one; (1, 32) of MXFP8
    """

    values: Tensor
    scales: Tensor
    block: tuple[int, int]

    def narrow(self, dim: int, start: int, length: int) -> Fp8Blocks:
        """A copy of some of its outputs (0) or inputs (1). Raises ValueError if that would divide a block."""
        values = self.values.narrow(dim, start, length).clone()
        if self.is_by_output and dim == 1:
            return Fp8Blocks(values, self.scales, (1, length))
        first, count = _blocks(start, length, self.block[dim], ("outputs", "inputs")[dim])
        return Fp8Blocks(values, self.scales.narrow(dim, first, count).clone(), self.block)

    def of_expert(self, index: int) -> Fp8Blocks:
        """One of a stack, [n, k]."""
        return Fp8Blocks(self.values[index], self.scales[index], self.block)

    @property
    def is_by_output(self) -> bool:
        """Whether each output has one scale."""
        return self.block == (1, self.values.shape[-1])


@dataclass(frozen=True)
class Nvfp4:
    """A weight [..., n, k] in NVFP4, or [..., k, n]: what is said of inputs is of the dimension that codes pack.

    codes    [..., n, k / 2] uint8, two e2m1 a byte, an even input in the lower half
    scales   [..., n, k / 16] float8_e4m3fn, not negative
    factors  [...] fp32, what multiplies all of a matrix
    """

    codes: Tensor
    scales: Tensor
    factors: Tensor

    def of_expert(self, index: int) -> Nvfp4:
        """One of a stack, [n, k]."""
        return Nvfp4(self.codes[index], self.scales[index], self.factors[index])

    def narrow(self, dim: int, start: int, length: int) -> Nvfp4:
        """A copy of some of a matrix' outputs (0) or inputs (1). Raises ValueError if that would divide a group."""
        if dim == 0:
            cut = (start, length), (start, length)
        else:
            first, count = _blocks(start, length, 16, "inputs")
            cut = (first * 8, count * 8), (first, count)
        codes, scales = (t.narrow(dim, *at).clone() for t, at in zip((self.codes, self.scales), cut))
        return Nvfp4(codes, scales, self.factors)


@dataclass(frozen=True)
class GgufRows:
    """A weight [..., n, k] in the blocks of a GGUF file.

    kind    the format's name: "q4_k"
    rows    [..., n, bytes] uint8
    inputs  values of a block
    bytes   of a block
    """

    kind: str
    rows: Tensor
    inputs: int
    bytes: int

    def narrow(self, dim: int, start: int, length: int) -> GgufRows:
        """A copy of some of its outputs (0) or inputs (1). Raises ValueError if that would divide a block."""
        if dim == 0:
            rows = self.rows.narrow(0, start, length)
        else:
            first, count = _blocks(start, length, self.inputs, "inputs")
            rows = self.rows.narrow(-1, first * self.bytes, count * self.bytes)
        return GgufRows(self.kind, rows.clone(), self.inputs, self.bytes)


# A weight as an operator may take it without decoding.
Stored = Codes | Fp8Blocks | Nvfp4 | GgufRows


@dataclass(frozen=True)
class OwnTensors:
    """The tensors that a format keeps a weight in.

    needed    what stands in their names in place of `ending`
    optional  the same, of tensors that may be absent
    ending    of the weight's name
    tells     the first of `needed` that is not the weight's own
    """

    needed: tuple[str, ...]
    optional: tuple[str, ...] = ()
    ending: str = ".weight"
    tells: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "tells", next(suffix for suffix in self.needed if suffix != self.ending))

    def of(self, names: Collection[str], key: str) -> tuple[str, ...]:
        """The names of the tensors that hold the weight `key`; () if some are absent."""
        if not key.endswith(self.ending):
            return ()
        stem = key.removesuffix(self.ending)
        if stem + self.tells not in names or not all(stem + suffix in names for suffix in self.needed):
            return ()
        # A plain weight comes before tensors that would make one of its name.
        if self.ending not in self.needed and key in names:
            return ()
        return tuple(stem + s for s in (*self.needed, *self.optional) if stem + s in names)

    def weights(self, names: Collection[str]) -> Iterator[str]:
        """The weights that these tensors would hold, by what their names end with."""
        for name in names:
            if name.endswith(self.tells):
                yield name.removesuffix(self.tells) + self.ending


def ending_of(name: str) -> str:
    """A name from its last dot on; all of it if it has none. A checkpoint has thousands of names, and few of these."""
    return name[max(0, name.rfind(".")) :]


def is_told(suffixes: Collection[str], endings: Collection[str]) -> bool:
    """Whether a name may end with one of the suffixes, where these are the endings of all names."""
    return any(ending.endswith(ending_of(suffix)) for suffix in suffixes for ending in endings)


class SourceFormat(ABC):
    """One way in which checkpoints store weights. An instance stands in the registry, table.py.

    title       what people call it; said where a checkpoint in a format that is not read is refused
    methods     values of quant_method in config.json that stand for it
    own         which tensors hold a weight where that is not one of the weight's name
    tells       what a tensor's name has in place of ".weight" that no other format has: alone, it names the format
    """

    title: ClassVar[str] = ""
    methods: ClassVar[tuple[str, ...]] = ()
    own: ClassVar[tuple[OwnTensors, ...]] = ()
    tells: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls) -> None:
        if cls.title and cls.title not in _TITLES:
            _TITLES.append(cls.title)

    def may_be_in(self, endings: Collection[str]) -> bool:
        """Whether a checkpoint may have such a weight.

        endings   of all of its names, as `ending_of` gives them
        """
        return not self.own or is_told({own.tells for own in self.own}, endings)

    def held(self, reader: Reader, key: str) -> tuple[str, ...]:
        """The tensors that hold a weight's values; () if it is not in this format. Names may be all there is."""
        names = reader.names
        for own in self.own:
            if held := own.of(names, key):
                return held
        return ()

    @abstractmethod
    def detect(self, reader: Reader, key: str, held: tuple[str, ...]) -> Format:
        """How the weight is stored, from headers alone, or from names if the checkpoint is not complete.

        held     its tensors, as `held` gave them
        Raises   CheckpointError if its tensors do not fit together, or config.json does not say how to read them
        """

    @abstractmethod
    def decode(self, reader: Reader, key: str, form: Format, index: int | None) -> Tensor:
        """Read the weight, or one slice of its first dimension, as floats on the CPU.

        form     as `detect` gave it, of a complete checkpoint
        Raises   CheckpointError, also if scales or codes make no sense
        """

    def stored(self, reader: Reader, key: str, form: Format) -> Stored:
        """Read the weight undecoded, for operators that list the format as one that they take so."""
        raise NotImplementedError(f"{form.name} is read decoded only")

    def stored_slice(self, reader: Reader, key: str, form: Format, index: int) -> Stored:
        """The same, of one slice of the first dimension of a weight whose format is `by_slice`."""
        raise NotImplementedError(f"{form.name} is read whole")


def no_expert_of_a_matrix(reader: Reader, key: str, index: int | None, shape: tuple[int, ...]) -> None:
    """Raise CheckpointError where one of the slices of a matrix is asked for: only stacks of them are cut."""
    if index is not None and len(shape) < 3:
        raise refused(reader, key, f"there is no expert {index} in a matrix; it is read whole.")


def check_scales(reader: Reader, name: str, scales: Tensor, of_parts: bool = False) -> None:
    """Raise CheckpointError naming the position of the first scale that is not positive and finite.

    of_parts  they are of blocks or outputs, which may be all zeros: then a scale may be 0
    """
    wrong = ~(torch.isfinite(scales) & ((scales >= 0) if of_parts else (scales > 0)))
    if wrong.any():
        position = place_of(scales, int(wrong.flatten().nonzero()[0]))
        value = scales[tuple(position)].item()
        text = f"{value} at {position}; scales must be positive{' or 0' if of_parts else ''}, and finite"
        remedy = (
            "Use a checkpoint whose scales have no sign: their weights have it"
            if value < 0
            else DOWNLOAD_AGAIN[:-1]
        )
        raise refused(reader, name, f"{text}. {remedy}.")


def _blocks(start: int, length: int, size: int, what: str) -> tuple[int, int]:
    """The first of the blocks of this size, and how many they are."""
    if start % size or length % size:
        raise ValueError(
            f"{what} {start} to {start + length - 1} are no whole blocks: a scale is for {size} of them. "
            "Use fewer processes, or an operator for which the checkpoint is decoded"
        )
    return start // size, length // size


def check_finite(name: str, tensor: torch.Tensor, reader: Reader | None = None) -> None:
    """Raise CheckpointError naming the tensor and the position of its first NaN or infinity, if any.

    reader   whose path the error names, too
    """
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return
    flat = tensor.reshape(-1)
    for start in range(0, flat.numel(), _CHECK_ELEMENTS):
        piece = flat[start : start + _CHECK_ELEMENTS]
        if piece.element_size() == 1:
            piece = piece.float()  # torch has no isfinite for 8-bit floats
        finite = torch.isfinite(piece)
        if not finite.all():
            first = int((~finite).nonzero()[0])
            where = "" if reader is None else f"{reader.path}: "
            raise CheckpointError(
                f"{where}tensor {shown(name)}: {piece[first].item()} at {place_of(tensor, start + first)}; "
                f"all values must be finite. The checkpoint is damaged. {DOWNLOAD_AGAIN}"
            )


def place_of(tensor: torch.Tensor, flat: int) -> list[int]:
    """The indices of an element that stands at `flat` in order."""
    return [
        int(i) for i in torch.unravel_index(torch.tensor(flat, dtype=torch.int64, device="cpu"), tensor.shape)
    ]


def refused(reader: Reader, key: str, found: str) -> CheckpointError:
    """The error that says where `found` was found."""
    return CheckpointError(f"{reader.path}: tensor {shown(key)}: {found}")


def unread(reader: Reader, key: str, found: str) -> CheckpointError:
    """The error for a weight in a format that is not read."""
    titles = "; ".join(sorted(_TITLES, key=str.casefold))
    return refused(
        reader, key, f"{found}. Read are bf16, fp16, fp32; {titles}. Use a checkpoint in one of these."
    )
