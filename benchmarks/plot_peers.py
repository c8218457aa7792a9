"""Draws docs/images/peers.svg, the picture of README: how many times as fast as its peers ktinject is, in one format.

    python benchmarks/plot_peers.py docs/images/peers.svg

Every dot is a row of results.csv that has the peer's time in it, measured in the same run. A test draws it again.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

RESULTS = Path(__file__).parent / "results.csv"
MACHINE = "reference box"
FORMATS = {"bf16": "bf16", "int8": "int8", "int4": "int4", "int4-g128": "int4"}


@dataclass(frozen=True)
class Line:
    """One line of the picture: the rows of results.csv that agree in all of this, one a format."""

    title: str
    commit: str
    peer: str
    benchmark: str
    shape: str
    tokens: str

    def ratios(self, rows: Sequence[dict[str, str]]) -> dict[str, float]:
        """Weight format → the peer's time over ours."""
        wanted = (self.commit, self.benchmark, self.shape, self.tokens)
        return {
            FORMATS[row["weights"]]: float(row["peer_us"]) / float(row["us"])
            for row in rows
            if (row["commit"], row["benchmark"], row["shape"], row["tokens"]) == wanted
            and row["machine"].startswith(MACHINE)
            and row["peer"].startswith(self.peer)
            and row["routing"] in ("uniform", "random tokens")
            and _is_same_format(row)
        }


def _is_same_format(row: dict[str, str]) -> bool:
    """PyTorch computes in bf16, so only our bf16 is compared with it."""
    return row["weights"] == "bf16" or not row["peer"].startswith("transformers")


QWEN, DEEPSEEK, MODEL = "qwen3-30b-a3b", "deepseek-v3", "qwen3-30b-a3b x8"
# Headline and subtitle of a group, then its lines.
GROUPS = [
    (
        "llama.cpp",
        "whole models; experts on the CPU, the rest on the GPU",
        [
            Line("write a token", "754b8e9", "llama.cpp", "tg64", MODEL, "1"),
            Line("read a prompt of 512", "754b8e9", "llama.cpp", "pp512", MODEL, "512"),
            Line("read a prompt of 2048", "754b8e9", "llama.cpp", "pp2048", MODEL, "2048"),
        ],
    ),
    (
        "llama.cpp",
        "whole models on the CPU alone",
        [
            Line("write a token", "754b8e9", "llama.cpp", "tg64, CPU only", MODEL, "1"),
            Line("read a prompt of 512", "754b8e9", "llama.cpp", "pp512, CPU only", MODEL, "512"),
        ],
    ),
    (
        "PyTorch",
        "whole models on the CPU alone, plain transformers",
        [
            Line("write a token", "2f21784", "transformers", "tg64, CPU only", MODEL, "1"),
            Line("read a prompt of 512", "2f21784", "transformers", "pp512, CPU only", MODEL, "512"),
        ],
    ),
    (
        "kt-kernel",
        "one layer of experts on the CPU",
        [
            Line("Qwen3-30B-A3B, 1 token", "2f21784", "kt-kernel", "moe", QWEN, "1"),
            Line("Qwen3-30B-A3B, 1024 tokens", "2f21784", "kt-kernel", "moe", QWEN, "1024"),
            Line("DeepSeek-V3, 1 token", "2f21784", "kt-kernel", "moe", DEEPSEEK, "1"),
            Line("DeepSeek-V3, 1024 tokens", "2f21784", "kt-kernel", "moe", DEEPSEEK, "1024"),
        ],
    ),
]

WIDTH, LEFT, UNIT, MOST = 860, 268, 106, 5.4
TOP, HEADING, NAMES, STEP, GAP = 120, 26, 14, 26, 22  # NAMES: room for the formats' names
STYLE = """
    .card { fill: #ffffff; stroke: #d8dee4; }
    text { font: 14px -apple-system, "Segoe UI", "Noto Sans", Helvetica, Arial, sans-serif; fill: #1f2328; }
    .title { font-size: 19px; font-weight: 600; }
    .peer { font-weight: 600; }
    .soft { fill: #59636e; } .small { font-size: 12px; }
    .grid { stroke: #d8dee4; } .equal { stroke: #59636e; stroke-width: 1.5; }
    .range { stroke: #afb8c1; stroke-width: 2; } circle { stroke: #ffffff; stroke-width: 1.5; }
    .bf16 { fill: #0969da; } .int8 { fill: #8250df; } .int4 { fill: #bc4c00; }
    @media (prefers-color-scheme: dark) {
      .card { fill: #0d1117; stroke: #3d444d; }
      text { fill: #f0f6fc; } .soft { fill: #9198a1; }
      .grid { stroke: #2a313c; } .equal { stroke: #9198a1; } .range { stroke: #656c76; }
      circle { stroke: #0d1117; }
      .bf16 { fill: #58a6ff; } .int8 { fill: #bc8cff; } .int4 { fill: #f0883e; }
    }
"""


