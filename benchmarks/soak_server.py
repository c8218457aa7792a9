"""Many clients at a server, over a socket, with the `openai` package: are their answers those of `generate`?

    python benchmarks/soak_server.py examples/models/tiny-qwen3-moe --clients 16 --requests 50
    python benchmarks/soak_server.py examples/models/tiny-qwen3-moe --speed 1 4 16     # tokens/s instead
    python benchmarks/soak_server.py examples/models/tiny-qwen3-moe --speed 1 --shape qwen3-30b-a3b --device cuda:0

Of all requests, half stream, a tenth goes away in the middle, a tenth is malformed or too large, and some do not come
through a full queue and ask again. The model computes in fp32, where roundings decide no token. Prints how many answers
were right, what else was answered, and the memory of the process after each quarter. Ends with 1 if an answer
was wrong or failed, or if memory grew by more than --growth MiB from the first quarter to the last.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import torch
from rows import commit
from transformers import AutoTokenizer

import ktinject
from ktinject.serving.gate import Limits
from ktinject.serving.server import Server, Settings
from ktinject.tools import random_models

KEY = "a key of tests"
TOKENS = 16
ODD: list[dict[str, Any]] = [
    {"n": 2},
    {"prompt": ""},
    {"prompt": "a b " * 4000},
    {"max_tokens": 10**6},
    {"temperature": -1},
]

# Clients of `--speed`, in a process of their own as clients are: a line of requests, answered by a line when all are.
CLIENTS = """
import json, sys, urllib.request
from concurrent.futures import ThreadPoolExecutor

def ask(body):
    headers = {"Content-Type": "application/json", "Authorization": "Bearer " + sys.argv[2]}
    request = urllib.request.Request(sys.argv[1], json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=600) as answer:
        return sum(line.startswith(b"data: {") for line in answer)

for line in sys.stdin:
    bodies = json.loads(line)
    with ThreadPoolExecutor(len(bodies)) as clients:
        print(sum(clients.map(ask, bodies)), flush=True)
"""


def memory() -> float:
    """MiB of this process that are in RAM."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 2**20


class Soak:
    def __init__(self, args: argparse.Namespace, dtype: torch.dtype) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(args.model)
        if args.shape is None:
            self.model: Any = ktinject.load(args.model, devices=args.device, dtype=dtype, progress=False)
        else:
            config = random_models.config(args.shape, args.layers, vocab_size=len(self.tokenizer))
            self.model = random_models.build(
                config, devices=[args.device], variables={"experts": "int4", "gpu_experts": 0}
            )
        limits = Limits(queue=12, key=KEY, seconds=600)
        self.server = Server(
            self.model, self.tokenizer, "model", Settings(port=0, batch=args.batch, limits=limits)
        )
        address: list[str] = []
        self.thread = threading.Thread(target=self.server.run, args=[address.append], daemon=True)
        self.thread.start()
        while not address:
            time.sleep(0.01)
        self.address = address[0]
        self.client = openai.OpenAI(base_url=f"{address[0]}/v1", api_key=KEY, max_retries=0, timeout=600)
        self.counts: Counter[str] = Counter()

    def close(self) -> None:
        self.server.stop()
        self.thread.join(60)

    def written(self, prompt: str, tokens: int = TOKENS) -> str:
        ids = self.tokenizer(prompt, return_tensors="pt")["input_ids"].to(self.model.device)
        found = self.model.generate(ids, max_new_tokens=tokens, do_sample=False)[0, ids.shape[1] :]
        return str(self.tokenizer.decode(found, skip_special_tokens=True))

    def ask(self, text: str, stream: bool, leaves: bool = False, **more: Any) -> str:
        asked = {"model": "model", "prompt": text, "max_tokens": TOKENS, "temperature": 0, **more}
        if not stream:
            return str(self.client.completions.create(**asked).choices[0].text)
        pieces = []
        with self.client.completions.create(stream=True, **asked) as answer:
            for piece in answer:
                pieces.append(piece.choices[0].text)
                if leaves and len(pieces) > 2:
                    break
        return "".join(pieces)

    def one(self, prompt: str, want: str, seed: int) -> None:
        chance = random.Random(seed)
        kind = chance.random()
        if kind < 0.1:
            try:
                self.ask(prompt, False, **chance.choice(ODD))
            except openai.BadRequestError:
                self.counts["refused as it should be"] += 1
            except openai.RateLimitError:
                self.counts["queue full"] += 1
            else:
                self.counts["WRONG: not refused"] += 1
            return
        while True:
            try:
                found = self.ask(prompt, kind < 0.6, leaves=kind < 0.2)
            except openai.RateLimitError:
                self.counts["queue full"] += 1
                time.sleep(0.05)
                continue
            except Exception as error:
                self.counts[f"WRONG: {type(error).__name__}"] += 1
                return
            break
        if kind < 0.2:
            self.counts["went away"] += 1
        else:
            self.counts["right" if found == want else "WRONG: another text"] += 1


