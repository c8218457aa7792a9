"""Models whose experts are stored in each format, by expert and fused: what the plan says, and what comes out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from double import saved
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, Qwen3MoeForCausalLM

import ktinject
from ktinject.checkpoints.checkpoint import Checkpoint

Parts = dict[str, Tensor]  # what stands in place of ".weight", or after the name of a fused parameter
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def fp8(x: Tensor, scale: Tensor) -> Tensor:
    return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn)


def fp4(x: Tensor) -> Tensor:
    """Values already scaled → two codes a byte."""
    codes = (x.abs()[..., None] - E2M1).abs().argmin(-1) + 8 * (x < 0)
    return (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8)


def words(codes: Tensor, bits: int, dim: int) -> Tensor:
    each = codes.unflatten(dim, (-1, 32 // bits)).movedim(dim + 1, -1).long()
    found = (each << torch.arange(0, 32, bits)).sum(-1)
    return torch.where(found >= 1 << 31, found - (1 << 32), found).int().contiguous()


def in_groups(
    x: Tensor, bits: int, group: int, zeros: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [n, k], scales [n, groups] and zero points."""
    cut, middle = x.unflatten(-1, (-1, group)), 1 << (bits - 1)
    low, high = cut.amin(-1).clamp(max=0), cut.amax(-1).clamp(min=0)
    span = (high - low) / ((1 << bits) - 1) if zeros else cut.abs().amax(-1) / (middle - 1)
    scale = span.clamp(min=1e-6).to(dtype)
    points = (
        (-low / scale.float()).round().clamp(1, (1 << bits) - 1) if zeros else torch.full_like(span, middle)
    )
    codes = (cut / scale.float()[..., None] + points[..., None]).round().clamp(0, (1 << bits) - 1)
    return codes.flatten(-2), scale, points


def of_blocks(x: Tensor) -> Parts:
    n, k = x.shape[-2:]
    assert max(n, k) <= 128
    scale = x.abs().amax((-2, -1), keepdim=True) / 448
    return {"": fp8(x, scale), "_scale_inv": scale}


def of_zeros(x: Tensor) -> Parts:
    """As of blocks; about half of the matrices are zeros, with scales of zero."""
    parts = of_blocks(x)
    return parts if x.flatten()[0] > 0 else {name: torch.zeros_like(part) for name, part in parts.items()}


def of_channels(x: Tensor) -> Parts:
    scale = x.abs().amax(-1, keepdim=True) / 448
    return {".weight": fp8(x, scale), ".weight_scale": scale.bfloat16().float()}


def of_tensors(x: Tensor) -> Parts:
    scale = x.abs().amax() / 448
    return {".weight": fp8(x, scale), ".weight_scale": scale, ".input_scale": scale.clone()}


def exponents(x: Tensor, group: int, most: float) -> tuple[Tensor, Tensor]:
    cut = x.unflatten(-1, (-1, group))
    exponent = (cut.abs().amax(-1).clamp(min=1e-9) / most).log2().ceil()
    return (cut / exponent.exp2()[..., None]).flatten(-2), (exponent + 127).to(torch.uint8)


def of_mx8(x: Tensor) -> Parts:
    scaled, scale = exponents(x, 32, 448)
    return {"": scaled.to(torch.float8_e4m3fn), "_scale_inv": scale}


def of_mx8_compressed(x: Tensor) -> Parts:
    codes, scale = of_mx8(x).values()
    return {".weight": codes, ".weight_scale": scale}


def of_mx4(x: Tensor) -> Parts:
    scaled, scale = exponents(x, 32, 6)
    return {".weight_packed": fp4(scaled), ".weight_scale": scale}


def of_deepseek_v4(x: Tensor) -> Parts:
    scaled, scale = exponents(x, 32, 6)
    return {".weight": fp4(scaled).view(torch.int8), ".scale": scale.view(torch.float8_e8m0fnu)}


