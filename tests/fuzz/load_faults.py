"""Loads that are disturbed at random moments: Ctrl-C, a full disk, no memory, a file that vanishes or is cut off.

Each fault is tried in a load that packs and writes the packed cache, and in one that reads the cache. What comes of it
must be one of the outcomes that are allowed. Afterwards the threads that read have ended, no half file is left, the
next load gives the same logits, and at the end resident memory is what it was.

Memory is tried in loads of one thread: glibc ends a process that has no memory for what belongs to a thread.

    python tests/fuzz/load_faults.py --times 200 --seed 1
    python tests/fuzz/load_faults.py --faults interrupt disk --times 20
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

import ktinject
from ktinject import env
from ktinject.checkpoints.packed import PackedFile
from ktinject.errors import CheckpointError, KTInjectError

IDS = torch.arange(5, 17)[None]
# What torch raises in place of MemoryError.
OUT_OF_MEMORY = ("alloc", "memory", "start new thread")


def write_model(folder: Path) -> None:
    """Some 10 MB in two shards."""
    config = Qwen3MoeConfig(
        vocab_size=256, hidden_size=128, intermediate_size=128, moe_intermediate_size=64, num_hidden_layers=6,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, num_experts=16, num_experts_per_tok=2,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(
        folder, max_shard_size="4MB"
    )


class Ground:
    """A model folder, whose files come back after each turn, and the cache's folder."""

    def __init__(self, base: Path) -> None:
        self.original, self.model, self.cache = base / "original", base / "model", base / "cache"
        write_model(self.original)
        os.environ["KTINJECT_CACHE"] = str(self.cache)
        env.settings.cache_clear()
        self.restore()
        self.load()
        self.wanted = self.logits(self.timed())

    def restore(self) -> None:
        """All files as they were, with the same times."""
        self.model.mkdir(exist_ok=True)
        for file in self.original.iterdir():
            target = self.model / file.name
            if not target.exists() or target.stat().st_size != file.stat().st_size:
                target.unlink(missing_ok=True)
                shutil.copy2(file, target)

    def kept(self) -> list[Path]:
        folder = self.cache / "packed"
        return sorted(folder.iterdir()) if folder.is_dir() else []

    def load(self) -> Any:
        return ktinject.load(
            self.model, variables={"experts": "int4"}, devices="cpu", progress=False, cache="auto"
        )

    def timed(self) -> Any:
        """Load, and keep how long it takes now: faults are to come at any moment of it."""
        start = time.perf_counter()
        model = self.load()
        self.seconds = time.perf_counter() - start
        return model

    @staticmethod
    def logits(model: Any) -> torch.Tensor:
        with torch.no_grad():
            return model(IDS).logits


@contextmanager
def later(seconds: float, act: Callable[..., None], *arguments: Any) -> Iterator[None]:
    """Have something done meanwhile, if it takes as long."""
    timer = threading.Timer(seconds, act, arguments)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


def interrupt(ground: Ground, chance: random.Random) -> Any:
    return later(chance.random() * ground.seconds * 1.2, os.kill, os.getpid(), signal.SIGINT)


@contextmanager
def disk(ground: Ground, chance: random.Random) -> Iterator[None]:
    """No file may grow beyond a random size, as on a full disk; nothing else of this process writes meanwhile."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    size = sum(path.stat().st_size for path in ground.model.iterdir()) // 3
    resource.setrlimit(resource.RLIMIT_FSIZE, (chance.randrange(size), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def memory(ground: Ground, chance: random.Random) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"
    room = chance.randrange(6 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + room, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        del os.environ["HF_DEACTIVATE_ASYNC_LOAD"]


def vanish(ground: Ground, chance: random.Random) -> Any:
    """A file of the checkpoint or of the cache is deleted or cut off."""
    shards = [*ground.model.glob("*.safetensors"), *ground.kept()]
    path, cut = chance.choice(shards), chance.random() < 0.5

    def act() -> None:
        try:
            if cut:
                os.truncate(path, int(path.stat().st_size * chance.random()))
            else:
                path.unlink()
        except FileNotFoundError:
            pass

    return later(chance.random() * ground.seconds * 1.5, act)


FAULTS: dict[str, Callable[[Ground, random.Random], Any]] = {
    "interrupt": interrupt,
    "disk": disk,
    "memory": memory,
    "vanish": vanish,
}


def outcome(fault: str, ground: Ground, chance: random.Random) -> str:
    """Load once with a fault; the name of what came of it. Anything but what is allowed is raised."""
    model = None
    try:
        try:
            with FAULTS[fault](ground, chance):
                model = ground.load()
        except KeyboardInterrupt:
            if fault != "interrupt":
                raise
            return "KeyboardInterrupt"
    except MemoryError:
        if fault != "memory":
            raise
        return "MemoryError"
    except KTInjectError as error:
        allowed = {"vanish": CheckpointError, "memory": KTInjectError}.get(fault)
        if allowed is None or not isinstance(error, allowed):
            raise
        return type(error).__name__
    except (RuntimeError, OSError, ImportError) as error:
        if fault != "memory" or not any(word in str(error).lower() for word in OUT_OF_MEMORY):
            raise
        return "out of memory, in another's words"
    assert torch.equal(ground.logits(model), ground.wanted), "another answer"
    return "loaded"


def check(ground: Ground) -> None:
    """What must hold after each turn, whatever came of it."""
    assert not [t for t in threading.enumerate() if t.name == "ktinject-read"], "threads are left"
    for path in ground.kept():
        assert path.name.endswith(".packed.safetensors"), f"{path} is left"
    if chance_of_a_look():
        assert torch.equal(ground.logits(ground.load()), ground.wanted), "the next load differs"
        for path in ground.kept():
            with PackedFile(path) as file:
                assert not file.wrong(lambda count: None), f"{path} is damaged"


_turns = 0


def chance_of_a_look() -> bool:
    """After every eighth turn: a load more for each would be most of the time."""
    global _turns
    _turns += 1
    return _turns % 8 == 0


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--times", type=int, default=200, help="of each fault, while packing and while reading the cache"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=[*FAULTS])
    given = parser.parse_args()
    logging.getLogger("ktinject").setLevel(logging.ERROR)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell lets what it starts behind ignore it
    torch.set_num_threads(1)
    chance = random.Random(given.seed)
    with tempfile.TemporaryDirectory() as base:
        ground = Ground(Path(base))
        print(f"a load takes {ground.seconds:.2f} s", flush=True)
        for fault in given.faults:
            before = 0
            for way in ("packing, and writing the cache", "reading the cache"):
                seen: Counter[str] = Counter()
                for turn in range(given.times):
                    ground.restore()
                    is_packing = way.startswith("packing")
                    if is_packing:
                        shutil.rmtree(ground.cache, ignore_errors=True)
                    elif not ground.kept():
                        ground.load()
                    if turn % 25 == 0:
                        ground.timed()
                        if is_packing:
                            shutil.rmtree(ground.cache, ignore_errors=True)
                    seen[outcome(fault, ground, chance)] += 1
                    ground.restore()
                    check(ground)
                    if turn == min(20, given.times - 1):
                        gc.collect()
                        before = resident()
                gc.collect()
                grown = (resident() - before) / 2**20
                print(
                    f"{fault}, {way}: {given.times} times: {dict(seen)}; resident {grown:+.1f} MiB",
                    flush=True,
                )
                assert grown < 64, "memory did not come back"


if __name__ == "__main__":
    sys.exit(main())
