"""The process group of a tensor-parallel model: one process a GPU, started by torchrun.

    rank 0 ── data: NCCL on GPUs, gloo on CPUs; in the order of the stream ──► other ranks
           ── control: gloo; decisions and failures, from host to host ──────► other ranks

All processes run the same program, so they call the same functions in the same order. A decision or a failure that only
one process knows is sent through the control group. So no process waits for another one that has given up.
"""

from __future__ import annotations

import functools
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ktinject import env, errors
from ktinject.errors import OperatorError, PlanError
from ktinject.machine import Machine
from ktinject.support import SUPPORTED, Support

# Rank 0 packs all experts, and the other ranks wait for it.
_LOADING = timedelta(hours=2)
# Counts from the moment when a transfer is queued, so it includes the computation that the transfer waits for.
_COMPUTING = timedelta(minutes=30)
_START = "Start it with `torchrun --nproc-per-node <number of GPUs> script.py`."


class ProcessGroup:
    """The processes that share a model, as one of them sees them.

    rank     of this process, 0 to size - 1; rank 0 holds the experts
    size     number of processes
    device   where this process computes
    failure  an error of this process that is not raised yet, since all ranks have to raise it at the same point; ""
             without one
    """

    def __init__(self, rank: int, size: int, device: torch.device, control: Any, data: Any) -> None:
        self.rank, self.size, self.device = rank, size, device
        self.failure = ""
        self._control, self._data = control, data
        self._checks: list[weakref.WeakMethod[Callable[[], None]]] = []

    @classmethod
    def join(cls, machine: Machine, devices: str | Sequence[str] | None) -> ProcessGroup | None:
        """Connect to the other processes.

        devices  None: rank n gets the n-th GPU, or the CPU on a machine without GPUs; else one device for each rank, or
                 "cpu" for all
        Returns  None if this is the only process
        Raises   PlanError, in all processes alike
        """
        rank, size = rank_and_size()
        device = torch.device(_device(machine, devices, rank, size))
        if size == 1:
            return None
        return cls(rank, size, device, *_connect(device))

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Overwrite `tensor`, which is contiguous, with rank 0's values in all ranks; returns it."""
        dist.broadcast(tensor, 0, group=self._data)
        return tensor

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Overwrite `tensor`, which is contiguous, with the sum over all ranks; returns it. All get the same bits."""
        dist.all_reduce(tensor, group=self._data)
        return tensor

    def gather_last(self, part: Tensor) -> Tensor:
        """[…, n] → […, size · n]: the parts of all ranks along the last dimension, by rank."""
        parts = part.new_empty(self.size, *part.shape)
        if part.device.type == "cuda":
            dist.all_gather_into_tensor(parts, part.contiguous(), group=self._data)
        else:
            dist.all_gather(list(parts.unbind(0)), part.contiguous(), group=self._data)
        return parts.movedim(0, -2).flatten(-2)

    def all_gather(self, thing: Any) -> list[Any]:
        """Exchange small, picklable objects through the control group. Returns those of all ranks, by rank."""
        said: list[Any] = [None] * self.size
        dist.all_gather_object(said, thing, group=self._control)
        return said

    def all_agree(self, fine: bool) -> bool:
        """Whether `fine` is true in all ranks."""
        return all(self.all_gather(fine))

    def all_support(self, support: Support) -> Support:
        """The first refusal by rank, if any rank refuses; so all ranks decide alike."""
        return next((said for said in self.all_gather(support) if not said), SUPPORTED)

    @contextmanager
    def sharing_errors(self) -> Iterator[None]:
        """If one rank raises in the `with` block, the other ranks raise the same error at its end.

        A rank that raises must not leave the others inside a collective call: they would wait for it.
        """
        try:
            yield
        except BaseException as error:
            self.all_gather((type(error).__name__, str(error)))
            raise
        self._raise_what(self.all_gather(None))

    def _raise_what(self, said: list[tuple[str, str] | None]) -> None:
        for rank, failure in enumerate(said):
            if failure is not None and rank != self.rank:
                kind = getattr(errors, failure[0], OperatorError)
                text = failure[1] if kind.__name__ == failure[0] else f"{failure[0]}: {failure[1]}"
                raise kind(f"process {rank} of {self.size}: {text}")

    def add_check(self, check: Callable[[], None]) -> None:
        """Register a method that `raise_if_failed` calls to find failures. The method raises OperatorError for one.

        The group does not keep the method's object alive.
        """
        self._checks.append(weakref.WeakMethod(check))

    def raise_if_failed(self, logits: Tensor) -> None:
        """At the end of a forward pass, raise in all ranks the error of any rank.

        logits  [b, …, v], the same bits in all ranks. A failure of the experts makes all tokens NaN and so all logits,
                so the ranks exchange their failures only if there is a NaN
        Raises  OperatorError
        """
        if bool(logits[..., 0].isnan().any()):
            self.raise_failures()

    def raise_failures(self) -> None:
        """The second half of `raise_if_failed`, once all ranks have seen NaN. Raises OperatorError."""
        for reference in self._checks:
            try:
                if (check := reference()) is not None:
                    check()
            except OperatorError as error:
                self.failure = self.failure or str(error)
        said, self.failure = self.all_gather(self.failure), ""
        for rank, failure in enumerate(said):
            if failure:
                where = "" if rank == self.rank else f"process {rank} of {self.size}: "
                raise OperatorError(f"{where}{failure}")

    def begin_request(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Check that all ranks were given the same request, and set rank 0's random state in all of them.

        args, kwargs  the arguments of `generate`
        Raises        OperatorError if the tensors in the arguments differ between ranks
        """
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        mine = [(list(tensor.shape), _checksum(tensor)) for tensor in tensors]
        state: list[Tensor] = [torch.get_rng_state()] if self.rank == 0 else []
        if self.rank == 0 and self.device.type == "cuda":
            state.append(torch.cuda.get_rng_state(self.device))
        said = self.all_gather((mine, state))
        for rank, (theirs, _) in enumerate(said):
            if theirs != said[0][0]:
                raise OperatorError(
                    f"generate: process {rank} of {self.size} was given {_shapes(theirs)}, process 0 "
                    f"{_shapes(said[0][0])}, and they must be the same. Give every process the same prompts."
                )
        if self.rank:
            torch.set_rng_state(said[0][1][0])
            if self.device.type == "cuda":
                torch.cuda.set_rng_state(said[0][1][1], self.device)


