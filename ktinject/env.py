"""The environment variables, read once.

Everything that can be set from outside the process stands here, so a forward pass never looks anything up.
"""

from __future__ import annotations

import difflib
import functools
import logging
import os
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ktinject import _native
from ktinject.errors import OperatorError, PlanError

VERBOSITY = {"error": logging.ERROR, "warning": logging.WARNING, "info": logging.INFO, "debug": logging.DEBUG}


@dataclass(frozen=True)
class Settings:
    """What the environment asks for. None means that the variable is absent or empty: ktinject decides.

    threads    workers of the CPU pool
    kernel     the row of the kernel table to force; at most one of this and `level` is set
    level      the instruction level that all of the native core is restricted to
    numa       virtual NUMA nodes that weights and workers are cut into, for tests
    cache      folder of files that can be built again at any time
    verbosity  a key of VERBOSITY
    """

    threads: int | None = None
    kernel: str | None = None
    numa: int | None = None
    cache: Path = Path("~/.cache/ktinject")
    verbosity: str | None = None
    level: str | None = None


@functools.cache
def settings() -> Settings:
    """The settings of this process; the environment is read on the first call and never again.

    What belongs to the process and to no model takes effect here: the number of threads and of virtual nodes,
    the instruction level or the forced kernel, and what is logged.

    Raises  PlanError, or OperatorError for KTINJECT_KERNEL, as `read` does
    """
    found = read(os.environ, kernels=_native.kernels(), levels=_native.levels())
    if found.verbosity:
        logging.getLogger("ktinject").setLevel(VERBOSITY[found.verbosity])
    if found.numa:
        _native.set_nodes(found.numa)
    if found.threads:
        _native.set_threads(found.threads)
    if found.kernel:
        _native.force_kernel(found.kernel)
    if found.level:
        _native.restrict_to(found.level)
    return found


def loads_in_one_thread() -> bool:
    """Whether HF_DEACTIVATE_ASYNC_LOAD, which is transformers', asks for loads without threads that read."""
    return os.environ.get("HF_DEACTIVATE_ASYNC_LOAD", "").upper() in ("1", "ON", "YES", "TRUE")


def launched() -> tuple[int, int] | None:
    """This process's rank and the number of processes, as torchrun says; None if it did not start this one."""
    try:
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    except (KeyError, ValueError):
        return None


def launched_here() -> int | None:
    """The number of those processes that are on this machine, if torchrun says so."""
    found = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(found) if found.isdigit() else None


def read(
    environ: Mapping[str, str], *, kernels: list[dict[str, Any]], levels: list[dict[str, Any]]
) -> Settings:
    """Check the variables and turn them into settings.

    kernels  the kernel table, as `_native.kernels()` gives it
    levels   the instruction levels, as `_native.levels()` gives them
    Raises   PlanError naming variable, value and what is allowed; OperatorError if it is the kernel
    """
    forced = _forced(environ.get("KTINJECT_KERNEL", ""), kernels, levels)
    return Settings(
        threads=_whole(environ, "KTINJECT_THREADS", 1, 4096),
        kernel=forced if forced in _names(kernels) else None,
        numa=_whole(environ, "KTINJECT_NUMA", 1, 64),
        cache=_folder(environ),
        verbosity=_verbosity(environ.get("KTINJECT_VERBOSITY", "")),
        level=forced if forced in _names(levels) else None,
    )


def _whole(environ: Mapping[str, str], name: str, low: int, high: int) -> int | None:
    text = environ.get(name, "").strip()
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 9 and low <= int(text) <= high):
        raise PlanError(
            f"{name}={text!r}: allowed is a whole number from {low} to {high}. Correct or unset it."
        )
    return int(text)


def _names(rows: Iterable[dict[str, Any]]) -> list[str]:
    return sorted(row["name"] for row in rows)


def _forced(name: str, kernels: list[dict[str, Any]], levels: list[dict[str, Any]]) -> str | None:
    """A level or a row of the kernel table that this CPU has, if one is named."""
    if not name:
        return None
    had = ", ".join(_names(level for level in levels if level["available"]))
    for row in (*levels, *kernels):
        if row["name"] == name:
            if not row["available"]:
                raise OperatorError(
                    f"KTINJECT_KERNEL={name!r}: {row['reason']}. Levels that can be had here: {had}. "
                    "Name one of them or a kernel that `ktinject doctor` lists as available, or unset it."
                )
            return name
    near = difflib.get_close_matches(name, _names((*levels, *kernels)), n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise OperatorError(
        f"KTINJECT_KERNEL={name!r}: no instruction level or kernel has that name.{hint} "
        f"Levels that can be had here: {had}; `ktinject doctor` lists the kernels."
    )


def _folder(environ: Mapping[str, str]) -> Path:
    text = environ.get("KTINJECT_CACHE", "")
    if not text:
        base = environ.get("XDG_CACHE_HOME") or "~/.cache"
        try:
            return Path(base, "ktinject").expanduser()
        except RuntimeError:  # no HOME, and a user id that no account has, as in containers
            return Path(tempfile.gettempdir(), f"ktinject-{os.getuid()}")
    try:
        folder = Path(text).expanduser()
    except RuntimeError:
        folder = Path(text)  # refused below
    if not folder.is_absolute() or (folder.exists() and not folder.is_dir()):
        raise PlanError(
            f"KTINJECT_CACHE={text!r}: allowed is the absolute path of a folder, which need not exist yet."
        )
    return folder


def _verbosity(text: str) -> str | None:
    if text and text not in VERBOSITY:
        raise PlanError(f"KTINJECT_VERBOSITY={text!r}: allowed is {', '.join(VERBOSITY)}.")
    return text or None
