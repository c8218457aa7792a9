"""What the fuzzers of files have in common: runs that can be repeated one by one, and a command line."""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable


def count(
    runs: Iterable[int],
    seed: int,
    make: Callable[[int, random.Random], bytes],
    attempt: Callable[[int, bytes], str],
) -> Counter[str]:
    """Count the outcomes of runs by their numbers.

    make     number and what is random about it → the file
    attempt  number and file → the outcome; whatever it raises is raised, after the file is printed
    """
    counts: Counter[str] = Counter()
    for run in runs:
        content = make(run, random.Random(seed << 40 | run))
        try:
            counts[attempt(run, content)] += 1
        except BaseException:
            print(f"seed {seed}, run {run}: {content!r}", file=sys.stderr)
            raise
    return counts


def main(description: str, fuzz: Callable[[int, int, int], Counter[str]]) -> None:
    """Run `fuzz(runs, seed, first)` as the command line says."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--runs", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first run")
    options = parser.parse_args()
    started = time.monotonic()
    outcome = fuzz(options.runs, options.seed, options.first)
    seconds = time.monotonic() - started
    print(f"{options.runs} runs, seed {options.seed}, {seconds:.0f} s, {options.runs / seconds:.0f} a second")
    print(dict(outcome))
