"""What was measured on this machine, kept for the next process: small JSON files in the user's cache folder.

A file holds the values beside all that they depend on: CPU, GPU and driver, the build of ktinject, versions, and what
was measured. Its name is a hash of that. A file that was measured on another machine or by another build is never read,
and one that is damaged is measured again. `ktinject doctor` shows the files.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ktinject import _native, env, machine
from ktinject.machine import Machine

log = logging.getLogger("ktinject")

_MOST_BYTES = 1 << 16
_DRIVER = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True)
class Kept:
    """One file. `state` is "current", or why the file is not used here."""

    path: Path
    key: Mapping[str, Any]
    values: Mapping[str, Any]
    state: str

    @property
    def is_current(self) -> bool:
        return self.state == "current"


def folder() -> Path:
    """Where files are kept, which need not exist yet."""
    return env.settings().cache / "measured"


def this_machine(device: str, found: Machine | None = None) -> dict[str, Any]:
    """What the times of CPU and GPU depend on; `device` as torch names it, such as cuda:0."""
    found = found or machine.detect()
    core = Path(str(_native.__file__)).stat()
    return {
        "cpu": found.cpu,
        "cpus": len(found.cpus),
        "nodes": len(found.usable_nodes),
        "memory": found.memory_bytes >> 30,
        "threads": _native.threads(),
        "settings": f"{env.settings().level or env.settings().kernel} {env.settings().numa}",
        "gpu": gpu(device),
        "driver": _driver(),
        "versions": {name: found.versions.get(name, "") for name in ("torch", "CUDA")},
        "ktinject": f"{_version()}, core of {core.st_size} bytes, {core.st_mtime_ns}",
    }


def load(subject: str, key: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The values that were kept for such a key, which the caller checks; None if there are none that can be used."""
    path = _path(subject, key)
    if not path.exists():
        return None
    kept = _read(path)
    if kept.is_current and kept.key != _plain(key):
        kept = Kept(path, kept.key, kept.values, "it is of another key")
    if not kept.is_current:
        log.warning("%s: %s; measured again", path, kept.state)
        return None
    return kept.values


def save(subject: str, key: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Keep values. Where that is not possible, the log says so, and the next process measures again."""
    path = _path(subject, key)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".part")
        try:
            with os.fdopen(handle, "w") as file:
                json.dump({"key": key, "values": values}, file, indent=1)
            os.replace(name, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(name)
            raise
    except OSError as error:
        log.warning("what was measured is not kept, the next process measures again: %s", error)


def kept(subject: str, devices: Mapping[str, Machine]) -> Iterator[Kept]:
    """The files of a subject, by name.

    devices  devices that are here; files of others are not current
    """
    here = [_plain(this_machine(device, found)) for device, found in devices.items()]
    for path in sorted(folder().glob(f"{subject}-*.json")) if folder().is_dir() else []:
        found = _read(path)
        if found.is_current and not any(found.key.get("machine") == one for one in here):
            found = Kept(path, found.key, found.values, "of another machine, driver, build or setting")
        yield found


def _path(subject: str, key: Mapping[str, Any]) -> Path:
    text = json.dumps(_plain(key), sort_keys=True)
    return folder() / f"{subject}-{hashlib.sha256(text.encode()).hexdigest()[:20]}.json"


def _plain(key: Mapping[str, Any]) -> Any:
    return json.loads(json.dumps(key))


def _read(path: Path) -> Kept:
    try:
        status = path.stat()
        if status.st_uid not in (os.geteuid(), 0):
            return Kept(path, {}, {}, "it belongs to another user")
        if status.st_size > _MOST_BYTES:
            return Kept(path, {}, {}, f"damaged: it has {status.st_size} bytes")
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        return Kept(path, {}, {}, f"damaged: {error}")
    key, values = (found.get(name) if isinstance(found, dict) else None for name in ("key", "values"))
    if not isinstance(key, dict) or not isinstance(values, dict):
        return Kept(path, {}, {}, "damaged: it has no key or no values")
    return Kept(path, key, values, "current")


def gpu(device: str) -> str:
    """A GPU, so that another one has another name; `device` as torch names it."""
    import torch

    if not machine.has_gpu(device):
        return "none"
    found = torch.cuda.get_device_properties(device)
    return f"{found.name}, {getattr(found, 'uuid', device)}"


def _driver() -> str:
    try:
        return _DRIVER.read_text().partition("\n")[0].strip()
    except OSError:
        return "unknown"


def _version() -> str:
    try:
        return version("ktinject")
    except PackageNotFoundError:
        return "not installed"
