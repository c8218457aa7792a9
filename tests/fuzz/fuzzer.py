"""What the fuzzers of files have in common: runs that can be repeated one by one, and a command line."""

from __future__ import annotations

import argparse
import random
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

# What no file may take before it is refused or accepted: seconds of CPU, and bytes of address space.
MOST_SECONDS, MOST_BYTES = 5.0, 256 << 20
# Runs that start from the same file, each with changes of its own: to make one takes as long as to read it.
RUNS_A_FILE = 4


class Outcomes(Counter[str]):
    """How often each outcome was, and the longest that a file took: seconds of CPU, and the number of the run."""

    slowest: tuple[float, int] = (0.0, -1)


def count(
    runs: Iterable[int],
    seed: int,
    make: Callable[[int, random.Random], bytes],
    attempt: Callable[[int, bytes], str],
) -> Outcomes:
    """Count the outcomes of runs by their numbers.

    make     number and what is random about it → the file
    attempt  number and file → the outcome; whatever it raises is raised, after the file is printed
    Raises   AssertionError for a file that takes more than MOST_SECONDS, too
    """
    counts = Outcomes()
    for run in runs:
        content = make(run, random.Random(seed << 40 | run))
        try:
            start = time.process_time()
            counts[attempt(run, content)] += 1
            seconds = time.process_time() - start
            counts.slowest = max(counts.slowest, (seconds, run))
            assert seconds < MOST_SECONDS, f"it took {seconds:.1f} s"
        except BaseException:
            print(f"seed {seed}, run {run}: {content!r}", file=sys.stderr)
            raise
    return counts


def base_of(run: int, seed: int) -> random.Random:
    """What is random about the file that a run starts from: the same for RUNS_A_FILE runs."""
    return random.Random(seed << 40 | 1 << 39 | run // RUNS_A_FILE)


def main(description: str, fuzz: Callable[[int, int, int], Outcomes]) -> None:
    """Run `fuzz(runs, seed, first)` as the command line says, with no more memory than MOST_BYTES beyond a start's.

    So what takes more ends in MemoryError, which is none of the outcomes allowed.
    """
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--runs", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first run")
    options = parser.parse_args()
    fuzz(
        min(200, options.runs), options.seed, options.first
    )  # what is imported and kept from the first use on
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before, limits = (
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        resource.getrlimit(resource.RLIMIT_AS),
    )
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MOST_BYTES, limits[1]))
    started = time.monotonic()
    outcome = fuzz(options.runs, options.seed, options.first)
    seconds = time.monotonic() - started
    print(f"{options.runs} runs, seed {options.seed}, {seconds:.0f} s, {options.runs / seconds:.0f} a second")
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    print(
        f"the longest took {outcome.slowest[0] * 1e3:.0f} ms (run {outcome.slowest[1]}); peak memory {grown:+.0f} MiB"
    )
    print(dict(outcome), flush=True)
