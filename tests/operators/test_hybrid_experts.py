"""`hybrid_experts` against `cpu_experts` on the same weights: eagerly, in graphs, and in the trained models."""

from __future__ import annotations

import dataclasses
import json
import math
from functools import cache
from pathlib import Path
from typing import Any

import expert_cases
import models
import pytest
import reference
import torch
import transformers
from handoff_cases import make_up_a_gpu
from torch import Tensor, nn
from trained import trained_model
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

import ktinject
from ktinject import _native, machine
from ktinject.errors import OperatorError
from ktinject.operators.cpu_experts import CpuExperts, CpuExpertsConfig
from ktinject.operators.hybrid_experts import HybridExperts, HybridExpertsConfig
from ktinject.operators.offload import expert_cache, expert_placement, gpu_experts, handoff, ring
from ktinject.operators.offload.expert_placement import ExpertPlacement

EXPERTS, HIDDEN = 16, 128
gpu = pytest.mark.gpu


@cache
def module() -> Qwen3MoeExperts:
    config = Qwen3MoeConfig(hidden_size=HIDDEN, moe_intermediate_size=96, num_experts=EXPERTS)
    config._experts_implementation = "eager"
    made = Qwen3MoeExperts(config)
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(std=parameter.shape[-1] ** -0.5, generator=random)
    return made


def filled(operator: CpuExperts, leaf: nn.Module) -> CpuExperts:
    operator.allocate()
    for name, parameter in reference.parameters_of(leaf).items():
        expert_cases.load(operator, name, parameter)
    operator.finish()
    return operator


def hybrid(device: str, leaf: nn.Module | None = None, **arguments: Any) -> HybridExperts:
    leaf = leaf or module()
    config = HybridExpertsConfig(device=device, **arguments)
    placement = HybridExperts.plan_placement(nn.Module(), {"e": (leaf, config)}, {device: 1 << 34}).get("e")
    made = HybridExperts.build(leaf, config)
    if placement is not None:
        assert not isinstance(placement, str), placement
        made.place(placement)
    filled(made, leaf)
    return made


@cache
def plain(**arguments: Any) -> CpuExperts:
    return filled(CpuExperts.build(module(), CpuExpertsConfig(device="cpu", **arguments)), module())


def inputs(tokens: int, seed: int = 0, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, HIDDEN, generator=random).bfloat16()
    ids = torch.rand(tokens, EXPERTS, generator=random).argsort(-1)[:, :4].contiguous()
    return x.to(device), ids.to(device), torch.rand(tokens, 4, generator=random).to(device)


# --- without a GPU ---


def test_without_a_gpu_it_is_cpu_experts() -> None:
    made, arguments = hybrid("cpu"), inputs(5)
    assert torch.equal(made(*arguments), plain()(*arguments))
    assert "no GPU is used" in made.describe()["handoff"]
    assert made.capturable and not plain().capturable


def test_a_plan_without_a_gpu_says_so(tiny_qwen3_moe: Path) -> None:
    rules: list[dict[str, Any]]
    rules = [{"name": "e", "match": {"path": r".*\.experts"}, "replace": {"operator": "hybrid_experts"}}]
    model = ktinject.load(tiny_qwen3_moe, rules, devices=["cpu"], progress=False)
    assert "hybrid_experts computes as cpu_experts does" in str(model.ktinject)
    ids = torch.arange(12)[None]
    rules[0]["replace"] = {"operator": "cpu_experts"}
    plain = ktinject.load(tiny_qwen3_moe, rules, devices=["cpu"], progress=False)
    with torch.inference_mode():
        assert torch.equal(model(ids).logits, plain(ids).logits)


def test_what_needs_a_gpu_is_not_dropped_silently() -> None:
    assert "without effect" not in hybrid("cpu").describe()["handoff"]
    asked = hybrid("cpu", gpu_experts=0.25, dynamic=True, handoff="flags").describe()["handoff"]
    assert asked.endswith("; without effect: gpu_experts=0.25, dynamic=True, handoff=flags")


def test_gradients_are_those_of_cpu_experts() -> None:
    x, ids, weights = inputs(3)
    grads = []
    for operator in (hybrid("cpu"), plain()):
        leaf = x.float().requires_grad_()
        operator(leaf, ids, weights).sum().backward()
        grads.append(leaf.grad)
    assert torch.equal(grads[0], grads[1])


# --- which experts go to the GPU ---


