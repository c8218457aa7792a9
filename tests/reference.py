"""What routed experts compute, in fp64 and without haste: the one reference of all tests, and the tolerances.

It shares no arithmetic with the package. Letters: m tokens, n outputs, k inputs, e experts, t top-k.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ktinject.operators.probes.experts import ExpertsSpec, parameter_shapes, probe, views

# Relative error ‖out - reference‖ / ‖reference‖ against the ORIGINAL weights, Gaussian weights and inputs.
# The two layers, gate·up and down, each add an error of about the same size.
TOLERANCE = {
    # 8 bits of mantissa, at most 2^-9 per factor: weights, input and intermediate are rounded. Seen: 3e-3.
    "bf16": 1e-2,
    # A step of amax / 127, with amax at 3 to 4 standard deviations, on weights and activations. Seen: 2.3e-2.
    "int8": 3e-2,
    # Steps of about amax / 7.5: the more values share a scale, the greater their amax, and the step with it.
    "int4_g32": 0.17,
    "int4_g64": 0.20,
    "int4_g128": 0.21,
    "int4_g32_zero": 0.17,
    # Steps of 2^-4 to 2^-3 of the value itself. Seen: 6.0e-2, in a layer 24 values wide.
    "fp8": 6.5e-2,
    # 8 magnitudes, a power of two for 32 values. Seen: 0.23, in a layer 24 values wide.
    "mxfp4": 0.24,
    # As fp8; scales of e4m3 for 16 values; as fp8, with powers of two.
    "fp8_channel": 6.5e-2,
    "nvfp4": 0.24,
    "mxfp8": 6.5e-2,
}

_OF_FLOATS = ("bf16", "fp8", "mxfp4", "fp8_channel", "nvfp4", "mxfp8")

# The same against the weights that the operator unpacks: the rounding of the activations remains. Seen at the
# most: bf16 3.7e-3, int8 activations 2.2e-2.
KERNEL_TOLERANCE = dict.fromkeys(TOLERANCE, 2.5e-2) | dict.fromkeys(_OF_FLOATS, 5e-3)

# The same with a reference that rounds its activations as the kernels do: what remains is the order of fp32
# sums, and the few intermediates that it carries across a rounding boundary, by a whole step. Seen at the
# most: bf16 1e-7, int8 activations 2.0e-3.
EMULATED_TOLERANCE = dict.fromkeys(TOLERANCE, 3e-3) | dict.fromkeys(_OF_FLOATS, 3e-4)

# ‖out - reference‖ / ‖reference‖ of a GPU linear layer against the weights that it unpacks: codes and scales are exact
# and sums fp32, which leaves the rounding of the output. For bf16, 8 bits, that is 1.7e-3 over many outputs.
INT4_LINEAR_TOLERANCE = {torch.bfloat16: 2e-3, torch.float16: 3e-4}

# The same of fp8_linear, with the input rounded to fp8 in the reference, too: a bf16 output of sums that Hopper's fp8
# units keep with 14 bits over 128 inputs. Seen at the most: 4.9e-3, of few outputs.
FP8_LINEAR_TOLERANCE = 8e-3


K_QUANTS = ("q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_xs", "q8_0")


def relative_error(found: Tensor, want: Tensor) -> float:
    """‖found - want‖ / ‖want‖ in fp64; 0 for two zeros.

    Beside a zero, 1e-30 stands for ‖want‖: the kernels' exp ends at e^-87, where that of fp64 goes on to 0.
    """
    found, want = found.double(), want.double()
    assert found.shape == want.shape, f"expected shape {list(want.shape)}, found {list(found.shape)}"
    difference = (found - want).norm().item()
    return difference / (want.norm().item() or 1e-30) if difference else 0.0


def weights_of(spec: ExpertsSpec, parameters: dict[str, Tensor]) -> dict[str, Tensor]:
    """Stack a leaf's parameters by projection: gate, up, down [e, n, k] and their biases [e, n], in fp64."""
    cut: dict[str, list[Tensor]] = {}
    for name in parameter_shapes(spec):
        for projection, expert, view in views(spec, name, parameters[name].detach(), None, None):
            assert expert == len(cut.setdefault(projection, []))
            cut[projection].append(view.double())
    return {projection: torch.stack(tensors) for projection, tensors in cut.items()}


