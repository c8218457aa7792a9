"""What every operator promises the engine (operators/base.py), as checks of one small case.

A check raises AssertionError with a sentence. `CHECKS` are those that ask what a plan asks and compute nothing;
`COMPUTING` are those that fill the operator with weights and call it.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ktinject.errors import OperatorError
from ktinject.operators import REGISTRY, Operator
from ktinject.testing.case import (
    Case,
    Inputs,
    call,
    machine,
    must,
    outputs,
    relative_error,
    taken,
    unpacked,
)

_TOKENS = (0, 1, 9)


def check_operator(
    operator: type[Operator],
    make: Callable[[], nn.Module],
    inputs: Callable[[int], Inputs],
    *,
    arguments: Mapping[str, Any] | None = None,
    device: str = "cpu",
    **expected: Any,
) -> None:
    """Check that an operator keeps its contract with the engine, on one module. Needs no test framework.

    operator   a class that `register_operator` has registered
    make       makes a module that it replaces, with weights
    inputs     the number of tokens → what the module's forward takes, by name; the first is the hidden states
    arguments  of a rule
    device     where the operator computes
    expected   `tolerance` and others of `Case`
    Raises     AssertionError that names every check that failed
    """
    must(
        getattr(operator, "name", None) in REGISTRY and REGISTRY[operator.name] is operator,
        f"{operator.__qualname__} is not registered. Write @register_operator above the class.",
    )
    case = Case(operator, make, inputs, arguments or {}, device, **expected)
    failed = []
    for name, check in (CHECKS | COMPUTING).items():
        try:
            check(case)
        except AssertionError as error:
            failed.append(f"{name}: {error}")
        except Exception as error:
            failed.append(f"{name}: {type(error).__name__}: {error}")
    must(not failed, f"{operator.name} does not keep the contract of an operator:\n  " + "\n  ".join(failed))


class _Foreign(nn.Module):
    """Nothing that an operator serves."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(3, 4, dtype=torch.float32, device="cpu"))

    def forward(self, x: Tensor) -> Tensor:
        return x


def refuses_in_a_sentence(case: Case) -> None:
    """What it does not serve it refuses in a sentence."""
    operator, config = case.config(case.make())
    reason = operator.supports(_Foreign(), config, machine())
    must(reason is not None, "supports takes a module that has nothing to do with it, and names no reason")
    must(
        isinstance(reason, str) and reason and "\n" not in reason and not reason.endswith("."),
        f"supports answers {reason!r}; it answers None, or one sentence without its full stop",
    )


def building_changes_nothing(case: Case) -> None:
    """Building leaves the module as it is, and a module on meta is enough."""
    module = case.make()
    before, classes = module.state_dict(keep_vars=True), [type(part) for part in module.modules()]
    values = {key: tensor.clone() for key, tensor in before.items()}
    operator = case.built(module)
    after = module.state_dict(keep_vars=True)
    must(
        [*after] == [*before] and [type(part) for part in module.modules()] == classes,
        "build adds to the module that it replaces, or takes from it",
    )
    must(
        all(after[key] is before[key] and torch.equal(after[key], values[key]) for key in before),
        "build changes a weight of the module that it replaces",
    )
    empty = case.built(copy.deepcopy(module).to("meta"))
    for what in ("describe", "footprint", "parameter_shapes"):
        here, there = getattr(operator, what)(), getattr(empty, what)()
        must(here == there, f"{what}() is {there} for a module on meta and {here} for one with weights")


