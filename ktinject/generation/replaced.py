"""What recorded steps and our own loops do in the place of others' code, and what that must be for them to do so.

    methods of a model   that our loops, or recorded steps, do not call
    methods of a cache   and of its layers: a recorded step writes to tensors of its own
    functions of torch   that a recorded step has in its own kernels

Each must be the one that was there when this file was loaded. Of a class that is loaded later, it must be of a trusted
package when it is first seen, and stay that. So what somebody puts in its place is found on an instance, on a class and
on one that it derives from, before a first request or after it. A family's own override is unknown until `KNOWN` has
it, with a test of what it does.

All of this is asked once a request. What a model's modules are is looked at before each step, see watch.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import GenerationMixin, cache_utils

from ktinject.errors import OperatorError
from ktinject.generation.trust import unknown_file
from ktinject.hf.private import owner_of
from ktinject.model_class import own_class
from ktinject.operators import Operator
from ktinject.support import SUPPORTED, Support

# What recorded steps do not call: it decides what a step is given.
OF_STEPS = (
    "prepare_inputs_for_generation",
    "_update_model_kwargs_for_generation",
    "_prefill",
    "__call__",
)
# What none of our loops calls.
OF_LOOPS = ("_sample", "_has_unfinished_sequences")
OF_CANDIDATES = ("_assisted_decoding", "_get_candidate_generator", "_has_unfinished_sequences")

_MODELS = "transformers.models"
_PHIMOE = f"{_MODELS}.phimoe.modeling_phimoe:PhimoeForCausalLM"
# Methods of families of their own, whose steps recorded ones stand for.
KNOWN: dict[str, frozenset[str]] = {
    "prepare_inputs_for_generation": frozenset(
        {
            # Asks for the logits of as many tokens as the config says.
            f"{_MODELS}.nemotron_h.modeling_nemotron_h:NemotronHForCausalLM",
            # Give steps none of what says where pictures are.
            f"{_MODELS}.ernie4_5_vl_moe.modeling_ernie4_5_vl_moe:Ernie4_5_VLMoeForConditionalGeneration",
            f"{_MODELS}.gemma4.modeling_gemma4:Gemma4ForConditionalGeneration",
            _PHIMOE,  # see `read_again_at`
        }
    ),
    "_prefill": frozenset(
        {
            # Tells layers of a cache how long the prompt is. We call it.
            f"{_MODELS}.unlimited_ocr.generation_unlimited_ocr:UnlimitedOcrGenerationMixin"
        }
    ),
}

_KINDS = (FunctionType, property, staticmethod)
# By which a class may change what all its others are.
_ACCESS = ("__getattribute__", "__getattr__", "__setattr__", "__getitem__", "__len__", "__iter__")


def support(model: Any) -> Support:
    """Whether recorded steps do what is in their place now, of a model and of torch."""
    return methods_support(model, OF_STEPS) and _functions_support()


def methods_support(model: Any, names: Iterable[str]) -> Support:
    """Whether methods of a model are those that are known."""
    own = own_class(model)
    for name in names:
        function = getattr(own, name, None)
        here = vars(model).get(name)
        # A bound method of its own may have been put back, as PEFT does it.
        known = (function, getattr(type(model), name, None))
        if here is not None and not (
            getattr(here, "__self__", None) is model and getattr(here, "__func__", None) in known
        ):
            return Support.no(f"{name} of the model was replaced, {_why(name)}")
        if function is not _STOCK[name] and not _is_known(own, name, function):
            holder = next((base for base in own.__mro__ if name in vars(base)), own)
            return Support.no(f"{name} of {holder.__qualname__} is none that is known, {_why(name)}")
    return SUPPORTED


# A class of modules that operators replaced, the forward that it had then, and the name of such an operator.
StoodFor = tuple[type[nn.Module], Any, str]


def stood_for(model: nn.Module) -> frozenset[StoodFor]:
    found = ((module.stood_for, module.name) for module in model.modules() if isinstance(module, Operator))
    return frozenset((*both, name) for both, name in found if both is not None)


def require_forwards(operators: Iterable[StoodFor]) -> None:
    """Raises OperatorError if a class has another forward than operators stand for: no step calls it, in no loop."""
    for kind, forward, name in operators:
        if kind.forward is not forward:
            raise OperatorError(
                f"generate: {kind.__qualname__}.forward was replaced after the model was swapped, and {name} stands "
                "for its modules and does not call it. Replace it before ktinject.optimize, or keep these modules by "
                "a rule with `replace: keep`."
            )


def _why(name: str) -> str:
    return "which decides what each step is given" if name in OF_STEPS else "which our own loop stands for"


def _is_known(own: type, name: str, function: Any) -> bool:
    """Whether it is a family's own, of those that are listed; so must be those that it may call of classes behind."""
    first, *behind = [base for base in own.__mro__ if name in vars(base)] or [own]
    if owner_of(first) not in KNOWN.get(name, ()):
        return False
    if (first, name) not in _SEEN and unknown_file(function) is None:
        _SEEN[first, name] = function
    others = all(
        vars(base)[name] is _STOCK[name] or _is_known(base, name, vars(base)[name]) for base in behind[:1]
    )
    return others and _SEEN.get((first, name)) is function


