"""What is in the packed cache, for `ktinject cache`."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ktinject.checkpoints.packed import PackedFile, abandoned
from ktinject.errors import CheckpointError
from ktinject.loading.packed_cache import SUFFIX, folder_of_caches, layout


@dataclass(frozen=True)
class Cached:
    """One file of the cache.

    source   the checkpoint that it was packed from; "" if the file does not say
    weights  the formats of what it holds
    state    "current"; else why it will not be used: what has become of the checkpoint, or of the file
    """

    path: Path
    bytes: int
    source: str
    weights: str
    state: str

    @property
    def is_current(self) -> bool:
        return self.state == "current"


def found() -> list[Cached]:
    """All files of the cache, by name."""
    folder = folder_of_caches()
    paths = sorted(folder.glob(f"*{SUFFIX}")) if folder.is_dir() else []
    return [_look_at(path) for path in paths]


def _look_at(path: Path) -> Cached:
    try:
        size = path.stat().st_size
        with PackedFile(path) as file:
            metadata = file.metadata
    except (OSError, CheckpointError) as error:
        return Cached(path, size if path.exists() else 0, "", "", f"cannot be used: {error}")
    forms = sorted({value for name, value in metadata.items() if name.startswith("form of ")})
    source = metadata.get("source", "")
    return Cached(path, size, source, ", ".join(forms), _state(source, metadata))


def _state(source: str, metadata: dict[str, str] | object) -> str:
    assert isinstance(metadata, dict)
    if metadata.get("layout") != layout():
        return "of another version of ktinject"
    folder = Path(source) if Path(source).is_dir() else Path(source).parent
    for name, text in metadata.items():
        if not name.startswith("file "):
            continue
        said = json.loads(text)
        try:
            now = (folder / said["name"]).stat()
        except OSError:
            return "the checkpoint is not there any more"
        if (now.st_size, now.st_mtime_ns) != (said["bytes"], said["mtime_ns"]):
            return "the checkpoint has changed"
    return "current"


def remove(only_stale: bool) -> list[Path]:
    """Delete the files of the cache, or those that will not be used again; and what nobody writes any more.

    Returns  the files that are gone
    """
    folder = folder_of_caches()
    paths = [cached.path for cached in found() if not (only_stale and cached.is_current)]
    paths += abandoned(folder) if folder.is_dir() else []
    gone = []
    for path in paths:
        with suppress(OSError):
            path.unlink()
            gone.append(path)
    return gone


def wrong(path: Path, advance: Callable[[int], None]) -> list[str]:
    """Read all of a file: names of the tensors whose bytes are not those that were written. Raises CheckpointError."""
    with PackedFile(path) as file:
        return file.wrong(advance)
