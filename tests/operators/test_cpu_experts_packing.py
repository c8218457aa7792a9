"""How `cpu_experts` takes weights: piece by piece, from any dtype, onto the grids that its formats are said to have."""

from __future__ import annotations

import copy

import pytest
import reference
import torch
from expert_cases import (
    FORMATS,
    RUNS,
    build,
    family,
    filled,
    gaussian,
    inputs,
    ready,
)
from probe_cases import KINDS
from torch import Tensor

from ktinject.errors import OperatorError
from ktinject.operators.cpu_experts import CpuExperts, CpuExpertsConfig

# --- loading ---


# Where a piece goes, what it is packed to and what it is converted from are independent: any two meet, not all three.
SOURCES = [torch.float32, torch.bfloat16, torch.float16]
PIECES = [
    (family_name, name, SOURCES[(i + j) % len(SOURCES)])
    for i, family_name in enumerate(KINDS)
    for j, name in enumerate(FORMATS)
]


@pytest.mark.parametrize("family_name,name,source", PIECES)
def test_pieces_of_every_kind_pack_alike(family_name: str, name: str, source: torch.dtype) -> None:
    module = family(family_name)
    parameters = {key: value.to(source) for key, value in reference.parameters_of(module).items()}

    def load(operator: CpuExperts, form: str) -> CpuExperts:
        operator.allocate()
        for key, tensor in parameters.items():
            spec = operator.spec
            if form == "whole":
                operator.load(key, tensor, None, None)
                continue
            for e in reversed(range(spec.num_experts)):
                if form == "parts" and key.startswith("gate_up_proj") and spec.is_concatenated:
                    dimension = 1 if spec.is_transposed and not key.endswith("_bias") else 0
                    for part, half in enumerate(tensor[e].chunk(2, dimension)):
                        operator.load(key, half, e, part)
                else:
                    operator.load(key, tensor[e], e, None)
        operator.finish()
        return operator

    first, *others = [load(build(module, name), form) for form in ("whole", "experts", "parts")]
    for key in parameters:
        for other in others:
            assert torch.equal(first.unpack(key), other.unpack(key))
        if name == "bf16" or key.endswith("_bias"):
            rounded = parameters[key] if key.endswith("_bias") else parameters[key].bfloat16()
            assert torch.equal(first.unpack(key), rounded.float())


def test_nothing_of_the_source_is_kept() -> None:
    module = family("qwen3_moe")
    operator = build(module)
    operator.allocate()
    for key, tensor in reference.parameters_of(module).items():
        piece = tensor.clone()
        operator.load(key, piece, None, None)
        piece.fill_(float("nan"))
    operator.finish()
    arguments = inputs(operator.spec, 3)
    assert torch.equal(operator(*arguments), ready("qwen3_moe", "bf16")(*arguments))


def test_nothing_runs_before_the_memory_is_there() -> None:
    operator = build(family("qwen3_moe"))
    with pytest.raises(OperatorError, match=r"down_proj: expert 0, down: allocate\(\) was not called"):
        operator.load("down_proj", torch.zeros(40, 24), 0, None)
    with pytest.raises(OperatorError, match=r"before allocate\(\)"):
        operator(*inputs(operator.spec, 3))
    with pytest.raises(OperatorError, match=r"expert 0, down: allocate\(\) was not called"):
        operator.unpack("down_proj", 0)
    with pytest.raises(OperatorError, match="never loaded: expert 0 gate, expert 0 up"):
        operator.finish()


