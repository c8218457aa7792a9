"""Checkpoints whose experts are fp8, mxfp8 or mxfp4, in `cpu_experts` with the same weights: rounded no second time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import models
import pytest
import reference
import torch
from double import on_meta, saved
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

import ktinject
from ktinject.checkpoints.checkpoint import Checkpoint
from ktinject.checkpoints.formats.base import Format
from ktinject.errors import OperatorError, PlanError
from ktinject.operators.cpu_experts import CpuExperts, CpuExpertsConfig

torch.set_num_threads(1)


def experts_as(weights: str, operator: str = "cpu_experts") -> list[dict[str, Any]]:
    path = r".*\.experts" if operator != "deferred_moe" else r".*\.layers\.1\.mlp"
    return [
        {"name": "experts", "match": {"path": path}, "replace": {"operator": operator, "weights": weights}}
    ]


KEEP = [{"name": "all", "match": {"path": r".*\.experts"}, "replace": "keep"}]


def requantise(folder: Path, quantization: dict[str, Any], change: Any) -> Path:
    """Rewrite a checkpoint: `change` takes a name and a tensor and gives the tensors that replace it."""
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        tensors |= change(name, tensor)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def codes(*shape: int) -> torch.Tensor:
    """e4m3 of every finite value; so no block's scale can be told from its largest."""
    bits = torch.randint(0, 254, shape, dtype=torch.uint8)
    return (bits + (bits >= 127).to(torch.uint8)).view(torch.float8_e4m3fn)


