"""Every row of the kernel table that this CPU can run, on random layers; `differential.py` runs as many as asked."""

from __future__ import annotations

import dataclasses
import math

import differential
import k_quants
import pytest
import reference
import torch

from ktinject import _native

TABLE = _native.kernels()
FORMATS = ("bf16", "int8", "int4", "fp8", "mxfp4", "fp8_channel", "nvfp4", "mxfp8", *k_quants.KINDS)


def _cases(row):
    """So many that all rows take some ten seconds; a nightly run has more."""
    if row["weights"] in k_quants.KINDS:  # wide layers
        return 2 if row["name"].startswith("reference") else 4
    return 6 if row["name"].startswith(("reference", "modelled")) else 14


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row["name"])
def test_kernel_on_random_layers(row):
    if not row["available"]:
        pytest.skip(row["reason"])
    torch.set_num_threads(1)
    errors, failures = differential.sweep(_cases(row), 1000, [row])
    assert not failures, "\n".join(failures)
    assert len(errors[row["name"]]) == _cases(row)


def test_every_format_has_a_row_for_every_cpu():
    """In this order among themselves, whatever other rows stand between them."""
    vector = {"int8": ["avx512", "avxvnni", "avx2"], "int4": ["avx512", "avxvnni", "avx2"]}
    assert {row["weights"] for row in TABLE} == set(FORMATS)
    assert len({row["name"] for row in TABLE}) == len(TABLE)
    for weights in FORMATS:
        isas = ["amx", *vector.get(weights, ["avx512", "avx2"]), "reference", "modelled_amx"]
        needed = [f"{isa}_{weights}" for isa in isas]
        assert [row["name"] for row in TABLE if row["name"] in needed] == needed
        *_, last = [row for row in TABLE if row["weights"] == weights and row["automatic"]]
        assert last["name"] == f"reference_{weights}" and last["available"] and not last["isa"]


def test_modelled_kernels_are_never_chosen_by_themselves():
    assert {row["name"] for row in TABLE if not row["automatic"]} == {
        f"modelled_amx_{weights}" for weights in FORMATS
    }


@pytest.mark.parametrize(
    "weights,group_size,symmetric",
    [
        ("bf16", 0, True),
        ("int8", 0, True),
        ("int4", 32, True),
        ("int4", 128, True),
        ("int4", 32, False),
        ("int4", 128, False),
        ("fp8", 0, True),
        ("mxfp4", 0, True),
        ("fp8_channel", 0, True),
        ("nvfp4", 0, True),
        ("mxfp8", 0, True),
    ],
)
def test_packed_weights_do_not_depend_on_the_instruction_set(weights, group_size, symmetric):
    """A value on a rounding boundary must fall to the same side everywhere."""
    torch.manual_seed(0)
    weight = torch.randn(1024, 1024)
    found = []
    for row in TABLE:
        if row["weights"] != weights or not row["available"]:
            continue
        experts = _native.Experts(
            experts=1,
            hidden_size=1024,
            intermediate_size=1024,
            weights=weights,
            group_size=group_size,
            symmetric=symmetric,
            has_gate=False,
            has_bias=False,
            activation="identity",
            alpha=1.0,
            gate_max=math.inf,
            up_limit=math.inf,
            up_offset=0.0,
            kernel=row["name"],
        )
        experts.allocate()
        experts.load("down", 0, weight)
        found.append(torch.empty(1024, 1024))
        experts.unpack("down", 0, found[-1])
    assert len(found) >= 2
    assert all(torch.equal(found[0], other) for other in found[1:])


@pytest.mark.parametrize("tokens", [319, 321, 641, 1000])
@pytest.mark.parametrize("weights", ["bf16", "int8"])
def test_an_expert_with_more_rows_than_a_kernel_is_given_at_once(weights, tokens):
    """They are cut; a token's result does not depend on who else is there."""
    torch.manual_seed(0)
    experts = _native.Experts(
        experts=2, hidden_size=72, intermediate_size=40, weights=weights, group_size=0, has_gate=True,
        has_bias=False, activation="silu", alpha=1.0, gate_max=math.inf, up_limit=math.inf, up_offset=0.0,
        kernel=f"avx512_{weights}" if _native.cpu_features()["avx512_bf16"] else f"reference_{weights}",
    )  # fmt: skip
    experts.allocate()
    for expert in range(2):
        for projection, shape in (("gate", (40, 72)), ("up", (40, 72)), ("down", (72, 40))):
            experts.load(projection, expert, torch.randn(shape) * 0.1)
    x, weight = torch.randn(tokens, 72), torch.rand(tokens, 1)
    index = torch.zeros(tokens, 1, dtype=torch.int64)
    out, part = torch.full_like(x, math.nan), torch.full((64, 72), math.nan)
    experts.forward(x, index, weight, out)
    for first in range(0, tokens, 64):
        some = slice(first, min(first + 64, tokens))
        count = some.stop - first
        experts.forward(x[some], index[some], weight[some], part[:count])
        assert torch.equal(part[:count], out[some])


