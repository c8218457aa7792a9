"""`cpu_experts` against the modules it replaces and the fp64 reference, for every kernel that can run here.

Three distances, from loose to tight (`reference.py` has the figures): to the original weights, which is what
users get; to the weights that the operator unpacks, which leaves the rounding of activations; and to a
reference that rounds its activations too, which leaves next to nothing and so finds a wrong index or scale.
"""

from __future__ import annotations

import copy
import time
from typing import Any

import models
import pytest
import reference
import torch
from expert_cases import (
    FORMATS,
    RUNS,
    TABLE,
    assert_close,
    build,
    emulated,
    family,
    filled,
    gaussian,
    inputs,
    multiplied,
    original,
    ready,
    requantised,
    unpacked,
    wanted,
)
from probe_cases import KINDS, experts_module

from ktinject import _native
from ktinject.errors import OperatorError
from ktinject.operators.cpu_experts import CpuExperts, CpuExpertsConfig
from ktinject.operators.probes.experts import parameter_shapes

# --- every kind of experts, every format, every kernel ---


@pytest.mark.parametrize("name,kernel", RUNS)
@pytest.mark.parametrize("family_name", KINDS)
def test_kind(family_name: str, name: str, kernel: str) -> None:
    operator = ready(family_name, name, kernel)
    out = operator(*inputs(operator.spec, 17))
    assert out.dtype == torch.float32
    assert_close(out, wanted(family_name, name, 17), name, operator)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("family_name", KINDS)
def test_kind_against_its_own_module(family_name: str, name: str) -> None:
    """The same without the reference, which would hide a mistake that it shares."""
    module, operator = family(family_name), ready(family_name, name)
    arguments = inputs(operator.spec, 17, seed=1)
    with torch.no_grad():
        assert reference.relative_error(operator(*arguments), module(*arguments)) <= reference.TOLERANCE[name]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("family_name", KINDS)
def test_kernels_agree_on_the_packed_weights(family_name: str, name: str) -> None:
    """Packing does not depend on the kernel, but for ties that a fused multiply-add rounds the other way."""
    first, *others = [ready(family_name, name, kernel) for run, kernel in RUNS if run == name]
    for other in others:
        for parameter in first.parameter_shapes():
            a, b = first.unpack(parameter), other.unpack(parameter)
            if name == "int8":
                assert (a != b).float().mean() < 1e-3
                assert reference.relative_error(a, b) < 1e-3
            else:
                assert torch.equal(a, b)


# --- guesses ---


@pytest.mark.parametrize("name", FORMATS)
def test_a_guess_does_not_change_results(name: str) -> None:
    """Right, half right, wrong, of no expert, of other numbers; for the other layer; and no call at all behind it."""
    layers = [filled(gaussian(256, 256, experts=16), name) for _ in range(2)]
    random = torch.Generator().manual_seed(0)
    for turn in range(20):
        x, _, weights = inputs(layers[0].spec, 1, 4, seed=turn)
        ids = torch.randperm(16, generator=random)[:4][None]
        other = torch.randperm(16, generator=random)[:4][None]
        want = [layer(x, ids, weights) for layer in layers]
        guesses = [
            ids[0].tolist(),
            ids[0, :2].tolist() + other[0, :2].tolist(),
            other[0].tolist(),
            [-1, 99, -1, int(ids[0, 0])],
            [3] * 4,
            [-1] * 4,
            [],
            list(range(16)) * 4,
            list(range(16)) * 5,
        ]
        for guess in guesses:
            layers[0].native.fetch_ahead(guess)
            assert torch.equal(layers[0](x, ids, weights), want[0])
            layers[1].native.fetch_ahead(guess)
            assert torch.equal(layers[0](x, ids, weights), want[0])
            layers[0].native.fetch_ahead(guess)
            layers[1].native.fetch_ahead(guess)
            assert torch.equal(layers[1](x, ids, weights), want[1])
            layers[0].native.fetch_ahead(guess)
            many = inputs(layers[0].spec, 9, 4, seed=turn)
            assert torch.equal(layers[0](*many), layers[0](*many))


def test_how_often_a_guess_was_right_is_counted() -> None:
    layer = filled(gaussian(256, 256, experts=16))
    x, _, weights = inputs(layer.spec, 1, 4)
    ids = torch.tensor([[1, 5, 9, 13]])
    wanted = [0, 0]
    for guess, right in [([13, 5, 1, 9], 4), ([1, 2, 3, 13], 2), ([0, 2, 4, 6], 0), ([-1, 5, 16, 99], 1)]:
        layer.native.fetch_ahead(guess)
        for _ in range(2):  # the guess was of the first of them
            layer(x, ids, weights)
        wanted = [wanted[0] + right, wanted[1] + 4]
        assert [*layer.native.guesses] == wanted
    # Not what was guessed: several tokens, or another layer first.
    layer.native.fetch_ahead([1, 5, 9, 13])
    layer(*inputs(layer.spec, 3, 4))
    layer.native.fetch_ahead([1, 5, 9, 13])
    filled(gaussian(256, 256, experts=16))(x, ids, weights)
    layer(x, ids, weights)
    assert [*layer.native.guesses] == wanted