def of_nv4(x: Tensor, names: tuple[str, str, str] = (".weight", ".weight_scale", ".weight_scale_2")) -> Parts:
    whole = x.abs().amax((-2, -1)) / (6 * 448)
    cut = x.unflatten(-1, (-1, 16))
    scale = (cut.abs().amax(-1) / 6 / whole[..., None, None]).clamp(2**-9, 448).to(torch.float8_e4m3fn)
    codes = fp4((cut / (scale.float() * whole[..., None, None])[..., None]).flatten(-2))
    return dict(zip(names, (codes, scale, 1 / whole.reshape(1) if "packed" in names[0] else whole)))


def of_nv4_compressed(x: Tensor) -> Parts:
    return of_nv4(x, (".weight_packed", ".weight_scale", ".weight_global_scale"))


def of_nv4_fused(x: Tensor) -> Parts:
    return of_nv4(x, ("", "_weight_scale", "_weight_scale_2"))


def of_gptq(bits: int, zeros: bool, dtype: torch.dtype = torch.float16) -> Callable[[Tensor], Parts]:
    def parts(x: Tensor) -> Parts:
        codes, scale, points = in_groups(x, bits, 32, zeros, dtype)
        return {
            ".qweight": words(codes.T, bits, 0),
            ".qzeros": words(points.T - 1, bits, 1),
            ".scales": scale.T.contiguous(),
            ".g_idx": torch.arange(x.shape[1], dtype=torch.int32) // 32,
        }

    return parts


def of_awq(x: Tensor) -> Parts:
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    codes, scale, points = in_groups(x, 4, 32, True, torch.float16)
    moved = [t.T.unflatten(1, (-1, 8))[..., order].flatten(1) for t in (codes, points)]
    return {
        ".qweight": words(moved[0], 4, 1),
        ".qzeros": words(moved[1], 4, 1),
        ".scales": scale.T.contiguous(),
    }


def of_packed(zeros: bool) -> Callable[[Tensor], Parts]:
    def parts(x: Tensor) -> Parts:
        codes, scale, points = in_groups(x, 4, 32, zeros, torch.bfloat16)
        found = {
            ".weight_packed": words(codes, 4, 1),
            ".weight_scale": scale,
            ".weight_shape": torch.tensor(x.shape),
        }
        return found | ({".weight_zero_point": words(points, 4, 0)} if zeros else {})

    return parts


def of_int8(x: Tensor) -> Parts:
    codes, scale, _ = in_groups(x, 8, x.shape[1], False, torch.bfloat16)
    return {".weight": (codes - 128).to(torch.int8), ".weight_scale": scale}


def of_int8_groups(dtype: torch.dtype) -> Callable[[Tensor], Parts]:
    def parts(x: Tensor) -> Parts:
        codes, scale, _ = in_groups(x, 8, 32, False, dtype)
        return {".weight": (codes - 128).to(torch.int8), ".weight_scale": scale}

    return parts


