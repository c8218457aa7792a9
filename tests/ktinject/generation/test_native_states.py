"""Native decode steps of layers that leave states of fixed size: what holds for all families that have some."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from test_generate import prompt, stock
from test_native_decoder import assert_same_but_for_roundings, assert_same_tokens
from test_native_windows import assert_native, assert_steps_take_turns
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

import ktinject
from ktinject.generation import cache_layers
from ktinject.hf import compat
from tests.models import AVAILABLE, tiny

torch.set_num_threads(1)

NIGHTLY = pytest.mark.nightly


class Family(NamedTuple):
    """A family's config, where its first layer has its states, and vectors of that layer that its steps read."""

    config: dict[str, Any]
    mixer: str
    part: str  # of the mixer, which may get hooks
    vectors: tuple[str, ...]


_MAMBA = ("conv1d.weight", "conv1d.bias", "norm.weight", "A_log", "D", "dt_bias")
_DELTA = ("conv1d.weight", "norm.weight", "A_log", "dt_bias")
# All experts are taken, so none can turn over.
FAMILIES = {
    "granitemoehybrid": Family(
        {"layer_types": ["mamba", "attention"], "residual_multiplier": 0.37, "mamba_d_state": 24},
        "mamba",
        "norm",
        _MAMBA,
    ),
    "jamba": Family(
        {}, "mamba", "conv1d", ("conv1d.weight", "conv1d.bias", "A_log", "D", "b_layernorm.weight")
    ),
    "kimi_linear": Family(
        {"layer_types": ["linear_attention", "full_attention"]},
        "self_attn",
        "o_norm",
        ("conv1d.weight", "o_norm.weight", "forget_gate.A_log", "forget_gate.dt_bias"),
    ),
    "lfm2_moe": Family({"layer_types": ["conv", "full_attention"]}, "conv", "conv", ("conv.weight",)),
    "nemotron_h": Family(
        {
            "layers_block_type": ["mamba", "moe", "attention", "mlp"],
            "mamba_num_heads": 4,
            "mamba_head_dim": 20,
            "ssm_state_size": 24,
            "n_groups": 2,
        },
        "mixer",
        "norm",
        _MAMBA,
    ),
    "qwen3_5_moe_text": Family({}, "linear_attn", "conv1d", _DELTA),
    "qwen3_next": Family({}, "linear_attn", "conv1d", _DELTA),
}
HERE = [name for name in FAMILIES if name in AVAILABLE]


def model_of(family: str) -> PreTrainedModel:
    model = tiny(family, **{"num_experts_per_tok": 6}, **FAMILIES[family].config).bfloat16()
    return ktinject.optimize(model, "auto", devices=["cpu"], progress=False)


@pytest.fixture(params=HERE)
def family(request: pytest.FixtureRequest) -> Family:
    return FAMILIES[request.param]


@pytest.fixture
def model(request: pytest.FixtureRequest, family: Family) -> PreTrainedModel:
    return model_of(next(name for name, one in FAMILIES.items() if one is family))


def mixer_of(model: Any, family: Family) -> Any:
    return model.model.layers[0].get_submodule(family.mixer)


@pytest.mark.parametrize(
    "case",
    [
        {},
        pytest.param({"cache_implementation": "static"}, marks=NIGHTLY),
        pytest.param({"max_time": 1e6}, marks=NIGHTLY),
        {"max_time": 1e6, "cache_implementation": "static"},
    ],
    ids=str,
)
def test_tokens_are_the_stock_loop_s(model: PreTrainedModel, case: dict[str, Any]) -> None:
    """Also of rows with padding on their left."""
    for batch in (3, 1, 3):
        assert_same_tokens(model, {**prompt(batch), "eos_token_id": None, **case})
        assert_native(model)


@pytest.mark.parametrize("length", [1, pytest.param(2, marks=NIGHTLY), pytest.param(5, marks=NIGHTLY), 70])
def test_prompts_shorter_than_the_convolution_and_longer_than_a_chunk(
    model: PreTrainedModel, length: int
) -> None:
    model.generate(**prompt(2))  # whose states must leave no trace
    assert_same_tokens(model, {**prompt(2, length, padding=length // 5), "eos_token_id": None})
    assert_native(model)


def test_steps_take_turns_with_the_model_s_own(model: PreTrainedModel) -> None:
    arguments = {**prompt(1, padding=2), "eos_token_id": None}
    model.generate(**arguments)
    assert_native(model)
    assert_steps_take_turns(model, arguments)


def test_a_cache_of_the_callers(model: PreTrainedModel) -> None:
    """Two turns."""
    cache = DynamicCache(config=model.config)
    arguments = {**prompt(1, padding=0), "eos_token_id": None}
    for _ in range(2):
        found = model.generate(**arguments, past_key_values=cache)
        assert_native(model)
        assert_same_but_for_roundings(model, arguments, found, stock(model, **arguments))
        assert cache.get_seq_length() == found.shape[1] - 1
        ids = torch.cat([found, arguments["input_ids"]], dim=1)
        arguments |= {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


@pytest.mark.parametrize(
    "name, vector",
    [
        pytest.param(name, one, marks=[NIGHTLY] if number else [])
        for name in HERE
        for number, one in enumerate(FAMILIES[name].vectors)
    ],
)
def test_weights_in_place_and_replaced(name: str, vector: str) -> None:
    """Each must change the tokens, to be seen at all."""
    model = model_of(name)
    arguments = {**prompt(), "eos_token_id": None}
    before = model.generate(**arguments)
    path, _, last = vector.rpartition(".")
    holder: Any = mixer_of(model, FAMILIES[name]).get_submodule(path)
    with torch.no_grad():
        getattr(holder, last).neg_().add_(0.7)
    assert not torch.equal(before, model.generate(**arguments))
    assert_same_tokens(model, arguments)
    assert_native(model)
    setattr(holder, last, nn.Parameter(0.7 - getattr(holder, last).detach()))
    assert_same_tokens(model, arguments)
    assert_native(model)


def test_hooks_on_a_part(model: PreTrainedModel, family: Family) -> None:
    model.generate(**prompt())
    handle = mixer_of(model, family).get_submodule(family.part).register_forward_hook(lambda *_: None)
    model.generate(**prompt())
    assert f"{family.part} has forward hooks" in model.ktinject_decoding.reason
    handle.remove()
    model.generate(**prompt())
    assert_native(model)


@pytest.mark.parametrize("what", ["output", "state"])
def test_what_computes_something_else_keeps_its_steps(
    model: PreTrainedModel, family: Family, what: str
) -> None:
    """Also where the output of the first step is the same, and those of later ones are not."""
    module = mixer_of(model, family)
    own = type(module).forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        out: Tensor = own(self, *args, **kwargs)
        if what == "output":
            return out * 0.8
        for state in cache_layers.tensors_of(compat.cache_of(kwargs).layers[0]):
            state.mul_(0.8)
        return out

    module.__class__ = type("Odd", (type(module),), {"forward": forward, "capturable": True})
    arguments = {**prompt(), "eos_token_id": None}
    assert torch.equal(model.generate(**arguments), stock(model, **arguments))
    assert model.ktinject_decoding.last == "eager loop"
    assert model.ktinject_decoding.reason.startswith("layer 0: relative difference")
