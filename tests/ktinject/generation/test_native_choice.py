"""Native decode steps of sparse attention, whose indexer chooses places (DeepSeek-V3.2, GLM-5); and of DeepSeek-V2."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_generate import prompt, stock
from test_native_decoder import (
    INT8_TOLERANCE,
    assert_as_exact_as_its_own,
    assert_same_tokens,
    doubled,
    logits_of,
    stock_step,
    varied,
)
from test_native_windows import assert_native
from torch import Tensor, nn
from transformers import PreTrainedModel

import ktinject
from ktinject import _native
from ktinject.generation import indexer_spec, layer_spec
from ktinject.generation.cpu.native_decoder import NativeDecoder
from ktinject.generation.indexer_spec import IndexerSpec
from ktinject.generation.layer_spec import DecoderLayerSpec, LatentAttentionSpec
from ktinject.support import Support
from tests.models import tiny

torch.set_num_threads(1)
FAMILIES = ["deepseek_v32", "glm_moe_dsa"]
# All experts are taken, so none can turn over. With as many heads, hardly any places tie.
SURE: dict[str, Any] = {"num_experts_per_tok": 6, "n_group": 1, "topk_group": 1, "index_n_heads": 16}
# The second layer goes by the choice of the first.
SHARED = {"indexer_types": ["full", "shared"]}
CASES = [(family, {"index_topk": few}) for family in FAMILIES for few in (5, 12, 64)]
CASES += [("glm_moe_dsa", SHARED | {"index_topk": few}) for few in (5, 12)]


def made(family: str, weights: str = "bf16", **changes: Any) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A swapped model in bf16, and the same before in fp32."""
    if family in FAMILIES:
        changes = SURE | changes
    model, truth = (varied(doubled(tiny(family, **changes).bfloat16())) for _ in range(2))
    for one in (model, truth):
        # As transformers loads it.
        for name, parameter in one.named_parameters():
            if "indexer.weights_proj" in name:
                parameter.data = parameter.data.float()
    variables = dict.fromkeys(("experts", "dense", "head"), weights)
    return ktinject.optimize(
        model, "auto", devices=["cpu"], variables=variables, progress=False
    ), truth.float()


@pytest.mark.parametrize("family, changes", CASES, ids=str)
def test_steps_are_as_exact_as_the_model_s_own(family: str, changes: dict[str, Any]) -> None:
    """The text grows from 9 to 15 tokens: all places are attended to, some of them, or first all."""
    assert_as_exact_as_its_own(*made(family, **changes))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_formats(weights: str, family: str) -> None:
    assert_as_exact_as_its_own(*made(family, weights, index_topk=12), INT8_TOLERANCE)


def in_fp32(family: str, **changes: Any) -> PreTrainedModel:
    """A swapped model whose steps differ from its own in last places alone, so that no other place is chosen."""
    plain = varied(doubled(tiny(family, **SURE | changes)))
    variables = dict.fromkeys(("experts", "dense", "head"), "int8")
    return ktinject.optimize(plain, "auto", devices=["cpu"], variables=variables, progress=False)


