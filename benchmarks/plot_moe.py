"""Draws rows of results.csv: the roofline with every cell on it, and the share of it by tokens.

    python benchmarks/plot_moe.py docs/images/speed.png --commit 1a2b3c4 --machine "reference box"

Needs matplotlib (pip install matplotlib).
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

RESULTS = Path(__file__).parent / "results.csv"
Row = dict[str, str]


def require_matplotlib() -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise SystemExit("plotting needs matplotlib: python -m pip install matplotlib") from None


def ceilings_of(rows: list[Row]) -> tuple[float, dict[str, float]]:
    """Read bandwidth in GB/s and TFLOPS a multiply unit, from cells that are bound by them."""
    read, rates = 0.0, {}
    for row in rows:
        us, roofline = float(row["us"]), float(row["roofline_us"])
        if row["bound"] == "memory":
            read = float(row["gb_s"]) * us / roofline
        else:
            isa = row["kernel"].split("_")[0]
            rates[f"{isa} {'int8' if row['weights'].startswith('int') else 'bf16'}"] = (
                float(row["tflops"]) * us / roofline
            )
    return read, rates


def draw(rows: list[Row], path: Path) -> None:
    """One line of plots a shape: roofline on the left, share by tokens on the right. Rows of one run, as in the CSV."""
    require_matplotlib()
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    unique = {(r["shape"], r["routing"], r["tokens"], r["weights"], r["kernel"]): r for r in rows}
    rows = [row for row in unique.values() if row["routing"] == "uniform"] or list(unique.values())
    shapes = list(dict.fromkeys(row["shape"] for row in rows))
    formats = list(dict.fromkeys(row["weights"] for row in rows))
    colours = dict(zip(formats, pyplot.rcParams["axes.prop_cycle"].by_key()["color"], strict=False))
    read, rates = ceilings_of(rows)
    figure, axes = pyplot.subplots(len(shapes), 2, figsize=(11, 3.6 * len(shapes)), squeeze=False)
    for (left, right), shape in zip(axes, shapes, strict=True):
        mine = [row for row in rows if row["shape"] == shape]
        intensities = [1e3 * float(r["tflops"]) / float(r["gb_s"]) for r in mine]
        least, most = min(intensities) / 1.5, max(intensities) * 1.5
        for name, rate in sorted(rates.items()):
            ridge = rate * 1e3 / read
            left.plot([least, ridge, most], [least * read / 1e3, rate, rate], color="grey", linewidth=1)
            left.annotate(f"{name} {rate:.1f} T", (most, rate), ha="right", va="bottom", fontsize=8)
        if not rates:
            left.plot([least, most], [least * read / 1e3, most * read / 1e3], color="grey", linewidth=1)
        for weights in formats:
            cells = sorted((r for r in mine if r["weights"] == weights), key=lambda r: int(r["tokens"]))
            x = [1e3 * float(r["tflops"]) / float(r["gb_s"]) for r in cells]
            left.plot(
                x,
                [float(r["tflops"]) for r in cells],
                "o",
                markersize=4,
                color=colours[weights],
                label=weights,
            )
            tokens = [int(r["tokens"]) for r in cells]
            right.plot(tokens, [float(r["share"]) for r in cells], "o-", markersize=4, color=colours[weights])
        left.set(xscale="log", yscale="log", title=f"{shape}: roofline", ylabel="TFLOPS")
        left.set_xlabel(f"operations a byte of distinct experts (reads {read:.0f} GB/s)")
        left.legend(fontsize=8)
        right.set(xscale="log", ylim=(0, 1.05), title=f"{shape}: share of roofline", xlabel="tokens")
        right.set_xscale("log", base=2)
        right.grid(alpha=0.3)
    first = rows[0]
    figure.suptitle(f"{first['machine']}; {first['threads']} threads; commit {first['commit']}", fontsize=10)
    figure.tight_layout(rect=(0, 0, 1, 0.98))
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("png", type=Path)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--machine", default="", help="only rows whose machine begins so")
    parser.add_argument("--commit", default="", help="only rows of this commit")
    parser.add_argument("--threads", default="", help="only rows with so many threads")
    arguments = parser.parse_args()
    with arguments.results.open(newline="") as file:
        rows = [
            row
            for row in csv.DictReader(file)
            if row["benchmark"] == "moe"
            and row["machine"].startswith(arguments.machine)
            and row["commit"].startswith(arguments.commit)
            and arguments.threads in ("", row["threads"])
        ]
    if not rows:
        raise SystemExit(
            f"{arguments.results}: no rows of the benchmark 'moe' for that machine, commit and threads"
        )
    draw(rows, arguments.png)


if __name__ == "__main__":
    main()
