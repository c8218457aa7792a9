"""Whatever is put in the place of what recorded steps and our loops stand for is followed, or refused: on an instance,
on a class and on one that it derives from, before a first request and after one, beside the unswapped model."""

from __future__ import annotations

import importlib
import inspect
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import models
import pytest
import torch
from answers import made, pair
from test_generate import prompt
from test_native_decoder import SURE, SURE_GROUPS, sure
from torch import Tensor, nn
from torch.nn import functional
from transformers import DynamicCache, GenerationMixin, PreTrainedModel, StaticCache

from ktinject import OperatorError
from ktinject.generation import replaced
from ktinject.generation.decoding import Decoding
from ktinject.hf import compat
from ktinject.model_class import own_class
from ktinject.operators import Operator

torch.set_num_threads(1)
# One family a kind of layer: attention, latents, windows with sinks, the gated delta rule.
KINDS = [name for name in ("qwen3_moe", "deepseek_v3", "gpt_oss", "qwen3_next") if name in models.AVAILABLE]
STEPS = 6
MOVED = 0.2  # relative difference of logits from which on a change shows
WRONG = 0.1
_RAISED = (TypeError, ValueError, RuntimeError, AttributeError, StopIteration)
Make = Callable[[Any], Any]


def config_of(family: str) -> dict[str, Any]:
    """All experts are taken where that can be said, so none can turn over."""
    row = models.FAMILIES[family]
    if "num_experts_per_tok" in row or family == "nemotron_h":
        return {}
    # No index has a near tie to decide.
    return {**_all_experts(family, row), **({"index_topk": 64} if "index_topk" in row else {})}


def _all_experts(family: str, row: dict[str, Any]) -> dict[str, Any]:
    if family == "phimoe":
        return {"num_local_experts": 2}
    if row.get("n_group") and family != "beam":
        return SURE_GROUPS
    return SURE if row.keys() & {"num_experts", "num_local_experts"} else {}


@contextmanager
def put(holder: Any, name: str, make: Make) -> Iterator[None]:
    """Within, an attribute of an object or a class is what `make` makes of it."""
    missing = object()
    before = vars(holder).get(name, missing)
    setattr(holder, name, make(getattr(holder, name)))
    try:
        yield
    finally:
        if before is missing:
            delattr(holder, name)
        else:
            setattr(holder, name, before)


def behind(change: Callable[[Any], Any]) -> Make:
    """Of a function or a method, one that changes what it gives."""
    return lambda own: lambda *args, **kwargs: change(own(*args, **kwargs))


def halving(own: Any) -> Any:
    """Of a method, one that is given half of each tensor of numbers."""

    def half(value: Any) -> Any:
        return value * 0.3 if isinstance(value, Tensor) and value.is_floating_point() else value

    return lambda *args, **kwargs: own(*map(half, args), **kwargs)


def rolled(out: Any) -> Any:
    logits = out.logits
    out.logits = tuple(one.roll(1, -1) for one in logits) if isinstance(logits, tuple) else logits.roll(1, -1)
    return out


def other_ids(inputs: dict[str, Any]) -> dict[str, Any]:
    return {**inputs, "input_ids": (inputs["input_ids"] + 1) % 90}


def hiding(kwargs: dict[str, Any]) -> dict[str, Any]:
    mask = kwargs["attention_mask"].clone()
    mask[:, :6] = 0
    return {**kwargs, "attention_mask": mask}


# Method of a model → what a replacement does.
METHODS: dict[str, Make] = {
    "prepare_inputs_for_generation": behind(other_ids),
    "_update_model_kwargs_for_generation": behind(hiding),
    "_prefill": behind(rolled),
    "_has_unfinished_sequences": behind(lambda _: False),
    "forward": behind(rolled),
}
# transformers takes these of the class.
OF_CLASSES: dict[str, Make] = {**METHODS, "_sample": behind(rolled), "__call__": behind(rolled)}


@dataclass(frozen=True)
class Mutation:
    """put: for a model. cache: what a request to it is given. is_shared: of a class, which both models see."""

    name: str
    put: Callable[[Any], AbstractContextManager[Any]]
    cache: Callable[[Any], Any] = lambda model: None
    is_shared: bool = False


