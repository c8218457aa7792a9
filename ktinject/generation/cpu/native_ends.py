"""What a model does before its first decoder layer and behind its last norm, found by running twins of it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import MoeModelOutputWithPast

from ktinject.generation.attention_probes import SCALE, takes_scale
from ktinject.generation.cpu.native_parts import UnknownLayer
from ktinject.generation.layer_probes import Stub
from ktinject.hf.layers import Layers
from ktinject.operators.probes import twin


@dataclass(frozen=True)
class Scale:
    """What values are multiplied with, or divided by.

    by  a number that is not 0
    """

    by: float = 1.0
    divides: bool = False

    def __call__(self, x: Tensor) -> Tensor:
        if self.by == 1.0:
            return x
        return x / self.by if self.divides else x * self.by

    @classmethod
    def between(cls, before: Tensor, after: Tensor) -> Scale | None:
        """The one that makes of fp64 values the others, to the bit; None: it is something else."""
        square, along = (before * before).sum().item(), (before * after).sum().item()
        if along == 0:
            return None
        # Of digits beyond these, doubles know nothing.
        ratio, inverse = (float(f"{part:.12g}") for part in (along / square, square / along))
        # A factor of more digits, such as a root, is among the quotients of single values.
        quotients = (after / before).flatten().tolist() if before.all() else []
        candidates = (cls(), cls(ratio), cls(inverse, True), *map(cls, dict.fromkeys(quotients)))
        return next((scale for scale in candidates if scale.by and torch.equal(scale(before), after)), None)


def language_path(model: Any) -> str:
    """The path of the module that owns embeddings, decoder layers and the last norm."""
    layers = Layers(model)
    if not layers.count:
        raise UnknownLayer("the model has no decoder layers that can be told")
    return layers.paths[0].rpartition(".")[0].rpartition(".")[0]


def head_path(model: Any, path: str) -> str:
    """The path of the output layer: of the model, or of the innermost module around a path that has one.

    Raises  UnknownLayer
    """
    holders = ["", *(path[:at] for at, letter in enumerate(path) if letter == ".")]
    found = [
        f"{holder}.lm_head".strip(".")
        for holder in holders
        if isinstance(getattr(model.get_submodule(holder), "lm_head", None), nn.Module)
    ]
    if not found:
        raise UnknownLayer("the model has nothing as lm_head, not a Module")
    return found[-1]


class _Reached(Exception):
    """Ends a forward that has got as far as the language part. Its argument is what that is given."""


def _standing_in(module: nn.Module, forward: Callable[..., Any]) -> nn.Module:
    """A twin that computes something else."""
    found = twin.of(module, hooks=False)
    vars(found)["forward"] = forward
    return found


@contextmanager
def _tried_out() -> Iterator[list[Any]]:
    """For a call that a stand-in stops; behind it, the list has what that was given. Raises UnknownLayer."""
    given: list[Any] = []
    try:
        yield given
    except _Reached as reached:
        given.extend(reached.args)
    except Exception as error:  # transformers' own code, given what it may not be made for
        raise UnknownLayer(f"what it embeds cannot be tried out: {type(error).__name__}: {error}") from error


def read_as(model: Any, path: str, name: str, vocabulary: int) -> Tensor | None:
    """The ids that a model of text and images embeds for all ids of text; None: those that it is given.

    Kimi-K2.5, for one, reads the ids that stand for images as 0 before it puts the images there.
    """
    if path == model.base_model_prefix:
        return None

    def embed(ids: Tensor) -> Tensor:
        return ids[..., None].double()

    def stop(*_: Any, **kwargs: Any) -> None:
        raise _Reached(kwargs.get("inputs_embeds"), kwargs.get("input_ids"))

    module: Any = model.get_submodule(path)
    stub = _standing_in(module.get_submodule(name), embed)
    language = twin.of(module, {name: stub}, hooks=False)
    vars(language)["forward"] = stop
    ids = torch.arange(vocabulary, device="cpu")[None]
    with _tried_out() as reached, twin.on_cpu():
        twin.around(model, path, language, without=("ktinject_decoding",), hooks=False)(
            input_ids=ids, position_ids=torch.zeros_like(ids), use_cache=False
        )
    found, given = reached if reached else (None, None)
    if found is None and isinstance(given, Tensor) and torch.equal(given, ids):
        return None
    if not isinstance(found, Tensor) or found.shape != (1, vocabulary, 1):
        raise UnknownLayer("the model gives its language part something else than embeddings")
    read = found[0, :, 0].long()
    if not torch.equal(embed(read), found[0]) or not bool(((read >= 0) & (read < vocabulary)).all()):
        raise UnknownLayer("the model changes embeddings before its first layer")
    return None if torch.equal(read, ids[0]) else read


def embedding_scale(module: nn.Module, name: str, streams: int = 1) -> Scale:
    """What the module that owns embeddings, under this name, and layers multiplies them with before its first layer.

    streams  that the first layer gets: all the same
    Raises  UnknownLayer where it makes something else of them, or cannot be tried out
    """
    given = torch.linspace(-3, 3, 16, dtype=torch.float64, device="cpu").view(1, 1, -1)

    def stop(*args: Any, **kwargs: Any) -> None:
        raise _Reached(args[0] if args else kwargs.get("hidden_states"))

    layers: Any = module.get_submodule("layers")
    embed = _standing_in(module.get_submodule(name), lambda ids: given)
    first = twin.of(layers, {"0": _standing_in(layers[0], stop)}, hooks=False)
    changed = twin.of(module, {name: embed, "layers": first}, hooks=False)
    with _tried_out() as reached, twin.on_cpu():
        twin.run(changed, input_ids=torch.zeros(1, 1, dtype=torch.int64, device="cpu"), use_cache=False)
    found = next(iter(reached), None)
    if streams > 1 and isinstance(found, Tensor) and found.shape == (1, 1, streams, given.shape[-1]):
        found = found[:, :, 0] if torch.equal(found, found[:, :, :1].expand_as(found)) else None
    scale = Scale.between(given, found) if isinstance(found, Tensor) and found.shape == given.shape else None
    if scale is None:
        raise UnknownLayer("the model changes embeddings before its first layer")
    return scale


def widened_kinds(module: nn.Module, embed: str, rotary: str) -> tuple[str, ...]:
    """The kinds of layers whose rotation is asked for in fp32, of a model in another dtype, as dots3-note has it.

    module  owns embeddings, layers and rotary embedding, the first and the last under these names

    Raises  UnknownLayer
    """
    own: Any = module.get_submodule(rotary)
    if "layer_type" not in inspect.signature(type(own).forward).parameters:
        return ()
    found: list[str] = []

    def asked(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if x.dtype == torch.float32:
            found.append(kwargs.get("layer_type", args[-1]))
        return type(own).forward(own, x, *args, **kwargs)

    def stop(*_: Any, **__: Any) -> None:
        raise _Reached

    layers: Any = module.get_submodule("layers")
    stubs = {
        embed: _standing_in(
            module.get_submodule(embed),
            lambda ids: torch.zeros(*ids.shape, 8, dtype=torch.float32, device="cpu").bfloat16(),
        ),
        rotary: _standing_in(own, asked),
        "layers": twin.of(layers, {"0": _standing_in(layers[0], stop)}, hooks=False),
    }
    with _tried_out(), twin.on_cpu():
        twin.run(
            twin.of(module, stubs, hooks=False),
            input_ids=torch.zeros(1, 1, dtype=torch.int64, device="cpu"),
            use_cache=False,
        )
    return tuple(sorted(found))


# Positions at which a model is asked what it gives its layers by them, and what is known: (e, f) of queries that are
# multiplied with (1 + (position + 1) / e)^f, as BEAM has it.
_POSITIONS = (0, 1, 1000, 2047, 2048, 20_000, 100_000, 1_000_000)
_POWERS = ((2048.0, 0.1),)
NO_POWER = (0.0, 0.0)


def query_powers(module: nn.Module, embed: str, rotary: str) -> list[tuple[float, float]]:
    """By what each layer has its attention multiply queries: (e, f) as `_POWERS` has them; `NO_POWER`: by nothing.

    module  owns embeddings, layers and rotary embedding, the first and the last under these names

    Raises  UnknownLayer
    """
    layers: Any = module.get_submodule("layers")
    if not any(takes_scale(child) for layer in layers for child in layer.children()):
        return [NO_POWER] * len(layers)
    given: dict[int, Any] = {}

    def noting(index: int) -> Callable[..., Any]:
        def note(x: Tensor, **kwargs: Any) -> Any:
            given[index] = kwargs.get(SCALE)
            return x, None

        return note

    def alone(index: int, layer: nn.Module) -> nn.Module:
        children = {name: Stub(lambda x: x) for name, _ in layer.named_children()}
        scaled = (name for name, child in layer.named_children() if takes_scale(child))
        children |= {name: Stub(noting(index), names_kept=True) for name in scaled}
        return twin.of(layer, children, hooks=False)

    own: Any = module.get_submodule(embed)
    stubs = {
        embed: _standing_in(
            own, lambda ids: torch.zeros(*ids.shape, own.embedding_dim, dtype=torch.float32, device="cpu")
        ),
        "layers": twin.of(layers, {str(index): alone(index, layer) for index, layer in enumerate(layers)}),
    }
    if rotary in dict(module.named_children()):
        stubs[rotary] = _standing_in(module.get_submodule(rotary), lambda x, *_, **__: (x, x))
    positions = torch.tensor([_POSITIONS], dtype=torch.int64, device="cpu")
    with _tried_out(), twin.on_cpu():
        twin.run(
            twin.of(module, stubs, hooks=False),
            input_ids=torch.zeros_like(positions),
            position_ids=positions,
            use_cache=False,
        )
    return [_power(given.get(index)) for index in range(len(layers))]


def _power(given: Any) -> tuple[float, float]:
    """What queries are multiplied with at `_POSITIONS`, or None. Raises UnknownLayer."""
    if given is None:
        return NO_POWER
    places = torch.tensor(_POSITIONS, dtype=torch.float64, device="cpu") + 1
    for every, exponent in _POWERS:
        want = (1 + places / every) ** exponent
        if given.numel() == want.numel() and torch.allclose(given.flatten().double(), want, rtol=1e-5):
            return every, exponent
    raise UnknownLayer("the model scales queries by their position in another way")


@dataclass(frozen=True)
class Cap:
    """What values come near, and never reach: by · tanh(x / by).

    is_wide  in fp32, whatever they are
    """

    by: float
    is_wide: bool = False

    def __call__(self, x: Tensor) -> Tensor:
        return torch.tanh((x.float() if self.is_wide else x) / self.by) * self.by


class _Given(MoeModelOutputWithPast):
    """What a language part gives, and None for whatever else a model asks it for."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def logits_scale(model: Any, path: str) -> Scale | Cap:
    """What a model multiplies or divides the logits with that its output layer gives, or how it caps them.

    path  of the language part, as `language_path` gives it

    Where it does something else, or cannot be tried out, nothing is taken to be done: the first step compares.
    """
    given = torch.linspace(-3, 3, 16, dtype=torch.float64, device="cpu").view(1, 1, -1)
    try:
        name = path.partition(".")[0]
        base: nn.Module = model.get_submodule(name)
        inner = _standing_in(base, lambda *_, **__: _Given(last_hidden_state=given))
        held = {name: inner, "lm_head": _standing_in(model.lm_head, lambda x: x)}
        with twin.on_cpu():
            changed = twin.of(model, held, without=("ktinject_decoding",), hooks=False)
            logits = twin.run(
                changed, input_ids=torch.zeros(1, 1, dtype=torch.int64, device="cpu"), use_cache=False
            ).logits
        cap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
        for capped in (Cap(cap), Cap(cap, is_wide=True)) if isinstance(cap, (int, float)) and cap else ():
            if logits.dtype == capped(given).dtype and torch.equal(capped(given), logits):
                return capped
        return Scale.between(given, logits) or Scale()
    except Exception:  # transformers' own code, given what it may not be made for
        return Scale()


def casts_for_head(model: Any, path: str) -> bool:
    """Whether a model gives its output layer values of the dtype that this has, as Hunyuan 4 does; else as they are.

    Where that cannot be tried out, they are taken to be as they are: the first step compares.
    """
    seen: list[torch.dtype] = []

    def note(x: Tensor) -> Tensor:
        seen.append(x.dtype)
        return x

    given, head = torch.ones(1, 1, 16, dtype=torch.bfloat16, device="cpu"), Stub(note)
    try:
        name = path.partition(".")[0]
        base: nn.Module = model.get_submodule(name)
        inner = _standing_in(base, lambda *_, **__: _Given(last_hidden_state=given))
        with twin.on_cpu():
            changed = twin.of(
                model, {name: inner, "lm_head": head}, without=("ktinject_decoding",), hooks=False
            )
            twin.run(changed, input_ids=torch.zeros(1, 1, dtype=torch.int64, device="cpu"), use_cache=False)
    except Exception:  # transformers' own code, given what it may not be made for
        return False
    return seen == [head.weight.dtype]