@functools.cache
def _connect(device: torch.device) -> tuple[Any, Any]:
    """The process groups for control and data. One pair serves all models of a process."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", timeout=_LOADING)
    control = dist.new_group(backend="gloo", timeout=_LOADING)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    data = dist.new_group(backend="nccl" if device.type == "cuda" else "gloo", timeout=_COMPUTING)
    # NCCL connects and takes its memory at the first transfer, so make that here and not in a forward pass.
    dist.all_reduce(torch.zeros(1, device=device, dtype=torch.float32), group=data)
    return control, data


def _checksum(tensor: Tensor) -> int:
    return zlib.crc32(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)


def _shapes(tensors: list[tuple[list[int], int]]) -> str:
    return ", ".join(f"{shape} (checksum {checksum:08x})" for shape, checksum in tensors) or "no tensor"


def rank_and_size() -> tuple[int, int]:
    """This process's rank, and the number of processes. Raises PlanError."""
    if not dist.is_available():
        raise PlanError("tp: this build of torch has no torch.distributed. Use another one, or leave tp out.")
    if dist.is_initialized():
        rank, size = dist.get_rank(), dist.get_world_size()
    else:
        found = env.launched()
        if found is None:
            raise PlanError(f"tp: this process was not started by torchrun: found no RANK. {_START}")
        rank, size = found
    here = env.launched_here() or size
    if here != size:
        raise PlanError(
            f"tp: found {size} processes, {here} of them on this machine; the experts are in the memory of one "
            "machine, and allowed are the processes of one. Start them all on it."
        )
    return rank, size


def _device(machine: Machine, devices: str | Sequence[str] | None, rank: int, size: int) -> str:
    """The device of rank `rank`. Raises PlanError."""
    gpus = [f"cuda:{gpu.index}" for gpu in machine.gpus]
    listed = [devices] if isinstance(devices, str) else list(gpus or ["cpu"] if devices is None else devices)
    listed = ["cuda:0" if device == "cuda" else str(device) for device in listed]
    if listed == ["cpu"]:
        return "cpu"
    absent = [device for device in listed if device not in gpus]
    if absent:
        raise PlanError(
            f"tp: there is no device {', '.join(absent)}; found are {', '.join(gpus) or 'no GPUs'}. "
            'Name a GPU for each process, or "cpu".'
        )
    if len(listed) < size or (devices is not None and len(listed) != size):
        raise PlanError(
            f"tp: found {size} processes and {len(listed)} GPUs ({', '.join(listed)}); each process has one of its "
            f"own. Start {len(listed)} processes, or name {size} GPUs."
        )
    return listed[rank]
