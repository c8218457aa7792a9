"""Loading: a checkpoint of random weights is written, and loaded as often as asked, each time in a new process.

    python benchmarks/bench_load.py make /tmp/qwen3 --gb 11
    python benchmarks/bench_load.py run /tmp/qwen3 --weights int4 bf16 --threads 1 4 8 --packing threads pool

`run` prints, for each format, the rate of reading alone and of packing alone, and of whole loads in GB of the
checkpoint a second, with the peak of resident memory beside the packed size; then of loads that write and read the
packed cache. With `--cold`, the files are dropped from the page cache before each measurement.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from ktinject.tools import random_models

_BLOCK = 8 << 20


def make(folder: Path, shape: str, gb: float) -> None:
    """A checkpoint of bf16 with as many layers as `gb` has room for, in shards of a layer each."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = torch.empty(32 << 20, dtype=torch.bfloat16).normal_(std=0.02)

    def values(*size: int) -> torch.Tensor:
        count = torch.Size(size).numel()
        start = int(torch.randint(0, max(1, len(drawn) - count), ()))
        return (
            drawn.repeat(-(-count // len(drawn)))[:count].view(size)
            if count > len(drawn)
            else drawn[start : start + count].view(size).clone()
        )

    one = random_models.config(shape, 1, vocab_size=4096)
    model = random_models.models.meta_model(one, torch.bfloat16)
    size = sum(value.nbytes for value in model.state_dict().values())
    layers = max(1, round(gb * 1e9 / size))
    config = random_models.config(shape, layers, vocab_size=4096)
    model = random_models.models.meta_model(config, torch.bfloat16)
    config.architectures = [type(model).__name__]
    config.dtype = torch.bfloat16
    config.save_pretrained(folder)
    shards: dict[str, dict[str, torch.Size]] = {}
    for name, value in model.state_dict().items():
        parts = name.split(".")
        shard = f"layer-{int(parts[2]):03}" if "layers" in parts else "rest"
        stem = name.rpartition(".")[0]
        if name.endswith("experts.gate_up_proj"):
            n, width, k = value.shape
            for e in range(n):
                for half in ("gate_proj", "up_proj"):
                    shards.setdefault(shard, {})[f"{stem}.{e}.{half}.weight"] = torch.Size((width // 2, k))
        elif name.endswith("experts.down_proj"):
            for e in range(len(value)):
                shards.setdefault(shard, {})[f"{stem}.{e}.down_proj.weight"] = value.shape[1:]
        else:
            shards.setdefault(shard, {})[name] = value.shape
    weight_map = {}
    for shard, tensors in shards.items():
        file = f"{shard}.safetensors"
        save_file({name: values(*size) for name, size in tensors.items()}, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
    index = {"metadata": {"total_size": bytes_of(folder)}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    print(f"{folder}: {layers} layers, {bytes_of(folder) / 1e9:.2f} GB")


def files_of(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def bytes_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in files_of(folder))


def drop(paths: list[Path]) -> None:
    """Out of the page cache, which needs no privilege for clean pages of one's own files."""
    for path in paths:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_alone(paths: list[Path], threads: int, direct: bool) -> float:
    """Seconds to read all files in blocks, by so many threads into a buffer each."""
    jobs = iter([(path, at) for path in paths for at in range(0, path.stat().st_size, _BLOCK)])
    lock = threading.Lock()

    def work() -> None:
        buffer = mmap.mmap(-1, _BLOCK)
        opened: dict[Path, int] = {}
        while True:
            with lock:
                job = next(jobs, None)
            if job is None:
                break
            path, at = job
            if path not in opened:
                opened[path] = os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
            os.preadv(opened[path], [buffer], at)
        for fd in opened.values():
            os.close(fd)

    workers = [threading.Thread(target=work) for _ in range(threads)]
    start = time.perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return time.perf_counter() - start


def pack_alone(folder: Path, weights: str) -> float:
    """GB/s of packing experts from memory, by the operator's own `load`."""
    import ktinject

    config = random_models.models.read_config(folder)
    config.num_hidden_layers, config.name_or_path = 1, ""
    model = random_models.models.meta_model(config, torch.bfloat16)
    plan = ktinject.plan(model, "auto", variables={"experts": weights}, devices="cpu")
    built = random_models.inject.build(plan, model)
    found = next(r for r in plan.replacements if r.path.endswith("experts"))
    operator = built[found.path]
    operator.allocate()
    pieces = [
        (name, expert, part, random_models._random((shape[1] // parts, shape[2])))
        for name, shape in found.parameter_shapes.items()
        for parts in [2 if name == "gate_up_proj" else 1]
        for expert in range(min(shape[0], 64))
        for part in (range(2) if parts == 2 else [None])
    ]
    best = 1e9
    for _ in range(3):
        start = time.perf_counter()
        for name, expert, part, tensor in pieces:
            operator.load(name, tensor, expert, part)
        best = min(best, time.perf_counter() - start)
    return sum(tensor.nbytes for *_, tensor in pieces) / best / 1e9


def load(folder: Path, weights: str, arguments: dict[str, Any]) -> dict[str, float]:
    """One load, in this process: seconds, and bytes at the peak, before, and packed."""
    import ktinject
    from ktinject.operators.cpu_experts import CpuExperts

    CpuExperts.packs_alone = arguments.pop("packing", "threads") == "threads"

    def resident(field: str) -> int:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(field):
                return int(line.split()[1]) * 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    torch.zeros(1 << 22).add_(1)
    before = resident("VmRSS:")
    start = time.perf_counter()
    model = ktinject.load(folder, variables={"experts": weights}, devices="cpu", progress=False, **arguments)
    seconds = time.perf_counter() - start
    return {
        "seconds": seconds,
        "peak": resident("VmHWM:"),
        "before": before,
        "packed": sum(model.ktinject.bytes.values()),
    }


def loads(
    folder: Path, weights: str, repeats: int, cold: bool, **arguments: Any
) -> Iterator[dict[str, float]]:
    for _ in range(repeats):
        if cold:
            drop([*files_of(folder), *(folder / "cache" / "packed").glob("*.safetensors")])
        command = [sys.executable, __file__, "load", str(folder), weights, json.dumps(arguments)]
        run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        yield json.loads(run.stdout.splitlines()[-1])


def run(
    folder: Path, weights: list[str], threads: list[int], repeats: int, cold: bool, packing: list[str]
) -> None:
    paths, size = files_of(folder), bytes_of(folder)
    os.environ["KTINJECT_CACHE"] = str(folder.resolve() / "cache")
    print(f"{folder}: {size / 1e9:.2f} GB in {len(paths)} files, {len(os.sched_getaffinity(0))} CPUs")
    for direct in (False, True):
        for count in threads:
            if cold:
                drop(paths)
            rate = size / read_alone(paths, count, direct) / 1e9
            print(
                f"read alone, {'O_DIRECT' if direct else 'page cache'}, {count} threads: {rate:.2f} GB/s",
                flush=True,
            )
    for format_ in weights:
        print(f"{format_}: packing alone {pack_alone(folder, format_):.2f} GB/s", flush=True)
        for turn in range(repeats * len(packing)):
            how = packing[turn % len(packing)]
            (found,) = loads(folder, format_, 1, cold, packing=how)
            _show(f"{format_}: load, packed by the {how}", size, found)
        for turn in ("first", "second", "third"):
            (found,) = loads(folder, format_, 1, cold and turn != "first", cache="auto")
            _show(f"{format_}: {turn} load with the cache", size, found)
        for count in threads:
            kept = [*Path(os.environ["KTINJECT_CACHE"], "packed").glob("*.safetensors")]
            if cold:
                drop(kept)
            seconds, packed = read_alone(kept, count, False), sum(path.stat().st_size for path in kept)
            print(
                f"{format_}: its {packed / 1e9:.2f} GB read alone, {count} threads: {packed / seconds / 1e9:.2f} GB/s"
            )
        for path in kept:
            path.unlink()


def _show(title: str, size: int, found: dict[str, float]) -> None:
    seconds, extra = found["seconds"], found["peak"] - found["packed"]
    print(
        f"{title} {seconds:.2f} s, {size / seconds / 1e9:.2f} GB/s; packed {found['packed'] / 1e9:.2f} GB, "
        f"peak {found['peak'] / 1e9:.2f} GB: {extra / 2**30:.2f} GiB more, {found['before'] / 2**30:.2f} before",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    making = commands.add_parser("make")
    making.add_argument("folder", type=Path)
    making.add_argument("--shape", default="qwen3-30b-a3b")
    making.add_argument("--gb", type=float, default=11)
    running = commands.add_parser("run")
    running.add_argument("folder", type=Path)
    running.add_argument("--weights", nargs="+", default=["int4", "bf16"])
    running.add_argument("--threads", nargs="+", type=int, default=[1, 4, 8])
    running.add_argument("--repeats", type=int, default=2)
    running.add_argument(
        "--packing",
        nargs="+",
        choices=("threads", "pool"),
        default=["threads"],
        help="experts are packed by the threads that read them, or by all workers together, in turns",
    )
    running.add_argument("--cold", action="store_true", help="drop the files from the page cache before")
    one = commands.add_parser("load", help="what `run` starts")
    one.add_argument("folder", type=Path)
    one.add_argument("weights")
    one.add_argument("arguments")
    given = parser.parse_args()
    if given.command == "make":
        make(given.folder, given.shape, given.gb)
    elif given.command == "run":
        run(given.folder, given.weights, given.threads, given.repeats, given.cold, given.packing)
    else:
        print(json.dumps(load(given.folder, given.weights, json.loads(given.arguments))))


if __name__ == "__main__":
    main()
