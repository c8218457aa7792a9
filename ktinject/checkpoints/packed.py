"""Files of packed weights: what operators hold, as safetensors that any reader of the format shows.

    header    of each tensor dtype, shape, place; as metadata what the weights were packed from, and checksums
    tensors   `<module path>.<part>`: uint8 panels as native/gemm/layout.hpp has them, fp32 biases

In the file the panels of an expert follow each other; in memory each NUMA node has some of them. So a tensor is a list
of runs, each of which lies together in both, and one file serves any number of nodes, and all instruction sets.

A file is written beside its name and renamed when it is whole. It is read into final memory, by `pread`: a file that is
cut off while it is mapped would end the process.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Self

from ktinject.checkpoints.files import DataFile
from ktinject.checkpoints.reader import Entry
from ktinject.checkpoints.safetensors import BITS, read_header
from ktinject.errors import CheckpointError, shown

FORMAT = "ktinject packed"
VERSION = "1"  # of what this file says
# The beginning of the metadata's names of checksums; the tensor's name follows.
SUM = "sha256 of "
# What a Ctrl-C waits for at most, and what one thread reads in one go.
BLOCK = 16 << 20
_ABANDONED_SECONDS = 3600
_COUNTER = itertools.count()


class Run(NamedTuple):
    """Bytes of a tensor that lie together in memory; `start` counts within the tensor as the file has it."""

    start: int
    bytes: int
    address: int


@dataclass(frozen=True)
class PackedTensor:
    """One tensor of a file, and where its bytes lie in memory. Its operator lives as long as it is in use."""

    dtype: str
    shape: tuple[int, ...]
    runs: tuple[Run, ...]

    @property
    def bytes(self) -> int:
        count = BITS[self.dtype] // 8
        for extent in self.shape:
            count *= extent
        return count


@dataclass(frozen=True)
class PackedWeights:
    """All that an operator holds of its weights.

    form      what the bytes mean; where it and the shapes are equal, so are the bytes of equal weights
    tensors   by the name of the part
    state     what else the operator keeps of what it loaded
    """

    form: str
    tensors: Mapping[str, PackedTensor]
    state: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of_native(
        cls, form: str, parts: list[tuple[str, bool, list[int], list[tuple[int, int, int]]]]
    ) -> Self:
        """What `packed()` of a native object says."""
        return cls(
            form,
            {
                name: PackedTensor(
                    "F32" if is_float else "U8", tuple(shape), tuple(Run(*run) for run in runs)
                )
                for name, is_float, shape, runs in parts
            },
        )


class Block(NamedTuple):
    """Bytes that are read or written in one go."""

    name: str
    offset: int
    memory: memoryview


class PackedFile:
    """A file of packed weights that is open. Close it."""

    def __init__(self, path: Path) -> None:
        """Open a file and check its header. Raises CheckpointError."""
        self.path = path
        self._file = DataFile(path)
        try:
            header = read_header(path, self._file.fileno())
            self.entries: Mapping[str, Entry] = header.tensors
            self.metadata: Mapping[str, str] = header.metadata
            if self.metadata.get("format") != FORMAT or self.metadata.get("version") != VERSION:
                raise CheckpointError(
                    f"{path}: found metadata of format {shown(self.metadata.get('format'))}, version "
                    f"{shown(self.metadata.get('version'))}; {FORMAT!r}, {VERSION} is needed. Delete the file."
                )
        except BaseException:
            self._file.close()
            raise

    @property
    def status(self) -> os.stat_result:
        """Of the file that is open, whatever its name means by now."""
        return os.fstat(self._file.fileno())

    def check(self, tensors: Mapping[str, PackedTensor]) -> None:
        """Refuse a file that does not hold these tensors, in their dtypes and shapes. Raises CheckpointError."""
        for name, tensor in tensors.items():
            entry = self.entries.get(name)
            if entry is None or (entry.dtype, entry.shape) != (tensor.dtype, tensor.shape):
                found = "nothing" if entry is None else f"{entry.dtype} {list(entry.shape)}"
                raise CheckpointError(
                    f"{self.path}: tensor {shown(name)}: found {found}; expected {tensor.dtype} "
                    f"{list(tensor.shape)}. Delete the file."
                )

    def blocks(self, tensors: Mapping[str, PackedTensor]) -> Iterator[Block]:
        """The blocks of tensors that the file holds, in its order; `memory` is where they belong."""
        for name in sorted(tensors, key=lambda name: self.entries[name].offset):
            yield from _blocks(name, self.entries[name].offset, tensors[name])

    def read(self, block: Block) -> int:
        """Read a block to where it belongs; returns its bytes. From any thread. Raises CheckpointError."""
        self._file.read_into(block.memory, block.offset, f"{self.path}: tensor {shown(block.name)}")
        return len(block.memory)

    def wrong(self, advance: Callable[[int], None]) -> list[str]:
        """Names of the tensors whose bytes are not those that were written. Raises CheckpointError."""
        buffer = memoryview(bytearray(BLOCK))
        found = []
        for name, entry in self.entries.items():
            digest = hashlib.sha256()
            for start in range(0, entry.bytes, BLOCK):
                part = buffer[: min(BLOCK, entry.bytes - start)]
                self.read(Block(name, entry.offset + start, part))
                digest.update(part)
                advance(len(part))
            if self.metadata.get(SUM + name) != digest.hexdigest():
                found.append(name)
        return found

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class Writer:
    """Writes a file of packed weights under another name, and renames it when `finish` is called. Use it in `with`.

    Raises   OSError as the system does, a full disk among them; nothing is left then
    """

    def __init__(
        self, path: Path, tensors: Mapping[str, PackedTensor], metadata: Mapping[str, str], mode: int = 0o666
    ) -> None:
        """mode   of the file, less the process' umask"""
        self._path, self._tensors, self._mode = path, tensors, mode
        self._metadata = {"format": FORMAT, "version": VERSION, **metadata}
        self._sums = dict.fromkeys(tensors, "0" * 64)
        self._temporary = path.with_name(f".{path.name}.{os.getpid()}.{next(_COUNTER)}.part")
        self._stopped = threading.Event()
        self._fd = -1

    def __enter__(self) -> Self:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        for path in abandoned(self._path.parent):
            path.unlink(missing_ok=True)
        self._fd = os.open(self._temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, self._mode)
        self._start = len(self._header())
        self._offsets = dict(
            zip(self._tensors, itertools.accumulate((t.bytes for t in self._tensors.values()), initial=0))
        )
        return self

    def write(self, name: str) -> None:
        """Write one of the tensors. From several threads, of different tensors. Raises OSError."""
        digest = hashlib.sha256()
        offset = self._start + self._offsets[name]
        for block in _blocks(name, offset, self._tensors[name]):
            done = 0
            while done < len(block.memory) and not self._stopped.is_set():
                done += os.pwrite(self._fd, block.memory[done:], block.offset + done)
            if self._stopped.is_set():
                return
            digest.update(block.memory)
        self._sums[name] = digest.hexdigest()

    def stop(self) -> None:
        """Let `write` return soon in all threads: what it has written is thrown away."""
        self._stopped.set()

    def finish(self) -> None:
        """Give the file its name, when all tensors are written. Raises OSError."""
        header = self._header()
        assert len(header) == self._start, "checksums have one length"
        done = 0
        while done < len(header):
            done += os.pwrite(self._fd, header[done:], done)
        os.fsync(self._fd)
        os.rename(self._temporary, self._path)
        folder = os.open(self._path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def __exit__(self, *exception: object) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            self._temporary.unlink(missing_ok=True)

    def _header(self) -> bytes:
        table: dict[str, object] = {
            "__metadata__": {**self._metadata, **{SUM + name: value for name, value in self._sums.items()}}
        }
        start = 0
        for name, tensor in self._tensors.items():
            end = start + tensor.bytes
            table[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [start, end]}
            start = end
        text = json.dumps(table, separators=(",", ":")).encode()
        text += b" " * (-(len(text) + 8) % 64)
        return len(text).to_bytes(8, "little") + text


def _blocks(name: str, offset: int, tensor: PackedTensor) -> Iterator[Block]:
    """A tensor's runs in the order of the file, in pieces of at most `BLOCK`."""
    for run in sorted(tensor.runs):
        for start in range(0, run.bytes, BLOCK):
            size = min(BLOCK, run.bytes - start)
            memory = (ctypes.c_ubyte * size).from_address(run.address + start)
            yield Block(name, offset + run.start + start, memoryview(memory).cast("B"))


def abandoned(folder: Path) -> list[Path]:
    """Files that nobody writes any more: their process has ended, and for an hour nothing was written.

    The process alone does not say it, where other containers use the same folder.
    """
    found = []
    for path in folder.glob(".*.part"):
        owner = path.name.split(".")[-3]
        with suppress(OSError):
            if not Path("/proc", owner).exists() and time.time() - path.stat().st_mtime > _ABANDONED_SECONDS:
                found.append(path)
    return found
