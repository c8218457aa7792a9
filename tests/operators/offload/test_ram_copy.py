"""`ram_copy: false`: experts on the GPU leave RAM while they are loaded, and nobody asks RAM for them afterwards."""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import models
import pytest
import reference
import torch
import transformers
from handoff_cases import make_up_a_gpu
from torch import Tensor, nn
from trained import trained_model

import ktinject
from ktinject import _native
from ktinject.cli.measure import resident_bytes
from ktinject.errors import OperatorError
from ktinject.operators import hybrid_experts
from ktinject.operators.cpu_experts import CpuExperts, CpuExpertsConfig, native_experts
from ktinject.operators.hybrid_experts import HybridExperts, HybridExpertsConfig
from ktinject.operators.offload.hybrid_config import GPU_FORMATS
from ktinject.operators.offload.streaming import FEWEST_TOKENS
from ktinject.operators.probes import experts as routed_experts

gpu = pytest.mark.gpu
needs_cuda_parts = pytest.mark.skipif(not _native.cuda_built(), reason="built without CUDA")
FAMILIES = ("qwen3_moe", "gpt_oss", "nemotron_h")  # with a gate; with biases; without a gate


def built(leaf: nn.Module, device: str = "cuda:0", **arguments: Any) -> HybridExperts:
    config = HybridExpertsConfig(device=device, **arguments)
    (placement,) = HybridExperts.plan_placement(nn.Module(), {"e": (leaf, config)}, {}).values()
    assert not isinstance(placement, str), placement
    made = HybridExperts.build(leaf, config)
    made.place(placement)
    return made


def load(made: CpuExperts, leaf: nn.Module, threads: int = 1) -> None:
    """All weights, an expert at a time."""
    pieces = [
        (name, parameter[expert].detach(), expert)
        for name, parameter in reference.parameters_of(leaf).items()
        for expert in range(made.num_experts)
    ]

    def one(piece: tuple[str, Tensor, int]) -> None:
        name, value, expert = piece
        made.load(name, value, expert, None)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(one, pieces))


# --- the native experts ---

SHAPE = dataclasses.replace(
    routed_experts.probe(models.leaf(models.tiny("qwen3_moe"))[1]),  # type: ignore[type-var]
    num_experts=12,
    hidden_size=512,
    intermediate_size=512,
)


def native(weights: str = "bf16") -> tuple[_native.Experts, dict[str, Tensor]]:
    experts = native_experts(SHAPE, weights, 128, "auto")
    random = torch.Generator().manual_seed(0)
    values = {name: torch.randn(12, 512, 512, generator=random) / 23 for name in ("gate", "up", "down")}
    experts.allocate()
    for name, value in values.items():
        for expert in range(12):
            experts.load(name, expert, value[expert])
    return experts, values


def compute(experts: _native.Experts, *ids: int) -> Tensor:
    x = torch.randn(3, 512, generator=torch.Generator().manual_seed(1)).bfloat16()
    out = torch.empty_like(x)
    experts.forward(x, torch.tensor([ids] * 3), torch.ones(3, len(ids)), out)
    return out


@pytest.mark.parametrize("weights", ["bf16", "int8", "int4"])
def test_what_leaves_ram_gives_its_memory_back_and_is_refused(weights: str) -> None:
    experts, _ = native(weights)
    kept = compute(experts, 0, 7, 11)
    before = resident_bytes()
    gone = [1, 2, 3, 4, 5, 6, 8, 9, 10]
    for expert in gone:
        experts.release(expert)
    assert before - resident_bytes() >= 0.9 * len(gone) * experts.released_bytes
    assert experts.released_bytes >= 0.9 * experts.bytes / 12
    assert torch.equal(compute(experts, 0, 7, 11), kept) and torch.equal(compute(experts, 0, 7, 11, -1), kept)
    assert not experts.absent(5), "they were loaded"
    for expert in gone:
        with pytest.raises(ValueError, match=f"routed to expert {expert}, which is not in RAM"):
            compute(experts, 0, expert)
        with pytest.raises(ValueError, match=f"expert {expert}, up: the expert is not in RAM"):
            experts.unpack("up", expert, torch.empty(512, 512))
    with pytest.raises(ValueError, match="not in RAM"):
        experts.repeat(3)


