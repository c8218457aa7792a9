"""Every operator that rules can name keeps the contract of `operators/base.py`, on one small case each.

What an operator computes in all its formats, sizes and modes is in its own tests; what all of them promise is here.
"""

from __future__ import annotations

import copy
import pickle
import re
from typing import Any

import pytest
import reference
import torch
from conformance_cases import (
    BUILT,
    CASES,
    FILLED,
    NAMES,
    NEVER_BUILT,
    built,
    call,
    config_of,
    cuda_or_skip,
    filled,
    machine,
    on,
    taken,
)
from torch import Tensor, nn

from ktinject.errors import OperatorError
from ktinject.operators import REGISTRY, Operator


def test_every_registered_operator_has_a_case() -> None:
    assert set(NAMES) == {*CASES, *NEVER_BUILT}
    assert all(REGISTRY[name].name == name for name in NAMES)


def refused(name: str, call: Any, *arguments: Any) -> str:
    """The message of the OperatorError, which names the operator."""
    with pytest.raises(OperatorError) as caught:
        call(*arguments)
    message = str(caught.value)
    spoken = {name, CASES[name].delegate}
    assert any(re.search(rf"\b{one}\b", message) for one in spoken if one), message
    return message


class Foreign(nn.Module):
    """Nothing that an operator serves."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(3, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x


# --- what the plan asks, without a weight and without a GPU ---


@pytest.mark.parametrize("name", BUILT)
def test_what_it_does_not_serve_it_refuses_in_a_sentence(name: str) -> None:
    operator, config = config_of(name, CASES[name].make())
    reason = operator.supports(Foreign(), config, machine())
    assert isinstance(reason, str) and reason and "\n" not in reason and not reason.endswith(".")


@pytest.mark.parametrize("name", BUILT)
def test_building_changes_nothing_and_meta_is_enough(name: str) -> None:
    module = CASES[name].make()
    before, classes = module.state_dict(keep_vars=True), [type(part) for part in module.modules()]
    values = {key: tensor.clone() for key, tensor in before.items()}
    operator = built(name, module)
    after = module.state_dict(keep_vars=True)
    assert [*after] == [*before] and [type(part) for part in module.modules()] == classes
    assert all(after[key] is before[key] and torch.equal(after[key], values[key]) for key in before)

    empty = built(name, copy.deepcopy(module).to("meta"))
    assert empty.describe() == operator.describe() and empty.footprint() == operator.footprint()
    assert empty.parameter_shapes() == operator.parameter_shapes()


@pytest.mark.parametrize("name", BUILT)
def test_the_plan_learns_what_runs_and_what_it_takes(name: str) -> None:
    module = CASES[name].make()
    operator = built(name, module)
    said = operator.describe()
    assert {"weights", "kernel"} <= set(said) and all(said.values())
    of_module = {key: tuple(parameter.shape) for key, parameter in module.named_parameters()}
    shapes = operator.parameter_shapes()
    assert shapes == {key: of_module[key] for key in shapes}
    sizes = operator.footprint()
    assert set(sizes) <= {CASES[name].device} and bool(shapes) == bool(sum(sizes.values()))
    weights = sum(taken(operator, module)[key].numel() for key in shapes)
    assert weights / 2 <= sum(sizes.values(), 0) or not shapes
    for (device, _), (least, wanted) in operator.workspace().items():
        assert device == CASES[name].device and 0 <= least <= wanted


@pytest.mark.parametrize("name", BUILT)
def test_it_holds_no_tensor_but_those_it_keeps(name: str) -> None:
    """What transformers loads and saves: the module's state without what `load` takes, under the same names."""
    module = CASES[name].make()
    operator = built(name, module)
    kept = {
        key: value for key, value in module.state_dict().items() if key not in operator.parameter_shapes()
    }
    found = operator.state_dict()
    assert set(found) == set(kept)
    assert all(found[key].data_ptr() == kept[key].data_ptr() for key in kept)
    mine = [*dict(operator.named_parameters(recurse=False)), *dict(operator.named_buffers(recurse=False))]
    theirs = [*dict(module.named_parameters(recurse=False)), *dict(module.named_buffers(recurse=False))]
    assert set(mine) <= set(theirs) - set(operator.parameter_shapes())
    assert getattr(operator, "_is_hf_initialized", False)