def mutations(model: PreTrainedModel) -> Iterator[Mutation]:
    own = own_class(model)
    for name, make in METHODS.items():
        yield Mutation(f"model.{name}", lambda m, name=name, make=make: put(m, name, make))
    for name, make in OF_CLASSES.items():
        yield shared(own, name, make)
        if name in vars(GenerationMixin):
            yield shared(GenerationMixin, name, make)
    made = DynamicCache(config=model.config)
    kinds = [*dict.fromkeys(map(type, made.layers))]
    for kind in (DynamicCache, *kinds):
        for name in [name for name in dir(kind) if name.startswith("update")]:
            yield shared(kind, name, halving)
    yield Mutation("cache.update", nothing, with_update)
    yield Mutation("layer.update", nothing, with_layers_update)
    yield shared(functional, "scaled_dot_product_attention", behind(lambda out: out * 0.3))


def shared(holder: Any, name: str, make: Make) -> Mutation:
    return Mutation(f"{holder.__name__}.{name}", lambda _: put(holder, name, make), is_shared=True)


@contextmanager
def nothing(_: Any) -> Iterator[None]:
    yield


def with_update(model: Any) -> Any:
    cache = DynamicCache(config=model.config)
    cache.update = halving(cache.update)  # type: ignore[method-assign]
    return cache


def with_layers_update(model: Any) -> Any:
    cache = DynamicCache(config=model.config)
    for layer in cache.layers:
        for name in [name for name in dir(layer) if name.startswith("update")]:
            setattr(layer, name, halving(getattr(layer, name)))
    return cache


def of_attributes(model: PreTrainedModel) -> Iterator[Mutation]:
    """Each number of each kind of module that no operator stands for, and each table of a rotary embedding."""
    seen: set[tuple[type, str]] = set()
    for path, module in model.named_modules():
        if isinstance(module, Operator) or isinstance(module, nn.ModuleList):
            continue
        tables = [name for name, tensor in module.named_buffers(recurse=False) if "inv_freq" in name]
        for name in [name for name, value in vars(module).items() if isinstance(value, float)] + tables:
            if (type(module), name) not in seen:
                seen.add((type(module), name))

                def change(m: Any, path: str = path, name: str = name) -> Any:
                    return put_attribute(m.get_submodule(path), name)

                yield Mutation(f"{type(module).__name__}.{name}", change)


@contextmanager
def put_attribute(module: nn.Module, name: str) -> Iterator[None]:
    before = getattr(module, name)
    setattr(module, name, before * 0.3)
    try:
        yield
    finally:
        setattr(module, name, before)


def write(model: Any, ids: Tensor, cache: Any = None, text: Tensor | None = None) -> Any:
    """A greedy answer with logits; text [1, n]: the one that is to be written."""
    given = {} if cache is None else {compat.CACHE: cache}
    if text is not None:
        given["prefix_allowed_tokens_fn"] = lambda row, so_far: [
            int(text[row, min(len(so_far), text.shape[1] - 1)])
        ]
    mask = torch.ones_like(ids)
    mask[:, 0] = 0  # transformers drops one of ones
    return model.generate(
        ids, attention_mask=mask, max_new_tokens=STEPS, do_sample=False, eos_token_id=None, pad_token_id=0,
        return_dict_in_generate=True, output_logits=True, **given,
    )  # fmt: skip


def error(ours: Any, theirs: Any) -> Tensor:
    """Of each step, relative."""
    a, b = (torch.stack(out.logits, 1)[0].float() for out in (ours, theirs))
    return (a - b).norm(dim=-1) / b.norm(dim=-1).clamp(min=1e-9)


def outcome(model: Any, plain: Any, mutation: Mutation, ids: Tensor) -> str:
    """ "unmoved": the mutation changes nothing of the unswapped model; else "native", "eager", "refused" or "WRONG"."""
    with ExitStack() as both:
        both.enter_context(mutation.put(model))
        if not mutation.is_shared:
            both.enter_context(mutation.put(plain))
        ours: Any = None
        try:
            ours = write(model, ids, mutation.cache(model))
        except OperatorError:
            return "refused"
        except _RAISED:
            pass
        try:
            theirs = write(plain, ids, mutation.cache(plain), None if ours is None else ours.sequences)
        except _RAISED:
            return "unmoved"  # what it was given, it does not take
    if ours is None:
        return "WRONG: it raises"
    if len(ours.logits) != len(theirs.logits):
        return f"WRONG: {len(ours.logits)} steps for {len(theirs.logits)}"
    how = "native" if model.ktinject_decoding.last in ("native loop", "graph loop") else "eager"
    if len(theirs.logits) < STEPS:
        return how
    moved = error(write(plain, ids, text=ours.sequences), theirs) > MOVED
    if not moved.any():
        return "unmoved"
    wrong = error(ours, theirs)[moved].median().item()
    return how if wrong <= WRONG else f"WRONG: {wrong:.2f}, {model.ktinject_decoding.last}"