@pytest.mark.parametrize("weights", ["int8", "fp8"])
def test_a_refused_write_leaves_the_experts_as_they_were(weights: str) -> None:
    operator = ready("qwen3_moe", weights)
    arguments = inputs(operator.spec, 7)
    want = operator(*arguments)
    for name in operator.parameter_shapes():
        kept = [operator.unpack(name, expert) for expert in range(operator.parameter_shapes()[name][0])]
        broken = torch.randn(kept[1].shape)
        broken[-1, 3] = float("nan")
        with pytest.raises(OperatorError, match=r"expert 1, .*holds a NaN"):
            operator.load(name, broken, 1, None)
        with pytest.raises(OperatorError, match=r"expert 1, .*holds a NaN"):
            operator.load(name, torch.stack([kept[0] + 1, broken, *kept[2:]]), None, None)
        assert all(torch.equal(operator.unpack(name, expert), old) for expert, old in enumerate(kept))
    operator.finish()
    assert torch.equal(operator(*arguments), want)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn])
def test_codes_are_not_taken_for_values(dtype: torch.dtype) -> None:
    operator = build(family("qwen3_moe"))
    operator.allocate()
    with pytest.raises(OperatorError, match=rf"down_proj: found dtype {dtype}; allowed: .*decoded first"):
        operator.load("down_proj", torch.zeros(40, 24).to(dtype), 0, None)


def test_a_call_of_the_wrong_shape_says_what_it_found() -> None:
    operator = build(family("qwen3_moe"))
    operator.allocate()
    x, index, weights = inputs(operator.spec, 3)
    for arguments in ((x[None], index, weights), (x, index[0], weights)):
        with pytest.raises(
            OperatorError, match=rf"expected \[m, {operator.spec.hidden_size}\], \[m, t\], \[m, t\]"
        ):
            operator(*arguments)
    for wrong in (index.float(), index.bool()):
        with pytest.raises(
            OperatorError, match=r"top_k_index: found torch\.(float32|bool); allowed: integers"
        ):
            operator(x, wrong, weights)
    with pytest.raises(OperatorError, match="found parameter w1; allowed: gate_up_proj, down_proj"):
        operator.unpack("w1")


def test_biases_are_not_taken_as_codes() -> None:
    """Whatever they are called: by their shape."""
    operator = build(family("gpt_oss"))
    found = {name: operator.takes_codes(name) for name in operator.parameter_shapes()}
    assert found == {
        "gate_up_proj": True,
        "gate_up_proj_bias": False,
        "down_proj": True,
        "down_proj_bias": False,
    }
    assert not operator.takes_codes("w1")


def test_what_was_not_loaded_is_named() -> None:
    operator = build(family("gpt_oss"))
    operator.allocate()
    parameters = reference.parameters_of(family("gpt_oss"))
    for key in ("gate_up_proj", "gate_up_proj_bias", "down_proj"):
        operator.load(key, parameters[key], None, None)
    for e in (0, 1, 2, 4, 5):
        operator.load("down_proj_bias", parameters["down_proj_bias"][e], e, None)
    with pytest.raises(OperatorError, match=r"expert 3 down bias\.?$"):
        operator.finish()
    operator.load("down_proj_bias", parameters["down_proj_bias"][3], 3, None)
    operator.finish()


