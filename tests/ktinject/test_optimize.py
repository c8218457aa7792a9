"""The three calls on whole models: what comes out computes what the original did."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import logging
import os
from pathlib import Path
from typing import Any

import models
import prepared
import pytest
import torch
from double import EXPERTS, on_meta, saved
from safetensors.torch import load_file, save_file
from trained import trained_model
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

import ktinject
from ktinject import machine
from ktinject.checkpoints.checkpoint import Checkpoint
from ktinject.checkpoints.files import DataFile
from ktinject.errors import CheckpointError, PlanError, RuleError
from ktinject.hf import models as hf
from ktinject.loading import inject

torch.set_num_threads(1)
IDS = torch.randint(3, 90, (2, 12), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def assert_same(ours: PreTrainedModel, theirs: PreTrainedModel, tolerance: float = 1e-5) -> None:
    """Logits within the tolerance and the same greedy tokens."""
    assert not ours.training
    difference = (ours(IDS).logits - theirs(IDS).logits).abs().max().item()
    assert difference <= tolerance, difference
    tokens = [model.generate(IDS, max_new_tokens=8, do_sample=False) for model in (ours, theirs)]
    assert torch.equal(*tokens)


# Every family, every form of checkpoint


@pytest.mark.parametrize("shards", ["10GB", "60KB"])
@pytest.mark.parametrize("name", ["deepseek_v3", "qwen3_moe", "mixtral", "gpt_oss", "granitemoe"])
def test_a_swapped_model_is_the_same_model(name: str, shards: str, tmp_path: Path) -> None:
    original = models.tiny(name)
    folder = saved(original, tmp_path, max_shard_size=shards)
    assert (len([*folder.glob("*.safetensors")]) > 1) == (shards == "60KB")
    model = on_meta(folder)
    assert ktinject.optimize(model, [EXPERTS], progress=False) is model
    assert not [name for name, tensor in everything(model) if tensor.is_meta]
    assert_same(model, original)


@pytest.mark.parametrize("name", [name for name in models.AVAILABLE if name != "kimi_linear"])
def test_experts_of_every_family_can_be_swapped(name: str, tmp_path: Path) -> None:
    original = models.tiny(name)
    model = on_meta(saved(original, tmp_path))
    ktinject.optimize(model, [EXPERTS], progress=False)
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, original(IDS).logits)


def everything(model: PreTrainedModel) -> list[tuple[str, torch.Tensor]]:
    """What PyTorch holds; a swapped model's own `named_parameters` also gives the weights in operators."""
    return [*torch.nn.Module.named_parameters(model), *model.named_buffers()]


def test_a_model_with_its_weights_needs_no_checkpoint() -> None:
    model, original = models.tiny("mixtral").train(), models.tiny("mixtral")
    want = {name: id(tensor) for name, tensor in everything(model) if ".experts." not in name}
    ktinject.optimize(model, [EXPERTS], progress=False)
    assert {name: id(tensor) for name, tensor in everything(model)} == want
    assert model.training and model.model.layers[0].mlp.experts.training
    assert_same(model.eval(), original)


def test_a_checkpoint_replaces_the_weights_a_model_has(tmp_path: Path) -> None:
    original = models.tiny("deepseek_v3", seed=1)
    model = models.tiny("deepseek_v3", seed=2)
    inv_freq = model.model.rotary_emb.inv_freq.clone()
    ktinject.optimize(model, [EXPERTS], checkpoint=saved(original, tmp_path), progress=False)
    assert torch.equal(model.model.rotary_emb.inv_freq, inv_freq)
    assert_same(model, original)


def test_weights_loaded_from_a_folder_are_taken_from_the_model_and_not_read_again(tmp_path: Path) -> None:
    folder = saved(models.tiny("qwen3_moe"), tmp_path)
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.model.layers[1].mlp.experts.down_proj.mul_(2)
        want = model(IDS).logits
        ktinject.optimize(model, [EXPERTS], progress=False)
        assert torch.equal(model(IDS).logits, want)
    assert model.ktinject.checkpoint is None


