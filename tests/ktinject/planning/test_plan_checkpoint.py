"""Plans from a checkpoint's headers: what is wrong with it, and one at full size. Nothing here loads a weight."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import prepared
import pytest
import torch
from double import on_meta, saved
from plan_cases import changed, planned, refusal, rule
from transformers import PreTrainedModel

import ktinject
from ktinject.errors import CheckpointError, PlanError, few, listed
from ktinject.planning.match import grouped

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
    found = re.sub(r"( dtype \w+) is not.*", r"\1", said)  # the rest is the reader's own wording
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
        "Use the config.json that came with the weights, and a complete download, or do without some by "
        "ignore=[patterns] (--ignore)."
    )


# What a checkpoint may have beside the weights of a model, and names like these that no model is known to do without.
HARMLESS = (
    "model.layers.1.mlp.experts.2.up_proj.input_scale",
    "model.layers.1.mlp.experts.gate_up_proj_input_scale",
    "model.layers.0.self_attn.k_proj.k_scale",
    "model.layers.0.self_attn.v_scale",
    "model.layers.0.self_attn.masked_bias",
    "rope_freqs.weight",
    "model.layers.0.self_attn.rotary_emb.cos_cached",
    "mtp.layers.0.mlp.gate.weight",
    "model.visual.blocks.0.attn.qkv.weight",
    "vision_tower.patch_embed.proj.weight",
)
HARMFUL = (
    "model.layers.0.self_attn.bias_scale",
    "model.layers.9.mlp.experts.0.up_proj.weight",
    "model.layers.0.visual_gate.weight",
    "model.layers.0.mlp.extra.weight",
)


def test_what_models_do_without_is_named_once_and_skipped(folder: Path, tmp_path: Path) -> None:
    model = on_meta(models.tiny("deepseek_v3"))
    announced = f"model.layers.{model.config.num_hidden_layers}.mlp.experts.0.up_proj.weight"
    names = {name: torch.zeros(2) for name in (*HARMLESS, *HARMFUL, announced)}
    path = changed(folder, tmp_path / "changed", lambda tensors: tensors.update(names))
    model._keys_to_ignore_on_load_unexpected = None
    model.config.num_nextn_predict_layers = 1
    said = refusal(CheckpointError, model, rule(), path)
    listed_there = said.partition("not expected by the model:\n")[2].partition("\nUse ")[0]
    assert sorted(line.strip() for line in listed_there.splitlines()) == sorted(HARMFUL)
    decided = ktinject.plan(model, rule(), checkpoint=path, devices="cpu", ignore=[r".*\.(bias_scale|extra\..*)",
                            r"model\.layers\.9\..*", r".*visual_gate.*"])  # fmt: skip
    notes = [note for note in decided.notes if note.endswith("which the model does not need; skipped")]
    assert len(notes) == 1 and "more, which" in notes[0]


@pytest.mark.parametrize("pattern", ["(", "a{2000}", 3])
def test_ignore_takes_patterns_alone(pattern: Any, folder: Path) -> None:
    model = on_meta(models.tiny("deepseek_v3"))
    with pytest.raises(PlanError, match=r"ignore: .*names of tensors match as a whole"):
        ktinject.plan(model, rule(), checkpoint=folder, devices="cpu", ignore=[pattern])


def test_a_bias_that_autogptq_adds_is_skipped_if_it_is_zero(folder: Path, tmp_path: Path) -> None:
    model = on_meta(models.tiny("deepseek_v3"))
    stem = "model.layers.0.self_attn.o_proj"

    def change(bias: float) -> Callable[[dict[str, torch.Tensor]], None]:
        def apply(tensors: dict[str, torch.Tensor]) -> None:
            tensors[f"{stem}.bias"] = torch.full((40,), bias)
            tensors[f"{stem}.qweight"] = torch.zeros(1, dtype=torch.int32)

        return apply

    for bias in (0.0, 1.0):
        said = refusal(CheckpointError, model, rule(), changed(folder, tmp_path / str(bias), change(bias)))
        assert (f"{stem}.bias" in said) is bool(bias) and f"{stem}.qweight" in said


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


def test_names_that_differ_in_numbers_share_a_line() -> None:
    names = [f"layers.{layer}.experts.{e}.{p}" for layer in range(3, 9) for e in range(16) for p in "ab"]
    assert grouped(names) == [
        "layers.{3-8}.experts.{0-15}.a (96 tensors)",
        "layers.{3-8}.experts.{0-15}.b (96 tensors)",
    ]
    gaps = [f"layers.{layer}.norm" for layer in (0, 1, 2, 5, 9, *range(20, 40))]
    assert grouped(gaps) == ["layers.{0-2,5,9,20-39}.norm (25 tensors)"]
    ragged = [*names, "layers.9.experts.1.a"]
    assert len(grouped(ragged)) == 1 + 97, "no line covers exactly these"
    assert grouped(names[:20]) == names[:20]
    assert grouped([*names, "norm"])[-1] == "norm"


def test_a_refusal_lists_twenty_lines_and_how_many_more() -> None:
    assert few(map(str, range(20))) == [*map(str, range(20))]
    assert few(map(str, range(2021)))[19:] == ["19", "and 2,001 more"]
    assert few(["\x1b[2J", "x" * 2000]) == ["'\\x1b[2J'", "x" * 1000 + "…"]
    assert listed(["a", "b"]) == "\n  a\n  b"


@pytest.mark.parametrize("ragged", [False, True])
def test_what_is_wrong_with_a_large_checkpoint_fits_a_screen(ragged: bool, tmp_path: Path) -> None:
    """A format that is not read, at the number of tensors of Qwen3-30B-A3B."""
    model = on_meta(models.tiny("qwen3_moe", num_hidden_layers=1))
    model.config.num_hidden_layers, model.config.num_experts = 48, 128
    model = on_meta(model)
    names = [
        f"model.layers.{layer}.mlp.experts.{e}.{part}_proj.weight"
        for layer in range(6 if ragged else 48)
        for e in range(128)
        for part in ("gate", "up", "down")
    ]
    if ragged:  # no line covers exactly these
        names = [name for number, name in enumerate(names) if number % 7]
    files = {name + end: "model-1.safetensors" for name in names for end in ("", ".absmax")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    said = refusal(CheckpointError, model, rule(), tmp_path)
    assert "bitsandbytes 4-bit, to which" in said and len(said) < 20_000
    assert len(said.splitlines()) <= 20
    if not ragged:
        assert "experts.{0-127}.gate_proj.weight.absmax' belongs" in said and "(6144 tensors)" in said


@pytest.mark.parametrize("method", ["mxfp8", "bitsandbytes", "hqq", None, "plain text"])
def test_a_quantised_checkpoint_that_is_not_read_is_refused(method: Any, folder: Path) -> None:
    model = on_meta(models.tiny("deepseek_v3"))
    model.config.quantization_config = method if method == "plain text" else {"quant_method": method}
    said = refusal(PlanError, model, rule(), folder)
    assert (
        f"its config.json says quant_method {method!r}; read are checkpoints in bf16, fp16, fp32 and mxfp4"
        in said
    )


def test_a_checkpoint_of_mlx_is_called_that(folder: Path) -> None:
    model = on_meta(models.tiny("deepseek_v3"))
    model.config.quantization_config = {"group_size": 64, "bits": 4}
    assert "its config.json says quant_method 'mlx'; read are" in refusal(PlanError, model, rule(), folder)


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
import ktinject
from ktinject.hf import models as hf
started = time.process_time()
folder = {str(deepseek_v3_671b(tmp_path))!r}
plan = ktinject.plan(hf.meta_model(hf.read_config(folder)), "deepseek-v3", checkpoint=folder)
print(plan)
seconds = time.process_time() - started  # without the imports, and ours alone, whoever else computes here
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps([seconds, peak, len(plan.replacements), plan.bytes]))
"""
    done = prepared.run(code)
    assert done.returncode == 0, done.stderr
    seconds, peak, entries, sizes = json.loads(done.stdout.splitlines()[-1])
    print(f"{seconds:.1f} s, {peak / 2**20:.0f} MiB\n{done.stdout}")
    # 58 layers of experts, routers and shared experts, 61 of attention with four linears, 3 dense layers, the head;
    # norms.
    assert entries == 58 * 5 + 61 * 5 + 3 * 3 + 1 + (61 * 4 + 1) and sum(sizes.values()) > 6e11 / 2
    assert seconds < 30 and peak < 4 * 2**30
