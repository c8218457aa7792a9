"""Hands work to the experts on the CPU: one call submits it, and another call waits for the result.

    ticket = handoff.submit(x, ids, weights)      # returns at once, on a GPU in the order of the current stream
    …                                             # other work of the device
    out = handoff.wait(ticket)                    # [m, hidden], of x's dtype, on x's device

Several submits may be under way; they are computed in the order in which they were submitted. On a CUDA device both
calls only put kernels into the current stream. So a CUDA graph can capture both, and each replay is a new submit and
a new wait. A graph may hold submits of any number of tokens, and keeps their buffers alive. On the CPU, a thread of
the native core computes while the caller continues.

A failure in the experts never hangs the GPU: the result is NaN. On a CUDA device `wait` returns before the result is
there, so the error is raised by this call or by the next submit, wait or check; once, in one thread. After a replay,
call `check()` when the result has been read. Call `wake()` before a replay: a GPU cannot wake a sleeping thread, so
without it the first result comes up to 50 us later, or up to 1 ms later if there was no work for a second.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections import deque
from contextlib import suppress

import torch
from torch import Tensor

from ktinject import _native
from ktinject.addresses import CODES, address, stream_of
from ktinject.errors import OperatorError
from ktinject.machine import has_gpu, limits_of
from ktinject.operators.offload.submits import (
    MOST_EXPERTS_PER_TOKEN,
    MOST_TOKENS,
    SLOTS,
    Mode,
    OnGpu,
    Routing,
    Slots,
    Ticket,
    live_rows,
    mode_of,
    of_ranks,
    take_from,
    take_shared,
)

logger = logging.getLogger("ktinject")

# Bytes of a token's experts from which on a guess at them pays: 40 µs at 200 GB/s.
_LEAST_FORESEEN = 8 << 20
# Where the driver ends kernels that run for long.
_SHORT_WAITS = (
    f"a captured step waits {_native.LONGEST_KERNEL_SECONDS:g} s at most for the CPU, since the driver ends kernels "
    "that run for seconds, mostly where a display is attached"
)
# Answers in page-locked memory that kernels may still be reading, each with an event that follows those kernels.
_read: deque[tuple[torch.cuda.Event, Tensor]] = deque()
_read_lock = threading.Lock()


@functools.cache
def _warn_of_short_waits(device: torch.device) -> None:
    """Once a process and device."""
    assert device.index is not None
    if limits_of(device.index).get("ends_long_kernels"):
        logger.warning(
            "%s: %s. Use a GPU without a display where the CPU may be held up for longer.",
            device,
            _SHORT_WAITS,
        )


class Handoff:
    """Submits the work of one layer to its experts on the CPU.

    experts  the layer's experts, with weights; must not be closed while submits are under way
    mode     how a CUDA device signals the CPU: by flags in mapped memory, or by host functions of the stream; auto:
             flags where they work
    foreign  submits come from another engine: ids that are no expert are skipped, the host never waits for a CUDA
             device, whatever the number of tokens, and what lies on the CPU may be overwritten after `submit`
    """

    def __init__(
        self, experts: _native.Experts, hidden_size: int, mode: Mode = "auto", foreign: bool = False
    ) -> None:
        self._experts = experts
        self._hidden = hidden_size
        self._mode = mode
        self._foreign = foreign
        self._channels: dict[torch.device, _native.Channel] = {}
        self._own: dict[torch.device, Slots] = {}  # slots of up to MOST_TOKENS tokens
        # Keeps alive the shared slots that were used, and own slots that wider ones have replaced.
        self._others: set[Slots] = set()

    def prepare(self, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> None:
        """Allocate the buffers for a CUDA device now instead of at the first submit.

        dtype    of the tokens that will be submitted
        Raises   OperatorError if there is no room for them, or mode is `flags` and flags do not work
        """
        held = self._own.get(device)
        size = MOST_TOKENS * self._hidden * dtype.itemsize
        if held is not None and held.size >= size:
            return
        assert device.index is not None
        try:
            if device not in self._channels:
                self._channels[device] = _native.Channel(experts=self._experts, device=device.index)
            made = Slots(
                device, SLOTS, size, MOST_TOKENS * MOST_EXPERTS_PER_TOKEN, mode_of(device, self._mode)
            )
        except (RuntimeError, MemoryError) as error:
            raise OperatorError(f"handoff: {str(error) or 'no room for pinned buffers'}.") from None
        if made.mode == "flags":
            _warn_of_short_waits(device)
        if held is not None:
            self._others.add(held)
        self._own[device] = made

    def submit(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        on_gpu: OnGpu | None = None,
        ranks: tuple[int, int] | None = None,
        routing: Routing | None = None,
    ) -> Ticket:
        """Hand work to the experts on the CPU.

        x        [m, hidden] float32, bfloat16 or float16, on the CPU or a CUDA device
        ids      [m, t] int64 or int32 on the same device; -1 and num_experts are skipped
        weights  [m, t] float32, bfloat16 or float16 on the same device
        on_gpu   the experts that are on the device; the CPU skips them
        ranks    (first, end): compute only the experts of a token with these ranks; see `of_ranks`
        routing  the submit chooses the experts itself, and writes ids (int64) and weights (the logits' dtype, or
                 float32), both contiguous, instead of reading them; only on a CUDA device, in a graph or for up to
                 MOST_TOKENS tokens
        Returns  a ticket, to be given to `wait` once
        Raises   OperatorError for wrong shapes, dtypes or devices, and for failures of earlier submits
        """
        self._check(x, ids, weights)
        capturing = x.is_cuda and torch.cuda.is_current_stream_capturing()
        if routing is not None and not (x.is_cuda and (capturing or len(x) <= MOST_TOKENS)):
            raise OperatorError(
                f"handoff: found {len(x)} tokens on {x.device} to be routed by the submit; "
                f"allowed are up to {MOST_TOKENS} on a CUDA device, and any number in a graph."
            )
        ticket = Ticket(x)
        if x.shape[0] == 0:
            return ticket
        if not x.is_cuda or (x.shape[0] > MOST_TOKENS and not capturing and not self._foreign):
            self._submit_host(
                ticket, x, ids if ranks is None else of_ranks(ids, weights, *ranks), weights, on_gpu
            )
            return ticket
        self.prepare(x.device, x.dtype)
        if not capturing:
            self.check()
        channel, live = self._channels[x.device], live_rows(x)
        x = x.contiguous()
        if routing is None:  # else the submit writes to them, so they must not be copies
            ids, weights = ids.contiguous(), weights.contiguous()
        ticket.stream = torch.cuda.current_stream(x.device).cuda_stream
        ticket.captured = capturing
        slots, slot = self._take(x, ids.numel(), ticket)
        try:
            logits = None if routing is None else routing.logits
            if logits is not None and tuple(logits.shape) != (len(ids), self._experts.count):
                expected = [len(ids), self._experts.count]
                raise ValueError(f"logits: found {list(logits.shape)}; expected {expected}")
            if logits is not None and (
                logits.dtype not in CODES or weights.dtype not in (logits.dtype, torch.float32)
            ):
                raise ValueError(
                    f"logits: found {logits.dtype} beside weights of {weights.dtype}; allowed are float32, bfloat16, "
                    "float16, and weights of the same dtype or of float32"
                )
            channel.submit(
                slots.native,
                slot,
                address("hidden_states", x, x.device),
                CODES[x.dtype],
                address("top_k_index", ids, x.device),
                ids.dtype == torch.int64,
                address("top_k_weights", weights, x.device),
                CODES[weights.dtype],
                ids.shape[0],
                ids.shape[1],
                *((0, 0, 0) if on_gpu is None else on_gpu.addresses(ids)),
                *(ranks or (0, ids.shape[1])),
                address("live", live, x.device, torch.bool, ids.shape[:1]),
                self._foreign,
                address("logits", logits, x.device),
                CODES[weights.dtype if logits is None else logits.dtype],
                routing is not None and routing.normed,
                ticket.stream,
            )
        except (RuntimeError, ValueError) as error:
            slots.give(slot)
            raise OperatorError(f"handoff: {error}.") from None
        ticket.slot, ticket.slots, ticket.channel = slot, slots, channel
        return ticket

    def wait(
        self,
        ticket: Ticket,
        out: Tensor | None = None,
        addend: Tensor | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """The result of a submit: out = round(experts + addend) + residual. On a GPU, only the current stream waits.

        out       [m, hidden] contiguous, of x's dtype and device, receives the result; None: a new tensor
        addend    [m, hidden] float32 contiguous on x's device, added before rounding
        residual  [m, hidden] contiguous, of x's dtype and device, added after rounding
        Raises    OperatorError for failures of the experts, or if no answer came within the timeout
        """
        if out is None:
            out = torch.empty(ticket.shape, dtype=ticket.dtype, device=ticket.device)
        elif (out.shape, out.dtype, out.device) != (
            ticket.shape,
            ticket.dtype,
            ticket.device,
        ) or not out.is_contiguous():
            raise OperatorError(
                f"handoff: out is {list(out.shape)} {out.dtype} on {out.device}; it must be contiguous, "
                f"{list(ticket.shape)} {ticket.dtype} on {ticket.device}."
            )
        if ticket.shape[0] == 0:
            return out
        if ticket.task is not None:
            self._wait_host(ticket, out, addend)
            return out if residual is None else out.add_(residual)
        try:
            addresses = (
                address("out", out, ticket.device, ticket.dtype, ticket.shape),
                address("addend", addend, ticket.device, torch.float32, ticket.shape),
                address("residual", residual, ticket.device, ticket.dtype, ticket.shape),
            )
        except ValueError as error:
            raise OperatorError(f"handoff: {error}.") from None
        slots, ticket.slots = ticket.slots, None
        if slots is None or ticket.channel is None:
            raise OperatorError("handoff: this ticket was waited for already; submit again.")
        try:
            ticket.channel.wait(
                slots.native,
                ticket.slot,
                ticket.shape[0],
                CODES[ticket.dtype],
                *addresses,
                torch.cuda.current_stream(ticket.device).cuda_stream,
                ticket.stream,
            )
        except RuntimeError as error:
            raise OperatorError(f"handoff: {error}.") from None
        finally:
            slots.give(ticket.slot)
        if not ticket.captured:
            self.check()
        return out

    def is_foreseeable(self, top_k: int) -> bool:
        """Whether a token with top_k experts takes the CPU longer than the GPU takes for a guess, some 8 µs."""
        return self._experts.bytes // self._experts.count * top_k >= _LEAST_FORESEEN

    def foresee(self, ticket: Ticket, ids: Tensor) -> None:
        """Between submit and wait of another layer: say which of these experts will perhaps be asked for next.

        While the GPU then computes what lies between the two layers, the CPU reads these experts' weights into its
        caches. Results do not depend on it. Does nothing without flags.

        ticket   of the other layer's submit of one token, on a CUDA device
        ids      [1, t] int64 contiguous on this device; an id that is no expert is left out
        Raises   OperatorError for another shape, dtype or device, and as `prepare`
        """
        if ticket.slots is None or ticket.slots.mode != "flags":
            return
        self.prepare(ticket.device, ticket.dtype)
        try:
            if ticket.shape[0] != 1:
                raise ValueError(
                    f"found a submit of {ticket.shape[0]} tokens; only those of one have a next layer"
                )
            self._channels[ticket.device].foresee(
                ticket.slots.native,
                ticket.slot,
                address("ids", ids, ticket.device, torch.int64, (1, ids.shape[-1])),
                ids.shape[-1],
                ticket.stream,
            )
        except (RuntimeError, ValueError) as error:
            raise OperatorError(f"handoff: {error}.") from None

    def check(self) -> None:
        """Raise OperatorError for a failure of a submit so far. Cheap: reads two words of memory for each device."""
        for channel in self._channels.values():
            try:
                channel.check()
            except (IndexError, ValueError, RuntimeError) as error:
                raise OperatorError(f"handoff: {error}.") from None

    def forget(self) -> None:
        """Wait for all submits under way and discard their failures. For a caller that raises another error already."""
        for device, channel in self._channels.items():
            for _ in ("who waits", "what was computed"):
                with suppress(IndexError, ValueError, RuntimeError):
                    torch.cuda.synchronize(device)
                    channel.check()

    def describe(self, device: torch.device) -> str:
        """How a CUDA device will signal the CPU, and why, in words for the plan."""
        if self._mode != "auto":
            return self._mode
        if not has_gpu(str(device)) or not _native.cuda_built():
            return "flags"  # the plan is for a GPU that is not here; flags work on nearly all
        reason = _native.why_no_flags(device.index)
        if reason:
            return f"host_func, since mapped flags do not work here: {reason}"
        return f"flags; {_SHORT_WAITS}" if limits_of(device.index).get("ends_long_kernels") else "flags"

    def channel(self, device: torch.device) -> _native.Channel:
        """The native way from a CUDA device that has been prepared."""
        return self._channels[device]

    def read(self, counts: Tensor) -> Tensor:
        """Copy a CUDA tensor to the CPU by the current stream. Allowed while another thread captures a graph."""
        out = torch.empty_like(counts, device="cpu")
        here, there = address("counts", counts, counts.device), address("out", out, out.device)
        _native.read_device(here, there, counts.nbytes, stream_of(counts.device))
        return out

    def modes(self) -> dict[torch.device, Mode]:
        """Device → how it signals the CPU, for all devices used so far."""
        return {device: slots.mode for device, slots in self._own.items()}

    def _take(self, x: Tensor, routes: int, ticket: Ticket) -> tuple[Slots, int]:
        """A free slot for a submit of x with `routes` pairs of an id and a weight. Raises OperatorError."""
        own = self._own[x.device]
        if x.shape[0] <= MOST_TOKENS:
            slot = own.take(ticket.captured)
            if slot is None:
                raise OperatorError(
                    f"handoff: {SLOTS} submits of one layer are under way, which is the most. Wait for one first."
                )
            return own, slot
        try:
            if own.mode == "flags":
                slots, slot = take_shared(x.device, ticket.stream, x.nbytes, routes)
            else:  # layers cannot share slots here: a host function does not know which layer has the slot
                slots, slot = take_from(self._others, x.device, x.nbytes, routes, own.mode)
        except (RuntimeError, MemoryError) as error:
            raise OperatorError(
                f"handoff: no room for the pinned buffers of {x.shape[0]} tokens "
                f"({2 * x.nbytes / 2**20:.0f} MiB): {str(error) or 'out of memory'}. Submit or capture fewer tokens."
            ) from None
        self._others.add(slots)
        return slots, slot

    def _check(self, x: Tensor, ids: Tensor, weights: Tensor) -> None:
        if x.dim() != 2 or x.shape[1] != self._hidden or ids.dim() != 2 or ids.shape != weights.shape:
            found = ", ".join(str(list(tensor.shape)) for tensor in (x, ids, weights))
            raise OperatorError(
                f"hidden_states, top_k_index and top_k_weights: found shapes {found}; "
                f"expected [m, {self._hidden}], [m, t], [m, t]."
            )
        if ids.shape[0] != x.shape[0]:
            raise OperatorError(f"top_k_index: found {ids.shape[0]} tokens; hidden_states has {x.shape[0]}.")
        if x.dtype not in CODES or weights.dtype not in CODES:
            raise OperatorError(
                f"hidden_states and top_k_weights: found {x.dtype} and {weights.dtype}; "
                "allowed: float32, bfloat16, float16."
            )
        if ids.dtype not in (torch.int64, torch.int32):
            raise OperatorError(f"top_k_index: found {ids.dtype}; allowed: int64, int32.")
        if not x.device == ids.device == weights.device:
            raise OperatorError(
                f"hidden_states, top_k_index and top_k_weights are on {x.device}, {ids.device} and "
                f"{weights.device}; they must be on one device."
            )

    def _add(self, answer: Tensor, addend: Tensor, out: Tensor) -> None:
        """out = answer + addend. The answer is on the CPU, in page-locked memory if `out` is on a GPU."""
        if not out.is_cuda or self._hidden % 8:
            torch.add(answer.to(out.device), addend, out=out)
            return
        _native.add_from_host(
            address("answer", answer, answer.device, out.dtype, out.shape),
            address("addend", addend, out.device, torch.float32, out.shape),
            address("out", out, out.device),
            out.numel(),
            CODES[out.dtype],
            stream_of(out.device),
        )
        # torch does not know that a kernel reads the answer, and would reuse its memory too early.
        with _read_lock:
            while _read and _read[0][0].query():
                _read.popleft()
            _read.append((torch.cuda.current_stream(out.device).record_event(), answer))

    def _submit_host(
        self, ticket: Ticket, x: Tensor, ids: Tensor, weights: Tensor, on_gpu: OnGpu | None
    ) -> None:
        if (live := live_rows(x)) is not None:
            ids = ids.masked_fill(~live[:, None], -1)
        if on_gpu is not None:
            ids = on_gpu.split(ids)
        if self._foreign:
            ids = ids.masked_fill((ids < 0) | (ids >= self._experts.count), -1)
            x, weights = x.clone(), weights.clone()
        x, ids, weights = _on_host(x.detach(), ids, weights.detach().float())
        out = torch.empty(x.shape, dtype=x.dtype, pin_memory=ticket.device.type == "cuda")
        ticket.tensors = (x, ids, weights, out)
        ticket.task = _native.Task(
            self._experts,
            address("hidden_states", x, out.device),
            CODES[x.dtype],
            address("top_k_index", ids, out.device),
            ids.dtype == torch.int64,
            address("top_k_weights", weights, out.device, torch.float32),
            address("out", out, out.device),
            ids.shape[0],
            ids.shape[1],
        )
        ticket.task.submit()

    def _wait_host(self, ticket: Ticket, out: Tensor, addend: Tensor | None) -> None:
        assert ticket.task is not None
        if not ticket.tensors:
            raise OperatorError("handoff: this ticket was waited for already; submit again.")
        try:
            ticket.task.wait()
        except (IndexError, ValueError, RuntimeError) as error:
            raise OperatorError(f"{error}.") from None
        answer, ticket.tensors = ticket.tensors[-1], ()
        if addend is None:
            out.copy_(answer, non_blocking=True)
        else:
            self._add(answer, addend, out)


def _on_host(*tensors: Tensor) -> list[Tensor]:
    """Contiguous tensors on the CPU. Those of a GPU are copied to page-locked memory, with one wait for all of them."""
    if not tensors[0].is_cuda:
        return [tensor.contiguous() for tensor in tensors]
    copies = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in tensors]
    for copy, tensor in zip(copies, tensors):
        copy.copy_(tensor, non_blocking=True)
    torch.cuda.current_stream(tensors[0].device).synchronize()
    return copies


def wake() -> None:
    """Wake the dispatcher thread. Call it before a graph with submits is replayed: a GPU cannot wake the thread."""
    _native.handoff_wake()
