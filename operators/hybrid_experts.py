"""Routed experts of a model on a GPU: the CPU computes them, and at the same time the GPU computes some of them.

    submit ──────────────► CPU: all other experts ─────────┐
      GPU: the resident experts (`gpu_experts` of a rule)  ▼
                                                 wait: the sum of both

There is no host function, no copy that the host waits for and no allocation, so a CUDA graph can capture a decode step.
The CPU holds every expert. Without a GPU, or if gradients are needed, it computes all of them, as `cpu_experts` does.
With `ram_copy: false`, those on the GPU leave RAM, each as soon as it is whole, and then only the GPU computes them.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from ktinject import _native
from ktinject.errors import OperatorError
from ktinject.operators.base import Placement, register_operator
from ktinject.operators.cpu_experts import CpuExperts, native_experts, weights_in_words
from ktinject.operators.offload import expert_cache, expert_placement, lent, links, prefill_rates, streaming
from ktinject.operators.offload.expert_cache import Hits
from ktinject.operators.offload.expert_placement import ExpertPlacement
from ktinject.operators.offload.gpu_experts import GpuExperts
from ktinject.operators.offload.handoff import Handoff
from ktinject.operators.offload.hybrid_config import HybridExpertsConfig
from ktinject.operators.offload.one_link import Here
from ktinject.operators.offload.streaming import StreamedExperts
from ktinject.operators.offload.submits import MOST_TOKENS, Routing, Ticket, of_ranks

if TYPE_CHECKING:
    from ktinject.checkpoints.packed import PackedWeights
    from ktinject.machine import Machine
    from ktinject.operators.probes.experts import ExpertsSpec

log = logging.getLogger("ktinject")

# A submit can route among so many experts, and choose so many of them for a token (native/cuda/route.cuh).
MOST_ROUTED, MOST_CHOSEN = 256, 32


class Underway(NamedTuple):
    """Experts under way: the ticket of the CPU's part, and the GPU's part [m, hidden] fp32 if there is one."""

    ticket: Ticket
    part: Tensor | None


Started = Tensor | Underway  # what `start` returns; a Tensor is the finished result


@register_operator("hybrid_experts")
class HybridExperts(CpuExperts):
    """Runs routed experts on the CPU from inside a CUDA stream. Optionally keeps some experts on the GPU."""

    Config = HybridExpertsConfig
    device_types = ("cuda", "cpu")
    capturable = True
    # What was captured of experts on the GPU stays right when they give back their memory.
    changing = frozenset({"_rates", "streamed", "on_gpu", "seat", "_gone", "_hits"})
    config: HybridExpertsConfig

    def __init__(self, spec: ExpertsSpec, config: HybridExpertsConfig) -> None:
        super().__init__(spec, config)
        self.resident: tuple[int, ...] = ()
        self._remark = ""  # on those
        self.helpers: tuple[str, ...] = ()  # other GPUs that stream a part of the experts of long prompts
        self.handoff = Handoff(self.native, spec.hidden_size, config.handoff)
        self.on_gpu: GpuExperts | None = None
        self.seat: expert_cache.Seat | None = None  # where the experts on the GPU are a cache
        self.streamed: StreamedExperts | None = None
        # Held while work for experts in lent memory is queued. Others take nothing.
        self._queueing: AbstractContextManager[Any] = nullcontext()
        self._gone: GpuExperts | None = None  # gave its memory back; graphs read its tables
        self._hits = Hits()  # until then
        self._rates: prefill_rates.Rates | None = None
        # The experts in the GPU's format; the same object as the CPU's if the formats are equal.
        self._for_gpu = self.native
        # Of experts that are to leave RAM: what was packed of each; those that have left it.
        self._packed: dict[int, set[str]] = {}
        self._left: set[int] = set()
        self._leaving = threading.Lock()

    @classmethod
    def plan_placement(
        cls,
        decoder: nn.Module,
        modules: Mapping[str, tuple[nn.Module, Any]],
        spare: Mapping[str, int],
    ) -> dict[str, ExpertPlacement | str]:
        placements: dict[str, ExpertPlacement | str] = {}
        sharing = Counter(config.device for _, config in modules.values() if config.auto_sized)
        for config in dict.fromkeys(config for _, config in modules.values()):
            if config.gpu_experts != 0:
                theirs = {path: module for path, (module, other) in modules.items() if other == config}
                left = {
                    device: size * len(theirs) // (sharing[device] or 1) for device, size in spare.items()
                }
                placements |= expert_placement.plan(theirs, config, left)
        used = [config.device for _, config in modules.values()]
        for path, (_, config) in modules.items():
            placement = placements.get(path, ExpertPlacement())
            if config.device != "cpu" and not isinstance(placement, str):
                helpers = links.of_argument(config.links, config.device, used) if config.streams else ()
                placements[path] = dataclasses.replace(placement, helpers=helpers)
        return placements

    def place(self, placement: Placement) -> None:
        assert isinstance(placement, ExpertPlacement), placement
        config, self.resident, self._remark = self.config, placement.resident, placement.remark
        self.helpers = placement.helpers if StreamedExperts.support(self.spec) else ()
        self._for_gpu = self.native
        if self.resident and not config.copies_as_is:
            self._for_gpu = native_experts(self.spec, config.gpu_format, config.group_size, "auto")

    @classmethod
    def native_of(cls, spec: ExpertsSpec, config: Any) -> _native.Experts:
        streamed = StreamedExperts.support(spec)
        if config.streams_from is not None and not streamed:
            raise OperatorError(f"hybrid_experts: prefill is {config.prefill}, but {streamed.reason}")
        if config.device != "cpu" and not config.ram_copy and not config.copies_as_is:
            raise OperatorError(
                f"hybrid_experts: ram_copy is false, but the GPU has no kernel for {weights_in_words(config)}; "
                "choose another of the formats in weights, or ram_copy: true"
            )
        return super().native_of(spec, config)

    @classmethod
    def supports(cls, module: nn.Module, config: Any, machine: Machine) -> str | None:
        if config.device != "cpu" and not machine.cuda_built:
            return (
                "beside a GPU it needs ktinject's CUDA parts, and this build has none; install the CUDA toolkit and "
                "build again, or use the CPU alone"
            )
        return cls._unsupported(module, config)

    def describe(self) -> dict[str, Any]:
        runs = super().describe()
        if self.config.device == "cpu":
            runs["handoff"] = "none: no GPU is used, so hybrid_experts computes as cpu_experts does"
            if self._idle_arguments():
                runs["handoff"] += f"; without effect: {', '.join(self._idle_arguments())}"
            return runs
        runs["handoff"] = self.handoff.describe(torch.device(self.config.device))
        runs["prefill"] = self._prefill()
        if self.resident or self._remark:
            runs["on the GPU"] = self._on_gpu()
        return runs

    def _on_gpu(self) -> str:
        config = self.config
        if not self.resident:
            return f"no experts: {self._remark}"
        text = f"{len(self.resident)} of {self.num_experts} experts as {config.gpu_format}"
        if config.gpu_weights == "same" and config.gpu_format != config.weights:
            text += f" ({weights_in_words(config)} has no kernel there, so they do not move)"
        if self._spares():
            text += ", a cache of those in use"
        if self._leave:
            text += ", which are not in RAM"
        elif self.lends:
            text += ", until somebody else needs the memory"
        return text

    def _idle_arguments(self) -> list[str]:
        """The rule's arguments that have no effect without a GPU, as `name=value`."""
        config, default = self.config, HybridExpertsConfig()
        names = ("gpu_experts", "dynamic", "prefill", "links", "ram_copy", "handoff")
        asked = {name: getattr(config, name) for name in names}
        if config.other_devices:
            asked["links"] = list(config.other_devices)
        # What the bundled rules say is asked by nobody.
        asked = {name: value for name, value in asked.items() if (name, value) != ("gpu_experts", "auto")}
        return [f"{name}={value}" for name, value in asked.items() if value != getattr(default, name)]

    def _prefill(self) -> str:
        if self.config.prefill == "cpu":
            return "on the CPU"
        if not (streamed := StreamedExperts.support(self.spec)):
            return f"on the CPU: {streamed.reason}"
        if self.config.streams_from is not None:
            least = f" from {self.config.prefill} tokens on" if isinstance(self.config.prefill, int) else ""
            text = f"experts streamed to the GPU{least}"
        else:
            text = (
                "long prompts with experts streamed to the GPU, all or a part of them, where that is faster"
            )
        if self.helpers:
            every = sorted((self.config.device, *self.helpers), key=lambda name: (len(name), name))
            text += f"; over the links of {', '.join(every)} where all of them are faster than one"
        return text

    @property
    def _leave(self) -> bool:
        """Whether the experts on the GPU leave RAM."""
        return bool(self.resident) and not self.config.ram_copy

    def _spares(self) -> int:
        """Places on the GPU beside those of the resident experts; 0 where these stay where they are."""
        moves = self.config.moves and 0 < len(self.resident) < self.num_experts
        return expert_cache.spares(len(self.resident)) if moves else 0

    def experts_on_gpu(self) -> list[int]:
        """Ids of the experts that are on the GPU now, in ascending order."""
        with self._queueing:
            if self.seat is None:
                return sorted(self.on_gpu.resident) if self.on_gpu is not None else []
            return [expert for expert, place in enumerate(self.seat.places()) if place >= 0]

    @property
    def lends(self) -> bool:
        """Whether the experts on the GPU give back their memory when somebody needs it."""
        return bool(self.resident) and self.config.gives_back

    def lent(self) -> Tensor | None:
        """As `lent.Borrower` has it."""
        return None if self.on_gpu is None else self.on_gpu.memory

    def give_back(self) -> Tensor | None:
        """As `lent.Borrower` has it."""
        with self._queueing:
            here = self.on_gpu
            if here is None:
                return None
            found = self._hits_here()
            if self.seat is not None:
                self.seat.leave()
            if self.streamed is not None:
                self.streamed.here = None
            self.on_gpu = self.seat = None
            self._gone, self._hits = here, dataclasses.replace(found, moves=False)
            return here.empty()

    def hits(self) -> Hits:
        """What the experts on the GPU were good for, in decode steps so far. May wait for the GPU."""
        with self._queueing:
            return self._hits_here()

    def _hits_here(self) -> Hits:
        if self.seat is not None:
            return self.seat.hits()
        if self.on_gpu is None:
            return self._hits
        counts = self.on_gpu.traffic.long() & 0xFFFFFFFF
        return Hits(int(counts.sum()), int(counts[list(self.resident)].sum()))

    def footprint(self) -> dict[str, int]:
        sizes = super().footprint()
        if self._leave:
            sizes["cpu"] -= len(self.resident) * self.native.released_bytes
        if self.resident:
            experts = (len(self.resident) + self._spares()) * (self._for_gpu.bytes // self.num_experts)
            sizes[self.config.device] = experts + GpuExperts.table_bytes(self.num_experts)
        return sizes

    def workspace(self) -> dict[tuple[str, str], tuple[int, int]]:
        found = super().workspace()
        if self._leave:
            # A file may have the gates of all experts of a layer before their downs.
            passing = len(self.resident) * self.native.released_bytes
            found["cpu", "experts on their way to the GPU"] = passing, passing
        least, wanted = expert_placement.ring_bytes(self.config, self.spec, self.native.bytes)
        if wanted:
            # Without room for a ring, auto leaves prompts to the CPU.
            needed = 0 if self.config.streams_from is None else least
            found[self.config.device, "the experts of long prompts"] = needed, wanted
            for helper in self.helpers:  # which can be done without
                found[helper, "the experts of long prompts"] = 0, wanted
        return found

    def allocate(self) -> None:
        super().allocate()
        if self._for_gpu is not self.native:
            self._for_gpu.allocate()
        if self._leave:
            self._packed = {expert: set() for expert in self.resident}
            device = torch.device(self.config.device)
            self.on_gpu = self._place_on(device, filled=False)

    def _touch(self) -> None:
        if not self._leave:  # it would take the memory of those that leave; others go where they are packed
            super()._touch()

    def _place_on(self, device: torch.device, filled: bool = True) -> GpuExperts:
        try:
            return GpuExperts(self._for_gpu, self.num_experts, self.resident, device, self._spares(), filled)
        except (RuntimeError, ValueError) as error:
            raise OperatorError(f"hybrid_experts: {error}") from None

    @property
    def repeats(self) -> bool:
        return not self._leave

    def repeat(self, expert: int) -> None:
        super().repeat(expert)
        if self._for_gpu is not self.native:
            self._for_gpu.repeat(expert)

    def _pack(self, projection: str, expert: int, view: Tensor) -> None:
        super()._pack(projection, expert, view)
        self._leave_ram(projection, expert)
        if self._for_gpu is not self.native and expert in self.resident:
            if projection.endswith("_bias"):
                self._for_gpu.load_bias(projection.removesuffix("_bias"), expert, view)
            else:
                self._for_gpu.load(projection, expert, view)

    def _pack_integers(
        self, projection: str, expert: int, codes: Tensor, scales: Tensor, zeros: Tensor | None
    ) -> None:
        super()._pack_integers(projection, expert, codes, scales, zeros)
        self._pack_for_gpu(projection, expert)

    def _pack_fp8(self, projection: str, expert: int, codes: Tensor, scales: Tensor) -> None:
        super()._pack_fp8(projection, expert, codes, scales)
        self._pack_for_gpu(projection, expert)

    def _pack_nvfp4(self, projection: str, expert: int, codes: Tensor, scales: Tensor, factor: float) -> None:
        super()._pack_nvfp4(projection, expert, codes, scales, factor)
        self._pack_for_gpu(projection, expert)

    def _pack_rows(self, projection: str, expert: int, rows: Tensor) -> None:
        super()._pack_rows(projection, expert, rows)
        self._pack_for_gpu(projection, expert)

    def _pack_for_gpu(self, projection: str, expert: int) -> None:
        """What was packed for the CPU, decoded, in the GPU's format."""
        self._leave_ram(projection, expert)
        if self._for_gpu is self.native or expert not in self.resident:
            return
        shape = [self.spec.hidden_size, self.spec.intermediate_size]
        value = torch.empty(shape if projection == "down" else shape[::-1], dtype=torch.float32, device="cpu")
        self.native.unpack(projection, expert, value)
        self._for_gpu.load(projection, expert, value)

    def _leave_ram(self, projection: str, expert: int) -> None:
        """Note that this much of an expert is packed. If that is all of it, and it is to leave, it does."""
        if expert not in self._packed:
            return
        spec, here = self.spec, self.on_gpu
        wanted = {"gate", "up", "down"} if spec.has_gate else {"up", "down"}
        if spec.has_bias:
            wanted |= {f"{name}_bias" for name in wanted}
        with self._leaving:  # threads pack parts of one expert
            packed = self._packed[expert]
            packed.add(projection)
            if packed != wanted or expert in self._left:
                return
            assert here is not None
            try:
                here.put(self.native, expert)
            except RuntimeError as error:
                raise OperatorError(f"hybrid_experts: {error}") from None
            self.native.release(expert)
            self._left.add(expert)

    def packed_weights(self) -> PackedWeights | None:
        # Experts that the GPU has in another format are packed from the checkpoint, not from rounded weights. Those
        # that leave RAM do so while they are packed.
        return super().packed_weights() if self._for_gpu is self.native and not self._leave else None

    def finish(self) -> None:
        super().finish()
        if self.config.device == "cpu":
            return
        device = torch.device(self.config.device)
        self.handoff.prepare(device)
        # First, since it page-locks the experts: the bus then takes them at its full speed.
        if self.config.prefill != "cpu" and StreamedExperts.support(self.spec):
            try:
                self.streamed = StreamedExperts(self.spec, self.native, device, gone=self._left)
                for helper in self.helpers:
                    self.streamed.add_helper(torch.device(helper))
            except RuntimeError as error:
                if self.config.streams_from is not None:
                    raise OperatorError(f"hybrid_experts: {error}. Use prefill: cpu.") from None
                log.warning("prompts stay on the CPU: %s", error)
        self._packed.clear()
        if self.resident and self.on_gpu is None:
            try:
                self.on_gpu = self._place_on(device)
            except OperatorError as error:
                if not self.lends:
                    raise
                log.warning("experts stay on the CPU alone: %s", error)
        is_same, self._for_gpu = self._for_gpu is self.native, self.native
        here = self.on_gpu
        if here is not None and here.spares:
            self._join_cache(here, device)
        if here is not None and self.streamed is not None and is_same:
            first = here.first_places
            places = (lambda: first) if self.seat is None else self.seat.places
            self.streamed.here = Here(here.native, here.memory, places)
        if here is not None and self.lends:
            self._queueing = threading.Lock()
            lent.lend(self)

    def _join_cache(self, here: GpuExperts, device: torch.device) -> None:
        try:
            # Experts that are streamed are page-locked already.
            locked = self.streamed.source if self.streamed is not None else _native.Streamed(self.native)
            self.seat = expert_cache.of(device).join(self.native, here, self.handoff.channel(device), locked)
        except RuntimeError as error:
            if self.config.dynamic is True:
                raise OperatorError(f"hybrid_experts: {error}. Use dynamic: false.") from None
            log.warning("the experts on the GPU stay where they are: %s", error)

    def unwritable(self) -> str | None:
        if self.config.device != "cpu":
            return f"{self.config.device} may compute with them, or with a copy"
        return super().unwritable()

    def compute(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        self._require_ram("gradients, torch.compile and inputs on the CPU need")
        return super().compute(hidden_states, top_k_index, top_k_weights)

    def unpack(self, name: str, expert: int | None = None) -> Tensor:
        self._require_ram("saving and gradients need")
        return super().unpack(name, expert)

    def _require_ram(self, who: str) -> None:
        if self._leave:
            raise OperatorError(
                f"hybrid_experts: {len(self.resident)} of {self.num_experts} experts lie on {self.config.device} "
                f"alone (ram_copy: false), and {who} all of them in RAM. Load the model with ram_copy: true for that."
            )

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """The weighted sum of the experts' outputs.

        hidden_states  [m, hidden] float32, bfloat16 or float16
        top_k_index    [m, t] int64 or int32; -1 and num_experts are skipped
        top_k_weights  [m, t] float32, bfloat16 or float16
        Returns        [m, hidden] of hidden_states' dtype, on its device
        Raises         OperatorError for an invalid id; on a GPU, in a later call
        """
        return self.complete(self.start(hidden_states, top_k_index, top_k_weights))

    def start(
        self,
        hidden_states: Tensor,
        top_k_index: Tensor,
        top_k_weights: Tensor,
        ranks: tuple[int, int] | None = None,
    ) -> Started:
        """Begin `forward`; `complete` ends it. Several may be under way; they are computed in the order of the starts.

        ranks    (first, end): compute only the experts of a token with these ranks; see `submits.of_ranks`
        Raises   OperatorError, as `forward`
        """
        needs_graph = torch.is_grad_enabled() and (hidden_states.requires_grad or top_k_weights.requires_grad)
        if not hidden_states.is_cuda or needs_graph or torch.compiler.is_compiling():
            if ranks is not None:
                top_k_index = of_ranks(top_k_index, top_k_weights, *ranks)
            return super().forward(hidden_states, top_k_index, top_k_weights)
        # The host fills the ring of streamed experts, and a replayed graph runs no host code.
        captured = torch.cuda.is_current_stream_capturing()
        streamed = self._streams(*top_k_index.shape) if ranks is None and not captured else 0
        if streamed:
            try:
                with self._queueing:
                    return self._stream(streamed, hidden_states, top_k_index, top_k_weights)
            except torch.OutOfMemoryError:
                pass
            # Here, where nothing of the failed try is left.
            if self.streamed is not None and lent.give_back(self.streamed.devices):
                return self.start(hidden_states, top_k_index, top_k_weights)
            self._keep_on_cpu()
        with self._queueing:
            if self.seat is not None and not captured:
                if len(hidden_states) > MOST_TOKENS:  # an exchange waits only for submits with a slot
                    with self.seat.held(torch.cuda.current_stream(hidden_states.device)):
                        return self._submit(hidden_states, top_k_index, top_k_weights, ranks)
                if self.seat.begins() and (ranks is None or ranks[0] == 0):
                    self.seat.cache.step()
            return self._submit(hidden_states, top_k_index, top_k_weights, ranks)

    def _submit(self, x: Tensor, ids: Tensor, weights: Tensor, ranks: tuple[int, int] | None) -> Underway:
        """Submit to the CPU what the GPU does not have; the submit itself divides the routes. Start the GPU's part."""
        here = self.on_gpu
        asked = None if here is None else here.ask(ids)
        ticket = self.handoff.submit(x, ids, weights, asked, ranks)
        if here is None or asked is None or asked.chosen is None:
            return Underway(ticket, None)
        return Underway(ticket, here.forward(x, asked.chosen, weights))

    def routes(self, experts: int, top_k: int) -> bool:
        """Whether `start_routed` can choose top_k of so many experts."""
        return (
            self.config.device != "cpu"
            and experts == self.num_experts <= MOST_ROUTED
            and top_k <= MOST_CHOSEN
        )

    def start_routed(self, hidden_states: Tensor, logits: Tensor, top_k: int, normed: bool) -> Underway:
        """As `start`, but the submit also chooses the experts, by softmax. For a GPU, without gradients.

        hidden_states  [m, hidden]; outside of graphs, m is at most MOST_TOKENS
        logits         [m, num_experts] contiguous
        normed         divide the weights of the top_k experts by their sum; then they are rounded to the logits' dtype
        Raises         OperatorError, as `forward`
        """
        ids = torch.empty(len(logits), top_k, dtype=torch.int64, device=logits.device)
        weights = logits.new_empty(len(logits), top_k)
        with self._queueing:
            here, seat = self.on_gpu, self.seat
            if seat is not None and seat.begins() and not torch.cuda.is_current_stream_capturing():
                seat.cache.step()
            asked = None if here is None else here.ask(ids)
            ticket = self.handoff.submit(hidden_states, ids, weights, asked, routing=Routing(logits, normed))
            if here is None or asked is None or asked.chosen is None:
                return Underway(ticket, None)
            return Underway(ticket, here.forward(hidden_states, asked.chosen, weights))

    def is_foreseeable(self, top_k: int) -> bool:
        """Whether `foresee` can pay for a token with top_k experts. Where the GPU has experts of its own, it does not
        wait for another layer's."""
        return self.on_gpu is None and self.config.foresee and self.handoff.is_foreseeable(top_k)

    def foresee(self, started: Started, ids: Tensor) -> None:
        """Between `start` and `complete` of another layer on the same GPU, of one token: what may be asked for next.

        ids      [1, t] int64 contiguous; results do not depend on them
        Raises   OperatorError for another shape, dtype or device
        """
        if isinstance(started, Underway):
            self.handoff.foresee(started.ticket, ids)

    def _stream(self, count: int, x: Tensor, ids: Tensor, weights: Tensor) -> Started:
        """Compute `count` experts on the GPU, those that are there and the first of the others, while the CPU computes
        the rest."""
        streamed = self.streamed
        assert streamed is not None
        if streamed.here is None or self.seat is None:
            held: AbstractContextManager[Sequence[int]] = nullcontext(streamed.places())
        else:
            held = self.seat.held(torch.cuda.current_stream(x.device))
        with held as places:
            if count == self.num_experts:
                return streamed.forward(x, ids, weights, places=places)
            # The CPU's part is submitted first: it would otherwise wait for the work that is queued on the GPU.
            ticket = self.handoff.submit(x, ids.masked_fill(streamed.passes(ids, count, places), -1), weights)
            return Underway(ticket, streamed.forward(x, ids, weights, count, torch.float32, places))

    def streams(self, tokens: int, top_k: int) -> bool:
        """Whether experts are streamed through the GPU for so many tokens; never in a graph."""
        return self._streams(tokens, top_k) > 0

    def _streams(self, tokens: int, top_k: int) -> int:
        """How many experts to compute on the GPU as `_stream` does; 0 if the CPU computes this call."""
        if self.streamed is None or tokens <= MOST_TOKENS or top_k == 0:
            return 0
        if self.config.streams_from is not None:
            return self.num_experts if tokens >= self.config.streams_from else 0
        if tokens < streaming.FEWEST_TOKENS:
            return 0
        here = 0 if self.streamed.here is None else len(self.resident)
        absent = self.num_experts - here
        if not absent:
            return self.num_experts
        kind, device = weights_in_words(self.config), torch.device(self.config.device)
        try:
            if self._rates is None:
                measured = functools.partial(prefill_rates.measure, self.streamed, kind, top_k)
                self._rates = lent.retried(measured, {device})
            over = lent.retried(functools.partial(self.streamed.links_for, tokens), self.streamed.devices)
        except torch.OutOfMemoryError:
            self._keep_on_cpu()
            return 0
        rates = self._rates if over is None else self._rates.over(over)
        streamed = rates.passing(tokens, absent, absent / self.num_experts)
        return here + streamed if streamed else 0

    def _keep_on_cpu(self) -> None:
        text = "no room to stream experts through the GPU"
        if self.config.streams_from is not None:
            raise OperatorError(
                f"hybrid_experts: {text}. Give it more memory, or use prefill: auto."
            ) from None
        log.warning("%s: prompts stay on the CPU", text)
        self.streamed = None

    def complete(self, started: Started, residual: Tensor | None = None) -> Tensor:
        """The result of `forward`, plus residual [m, hidden]. On a GPU, the current stream waits for it."""
        if isinstance(started, Tensor):
            return started if residual is None else started + residual
        return self.handoff.wait(started.ticket, addend=started.part, residual=residual)