def tells_the_plan(case: Case) -> None:
    """The plan learns what runs and what it takes."""
    module = case.make()
    operator = case.built(module)
    said = operator.describe()
    complete = {"weights", "kernel"} <= {*said} and all(said.values())
    must(complete, f"describe() is {said}; it has a kernel and weights, and nothing empty")
    of_module = {key: tuple(parameter.shape) for key, parameter in module.named_parameters()}
    shapes = operator.parameter_shapes()
    wrong = {key: shape for key, shape in shapes.items() if of_module.get(key) != tuple(shape)}
    must(not wrong, f"parameter_shapes() has {wrong}; the module has {of_module}")
    sizes = operator.footprint()
    must({*sizes} <= {case.device}, f"footprint() names {', '.join(sizes)}; the operator is on {case.device}")
    must(
        bool(shapes) == bool(sum(sizes.values())),
        f"footprint() is {sizes} bytes, and it takes {len(shapes)} parameters",
    )
    values = sum(taken(operator, module)[key].numel() for key in shapes)
    must(
        not shapes or values / 2 <= sum(sizes.values()),
        f"footprint() is {sizes} bytes for {values} values: less than 4 bits each",
    )
    for (device, what), (least, wanted) in operator.workspace().items():
        must(
            device == case.device and 0 <= least <= wanted,
            f"workspace() wants {least} to {wanted} bytes of {device} for {what}",
        )


def holds_what_it_keeps(case: Case) -> None:
    """Its state is the module's without what `load` takes, under the same names: transformers loads and saves it."""
    module = case.make()
    operator = case.built(module)
    shapes = operator.parameter_shapes()
    kept = {key: value for key, value in module.state_dict().items() if key not in shapes}
    found = operator.state_dict()
    must(
        {*found} == {*kept},
        f"its state_dict() has {', '.join(found) or 'nothing'}; of the module it leaves {', '.join(kept) or 'nothing'} "
        "to transformers",
    )
    copied = ", ".join(key for key in kept if not found[key].is_set_to(kept[key]))
    must(not copied, f"it holds copies of {copied}; keep the module's own parameters")
    mine = [*dict(operator.named_parameters(recurse=False)), *dict(operator.named_buffers(recurse=False))]
    theirs = [*dict(module.named_parameters(recurse=False)), *dict(module.named_buffers(recurse=False))]
    own = {*mine} - {*theirs} | {*mine} & {*shapes}
    must(not own, f"it holds parameters or buffers of its own: {', '.join(sorted(own))}")
    must(
        getattr(operator, "_is_hf_initialized", False), "transformers would initialise it: _is_hf_initialized"
    )


def refuses_copies(case: Case) -> None:
    """Copies are refused, with the way out."""
    operator = case.built(case.make())
    for what, copying in (("copy.deepcopy", copy.deepcopy), ("pickle.dumps", pickle.dumps)):
        message = case.refused(what, copying, operator)
        must("ktinject." in message, f"{what}: the message does not say what to do: {message!r}")


def refuses_misfits(case: Case) -> None:
    """A piece that does not fit is refused."""
    module = case.make()
    operator = case.built(module)
    case.refused(
        "load of an unknown parameter",
        operator.load,
        "no_such_parameter",
        torch.zeros(3, 4, dtype=torch.float32, device="cpu"),
        None,
        None,
    )
    if not operator.parameter_shapes():
        return
    if case.device == "cpu":
        operator.allocate()
    for key, tensor in taken(operator, module).items():
        case.refused(f"load of {key}, too narrow", operator.load, key, tensor[..., :-1], None, None)
        case.refused(f"load of {key} as int8", operator.load, key, tensor.to(torch.int8), None, None)
        must(
            operator.parameter_shapes()[key] == tuple(tensor.shape),
            f"parameter_shapes() has another shape for {key} after a refused load",
        )


def waits_for_all_pieces(case: Case) -> None:
    """Nothing goes before its turn: a load before `allocate`, a `finish` before the last load."""
    module = case.make()
    operator = case.built(module)
    weights = taken(operator, module)
    if not weights:
        operator.allocate()
        operator.finish()
        return
    checks = type(operator).finish is not Operator.finish
    if checks:
        said = case.refused("finish before any load", operator.finish)
        must("never loaded" in said, f"finish does not say what was never loaded: {said!r}")
    if case.device == "cpu" and type(operator).allocate is not Operator.allocate:
        case.refused("load before allocate", operator.load, *next(iter(weights.items())), None, None)
    operator.allocate()
    *others, last = weights
    for key in others:
        operator.load(key, weights[key], None, None)
        if checks:
            case.refused(f"finish without {last}", operator.finish)
    if checks:
        said = case.refused(f"finish without {last}", operator.finish)
        must(
            last.split(".")[-1].split("_")[0] in said, f"finish does not name what was never loaded: {said!r}"
        )
    operator.load(last, weights[last], None, None)
    operator.finish()