def parameters_of(module: nn.Module) -> dict[str, Tensor]:
    """The leaf's parameters by name."""
    return {name: parameter.detach() for name, parameter in module.named_parameters()}


def experts(
    x: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    weights: dict[str, Tensor],
    spec: ExpertsSpec,
    activations: str = "exact",
) -> Tensor:
    """The output [m, hidden] in fp64, one expert after the other; exact ones are differentiable.

    x              [m, hidden]
    top_k_index    [m, t]; -1 and num_experts are skipped
    top_k_weights  [m, t]
    weights        as `weights_of` gives them
    activations    exact, or what kernels round input and intermediate to: bf16, or int8 with a scale per row
                   and outliers, or per 256 inputs (the intermediate by way of bf16)
    """
    x, top_k_weights = x.double(), top_k_weights.double()
    if activations != "exact":
        x = rounded(x, activations)

    def project(projection: str, e: int, rows: Tensor) -> Tensor:
        out = rows @ weights[projection][e].T
        return out + weights[f"{projection}_bias"][e] if spec.has_bias else out

    out = x.new_zeros(x.shape[0], spec.hidden_size)
    for e in top_k_index.unique().tolist():
        if e in (-1, spec.num_experts):
            continue
        token, slot = torch.where(top_k_index == e)
        up = project("up", e, x[token])
        gate = project("gate", e, x[token]) if spec.has_gate else None
        h = intermediate(gate, up, spec)
        if activations != "exact":
            h = to_bf16(h) if activations == "bf16" else rounded(to_bf16(h), activations)
        out = out.index_add(0, token, top_k_weights[token, slot, None] * project("down", e, h))
    return out


def intermediate(gate: Tensor | None, up: Tensor, spec: ExpertsSpec) -> Tensor:
    """What the down projection sees."""
    z = up if gate is None else torch.clamp(gate, max=spec.gate_max)
    if spec.activation == "silu":
        h = z / (1 + torch.exp(-spec.alpha * z))
    elif spec.activation == "gelu":
        h = z * (1 + torch.erf(z / math.sqrt(2))) / 2
    elif spec.activation == "gelu_tanh":
        h = z * (1 + torch.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3))) / 2
    else:
        h = {"relu": torch.relu(z), "relu2": torch.relu(z) ** 2, "identity": z}[spec.activation]
    if gate is None:
        return h
    return h * (torch.clamp(up, -spec.up_limit, spec.up_limit) + spec.up_offset)


def rounding(weights: str) -> str:
    """What kernels for a weight format round activations to: bf16, int8 with a scale a row, or one for some inputs."""
    if weights in K_QUANTS:
        return "int8_128" if weights == "q8_0" else "int8_256"
    return "int8" if weights.startswith("int") else "bf16"


def rounded(x: Tensor, activations: str) -> Tensor:
    """x rounded as `rounding` says, in fp64."""
    if activations.startswith("int8_"):
        inputs = int(activations.removeprefix("int8_"))
        blocks = torch.nn.functional.pad(x, (0, -x.shape[-1] % inputs)).unflatten(-1, (-1, inputs))
        return dequantise_rows(*quantise_int8_rows(blocks)).double().flatten(-2)[..., : x.shape[-1]]
    return to_bf16(x) if activations == "bf16" else to_int8(x)


def multiplied(w: Tensor, weights: str) -> Tensor:
    """The values that kernels multiply by, of the unpacked weights, in fp64: fp8 codes times scale as bf16."""
    return to_bf16(w) if weights == "fp8" else w.double()


def to_bf16(x: Tensor) -> Tensor:
    """Rounded to bf16, in fp64."""
    return x.float().bfloat16().double()


def to_int8(x: Tensor) -> Tensor:
    """Rounded to int8 with one scale per row, in fp64; outliers, which have no part in the scale, are kept."""
    apart = outliers(x)
    return x.double().where(
        apart, dequantise_rows(*quantise_int8_rows(x.float().masked_fill(apart, 0))).double()
    )