@pytest.mark.parametrize("name", BUILT)
def test_copies_are_refused_with_the_way_out(name: str) -> None:
    operator = built(name, CASES[name].make())
    assert "ktinject.optimize" in refused(name, copy.deepcopy, operator)
    assert "ktinject.load" in refused(name, pickle.dumps, operator)


@pytest.mark.parametrize("name", BUILT)
def test_a_piece_that_does_not_fit_is_refused(name: str) -> None:
    module = CASES[name].make()
    operator = built(name, module)
    refused(name, operator.load, "no_such_parameter", torch.zeros(3, 4), None, None)
    if not operator.parameter_shapes():
        return
    cuda_or_skip(name)
    if not CASES[name].on_gpu:
        operator.allocate()
    for key, tensor in taken(operator, module).items():
        refused(name, operator.load, key, tensor[..., :-1], None, None)
        refused(name, operator.load, key, tensor.to(torch.int8), None, None)
        assert operator.parameter_shapes()[key] == tuple(tensor.shape)


# --- filled ---


@pytest.mark.parametrize("name", FILLED)
def test_nothing_goes_before_its_turn(name: str) -> None:
    cuda_or_skip(name)
    module = CASES[name].make()
    operator = built(name, module)
    weights = taken(operator, module)
    if not weights:
        operator.allocate()
        operator.finish()
        return
    assert "never loaded" in refused(name, operator.finish)
    if not CASES[name].on_gpu:
        refused(name, operator.load, *next(iter(weights.items())), None, None)
    operator.allocate()
    *others, last = weights
    for key in others:
        operator.load(key, weights[key], None, None)
        assert "never loaded" in refused(name, operator.finish)
    assert last.split(".")[-1].split("_")[0] in refused(name, operator.finish)
    operator.load(last, weights[last], None, None)
    operator.finish()


@pytest.mark.parametrize("name", FILLED)
def test_weights_come_in_any_order_and_back(name: str) -> None:
    cuda_or_skip(name)
    module = CASES[name].make()
    first, second = filled(name, module), built(name, module)
    weights = taken(first, module)
    second.allocate()
    for key in reversed(weights):
        if second.per_expert:
            for expert in reversed(range(len(weights[key]))):
                second.load(key, weights[key][expert].clone(), expert, None)
        else:
            second.load(key, weights[key].clone(), None, None)
    second.finish()
    arguments = on(CASES[name].device, CASES[name].inputs(5))
    for a, b in zip(call(first, arguments), call(second, arguments), strict=True):
        assert torch.equal(a, b)
    for key, weight in weights.items():
        found = first.unpack(key)
        assert found.dtype == torch.float32 and found.shape == weight.shape
        assert torch.equal(found, second.unpack(key))
        # Eight bits of mantissa, or a step of int4 in a group of 64.
        assert reference.relative_error(found.cpu(), weight) <= (0.15 if CASES[name].on_gpu else 4e-3)
        if first.per_expert:
            assert torch.equal(first.unpack(key, 1), found[1])
    if weights:
        refused(name, first.unpack, "no_such_parameter")


@pytest.mark.parametrize("name", FILLED)
def test_lossless_means_bit_by_bit(name: str) -> None:
    cuda_or_skip(name)
    exact = CASES[name].make().bfloat16()
    operator = filled(name, exact)
    assert operator.is_lossless() is not CASES[name].on_gpu
    if operator.is_lossless():
        for key, weight in taken(operator, exact).items():
            assert torch.equal(operator.unpack(key).to(weight.dtype), weight)


def unpacked_module(operator: Operator, module: nn.Module) -> nn.Module:
    """The module with the weights that the operator has made of its own."""
    other = copy.deepcopy(module)
    with torch.no_grad():
        for key in operator.parameter_shapes():
            other.get_parameter(key).copy_(operator.unpack(key))
    return other