def _with_outliers(rows, width):
    """Rows with outliers in the same three channels, in one of these, elsewhere, in both, in more than are taken; and
    without."""
    x = torch.randn(rows, width)
    kind = torch.arange(rows) % 6
    x[(kind == 0) | (kind == 3), 5] = 90.0
    x[(kind == 0) | (kind == 3), 70] = -40.0
    x[kind <= 1, width - 1] = 60.0
    for row in torch.where((kind == 2) | (kind == 3))[0]:
        x[row, torch.randperm(width)[:3]] = 70.0
    for row in torch.where(kind == 4)[0]:
        x[row, torch.randperm(width)[:20]] *= 100.0
    return x


@pytest.mark.parametrize("group_size,symmetric", [(0, True), (32, True), (64, False)])
def test_outliers_have_the_same_bits_beside_any_others(group_size, symmetric):
    """Those that rows share go another way than those of a row alone. Without the outliers, none of it would be."""
    torch.manual_seed(0)
    hidden, inner = 304, 96  # not whole blocks
    weights = "int4" if group_size else "int8"
    sizes = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
    matrices = {name: torch.randn(shape) / math.sqrt(shape[1]) for name, shape in sizes.items()}
    x = _with_outliers(350, hidden).bfloat16()  # more than a kernel is given at once
    chosen = reference.outliers(x)
    assert {0, 1, 3, 6} <= set(chosen.sum(-1).tolist())
    kernels = [row["name"] for row in TABLE if row["weights"] == weights and row["available"]]
    for kernel in kernels:
        experts = _native.Experts(
            experts=1, hidden_size=hidden, intermediate_size=inner, weights=weights, group_size=group_size,
            symmetric=symmetric, has_gate=True, has_bias=False, activation="silu", alpha=1.0, gate_max=math.inf,
            up_limit=math.inf, up_offset=0.0, kernel=kernel,
        )  # fmt: skip
        linear = _native.Linear(
            out_features=inner, in_features=hidden, weights=weights, group_size=group_size, symmetric=symmetric,
            has_bias=False, kernel=kernel,
        )  # fmt: skip
        experts.allocate()
        linear.allocate()
        for projection, matrix in matrices.items():
            experts.load(projection, 0, matrix)
        linear.load(matrices["up"])

        def computed(count, experts=experts, linear=linear):
            out, y = torch.full_like(x, math.nan), torch.full((len(x), inner), math.nan).bfloat16()
            for some, part, part_y in zip(x.split(count), out.split(count), y.split(count), strict=True):
                one = torch.zeros(len(some), 1, dtype=torch.int64), torch.ones(len(some), 1)
                experts.forward(some, *one, part)
                linear.forward(some, part_y)
            return torch.cat([out, y], 1)

        found = computed(350)
        rows = 350 if not kernel.startswith(("reference", "modelled")) else 36
        for count in (33, 9, 3, 1) if rows == 350 else (9,):
            assert torch.equal(found, computed(count)), (kernel, count)
        try:
            _native.take_outliers(False)
            left_in = computed(350)
        finally:
            _native.take_outliers(True)
        has_none = ~chosen.any(-1)
        exact = x[~has_none].double() @ matrices["up"].double().T
        errors = [reference.relative_error(y[~has_none, hidden:], exact) for y in (found, left_in)]
        assert torch.equal(left_in[has_none, hidden:], found[has_none, hidden:])
        assert errors[0] < errors[1], kernel