def outliers(x: Tensor) -> Tensor:
    """The values of each row that are multiplied apart from its int8 values, as booleans.

    Those above a limit, at first the row's largest magnitude. It is halved i times, for i from 1 on, where that adds no
    more than 2^i outliers, one of them at least 1.25 times the limit, and so on from there, 10 times in all. At most 16
    are chosen, and one of 16 values.
    """
    magnitude = x.float().abs()
    most = magnitude.amax(-1, keepdim=True)
    chosen = torch.zeros_like(magnitude, dtype=torch.bool)
    count, halved = (torch.zeros_like(most, dtype=torch.int64) for _ in range(2))
    for i in range(1, 11):
        above = magnitude > most / 2**i
        found = above.sum(-1, keepdim=True)
        taken = (found <= min(16, x.shape[-1] // 16)) & (found <= count + 2 ** (i - halved))
        taken &= (found == count) | ((magnitude > most / 2**i * 1.25).sum(-1, keepdim=True) > count)
        chosen, count = above.where(taken, chosen), found.where(taken, count)
        halved[taken] = i
    return chosen


def quantise_int8_rows(w: Tensor) -> tuple[Tensor, Tensor]:
    """Symmetric int8 per row: q int8 [..., k] and scale fp32 [..., 1] = amax / 127, to nearest even."""
    w = w.float()
    scale = w.abs().amax(-1, keepdim=True) / 127
    q = torch.where(scale > 0, w / scale, torch.zeros_like(w)).round().clamp(-127, 127)
    return q.to(torch.int8), scale


def dequantise_rows(q: Tensor, scale: Tensor) -> Tensor:
    """The fp32 values of `quantise_int8_rows`."""
    return q.float() * scale


def quantise_int4_groups(w: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """Plain int4: q in [-8, 7] [n, k] and scale bf16 [n, groups] = amax / 7; the last group may be shorter.

    The native core searches for a better scale: it may not have a greater squared error than this.
    """
    n, k = w.shape
    padded = torch.nn.functional.pad(w.float(), (0, -k % group_size)).view(n, -1, group_size)
    scale = (padded.abs().amax(-1) / 7).bfloat16()
    step = scale.float()[..., None]
    q = torch.where(step > 0, padded / step, torch.zeros_like(padded)).round().clamp(-8, 7)
    return q.view(n, -1)[:, :k].to(torch.int8), scale


def dequantise_groups(q: Tensor, scale: Tensor, group_size: int) -> Tensor:
    """The fp32 values of `quantise_int4_groups`; exact, since 4 and 8 bits of mantissa make 12."""
    return q.float() * scale.float().repeat_interleave(group_size, 1)[:, : q.shape[1]]


# --- greedy text of two models that differ by rounding ---
#
# A token is a choice between logits; where two of them are nearly equal, rounding decides, and from there on the texts
# are different ones. So no text is compared with another: the reference reads what the other model wrote, and must have
# chosen the same, or nearly so.

# In models with routers the largest differences of logits are not those of rounding itself: where two experts are
# nearly equal, rounding decides which of them is asked. So a bound is measured on a model that rounds the same and is
# known to be right (bf16 experts on the CPU beside fp32 ones), the mean and the greatest, and twice that is allowed for
# another draw of the same errors: rows of one batch differ by as much. A single wrong expert of a layer moves the mean
# by more.
DRAW = 2


class Rounding(NamedTuple):
    """Differences of logits that rounding makes: the mean, and the greatest at a place."""

    mean: float
    greatest: float

    @classmethod
    def between(cls, found: Tensor, want: Tensor) -> Rounding:
        """Of logits [b, s, v] of two models that read the same text."""
        differences = (found.double() - want.double()).abs()
        return cls(differences.mean().item(), differences.max().item())


@torch.inference_mode()
def write(model: Any, batch: dict[str, Tensor], steps: int) -> tuple[Tensor, Tensor]:
    """What `model` writes greedily after prompts padded on the left: tokens [b, steps], and its logits [b, steps, v].

    Written twice, by `generate` as everybody calls it and once more for the logits; both must be the same text.
    """
    given = {name: tensor.to(model.device) for name, tensor in batch.items()}
    options: dict[str, Any] = {"max_new_tokens": steps, "do_sample": False, "eos_token_id": None}
    plain = model.generate(**given, **options)
    again = model.generate(**given, **options, return_dict_in_generate=True, output_logits=True)
    assert torch.equal(plain, again.sequences), "the same request was answered in two ways"
    return plain[:, -steps:].cpu(), torch.stack(again.logits, 1).float().cpu()


@torch.inference_mode()
def read(model: Any, batch: dict[str, Tensor], tokens: Tensor) -> Tensor:
    """The logits [b, s, v], fp32, that `model` has before each of the tokens [b, s] when it reads them in one pass."""
    whole = torch.cat([batch["input_ids"], tokens], 1).to(model.device)
    mask = torch.cat([batch["attention_mask"], torch.ones_like(tokens)], 1).to(model.device)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    logits = model(input_ids=whole, attention_mask=mask, position_ids=positions, use_cache=False).logits
    return logits[:, -tokens.shape[1] - 1 : -1].float().cpu()


def same_text(tokens: Tensor, logits: Tensor, want: Tensor, rounding: Rounding) -> int:
    """Check what a model wrote against what the reference has at each place of that text.

    tokens    [b, s], written with logits [b, s, v]
    want      [b, s, v]: the reference, reading the tokens
    Returns   the rows in which every token is the reference's own choice, too
    """
    found = Rounding.between(logits, want)
    assert found.mean <= DRAW * rounding.mean, f"logits differ by {found.mean} in the mean, {rounding}"
    # Two logits that change places have moved by at most the greatest difference each.
    behind = want.amax(-1) - want.gather(-1, tokens[..., None])[..., 0]
    bound = 2 * DRAW * rounding.greatest
    assert behind.max() <= bound, (
        f"a token {behind.max():.3f} behind the reference's own; {bound:.3f} is rounding"
    )
    # Near ties: eager steps in bf16 alone have up to 0.021 of them in the texts of the trained models.
    other = int((behind > 0).sum())
    assert other <= math.ceil(0.03 * tokens.numel()), (
        f"{other} of {tokens.numel()} tokens are not the reference's"
    )
    return int((behind == 0).all(-1).sum())


class Deferral:
    """Expert deferral as defined, written out: sets itself into a plain model in place of its experts.

    deferred  experts that each Mixture-of-Experts layer defers at decode, first layer to last; the last 0
    decodes   to be set by hand before each forward pass
    skip      leave the deferred experts out for good; for comparison
    apart     [m] for each choice of experts so far: how far apart, in logits of the router, the last one taken and the
              first one not taken are; also for the choice of those to be late
    """

    def __init__(
        self, model: nn.Module, deferred: list[int], activations: str = "bf16", skip: bool = False
    ) -> None:
        self.decodes = False
        self.handed_on: Tensor | None = None
        self.apart: list[Tensor] = []
        blocks = [
            module for module in model.modules() if isinstance(getattr(module, "experts", None), nn.Module)
        ]
        assert len(blocks) == len(deferred) and (skip or deferred[-1] == 0)
        for block, n in zip(blocks, deferred):
            spec = probe(block.experts)
            assert isinstance(spec, ExpertsSpec)
            weights = weights_of(spec, parameters_of(block.experts))
            block.experts = _Deferring(self, spec, weights, n, activations, skip)
            router = getattr(block, "gate", None) or getattr(block, "router", None)
            if router is not None:
                router.register_forward_hook(partial(self._look, n))

    def _look(self, n: int, router: nn.Module, args: Any, chosen: tuple[Tensor, Tensor, Tensor]) -> None:
        logits, _, ids = chosen
        taken = logits.gather(1, ids).sort(descending=True).values
        left = logits.scatter(1, ids, -math.inf)
        self.apart.append(taken[:, -1] - left.amax(1))
        if self.decodes and 0 < n < ids.shape[1]:
            self.apart.append(taken[:, -n - 1] - taken[:, -n])


class _Deferring(nn.Module):
    def __init__(
        self, whole: Deferral, spec: ExpertsSpec, weights: dict[str, Tensor], n: int, *how: Any
    ) -> None:
        super().__init__()
        self.num_experts = spec.num_experts
        self.of = (whole, spec, weights, n, *how)

    def forward(self, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        whole, spec, weights, n, activations, skip = self.of
        # The n of the least weight; of equal ones the last.
        order = top_k_weights.abs().sort(dim=1, descending=True, stable=True).indices
        is_late = torch.zeros_like(top_k_index, dtype=torch.bool)
        if whole.decodes:
            is_late.scatter_(1, order[:, top_k_index.shape[1] - n :], True)
        early, late = (
            experts(x, top_k_index.where(part, -1), top_k_weights, weights, spec, activations)
            for part in (~is_late, is_late)
        )
        if whole.handed_on is not None and whole.decodes:
            early += whole.handed_on
        whole.handed_on = None if skip or not whole.decodes else late
        return early.to(x.dtype)
