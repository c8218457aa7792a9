"""What the formats of integers have in common: decoding, whether tensors fit, and how many inputs share a scale."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from ktinject.checkpoints.files import DOWNLOAD_AGAIN
from ktinject.checkpoints.formats.base import Codes, Format, SourceFormat, no_expert_of_a_matrix, refused
from ktinject.checkpoints.reader import Reader

_Q8_0_INPUTS = 32  # that share a scale there; larger groups have theirs several times


class IntegerFormat(SourceFormat):
    """A format of integers in matrices, which are read whole."""

    def decode(self, reader: Reader, key: str, form: Format, index: int | None) -> Tensor:
        assert form.shape is not None, "of a complete checkpoint"
        no_expert_of_a_matrix(reader, key, index, form.shape)
        return self.stored(reader, key, form).values()

    @abstractmethod
    def stored(self, reader: Reader, key: str, form: Format) -> Codes:
        """Read the weight as codes."""


def check_part(reader: Reader, name: str, dtypes: tuple[str, ...], shape: tuple[int, ...] | None) -> None:
    """Raise CheckpointError unless a tensor has one of the dtypes and that shape, or is a matrix."""
    info = reader.tensors[name]
    fits = len(info.shape) == 2 and 0 not in info.shape if shape is None else info.shape == shape
    if info.dtype not in dtypes or not fits:
        needed = f"{' or '.join(dtypes)} {'as a matrix' if shape is None else list(shape)} is needed"
        raise refused(reader, name, f"{info.dtype} {list(info.shape)}; {needed}. {DOWNLOAD_AGAIN}")


def group_size_of(reader: Reader, scales: str, k: int, groups: int, varied: bool, said: object = None) -> int:
    """Inputs that share a scale. The last group may have fewer, if config.json says how many the others have.

    scales   the name of the tensor of scales
    groups   how many it is for
    varied   config.json has other settings for some layers, so that they need not be those of all
    said     what config.json says of the layer; None: what it says of all
    Raises   CheckpointError
    """
    if said is None:
        said = reader.quantization.get("group_size", reader.quantization.get("q_group_size"))
    size = (k if said == -1 else said) if type(said) is int and (said > 0 or said == -1) else None
    if size is not None and groups == -(-k // min(size, k)):
        return min(size, k)
    if groups > 0 and k % groups == 0 and (size is None or varied):
        return k // groups
    needed = f"{-(-k // min(size, k))}" if size is not None else f"a number of groups that divides {k}"
    text = f"{groups} groups for {k} inputs; {needed} is needed for quantization_config.group_size {said}"
    raise refused(reader, scales, f"{text}. Correct config.json, or download the file again.")


def group_table(reader: Reader, key: str, k: int, size: int, g_idx: Tensor | None) -> Tensor | None:
    """The group of each input; None if groups are equal and in order. Raises CheckpointError for one that is absent."""
    in_order = torch.arange(k, device="cpu") // size
    if g_idx is None:
        return None if k % size == 0 else in_order
    if bool(g_idx.min() < 0) or bool(g_idx.max() >= -(-k // size)):
        raise refused(reader, key, f"g_idx names a group that is not there. {DOWNLOAD_AGAIN}")
    order = g_idx.long()
    return None if k % size == 0 and torch.equal(order, in_order) else order


def integer_format(
    name: str,
    held: tuple[str, ...],
    shape: tuple[int, int],
    bits: int,
    group_size: int,
    has_zeros: bool,
    scales: str,
    ordered: bool = False,
) -> Format:
    """ordered   a tensor says the group of each input, which need not be in order"""
    encoding = ""  # groups of which the last is smaller are decoded
    if shape[1] % group_size == 0:
        encoding = _encoding(bits, group_size, group_size == shape[1], has_zeros or ordered)
    return Format(
        name,
        held,
        shape=shape,
        group_size=group_size,
        has_zeros=has_zeros,
        encoding=encoding,
        is_ordered=ordered,
        scales=scales,
    )


def announced(
    name: str, held: tuple[str, ...], bits: object, group_size: object, has_zeros: bool, ordered: bool = False
) -> Format:
    """What `integer_format` will most likely be: without a tensor's shape, by what config.json says.

    group_size  a whole number; anything else: one scale an output
    """
    size = group_size if type(group_size) is int and group_size > 0 else -1
    encoding = _encoding(bits, size, size == -1, has_zeros or ordered)
    return Format(name, held, group_size=size, has_zeros=has_zeros, encoding=encoding, is_ordered=ordered)


def _encoding(bits: object, group_size: int, is_row: bool, varied: bool) -> str:
    """varied   there are zero points, or groups need not be in order"""
    if bits == 4:
        return "int4"
    if bits != 8 or varied:
        return ""
    return "int8" if is_row else "q8_0" if group_size % _Q8_0_INPUTS == 0 else ""
