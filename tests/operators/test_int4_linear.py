"""`int4_linear`: its layout on the CPU, every refusal, and on a GPU the kernel against fp64."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import reference
import torch
from device_limits import pretended
from int4_cases import LAYERS, RACECHECK, check_product, codes, filled, in_activation_order, linear
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import ktinject
from ktinject import _native, machine
from ktinject.checkpoints.formats.base import Format
from ktinject.errors import OperatorError, PlanError
from ktinject.machine import Gpu
from ktinject.operators.int4_linear import Int4Linear, Int4LinearConfig
from ktinject.operators.linears import int4_layout
from ktinject.operators.linears.int4_choice import MANY_TOKENS, is_small

GROUPS = [32, 64, 128, -1]
UNPACKED = [] if RACECHECK else [MANY_TOKENS + 1]  # tokens that cuBLAS multiplies


def place(n: int, depths: int, output: int, column: int) -> tuple[int, int]:
    """Where a code lies by the layout's drawing: word and nibble."""
    tiles = -(-n // 64)
    strip, output = divmod(output, 256)
    tile, output = divmod(output, 64)
    operand, output = divmod(output, 16)
    depth, column = divmod(column, 64)
    step, column = divmod(column, 16)
    lane, nibble = 4 * (output // 2) + column % 8 // 2, output % 2 + 2 * (column // 8) + 4 * (column % 2)
    before = 4 * strip * depths + depth * min(4, tiles - 4 * strip) + tile
    return 4 * (32 * (4 * before + operand) + lane) + step, nibble


@pytest.mark.parametrize("n, k", [(64, 64), (1, 64), (200, 192), (129, 128), (600, 128)])
def test_codes_lie_where_the_drawing_says(n: int, k: int) -> None:
    codes = torch.randint(0, 16, (n, k), dtype=torch.uint8)
    words = int4_layout.pack_codes(codes)
    assert words.numel() == -(-n // 64) * 64 * k // 8
    for _ in range(200):
        output, column = int(torch.randint(n, ())), int(torch.randint(k, ()))
        at, nibble = place(n, k // 64, output, column)
        assert int(words[at]) >> 4 * nibble & 15 == int(codes[output, column])
    assert int4_layout.unpack_codes(words, n, k).equal(codes)


def test_scales_and_zero_points_come_back() -> None:
    scales = torch.randn(200, 3).bfloat16().float()
    zeros = torch.randint(0, 17, (200, 3), dtype=torch.uint8)
    packed = int4_layout.pack_scales(scales, zeros, torch.bfloat16)
    assert int(packed[4 * 64 * 2 + 64 + 5]) >> 16 == int(zeros[69, 2])
    again, same = int4_layout.unpack_scales(packed, 200, 3, torch.bfloat16)
    assert again.equal(scales) and same is not None and same.equal(zeros)
    packed = int4_layout.pack_scales(scales, None, torch.bfloat16)
    again, none = int4_layout.unpack_scales(packed, 200, 3, torch.bfloat16)
    assert again.equal(scales) and none is None


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group_size", [32, 64, 128, 256])
def test_our_scales_lose_nothing_in_bf16_and_little_against_fine_ones(
    group_size: int, symmetric: bool
) -> None:
    torch.manual_seed(group_size)
    weight = torch.randn(96, 512) * 0.02
    weight[3] = 0
    weight[4, 7] = 0.5  # an outlier
    quantised = int4_layout.quantise(weight, group_size, symmetric)
    values = quantised.values()
    assert values.bfloat16().float().equal(values) and values[3].abs().max() == 0
    error = reference.relative_error(values, weight)
    codes, scales = reference.quantise_int4_groups(weight, group_size)
    assert error < 1.0 * reference.relative_error(
        reference.dequantise_groups(codes, scales, group_size), weight
    )


def test_quantising_in_pieces_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(300, 128)
    whole = int4_layout.quantise(weight, 64, False)
    monkeypatch.setattr(int4_layout, "_ROWS", 128)
    pieces = int4_layout.quantise(weight, 64, False)
    assert whole.values().equal(pieces.values())


def test_the_footprint_is_exact() -> None:
    for arguments in ({}, {"symmetric": False}, {"group_size": -1}, {"group_size": 32}):
        operator = filled(linear(256, 200, bias=True), **arguments)
        held = [operator._words, operator._scales, operator._counters, operator._bias]
        assert operator.footprint() == {"cpu": sum(t.nbytes for t in held)}


def test_it_is_a_linear_layer_without_parameters_and_buffers() -> None:
    module = linear(128, 96, bias=True)
    operator = filled(module)
    assert isinstance(operator, nn.Linear) and (operator.in_features, operator.out_features) == (128, 96)
    assert not list(operator.parameters()) and not list(operator.buffers()) and not operator.state_dict()
    assert operator.weight.dtype == torch.bfloat16 and operator.weight.float().equal(
        operator.unpack("weight")
    )
    assert operator.bias is not None and operator.bias.equal(module.bias) and module.bias is not None
    assert operator.unpack("bias").equal(module.bias.float())
    assert "128 → 96, bias, int4 group 128" in repr(operator)
    assert filled(linear(64, 8), group_size=64).bias is None


@pytest.mark.parametrize("zeros", [True, False])
@pytest.mark.parametrize("name, groups", [("gptq", 3), ("awq", 2), ("packed", 12), ("gptq", 1)])
def test_codes_of_a_checkpoint_are_taken_exactly(name: str, groups: int, zeros: bool) -> None:
    stored = codes(72, 384, groups, zeros)
    source = Format(name, (), None, (72, 384), 384 // groups, zeros)
    config = Int4Linear.use_checkpoint_format(Int4LinearConfig("cpu"), source)
    operator = Int4Linear.build(linear(384, 72), config)
    operator.allocate()
    operator.load_stored("weight", stored, None, None)
    operator.finish()
    assert operator.unpack("weight").equal(stored.values())
    assert f"as stored ({name})" in operator.describe()["weights"]
    held = [operator._words, operator._scales, operator._counters]
    assert operator.footprint() == {"cpu": sum(t.nbytes for t in held)}


def test_groups_in_activation_order_are_sorted_and_given_back() -> None:
    operator, stored = in_activation_order(72, 384, 64)
    assert operator._order is not None and not operator._order.equal(torch.arange(384))
    assert operator.unpack("weight").equal(stored.values())
    assert operator.weight.equal(stored.values().to(operator.dtype))
    found = operator.codes()
    assert found.codes.equal(stored.codes) and found.group_of is not None and stored.group_of is not None
    assert found.group_of.equal(stored.group_of)
    held = [operator._words, operator._scales, operator._counters, operator._order]
    assert operator.footprint() == {"cpu": sum(t.nbytes for t in held)}


# (inputs, outputs, tokens) → µs of the kernel, and of unpacking and cuBLAS, on an H200
MEASURED = {
    (2048, 2048, 256): (12.2, 9.8), (2560, 2560, 256): (15.2, 12.3), (2048, 4096, 256): (14.4, 13.7),
    (4096, 512, 256): (8.7, 9.8), (4096, 4096, 256): (23.2, 25.2), (2048, 8192, 256): (21.4, 24.4),
    (2048, 2048, 512): (14.4, 12.0), (5120, 1024, 512): (23.6, 15.2), (4096, 512, 512): (12.3, 11.1),
    (3584, 3584, 512): (28.4, 26.8), (7168, 2048, 512): (30.9, 32.0), (2048, 6144, 512): (25.1, 26.9),
    (2048, 2048, 128): (8.8, 9.6), (7168, 1536, 128): (12.4, 18.3),
}  # fmt: skip


@pytest.mark.parametrize("cell", MEASURED)
def test_small_layers_are_unpacked_where_that_was_faster(cell: tuple[int, int, int]) -> None:
    k, n, m = cell
    ours, unpacked = MEASURED[cell]
    assert is_small(k, n, m) == (unpacked < ours)
    ranges = {256: (193, 256), 512: (385, 512)}
    if m in ranges:
        assert {is_small(k, n, tokens) for tokens in ranges[m]} == {unpacked < ours}, "the same blocks"
    assert not any(is_small(k, n, tokens) for tokens in (1, 128, 192, 257, 384, 513, MANY_TOKENS))


# Tokens and outputs of blocks whose sums are whole → sets of warpgroups that take turns (int4_blocks.hpp).
WHOLE = {
    (32, 64): 4, (32, 128): 2, (64, 64): 4, (64, 128): 2, (96, 64): 2, (96, 128): 2, (128, 64): 2, (128, 128): 1,
    (128, 192): 1,
}  # fmt: skip

# (inputs, outputs, tokens) → tokens, split and outputs of the blocks that are chosen (None: those of the rules, or
# cuBLAS), µs of what ran before, and of the fastest such blocks, on an H100 or an H200
CHOSEN = {
    (2048, 512, 64): ((32, 7, 0), 5.86, 4.01), (4096, 512, 128): ((32, 7, 0), 7.78, 6.5),
    (4096, 512, 512): ((32, 1, 64), 9.57, 8.96), (7168, 576, 256): ((64, 8, 0), 12.05, 10.76),
    (2048, 2048, 64): ((32, 1, 64), 6.02, 5.03), (2048, 2048, 256): ((64, 1, 64), 11.32, 6.61),
    (512, 16384, 128): ((128, 1, 128), 6.7, 6.0), (1536, 4096, 384): ((128, 1, 0), 20.65, 12.29),
    (2560, 2560, 256): ((96, 1, 64), 14.39, 8.79), (2560, 2560, 512): ((96, 1, 128), 16.35, 13.87),
    (7168, 2048, 64): (None, 11.17, 11.9), (7168, 2048, 256): ((64, 1, 64), 17.97, 16.86),
    (4096, 4096, 32): ((32, 6, 0), 10.24, 8.61), (4096, 4096, 448): ((128, 1, 0), 32.09, 27.01),
    (512, 2048, 128): ((64, 1, 64), 4.69, 2.84), (3584, 512, 64): ((32, 7, 0), 6.8, 4.73),
    (3072, 2560, 32): ((32, 8, 0), 6.2, 5.55), (1408, 4096, 256): ((128, 1, 64), 11.19, 6.91),
    (2048, 7168, 256): ((128, 1, 128), 14.76, 13.4), (2880, 4096, 512): ((128, 1, 128), 20.16, 18.57),
    (2048, 8192, 512): (None, 25.46, 29.36), (4096, 4096, 256): ((128, 1, 64), 17.61, 14.48),
    (4096, 2048, 256): ((64, 1, 64), 13.18, 10.7), (4096, 1024, 256): ((32, 1, 64), 10.27, 9.2),
    (2048, 6144, 512): ((128, 1, 192), 25.87, 18.94), (4096, 4096, 64): ((32, 1, 64), 9.59, 9.25),
    (2048, 12288, 32): ((32, 1, 128), 10.75, 8.0), (3072, 4096, 128): ((64, 1, 64), 11.39, 8.78),
}  # fmt: skip


@pytest.mark.parametrize("cell", CHOSEN)
def test_blocks_are_chosen_where_they_were_faster(cell: tuple[int, int, int]) -> None:
    k, n, m = cell
    blocks, before, after = CHOSEN[cell]
    assert (blocks is not None) == (after <= before / (1.03 if blocks and blocks[2] else 1.05))
    most = m if m in (32, 64) else -(-m // 64) * 64
    fewest = {32: 17, 64: 33, 128: 65}.get(most, most - 63)
    for tokens in (fewest, m):
        block_tokens, outputs, sharers, whole = _native.int4_blocks(n, k, tokens, 132)[:4]
        assert _native.int4_is_measured(n, k, tokens, 132) == (blocks is not None)
        kind = (block_tokens, 1, outputs) if whole else (block_tokens, sharers, 0)
        assert blocks is None or kind == (blocks if whole or blocks[1] != 1 else (blocks[0], 0, 0))
        assert not _native.int4_is_measured(n, k, tokens, 114), "measured with 132 multiprocessors alone"
    assert not _native.int4_is_measured(n, k, 16, 132) and not _native.int4_is_measured(n, k, 513, 132)


@pytest.mark.parametrize("multiprocessors", [1, 60, 114, 132])
def test_blocks_cover_every_stage_once(multiprocessors: int) -> None:
    for k, n in [*LAYERS, (64, 1), (128, 65), (18432, 7168), (192, 100_000)]:
        for m in (1, 8, 9, 17, 33, 64, 65, 100, 128, 129, 200, 256, 300, 400, 512, 1000, 4096):
            tokens, outputs, sharers, whole, share, blocks = _native.int4_blocks(n, k, m, multiprocessors)
            few, wide = ((8, 256), (16, 256)), ((32, 256), (64, 256), (128, 256), (256, 128))
            narrow = m > 16 and outputs == 128 and tokens in (32, 64, 128) and not whole
            assert _native.int4_is_measured(n, k, m, multiprocessors) == (narrow or whole)
            assert not narrow or (tokens, 0 if sharers == 1 else sharers, 0) in allowed(k)
            assert not whole or (m > 16 and (tokens, 1, outputs) in allowed(k))
            assert narrow or whole or (tokens, outputs) in (few if m <= 16 else wide)
            units, depth = -(-n // outputs) * -(-m // tokens), k // 64
            if whole:
                assert sharers == 0 and blocks == units and share == depth
            elif sharers:
                assert blocks == sharers * units and sharers <= min(depth, 8)
            else:
                assert (blocks - 1) * share < units * depth <= blocks * share


@pytest.mark.parametrize(
    "blocks, reason",
    [
        ((16, 0, 0), "32, 64 and 128 tokens"), ((256, 0, 0), "32, 64 and 128 tokens"),
        ((64, 9, 0), "splits of 0 to 8"), ((64, -1, 0), "splits of 0 to 8"), ((64, 5, 0), "one stage at least"),
        ((64, 1, 256), "blocks of whole sums of"), ((40, 1, 64), "blocks of whole sums of"),
        ((64, 1, -64), "blocks of whole sums of"),
    ],
)  # fmt: skip
def test_blocks_that_there_are_not_are_refused(blocks: tuple[int, ...], reason: str) -> None:
    def native(blocks: tuple[int, ...] | None) -> None:
        _native.Int4Linear(
            words=64, scales=64, bias=0, n=64, k=256, group_size=64, has_zeros=False, fp16_scales=False,
            sm80_only=False, every_lane=False, blocks=blocks, device=0,
        )  # fmt: skip

    with pytest.raises(ValueError, match=f"there are no such blocks; allowed are .*{reason}"):
        native(blocks)
    native(None)
    for kind in allowed(256):
        native(kind)


def test_only_hopper_unpacks_small_layers() -> None:
    operator = filled(linear(2048, 2112))  # of no model: it has no blocks that were measured
    assert operator._arch == "sm80" and not operator._is_unpacked(256) and operator._is_unpacked(257)
    operator._arch, operator._many_tokens, operator._multiprocessors = "sm90", MANY_TOKENS, 132
    assert operator._is_unpacked(256) and operator._is_unpacked(MANY_TOKENS + 1)
    assert not operator._is_unpacked(300) and not operator._is_unpacked(MANY_TOKENS)
    assert "where faster" in operator.describe()["kernel"]
    operator.sm80_only = True
    assert not operator._is_unpacked(256)
    other = filled(linear(2048, 4096))
    other._arch, other._many_tokens, other._multiprocessors = "sm90", MANY_TOKENS, 114
    assert other._is_unpacked(256), "narrow blocks are faster, but not measured here"
    other._multiprocessors = 132
    assert is_small(2048, 4096, 256) and not other._is_unpacked(256)


@pytest.mark.parametrize(
    "arguments", [(0, 64, 1, 1), (1, 63, 1, 1), (1, 0, 1, 1), (1, 64, 0, 1), (1, 64, 1, 0)]
)
def test_blocks_of_nothing_are_refused(arguments: tuple[int, int, int, int]) -> None:
    with pytest.raises(ValueError, match="outputs, tokens and multiprocessors must be at least 1"):
        _native.int4_blocks(*arguments)


# Refusals


def reason(module: nn.Module, **arguments: Any) -> str:
    return (
        Int4Linear.supports(module, Int4LinearConfig(**{"device": "cuda:0"} | arguments), MACHINE) or "served"
    )


GPU = Gpu(0, "a GPU", 1 << 34, 1 << 34, (9, 0))
MACHINE = dataclasses.replace(machine.detect(), gpus=(GPU,), cuda_built=True)


def test_what_is_served() -> None:
    assert reason(linear(128, 7)) == reason(linear(64, 8, dtype=torch.float16), group_size=32) == "served"


def test_what_is_refused() -> None:
    assert "inputs must be a multiple of 64" in reason(linear(96, 8), group_size=32)
    assert "group_size 128 does not divide its 192 inputs; choose a smaller one, or -1" in reason(
        linear(192, 8)
    )
    assert "dtype is float32" in reason(linear(128, 8, dtype=torch.float32))
    assert "it replaces nn.Linear" in reason(nn.Embedding(128, 8))

    class Other(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return x

    assert "its forward is not that of nn.Linear" in reason(Other(128, 8, dtype=torch.bfloat16))


def test_gpus_and_builds_that_are_refused() -> None:
    old = dataclasses.replace(MACHINE, gpus=(dataclasses.replace(GPU, capability=(7, 5)),))
    said = Int4Linear.supports(linear(128, 8), Int4LinearConfig("cuda:0"), old)
    assert said is not None and "compute capability 7.5; 8.0 or newer is needed" in said
    without = dataclasses.replace(MACHINE, cuda_built=False)
    said = Int4Linear.supports(linear(128, 8), Int4LinearConfig("cuda:0"), without)
    assert said is not None and "no CUDA parts" in said


def test_without_a_gpu_the_plan_refuses(tiny_qwen3_moe: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_qwen3_moe, dtype=torch.bfloat16)
    rule = {
        "name": "a",
        "match": {"path": r".*\.q_proj"},
        "replace": {"operator": "int4_linear", "group_size": 64},
    }
    with pytest.raises(PlanError, match="int4_linear computes on cuda only; the plan may use cpu"):
        ktinject.plan(model, [rule])


def test_forward_off_the_gpu_and_odd_inputs_are_refused() -> None:
    operator = filled(linear(128, 8))
    with pytest.raises(OperatorError, match="it computes on CUDA devices; this one is on cpu"):
        operator(torch.zeros(1, 128, dtype=torch.bfloat16))
    for x in (torch.zeros(1, 128), torch.zeros(1, 64, dtype=torch.bfloat16)):
        with pytest.raises(OperatorError, match=r"allowed: bfloat16 or float16 \[\.\.\., 128\]"):
            operator(x)


def test_loads_that_are_refused() -> None:
    operator = Int4Linear.build(linear(128, 8, bias=True), Int4LinearConfig("cpu"))
    operator.allocate()
    with pytest.raises(OperatorError, match="never loaded: weight, bias"):
        operator.finish()
    with pytest.raises(OperatorError, match="weight is not loaded"):
        operator.weight.clone()
    with pytest.raises(OperatorError, match=r"expected the whole \[8, 128\]"):
        operator.load("weight", torch.zeros(8, 64), None, None)
    with pytest.raises(OperatorError, match="found dtype int8"):
        operator.load("weight", torch.zeros(8, 128, dtype=torch.int8), None, None)
    with pytest.raises(OperatorError, match="found parameter scale; allowed: weight, bias"):
        operator.load("scale", torch.zeros(8), None, None)
    with pytest.raises(OperatorError, match="a value is not finite; it cannot be quantised"):
        operator.load("weight", torch.full((8, 128), float("nan")), None, None)


def test_codes_that_are_refused() -> None:
    operator = Int4Linear.build(linear(128, 8), Int4LinearConfig("cpu"))
    operator.allocate()
    good = codes(8, 128, 1, zeros=False)
    for bad, words in [
        (codes(8, 128, 2, zeros=False), r"found \[8, 128\] in 2 groups; expected \[8, 128\] in 1"),
        (codes(8, 128, 1), "found zero points; the plan has none"),
        (dataclasses.replace(good, scales=torch.full((8, 1), 1 / 3)), "fit neither bfloat16 nor float16"),
    ]:
        with pytest.raises(OperatorError, match=words):
            operator.load_stored("weight", bad, None, None)
    odd = Int4Linear.use_checkpoint_format(
        Int4LinearConfig("cpu"), Format("gptq", (), None, (8, 192), 48, False)
    )
    with pytest.raises(OperatorError, match="the checkpoint has groups of 48 inputs"):
        Int4Linear.build(linear(192, 8), odd)


def test_groups_of_different_sizes_are_refused() -> None:
    group_of = torch.arange(128) // 64
    group_of[0] = 1
    with pytest.raises(OperatorError, match=r"found groups of 63 to 65 inputs in g_idx; expected 64 in each"):
        in_activation_order(8, 128, 64, group_of=group_of)


# Kernel


@pytest.fixture(scope="session")
def cuda() -> str:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return "cuda:0"


@pytest.mark.gpu
@pytest.mark.parametrize("sm80_only", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group_size", GROUPS)
def test_the_kernels_on_every_kind_of_shape(
    group_size: int, symmetric: bool, dtype: torch.dtype, sm80_only: bool, cuda: str
) -> None:
    for k, n in [(64, 8), (128, 64), (192, 200), (448, 513), (1024, 2304), (4096, 300), (512, 9000)]:
        if group_size == 128 and k % 128:
            continue
        module = linear(k, n, bias=n % 2 == 0, dtype=dtype, seed=n)
        operator = filled(module, cuda, sm80_only, group_size=group_size, symmetric=symmetric)
        for m in (1, 2, 7, 8, 9, 16, 17, 33, 64, 65, 129, 200, 400, *UNPACKED):
            check_product(operator, dtype, m)


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["sm_89 RTX 4060", "sm_120 RTX 5090"])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group_size", GROUPS)
def test_the_kernels_with_the_shared_memory_of_smaller_devices(
    group_size: int, symmetric: bool, device: str, cuda: str
) -> None:
    for k, n in [(192, 200), (1024, 2304), (4096, 300), (512, 9000)]:
        if group_size == 128 and k % 128:
            continue
        module = linear(k, n, bias=n % 2 == 0, dtype=torch.bfloat16, seed=n)
        operator = filled(module, cuda, group_size=group_size, symmetric=symmetric)
        with pretended(device):
            for m in (1, 8, 9, 16, 17, 33, 65):
                check_product(operator, torch.bfloat16, m)


def allowed(k: int) -> list[tuple[int, int, int]]:
    """Every kind of blocks that a product of k inputs can have: narrow ones, and those of whole sums, whose tokens,
    outputs and sets of warpgroups WHOLE has."""
    narrow = [(tokens, split, 0) for tokens in (32, 64, 128) for split in range(9) if split <= k // 64]
    return narrow + [(tokens, 1, outputs) for (tokens, outputs), sets in WHOLE.items() if sets <= k // 64]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group_size", GROUPS)
def test_every_kind_of_blocks(group_size: int, symmetric: bool, dtype: torch.dtype, cuda: str) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("blocks are chosen on Hopper alone")
    for k, n, tokens in ((1024, 513, (17, 300)), (640, 1000, (129,))):
        operator = filled(
            linear(k, n, bias=True, dtype=dtype, seed=n), cuda, group_size=group_size, symmetric=symmetric
        )
        for blocks in allowed(k):
            operator.blocks = blocks
            operator.finish()
            for m in tokens:
                check_product(operator, dtype, m)


@pytest.mark.gpu
@pytest.mark.parametrize("multiprocessors", [132])
def test_the_blocks_that_layers_of_models_have(multiprocessors: int, cuda: str) -> None:
    """One product of each kind of blocks that is chosen for any of the layers for which they were measured."""
    if torch.cuda.get_device_properties(0).multi_processor_count != multiprocessors:
        pytest.skip("other blocks are chosen here")
    found: dict[tuple[int, ...], tuple[int, int, int]] = {}
    for k, n in LAYERS:
        for m in (17, 32, 48, 64, 100, 128, 192, 200, 256, 300, 384, 400, 512):
            chosen = _native.int4_blocks(n, k, m, multiprocessors)[:4]
            if _native.int4_is_measured(n, k, m, multiprocessors) or not is_small(k, n, m):
                found.setdefault(chosen, (k, n, m))
    for k, n, m in found.values():
        check_product(filled(linear(k, n, seed=n), cuda), torch.bfloat16, m)


@pytest.mark.gpu
@pytest.mark.parametrize("scales", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_codes_of_a_checkpoint_with_scales_of_either_type(
    scales: torch.dtype, dtype: torch.dtype, cuda: str
) -> None:
    """Scales of more bits than ours: above 16 tokens each weight is rounded once to the activations' type."""
    k, n, group = 512, 700, 64
    made = codes(n, k, k // group)
    stored = dataclasses.replace(made, scales=(made.scales.float() / 50 + 0.001).to(scales))
    source = Format("gptq", (), None, (n, k), group, True)
    operator = Int4Linear.build(
        linear(k, n, dtype=dtype), Int4Linear.use_checkpoint_format(Int4LinearConfig(cuda), source)
    )
    operator.every_lane = RACECHECK
    operator.allocate()
    operator.load_stored("weight", stored, None, None)
    operator.finish()
    exact = stored.values().to(cuda)
    assert operator.unpack("weight").to(cuda).equal(exact)
    assert operator.dequantise(dtype).equal(exact.to(dtype))
    for m in (5, 16, 30, 64, 200, *UNPACKED):
        x = torch.randn(m, k, device=cuda).to(dtype)
        weight = exact if m <= 16 else exact.to(dtype)
        error = reference.relative_error(operator(x), x.double() @ weight.double().T)
        # A bf16 scale times a step may be rounded to fp16 twice: in the scale and in the product.
        assert error < reference.INT4_LINEAR_TOLERANCE[dtype], (m, error)


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 40, MANY_TOKENS + 1])
def test_products_in_activation_order(m: int, cuda: str) -> None:
    operator, stored = in_activation_order(700, 512, 128, cuda)
    exact = stored.values().to(cuda)
    assert operator.dequantise(torch.bfloat16).equal(exact.bfloat16())
    x = torch.randn(m, 512, device=cuda).bfloat16().requires_grad_()
    weight = exact if m <= 32 else exact.bfloat16()
    y = operator(x)
    want = x.detach().double() @ weight.double().T
    assert reference.relative_error(y, want) < reference.INT4_LINEAR_TOLERANCE[torch.bfloat16]
    y.backward(torch.ones_like(y))
    assert x.grad is not None and x.grad.equal(torch.ones_like(y) @ exact.bfloat16())


@pytest.fixture(scope="module")
def layer(cuda: str) -> Int4Linear:
    return filled(linear(256, 320, bias=True), cuda)


@pytest.mark.gpu
def test_any_leading_shape_and_any_alignment(layer: Int4Linear) -> None:
    x = torch.randn(3, 5, 256, device="cuda").bfloat16()
    y = layer(x)
    assert y.shape == (3, 5, 320) and y.view(15, 320).equal(layer(x.view(15, 256)))
    assert layer(x[:0]).shape == (0, 5, 320)
    odd = torch.randn(1 + 4 * 256, device="cuda").bfloat16()[1:].view(4, 256)
    assert layer(odd).equal(layer(odd.clone()))
    assert layer(x[:, :, None].transpose(0, 1)).equal(y[:, :, None].transpose(0, 1))
    assert layer(x.cpu()).equal(y.cpu())


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 40, 100, *UNPACKED])
def test_in_a_cuda_graph(m: int, layer: Int4Linear) -> None:
    x = torch.randn(m, 256, device="cuda").bfloat16()
    layer(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer(layer(x)[:, :256])
    for seed in range(3):
        torch.manual_seed(seed)
        x.copy_(torch.randn(m, 256))
        graph.replay()
        assert y.equal(layer(layer(x)[:, :256]))


@pytest.mark.gpu
def test_on_several_streams_at_once(layer: Int4Linear) -> None:
    inputs = [torch.randn(16, 256, device="cuda").bfloat16() for _ in range(4)]
    wanted = [layer(x) for x in inputs]
    streams = [torch.cuda.Stream() for _ in inputs]
    torch.cuda.synchronize()
    for _ in range(50):
        found = []
        for stream, x in zip(streams, inputs):
            with torch.cuda.stream(stream):
                found.append(layer(x))
        torch.cuda.synchronize()
        assert all(a.equal(b) for a, b in zip(found, wanted))


@pytest.mark.gpu
def test_gradients_compile_and_opcheck(layer: Int4Linear) -> None:
    x = torch.randn(6, 256, device="cuda").bfloat16().requires_grad_()
    y = layer(x)
    slope = torch.randn_like(y)
    y.backward(slope)
    assert x.grad is not None
    want = slope.double() @ layer.unpack("weight").cuda().double()
    assert reference.relative_error(x.grad, want) < 3e-3
    torch.library.opcheck(torch.ops.ktinject.linear.default, (x.detach().requires_grad_(), layer._handle))
    compiled = torch.compile(lambda x: layer(x) * 2, fullgraph=True)
    assert compiled(x).equal(layer(x) * 2)


@pytest.mark.gpu
def test_lora_through_peft(cuda: str) -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(128, device=cuda, dtype=torch.bfloat16)
            self.first = filled(linear(128, 192), cuda)
            self.second = filled(linear(192, 64), cuda, group_size=64)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(torch.relu(self.first(self.norm(x))))

    class Plain(nn.Module):
        def __init__(self, model: Model) -> None:
            super().__init__()
            self.norm = model.norm
            for name, operator in (("first", model.first), ("second", model.second)):
                dense = nn.Linear(
                    operator.in_features, operator.out_features, False, device=cuda, dtype=torch.bfloat16
                )
                dense.weight.data.copy_(operator.weight)
                setattr(self, name, dense)

        forward = Model.forward

    model = Model()
    config = peft.LoraConfig(r=4, target_modules=["first", "second"], init_lora_weights=False)
    gradients = []
    x = torch.randn(10, 128, device=cuda).bfloat16()
    for each in (Plain(model), model):
        torch.manual_seed(1)
        tuned = peft.get_peft_model(each, config).to(cuda)
        y = tuned(x)
        y.float().square().sum().backward()
        gradients.append([y] + [p.grad for name, p in sorted(tuned.named_parameters()) if p.requires_grad])
    assert len(gradients[0]) == 5
    for plain, ours in zip(*gradients):
        assert reference.relative_error(ours, plain) < 2e-2