def loads_in_any_order(case: Case) -> None:
    """Weights come in any order, and back by `unpack`."""
    module = case.make()
    first, second = case.filled(module), case.built(module)
    weights = taken(first, module)
    second.allocate()
    for key in reversed(weights):
        if second.per_expert:
            for expert in reversed(range(len(weights[key]))):
                second.load(key, weights[key][expert].clone(), expert, None)
        else:
            second.load(key, weights[key].clone(), None, None)
    second.finish()
    arguments = case.arguments_of_call(5)
    for a, b in zip(call(first, arguments), call(second, arguments), strict=True):
        must(torch.equal(a, b), "the order in which weights are loaded changes the result")
    for key, weight in weights.items() if case.unpacks(first) else ():
        found = first.unpack(key)
        must(
            found.dtype == torch.float32 and found.shape == weight.shape,
            f"unpack({key!r}) gives {found.dtype} {list(found.shape)}; it gives fp32 {list(weight.shape)}",
        )
        must(torch.equal(found, second.unpack(key)), f"unpack({key!r}) depends on the order of loading")
        error = relative_error(found.cpu(), weight)
        must(error <= case.weight_tolerance, f"unpack({key!r}) is off by {error:.2g}")
        if first.per_expert:
            must(torch.equal(first.unpack(key, 1), found[1]), f"unpack({key!r}, 1) is not expert 1")
    if weights:
        case.refused("unpack of an unknown parameter", first.unpack, "no_such_parameter")


def is_lossless_bit_by_bit(case: Case) -> None:
    """`is_lossless` means bit by bit."""
    exact = case.make().bfloat16()
    operator = case.filled(exact)
    must(
        case.lossless is None or operator.is_lossless() is case.lossless,
        f"is_lossless() is {operator.is_lossless()} for bf16 weights",
    )
    if operator.is_lossless():
        for key, weight in taken(operator, exact).items():
            same = torch.equal(operator.unpack(key).to(weight.dtype), weight)
            must(same, f"is_lossless() is True, and {key} is not what was loaded")


def computes_what_the_module_does(case: Case) -> None:
    """Values, shapes, dtype and device, and inputs that stay as they were."""
    for tokens in _TOKENS if case.takes_none else _TOKENS[1:]:
        module = case.make()
        operator = case.filled(module).to(case.device)
        other = case.reference(operator, module)
        arguments = case.arguments_of_call(tokens)
        before = copy.deepcopy(arguments)
        want, found = call(other, arguments), call(operator, arguments)
        must(
            len(found) == len(want) > 0,
            f"forward returns {len(found)} tensors; the module returns {len(want)}",
        )
        for a, b in zip(found, want):
            must(
                a.shape == b.shape and a.dtype == b.dtype and a.device == b.device,
                f"forward of {tokens} tokens returns {a.dtype} {list(a.shape)} on {a.device}; the module returns "
                f"{b.dtype} {list(b.shape)} on {b.device}",
            )
            error = relative_error(a, b)
            must(
                error <= case.tolerance,
                f"forward of {tokens} tokens is off by {error:.2g}; allowed is {case.tolerance:g}",
            )
        for key, value in before.items():
            same = not isinstance(value, Tensor) or torch.equal(value, arguments[key])
            must(same, f"forward changes its input {key}")


