"""What is made once for all processes of a run, by whichever of them comes first: a module's tests may be spread."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """A file or folder that `make` writes, at a path that is not there; who comes meanwhile waits for it."""
    base = factory.getbasetemp()
    path = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    with Path(f"{path}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            making = Path(
                f"{path}.{os.getpid()}"
            )  # another process may have been ended while it made the same
            make(making)
            making.rename(path)
    return path
