"""Work for the CPU's experts that is handed in by one call and waited for by another.

    ticket = handoff.submit(x, ids, weights)      # returns at once, on a GPU in the order of the current stream
    …                                             # what the device does meanwhile
    out = handoff.wait(ticket)                    # [m, hidden], where and as x was

Several submits may be under way; they are computed in the order in which they were submitted. On a CUDA device both
calls only put kernels into the current stream, so both can be captured in a graph, and each replay is a new submit and
a new wait. On the CPU a thread of the native core computes while the caller goes on.

A failure in the experts never hangs the GPU: it gets NaN. On a CUDA device `wait` returns before the answer is there,
so either it or the next submit, wait or check raises OperatorError; once, in one thread.
Whoever replays a graph calls `wake()` before, since a GPU cannot wake a sleeping thread, and `check()` of the operators
after it has looked at the result.
"""

from __future__ import annotations

import threading
from collections import deque
from contextlib import suppress

import torch
from torch import Tensor

from ktinject import _native
from ktinject.addresses import CODES, address, stream_of
from ktinject.errors import OperatorError
from ktinject.machine import has_gpu
from ktinject.operators.offload.submits import MOST_TOKENS, Mode, OnGpu, Routing, Slots, Ticket

# Answers that kernels may still be reading.
_read: deque[tuple[torch.cuda.Event, Tensor]] = deque()
_read_lock = threading.Lock()


