"""Q4_0 from the file to the GPU: `int4_linear` multiplies by the values that the file means."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy
import pytest
import torch

import ktinject
from ktinject.checkpoints.checkpoint import Checkpoint
from ktinject.tools import random_models

WRITER = Path(__file__).parents[3] / "benchmarks" / "gguf_file.py"


@pytest.fixture
def q4_0(tmp_path: Path) -> Path:
    spec = importlib.util.spec_from_file_location("gguf_file", WRITER)
    assert spec is not None and spec.loader is not None
    writer = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(writer)
    config = random_models.config(
        "qwen3-30b-a3b", 2, hidden_size=512, moe_intermediate_size=128, num_experts=16, vocab_size=600
    )
    metadata, tensors = writer.qwen3_moe(config, "q4_0")
    raw = bytearray(
        writer.header(metadata, tensors) + b"".join(writer.data(tensors, numpy.random.default_rng(0)))
    )
    path = tmp_path / "a.gguf"
    path.write_bytes(raw)
    # Scales of all bits, and of both signs, as real files have them.
    with Checkpoint.open(path) as checkpoint:
        name = "model.layers.1.self_attn.q_proj.weight"
        place = checkpoint._reader._shards["a.gguf"].entries[name]
        rows = checkpoint.read(name).view(-1, 18)
    scales = (torch.randn(len(rows), generator=torch.Generator().manual_seed(0)) / 200).half()
    rows[:, :2] = scales.view(torch.uint8).view(-1, 2)
    raw[place.offset : place.offset + place.bytes] = rows.numpy().tobytes()
    path.write_bytes(raw)
    return path


@pytest.mark.gpu
def test_q4_0_on_the_gpu(q4_0: Path) -> None:
    model = ktinject.load(q4_0, variables={"dense": "int4"}, devices="cuda:0", progress=False)
    (runs,) = {
        replacement.runs["weights"]
        for replacement in model.ktinject.replacements
        if replacement.path.endswith("_proj")
    }
    assert runs == "int4 group 32, as stored (q4_0)"
    name = "model.layers.1.self_attn.q_proj"
    with Checkpoint.open(q4_0) as checkpoint:
        weight = checkpoint.decode(f"{name}.weight")
    layer = model.get_submodule(name)
    assert layer.unpack("weight").equal(weight), "every value is that of the file"
    for m in (1, 7, 40, 300):
        x = torch.randn(m, weight.shape[1], dtype=torch.bfloat16, device="cuda:0")
        want = x.double() @ weight.double().cuda().T
        assert (layer(x).double() - want).norm() / want.norm() <= 4e-3
    tokens = model.generate(torch.arange(8, device="cuda:0")[None], max_new_tokens=8, do_sample=False)
    assert tokens.shape == (1, 16)


def test_q4_0_is_planned_for_a_gpu_only(q4_0: Path) -> None:
    """On the CPU the same rules decode the file and quantise again, and the plan says so."""
    model = ktinject.load(q4_0, variables={"dense": "int4", "group_size": 32}, devices="cpu", progress=False)
    (runs,) = {
        replacement.runs["weights"]
        for replacement in model.ktinject.replacements
        if replacement.path.endswith("_proj")
    }
    assert runs == "int4 group 32"
    assert any("quantised again where the operator's format says so" in note for note in model.ktinject.notes)
    with Checkpoint.open(q4_0) as checkpoint:
        name = "model.layers.1.self_attn.q_proj"
        want = checkpoint.decode(f"{name}.weight")
    found = model.get_submodule(name).unpack("weight")
    assert ((found - want).norm() / want.norm()) <= 4e-3, "scales are bf16 there"
