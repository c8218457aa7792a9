"""Ctrl-C at random moments: `python tests/ktinject/interrupts.py 500` sends so many and says what became of them.

    start-up   the command line while it imports: it ends with exit code 130 and one line
    load       ktinject.load
    first      the first request of a model, in which decode steps are compared with the model's own
    prompt     a request of many tokens in and few out
    decode     one of few tokens in and many out

All but the first happen in one process. Each Ctrl-C must arrive as one KeyboardInterrupt, and the next request must be
answered as before. The signal comes from another process, so that it can meet any instruction.

What fails does not depend on how busy the machine is: a Ctrl-C is lost if its handler has run and nothing was raised,
and late if the process has computed for long in between.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

STAGES = ("start-up", "load", "first", "prompt", "decode")
# In seconds that one core computes; all of the process's threads compute.
LATE_SECONDS = 1.0 * (os.cpu_count() or 1)
LATE_START_SECONDS = (
    5.0  # torch's libraries are loaded in one call, of a second or two, that nothing can interrupt
)


def run(folder: Path, counts: dict[str, int], seed: int = 0) -> dict[str, dict[str, Any]]:
    """Send so many Ctrl-C to each stage. Of each: how many were sent and arrived, faults, and the longest delay."""
    chance = random.Random(seed)
    found = {stage: {"sent": 0, "arrived": 0, "faults": [], "slowest": 0.0} for stage in STAGES}
    starts = counts.get("start-up", 0)
    within = _seconds_of_a_start(folder) if starts > 4 else 1.0
    for _ in range(starts):
        _note(found["start-up"], *_start_up(folder, chance, within))
    stages = [stage for stage in STAGES[1:] for _ in range(counts.get(stage, 0))]
    chance.shuffle(stages)
    if stages:
        with _other(folder) as ask:
            for number, stage in enumerate(stages, 1):
                _note(found[stage], *ask(stage, chance))
                if number % 50 == 0:
                    arrived = sum(row["arrived"] for row in found.values())
                    print(f"{number} of {len(stages)} sent, {arrived} arrived", file=sys.stderr, flush=True)
    return found


def _note(row: dict[str, Any], fault: str, delay: float) -> None:
    row["sent"] += 1
    row["slowest"] = max(row["slowest"], delay)
    if fault:
        print(fault, file=sys.stderr, flush=True)
        row["faults"].append(fault)
    else:
        row["arrived"] += 1


# Tells when Ctrl-C is handled by the command; before, while Python itself starts, it is Python's.
_STARTER = """
import os, signal, sys
from ktinject.__main__ import main
own = signal.signal
def telling(*arguments):
    signal.signal = own
    own(*arguments)
    os.write(1, b".")
