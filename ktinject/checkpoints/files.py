"""Files of a checkpoint: only ordinary files of the model's folder are opened, and one that changes is refused.

Data is read with `pread` into memory of its own: a file truncated while it is mapped ends the process with
SIGBUS, here it is a `CheckpointError`. What was read stays in the page cache, where a second load finds it;
the kernel gives it up when memory is short.
"""

from __future__ import annotations

import hashlib
import io
import os
import stat
from pathlib import Path
from typing import Any

from ktinject.errors import CheckpointError

DOWNLOAD_AGAIN = "Download the file again."

PICKLES = (".bin", ".pt", ".pth", ".ckpt")
CONVERT = (
    "Only safetensors is read, since the others can run code when loaded. Convert once with "
    "`AutoModelForCausalLM.from_pretrained(path).save_pretrained(new_path)`, which writes safetensors."
)

# What a Ctrl-C waits for at most: one read.
_READ_BYTES = 64 << 20
_HASHED_BYTES = 1 << 20
_SAMPLES, _SAMPLE_BYTES = 8, 4096


def open_file(path: str | os.PathLike[str]) -> io.FileIO:
    """Open a regular file for reading, unbuffered. Raises CheckpointError for anything else."""
    try:
        # Without O_NONBLOCK, opening a named pipe would wait for a writer for ever.
        file = io.FileIO(path, opener=lambda p, flags: os.open(p, flags | os.O_NONBLOCK))
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise CheckpointError(
            f"{os.fspath(path)}: cannot be opened: {why}. Put a readable file there."
        ) from error
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise CheckpointError(
            f"{os.fspath(path)}: not a regular file; only those are read. Put the file itself there."
        )
    return file


class DataFile:
    """An open file that notices when the file on disk is no longer the one that was opened.

    Without __del__, where a Ctrl-C that comes meanwhile would be lost: files that nobody closes close themselves.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = open_file(path)
        # Before a header is read, so that a change from then on is noticed.
        self._identity = _identity(os.fstat(self._file.fileno()))

    def fileno(self) -> int:
        return self._file.fileno()

    def read_into(self, memory: memoryview, offset: int, where: str) -> None:
        """Fill `memory` from `offset` on. Raises CheckpointError, starting with `where`."""
        done, fd = 0, self.fileno()
        try:
            while done < len(memory):
                got = os.preadv(fd, [memory[done : done + _READ_BYTES]], offset + done)
                if got == 0:
                    break
                done += got
            now = {_identity(os.fstat(fd)), _identity(os.stat(self.path))}
        except OSError as error:
            raise CheckpointError(f"{where}: cannot be read: {error}. Load the checkpoint again.") from error
        if done < len(memory) or now != {self._identity}:
            raise CheckpointError(
                f"{where}: the file changed while it was in use. Wait until nothing writes to it and load again."
            )

    def fingerprint(self, header_bytes: int) -> dict[str, Any]:
        """What tells this file from others without reading all of it, ready for JSON.

        header_bytes   the part before the data
        Returns        name, bytes, mtime_ns; sha256 of the header, and of a few samples of the data
        Raises         CheckpointError
        """
        _, _, size, changed, _ = self._identity
        digests = []
        for places in ([(0, header_bytes)], _samples(header_bytes, size)):
            digest = hashlib.sha256()
            for start, length in places:
                for offset in range(start, start + length, _HASHED_BYTES):
                    part = bytearray(min(_HASHED_BYTES, start + length - offset))
                    self.read_into(memoryview(part), offset, f"{self.path}")
                    digest.update(part)
            digests.append(digest.hexdigest())
        header, samples = digests
        return {
            "name": self.path.name,
            "bytes": size,
            "mtime_ns": changed,
            "header": header,
            "samples": samples,
        }

    def close(self) -> None:
        self._file.close()


def _samples(start: int, end: int) -> list[tuple[int, int]]:
    """Offset and bytes of a few places in the data, the last bytes among them."""
    length = min(_SAMPLE_BYTES, end - start)
    last = end - length
    return [(start + (last - start) * i // (_SAMPLES - 1), length) for i in range(_SAMPLES)]


def _identity(status: os.stat_result) -> tuple[int, ...]:
    # The time of change of the inode, too: who writes in place may set the other one back.
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def names_in(folder: Path) -> list[str]:
    """The names in a folder, but for hidden ones. Raises CheckpointError if it cannot be listed."""
    try:
        return sorted(name for name in os.listdir(folder) if not name.startswith("."))
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be listed: {error}.") from error


def check_inside(folder: Path, name: str) -> None:
    """Refuse a link that leaves the folder, unless into the blobs of the Hub cache that the folder is in.

    The cache is laid out as …/snapshots/<revision>/<name> -> …/blobs/<hash>.
    """
    path = folder / name
    if os.path.islink(path):
        home, target = Path(os.path.realpath(folder)), Path(os.path.realpath(path))
        blobs = [p.parent.parent / "blobs" for p in (home, *home.parents) if p.parent.name == "snapshots"]
        if not any(target.is_relative_to(allowed) for allowed in (home, *blobs)):
            raise CheckpointError(
                f"{path}: a link to {target}, outside the model's folder. Put the file itself there."
            )
