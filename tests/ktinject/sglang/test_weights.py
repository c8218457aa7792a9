"""--kt-weight-path and --kt-method: which checkpoints are read, as what, and what is said of others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf_by_hand
import pytest
import reference
import sglang_cases
import torch
from sglang_cases import EXPERTS, HIDDEN, INNER, LAYERS, arguments, expected, filled, forward, inputs, is_near
from torch import Tensor
from trained import trained_model

from ktinject.errors import CheckpointError, KTInjectError
from ktinject.sglang import KTMoEWrapper

NAMES = ("gate_proj", "up_proj", "down_proj")


def renamed(place: str, parts: tuple[str, ...], layers: str = "model.layers") -> dict[str, Tensor]:
    """The experts, and no others, by other names."""
    values = sglang_cases.tensors()
    return {
        f"{layers}.{layer}{place}.{expert}.{part}.weight": values[
            sglang_cases.EACH.format(layer, expert, name)
        ]
        for layer in range(LAYERS)
        for expert in range(EXPERTS)
        for name, part in zip(NAMES, parts)
    }


def together(layers: str = "model.language_model.layers") -> dict[str, Tensor]:
    found = {}
    for layer in range(LAYERS):
        stacks = {name: stack.bfloat16() for name, stack in sglang_cases.stacks(layer).items()}
        at = f"{layers}.{layer}.mlp.experts"
        found[f"{at}.gate_up_proj"] = torch.cat((stacks["gate"], stacks["up"]), 1)
        found[f"{at}.down_proj"] = stacks["down"]
    return found


@pytest.mark.parametrize(
    "values",
    [
        renamed(".block_sparse_moe.experts", ("w1", "w3", "w2")),
        renamed(".experts", ("w1", "w3", "w2"), "layers"),
        renamed(".mlp.experts", NAMES, "language_model.model.layers"),
        together(),
    ],
    ids=["mixtral", "mistral", "within", "together"],
)
def test_names_of_all_kinds_are_found(values: dict[str, Tensor], tmp_path: Path) -> None:
    made = filled(1, weight_path=str(sglang_cases.saved(values, tmp_path)))
    assert is_near(forward(made, inputs(5)), expected(*inputs(5), layer=1))


@pytest.mark.parametrize(
    ("method", "weights", "of"),
    [
        ("AMXINT4", "int4 group 32", "int4_g32"),
        ("moe_int8", "int8", "int8"),
        ("BF16", "bf16", "bf16"),
        ("auto", "bf16", "bf16"),
        ("LLAMAFILE", "bf16", "bf16"),
    ],
)
def test_a_method_is_a_format(method: str, weights: str, of: str) -> None:
    made = filled(method=method)
    assert made._layer._experts.describe()["weights"] == weights
    assert is_near(forward(made, inputs(40)), expected(*inputs(40)), of)


def fp8(
    values: dict[str, Tensor], block: tuple[int, int], dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """With a scale of 1/16 for each block; uint8 is its exponent."""
    found = {}
    for name, value in values.items():
        n, k = value.shape
        found[name] = (value.float() * 16).to(torch.float8_e4m3fn)
        grid = (-(-n // block[0]), -(-k // block[1]))
        scale = 123 if dtype == torch.uint8 else 1 / 16
        found[f"{name}_scale_inv"] = torch.full(grid, scale, dtype=dtype)
    return found


def packed(values: dict[str, Tensor], group: int) -> dict[str, Tensor]:
    """int4 as compressed-tensors packs it."""
    found = {}
    for name, value in values.items():
        n, k = value.shape
        steps = value.float().view(n, k // group, group)
        scales = steps.abs().amax(-1, keepdim=True) / 7
        codes = (steps / scales).round().clamp(-8, 7).view(n, k // 8, 8).long() + 8
        words = (codes << torch.arange(0, 32, 4)).sum(-1)
        stem = name.removesuffix(".weight")
        found[f"{stem}.weight_packed"] = torch.where(words >= 1 << 31, words - (1 << 32), words).int()
        found[f"{stem}.weight_scale"] = scales[..., 0].bfloat16()
        found[f"{stem}.weight_shape"] = torch.tensor([n, k])
    return found


PACKED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 4,
                "type": "int",
                "symmetric": True,
                "strategy": "group",
                "group_size": 32,
            },
        }
    },
}


@pytest.mark.parametrize(
    ("method", "values", "quantization", "weights", "of"),
    [
        (
            "FP8",
            fp8(sglang_cases.tensors(), (128, 128)),
            {"quant_method": "fp8", "weight_block_size": [128, 128]},
            "fp8",
            "fp8",
        ),
        (
            "MXFP8",
            fp8(sglang_cases.tensors(), (1, 32), torch.uint8),
            {"quant_method": "fp8", "weight_block_size": [1, 32]},
            "mxfp8",
            "mxfp8",
        ),
        (
            "RAWINT4",
            packed(sglang_cases.tensors(), 32),
            PACKED,
            "int4 group 32",
            "int4_g64",
        ),  # and activations
        ("BF16", packed(sglang_cases.tensors(), 32), PACKED, "bf16", "int4_g32"),
    ],
    ids=["fp8", "mxfp8", "rawint4", "decoded"],
)
def test_quantised_checkpoints_stay_as_they_are(
    method: str,
    values: dict[str, Tensor],
    quantization: dict[str, Any],
    weights: str,
    of: str,
    tmp_path: Path,
) -> None:
    sglang_cases.saved(values, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"quantization_config": quantization}}))
    made = filled(method=method, weight_path=str(tmp_path))
    assert made._layer._experts.describe()["weights"] == weights
    assert is_near(forward(made, inputs(5)), expected(*inputs(5)), of)


def broken(kind: str, folder: Path) -> dict[str, Any]:
    values = sglang_cases.tensors()
    if kind == "numa":
        values = {"blk.0.ffn_up_exps.0.numa.0.weight": torch.zeros(4, dtype=torch.uint8)}
    if kind == "shape":
        values = {name: value[:, : HIDDEN // 2].contiguous() for name, value in values.items()}
    if kind == "stacked":
        values = {name: value.mT.contiguous() for name, value in together().items()}
    if kind == "bias":
        values = together() | {
            f"{name}_bias": value[..., 0].contiguous() for name, value in together().items()
        }
    if kind == "kt":
        (folder / "_layer_0").mkdir()
    sglang_cases.saved(values, folder)
    if kind == "nothing":
        return {"weight_path": str(folder / "absent")}
    if kind == "layer":
        return {"weight_path": str(folder), "layer_idx": LAYERS}
    if kind == "fused":
        return {"weight_path": str(folder), "num_experts": EXPERTS + 1}
    if kind == "method":
        return {"weight_path": str(folder), "method": "FP8"}
    return {"weight_path": str(folder)}


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("numa", "converted for kt-kernel"),
        ("kt", "converted for kt-kernel"),
        ("nothing", "usually that of --model-path"),
        ("layer", "layer 3 has no experts"),
        ("fused", "--disable-shared-experts-fusion"),
        ("method", "has its experts as bf16; allowed: fp8"),
        ("shape", "expected shape"),
        ("stacked", "gate above up"),
        ("bias", "has biases"),
    ],
)
def test_what_cannot_be_read_is_refused_with_a_remedy(kind: str, said: str, tmp_path: Path) -> None:
    given = arguments() | broken(kind, tmp_path)
    with pytest.raises(KTInjectError) as refused:
        made = KTMoEWrapper(**given)
        made.load_weights(torch.arange(given["num_experts"]))
    assert said in str(refused.value)


def test_experts_on_the_gpu_are_neither_read_nor_needed(tmp_path: Path) -> None:
    values = {name: value for name, value in sglang_cases.tensors().items() if ".experts.0." not in name}
    folder = str(sglang_cases.saved(values, tmp_path))
    with pytest.raises(CheckpointError):
        filled(weight_path=folder)
    made = filled(weight_path=folder, num_gpu_experts=1, hidden_size=HIDDEN, moe_intermediate_size=INNER)
    assert is_near(forward(made, inputs(5)), expected(*inputs(5), on_gpu={0}))
    nothing = filled(num_gpu_experts=EXPERTS)
    assert not forward(nothing, inputs(5)).any()


def test_clamped_gates_are_those_of_the_fork() -> None:
    """gate at most the limit, up within it; with alpha, gate · sigmoid(alpha · gate) · (up + 1)."""
    x, _, _ = inputs(4)
    one = (x, torch.zeros(4, 1, dtype=torch.int32), torch.ones(4, 1))
    made = filled(swiglu_limit=0.5, swiglu_alpha=1.7, num_experts_per_tok=1)
    gate, up, down = (stack[0] for stack in sglang_cases.stacks().values())
    g, u = (x.double() @ gate.T).clamp(max=0.5), (x.double() @ up.T).clamp(-0.5, 0.5)
    assert is_near(forward(made, one), (g * torch.sigmoid(1.7 * g) * (u + 1)) @ down.T)


@pytest.mark.parametrize(("kind", "weights"), [("Q4_0", "int4 group 32"), ("Q8_0", "int8")])
def test_a_gguf_file_is_read_as_what_is_nearest(kind: str, weights: str, tmp_path: Path) -> None:
    """The trained model: GGUF's names are its own, and ours what the model has in safetensors."""
    file = gguf_by_hand.converted(trained_model("tiny-qwen3-moe"), tmp_path / "model.gguf", kind)
    of = {"num_experts": 32, "num_experts_per_tok": 8, "hidden_size": 128, "moe_intermediate_size": 64}
    made, stored = (
        KTMoEWrapper(**arguments(1, **of, weight_path=str(path), method=method))
        for path, method in ((file, "LLAMAFILE"), (trained_model("tiny-qwen3-moe"), "BF16"))
    )
    random = torch.Generator().manual_seed(0)
    x = torch.randn(9, 128, generator=random).bfloat16()
    call = (
        x,
        torch.rand(9, 32, generator=random).argsort(-1)[:, :8].int().contiguous(),
        torch.full((9, 8), 0.125),
    )
    for one in (made, stored):
        one.load_weights(None)
    assert made._layer._experts.describe()["weights"] == weights
    assert reference.relative_error(forward(made, call), forward(stored, call)) < 0.2
