"""What users do to a swapped model's weights and attributes is done, or refused by name. Beside the unswapped model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, parametrizations, prune, vector_to_parameters
from transformers import AutoModelForCausalLM, PreTrainedModel

import ktinject
from ktinject.errors import OperatorError
from ktinject.operators import stand_in
from ktinject.operators.held import Held
from tests.models import AVAILABLE, tiny

torch.set_num_threads(1)
IDS = torch.arange(3, 15)[None]
# One of each kind of layers; all experts are taken, so none can turn over.
KINDS = ["qwen3_moe", "deepseek_v3", "gpt_oss"]
FAMILIES = KINDS + [
    pytest.param(name, marks=pytest.mark.nightly)
    for name in (
        "glm4_moe",
        "mixtral",
        "qwen2_moe",
        "olmoe",
        "minimax_m2",
        "deepseek_v2",
        "ernie4_5_moe",
        "hy_v3",
    )
    if name in AVAILABLE
]
SURE = {"num_experts_per_tok": 6}
GROUPS = {"n_group": 1, "topk_group": 1}
TOLERANCE = (
    0.04  # of logits, with sums that bf16 rounds to the other side; a change below moves them by 0.1 and more
)


def both(family: str, *rules: dict[str, Any], **config: Any) -> tuple[Any, Any]:
    """The swapped model and the unswapped one."""
    groups = GROUPS if family.startswith(("deepseek", "glm4")) else {}
    given = {**SURE, **groups, "tie_word_embeddings": False, **config}
    original = tiny(family, **given).bfloat16().eval()
    return optimized(copy.deepcopy(original), *rules), original


def optimized(model: PreTrainedModel, *rules: dict[str, Any]) -> Any:
    return ktinject.optimize(model, [*rules] or "auto", devices="cpu", progress=False)


def packed(pattern: str, operator: str = "cpu_linear", **arguments: Any) -> dict[str, Any]:
    return {"name": operator, "match": {"path": pattern}, "replace": {"operator": operator, **arguments}}


@torch.no_grad()
def logits(model: Any) -> Tensor:
    found: Tensor = model(IDS).logits.float()
    return found


def off(found: Tensor, want: Tensor) -> float:
    return ((found - want).norm(dim=-1) / want.norm(dim=-1)).median().item()


def steps(model: Any, like: Tensor | None = None) -> Any:
    """Eight greedy tokens, or those that another model has chosen, and their logits."""
    forced = None if like is None else lambda _, ids: [int(like[0, ids.shape[-1]])]
    return model.generate(
        IDS,
        max_new_tokens=8,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
        prefix_allowed_tokens_fn=forced,
    )


def assert_same(model: Any, original: Any, how: str = "native loop") -> None:
    """Prompts and decode steps are those of the unswapped model."""
    assert off(logits(model), logits(original)) < TOLERANCE
    found = steps(model)
    assert model.ktinject_decoding.last == how, model.ktinject_decoding.reason
    want = steps(original, found.sequences)
    assert off(torch.stack(found.logits, 1), torch.stack(want.logits, 1)) < TOLERANCE


def assert_moved(model: Any, before: Tensor) -> None:
    assert off(logits(model), before) > 2 * TOLERANCE, "it makes a difference"


def scaled(model: Any) -> None:
    for parameter in model.parameters():
        parameter.mul_(0.9 if parameter.dim() > 1 else 1.0)


def from_vector(model: Any) -> None:
    vector_to_parameters(parameters_to_vector(model.parameters()) * 0.9, model.parameters())


def from_state(model: Any) -> None:
    state = {name: 0.9 * tensor for name, tensor in model.state_dict().items()}
    assert not any(model.load_state_dict(state))


def in_state(model: Any) -> None:
    for tensor in model.state_dict().values():
        tensor *= 0.9


def abliterated(model: Any) -> None:
    direction = torch.randn(model.config.hidden_size, generator=torch.Generator().manual_seed(1)).bfloat16()
    direction /= direction.norm()
    for name, parameter in model.named_parameters():
        if name.endswith("o_proj.weight"):
            parameter.data -= torch.outer(direction, direction @ parameter.data)
        elif name.endswith("lm_head.weight"):
            parameter.sub_(torch.outer(parameter @ direction, direction))


def task_vector(model: Any) -> None:
    random = torch.Generator().manual_seed(2)
    for name, parameter in sorted(model.named_parameters()):
        if "proj" in name and "bias" not in name:
            parameter.add_(0.3 * parameter.std() * torch.randn(parameter.shape, generator=random).bfloat16())


def all_at_once(model: Any) -> None:
    torch._foreach_mul_([*model.parameters()], 0.9)


def exchanged(model: Any) -> None:
    for layer in model.model.layers:
        projection = layer.self_attn.o_proj
        projection.weight = nn.Parameter(projection.weight.flip(0).clone())


EDITS = [scaled, from_vector, from_state, in_state, abliterated, task_vector, all_at_once, exchanged]


class TestWeights:
    @pytest.mark.parametrize("family", FAMILIES)
    def test_edits_are_those_of_the_unswapped_model(self, family: str) -> None:
        """One after the other, after a request whose steps were recorded."""
        model, original = both(family)
        names = [name for name, _ in original.named_parameters()]
        assert [name for name, _ in model.named_parameters()] == names
        assert model.state_dict().keys() == original.state_dict().keys()
        assert_same(model, original)
        for edit in EDITS:
            before = logits(original)
            with torch.no_grad():
                edit(model)
                edit(original)
            if edit is not scaled or family != "deepseek_v3":
                assert not torch.equal(logits(original), before), edit.__name__
            assert_same(model, original)

    def test_a_packed_router_is_one_of_them(self) -> None:
        model, original = both("qwen3_moe", packed(r".*\.gate", "cpu_router"), num_experts_per_tok=2)
        before = logits(original)
        with torch.no_grad():
            for one in (model, original):
                one.model.layers[0].mlp.gate.weight.copy_(one.model.layers[0].mlp.gate.weight.flip(0))
        assert_moved(model, before)
        assert off(logits(model), logits(original)) < TOLERANCE

    def test_a_copy_of_a_tied_weight_is_a_weight_of_its_own(self) -> None:
        """Unswapped, both names are one tensor, and a loop meets it once."""
        model, original = both("qwen3_moe", packed("lm_head"), tie_word_embeddings=True)
        assert len([*model.parameters()]) == len([*original.parameters()]) + 1
        assert model.num_parameters() == original.num_parameters()
        with torch.no_grad():
            scaled(model)
            scaled(original)
        assert torch.equal(model.lm_head.weight, original.lm_head.weight)
        assert off(logits(model), logits(original)) < TOLERANCE

    def test_a_whole_state_is_loaded_or_refused_before_anything_is(self) -> None:
        model, original = both("qwen3_moe")
        state = {name: 0.5 * tensor for name, tensor in original.state_dict().items()}
        before = logits(model)
        with pytest.raises(
            OperatorError,
            match=r"layers\.1\.self_attn\.o_proj: cpu_linear: weight: found shape \[40, 63\]; expected",
        ):
            model.load_state_dict(
                {
                    n: t[..., :-1] if n == "model.layers.1.self_attn.o_proj.weight" else t
                    for n, t in state.items()
                }
            )
        assert torch.equal(logits(model), before)
        left = {name: tensor for name, tensor in state.items() if "down_proj" not in name}
        with pytest.raises(RuntimeError, match=r'Missing key.*"model\.layers\.0\.mlp\.experts\.down_proj"'):
            model.load_state_dict(left)
        assert sorted(model.load_state_dict(left, strict=False).missing_keys) == [
            f"model.layers.{layer}.mlp.experts.down_proj" for layer in (0, 1)
        ]
        model.load_state_dict(state)
        original.load_state_dict(state)
        assert off(logits(model), logits(original)) < TOLERANCE
        assert not any(model.load_state_dict(model.state_dict()))

    def test_a_state_is_saved_as_it_is(self, tmp_path: Any) -> None:
        """By safetensors and by torch; nothing is unpacked before."""
        model, original = both("qwen3_moe")
        state = model.state_dict()
        assert isinstance(state["lm_head.weight"], Held)
        torch.save(state, tmp_path / "state.pt")
        save_file(
            {name: tensor.contiguous() for name, tensor in state.items()}, tmp_path / "state.safetensors"
        )
        for found in (torch.load(tmp_path / "state.pt"), load_file(tmp_path / "state.safetensors")):
            assert all(torch.equal(found[name], tensor) for name, tensor in original.state_dict().items())
            assert all(type(tensor) is Tensor for tensor in found.values())
        model.save_pretrained(tmp_path, state_dict=state)
        found = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
        assert all(torch.equal(found[name], tensor) for name, tensor in original.state_dict().items())

    def test_what_cannot_be_written_is_refused(self) -> None:
        model, _ = both("qwen3_moe")
        projection = model.model.layers[0].self_attn.o_proj
        before, says = logits(model), "replace: keep"
        for value in (
            None,
            torch.zeros(3, 4),
            torch.zeros(40, 64, dtype=torch.int8),
            torch.zeros(40, 64, device="meta"),
        ):
            with pytest.raises(OperatorError, match=rf"cpu_linear: weight: found .*{says}"):
                projection.weight = value
        with pytest.raises(OperatorError, match=rf"cpu_linear: bias cannot be set to .*{says}"):
            projection.bias = nn.Parameter(torch.zeros(40))
        with pytest.raises(OperatorError, match=rf"weight_orig cannot become a parameter .*{says}"):
            prune.l1_unstructured(projection, "weight", 0.3)
        with pytest.raises(ValueError, match="does not have a parameter"):
            parametrizations.weight_norm(projection)
        assert projection.bias is None
        assert torch.equal(logits(model), before)

    def test_memory_that_nobody_would_read_is_not_given_to_be_written(self) -> None:
        original = tiny("qwen3_moe").eval()
        weight = optimized(original, packed("lm_head")).lm_head.weight
        array = weight.numpy()
        assert torch.equal(torch.from_numpy(array.copy()), weight)
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0

    def test_training_them_is_not_silent(self, caplog: pytest.LogCaptureFixture) -> None:
        model, _ = both("qwen3_moe", packed("lm_head"))
        model.lm_head.weight.requires_grad_(True)
        assert not model.lm_head.weight.requires_grad
        assert "cpu_linear: requires_grad: weights in operators are not trained" in caplog.text

    @pytest.mark.parametrize("weights", ["int8", "mxfp4"])
    def test_rounded_weights_say_that_they_are_rounded_anew(
        self, weights: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        stand_in._written.clear()
        model, original = both("qwen3_moe", packed(r".*\.o_proj", weights=weights))
        with torch.no_grad():
            for one in (model, original):
                for layer in one.model.layers:
                    layer.self_attn.o_proj.weight.mul_(0.25)
        assert off(logits(model), logits(original)) < 0.2
        says = f"cpu_linear: a weight is written to, and rounded to {weights}"
        assert caplog.text.count(says) == 1
        stand_in._written["cpu_linear", weights] -= 60
        with torch.no_grad():
            model.model.layers[0].self_attn.o_proj.weight.mul_(2)
        assert caplog.text.count(says) == 2

    def test_values_that_are_not_finite_leave_all_experts_as_they_were(self) -> None:
        model, _ = both("qwen3_moe", packed(r".*\.experts", "cpu_experts", weights="int8"))
        before = logits(model)
        bad = model.model.layers[0].mlp.experts.down_proj.clone() * 2
        bad[-1, 0, 0] = float("nan")
        with pytest.raises(OperatorError, match="cpu_experts: down_proj: a value is not finite"):
            model.model.layers[0].mlp.experts.down_proj = bad
        assert torch.equal(logits(model), before)

    def test_copies_of_parts_are_the_unswapped_modules(self) -> None:
        model, original = both("qwen3_moe")
        for path in ("lm_head", "model.norm", "model.layers.0", "model.layers.0.mlp.gate"):
            own, found = original.get_submodule(path), copy.deepcopy(model.get_submodule(path))
            assert type(found) is type(own)
            theirs, ours = own.state_dict(), found.state_dict()
            assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items()) and len(
                ours
            ) == len(theirs)
        with pytest.raises(OperatorError, match="a swapped model cannot be copied"):
            copy.deepcopy(model)


@pytest.mark.parametrize(
    "order", [("double", "float"), ("half",), ("float",), ("half", "bfloat16"), ("double",)]
)
def test_dtypes(order: tuple[str, ...]) -> None:
    model, original = both("qwen3_moe")
    steps(model)
    for one in (model, original):
        for name in order:
            getattr(one, name)()
        one.set_experts_implementation("eager")  # transformers' own products of groups are not for all dtypes
    assert {parameter.dtype for parameter in model.parameters()} == {original.dtype} == {model.dtype}
    assert model.model.layers[0].mlp.gate.weight.dtype == original.dtype
    assert_same(model, original, "eager loop" if order == ("double",) else "native loop")


def norm_epsilon(model: Any) -> None:
    model.model.norm.variance_epsilon = 0.5


def scaling(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.scaling = 0.9


def one_expert(model: Any) -> None:
    block = model.model.layers[-1].mlp
    for holder in (block, getattr(block, "gate", None), getattr(block, "router", None)):
        if hasattr(holder, "top_k"):
            holder.top_k = 1


def pruned(model: Any) -> None:
    layers = model.model.layers
    model.model.layers = nn.ModuleList([layers[0], layers[2]])
    model.config.num_hidden_layers = 2
    if getattr(model.config, "layer_types", None):
        model.config.layer_types = [model.config.layer_types[0], model.config.layer_types[2]]
    for index, layer in enumerate(model.model.layers):
        layer.self_attn.layer_idx = index


class TestAttributes:
    @pytest.mark.parametrize("family", FAMILIES)
    @pytest.mark.parametrize("after", [True, pytest.param(False, marks=pytest.mark.nightly)])
    def test_what_is_set_is_followed(self, family: str, after: bool) -> None:
        model, original = both(family, num_hidden_layers=3)
        if after:
            steps(model)
        for change in (norm_epsilon, scaling, pruned, one_expert):
            before = logits(original)
            for one in (model, original):
                change(one)
            if change is not scaling:
                assert not torch.equal(logits(original), before), change.__name__
            assert_same(model, original)

    def test_what_experts_were_made_with_is_read_and_refused(self) -> None:
        model, original = both("gpt_oss")
        experts, own = model.model.layers[0].mlp.experts, original.model.layers[0].mlp.experts
        before = logits(model)
        for name in ("limit", "alpha", "num_experts", "hidden_size"):
            value = getattr(own, name)
            assert getattr(experts, name) == value
            setattr(experts, name, value)
            with pytest.raises(
                OperatorError, match=rf"hybrid_experts: {name} cannot be set to .*replace: keep"
            ):
                setattr(experts, name, value / 2)
            assert getattr(experts, name) == value
        assert torch.equal(experts.down_proj, own.down_proj) and torch.equal(
            experts.gate_up_proj_bias, own.gate_up_proj_bias
        )
        with pytest.raises(AttributeError, match="no attribute 'no_such_name'"):
            experts.no_such_name  # noqa: B018
        assert torch.equal(logits(model), before)

    def test_an_activation_is_read_and_refused(self) -> None:
        model, original = both("qwen3_moe")
        experts = model.model.layers[0].mlp.experts
        assert type(experts.act_fn) is type(original.model.layers[0].mlp.experts.act_fn)
        for value in (torch.relu, nn.ReLU()):
            with pytest.raises(
                OperatorError, match=r"hybrid_experts: act_fn cannot be set to .*replace: keep"
            ):
                experts.act_fn = value

    def test_a_value_that_no_probe_knows_is_refused(self) -> None:
        model, _ = both("deepseek_v3")
        attention = model.model.layers[0].self_attn
        for name, value in (("scaling", "much"), ("is_causal", False), ("num_heads", 3)):
            before = getattr(attention, name)
            with pytest.raises(
                OperatorError, match=rf"absorbed_mla: {name} cannot be set to .*replace: keep"
            ):
                setattr(attention, name, value)
            assert getattr(attention, name) == before
        attention.of_the_users_own = 3
        assert attention.of_the_users_own == 3