def soak(args: argparse.Namespace) -> bool:
    found = Soak(args, torch.float32)
    prompts = [f"def {name}(" for name in ("f", "add", "read", "main", "sort", "_next", "close", "parse")]
    want = {prompt: found.written(prompt) for prompt in prompts}
    before, seen = time.perf_counter(), []
    with ThreadPoolExecutor(args.clients) as clients:
        for quarter in range(4):
            jobs = range(
                quarter * args.clients * args.requests // 4, (quarter + 1) * args.clients * args.requests // 4
            )
            list(clients.map(lambda n: found.one(prompts[n % 8], want[prompts[n % 8]], n), jobs))
            seen.append(memory())
    print(
        f"{args.model}: {args.clients} clients x {args.requests}, {time.perf_counter() - before:.0f} s"
        f"; {dict(found.counts)}"
    )
    print(
        f"through a batch: {found.server._batches._number}; MiB after each quarter: {[round(m) for m in seen]}; "
        f"{commit()}"
    )
    found.close()
    return not any("WRONG" in name for name in found.counts) and seen[-1] - seen[0] < args.growth


def speed(args: argparse.Namespace) -> None:
    found = Soak(args, torch.bfloat16)
    tokens = args.tokens
    found.model.generation_config.eos_token_id = None
    found.written("def f(", tokens)
    rates: dict[Any, list[float]] = {"generate": [], **{count: [] for count in args.speed}}
    command = [sys.executable, "-c", CLIENTS, f"{found.address}/v1/completions", KEY]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as clients:

        def ask(count: int) -> float:
            """Seconds until so many clients have their answers."""
            asked = {"model": "model", "max_tokens": tokens, "temperature": 0, "stream": True}
            bodies = [{**asked, "prompt": f"def f{number}("} for number in range(count)]
            begin = time.perf_counter()
            print(json.dumps(bodies), file=clients.stdin, flush=True)
            if not int(clients.stdout.readline()):
                raise SystemExit("the server's answers are empty")
            return time.perf_counter() - begin

        ask(1)
        for _ in range(args.repeats):
            begin = time.perf_counter()
            found.written("def f0(", tokens)
            rates["generate"].append(tokens / (time.perf_counter() - begin))
            for count in args.speed:
                rates[count].append(count * tokens / ask(count))
        clients.stdin.close()
    own = statistics.median(rates["generate"])
    for name, each in rates.items():
        # Of each repetition, since they take turns.
        shares = [one / of for one, of in zip(each, rates["generate"])]
        print(
            f"{name}: {statistics.median(each):.1f} tokens/s, {statistics.median(each) / own:.2f} of generate "
            f"(in turns: {', '.join(f'{share:.2f}' for share in shares)})"
        )
    print(f"how a request alone ran: {found.model.ktinject_decoding.last}; {commit()}")
    found.close()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="a folder")
    parser.add_argument("--shape", help="random weights of a shape, with the folder's tokenizer")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--requests", type=int, default=50)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--growth", type=float, default=64)
    parser.add_argument("--speed", type=int, nargs="+", metavar="CLIENTS")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    if args.speed:
        speed(args)
        return 0
    return 0 if soak(args) else 1


if __name__ == "__main__":
    raise SystemExit(main())