def keeps_the_dtype(case: Case) -> None:
    """An output has the dtype of its input, where no weight of the module itself has another."""
    operator = case.filled(case.make())
    if case.kept_first or case.device != "cpu" or not operator.parameter_shapes():
        return
    arguments = case.arguments_of_call(5)
    first = next(iter(arguments))
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        (want,) = call(operator, arguments)
        (found,) = call(operator, arguments | {first: arguments[first].to(dtype)})
        must(found.dtype == dtype, f"forward of {dtype} returns {found.dtype}")
        error = relative_error(found, want)
        must(error <= 1e-2, f"forward of {dtype} is off by {error:.2g} from that of {arguments[first].dtype}")


def takes_any_strides(case: Case) -> None:
    """Inputs that are not contiguous give the same result."""
    operator = case.filled(case.make()).to(case.device)
    arguments = case.arguments_of_call(6)
    first = next(iter(arguments))
    x = arguments[first]
    wide = torch.full((*x.shape[:-1], 3 * x.shape[-1]), float("nan"), dtype=x.dtype, device=x.device)
    wide[..., 1::3] = x
    across = [x.T.contiguous().T] if x.dim() == 2 else []  # modules that flatten two dimensions refuse it
    # Where the module's own children multiply, sums may take another order.
    allowed = 0.0 if operator.parameter_shapes() else 1e-6
    for strided in (wide[..., 1::3], *across):
        for a, b in zip(call(operator, arguments | {first: strided}), call(operator, arguments), strict=True):
            must(
                relative_error(a, b) <= allowed, f"forward of strides {strided.stride()} gives another result"
            )


def refuses_another_width(case: Case) -> None:
    """Another width is refused: by the operator, or by what it keeps of the module where that comes first."""
    module = case.make()
    operator = case.filled(module).to(case.device)
    arguments = case.arguments_of_call(3)
    first = next(iter(arguments))
    wrong = arguments | {first: arguments[first][..., :-1]}
    before = call(operator, arguments)
    if case.kept_first or not operator.parameter_shapes():
        must(
            not _computes(operator, wrong) or _computes(module.to(case.device), wrong),
            "hidden states of another width are computed; the module refuses them",
        )
    else:
        case.refused("forward of another width", call, operator, wrong)
    for a, b in zip(call(operator, arguments), before, strict=True):
        must(torch.equal(a, b), "a refused call changes what later calls compute")


def _computes(module: nn.Module, arguments: Inputs) -> bool:
    try:
        call(module, arguments)
    except (OperatorError, RuntimeError, ValueError):
        return False
    return True


def passes_gradients(case: Case) -> None:
    """Gradients reach the input: those of the module with the weights that the operator unpacks."""
    module = case.make()
    operator = case.filled(module).to(case.device)
    arguments = case.arguments_of_call(4)
    first, *others = arguments
    found = []
    other = unpacked(operator, module) if case.unpacks(operator) else module
    for one in (operator, other.to(case.device)):
        x = arguments[first].detach().clone().requires_grad_()
        parts = outputs(one(x, **{key: arguments[key] for key in others}))
        reached = [part.float().sin().sum() for part in parts if part.requires_grad]
        must(reached, "its outputs require no gradient where the input does")
        torch.stack(reached).sum().backward()
        if x.grad is None:
            raise AssertionError("no gradient reaches the input")
        found.append(x.grad)
    mine, theirs = found
    must(mine.dtype == theirs.dtype, f"the gradient is {mine.dtype}; the module's is {theirs.dtype}")
    error = relative_error(mine, theirs)
    must(error <= max(2 * case.tolerance, 1e-2), f"the gradient is off by {error:.2g}")


