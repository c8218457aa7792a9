"""The plan's devices: where modules stand, and what may be used of each. Nothing here loads a weight."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import models
import pytest
import torch
from double import HeldConfig, HeldExperts, machine
from plan_cases import planned, refusal, rule
from transformers import PreTrainedModel

from ktinject.errors import PlanError
from ktinject.machine import device_of
from ktinject.planning.devices import Devices, parse_bytes, show_bytes, spread

# Devices and budgets


def test_without_a_gpu_everything_is_on_the_cpu(model: PreTrainedModel) -> None:
    assert planned(model).device_map == {"": "cpu"}


def test_the_rest_goes_to_the_first_gpu_if_it_fits(model: PreTrainedModel) -> None:
    plan = planned(model, machine=machine(gpus=2))
    assert plan.device_map == {"": "cuda:0"} and plan.replacements[0].device == "cpu"
    assert plan.bytes == {"cpu": plan.replacements[0].bytes["cpu"], "cuda:0": plan.rest_bytes["cuda:0"]}
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
    cache = 2 * 256 * plan.runtime_memory["cuda:0"].kv_bytes_per_token  # of the shortest request
    small = machine(gpus=2, gpu_memory=first + cache + 1000)
    plan = planned(model, machine=small)
    assert set(plan.device_map.values()) == {"cuda:0", "cuda:1"} and not plan.problems
    assert plan.notes == ["decoder layers stand on cuda:0, cuda:1: they do not fit on cuda:0"]
    tiny = machine(gpus=2, gpu_memory=2**10)
    assert planned(model, machine=tiny).device_map == {"": "cpu"}


def test_a_gpu_is_left_alone_by_a_build_without_cuda_parts(model: PreTrainedModel) -> None:
    """What runs by itself on a machine with a driver and without the CUDA toolkit."""
    without = replace(machine(gpus=2), cuda_built=False)
    plan = planned(model, machine=without)
    assert plan.device_map == {"": "cpu"} and list(plan.bytes) == ["cpu"]
    (note,) = plan.notes
    assert note.startswith("not used: cuda:0, cuda:1; this build of ktinject has no CUDA parts.")
    assert planned(model, machine=without, devices="cuda:1").device_map == {"": "cuda:1"}


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
    assert planned(model, machine=one).replacements[0].device == "cuda:0"
    assert planned(model, machine=one, devices="cpu").replacements[0].device == "cpu"
    assert planned(model, rule(device="cpu"), machine=one).replacements[0].device == "cpu"
    monkeypatch.setattr(HeldExperts, "device_types", ("cuda",))
    said = refusal(PlanError, model)
    assert "held_experts computes on cuda only; the plan may use cpu. Use another operator" in said


def test_gpus_whose_links_carry_a_part_of_every_layer(model: PreTrainedModel) -> None:
    """They are those of the plan, or those that a rule names; where none of the model is, a ring is counted alone."""
    two, what = machine(gpus=2), "the experts of long prompts"

    def streaming(**arguments: Any) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = rule("hybrid_experts", prefill="gpu", **arguments)
        found[0]["match"] = {"role": "routed_experts"}
        return found

    both = planned(model, streaming(), machine=two, devices=["cuda:0", "cuda:1"])
    (experts,) = both.replacements
    assert experts.device == "cuda:1", "the only layer with experts: nobody else has some"
    assert experts.placement.helpers == () and what not in both.runtime_memory["cuda:0"].workspace
    named = streaming(links=["cuda:0", "cuda:1"])
    plan = planned(model, named, machine=two)
    (experts,) = plan.replacements
    assert experts.device == "cuda:0" and experts.placement.helpers == ("cuda:1",)
    assert "over the links of cuda:0, cuda:1 where" in experts.runs["prefill"]
    ring = plan.runtime_memory["cuda:0"].workspace[what]
    assert plan.runtime_memory["cuda:1"].workspace == {what: ring} and "cuda:1" not in plan.bytes
    assert not any("not used" in note for note in plan.notes) and not plan.problems
    short = planned(model, named, machine=two, budget={"cuda:1": ring - 1})
    assert short.runtime_memory["cuda:1"].workspace == {what: ring - 1}, "it can be done without"
    assert not planned(model, named, machine=two, budget={"cuda:1": 0}).problems
    said = refusal(PlanError, model, named, machine=two, devices="cuda:0")
    assert "replace.links: rule 'experts': device 'cuda:1' is not among the devices of this call" in said
    said = refusal(PlanError, model, streaming(links=["cuda:2"]), machine=two)
    assert "device 'cuda:2' is not there; usable are cpu, cuda:0, cuda:1" in said
    assert planned(model, named).replacements[0].device == "cpu", "without a GPU the rule means nothing"


def test_an_operators_device_is_the_rests_only_if_it_can(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HeldExperts, "device_types", ("cuda",))
    plan = planned(model, machine=machine(gpus=1), devices=["cuda:0"])
    assert plan.replacements[0].device == "cuda:0" and list(plan.bytes) == ["cuda:0"]


def test_what_does_not_fit_is_a_problem_of_the_plan(model: PreTrainedModel) -> None:
    plan = planned(model, machine=machine(memory=100 * 2**10))
    assert plan.problems == ["cpu needs 206.1 KiB, but 100.0 KiB are free."]
    assert [remedy.arguments for remedy in plan.remedies] == [None], "a double has no smaller weights"
    assert plan.remedies[0].text == "a machine with 924.0 KiB more on cpu"
    plan = planned(model, machine=machine(gpus=1), budget={"cuda:0": "100KiB", "cpu": 90 * 2**10})
    assert plan.device_map == {"": "cuda:0"}, "the placement that lacks least is shown"
    assert "the budget is 100.0 KiB" in plan.problems[0]


def test_an_operator_is_built_once_for_a_device(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many devices are tried, and although what is left of them is planned for again each time."""
    built, asked = [], []

    def build(cls: type[HeldExperts], module: torch.nn.Module, config: HeldConfig) -> HeldExperts:
        built.append(config.device)
        return cls(module, config)

    def plan_placement(cls: type[HeldExperts], decoder: Any, modules: Any, spare: Any) -> dict[str, Any]:
        asked.append(([config.device for _, config in modules.values()], bool(spare)))
        return {}

    monkeypatch.setattr(HeldExperts, "device_types", ("cuda", "cpu"))
    monkeypatch.setattr(HeldExperts, "build", classmethod(build))
    monkeypatch.setattr(HeldExperts, "plan_placement", classmethod(plan_placement))
    monkeypatch.setattr(HeldConfig, "auto_sized", True)
    plan = planned(
        model, machine=replace(machine(gpus=2), cuda_built=True), budget={"cuda:0": 1, "cuda:1": 1}
    )
    assert plan.device_map == {"": "cpu"}
    assert built == ["cuda:0", "cuda:1", "cpu"] or built == ["cuda:0", "cpu"]
    assert [spare for _, spare in asked] == [False, True, *[False, False, True] * 2, False, True]


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
        ({"cpu": "1.5"}, "found '1.5'"),
        ({"cpu": "9" * 400 + "GiB"}, "a size is"),
        ({"cpu": "9" * 400}, "a size is"),
        ({"cpu": None}, "found None"),
        ("24GiB", "found '24GiB'; it maps devices to sizes"),
    ],
)
def test_budgets_are_read_strictly(budget: Any, found: str, model: PreTrainedModel) -> None:
    assert found in refusal(PlanError, model, budget=budget)


@pytest.mark.parametrize(
    "size, count",
    [
        (0, 0),
        ("0B", 0),
        ("5000000000", 5 * 10**9),
        ("9007199254740993", 2**53 + 1),
        ("24GiB", 24 * 2**30),
        (" 1.5 MiB ", 3 * 2**19),
        ("2TB", 2 * 10**12),
        ("7 KB", 7000),
    ],
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
    assert not plan.problems and plan.to_load == plan.replacements[0].bytes
    assert plan.rest_bytes["cpu"] > 0 and plan.device_map == {"": "cpu"}


def test_a_model_with_weights_is_not_moved() -> None:
    model = models.tiny("deepseek_v3")
    said = refusal(PlanError, model, machine=machine(gpus=1), devices="cuda:0")
    assert "the model is on cpu; allowed are cuda:0. Move it with model.to() before" in said
    assert planned(model, machine=machine(gpus=1)).device_map == {"": "cpu"}