def test_what_is_not_whole_cannot_leave_ram() -> None:
    experts = native_experts(SHAPE, "bf16", 128, "auto")
    with pytest.raises(ValueError, match="no memory yet"):
        experts.release(0)
    experts.allocate()
    for name in ("gate", "up"):
        experts.load(name, 0, torch.ones(512, 512))
    with pytest.raises(ValueError, match="expert 0, down: was not loaded yet"):
        experts.release(0)
    experts.load("down", 0, torch.ones(512, 512))
    for expert in (-1, 12):
        with pytest.raises(ValueError, match=f"no expert {expert}"):
            experts.release(expert)
    experts.release(0)
    with pytest.raises(ValueError, match="expert 0, up: the expert was loaded before"):
        experts.load("up", 0, torch.ones(512, 512))


# --- loading, with a GPU that only notes what comes ---


class There:
    """Stands for the experts on a GPU."""

    table_bytes = hybrid_experts.GpuExperts.table_bytes

    def __init__(self, experts: Any, num_experts: int, resident: Any, device: Any, spares: int, filled: bool):
        assert not filled and not spares
        self.came: dict[int, dict[str, Tensor]] = {}

    def put(self, experts: _native.Experts, expert: int) -> None:
        assert expert not in self.came
        self.came[expert] = unpacked(experts, expert)


def unpacked(experts: _native.Experts, expert: int) -> dict[str, Tensor]:
    found = {"gate": torch.empty(24, 40), "up": torch.empty(24, 40), "down": torch.empty(40, 24)}
    for name, value in found.items():
        experts.unpack(name, expert, value)
    return found


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hybrid_experts, "GpuExperts", There)


@needs_cuda_parts
@pytest.mark.parametrize("threads", [1, 4])
def test_each_leaves_as_soon_as_it_is_whole(there: None, threads: int) -> None:
    leaf = models.leaf(models.tiny("qwen3_moe"))[1]
    made = built(leaf, gpu_experts=3, ram_copy=False)
    whole = CpuExperts.build(leaf, CpuExpertsConfig(device="cpu"))
    whole.allocate()
    made.allocate()
    spec = made.spec
    assert (spec.hidden_size, spec.intermediate_size) == (40, 24), "as `unpacked` takes them"
    load(whole, leaf)
    load(made, leaf, threads)
    here: Any = made.on_gpu
    assert sorted(here.came) == [0, 1, 2] == sorted(made._left)
    for expert, values in here.came.items():
        for name, want in unpacked(whole.native, expert).items():
            assert torch.equal(values[name], want), (expert, name)
    assert not made.native.absent(9)
    with pytest.raises(OperatorError, match="was loaded before, and has left RAM"):
        load(made, leaf)
    # What needs them all in RAM says what to do.
    x, weights = torch.randn(2, 40), torch.ones(2, 1)
    with pytest.raises(OperatorError, match=r"3 of 6 experts lie on cuda:0 alone.*Load .* ram_copy: true"):
        made(x, torch.tensor([[5], [6]]), weights)
    with pytest.raises(OperatorError, match="saving and gradients need all of them in RAM"):
        made.unpack("down_proj", 5)
    assert made.packed_weights() is None and not made.repeats
    assert whole.packed_weights() is not None and whole.repeats


@needs_cuda_parts
def test_only_one_that_is_not_whole_waits(there: None) -> None:
    """Expert by expert, as files have them: no more than one is in RAM that is to leave it."""
    leaf = models.leaf(models.tiny("qwen3_moe"))[1]
    made = built(leaf, gpu_experts=1.0, ram_copy=False)
    made.allocate()
    for expert in range(made.num_experts):
        assert len(made._left) == expert
        for name, parameter in reference.parameters_of(leaf).items():
            made.load(name, parameter[expert].detach(), expert, None)
    assert len(made._left) == made.num_experts


