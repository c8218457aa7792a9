"""Budgets: how they are spelled, the formats that they choose, and what is named where a plan does not fit."""

from __future__ import annotations

import bisect
import itertools
from typing import Any

import models
import pytest
import torch
from double import machine, on_meta
from plan_cases import planned, refusal, rule
from transformers import PreTrainedModel

import ktinject
from ktinject import _native, rules
from ktinject.checkpoints.formats.base import Format
from ktinject.errors import PlanError
from ktinject.hf.models import meta_model
from ktinject.operators import REGISTRY, expert_formats
from ktinject.operators.offload import gpu_experts
from ktinject.planning.devices import fill, one_budget
from ktinject.planning.plan import Plan
from ktinject.tools import random_models

AUTO = rule("hybrid_experts", weights="auto")
# The most accurate first: weights, group_size.
LADDER = [("bf16", 128), ("int8", 128), ("fp8", 128), ("int4", 32), ("int4", 64), ("int4", 128)]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    # Wide enough for groups of 128 to be smaller than groups of 32.
    return on_meta(models.tiny("qwen3_moe", hidden_size=256, moe_intermediate_size=128))


def taken(plan: Plan) -> tuple[str, int]:
    (found,) = {(one.config.weights, one.config.group_size) for one in plan.replacements}
    return found


def least(model: PreTrainedModel, weights: str, group_size: int) -> int:
    """The smallest budget of the CPU with which this format fits: its weights, and a short request's cache twice."""
    plan = planned(model, rule("hybrid_experts", weights=weights, group_size=group_size))
    return plan.to_load["cpu"] + 2 * 256 * plan.runtime_memory["cpu"].kv_bytes_per_token


# --- spelling ---


def test_gpus_are_named_or_numbered(model: PreTrainedModel) -> None:
    two = machine(gpus=2)
    named = planned(model, AUTO, machine=two, budget={"cuda:0": "1GiB", "cuda:1": 2**20, "cpu": "3GiB"})
    numbered = planned(model, AUTO, machine=two, budget={0: "1GiB", "1": 2**20, "cpu": "3GiB"})
    assert named.limits == numbered.limits and named.limits["cuda:1"] == 2**20
    said = refusal(PlanError, model, AUTO, machine=two, budget={0: "1GiB", "cuda": "2GiB"})
    assert said == "budget: 'cuda' and 0 are the same device, cuda:0. Give each device once."
    said = refusal(PlanError, model, AUTO, machine=two, budget={7: "1GiB"})
    assert "budget: there is no device 'cuda:7'; found are cpu, cuda:0, cuda:1." in said


def test_a_budget_has_one_name() -> None:
    given = {"cpu": "1GiB"}
    assert one_budget(given, None) is given is one_budget(None, given) and one_budget(None, None) is None
    with pytest.raises(
        PlanError, match=r"budget and max_memory are two names of one thing. Give one of them"
    ):
        one_budget(given, given)


# --- formats ---


def test_the_most_accurate_format_that_fits_is_taken(model: PreTrainedModel) -> None:
    sizes = [least(model, *one) for one in LADDER]
    assert sizes == sorted(sizes, reverse=True) and len({*sizes}) == len(sizes)
    for place, (size, wanted) in enumerate(zip(sizes, LADDER)):
        plan = planned(model, AUTO, budget={"cpu": size})
        assert taken(plan) == wanted and not plan.problems
        below = planned(model, AUTO, budget={"cpu": size - 1})
        if place + 1 < len(LADDER):
            assert taken(below) == LADDER[place + 1] and not below.problems
        else:
            assert taken(below) == wanted and below.problems
    (note,) = (
        note for note in planned(model, AUTO, budget={"cpu": sizes[1]}).notes if "weights: auto" in note
    )
    assert note.startswith("experts: weights: auto is int8. Given up: bf16: cpu ") and note.count(":") < 8


