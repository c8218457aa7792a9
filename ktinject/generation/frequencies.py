"""Rotary embeddings that choose their frequencies by the longest text that they have met: LongRoPE, dynamic NTK.

    a prompt, an eager step     the module's own forward chooses, and turns
    a captured step             `Frequencies.choose`: the module's own forward chooses, before each replay
                                `Frequencies.fixed`: the step turns by what was chosen, in tensors that stay in place

To choose, transformers compares positions with a limit. Where it does so on the host, or gets frequencies from there, a
step could not be captured. And what is chosen is the module's state, which the next request goes on from: whoever tries
a model out does that within `kept`.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ktinject.operators.probes import twin
from ktinject.support import SUPPORTED, Support

# Kinds of rotations whose angles are those of the position alone.
BY_POSITION = frozenset({"default", "linear", "llama3", "yarn"})
# Those that are chosen by the length of the text. Towers for images have further kinds, and no text.
_BY_LENGTH = frozenset({"dynamic", "longrope"})
# What the latter change of a module: buffers, how long the longest text was, and what they were made of.
_STATE = ("max_seq_len_cached", "original_inv_freq", "long_inv_freq")


def _types(module: nn.Module) -> dict[str, str]:
    """The kind of a rotary embedding's rotations, by the kinds of layers that have one of their own, or under ""."""
    found = vars(module).get("rope_type")
    if isinstance(found, str):
        return {"": found}
    return {kind: name for kind, name in found.items() if name} if isinstance(found, dict) else {}


def chooses(module: nn.Module) -> bool:
    """Whether a module is a rotary embedding that chooses its frequencies by the length of a text."""
    return not _BY_LENGTH.isdisjoint(_types(module).values())


def goes_by_position(module: nn.Module) -> bool:
    """Whether a rotary embedding says that its angles are those of the position alone."""
    kinds = {*_types(module).values()}
    return bool(kinds) and kinds <= BY_POSITION


def state_of(module: nn.Module) -> frozenset[str]:
    """Attributes of such a module that its own forward changes."""
    if not chooses(module):
        return frozenset()
    return frozenset({"_buffers"} | {name for name in vars(module) if name.endswith(_STATE)})


@contextmanager
def kept(model: nn.Module) -> Iterator[None]:
    """Within, a model is tried out: behind it, its rotary embeddings are as they were before."""
    before = [
        (module, dict(vars(module)), {name: (held, held.clone()) for name, held in module.named_buffers()})
        for module in model.modules()
        if chooses(module)
    ]
    try:
        yield
    finally:
        for module, values, buffers in before:
            names = state_of(module) - {"_buffers"}
            for name in names - values.keys():
                del vars(module)[name]
            vars(module).update({name: values[name] for name in names & values.keys()})
            for name, (held, value) in buffers.items():
                held.copy_(value)
                module._buffers[name] = held


class _Fixed:
    """One module, and a twin of it in which frequencies lie where they stay.

    module     the model's own
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        # Made outside of inference mode, whose tensors could not be written outside of it later.
        with torch.inference_mode(False):
            # What grows may be in fp32 where the first ones are not.
            tensors = {name: tensor.float() + 0 for name, tensor in module.named_buffers(recurse=False)}
        self._twin = twin.of(module, tensors=tensors)
        self._limits = {kind: _limit(module, kind) for kind in _types(module)}
        self._chosen: tuple[int, ...] | None = None

    def forget(self) -> None:
        self._chosen = None

    def choose(self, last: int) -> None:
        """last: the greatest position of the next step."""
        chosen = tuple(self._chosen_at(last + 1, kind) for kind in self._limits)
        if chosen == self._chosen:
            return
        device = next(self._twin.buffers()).device
        x = torch.zeros(1, 1, 1, dtype=torch.float32, device=device)
        position = torch.full((1, 1), last, dtype=torch.int64, device=device)
        with torch.no_grad():
            for kind in self._limits:
                self.module(x, position, *([kind] if kind else []))
            for name, tensor in self._twin.named_buffers():
                tensor.copy_(self.module.get_buffer(name))
        self._chosen = chosen

    def _chosen_at(self, length: int, kind: str) -> int:
        """What is equal where the same frequencies are chosen for a text that goes on."""
        limit = self._limits[kind]
        if limit is None:
            return length
        return int(length > limit) if _types(self.module)[kind] == "longrope" else max(length, limit)

    def forward(self, thread: int, *args: Any, **kwargs: Any) -> Any:
        """As the module's own, without the choice if it is called from the thread."""
        own = type(self.module).forward
        if threading.get_ident() != thread:
            return own(self.module, *args, **kwargs)
        return inspect.unwrap(own)(self._twin, *args, **kwargs)


def _limit(module: Any, kind: str) -> int | None:
    """The length beyond which other frequencies are chosen; None: it is not known."""
    said = getattr(module.config, "rope_parameters", None) or {}
    said = said.get(kind, said) if kind else said
    named = "original_max_position_embeddings" if _types(module)[kind] == "longrope" else None
    found = said.get(named) if named else getattr(module, "original_max_seq_len", None)
    return found if isinstance(found, int) else None


def recording_support(model: nn.Module) -> Support:
    """Whether the rotary embeddings of a model can be recorded once their frequencies are chosen before.

    One that looks at positions in its own forward, too, cannot: on meta, where there are no values, it fails.
    """
    for module in filter(chooses, model.modules()):
        x = torch.zeros(1, 1, 1, dtype=torch.float32, device="meta")
        position = torch.zeros(1, 1, dtype=torch.int64, device="meta")
        tensors = {name: tensor.to("meta") for name, tensor in module.named_buffers(recurse=False)}
        on_meta = twin.of(module, tensors=tensors)
        try:
            for kind in _types(module):
                inspect.unwrap(type(module).forward)(on_meta, x, position, *([kind] if kind else []))
        except (RuntimeError, NotImplementedError):
            return Support.no(
                f"{type(module).__name__} looks at positions to choose its frequencies, which no recorded step can"
            )
    return SUPPORTED


class Frequencies:
    """Those of a model, for steps that are captured. False if none of its modules chooses."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = [_Fixed(module) for module in model.modules() if chooses(module)]

    def __len__(self) -> int:
        return len(self._modules)

    def begin(self) -> None:
        """A request begins: others may have chosen since."""
        for module in self._modules:
            module.forget()

    def choose(self, last: int) -> None:
        """Have the frequencies of a step chosen, by the greatest position in it."""
        for module in self._modules:
            module.choose(last)

    @contextmanager
    def fixed(self) -> Iterator[None]:
        """Within, this thread's calls of the modules choose nothing."""
        try:
            for one in self._modules:
                vars(one.module)["forward"] = functools.partial(one.forward, threading.get_ident())
            yield
        finally:
            for one in self._modules:
                vars(one.module).pop("forward", None)

    def around(self, forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """A forward of the model that chooses nothing."""
        return functools.partial(self._run, forward) if self else forward

    def _run(self, forward: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        with self.fixed():
            return forward(*args, **kwargs)