@pytest.mark.parametrize("name", ["int8", "int4_g32", "int4_g32_zero", "fp8", "mxfp4", "mxfp8"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_without_a_scale_are_refused(name: str, value: float) -> None:
    operator = build(family("qwen3_moe"), name)
    operator.allocate()
    tensor = reference.parameters_of(family("qwen3_moe"))["down_proj"].clone()
    tensor[2, 7, 5] = value
    with pytest.raises(OperatorError, match=r"(?s)down_proj.*expert 2.*row 7"):
        operator.load("down_proj", tensor, None, None)


def test_wrong_pieces_are_refused() -> None:
    operator = build(family("qwen3_moe"))
    operator.allocate()
    with pytest.raises(OperatorError, match=r"expected shape \[40, 24\], found \[24, 40\]"):
        operator.load("down_proj", torch.zeros(24, 40), 0, None)
    with pytest.raises(OperatorError, match="no such parameter"):
        operator.load("w1", torch.zeros(24, 40), 0, None)


# --- quantised weights are what they are said to be ---


@pytest.mark.parametrize("kernel", [kernel for name, kernel in RUNS if name == "int8"])
def test_int8_is_symmetric_per_output_row(kernel: str) -> None:
    module = gaussian(160, 96)
    operator = filled(module, "int8", kernel)
    for name, parameter in reference.parameters_of(module).items():
        found = operator.unpack(name)
        q, scale = reference.quantise_int8_rows(parameter)
        steps = found / scale
        torch.testing.assert_close(steps, steps.round(), rtol=0, atol=1e-4)
        # x * (1 / scale) and x / scale may fall on different sides of a tie.
        assert (steps.round() - q).abs().max() <= 1
        assert (steps.round() != q).float().mean() < 1e-4
        assert ((found - parameter).abs() <= scale * (0.5 + 1e-5)).all()


@pytest.mark.parametrize(
    "name,kernel", [run for run in RUNS if run[0].startswith("int4_g") and "zero" not in run[0]]
)
def test_int4_has_one_bf16_scale_for_a_group(name: str, kernel: str) -> None:
    module = gaussian(160, 96)  # 160 and 96 end in the middle of a group of 64 or 128
    operator = filled(module, name, kernel)
    group_size = FORMATS[name]["group_size"]
    for parameter_name, parameter in reference.parameters_of(module).items():
        for w, found in zip(
            parameter.flatten(0, 1).split(500), operator.unpack(parameter_name).flatten(0, 1).split(500)
        ):
            q, scale = reference.quantise_int4_groups(w, group_size)
            plain = reference.dequantise_groups(q, scale, group_size)
            for start in range(0, w.shape[1], group_size):
                group = found[:, start : start + group_size]
                assert_on_a_grid(group)
                error = (group - w[:, start : start + group_size]).square().sum(-1)
                plain_error = (plain - w)[:, start : start + group_size].square().sum(-1)
                assert (error <= plain_error * 1.001 + 1e-12).float().mean() > 0.99


def assert_on_a_grid(group: Tensor) -> None:
    """Each row is a bf16 scale times integers from -8 to 7."""
    most = group.abs().amax(-1, keepdim=True)
    fits = most[:, 0] == 0
    for steps in range(1, 9):
        for sign in (1, -1):
            scale = sign * most / steps
            q = group / scale
            is_bf16 = (scale.bfloat16().float() == scale)[:, 0]
            fits |= is_bf16 & (q == q.round()).all(-1) & (q >= -8).all(-1) & (q <= 7).all(-1)
    assert fits.all()


@pytest.mark.parametrize("group_size", [32, 128])
def test_int4_with_zero_points_follows_weights_that_are_all_of_one_sign(group_size: int) -> None:
    """Symmetric codes lose a bit on these; a zero point has to win it back."""
    module = copy.deepcopy(gaussian(160, 96))
    with torch.no_grad():
        module.gate_up_proj.abs_()
        module.down_proj.abs_().neg_()
    errors = {}
    for symmetric in (True, False):
        config = CpuExpertsConfig(device="cpu", weights="int4", group_size=group_size, symmetric=symmetric)
        operator = CpuExperts.build(module, config)
        operator.allocate()
        for name, parameter in reference.parameters_of(module).items():
            operator.load(name, parameter, None, None)
        operator.finish()
        assert ("with zero points" in operator.describe()["weights"]) is not symmetric
        errors[symmetric] = [
            reference.relative_error(operator.unpack(name), parameter)
            for name, parameter in reference.parameters_of(module).items()
        ]
    assert all(zero < 0.6 * plain for zero, plain in zip(errors[False], errors[True]))


def test_int4_with_zero_points_is_no_worse_than_from_least_to_greatest() -> None:
    module = gaussian(160, 96)
    operator = filled(module, "int4_g32_zero")
    for name, parameter in reference.parameters_of(module).items():
        w = parameter.unflatten(-1, (-1, 32))
        low, high = w.amin(-1, keepdim=True).clamp(max=0), w.amax(-1, keepdim=True).clamp(min=0)
        scale = ((high - low) / 15).bfloat16().float()
        zero = (-low / scale).round()
        plain = (((w / scale).round() + zero).clamp(0, 15) - zero) * scale
        found = operator.unpack(name).unflatten(-1, (-1, 32))
        # Steps of 16 values at the most: one bf16 scale, whole numbers of it.
        assert max(len(group.unique()) for group in found.flatten(0, -2)[:200]) <= 16
        assert ((found - w).square().sum(-1) <= (plain - w).square().sum(-1) * 1.001).float().mean() > 0.98


def test_zero_points_are_for_int4_alone() -> None:
    for weights in ("bf16", "int8", "fp8", "mxfp4", "mxfp8"):
        with pytest.raises(OperatorError, match="symmetric: found false; only int4 weights have zero points"):
            CpuExperts.build(
                family("qwen3_moe"), CpuExpertsConfig(device="cpu", weights=weights, symmetric=False)
            )


def test_fp8_is_rounded_to_nearest_with_a_scale_for_128_by_128() -> None:
    module = gaussian(300, 200)
    operator = filled(module, "fp8")
    for name in ("gate_up_proj", "down_proj"):
        w, found = reference.parameters_of(module)[name], operator.unpack(name)
        halves = zip(w.chunk(2, 1), found.chunk(2, 1)) if name == "gate_up_proj" else [(w, found)]
        for projection, got in halves:
            for n in range(0, projection.shape[1], 128):
                for k in range(0, projection.shape[2], 128):
                    block = projection[:, n : n + 128, k : k + 128]
                    scale = block.abs().amax((1, 2), keepdim=True) / 448
                    codes = (block * (1 / scale)).to(torch.float8_e4m3fn)
                    assert torch.equal(got[:, n : n + 128, k : k + 128], codes.float() * scale)


def test_mxfp4_is_rounded_to_nearest_with_the_better_power_of_two() -> None:
    module = gaussian(160, 96)
    operator = filled(module, "mxfp4")
    grid = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    for name, parameter in reference.parameters_of(module).items():
        w = parameter.unflatten(-1, (-1, 32))
        first = torch.exp2(torch.floor(torch.log2(w.abs().amax(-1, keepdim=True))) - 2)
        best = None
        for scale in (first, 2 * first):
            nearest = grid[((w.abs() / scale)[..., None] - grid).abs().argmin(-1)] * scale * w.sign()
            error = (nearest - w).square().sum(-1)
            best = error if best is None else torch.minimum(best, error)
        found = operator.unpack(name).unflatten(-1, (-1, 32))
        torch.testing.assert_close((found - w).square().sum(-1), best, rtol=1e-4, atol=1e-9)


def test_mxfp8_is_rounded_to_nearest_with_the_least_power_of_two() -> None:
    module = gaussian(160, 96)
    operator = filled(module, "mxfp8")
    for name, parameter in reference.parameters_of(module).items():
        w = parameter.unflatten(-1, (-1, 32))
        scale = torch.exp2(torch.ceil(torch.log2(w.abs().amax(-1, keepdim=True) / 448)))
        want = (w / scale).to(torch.float8_e4m3fn).float() * scale
        found = operator.unpack(name)
        assert torch.equal(found.unflatten(-1, (-1, 32)), want)
        again = CpuExperts.build(module, operator.config)
        again.allocate()
        again.load(name, found, None, None)
        assert torch.equal(again.unpack(name), found), "values of the format come back"


def test_a_row_of_zeros_stays_zero() -> None:
    module = copy.deepcopy(gaussian(40, 24))
    with torch.no_grad():
        module.down_proj[1] = 0
        module.gate_up_proj[0, 3] = 0
    for name in FORMATS:
        operator = filled(module, name)
        assert not operator.unpack("down_proj", 1).any() and not operator.unpack("gate_up_proj", 0)[3].any()
        x, index, weights = inputs(operator.spec, 3, top_k=1)
        index[:] = 1
        assert not operator(x, index, weights).any()