def placed(
    layers: int = 2, spare: int = 1 << 34, device: str = "cuda:0", **arguments: Any
) -> list[tuple[int, ...]]:
    config = HybridExpertsConfig(device=device, **arguments)
    modules = {f"layers.{layer}.experts": (module(), config) for layer in range(layers)}
    placements = HybridExperts.plan_placement(nn.Module(), modules, {"cuda:0": spare})
    for placement in placements.values():
        if isinstance(placement, str):
            raise ValueError(placement)
    found = {path: placement.resident for path, placement in placements.items()}
    return [found.get(path, ()) for path in modules]


@pytest.fixture
def profile(tmp_path: Path) -> str:
    """The first layer sends nearly everything to four experts, the second spreads it."""
    counts = [[1] * EXPERTS, [50] * EXPERTS]
    for expert, count in {2: 400, 5: 300, 11: 200, 3: 100}.items():
        counts[0][expert] = count
    counts[1][7] = 51
    file = tmp_path / "routing.json"
    file.write_text(json.dumps({"experts": {f"layers.{i}.experts": c for i, c in enumerate(counts)}}))
    return str(file)


needs_cuda_parts = pytest.mark.skipif(not _native.cuda_built(), reason="built without CUDA")
EXPERT_BYTES = 3 * HIDDEN * 96 * 2
# What `auto` keeps back, so that tests can name the room that is left.
KEPT = (
    gpu_experts.RESERVE_BYTES
    + 2 * gpu_experts.GpuExperts.table_bytes(EXPERTS)
    + EXPERTS * (1 + ring.SLOTS) * EXPERT_BYTES  # all experts of a layer, on their way
)


def spare_for(experts: float) -> int:
    return int((KEPT + experts * EXPERT_BYTES) / (1 - gpu_experts.RESERVE_SHARE)) + 1


@needs_cuda_parts
def test_numbers_and_shares(profile: str) -> None:
    assert placed() == [(), ()]
    assert placed(gpu_experts=3) == [(0, 1, 2)] * 2
    assert placed(gpu_experts=0.25) == [(0, 1, 2, 3)] * 2
    assert placed(gpu_experts=1.0) == [tuple(range(EXPERTS))] * 2
    assert placed(gpu_experts=3, profile=profile) == [(2, 5, 11), (0, 1, 7)]
    assert placed(gpu_experts=3, device="cpu") == [(), ()]


@needs_cuda_parts
def test_auto_takes_what_is_left(profile: str) -> None:
    assert placed(gpu_experts="auto", spare=0) == [(), ()]
    assert placed(gpu_experts="auto", dynamic=False, spare=spare_for(13.5)) == [tuple(range(6))] * 2
    # Where experts are exchanged, two layers have their spare places besides.
    spares = 2 * expert_cache.MOST_SPARES
    assert placed(gpu_experts="auto", spare=spare_for(13.5 + spares)) == [tuple(range(6))] * 2
    assert placed(gpu_experts="auto") == [tuple(range(EXPERTS))] * 2
    # Few of them do not pay, but where they leave RAM.
    least = math.ceil(expert_placement.LEAST_SHARE * EXPERTS)
    assert placed(gpu_experts="auto", spare=spare_for(2 * least + 0.5 + spares)) == [tuple(range(least))] * 2
    assert placed(gpu_experts="auto", spare=spare_for(2 * least - 0.5 + spares)) == [(), ()]
    assert placed(gpu_experts="auto", ram_copy=False, spare=spare_for(2.5)) == [(0,)] * 2
    # By the profile the first layer's four come first, whichever way it is given.
    for arguments in (
        {"gpu_experts": profile},
        {"gpu_experts": "auto", "profile": profile, "dynamic": False},
    ):
        assert placed(**arguments, spare=spare_for(5.5)) == [(2, 3, 5, 11), (7,)]
        assert placed(**arguments, spare=spare_for(2.5)) == [(2, 5), ()]


@needs_cuda_parts
def test_auto_says_why_there_are_none() -> None:
    def remark(spare: dict[str, int], **arguments: Any) -> str:
        config = HybridExpertsConfig(device="cuda:0", gpu_experts="auto", **arguments)
        (found,) = HybridExperts.plan_placement(nn.Module(), {"e": (module(), config)}, spare).values()
        assert isinstance(found, ExpertPlacement) and not found.resident
        if arguments:
            return found.remark
        made = HybridExperts.build(module(), config)
        made.place(found)
        assert not made.lends and "cuda:0" not in made.footprint()
        return found.remark

    assert remark({}).startswith("nothing is left to them here, as with tp")
    few = {"cuda:0": spare_for(1.5 + expert_cache.MOST_SPARES)}
    assert remark(few) == "there would be room for 1 of 16 of each layer, and fewer than 4 do not pay"
    # As bf16 they take more than twice the memory, and do not move.
    said = "the GPU has no kernel for q4_k; with a number or a share they lie there as bf16"
    assert remark({"cuda:0": 1 << 34}, weights="q4_k") == said