def fp8_checkpoint(folder: Path, side: int = 128) -> Path:
    torch.manual_seed(0)
    model = models.tiny("deepseek_v3", hidden_size=168, moe_intermediate_size=144)

    def change(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        if ".experts." not in name:
            return {name: tensor}
        n, k = tensor.shape
        scales = torch.rand(-(-n // side), -(-k // side)) * 1e-3 + 1e-4
        return {name: codes(n, k), f"{name}_scale_inv": scales}

    quantization = {"quant_method": "fp8", "weight_block_size": [side, side]}
    return requantise(saved(model, folder), quantization, change)


def mxfp8_checkpoint(folder: Path) -> Path:
    torch.manual_seed(0)
    model = models.tiny(
        "deepseek_v3", hidden_size=160, moe_intermediate_size=144
    )  # 144: half a group is padding

    def change(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        if ".experts." not in name:
            return {name: tensor}
        n, k = tensor.shape
        scales = torch.randint(110, 118, (n, -(-k // 32)), dtype=torch.uint8)
        return {name: codes(n, k), f"{name}_scale_inv": scales}

    quantization = {"quant_method": "fp8", "weight_block_size": [1, 32]}
    return requantise(saved(model, folder), quantization, change)


def mxfp4_checkpoint(folder: Path) -> Path:
    torch.manual_seed(0)
    model = models.tiny("gpt_oss", hidden_size=64, intermediate_size=96)

    def change(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        if not name.endswith(("gate_up_proj", "down_proj")):
            return {name: tensor}
        e, k, n = tensor.shape
        scales = torch.randint(118, 124, (e, n, k // 32), dtype=torch.uint8)
        blocks = torch.randint(0, 256, (e, n, k // 32, 16), dtype=torch.uint8)
        blocks[0, 0] = 0  # nothing but zeros leaves any scale
        blocks[0, 1] &= 0x99  # nothing above a half: a smaller scale would say the same
        return {f"{name}_blocks": blocks, f"{name}_scales": scales}

    return requantise(saved(model, folder), {"quant_method": "mxfp4"}, change)


def stored_values(folder: Path, model: PreTrainedModel, path: str, name: str) -> torch.Tensor:
    """A leaf's parameter as the checkpoint means it, in fp32."""
    plan = ktinject.plan(on_meta(folder), KEEP, checkpoint=folder)
    assert plan.mapping is not None
    pieces = plan.mapping.targets[f"{path}.{name}"]
    with Checkpoint.open(folder) as checkpoint:
        if pieces[0].expert is None:
            return checkpoint.decode(pieces[0].key).float()
        parts = {(p.expert, p.part): checkpoint.decode(p.key).float() for p in pieces}
    each = [
        torch.cat([parts[key] for key in sorted(parts, key=str) if key[0] == e])
        for e in sorted({key[0] for key in parts if key[0] is not None})
    ]
    return torch.stack(each)


CHECKPOINTS = {"fp8": fp8_checkpoint, "mxfp8": mxfp8_checkpoint, "mxfp4": mxfp4_checkpoint}


@pytest.mark.parametrize("weights", CHECKPOINTS)
def test_every_value_comes_back_bit_by_bit(weights: str, tmp_path: Path) -> None:
    folder = CHECKPOINTS[weights](tmp_path)
    model = ktinject.load(folder, experts_as(weights), progress=False)
    leaves = [
        module for _, module in model.named_modules() if isinstance(module, ktinject.operators.Operator)
    ]
    assert len(leaves) == len(model.ktinject.replacements) >= 1
    for replacement, leaf in zip(model.ktinject.replacements, leaves):
        assert replacement.runs["weights"] == weights
        for name in ("gate_up_proj", "down_proj"):
            want = stored_values(folder, model, replacement.path, name)
            assert want.abs().max() > 0 and torch.equal(leaf.unpack(name), want)
    # And it computes what the weights mean, but for bf16 activations.
    plain = ktinject.load(folder, experts_as("bf16"), progress=False)
    ids = torch.randint(3, 90, (2, 12))
    with torch.no_grad():
        assert reference.relative_error(model(ids).logits, plain(ids).logits) <= 1e-2


@pytest.mark.parametrize("weights", ["fp8", "mxfp8"])
@pytest.mark.parametrize("operator", ["hybrid_experts", "deferred_moe"])
def test_operators_that_hold_experts_take_codes_as_they_are(
    operator: str, weights: str, tmp_path: Path
) -> None:
    folder = CHECKPOINTS[weights](tmp_path)
    model = ktinject.load(folder, experts_as(weights, operator), progress=False)
    replacement = model.ktinject.replacements[-1]
    assert replacement.runs["values"].startswith("kept (")
    leaf, inner = model.get_submodule(replacement.path), "experts." if operator == "deferred_moe" else ""
    path = replacement.path + (".experts" if inner else "")
    want = stored_values(folder, model, path, "down_proj")
    assert torch.equal(leaf.unpack(f"{inner}down_proj"), want)


def test_what_is_not_swapped_is_decoded(tmp_path: Path) -> None:
    folder = mxfp4_checkpoint(tmp_path)
    model = ktinject.load(folder, KEEP, progress=False)
    experts = model.model.layers[0].mlp.experts
    want = stored_values(folder, model, "model.layers.0.mlp.experts", "gate_up_proj")
    assert torch.equal(experts.gate_up_proj.float(), want)


@pytest.mark.parametrize("operator", ["cpu_experts", "hybrid_experts", "deferred_moe"])
def test_blocks_of_another_size_are_refused_by_the_plan(operator: str, tmp_path: Path) -> None:
    folder = fp8_checkpoint(tmp_path, side=64)
    with pytest.raises(PlanError, match=r"blocks of 64 × 64; weights: fp8 keeps 128 × 128; choose other"):
        ktinject.plan(on_meta(folder), experts_as("fp8", operator), checkpoint=folder)
    assert ktinject.load(folder, experts_as("int8", operator), progress=False).ktinject.replacements


@pytest.mark.parametrize("value", [0x7F, 0xFF])
def test_a_nan_is_refused_and_named(value: int, tmp_path: Path) -> None:
    folder = fp8_checkpoint(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in tensors if name.endswith("experts.3.up_proj.weight"))
    tensors[name].view(torch.uint8)[7, 100] = value
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(OperatorError, match=r"gate_up_proj: expert 3, up: output row 7 holds a NaN"):
        ktinject.load(folder, experts_as("fp8"), progress=False)


def test_exponents_out_of_range_are_refused(tmp_path: Path) -> None:
    folder = mxfp8_checkpoint(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in tensors if name.endswith("experts.2.down_proj.weight_scale_inv"))
    tensors[name][7, 3] = 9
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        OperatorError, match=r"expert 2, down: the scale of output row 7, group 3 is 2\^-118; .*: bf16"
    ):
        ktinject.load(folder, experts_as("kept"), progress=False)
    assert ktinject.load(folder, experts_as("bf16"), progress=False).ktinject.replacements


def test_scales_for_inputs_are_no_scales_for_outputs() -> None:
    """Of parameters that stand across, an e4m3 scale belongs to inputs: such weights are decoded."""
    module = models.tiny("gpt_oss", hidden_size=64, intermediate_size=96).model.layers[0].mlp.experts
    for name, block in (("mxfp8", (1, 32)), ("fp8_channel", (1, 64))):
        operator = CpuExperts.build(module, CpuExpertsConfig(device="cpu", weights=name))
        form = Format(name, block=block, group_size=32, encoding=name)
        assert "its scales are for inputs" in (operator.misfit_of("down_proj", form, None) or "")


def test_a_scale_out_of_range_is_refused(tmp_path: Path) -> None:
    folder = fp8_checkpoint(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in tensors if name.endswith("experts.2.down_proj.weight_scale_inv"))
    tensors[name][1, 0] = 2.0**-110
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        OperatorError, match=r"expert 2, down: the scale of block \[1, 0\] is .*2\^-100 to 2\^100"
    ):
        ktinject.load(folder, experts_as("fp8"), progress=False)
