"""The interface of a container: a `Reader` has the tensors of a checkpoint's files, whatever kind of files they are.

    main_file, open ── headers ── one table: name → dtype, shape, place ── read

A kind of container is a subclass in a file of its own (safetensors.py, gguf.py), and stands in `checkpoint.READERS`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, KeysView, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Literal, NamedTuple, Self

import torch

from ktinject.checkpoints.files import DOWNLOAD_AGAIN, DataFile
from ktinject.errors import CheckpointError, listed, shown

MAX_TENSORS = 400_000  # of all files of a checkpoint; Kimi-K2's int4 has 210,000
MAX_ELEMENTS = 2**63 - 1  # torch counts in int64

TORCH_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
INTEGERS = ("I64", "I32", "I16", "I8", "U64", "U32", "U16", "U8", "BOOL")


class Entry(NamedTuple):
    """One tensor of a file; `offset` counts from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    bytes: int


@dataclass(frozen=True)
class Header:
    """A checked header of a file.

    tensors   name → dtype, shape (the outermost extent first), place; in the order of the data
    metadata  what else the header says
    """

    tensors: dict[str, Entry]
    metadata: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor as its header describes it; `shard` is a file name, `bytes` the size of the data.

    A tensor of stacked experts in GGUF counts as one tensor for each expert.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    shard: str
    bytes: int


