"""What a module of routed experts computes, found out by running it.

transformers has over sixty expert classes with one signature, `experts(hidden, top_k_index, top_k_weights)`.
Their names and attributes say little about the arithmetic: clamps, offsets and slopes hide in `_apply_gate`,
in `act_fn` or in `forward` itself. So `probe` runs the module's own `forward` on a small twin of it,
reads the parameters of

    h = act(min(gate, gate_max)) * (clamp(up, -up_limit, up_limit) + up_offset)

off its answers, and then demands that the twin and the formula agree. A module that computes anything else is
refused, with the difference; nothing is concluded from a class name.

Some take nothing but rows: those of each expert together, all equally many, multiplied with their routing weights
before (Llama 4). They are the same experts, of one row each and weight 1.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from math import inf, isfinite, log

import torch
from torch import Tensor, nn
from torch.nn import functional

from ktinject.errors import OperatorError, few
from ktinject.operators.probes import twin
from ktinject.operators.probes.answer import answered_once, refusal_of
from ktinject.operators.probes.comparison import Tolerance, difference
from ktinject.support import Support

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2", "identity")

Gate = Callable[[Tensor, Tensor], Tensor]  # gate, up [m, n] -> intermediate [m, n]

# Far above any clamp limit, and a power of two: exact in fp32, to which some modules drop inside.
_BIG = 2.0**20

_TOLERANCE = Tolerance(
    1e-5,
    "experts that compute in fp32 inside (beam, openai_privacy_filter) differ from the fp64 formula by under 2e-6; the "
    "closest pair of different activations, gelu and gelu_tanh, differs by 4e-4",
)


@dataclass(frozen=True)
class ExpertsSpec:
    """The shape and the arithmetic of one module of routed experts.

    hidden_size is the module's input and output width, which need not be the model's: the experts of nemotron_h
    may work on a narrower latent. Without a gate there are only up and down, and h = act(up).
    """

    num_experts: int
    hidden_size: int
    intermediate_size: int
    has_gate: bool  # gate_up_proj and down_proj; otherwise up_proj and down_proj
    has_bias: bool
    is_transposed: bool  # parameters are [experts, inputs, outputs]; otherwise [experts, outputs, inputs]
    is_concatenated: bool  # gate above up; otherwise gate and up take turns
    activation: str  # one of ACTIVATIONS
    alpha: float  # silu: x * sigmoid(alpha * x)
    gate_max: float  # inf: no clamp
    up_limit: float  # inf: no clamp
    up_offset: float  # added to up after the clamp
    takes_rows: bool = (
        False  # its forward takes (rows) [experts · m, hidden], the rows of each expert together
    )


@answered_once
def probe(module: nn.Module) -> ExpertsSpec | Support:
    """What an experts module computes, which may be on the meta device."""
    layout = _layout(module)
    if isinstance(layout, Support):
        return layout
    try:
        with twin.on_cpu():
            return _arithmetic(module, layout)
    except Exception as error:  # the module's own code runs here, so anything may come out of it
        return refusal_of(error, "its forward fails on a small copy of itself")


def of_gate(module: nn.Module, gate: Gate) -> ExpertsSpec | Support:
    """What a module makes of gate and up. Only activation, alpha, gate_max, up_limit and up_offset of it count.

    gate    computes that of [m, n] each in fp64
    Raises  whatever it raises
    """
    blank = ExpertsSpec(1, 1, 3, True, False, False, True, "identity", 1.0, inf, inf, 0.0)
    spec = _fit(module, blank, gate)
    off = inf if spec is None else _gate_difference(spec, gate)
    return spec if spec is not None and _TOLERANCE.allows(off) else _other_gate(off)


def parameter_shapes(spec: ExpertsSpec) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the module's parameters."""
    e, h, i = spec.num_experts, spec.hidden_size, spec.intermediate_size
    up = "gate_up_proj" if spec.has_gate else "up_proj"
    n = 2 * i if spec.has_gate else i
    shapes: dict[str, tuple[int, ...]] = {
        up: (e, h, n) if spec.is_transposed else (e, n, h),
        "down_proj": (e, i, h) if spec.is_transposed else (e, h, i),
    }
    if spec.has_bias:
        shapes |= {f"{up}_bias": (e, n), "down_proj_bias": (e, h)}
    return shapes


