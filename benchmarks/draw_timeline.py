"""Draw some layers of one decode step from Chrome traces that `ktinject bench --trace FILE` wrote, one below the other.

    python benchmarks/draw_timeline.py docs/images/deferral-timeline.png none=trace0.json four=trace4.json

Two rows a trace: what the GPU does, its waits for the CPU pale; and when the CPU computes experts, deferred ones pale.
All traces share one scale and begin where the CPU begins with the same layer.
"""

from __future__ import annotations

import argparse
import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BLUE, PALE_BLUE, RED, PALE_RED = "#247", "#d5ddea", "#c44", "#eeb0a0"


@dataclass(frozen=True)
class Bar:
    begin: float  # µs
    end: float
    name: str


@dataclass(frozen=True)
class Step:
    """What happened from `origin` on: kernels and waits of the GPU, experts of the CPU at once and late."""

    origin: float
    end: float
    kernels: list[Bar]
    waits: list[Bar]
    now: list[Bar]
    late: list[Bar]


def read(file: Path, first: int, layers: int) -> Step:
    """The window that begins with the experts of the `first` layer of the step of median length and has `layers`."""
    events = [event for event in json.loads(file.read_text())["traceEvents"] if event.get("ph") == "X"]

    def bars(wanted: Any) -> list[Bar]:
        found = [Bar(e["ts"], e["ts"] + e["dur"], e["name"]) for e in events if wanted(e)]
        return sorted(found, key=lambda bar: bar.begin)

    experts = bars(lambda e: e.get("cat") == "cpu_experts" and e["args"]["tokens"] == 1)
    if not experts:
        raise SystemExit(f"{file}: no experts on the CPU in it; make it with `ktinject bench --trace`")
    # A layer that defers computes twice in a row.
    late = [bar for before, bar in itertools.pairwise(experts) if before.name == bar.name]
    now = [bar for bar in experts if bar not in late]
    names = list(dict.fromkeys(bar.name for bar in now))
    starts = [i for i, bar in enumerate(now[:-layers]) if bar.name == names[first]]
    # The step of median length: a single one may be anything.
    starts.sort(key=lambda i: now[i + layers].begin - now[i].begin)
    at = starts[len(starts) // 2]
    window = now[at : at + layers + 1]
    origin, end = window[0].begin, window[-1].begin

    def within(of: list[Bar]) -> list[Bar]:
        return [bar for bar in of if bar.end > origin and bar.begin < end]

    gpu = bars(lambda e: str(e.get("cat")) in ("kernel", "gpu_memcpy", "gpu_memset"))
    waits = [bar for bar in gpu if "wait_kernel" in bar.name]
    kernels = [bar for bar in gpu if "wait_kernel" not in bar.name]
    return Step(origin, end, within(kernels), within(waits), within(now), within(late))


def share(bars: list[Bar], step: Step) -> float:
    """How much of the window bars cover; they do not overlap."""
    covered = sum(min(bar.end, step.end) - max(bar.begin, step.origin) for bar in bars)
    return covered / (step.end - step.origin)


def draw(steps: dict[str, Step], layers: int, file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        len(steps), 1, figsize=(9, 1.6 * len(steps) + 0.6), sharex=True, squeeze=False
    )
    longest = max(step.end - step.origin for step in steps.values())
    for axis, (name, step) in zip(axes[:, 0], steps.items()):
        rows = (
            (1, step.waits, PALE_BLUE), (1, step.kernels, BLUE), (0, step.late, PALE_RED), (0, step.now, RED)
        )  # fmt: skip
        for row, bars, colour in rows:
            spans = [(max(b.begin, step.origin) - step.origin, min(b.end, step.end) - max(b.begin, step.origin)) for b in bars]  # fmt: skip  # noqa: E501
            axis.broken_barh(spans, (row + 0.1, 0.8), color=colour, linewidth=0)
        for bar in step.now:
            if bar.begin < step.end:
                axis.axvline(bar.begin - step.origin, color="#666", linewidth=0.5, linestyle=":")
        took = (step.end - step.origin) / layers
        gpu, cpu = share(step.kernels, step), share([*step.now, *step.late], step)
        axis.set_title(
            f"{name}: {took:.0f} µs a layer, GPU busy {gpu:.0%}, CPU busy {cpu:.0%}", fontsize=9, loc="left"
        )
        axis.set_yticks([0.5, 1.5], ["CPU experts", "GPU"], fontsize=8)
        axis.set_xlim(0, longest)
        axis.set_ylim(0, 2)
        axis.spines[["top", "right", "left"]].set_visible(False)
    axes[-1, 0].set_xlabel("µs")
    figure.tight_layout()
    figure.savefig(file, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("traces", nargs="+", help="TITLE=FILE")
    parser.add_argument("--first", type=int, default=2, help="layer to begin with")
    parser.add_argument("--layers", type=int, default=3)
    arguments = parser.parse_args()
    pairs = dict(trace.split("=", 1) for trace in arguments.traces)
    steps = {title: read(Path(file), arguments.first, arguments.layers) for title, file in pairs.items()}
    draw(steps, arguments.layers, arguments.out)


if __name__ == "__main__":
    main()