def answers_for_the_module(case: Case) -> None:
    """Each public attribute and weight of the module is read as it was there."""
    module = case.make()
    operator = case.filled(module)
    for key, value in _attributes(module).items():
        try:
            found = getattr(operator, key)
        except AttributeError:
            raise AssertionError(f"{key} of the module cannot be read") from None
        must(found is value or found == value, f"{key} is {found!r}; the module has {value!r}")
    for key, tensor in taken(operator, module).items():
        weight = operator.held_parameters()[key]
        must(
            weight.shape == tensor.shape and weight.dtype == tensor.dtype,
            f"{key} is read as {weight.dtype} {list(weight.shape)}; the module has {tensor.dtype} {list(tensor.shape)}",
        )
        if case.unpacks(operator):
            error = relative_error(weight.plain().float().cpu(), tensor.float())
            must(error <= max(case.weight_tolerance, 4e-3), f"{key} is read {error:.2g} off")


def follows_or_refuses_attributes(case: Case) -> None:
    """An attribute of the module that is set is followed, or refused by name with what to do."""
    for key, value in _attributes(case.make()).items():
        other = _another(value)
        if other is None:
            continue
        module = case.make()
        operator = case.filled(module).to(case.device)
        arguments = case.arguments_of_call(5)
        before = call(operator, arguments)
        try:
            setattr(operator, key, other)
        except OperatorError as refusal:
            must(
                case.name in str(refusal) or (case.delegate and case.delegate in str(refusal)),
                f"setting {key}: the message does not name the operator: {refusal}",
            )
            must(
                key in str(refusal) and "replace: keep" in str(refusal),
                f"setting {key}: the message does not say what is refused, and what to do: {refusal}",
            )
            must(getattr(operator, key) == value, f"setting {key} was refused, and it is another")
            for a, b in zip(call(operator, arguments), before, strict=True):
                must(torch.equal(a, b), f"setting {key} was refused, and changes what is computed")
            continue
        must(getattr(operator, key) == other, f"{key} was set to {other!r} and is {getattr(operator, key)!r}")
        setattr(module, key, other)
        if not _computes(module.to(case.device), arguments):
            continue
        for a, b in zip(
            call(operator, arguments), call(case.reference(operator, module), arguments), strict=True
        ):
            error = relative_error(a, b)
            must(
                error <= case.tolerance,
                f"{key} was set to {other!r} without a word, and what it computes is {error:.2g} off the module",
            )


def takes_edits_of_weights(case: Case) -> None:
    """A weight that is edited in place, after the swap, is edited; or it is refused by name."""
    module = case.make()
    operator = case.filled(module).to(case.device)
    for key in operator.held_parameters():
        before = operator.held_parameters()[key].plain().clone()
        try:
            operator.held_parameters()[key].mul_(0.5)
        except OperatorError as refusal:
            must(
                key.rpartition(".")[2] in str(refusal) and "replace: keep" in str(refusal),
                f"writing to {key}: the message does not say what is refused, and what to do: {refusal}",
            )
            continue
        found = operator.held_parameters()[key].plain()
        error = relative_error(found.float(), 0.5 * before.float())
        must(error <= max(case.weight_tolerance, 4e-3), f"{key} was halved, and is {error:.2g} off that")


def _attributes(module: nn.Module) -> dict[str, Any]:
    """Plain public attributes of a module. Its `config` is none: an operator's own arguments have that name."""
    return {
        key: value
        for key, value in vars(module).items()
        if not key.startswith("_") and key not in ("training", "config") and _another(value) is not None
    }


def _another(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return max(1, value - 1) if value > 1 else value + 1
    return 0.5 * value + 0.1 if isinstance(value, float) else None


def _by_name(*checks: Callable[[Case], None]) -> dict[str, Callable[[Case], None]]:
    return {check.__name__: check for check in checks}


CHECKS = _by_name(
    refuses_in_a_sentence,
    building_changes_nothing,
    tells_the_plan,
    holds_what_it_keeps,
    refuses_copies,
    refuses_misfits,
)
COMPUTING = _by_name(
    waits_for_all_pieces,
    loads_in_any_order,
    is_lossless_bit_by_bit,
    computes_what_the_module_does,
    keeps_the_dtype,
    takes_any_strides,
    refuses_another_width,
    passes_gradients,
    answers_for_the_module,
    follows_or_refuses_attributes,
    takes_edits_of_weights,
)