def test_more_memory_never_means_a_less_accurate_format(model: PreTrainedModel) -> None:
    """On the CPU, beside a GPU, and beside two, with experts that are to fill these."""
    low, high = least(model, *LADDER[-1]) // 2, 2 * least(model, *LADDER[0])
    steps = [low + (high - low) * step // 3 for step in range(4)]
    for gpus, source in (
        (0, AUTO),
        (1, rule("hybrid_experts", weights="auto", gpu_experts="auto")),
        (2, AUTO),
    ):
        places = {}
        for cpu in steps:
            for gpu in steps if gpus else steps[:1]:
                budget: dict[int | str, int] = {"cpu": cpu, **dict.fromkeys(range(gpus), gpu // 4)}
                plan = planned(model, source, machine=machine(gpus=gpus), budget=budget)
                place = len(LADDER) if plan.problems else LADDER.index(taken(plan))
                places[cpu, gpu] = place
        again = planned(model, source, machine=machine(gpus=gpus), budget=budget)
        assert str(again) == str(plan), "the same budget is the same plan"
        assert len({*places.values()}) > 2
        for (cpu, gpu), place in places.items():
            assert all(other <= place for (c, g), other in places.items() if c >= cpu and g >= gpu)


def test_other_arguments_narrow_the_choice(model: PreTrainedModel) -> None:
    def choose(**arguments: Any) -> tuple[str, int]:
        return taken(planned(model, rule("hybrid_experts", weights="auto", **arguments)))

    assert choose() == ("bf16", 128)
    assert choose(kernel="avx2_int8") == ("int8", 128)
    assert choose(kernel="reference_int4", group_size=64)[0] == "int4"
    assert choose(dynamic=True, gpu_weights="int4")[0] == "int4"
    config = REGISTRY["hybrid_experts"].Config(weights="auto", group_size=64)
    assert [one.group_size for _, one in expert_formats.choices(config, []) if one.weights == "int4"] == [
        32,
        64,
    ]


@pytest.mark.parametrize(
    ("stored", "first"),
    [
        ([], ("bf16", 128)),
        ([Format("float")], ("bf16", 128)),
        ([Format("fp8_blocks", block=(128, 128), encoding="fp8")], ("fp8", 128)),
        ([Format("fp8_blocks", block=(64, 128), encoding="fp8")], ("bf16", 128)),
        ([Format("fp8_blocks", block=(128, 128), encoding="fp8"), Format("bf16")], ("bf16", 128)),
        ([Format("mxfp4", group_size=32, encoding="mxfp4")], ("mxfp4", 128)),
        ([Format("gptq", group_size=64, encoding="int4")], ("int4", 64)),
        ([Format("gptq", group_size=64, has_zeros=True, encoding="int4")], ("int4", 64)),
        ([Format("gptq", group_size=64, is_ordered=True, encoding="int4")], ("bf16", 128)),
        ([Format("int8", group_size=64, encoding="int8")], ("int8", 128)),
        ([Format("nvfp4", group_size=16, encoding="nvfp4")], ("nvfp4", 128)),
        ([Format("mxfp8", block=(1, 32), group_size=32, encoding="mxfp8")], ("mxfp8", 128)),
        (
            [Format("gptq", group_size=64, encoding="int4"), Format("gptq", group_size=128, encoding="int4")],
            ("bf16", 128),
        ),
        ([Format("q4_0", group_size=32, encoding="int4")], ("int4", 32)),
    ],
)
def test_what_the_checkpoint_has_comes_first(stored: list[Format], first: tuple[str, int]) -> None:
    config = REGISTRY["cpu_experts"].Config(weights="auto")
    found = expert_formats.choices(config, stored)
    assert (found[0][1].weights, found[0][1].group_size) == first
    assert [rank for rank, _ in found] == sorted({rank for rank, _ in found})
    assert not expert_formats.choices(REGISTRY["cpu_experts"].Config(weights="int8"), stored)
    kept = expert_formats.choices(REGISTRY["cpu_experts"].Config(weights="kept"), stored)
    assert (kept[0][1].weights, kept[0][1].group_size) == first and kept[-1][1].weights == "bf16"
    assert kept[0][1].symmetric is not any(form.has_zeros and first[0] == "int4" for form in stored)


def test_biases_and_routers_do_not_say_what_the_experts_are() -> None:
    mxfp4 = Format("mxfp4", group_size=32, encoding="mxfp4")
    stored = [("experts.gate_up_proj", mxfp4), ("experts.down_proj_bias", Format("bf16"))]
    for name, has in (("cpu_experts", stored), ("deferred_moe", [*stored, ("gate.weight", Format("fp32"))])):
        operator = REGISTRY[name]
        (_, first), *_ = operator.weight_formats(operator.Config(weights="auto"), has)
        assert first.weights == "mxfp4"


def test_what_operators_refuse_at_every_format_is_refused(model: PreTrainedModel) -> None:
    said = refusal(PlanError, model, [{**AUTO[0], "match": {"path": "lm_head"}}])
    assert "hybrid_experts cannot replace a Linear" in said


def test_layers_fit_where_some_division_of_them_does() -> None:
    """What fits two GPUs fits larger ones, though shares in proportion then change."""
    layers = {f"layer {number}": size for number, size in enumerate([4, 1, 6, 2, 3])}
    gpus = ["cuda:0", "cuda:1", "cuda:2"]

    def fits(*limits: int) -> bool:
        room = dict(zip(gpus, limits))
        device_map = fill(2, layers, gpus, room)
        used = dict.fromkeys(gpus, 0) | {"cuda:0": 2}
        for path, size in layers.items():
            used[device_map.get(path, device_map[""])] += size
        return all(used[gpu] <= room[gpu] for gpu in gpus)

    found = {limits: fits(*limits) for limits in itertools.product(range(2, 13, 2), repeat=3)}
    assert found[8, 8, 4] and not found[6, 6, 4] and any(found.values())
    for limits, here in found.items():
        larger = [other for other in found if all(a <= b for a, b in zip(limits, other))]
        assert not here or all(found[other] for other in larger)


# --- the request ---


@pytest.mark.skipif(not _native.cuda_built(), reason="built without CUDA")
@pytest.mark.parametrize("shape, layers", [("qwen3-30b-a3b", 24), ("deepseek-v3", 8)])
def test_experts_of_auto_leave_room_for_a_request_that_is_named(
    shape: str, layers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What fits where the GPU has no experts still fits; and where there is more room than that, it has some."""
    monkeypatch.setattr(_native, "why_no_flags", lambda device: "")
    model = meta_model(random_models.config(shape, layers), torch.bfloat16)

    def plan(gib: int, context: int | None, on_gpu: int | str) -> tuple[Plan, int, int]:
        found = ktinject.plan(
            model,
            "auto",
            machine={"cpu": "900GiB", "cuda:0": f"{gib}GiB"},
            devices="cuda:0",
            variables={"gpu_experts": on_gpu, "experts": "int4"},
            context=context,
        )
        return found, found.runtime_memory["cuda:0"].longest_request or 0, found.bytes["cuda:0"]

    taken = {}
    for gib in (8, 16, 24, 80, 141):
        none, longest, without = plan(gib, None, 0)
        if none.problems:
            continue  # the model does not fit it at all
        beside, then, with_experts = plan(gib, longest, "auto")
        assert not beside.problems and then >= longest, gib
        taken[gib] = with_experts - without
    assert len(taken) >= 3 and taken[141] > taken[min(taken)] >= 0


def by_default(
    model: PreTrainedModel, sizes: list[int], context: int | None = None, **variables: Any
) -> tuple[Plan, set[int]]:
    """The bundled rules on GPUs of so many bytes; and how many experts of a layer are on them."""
    gpus = {f"cuda:{number}": size for number, size in enumerate(sizes)}
    found = ktinject.plan(
        model,
        "auto",
        machine={"cpu": "900GiB", **gpus},
        devices=[*gpus] or "cpu",
        variables={"experts": "int4", **variables},
        context=context,
    )
    placed = [one.placement for one in found.replacements if one.operator == "hybrid_experts"]
    return found, {len(getattr(one, "resident", ())) for one in placed}


GIB = 2**30


@pytest.fixture
def four_layers(monkeypatch: pytest.MonkeyPatch) -> PreTrainedModel:
    """4 layers of Qwen3-30B-A3B's shape: 128 experts each, and a text of up to 40,960 tokens."""
    if not _native.cuda_built():
        pytest.skip("built without CUDA")
    monkeypatch.setattr(_native, "why_no_flags", lambda device: "")
    return meta_model(random_models.config("qwen3-30b-a3b", 4), torch.bfloat16)


def test_by_default_experts_take_what_the_longest_request_leaves(four_layers: PreTrainedModel) -> None:
    """No request has less room than without experts on the GPU, whatever its size; and a few experts are none."""
    counts: dict[int, int] = {}
    for size in (1536 << 20, 2 * GIB, 3 * GIB, 4 * GIB, 6 * GIB, 24 * GIB, 141 * GIB):
        none, zero = by_default(four_layers, [size], gpu_experts=0)
        found, (counts[size],) = by_default(four_layers, [size])
        assert zero == {0} and found.problems == none.problems
        before, after = none.runtime_memory.get("cuda:0"), found.runtime_memory.get("cuda:0")
        if before is None or after is None:
            assert before == after
            continue
        assert after == before, "the ring of streamed prompts and the longest request are the same"
        taken = found.bytes["cuda:0"] - none.bytes["cuda:0"]
        assert (counts[size] == 0) == (taken == 0)
        if taken:
            tokens = min(before.longest_request or 0, 65_536)  # the bucket of 40,960
            cache = 2 * tokens * before.kv_bytes_per_token
            room = size - found.bytes["cuda:0"] - sum(after.workspace.values()) - cache
            assert room >= gpu_experts.RESERVE_BYTES, "and a reserve"
    assert {*counts.values()} & {*range(1, 32)} == set() and counts[min(counts)] == 0
    assert counts[141 * GIB] == 128 and sorted(counts.values()) == [*counts.values()]


def test_experts_come_from_a_quarter_on(four_layers: PreTrainedModel) -> None:
    """A MiB decides: so many as pay, or none, and the plan says why."""
    low, high = 2 * GIB, 8 * GIB
    assert by_default(four_layers, [low])[1] == {0} and by_default(four_layers, [high])[1] != {0}
    while high - low > 1 << 20:
        middle = (low + high) // 2
        low, high = (low, middle) if by_default(four_layers, [middle])[1] != {0} else (middle, high)
    found, counts = by_default(four_layers, [high])
    assert counts == {32}
    assert "32 of 128 experts as int4, a cache of those in use, until somebody else needs the memory" in str(
        found
    )
    assert "cuda:0 beside a request of 65,536 tokens, all rows together, and a reserve" in str(found)
    said = str(by_default(four_layers, [low])[0])
    assert "no experts: there would be room for 31 of 128 of each layer, and fewer than 32 do not pay" in said
    # Who says how long requests get, gets more of them; and a rule or a variable turns it off.
    (more,) = by_default(four_layers, [high], context=1024)[1]
    assert more > 32
    (other,) = by_default(four_layers, [low], **{"routed experts.gpu_experts": 0.25})[1]
    assert other == 32
    off = str(by_default(four_layers, [high], **{"routed experts.gpu_experts": 0})[0])
    assert "on the GPU" not in off and "gpu_experts: what is left" not in off


def test_without_a_gpu_nothing_is_said_of_it(four_layers: PreTrainedModel) -> None:
    found, counts = by_default(four_layers, [])
    assert counts == {0} and "gpu_experts" not in str(found) and "without effect" not in str(found)


def test_each_gpu_leaves_room_for_its_own_layers(four_layers: PreTrainedModel) -> None:
    """Layers of a GPU that has no room for experts have none, those of the other one do."""
    found, counts = by_default(four_layers, [24 * GIB, 2 * GIB])
    none, _ = by_default(four_layers, [24 * GIB, 2 * GIB], gpu_experts=0)
    assert not found.problems and counts == {0, 128}
    assert found.bytes["cuda:0"] > none.bytes["cuda:0"] and found.bytes["cuda:1"] == none.bytes["cuda:1"]
    assert found.runtime_memory == none.runtime_memory
    alike, counts = by_default(four_layers, [24 * GIB, 24 * GIB])
    assert counts == {128} and all(alike.bytes[f"cuda:{gpu}"] < 24 * GIB for gpu in (0, 1))


def test_room_for_a_request_is_counted(model: PreTrainedModel) -> None:
    short = least(model, "int8", 128)
    token = planned(model).runtime_memory["cpu"].kv_bytes_per_token
    fixed = rule("hybrid_experts", weights="int8")
    for tokens, positions in ((300, 512), (512, 512), (513, 1024)):
        enough = short + 2 * (positions - 256) * token
        assert not planned(model, fixed, budget={"cpu": enough}, context=tokens).problems
        (problem,) = planned(model, fixed, budget={"cpu": enough - 1}, context=tokens).problems
        assert f"no room for {tokens:,} tokens." in problem
    for wrong in (0, -1, True, 2.5, "8192", 2**31):
        assert f"context: found {wrong!r}; it is the number of tokens" in refusal(
            PlanError, model, context=wrong
        )


# --- what makes a plan fit that does not ---


DENSE = {
    "name": "attention",
    "match": {"path": r".*_proj", "class": "Linear"},
    "replace": {"operator": "dense_linear"},
}
BF16 = rule("hybrid_experts")
MIB = 2**20
UNFIT: dict[str, tuple[list[dict[str, Any]], dict[str, Any], list[str]]] = {
    # rules, what there is, what each remedy says
    "a smaller format": (BF16, {"cpu": 2.2}, ["--set experts.weights=int8", "--budget cpu="]),
    "smaller groups": (
        BF16,
        {"cpu": 1.46},
        ["--set experts.weights=int4 --set experts.group_size=64", "--budget cpu="],
    ),
    "other weights": (
        [*rule("hybrid_experts", weights="int4"), DENSE],
        {"cpu": 1.2},
        ["--set attention.weights=int8", "--budget cpu="],
    ),
    "a shorter request": (
        BF16,
        {"cpu": 5.5, "context": 3000},
        ["--context 2048", "--set experts.weights=int4", "--budget cpu="],
    ),
    "fewer experts on the GPU": (
        rule("hybrid_experts", gpu_experts=6, gpu_weights="bf16"),
        {"cpu": 64, "cuda:0": 1.6, "devices": ["cuda:0"]},
        ["--set experts.gpu_experts=2", "--budget cuda:0="],
    ),
    "several at once": (
        rule("hybrid_experts", gpu_experts=3, gpu_weights="bf16"),
        {"cpu": 1.3, "cuda:0": 1.5, "devices": ["cuda:0"]},
        ["--set experts.gpu_experts=0 --set experts.weights=int8", "--budget cuda:0="],
    ),
    "nothing but memory": (rule("hybrid_experts", weights="int4"), {"cpu": 0.25}, ["--budget cpu="]),
}


@pytest.mark.parametrize("kind", UNFIT)
def test_each_remedy_makes_it_fit(model: PreTrainedModel, kind: str) -> None:
    source, has, says = UNFIT[kind]
    sizes = dict(has)
    given: dict[str, Any] = {name: sizes.pop(name, None) for name in ("context", "devices")}
    given["machine"] = machine(gpus=len(sizes) - 1)
    given["budget"] = {device: int(size * MIB) for device, size in sizes.items()}
    plan = planned(model, source, **given)
    assert plan.problems
    assert [remedy.text[: len(start)] for remedy, start in zip(plan.remedies, says)] == says
    for remedy in plan.remedies:
        assert remedy.arguments is not None
        again = given | {name: value for name, value in remedy.arguments.items() if name != "variables"}
        changed = rules.read(source, variables=remedy.arguments.get("variables"))
        assert not planned(model, changed, **again).problems, remedy.text
    with pytest.raises(PlanError) as caught:
        plan.check()
    assert str(caught.value).startswith("the plan does not fit:\n  ")
    assert all(f"\n  {remedy.text}" in str(caught.value) for remedy in plan.remedies)
    assert plan.to_dict()["remedies"][0]["text"] == plan.remedies[0].text


def test_no_second_copy_of_weights_is_a_remedy() -> None:
    tiny = models.tiny("qwen3_moe", hidden_size=256, moe_intermediate_size=128)
    model = meta_model(tiny.config, torch.bfloat16)
    int4 = {**DENSE, "replace": {"operator": "int4_linear", "group_size": 64, "bf16_copy": True}}
    off, no_experts = {"attention.bf16_copy": False}, {"experts.gpu_experts": 0}

    def plan(size: int, gpu_experts: int = 0, **variables: Any) -> Plan:
        source = [*rule("hybrid_experts", gpu_experts=gpu_experts, gpu_weights="bf16"), int4]
        return planned(
            model,
            rules.read(source, variables=variables),
            machine=machine(gpus=1),
            devices=["cuda:0"],
            budget={"cpu": 2**30, "cuda:0": size},
        )

    def fitting(**variables: Any) -> int:
        return bisect.bisect_left(range(2**24), True, key=lambda size: not plan(size, **variables).problems)

    both, alone = fitting(), fitting(**off)
    linears = [model.get_submodule(one.path) for one in plan(both).replacements if one.rule == "attention"]
    assert both - alone == sum(2 * one.weight.numel() for one in linears) > 0
    for size in (alone, both - 1):
        found = plan(size).remedies[0]
        assert found.arguments == {"variables": off} and found.text == "--set attention.bf16_copy=False"
    # With experts on the GPU, these leave it first; where that is not enough, both go.
    assert plan(both, gpu_experts=1).remedies[0].arguments == {"variables": no_experts}
    assert plan(alone, gpu_experts=1).remedies[0].arguments == {"variables": off | no_experts}


def test_a_machine_that_is_too_small_even_for_int4_says_how_much(model: PreTrainedModel) -> None:
    """What is missing is named for the smallest experts, too: it is far less than for those that were asked for."""
    plan = planned(model, rule("hybrid_experts", weights="bf16"), machine=machine(memory=MIB // 4))
    smaller, asked = plan.remedies
    assert smaller.text.startswith("--set experts.weights=int4 and a machine with ")
    assert asked.text.startswith("a machine with ") and smaller.arguments is asked.arguments is None

    def more(text: str) -> float:
        size, unit = text.split("with ")[1].split()[:2]
        return float(size) * {"KiB": 2**10, "MiB": 2**20}[unit]

    assert more(smaller.text) < more(asked.text)


def test_a_machine_may_be_too_small(model: PreTrainedModel) -> None:
    plan = planned(model, rule("hybrid_experts", weights="int4"), machine=machine(memory=MIB // 4))
    (remedy,) = plan.remedies
    assert (
        remedy.arguments is None
        and remedy.text.startswith("a machine with ")
        and remedy.text.endswith(" on cpu")
    )
