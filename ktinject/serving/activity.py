"""What a model is doing now, for those who look: which experts it uses, and where a decode step's time goes.

Nothing is counted while nobody asks. Who asks gets what happened since somebody began to; when nobody has asked for
some seconds, it ends.

    the CPU's experts    counted and timed by the native core, before they compute
    experts on a GPU     counted by the submits of their layer, on that GPU
    streamed experts     counted where they are streamed
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from ktinject import _native
from ktinject.errors import OperatorError
from ktinject.generation.piecewise_graph import without_collecting
from ktinject.hf.layers import Layers
from ktinject.operators.cpu_experts import CpuExperts
from ktinject.operators.hybrid_experts import HybridExperts
from ktinject.operators.offload.expert_cache import Hits
from ktinject.serving.picture import experts_of, on_gpu

logger = logging.getLogger("ktinject")

Span = tuple[int, int, int, int]  # begin, end: ns; layer; tokens

IDLE_S = 15.0  # nobody has asked for so long: nobody looks
_MOST_ROWS = 64  # tokens of a decode step; more are a prompt's
_STEPS = 32  # the latest steps, over which times are taken


class Activity:
    """Counts while somebody looks. `answer` may be called by many at once.

    now   what else there is to say at present
    """

    def __init__(self, model: PreTrainedModel, now: Callable[[], dict[str, Any]] = dict) -> None:
        self._now = now
        found = [(i, experts_of(model.get_submodule(path))) for i, path in enumerate(Layers(model).paths)]
        self._layers: dict[int, CpuExperts] = {i: one for i, one in found if one is not None}
        self._layer_of = {one.native.id: i for i, one in self._layers.items()}
        self._lock = threading.Lock()
        self._asked = self._since = 0.0
        self._before: dict[int, Any] = {}  # layer → its GPU's counts when this began
        self._spans: list[Span] = []
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._device = "cpu" if model.device.type == "cpu" else "gpu"
        self._handoff = handoff_seconds(next(iter(self._layers.values()), None))

    @property
    def is_looked_at(self) -> bool:
        return bool(self._since)

    async def answer(self) -> dict[str, Any]:
        """What GET /activity answers, as JSON."""
        self._asked = time.monotonic()
        if not self.is_looked_at:
            await asyncio.to_thread(self._begin)
            asyncio.get_running_loop().call_later(IDLE_S, self._lapse)
        return await asyncio.to_thread(self._look)

    def end(self) -> None:
        """Count no more."""
        with self._lock:
            if not self._since:
                return
            self._since = 0.0
            _native.uses_stop()
            _native.trace_stop()
            for one in self._layers.values():
                if (streamed := getattr(one, "streamed", None)) is not None:
                    streamed.uses = None

    def _begin(self) -> None:
        with self._lock:
            if self._since:
                return
            self._spans.clear()
            for one in self._layers.values():
                if (streamed := getattr(one, "streamed", None)) is not None:
                    streamed.uses = torch.zeros(one.num_experts, dtype=torch.int64, device=one.config.device)
            self._before = {i: self._asked_of_gpu(one) for i, one in self._layers.items()}
            _native.uses_start()
            _native.trace_start()
            self._since = time.monotonic()

    def _lapse(self) -> None:
        left = IDLE_S - (time.monotonic() - self._asked)
        if left > 0:
            asyncio.get_running_loop().call_later(left, self._lapse)
        else:
            self.end()

    def _look(self) -> dict[str, Any]:
        with self._lock:
            if not self._since:
                return self._now()
            found = _native.trace_stop()
            _native.trace_start()
            known = [(a, b, self._layer_of[owner], n) for a, b, owner, n in found if owner in self._layer_of]
            # Of a step that is under way there is a part; the next look has the rest of it.
            self._spans = (self._spans + known)[-(_STEPS + 2) * 2 * max(1, len(self._layers)) :]
            counts = dict(_native.uses())
            return {
                **self._now(),
                "seconds": time.monotonic() - self._since,
                "uses": {i: self._uses(i, counts.get(one.native.id)) for i, one in self._layers.items()},
                "on_gpu": {i: here for i, one in self._layers.items() if (here := on_gpu(one))},
                "step": step_of(self._spans, self._device, self._handoff),
                "cache": self.cache(),
            }

    def cache(self) -> dict[str, int] | None:
        """What the experts on GPUs were good for since the model was loaded; None where they stay where they are."""
        layers = [
            one for one in self._layers.values() if isinstance(one, HybridExperts) and one.seat is not None
        ]
        if not layers:
            return None
        total = sum((one.hits() for one in layers), start=Hits())
        return {"uses": total.uses, "hits": total.hits, "fetches": total.fetches, "bytes": total.bytes}

    def _uses(self, layer: int, on_cpu: Sequence[int] | None) -> list[int]:
        """How often each expert of a layer was chosen."""
        one = self._layers[layer]
        found = (
            torch.tensor(on_cpu, dtype=torch.int64, device="cpu")
            if on_cpu
            else torch.zeros(one.num_experts, dtype=torch.int64, device="cpu")
        )
        streamed = getattr(getattr(one, "streamed", None), "uses", None)
        if streamed is not None:
            found += self._read(one, streamed)
        asked = self._asked_of_gpu(one)
        if asked is not None:
            asked = (asked - self._before[layer]) % 2**32
            if (
                getattr(one, "seat", None) is not None
            ):  # places change: submits count wherever they were computed
                return torch.maximum(found, asked).tolist()
            here = on_gpu(one)
            found[here] += asked[here]
        return found.tolist()

    def _asked_of_gpu(self, one: Any) -> torch.Tensor | None:
        """How often submits have asked for each expert of a layer that has some on a GPU; [num_experts] int64."""
        held = getattr(one, "on_gpu", None)
        return None if held is None else self._read(one, held.traffic).long()

    def _read(self, one: Any, counts: torch.Tensor) -> torch.Tensor:
        device = counts.device
        stream = self._streams.setdefault(device, torch.cuda.Stream(device))
        with torch.cuda.stream(stream):
            found: torch.Tensor = one.handoff.read(counts)
        return found


def steps_in(spans: Sequence[Span]) -> Iterator[list[Span]]:
    """Decode steps, each the spans of all its layers. Prompts are left out, and so is a step that has only begun."""
    step: list[Span] = []
    for span in sorted(spans):
        if step and (span[2] < step[-1][2] or span[3] != step[0][3] or span[3] > _MOST_ROWS):
            yield step
            step = []
        if span[3] <= _MOST_ROWS:
            step.append(span)


def step_of(spans: Sequence[Span], device: str, handoff: float | None = None) -> dict[str, Any] | None:
    """Where a decode step's time goes: medians of the latest ones. None if there was none.

    device   "gpu": what is not the CPU's experts is the GPU's, and the way there and back
    handoff  seconds from a submit to its answer where nothing is computed; None: not known
    Returns  seconds of a step, of the CPU's experts, of the handoff (None: not known) and of the rest; rows of a step;
             and the latest one: (layer, begin, end) in seconds
    """
    steps = list(steps_in(spans))[-_STEPS - 1 :]
    # Most of them: a step that is compared with another way computes twice, and one that a look cut lacks a layer.
    layers = statistics.mode(map(len, steps)) if steps else 0
    pairs = [
        (before, step)
        for before, step in itertools.pairwise(steps)
        # One that began a request says nothing.
        if len(before) == len(step) == layers
        and before[0][3] == step[0][3]
        and step[0][0] - before[-1][1] < (step[-1][1] - step[0][0]) + 20_000_000
    ]
    if not pairs:
        return None
    lengths = [(step[-1][1] - before[-1][1]) / 1e9 for before, step in pairs]
    experts = [sum(end - begin for begin, end, *_ in step) / 1e9 for _, step in pairs]
    length, cpu = statistics.median(lengths), statistics.median(experts)
    way = None if device == "cpu" or handoff is None else min(handoff * layers, max(0.0, length - cpu))
    before, last = pairs[-1]
    start = before[-1][1]
    return {
        "device": device,
        "steps": len(pairs),
        "rows": last[0][3],
        "seconds": length,
        "cpu_experts": cpu,
        "handoff": way,
        "rest": max(0.0, length - cpu - (way or 0.0)),
        "latest": [(layer, (begin - start) / 1e9, (end - start) / 1e9) for begin, end, layer, _ in last],
    }


@torch.inference_mode()
def handoff_seconds(operator: Any) -> float | None:
    """Seconds from a submit without experts to its answer, in a CUDA graph; None where there is no handoff."""
    if operator is None or getattr(operator.config, "device", "cpu") in ("cpu", "auto"):
        return None
    device, times = torch.device(operator.config.device), 16
    try:
        with torch.cuda.device(device):
            x = torch.zeros(1, operator.spec.hidden_size, dtype=torch.bfloat16, device=device)
            ids, weights = (
                torch.full((1, 1), -1, device=device, dtype=torch.int64),
                torch.zeros(1, 1, device=device, dtype=torch.float32),
            )
            operator.complete(operator.start(x, ids, weights))
            graph = torch.cuda.CUDAGraph()
            with without_collecting(), torch.cuda.graph(graph, capture_error_mode="thread_local"):
                for _ in range(times):
                    operator.complete(operator.start(x, ids, weights))
            found = []
            for _ in range(9):
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                graph.replay()
                end.record()
                end.synchronize()
                found.append(begin.elapsed_time(end) / 1e3 / times)
        operator.handoff.check()
        return statistics.median(found)
    except (RuntimeError, OperatorError) as error:
        logger.warning("the time of a handoff is not known: %s", error)
        return None
