"""One model is built at a time in a process.

transformers sets torch's default dtype while it builds a model, and that belongs to the process. Two threads that build
at once make parameters of each other's dtype, and one of the two dtypes may stay the default for ever. So who builds
waits for his turn here: ktinject itself, and, since `install`, transformers' `from_config` and `from_pretrained`.

A model's own class, `Model(config)`, sets no default and does not wait. If another thread builds at that moment, its
parameters may have that thread's dtype: `ktinject.optimize` looks for that (dtypes.py).
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import modeling_utils

from ktinject.hf import compat

_turn = threading.RLock()
# A fork waits until nobody builds: the child would have the lock, and the dtype, of a thread that it does not have.
os.register_at_fork(before=_turn.acquire, after_in_parent=_turn.release, after_in_child=_turn.release)


@contextmanager
def alone() -> Iterator[None]:
    """Within, no other thread builds a model; torch's default dtype is then what it was."""
    with _turn:
        before = torch.get_default_dtype()
        try:
            yield
        finally:
            torch.set_default_dtype(before)


def install() -> None:
    """Have transformers build one model at a time. May be called again."""
    own = compat.local_torch_dtype if compat.support("building") else None
    if own is None or modeling_utils.local_torch_dtype is not own:
        return

    @contextmanager
    @functools.wraps(own)
    def local_torch_dtype(*args: Any, **kwargs: Any) -> Iterator[None]:
        with alone(), own(*args, **kwargs):
            yield

    modeling_utils.local_torch_dtype = local_torch_dtype
