"""One model shared by two processes: the same as one process has, and failures are everybody's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import models
import processes
import pytest
import torch
from double import EXPERTS, machine, on_meta, saved

import ktinject
from ktinject import OperatorError, PlanError
from ktinject.checkpoints.formats.base import Codes, Fp8Blocks
from ktinject.distributed import process_group, tensor_parallel

CPU = [{**EXPERTS, "replace": {"operator": "cpu_experts"}}]
# Dense layers by an operator of ours: the part of a layer that a process has is a layer.
DENSE = [
    *CPU,
    {
        "name": "dense",
        "match": {"path": r".*(self_attn|shared_experts)\.\w+_proj", "class": "Linear"},
        "replace": {"operator": "cpu_linear", "weights": "bf16"},
    },
]
# Of logits, relative to the greatest: parts are summed in another order. In bf16, each part is rounded on its own.
SAME, SAME_BF16 = 1e-5, 4e-2

# name → config's changes, rules, tolerance
MODELS: dict[str, tuple[str, dict[str, Any], Any, float]] = {
    "qwen3_moe": ("qwen3_moe", {"attention_bias": True}, CPU, SAME),
    "deepseek_v3": ("deepseek_v3", {}, "deepseek-v3", SAME),
    "olmoe": ("olmoe", {}, CPU, SAME),
    "dots1": ("dots1", {"dtype": "bfloat16"}, DENSE, SAME_BF16),
}


def folder(name: str, where: Path, scale: float = 2.0, **changes: Any) -> Path:
    """A tiny model whose next tokens are clear."""
    model = models.tiny(name, **changes)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale)
    return saved(model.to(changes.get("dtype") and torch.bfloat16), where / name)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """What two processes say to all cases of this file: name → by rank."""
    where = tmp_path_factory.mktemp("models")
    folders = {key: folder(name, where, **changes) for key, (name, changes, *_) in MODELS.items()}
    qwen = folders["qwen3_moe"]
    deferred = [{"name": "defer", "match": {"path": r".*\.mlp"}, "replace": {"operator": "deferred_moe"}}]
    cases: dict[str, processes.Case] = {
        key: (processes.same, (folders[key], rules, "cpu")) for key, (_, _, rules, _) in MODELS.items()
    }
    cases |= {
        "failure": (processes.failure, (qwen, CPU, "cpu")),
        "other prompts": (processes.other_prompts, (qwen, CPU, "cpu")),
        "deferred": (processes.refused, (qwen, deferred)),
        "bad shard": (processes.bad_shard, (qwen, CPU)),  # the last: it stays broken
    }
    results = processes.run([*cases.values()])
    return dict(zip(cases, results)) | {"folders": [folders]}


@pytest.mark.parametrize("key", MODELS)
def test_same_as_one_process(found: dict[str, list[Any]], key: str) -> None:
    _, _, rules, tolerance = MODELS[key]
    one = ktinject.load(found["folders"][0][key], rules, devices="cpu", progress=False)
    ids = processes.prompt(3, 7)
    with torch.no_grad():
        expected = one(ids).logits.float()
    first, second = found[key]
    logits = torch.tensor(first["logits"])
    assert (logits - expected).abs().max() <= tolerance * expected.abs().max()
    assert first["logits"] == second["logits"], "the same bits in both"
    for way in ("greedy", "again", "sampled", "beams", "static", "stock"):
        assert first[way] == second[way], way
    if tolerance == SAME:
        assert first["greedy"] == [processes.greedy(one, processes.prompt(batch, 7)) for batch in (1, 3)]
        assert first["static"] == first["again"] == first["greedy"][1]
        torch.manual_seed(0)
        sampled = processes.greedy(one, ids, do_sample=True, temperature=0.9, top_k=20, top_p=0.95)
        assert first["sampled"] == sampled, "process 0's random numbers"
    assert "eager loop" in first["ways"]


@pytest.mark.parametrize("key", MODELS)
def test_what_each_has(found: dict[str, list[Any]], key: str) -> None:
    first, second = found[key]
    one = ktinject.plan(
        on_meta(found["folders"][0][key]), MODELS[key][2], checkpoint=found["folders"][0][key], devices="cpu"
    )
    experts = sum(
        replacement.bytes["cpu"] for replacement in one.replacements if "experts" in replacement.operator
    )
    assert first["bytes"]["cpu"] - second["bytes"]["cpu"] >= 0.9 * experts > 0, (
        "experts are in process 0 only"
    )
    assert second["bytes"]["cpu"] < one.bytes["cpu"] - experts, "and the rest is cut"
    assert first["experts read"] > 0 == second["experts read"]
    assert any("process 1 of 2" in note for note in second["notes"])
    assert first["cut"] == second["cut"] and "lm_head" in first["cut"]
    assert "each process has a part of it" in first["saving"]


def test_parts_are_what_the_plan_says(found: dict[str, list[Any]]) -> None:
    config, shapes = models.config("qwen3_moe"), found["qwen3_moe"][0]["shapes"]
    heads, size, hidden = config.num_attention_heads, config.head_dim, config.hidden_size
    attention = "model.layers.0.self_attn"
    assert shapes[f"{attention}.q_proj.weight"] == [heads * size // 2, hidden]
    assert shapes[f"{attention}.q_proj.bias"] == [heads * size // 2]
    assert shapes[f"{attention}.o_proj.weight"] == [hidden, heads * size // 2]
    assert shapes[f"{attention}.o_proj.bias"] == [hidden]
    assert shapes["model.embed_tokens.weight"] == [config.vocab_size, hidden]
    assert shapes["lm_head.weight"] == [config.vocab_size // 2, hidden]
    # An operator takes the attention of DeepSeek as a whole, and transformers' plan leaves it whole as well.
    assert not any("self_attn" in path for path in found["deepseek_v3"][0]["cut"])


def test_a_failure_is_everybodys(found: dict[str, list[Any]]) -> None:
    check_failures(*found["failure"])


def check_failures(first: list[str], second: list[str]) -> None:
    assert second == [f"process 0 of 2: {first[0]}", first[1], f"process 0 of 2: {first[2]}", first[3]]
    assert first[0] == "made to fail" and "routed to expert 100" in first[2]
    assert first[1] == first[3] == "the same afterwards"


def test_a_failure_while_loading_is_everybodys(found: dict[str, list[Any]]) -> None:
    first, second = found["bad shard"]
    assert first == ("CheckpointError", "process 1 of 2: made to fail")
    assert second == ("CheckpointError", "made to fail")


def test_everybody_gets_the_same_prompts(found: dict[str, list[Any]]) -> None:
    for kind, text in found["other prompts"]:
        assert kind == "OperatorError" and "process 1 of 2 was given [1, 6]" in text


def test_operators_that_do_not_run_so(found: dict[str, list[Any]]) -> None:
    for kind, text in found["deferred"]:
        assert kind == "PlanError" and "deferred_moe does not run with tp" in text


@pytest.mark.parametrize("size, count", [(3, "4 heads"), (4, "2 heads"), (16, "4 heads")])
def test_sizes_that_cannot_be_shared(size: int, count: str) -> None:
    with pytest.raises(
        PlanError, match=rf"{size} processes cannot share .*{count}.*allowed are 1, 2 processes"
    ):
        tensor_parallel.choose(models.tiny("qwen3_moe"), size, [])


def test_what_a_process_caches() -> None:
    styles = {"layers.1.self_attn.k_proj": "colwise", "layers.0.mlp.up_proj": "colwise"}
    one, two = None, process_group.ProcessGroup(1, 2, torch.device("cpu"), None, None)
    for who, cached in ((one, [64, 64]), (two, [64, 32])):
        assert (
            tensor_parallel.cached_values([64, 64], lambda path: int(path.split(".")[1]), styles, who)
            == cached
        )


def test_models_without_a_plan() -> None:
    with pytest.raises(PlanError, match="names no linear layer that can be cut"):
        tensor_parallel.choose(models.tiny("nemotron_h"), 2, [])


def test_what_hangs_together_stays_whole() -> None:
    model = models.tiny("qwen3_moe", tie_word_embeddings=True)
    assert set(tensor_parallel.choose(model, 2, ["model.layers.1.self_attn"])) == {
        f"model.layers.0.self_attn.{name}_proj" for name in "qkvo"
    }, "an operator takes one attention, and the output layer is tied"
    # Sinks, a bare parameter, are cut with the heads by transformers' plan; not so here.
    model = models.tiny("mimo_v2_flash")
    sinks = [name.rpartition(".")[0] for name, _ in model.named_parameters() if name.endswith(".sinks")]
    assert sinks == ["model.layers.1.self_attn"], "of sliding attention only"
    assert not any(path.startswith(sinks[0]) for path in tensor_parallel.choose(model, 2, []))


def test_applied_is_undone() -> None:
    model = on_meta(models.tiny("qwen3_moe"))
    before = {name: (id(p), p.shape) for name, p in model.named_parameters()}
    features = model.lm_head.out_features
    styles = tensor_parallel.choose(model, 2, [])
    with tensor_parallel.applied(model, styles, 2):
        assert model.lm_head.out_features == features // 2 == model.lm_head.weight.shape[0]
    assert model.lm_head.out_features == features
    assert before == {name: (id(p), p.shape) for name, p in model.named_parameters()}


def test_a_process_on_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    where = folder("qwen3_moe", tmp_path)
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(PlanError, match="not started by torchrun: found no RANK"):
        ktinject.load(where, CPU, tp=True, progress=False)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    model = ktinject.load(where, CPU, tp=True, devices="cpu", progress=False)
    assert not model.ktinject.styles, "one process shares nothing"
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(PlanError, match="found 4 processes, 2 of them on this machine"):
        ktinject.load(where, CPU, tp=True, devices="cpu", progress=False)


@pytest.mark.parametrize(
    "gpus, devices, size, text",
    [
        (1, None, 2, r"found 2 processes and 1 GPUs \(cuda:0\).*Start 1 processes"),
        (4, ["cuda:0", "cuda:1", "cuda:2"], 2, "found 2 processes and 3 GPUs"),
        (2, ["cuda:0", "cuda:5"], 2, "there is no device cuda:5; found are cuda:0, cuda:1"),
        (0, "cuda", 2, "there is no device cuda:0; found are no GPUs"),
    ],
)
def test_devices_that_are_refused(gpus: int, devices: Any, size: int, text: str) -> None:
    with pytest.raises(PlanError, match=text):
        process_group._device(machine(gpus=gpus), devices, 0, size)


def test_devices() -> None:
    chosen = {
        (gpus, str(devices)): [process_group._device(machine(gpus=gpus), devices, rank, 2) for rank in (0, 1)]
        for gpus, devices in ((4, None), (4, ["cuda:2", "cuda:0"]), (0, None), (4, "cpu"))
    }
    assert [*chosen.values()] == [["cuda:0", "cuda:1"], ["cuda:2", "cuda:0"], ["cpu", "cpu"], ["cpu", "cpu"]]


@pytest.mark.parametrize("zeros", [False, True])
def test_parts_of_stored_codes(zeros: bool) -> None:
    codes = Codes(
        torch.randint(0, 16, (6, 64), dtype=torch.uint8),
        torch.rand(6, 4),
        torch.randint(0, 16, (6, 4), dtype=torch.uint8) if zeros else None,
    )
    whole = codes.values()
    assert torch.equal(codes.narrow(0, 3, 3).values(), whole[3:])
    assert torch.equal(codes.narrow(1, 32, 32).values(), whole[:, 32:])
    with pytest.raises(ValueError, match="inputs 8 to 39 are no whole blocks: a scale is for 16"):
        codes.narrow(1, 8, 32)
    turned = Codes(codes.codes, codes.scales, codes.zeros, torch.randint(0, 4, (64,)))
    assert torch.equal(turned.narrow(1, 8, 32).values(), turned.values()[:, 8:40])


def test_parts_of_stored_blocks() -> None:
    blocks = Fp8Blocks(torch.randn(8, 12).to(torch.float8_e4m3fn), torch.rand(2, 3), (4, 4))
    part = blocks.narrow(1, 4, 8)
    assert torch.equal(part.scales, blocks.scales[:, 1:]) and part.values.shape == (8, 8)
    with pytest.raises(ValueError, match="outputs 2 to 5 are no whole blocks"):
        blocks.narrow(0, 2, 4)


def test_gradients_are_refused() -> None:
    hook = tensor_parallel._Sum(None)  # type: ignore[arg-type]
    with pytest.raises(OperatorError, match="gradients do not pass between processes"):
        hook(torch.nn.Identity(), (), torch.zeros(1, requires_grad=True))


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus(tmp_path: Path) -> None:
    """In captured graphs, with NCCL: the tokens of one GPU, and failures are everybody's."""
    hybrid = [{**EXPERTS, "replace": {"operator": "hybrid_experts"}}]
    some = [{**EXPERTS, "replace": {"operator": "hybrid_experts", "gpu_experts": 2}}]
    folders = {name: folder(name, tmp_path, dtype="bfloat16") for name in ("qwen3_moe", "deepseek_v3")}
    cases: list[processes.Case] = [(processes.same, (path, hybrid, None)) for path in folders.values()]
    cases.append((processes.same, (folders["qwen3_moe"], some, None)))
    cases.append((processes.failure, (folders["qwen3_moe"], hybrid, None)))
    results = processes.run(cases, gpu=True)
    for path, (first, second) in zip([*folders.values(), folders["qwen3_moe"]], results):
        one = ktinject.load(path, hybrid, devices="cuda:0", progress=False)
        with torch.no_grad():
            expected = one(processes.prompt(3, 7, device="cuda")).logits.float().cpu()
        logits = torch.tensor(first["logits"])
        assert (logits - expected).norm() <= SAME_BF16 * expected.norm()
        assert first["logits"] == second["logits"]
        for way in ("greedy", "again", "sampled", "beams", "static", "stock"):
            assert first[way] == second[way], way
        assert first["again"] == first["greedy"][1]
        assert "graph loop" in first["ways"], first["reason"]
        assert first["greedy"][0] == processes.greedy(one, processes.prompt(1, 7, device="cuda"))
    check_failures(*results[-1])