def views(
    spec: ExpertsSpec, name: str, tensor: Tensor, expert: int | None, part: int | None
) -> list[tuple[str, int, Tensor]]:
    """Cut a piece of a checkpoint into projections, copying nothing.

    tensor   the whole parameter `name`; with `expert`, that expert's slice of it; with `part`, only the gate
             (0) or the up (1) outputs of either
    Returns  (projection, expert, view) triples: for gate, up and down a view [n outputs, k inputs] of any
             strides, for gate_bias, up_bias and down_bias a view [n outputs]
    Raises   OperatorError for a name, an expert or a part that the module has not, and for a wrong shape
    """
    shapes = parameter_shapes(spec)
    if name not in shapes:
        raise OperatorError(f"{name}: the experts have no such parameter; it has {', '.join(shapes)}.")
    shape = list(shapes[name])
    is_pair = name.startswith("gate_up_proj")
    is_bias = name.endswith("_bias")
    if part is not None:
        if not is_pair or part not in (0, 1):
            raise OperatorError(f"{name}: found part {part}; gate_up_proj alone has parts, 0 and 1.")
        if not spec.is_concatenated:
            raise OperatorError(
                f"{name}: found part {part}; gate and up take turns here, so it has no parts."
            )
        shape[2 if spec.is_transposed and not is_bias else 1] //= 2
    if expert is not None:
        if not 0 <= expert < spec.num_experts:
            raise OperatorError(f"{name}: found expert {expert}; there are 0 to {spec.num_experts - 1}.")
        del shape[0]
    if list(tensor.shape) != shape:
        of = "" if expert is None else f" of expert {expert}"
        raise OperatorError(f"{name}{of}: expected shape {shape}, found {list(tensor.shape)}.")

    stack = tensor if expert is None else tensor[None]
    if spec.is_transposed and not is_bias:
        stack = stack.mT
    if not is_pair:
        cuts = {"up" if name.startswith("up_proj") else "down": stack}
    elif part is not None:
        cuts = {("gate", "up")[part]: stack}
    elif spec.is_concatenated:
        i = spec.intermediate_size
        cuts = {"gate": stack[:, :i], "up": stack[:, i:]}
    else:
        cuts = {"gate": stack[:, ::2], "up": stack[:, 1::2]}
    suffix = "_bias" if is_bias else ""
    return [
        (projection + suffix, e, cut[row])
        for row, e in enumerate(range(spec.num_experts) if expert is None else [expert])
        for projection, cut in cuts.items()
    ]


def activate(spec: ExpertsSpec, gate: Tensor | None, up: Tensor) -> Tensor:
    """The intermediate [m, n] from the gate (None where there is none) and up projections [m, n]."""
    if gate is None:
        return _act(spec.activation, spec.alpha, up)
    up = up.clamp(-spec.up_limit, spec.up_limit) + spec.up_offset
    return _act(spec.activation, spec.alpha, gate.clamp(max=spec.gate_max)) * up


def _act(name: str, alpha: float, x: Tensor) -> Tensor:
    if name == "silu":
        return x * torch.sigmoid(alpha * x)
    if name == "gelu":
        return functional.gelu(x)
    if name == "gelu_tanh":
        return functional.gelu(x, approximate="tanh")
    if name == "relu":
        return functional.relu(x)
    if name == "relu2":
        return functional.relu(x).square()
    return x


def _layout(module: nn.Module) -> ExpertsSpec | Support:
    """The spec with its arithmetic still open, from the flags and the parameter shapes."""
    signature = inspect.signature(type(module).forward)
    takes_rows = len(signature.parameters) == 2 and "down_proj" in module._parameters
    try:
        signature.bind(module, None, *([] if takes_rows else [None, None]))
    except TypeError:
        taken = ", ".join([*signature.parameters][1:])
        return Support.no(
            f"its forward takes ({taken}), not (hidden_states, top_k_index, top_k_weights) or rows"
        )
    if getattr(module, "has_post_expert_norm", False):
        return Support.no("it normalises what each expert gives (has_post_expert_norm), which no kernel does")

    parameters = dict(module.named_parameters())
    has_gate = getattr(module, "has_gate", True)
    up_name = "gate_up_proj" if has_gate else "up_proj"
    for name in (up_name, "down_proj"):
        if name not in parameters or parameters[name].dim() != 3:
            found = ", ".join(f"{n} {list(p.shape)}" for n, p in [*parameters.items()][:4]) or "none"
            return Support.no(
                f"it has no parameter {name} of three dimensions, experts first; it has {found}"
            )
    up_shape, down_shape = parameters[up_name].shape, parameters["down_proj"].shape
    # Where a class does not say it, the shapes do: [e, h, 2 i] and [e, i, h], or [e, 2 i, h] and [e, h, i].
    is_transposed = bool(getattr(module, "is_transposed", takes_rows and up_shape[1] == down_shape[2]))
    down_k, down_n = (1, 2) if is_transposed else (2, 1)
    # Defaults are those of transformers' decorator; a class without it is served if the probe agrees.
    spec = ExpertsSpec(
        num_experts=down_shape[0],
        hidden_size=down_shape[down_n],
        intermediate_size=down_shape[down_k],
        has_gate=bool(has_gate),
        has_bias=bool(getattr(module, "has_bias", False)),
        is_transposed=is_transposed,
        is_concatenated=bool(getattr(module, "is_concatenated", True)),
        activation="identity",
        alpha=1.0,
        gate_max=inf,
        up_limit=inf,
        up_offset=0.0,
        takes_rows=takes_rows,
    )
    shapes = parameter_shapes(spec)
    for name, shape in shapes.items():
        if name not in parameters:
            return Support.no(f"it has no parameter {name}, which its flags promise")
        if tuple(parameters[name].shape) != shape:
            return Support.no(
                f"its {name} is {[*parameters[name].shape]}, but with down_proj {[*down_shape]} it should be {[*shape]}"
            )
        if not parameters[name].is_floating_point():
            return Support.no(
                f"its {name} is {parameters[name].dtype}: the module is quantised; inject into the plain model"
            )
    extra = [name for name in [*parameters, *dict(module.named_buffers())] if name not in shapes]
    if extra:
        return Support.no(f"it also holds {', '.join(few(extra))}, which no kernel applies")
    stated = getattr(module, "num_experts", spec.num_experts)
    if stated != spec.num_experts or 0 in up_shape or 0 in down_shape:
        return Support.no(f"it says it has {stated} experts, and {up_name} is {list(up_shape)}")
    return spec


