"""What a layer of experts on the CPU costs within SGLang's graphs, by the object that SGLang hands them to.

A captured graph of some layers, each a submit and a sync, as SGLang captures decode steps, and prompts from 0.5.17 on.
The weights are random, and all experts of a layer alike, each with memory of its own. Where kt-kernel is installed, its
own submit and sync are measured in turns with ours, in the same process; moe_peers.py says how it gets there.

`alone` is the same layers called on the CPU, without a GPU and without a thread that waits for one. `cut` is a graph of
which the host does a part, as SGLang's graphs of prompts are: so many of the experts pass through the GPU. Who waits
for a graph sleeps, as in SGLang with our plug-in; `--spin` adds what it takes where that thread spins.

The line below says how near each is to a plain read of memory by all threads, measured right before and after (the
larger of both): the weights of the experts that are asked for, in the time of a layer. Each step asks for others.

    python benchmarks/bench_sglang.py [--methods AMXINT4 BF16] [--tokens 1 8 64 2048] [--layers 4] [--spin]

Without a GPU: the layers alone, and by the calls that SGLang makes for a model on the CPU.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from sglang_peer import FORMATS, KtContract, weights
from torch import Tensor

from ktinject import _native
from ktinject.operators.cpu_experts import CpuExperts
from ktinject.sglang import KTMoEWrapper, graphs, waiting
from ktinject.sglang.layer import Layer
from ktinject.sglang.weights import plain_config, spec_of

EXPERTS, TOP_K, HIDDEN, INNER = 128, 8, 2048, 768  # Qwen3-30B-A3B
ROUNDS, DRAWS = 2, 16
READ = 256 << 20  # bytes of each thread


def made(method: str, layer: int, weights: tuple[Tensor, Tensor]) -> KTMoEWrapper:
    one = KTMoEWrapper(
        layer_idx=layer,
        num_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        hidden_size=HIDDEN,
        moe_intermediate_size=INNER,
        num_gpu_experts=0,
        method=method,
    )
    fill(one._layer, *weights)
    return one


def fill(layer: Layer, gate_up: Tensor, down: Tensor) -> None:
    """Pack the first expert, and copy it."""
    with torch.device("cpu"):
        experts = CpuExperts(spec_of(layer.given), plain_config(layer.given, 0))
        experts.allocate()
        experts.load("gate_up_proj", gate_up[0, :INNER], 0, 0)
        experts.load("gate_up_proj", gate_up[0, INNER:], 0, 1)
        experts.load("down_proj", down[0], 0, None)
        experts.repeat(0)
        layer._take(experts, [*range(EXPERTS)])


class Routes:
    """What a step asks for: the same tensors for each, and other experts, or caches would have them from the last one.

    ids    of each layer, [m, TOP_K] int32
    scale  of each layer, [m, TOP_K]
    asked  how many experts a layer is asked for, on average
    """

    def __init__(self, m: int, layers: int, device: str) -> None:
        drawn = [torch.rand(layers, m, EXPERTS).argsort(-1)[..., :TOP_K].int() for _ in range(DRAWS)]
        self.asked = statistics.mean(len(ids.unique()) for step in drawn for ids in step)
        self._drawn, self._next = [step.contiguous().to(device) for step in drawn], 0
        self._ids = self._drawn[0].clone()
        self.ids = [*self._ids]
        self.scale = [torch.full((m, TOP_K), 1 / TOP_K, device=device) for _ in range(layers)]

    def turn(self) -> None:
        """The next step's."""
        self._next = (self._next + 1) % DRAWS
        self._ids.copy_(self._drawn[self._next])


def step_of(layers: list[Any], x: Tensor, routes: Routes) -> Callable[[], Tensor]:
    """A pass through the layers, by SGLang's calls."""

    def step() -> Tensor:
        hidden = x
        for layer, ids, scale in zip(layers, routes.ids, routes.scale):
            stream = torch.cuda.current_stream().cuda_stream if x.is_cuda else 0
            layer.submit_forward(hidden, ids, scale, stream)
            hidden = layer.sync_forward(hidden, stream)
        return hidden

    return step