signal.signal = telling
sys.argv[:] = ["ktinject", "plan", sys.argv[1], "--json"]
main()
"""


def _seconds_of_a_start(folder: Path) -> float:
    """How long a start takes that nobody interrupts."""
    start = time.monotonic()
    subprocess.run([sys.executable, "-c", _STARTER, str(folder)], stdout=subprocess.DEVNULL, check=True)
    return time.monotonic() - start


def _start_up(folder: Path, chance: random.Random, within: float) -> tuple[str, float]:
    command = [sys.executable, "-c", _STARTER, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.read(1)
        time.sleep(chance.uniform(0, within))
        computed = _computed(process.pid)
        os.kill(process.pid, signal.SIGINT)  # send_signal() would take the status of one that has ended
        answer, said = process.stdout.read(), process.stderr.read().decode()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    delay = usage.ru_utime + usage.ru_stime - computed
    if answer and process.returncode in (0, -signal.SIGINT):
        return _start_up(folder, chance, within)  # it had ended
    # Libraries may have warned before.
    ended = process.returncode == 130 and said.endswith("ktinject: interrupted\n") and "Traceback" not in said
    return (
        "" if ended and delay < LATE_START_SECONDS else f"{process.returncode}, {said!r} after {delay:.2f} s"
    ), delay


def _computed(pid: int) -> float:
    """Seconds that a process has computed so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def _other(folder: Path) -> Iterator[Callable[[str, random.Random], tuple[str, float]]]:
    """A process that works on one stage after the other, and how to interrupt it in one: gives fault and delay."""
    command = [sys.executable, __file__, "--work", str(folder)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        durations: dict[str, float] = json.loads(process.stdout.readline())

        def ask(stage: str, chance: random.Random) -> tuple[str, float]:
            assert process.stdin is not None and process.stdout is not None
            print(stage, file=process.stdin)
            assert process.stdout.readline() == "go\n"
            time.sleep(chance.uniform(0, 1.05 * durations[stage]))
            computed = _computed(process.pid)
            process.send_signal(signal.SIGINT)
            found = json.loads(process.stdout.readline())
            delay = max(0.0, found["computed"] - computed)
            late = f"after {delay:.2f} s" if delay > LATE_SECONDS else ""
            return found["fault"] or late, delay

        try:
            yield ask
            process.stdin.close()
            assert process.wait() == 0
        finally:
            process.kill()


class _Work:
    """What the other process does."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = self.load()
        self.first()
        self.expected = self.answers()

    def load(self) -> Any:
        import ktinject

        return ktinject.load(self.folder, devices="cpu", progress=False)

    def tokens(self, prompt: int, new: int, model: Any = None) -> list[int]:
        import torch

        ids = torch.arange(prompt)[None] % 90 + 3
        arguments = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        return (model or self.model).generate(ids, max_new_tokens=new, **arguments)[0].tolist()

    def first(self) -> None:
        self.tokens(5, 5)

    def prompt(self) -> None:
        self.tokens(400, 2)

    def decode(self) -> None:
        self.tokens(5, 60)

    def answers(self) -> list[list[int]]:
        return [self.tokens(40, 12), self.tokens(5, 12)]

    def interrupted(self, stage: str) -> tuple[str, float]:
        """Do what a stage does, within which the signal comes; afterwards everything must be as before."""
        if stage == "first":
            self.model = self.load()
        called: list[float] = []
        ignored: list[str] = []

        def handle(number: int, frame: object) -> None:
            called.append(time.process_time())
            raise KeyboardInterrupt

        def note(unraisable: Any) -> None:
            ignored.append("".join(traceback.format_exception(unraisable.exc_value)))

        signal.signal(signal.SIGINT, handle)
        sys.unraisablehook = note
        fault = ""
        try:
            print("go", flush=True)
            getattr(self, stage)()
            while not called:
                time.sleep(0.001)
            fault = f"lost: {ignored}"
        except KeyboardInterrupt:
            arrived = time.process_time()
        except BaseException as error:
            fault = "came as " + "".join(traceback.format_exception(error))
        if fault:
            arrived = time.process_time()
        if len(called) != 1:
            fault = fault or f"raised {len(called)} times"
        try:
            if stage == "load":
                self.model = self.load()
            if self.answers() != self.expected:
                fault = fault or "the next answer is another one"
        except BaseException as error:
            fault = fault or "afterwards " + "".join(traceback.format_exception(error))
            self.model = self.load()
        return fault, arrived


def _work(folder: Path) -> None:
    work = _Work(folder)
    durations = {}
    for stage in STAGES[1:]:
        start = time.monotonic()
        getattr(work, stage)()
        durations[stage] = time.monotonic() - start
    print(json.dumps(durations), flush=True)
    for line in sys.stdin:
        fault, computed = work.interrupted(line.strip())
        print(json.dumps({"fault": fault, "computed": computed}), flush=True)


def main() -> None:
    if sys.argv[1] == "--work":
        return _work(Path(sys.argv[2]))
    count = int(sys.argv[1])
    folder = Path(__file__).parents[2] / "examples/models/tiny-qwen3-moe"
    counts = {"start-up": count // 10, "load": count // 10, "first": count // 10, "prompt": 3 * count // 10}
    counts["decode"] = count - sum(counts.values())
    for stage, row in run(folder, counts, seed=count).items():
        print(
            f"{stage:8}  {row['sent']:4} sent  {row['arrived']:4} arrived  slowest {row['slowest']:.2f} s of computing"
        )
        for fault in row["faults"]:
            print("   ", fault)


if __name__ == "__main__":
    main()
