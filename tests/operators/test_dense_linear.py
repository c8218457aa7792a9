"""dense_linear: which operator it comes to, by format, device and dtype of the model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

import ktinject
from ktinject import PlanError
from ktinject import rules as language
from ktinject.checkpoints.checkpoint import Checkpoint
from ktinject.checkpoints.formats.base import Format
from ktinject.hf import models
from ktinject.machine import Gpu, detect
from ktinject.operators.cpu_linear import CpuLinear
from ktinject.operators.dense_linear import DenseLinear, DenseLinearConfig
from ktinject.operators.fp8_linear import quantise_blocks
from ktinject.planning.modules import MatchedModule, for_ranks
from ktinject.planning.plan import Plan
from ktinject.planning.planner import make
from tests.models import tiny
from tests.reference import relative_error


def rules(path: str = r".*\.self_attn\.[qkvo]_proj", **arguments: Any) -> list[dict[str, Any]]:
    replaced = {"operator": "dense_linear", **arguments}
    return [{"name": "dense", "match": {"path": path}, "replace": replaced}]


def planned(model: PreTrainedModel, gpus: int, **arguments: Any) -> Plan:
    """On a machine with made-up GPUs, and with the CUDA parts whether this build has them or not."""
    with torch.device("meta"):
        there = type(model)(model.config).to(model.dtype)
    made_up = tuple(Gpu(i, "made-up", 2**34, 2**34, (9, 0)) for i in range(gpus))
    has = replace(detect(), gpus=made_up, cuda_built=True)
    return make(there, language.read(rules(**arguments)), None, has)


@pytest.mark.parametrize(
    "weights,gpus,operator",
    [
        ("bf16", 0, "cpu_linear"),
        ("fp8", 0, "cpu_linear"),
        ("int8", 0, "cpu_linear"),
        ("int4", 0, "cpu_linear"),
        ("bf16", 1, None),
        ("fp8", 1, "fp8_linear"),
        ("int4", 1, "int4_linear"),
        ("kept", 0, "cpu_linear"),
        ("kept", 1, None),
    ],
)
def test_what_it_comes_to(weights: str, gpus: int, operator: str | None) -> None:
    sizes = {"hidden_size": 128, "head_dim": 64}
    found = planned(tiny("qwen3_moe", **sizes).bfloat16(), gpus, weights=weights, group_size=64)
    assert [replacement.operator for replacement in found.replacements] == (
        [operator] * 8 if operator else []
    )
    assert {replacement.config.device for replacement in found.replacements} <= {"cuda:0" if gpus else "cpu"}
    if weights == "int4":
        assert {replacement.config.group_size for replacement in found.replacements} == {64}
    if operator is None:
        assert "dense               8 modules   keep" in str(found)
        assert found.matched["dense"][0] == "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_bf16_leaves_a_model_of_more_digits_alone(dtype: torch.dtype) -> None:
    model = tiny("qwen3_moe").to(dtype)
    assert planned(model, 0).replacements == planned(model, 0, weights="kept").replacements == ()
    assert len(planned(model, 0, weights="int8").replacements) == 8


def test_what_runs_is_what_was_planned() -> None:
    model, other = tiny("qwen3_moe").bfloat16(), tiny("qwen3_moe").bfloat16()
    ktinject.optimize(other, rules(), progress=False, devices=["cpu"])
    assert isinstance(other.model.layers[0].self_attn.q_proj, CpuLinear)
    assert {replacement.operator for replacement in other.ktinject.replacements} == {"cpu_linear"}
    ids = torch.randint(3, 96, (2, 7))
    with torch.inference_mode():
        exact = model.float()(ids).logits
        assert relative_error(other(ids).logits, exact) <= 0.05


def in_fp8(folder: Path) -> Path:
    """A tiny Qwen3-MoE whose attention is stored in fp8, in blocks of 128 × 128."""
    model = tiny("qwen3_moe", hidden_size=128, head_dim=64, dtype="bfloat16").bfloat16()
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for key in [key for key in tensors if ".self_attn." in key and key.endswith("_proj.weight")]:
        blocks = quantise_blocks(tensors[key])
        tensors |= {key: blocks.values, f"{key}_scale_inv": blocks.scales}
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("weights,operator", [("kept", set()), ("fp8", {"fp8_linear"})])
def test_a_gpu_takes_fp8_where_it_is_asked_for(weights: str, operator: set[str], tmp_path: Path) -> None:
    with Checkpoint.open(in_fp8(tmp_path)) as checkpoint:
        config = models.read_config(tmp_path, checkpoint)
        model = models.meta_model(config, torch.bfloat16, checkpoint)
        checkpoint.say_quantization(models.quantization(model.config))
        made_up = (Gpu(0, "made-up", 2**34, 2**34, (9, 0)),)
        has = replace(detect(), gpus=made_up, cuda_built=True)
        found = make(model, language.read(rules(weights=weights)), checkpoint, has)
    assert {one.operator for one in found.replacements} == operator
    assert all(one.runs["values"] == "kept (fp8_blocks)" for one in found.replacements)


@pytest.mark.gpu
def test_fp8_computes_on_a_gpu_what_the_checkpoint_says(tmp_path: Path) -> None:
    folder = in_fp8(tmp_path)
    model = ktinject.load(folder, rules(weights="fp8"), devices="cuda:0", progress=False)
    found = {one.operator: one.runs["values"] for one in model.ktinject.replacements}
    assert found == {"fp8_linear": "kept (fp8_blocks)"}
    with Checkpoint.open(folder, {"quant_method": "fp8"}) as checkpoint:
        for one in model.ktinject.replacements:
            operator, values = model.get_submodule(one.path), checkpoint.decode(f"{one.path}.weight")
            assert operator.unpack("weight").equal(values)
            x = torch.randn(33, values.shape[1]).bfloat16()
            # Activations are rounded to fp8, too.
            assert relative_error(operator(x.cuda()).cpu(), x.float() @ values.float().T) <= 0.04
    decoded = ktinject.load(folder, rules(weights="bf16"), devices="cuda:0", progress=False)
    ids = torch.randint(3, 96, (2, 33), device="cuda:0")
    with torch.inference_mode():
        errors = relative_error(model(ids).logits, decoded(ids).logits)
    assert errors <= 0.2  # four roundings of activations a layer; 0.12 was found
    assert model.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=0).shape == (2, 38)


@pytest.mark.parametrize(
    "form,style,ranks,kept",
    [
        (Format("fp8_blocks", block=(128, 128), encoding="fp8"), None, 4, True),
        (Format("fp8_blocks", block=(128, 128), encoding="fp8"), "rowwise", 2, True),
        (Format("fp8_blocks", block=(128, 128), encoding="fp8"), "rowwise", 4, False),
        (Format("fp8_blocks", block=(128, 128), encoding="fp8"), "colwise", 2, False),
        (Format("fp8_channel", block=(1, 512), encoding="fp8_channel"), "rowwise", 8, True),
        (Format("nvfp4", group_size=16, encoding="nvfp4"), "rowwise", 32, True),
        (Format("nvfp4", group_size=16, encoding="nvfp4"), "rowwise", 64, False),
        (Format("mxfp8", block=(1, 32), group_size=32, encoding="mxfp8"), "rowwise", 16, True),
        (Format("mxfp8", block=(1, 32), group_size=32, encoding="mxfp8"), "rowwise", 32, False),
        (Format("mxfp8", block=(1, 32), group_size=32, encoding="mxfp8"), "colwise", 2, True),
        (Format("int8", group_size=512, encoding="int8"), "rowwise", 2, False),
        (Format("int8", group_size=512, encoding="int8"), "colwise", 2, True),
        (Format("q4_k", encoding="q4_k"), "rowwise", 2, True),
        (Format("q4_k", encoding="q4_k"), "rowwise", 4, False),
    ],
)
def test_what_ranks_would_divide_is_decoded(form: Format, style: str | None, ranks: int, kept: bool) -> None:
    asked = DenseLinearConfig(device="cpu", weights="kept")
    rule = language.read(rules(weights="kept")).rules[0]
    layer = torch.nn.Linear(512, 192, bias=False, device="meta", dtype=torch.bfloat16)
    if form.encoding == "fp8" and style == "rowwise" and ranks == 4:
        layer.in_features = 256
    matched = MatchedModule(
        "a", layer, rule, DenseLinear, DenseLinear.use_checkpoint_format(asked, form), asked, form
    )
    found = for_ranks(matched, style, ranks)
    resolved = DenseLinear.resolve(layer, found.config)
    assert resolved is not None
    assert resolved[1].weights == (form.encoding if kept else "bf16")
    assert (found.source is None) == (not kept)


def test_refused() -> None:
    with pytest.raises(
        PlanError,
        match="dense_linear cannot replace a Linear: weights int8 are not computed on cuda:0; allowed: bf16, fp8",
    ):
        planned(tiny("qwen3_moe").bfloat16(), 1, weights="int8")
    with pytest.raises(PlanError, match=r"cannot replace a Qwen3MoeRMSNorm: it replaces nn\.Linear"):
        planned(tiny("qwen3_moe").bfloat16(), 0, path=r".*\.norm")
    reason = DenseLinear.supports(torch.nn.ReLU(), DenseLinearConfig(device="cpu"), detect())
    assert reason == "it replaces nn.Linear"
