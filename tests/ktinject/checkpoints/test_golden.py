"""Weights that the libraries which define the formats have packed and unpacked (golden/make.py), value for value."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from ktinject.checkpoints.checkpoint import Checkpoint
from ktinject.errors import CheckpointError

GOLDEN = Path(__file__).parent / "golden"
NAMES = sorted(path.stem for path in GOLDEN.glob("*.safetensors"))
# Name, encoding, inputs that share a scale, zero points, formats of operators in which nothing is rounded.
SAYS = {
    "awq": ("awq", "int4", 32, True, ()),
    "fp8_block": ("fp8_blocks", "fp8", 0, False, ()),
    "fp8_channel": ("fp8_channel", "fp8_channel", 0, False, ()),
    "fp8_tensor": ("fp8_tensor", "fp8", 0, False, ()),
    "gptq4": ("gptq", "int4", 32, False, ()),
    "gptq4_zeros": ("gptq", "int4", 64, True, ()),
    "gptq8": ("gptq", "q8_0", 32, False, ()),
    "gptq8_zeros": ("gptq", "", 32, True, ()),
    "int8_channel": ("int8", "int8", 128, False, ()),
    "int8_group": ("int8", "q8_0", 32, False, ()),
    "int8_zeros": ("int8", "", 128, True, ()),
    "modelopt_nvfp4": ("nvfp4", "nvfp4", 16, False, ()),
    "mxfp4": ("mxfp4", "mxfp4", 32, False, ("bf16", "mxfp4")),
    "mxfp8": ("mxfp8", "mxfp8", 32, False, ("bf16", "mxfp8")),
    "nvfp4": ("nvfp4", "nvfp4", 16, False, ()),
    "packed4": ("packed", "int4", 32, False, ()),
    "packed4_channel": ("packed", "int4", 128, False, ()),
    "packed4_zeros": ("packed", "int4", 32, True, ()),
    "packed8": ("packed", "q8_0", 32, False, ()),
    "packed8_zeros": ("packed", "", 32, True, ()),
}


def golden(name: str) -> tuple[dict[str, Tensor], Tensor, dict[str, Any]]:
    """The tensors of a weight `x.weight`, its values, and the config.json that comes with it."""
    path = GOLDEN / f"{name}.safetensors"
    tensors = load_file(path)
    with safe_open(path, "pt") as file:
        config = json.loads(file.metadata()["quantization_config"])
    return tensors, tensors.pop("values"), config


@pytest.mark.parametrize("name", NAMES)
def test_values_are_those_of_the_library(name: str, tmp_path: Path) -> None:
    tensors, values, config = golden(name)
    save_file(tensors, tmp_path / "model.safetensors")
    with Checkpoint.open(tmp_path, config) as checkpoint:
        assert "x.weight" in checkpoint.weights and config["quant_method"] in checkpoint.methods
        form = checkpoint.format_of("x.weight")
        found = (form.name, form.encoding, form.group_size, form.has_zeros, form.exact_in)
        assert found == SAYS[name]
        assert checkpoint.shape("x.weight") == values.shape
        decoded = checkpoint.decode("x.weight")
        assert not checkpoint.holds_integers("x.weight")
    assert decoded.dtype == torch.float32
    # The library rounds to the dtype of its scales.
    assert decoded.to(values.dtype).equal(values)


@pytest.mark.parametrize("name", NAMES)
def test_an_index_alone_says_the_same(name: str, tmp_path: Path) -> None:
    """With config.json: what a plan of a model that is not downloaded goes by."""
    tensors, _, config = golden(name)
    index = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(tensors, "model.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with Checkpoint.open(tmp_path, config) as checkpoint:
        form = checkpoint.format_of("x.weight")
        assert (form.name, form.encoding) == SAYS[name][:2]


@pytest.mark.parametrize(
    ("packing", "version"),
    [("auto_round:auto_gptq", 1), ("auto_round", 2), ("auto_round:gptqmodel", 2), (None, 1)],
)
def test_auto_round_says_how_zero_points_are_stored(
    packing: str | None, version: int, tmp_path: Path
) -> None:
    """Less one where it packs as AutoGPTQ, and as they are elsewhere."""
    tensors, values, config = golden("gptq4_zeros")
    config |= {"quant_method": "auto-round"} | ({} if packing is None else {"packing_format": packing})
    if version == 2:
        tensors["x.qzeros"] = tensors["x.qzeros"] + 0x11111111  # the drawn ones leave room for it
    save_file(tensors, tmp_path / "model.safetensors")
    with Checkpoint.open(tmp_path, config) as checkpoint:
        assert checkpoint.decode("x.weight").to(values.dtype).equal(values)


def test_every_file_is_looked_at() -> None:
    assert {*NAMES} == {*SAYS}


# What is wrong with a folder


def gone(tensor: Tensor) -> None:
    return None


def cut(tensor: Tensor) -> Tensor:
    """One column less."""
    return tensor[..., :-1].contiguous()


def twice(tensor: Tensor) -> Tensor:
    """Twice the columns."""
    return torch.cat([tensor, tensor], -1)


def filled(value: float) -> Callable[[Tensor], Tensor]:
    """The last value is that one."""

    def change(tensor: Tensor) -> Tensor:
        flat = tensor.clone().reshape(-1)
        flat[-1] = torch.tensor(value).to(tensor.dtype)
        return flat.reshape(tensor.shape)

    return change


def to(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda tensor: tensor.float().to(dtype)


NAN, INFINITE = filled(float("nan")), filled(float("inf"))
F64, I16 = torch.float64, torch.int16
# Golden file, part, what happens to it, what the refusal says.
DAMAGE: list[tuple[str, str, Callable[[Tensor], Tensor | None], str]] = [
    ("fp8_channel", "weight_scale", twice, r"a scale grid of \[32, 2\]"),
    ("fp8_channel", "weight_scale", filled(-1), "scales must be positive"),
    ("fp8_channel", "weight_scale", NAN, "scales must be positive"),
    ("fp8_channel", "weight_scale", to(F64), "scales of dtype F64"),
    ("fp8_channel", "weight_scale", gone, "not that of a weight without scales"),
    ("fp8_channel", "weight", to(torch.float8_e5m2), "is not read or not whole"),
    ("fp8_tensor", "weight_scale", filled(0), "scales must be positive"),
    ("fp8_tensor", "weight_scale", INFINITE, "scales must be positive"),
    ("fp8_block", "weight_scale", cut, "a scale grid of"),
    ("fp8_block", "weight", lambda tensor: tensor[:16], "a scale grid of"),
    ("mxfp8", "weight_scale", cut, "a scale grid of"),
    ("mxfp8", "weight_scale", filled(255), "scales must be positive"),
    ("mxfp8", "weight_scale", to(I16), "scales of dtype I16"),
    ("mxfp4", "weight_scale", filled(253), "must be at most 252"),
    ("mxfp4", "weight_scale", cut, "32 inputs, in 16 bytes, share a scale"),
    ("mxfp4", "weight_scale", gone, "is not read or not whole"),
    ("mxfp4", "weight_packed", cut, "share a scale"),
    ("nvfp4", "weight_scale", cut, "16 inputs, in 8 bytes, share a scale"),
    ("nvfp4", "weight_scale", NAN, "must be finite"),
    ("nvfp4", "weight_scale", filled(-1), "must not be negative"),
    ("nvfp4", "weight_scale", to(torch.float16), "int of 4 and 8 bits is read"),
    ("nvfp4", "weight_global_scale", filled(0), "scales must be positive"),
    ("nvfp4", "weight_global_scale", INFINITE, "scales must be positive"),
    ("nvfp4", "weight_global_scale", twice, r"F32 \[2\]"),
    ("nvfp4", "weight_global_scale", to(F64), "F32 .* is needed"),
    ("nvfp4", "weight_global_scale", filled(1e-45), "must be finite|must be positive"),
    ("nvfp4", "weight_packed", gone, "not in the checkpoint|not whole"),
    ("modelopt_nvfp4", "weight_scale_2", gone, "scales of mxfp4"),
    ("modelopt_nvfp4", "weight_scale", gone, "is not read or not whole"),
    ("gptq4", "qweight", cut, "is needed"),
    ("gptq4", "qweight", to(I16), "I32 as a matrix"),
    ("gptq4", "qzeros", cut, "is needed for 4 bits"),
    ("gptq4", "qzeros", twice, "is needed for 4 bits"),
    ("gptq4", "qzeros", filled(0), "zero points other than 8"),
    ("gptq4", "qzeros", gone, "is not read or not whole"),
    ("gptq4", "scales", cut, r"\[4, 32\] is needed"),
    ("gptq4", "scales", INFINITE, "must be finite"),
    ("gptq4", "g_idx", cut, r"\[128\] is needed"),
    ("gptq4", "g_idx", filled(4), "a group that is not there"),
    ("gptq4", "g_idx", filled(-1), "a group that is not there"),
    ("gptq8", "qzeros", filled(0), "zero points other than 128"),
    ("awq", "qzeros", cut, "is needed"),
    ("awq", "scales", to(torch.int32), "is needed"),
    ("awq", "qweight", gone, "not in the checkpoint|not whole"),
    ("packed4", "weight_shape", filled(64), "weight_shape says"),
    ("packed4", "weight_shape", cut, r"\[2\] is needed"),
    ("packed4", "weight_scale", twice, "8 groups for 128 inputs; 4 is needed"),
    ("packed4", "weight_scale", NAN, "must be finite"),
    ("packed4", "weight_scale", gone, "is not read or not whole"),
    ("packed4_zeros", "weight_zero_point", cut, "is needed"),
    ("packed4_zeros", "weight_zero_point", to(torch.int8), "is needed"),
    ("packed8", "weight_packed", cut, "weight_shape says"),
    ("int8_group", "weight_scale", cut, "3 groups for 128 inputs; 4 is needed"),
    ("int8_channel", "weight_scale", to(torch.int8), "is needed"),
    ("int8_channel", "weight", lambda tensor: tensor[None], "is not read|as a matrix"),
    ("int8_zeros", "weight_zero_point", twice, r"\[32, 1\] is needed"),
]
# Golden file, what config.json says instead, what the refusal says.
CONFIGS: list[tuple[str, dict[str, Any], str]] = [
    ("gptq4", {"bits": 3}, "GPTQ of 3 bits"),
    ("gptq4", {"bits": 8}, "is needed for 8 bits"),
    ("gptq4", {"group_size": 64}, "4 groups for 128 inputs; 2 is needed"),
    ("gptq4", {"group_size": 48}, "4 groups for 128 inputs; 3 is needed"),
    ("gptq4", {"quant_method": "other"}, "GPTQ or AWQ"),
    ("gptq4", {"checkpoint_format": "marlin"}, "gptq and gptq_v2 are read"),
    ("fp8_channel", {"transform_config": {"a": 1}}, "its weights are rotated"),
    ("nvfp4", {"transform_config": {"a": 1}}, "its weights are rotated"),
    ("packed4", {"transform_config": {"a": 1}}, "its weights are rotated"),
    ("int8_channel", {"transform_config": {"a": 1}}, "its weights are rotated"),
    ("gptq4_zeros", {"sym": True}, "zero points other than 8"),
    ("awq", {"bits": 8}, "AWQ of 8 bits"),
    ("awq", {"version": "gemv"}, "AWQ of version 'gemv'"),
    ("awq", {"zero_point": False}, "zero points other than 8"),
    ("packed4", {"config_groups": {}}, "config_groups does not say how"),
    ("packed4", {"config_groups": {"a": {"weights": {"num_bits": 2}}}}, "int of 4 and 8 bits is read"),
    ("packed4", {"config_groups": {"a": {"weights": {"num_bits": 8, "group_size": 32}}}}, "4 groups for 64 inputs"),
    ("packed4", {"config_groups": {c: {"weights": {"num_bits": b}, "targets": ["Linear"]} for c, b in (("a", 4),
     ("b", 8))}}, "do not say which of them"),
    ("packed4", {"config_groups": {c: {"weights": {"num_bits": b}, "targets": ["re:("]} for c, b in (("a", 4),
     ("b", 8))}}, "a target that cannot be matched"),
    ("fp8_block", {"config_groups": {"a": {"weights": {"block_structure": [32, 32]}}}}, "a scale grid of"),
]  # fmt: skip


def refused(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any], said: str) -> None:
    save_file(tensors, folder / "model.safetensors")
    with Checkpoint.open(folder, config) as checkpoint:
        with pytest.raises(CheckpointError, match=said) as caught:
            checkpoint.format_of("x.weight")
            checkpoint.decode("x.weight")
    message = str(caught.value)
    assert str(folder) in message and "'x." in message and message.count("\n") < 20


@pytest.mark.parametrize(("name", "part", "change", "said"), DAMAGE)
def test_damaged_parts_are_refused(name: str, part: str, change: Any, said: str, tmp_path: Path) -> None:
    tensors, _, config = golden(name)
    if (changed := change(tensors.pop(f"x.{part}"))) is not None:
        tensors[f"x.{part}"] = changed.contiguous()
    refused(tmp_path, tensors, config, said)


@pytest.mark.parametrize(("name", "change", "said"), CONFIGS)
def test_configs_of_other_weights_are_refused(name: str, change: Any, said: str, tmp_path: Path) -> None:
    tensors, _, config = golden(name)
    refused(tmp_path, tensors, config | change, said)


def test_there_is_enough_that_is_wrong() -> None:
    assert len(DAMAGE) + len(CONFIGS) >= 60