def test_nothing_to_swap_is_an_ordinary_load(tmp_path: Path) -> None:
    original = models.tiny("qwen3_moe")
    keep = {"name": "all", "match": {"class": "Qwen3MoeExperts"}, "replace": "keep"}
    model = ktinject.load(saved(original, tmp_path), [keep], progress=False)
    assert_same(model, original)
    assert model.ktinject.replacements == ()


@pytest.mark.parametrize("there", ["model.embed_tokens.weight", "lm_head.weight"])
def test_tied_embeddings(there: str, tmp_path: Path) -> None:
    original = models.tiny("qwen3_moe", tie_word_embeddings=True)
    folder = saved(original, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    (stored,) = {"model.embed_tokens.weight", "lm_head.weight"} & tensors.keys()
    tensors[there] = tensors.pop(stored)
    save_file(tensors, folder / "model.safetensors")
    model = ktinject.load(folder, [EXPERTS], progress=False)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert_same(model, original)


def test_bf16_models_keep_what_must_be_fp32(tmp_path: Path) -> None:
    folder = saved(models.tiny("deepseek_v3"), tmp_path)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model = ktinject.load(folder, [EXPERTS], dtype="bfloat16", progress=False)
    assert model.model.layers[1].mlp.gate.e_score_correction_bias.dtype == torch.float32
    dtypes = {name: tensor.dtype for name, tensor in everything(reference) if ".experts." not in name}
    assert {name: tensor.dtype for name, tensor in everything(model)} == dtypes
    assert_same(model, reference)


def test_operators_get_the_checkpoints_dtype(tmp_path: Path) -> None:
    folder = saved(models.tiny("qwen3_moe").half(), tmp_path)
    model = ktinject.load(folder, [EXPERTS], dtype="float32", progress=False)
    assert model.model.layers[0].mlp.experts.dtypes == {torch.float16}


# FP8 checkpoints


def quantise(weight: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """FP8 values, their scales, and what both mean in fp32."""
    n, k = weight.shape
    rows, columns = -(-n // block), -(-k // block)
    padded = torch.zeros(rows * block, columns * block)
    padded[:n, :k] = weight
    blocks = padded.view(rows, block, columns, block)
    scales = blocks.abs().amax((1, 3)).clamp(min=1e-6) / 448
    values = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn)
    meant = values.float() * scales[:, None, :, None]
    return (
        values.view(rows * block, -1)[:n, :k].contiguous(),
        scales,
        meant.view(rows * block, -1)[:n, :k].contiguous(),
    )


@pytest.fixture(scope="module")
def fp8(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    """A checkpoint as DeepSeek publishes them, and the model that it means, in fp32."""
    folder = saved(models.tiny("deepseek_v3"), tmp_path_factory.mktemp("fp8") / "model")
    meaning = folder.with_name("meaning")
    meaning.mkdir()
    tensors = load_file(folder / "model.safetensors")
    meant = dict(tensors)
    for name, weight in list(tensors.items()):
        if name.endswith("_proj.weight") or name.endswith("_with_mqa.weight"):
            tensors[name], tensors[f"{name}_scale_inv"], meant[name] = quantise(weight, 16)
    assert len(tensors) > len(meant) + 20
    save_file(tensors, folder / "model.safetensors")
    save_file(meant, meaning / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (meaning / "config.json").write_text(json.dumps(config))
    config["quantization_config"] = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [16, 16],
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder, AutoModelForCausalLM.from_pretrained(meaning)


def test_fp8_checkpoints_are_decoded_in_swapped_and_dense_parts(fp8: tuple[Path, PreTrainedModel]) -> None:
    folder, reference = fp8
    model = on_meta(folder)
    ktinject.optimize(model, [EXPERTS], progress=False)
    assert_same(model, reference, tolerance=0.0)
    assert hf.quantization(model.config) is None
    assert (
        "the checkpoint is quantised (fp8); what is not kept is decoded while it is read"
        in model.ktinject.notes
    )


def test_fp8_checkpoints_in_bf16(fp8: tuple[Path, PreTrainedModel]) -> None:
    folder, reference = fp8
    model = ktinject.load(folder, [EXPERTS], dtype="bfloat16", progress=False)
    dense = model.model.layers[0].mlp.up_proj.weight
    assert torch.equal(dense, reference.model.layers[0].mlp.up_proj.weight.bfloat16())


def test_a_scale_that_is_not_a_number_is_always_refused(
    fp8: tuple[Path, PreTrainedModel], tmp_path: Path
) -> None:
    for part in ("layers.1.mlp.experts.3.up_proj", "layers.0.self_attn.o_proj"):
        tensors = load_file(fp8[0] / "model.safetensors")
        tensors[f"model.{part}.weight_scale_inv"][0, 1] = torch.nan
        save_file(tensors, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text((fp8[0] / "config.json").read_text())
        with pytest.raises(CheckpointError, match=rf"{part}.weight_scale_inv'.*nan at \[0, 1\]"):
            ktinject.load(tmp_path, [EXPERTS], progress=False)


# Arguments and defaults


def test_load_with_automatic_rules_and_variables(tmp_path: Path) -> None:
    folder = saved(models.tiny("qwen3_moe"), tmp_path)
    model = ktinject.load(folder, variables={"experts": "int8"}, progress=False)
    assert {replacement.runs["weights"] for replacement in model.ktinject.replacements} == {
        "int8",
        "kept",
    }  # kept: norms
    with torch.no_grad():
        assert model.generate(IDS, max_new_tokens=4).shape == (2, 16)
    plan = ktinject.plan(on_meta(folder), "auto", variables={"experts": "int8"})
    assert plan.to_dict()["modules"] == model.ktinject.to_dict()["modules"]


def test_a_folder_may_be_given_as_the_file_in_it(tmp_path: Path) -> None:
    folder = saved(models.tiny("qwen3_moe"), tmp_path)
    model = ktinject.load(folder / "model.safetensors", [EXPERTS], progress=False)
    assert_same(model, ktinject.load(folder, [EXPERTS], progress=False))


def test_an_unknown_variable_is_refused(tmp_path: Path) -> None:
    folder = saved(models.tiny("qwen3_moe"), tmp_path)
    with pytest.raises(RuleError, match="expert"):
        ktinject.load(folder, variables={"expertts": "int8"}, progress=False)


def test_the_checkpoint_is_where_the_config_came_from(tmp_path: Path) -> None:
    folder = saved(models.tiny("qwen3_moe"), tmp_path)
    assert ktinject.plan(on_meta(folder), [EXPERTS]).checkpoint == str(folder)
    assert ktinject.plan(on_meta(models.tiny("qwen3_moe")), [EXPERTS]).checkpoint is None


def test_the_generation_config_of_the_folder_is_used(tmp_path: Path) -> None:
    folder = saved(models.tiny("qwen3_moe"), tmp_path)
    GenerationConfig(max_new_tokens=3, do_sample=False).save_pretrained(folder)
    model = ktinject.optimize(on_meta(folder), [EXPERTS], progress=False)
    assert model.generate(IDS).shape == (2, 15)


def test_a_swapped_model_prints_nothing_unless_asked(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = saved(models.tiny("qwen3_moe"), tmp_path)
    model = on_meta(folder)
    capfd.readouterr()
    ktinject.plan(model, [EXPERTS])
    ktinject.optimize(model, [EXPERTS], progress=False)
    assert capfd.readouterr() == ("", "")
    ktinject.optimize(on_meta(folder), [EXPERTS], progress=True)
    out, err = capfd.readouterr()
    assert out == "" and "loading" in err and "100%" not in out


def test_what_was_done_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="ktinject"):
        ktinject.load(saved(models.tiny("qwen3_moe"), tmp_path), [EXPERTS], progress=False)
    assert "swapped 2 modules of Qwen3MoeForCausalLM" in caplog.text


# What a load leaves out


def test_the_files_of_a_load_are_opened_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, opened = saved(models.tiny("qwen3_moe"), tmp_path), []

    def of(self: DataFile, path: Path) -> None:
        opened.append(path.name)
        original(self, path)

    original = DataFile.__init__
    monkeypatch.setattr(DataFile, "__init__", of)
    ktinject.load(folder, [EXPERTS], progress=False)
    assert opened == ["model.safetensors"]


def test_an_open_checkpoint_is_read_as_the_config_says_and_stays_open(tmp_path: Path) -> None:
    original = models.tiny("qwen3_moe")
    folder = saved(original, tmp_path)
    with Checkpoint.open(folder, {"quant_method": "of another config"}) as checkpoint:
        model = ktinject.optimize(on_meta(folder), [EXPERTS], checkpoint=checkpoint, progress=False)
        assert checkpoint.quantization == {}
        ktinject.optimize(on_meta(folder), [EXPERTS], checkpoint=checkpoint, progress=False)
        with pytest.raises(CheckpointError, match=r"looked at as quantization_config \{\}.*Open it again"):
            checkpoint.say_quantization({"quant_method": "of another config"})
        assert checkpoint.read("lm_head.weight").shape == original.lm_head.weight.shape
    assert_same(model, original)


@pytest.mark.parametrize("kept_by_python", [0, 375])
def test_only_what_a_load_makes_is_searched_for_garbage(
    kept_by_python: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python 3.12 keeps some objects of its own from searches: that is not the caller's doing."""
    folder, build, left_alone = saved(models.tiny("qwen3_moe"), tmp_path), inject.build, []
    frozen = gc.get_freeze_count
    monkeypatch.setattr(gc, "get_freeze_count", lambda: frozen() + kept_by_python)

    def counted(*given: Any) -> Any:
        left_alone.append(frozen())
        return build(*given)

    monkeypatch.setattr(inject, "build", counted)
    was = frozen()
    gc.unfreeze()
    try:
        ktinject.load(folder, [EXPERTS], progress=False)
        assert left_alone[0] > 10_000 and frozen() == 0
        with pytest.raises(CheckpointError):
            ktinject.load(tmp_path / "nothing", progress=False)
        assert frozen() == 0
        gc.freeze()
        ktinject.load(folder, [EXPERTS], progress=False)
        assert frozen() > 10_000, "what the caller does so stays"
        # Of an interpreter that has imported nothing, 8,000 are kept.
        monkeypatch.setattr(gc, "get_freeze_count", lambda: 8_000)
        ktinject.load(folder, [EXPERTS], progress=False)
        assert frozen() > 10_000, "and if it was done early"
    finally:
        if not was:
            gc.unfreeze()


@pytest.mark.parametrize(
    ("named", "looks"),
    [
        ({"devices": "cpu"}, False),
        ({"devices": ["cpu"], "budget": {"cpu": "1GiB"}}, False),
        ({"devices": [torch.device("cpu")]}, False),
        ({}, True),
        ({"devices": "cpu", "max_memory": {0: "1GiB"}}, True),
        ({"devices": ["cpu", "cuda"]}, True),
    ],
)
def test_gpus_are_looked_for_unless_the_cpu_alone_is_named(
    named: dict[str, Any], looks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(machine, "_gpus", lambda: asked.append("GPUs") or ((), "none in this test"))
    with contextlib.suppress(PlanError):  # the devices are not there
        ktinject.plan(tiny_meta(), [EXPERTS], **named)
    assert bool(asked) == looks


def test_the_cpu_alone_says_why_there_is_no_gpu() -> None:
    rule = {**EXPERTS, "replace": {**EXPERTS["replace"], "device": "cuda:0"}}
    with pytest.raises(
        PlanError, match="device 'cuda:0' is not among the devices of this call; usable are cpu"
    ):
        ktinject.plan(tiny_meta(), [rule], devices="cpu")


@pytest.mark.parametrize("state", ["madvise", "never", "absent"])
def test_a_machine_without_huge_pages_is_logged(
    state: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = dataclasses.replace(machine.detect(), huge_pages=state)
    monkeypatch.setattr(machine, "detect", lambda **how: found)
    with caplog.at_level(logging.INFO, logger="ktinject"):
        ktinject.load(saved(models.tiny("qwen3_moe"), tmp_path), [EXPERTS], progress=False)
    assert ("pages of 4 KiB" in caplog.text) == (state != "madvise")


OUT_OF_MEMORY = """
import gc, resource, sys
import ktinject
from ktinject.errors import KTInjectError

def pages(field):
    return int(open("/proc/self/statm").read().split()[field])

ktinject.load(sys.argv[1], devices=["cpu"], progress=False)
virtual, resident = pages(0), []
for spare in range(0, 1 << 28, 3 << 20):
    resource.setrlimit(resource.RLIMIT_AS, (virtual * resource.getpagesize() + spare, resource.RLIM_INFINITY))
    try:
        ktinject.load(sys.argv[1], devices=["cpu"], progress=False)
        break
    except MemoryError:  # of Python itself, when it reads or parses a small file
        pass
    except KTInjectError as error:
        # The plan, which counts the limit; native memory; torch, in a probe.
        assert any(text in str(error) for text in ("does not fit", "no room", "allocate memory")), error
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    gc.collect()
    resident.append(pages(1))
    # Of the first times, what is imported and compiled to say so stays.
    assert resident[-1] < max(resident[:3]) * 1.01, resident
print(len(resident))
"""


def test_wherever_memory_runs_out_everything_is_given_back() -> None:
    """Some more each time, until there is enough: refused further on each time, resident memory back within 1 %.

    In one thread: glibc ends a process that starts a thread for which it has no thread-local memory.
    """
    environment = os.environ | {"HF_DEACTIVATE_ASYNC_LOAD": "1"}
    done = prepared.run(OUT_OF_MEMORY, trained_model("tiny-qwen3-moe"), env=environment)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 4


# Refusals


def test_meta_without_a_checkpoint_is_refused() -> None:
    model = on_meta(models.tiny("qwen3_moe"))
    with pytest.raises(
        CheckpointError, match=r"on meta and there is no checkpoint to load.*checkpoint=<folder>"
    ):
        ktinject.optimize(model, [EXPERTS], progress=False)
    assert ktinject.plan(model, [EXPERTS]).problems == [], "but it can be planned"


@pytest.mark.parametrize(
    "call", [ktinject.load, lambda path, rules: ktinject.plan(tiny_meta(), rules, checkpoint=path)]
)
def test_absent_files_and_folders_are_refused(call: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"model\.gguf: no such folder or file"):
        call(tmp_path / "model.gguf", [EXPERTS])
    with pytest.raises(CheckpointError, match="no such folder or file here, and not in the Hub's cache"):
        call("Qwen/Qwen3-30B-A3B", [EXPERTS])


@pytest.mark.parametrize("call", [ktinject.plan, ktinject.optimize])
@pytest.mark.parametrize("rules", ["auto", [EXPERTS]])
def test_something_else_than_a_model_is_refused(call: Any, rules: Any, tmp_path: Path) -> None:
    for found in (str(tmp_path), torch.nn.Linear(1, 1)):
        with pytest.raises(
            PlanError, match=f"found a {type(found).__name__}; models of transformers are served"
        ):
            call(found, rules)


def tiny_meta() -> PreTrainedModel:
    return on_meta(models.tiny("qwen3_moe"))


def test_a_gguf_named_by_the_config_is_the_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    model = tiny_meta()
    model.config.name_or_path = str(tmp_path / "model.gguf")
    with pytest.raises(CheckpointError, match="4 bytes are too few for a GGUF file"):
        ktinject.plan(model, [EXPERTS])


def test_an_index_alone_is_not_enough_to_load(tmp_path: Path) -> None:
    folder = saved(models.tiny("qwen3_moe"), tmp_path, max_shard_size="50KB")
    for shard in folder.glob("*.safetensors"):
        shard.unlink()
    with pytest.raises(CheckpointError, match=r"only the index is there\. Download the shards"):
        ktinject.load(folder, [EXPERTS], progress=False)


def test_a_plan_that_does_not_fit_is_not_carried_out(tmp_path: Path) -> None:
    folder = saved(models.tiny("qwen3_moe"), tmp_path)
    with pytest.raises(
        PlanError, match=r"the plan does not fit:\n  cpu needs .*, but the budget is 10.0 KiB"
    ):
        ktinject.load(folder, [EXPERTS], budget={"cpu": "10KiB"}, progress=False)


@pytest.mark.parametrize("part", ["layers.1.mlp.experts.4.up_proj", "layers.0.self_attn.o_proj"])
def test_tensors_are_checked_if_asked(part: str, tmp_path: Path) -> None:
    folder = saved(models.tiny("qwen3_moe"), tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors[f"model.{part}.weight"][2, 3] = torch.inf
    save_file(tensors, folder / "model.safetensors")
    ktinject.load(folder, [EXPERTS], progress=False)
    with pytest.raises(CheckpointError, match=rf"{part}.weight.*inf at \[2, 3\]"):
        ktinject.load(folder, [EXPERTS], progress=False, check_tensors=True)


def test_tensors_of_a_model_with_weights_are_checked_if_asked() -> None:
    model = models.tiny("qwen3_moe")
    with torch.no_grad():
        model.model.layers[1].mlp.experts.down_proj[3, 2, 1] = torch.inf
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.experts\.down_proj.*inf at \[3, 2, 1\]"):
        ktinject.optimize(model, [EXPERTS], progress=False, check_tensors=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_rest_on_a_gpu(tmp_path: Path) -> None:
    original = models.tiny("deepseek_v3")
    model = ktinject.load(saved(original, tmp_path), "deepseek-v3", devices="cuda:0", progress=False)
    assert model.lm_head.weight.device.type == "cuda" and model.ktinject.device_map == {"": "cuda:0"}
    with torch.no_grad():
        ours, theirs = model(IDS.to("cuda")).logits.cpu(), original(IDS).logits
    assert (ours - theirs).norm() / theirs.norm() < 1e-2


class TestAnAdapterBesideTheModel:
    """transformers puts it on the model; no door of ours may leave it out without a word."""

    BESIDE = "there is an adapter beside the model"
    ALONE = r"this is an adapter of 'some/model' .*, and no model. Load its model, then the adapter"

    @pytest.fixture
    def beside(self, tmp_path: Path) -> Path:
        folder = saved(models.tiny("qwen3_moe"), tmp_path / "model")
        (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "some/model"}')
        return folder

    def test_every_call_refuses_it(self, beside: Path) -> None:
        config = AutoConfig.from_pretrained(beside)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        before = dict(vars(model))
        for call in (
            lambda: ktinject.load(beside, devices="cpu"),
            lambda: ktinject.optimize(model, "auto", checkpoint=beside, devices="cpu"),
            lambda: ktinject.plan(model, "auto", checkpoint=beside, devices="cpu"),
        ):
            with pytest.raises(CheckpointError, match=self.BESIDE):
                call()
        assert vars(model) == before

    def test_an_adapter_alone_is_called_one(self, beside: Path) -> None:
        for file in [*beside.iterdir()]:
            if file.name != "adapter_config.json":
                file.rename(file.with_name(f"of_{file.name}"))
        with pytest.raises(CheckpointError, match=self.ALONE):
            ktinject.load(beside, devices="cpu")
        (beside / "adapter_config.json").write_text("[")
        with pytest.raises(CheckpointError, match=r"this is an adapter .*, and no model"):
            ktinject.load(beside, devices="cpu")
