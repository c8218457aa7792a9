"""What a recorded decode step relies on, and whether it is still so.

A captured graph, or the native twin of a model's layers, computes what the model computed when it was recorded. It
misses whatever a user changes afterwards: a replaced `forward`, a hook, an attribute, a weight, a class. So a `Watch`
notes all of that and is asked before every step; the answer takes microseconds (native/bindings/watch.cpp).

A `Watch` notes which objects a module holds under which names, down through lists, dicts and configs. It does not note
the values of weights: a recorded step reads them where they lie.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from types import FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedConfig

from ktinject import _native
from ktinject.generation import frequencies, step_inputs
from ktinject.generation.trust import BASES, is_trusted
from ktinject.hf import adapters, compat
from ktinject.operators import Operator

# Kinds of entries, as native/bindings/watch.cpp knows them. Of tensors, what data_ptr() gives is compared.
_ATTRIBUTES, _ITEMS, _ELEMENTS, _LOOKUPS, _CLASS, _TENSOR, _EMPTY = range(7)

# Of the model: what every request reads anew, and what generation leaves there.
_ASIDE_OF_MODEL = frozenset(
    {
        "ktinject_decoding",
        "generation_config",
        "_compiled_call",
        "_last_compile_config",
        "_previous_max_cache_length",
        "_cached_continuous_batching_manager",
    }
)
# transformers changes it for the time of decoding, and back.
_ASIDE_OF_CONFIGS = frozenset({"_experts_implementation", "_experts_implementation_internal"})
# Of a module's own bookkeeping, what decides about its forward, and the rest.
_DECISIVE = frozenset({"_modules", "_parameters", "_buffers", "_forward_hooks", "_forward_pre_hooks"})
_BOOKKEEPING = frozenset(vars(nn.Module())) - _DECISIVE
# A list or dict that is longer is noted as a whole, as the names of 100,000 labels in a config.
_MOST_ITEMS = 4096
_GLOBAL_HOOKS = ("_global_forward_hooks", "_global_forward_pre_hooks")


class _EmptyDicts:
    """Dicts that hold nothing: two thirds of all that is noted of a model.

    One look at all of them is faster than as many entries.
    """

    def __init__(self) -> None:
        self.named: list[tuple[dict[Any, Any], str]] = []

    def first_filled(self) -> str:
        """The name of what the first of them holds that holds something."""
        found = (f"{name}.{key}" for held, name in self.named for key in [*held])
        return next(found, "a dict")  # which another thread may have emptied again


class Watch:
    """A model as it was when this was made. Holds its parts, and the model weakly."""

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._found = _native.Seen()
        self._entries: list[tuple[Any, ...]] = []
        self._names: list[str] = []
        self._empty = _EmptyDicts()
        self._seen: set[int] = set()
        self._classes: set[type] = set()
        for path, module in model.named_modules():
            self._note_module(module, path, model)
        for name in _GLOBAL_HOOKS:
            self._note_value(getattr(nn.modules.module, name), f"torch's {name}")
        for registry in (compat.ALL_ATTENTION_FUNCTIONS, compat.ALL_MASK_ATTENTION_FUNCTIONS):
            for name in ("_local_mapping", "_global_mapping"):
                self._note_value(getattr(registry, name, {}), "the attention functions")
        self._note("", _EMPTY, self._empty, tuple(held for held, _ in self._empty.named))
        del self._seen, self._classes

    def change(self) -> str:
        """The first thing that differs from when this was made, as "… was changed"; "" if nothing does."""
        model = self._model()
        at = self._found.first_change(self._entries, model)
        return "" if at < 0 else self._name(at, model)

    def _name(self, at: int, model: Any) -> str:
        kind, holder, *noted = self._entries[at]
        if holder is self._empty:
            return f"{self._empty.first_filled()} was changed"
        holder = model if holder is None else holder
        if kind not in (_ATTRIBUTES, _ITEMS):
            return f"{self._names[at]} was changed"
        before = _unpaired(noted[-2] if kind == _ATTRIBUTES else noted[0])
        aside = noted[-1] if kind == _ATTRIBUTES else ()
        now = {k: v for k, v in (vars(holder) if kind == _ATTRIBUTES else holder).items() if k not in aside}
        missing = object()
        changed = [k for k in (*before, *now) if before.get(k, missing) is not now.get(k, missing)]
        where = self._names[at]
        if not changed:
            return f"{where or 'the model'} is a {type(holder).__name__} now"
        return f"{where}.{changed[0]} was changed".removeprefix(".")

    def _note(self, name: str, kind: int, *rest: Any) -> None:
        self._entries.append((kind, *rest))
        self._names.append(name)

    def _note_module(self, module: nn.Module, path: str, model: nn.Module) -> None:
        values = vars(module)
        aside = _ASIDE_OF_MODEL if module is model else frozenset()
        if isinstance(module, Operator):
            aside |= module.changing
        aside |= frequencies.state_of(module)
        if is_trusted(type(module).__module__):
            aside |= {step_inputs.REMEMBERED}  # of each request; a step that is recorded does not read it
        elif not adapters.is_lora_linear(module):  # what it remembers of its own work
            aside |= {name for name in values if name.startswith("_")} - _BOOKKEEPING - _DECISIVE
        values = {name: value for name, value in values.items() if name not in aside}
        holder = None if module is model else module
        self._note(path, _ATTRIBUTES, holder, type(module), _paired(values), aside)
        for name, value in values.items():
            if name not in _BOOKKEEPING:
                self._note_value(value, f"{path}.{name}".removeprefix("."))
        self._note_class(type(module))

    def _note_value(self, value: Any, name: str) -> None:
        """What a value holds in turn, if that is data."""
        if id(value) in self._seen or isinstance(value, nn.Module):
            return
        if isinstance(value, Tensor):
            self._seen.add(id(value))
            address = _address(value)
            if address is not None:
                self._note(name, _TENSOR, value, address)
        elif isinstance(value, PreTrainedConfig):
            self._seen.add(id(value))
            items = {n: v for n, v in vars(value).items() if n not in _ASIDE_OF_CONFIGS}
            self._note(name, _ATTRIBUTES, value, type(value), _paired(items), _ASIDE_OF_CONFIGS)
            for key, inner in items.items():
                self._note_value(inner, f"{name}.{key}")
        elif isinstance(value, dict) and len(value) <= _MOST_ITEMS:
            self._seen.add(id(value))
            if not value:
                self._empty.named.append((value, name))
                return
            self._note(name, _ITEMS, value, _paired(value))
            for key, inner in value.items():
                self._note_value(inner, f"{name}.{key}")
        elif isinstance(value, list) and len(value) <= _MOST_ITEMS:
            self._seen.add(id(value))
            self._note(name, _ELEMENTS, value, tuple(value))
            for inner in value:
                self._note_value(inner, name)

    def _note_class(self, kind: type) -> None:
        """Its methods, and the functions of the file that it is from."""
        if kind in self._classes:
            return
        self._classes.add(kind)
        names = {name for base in kind.__mro__ if base not in BASES for name in vars(base)}
        names |= {"forward", "__call__", "_call_impl", "__getattr__"}
        found = {name: getattr(kind, name, None) for name in names if not name.startswith("_abc")}
        methods = {
            name: value for name, value in found.items() if isinstance(value, (FunctionType, property))
        }
        self._note(f"{kind.__module__}.{kind.__qualname__}", _CLASS, kind, _paired(methods))
        for base in kind.__mro__[1:]:
            if base not in BASES:
                self._note_class(base)  # which may have a method that one before it hides
        for base in kind.__mro__:
            file = vars(base).get("forward")
            names_of_file = getattr(file, "__globals__", None)
            if names_of_file is None or base in BASES or id(names_of_file) in self._seen:
                continue
            self._seen.add(id(names_of_file))
            used = {n: v for n, v in names_of_file.items() if isinstance(v, (FunctionType, type, ModuleType))}
            self._note(str(names_of_file.get("__name__")), _LOOKUPS, names_of_file, _paired(used))


def _paired(values: Mapping[Any, Any]) -> tuple[Any, ...]:
    return tuple(part for pair in values.items() for part in pair)


def _unpaired(pairs: tuple[Any, ...]) -> dict[Any, Any]:
    return dict(zip(pairs[::2], pairs[1::2]))


def _address(tensor: Tensor) -> int | None:
    """None of tensors that have none, such as those of other backends."""
    try:
        return tensor.data_ptr()
    except (RuntimeError, NotImplementedError):
        return None