@needs_cuda_parts
def test_layers_of_two_formats_share_what_is_left() -> None:
    """Rules of one operator with other arguments do not each take all of it."""

    def taken(spare: int, formats: list[str]) -> int:
        modules: dict[str, Any] = {
            f"layers.{layer}.experts": (
                module(),
                HybridExpertsConfig(device="cuda:0", gpu_experts="auto", weights=weights),  # type: ignore[arg-type]
            )
            for layer, weights in enumerate(formats)
        }
        size = 0
        for path, found in HybridExperts.plan_placement(nn.Module(), modules, {"cuda:0": spare}).items():
            made = HybridExperts.build(*modules[path])
            assert isinstance(found, ExpertPlacement)
            made.place(found)
            size += made.footprint().get("cuda:0", 0)
        return size

    spare = 2 * spare_for(2 * (9 + expert_cache.MOST_SPARES))
    alone, mixed = taken(spare, ["bf16"] * 4), taken(spare, ["bf16", "int8"] * 2)
    room = int(spare * (1 - gpu_experts.RESERVE_SHARE)) - gpu_experts.RESERVE_BYTES
    assert 0 < alone <= room and 0 < mixed <= room


@needs_cuda_parts
def test_the_plan_counts_them(tiny_qwen3_moe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_up_a_gpu(monkeypatch)
    config = transformers.AutoConfig.from_pretrained(tiny_qwen3_moe)
    sizes = {}
    for value in (0, 2, "auto"):
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
        replace = {"operator": "hybrid_experts", "gpu_experts": value}
        plan = ktinject.plan(model, [{"name": "e", "match": {"path": r".*\.experts"}, "replace": replace}])
        sizes[value] = plan.bytes["cuda:0"]
        found = {0: "handoff: flags", 2: "2 of 8 experts", "auto": "8 of 8 experts"}[value]
        assert found in str(plan)
    expert = 3 * 64 * 32 * 2
    tables = 3 * gpu_experts.GpuExperts.table_bytes(8)
    assert sizes[2] - sizes[0] == 3 * 2 * expert + tables
    assert sizes["auto"] - sizes[0] == 3 * 8 * expert + tables


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=needs_cuda_parts)])
def test_what_cannot_be_placed_is_refused(tmp_path: Path, profile: str, device: str) -> None:
    for bad in ({"gpu_experts": -1}, {"gpu_experts": 1.5}, {"gpu_experts": "all"},
                {"gpu_experts": profile, "profile": profile}, {"profile": profile}):  # fmt: skip
        with pytest.raises(ValueError, match="gpu_experts"):
            HybridExpertsConfig(**bad)
    with pytest.raises(ValueError, match="17 of its experts are to be on the GPU, and it has 16"):
        placed(gpu_experts=17, device=device)
    with pytest.raises(ValueError, match="has nothing for it, and it has 16 experts"):
        placed(layers=3, gpu_experts=1, profile=profile, device=device)
    for text in ("{", "[]", '{"experts": {"layers.0.experts": [1, -2]}}', '{"experts": 3}'):
        file = tmp_path / "bad.json"
        file.write_text(text)
        with pytest.raises(ValueError, match=r"ktinject profile MODEL --prompts FILE"):
            placed(gpu_experts=1, profile=str(file), device=device)