@pytest.mark.parametrize("right, is_followed", [(0, False), (1, False), (2, True), (4, True)])
def test_guesses_that_are_mostly_wrong_are_not_followed(right: int, is_followed: bool) -> None:
    """They are tried again later, and followed again once they are right."""
    layer = filled(gaussian(256, 256, experts=16))
    x, _, weights = inputs(layer.spec, 1, 4)
    ids = torch.tensor([[1, 5, 9, 13]])

    def followed(guess: list[int], times: int) -> int:
        before = layer.native.guesses[1]
        for _ in range(times):
            layer.native.fetch_ahead(guess)
            layer(x, ids, weights)
        return (layer.native.guesses[1] - before) // 4

    guess = [*ids[0, :right].tolist(), *[0, 2, 4, 6][right:]]
    assert followed(guess, 64) == 64
    assert followed(guess, 200) == (200 if is_followed else 0)
    if not is_followed:
        assert followed(guess, 4096) == 64
        assert followed(ids[0].tolist(), 4096 + 300) == 300 + 136  # what was left of 4096


def test_workers_bring_nearer_what_was_guessed() -> None:
    """All of it if they have the time; experts that are gone by then do no harm."""
    layer = filled(gaussian(256, 256, experts=16))
    before = _native.fetched_bytes()
    layer.native.fetch_ahead([1, 5, 9, 13])
    end = time.monotonic() + 20
    while _native.fetched_bytes() == before and _native.threads() > 1:
        assert time.monotonic() < end
    for _ in range(20):
        gone = filled(gaussian(256, 256, experts=16))
        gone.native.fetch_ahead([0, 1, 2, 3])
        del gone
    x, ids, weights = inputs(layer.spec, 1, 4)
    assert layer(x, ids, weights).isfinite().all()


# --- sizes ---

# Rows of an expert choose between kernels and paths: none, one, a few, more than a tile of 16 or of 32 rows.
TOKENS = [0, 1, 3, 17, 130]


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("name,kernel", RUNS)
@pytest.mark.parametrize("family_name", ["qwen3_moe", "gpt_oss", "nemotron_h"])
def test_tokens(family_name: str, name: str, kernel: str, tokens: int) -> None:
    operator = ready(family_name, name, kernel)
    out = operator(*inputs(operator.spec, tokens))
    assert out.shape == (tokens, operator.spec.hidden_size)
    if tokens:
        assert_close(out, wanted(family_name, name, tokens), name, operator)


def test_tasks_that_were_planned_for_another_layer_or_token_are_not_taken() -> None:
    """Tokens one at a time through layers in turn: what the tasks depend on changes, and comes back."""
    layers = [
        filled(gaussian(hidden, inner, experts), name)
        for hidden, inner, experts, name in [
            (160, 96, 4, "bf16"), (160, 96, 9, "int4_g32"), (160, 96, 4, "int8"), (96, 160, 9, "int4_g32"),
        ]
    ]  # fmt: skip
    calls = []
    for turn in range(3):
        for layer in layers:
            x, ids, weights = inputs(layer.spec, 1 + turn % 2 * 2, top_k=3, seed=turn)
            if turn == 2:
                ids[0, 1] = -1
            calls.append((layer, (x, ids, weights)))
    for _ in range(2):
        for layer, arguments in calls:
            alone = torch.cat(
                [layer(*(part[i : i + 1] for part in arguments)) for i in range(len(arguments[0]))]
            )
            assert reference.relative_error(layer(*arguments), alone) < 5e-3  # sums in another order
            want = reference.experts(*arguments, multiplied(layer), layer.spec)
            assert reference.relative_error(alone, want) < 0.1


# hidden, intermediate: one short of and one past a tile, a panel, a group; less than any of them; groups that
# end in the middle.
SIZES = [(1, 1), (7, 5), (15, 33), (33, 17), (40, 24), (64, 32), (127, 129), (160, 96), (200, 320)]