def _arithmetic(module: nn.Module, layout: ExpertsSpec) -> ExpertsSpec | Support:
    """Fill in the activation, clamps and offset, or say why no choice of them is what the module computes."""
    small = dataclasses.replace(layout, num_experts=3, hidden_size=6, intermediate_size=3)
    gate = _gate_of(module, small)
    spec = _fit(module, small, gate)
    off = inf if spec is None else _gate_difference(spec, gate)
    if spec is None or not _TOLERANCE.allows(off):
        return _other_gate(off)
    apply_gate = getattr(module, "_apply_gate", None)
    if spec.has_gate and apply_gate is not None:
        # Eager forward may spell the gate out; transformers' other implementations call _apply_gate instead.
        off = _gate_difference(spec, lambda gate, up: apply_gate(_join(spec, gate, up)))
        if not _TOLERANCE.allows(off):
            return Support.no(f"its forward and its _apply_gate differ by {off:.1e}")
    off = _forward_difference(module, spec)
    if not _TOLERANCE.allows(off):
        return Support.no(f"its forward does more than route, project and gate: max difference {off:.1e}")
    return dataclasses.replace(
        spec,
        num_experts=layout.num_experts,
        hidden_size=layout.hidden_size,
        intermediate_size=layout.intermediate_size,
    )


def _other_gate(off: float) -> Support:
    return Support.no(
        "its gate is none of act(min(gate, a)) * (clamp(up, -b, b) + c), with act one of "
        f"{', '.join(ACTIVATIONS)}: max difference {off:.1e} from the closest"
    )


def _fit(module: nn.Module, spec: ExpertsSpec, gate_of: Gate) -> ExpertsSpec | None:
    """Solve the formula for its parameters at points chosen so that each shows alone; None if none can be."""
    stated = [value for value in vars(module).values() if isinstance(value, float)]

    def exact(value: float) -> float:
        # From a module in fp32 numbers come inexact: take a short one, or one that it states, if as close.
        close = (x for x in [round(value, 3), *stated] if abs(x - value) <= 1e-5 * max(1.0, abs(x)))
        return next(close, value)

    def at(gate: float, up: float) -> float:
        return gate_of(_row(gate), _row(up))[0, 0].item()

    if spec.has_gate:
        # A difference between two values of up removes the offset.
        def act(gate: float) -> float:
            return (at(gate, 0.25) - at(gate, 0.0)) / 0.25

        scale = act(1.0)
        if not (isfinite(scale) and scale != 0):
            return None
        offset = exact(at(1.0, 0.0) / scale)
        limit = at(1.0, _BIG) / scale - offset
        spec = dataclasses.replace(
            spec, up_offset=offset, up_limit=inf if limit >= 0.999 * _BIG else abs(exact(limit))
        )
    else:

        def act(gate: float) -> float:
            return at(0.0, gate)

    below_one = -act(-1.0)
    alpha = exact(log(1 / below_one - 1)) if 0 < below_one < 1 else 1.0
    points = [-3.0, -1.0, -0.5, 0.25, 0.5]
    found = torch.tensor([act(x) for x in points], dtype=torch.float64, device="cpu")
    inputs = torch.tensor(points, dtype=torch.float64, device="cpu")
    name = min(ACTIVATIONS, key=lambda n: (_act(n, alpha, inputs) - found).abs().max().item())
    if name != "silu":
        alpha = 1.0

    def ideal(x: float) -> float:
        return _act(name, alpha, _row(x))[0, 0].item()

    top = act(_BIG)
    if top >= 0.999 * ideal(_BIG):
        return dataclasses.replace(spec, activation=name, alpha=alpha)
    # Activations rise on positive inputs, so a clamp of the output (step3p7, relu6) is one of the input.
    low, high = 0.0, _BIG
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if ideal(middle) < top else (low, middle)
    return dataclasses.replace(spec, activation=name, alpha=alpha, gate_max=exact(high))