# --- rules and plans ---


@pytest.mark.parametrize(
    "arguments, says",
    [
        ({}, "gpu_experts is 0"),
        ({"gpu_experts": 2, "dynamic": True}, "dynamic moves experts"),
        ({"gpu_experts": 2, "weights": "int4", "gpu_weights": "bf16"}, "gpu_weights bf16"),
        ({"gpu_experts": 2, "weights": "q4_k"}, "weights is q4_k"),
    ],
)
def test_what_needs_the_copy_is_refused(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        HybridExpertsConfig(ram_copy=False, **arguments)


def test_experts_of_auto_do_not_move_without_a_copy() -> None:
    assert HybridExpertsConfig(gpu_experts="auto").moves
    assert not HybridExpertsConfig(gpu_experts="auto", ram_copy=False).moves


def test_without_a_gpu_it_has_no_effect() -> None:
    leaf = models.leaf(models.tiny("qwen3_moe"))[1]
    made = HybridExperts.build(leaf, HybridExpertsConfig(device="cpu", gpu_experts=2, ram_copy=False))
    assert made.describe()["handoff"].endswith("without effect: gpu_experts=2, ram_copy=False")
    made.allocate()
    load(made, leaf)
    made.finish()
    x, ids, weights = torch.randn(2, 40), torch.tensor([[0], [5]]), torch.ones(2, 1)
    assert made(x, ids, weights).abs().min() > 0 and made.packed_weights() is not None


@needs_cuda_parts
@pytest.mark.parametrize("operator", ["hybrid_experts", "deferred_moe"])
def test_the_plan_has_what_leaves_ram_on_the_gpu_alone(
    tiny_qwen3_moe: Path, monkeypatch: pytest.MonkeyPatch, operator: str
) -> None:
    make_up_a_gpu(monkeypatch)
    config = transformers.AutoConfig.from_pretrained(tiny_qwen3_moe)
    config.name_or_path, config.hidden_size, config.moe_intermediate_size = "", 256, 256  # pages of their own
    path = r".*\.experts" if operator == "hybrid_experts" else r".*\.mlp"
    plans = {}
    for ram_copy in (True, False):
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
        replace = {"operator": operator, "gpu_experts": 5, "ram_copy": ram_copy}
        plans[ram_copy] = ktinject.plan(model, [{"name": "e", "match": {"path": path}, "replace": replace}])
    layers, expert = 3, 3 * 256 * 256 * 2
    spared = plans[True].bytes["cpu"] - plans[False].bytes["cpu"]
    assert 0.95 * layers * 5 * expert <= spared <= layers * 5 * expert
    assert plans[True].bytes["cuda:0"] == plans[False].bytes["cuda:0"]
    passing = plans[False].runtime_memory["cpu"].workspace["experts on their way to the GPU"]
    assert passing == spared // layers, "of one layer at a time"
    assert "5 of 8 experts as bf16, which are not in RAM" in str(plans[False])
    assert "not in RAM" not in str(plans[True])
    # Where the GPU has no room for them, fewer of them are tried, and none, which then would stay in RAM.
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    rules = [{"name": "e", "match": {"path": path}, "replace": {**replace, "prefill": "cpu"}}]
    full = ktinject.plan(model, rules).bytes["cuda:0"]
    short = ktinject.plan(model, rules, devices="cuda:0", budget={"cuda:0": full - layers * expert})
    counts = [remedy.arguments["variables"].get("e.gpu_experts") for remedy in short.remedies[:1]]
    assert short.problems and counts and counts[0] in (1, 2, 3, 4)


# --- on a GPU ---


@pytest.fixture
def cuda() -> str:
    if not torch.cuda.is_available() or not _native.cuda_built():
        pytest.skip("no CUDA device, or built without CUDA")
    return "cuda:0"


@gpu
@pytest.mark.parametrize("prefill", ["cpu", "gpu", "part"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("weights", GPU_FORMATS)
def test_steps_and_prompts_are_those_with_a_copy(cuda: str, weights: str, family: str, prefill: str) -> None:
    """Bit by bit: the same kernels read the same bytes. Some of the experts that leave lie between others."""
    # Experts are streamed where both widths are multiples of 8.
    widths = {"moe_latent_size": 40} if family == "nemotron_h" else {}
    leaf = models.leaf(models.tiny(family, **widths))[1]
    both = {"weights": weights, "gpu_experts": 0.5, "prefill": "auto" if prefill == "part" else prefill}
    both |= {"dynamic": False} | ({"group_size": 32} if weights == "int4" else {})
    try:
        made = [built(leaf, cuda, ram_copy=ram_copy, **both) for ram_copy in (True, False)]
    except OperatorError as error:
        pytest.skip(f"{family} in {weights}: {error}")
    experts = made[0].num_experts
    for operator in made:
        operator.resident = tuple(range(1, experts, 2))
        operator.allocate()
        load(operator, leaf)
        operator.finish()
        if prefill == "part":
            operator._streams = lambda tokens, top_k: 3 * experts // 4 if tokens >= FEWEST_TOKENS else 0  # type: ignore[method-assign]
    spec = made[0].spec
    for tokens in (1, 5, 40, FEWEST_TOKENS + 3):
        random = torch.Generator().manual_seed(tokens)
        x = torch.randn(tokens, spec.hidden_size, generator=random).bfloat16().to(cuda)
        ids = torch.rand(tokens, experts, generator=random).argsort(-1)[:, :2].contiguous()
        ids[0, 0] = -1
        routing = torch.rand(tokens, 2, generator=random).to(cuda)
        with torch.inference_mode():
            want, found = (operator(x, ids.to(cuda), routing) for operator in made)
        assert want.abs().max() > 0 and torch.equal(found, want), tokens
    with pytest.raises(OperatorError, match="ram_copy: true"):
        made[1](x.float().requires_grad_(), ids.to(cuda), routing)


@gpu
def test_a_model_without_a_copy_writes_the_same(cuda: str, tmp_path: Path) -> None:
    """Also a second time, beside a packed cache; it cannot be saved, and says why."""
    folder = trained_model("tiny-qwen3-moe")
    prompt = torch.arange(7, 60)[None].to(cuda)
    texts = []
    for ram_copy in (True, False, False):
        replace = {"operator": "hybrid_experts", "gpu_experts": 0.5, "dynamic": False, "ram_copy": ram_copy}
        rules = [{"name": "e", "match": {"role": "routed_experts"}, "replace": replace}]
        model = ktinject.load(folder, rules, devices=cuda, progress=False)
        with torch.inference_mode():
            texts.append(model.generate(prompt, max_new_tokens=24, do_sample=False).tolist())
    assert texts[0] == texts[1] == texts[2]
    with pytest.raises(OperatorError, match="ram_copy: true"):
        model.save_pretrained(tmp_path)


@gpu
def test_ram_holds_only_what_the_gpu_does_not(cuda: str) -> None:
    leaf = models.leaf(models.tiny("qwen3_moe", hidden_size=1024, moe_intermediate_size=768, num_experts=32))[
        1
    ]
    used = {}
    for ram_copy in (True, False):
        made = built(leaf, cuda, gpu_experts=0.75, ram_copy=ram_copy, dynamic=False, prefill="gpu")
        before = resident_bytes()
        made.allocate()
        load(made, leaf)
        made.finish()
        used[ram_copy] = resident_bytes() - before
    spared = 24 * made.native.released_bytes
    assert used[True] - used[False] >= 0.8 * spared, used