@pytest.mark.parametrize(
    "group_size,symmetric", [(32, True), (64, True), (128, True), (32, False), (128, False)]
)
@pytest.mark.parametrize("kernel", ["amx_int4", "modelled_amx_int4"])
def test_int4_weights_become_whole_numbers_of_a_level(kernel, group_size, symmetric):
    """Rows with a single one show each weight as tiles have it, with few rows as with many: a level is 1/127 of the
    largest weight that an output could have, and a weight is rounded once, or first to 1/256 of it. Scales may be
    negative and of any size."""
    if reason := next(row["reason"] for row in TABLE if row["name"] == kernel):
        pytest.skip(reason)
    torch.manual_seed(0)
    k, n, groups = 320, 64, -(-320 // group_size)
    codes = torch.randint(0, 16, (n, k), dtype=torch.uint8)
    scales = (torch.randn(n, groups) * torch.rand(n, groups).mul(-8).exp()).bfloat16().float()
    zeros = None if symmetric else torch.randint(0, 16, (n, groups), dtype=torch.uint8)
    linear = _native.Linear(
        out_features=n, in_features=k, weights="int4", group_size=group_size, symmetric=symmetric, has_bias=False,
        kernel=kernel,
    )  # fmt: skip
    linear.allocate()
    linear.load_integers(codes, scales, zeros)
    weight = torch.empty(n, k)
    linear.unpack(weight)
    zero = torch.full((n, groups), 8) if zeros is None else zeros.int()
    level = (scales.abs() * torch.maximum(zero, 15 - zero)).amax(1) / 127
    for rows in (7, 32, 64, k):
        found = torch.full((k, n), math.nan)
        try:
            _native.take_outliers(False)
            for some, out in zip(torch.eye(k).split(rows), found.split(rows), strict=True):
                linear.forward(some, out)
        finally:
            _native.take_outliers(True)
        levels = found.T.double() / level[:, None].double()
        assert (levels - levels.round()).abs().max() < 1e-4
        assert (levels - weight.double() / level[:, None].double()).abs().max() < 0.5 + 1 / 256 + 1e-3


@pytest.mark.parametrize("weights", k_quants.KINDS)
def test_a_token_has_the_same_bits_beside_any_others_and_with_any_instructions(weights):
    """The sum of a block is a whole number in every kernel; the reference adds blocks up with a rounding more."""
    torch.manual_seed(0)
    hidden, inner = (
        (800, 288) if weights in k_quants.INPUTS else (768, 256)
    )  # not whole blocks of the kernels'
    sizes = {"up": (inner, hidden), "down": (hidden, inner)}
    blocks = {name: k_quants.quantised(torch.randn(shape) * 0.1, weights) for name, shape in sizes.items()}
    x, found = torch.randn(70, hidden).bfloat16(), []
    for row in TABLE:
        if row["weights"] != weights or not row["available"] or row["name"].startswith("reference"):
            continue
        experts = _native.Experts(
            experts=1, hidden_size=hidden, intermediate_size=inner, weights=weights, group_size=0, has_gate=False,
            has_bias=False, activation="identity", alpha=1.0, gate_max=math.inf, up_limit=math.inf, up_offset=0.0,
            kernel=row["name"],
        )  # fmt: skip
        experts.allocate()
        for projection in sizes:
            experts.load_blocks(projection, 0, blocks[projection])
        for count in (70, 33, 9, 3, 1):
            found.append(torch.full_like(x, math.nan))
            for some, out in zip(x.split(count), found[-1].split(count), strict=True):
                experts.forward(
                    some, torch.zeros(len(some), 1, dtype=torch.int64), torch.ones(len(some), 1), out
                )
    assert len(found) >= 5
    assert all(torch.equal(found[0], other) for other in found[1:])


@pytest.mark.parametrize(
    "kernel", [r["name"] for r in TABLE if r["weights"] in k_quants.KINDS and r["available"]]
)
def test_the_largest_sums_of_k_quants(kernel):
    """Codes, scales and minima at their ends beside activations of one size: what sums of 16 bits must hold, for many
    rows as for one, over more blocks than are prepared at once.
    """
    torch.manual_seed(0)
    rows, k, n = 256, 4096, 64
    kind = next(name for name in k_quants.KINDS if kernel.endswith(name))
    x = torch.ones(rows, k)
    x[1] = -1
    x[2, 1::2] = -1
    x[3, 2::4] = x[3, 3::4] = -1
    x[4:] = torch.randint(0, 2, (rows - 4, k)) * 2.0 - 1
    blocks = k_quants.quantised(torch.randn(n, k), kind).view(n, k // k_quants.INPUTS.get(kind, 256), -1)
    file_d = {
        "q2_k": (80, 84),
        "q3_k": (108, 110),
        "q4_k": (0, 4),
        "q5_k": (0, 4),
        "q6_k": (208, 210),
        "iq4_xs": (0, 2),
        "q8_0": (0, 2),
    }
    first, last = file_d[kind]  # d and m stay; all else is ones, zeros, or either
    ends = torch.randint(0, 2, blocks.shape, dtype=torch.uint8) * 255
    ends[: n // 4], ends[n // 4 : n // 2] = 255, 0
    ends[n // 2 : n // 4 * 3] = torch.randint(0, 256, ends[n // 2 : n // 4 * 3].shape, dtype=torch.uint8)
    if kind == "q8_0":  # signed: -128, 127, and either
        either = torch.where(ends[n // 4 * 3 :] > 0, 128, 127).byte()
        ends[: n // 4], ends[n // 4 : n // 2], ends[n // 4 * 3 :] = 128, 127, either
    ends[..., first:last] = blocks[..., first:last]
    linear = _native.Linear(
        out_features=n, in_features=k, weights=kind, group_size=0, has_bias=False, kernel=kernel
    )
    linear.allocate()
    linear.load_blocks(ends.view(n, -1))
    want, out = torch.empty(n, k), torch.empty(rows, n)
    linear.unpack(want)
    linear.forward(x, out)
    size = x.abs().double() @ want.abs().double().T
    assert ((out - x.double() @ want.double().T).abs() <= 2e-5 * size).all()
    one = torch.empty(1, n)
    for row in (0, 1, 2, 3, 200):
        linear.forward(x[row : row + 1].clone(), one)
        assert one[0].equal(out[row])


@pytest.mark.parametrize("weights,tokens", [("int8", 3000), ("bf16", 5000)])
def test_results_of_down_that_are_longer_than_the_caches(weights, tokens):
    """They are written past the caches, and above 512 MiB of working memory there are several passes; a token's result
    is the same."""
    torch.manual_seed(0)
    hidden = 8192  # 64 KiB of fp32 for the two experts of a token
    experts = _native.Experts(
        experts=3, hidden_size=hidden, intermediate_size=16, weights=weights, group_size=0, has_gate=False,
        has_bias=False, activation="relu", alpha=1.0, gate_max=math.inf, up_limit=math.inf, up_offset=0.0,
        kernel=f"avx512_{weights}" if _native.cpu_features()["avx512_bf16"] else f"avx2_{weights}",
    )  # fmt: skip
    experts.allocate()
    for expert in range(3):
        experts.load("up", expert, torch.randn(16, hidden) * 0.1)
        experts.load("down", expert, torch.randn(hidden, 16) * 0.1)
    x, weight = torch.randn(tokens, hidden).bfloat16(), torch.rand(tokens, 2)
    index = torch.rand(tokens, 3).topk(2).indices
    out, part = torch.full_like(x, math.nan), torch.full((1000, hidden), math.nan, dtype=torch.bfloat16)
    experts.forward(x, index, weight, out)
    for some in (slice(first, first + 1000) for first in range(0, tokens, 1000)):
        experts.forward(x[some], index[some], weight[some], part)
        assert torch.equal(part, out[some])


@pytest.mark.parametrize("tokens", [20, 70, 160])
@pytest.mark.parametrize("row", [r for r in TABLE if "amx" in r["name"]], ids=lambda row: row["name"])
@pytest.mark.nightly
def test_tiles_with_inputs_that_are_cut(row, tokens):
    """Rows that are long for the caches, and so few and so many that codes are expanded in either way."""
    if not row["available"]:
        pytest.skip(row["reason"])
    drawn = differential.draw(0, [row])
    hidden, inner = (4352, 256) if row["weights"] in k_quants.KINDS else (4300, 24)
    spec = dataclasses.replace(
        drawn.spec, num_experts=1, hidden_size=hidden, intermediate_size=inner, activation="silu"
    )
    case = dataclasses.replace(drawn, spec=spec, tokens=tokens, top_k=1, dtype=torch.bfloat16)
    error, allowed = differential.run(case)
    assert error <= allowed


def one_expert(kernel: str, weights: str = "bf16", size: int = 64) -> _native.Experts:
    experts = _native.Experts(
        experts=1, hidden_size=size, intermediate_size=size, weights=weights,
        group_size=32 if weights == "int4" else 0, has_gate=True, has_bias=False, activation="silu", alpha=1.0,
        gate_max=math.inf, up_limit=math.inf, up_offset=0.0, kernel=kernel,
    )  # fmt: skip
    experts.allocate()
    return experts


@pytest.mark.parametrize("kernel", [r["name"] for r in TABLE if r["weights"] == "bf16" and r["available"]])
def test_the_activation_far_from_zero(kernel):
    """Gates where the exponential is cut off, infinite ones, and NaN, which stays in its token."""
    experts = one_expert(kernel)
    for projection in ("gate", "up", "down"):
        experts.load(projection, 0, torch.eye(64))
    gates = torch.tensor([-1e6, -1e4, -100, -88, -87, -20, -1, -0.0, 1, 20, 87, 88, 100, 1e4, 1e15, math.nan])
    x = gates.bfloat16()[:, None].expand(16, 64).contiguous()
    out = torch.full((16, 64), 7, dtype=torch.bfloat16)
    experts.forward(x, torch.zeros(16, 1, dtype=torch.int64), torch.ones(16, 1), out)
    gate = x.double()
    want = gate / (1 + torch.exp(-gate)) * gate
    assert out[15].isnan().all()
    torch.testing.assert_close(out[:15].double(), want[:15], rtol=1e-2, atol=1e-6)


@pytest.mark.parametrize("weights", FORMATS)
def test_the_kernel_for_so_many_rows(weights):
    experts = one_expert("auto", weights, 256)
    many, few = experts.kernels
    assert (experts.kernel_for(1), experts.kernel_for(4096)) == (few, many)