def _gate_difference(spec: ExpertsSpec, gate_of: Gate) -> float:
    """The greatest difference, relative above one, on a grid over ±20 and well beyond every limit."""
    limits = [x for x in (spec.gate_max, spec.up_limit) if x < inf]
    reach = max([20.0, *(2 * x for x in limits)])
    line = torch.cat(
        [
            torch.linspace(-20, 20, 56, dtype=torch.float32, device="cpu"),
            torch.linspace(-reach, reach, 43, dtype=torch.float32, device="cpu"),
        ]
    ).double()
    pairs = torch.meshgrid(line, line.flip(0), indexing="ij")
    gate, up = (x.reshape(-1, spec.intermediate_size) for x in pairs)
    want = activate(spec, gate if spec.has_gate else None, up)
    return difference(gate_of(gate, up), want)


def _forward_difference(module: nn.Module, spec: ExpertsSpec) -> float:
    """The same for the module's whole forward on random weights, biases, routing and routing weights."""
    random = torch.Generator("cpu").manual_seed(0)

    def gaussian(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random, dtype=torch.float64, device="cpu")

    parameters = {name: gaussian(*shape) for name, shape in parameter_shapes(spec).items()}
    x, weights = gaussian(7, spec.hidden_size), gaussian(7, 2)
    index = torch.tensor([[0, 1], [2, 1], [1, 0], [2, 0], [0, 2], [1, 2], [2, 1]], device="cpu")
    cut: dict[tuple[str, int], Tensor] = {}
    for name, tensor in parameters.items():
        cut |= {(projection, e): view for projection, e, view in views(spec, name, tensor, None, None)}

    def project(projection: str, e: int, row: Tensor) -> Tensor:
        return functional.linear(row, cut[projection, e], cut.get((f"{projection}_bias", e)))

    want = torch.zeros_like(x)
    for t in range(x.shape[0]):
        for slot, e in enumerate(index[t].tolist()):
            gate = project("gate", e, x[t]) if spec.has_gate else None
            h = activate(spec, gate, project("up", e, x[t]))
            want[t] += weights[t, slot] * project("down", e, h)
    return difference(_run(module, spec, parameters, x, index, weights), want)


def _gate_of(module: nn.Module, spec: ExpertsSpec) -> Gate:
    """The module's gate alone: identity matrices on both sides of it, one expert, weight one."""
    parameters = {}
    for name, (e, *shape) in parameter_shapes(spec).items():
        matrix = (
            torch.zeros(shape[0], dtype=torch.float32, device="cpu")
            if name.endswith("_bias")
            else torch.eye(*shape, dtype=torch.float32, device="cpu")
        )
        parameters[name] = matrix.double().expand(e, *shape).contiguous()

    def alone(gate: Tensor, up: Tensor) -> Tensor:
        x = _join(spec, gate, up) if spec.has_gate else functional.pad(up, (0, up.shape[1]))
        index = torch.zeros(x.shape[0], 1, dtype=torch.int64, device="cpu")
        weights = torch.ones(x.shape[0], 1, dtype=torch.float64, device="cpu")
        return _run(module, spec, parameters, x, index, weights)[:, : spec.intermediate_size]

    return alone


def _run(
    module: nn.Module,
    spec: ExpertsSpec,
    parameters: dict[str, Tensor],
    x: Tensor,
    index: Tensor,
    weights: Tensor,
) -> Tensor:
    """The module's own forward with other parameters."""
    sizes = {"num_experts": spec.num_experts}
    if not spec.takes_rows:
        found: Tensor = twin.run_eager(
            twin.of(module, tensors=parameters, attributes=sizes), x, index, weights
        )
        return found
    sizes |= {"hidden_size": spec.hidden_size, "intermediate_size": spec.intermediate_size}
    small = twin.of(module, tensors=parameters, attributes=sizes | {"expert_dim": spec.intermediate_size})
    rows = twin.run_eager(small, x.repeat(spec.num_experts, 1)).view(spec.num_experts, *x.shape)
    return (weights[..., None] * rows[index, torch.arange(len(x), device="cpu")[:, None]]).sum(1)


def _join(spec: ExpertsSpec, gate: Tensor, up: Tensor) -> Tensor:
    return torch.cat([gate, up], -1) if spec.is_concatenated else torch.stack([gate, up], -1).flatten(-2)


def _row(value: float) -> Tensor:
    return torch.full((1, 3), value, dtype=torch.float64, device="cpu")
