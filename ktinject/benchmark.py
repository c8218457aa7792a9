"""How fast a model reads and writes, by llama-bench's conventions, and where the time of a step goes.

    pp512   a prompt of 512 tokens, until the first token is there
    tg128   128 tokens one after another, from an almost empty context; the prompt's token is not counted

Tokens are drawn at random, in tg by sampling at temperature 1 from all of them: a model of random weights that always
took the likeliest would soon repeat itself, and find its experts in the cache.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from ktinject import _native
from ktinject.errors import PlanError


@dataclass(frozen=True)
class Result:
    """One test: tokens a second of each repetition."""

    test: str
    tokens: int
    rates: tuple[float, ...]
    how: str  # as Decoding.last says

    @property
    def mean(self) -> float:
        return statistics.fmean(self.rates)

    @property
    def deviation(self) -> float:
        return statistics.stdev(self.rates) if len(self.rates) > 1 else 0.0


@dataclass
class Breakdown:
    """Where the time of a decode step goes, in µs, means over some steps.

    step    from one step to the next
    gpu     some kernel of the model runs, those that wait for the CPU left out
    cpu     experts are computed
    handoff the GPU waits for the CPU, less the time in which experts are computed
    idle    neither: gaps between kernels
    layers  the same by layer with experts on the CPU: (path, cpu, handoff)
    kernels (µs a step, launches a step, name), longest first
    """

    step: float
    gpu: float
    cpu: float
    handoff: float
    idle: float
    layers: list[tuple[str, float, float]] = field(default_factory=list)
    kernels: list[tuple[float, float, str]] = field(default_factory=list)


class _Clock:
    """A streamer that notes when each token arrived."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, _: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


@contextmanager
def _no_end(model: PreTrainedModel) -> Iterator[None]:
    """No end token, and nothing else that the model's folder asks of generation."""
    kept, model.generation_config = model.generation_config, GenerationConfig(pad_token_id=0)
    try:
        yield
    finally:
        model.generation_config = kept


def _tokens(model: PreTrainedModel, batch: int, count: int) -> torch.Tensor:
    vocab = model.config.get_text_config().vocab_size
    return torch.randint(0, vocab, (batch, count), device=model.device)


def prefill(model: PreTrainedModel, count: int, repetitions: int, batch: int = 1) -> Result:
    """Read prompts of `count` tokens."""
    rates = []
    with _no_end(model):
        for repetition in range(repetitions + 1):
            ids = _tokens(model, batch, count)
            _synchronise(model)
            start = time.perf_counter()
            model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=1, do_sample=False)
            _synchronise(model)
            if repetition:  # the first pays for what happens once
                rates.append(batch * count / (time.perf_counter() - start))
    return Result(f"pp{count}", count, tuple(rates), "prefill")


def decode(model: PreTrainedModel, count: int, repetitions: int, batch: int = 1) -> Result:
    """Write `count` tokens after the first."""
    rates = []
    with _no_end(model):
        for repetition in range(repetitions + 1):
            clock = _Clock()
            _generate(model, count + 1, batch, clock)
            if repetition:
                rates.append(batch * count / (clock.times[-1] - clock.times[1]))
    return Result(f"tg{count}", count, tuple(rates), getattr(model, "ktinject_decoding", _Stock).last)


class _Stock:
    last = "stock loop"


def _generate(model: PreTrainedModel, count: int, batch: int, clock: _Clock | None = None) -> None:
    ids = _tokens(model, batch, 1)
    options: dict[str, Any] = {"do_sample": True, "top_k": 0, "temperature": 1.0, "max_new_tokens": count}
    if clock is None:
        model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        return
    # A streamer of transformers takes one row; ours only looks at the clock.
    model.generate(ids, attention_mask=torch.ones_like(ids), streamer=clock, **options)


def _synchronise(model: PreTrainedModel) -> None:
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)


def profile(model: PreTrainedModel, steps: int = 32, batch: int = 1, trace: Path | None = None) -> Breakdown:
    """Look at some decode steps.

    trace    write them as a Chrome trace, experts on the CPU and kernels on one time line
    Raises   PlanError if the trace cannot be written
    """
    activities = [torch.profiler.ProfilerActivity.CPU]
    if model.device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with _no_end(model):
        _generate(model, steps + 1, batch)
        _native.trace_start()
        try:
            with torch.profiler.profile(activities=activities) as profiler:
                _generate(model, steps + 1, batch)
                _synchronise(model)
        finally:
            spans = _native.trace_stop()
    events = _gpu_events(profiler)
    names = {
        module.native.id: path
        for path, module in model.named_modules()
        if isinstance(getattr(module, "native", None), _native.Experts)
    }
    if trace is not None:
        _write_trace(profiler, spans, names, trace)
    return _break_down(events, spans, names, steps)


def _is_wait(name: str) -> bool:
    """Kernels that only wait for the CPU."""
    return "ktinject" in name and "wait" in name


