"""The plan: what it says, what it refuses and with which words. Nothing here loads a weight."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Self

import models
import pytest
import torch
from double import EXPERTS, HeldExperts, on_meta, saved
from plan_cases import KEEP_ROUTER, planned, refusal, rule
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

import ktinject
from ktinject.errors import OperatorError, PlanError, RuleError
from ktinject.hf import compat
from ktinject.operators import REGISTRY, Placement, register_operator
from ktinject.tools import random_models

# What it says


def test_bytes_are_exact(model: PreTrainedModel, folder: Path) -> None:
    plan = planned(model, [KEEP_ROUTER, *rule()], folder)
    experts = sum(p.numel() for p in model.model.layers[1].mlp.experts.parameters()) * 4
    everything = sum(t.numel() * t.itemsize for t in [*model.parameters(), *model.buffers()])
    (replacement,) = plan.replacements
    assert replacement.path == "model.layers.1.mlp.experts" and replacement.bytes == {"cpu": experts}
    assert plan.rest_bytes == {"cpu": everything - experts}
    assert plan.bytes == plan.to_load == {"cpu": everything}
    assert plan.matched == {"router": ("model.layers.1.mlp.gate",), "experts": (replacement.path,)}
    assert not plan.problems and plan.checkpoint == str(folder)


def test_bytes_count_what_stays_fp32_and_tied_weights_once() -> None:
    def bf16(name: str, **changes: Any) -> PreTrainedModel:
        with torch.device("meta"):
            return type(models.tiny(name))._from_config(models.config(name, **changes), dtype=torch.bfloat16)

    plain = bf16("deepseek_v3")
    gate = plain.model.layers[1].mlp.gate
    bias = (
        gate.e_score_correction_bias
    )  # fp32 once it is loaded; the weight is bf16 then, if a checkpoint has it so
    widened = bias.numel() * (4 - bias.itemsize) - gate.weight.numel() * (gate.weight.itemsize - 2)
    plan = planned(plain)
    loose = sum(t.nbytes for t in [*plain.parameters(), *plain.buffers()]) - experts_bytes(plain)
    assert plan.rest_bytes["cpu"] == loose + widened
    tied, untied = bf16("qwen3_moe", tie_word_embeddings=True), bf16("qwen3_moe")
    saving = planned(untied).rest_bytes["cpu"] - planned(tied).rest_bytes["cpu"]
    assert saving == untied.lm_head.weight.nbytes


def experts_bytes(model: PreTrainedModel) -> int:
    return sum(p.nbytes for name, p in model.named_parameters() if ".mlp.experts." in name)


def test_the_table(model: PreTrainedModel, folder: Path) -> None:
    rest = {"name": "nothing", "match": {"class": "Conv2d"}, "replace": "keep", "optional": True}
    text = str(planned(model, [KEEP_ROUTER, rest, *rule()], folder, budget={"cpu": "10KiB"}))
    rows = [re.split(r"  +", line.strip()) for line in text.splitlines()]
    assert rows[0] == ["rule", "modules", "operator", "kernel", "weights", "device", "bytes", "from"]
    assert ["router", "1 modules", "keep", "<python>:rules[0]"] in rows
    assert ["nothing", "none (optional)", "keep", "<python>:rules[1]"] in rows
    ran = ["held_experts", "torch", "fp32", "cpu", "67.5 KiB"]
    assert ["experts", "1 × DeepseekV3Experts", *ran, "<python>:rules[2]"] in rows
    assert ["(everything else)", "transformers", "cpu", "138.6 KiB"] in rows
    assert "cpu: 206.1 KiB to load, 10.0 KiB may be used" in text
    assert "does not fit: cpu needs 206.1 KiB, but the budget is 10.0 KiB." in text


def test_remarks_of_operators_are_shown_once(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = {"kernel": "slow", "weights": "fp32", "instead of": "fast, which this CPU lacks"}
    monkeypatch.setattr(HeldExperts, "describe", lambda self: runs)
    plan = planned(on_meta(models.tiny("qwen3_moe")))
    assert len(plan.replacements) == 2
    assert str(plan).count("experts: instead of: fast, which this CPU lacks") == 1


def test_to_dict_is_json_and_says_everything(model: PreTrainedModel, folder: Path) -> None:
    told = planned(model, rule(), folder).to_dict()
    assert json.loads(json.dumps(told)) == told
    (module,) = told["modules"]
    assert module["arguments"] == {} and module["runs"] == {"kernel": "torch", "weights": "fp32"}
    assert module["operator"] == "held_experts" and module["device"] == "cpu"
    assert told["rest"]["device_map"] == {"": "cpu"} and told["model_type"] == "deepseek_v3"


def test_html_escapes(model: PreTrainedModel) -> None:
    plan = planned(model)
    plan.notes.append("<script>")
    assert "<table>" in plan._repr_html_() and "&lt;script&gt;" in plan._repr_html_()


def test_planning_changes_nothing(model: PreTrainedModel, folder: Path) -> None:
    before = [(id(m), {k: id(v) for k, v in vars(m).items()}) for m in model.modules()]
    threads = torch.get_num_threads()
    planned(model, rule(), folder)
    assert [(id(m), {k: id(v) for k, v in vars(m).items()}) for m in model.modules()] == before
    assert torch.get_num_threads() == threads


# Which model


def test_rules_for_another_model_are_refused(model: PreTrainedModel) -> None:
    source = {"version": 1, "model_types": ["mixtral", "olmoe"], "rules": rule()}
    assert "these rules are for mixtral, olmoe; the model is a deepseek_v3. Take other" in refusal(
        PlanError, model, source
    )


def test_something_else_than_a_transformers_model_is_refused() -> None:
    assert "found a Linear; models of transformers" in refusal(PlanError, nn.Linear(1, 1))


def test_a_model_half_on_meta_is_refused() -> None:
    model = models.tiny("qwen3_moe")
    model.lm_head.to("meta")
    assert "partly on the meta device" in refusal(PlanError, model)


@pytest.mark.skipif("deepseek_v4" not in models.AVAILABLE, reason="transformers has no DeepSeek-V4")
def test_a_model_whose_forward_fails_with_this_transformers_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with torch.device("meta"):
        exact = models.tiny("deepseek_v4")
        narrow = type(exact)._from_config(models.config("deepseek_v4"), dtype=torch.bfloat16)
    monkeypatch.setattr(compat, "_VERSION", (5, 19))
    assert "a model of type deepseek_v4 in bfloat16: its norms give fp32" in refusal(PlanError, narrow)
    assert "Install transformers 5.20 or later." in refusal(PlanError, narrow)
    assert planned(exact).replacements
    monkeypatch.setattr(compat, "_VERSION", (5, 20))
    assert planned(narrow).replacements


def test_an_unknown_operator_is_refused(model: PreTrainedModel) -> None:
    assert "Did you mean 'held_experts'?" in refusal(RuleError, model, rule("held_expert"))


def test_a_wrong_argument_is_refused(model: PreTrainedModel) -> None:
    assert "has no argument 'weight'" in refusal(RuleError, model, rule(weight="int4"))


def test_a_rule_that_matches_nothing_is_refused(model: PreTrainedModel) -> None:
    source = [EXPERTS | {"match": {"class": "DeepseekV3Expert"}}]
    assert "no module is a DeepseekV3Expert (closest: DeepseekV3Experts" in refusal(RuleError, model, source)


def test_a_dense_model_is_told_that_it_has_no_routed_experts(tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4
    )
    dense = LlamaForCausalLM(config)
    saved(dense, tmp_path)
    said = "LlamaForCausalLM (model type 'llama') has no routed experts"
    for call in (
        lambda: ktinject.plan(dense, "auto"),
        lambda: ktinject.optimize(dense, "auto"),
        lambda: ktinject.load(tmp_path, progress=False),
        lambda: random_models.build(config),
    ):
        with pytest.raises(
            PlanError, match=r"has no routed experts: it is a dense model, .* as it is, or write"
        ):
            call()
    assert said in refusal(RuleError, dense, "moe-auto")
    linears = [{"name": "linears", "match": {"class": "Linear"}, "replace": {"operator": "cpu_linear"}}]
    assert planned(dense, linears).notes == [f"{said}: what is swapped are its other modules alone"]


def test_a_model_whose_every_layer_is_dense_is_dense_too() -> None:
    model = on_meta(models.tiny("qwen3_moe", mlp_only_layers=[0, 1]))
    with pytest.raises(PlanError, match=r"Qwen3MoeForCausalLM .* has no routed experts"):
        ktinject.plan(model, "auto")


def test_layers_of_rules_are_decoder_layers() -> None:
    model = on_meta(models.tiny("qwen3_moe"))
    source = [EXPERTS | {"match": {**EXPERTS["match"], "layers": "1"}}]
    assert [replacement.path for replacement in planned(model, source).replacements] == [
        "model.layers.1.mlp.experts"
    ]


def test_modules_an_operator_cannot_take_are_all_named_with_the_reason() -> None:
    model = on_meta(models.tiny("qwen3_moe"))
    said = refusal(PlanError, model, rule(refuse="it is too beautiful"))
    assert said == (
        "<python>:rules[0]: rule 'experts': held_experts cannot replace a Qwen3MoeExperts: it is too beautiful; "
        "matched model.layers.0.mlp.experts, model.layers.1.mlp.experts. Narrow the match, or replace: keep."
    )


def test_cpu_experts_says_why_it_cannot_take_a_module() -> None:
    model = on_meta(models.tiny("qwen3_moe"))
    source = [EXPERTS | {"match": {"path": r".*\.q_proj"}, "replace": {"operator": "cpu_experts"}}]
    assert "cpu_experts cannot replace a Linear: its forward takes (input), not" in refusal(
        PlanError, model, source
    )


@pytest.mark.parametrize("operator", ["cpu_experts", "hybrid_experts", "cpu_linear"])
def test_a_kernel_that_is_none_is_refused_with_those_there_are(operator: str, model: PreTrainedModel) -> None:
    said = refusal(RuleError, model, rule(operator, kernel="amx_bf16", weights="int8"))
    assert said.startswith(
        "<python>:rules[0].replace.kernel: rule 'experts': kernel is 'amx_bf16'; for weights int8 it is auto, "
    )
    assert ", reference_int8" in said and said.endswith(". Write one of these.") and "match" not in said


def test_a_number_of_nodes_that_is_none_is_refused_at_its_line(
    tmp_path: Path, model: PreTrainedModel
) -> None:
    file = tmp_path / "rules.yaml"
    file.write_text(
        "version: 1\nrules:\n- name: experts\n  match: {class: DeepseekV3Experts}\n  replace:\n"
        "    operator: cpu_experts\n    weights: int8\n    numa: 0\n"
    )
    said = refusal(RuleError, model, file)
    assert f"{file}:8" in said
    assert said.endswith("numa is 0; it is auto or a number of nodes, 1 or more. Write one of these.")


@pytest.mark.parametrize(
    "arguments, about", [({"numa": 4000}, "numa"), ({"weights": "int8", "symmetric": False}, "symmetric")]
)
def test_an_argument_that_does_not_fit_is_to_be_changed(
    arguments: dict[str, Any], about: str, model: PreTrainedModel
) -> None:
    said = refusal(PlanError, model, rule("cpu_experts", **arguments))
    assert f"cpu_experts cannot replace a DeepseekV3Experts: {about}: found " in said
    assert said.endswith(f"Change {about}, narrow the match, or replace: keep.")


# Operators that break the contract


def broken(monkeypatch: pytest.MonkeyPatch, **methods: Any) -> None:
    for name, method in methods.items():
        monkeypatch.setattr(HeldExperts, name, method)


def test_an_operator_that_fails_to_build_is_located(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(module: nn.Module, config: Any) -> None:
        raise OperatorError("no tiles")

    broken(monkeypatch, build=build)
    assert refusal(OperatorError, model) == (
        "<python>:rules[0]: rule 'experts': model.layers.1.mlp.experts: held_experts: no tiles"
    )


@pytest.mark.parametrize(
    "method",
    [
        "plan_placement",
        "resolve",
        "supports",
        "build",
        "describe",
        "footprint",
        "parameter_shapes",
        "workspace",
    ],
)
def test_an_operator_whose_code_fails_is_named(
    method: str, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise KeyError("tiles")

    broken(monkeypatch, **{method: fail})
    assert refusal(OperatorError, model) == (
        "<python>:rules[0]: rule 'experts': model.layers.1.mlp.experts: held_experts: KeyError: 'tiles'"
    )


def test_what_is_placed_reaches_the_operator_and_the_plan(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    placement, placed = Placement(), []
    path = "model.layers.1.mlp.experts"
    broken(monkeypatch, plan_placement=lambda decoder, modules, spare: dict.fromkeys(modules, placement))
    assert refusal(OperatorError, model) == (
        f"<python>:rules[0]: rule 'experts': {path}: held_experts: plan_placement settled Placement, and the class "
        "does not define place. Correct the operator."
    )
    broken(monkeypatch, place=lambda self, given: placed.append(given))
    (replacement,) = planned(model).replacements
    assert placed == [placement] and replacement.placement is placement

    broken(monkeypatch, plan_placement=lambda decoder, modules, spare: {path: "there is no room"})
    assert f"cannot replace a DeepseekV3Experts: there is no room; matched {path}. Narrow" in refusal(
        PlanError, model
    )


def test_an_operator_that_describes_nothing_is_refused(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken(monkeypatch, describe=lambda self: None)
    assert "held_experts: its describe() gave None, which is no dict. Correct" in refusal(
        OperatorError, model
    )


def test_an_operator_with_a_parameter_of_its_own_is_refused(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(module: nn.Module, config: Any) -> HeldExperts:
        operator = HeldExperts(module, config)
        operator.register_buffer("packed", torch.zeros(1), persistent=False)
        return operator

    broken(monkeypatch, build=build)
    assert "holds a parameter or buffer of its own, 'packed'" in refusal(OperatorError, model)


@pytest.mark.parametrize(
    "shapes, found",
    [
        (
            {"gate_up_proj": (6, 48, 40), "down_proj": (6, 40, 24), "bias": (1,)},
            "its parameter_shapes() has 'bias' of [1]; the module has nothing",
        ),
        ({"gate_up_proj": (6, 48, 40), "down_proj": (6, 24, 40)}, "the module has [6, 40, 24]"),
        ({"gate_up_proj": (6, 48, 40)}, "neither loads nor keeps down_proj"),
    ],
)
def test_an_operator_takes_all_the_module_has_and_nothing_else(
    shapes: dict[str, Any], found: str, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken(monkeypatch, parameter_shapes=lambda self: shapes)
    assert found in refusal(OperatorError, model)


def test_an_operator_stays_on_the_devices_of_the_plan(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken(monkeypatch, footprint=lambda self: {"cuda:0": 1})
    assert "its footprint names cuda:0, which the plan may not use" in refusal(OperatorError, model)


def test_registering_refuses_what_breaks_the_contract() -> None:
    class NoLoad(HeldExperts):
        load = property()  # type: ignore[assignment]

    class NoConfig(HeldExperts):
        Config = dict

    with pytest.raises(OperatorError, match=r"'keep' is already ktinject.operators.keep.Keep"):
        register_operator("keep")(NoLoad)
    with pytest.raises(OperatorError, match="lower-case letters"):
        register_operator("Fast-Experts")(NoLoad)
    with pytest.raises(OperatorError, match=r"NoConfig.Config is not a dataclass"):
        register_operator("no_config")(NoConfig)
    with pytest.raises(OperatorError, match=r"is not a subclass of ktinject\.operators\.Operator"):
        register_operator("linear")(nn.Linear)  # type: ignore[type-var]
    with pytest.raises(OperatorError, match="Operator does not define build, supports"):
        register_operator("abstract")(HeldExperts.__mro__[1])
    assert not {"no_config", "linear", "abstract"} & REGISTRY.keys()


def test_an_operator_may_have_methods_of_its_own_whatever_they_are_called() -> None:
    @register_operator("own_names")
    class OwnNames(HeldExperts):
        takes = ("gptq",)

        def wants(self) -> dict[str, tuple[int, ...]]:
            return {}

        def shares(self) -> int:
            return 2

    try:
        assert REGISTRY["own_names"] is OwnNames and OwnNames.native_formats == HeldExperts.native_formats
    finally:
        del REGISTRY["own_names"]


def test_registering_without_a_name_is_refused() -> None:
    with pytest.raises(
        OperatorError, match=r'found Bare in place of a name.*Write @register_operator\("my_operator"\)'
    ):

        @register_operator  # type: ignore[arg-type]
        class Bare(HeldExperts):
            pass


# Tied weights and nested operators


@register_operator("held_linear")
class HeldLinear(HeldExperts):
    """Stands for operators that take a Linear: whole tensors, no experts."""

    per_expert = False

    def load(self, name: str, tensor: torch.Tensor, expert: int | None, part: int | None) -> None:
        assert expert is None and part is None
        self.held[name].copy_(tensor)


@register_operator("held_block")
class HeldBlock(HeldExperts):
    """Stands for operators that take a block, keep its router and experts, and compute the rest."""

    keeps = ("gate", "experts")

    @classmethod
    def build(cls, module: nn.Module, config: Any) -> Self:
        operator = cls(nn.Module(), config)
        for name, child in module.named_children():
            operator.add_module(name, child)
        return operator

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        _, weights, index = self.gate(x)
        flat = x.reshape(-1, x.shape[-1])
        return self.experts(flat, index, weights).reshape(x.shape)


LINEAR = {"name": "head", "match": {"path": "lm_head"}, "replace": {"operator": "held_linear"}}
BLOCK = {"name": "block", "match": {"path": r".*\.mlp"}, "replace": {"operator": "held_block"}}


def test_the_source_of_a_tie_cannot_be_replaced_alone() -> None:
    model = on_meta(models.tiny("qwen3_moe", tie_word_embeddings=True))
    source = [LINEAR | {"name": "words", "match": {"path": r".*\.embed_tokens"}}]
    said = refusal(PlanError, model, source)
    assert "lm_head.weight is tied to model.embed_tokens.weight, which a rule replaces" in said
    assert len(planned(model, [LINEAR]).replacements) == 1
    assert len(planned(model, [LINEAR, *source]).replacements) == 2


def test_an_operator_may_keep_children_which_others_replace() -> None:
    model = on_meta(models.tiny("qwen3_moe"))
    plan = planned(model, [BLOCK, EXPERTS])
    assert [replacement.path.partition("mlp")[2] for replacement in plan.replacements] == ["", ".experts"] * 2
    kept = planned(model, [BLOCK])
    assert kept.bytes["cpu"] == planned(model, [KEEP_ROUTER]).bytes["cpu"]


def test_replacing_what_a_replaced_block_drops_is_refused() -> None:
    model = on_meta(models.tiny("deepseek_v3"))
    said = refusal(
        RuleError, model, [EXPERTS | {"match": {"path": r".*\.layers\.1"}}, EXPERTS | {"name": "b"}]
    )
    assert "'model.layers.1.mlp.experts' goes away with 'model.layers.1'" in said
