"""SGLang with experts on the CPU beside SGLang alone: the same answers, and how fast. In an environment with both.

    python benchmarks/bench_sglang_engine.py same [--device cpu] [--own 8 0 31] [--at-once 1] [--no-eager] [--tp 2]
    python benchmarks/bench_sglang_engine.py soak [--device cpu] [--own 8] [--requests 1000]
    python benchmarks/bench_sglang_engine.py speed [--layers 48] [--clients 1 32] [--own 32] [--tp 2 [--apart]] [--peer]

`same` asks the trained Qwen3-MoE of this repository, one prompt at a time and 32 at once, with some of the experts
SGLang's own, with graphs and without. Of two texts, either may be right: a token counts as fp32's where fp32, given all
before it, has it as the best one. Others should be as rare as with SGLang alone, and no further behind. Several engines
may run at once, which says nothing about speed. Where fp32's best is far ahead of its second, all must write it.

With `--tp` of 2 or more, each engine has so many processes and GPUs. `same` then lets them share CPUs, so that the
first one has all experts of the CPU, and gives each its own, so that each has a part; `speed` does the latter with
`--apart`.

`soak` asks one engine of these for its answers before and after requests of which some are cancelled, kills it at work,
and asks another one that is started then.

`speed` has the shape of Qwen3-30B-A3B with random weights, int4 experts on the CPU, and `--own` of a layer's 128, none
unless given, on the GPU in bf16. With `--tp`, each GPU has a part of every one of those. Tokens are drawn at random, so
that clients do not ask for the same experts. It ends with a prompt of 2048 tokens, and with where the GPU is in a
decode step of one client: in kernels that wait for the CPU, in others, in none. With `--peer`, kt-kernel's own
kernels, submit and sync are in the place of ktinject's, with no expert on the GPU (sglang_peer.py). bench_generate.py
has plain `generate` of that shape: hosts differ, so run it right before, on the same one.
"""

from __future__ import annotations

import argparse
import signal
import sys

from sglang_answers import EXPERTS, same, soaked
from sglang_speed import speed


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["same", "soak", "speed"])
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--new", type=int, default=24, help="tokens of each answer")
    parser.add_argument("--own", type=int, nargs="+", help="experts of SGLang; of a speed, one number")
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--requests", type=int, default=1000, help="of a soak")
    parser.add_argument("--at-once", type=int, default=1, help="engines")
    parser.add_argument(
        "--eager", action=argparse.BooleanOptionalAction, default=True, help="also without graphs"
    )
    parser.add_argument("--tp", type=int, default=1, help="processes of an engine, each with a GPU")
    parser.add_argument("--apart", action="store_true", help="of a speed: each process has CPUs of its own")
    parser.add_argument("--seconds", type=float, default=600, help="for each engine")
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--peer", action="store_true", help="of a speed: kt-kernel in ktinject's place")
    given = parser.parse_args()
    if given.own is None:
        given.own = [0] if given.what == "speed" else [8, 0, EXPERTS - 1]
    if given.what == "speed" and len(given.own) > 1:
        parser.error(f"--own {' '.join(map(str, given.own))}: a speed is measured with one number of experts")
    if given.peer and (given.what != "speed" or given.own != [0] or given.tp > 1):
        parser.error("--peer is for a speed of one process without experts on the GPU")
    # Else SIGTERM would leave engines behind, which have sessions of their own.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    if given.what == "speed":
        speed(given)
    elif not (same if given.what == "same" else soaked)(given):
        raise SystemExit("not as it should be, see above")


if __name__ == "__main__":
    main()