@pytest.mark.parametrize("hidden,inner", SIZES)
@pytest.mark.parametrize("name,kernel", RUNS)
def test_sizes(hidden: int, inner: int, name: str, kernel: str) -> None:
    operator = filled(gaussian(hidden, inner), name, kernel)
    arguments = inputs(operator.spec, 9, top_k=3)
    want = reference.experts(*arguments, multiplied(operator), operator.spec, emulated(name))
    # A single feature may sit on a rounding boundary, and there is nothing to average it with.
    tolerance = (reference.EMULATED_TOLERANCE[name] if hidden > 1 else 1e-2) + requantised(operator)
    assert reference.relative_error(operator(*arguments), want) <= tolerance


@pytest.mark.parametrize("name,kernel", RUNS)
def test_large_enough_for_every_group_to_be_full(name: str, kernel: str) -> None:
    """The tolerances of the issue, where each group has all its inputs: the worst case for int4."""
    module = gaussian(512, 256)
    operator = filled(module, name, kernel)
    arguments = inputs(operator.spec, 12)
    weights = unpacked(operator)
    assert_close(
        operator(*arguments),
        {
            "original": reference.experts(*arguments, original(module, operator.spec), operator.spec),
            "unpacked": reference.experts(*arguments, weights, operator.spec),
            "emulated": reference.experts(*arguments, multiplied(operator), operator.spec, emulated(name)),
        },
        name,
        operator,
    )


# --- what callers may hand in ---


