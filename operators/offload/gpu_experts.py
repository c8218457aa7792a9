"""The resident experts of a layer, which are on a GPU: which they are, where they lie, and how they are computed.

They are copies, since the CPU holds every expert, but with `ram_copy: false`. An expert has the same packed layout on
the GPU as in RAM, so placing one there only copies bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from ktinject import _native
from ktinject.addresses import CODES, address, stream_of
from ktinject.checkpoints.beside import read
from ktinject.checkpoints.json_text import parse_json
from ktinject.errors import CheckpointError, OperatorError
from ktinject.operators.offload.submits import OnGpu

# Memory that `gpu_experts: auto` leaves free beside the longest request, for activations and whatever is not known: a
# share of the rest, plus some bytes.
RESERVE_SHARE, RESERVE_BYTES = 0.15, 2**30
# Pairs (token, expert of the token) in one launch: the limit of a dimension of a CUDA grid.
MOST_PAIRS = 65535
_PROFILE_BYTES = 16 << 20  # largest file that is read; 61 layers with 256 experts take 100 KB
_AGAIN = "Make one with `ktinject profile MODEL --prompts FILE`."


def read_profile(path: str) -> dict[str, list[int]]:
    """Read a file that `ktinject profile` has written.

    Returns  path of a layer's experts module → how often each of its experts was chosen
    Raises   OperatorError
    """
    try:
        found = parse_json(read(Path(path), _PROFILE_BYTES), path, _AGAIN)["experts"]
    except CheckpointError as error:
        raise OperatorError(f"profile {error}") from None
    except KeyError:
        raise OperatorError(f"profile {path!r}: it has no experts. {_AGAIN}") from None
    if not isinstance(found, dict) or not all(
        isinstance(counts, list) and all(type(count) is int and count >= 0 for count in counts)
        for counts in found.values()
    ):
        raise OperatorError(
            f"profile {path!r}: its experts must be lists of counts, one list a layer. {_AGAIN}"
        )
    return found


def hottest(counts: Sequence[int], n: int) -> tuple[int, ...]:
    """The ids of the n experts with the greatest counts, in ascending order; of equal counts, the first expert."""
    return tuple(sorted(sorted(range(len(counts)), key=lambda e: (-counts[e], e))[:n]))


def fill(counts: Mapping[str, Sequence[int]], expert_bytes: Mapping[str, int], room: int) -> dict[str, int]:
    """How many experts of each layer to place in `room` bytes. Those with the most traffic per byte come first.

    counts        path → how often each expert of the layer was chosen
    expert_bytes  path → bytes of one expert of the layer
    Returns       path → number of experts
    """
    order = sorted(
        (-count / max(1, sum(layer)) / expert_bytes[path], rank, path)
        for path, layer in counts.items()
        for rank, count in enumerate(sorted(layer, reverse=True))
    )
    taken = dict.fromkeys(counts, 0)
    for _, _, path in order:
        if expert_bytes[path] <= room:
            room -= expert_bytes[path]
            taken[path] += 1
    return taken


class GpuExperts:
    """The resident experts of one layer on one CUDA device.

    experts      source of the copies, in the GPU's format. Not kept
    num_experts  of the layer
    resident     ids of the experts to place
    spares       places more, where experts may come to lie later
    filled       the resident experts are loaded, and copied now; False: `put` copies each of them later
    Raises       OperatorError if there is no room for them
    """

    def __init__(
        self,
        experts: _native.Experts,
        num_experts: int,
        resident: Sequence[int],
        device: torch.device,
        spares: int = 0,
        filled: bool = True,
    ) -> None:
        self.native = _native.Resident(experts)
        self.hidden = experts.hidden_size
        self.spares = spares
        size = self.native.bytes
        try:
            self.memory = torch.empty((len(resident) + spares) * size, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError:
            raise OperatorError(
                f"no room for {len(resident)} experts of {size / 2**20:.1f} MiB on {device}. Give fewer gpu_experts."
            ) from None
        self.resident = list(resident)  # at first, by place
        for expert in resident if filled else ():
            self._copy(experts, expert)
        places = torch.full((num_experts,), -1, dtype=torch.int32, device="cpu")
        places[self.resident] = torch.arange(len(resident), dtype=torch.int32, device="cpu")
        self.first_places: tuple[int, ...] = (*places.tolist(),)  # for good, where experts do not move
        self.places = places.to(device)
        self.traffic = torch.zeros_like(self.places)
        torch.cuda.current_stream(device).synchronize()

    def put(self, experts: _native.Experts, expert: int) -> None:
        """Copy a resident expert, which is loaded, to its place. It is there when this returns. From any thread."""
        self._copy(experts, expert)
        torch.cuda.current_stream(self.memory.device).synchronize()

    def _copy(self, experts: _native.Experts, expert: int) -> None:
        at = self.resident.index(expert) * self.native.bytes
        memory = address("memory", self.memory, self.memory.device)
        self.native.copy(experts, expert, memory + at, stream_of(self.memory.device))

    def empty(self) -> Tensor:
        """Have no expert here from now on, in the order of the current stream; returns the memory.

        The tables stay where they are, for graphs that read them.
        """
        with torch.cuda.device(self.memory.device):
            self.places.fill_(-1)
        memory, self.memory = self.memory, self.memory.new_empty(0)
        return memory

    @staticmethod
    def table_bytes(num_experts: int) -> int:
        """Bytes on the GPU of the table of places and of the counts of traffic."""
        return 2 * 4 * num_experts

    def ask(self, ids: Tensor) -> OnGpu:
        """The argument `on_gpu` for the submit of `ids` [m, t]. Its `chosen` then goes to `forward`."""
        return OnGpu(self.places, torch.empty(ids.shape, dtype=torch.int32, device=ids.device), self.traffic)

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """The weighted sum over the resident experts of each token. Only enqueues kernels.

        x        [m, hidden] float32, bfloat16 or float16; rounded to bfloat16
        chosen   [m, t] int32: places of resident experts; -1 for other experts
        weights  [m, t] float32, bfloat16 or float16
        Returns  [m, hidden] float32; zero for a token without a resident expert
        """
        x, weights = x.contiguous(), weights.contiguous()
        if x.data_ptr() % 16:
            x = x.clone()
        tokens, top_k = chosen.shape
        most = max(1, MOST_PAIRS // top_k)
        out = torch.empty((tokens, self.hidden), dtype=torch.float32, device=x.device)
        inner = torch.empty(
            (min(tokens, most) * top_k, self.native.inner_width), dtype=torch.bfloat16, device=x.device
        )
        for first in range(0, tokens, most):
            rows = slice(first, first + most)
            self.native.forward(
                address("x", x[rows], x.device),
                CODES[x.dtype],
                address("chosen", chosen[rows], x.device, torch.int32),
                address("weights", weights[rows], x.device),
                CODES[weights.dtype],
                chosen[rows].shape[0],
                top_k,
                address("memory", self.memory, x.device),
                address("inner", inner, x.device),
                address("out", out[rows], x.device, torch.float32),
                stream_of(x.device),
            )
        return out
