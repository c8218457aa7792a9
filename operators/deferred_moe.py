"""Expert deferral: at decode the least weighted experts of a layer are added one Mixture-of-Experts layer later.

    layer i     router ─┬─► now: the top_k - n experts of the greatest weights ──► output i
                        └─► later: the n others, from the same input ──┐
    layer i+1   router ─┬─► now ───────────────────────────────────────┴──────────► output i+1
                        └─► later …

The definition, token by token:

- A forward pass is a decode step if every row of the batch brings one token and the cache holds tokens already. Only
  decode steps defer; a prompt does not, unless what is left of it is one token: the last chunk of one in chunks, or a
  continued turn of one token. Nothing in such a pass differs from a decode step.
- In a decode step, Mixture-of-Experts layer i sorts the slots of a token by |weight|, equal ones by their place, and
  defers the last n. Their experts see the input of layer i and keep its routing weights.
- The sum of what layer i deferred is added to the output of Mixture-of-Experts layer i+1, whatever dense layers stand
  between. The last one defers nothing. So each expert is added exactly once, within the same forward pass.

Because a pass ends with nothing left over, there is no state between passes: what layers hand on is dropped when the
next pass of the model begins. Requests that take turns, rows that end early, and passes that were aborted midway cannot
meet each other's outputs. Passes of several threads are kept apart.

The block's own forward runs unchanged, router and shared experts included; only its experts module is exchanged. On a
GPU that module hands `now` and then `later` to the CPU. It waits for `now` alone, and only when the block is done with
everything else: where the block adds shared experts, the module gives it zeros, and the sum is made after the block. So
shared experts run while the CPU computes `now`, and the next layer's attention while it computes `later`. All of it is
kernels in a stream, eagerly or in a CUDA graph.
"""

from __future__ import annotations

import dataclasses
import inspect
import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self

import torch
from torch import Tensor, nn

from ktinject.errors import OperatorError
from ktinject.hf import compat
from ktinject.operators.base import Operator, Placement, register_operator
from ktinject.operators.hybrid_experts import HybridExperts, HybridExpertsConfig, Started
from ktinject.operators.offload import deferral
from ktinject.operators.offload.expert_placement import ExpertPlacement
from ktinject.operators.probes import moe_block, twin
from ktinject.operators.probes.moe_block import BlockSpec
from ktinject.support import Support

if TYPE_CHECKING:
    from ktinject.checkpoints.formats.base import Format, Stored
    from ktinject.checkpoints.packed import PackedWeights
    from ktinject.machine import Machine


@dataclass(frozen=True)
class DeferredMoeConfig(HybridExpertsConfig):
    """Arguments of `deferred_moe` in a rule: those of `hybrid_experts`, and two more."""

    deferred: int = 0  # how many experts of a token are added a layer later, at most top-k
    # fixed: `deferred` in all layers; auto: as many as fill the GPU's gaps; a list: one number a layer, in order.
    schedule: Literal["fixed", "auto"] | list[int] = "fixed"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.deferred < 0:
            raise ValueError(
                f"deferred is {self.deferred}; it is 0 or more. Write how many experts may be deferred."
            )
        if isinstance(self.schedule, list):
            if self.deferred:
                raise ValueError("deferred and a schedule by layer contradict each other. Write one of them.")
            if any(n < 0 for n in self.schedule):
                raise ValueError(f"schedule is {self.schedule}; its numbers are 0 or more. Correct it.")


@dataclass(frozen=True)
class DeferralPlacement(Placement):
    """What one block does.

    deferred  how many of a token's experts come one layer later
    remark    the reason for that number, or ""
    experts   what `hybrid_experts` settled for the experts, if it had to
    """

    deferred: int
    remark: str
    experts: ExpertPlacement | None


class Deferred(NamedTuple):
    """A layer's deferred experts under way, and who completes them."""

    experts: HybridExperts
    started: Started

    def complete(self) -> Tensor:
        return self.experts.complete(self.started)