def test_a_build_without_cuda_parts_refuses_a_gpu(
    tiny_qwen3_moe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the plan, not when the weights are there; whether experts go to the GPU or not."""
    gpu = machine.Gpu(0, "made up", 1 << 34, 1 << 34, (9, 0))
    here = dataclasses.replace(machine.detect(), gpus=(gpu,), no_gpu="", cuda_built=False)
    monkeypatch.setattr(machine, "detect", lambda **how: here)
    config = transformers.AutoConfig.from_pretrained(tiny_qwen3_moe)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    assert {replacement.device for replacement in ktinject.plan(model, "auto").replacements} == {"cpu"}
    for value in (0, 2):
        with pytest.raises(
            ktinject.PlanError, match="it needs ktinject's CUDA parts, and this build has none"
        ):
            ktinject.plan(model, "auto", devices="cuda:0", variables={"gpu_experts": value})


# --- on a GPU ---


@pytest.fixture
def cuda() -> str:
    if not torch.cuda.is_available() or not _native.cuda_built():
        pytest.skip("no CUDA device, or built without CUDA")
    return "cuda:0"


@gpu
@pytest.mark.parametrize("weights", ["bf16", "int8", "int4"])
@pytest.mark.parametrize("tokens", [0, 1, 3, 8, 100])
def test_eager(cuda: str, tokens: int, weights: str) -> None:
    made, arguments = hybrid(cuda, weights=weights), inputs(tokens, device=cuda)
    with torch.inference_mode():
        for _ in range(2):
            out = made(*arguments)
            assert out.device == arguments[0].device
            assert torch.equal(out.cpu(), plain(weights=weights)(*inputs(tokens)))


@gpu
@pytest.mark.parametrize("mode", ["flags", "host_func"])
def test_replays(cuda: str, mode: str) -> None:
    made = hybrid(cuda, handoff=mode)
    assert mode in made.describe()["handoff"]
    arguments = inputs(3, device=cuda)
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode():
        with torch.cuda.graph(graph):
            out = made(*arguments)
        for seed in range(20):
            for to, value in zip(arguments, inputs(3, seed)):
                to.copy_(value)
            handoff.wake()
            graph.replay()
            assert torch.equal(out.cpu(), plain()(*inputs(3, seed)))


@gpu
def test_gradients_on_the_gpu(cuda: str) -> None:
    x, ids, weights = inputs(3)
    want = x.float().requires_grad_()
    plain()(want, ids, weights).sum().backward()
    leaf = x.to(cuda).float().requires_grad_()
    made = hybrid(cuda)
    made(leaf, ids.to(cuda), weights.to(cuda)).sum().backward()
    assert want.grad is not None and leaf.grad is not None
    assert (leaf.grad.cpu() - want.grad).abs().max() <= 1e-4 * want.grad.abs().max()


@gpu
def test_a_bad_id_is_raised_by_the_next_call(cuda: str) -> None:
    made = hybrid(cuda)
    x, ids, weights = inputs(2, device=cuda)
    with torch.inference_mode(), pytest.raises(OperatorError, match="routed to expert"):
        made(x, ids + EXPERTS + 1, weights)
        torch.cuda.synchronize()
        made(x, ids, weights)
    with torch.inference_mode():
        assert torch.equal(made(x, ids, weights).cpu(), plain()(*inputs(2)))


GPU_FORMATS = [("bf16", "bf16", 128), ("int8", "bf16", 128), ("int4", "int4", 32), ("bf16", "int4", 128)]


@gpu
@pytest.mark.parametrize("tokens", [1, 3, 8, 40])
@pytest.mark.parametrize("share", [0.25, 1.0])
@pytest.mark.parametrize("weights,gpu_weights,group", GPU_FORMATS)
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v4", "nemotron_h", "gemma4_text"])
def test_experts_on_the_gpu(
    cuda: str, family: str, weights: str, gpu_weights: str, group: int, share: float, tokens: int
) -> None:
    """Against the reference on the weights that each side holds; the CPU's part is as exact as its format."""
    leaf = models.leaf(models.tiny(family))[1]
    both = {"weights": weights, "group_size": group}
    made = hybrid(cuda, leaf, gpu_experts=share, gpu_weights=gpu_weights, **both)
    cpu_side = filled(CpuExperts.build(leaf, CpuExpertsConfig(device="cpu", **both)), leaf)
    gpu_side = filled(
        CpuExperts.build(leaf, CpuExpertsConfig(device="cpu", weights=gpu_weights, group_size=group)), leaf
    )
    spec = made.spec
    random = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, spec.hidden_size, generator=random)
    ids = torch.rand(tokens, spec.num_experts, generator=random).argsort(-1)[:, :2].contiguous()
    ids[0, 0] = -1
    ids[-1, 1] = spec.num_experts
    routing = torch.rand(tokens, 2, generator=random)
    resident = torch.zeros(spec.num_experts + 1, dtype=torch.bool)
    resident[list(made.resident)] = True
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        inputs = x.to(dtype)
        weights_of = reference.weights_of(
            spec, {name: gpu_side.unpack(name) for name in gpu_side.parameter_shapes()}
        )
        want = (
            reference.experts(
                inputs.float(), torch.where(resident[ids], ids, -1), routing, weights_of, spec, "bf16"
            ).float()
            + cpu_side(inputs, torch.where(resident[ids], -1, ids), routing).float()
        )
        with torch.inference_mode():
            out = made(inputs.to(cuda), ids.to(cuda), routing.to(cuda))
        assert out.dtype == dtype
        tolerance = {torch.float32: 3e-3, torch.bfloat16: 8e-3, torch.float16: 3e-3}[dtype]
        assert reference.relative_error(out.cpu(), want) <= tolerance