# Each of the inputs is converted by itself: any two dtypes meet, not all three in every format.
INDEX_DTYPES, WEIGHT_DTYPES = [torch.int64, torch.int32, torch.int16], [torch.float32, torch.bfloat16]
DTYPES = [
    (name, dtype, WEIGHT_DTYPES[(i // 2 + j) % 2], INDEX_DTYPES[(i + j) % 3])
    for i, name in enumerate(FORMATS)
    for j, dtype in enumerate([torch.float32, torch.bfloat16, torch.float16, torch.float64])
]


@pytest.mark.parametrize("name,dtype,weight_dtype,index_dtype", DTYPES)
def test_dtypes(name: str, dtype: torch.dtype, weight_dtype: torch.dtype, index_dtype: torch.dtype) -> None:
    operator = ready("gpt_oss", name)
    x, index, weights = inputs(operator.spec, 17)
    x, index, weights = x.to(dtype), index.to(index_dtype), weights.to(weight_dtype)
    out = operator(x, index, weights)
    assert out.dtype == dtype
    want = reference.experts(x, index, weights, multiplied(operator), operator.spec, emulated(name))
    # The output is rounded to its own dtype last: 2^-9 at the most for bf16.
    rounding = {torch.bfloat16: 2e-3, torch.float16: 3e-4}.get(dtype, 0.0)
    assert reference.relative_error(out, want) <= reference.EMULATED_TOLERANCE[name] + rounding + requantised(
        operator
    )


@pytest.mark.parametrize("name", ["bf16", "int8", "int4_g32"])
def test_inputs_of_any_strides(name: str) -> None:
    operator = ready("qwen3_moe", name)
    x, index, weights = inputs(operator.spec, 17)
    want = operator(x, index, weights)
    wide = torch.full((17, 3 * x.shape[1]), float("nan"))
    wide[:, 1::3] = x
    apart = torch.full((34, 4), 99, dtype=torch.int64)
    apart[::2, 1:3] = index
    assert torch.equal(operator(wide[:, 1::3], apart[::2, 1:3], weights.T.contiguous().T), want)
    assert torch.equal(operator(x.T.contiguous().T, index.T.contiguous().T, weights), want)
    five = [tensor[:1].expand(5, -1) for tensor in (x, index, weights)]
    assert torch.equal(operator(*five), operator(*(tensor.contiguous() for tensor in five)))


def test_inputs_are_left_alone() -> None:
    operator = ready("qwen3_moe", "int8")
    arguments = inputs(operator.spec, 17)
    copies = [tensor.clone() for tensor in arguments]
    operator(*arguments)
    assert all(torch.equal(a, b) for a, b in zip(arguments, copies))


def test_extreme_activations() -> None:
    operator = ready("qwen3_moe", "int8")
    x, index, weights = inputs(operator.spec, 4)
    x[0] = 0
    x[1] *= 1e-30
    x[2] *= 1e4
    out = operator(x, index, weights)
    assert out.isfinite().all() and not out[0].any()
    want = reference.experts(x, index, weights, unpacked(operator), operator.spec, "int8")
    assert reference.relative_error(out[2], want[2]) < 2e-3


@pytest.mark.parametrize("name", FORMATS)
def test_a_broken_token_spoils_no_other(name: str) -> None:
    operator = ready("qwen3_moe", name)
    x, index, weights = inputs(operator.spec, 17)
    want = operator(x, index, weights)
    x[3], x[5, 2] = float("nan"), float("inf")
    out = operator(x, index, weights)
    whole = [token for token in range(17) if token not in (3, 5)]
    assert torch.equal(out[whole], want[whole])
    assert not out[3].isfinite().any() and not out[5].isfinite().all()


@pytest.mark.parametrize("name", ["bf16", "int8"])
def test_more_tokens_than_the_working_memory_holds(name: str) -> None:
    """64 experts a token make the working memory overflow early; it is then used several times."""
    operator = filled(gaussian(8, 8, experts=64), name)
    arguments = inputs(operator.spec, 1000, top_k=64)
    want = operator(*arguments)
    out = operator(*(tensor.repeat(60, 1) for tensor in arguments))
    torch.testing.assert_close(out, want.repeat(60, 1))


# --- routing ---


@pytest.mark.parametrize("name,kernel", RUNS)
def test_sentinels_are_skipped(name: str, kernel: str) -> None:
    operator = ready("gpt_oss", name, kernel)
    x, index, weights = inputs(operator.spec, 17, top_k=3)
    index[::2, 0] = operator.num_experts
    index[::3, 2] = -1
    index[5] = torch.tensor([-1, operator.num_experts, -1])
    out = operator(x, index, weights)
    assert not out[5].any()
    want = reference.experts(x, index, weights, multiplied(operator), operator.spec, emulated(name))
    assert reference.relative_error(out, want) <= reference.EMULATED_TOLERANCE[name] + requantised(operator)
    index[:] = operator.num_experts
    assert not operator(x, index, weights).any()


@pytest.mark.parametrize("bad", [-2, 7, 1000, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_ids_that_are_no_expert_are_refused(bad: int, dtype: torch.dtype) -> None:
    operator = ready("qwen3_moe", "bf16")
    x, index, weights = inputs(operator.spec, 5)
    index = index.to(dtype)
    want = operator(x, index, weights)
    broken = index.clone()
    broken[3, 1] = bad
    with pytest.raises((OperatorError, IndexError), match=rf"(?s)token 3.*expert {bad}.*0 to 5"):
        operator(x, broken, weights)
    assert torch.equal(operator(x, index, weights), want)


def test_wide_ids_are_not_cut() -> None:
    operator = ready("qwen3_moe", "bf16")
    x, index, weights = inputs(operator.spec, 5)
    index[2, 0] = 2**32 + 1
    with pytest.raises((OperatorError, IndexError), match=str(2**32 + 1)):
        operator(x, index, weights)


@pytest.mark.parametrize("name,kernel", RUNS)
def test_all_tokens_to_one_expert(name: str, kernel: str) -> None:
    operator = ready("deepseek_v4", name, kernel)
    x, index, weights = inputs(operator.spec, 70, top_k=1)
    index[:] = 4
    want = reference.experts(x, index, weights, multiplied(operator), operator.spec, emulated(name))
    assert reference.relative_error(operator(x, index, weights), want) <= reference.EMULATED_TOLERANCE[
        name
    ] + requantised(operator)


@pytest.mark.parametrize("name", FORMATS)
def test_routing_of_every_shape(name: str) -> None:
    """One expert twice for a token, every expert for a token, experts that nobody asks for."""
    operator = ready("qwen3_moe", name)
    x, _, _ = inputs(operator.spec, 6)
    for index in [
        torch.tensor([[3, 3]]).expand(6, 2),
        torch.arange(6).expand(6, 6),
        torch.tensor([[5, 0, 5, 5]]).expand(6, 4),
        torch.tensor([[0], [0], [0], [0], [0], [5]]),
    ]:
        weights = torch.randn(index.shape)
        want = reference.experts(x, index, weights, multiplied(operator), operator.spec, emulated(name))
        assert reference.relative_error(operator(x, index, weights), want) <= reference.EMULATED_TOLERANCE[
            name
        ] + requantised(operator)


@pytest.mark.parametrize(
    "change,message",
    [
        (lambda x, i, w: (x[:, :-1], i, w), "39"),
        (lambda x, i, w: (x[:-1], i, w), "top_k"),
        (lambda x, i, w: (x, i[:-1], w), "top_k"),
        (lambda x, i, w: (x, i, w[:, :1]), "top_k"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(change: Any, message: str) -> None:
    operator = ready("qwen3_moe", "bf16")
    with pytest.raises(OperatorError, match=message):
        operator(*change(*inputs(operator.spec, 5)))


# --- the operator in the engine ---


@pytest.mark.parametrize("name,kernel", RUNS)
def test_describe_says_what_runs(name: str, kernel: str) -> None:
    said = build(family("qwen3_moe"), name, kernel).describe()
    assert said["kernel"] == kernel
    assert said["weights"].startswith(FORMATS[name]["weights"])
    assert str(FORMATS[name].get("group_size", "")) in said["weights"]


# Sizes follow from the spec and the format, one by one: each kind meets one format, each format one kind or two.
@pytest.mark.parametrize("family_name,name", [*zip(KINDS, [*FORMATS, "bf16"])])
def test_plan_on_meta(family_name: str, name: str) -> None:
    """Everything that the plan asks is known without a weight, and the same as with weights."""
    planned, real = build(experts_module(family_name, "meta"), name), ready(family_name, name)
    assert planned.spec == real.spec
    assert planned.footprint() == real.footprint() and planned.describe() == real.describe()
    assert planned.parameter_shapes() == parameter_shapes(real.spec)
    parameters = reference.parameters_of(family(family_name))
    assert planned.parameter_shapes() == {key: tuple(value.shape) for key, value in parameters.items()}
    weights = sum(value.numel() for key, value in parameters.items() if not key.endswith("_bias"))
    per_weight = {"bf16": 2.0, "int8": 1.0}.get(name, 0.5)
    assert planned.footprint()["cpu"] >= weights * per_weight


def test_lossless_only_from_bf16() -> None:
    module = copy.deepcopy(family("qwen3_moe"))
    assert not filled(module, "bf16").is_lossless()
    assert filled(module.bfloat16(), "bf16").is_lossless()
    assert not filled(module, "int8").is_lossless()


@pytest.mark.parametrize("counts", [(1, 0, 2, 0, 0, 1), (0, 0, 0, 0, 0, 0)])
def test_rows_of_each_expert_together(counts: tuple[int, ...]) -> None:
    """As Llama 4 gives them: rows that an expert does not compute are zeros."""
    module = models.leaf(models.tiny("llama4_text"))[1]
    operator = filled(module, "bf16")
    rows = torch.zeros(6, 3, 40)
    for expert, count in enumerate(counts):
        rows[expert, :count] = torch.randn(count, 40, generator=torch.Generator().manual_seed(expert))
    with torch.no_grad():
        want, found = module(rows.view(18, 40)), operator(rows.view(18, 40))
        assert found.shape == want.shape
        assert (found - want).norm() <= 1e-2 * want.norm()
        assert not found.view_as(rows)[rows == 0].any()
        assert operator(rows[:, :0].reshape(0, 40)).shape == (0, 40)
    rows.requires_grad_()
    operator(rows.view(18, 40)).sum().backward()
    assert rows.grad is not None and rows.grad.any() == (sum(counts) > 0)


@pytest.mark.parametrize("family_name", models.REFUSED)
def test_other_leaves_are_refused(family_name: str) -> None:
    module = models.leaf(models.tiny(family_name))[1]
    config = CpuExpertsConfig(device="cpu")
    machine: Any = None
    reason = CpuExperts.supports(module, config, machine)
    assert reason is not None and not reason.endswith(".")
    with pytest.raises(OperatorError, match="cannot be replaced"):
        CpuExperts.build(module, config)
    assert CpuExperts.supports(family("qwen3_moe"), config, machine) is None


def test_unknown_kernels_are_refused() -> None:
    for kernel in ("avx1024_bf16", "reference_int8"):
        with pytest.raises(
            ValueError, match=rf"kernel is '{kernel}'; for weights bf16 it is auto, .*, reference_bf16"
        ):
            build(family("qwen3_moe"), "bf16", kernel)


@pytest.mark.parametrize("row", [row for row in TABLE if not row["available"]], ids=lambda row: row["name"])
def test_kernels_that_cannot_run_here_are_refused(row: dict[str, Any]) -> None:
    name = next(name for name, arguments in FORMATS.items() if arguments["weights"] == row["weights"])
    with pytest.raises(OperatorError, match=rf"{row['name']}.*cannot run here.*kernel: auto"):
        build(family("qwen3_moe"), name, row["name"])
    config = CpuExpertsConfig(device="cpu", kernel=row["name"], **FORMATS[name])
    machine: Any = None
    assert "cannot run here" in (CpuExperts.supports(family("qwen3_moe"), config, machine) or "")


@pytest.mark.parametrize("name", FORMATS)
def test_automatic_is_the_first_row_that_can_run(name: str) -> None:
    first = next(
        row["name"]
        for row in TABLE
        if row["weights"] == FORMATS[name]["weights"] and row["available"] and row["automatic"]
    )
    assert build(family("qwen3_moe"), name).describe()["kernel"].split(",")[0] == first
