"""Weights that the libraries which define the formats have packed and unpacked (golden/make.py), value for value."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from ktinject.checkpoints.checkpoint import Checkpoint

GOLDEN = Path(__file__).parent / "golden"
NAMES = sorted(path.stem for path in GOLDEN.glob("*.safetensors"))
# Name, encoding, inputs that share a scale, zero points, formats of operators in which nothing is rounded.
SAYS = {
    "awq": ("awq", "int4", 32, True, ()),
    "fp8_block": ("fp8_blocks", "fp8", 0, False, ()),
    "fp8_channel": ("fp8_channel", "", 0, False, ()),
    "fp8_tensor": ("fp8_tensor", "fp8", 0, False, ()),
    "gptq4": ("gptq", "int4", 32, False, ()),
    "gptq4_zeros": ("gptq", "int4", 64, True, ()),
    "gptq8": ("gptq", "", 32, False, ()),
    "gptq8_zeros": ("gptq", "", 32, True, ()),
    "int8_channel": ("int8", "int8", 128, False, ()),
    "int8_group": ("int8", "", 32, False, ()),
    "int8_zeros": ("int8", "", 128, True, ()),
    "modelopt_nvfp4": ("nvfp4", "nvfp4", 16, False, ()),
    "mxfp4": ("mxfp4", "mxfp4", 32, False, ("bf16", "mxfp4")),
    "mxfp8": ("mxfp8", "", 0, False, ("bf16",)),
    "nvfp4": ("nvfp4", "nvfp4", 16, False, ()),
    "packed4": ("packed", "int4", 32, False, ()),
    "packed4_channel": ("packed", "int4", 128, False, ()),
    "packed4_zeros": ("packed", "int4", 32, True, ()),
    "packed8": ("packed", "", 32, False, ()),
    "packed8_zeros": ("packed", "", 32, True, ()),
}


def golden(name: str) -> tuple[dict[str, Tensor], Tensor, dict[str, object]]:
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


def test_every_file_is_looked_at() -> None:
    assert {*NAMES} == {*SAYS}