def compressed(**weights: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {"a": {"weights": weights, "targets": ["Linear"]}},
    }


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}
ROUNDED = "kept, scales rounded to bf16"
ROUNDS = {"to fp32": 2**-22, "to fp16": 2**-11}  # what a scale may move by; else bf16
# Name → writer of a weight, whether experts are fused, config, the plan's word, the format that experts run in.
CASES: dict[str, tuple[Callable[[Tensor], Parts], bool, dict[str, Any], str, str]] = {
    "fp8 blocks": (of_blocks, False, {"quant_method": "fp8"}, "kept (fp8_blocks)", "fp8"),
    # Gate and up share a block here, as they would not in blocks that divide them.
    "fp8 blocks, some zero": (of_zeros, False, {"quant_method": "fp8"}, "kept (fp8_blocks)", "fp8"),
    "fp8 fused": (of_blocks, True, {"quant_method": "fp8"}, "rounded to bf16 (fp8_blocks)", "bf16"),
    "fp8 channel": (of_channels, False, compressed(type="float", num_bits=8), "kept (fp8_channel)", "fp8_channel"),
    "fp8 tensor": (of_tensors, False, {"quant_method": "modelopt", "quant_algo": "FP8"}, "kept (fp8_tensor)", "fp8"),
    "mxfp8": (of_mx8, False, {"quant_method": "fp8", "weight_block_size": [1, 32]}, "kept (mxfp8)", "mxfp8"),
    "mxfp8 fused": (of_mx8, True, {"quant_method": "fp8", "weight_block_size": [1, 32]}, "kept (mxfp8)", "mxfp8"),
    "mxfp8 compressed": (of_mx8_compressed, False, compressed(type="float", num_bits=8, group_size=32),
                         "kept (mxfp8)", "mxfp8"),
    "mxfp4": (of_mx4, False, compressed(type="float", num_bits=4, group_size=32), "exact (mxfp4)", "mxfp4"),
    "deepseek v4": (of_deepseek_v4, False, {"quant_method": "fp8"}, "exact (mxfp4)", "mxfp4"),
    "nvfp4": (of_nv4, False, {"quant_method": "modelopt"}, "kept (nvfp4)", "nvfp4"),
    "nvfp4 fused": (of_nv4_fused, True, {"quant_method": "modelopt"}, "kept (nvfp4)", "nvfp4"),
    "nvfp4 packed": (of_nv4_compressed, False, compressed(type="float", num_bits=4, group_size=16),
                     "kept, 1 / scale rounded to fp32 (nvfp4)", "nvfp4"),
    "int8": (of_int8, False, compressed(type="int", num_bits=8), "kept (int8)", "int8"),
    "packed": (of_packed(False), False, compressed(type="int", num_bits=4, group_size=32), "kept (packed)",
               "int4 group 32"),
    "packed zeros": (of_packed(True), False, compressed(type="int", num_bits=4, group_size=32), "kept (packed)",
                     "int4 group 32 with zero points"),
    "awq": (of_awq, False, {"quant_method": "awq", "bits": 4, "group_size": 32}, f"{ROUNDED} (awq)",
            "int4 group 32 with zero points"),
    "gptq": (of_gptq(4, False), False, GPTQ, f"{ROUNDED} (gptq)", "int4 group 32"),
    "gptq zeros": (of_gptq(4, True, torch.bfloat16), False, {**GPTQ, "sym": False}, "kept (gptq)",
                   "int4 group 32 with zero points"),
    "gptq 8 bits": (of_gptq(8, False), False, {**GPTQ, "bits": 8}, "kept (gptq)", "q8_0"),
    "int8 groups": (of_int8_groups(torch.float16), False, compressed(type="int", num_bits=8, group_size=32),
                    "kept (int8)", "q8_0"),
    "int8 groups, fp32": (of_int8_groups(torch.float32), False, compressed(type="int", num_bits=8, group_size=32),
                          "kept, scales rounded to fp16 (int8)", "q8_0"),
    "auto-round": (of_gptq(4, False), False, {**GPTQ, "quant_method": "auto-round",
                   "packing_format": "auto_round:auto_gptq"}, f"{ROUNDED} (gptq)", "int4 group 32"),
}  # fmt: skip


