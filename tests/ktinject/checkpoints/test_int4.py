"""int4 of GPTQ, AWQ, compressed-tensors and GGUF against packers written from their descriptions, bit by bit."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import ktinject
from ktinject import machine, rules
from ktinject.checkpoints.checkpoint import Checkpoint
from ktinject.checkpoints.formats import int_packing
from ktinject.checkpoints.formats.base import Codes
from ktinject.errors import CheckpointError
from ktinject.hf import models
from ktinject.machine import Gpu
from ktinject.planning.planner import make

STEM = "model.layers.0.self_attn.o_proj"
KEY = f"{STEM}.weight"
N, K, GROUP = 24, 128, 32
PACKED = {
    "quant_method": "compressed-tensors",
    "config_groups": {"a": {"weights": {"num_bits": 4, "type": "int"}}},
}
CONFIGS: dict[str, dict[str, Any]] = {
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": False},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": GROUP},
    "packed": PACKED,
}


def drawn(zeros: bool = True) -> Codes:
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(0, 16, (N, K), dtype=torch.uint8, generator=generator)
    scales = (torch.rand(N, K // GROUP, generator=generator) / 50).half()
    points = torch.randint(0, 16, scales.shape, dtype=torch.uint8, generator=generator)
    return Codes(codes, scales, points if zeros else None)


def word(values: list[int]) -> int:
    """Eight nibbles, the first lowest, as a signed number of 32 bits."""
    number = sum(value << 4 * i for i, value in enumerate(values))
    return number - (1 << 32) if number >= 1 << 31 else number


def pack(values: Tensor, dim: int, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """One word at a time: nibble i holds element order[i]."""
    rows = values.movedim(dim, -1).tolist()
    words = [[word([row[c + o] for o in order]) for c in range(0, len(row), 8)] for row in rows]
    return torch.tensor(words, dtype=torch.int32).movedim(-1, dim).contiguous()


def tensors(name: str, codes: Codes, group_of: Tensor | None = None) -> dict[str, Tensor]:
    """The tensors of a checkpoint of that format."""
    q, scales, zeros = codes.codes, codes.scales, codes.zeros
    assert zeros is not None
    if name == "gptq":
        found = {
            "qweight": pack(q.T, 0),
            "qzeros": pack((zeros.T.int() - 1) % 16, 1),
            "scales": scales.T.contiguous(),
        }
        return found | {
            "g_idx": torch.arange(q.shape[1], dtype=torch.int32) // GROUP if group_of is None else group_of
        }
    if name == "awq":
        order = (0, 2, 4, 6, 1, 3, 5, 7)
        return {
            "qweight": pack(q.T, 1, order),
            "qzeros": pack(zeros.T, 1, order),
            "scales": scales.T.contiguous(),
        }
    return {
        "weight_packed": pack(q, 1),
        "weight_scale": scales,
        "weight_shape": torch.tensor(q.shape),
        "weight_zero_point": pack(zeros, 0),
    }


def write(folder: Path, found: dict[str, Tensor], config: Any) -> Checkpoint:
    save_file({f"{STEM}.{name}": tensor for name, tensor in found.items()}, folder / "model.safetensors")
    return Checkpoint.open(folder, config)


@pytest.mark.parametrize("name", CONFIGS)
def test_codes_come_back_bit_by_bit(name: str, tmp_path: Path) -> None:
    want = drawn()
    assert want.zeros is not None
    with write(tmp_path, tensors(name, want), CONFIGS[name]) as checkpoint:
        assert checkpoint.weights == {KEY}
        form = checkpoint.format_of(KEY)
        assert (form.name, form.shape, form.group_size, form.has_zeros) == (name, (N, K), GROUP, True)
        assert checkpoint.shape(KEY) == (N, K)
        found = checkpoint.stored(KEY)
        values = checkpoint.decode(KEY)
    assert found.codes.equal(want.codes) and found.scales.equal(want.scales) and found.group_of is None
    assert found.zeros is not None and found.zeros.equal(want.zeros)
    grid = want.scales.double().repeat_interleave(GROUP, 1)
    exact = (want.codes.double() - want.zeros.double().repeat_interleave(GROUP, 1)) * grid
    assert values.dtype == torch.float32 and values.double().equal(exact)


def test_zero_points_that_are_all_eight_are_none(tmp_path: Path) -> None:
    codes = drawn()
    symmetric = Codes(codes.codes, codes.scales, torch.full(codes.scales.shape, 8, dtype=torch.uint8))
    config = CONFIGS["gptq"] | {"sym": True}
    with write(tmp_path, tensors("gptq", symmetric), config) as checkpoint:
        assert not checkpoint.format_of(KEY).has_zeros
        assert checkpoint.stored(KEY).zeros is None


def test_gptq_version_2_stores_zero_points_as_they_are(tmp_path: Path) -> None:
    want = drawn()
    assert want.zeros is not None
    found = tensors("gptq", want) | {"qzeros": pack(want.zeros.T, 1)}
    with write(tmp_path, found, CONFIGS["gptq"] | {"checkpoint_format": "gptq_v2"}) as checkpoint:
        codes = checkpoint.stored(KEY)
    assert codes.zeros is not None and codes.zeros.equal(want.zeros)


@pytest.mark.parametrize("k, has_table", [(192, False), (192, True), (10_944, True)])
def test_a_last_group_may_be_smaller(k: int, has_table: bool, tmp_path: Path) -> None:
    """GPTQ's groups of 128 where they do not divide the inputs, with g_idx and without."""
    generator, groups = torch.Generator().manual_seed(3), -(-k // 128)
    scales = (torch.rand(N, groups, generator=generator) / 50).half()
    drawn = [
        torch.randint(1, 16, (N, count), dtype=torch.uint8, generator=generator) for count in (k, groups)
    ]
    found = tensors("gptq", Codes(drawn[0], scales, drawn[1]), torch.arange(k, dtype=torch.int32) // 128)
    if not has_table:
        del found["g_idx"]
    with write(tmp_path, found, CONFIGS["gptq"] | {"group_size": 128}) as checkpoint:
        assert checkpoint.format_of(KEY).group_size == 128
        values = checkpoint.decode(KEY)
    steps, grid = (t.double().repeat_interleave(128, 1)[:, :k] for t in (drawn[1], scales))
    assert values.double().equal((drawn[0].double() - steps) * grid)


def test_activation_order_is_decoded(tmp_path: Path) -> None:
    want = drawn()
    assert want.zeros is not None
    group_of = torch.randperm(K, generator=torch.Generator().manual_seed(2)).int() // GROUP
    with write(tmp_path, tensors("gptq", want, group_of), CONFIGS["gptq"]) as checkpoint:
        values = checkpoint.decode(KEY)
    for output, column in [(0, 0), (5, 77), (23, 127)]:
        group = int(group_of[column])
        step = int(want.codes[output, column]) - int(want.zeros[output, group])
        assert values[output, column] == step * want.scales[output, group].float()


def test_q4_0_blocks_of_gguf() -> None:
    want = drawn(zeros=False)
    rows = []
    for output in range(N):
        for group in range(K // 32):
            block = want.codes[output, 32 * group : 32 * group + 32].tolist()
            rows.append(want.scales[output, group : group + 1].view(torch.uint8).tolist())
            rows[-1] += [block[i] | block[i + 16] << 4 for i in range(16)]
    found = int_packing.from_q4_0(torch.tensor(rows, dtype=torch.uint8).view(N, -1), K)
    assert found.codes.equal(want.codes) and found.scales.equal(want.scales) and found.zeros is None


# Refusals


def test_without_a_method_gptq_and_awq_cannot_be_told_apart(tmp_path: Path) -> None:
    with write(tmp_path, tensors("gptq", drawn()), {}) as checkpoint:
        with pytest.raises(CheckpointError, match=r"GPTQ or AWQ; quantization_config\.quant_method is None"):
            checkpoint.format_of(KEY)


@pytest.mark.parametrize(
    "name, change, words",
    [
        ("gptq", {"bits": 3}, "GPTQ of 3 bits; 4 and 8 are read"),
        ("gptq", {"bits": 8}, r"I32 \[4, 3\]; I32 \[groups, 6\] is needed for 8 bits"),
        ("awq", {"bits": 8}, "AWQ of 8 bits; 4 are read"),
        ("awq", {"version": "gemv"}, "AWQ of version 'gemv'; gemm is read"),
        ("packed", {"config_groups": {"a": {"weights": {"num_bits": 3}}}}, "int of 4 and 8 bits is read"),
        ("packed", {"config_groups": {}}, "config_groups does not say how"),
    ],
)
def test_other_ways_to_pack_are_refused(
    name: str, change: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with write(tmp_path, tensors(name, drawn()), CONFIGS[name] | change) as checkpoint:
        with pytest.raises(CheckpointError, match=words):
            checkpoint.format_of(KEY)


@pytest.mark.parametrize(
    "name, part, tensor, words",
    [
        ("gptq", "qweight", torch.zeros(16, N), "F32"),
        ("gptq", "scales", torch.zeros(3, N).half(), "3 groups for 128 inputs; 4 is needed"),
        ("gptq", "scales", torch.zeros(4, N + 1).half(), r"F16 or BF16 or F32 \[4, 24\] is needed"),
        ("gptq", "qzeros", torch.zeros(4, 4, dtype=torch.int32), r"I32 \[groups, 3\] is needed"),
        ("gptq", "g_idx", torch.zeros(4, dtype=torch.int32), r"\[128\] is needed"),
        ("awq", "qzeros", torch.zeros(4, 3), "F32"),
        ("packed", "weight_zero_point", torch.zeros(4, 4, dtype=torch.int32), r"I32 \[3, 4\] is needed"),
        ("packed", "weight_scale", torch.zeros(N), "a matrix is needed"),
    ],
)
def test_parts_that_do_not_fit_together(
    name: str, part: str, tensor: Tensor, words: str, tmp_path: Path
) -> None:
    with write(tmp_path, tensors(name, drawn()) | {part: tensor}, CONFIGS[name]) as checkpoint:
        with pytest.raises(CheckpointError, match=words) as caught:
            checkpoint.format_of(KEY)
    assert f"{STEM}.{part}" in str(caught.value)


@pytest.mark.parametrize(
    "name, part, tensor, config, words",
    [
        ("packed", "weight_shape", torch.tensor([N, K - 8]), {}, "weight_shape says"),
        ("packed", "weight_scale", torch.full((N, 4), float("nan")), {}, "all values must be finite"),
        (
            "gptq",
            "g_idx",
            torch.full((K,), 4, dtype=torch.int32),
            {},
            "g_idx names a group that is not there",
        ),
        ("gptq", "scales", torch.ones(4, N), {"sym": True}, "zero points other than 8"),
    ],
)
def test_values_that_make_no_sense(
    name: str, part: str, tensor: Tensor, config: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with write(tmp_path, tensors(name, drawn()) | {part: tensor}, CONFIGS[name] | config) as checkpoint:
        with pytest.raises(CheckpointError, match=words):
            checkpoint.stored(KEY)


def test_no_expert_of_a_matrix(tmp_path: Path) -> None:
    with write(tmp_path, tensors("awq", drawn()), CONFIGS["awq"]) as checkpoint:
        with pytest.raises(CheckpointError, match="no expert 1 in a matrix"):
            checkpoint.decode(KEY, 1)


# A whole model


@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_with_int4_weights_is_the_model_of_their_values(
    name: str, tiny_qwen3_moe: Path, tmp_path: Path
) -> None:
    """Attention and experts in int4, as published models have them, against the same values in fp32."""
    plain, packed = {}, {}
    for key, tensor in load_file(tiny_qwen3_moe / "model.safetensors").items():
        if ".q_proj." in key or ".experts." in key:
            n, k = tensor.shape
            made = drawn_like(n, k)
            plain[key] = made.values()
            packed |= {f"{key.removesuffix('.weight')}.{part}": t for part, t in tensors(name, made).items()}
        else:
            plain[key] = packed[key] = tensor
    assert any(".experts." in key for key in packed)
    logits = []
    for folder, weights, quantization in (
        (tmp_path / "a", plain, None),
        (tmp_path / "b", packed, CONFIGS[name]),
    ):
        folder.mkdir()
        save_file(weights, folder / "model.safetensors")
        config = json.loads((tiny_qwen3_moe / "config.json").read_text())
        if quantization:
            config["quantization_config"] = quantization
        (folder / "config.json").write_text(json.dumps(config))
        rule = {"name": "a", "match": {"path": r".*\.experts"}, "replace": {"operator": "cpu_experts"}}
        model = ktinject.load(folder, [rule], devices="cpu", progress=False)
        with torch.no_grad():
            logits.append(model(torch.arange(12)[None]).logits)
    assert logits[0].equal(logits[1])


@pytest.mark.parametrize(
    "operator", [{"operator": "int4_linear"}, {"operator": "dense_linear", "weights": "int4"}]
)
@pytest.mark.parametrize("name", CONFIGS)
def test_the_plan_takes_group_size_and_zero_points_from_the_checkpoint(
    name: str, operator: dict[str, Any], tiny_qwen3_moe: Path, tmp_path: Path
) -> None:
    packed = {}
    for key, tensor in load_file(tiny_qwen3_moe / "model.safetensors").items():
        if key.endswith("q_proj.weight"):
            found = tensors(name, drawn_like(*tensor.shape))
            packed |= {f"{key.removesuffix('.weight')}.{part}": t for part, t in found.items()}
        else:
            packed[key] = tensor.bfloat16()
    save_file(packed, tmp_path / "model.safetensors")
    config = json.loads((tiny_qwen3_moe / "config.json").read_text())
    config |= {"quantization_config": CONFIGS[name], "dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    gpu = Gpu(0, "a GPU", 1 << 34, 1 << 34, (9, 0))
    box = dataclasses.replace(machine.detect(), gpus=(gpu,), cuda_built=True)
    rule = {
        "name": "a",
        "match": {"path": r".*\.[qo]_proj"},
        "replace": operator | {"group_size": 64},
    }
    with Checkpoint.open(tmp_path, CONFIGS[name]) as checkpoint:
        model = models.meta_model(models.read_config(tmp_path), "auto", checkpoint)
        decided = make(model, rules.read([rule]), checkpoint, box)
    weights = {
        replacement.path.rpartition(".")[2]: replacement.runs["weights"]
        for replacement in decided.replacements
    }
    assert weights == {
        "q_proj": f"int4 group 32, zero points, as stored ({name})",
        "o_proj": "int4 group 64",
    }
    assert {replacement.device for replacement in decided.replacements} == {"cuda:0"}


def drawn_like(n: int, k: int) -> Codes:
    codes = torch.randint(0, 16, (n, k), dtype=torch.uint8)
    groups = k // GROUP
    return Codes(
        codes, (torch.rand(n, groups) / 50).half(), torch.randint(0, 16, (n, groups), dtype=torch.uint8)
    )