def outcomes(
    model: Any, plain: Any, wanted: Callable[[Any], Iterator[Mutation]], *, after: bool
) -> dict[str, str]:
    """Mutation → what became of it.

    after  a first request ran as it should before it
    """
    device = next(model.parameters()).device
    ids = torch.randint(3, 90, (1, 9), generator=torch.Generator().manual_seed(3)).to(device)
    found = {}
    for mutation in [*wanted(model)]:
        if not after:
            model.ktinject_decoding = Decoding(model)
        elif not found:
            write(model, ids)
        found[mutation.name] = outcome(model, plain, mutation, ids)
    return found


def assert_none_is_wrong(found: dict[str, str]) -> None:
    assert not {name: what for name, what in found.items() if what.startswith("WRONG")}


@pytest.mark.parametrize("family", KINDS)
def test_what_is_put_in_place_is_followed_or_refused(family: str) -> None:
    model, plain = made(family, **config_of(family))
    found = outcomes(model, plain, mutations, after=True)
    assert_none_is_wrong(found)
    assert Counter(found.values())["unmoved"] < len(found) / 2
    write(model, torch.tensor([[5, 6, 7]]))
    assert model.ktinject_decoding.last == "native loop"  # all of it is undone


@pytest.mark.nightly
@pytest.mark.parametrize("family", models.AVAILABLE)
def test_of_every_family(family: str, capsys: pytest.CaptureFixture[str]) -> None:
    model, plain = made(family, **config_of(family))
    for after in (False, True):
        found = outcomes(model, plain, lambda m: (*mutations(m), *of_attributes(m)), after=after)
        counts = Counter(what.partition(":")[0] for what in found.values())
        with capsys.disabled():
            when = "after a request" if after else "before"
            print(f"\n{family}, {when}: {len(found)} changed, {dict(counts)}")
        assert_none_is_wrong(found)


# The double that holds experts on a GPU in tests knows no transposed ones, as gpt_oss has.
@pytest.mark.gpu
@pytest.mark.parametrize("family", [family for family in KINDS if family != "gpt_oss"])
@pytest.mark.parametrize("after", [False, True])
def test_in_graphs(family: str, after: bool) -> None:
    both = pair(family, "graph")
    found = outcomes(both.model, both.plain, lambda m: (*mutations(m), *of_attributes(m)), after=after)
    assert_none_is_wrong(found)
    assert "native" not in found.values() or both.model.ktinject_decoding.graphs


