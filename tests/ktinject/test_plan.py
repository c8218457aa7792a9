"""The plan: what it says, what it refuses and with which words. Nothing here loads a weight."""

from __future__ import annotations

import json
import math
import re
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any, Self

import models
import pytest
import torch
from double import EXPERTS, HeldExperts, machine, on_meta, saved
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel

from ktinject import rules
from ktinject.errors import CheckpointError, KTInjectError, OperatorError, PlanError, RuleError
from ktinject.operators import REGISTRY, register_operator
from ktinject.placement import Devices, device_of, parse_bytes, show_bytes, spread
from ktinject.plan import Plan, make
from ktinject.weights.checkpoint import Checkpoint
from ktinject.weights.match import listed

torch.set_num_threads(1)

KEEP_ROUTER = {"name": "router", "match": {"path": r".*\.mlp\.gate"}, "replace": "keep"}


def rule(operator: str = "held_experts", **arguments: Any) -> list[dict[str, Any]]:
    return [EXPERTS | {"replace": {"operator": operator, **arguments}}]


def planned(model: PreTrainedModel, source: Any = None, folder: Path | None = None, **kwargs: Any) -> Plan:
    ruleset = rules.read(source or rule())
    has = kwargs.pop("machine", None) or machine()
    if folder is None:
        return make(model, ruleset, None, has, **kwargs)
    with Checkpoint.open(folder) as checkpoint:
        return make(model, ruleset, checkpoint, has, **kwargs)