def _gpu_events(profiler: Any) -> list[tuple[float, float, str]]:
    """(begin, end, name) of what ran on GPUs, ns of the system clock, in order.

    A kernel that began while the one before it in its stream still ran, has waited for that one's end.
    """
    streams: dict[int, list[tuple[float, float, str]]] = {}
    for event in profiler.profiler.kineto_results.events():
        if "cuda" in str(event.device_type()).lower():
            begin = event.start_ns()
            span = (begin, begin + event.duration_ns(), event.name())
            streams.setdefault(event.device_resource_id(), []).append(span)
    return sorted(span for spans in streams.values() for span in _one_after_another(spans))


def _one_after_another(spans: list[tuple[float, float, str]]) -> list[tuple[float, float, str]]:
    """Spans of one stream, each from where the one before it ended."""
    found: list[tuple[float, float, str]] = []
    for begin, end, name in sorted(spans, key=lambda span: span[1]):
        found.append((max(begin, found[-1][1]) if found else begin, end, name))
    return found


def _union(intervals: Sequence[tuple[float, float]]) -> float:
    """The length of what intervals cover, in any order."""
    total, end = 0.0, float("-inf")
    for begin, stop in sorted(intervals):
        total += max(0.0, stop - max(begin, end))
        end = max(end, stop)
    return total


def _break_down(
    events: list[tuple[float, float, str]],
    spans: list[tuple[int, int, int, int]],
    names: dict[int, str],
    steps: int,
) -> Breakdown:
    """The last half of the steps: the first ones include a prompt."""
    rounds: dict[int, list[tuple[int, int]]] = {}
    for start, stop, owner, _ in spans:
        rounds.setdefault(owner, []).append((start, stop))
    half = max(1, steps // 2)
    if rounds:
        # A layer that defers experts computes twice a step, the last one never does.
        first = min(rounds.values(), key=len)
        half = min(half, len(first) - 1)
        begin, end = float(first[-1 - half][0]), float(first[-1][0])
    elif events:
        begin, end = (events[0][0] + events[-1][1]) / 2, events[-1][1]
    else:
        raise PlanError("nothing was recorded: the model computes neither on a GPU nor in swapped experts.")

    def within(intervals: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
        cut = [(max(begin, a), min(end, b)) for a, b in intervals]
        return [(a, b) for a, b in cut if a < b]

    def each(total: float) -> float:
        return total / half / 1000

    cpu = within([(a, b) for of_one in rounds.values() for a, b in of_one])
    gpu = within([(a, b) for a, b, name in events if not _is_wait(name)])
    waits = within([(a, b) for a, b, name in events if _is_wait(name)])
    busy, computing = _union(gpu), _union(cpu)
    waiting = _union([*waits, *cpu]) - computing if waits else 0.0
    covered = _union([*gpu, *waits, *cpu])
    layers = []
    for owner, of_one in rounds.items():
        mine = within(of_one)
        around = [w for w in waits if any(w[0] < b and a < w[1] for a, b in mine)]
        alone = _union([*around, *mine]) - _union(mine)
        layers.append((names.get(owner, "?"), each(_union(mine)), each(alone)))
    kernels: dict[str, list[float]] = {}
    for a, b, name in events:
        if begin <= a < end:
            kernels.setdefault(name, []).append(b - a)
    table = [(each(sum(times)), len(times) / half, name) for name, times in kernels.items()]
    return Breakdown(
        step=each(end - begin),
        gpu=each(busy),
        cpu=each(computing),
        handoff=each(waiting),
        idle=each(end - begin - covered),
        layers=layers,
        kernels=sorted(table, reverse=True),
    )


def _write_trace(
    profiler: Any, spans: list[tuple[int, int, int, int]], names: dict[int, str], path: Path
) -> None:
    """torch's own trace with a process more, the CPU's experts."""
    try:
        profiler.export_chrome_trace(str(path))
        document = json.loads(path.read_text())
        base = int(document.get("baseTimeNanoseconds", 0))
        process = "experts on the CPU"
        document["traceEvents"] += [
            {"ph": "M", "name": "process_name", "pid": process, "args": {"name": process}},
            *(
                {
                    "ph": "X",
                    "name": names.get(owner, "experts"),
                    "cat": "cpu_experts",
                    "pid": process,
                    "tid": 0,
                    "ts": (begin - base) / 1000,
                    "dur": (end - begin) / 1000,
                    "args": {"tokens": tokens},
                }
                for begin, end, owner, tokens in spans
            ),
        ]
        path.write_text(json.dumps(document))
    except OSError as error:
        raise PlanError(f"--trace {path}: cannot be written: {error}.") from error


def run(
    model: PreTrainedModel,
    prompts: Sequence[int],
    writes: Sequence[int],
    repetitions: int,
    batch: int = 1,
    done: Callable[[Result], None] = lambda result: None,
) -> list[Result]:
    """All tests, prompts first; `done` is called after each."""
    found = []
    for measure, counts in ((prefill, prompts), (decode, writes)):
        for count in counts:
            found.append(measure(model, count, repetitions, batch))
            done(found[-1])
    return found