class TestOneByOne:
    """The reason says what was replaced."""

    @pytest.fixture
    def model(self) -> PreTrainedModel:
        return sure("qwen3_moe")

    def reason(self, model: Any, **more: Any) -> str:
        model.generate(**prompt(batch=1, padding=0), **more, eos_token_id=None)
        assert model.ktinject_decoding.last == "eager loop"
        found: str = model.ktinject_decoding.reason
        return found

    def test_an_update_of_a_cache(self, model: PreTrainedModel) -> None:
        given = {compat.CACHE: with_update(model)}
        assert self.reason(model, **given) == (
            "update of the cache was replaced, which recorded steps do not call"
        )

    def test_an_update_of_a_layer(self, model: PreTrainedModel) -> None:
        given = {compat.CACHE: with_layers_update(model)}
        assert self.reason(model, **given).startswith("update of layer 0 of the cache was replaced")

    def test_an_update_of_a_class(self, model: PreTrainedModel) -> None:
        with put(DynamicCache, "update", halving):
            assert self.reason(model).startswith("update of DynamicCache was replaced")

    def test_a_method_that_a_base_class_has(self, model: PreTrainedModel) -> None:
        with put(GenerationMixin, "prepare_inputs_for_generation", behind(other_ids)):
            assert self.reason(model).startswith("prepare_inputs_for_generation of GenerationMixin is none")

    def test_an_override_of_a_family_that_is_not_listed(
        self, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        own = own_class(model)

        def prepare_inputs_for_generation(self: Any, *args: Any, **kwargs: Any) -> Any:
            return GenerationMixin.prepare_inputs_for_generation(self, *args, **kwargs)

        monkeypatch.setattr(
            own, "prepare_inputs_for_generation", prepare_inputs_for_generation, raising=False
        )
        assert self.reason(model).startswith(f"prepare_inputs_for_generation of {own.__name__} is none")

    def test_what_a_listed_override_calls(self) -> None:
        model, _ = made("phimoe", num_local_experts=2)
        with put(GenerationMixin, "prepare_inputs_for_generation", behind(other_ids)):
            assert self.reason(model).startswith("prepare_inputs_for_generation of Phimoe")

    def test_a_loop_of_a_base_class_is_called(self, model: PreTrainedModel) -> None:
        calls: list[Any] = []
        with put(GenerationMixin, "_sample", behind(lambda out: calls.append(out) or out)):
            model.generate(**prompt(batch=1, padding=0), eos_token_id=None)
        assert calls and model.ktinject_decoding.last.startswith("native, stock loop: _sample")

    def test_a_forward_of_a_class_that_an_operator_stands_for(self, model: PreTrainedModel) -> None:
        norm = model.model.norm.stood_for[0]
        with put(norm, "forward", behind(lambda x: x * 0.5)):
            with pytest.raises(OperatorError, match=rf"{norm.__name__}\.forward was replaced after"):
                model.generate(**prompt(batch=1, padding=0))
        model.generate(**prompt(batch=1, padding=0))
        assert model.ktinject_decoding.last == "native loop"


@pytest.mark.parametrize("family", models.AVAILABLE)
def test_nothing_of_a_family_is_taken_for_a_replacement(family: str) -> None:
    """But for what is listed, no family overrides what steps stand for; a new one shows here."""
    with torch.device("meta"):
        config = models.config(family)
        model = models.AutoModelForCausalLM.from_config(config)
    assert replaced.support(model), replaced.support(model).reason
    assert replaced.methods_support(model, (*replaced.OF_LOOPS, *replaced.OF_CANDIDATES))
    caches = [DynamicCache(config=config)]
    with suppress(KeyError):  # of layers that it does not know
        caches.append(StaticCache(config=config, max_cache_len=8))
    for cache in caches:
        assert replaced.cache_support(cache), replaced.cache_support(cache).reason


@pytest.mark.parametrize("owner", sorted(replaced.KNOWN["prepare_inputs_for_generation"]))
def test_listed_overrides_give_a_step_what_others_are_given(owner: str) -> None:
    """But for what a step of text has no use for: where pictures are, of how many tokens logits are kept."""
    module, _, name = owner.partition(":")
    try:
        own = getattr(importlib.import_module(module), name)
    except ModuleNotFoundError:
        pytest.skip("this transformers lacks it")
    model = object.__new__(own)
    nn.Module.__init__(model)
    model.config, model.weight = own.config_class(), nn.Parameter(torch.empty(0))
    ids = torch.tensor([[5, 6, 7, 8]])
    given = {
        "next_sequence_length": 1,
        "attention_mask": torch.ones_like(ids),
        "position_ids": torch.arange(4)[None],
        "use_cache": True,
        compat.CACHE: DynamicCache(),
    }
    found = own.prepare_inputs_for_generation(model, ids, **given)
    wanted = GenerationMixin.prepare_inputs_for_generation(model, ids, **given)
    others = {"logits_to_keep", "mm_token_type_ids", "moe_mm_token_type_ids"}
    assert found.keys() - wanted.keys() <= others
    assert all(found[name] is None for name in found.keys() - wanted.keys() - {"logits_to_keep"})
    for name, value in wanted.items():
        same = torch.equal(found[name], value) if isinstance(value, Tensor) else found[name] is value
        assert same or name == "logits_to_keep", name


def test_what_was_listed_is_there() -> None:
    """A name that transformers no longer has would be looked for in vain."""
    for name in (*replaced.OF_STEPS, *replaced.OF_LOOPS, *replaced.OF_CANDIDATES):
        assert inspect.isfunction(replaced._STOCK[name]), name
