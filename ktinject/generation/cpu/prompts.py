"""Functions of transformers' modeling files that compute a prompt natively on the CPU, while a request of ours runs.

    modeling file of transformers          while one of our requests runs on this thread
    causal_conv1d_fn                 ──►   linear_prompts.py
    torch_chunk_gated_delta_rule     ──►   linear_prompts.py
    eager_attention_forward          ──►   attention_prompts.py

transformers' own forward calls these functions by name. So the names are given replacements. Outside of our requests
these call what was there before. They are used for what they know, and for no function that a first call shows to
compute something else.
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

from ktinject.generation.cpu import attention_prompts, linear_prompts, openmp
from ktinject.operators.probes import twin

logger = logging.getLogger("ktinject")

# Name in a modeling file → what gives the replacement of the function there, which answers NotImplemented for what it
# does not serve; or None, if the function computes something else than is known.
Make = Callable[[Callable[..., Any]], Callable[..., Any] | None]
_REPLACEMENTS: dict[str, Make] = {
    "causal_conv1d_fn": linear_prompts.convolution,
    "torch_chunk_gated_delta_rule": linear_prompts.delta_rule,
    "eager_attention_forward": attention_prompts.eager,
}
_in_request: ContextVar[bool] = ContextVar("in_request", default=False)
# Models whose modeling files have their replacements. To ask every module at each request costs some 2 µs a module.
_looked_at: weakref.WeakSet[nn.Module] = weakref.WeakSet()


@contextmanager
def native(model: nn.Module) -> Iterator[None]:
    """Have prompts of a model computed natively, where they are on the CPU, by what this thread runs inside."""
    if model not in _looked_at:
        for name in {type(module).__module__ for module in model.modules()}:
            _replace_in(name)
        _looked_at.add(model)
    token = _in_request.set(True)
    try:
        yield
    finally:
        _in_request.reset(token)


@functools.cache
def _replace_in(modeling: str) -> None:
    if not modeling.startswith("transformers.models."):
        return
    for name, make in _REPLACEMENTS.items():
        own = getattr(sys.modules[modeling], name, None)
        if inspect.isfunction(own):
            setattr(sys.modules[modeling], name, either(own, make, f"{modeling}.{name}"))


def either(own: Callable[..., Any], make: Make, where: str) -> Any:
    """`own`, or in a request its replacement where that serves the arguments."""

    @functools.cache
    def replacement() -> Callable[..., Any] | None:
        token = _in_request.set(False)
        try:
            with openmp.one_thread(), twin.on_cpu():
                found = make(inspect.unwrap(own))
        except TypeError:  # it takes other arguments
            found = None
        finally:
            _in_request.reset(token)
        if found is None:
            logger.info("%s computes something else than is known, and stays as it is.", where)
        return found

    @functools.wraps(own)
    def run(*args: Any, **kwargs: Any) -> Any:
        if (
            _in_request.get()
            and not torch.is_grad_enabled()
            and not torch.compiler.is_compiling()
            and (ours := replacement()) is not None
        ):
            found = ours(*args, **kwargs)
            if found is not NotImplemented:
                return found
        return own(*args, **kwargs)

    return run