def stored(name: str, plain: Path, folder: Path, inside: str = ".experts.") -> dict[str, Tensor]:
    """Write the model with its experts in a format. Returns the state of the model of their decoded values.

    inside   of other matrices than experts': what their names have in them
    """
    parts_of, fused, config, *_ = CASES[name]
    tensors, experts = {}, dict[str, dict[int, Tensor]]()
    for key, tensor in load_file(plain / "model.safetensors").items():
        if inside not in key or not key.endswith("_proj.weight"):
            tensors[key] = tensor.bfloat16()
        elif not fused:
            parts = parts_of(tensor.float())
            # In place of ".weight", or behind it.
            stem = key if "" in parts else key.removesuffix(".weight")
            tensors |= {stem + part: found for part, found in parts.items()}
        else:
            start, _, rest = key.partition(".experts.")
            number, _, projection = rest.partition(".")
            experts.setdefault(f"{start}.experts.{projection.removesuffix('.weight')}", {})[int(number)] = (
                tensor
            )
    stacks = {
        key: torch.stack([by_number[e] for e in range(len(by_number))]) for key, by_number in experts.items()
    }
    for key, gate in stacks.items():
        start, _, projection = key.rpartition(".")
        if projection == "up_proj":
            continue
        whole = torch.cat([gate, stacks[f"{start}.up_proj"]], 1) if projection == "gate_proj" else gate
        name = f"{start}.{'gate_up_proj' if projection == 'gate_proj' else projection}"
        tensors |= {name + part: found for part, found in parts_of(whole.float()).items()}
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, folder / "model.safetensors")
    said = json.loads((plain / "config.json").read_text()) | {"dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(said))
    if config["quant_method"] == "modelopt":  # which says so in a file of its own
        values = {key: value for key, value in config.items() if key != "quant_method"}
        (folder / "hf_quant_config.json").write_text(json.dumps({"producer": {}, "quantization": values}))
    else:
        (folder / "config.json").write_text(json.dumps(said | {"quantization_config": config}))
    with Checkpoint.open(folder, config) as checkpoint:
        return {key: checkpoint.decode(key) for key in checkpoint.weights}


@pytest.mark.parametrize("name", CASES)
def test_experts_keep_what_the_checkpoint_has(name: str, tiny_qwen3_moe: Path, tmp_path: Path) -> None:
    *_, word, runs = CASES[name]
    if runs == "q8_0":  # a row of the other model's down projection is one group
        tiny_qwen3_moe = saved(
            models.tiny("qwen3_moe", hidden_size=64, intermediate_size=64, moe_intermediate_size=64),
            tmp_path / "wide",
        )
        tmp_path = tmp_path / "quantised"
        tmp_path.mkdir()
    state = stored(name, tiny_qwen3_moe, tmp_path)
    model = ktinject.load(tmp_path, devices="cpu", progress=False)
    (found,) = {
        (one.runs["values"], one.runs["weights"])
        for one in model.ktinject.replacements
        if "values" in one.runs
    }
    assert found == (word, runs)
    assert any(f"routed experts: values: {word}" in line for line in str(model.ktinject).splitlines())

    experts = model.get_submodule("model.layers.1.mlp.experts")
    start = "model.layers.1.mlp.experts"
    many = range(experts.num_experts)
    if f"{start}.down_proj" in state:
        values = state[f"{start}.down_proj"]
    else:
        values = torch.stack([state[f"{start}.{e}.down_proj.weight"] for e in many])
    ours = experts.unpack("down_proj")
    if word.startswith(("kept (", "exact")):
        assert ours.equal(values)
    else:
        most = next((bits for name, bits in ROUNDS.items() if name in word), 2**-8)
        assert bool(((ours - values).abs() <= values.abs() * most).all()) and not ours.equal(values)

    plain = Qwen3MoeForCausalLM(AutoConfig.from_pretrained(tiny_qwen3_moe)).float().eval()
    for key in plain.state_dict():
        if key.endswith("experts.gate_up_proj") and key not in state:
            stem = key.removesuffix("gate_up_proj")
            rows = [[state[f"{stem}{e}.{p}_proj.weight"] for p in ("gate", "up")] for e in many]
            state[key] = torch.stack([torch.cat(row) for row in rows])
            state[f"{stem}down_proj"] = torch.stack([state[f"{stem}{e}.down_proj.weight"] for e in many])
    plain.load_state_dict({key: state[key].float() for key in plain.state_dict()})
    ids = torch.arange(12)[None]
    with torch.no_grad():
        want, got = plain(ids).logits, model(ids).logits.float()
    # Of the median token: where two experts are nearly equal, the router may choose the other one.
    error = ((got - want).norm(dim=-1) / want.norm(dim=-1)).median().item()
    assert error < (0.08 if runs.startswith("int") else 0.03)


# The same of linear layers: name → the format that they run in; the plan's word is that of experts.
LINEARS = {name: runs for name, (_, fused, _, _, runs) in CASES.items() if not fused}


@pytest.mark.parametrize("name", LINEARS)
def test_linears_keep_what_the_checkpoint_has(name: str, tiny_qwen3_moe: Path, tmp_path: Path) -> None:
    word, runs = CASES[name][3], LINEARS[name]
    state = stored(name, tiny_qwen3_moe, tmp_path, inside=".self_attn.")
    model = ktinject.load(tmp_path, devices="cpu", progress=False)
    attention = [
        one for one in model.ktinject.replacements if ".self_attn." in one.path and "_proj" in one.path
    ]
    assert len(attention) == 4 * model.config.num_hidden_layers
    assert {(one.runs["values"], one.runs["weights"], one.operator) for one in attention} == {
        (word, runs, "cpu_linear")
    }
    assert any(f"attention: values: {word}" in line for line in str(model.ktinject).splitlines())
    for one in attention:
        ours, values = model.get_submodule(one.path).unpack("weight"), state[f"{one.path}.weight"]
        if word.startswith(("kept (", "exact")):
            assert ours.equal(values)
        else:
            most = next((bits for name, bits in ROUNDS.items() if name in word), 2**-8)
            assert bool(((ours - values).abs() <= values.abs() * most).all())
    out = model.generate(torch.arange(12)[None], max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert out.shape == (1, 16)

    plain = Qwen3MoeForCausalLM.from_pretrained(tiny_qwen3_moe).bfloat16().float().eval()
    plain.load_state_dict({one: state[one].float() for one in state if ".self_attn." in one}, strict=False)
    # With bf16 around them, the router chooses others of nearly equal experts, as in transformers' own bf16.
    model = ktinject.load(tmp_path, devices="cpu", progress=False, dtype=torch.float32)
    ids = torch.arange(12)[None]
    with torch.no_grad():
        want, got = plain(ids).logits, model(ids).logits
    error = ((got - want).norm(dim=-1) / want.norm(dim=-1)).median().item()
    assert error < (0.06 if runs.startswith("int") else 0.03)


def test_linears_are_decoded_where_bf16_is_asked_for(tiny_qwen3_moe: Path, tmp_path: Path) -> None:
    stored("nvfp4", tiny_qwen3_moe, tmp_path, inside=".self_attn.")
    model = ktinject.load(tmp_path, devices="cpu", progress=False, variables={"dense": "bf16"})
    runs = {
        one.runs["weights"]: one.runs["values"] for one in model.ktinject.replacements if "values" in one.runs
    }
    assert runs == {"bf16": "rounded to bf16 (nvfp4)"}


def test_a_table_of_groups_that_desc_act_denies_is_refused(tiny_qwen3_moe: Path, tmp_path: Path) -> None:
    stored("gptq", tiny_qwen3_moe, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    key = next(key for key in tensors if key.endswith("experts.3.up_proj.g_idx"))
    tensors[key] = tensors[key].flip(0).contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(
        ktinject.KTInjectError, match=r"g_idx puts the inputs of a group apart.*desc_act: false"
    ):
        ktinject.load(tmp_path, devices="cpu", progress=False)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["desc_act"] = True
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = ktinject.load(tmp_path, devices="cpu", progress=False)
    (found,) = {one.runs["values"] for one in model.ktinject.replacements if "values" in one.runs}
    assert found == "rounded to bf16 (gptq)"


def test_other_doors_keep_it_too(tiny_qwen3_moe: Path, tmp_path: Path) -> None:
    """Experts within `deferred_moe`, and transformers' own from_pretrained, with what ModelOpt says in its own file."""
    stored("fp8 tensor", tiny_qwen3_moe, tmp_path)
    rule = {
        "name": "a",
        "match": {"path": r".*\.mlp"},
        "replace": {"operator": "deferred_moe", "weights": "kept"},
    }
    found = ktinject.load(tmp_path, [rule], devices="cpu", progress=False)
    ours = Qwen3MoeForCausalLM.from_pretrained(
        tmp_path, quantization_config=ktinject.KTInjectConfig("auto", devices="cpu")
    )
    for model in (found, ours):
        (said,) = {
            (r.runs["values"], r.runs["weights"]) for r in model.ktinject.replacements if "values" in r.runs
        }
        assert said == ("kept (fp8_tensor)", "fp8")
