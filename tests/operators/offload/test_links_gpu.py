"""Experts of a layer over the links of two GPUs, against one link and fp64."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import expert_cases
import models
import pytest
import reference
import torch
from expert_cases import ON_GPU
from streaming_cases import EXPERTS, exact, filled, inputs
from torch import Tensor

import ktinject
from ktinject import env, measured
from ktinject.errors import OperatorError
from ktinject.operators.cpu_experts import CpuExperts, CpuExpertsConfig
from ktinject.operators.hybrid_experts import HybridExperts, HybridExpertsConfig
from ktinject.operators.offload import links, ring, streaming
from ktinject.operators.offload.links import LinkRates

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


def on_two(operator: CpuExperts, home: int = 0, linked: bool | None = True) -> Any:
    layer = streaming.StreamedExperts(operator.spec, operator.native, torch.device("cuda", home))
    layer.add_helper(torch.device("cuda", 1 - home))
    layer.linked = linked
    return layer


def hybrid(home: int = 0, **arguments: Any) -> Any:
    """As it is swapped in by a plan for two GPUs; long prompts use both links."""
    config = HybridExpertsConfig(
        device=f"cuda:{home}", prefill="gpu", links=["cuda:0", "cuda:1"], **arguments
    )
    made: Any = filled(256, 96, operator=HybridExperts, config=config)
    assert [str(helper.ring.device) for helper in made.streamed.helpers] == [f"cuda:{1 - home}"]
    made.streamed.linked = True
    return made


@pytest.mark.parametrize("home", [0, 1])
@pytest.mark.parametrize("kind", ON_GPU)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_two_links_against_one_and_fp64(
    kind: str, dtype: torch.dtype, home: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ring, "CHUNK_BYTES", 2 * 6 * 256 * 96)  # two experts at a time
    operator = filled(256, 96, **ON_GPU[kind])
    x, ids, weights = inputs(300, 256)
    layer = on_two(operator, home)
    given = [one.to(f"cuda:{home}") for one in (x.to(dtype), ids, weights)]
    found = layer.forward(*given)
    assert found.dtype == dtype and found.device == given[0].device
    assert reference.relative_error(found.cpu(), exact(operator, x, ids, weights)) < 0.01
    for _ in range(5):
        assert torch.equal(layer.forward(*given), found), "always added up in one order"
    layer.linked = False
    alone = layer.forward(*given)
    assert reference.relative_error(found.cpu(), alone.cpu()) < (1e-4 if dtype == torch.float32 else 5e-3)


def test_biases() -> None:
    module = models.leaf(models.tiny("gpt_oss"))[1]
    operator = CpuExperts.build(module, CpuExpertsConfig(device="cpu"))
    operator.allocate()
    random = torch.Generator().manual_seed(0)
    for name, shape in operator.parameter_shapes().items():
        expert_cases.load(operator, name, torch.randn(shape, generator=random) * 0.1)
    operator.finish()
    spec = operator.spec
    x = torch.randn(300, spec.hidden_size, generator=random).bfloat16()
    ids = torch.rand(300, spec.num_experts, generator=random).argsort(-1)[:, :2].contiguous()
    weights = torch.rand(300, 2, generator=random)
    found = on_two(operator).forward(x.cuda(), ids.cuda(), weights.cuda())
    assert reference.relative_error(found.cpu(), exact(operator, x, ids, weights)) < 0.01


@pytest.mark.parametrize("weights", ["bf16", "int4"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_experts_on_the_gpu_and_two_links(
    weights: str, dynamic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ring, "CHUNK_BYTES", 3 * 6 * 256 * 96)
    made = hybrid(gpu_experts=5, dynamic=dynamic, weights=weights)
    x, ids, shares = inputs(300, 256)
    given = x.cuda(), ids.cuda(), shares.cuda()
    want = exact(made, x, ids, shares)
    with torch.inference_mode():
        for _ in range(3):
            assert reference.relative_error(made(*given).cpu(), want) < 0.01
        monkeypatch.setattr(
            HybridExperts, "_streams", lambda self, tokens, top_k: 8
        )  # and the CPU the others
        for _ in range(3):
            assert reference.relative_error(made(*given).cpu(), want) < 0.01
        with pytest.raises(OperatorError, match="allowed are 0 to"):
            made(given[0], given[1] + EXPERTS, given[2])
        assert reference.relative_error(made(*given).cpu(), want) < 0.01


@pytest.mark.parametrize("stranger", [-2, EXPERTS + 1])
def test_an_id_that_is_no_expert(stranger: int) -> None:
    operator, (x, ids, weights) = filled(256, 96), inputs(300, 256)
    layer, wrong = on_two(operator), ids.clone()
    wrong[20, 2] = stranger
    with pytest.raises(OperatorError, match=f"found {stranger}; allowed are 0 to {EXPERTS - 1}"):
        layer.forward(x.cuda(), wrong.cuda(), weights.cuda())
    found = layer.forward(x.cuda(), ids.cuda(), weights.cuda()).cpu()
    assert reference.relative_error(found, exact(operator, x, ids, weights)) < 0.01


def test_layers_on_two_gpus_follow_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each helps the other, with hidden states that cross; nothing is kept from prompt to prompt."""
    monkeypatch.setattr(ring, "CHUNK_BYTES", 2 * 6 * 256 * 96)
    operators = [filled(256, 96, seed) for seed in range(6)]
    layers = [on_two(operator, number // 2 % 2) for number, operator in enumerate(operators)]
    x, ids, weights = inputs(300, 256)

    def through(turn: int, check: bool) -> None:
        hidden = x
        moved = x.cuda().float()
        for number, (layer, operator) in enumerate(zip(layers, operators)):
            layer.linked = (turn + number) % 5 != 4  # some of them alone
            home = layer.ring.device
            moved = moved.to(home, non_blocking=True)
            given = moved.bfloat16()
            found = layer.forward(given, ids.to(home), weights.to(home), dtype=torch.float32)
            if check:
                hidden = given.cpu()
                assert reference.relative_error(found.cpu(), exact(operator, hidden, ids, weights)) < 0.01, (
                    number
                )
            moved = found / found.std()

    for turn in range(10):
        through(turn, True)
    torch.cuda.synchronize(0)
    torch.cuda.synchronize(1)
    held = [torch.cuda.memory_allocated(device) for device in range(2)]
    for turn in range(10):
        through(turn, False)
    assert [torch.cuda.memory_allocated(device) for device in range(2)] <= held


def test_another_stream_than_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """And work that is queued on the helper before, behind which its part has to wait."""
    monkeypatch.setattr(ring, "CHUNK_BYTES", 2 * 6 * 256 * 96)
    operator, (x, ids, weights) = filled(256, 96), inputs(300, 256)
    layer, want = on_two(operator), exact(operator, x, ids, weights)
    busy = torch.randn(4096, 4096, device="cuda:1")
    for _ in range(10):
        with torch.cuda.stream(torch.cuda.Stream("cuda:0")):
            given = [one.cuda() for one in (x, ids, weights)]
            for _ in range(5):
                busy = busy @ busy / 64
            found = layer.forward(*given)
            del given
            torch.full((1 << 20,), math.nan, device="cuda:0")  # takes memory that is free too early
            torch.full((1 << 20,), math.nan, device="cuda:1")
            assert reference.relative_error(found.cpu(), want) < 0.01


@pytest.mark.parametrize("what", ["ring", "answers"])
def test_a_helper_that_is_full(
    what: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    operator, (x, ids, weights) = filled(256, 96), inputs(300, 256)
    given = x.cuda(), ids.cuda(), weights.cuda()
    layer, real = on_two(operator), torch.empty
    if what == "answers":
        layer.forward(*given)

    def scarce(*shape: Any, **how: Any) -> Tensor:
        if str(how.get("device", "")) == "cuda:1":
            raise torch.OutOfMemoryError("no more")
        return real(*shape, **how)

    with monkeypatch.context() as full:
        full.setattr(torch, "empty", scarce)
        found = layer.forward(*given).cpu()
    assert reference.relative_error(found, exact(operator, x, ids, weights)) < 0.01
    assert not layer.helpers and "cuda:1: no room for the experts of long prompts" in caplog.text
    assert torch.equal(layer.forward(*given).cpu(), found)


def test_links_of_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(env, "settings", lambda: env.Settings(cache=tmp_path))
    monkeypatch.setattr(links, "_rates", {})
    operator = filled(1024, 512)
    layer = on_two(operator, linked=None)
    found = layer.links_for(4096)
    assert found is None or len(found.together_s) == 2
    (file,) = measured.folder().iterdir()
    rates = LinkRates.of_values(json.loads(file.read_text())["values"])
    assert rates is not None and rates.alone > 1e8 and rates.crossing > 1e8
    print(rates)
    layer.linked = True
    assert layer.links_for(4096) is not None


def test_a_model_over_two_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long prompts of a swapped model: the same tokens over both links as over each layer's own."""
    original = models.tiny("qwen3_moe", num_hidden_layers=4, hidden_size=64, head_dim=32)
    original.bfloat16().save_pretrained(tmp_path)
    rule = {
        "name": "experts",
        "match": {"role": "routed_experts"},
        "replace": {"operator": "hybrid_experts", "prefill": "gpu"},
    }
    ids = torch.randint(3, 90, (2, 150), generator=torch.Generator().manual_seed(0)).cuda()
    found = []
    for devices, how in ((["cuda:0"], None), (["cuda:0", "cuda:1"], False), (["cuda:0", "cuda:1"], True)):
        model = ktinject.load(tmp_path, [rule], devices=devices, progress=False)
        experts = [module for module in model.modules() if isinstance(module, HybridExperts)]
        assert {len(one.streamed.helpers) for one in experts} == {len(devices) - 1}
        for one in experts:
            one.streamed.linked = how
        arguments = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": 4}
        answers = [model.generate(ids, **arguments) for _ in range(3)]
        assert all(torch.equal(answer, answers[0]) for answer in answers)
        with torch.no_grad():
            found.append(model(ids, use_cache=False).logits.float().cpu())
        if len(devices) == 2:
            what = "the experts of long prompts"
            assert {d for d, m in model.ktinject.runtime_memory.items() if what in m.workspace} == {*devices}
    for other in found[1:]:  # where two experts are nearly as good, a router may take the other one
        assert other.isfinite().all()
        error = (other - found[0]).norm(dim=-1) / found[0].norm(dim=-1)
        assert error.median() < 0.01 and (error < 0.05).float().mean() > 0.9