def _text(x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> str:
    return f'  <text x="{x:g}" y="{y:g}" text-anchor="{anchor}" class="{kind}">{escape(text)}</text>'


def _x(ratio: float) -> float:
    return round(LEFT + ratio * UNIT, 1)


def _labels(y: float) -> Iterator[str]:
    for ratio in range(int(MOST) + 1):
        label = "as fast as the peer" if ratio == 1 else f"{ratio} ×"
        yield _text(_x(ratio), y, label, "small" if ratio == 1 else "small soft", "middle")


def _grid(top: float, bottom: float) -> Iterator[str]:
    for ratio in range(int(MOST) + 1):
        kind = "equal" if ratio == 1 else "grid"
        yield f'  <line x1="{_x(ratio)}" x2="{_x(ratio)}" y1="{top:g}" y2="{bottom:g}" class="{kind}"/>'


def _line(y: float, title: str, ratios: dict[str, float], is_first: bool) -> Iterator[str]:
    yield _text(LEFT - 16, y + 5, title, "", "end")
    least, most = min(ratios.values()), max(ratios.values())
    yield f'  <line x1="{_x(least)}" x2="{_x(most)}" y1="{y:g}" y2="{y:g}" class="range"/>'
    for weights, ratio in ratios.items():
        yield f'  <circle cx="{_x(ratio)}" cy="{y:g}" r="5.5" class="{weights}"/>'
        if is_first:
            yield _text(_x(ratio), y - 11, weights, f"small {weights}", "middle")
    if most > least:
        yield _text(_x(least) - 11, y + 4, f"{least:.1f}", "small soft", "end")
    yield _text(_x(most) + 11, y + 5, f"{most:.1f} ×", "peer")


def draw(rows: Sequence[dict[str, str]]) -> str:
    """The picture as SVG. Raises KeyError if a line has no rows."""
    body, y, found = [], float(TOP), list[float]()
    for peer, about, lines in GROUPS:
        body += [_text(28, y, f"beside {peer}", "peer"), _text(LEFT, y, about, "soft")]
        y += HEADING + (0 if found else NAMES)
        body += _grid(y - STEP / 2 - (0 if found else NAMES - 4), y + STEP * (len(lines) - 0.5))
        for line in lines:
            ratios = line.ratios(rows)
            if not ratios:
                raise KeyError(f"{RESULTS}: no rows for {line}")
            body += _line(y, line.title, ratios, not found)
            found += ratios.values()
            y += STEP
        y += GAP
    commits = sorted({line.commit for _, _, lines in GROUPS for line in lines})
    feet = [
        "As many bits on both sides, in one run. Inputs of an int4 scale: ktinject 128, llama.cpp 32, kt-kernel a row.",
        "Reference box: 16 vCPU Emerald Rapids (AMX), one H200. Whole models: 8 layers of Qwen3-30B-A3B's shape.",
        f"Commits {' and '.join(commits)}; rows in benchmarks/results.csv, drawn by benchmarks/plot_peers.py.",
    ]
    height = y + 6 + 18 * len(feet)
    title = f"{min(found):.1f} to {max(found):.1f} times as fast as llama.cpp, PyTorch and kt-kernel"
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" role="img">',
        f"  <title>ktinject: {title}</title>",
        f"  <style>{STYLE}  </style>",
        f'  <rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1:g}" rx="8" class="card"/>',
        _text(28, 38, title, "title"),
        _text(28, 61, "The peer's time over ours; each dot is a format of the weights", "soft"),
        *_labels(TOP - 22),
    ]
    foot = [_text(28, y + 18 * i, text, "small soft") for i, text in enumerate(feet)]
    return "\n".join([*head, *body, *foot, "</svg>"]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("svg", type=Path)
    arguments = parser.parse_args()
    with RESULTS.open(newline="") as file:
        arguments.svg.write_text(draw(list(csv.DictReader(file))))


if __name__ == "__main__":
    main()