@pytest.mark.parametrize("few", [5, 12])
def test_models_in_fp32(few: int) -> None:
    """With an indexer of torch's own layers."""
    model = in_fp32("deepseek_v32", index_topk=few)
    assert type(model.model.layers[0].self_attn.indexer.wk) is nn.Linear
    native = NativeDecoder(model)
    logits_of(model, native)
    assert native.is_proven, native.support.reason
    ours, theirs = (logits_of(model, forward)[0] for forward in (native, stock_step(model)))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "case",
    [
        {},
        *(
            pytest.param(case, marks=pytest.mark.nightly)
            for case in ({"cache_implementation": "static"}, {"max_time": 1e6}, {"prefill_chunk_size": 4})
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("family, changes", CASES, ids=str)
def test_tokens_are_the_stock_loop_s(family: str, changes: dict[str, Any], case: dict[str, Any]) -> None:
    model = in_fp32(family, **changes)
    for batch in (3, 1):
        arguments = {**prompt(batch), "eos_token_id": None, **case}
        assert torch.equal(model.generate(**arguments), stock(model, **arguments))
        assert_native(model)


@pytest.mark.parametrize("changes", [{}, SHARED], ids=str)
def test_several_tokens_of_a_text(changes: dict[str, Any]) -> None:
    """Each of them chooses among those before it."""
    model = in_fp32("glm_moe_dsa", index_topk=12, **changes)
    arguments = {**prompt(1, padding=0), "eos_token_id": None}
    want = model.generate(**arguments)
    found = model.generate(**arguments, prompt_lookup_num_tokens=3)
    assert "lookup" in model.ktinject_decoding.last and not model.ktinject_decoding.reason
    assert torch.equal(found, want)


def test_places_decide() -> None:
    """What the other tests compare is another text than one that attends to all."""
    few, all_places = (in_fp32("deepseek_v32", index_topk=n) for n in (5, 64))
    arguments = {**prompt(3), "eos_token_id": None}
    assert not torch.equal(few.generate(**arguments), all_places.generate(**arguments))


@pytest.mark.parametrize("changes", [{"q_lora_rank": None}, {"q_lora_rank": 24}], ids=str)
def test_deepseek_v2(changes: dict[str, Any]) -> None:
    """It turns neighbours by complex numbers in fp32."""
    model, truth = made("deepseek_v2", num_experts_per_tok=6, n_group=1, topk_method="greedy", **changes)
    assert_as_exact_as_its_own(model, truth)
    for batch in (3, 1):
        assert_same_tokens(model, {**prompt(batch), "eos_token_id": None})
        assert_native(model)


def test_specs() -> None:
    for family, rope in (("deepseek_v32", "halves"), ("glm_moe_dsa", "neighbours")):
        model, _ = made(family)
        spec = layer_spec.of_layer(model.model.layers[0])
        assert isinstance(spec, DecoderLayerSpec) and isinstance(spec.attention, LatentAttentionSpec)
        assert spec.attention.indexer == IndexerSpec(16, 16, 8, 8, rope, 1e-6)
        assert spec.attention.latent.chooses == "own"
        assert spec.attention.latent.hands_on == (family == "glm_moe_dsa")
    model, _ = made("glm_moe_dsa", **SHARED)
    spec = layer_spec.of_layer(model.model.layers[1])
    assert isinstance(spec, DecoderLayerSpec) and isinstance(spec.attention, LatentAttentionSpec)
    assert spec.attention.latent.chooses == "given" and spec.attention.indexer is None


def derived(module: Any, forward: Any) -> None:
    module.__class__ = type("Odd", (type(module),), {"forward": forward, "capturable": True})


class TestRefusals:
    @pytest.mark.parametrize("family", FAMILIES)
    def test_an_indexer_that_takes_the_worst(self, family: str) -> None:
        indexer = tiny(family).model.layers[0].self_attn.indexer
        own = type(indexer).forward
        assert indexer_spec.of_indexer(indexer)

        def forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
            self.weights_proj, kept = _Negated(self.weights_proj), self.weights_proj
            try:
                return own(self, x, *args, **kwargs)
            finally:
                self.weights_proj = kept

        derived(indexer, forward)
        found = indexer_spec.of_indexer(indexer)
        assert isinstance(found, Support) and found.reason.endswith("scores places in another way")

    def test_an_indexer_with_another_norm(self) -> None:
        indexer = tiny("deepseek_v32").model.layers[0].self_attn.indexer
        indexer.k_norm = nn.RMSNorm(16)
        found = indexer_spec.of_indexer(indexer)
        assert isinstance(found, Support) and "is no layer norm" in found.reason

    def test_a_layer_that_forgets_a_choice(self) -> None:
        model, _ = made("glm_moe_dsa", **SHARED)
        layer = model.model.layers[0]
        own = type(layer).forward

        def forward(self: Any, hidden_states: Tensor, **kwargs: Any) -> Any:
            out, chosen = own(self, hidden_states, **kwargs)
            return out, chosen.flip(-1)

        derived(layer, forward)
        assert NativeDecoder(model).support.reason.endswith("a choice of places is not handed on")

    @pytest.mark.parametrize("changes", [{}, SHARED], ids=str)
    def test_another_choice_is_seen_in_the_first_step(
        self, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Also of a text that is shorter than what is chosen."""
        own = _native.Indexer

        def worst(**arguments: Any) -> Any:
            weight = torch.randn(16, 40, generator=torch.Generator().manual_seed(0)).bfloat16()
            return own(**arguments | {"weights": _native.Projection(weight=weight)})

        model, _ = made("glm_moe_dsa", index_topk=64, **changes)
        monkeypatch.setattr(_native, "Indexer", worst)
        model.generate(**prompt())
        assert model.ktinject_decoding.last == "eager loop"
        assert "relative difference" in model.ktinject_decoding.reason
        assert torch.equal(model.generate(**prompt()), stock(model, **prompt()))

    def test_choices_that_are_missing(self) -> None:
        model, _ = made("glm_moe_dsa", **SHARED)
        native = NativeDecoder(model)
        keys, values = torch.zeros(1, 1, 16, 16).bfloat16(), torch.zeros(1, 1, 16, 8).bfloat16()
        x, table = torch.zeros(1, 40).bfloat16(), torch.ones(1, 8).bfloat16()

        def step(indexes: Any) -> None:
            cache = _native.DecoderCache([keys] * 2, [values] * 2, indexes)
            native._layers.decoder.forward(
                x=x, cos=table, sin=table, mask=None, position=3, cache=cache, first=1, last=2, final_norm=None,
                out=torch.empty_like(x),
            )  # fmt: skip

        with pytest.raises(ValueError, match="no layer before has chosen places"):
            step([keys, None])
        with pytest.raises(ValueError, match="found keys of 1 indexes; expected none or 2"):
            step([keys])
        with pytest.raises(ValueError, match="the keys of an index must be"):
            native._layers.decoder.forward(
                x=x, cos=table, sin=table, mask=None, position=3, first=0, last=1, final_norm=None,
                cache=_native.DecoderCache([keys] * 2, [values] * 2), out=torch.empty_like(x),
            )  # fmt: skip

    def test_arguments_of_an_indexer(self) -> None:
        def made(**changes: Any) -> Any:
            weight, one = torch.zeros(32, 24), torch.zeros(16)
            arguments: dict[str, Any] = {
                "q": _native.Projection(weight=weight), "k": _native.Projection(weight=torch.zeros(16, 40)),
                "weights": _native.Projection(weight=torch.zeros(2, 40)), "norm_weight": one, "norm_bias": one,
                "epsilon": 1e-6, "heads": 2, "size": 16, "rotary": 8, "top_k": 4, "neighbours": False,
            }  # fmt: skip
            return _native.Indexer(**arguments | changes)

        made()
        for wrong in ({"rotary": 18}, {"rotary": 7}, {"top_k": 0}, {"heads": 0}):
            with pytest.raises(ValueError, match="rotary even and at most size"):
                made(**wrong)
        for wrong in ({"heads": 3}, {"k": _native.Projection(weight=torch.zeros(15, 40))}):
            with pytest.raises(ValueError, match="do not fit its heads of 16 values"):
                made(**wrong)
        with pytest.raises(ValueError, match="16 weights and biases of one dtype"):
            made(norm_bias=torch.zeros(16).bfloat16())
        with pytest.raises(ValueError, match="either a packed layer or a weight"):
            _native.Projection()


class _Negated(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    @property
    def weight(self) -> Any:
        return self.module.weight

    def forward(self, x: Tensor) -> Tensor:
        return -self.module(x)