class Pass:
    """What the layers of one model hand on to each other within one forward pass of one thread."""

    def __init__(self, decoder: nn.Module) -> None:
        """decoder: the module that owns the decoder layers; its forward is the pass."""
        self._local = threading.local()
        names = [*inspect.signature(type(decoder).forward).parameters][1:]
        self._places = {name: place for place, name in enumerate(names)}
        decoder.register_forward_pre_hook(self._begin, with_kwargs=True)

    @property
    def decodes(self) -> bool:
        return getattr(self._local, "decodes", False)

    def put(self, deferred: Deferred) -> None:
        self._local.deferred = deferred

    def take(self) -> Deferred | Tensor | None:
        deferred: Deferred | Tensor | None = getattr(self._local, "deferred", None)
        self._local.deferred = None
        return deferred

    def detach(self) -> Tensor | None:
        """What was handed on, complete: before the next layer is on another GPU, whose stream cannot wait for it."""
        deferred = self.take()
        return deferred.complete() if isinstance(deferred, Deferred) else deferred

    def attach(self, tensor: Tensor) -> None:
        self._local.deferred = tensor

    def _begin(self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        def given(name: str) -> Any:
            place = self._places.get(name, len(args))
            return args[place] if place < len(args) else kwargs.get(name)

        inputs = given("inputs_embeds")
        if inputs is None:
            inputs = given("input_ids")
        self._local.deferred = None  # of a pass that was aborted
        cache = compat.cache_of({name: given(name) for name in compat.CACHE_NAMES})
        self._local.decodes = inputs is not None and inputs.shape[1] == 1 and _holds_tokens(cache)

    _begin.capturable = True  # type: ignore[attr-defined]  # it decides at the capture what every replay does


def _holds_tokens(cache: Any) -> bool:
    if not hasattr(cache, "get_seq_length"):  # none, or one of packed requests
        return False
    seen = cache.get_seq_length()
    if isinstance(seen, Tensor) and seen.is_cuda and torch.cuda.is_current_stream_capturing():
        return True  # it cannot be read now, and only decode steps are captured
    return int(seen) > 0


class _DeferringExperts(nn.Module):
    """Stands for the block's experts module: starts the experts, and returns their output.

    Where the block adds shared experts it returns zeros, and `collect` the output.
    """

    def __init__(self, experts: HybridExperts, spec: BlockSpec, defers: int) -> None:
        super().__init__()
        self.experts = experts
        self.num_experts = experts.num_experts
        self.spec = spec
        self.defers = defers
        self.within: Pass | None = None  # set when the whole model stands
        self._outstanding = threading.local()

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """As the experts module it replaces: [m, hidden], [m, t], [m, t] → [m, hidden]."""
        routed = (hidden_states, top_k_index, top_k_weights)
        experts, within = self.experts, self.within
        self._outstanding.parts = None  # of a block that was aborted
        earlier = None
        if within is None or not within.decodes:
            now = experts.start(*routed)
        else:
            handed_on = within.take()
            if self.defers:
                few, everything = top_k_index.shape[1] - self.defers, top_k_index.shape[1]
                now = experts.start(*routed, ranks=(0, few))
                within.put(Deferred(experts, experts.start(*routed, ranks=(few, everything))))
            else:
                now = experts.start(*routed)
            if handed_on is not None:
                # Here, since it is there before `now` is: its wait costs nothing while the CPU computes that.
                earlier = handed_on if isinstance(handed_on, Tensor) else handed_on.complete()
                earlier = earlier.to(hidden_states.device, hidden_states.dtype)
        if self.spec.adds and not isinstance(now, Tensor):
            self._outstanding.parts = (now, earlier)
            return torch.zeros_like(hidden_states)
        return self._sum(now, earlier)

    def collect(self) -> Tensor | None:
        """The output [m, hidden] that the block was given zeros for; None if it got it."""
        parts = getattr(self._outstanding, "parts", None)
        self._outstanding.parts = None
        return None if parts is None else self._sum(*parts)

    def _sum(self, now: Started, earlier: Tensor | None) -> Tensor:
        out = self.experts.complete(now)
        return out if earlier is None else out + earlier

    def extra_repr(self) -> str:
        return f"defers {self.defers}"


@register_operator("deferred_moe")
class DeferredMoe(Operator):
    """Takes a whole Mixture-of-Experts block and, at decode, may add its least weighted experts one such layer later.

    The block keeps its router, its shared experts and its own forward. With `deferred: 0` the operator computes what
    `hybrid_experts` computes. Prompts and the last Mixture-of-Experts layer are never deferred.
    """

    Config = DeferredMoeConfig
    device_types = HybridExperts.device_types
    capturable = True
    per_expert = True
    on_ranks = "none"
    keeps = ("gate", "router", "shared_experts", "shared_expert", "shared_expert_gate", "shared_mlp")

    def __init__(self, block: nn.Module, spec: BlockSpec, config: Any) -> None:
        super().__init__()
        self.spec = spec
        self.defers = 0
        self._remark = ""
        self._class = type(block).__name__
        experts = HybridExperts.build(block.get_submodule(spec.experts), _experts_config(config))
        self.native_formats, self.packs_alone = experts.native_formats, experts.packs_alone
        routed = _DeferringExperts(experts, spec, self.defers)
        own = twin.of(block, {spec.experts: routed}, hooks=False)
        # No child, but this module under the block's class: children and tensors are the same, exchanged or not.
        shared = ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set")
        vars(self).update({name: vars(own)[name] for name in shared}, _block=own)

    @classmethod
    def plan_placement(
        cls,
        decoder: nn.Module,
        modules: Mapping[str, tuple[nn.Module, Any]],
        spare: Mapping[str, int],
    ) -> dict[str, DeferralPlacement | str]:
        specs = {path: moe_block.probe(module) for path, (module, _) in modules.items()}
        placements: dict[str, DeferralPlacement | str] = {
            path: spec.reason for path, spec in specs.items() if isinstance(spec, Support)
        }
        blocks = {path: spec for path, spec in specs.items() if isinstance(spec, BlockSpec)}
        inner = {path: modules[path][0].get_submodule(spec.experts) for path, spec in blocks.items()}
        configs = {path: _experts_config(modules[path][1]) for path in blocks}
        # Profiles name experts modules, not blocks.
        names = {path: f"{path}.{spec.experts}" for path, spec in blocks.items()}
        theirs = {names[path]: (inner[path], configs[path]) for path in blocks}
        placed = HybridExperts.plan_placement(decoder, theirs, spare)
        for path, spec in blocks.items():
            experts = placed.get(names[path])
            if isinstance(experts, str):
                placements[path] = experts
                continue
            wants_time = modules[path][1].schedule == "auto"
            size = _expert_bytes(inner[path], configs[path], experts) if wants_time else 0.0
            depth = deferral.depth(decoder, modules, path, spec, size)
            placements[path] = depth if isinstance(depth, str) else DeferralPlacement(*depth, experts)
        return placements

    def place(self, placement: Placement) -> None:
        assert isinstance(placement, DeferralPlacement), placement
        self.defers = self._routed.defers = placement.deferred
        self._remark = placement.remark
        if placement.experts is not None:
            self._experts.place(placement.experts)

    @classmethod
    def weight_formats(cls, config: Any, stored: Collection[tuple[str, Format]]) -> Sequence[tuple[int, Any]]:
        return HybridExperts.weight_formats(
            config, [(name, form) for name, form in stored if name.startswith("experts.")]
        )

    @classmethod
    def supports(cls, module: nn.Module, config: Any, machine: Machine) -> str | None:
        spec = moe_block.probe(module)
        if isinstance(spec, Support):
            return spec.reason
        return HybridExperts.supports(module.get_submodule(spec.experts), _experts_config(config), machine)

    @classmethod
    def build(cls, module: nn.Module, config: Any) -> Self:
        spec = moe_block.probe(module)
        if isinstance(spec, Support):
            raise OperatorError(f"deferred_moe: {type(module).__name__} cannot be replaced: {spec.reason}.")
        return cls(module, spec, config)

    @classmethod
    def connect(cls, decoder: nn.Module, operators: Sequence[Self]) -> None:
        if any(operator.defers for operator in operators):
            within = Pass(decoder)
            for operator in operators:
                operator._routed.within = within

    def follow(self, module: nn.Module, name: str) -> str | None:
        spec = moe_block.probe(module)
        if isinstance(spec, Support):
            return spec.reason
        if spec != self.spec and self.defers:
            return "its experts are deferred by what it was when the model was swapped"
        self.spec = spec
        vars(self._block)[name] = getattr(module, name)  # the block's own forward reads it
        return None

    def describe(self) -> dict[str, Any]:
        deferred = f"{self.defers} of {self.spec.top_k}" + (f" ({self._remark})" if self._remark else "")
        runs = {**self._experts.describe(), "deferred": deferred}
        if warning := deferral.warning(self.defers, self.spec.top_k):
            runs["warning"] = warning
        return runs

    def footprint(self) -> dict[str, int]:
        return self._experts.footprint()

    def workspace(self) -> dict[tuple[str, str], tuple[int, int]]:
        return self._experts.workspace()

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        return {
            f"{self.spec.experts}.{name}": shape for name, shape in self._experts.parameter_shapes().items()
        }

    def allocate(self) -> None:
        self._experts.allocate()

    def load(self, name: str, tensor: Tensor, expert: int | None, part: int | None) -> None:
        self._experts.load(self._inner(name), tensor, expert, part)

    def misfit_of(self, name: str, source: Format, part: int | None) -> str | None:
        return self._experts.misfit_of(self._inner(name), source, part)

    def keeping(self, source: Format) -> str:
        return self._experts.keeping(source)

    def load_stored(self, name: str, stored: Stored, expert: int | None, part: int | None) -> None:
        self._experts.load_stored(self._inner(name), stored, expert, part)

    def packed_weights(self) -> PackedWeights | None:
        return self._experts.packed_weights()

    def restored(self, state: Mapping[str, str]) -> None:
        self._experts.restored(state)

    def finish(self) -> None:
        self._experts.finish()

    def is_lossless(self) -> bool:
        return self._experts.is_lossless()

    def unpack(self, name: str, expert: int | None = None) -> Tensor:
        return self._experts.unpack(self._inner(name), expert)

    def train(self, mode: bool = True) -> Self:
        vars(self._block)["training"] = mode  # blocks with noise in their router look at it
        return super().train(mode)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The block's own forward."""
        out = twin.run(self._block, *args, **kwargs)
        rest = self._routed.collect()
        if rest is None:
            return out
        if isinstance(out, tuple):
            return (out[0] + rest.view_as(out[0]), *out[1:])
        return out + rest.view_as(out)

    def extra_repr(self) -> str:
        return f"{self._class}, defers {self.defers} of {self.spec.top_k}"

    @property
    def pending_output(self) -> Pass | None:  # type: ignore[override]
        return self._routed.within

    @property
    def native(self) -> Any:
        """The native experts, as the experts' operators have them."""
        return self._experts.native

    def repeat(self, expert: int) -> None:
        """Copy one expert to all others, for models of random weights."""
        self._experts.repeat(expert)

    @property
    def _routed(self) -> Any:
        return self._modules[self.spec.experts]

    @property
    def _experts(self) -> HybridExperts:
        return self._routed.experts

    def _inner(self, name: str) -> str:
        return name.removeprefix(f"{self.spec.experts}.")


def _experts_config(config: Any) -> HybridExpertsConfig:
    """What the experts' operator is to be given: the arguments that are its own."""
    fields = dataclasses.fields(HybridExpertsConfig)
    return HybridExpertsConfig(**{field.name: getattr(config, field.name) for field in fields})


def _expert_bytes(module: nn.Module, config: HybridExpertsConfig, placement: ExpertPlacement | None) -> float:
    """What the CPU reads for one expert of a token, on average: nothing for those on the GPU."""
    built = HybridExperts.build(module, config)
    on_gpu = 0 if placement is None else len(placement.resident)
    return (1 - on_gpu / built.num_experts) * built.native.bytes / built.num_experts