@gpu
def test_replays_with_experts_on_both(cuda: str) -> None:
    made, eager = hybrid(cuda, gpu_experts=5), hybrid(cuda, gpu_experts=5)
    arguments = inputs(3, device=cuda)
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode():
        with torch.cuda.graph(graph):
            out = made(*arguments)
        for seed in range(20):
            for to, value in zip(arguments, inputs(3, seed)):
                to.copy_(value)
            handoff.wake()
            graph.replay()
            assert torch.equal(out, eager(*arguments))
            assert reference.relative_error(out.cpu(), plain()(*inputs(3, seed))) <= 8e-3


# --- the trained models, as transformers has them: no expert on the GPU, some, all ---


class Trained:
    """A trained model that is not swapped, some prompts, and what rounding in bf16 experts does to its logits."""

    STEPS = 32

    def __init__(self, name: str) -> None:
        self.folder = trained_model(name)
        self.plain = AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32).eval()
        tokenizer = AutoTokenizer.from_pretrained(self.folder, padding_side="left")
        lines = trained_model("prompts.jsonl").read_text("utf-8").splitlines()[:8]
        prompts = [json.loads(line)["prompt"][: 150 + 40 * i] for i, line in enumerate(lines)]
        self.prompts = dict(tokenizer(prompts, return_tensors="pt", padding=True))
        tokens, logits = reference.write(
            self.swapped("cpu", operator="cpu_experts"), self.prompts, self.STEPS
        )
        want = reference.read(self.plain, self.prompts, tokens)
        self.rounding = reference.Rounding.between(logits, want)

    def swapped(self, device: str, **replace: Any) -> Any:
        rules = [{"name": "e", "match": {"path": r".*\.experts"}, "replace": replace}]
        return ktinject.load(self.folder, rules, devices=[device], dtype=torch.float32, progress=False)

    def check(self, model: Any, batch: int) -> int:
        prompts = {name: tensor[:batch] for name, tensor in self.prompts.items()}
        tokens, logits = reference.write(model, prompts, self.STEPS)
        return reference.same_text(tokens, logits, reference.read(self.plain, prompts, tokens), self.rounding)


@pytest.fixture(scope="module", params=["tiny-deepseek-v3", "tiny-qwen3-moe"])
def trained(request: pytest.FixtureRequest) -> Trained:
    torch.set_num_threads(2)
    return Trained(request.param)


# Without a GPU one of the models is enough: the comparison serves the tests on a GPU.
@pytest.mark.parametrize(
    "trained", [pytest.param("tiny-deepseek-v3", marks=pytest.mark.gpu), "tiny-qwen3-moe"], indirect=True
)
def test_text_of_a_damaged_model_is_told_from_rounding(trained: Trained) -> None:
    whole = trained.swapped("cpu", operator="hybrid_experts")
    assert trained.check(whole, 3) >= 2
    experts = next(m for m in whole.modules() if isinstance(m, HybridExperts))
    # One expert of one layer; there are 32 or more in each.
    experts.load("down_proj", experts.unpack("down_proj", 5).roll(1, 0), 5, None)
    with pytest.raises(AssertionError, match="in the mean"):
        trained.check(whole, 3)


PLACEMENTS: list[dict[str, Any]] = [
    {"operator": "cpu_experts"},
    {"operator": "hybrid_experts"},
    {"operator": "hybrid_experts", "gpu_experts": 0.25},
    {"operator": "hybrid_experts", "gpu_experts": 1.0},
    {"operator": "hybrid_experts", "gpu_experts": 0.25, "dynamic": True},
]


@gpu
@pytest.mark.parametrize("replace", PLACEMENTS, ids=lambda r: ",".join(map(str, r.values())))
def test_the_trained_models_write_the_same(cuda: str, trained: Trained, replace: dict[str, Any]) -> None:
    """Against the model of transformers, which knows nothing of all this; batches of 1, 3 and 8."""
    model = trained.swapped(cuda, **replace)
    same = {batch: trained.check(model, batch) for batch in (1, 3, 8)}
    print(trained.folder.name, replace, "rows that agree wholly:", same, trained.rounding)
    assert same[8] >= 6
