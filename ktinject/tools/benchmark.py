"""How fast a model reads and writes, by llama-bench's conventions, and where the time of a step goes.

    pp512   a prompt of 512 tokens, until the first token is there
    tg128   128 tokens one after another, from an almost empty context; the prompt's token is not counted
    tg128 @ d4096   the same behind a prompt of 4,096 tokens and one, whose reading is not counted

Tokens are drawn at random, in tg by sampling at temperature 1 from all of them: a model of random weights that always
took the likeliest would soon repeat itself, and find its experts in the cache.
"""

from __future__ import annotations

import bisect
import json
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

from ktinject import _native
from ktinject.errors import PlanError
from ktinject.tools.evaluate import longest_text

# Begin, end and name. Nanoseconds of the system clock need more bits than a float has.
Span = tuple[int, int, str]


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


@dataclass(frozen=True)
class Part:
    """Where the time of a decode step, or of a layer's part of it, goes: µs, means over some steps.

    step    from one step to the next; of a layer, from the end of the experts before it to the end of its own, so that
            the first layer's has the output layer and the choice of the token, too
    gpu     some kernel of the model runs, those that wait for the CPU left out
    cpu     experts are computed
    handoff the GPU waits for the CPU, less the time in which experts are computed
    idle    neither: gaps between kernels
    """

    step: float
    gpu: float
    cpu: float
    handoff: float
    idle: float


@dataclass(frozen=True)
class Breakdown(Part):
    """A whole step.

    layers  path → its part, of layers with experts on the CPU
    kernels (µs a step, launches a step, name), longest first
    """

    layers: dict[str, Part] = field(default_factory=dict)
    kernels: list[tuple[float, float, str]] = field(default_factory=list)


def check_lengths(
    config: PreTrainedConfig, prompts: Sequence[int], writes: Sequence[int], depth: int = 0
) -> None:
    """Raises PlanError if a test has more tokens than a model was made for; what is written follows `depth` and one."""
    longest = longest_text(config)
    found = [f"pp{count}" for count in prompts if count > longest]
    found += [_writing(count, depth) for count in writes if depth + count + 2 > longest]
    if found:
        raise PlanError(
            f"{', '.join(found[:20])}: the model was made for {longest} tokens at once. Ask for shorter tests."
        )


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


def _writing(count: int, depth: int) -> str:
    return f"tg{count} @ d{depth}" if depth else f"tg{count}"


def decode(model: PreTrainedModel, count: int, repetitions: int, batch: int = 1, depth: int = 0) -> Result:
    """Write `count` tokens after the first, behind a prompt of `depth` tokens and one."""
    rates = []
    with _no_end(model):
        for repetition in range(repetitions + 1):
            clock = _Clock()
            _generate(model, count + 1, batch, clock, depth)
            if repetition:
                rates.append(batch * count / (clock.times[-1] - clock.times[1]))
    return Result(
        _writing(count, depth), count, tuple(rates), getattr(model, "ktinject_decoding", _Stock).last
    )


class _Stock:
    last = "stock loop"


def _generate(
    model: PreTrainedModel, count: int, batch: int, clock: _Clock | None = None, depth: int = 0
) -> None:
    ids = _tokens(model, batch, depth + 1)
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


def _gpu_events(profiler: Any) -> list[Span]:
    """What ran on GPUs, in order.

    A kernel that began while the one before it in its stream still ran, has waited for that one's end.
    """
    streams: dict[int, list[Span]] = {}
    for event in profiler.profiler.kineto_results.events():
        if "cuda" in str(event.device_type()).lower():
            begin = event.start_ns()
            span = (begin, begin + event.duration_ns(), event.name())
            streams.setdefault(event.device_resource_id(), []).append(span)
    return sorted(span for spans in streams.values() for span in _one_after_another(spans))


def _one_after_another(spans: list[Span]) -> list[Span]:
    """Spans of one stream, each from where the one before it ended."""
    found: list[Span] = []
    for begin, end, name in sorted(spans, key=lambda span: span[1]):
        found.append((max(begin, found[-1][1]) if found else begin, end, name))
    return found


def _covered(intervals: Iterable[tuple[int, int]]) -> Callable[[int], int]:
    """How long intervals, in any order, cover the time before a moment."""
    begins: list[int] = []
    ends: list[int] = []
    before = [0]
    for begin, end in sorted(intervals):
        if ends and begin <= ends[-1]:
            before[-1] += max(0, end - ends[-1])
            ends[-1] = max(end, ends[-1])
        else:
            begins.append(begin)
            ends.append(end)
            before.append(before[-1] + end - begin)

    def until(moment: int) -> int:
        count = bisect.bisect_right(begins, moment)
        return before[count] - max(0, ends[count - 1] - moment) if count else 0

    return until


def _break_down(
    events: list[Span],
    spans: list[tuple[int, int, int, int]],
    names: dict[int, str],
    steps: int,
) -> Breakdown:
    """The last half of the steps: the first ones include a prompt."""
    ends: dict[int, list[int]] = {}
    for _, stop, owner, _ in sorted(spans, key=lambda span: span[1]):
        ends.setdefault(owner, []).append(stop)
    half = max(1, steps // 2)
    if ends:
        # A layer that defers experts computes twice a step, the last one never does.
        first = min(ends.values(), key=len)
        half = min(half, len(first) - 1)
        begin, end = first[-1 - half], first[-1]
    elif events:
        begin, end = (events[0][0] + events[-1][1]) // 2, events[-1][1]
    else:
        raise PlanError("nothing was recorded: the model computes neither on a GPU nor in swapped experts.")

    cpu = [(a, b) for a, b, _, _ in spans]
    gpu = [(a, b) for a, b, name in events if not _is_wait(name)]
    waits = [(a, b) for a, b, name in events if _is_wait(name)]
    covers = [*map(_covered, (gpu, cpu, [*waits, *cpu] if waits else cpu, [*gpu, *waits, *cpu]))]

    def part(stretches: Sequence[tuple[int, int]]) -> Part:
        busy, computing, waiting, anything = (
            sum(until(b) - until(a) for a, b in stretches) / half / 1000 for until in covers
        )
        length = sum(b - a for a, b in stretches) / half / 1000
        return Part(length, busy, computing, waiting - computing, length - anything)

    stretches: dict[int, list[tuple[int, int]]] = {}
    at = begin
    for stop, owner in sorted((stop, owner) for owner, stops in ends.items() for stop in stops):
        if begin < stop <= end:
            stretches.setdefault(owner, []).append((at, stop))
            at = stop
    kernels: dict[str, list[int]] = {}
    for a, b, name in events:
        if begin <= a < end:
            kernels.setdefault(name, []).append(b - a)
    table = [(sum(times) / half / 1000, len(times) / half, name) for name, times in kernels.items()]
    return Breakdown(
        **asdict(part([(begin, end)])),
        layers={names.get(owner, "?"): part(stretches[owner]) for owner in ends if owner in stretches},
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
    depth: int = 0,
) -> list[Result]:
    """All tests, prompts first; what is written follows `depth` tokens."""
    found = [prefill(model, count, repetitions, batch) for count in prompts]
    return found + [decode(model, count, repetitions, batch, depth) for count in writes]