class Handoff:
    """The way of one layer to its experts on the CPU.

    experts  filled; must not be closed while submits are under way
    mode     how a CUDA device tells the CPU: mapped flags, or host functions where those do not work (auto)
    """

    def __init__(self, experts: _native.Experts, hidden_size: int, mode: Mode = "auto") -> None:
        self._experts = experts
        self._hidden = hidden_size
        self._mode = mode
        self._slots: dict[torch.device, Slots] = {}
        self._smaller: list[Slots] = []  # graphs that were captured with them still use them

    def prepare(self, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> None:
        """Take the buffers for a CUDA device now, as the first submit would; needed before a capture.

        Raises   OperatorError if there is no room for them, or `flags` were asked for and do not work
        """
        held = self._slots.get(device)
        if held is not None and held.value_bytes >= dtype.itemsize:
            return
        if torch.cuda.is_current_stream_capturing():
            raise OperatorError(
                "handoff: its buffers cannot be allocated while a graph is captured. Run the model once before."
            )
        if held is not None:
            self._smaller.append(held)
        try:
            self._slots[device] = Slots(self._experts, device, dtype.itemsize, self._mode)
        except (RuntimeError, MemoryError) as error:
            raise OperatorError(f"handoff: {str(error) or 'no room for pinned buffers'}.") from None

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
        on_gpu   experts that lie on the device, which the CPU leaves out
        ranks    first and end: only these of a token's experts, as `of_ranks` numbers them
        routing  ids (int64) and weights (of the logits' dtype), both contiguous, are written by this instead of read;
                 on a CUDA device, for up to MOST_TOKENS tokens
        Returns  a ticket to be given to `wait` once
        Raises   OperatorError for shapes, dtypes and devices, and for what went wrong before; during a capture
                 also for more than MOST_TOKENS tokens
        """
        self._check(x, ids, weights)
        if routing is not None and not (x.is_cuda and len(x) <= MOST_TOKENS):
            raise OperatorError(
                f"handoff: found {len(x)} tokens on {x.device} to be routed by the submit; "
                f"allowed are up to {MOST_TOKENS} on a CUDA device."
            )
        ticket = Ticket(x)
        if x.shape[0] == 0:
            return ticket
        capturing = x.is_cuda and torch.cuda.is_current_stream_capturing()
        if not x.is_cuda or (x.shape[0] > MOST_TOKENS and not capturing):
            self._submit_host(
                ticket, x, ids if ranks is None else of_ranks(ids, weights, *ranks), weights, on_gpu
            )
            return ticket
        if x.shape[0] > MOST_TOKENS:
            raise OperatorError(
                f"handoff: found {x.shape[0]} tokens in a graph; allowed are up to {MOST_TOKENS}. "
                "Run prompts outside of graphs."
            )
        self.prepare(x.device, x.dtype)
        if not capturing:
            self.check()
            moved.set()
        slots = self._slots[x.device]
        x = x.contiguous()
        if routing is None:  # else they are written
            ids, weights = ids.contiguous(), weights.contiguous()
        ticket.stream = torch.cuda.current_stream(x.device).cuda_stream
        ticket.captured = capturing
        slot = slots.take()
        try:
            logits = None if routing is None else routing.logits
            if logits is not None and (logits.dim() != 2 or len(logits) != len(ids)):
                raise ValueError(f"logits: found {list(logits.shape)}; expected [{len(ids)}, experts]")
            slots.native.submit(
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
                address("logits", logits, x.device, weights.dtype),
                routing is not None and routing.normed,
                ticket.stream,
            )
        except (RuntimeError, ValueError) as error:
            slots.give(slot)
            raise OperatorError(f"handoff: {error}.") from None
        ticket.slot, ticket.channel = slot, slots
        return ticket

    def wait(
        self,
        ticket: Ticket,
        out: Tensor | None = None,
        addend: Tensor | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """The result of a submit; on a CUDA device in the order of the current stream.

        out      [m, hidden] contiguous, of x's dtype and device, to write to; None: a new tensor
        addend   [m, hidden] float32 contiguous on x's device, added before rounding
        residual [m, hidden] contiguous, of x's dtype and device, added after rounding
        Raises   OperatorError for what the experts raised, or if nobody answered within the timeout
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
        slots, ticket.channel = ticket.channel, None
        if slots is None:
            raise OperatorError("handoff: this ticket was waited for already; submit again.")
        try:
            slots.native.wait(
                ticket.slot,
                ticket.shape[0],
                CODES[ticket.dtype],
                *addresses,
                torch.cuda.current_stream(ticket.device).cuda_stream,
            )
        except RuntimeError as error:
            raise OperatorError(f"handoff: {error}.") from None
        finally:
            slots.give(ticket.slot)
        if not ticket.captured:
            self.check()
        return out

    def check(self) -> None:
        """Raise OperatorError for what went wrong in submits so far; looks at two words of memory."""
        for slots in (*self._slots.values(), *self._smaller):
            try:
                slots.native.check()
            except (IndexError, ValueError, RuntimeError) as error:
                raise OperatorError(f"handoff: {error}.") from None

    def forget(self) -> None:
        """Wait for what is under way, and drop what went wrong in it: for whoever has an exception to raise already."""
        for slots in (*self._slots.values(), *self._smaller):
            for _ in ("who waits", "what was computed"):
                with suppress(IndexError, ValueError, RuntimeError):
                    torch.cuda.synchronize(slots.device)
                    slots.native.check()

    def describe(self, device: torch.device) -> str:
        """How a CUDA device would tell the CPU, and why, for the plan."""
        if self._mode != "auto":
            return self._mode
        if not has_gpu(str(device)) or not _native.cuda_built():
            return "flags"  # what a GPU that is planned for, but cannot be asked, most likely has
        reason = _native.why_no_flags(device.index)
        return f"host_func, since mapped flags do not work here: {reason}" if reason else "flags"

    def exchange(
        self, shapes: _native.Resident, leaving: int, coming: int, place: int, places: Tensor, memory: Tensor
    ) -> None:
        """Put expert `coming` to where `leaving` lies, in the current stream, which must not be one that submits.

        Waits for steps under way that may use `leaving`, but keeps none waiting; returns when the table says so.
        """
        self._slots[memory.device].native.exchange(
            shapes,
            self._experts,
            leaving,
            coming,
            place,
            address("places", places, memory.device, torch.int32),
            address("memory", memory, memory.device),
            torch.cuda.current_stream(memory.device).cuda_stream,
        )

    def read(self, counts: Tensor) -> Tensor:
        """A small tensor of a CUDA device, as it is now, through the current stream, whoever captures meanwhile."""
        out = torch.empty_like(counts, device="cpu")
        here, there = address("counts", counts, counts.device), address("out", out, out.device)
        _native.read_device(here, there, counts.nbytes, stream_of(counts.device))
        return out

    def modes(self) -> dict[torch.device, Mode]:
        """How each device that was used tells the CPU."""
        return {device: slots.mode for device, slots in self._slots.items()}

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
        """out = answer + addend; the answer is on the CPU, in page-locked memory where out is on a GPU."""
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
        # torch knows nothing of who reads there, and would give the memory to the next answer.
        with _read_lock:
            while _read and _read[0][0].query():
                _read.popleft()
            _read.append((torch.cuda.current_stream(out.device).record_event(), answer))

    def _submit_host(
        self, ticket: Ticket, x: Tensor, ids: Tensor, weights: Tensor, on_gpu: OnGpu | None
    ) -> None:
        if on_gpu is not None:
            ids = on_gpu.split(ids)
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
    """Contiguous copies on the CPU of what is on a GPU, by way of page-locked memory, waited for once."""
    if not tensors[0].is_cuda:
        return [tensor.contiguous() for tensor in tensors]
    copies = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in tensors]
    for copy, tensor in zip(copies, tensors):
        copy.copy_(tensor, non_blocking=True)
    torch.cuda.current_stream(tensors[0].device).synchronize()
    return copies


def of_ranks(ids: Tensor, weights: Tensor, first: int, end: int) -> Tensor:
    """ids [m, t] with -1 for all but the experts of a token of ranks first to end - 1 by |weight|.

    Rank 0 has the greatest weight [m, t]; of equal ones, the first in its row.
    """
    order = weights.abs().argsort(dim=-1, descending=True, stable=True)
    ranks = order.argsort(dim=-1)
    return ids.masked_fill((ranks < first) | (ranks >= end), -1)


# Set whenever there is traffic on a GPU, for whoever follows it.
moved = threading.Event()


def wake() -> None:
    """Wake the thread that answers. To be called before a graph with submits in it is replayed."""
    _native.handoff_wake()
    if not moved.is_set():
        moved.set()
