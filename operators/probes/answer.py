"""What a probe answers, and the memory of answers: each distinct module is run once in a process.

A probe is a function `probe(module) -> Spec | Support`; its Support is always a refusal. It runs a twin of the module
(twin.py) on inputs of its own, reads the formula's parameters off the outputs, and compares the twin with the formula
(comparison.py).
"""

from __future__ import annotations

import enum
import functools
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from ktinject.support import Support

_MOST_ANSWERS = 512  # of one probe; a large model has some dozens of distinct modules

Spec = TypeVar("Spec")
Answer = TypeVar("Answer")


class PassingRefusal(Support):
    """A refusal because of a failure that may pass, such as too little memory. Nothing is known of the module."""


_PASSING = (MemoryError, RecursionError, OSError, torch.OutOfMemoryError, torch.AcceleratorError)
# torch has no class of its own for what its CPU allocator, a std::bad_alloc or a thread that cannot start raises.
_PASSING_TEXTS = ("DefaultCPUAllocator", "bad_alloc", "can't start new thread")


def refusal_of(error: BaseException, what: str = "its forward fails on a copy of itself") -> Support:
    """The refusal for what a module's own code raised in a probe; a passing one if the failure may pass.

    what   what failed
    """
    kind = PassingRefusal if any(map(_passes, _causes(error))) else Support
    return kind(False, f"{what}: {type(error).__name__}: {error}")


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _passes(error: BaseException) -> bool:
    text = str(error) if isinstance(error, RuntimeError) else ""
    return isinstance(error, _PASSING) or any(sign in text for sign in _PASSING_TEXTS)


class Memory(Generic[Answer]):
    """Answers by what was asked about, but for passing refusals. When there are `most` of them, all are forgotten."""

    def __init__(self, most: int = _MOST_ANSWERS) -> None:
        self._answers: dict[Hashable, Answer] = {}
        self._most = most

    def once(self, key: Hashable, ask: Callable[[], Answer]) -> Answer:
        """The answer for a key; asked until there is one that is kept."""
        if key in (answers := self._answers):
            return answers[key]
        found = ask()
        if isinstance(found, PassingRefusal):
            return found
        if len(answers) >= self._most:
            self._answers = answers = {}  # another thread may still look into the old ones
        answers[key] = found
        return found


def answered_once(probe: Callable[[nn.Module], Spec | Support]) -> Callable[[nn.Module], Spec | Support]:
    """Remember a probe's answers. What `key_of` cannot tell apart has one answer."""
    answers: Memory[Spec | Support] = Memory()

    @functools.wraps(probe)
    def remembered(module: nn.Module) -> Spec | Support:
        return answers.once(key_of(module), lambda: probe(module))

    return remembered


def key_of(module: nn.Module) -> Hashable:
    """All that a module's arithmetic can depend on, but for the values of its parameters and buffers.

    These are, of the module and all below it: classes and their code, attributes with the configs among them, and the
    names, shapes and dtypes of tensors. Devices do not count: a probe runs on the CPU.
    """
    return tuple((name, *_of_module(inner)) for name, inner in module.named_modules())


def _of_module(module: nn.Module) -> Iterator[Hashable]:
    yield _Same(type(module))
    # By the functions themselves: a method that somebody replaces in a class is another one.
    for base in type(module).__mro__:
        if base not in (nn.Module, object):
            yield tuple((name, key_of_value(value)) for name, value in vars(base).items())
    for name, value in vars(module).items():
        if name == "_modules":
            continue  # named_modules has them
        if name in ("_parameters", "_buffers"):
            yield name, tuple((n, _of_tensor(tensor)) for n, tensor in value.items())
        else:
            yield name, key_of_value(value)


def _of_tensor(tensor: Tensor | None) -> Hashable:
    return None if tensor is None else (type(tensor), tensor.shape, tensor.dtype)


def key_of_value(value: Any) -> Hashable:
    """A key of the value itself where it is plain or a config; whatever else there is stands for itself alone."""
    if value is None or isinstance(value, (int, float, str, bytes, enum.Enum, torch.dtype, torch.device)):
        return type(value), value
    if isinstance(value, (list, tuple)):
        return type(value), tuple(map(key_of_value, value))
    if isinstance(value, (set, frozenset)):
        return type(value), frozenset(map(key_of_value, value))
    if isinstance(value, Mapping):
        return type(value), tuple((key_of_value(key), key_of_value(item)) for key, item in value.items())
    if isinstance(value, (PreTrainedConfig, SimpleNamespace)):
        return type(value), tuple((name, key_of_value(item)) for name, item in vars(value).items())
    return _Same(value)


class _Same:
    """Equal for one object as long as it lives, and never for two."""

    __slots__ = ("_held", "_id")

    def __init__(self, value: Any) -> None:
        self._id = id(value)
        try:
            self._held: Any = weakref.ref(value)
        except TypeError:
            self._held = functools.partial(_given, value)

    def __hash__(self) -> int:
        return hash(self._id)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Same) or self._id != other._id:
            return False
        mine = self._held()
        return mine is not None and mine is other._held()


def _given(value: Any) -> Any:
    return value
