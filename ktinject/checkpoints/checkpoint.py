"""A checkpoint on disk: every check is done by `Checkpoint.open`, which reads headers only.

    files ── headers ── one table: name → dtype, shape, place

Data is read with `pread` into memory of its own: a file truncated while it is mapped ends the process with
SIGBUS, here it is a `CheckpointError`. What was read stays in the page cache, where a second load finds it;
the kernel gives it up when memory is short.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, KeysView
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch

from ktinject.checkpoints import gguf, gguf_blocks, gguf_names, safetensors
from ktinject.checkpoints.files import check_inside, find, read_index
from ktinject.checkpoints.safetensors import DOWNLOAD_AGAIN, MAX_TENSORS, Entry, open_file, shown
from ktinject.errors import CheckpointError, few, listed

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

# What a Ctrl-C waits for at most: one read.
_READ_BYTES = 64 << 20


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
class _Shard:
    path: Path
    file: io.FileIO
    identity: tuple[int, ...]
    entries: dict[str, Entry]
    metadata: dict[str, Any]


class Checkpoint:
    """The tensors of a checkpoint, by name. Use `Checkpoint.open`; close it, or use it as a context manager.

    path         what was opened
    tensors      name → TensorInfo, in the order of files and of data in each, which is the fastest order to
                 read in; empty if not complete
    names        all tensor names, also if not complete
    complete     False if only an index is there and none of its shards: enough to plan, not to read
    total_bytes  of all tensors; None if not complete and the index does not say
    metadata     of a GGUF file, which is how to tell that it is one; else empty
    """

    def __init__(
        self,
        path: Path,
        shards: dict[str, _Shard],
        names: Iterable[str] = (),
        total_bytes: int | None = None,
        metadata: dict[str, Any] | None = None,
    ) -> None:
        self.path = path
        self.metadata = metadata or {}
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

    @property
    def names(self) -> KeysView[str]:
        return self._names.keys()

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Checkpoint:
        """Find the files of a checkpoint, read their headers and check everything but the data.

        path     a folder, a .safetensors or .gguf file, or an index (*.index.json) with its shards beside it
        Raises   CheckpointError with all faults of the same kind in one report
        """
        path = Path(path)
        folder, files, index = find(path)
        if index is None:
            with ExitStack() as opened:
                shards = _open_shards(folder, files, opened)
                metadata = _rename_gguf(path, shards) if files[0].lower().endswith(".gguf") else None
                opened.pop_all()
            return cls(path, shards, metadata=metadata)
        weight_map, total_bytes = read_index(index)
        files = sorted(set(weight_map.values()))
        for file in files:
            check_inside(folder, file)
        absent = [shown(file) for file in files if not os.path.exists(folder / file)]
        if len(absent) == len(files):
            return cls(path, {}, weight_map, total_bytes)
        if absent:
            raise CheckpointError(
                f"{index}: {len(absent)} of its {len(files)} shards are not there:{listed(absent)}\n"
                "Download them, or, to plan from the index alone, keep no shard beside it."
            )
        with ExitStack() as opened:
            shards = _open_shards(folder, files, opened)
            _agree(index, weight_map, shards)
            opened.pop_all()
        return cls(path, shards)

    def read(self, name: str, index: int | None = None, rows: tuple[int, int] | None = None) -> torch.Tensor:
        """Read one tensor, or one slice of its first dimension, or some of its rows, into new memory.

        rows     start and number along the first dimension
        Returns  [*shape], or [*shape[1:]] for an index; CPU, contiguous, writable, nobody else's memory;
                 of GGUF's blocks uint8, with the bytes of a row as last dimension
        Raises   CheckpointError if there is no such tensor or slice, torch has no such dtype, or the file is
                 not what it was when it was opened
        """
        if self._closed:
            raise CheckpointError(f"{self.path}: this checkpoint is closed. Open it again.")
        if name not in self._names:
            raise CheckpointError(f"{self.path}: there is no tensor {shown(name)}.")
        if not self.complete:
            raise CheckpointError(
                f"{self.path}: tensor {shown(name)}: only the index is there. Download the shards to read it."
            )
        info = self.tensors[name]
        shard = self._shards[info.shard]
        where = f"{shard.path}: tensor {shown(name)}"
        in_blocks = info.dtype in gguf_blocks.TYPES
        dtype = torch.uint8 if in_blocks else TORCH_DTYPES.get(info.dtype)
        if dtype is None:
            raise CheckpointError(
                f"{where}: dtype {info.dtype} is not read; allowed: {', '.join(TORCH_DTYPES)}. "
                "Use a checkpoint in another format."
            )
        offset, size, shape = shard.entries[name].offset, info.bytes, info.shape
        if index is not None:
            if not shape or not 0 <= index < shape[0]:
                raise CheckpointError(f"{where}: there is no slice {index}; its shape is {list(shape)}.")
            size //= shape[0]
            offset += index * size
            shape = shape[1:]
        elif rows is not None:
            start, count = rows
            if not shape or start < 0 or count < 1 or start + count > shape[0]:
                raise CheckpointError(
                    f"{where}: there are no rows {start} to {start + count - 1}; its shape is {list(shape)}."
                )
            row = size // shape[0]
            size, offset = count * row, offset + start * row
            shape = (count, *shape[1:])
        # `safe_open(backend="pread")` is as fast for whole tensors, but reads all of a stacked tensor to give
        # one of its experts (0.4 against 38 GB/s, 64 experts, page cache), and notices no changed file.
        buffer = torch.empty(size, dtype=torch.uint8, device="cpu")
        _read_into(shard, buffer.numpy().data, offset, where)
        return buffer.view(dtype).view((*shape[:-1], -1) if in_blocks else shape)

    def files(self) -> list[str]:
        """Paths of the files with the tensors, in reading order; none if not complete."""
        return [str(shard.path) for shard in self._shards.values()]

    def close(self) -> None:
        """Close the files. Tensors read before stay valid. Closing twice is allowed."""
        self._closed = True
        for shard in self._shards.values():
            shard.file.close()

    def __enter__(self) -> Self:
        return self

    # Without __del__, where a Ctrl-C that comes meanwhile would be lost; files that nobody closed close themselves.
    def __exit__(self, *exception: object) -> None:
        self.close()


def _open_shards(folder: Path, files: list[str], opened: ExitStack) -> dict[str, _Shard]:
    """Open the files, which `opened` then closes, and read their headers."""
    shards: dict[str, _Shard] = {}
    faults: list[str] = []
    total = 0
    for name in files:
        try:
            path = folder / name
            file = opened.enter_context(open_file(path))
            # Before the header is read, so that a change from then on is noticed.
            identity = _identity(os.fstat(file.fileno()))
            reader = gguf if name.lower().endswith(".gguf") else safetensors
            header = reader.read_header(path, file.fileno())
            total += len(header.tensors)
            if total > MAX_TENSORS:
                raise CheckpointError(
                    f"{folder}: its files hold more than the {MAX_TENSORS:,} tensors that are read. {DOWNLOAD_AGAIN}"
                )
            # Of safetensors, nobody asks for it.
            metadata = header.metadata if reader is gguf else {}
            shards[name] = _Shard(path, file, identity, header.tensors, metadata)
        except CheckpointError as error:
            faults.append(str(error))
    if len(faults) == 1:
        raise CheckpointError(faults[0])
    if faults:
        raise CheckpointError(
            f"{folder}: {len(faults)} of {len(files)} files cannot be used:{listed(faults)}"
        )
    return shards


def _rename_gguf(path: Path, shards: dict[str, _Shard]) -> dict[str, Any]:
    """Give the tensors of GGUF files the names of safetensors. Returns the metadata of the model."""
    headers = {name: (shard.metadata, shard.entries) for name, shard in shards.items()}
    for name, entries in gguf_names.rename(headers, path).items():
        shards[name] = replace(shards[name], entries=entries)
    return next(iter(shards.values())).metadata  # the first part has it all


def _agree(index: Path, weight_map: dict[str, str], shards: dict[str, _Shard]) -> None:
    """Refuse shards that do not hold exactly what the index says, with everything that differs."""
    held: dict[str, list[str]] = {}
    for file, shard in shards.items():
        for name in shard.entries:
            held.setdefault(name, []).append(file)
    missing = [name for name in weight_map if name not in held]
    doubled = [name for name, files in held.items() if len(files) > 1]
    single = [(name, files[0]) for name, files in held.items() if len(files) == 1]
    moved = [name for name, file in single if weight_map.get(name, file) != file]
    unnamed = [name for name, _ in single if name not in weight_map]
    report = ""
    for title, names, where in (
        ("named by the index but in no shard", missing, lambda name: f"should be in {weight_map[name]}"),
        ("in more than one shard", doubled, lambda name: f"in {' and '.join(few(held[name]))}"),
        (
            "not in the shard that the index names",
            moved,
            lambda name: f"in {held[name][0]}, not in {weight_map[name]}",
        ),
        ("in a shard but not named by the index", unnamed, lambda name: f"in {held[name][0]}"),
    ):
        if names:
            lines = listed(names, lambda name, where=where: f"{shown(name)} ({where(name)})")  # type: ignore[misc]
            report += f"\n{len(names)} tensors are {title}:{lines}"
    if report:
        raise CheckpointError(
            f"{index}: the index and its shards do not agree.{report}\n"
            "Download the index and the shards again, from one revision."
        )


def _identity(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _read_into(shard: _Shard, memory: memoryview, offset: int, where: str) -> None:
    """Fill `memory` from `offset` on, then check that the file is still the one that was opened."""
    done = 0
    try:
        while done < len(memory):
            got = os.preadv(shard.file.fileno(), [memory[done : done + _READ_BYTES]], offset + done)
            if got == 0:
                break
            done += got
        now = {_identity(os.fstat(shard.file.fileno())), _identity(os.stat(shard.path))}
    except OSError as error:
        raise CheckpointError(f"{where}: cannot be read: {error}. Load the checkpoint again.") from error
    if done < len(memory) or now != {shard.identity}:
        raise CheckpointError(
            f"{where}: the file changed while it was in use. Wait until nothing writes to it and load again."
        )