def read_again_at(model: Any) -> int | None:
    """Tokens of a text behind which the model's own steps drop the cache and read all of the text again; None: they
    never do. Phi-3.5-MoE turns keys by other frequencies from there on.
    """
    own = own_class(model)
    holder = next((base for base in own.__mro__ if OF_STEPS[0] in vars(base)), own)
    if owner_of(holder) != _PHIMOE:
        return None
    at: int | None = getattr(model.config, "original_max_position_embeddings", None)
    return at


def rereads(model: Any, before: int, tokens: int) -> bool:
    """Whether a text is read again on the way from `before` tokens, which its cache holds, to so many."""
    at = read_again_at(model)
    return at is not None and before <= at < tokens


def rereading_support(model: Any, before: int, tokens: int) -> Support:
    """Whether steps that do not read a text again may write it; arguments as of `rereads`."""
    if not rereads(model, before, tokens):
        return SUPPORTED
    return Support.no(
        f"the text is read again behind {read_again_at(model)} tokens, which may come within it"
    )


def cache_support(cache: Any) -> Support:
    """Whether recorded steps do what the methods of a cache of transformers' and of its layers do."""
    parts = (cache, *cache.layers)
    kinds = [*map(type, parts)]
    for kind in set(kinds):
        if kind not in _METHODS:
            _METHODS[kind] = _methods_of(kind)
        for name, value in _METHODS[kind][0].items():
            if getattr(kind, name, None) is not value:
                return Support.no(f"{name} of {kind.__qualname__} was replaced, {_CACHES}")
    for index, (kind, part) in enumerate(zip(kinds, parts)):
        names = _METHODS[kind][1]
        if not names.isdisjoint(vars(part)):
            where = f"layer {index - 1} of the cache" if index else "the cache"
            return Support.no(f"{min(names & vars(part).keys())} of {where} was replaced, {_CACHES}")
    return SUPPORTED


_CACHES = "which recorded steps do not call"


def _methods_of(kind: type) -> tuple[dict[str, Any], frozenset[str]]:
    """What a class has under the names of its methods, where those of unknown code are none that it has; and the names
    of those that an attribute of an instance would hide.
    """
    names = {name for base in kind.__mro__ for name, value in vars(base).items() if isinstance(value, _KINDS)}
    found = {name: getattr(kind, name, None) for name in (*sorted(names - {*vars(object)}), *_ACCESS)}
    known = {name: _UNKNOWN if unknown_file(value) else value for name, value in found.items()}
    return known, frozenset(name for name, value in found.items() if isinstance(value, FunctionType))


def _functions_support() -> Support:
    for owner, functions in _FUNCTIONS:
        for name, function in functions.items():
            if owner.get(name) is not function:
                return Support.no(f"torch's {name} was replaced, which recorded steps do not call")
    return SUPPORTED


_UNKNOWN = object()
# The methods that the base classes had when this file was loaded.
_STOCK: dict[str, Any] = {
    name: getattr(nn.Module if name == "__call__" else GenerationMixin, name, None)
    for name in (*OF_STEPS, *OF_LOOPS, *OF_CANDIDATES)
}
# Methods of families of their own, when they were first seen.
_SEEN: dict[tuple[type, str], Any] = {}
# Class of a cache or of a layer of one → what `_methods_of` says; of those that come later, when they are first seen.
_METHODS: dict[type, tuple[dict[str, Any], frozenset[str]]] = {
    kind: _methods_of(kind)
    for kind in vars(cache_utils).values()
    if isinstance(kind, type) and kind.__module__ == cache_utils.__name__
}
_OPERATIONS = ("matmul", "bmm", "baddbmm", "softmax", "sigmoid", "tanh", "topk", "rsqrt", "einsum", "cat")
_FUNCTIONS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (
        vars(functional),
        {
            name: value
            for name, value in vars(functional).items()
            if callable(value) and not isinstance(value, type) and not name.startswith("_")
        },
    ),
    (vars(torch), {name: getattr(torch, name) for name in _OPERATIONS}),
]