def refusal(kind: type[KTInjectError], *args: Any, **kwargs: Any) -> str:
    with pytest.raises(kind) as caught:
        planned(*args, **kwargs)
    assert type(caught.value) is kind
    return str(caught.value)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return on_meta(models.tiny("deepseek_v3"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(models.tiny("deepseek_v3"), tmp_path_factory.mktemp("plan") / "model")


def changed(folder: Path, to: Path, change: Any) -> Path:
    """A copy of a single-file checkpoint after `change(tensors)`."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    to.mkdir(exist_ok=True)
    save_file(tensors, to / "model.safetensors")
    (to / "config.json").write_text((folder / "config.json").read_text())
    return to


# What it says


def test_bytes_are_exact(model: PreTrainedModel, folder: Path) -> None:
    plan = planned(model, [KEEP_ROUTER, *rule()], folder)
    experts = sum(p.numel() for p in model.model.layers[1].mlp.experts.parameters()) * 4
    everything = sum(t.numel() * t.itemsize for t in [*model.parameters(), *model.buffers()])
    (entry,) = plan.entries
    assert entry.path == "model.layers.1.mlp.experts" and entry.bytes == {"cpu": experts}
    assert plan.rest_bytes == {"cpu": everything - experts}
    assert plan.bytes == plan.to_load == {"cpu": everything}
    assert plan.matched == {"router": ("model.layers.1.mlp.gate",), "experts": (entry.path,)}
    assert not plan.problems and plan.checkpoint == str(folder)


def test_bytes_count_what_stays_fp32_and_tied_weights_once() -> None:
    def bf16(name: str, **changes: Any) -> PreTrainedModel:
        with torch.device("meta"):
            return type(models.tiny(name))._from_config(models.config(name, **changes), dtype=torch.bfloat16)

    plain = bf16("deepseek_v3")
    bias = plain.model.layers[1].mlp.gate.e_score_correction_bias
    assert bias.dtype == torch.bfloat16, "from_config does not keep it in fp32; the loader does"
    plan = planned(plain)
    loose = sum(t.nbytes for t in [*plain.parameters(), *plain.buffers()]) - experts_bytes(plain)
    assert plan.rest_bytes["cpu"] == loose + bias.numel() * 2
    tied, untied = bf16("qwen3_moe", tie_word_embeddings=True), bf16("qwen3_moe")
    saving = planned(untied).rest_bytes["cpu"] - planned(tied).rest_bytes["cpu"]
    assert saving == untied.lm_head.weight.nbytes


def experts_bytes(model: PreTrainedModel) -> int:
    return sum(p.nbytes for name, p in model.named_parameters() if ".mlp.experts." in name)


def test_the_table(model: PreTrainedModel, folder: Path) -> None:
    rest = {"name": "nothing", "match": {"class": "Conv2d"}, "replace": "keep", "optional": True}
    text = str(planned(model, [KEEP_ROUTER, rest, *rule()], folder, budget={"cpu": "10KiB"}))
    rows = [re.split(r"  +", line.strip()) for line in text.splitlines()]
    assert rows[0] == ["rule", "modules", "operator", "kernel", "weights", "device", "bytes"]
    assert ["router", "1 modules", "keep"] in rows
    assert ["nothing", "none (optional)", "keep"] in rows
    assert ["experts", "1 × DeepseekV3Experts", "held_experts", "torch", "fp32", "cpu", "67.5 KiB"] in rows
    assert ["(everything else)", "transformers", "cpu", "138.6 KiB"] in rows
    assert "cpu: 206.1 KiB to load, 10.0 KiB may be used" in text
    assert "does not fit: cpu needs 206.1 KiB, but the budget is 10.0 KiB. Use smaller weights" in text


def test_remarks_of_operators_are_shown_once(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = {"kernel": "slow", "weights": "fp32", "instead of": "fast, which this CPU lacks"}
    monkeypatch.setattr(HeldExperts, "describe", lambda self: runs)
    plan = planned(on_meta(models.tiny("qwen3_moe")))
    assert len(plan.entries) == 2
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


def test_an_unknown_operator_is_refused(model: PreTrainedModel) -> None:
    assert "Did you mean 'held_experts'?" in refusal(RuleError, model, rule("held_expert"))


def test_a_wrong_argument_is_refused(model: PreTrainedModel) -> None:
    assert "has no argument 'weight'" in refusal(RuleError, model, rule(weight="int4"))


def test_a_rule_that_matches_nothing_is_refused(model: PreTrainedModel) -> None:
    source = [EXPERTS | {"match": {"class": "DeepseekV3Expert"}}]
    assert "no module is a DeepseekV3Expert (closest: DeepseekV3Experts" in refusal(RuleError, model, source)


def test_layers_of_rules_are_decoder_layers() -> None:
    model = on_meta(models.tiny("qwen3_moe"))
    source = [EXPERTS | {"match": {**EXPERTS["match"], "layers": "1"}}]
    assert [entry.path for entry in planned(model, source).entries] == ["model.layers.1.mlp.experts"]


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


def test_a_forced_kernel_that_is_none_is_refused(model: PreTrainedModel) -> None:
    said = refusal(PlanError, model, rule("cpu_experts", kernel="sse2_bf16"))
    assert said.startswith("<python>:rules[0]: rule 'experts': cpu_experts") and "sse2_bf16" in said


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
        "<python>:rules[0]: rule 'experts': model.layers.1.mlp.experts: no tiles"
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
    "wants, found",
    [
        ({"gate_up_proj": (6, 48, 40), "down_proj": (6, 40, 24), "bias": (1,)}, "wants 'bias' of shape"),
        ({"gate_up_proj": (6, 48, 40), "down_proj": (6, 24, 40)}, "the module has [6, 40, 24]"),
        ({"gate_up_proj": (6, 48, 40)}, "neither loads nor keeps down_proj"),
    ],
)
def test_an_operator_takes_all_the_module_has_and_nothing_else(
    wants: dict[str, Any], found: str, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken(monkeypatch, wants=lambda self: wants)
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
    with pytest.raises(
        OperatorError, match="Operator does not define build, describe, footprint, load, wants"
    ):
        register_operator("abstract")(HeldExperts.__mro__[1])
    assert not {"no_config", "linear", "abstract"} & REGISTRY.keys()


# Devices and budgets


def test_without_a_gpu_everything_is_on_the_cpu(model: PreTrainedModel) -> None:
    assert planned(model).device_map == {"": "cpu"}


def test_the_rest_goes_to_the_first_gpu_if_it_fits(model: PreTrainedModel) -> None:
    plan = planned(model, machine=machine(gpus=2))
    assert plan.device_map == {"": "cuda:0"} and plan.entries[0].device == "cpu"
    assert plan.bytes == {"cpu": plan.entries[0].bytes["cpu"], "cuda:0": plan.rest_bytes["cuda:0"]}
    assert plan.notes == ["not used: cuda:1; name several GPUs to spread the layers over them"]
    plan = planned(model, machine=machine(gpus=1, gpu_memory=2**10))
    assert plan.device_map == {"": "cpu"} and not plan.problems
    assert "everything else stands on cpu: it does not fit on cuda:0" in plan.notes


def test_named_devices_are_obeyed(model: PreTrainedModel) -> None:
    two = machine(gpus=2)
    assert planned(model, machine=two, devices="cpu").device_map == {"": "cpu"}
    assert planned(model, machine=two, devices=["cuda:1"]).device_map == {"": "cuda:1"}
    assert planned(model, machine=two, devices=torch.device("cuda:1")).device_map == {"": "cuda:1"}
    assert planned(model, machine=two, devices=["cpu", "cuda"]).device_map == {"": "cuda:0"}
    small = machine(gpus=1, gpu_memory=2**10)
    assert planned(model, machine=small, devices="cuda:0").problems, "no other device was named"
    assert planned(model, machine=small, devices=["cuda:0", "cpu"]).device_map == {"": "cpu"}


def test_layers_are_spread_over_gpus_by_their_limits(model: PreTrainedModel) -> None:
    two = machine(gpus=2)
    plan = planned(model, machine=two, devices=["cuda:0", "cuda:1"])
    assert plan.device_map == {"": "cuda:0", "model.layers.1": "cuda:1"}
    assert set(plan.rest_bytes) == {"cuda:0", "cuda:1"} and not plan.problems
    assert sum(plan.rest_bytes.values()) == planned(model).rest_bytes["cpu"]
    first = plan.rest_bytes["cuda:0"]
    plan = planned(model, machine=two, devices=["cuda:0", "cuda:1"], budget={"cuda:1": 0})
    assert plan.device_map == {"": "cuda:0"} and plan.rest_bytes["cuda:0"] > first
    cache = 2 * 256 * plan.running["cuda:0"].token_bytes  # of the shortest request
    small = machine(gpus=2, gpu_memory=first + cache + 1000)
    plan = planned(model, machine=small)
    assert set(plan.device_map.values()) == {"cuda:0", "cuda:1"} and not plan.problems
    assert plan.notes == ["decoder layers stand on cuda:0, cuda:1: they do not fit on cuda:0"]
    tiny = machine(gpus=2, gpu_memory=2**10)
    assert planned(model, machine=tiny).device_map == {"": "cpu"}


def test_shares_of_layers() -> None:
    layers = {f"l.{n}": 10 for n in range(10)}
    counts = lambda **limits: list(spread(0, layers, [*limits], limits).values()).count  # noqa: E731
    assert counts(a=1, b=1)("b") == 5
    assert counts(a=3, b=1)("b") == 2 or counts(a=3, b=1)("b") == 3
    assert counts(a=1, b=1, c=1)("c") == 3
    heavy = spread(100, layers, ["a", "b"], {"a": 1, "b": 1})
    assert heavy == {"": "a", **dict.fromkeys(layers, "b")}, "what is outside has filled the first"
    assert device_of({"": "a", "l.1": "b"}, "l.11.x") == "a"
    assert device_of({"": "a", "l.1": "b"}, "l.1.x") == "b"


@pytest.mark.parametrize(
    "devices, found",
    [
        ("cuda:2", "devices: there is no device 'cuda:2'; found are cpu, cuda:0, cuda:1. Name one"),
        ([], "found an empty list"),
        (["mps"], "no device 'mps'"),
        (7, "no device '7'"),
    ],
)
def test_devices_that_cannot_be_used_are_refused(devices: Any, found: str, model: PreTrainedModel) -> None:
    assert found in refusal(PlanError, model, machine=machine(gpus=2), devices=devices)


def test_no_gpu_says_why(model: PreTrainedModel) -> None:
    assert "no device 'cuda' (none here); found are cpu." in refusal(PlanError, model, devices="cuda")


def test_the_device_of_a_rule(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    one = machine(gpus=1)
    said = refusal(PlanError, model, rule(device="cuda:0"), machine=one)
    assert "rule 'experts': held_experts cannot compute on 'cuda:0', only on cpu. Use auto." in said
    said = refusal(PlanError, model, rule(device="cuda:3"), machine=one)
    assert "device 'cuda:3' is not there; usable are cpu, cuda:0" in said
    said = refusal(PlanError, model, rule(device="cuda:0"), machine=one, devices="cpu")
    assert "device 'cuda:0' is not among the devices of this call; usable are cpu." in said

    monkeypatch.setattr(HeldExperts, "device_types", ("cuda", "cpu"))
    assert planned(model, machine=one).entries[0].device == "cuda:0"
    assert planned(model, machine=one, devices="cpu").entries[0].device == "cpu"
    assert planned(model, rule(device="cpu"), machine=one).entries[0].device == "cpu"
    monkeypatch.setattr(HeldExperts, "device_types", ("cuda",))
    said = refusal(PlanError, model)
    assert "held_experts computes on cuda only; the plan may use cpu. Use another operator" in said


def test_an_operators_device_is_the_rests_only_if_it_can(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HeldExperts, "device_types", ("cuda",))
    plan = planned(model, machine=machine(gpus=1), devices=["cuda:0"])
    assert plan.entries[0].device == "cuda:0" and list(plan.bytes) == ["cuda:0"]


def test_what_does_not_fit_is_a_problem_of_the_plan(model: PreTrainedModel) -> None:
    plan = planned(model, machine=machine(memory=100 * 2**10))
    assert plan.problems == [
        "cpu needs 206.1 KiB, but 100.0 KiB are free. Use smaller weights (int8, int4) or a machine with more memory."
    ]
    plan = planned(model, machine=machine(gpus=1), budget={"cuda:0": "100KiB", "cpu": 90 * 2**10})
    assert plan.device_map == {"": "cuda:0"}, "the placement that lacks least is shown"
    assert "the budget is 100.0 KiB" in plan.problems[0] and "or a larger budget" in plan.problems[0]


@pytest.mark.parametrize(
    "budget, found",
    [
        ({"cuda:0": "1GiB"}, "budget: there is no device 'cuda:0'"),
        ({"cpu": "1 gigabyte"}, "budget['cpu']: found '1 gigabyte'; a size is"),
        ({"cpu": "-1GiB"}, "found '-1GiB'"),
        ({"cpu": -1}, "found -1"),
        ({"cpu": True}, "found True"),
        ({"cpu": 1.5}, "found 1.5"),
        ({"cpu": math.inf}, "found inf"),
        ({"cpu": "1e3GiB"}, "found '1e3GiB'"),
        ({"cpu": None}, "found None"),
    ],
)
def test_budgets_are_read_strictly(budget: Any, found: str, model: PreTrainedModel) -> None:
    assert found in refusal(PlanError, model, budget=budget)


@pytest.mark.parametrize(
    "size, count",
    [(0, 0), ("0B", 0), ("24GiB", 24 * 2**30), (" 1.5 MiB ", 3 * 2**19), ("2TB", 2 * 10**12), ("7 KB", 7000)],
)
def test_sizes(size: int | str, count: int) -> None:
    assert parse_bytes(size, "size") == count


def test_sizes_are_shown_in_a_fitting_unit() -> None:
    counts = [0, 1023, 1024, 3 * 2**19, 2**40, 2**52]
    assert [*map(show_bytes, counts)] == ["0 B", "1023 B", "1.0 KiB", "1.5 MiB", "1.0 TiB", "4096.0 TiB"]


def test_a_budget_above_what_is_free_counts_as_what_is_free() -> None:
    assert Devices.choose(machine(memory=100), None, {"cpu": 200}).limits == {"cpu": 100}


# A model that has its weights


def test_only_the_operators_count_for_a_model_with_weights() -> None:
    model = models.tiny("deepseek_v3")
    plan = planned(model, machine=machine(memory=170 * 2**10))
    assert not plan.problems and plan.to_load == plan.entries[0].bytes
    assert plan.rest_bytes["cpu"] > 0 and plan.device_map == {"": "cpu"}


def test_a_model_with_weights_is_not_moved() -> None:
    model = models.tiny("deepseek_v3")
    said = refusal(PlanError, model, machine=machine(gpus=1), devices="cuda:0")
    assert "the model is on cpu; allowed are cuda:0. Move it with model.to() before" in said
    assert planned(model, machine=machine(gpus=1)).device_map == {"": "cpu"}


# The checkpoint, from its headers


def test_everything_that_is_wrong_with_a_checkpoint_is_in_one_report(
    model: PreTrainedModel, folder: Path, tmp_path: Path
) -> None:
    experts = "model.layers.1.mlp.experts"

    def change(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[f"{experts}.2.up_proj.weight"], tensors["model.norm.weight"]
        tensors[f"{experts}.6.up_proj.weight"] = torch.zeros(24, 40)
        tensors[f"{experts}.3.gate_proj.weight"] = torch.zeros(40, 24)
        tensors["lm_head.weight"] = tensors["lm_head.weight"][:-1].clone()
        tensors[f"{experts}.4.down_proj.weight"] = torch.zeros(40, 24, dtype=torch.int8)
        tensors["model.layers.0.mlp.up_proj.weight"] = torch.zeros(56, 40, dtype=torch.float64)

    path = changed(folder, tmp_path / "changed", change)
    said = refusal(CheckpointError, model, rule(), path)
    found = re.sub(r"( dtype \w+) without.*", r"\1", said)  # the rest is the reader's own wording
    assert found == (
        f"{path}: this does not fit DeepseekV3ForCausalLM with the given config; tensors are\n"
        "missing:\n"
        f"  {experts}.2.up_proj.weight\n"
        "  model.norm.weight\n"
        "not expected by the model:\n"
        f"  {experts}.6.up_proj.weight\n"
        "of the wrong shape:\n"
        "  lm_head.weight: found [95, 40], expected [96, 40]\n"
        f"  {experts}.3.gate_proj.weight: found [40, 24], expected [24, 40]\n"
        "in a format that is not read:\n"
        "  tensor 'model.layers.0.mlp.up_proj.weight': dtype F64\n"
        f"  tensor '{experts}.4.down_proj.weight': dtype I8\n"
        "Use the config.json that came with the weights, and a complete download."
    )


def test_fused_experts_are_checked_too(tmp_path: Path) -> None:
    model = models.tiny("gpt_oss")
    name = "model.layers.1.mlp.experts.gate_up_proj"

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name] = tensors[name].mT.contiguous()

    path = changed(saved(model, tmp_path / "whole"), tmp_path / "changed", change)
    said = refusal(CheckpointError, on_meta(model), rule(), path)
    assert f"{name}: found [6, 112, 40], expected [6, 40, 112]" in said


def test_names_that_a_terminal_would_act_on_are_escaped(
    model: PreTrainedModel, folder: Path, tmp_path: Path
) -> None:
    path = changed(folder, tmp_path / "changed", lambda tensors: tensors.update({"\x1b[2J": torch.zeros(1)}))
    assert "not expected by the model:\n  '\\x1b[2J'\n" in refusal(CheckpointError, model, rule(), path)


def test_long_lists_are_complete_and_short() -> None:
    names = [f"layers.{layer}.experts.{e}.{p}" for layer in range(3, 9) for e in range(16) for p in "ab"]
    assert listed(names) == [
        "layers.{3-8}.experts.{0-15}.a (96 tensors)",
        "layers.{3-8}.experts.{0-15}.b (96 tensors)",
    ]
    gaps = [f"layers.{layer}.norm" for layer in (0, 1, 2, 5, 9, *range(20, 40))]
    assert listed(gaps) == ["layers.{0-2,5,9,20-39}.norm (25 tensors)"]
    ragged = [*names, "layers.9.experts.1.a"]
    assert len(listed(ragged)) == 1 + 97, "no line covers exactly these"
    assert listed(names[:20]) == names[:20]
    assert listed([*names, "norm"])[-1] == "norm"


@pytest.mark.parametrize("method", ["mxfp8", "bitsandbytes", "hqq", None, "plain text"])
def test_a_quantised_checkpoint_that_is_not_read_is_refused(method: Any, folder: Path) -> None:
    model = on_meta(models.tiny("deepseek_v3"))
    model.config.quantization_config = method if method == "plain text" else {"quant_method": method}
    said = refusal(PlanError, model, rule(), folder)
    assert (
        f"its config.json says quant_method {method!r}; read are checkpoints in bf16, fp16, fp32 and fp8"
        in said
    )


def test_only_an_index_is_enough_to_plan(model: PreTrainedModel, folder: Path, tmp_path: Path) -> None:
    sharded = saved(models.tiny("deepseek_v3"), tmp_path / "sharded", max_shard_size="50KB")
    for shard in sharded.glob("*.safetensors"):
        shard.unlink()
    plan = planned(model, rule(), sharded)
    assert plan.to_dict()["bytes"] == planned(model, rule(), folder).bytes
    assert "only the checkpoint's index is there: shapes and formats could not be checked" in plan.notes
    index = sharded / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    del content["weight_map"]["model.norm.weight"]
    index.write_text(json.dumps(content))
    assert "missing:\n  model.norm.weight\n" in refusal(CheckpointError, model, rule(), sharded)


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
    assert len(planned(model, [LINEAR]).entries) == 1
    assert len(planned(model, [LINEAR, *source]).entries) == 2


def test_an_operator_may_keep_children_which_others_replace() -> None:
    model = on_meta(models.tiny("qwen3_moe"))
    plan = planned(model, [BLOCK, EXPERTS])
    assert [entry.path.partition("mlp")[2] for entry in plan.entries] == ["", ".experts"] * 2
    kept = planned(model, [BLOCK])
    assert kept.bytes["cpu"] == planned(model, [KEEP_ROUTER]).bytes["cpu"]


def test_replacing_what_a_replaced_block_drops_is_refused() -> None:
    model = on_meta(models.tiny("deepseek_v3"))
    said = refusal(
        RuleError, model, [EXPERTS | {"match": {"path": r".*\.layers\.1"}}, EXPERTS | {"name": "b"}]
    )
    assert "'model.layers.1.mlp.experts' goes away with 'model.layers.1'" in said


# Full size


def deepseek_v3_671b(folder: Path) -> Path:
    """config.json and index of the published checkpoint, FP8 with its scales and the extra prediction layer."""

    def linear(name: str) -> list[str]:
        return [f"{name}.weight", f"{name}.weight_scale_inv"]

    projections = ("gate_proj", "up_proj", "down_proj")
    names = ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]
    for layer in range(62):
        at = f"model.layers.{layer}"
        norms = (
            "input_layernorm",
            "post_attention_layernorm",
            "self_attn.q_a_layernorm",
            "self_attn.kv_a_layernorm",
        )
        names += [f"{at}.{norm}.weight" for norm in norms]
        for projection in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"):
            names += linear(f"{at}.self_attn.{projection}")
        if layer < 3:
            names += [name for p in projections for name in linear(f"{at}.mlp.{p}")]
            continue
        names += [f"{at}.mlp.gate.weight", f"{at}.mlp.gate.e_score_correction_bias"]
        experts = ["shared_experts", *(f"experts.{expert}" for expert in range(256))]
        names += [name for e in experts for p in projections for name in linear(f"{at}.mlp.{e}.{p}")]
    extra = ("embed_tokens", "enorm", "hnorm", "eh_proj", "shared_head.norm", "shared_head.head")
    names += [f"model.layers.61.{name}.weight" for name in extra]
    shards = {
        name: f"model-{1 + i * 163 // len(names):05d}-of-000163.safetensors" for i, name in enumerate(names)
    }
    index = {"metadata": {"total_size": 688586727753}, "weight_map": shards}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "torch_dtype": "bfloat16",
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 61,
        "first_k_dense_replace": 3,
        "n_routed_experts": 256,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "vocab_size": 129280,
        "num_nextn_predict_layers": 1,
        "quantization_config": {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
        },
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.slow
def test_deepseek_v3_at_full_size_plans_from_config_and_index_alone(tmp_path: Path) -> None:
    code = f"""
import json, resource, time
start = time.monotonic()
import ktinject
from ktinject import hf
folder = {str(deepseek_v3_671b(tmp_path))!r}
plan = ktinject.plan(hf.meta_model(hf.read_config(folder)), "deepseek-v3", checkpoint=folder)
print(plan)
seconds = time.monotonic() - start
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps([seconds, peak, len(plan.entries), plan.bytes]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    seconds, peak, entries, sizes = json.loads(done.stdout.splitlines()[-1])
    print(f"{seconds:.1f} s, {peak / 2**20:.0f} MiB\n{done.stdout}")
    # 58 layers of experts, routers and shared experts, 61 of attention with four linears, 3 dense layers, the head.
    assert entries == 58 * 5 + 61 * 5 + 3 * 3 + 1 and sum(sizes.values()) > 6e11 / 2
    assert seconds < 15 and peak < 4 * 2**30
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss > 0
