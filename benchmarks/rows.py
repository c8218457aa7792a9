"""Lines of results.csv, as every benchmark writes them."""

from __future__ import annotations

import argparse
import csv
import datetime
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ktinject import _native
from ktinject.tools import benchmark

RESULTS = Path(__file__).parent / "results.csv"
COLUMNS = [
    "date", "commit", "machine", "threads", "benchmark", "shape", "routing", "tokens", "weights", "kernel",
    "us", "us_p10", "us_p90", "gb_s", "tflops", "roofline_us", "share", "bound", "peer", "peer_us", "ratio",
]  # fmt: skip


def commit() -> str:
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--exclude", "*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("KTINJECT_COMMIT", "unknown")


def record(rows: Sequence[Mapping[str, Any]], path: Path, columns: Sequence[str] = COLUMNS) -> None:
    """Append; the header is written once. What a row does not say is left empty."""
    is_new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        if is_new:
            writer.writeheader()
        writer.writerows(rows)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the lines of a run say of it, and where they go."""
    parser.add_argument("--machine", default=platform.node())
    parser.add_argument("--commit", default=None, help="instead of what git says")
    parser.add_argument("--csv", type=Path, help="append to this file")


def of_peer(
    commit: str, machine: str, benchmark: str, us: float, peer: str, peer_us: float, digits: int, **more: Any
) -> dict[str, Any]:
    """A line of µs beside a peer's; peer "": it is the peer."""
    ratio = {"peer": peer, "peer_us": f"{peer_us:.{digits}f}", "ratio": f"{peer_us / us:.2f}"}
    return {
        "date": datetime.date.today().isoformat(),
        "commit": commit,
        "machine": machine,
        "benchmark": benchmark,
        "us": f"{us:.{digits}f}",
        **(ratio if peer else dict.fromkeys(ratio, "")),
        **more,
    }


def about(arguments: argparse.Namespace, shape: str, layers: int, **more: Any) -> dict[str, Any]:
    """What all lines of a run over models of a shape have in common."""
    return {
        **dict.fromkeys(COLUMNS, ""),
        "date": datetime.date.today().isoformat(),
        "commit": arguments.commit or commit(),
        "machine": arguments.machine,
        "threads": _native.threads(),
        "shape": f"{shape} x{layers}",
        **more,
    }


def of_model(
    run: Mapping[str, Any],
    result: benchmark.Result,
    on_gpu: bool = True,
    reads: tuple[float, float] | None = None,
    **more: Any,
) -> dict[str, Any]:
    """A line: µs a token for decode, of the whole prompt for prefill.

    run    `about`
    reads  of decode: what the CPU reads for a token, and bytes a second that it can read
    more   other columns
    """
    is_decode = result.test.startswith("tg")
    scale = 1.0 if is_decode else result.tokens
    us = sorted(scale * 1e6 / rate for rate in result.rates)
    line = {
        **run,
        "benchmark": result.test if on_gpu else f"{result.test}, CPU only",
        "tokens": 1 if is_decode else result.tokens,
        "us": round(scale * 1e6 / result.mean, 1),
        "us_p10": round(us[0], 1),
        "us_p90": round(us[-1], 1),
        **more,
    }
    if reads is not None and is_decode:
        read, rate = reads
        roofline = read / rate * 1e6
        line |= {"gb_s": round(read * result.mean / 1e9, 2), "roofline_us": round(roofline, 1)}
        line |= {"share": round(roofline * result.mean / 1e6, 3), "bound": "memory"}
    return line
