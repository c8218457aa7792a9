"""Writes the files in this folder: one weight in each format, packed and unpacked by the library that defines it.

    python -m pip install --no-deps compressed-tensors==0.20.0 loguru
    python -m pip download --no-deps auto-gptq==0.7.1 autoawq==0.2.9 nvidia-modelopt==0.47.0    # unpack them in FOLDER
    python tests/ktinject/checkpoints/golden/make.py FOLDER

Of the last three, single files are imported from where they were unpacked: as packages they need a GPU, or a
transformers of their time. A file has the tensors `x.…` as the library writes them, `values` as it gives them back, and
`quantization_config` as metadata.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import types
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

HERE = Path(__file__).parent
N, K = 32, 128


def drawn() -> Tensor:
    return torch.randn(N, K, generator=torch.Generator().manual_seed(7)).bfloat16()


def write(name: str, tensors: dict[str, Tensor], values: Tensor, config: dict[str, Any]) -> None:
    held = {f"x.{part}": tensor.detach().contiguous() for part, tensor in tensors.items()}
    save_file(
        held | {"values": values.detach().contiguous()},
        HERE / f"{name}.safetensors",
        {"quantization_config": json.dumps(config)},
    )


# compressed-tensors

_INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
_FP8 = {"num_bits": 8, "type": "float"}
COMPRESSED: dict[str, tuple[str, dict[str, Any]]] = {
    "fp8_channel": ("float-quantized", {**_FP8, "strategy": "channel"}),
    "fp8_tensor": ("float-quantized", {**_FP8, "strategy": "tensor"}),
    "fp8_block": ("float-quantized", {**_FP8, "strategy": "block", "block_structure": [16, 64]}),
    "int8_channel": ("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}),
    "int8_group": ("int-quantized", {"num_bits": 8, "type": "int", "strategy": "group", "group_size": 32}),
    "int8_zeros": (
        "int-quantized",
        {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": False},
    ),
    "packed4": ("pack-quantized", _INT4),
    "packed4_zeros": ("pack-quantized", {**_INT4, "symmetric": False}),
    "packed4_channel": ("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "channel"}),
    "packed8": ("pack-quantized", {**_INT4, "num_bits": 8}),
    "packed8_zeros": ("pack-quantized", {**_INT4, "num_bits": 8, "symmetric": False}),
    "mxfp4": ("mxfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32,
                                        "scale_dtype": "torch.uint8"}),
    "mxfp8": ("mxfp8-quantized", {**_FP8, "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}),
    "nvfp4": ("nvfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16,
                                        "scale_dtype": "torch.float8_e4m3fn"}),
}  # fmt: skip


def compressed() -> None:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    for name, (form, said) in COMPRESSED.items():
        scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**said))
        args, weight = scheme.weights, drawn()
        state: dict[str, Tensor] = {"weight": weight}
        cut = {
            "channel": weight[:, None, :],
            "tensor": weight.reshape(1, 1, -1),
            "block": weight.view(N // 16, 16, K // 64, 64).transpose(1, 2).reshape(N // 16, K // 64, -1),
        }.get(said["strategy"], weight.view(N, -1, said.get("group_size") or K))
        low, high = cut.amin(-1).float(), cut.amax(-1).float()
        if "nvfp4" in form:
            state["weight_global_scale"] = generate_gparam(low.amin(), high.amax())
        scale, zero = calculate_qparams(low, high, args, global_scale=state.get("weight_global_scale"))
        scale = scale.reshape(-1)[:1] if said["strategy"] == "tensor" else scale
        state["weight_scale"] = scale.to(torch.float32 if "fp" in name and "8" in name else torch.bfloat16)
        if not said.get("symmetric", True):
            state["weight_zero_point"] = zero.to(torch.int8)
        compressor = BaseCompressor.get_value_from_registry(form)
        packed = compressor.compress(dict(state), scheme)
        values = compressor.decompress(dict(packed), scheme)["weight"]
        config = {
            "quant_method": "compressed-tensors",
            "format": form,
            "config_groups": {"group_0": json.loads(scheme.model_dump_json())},
        }
        write(name, packed, values, config)


# The others


def single(path: Path, name: str) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def in_groups(weight: Tensor, bits: int, group: int, symmetric: bool) -> tuple[Tensor, Tensor]:
    """Scales and zero points [n, groups] of a plain rounding."""
    cut = weight.float().view(N, -1, group)
    if symmetric:
        scale = cut.abs().amax(-1) / ((1 << (bits - 1)) - 1)
        return scale.half().float(), torch.full_like(scale, 1 << (bits - 1))
    low, high = cut.amin(-1).clamp(max=0), cut.amax(-1).clamp(min=0)
    scale = ((high - low) / ((1 << bits) - 1)).half().float()
    return scale, (-low / scale).round().clamp(1, (1 << bits) - 1)


def gptq(folder: Path) -> None:
    auto = single(folder / "auto_gptq/nn_modules/qlinear/qlinear_cuda_old.py", "auto_gptq_old")
    for name, bits, group, symmetric in (
        ("gptq4", 4, 32, True),
        ("gptq4_zeros", 4, 64, False),
        ("gptq8", 8, 32, True),
        ("gptq8_zeros", 8, 32, False),
    ):
        linear = nn.Linear(K, N, bias=False).half()
        linear.weight.data = drawn().half()
        layer = auto.QuantLinear(bits, group, K, N, False, weight_dtype=torch.float16)
        scales, zeros = in_groups(linear.weight.data, bits, group, symmetric)
        linear.weight.data = linear.weight.data.float().clamp(-4, 4).half()
        kept = (linear.weight.data.float().view(N, -1, group) / scales[..., None] + zeros[..., None]).round()
        codes = kept.clamp(0, (1 << bits) - 1)
        linear.weight.data = ((codes - zeros[..., None]) * scales[..., None]).view(N, K)
        layer.pack(linear, scales.clone(), zeros.clone(), None)
        layer.scales = layer.scales.half()
        # What the layer multiplies by: x of the unit matrix.
        values = layer(torch.eye(K).half())
        config = {
            "quant_method": "gptq",
            "bits": bits,
            "group_size": group,
            "sym": symmetric,
            "desc_act": False,
        }
        write(name, dict(layer.named_buffers()), values.T, config)


def awq(folder: Path) -> None:
    root = next(folder.glob("autoawq-*")) / "awq"
    packing = single(root / "utils/packing_utils.py", "awq_packing")
    source = (root / "modules/linear/gemm.py").read_text()
    scope: dict[str, Any] = {"torch": torch, "nn": nn, "__name__": "awq_gemm"}
    begin = source.index("class WQLinear_GEMM")
    end = source.index("    def forward", begin)
    exec(
        source[begin:end].replace("get_best_device()", "'cpu'"), scope
    )  # the packer without what needs a GPU
    linear = nn.Linear(K, N, bias=False).half()
    linear.weight.data = drawn().half()
    scales, zeros = in_groups(linear.weight.data, 4, 32, False)
    codes = (
        (linear.weight.data.float().view(N, -1, 32) / scales[..., None] + zeros[..., None])
        .round()
        .clamp(0, 15)
    )
    linear.weight.data = ((codes - zeros[..., None]) * scales[..., None]).view(N, K).half()
    layer = scope["WQLinear_GEMM"].from_linear(
        linear, 4, 32, scales=scales.T.contiguous(), zeros=zeros.T.contiguous()
    )
    values = packing.dequantize_gemm(layer.qweight, layer.qzeros, layer.scales, 4, 32)
    config = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
    write("awq", dict(layer.named_buffers()), values.T, config)


class Anything(types.ModuleType):
    """A module in which every name is there, for those that are imported and not used."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: None