@dataclass(frozen=True)
class Shard:
    """One file of a checkpoint, and the tensors in it by the names that a checkpoint gives them."""

    file: DataFile
    entries: dict[str, Entry]
    metadata: Mapping[str, Any]


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer as a file keeps it.

    kind        how words are joined: "gpt2" by a list of pairs, over bytes; "llama" by scores
    split       the name of the way in which text is cut before; "" if the file does not say
    words       by their numbers
    types       of the words: 1 ordinary, 2 unknown, 3 control, 4 the user's, 5 unused, 6 a byte
    scores      of the words; empty if there are none
    merges      pairs of words, the first to be joined first
    tokens      such as "bos" → number
    flags       such as "add_bos_token" → truth value, as far as the file says
    template    of chats, in Jinja; None if there is none
    """

    kind: str
    split: str
    words: tuple[str, ...]
    types: tuple[int, ...]
    scores: tuple[float, ...]
    merges: tuple[tuple[str, str], ...]
    tokens: Mapping[str, int]
    flags: Mapping[str, bool]
    template: str | None


class Made(NamedTuple):
    """A weight that no tensor holds as it is.

    parts     the tensors that it is made of
    shape     of the weight
    make      decoded parts → the weight [*shape]. Raises ValueError for values that cannot be
    by_slice  a slice of its first dimension is made of the same slices of its parts
    rows      what becomes of rows of inputs, which may be blocks, or codes and scales of groups: moved; across, which
              is moved with the last two dimensions exchanged; "": their values change, or they are cut
    """

    parts: tuple[str, ...]
    shape: tuple[int, ...]
    make: Callable[..., torch.Tensor]
    by_slice: bool
    rows: Literal["", "moved", "across"] = ""


class Reader(ABC):
    """The tensors of a checkpoint's files, by name.

    container       what such files are called
    suffixes        of the files that are opened so, in lower case
    states_formats  the files say how each tensor is stored: `quantization_config` in config.json speaks of others
    block_dtypes    dtypes whose values come in blocks of bytes: `read` gives the bytes

    path            what was opened
    tensors         name → TensorInfo, in the order of files and of data in each, which is the fastest order to read
                    in; empty if not complete
    names           all tensor names, also if not complete
    made            weight → the tensors that it is made of, and how; a weight that is there is not among these
    skipped         names of tensors that no weight needs, such as layers that predict further tokens
    complete        False if only an index is there and none of its shards: enough to plan, not to read
    total_bytes     of all tensors; None if not complete and the index does not say
    quantization    the model config's `quantization_config`; empty if the files state their formats
    """

    container: ClassVar[str]
    suffixes: ClassVar[tuple[str, ...]]
    states_formats: ClassVar[bool] = False
    block_dtypes: ClassVar[tuple[str, ...]] = ()
    made: Mapping[str, Made] = MappingProxyType({})
    skipped: Sequence[str] = ()

    def __init__(
        self,
        path: Path,
        shards: dict[str, Shard],
        quantization: Mapping[str, Any],
        names: Iterable[str] = (),
        total_bytes: int | None = None,
    ) -> None:
        self.path = path
        self.quantization: Mapping[str, Any] = {} if self.states_formats else quantization
        self.tensors = {
            name: TensorInfo(name, entry.dtype, entry.shape, file_name, entry.bytes)
            for file_name, shard in shards.items()
            for name, entry in shard.entries.items()
        }
        self.complete = bool(shards)
        self.total_bytes = sum(i.bytes for i in self.tensors.values()) if self.complete else total_bytes
        self._names = dict.fromkeys(self.tensors or names)
        self._shards = shards
        self._closed = False

    @classmethod
    @abstractmethod
    def main_file(cls, folder: Path) -> str | None:
        """The name of the file to open in a folder; None if it has none of this kind. Raises CheckpointError."""

    @classmethod
    @abstractmethod
    def open(cls, path: Path, file: Path, quantization: Mapping[str, Any]) -> Self:
        """Read the headers of a file, and of all files that belong to it, and check everything but the data.

        path     what was asked for, for messages
        Raises   CheckpointError with all faults of the same kind in one report
        """

    def config_values(self) -> dict[str, Any] | None:
        """What config.json would say, as far as the files state it; None if they never do. Raises CheckpointError."""
        return None

    def vocabulary(self) -> Vocabulary | None:
        """The tokenizer that the files hold, if any. Raises CheckpointError."""
        return None

    def add_packed(self, name: str, said: Any, where: str) -> None:
        """Let a tensor count as there that only a file of packed weights holds: it can be planned with, not read.

        said     dtype and extents, as the file says
        where    for refusals
        Raises   CheckpointError for one that is there, or makes no sense
        """
        fits = isinstance(said, list) and len(said) > 1 and said[0] in ("BF16", "F16", "F32")
        if not fits or not all(type(extent) is int and 0 < extent < 1 << 31 for extent in said[1:]):
            raise CheckpointError(
                f"{self.path}: tensor {shown(name)} of {where}: found {shown(said)}. Convert again."
            )
        if name in self._names:
            raise CheckpointError(
                f"{self.path}: tensor {shown(name)} is there, and in {where}. Delete one of them."
            )
        dtype, *shape = said
        size = prod(shape) * TORCH_DTYPES[dtype].itemsize
        self.tensors[name] = TensorInfo(name, dtype, tuple(shape), where, size)
        self._names[name] = None

    @property
    def names(self) -> KeysView[str]:
        return self._names.keys()

    def read(self, name: str, index: int | None = None, rows: tuple[int, int] | None = None) -> torch.Tensor:
        """Read one tensor, or one slice of its first dimension, or some of its rows, into new memory.

        rows     start and number along the first dimension
        Returns  [*shape], or [*shape[1:]] for an index; CPU, contiguous, writable, nobody else's memory;
                 of `block_dtypes` uint8, with the bytes of a row as last dimension
        Raises   CheckpointError if there is no such tensor or slice, torch has no such dtype, or the file is
                 not what it was when it was opened
        """
        if self._closed:
            raise CheckpointError(f"{self.path}: this checkpoint is closed. Open it again.")
        if name not in self._names:
            raise CheckpointError(f"{self.path}: there is no tensor {shown(name)}.")
        self.check_complete(name)
        info = self.tensors[name]
        if info.shard not in self._shards:
            raise CheckpointError(
                f"{self.path}: tensor {shown(name)} is only there in {info.shard}; it cannot be read by itself. Load "
                "it with the rules in config.json, or use the original checkpoint."
            )
        shard = self._shards[info.shard]
        where = f"{shard.file.path}: tensor {shown(name)}"
        in_blocks = info.dtype in self.block_dtypes
        dtype = torch.uint8 if in_blocks else TORCH_DTYPES.get(info.dtype)
        if dtype is None:
            raise CheckpointError(
                f"{where}: dtype {info.dtype} is not read; allowed: {', '.join(TORCH_DTYPES)}. "
                "Use a checkpoint in another format."
            )
        skip, size, shape = _part(info, index, rows, where)
        # `safe_open(backend="pread")` is as fast for whole tensors, but reads all of a stacked tensor to give
        # one of its experts (0.4 against 38 GB/s, 64 experts, page cache), and notices no changed file.
        buffer = torch.empty(size, dtype=torch.uint8, device="cpu")
        shard.file.read_into(buffer.numpy().data, shard.entries[name].offset + skip, where)
        return buffer.view(dtype).view((*shape[:-1], -1) if in_blocks else shape)

    def check_complete(self, name: str) -> None:
        """Raise CheckpointError, which names a tensor, where there are no files to read."""
        if not self.complete:
            raise CheckpointError(
                f"{self.path}: tensor {shown(name)}: only the index is there. Download the shards to read it."
            )

    def files(self) -> list[str]:
        """Paths of the files with the tensors, in reading order; none if not complete."""
        return [str(shard.file.path) for shard in self._shards.values()]

    def fingerprints(self) -> list[dict[str, Any]]:
        """Of each file what tells it from others without reading all of it; see `DataFile.fingerprint`.

        Raises   CheckpointError
        """
        return [
            shard.file.fingerprint(min((entry.offset for entry in shard.entries.values()), default=0))
            for shard in self._shards.values()
        ]

    def close(self) -> None:
        """Close the files. Tensors read before stay valid. Closing twice is allowed."""
        self._closed = True
        for shard in self._shards.values():
            shard.file.close()


def _part(
    info: TensorInfo, index: int | None, rows: tuple[int, int] | None, where: str
) -> tuple[int, int, tuple[int, ...]]:
    """Of a slice or some rows of a tensor: bytes before it, bytes of it, shape."""
    shape = info.shape
    if index is not None:
        if not shape or not 0 <= index < shape[0]:
            raise CheckpointError(f"{where}: there is no slice {index}; its shape is {list(shape)}.")
        size = info.bytes // shape[0]
        return index * size, size, shape[1:]
    if rows is not None:
        start, count = rows
        if not shape or start < 0 or count < 1 or start + count > shape[0]:
            raise CheckpointError(
                f"{where}: there are no rows {start} to {start + count - 1}; its shape is {list(shape)}."
            )
        row = info.bytes // shape[0]
        return start * row, count * row, (count, *shape[1:])
    return 0, info.bytes, shape


def open_shards(
    folder: Path, names: Iterable[str], opened: ExitStack, read_header: Callable[[Path, int], Header]
) -> dict[str, Shard]:
    """Open the files, which `opened` then closes, and read their headers.

    read_header   path and file descriptor → checked header
    Raises        CheckpointError with the faults of all files in one report
    """
    shards: dict[str, Shard] = {}
    faults: list[str] = []
    total, files = 0, [*names]
    for name in files:
        try:
            file = DataFile(folder / name)
            opened.callback(file.close)
            header = read_header(file.path, file.fileno())
            total += len(header.tensors)
            if total > MAX_TENSORS:
                raise CheckpointError(
                    f"{folder}: its files hold more than the {MAX_TENSORS:,} tensors that are read. {DOWNLOAD_AGAIN}"
                )
            shards[name] = Shard(file, header.tensors, header.metadata)
        except CheckpointError as error:
            faults.append(str(error))
    if len(faults) == 1:
        raise CheckpointError(faults[0])
    if faults:
        raise CheckpointError(
            f"{folder}: {len(faults)} of {len(files)} files cannot be used:{listed(faults)}"
        )
    return shards
