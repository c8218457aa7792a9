"""What the parts of a decoder layer compute, found by running them on the CPU: twins with other children or weights.

The children that are not in question are replaced by functions that no two of which can be mistaken for each other. A
module of the real sizes is never run.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from ktinject.hf import compat
from ktinject.operators.probes import experts, twin
from ktinject.operators.probes.answer import refusal_of
from ktinject.operators.probes.latent_formula import GIVEN
from ktinject.support import SUPPORTED, Support

ROWS = 3
# What gate, up and down of a gated unit may be called; or one layer for gate and up, and down.
GATED_UNITS: tuple[tuple[str, ...], ...] = (
    ("gate_proj", "up_proj", "down_proj"),
    ("w1", "w3", "w2"),
    ("input_linear", "output_linear"),
    ("gate_up_proj", "down_proj"),
)
# And up and down of one without a gate.
PLAIN_UNIT = ("up_proj", "down_proj")


class Stub(nn.Module):
    """A child that computes a function of its first argument."""

    def __init__(self, function: Callable[..., Any], names_kept: bool = False) -> None:
        """names_kept  the function takes other arguments by name, too"""
        super().__init__()
        self.function, self._names_kept = function, names_kept
        # For those who ask a norm for its dtype: nothing that is given is rounded.
        self.weight = torch.empty(0, dtype=torch.float64, device="cpu")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        x = args[0] if args else kwargs.pop("hidden_states")
        return self.function(x, *args[1:], **kwargs if self._names_kept else {})


def run_twin(module: nn.Module, changed: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
    """The class's own forward on a twin, on the CPU.

    changed   children, tensors that stand for parameters and buffers, or attributes that are numbers, by name
    Raises    whatever transformers' code does where it is given what it is not made for
    """
    children = {name: value for name, value in changed.items() if isinstance(value, nn.Module)}
    tensors = {name: value for name, value in changed.items() if isinstance(value, Tensor)}
    numbers = {name: value for name, value in changed.items() if isinstance(value, float)}
    with twin.on_cpu():
        return twin.run(twin.of(module, children, tensors, numbers), *args, **kwargs)


# A model's layers are of few shapes, and a router's weight takes longer to draw than to try.
@functools.lru_cache(8)
def random(*shape: int, seed: int = 0) -> Tensor:
    """Normally distributed; not to be written to."""
    return torch.randn(
        shape, generator=torch.Generator("cpu").manual_seed(seed), device="cpu", dtype=torch.float32
    )


# What a model gives its layers beside hidden states; those that stand for their children have no use for it.
ARGUMENTS = ("attention_mask", "position_ids", compat.CACHE, "position_embeddings")


def beside(module: Any) -> dict[str, Any]:
    """What a layer's or an attention's forward takes beside what others take: a dict for keys that layers share, as
    Gemma 4 and Mistral Large 4 have it."""
    name = "shared_kv_states"
    return {name: {}} if name in inspect.signature(type(module).forward).parameters else {}


class LayerNames(NamedTuple):
    """What the children of a decoder layer are called; empty: there is none."""

    attention: str = ""
    feed_forward: str = ""
    before_attention: str = ""
    before_feed_forward: str = ""
    behind_attention: str = ""
    behind_feed_forward: str = ""
    shared: str = ""  # what is added to the feed-forward part, of the same input

    @property
    def parts(self) -> list[tuple[str, ...]]:
        """Of attention and the feed-forward part, which there are: norm, part, norm, and what is added to the part."""
        parts = (
            (self.before_attention, self.attention, self.behind_attention, ""),
            (self.before_feed_forward, self.feed_forward, self.behind_feed_forward, self.shared),
        )
        return [part for part in parts if part[1]]

    @property
    def is_parallel(self) -> bool:
        """Whether both parts take what one norm gives."""
        others = self.before_feed_forward or self.behind_attention or self.behind_feed_forward
        return bool(self.before_attention and self.feed_forward and self.attention and not others)


# What stands for the children of a layer, in the order of their names.
_FUNCTIONS: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda x: torch.cos(2 * x),
    torch.square,
    lambda x: torch.sin(x + 0.3),
    lambda x: torch.tanh(x - 0.5),
    lambda x: torch.cos(x - 0.7),
    lambda x: torch.sin(3 * x + 0.2),
    torch.exp,
)


def residual_factor(
    layer: nn.Module, names: LayerNames, gives_more: bool, hands_on: bool = False
) -> float | Support:
    """What a layer multiplies its parts with. It adds attention of its input to that, and then the feed-forward part of
    the sum; norms are before and behind each part, where there are names for them.

    gives_more  its attention gives its weights along
    hands_on    its attention takes the places that a layer before has chosen, and gives its own choice: so does the
                layer
    """
    x = random(1, 2, 8).double()
    functions = {name: function for name, function in zip(names, _FUNCTIONS) if name}
    children = {name: Stub(function) for name, function in functions.items()}
    attention = functions.get(names.attention, torch.cos)
    choices = torch.tensor([[[0], [1]]], device="cpu"), torch.tensor([[[1], [0]]], device="cpu")
    taken: list[Any] = []

    def mixes(x: Tensor, **kwargs: Any) -> Any:
        taken.append(kwargs.get(GIVEN))
        return (attention(x), None, choices[1]) if hands_on else (attention(x), None)

    if gives_more:
        children[names.attention] = Stub(mixes, names_kept=True)
    arguments = dict.fromkeys(ARGUMENTS) | beside(layer)
    given = {GIVEN: choices[0]} if hands_on else {}

    def run() -> Any:
        found = run_twin(layer, children, x, use_cache=True, **arguments, **given)
        if hands_on and (found[1] is not choices[1] or taken[-1] is not choices[0]):
            raise RuntimeError("a choice of places is not handed on")
        return found[0] if isinstance(found, tuple) else found

    try:
        try:
            found = run()
        except ValueError:
            # It takes its feed-forward part's output apart: a block may give its routing along.
            children[names.feed_forward] = Stub(lambda x: (functions[names.feed_forward](x), None))
            found = run()
        first, *others = names.parts
        for _, part, behind, shared in others:  # without what they add
            for name in [behind] if behind else [part, shared][: 1 + bool(shared)]:
                plain = children[name].function
                children[name] = Stub(functools.partial(lambda plain, x: _times(plain(x), 0.0), plain))
        attended = run() if others else found
    except Exception as error:
        return refusal_of(error)

    def added(part: Sequence[str], y: Tensor) -> Tensor:
        before, name, behind, shared = (functions.get(name) for name in part)
        y = y if before is None else before(y)
        assert name is not None
        mixed = name(y) if shared is None else name(y) + shared(y)
        return mixed if behind is None else behind(mixed)

    is_known = all(isinstance(one, Tensor) and one.shape == x.shape for one in (found, attended))
    mixed = added(first, x)
    # Of digits beyond these, doubles know nothing.
    factor = float(f"{((attended - x) * mixed).sum() / (mixed * mixed).sum():.12g}") if is_known else 0.0
    want = x
    for each in names.parts:
        if names.is_parallel:
            want = want + factor * added((names.before_attention, *each[1:]), x)
        else:
            want = want + factor * added(each, want)
    if is_known and factor > 0 and torch.allclose(found, want, rtol=1e-9, atol=1e-9):
        return factor
    return Support.no("it is not x + attention(norm(x)), and that + feed_forward(norm(that))")


def _times(found: Any, factor: float) -> Any:
    return (found[0] * factor, *found[1:]) if isinstance(found, tuple) else found * factor


@dataclass(frozen=True)
class Gating:
    """What is made of gate and up: silu(min(gate, gate_max)) · (clamp(up, -up_limit, up_limit) + up_offset), where
    silu(x) = x · sigmoid(alpha · x); or with another activation in its place.

    is_wide  of a model in 16 bits, the product alone is rounded, not what the activation gives
    """

    alpha: float = 1.0
    gate_max: float = inf
    up_limit: float = inf
    up_offset: float = 0.0
    activation: str = "silu"
    is_wide: bool = False


# Those that the native core has in dense units.
ACTIVATIONS = ("silu", "gelu_tanh")
PLAIN = Gating()


def gating(module: nn.Module, names: Sequence[str]) -> Gating | Support:
    """What a module makes of gate and up, if it is a gated unit with one of `ACTIVATIONS`.

    names  of gate, up and down, or of one that gives gate and up, one behind the other, and of down
    """
    if not {*names} <= {name for name, _ in module.named_children()}:
        return Support.no(f"its {type(module).__name__} has no {', '.join(names[:-1])} and {names[-1]}")
    x = random(ROWS, 16).double()

    def gated(gate: Tensor, up: Tensor) -> Tensor:
        given = (gate, up) if len(names) == 3 else (torch.cat([gate, up], -1),)
        first = [Stub(lambda of, value=value: value + (of - x).abs().sum()) for value in given]
        # Not linear, so that what is done to its output would show.
        last = Stub(lambda h: h.sign() * h.abs().log1p())
        out: Tensor = run_twin(module, dict(zip(names, [*first, last], strict=True)), x)
        return out.sign() * out.abs().expm1()

    try:
        with twin.on_cpu():
            found = experts.of_gate(module, gated)
    except Exception as error:
        return refusal_of(error)
    if isinstance(found, Support) or found.activation not in ACTIVATIONS:
        return Support.no(f"its {type(module).__name__} is no gated unit with SiLU, or GELU by tanh")
    if found.activation != "silu" and found.alpha != 1.0:
        return Support.no(f"the {found.activation} of its {type(module).__name__} is of a multiple")
    plain = Gating(found.alpha, found.gate_max, found.up_limit, found.up_offset, found.activation)
    is_plain = plain == Gating(activation=found.activation)
    return replace(plain, is_wide=is_plain and _is_wide(module, names, plain.activation))


def _is_wide(module: nn.Module, names: Sequence[str], activation: str) -> bool:
    """`Gating.is_wide`. Where that cannot be tried out it is taken not to be so: it is a rounding more."""
    gate, up = (3 * random(ROWS, 64, seed=seed).bfloat16() for seed in (1, 2))
    given = (gate, up) if len(names) == 3 else (torch.cat([gate, up], -1),)
    stubs = [Stub(lambda _, value=value: value) for value in given]
    function = (
        functional.silu if activation == "silu" else functools.partial(functional.gelu, approximate="tanh")
    )
    try:
        found = run_twin(module, dict(zip(names, [*stubs, Stub(lambda h: h)], strict=True)), gate)
        with twin.on_cpu():
            wide = (function(gate.float()) * up.float()).bfloat16()
            return torch.equal(found, wide) and not torch.equal(found, function(gate) * up)
    except Exception:  # transformers' own code, given what it may not be made for
        return False


def is_plain_squared_relu(module: nn.Module, names: Sequence[str]) -> Support:
    """Whether a module is down(relu(up(x))²). names: of up and down."""
    children = {names[0]: Stub(torch.sin), names[1]: Stub(torch.tanh)}
    x = 3 * random(ROWS, 16)
    try:
        found = run_twin(module, children, x)
    except Exception as error:
        return refusal_of(error)
    want = torch.tanh(functional.relu(torch.sin(x)).square())
    if isinstance(found, Tensor) and torch.allclose(found, want, atol=1e-5):
        return SUPPORTED
    return Support.no(f"its {type(module).__name__} is no unit with a squared ReLU")


def forget_gate(module: Any, heads: int, size: int) -> float | Support:
    """The bound of a module that gives bound · sigmoid(exp(A_log) · y), [b, m, heads, size], of y =
    f_b_proj(f_a_proj(x)) + dt_bias; 0.0: it gives -exp(A_log) · softplus(y). A_log is a head's.
    """
    rates, bias = random(heads, seed=6), random(heads * size, seed=7)
    given = 12 * random(1, ROWS, heads * size, seed=8)  # some beyond what softplus leaves as it is
    children, parameters = dict(module.named_children()), dict(module.named_parameters(recurse=False))
    if children.keys() != {"f_a_proj", "f_b_proj"} or parameters.keys() != {"A_log", "dt_bias"}:
        return Support.no(f"its {type(module).__name__} holds {', '.join(sorted({*children, *parameters}))}")
    changed = {
        "f_a_proj": Stub(torch.sin),
        "f_b_proj": Stub(lambda x: given + x.sum()),
        "A_log": rates.view(parameters["A_log"].shape),
        "dt_bias": bias,
    }
    x = random(1, ROWS, 8)
    try:
        found = run_twin(module, changed, x)
    except Exception as error:
        return refusal_of(error)
    y = (given + torch.sin(x).sum() + bias).view(1, ROWS, heads, size)
    rates = rates.exp()[:, None]
    bound = getattr(module, "safe_gate_lower_bound", None)
    forms = {0.0: -rates * functional.softplus(y)}
    if isinstance(bound, float) and bound < 0:
        forms[bound] = bound * torch.sigmoid(rates * y)
    for form, want in forms.items():
        is_alike = isinstance(found, Tensor) and found.shape == want.shape
        if is_alike and torch.allclose(found, want, rtol=1e-4, atol=1e-5):
            return form
    return Support.no(
        f"its {type(module).__name__} is no softplus with a rate a head, and no bounded sigmoid"
    )


def is_norm_gated_by_sigmoid(module: Any, size: int, epsilon: float) -> Support:
    """Whether a module gives weight · x / sqrt(mean(x²) + epsilon) · sigmoid(gate), rounded once."""
    if [(name, tuple(tensor.shape)) for name, tensor in module.named_parameters()] != [("weight", (size,))]:
        return Support.no(f"its {type(module).__name__} holds something else than one vector called weight")
    weight = 1 + 0.3 * random(size, seed=9)
    x, gate = random(64, size).bfloat16(), (3 * random(64, size, seed=1)).bfloat16()
    try:
        found = run_twin(module, {"weight": weight}, x, gate)
    except Exception as error:
        return refusal_of(error)
    wide = x.float()
    want = (
        weight * wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon) * gate.float().sigmoid()
    )
    if (
        isinstance(found, Tensor)
        and found.dtype == x.dtype
        and (found != want.bfloat16()).float().mean() < 0.02
    ):
        return SUPPORTED
    return Support.no(f"its {type(module).__name__} is no RMS norm times a sigmoid, rounded once")


def is_rotation(module: nn.Module, frequencies: Tensor, scale: float) -> Support:
    """Whether a module gives cos and sin of positions · frequencies, twice side by side, times scale."""
    frequencies = frequencies.detach().cpu().float()
    positions = torch.tensor([[0, 7, 1000]], device="cpu")
    try:
        found = run_twin(
            module,
            {"inv_freq": frequencies},
            torch.zeros(1, 3, 1, dtype=torch.float32, device="cpu"),
            positions,
        )
    except Exception as error:
        return refusal_of(error)
    angles = positions[..., None].float() * frequencies
    angles = torch.cat([angles, angles], -1)
    wanted = (angles.cos() * scale, angles.sin() * scale)
    is_pair = isinstance(found, tuple) and len(found) == 2
    if is_pair and all(a.shape == b.shape and torch.allclose(a, b, atol=1e-3) for a, b in zip(found, wanted)):
        return SUPPORTED
    return Support.no("it does not give cos and sin, twice side by side")