@pytest.mark.parametrize("name", FILLED)
@pytest.mark.parametrize("tokens", [0, 1, 9])
def test_forward_is_the_module_s(name: str, tokens: int) -> None:
    """Values, shapes, dtype and device, and inputs that stay as they were."""
    cuda_or_skip(name)
    case = CASES[name]
    module = case.make()
    operator = filled(name, module).to(case.device)
    other = (unpacked_module(operator, module) if case.on_gpu else module).to(case.device)
    if tokens == 0 and name == "absorbed_mla":
        return  # the attention that it replaces cannot either
    arguments = on(case.device, case.inputs(tokens))
    before = copy.deepcopy(arguments)
    want, found = call(other, arguments), call(operator, arguments)
    assert len(found) == len(want) > 0
    for a, b in zip(found, want):
        assert a.shape == b.shape and a.dtype == b.dtype and a.device == b.device
        assert reference.relative_error(a, b) <= case.tolerance
    for key, value in before.items():
        assert not isinstance(value, Tensor) or torch.equal(value, arguments[key])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "name", [name for name in BUILT if not (CASES[name].kept_first or CASES[name].on_gpu)]
)
def test_an_output_has_the_dtype_of_its_input(name: str, dtype: torch.dtype) -> None:
    operator = filled(name, CASES[name].make())
    arguments = CASES[name].inputs(5)
    first = next(iter(arguments))
    (want,) = call(operator, arguments)
    (found,) = call(operator, arguments | {first: arguments[first].to(dtype)})
    assert found.dtype == dtype and reference.relative_error(found, want) <= 1e-2


@pytest.mark.parametrize("name", FILLED)
def test_strides_do_not_matter(name: str) -> None:
    cuda_or_skip(name)
    case = CASES[name]
    operator = filled(name, case.make()).to(case.device)
    arguments = on(case.device, case.inputs(6))
    first = next(iter(arguments))
    x = arguments[first]
    wide = torch.full((*x.shape[:-1], 3 * x.shape[-1]), float("nan"), dtype=x.dtype, device=x.device)
    wide[..., 1::3] = x
    across = [x.T.contiguous().T] if x.dim() == 2 else []  # modules that flatten two dimensions refuse it
    for strided in (wide[..., 1::3], *across):
        assert not strided.is_contiguous()
        for a, b in zip(call(operator, arguments | {first: strided}), call(operator, arguments), strict=True):
            # Where the module's own children multiply, sums may take another order.
            assert reference.relative_error(a, b) <= (0.0 if operator.parameter_shapes() else 1e-6)


@pytest.mark.parametrize("name", FILLED)
def test_another_width_is_refused(name: str) -> None:
    """By the operator, or by what it keeps of the module where that comes first."""
    cuda_or_skip(name)
    case = CASES[name]
    operator = filled(name, case.make()).to(case.device)
    arguments = on(case.device, case.inputs(3))
    first = next(iter(arguments))
    wrong = arguments | {first: arguments[first][..., :-1]}
    before = call(operator, arguments)
    if case.kept_first:
        with pytest.raises((OperatorError, RuntimeError, ValueError)):
            call(operator, wrong)
    else:
        refused(name, call, operator, wrong)
    for a, b in zip(call(operator, arguments), before, strict=True):
        assert torch.equal(a, b), "a refused call leaves nothing behind"


@pytest.mark.parametrize("name", FILLED)
def test_gradients_reach_the_input(name: str) -> None:
    """Those of the module with the weights that the operator unpacks."""
    cuda_or_skip(name)
    case = CASES[name]
    module = case.make()
    operator = filled(name, module).to(case.device)
    arguments = on(case.device, case.inputs(4))
    first, *others = arguments
    found = []
    for one in (operator, unpacked_module(operator, module).to(case.device)):
        x = arguments[first].detach().clone().requires_grad_()
        out = one(x, **{key: arguments[key] for key in others})
        parts = [out] if isinstance(out, Tensor) else [part for part in out if isinstance(part, Tensor)]
        sum(part.float().sin().sum() for part in parts if part.requires_grad).backward()
        found.append(x.grad)
    assert found[0].dtype == found[1].dtype
    assert reference.relative_error(found[0], found[1]) <= max(2 * case.tolerance, 1e-2)