def replays_of(
    step: Callable[[], Tensor], turn: Callable[[], None]
) -> tuple[Callable[[], float], Callable[[], float]]:
    """Functions that replay the step's graph once, and say how many µs it took: who waits sleeps, or spins.

    turn  called before each replay
    """
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()

    def replay(wait: Callable[[Any], None]) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        turn()
        start.record()
        graph.replay()
        end.record()
        wait(end)
        assert torch.isfinite(out[-1]).all()
        return start.elapsed_time(end) * 1e3

    return lambda: replay(waiting.until), lambda: replay(lambda event: event.synchronize())


class Segments:
    """The parts of a graph, and what the host does between them."""

    def __init__(self) -> None:
        self._parts: list[Callable[[], Any]] = []
        self._pool = torch.cuda.graph_pool_handle()

    def begin(self) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._graph.capture_begin(pool=self._pool)

    def end(self) -> None:
        self._graph.capture_end()
        self._parts.append(self._graph.replay)

    def cut(self, inner: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def here(*given: Any) -> Tensor:
            self.end()
            out = inner(*given)
            self._parts.append(lambda: out.copy_(inner(*given)))
            self.begin()
            return out

        return here

    def replay(self) -> None:
        for part in self._parts:
            part()


def cut_replays_of(step: Callable[[], Tensor], turn: Callable[[], None]) -> Callable[[], float]:
    """As `replays_of`, of a graph that is cut where experts pass through the GPU."""
    segments, side = Segments(), torch.cuda.Stream()
    step()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        graphs.cuts_by(segments.cut, lambda: True)
        try:
            segments.begin()
            step()
            segments.end()
        finally:
            graphs.cuts_by(None, None)
    torch.cuda.synchronize()

    def replay() -> float:
        with torch.cuda.stream(side):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            turn()
            start.record()
            segments.replay()
            end.record()
            waiting.until(end)
        return start.elapsed_time(end) * 1e3

    return replay


def timed(step: Callable[[], Any], turn: Callable[[], None]) -> Callable[[], float]:
    """The same for what returns when it is done."""

    def run() -> float:
        turn()
        start = time.perf_counter()
        step()
        return (time.perf_counter() - start) * 1e6

    return run


def alone(layers: list[KTMoEWrapper], x: Tensor, routes: Routes) -> Callable[[], None]:
    """The layers without handoff, from this thread. The routes are the CPU's."""
    x, out = x.cpu(), torch.empty(x.shape, dtype=x.dtype)
    natives = [layer._layer._experts.native for layer in layers]  # type: ignore[union-attr]

    def step() -> None:
        for native, ids, scale in zip(natives, routes.ids, routes.scale):
            native.forward(x, ids.long(), scale, out)

    return step


def medians(runs: dict[str, Callable[[], float]], seconds: float) -> dict[str, float]:
    """The median of each, taken in turns; between turns workers fall asleep."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(ROUNDS):
        for name, run in runs.items():
            time.sleep(0.1)
            run(), run()
            begun, before = time.perf_counter(), len(times[name])
            while (taken := len(times[name]) - before) < 3 or time.perf_counter() - begun < seconds / ROUNDS:
                times[name].append(run())
                if taken > 300:
                    break
    return {name: statistics.median(taken) for name, taken in times.items()}


def bound(layer: KTMoEWrapper, asked: float, found: dict[str, float], read: float) -> str:
    """How near the cells of `found` are to what memory allows, and by how much kt-kernel could be beaten at most.

    asked  experts of a layer
    found  name → µs a layer
    read   bytes a second that all threads read together, measured beside
    """
    native = layer._layer._experts.native  # type: ignore[union-attr]
    size = native.bytes / native.count * asked
    rates = {name: size / us * 1e6 for name, us in found.items() if not name.startswith("cut")}
    each = ", ".join(f"{name} {rate / 1e9:.0f} GB/s ({rate / read:.0%})" for name, rate in rates.items())
    most = (
        f"; at the read's rate {found['kt-kernel'] * read / size / 1e6:.2f} times kt-kernel"
        if "kt-kernel" in found
        else ""
    )
    return f"{asked:.1f} experts, {size / 1e6:.0f} MB; a plain read {read / 1e9:.0f} GB/s; {each}{most}"


def rival(given: argparse.Namespace) -> KtContract | None:
    """kt-kernel, if it is there and wanted."""
    if not given.peers or not torch.cuda.is_available():
        return None
    try:
        return KtContract(given.kt_threads or _native.threads(), given.tokens)
    except (ImportError, StopIteration) as error:
        print(f"# kt-kernel is left out: {error}")
        return None


def bench(given: argparse.Namespace) -> None:
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    kt = rival(given)
    print(f"# {_native.threads()} threads, {given.layers} layers of {EXPERTS} experts, µs a layer")
    if kt is not None:
        print(f"# kt-kernel {kt.kernel.version}, {kt.kernel.workers} workers and a dispatcher")
    for method in given.methods:
        random = weights(EXPERTS, HIDDEN, INNER)
        with torch.device(device):
            layers = [made(method, index, random) for index in range(given.layers)]
        theirs = (
            [kt.layer(index, method, *random, TOP_K) for index in range(given.layers)]
            if kt is not None and method in FORMATS
            else []
        )
        said = layers[0]._layer._experts.describe()  # type: ignore[union-attr]
        print(f"{method}: {said['weights']}, {said['kernel']}", flush=True)
        for m in given.tokens:
            x = torch.randn(m, HIDDEN, dtype=torch.bfloat16).to(device)
            calls, own = Routes(m, given.layers, device), Routes(m, given.layers, "cpu")
            runs = {"alone": timed(alone(layers, x, own), own.turn)}
            for name, mine in (("contract", layers), ("kt-kernel", theirs)):
                if mine:
                    step = step_of(mine, x, calls)
                    if x.is_cuda:
                        runs[name], spins = replays_of(step, calls.turn)
                        if given.spin:
                            runs[f"{name}, spinning"] = spins
                    else:
                        runs[name] = timed(step, calls.turn)
            streams = layers[0]._layer._prompts
            if streams is not None and (count := streams.passing(m)):
                runs[f"cut ({count} experts)"] = cut_replays_of(step_of(layers, x, calls), calls.turn)
            before = _native.read_bandwidth(READ)
            found = {name: us / given.layers for name, us in medians(runs, given.seconds).items()}
            line = "  ".join(f"{name} {us:9.1f}" for name, us in found.items())
            if "kt-kernel" in found:
                ours = [us for name, us in found.items() if name == "contract" or name.startswith("cut")]
                line += "  " + ", ".join(f"{found['kt-kernel'] / us:.2f}" for us in ours) + " times ours"
            read = max(before, _native.read_bandwidth(READ))
            print(f"  {m:5} tokens: {line}", flush=True)
            print(f"               {bound(layers[0], calls.asked, found, read)}", flush=True)
        del layers, theirs


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--methods", nargs="+", default=["AMXINT4", "BF16"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 8, 64, 2048])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=1.0, help="for each figure")
    parser.add_argument("--threads", type=int, default=0, help="0: all the process may use")
    parser.add_argument("--kt-threads", type=int, default=0, help="of kt-kernel; one less than CPUs at most")
    parser.add_argument("--no-peers", dest="peers", action="store_false", help="leave kt-kernel out")
    parser.add_argument(
        "--spin", action="store_true", help="also where who waits for a replay spins, as without our plug-in"
    )
    given = parser.parse_args()
    if given.threads:
        _native.set_threads(given.threads)
    torch.manual_seed(0)
    bench(given)


if __name__ == "__main__":
    main()
