"""`bf16_copy` of `int4_linear`: which of the two weights multiplies, what it takes, and on a GPU the products."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from int4_cases import LAYERS, RACECHECK, check_product, filled, in_activation_order, linear
from torch import Tensor
from torch.nn import functional

import ktinject
from ktinject import rules
from ktinject.checkpoints.formats.base import Format
from ktinject.errors import RuleError
from ktinject.operators import int4_linear
from ktinject.operators.dense_linear import DenseLinear, DenseLinearConfig
from ktinject.operators.int4_linear import Int4Linear, Int4LinearConfig
from ktinject.operators.linears.int4_choice import INT4_IS_FASTER, bf16_is_faster
from tests.models import tiny
from tests.reference import relative_error

PAGE = (Path(__file__).parents[2] / "docs" / "benchmarks.md").read_text()
COLUMNS = (32, 64, 128, 256, 512)
HOPPER = 132  # multiprocessors of an H100 or H200


def measured() -> dict[tuple[int, int, int], tuple[float, float]]:
    """(inputs, outputs, tokens) → µs of int4_linear and of cuBLAS in bf16, from the table of all layers."""
    found = {}
    for k, n, cells in re.findall(r"^\| (\d+) → (\d+) \|(.*)\|$", PAGE, re.MULTILINE):
        texts = re.findall(r"\*\*([\d.]+)\*\*, ([\d.]+)(?: \||$)", cells.rstrip())
        if len(texts) == len(COLUMNS):
            found |= {(int(k), int(n), m): (float(a), float(b)) for m, (a, b) in zip(COLUMNS, texts)}
    return found


MEASURED = measured()


# The choice


def test_the_faster_one_is_chosen_in_every_cell_that_was_measured() -> None:
    assert len(MEASURED) == 210 and len({cell[:2] for cell in MEASURED}) == 42
    copied = {cell for cell in MEASURED if bf16_is_faster(*cell, HOPPER)}
    for cell, (int4, bf16) in MEASURED.items():
        assert (bf16 if cell in copied else int4) == min(int4, bf16), cell
    by_tokens = [sum(m == column for *_, m in copied) for column in COLUMNS]
    assert by_tokens == [0, 0, 8, 19, 28], "as many as the page says"


def test_the_table_has_the_layers_of_the_page_and_two_large_ones() -> None:
    assert INT4_IS_FASTER.keys() - {cell[:2] for cell in MEASURED} == {(7168, 18432), (16384, 7168)}


def test_the_table_of_large_layers() -> None:
    """The first table has how many times as fast as cuBLAS int4_linear is, rounded: 1.0 may be either."""
    columns = (32, 64, 128, 512, 1024, 4096)
    rows = re.findall(r"^\| (\d+) → (\d+) \|((?:[ .\d]*\|){8})$", PAGE, re.MULTILINE)
    assert [row[:2] for row in rows] == [
        ("7168", "18432"), ("16384", "7168"), ("4096", "4096"), ("7168", "2048"), ("2048", "768"),
    ]  # fmt: skip
    large = 0
    for k, n, cells in rows:
        for m, cell in zip(columns, cells.split("|")[2:]):
            # Two of these layers were measured once more, with newer kernels.
            if cell.strip() and float(cell) != 1 and ((int(k), int(n), m) not in MEASURED):
                assert bf16_is_faster(int(k), int(n), m, HOPPER) == (float(cell) < 1), (k, n, m)
                large += 1
    assert large == 12


@pytest.mark.parametrize("layer", INT4_IS_FASTER)
def test_numbers_between_go_with_the_greater_one(layer: tuple[int, int]) -> None:
    ends = (64, 128, 256, 512, 1024, 1 << 20)
    for below, end in itertools.pairwise(ends):
        assert len({bf16_is_faster(*layer, m, HOPPER) for m in (below + 1, below + 20, end)}) == 1
    assert not any(bf16_is_faster(*layer, m, HOPPER) for m in (0, 1, 16, 33, 64))
    assert bf16_is_faster(*layer, 1025, HOPPER)


def test_layers_and_gpus_that_were_not_measured() -> None:
    for k, n in ((2048, 768), (512, 32768), (4096, 9728)):
        assert (k, n) not in INT4_IS_FASTER
        assert [bf16_is_faster(k, n, m, HOPPER) for m in (64, 65, 5000)] == [False, True, True]
    for k, n, multiprocessors in ((7168, 24576, HOPPER), (2048, 512, 0), (7168, 18432, 114)):
        found = [bf16_is_faster(k, n, m, multiprocessors) for m in (64, 128, 129, 5000)]
        assert found == [False, False, True, True]
    assert bf16_is_faster(2048, 512, 65, 114), "other blocks are chosen there"


@pytest.mark.parametrize(
    "arch, many, multiprocessors", [("sm90", 4096, 132), ("sm90", 4096, 114), ("sm80", 256, 0)]
)
def test_nothing_is_unpacked_that_lies_there_unpacked(arch: str, many: int, multiprocessors: int) -> None:
    """So every layer uses its copy, at the latest where it would be unpacked for each call."""
    for k, n in [*LAYERS, *INT4_IS_FASTER, (2048, 768)]:
        operator = Int4Linear.build(linear_on_meta(k, n), Int4LinearConfig("cpu", 64, bf16_copy=True))
        operator._arch, operator._many_tokens, operator._multiprocessors = arch, many, multiprocessors
        unpacked = [m for m in range(1, 6000, 13) if operator._is_unpacked(m)]
        assert unpacked and all(bf16_is_faster(k, n, m, multiprocessors) for m in unpacked)


def linear_on_meta(k: int, n: int) -> torch.nn.Linear:
    return torch.nn.Linear(k, n, bias=False, dtype=torch.bfloat16, device="meta")


# What it takes


@pytest.mark.parametrize("dtype, name", [(torch.bfloat16, "bf16"), (torch.float16, "fp16")])
def test_the_footprint_is_exact_and_the_plan_says_what_there_is(dtype: torch.dtype, name: str) -> None:
    for bias in (False, True):
        module = linear(256, 200, bias, dtype)
        operator, alone = filled(module, bf16_copy=True), filled(module)
        held = [operator._words, operator._scales, operator._counters, operator._bias]
        held += [operator._copy, operator._copy_bias]
        assert operator.footprint() == {"cpu": sum(t.nbytes for t in held if t is not None)}
        more = operator.footprint()["cpu"] - alone.footprint()["cpu"]
        assert more == 2 * 200 * 256 + (2 * 200 if bias else 0)
        assert operator.describe() == {
            "weights": f"int4 group 128 with {name} copy",
            "kernel": "int4_linear_sm80, cuBLAS with the copy where faster",
        }
        assert "copy" not in "".join(alone.describe().values()) and alone._copy is None


def test_the_copy_has_the_values_of_the_codes_also_after_they_were_written_to() -> None:
    operator = filled(linear(256, 200, bias=True), bf16_copy=True)
    assert operator._copy is not None and operator._copy_bias is not None and operator.bias is not None
    assert operator._copy.equal(operator.unpack("weight").bfloat16())
    assert operator._copy_bias.equal(operator.bias)
    before, place = operator._copy.clone(), operator._copy.data_ptr()
    operator.weight.add_(torch.randn(200, 256).bfloat16())
    operator.bias.mul_(2)
    assert not operator._copy.equal(before) and operator._copy.data_ptr() == place, "graphs know the place"
    assert operator._copy.equal(operator.unpack("weight").bfloat16())
    assert operator._copy_bias.equal(operator.unpack("bias").bfloat16())


def test_codes_of_a_checkpoint_keep_the_option_and_its_order() -> None:
    operator, stored = in_activation_order(72, 384, 64, bf16_copy=True)
    assert operator._order is not None and operator._copy is not None
    assert operator._copy.equal(stored.values().bfloat16()), "inputs are in the checkpoint's order"
    held = [operator._words, operator._scales, operator._counters, operator._order, operator._copy]
    assert operator.footprint() == {"cpu": sum(t.nbytes for t in held)}
    assert operator.describe()["weights"] == "int4 group 64, zero points, as stored (gptq) with bf16 copy"
    source = Format("awq", (), None, (72, 384), 64, True)
    for wanted in (False, True):
        assert (
            Int4Linear.use_checkpoint_format(Int4LinearConfig("cpu", bf16_copy=wanted), source).bf16_copy
            == wanted
        )


def test_a_product_of_another_dtype_than_the_copy_is_int4s() -> None:
    operator = filled(linear(256, 64), bf16_copy=True)
    assert not operator._is_copied(128, torch.bfloat16) and operator._is_copied(129, torch.bfloat16)
    assert not operator._is_copied(129, torch.float16)
    operator._multiprocessors = HOPPER
    assert not operator._is_copied(64, torch.bfloat16) and operator._is_copied(65, torch.bfloat16)
    assert not filled(linear(256, 64))._is_copied(129, torch.bfloat16)


# Rules


def test_dense_linear_hands_it_on_to_int4_linear_alone() -> None:
    config = DenseLinearConfig("cuda:0", "int4", 64, bf16_copy=True)
    found = DenseLinear.resolve(linear_on_meta(128, 64), config)
    assert found == (Int4Linear, Int4LinearConfig("cuda:0", 64, bf16_copy=True))
    cpu = DenseLinear.resolve(linear_on_meta(128, 64), DenseLinearConfig("cpu", "int4", 64, bf16_copy=True))
    assert cpu is not None and cpu[1].weights == "int4" and not hasattr(cpu[1], "bf16_copy")


@pytest.mark.parametrize("weights", ["kept", "bf16", "fp8", "int8"])
def test_without_int4_there_is_nothing_to_copy(weights: str) -> None:
    found = rules.read("auto", variables={"dense": weights, "bf16_copy": True})
    rule = next(rule for rule in found.rules if rule.name == "attention")
    with pytest.raises(
        RuleError,
        match=rf"attention.*bf16_copy keeps a copy beside int4 weights, and weights is {weights}\. "
        "Write weights: int4, or bf16_copy: false",
    ):
        rules.check_arguments(rule, DenseLinearConfig)


# Products


@pytest.fixture(scope="session")
def cuda() -> str:
    if RACECHECK:
        pytest.skip("racecheck breaks off in cuBLAS's kernels")
    return "cuda:0"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group_size", [32, 128, -1])
def test_products_on_both_sides_of_the_choice(
    group_size: int, symmetric: bool, dtype: torch.dtype, cuda: str
) -> None:
    sizes = {"group_size": group_size, "symmetric": symmetric}
    for k, n, numbers in [
        (4096, 512, (128, 129, 256, 257, 512, 513)),
        (5120, 1024, (1, 64, 65, 128, 600)),
        (256, 320, (0, 64, 65, 128, 129, 5000)),
    ]:
        module = linear(k, n, bias=n != 512, dtype=dtype, seed=n)
        operator, alone = filled(module, cuda, bf16_copy=True, **sizes), filled(module, cuda, **sizes)
        assert {operator._is_copied(m, dtype) for m in numbers} == {False, True}
        weight, bias = alone.dequantise(dtype), alone.unpacked("bias") if alone.has_bias else None
        for m in numbers:
            if m:
                check_product(operator, dtype, m)
            x = torch.randn(m, k, device=cuda).to(dtype)
            copied = operator._is_copied(m, dtype)
            want = functional.linear(x, weight, bias) if copied else alone(x)
            assert operator(x).equal(want), (k, n, m, copied)


@pytest.mark.gpu
def test_inputs_of_another_dtype_any_shape_and_any_alignment(cuda: str) -> None:
    module = linear(256, 320, bias=True)
    operator, alone = filled(module, cuda, bf16_copy=True), filled(module, cuda)
    half = torch.randn(300, 256, device=cuda).half()
    assert operator(half).equal(alone(half)) and operator(half).dtype == torch.float16
    x = torch.randn(3, 100, 256, device=cuda).bfloat16()
    assert operator(x).equal(operator(x.view(300, 256)).view(3, 100, 320))
    odd = torch.randn(1 + 300 * 256, device=cuda).bfloat16()[1:].view(300, 256)
    # cuBLAS may add up in another order there, and in parts that are rounded to bf16.
    assert relative_error(operator(odd), operator(odd.clone())) < 6e-3
    assert operator(x.cpu()).equal(operator(x).cpu())


@pytest.mark.gpu
def test_products_in_activation_order_with_a_copy(cuda: str) -> None:
    operator, stored = in_activation_order(700, 512, 128, cuda, bf16_copy=True)
    exact = stored.values().to(cuda)
    assert operator._copy is not None and operator._copy.equal(exact.bfloat16())
    for m in (40, 300):
        x = torch.randn(m, 512, device=cuda).bfloat16()
        want = x.double() @ exact.bfloat16().double().T
        assert operator._is_copied(m, x.dtype) == (m == 300)
        assert relative_error(operator(x), want) < 4e-3


@pytest.mark.gpu
def test_each_graph_keeps_its_own_way_and_sees_what_is_written(cuda: str) -> None:
    operator = filled(linear(256, 320, bias=True), cuda, bf16_copy=True)
    graphs = []
    for m in (1, 64, 300):
        x = torch.randn(m, 256, device=cuda).bfloat16()
        operator(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = operator(operator(x)[:, :256])
        graphs.append((x, graph, y))
    for seed in range(3):
        torch.manual_seed(seed)
        if seed:
            operator.weight.add_(torch.randn(320, 256, device=cuda).bfloat16() / 8)
            assert operator.bias is not None
            operator.bias.add_(1)
        for x, graph, y in graphs:
            x.copy_(torch.randn_like(x))
            graph.replay()
            assert y.equal(operator(operator(x)[:, :256]))


@pytest.mark.gpu
def test_on_a_second_gpu(cuda: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    operator = filled(linear(256, 320, bias=True), "cuda:1", bf16_copy=True)
    assert operator._copy is not None and operator._copy.device == torch.device("cuda:1")
    for m in (40, 300):
        check_product(operator, torch.bfloat16, m)


@pytest.mark.gpu
def test_gradients_and_compile(cuda: str) -> None:
    operator = filled(linear(256, 320, bias=True), cuda, bf16_copy=True)
    x = torch.randn(300, 256, device=cuda).bfloat16().requires_grad_()
    assert operator._is_copied(300, x.dtype)
    y = operator(x)
    slope = torch.randn_like(y)
    y.backward(slope)
    assert x.grad is not None
    assert relative_error(x.grad, slope.double() @ operator.unpack("weight").to(cuda).double()) < 3e-3
    compiled = torch.compile(lambda x: operator(x) * 2, fullgraph=True)
    assert compiled(x.detach()).equal(operator(x.detach()) * 2)


@pytest.mark.gpu
@pytest.mark.parametrize("chunk", [None, 150])
def test_prompts_of_a_model_take_the_copy_and_its_steps_int4(
    chunk: int | None, cuda: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny("qwen3_moe", hidden_size=128, head_dim=64, max_position_embeddings=512, dtype="bfloat16")
    model.bfloat16().save_pretrained(tmp_path)
    seen: list[int] = []

    def spied(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        seen.append(len(x))
        return functional.linear(x, weight, bias)

    monkeypatch.setattr(int4_linear, "functional", SimpleNamespace(linear=spied))
    ids = torch.randint(3, 96, (1, 300), generator=torch.Generator().manual_seed(0)).to(cuda)
    logits, settings = {}, {"do_sample": False, "pad_token_id": 0, "prefill_chunk_size": chunk}
    for bf16_copy in (False, True):
        variables: dict[str, Any] = {"dense": "int4", "group_size": 64, "bf16_copy": bf16_copy}
        found = ktinject.load(tmp_path, "auto", variables=variables, devices=cuda, progress=False)
        made = {
            type(found.get_submodule(one.path))
            for one in found.ktinject.replacements
            if one.rule == "attention"
        }
        assert made == {Int4Linear}
        seen.clear()
        with torch.inference_mode():
            logits[bf16_copy] = found(ids).logits
        if bf16_copy:
            assert {*seen} == {300}
        seen.clear()
        text = found.generate(ids, max_new_tokens=6, min_new_tokens=6, **settings)
        assert text.shape == (1, 306)
        if bf16_copy:
            assert max(seen) == (chunk or 300) and min(seen) > 64, (
                "steps have one token, which int4 multiplies"
            )
    # Rounding alone, which may turn over a router's choice.
    assert relative_error(logits[True], logits[False]) <= 0.1