def modelopt(folder: Path) -> None:
    """Without modelopt's own reductions, which need more of the package: the largest magnitudes of tensor and block."""
    root, base = folder / "modelopt/torch/quantization", "modelopt.torch.quantization"
    for name in ("backends", "backends.utils", "utils", "qtensor"):
        sys.modules[f"{base}.{name}"] = Anything(f"{base}.{name}")
    for name in ("modelopt", "modelopt.torch", base):
        sys.modules[name] = Anything(name)
    utils = sys.modules[f"{base}.utils"]
    utils.reduce_amax = lambda x, **_: x.abs().amax()  # type: ignore[attr-defined]
    utils.reduce_block_amax = (
        lambda x, block_sizes: (  # type: ignore[attr-defined]
            x.view(*x.shape[:-1], -1, block_sizes[-1]).abs().amax(-1)
        )
    )
    utils.reduce_block_padding = lambda x, block_sizes: x  # type: ignore[attr-defined]
    for name in ("utils.numeric_utils", "qtensor.base_qtensor", "qtensor.nvfp4_tensor"):
        single(root / f"{name.replace('.', '/')}.py", f"{base}.{name}")
    kind = sys.modules[f"{base}.qtensor.nvfp4_tensor"].NVFP4QTensor
    packed, scale, whole = kind.quantize(drawn(), 16)
    values = packed.dequantize(torch.float32, scale=scale, double_scale=whole, block_sizes={-1: 16})
    parts = {
        "weight": packed._quantized_data,
        "weight_scale": scale,
        "weight_scale_2": whole,
        "input_scale": torch.tensor(0.5),
    }
    write("modelopt_nvfp4", parts, values, {"quant_method": "modelopt", "quant_algo": "NVFP4"})


if __name__ == "__main__":
    compressed()
    gptq(Path(sys.argv[1]))
    awq(Path(sys.argv[1]))
    modelopt(Path(sys.argv[1]))
