"""Several processes that share a model, as torchrun would start them, and what tests let them do.

`run` starts them once for many cases, since each start on a GPU imports torch and transformers.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# A case is a function of a rank and its arguments; what it returns must be picklable.
Case = tuple[Callable[..., Any], tuple[Any, ...]]


def run(cases: Sequence[Case], size: int = 2, gpu: bool = False) -> list[list[Any]]:
    """[case][rank]: what each returned, or the exception it raised as (class name, text)."""
    import prepared  # not where this file is the process: its path has no such module

    # Listens from here on, as torchrun's does: a port that is only looked for may be another run's a moment later.
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environ = {
        **os.environ,
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "KTINJECT_THREADS": str(max(1, (os.cpu_count() or 1) // size)),
    }
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(size) as threads:
        folder = Path(name)
        (folder / "cases").write_bytes(pickle.dumps(list(cases)))

        def start(rank: int) -> list[Any]:
            own = {**environ, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            if gpu:
                command = [sys.executable, __file__, name]
                done = subprocess.run(command, env=own, capture_output=True, text=True)
            else:
                done = prepared.run(Path(__file__), name, env={**own, "CUDA_VISIBLE_DEVICES": ""})
            print(done.stderr)
            assert done.returncode == 0, done.stderr
            return pickle.loads((folder / str(rank)).read_bytes())

        found = list(threads.map(start, range(size)))
    return [list(results) for results in zip(*found)]


def work(folder: Path) -> None:
    """One of the processes."""
    torch.set_num_threads(1)
    rank, results = int(os.environ["RANK"]), []
    for case, arguments in pickle.loads((folder / "cases").read_bytes()):
        try:
            results.append(case(rank, *arguments))
        except Exception as error:
            results.append((type(error).__name__, str(error)))
            if type(error).__module__ != "ktinject.errors":
                traceback.print_exc()
    (folder / str(rank)).write_bytes(pickle.dumps(results))


# What they do. Tensors are given back as lists, since their memory goes with the process.


def load(folder: Path, rules: Any, devices: str | None = "cpu", **kwargs: Any) -> Any:
    import ktinject

    return ktinject.load(folder, rules, devices=devices, progress=False, tp=True, **kwargs)


def prompt(*shape: int, device: Any = "cpu") -> Tensor:
    return torch.randint(3, 90, shape, generator=torch.Generator().manual_seed(7)).to(device)


def greedy(model: Any, ids: Tensor, new_tokens: int = 10, **kwargs: Any) -> list[list[int]]:
    arguments: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None, **kwargs}
    return model.generate(ids, max_new_tokens=new_tokens, **arguments).tolist()


def same(rank: int, folder: Path, rules: Any, devices: str | None) -> dict[str, Any]:
    """Load, and answer in all ways of decoding."""
    from ktinject.checkpoints.checkpoint import Checkpoint
    from ktinject.errors import OperatorError

    read: list[str] = []
    ways = {name: getattr(Checkpoint, name) for name in ("read", "decode", "stored")}

    def counting(own: Callable[..., Any]) -> Callable[..., Any]:
        def way(self: Checkpoint, name: str, *args: Any, **kwargs: Any) -> Any:
            read.append(name)
            return own(self, name, *args, **kwargs)

        return way

    for name, own in ways.items():
        setattr(Checkpoint, name, counting(own))
    try:
        model = load(folder, rules, devices)
    finally:
        for name, own in ways.items():
            setattr(Checkpoint, name, own)
    ids = prompt(3, 7, device=model.device)
    with torch.no_grad():
        logits = model(ids).logits.float().tolist()
    torch.manual_seed(rank)
    found = {
        "logits": logits,
        "greedy": [greedy(model, prompt(batch, 7, device=model.device)) for batch in (1, 3)],
        "again": greedy(model, ids),
        "ways": dict(model.ktinject_decoding.requests),
        "sampled": greedy(model, ids, do_sample=True, temperature=0.9, top_k=20, top_p=0.95),
        "beams": greedy(model, ids, num_beams=2),
        "static": greedy(model, ids, cache_implementation="static"),
        "stock": greedy(model, ids, no_repeat_ngram_size=2),
        "bytes": model.ktinject.bytes,
        "experts read": sum(".experts." in name for name in read),
        "cut": sorted(model.ktinject.styles),
        "shapes": {name: list(p.shape) for name, p in model.named_parameters()},
        "notes": model.ktinject.notes,
        "reason": model.ktinject_decoding.reason,
    }
    try:
        model.save_pretrained(folder / f"copy-{rank}")
    except OperatorError as error:
        found["saving"] = str(error)
    return found


class Spoiler:
    """A streamer that makes the routing of process 0 wrong after some tokens."""

    def __init__(self, wrong: Tensor, after: int) -> None:
        self.wrong, self.left = wrong, after

    def put(self, _: Tensor) -> None:
        self.left -= 1
        if self.left == 0:
            self.wrong.fill_(1000)

    def end(self) -> None:
        pass


def failure(rank: int, folder: Path, rules: Any, devices: str | None) -> list[str]:
    """The experts of process 0 fail: once on the host, in a prompt, and once where they compute, in a decode step."""
    from ktinject.errors import OperatorError

    model = load(folder, rules, devices)
    ids = prompt(1, 7, device=model.device)
    experts = [module for module in model.modules() if getattr(module, "on_ranks", "") == "first"]
    assert bool(experts) == (rank == 0)
    wrong, refuse = torch.zeros((), dtype=torch.int64, device=model.device), [False]
    if rank == 0:
        kind: Any = type(experts[-1])
        own = kind.forward

        def spoiled(self: Any, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
            if refuse[0]:
                raise OperatorError("made to fail")
            return own(self, x, index + wrong, weights)

        members = {"forward": spoiled, "capturable": kind.capturable, "__module__": __name__}
        experts[-1].__class__ = type(kind.__name__, (kind,), members)
    right = greedy(model, ids)  # where there are graphs, they hold what is spoiled later
    texts = []
    for streamer in (None, Spoiler(wrong if rank == 0 else wrong.clone(), 4)):
        refuse[0] = streamer is None
        try:
            greedy(model, ids, streamer=streamer)
            texts.append("nothing was raised")
        except OperatorError as error:
            texts.append(str(error))
        refuse[0] = False
        wrong.zero_()
        texts.append("the same afterwards" if greedy(model, ids) == right else "other tokens afterwards")
    return texts


def other_prompts(rank: int, folder: Path, rules: Any, devices: str | None) -> Any:
    model = load(folder, rules, devices)
    return greedy(model, prompt(1, 5 + rank, device=model.device))


def bad_shard(rank: int, folder: Path, rules: Any) -> str:
    """Loading fails in process 1 only."""
    from ktinject.errors import CheckpointError
    from ktinject.loading import fill

    if rank == 1:

        def refuse(*_: Any) -> None:
            raise CheckpointError("made to fail")

        fill.from_checkpoint = refuse  # type: ignore[assignment]
    return refused(rank, folder, rules)


def refused(rank: int, folder: Path, rules: Any) -> str:
    load(folder, rules)
    return "not refused"


if __name__ == "__main__":
    work(Path(sys.argv[1]))
