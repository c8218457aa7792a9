"""llama.cpp's server with 1, 32 … clients, as bench_batching.py counts: tokens a second, time to the first token.

    python benchmarks/gguf_file.py /dev/shm/a.gguf --layers 48 --tokenizer
    python benchmarks/llama_clients.py ./llama-server /dev/shm/a.gguf --clients 1 32 --ways "-t 14" "-t 16 -ub 2048"

All clients ask at once, each for a text of its own; prompts are numbers of tokens, so that nothing is tokenised. Each
way is a server of its own, one after the other; of its rounds the median is shown, after one that does not count and
writes a few tokens only.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import random
import socket
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

# Experts on the CPU, all else on the GPU; without a GPU, the server ignores both.
PLACES = ["-ngl", "99", "-ncmoe", "99"]


@contextlib.contextmanager
def server(program: Path, gguf: Path, slots: int, context: int, options: Sequence[str]) -> Iterator[int]:
    """Starts one, and gives the port once it answers.

    context  tokens of one slot
    Raises   SystemExit with the last lines it wrote if it ends before, or takes more than two minutes
    """
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    command = [str(program), "-m", str(gguf), "--host", "127.0.0.1", "--port", str(port), *PLACES]
    command += ["--parallel", str(slots), "-c", str(slots * context), *options]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            begin = time.monotonic()
            while not healthy(port):
                if process.poll() is not None or time.monotonic() - begin > 120:
                    log.seek(0)
                    raise SystemExit(f"{program}: did not start: {' | '.join(log.read().splitlines()[-5:])}")
                time.sleep(0.2)
            yield port
        finally:
            process.terminate()
            process.wait()


def healthy(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


class Client(threading.Thread):
    """Asks for one text; knows when its first and its last token came, and how many there were."""

    def __init__(self, port: int, prompt: Sequence[int], write: int) -> None:
        super().__init__()
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
        self._body = {"prompt": prompt, "n_predict": write, "ignore_eos": True, "stream": True}
        self._body |= {"temperature": 0, "cache_prompt": False}
        self.first = self.last = 0.0
        self.tokens = 0

    def run(self) -> None:
        headers = {"Content-Type": "application/json"}
        self._connection.request("POST", "/completion", json.dumps(self._body), headers)
        for line in self._connection.getresponse():
            if not line.startswith(b"data: "):
                continue
            self.last = time.perf_counter()
            self.first = self.first or self.last
            answer = json.loads(line[6:])
            if answer.get("stop"):
                self.tokens = answer["tokens_predicted"]
        self._connection.close()


def a_round(port: int, count: int, prompt: int, write: int, vocab: int) -> tuple[float, list[float]]:
    """Tokens a second of all, and each client's seconds to its first token."""
    clients = [
        Client(port, [random.randrange(256, vocab) for _ in range(prompt)], write) for _ in range(count)
    ]
    begin = time.perf_counter()
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    if any(client.tokens != write for client in clients):
        raise SystemExit(
            f"not all {count} clients got {write} tokens: {[client.tokens for client in clients]}"
        )
    seconds = max(client.last for client in clients) - begin
    return count * write / seconds, [client.first - begin for client in clients]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("program", type=Path)
    parser.add_argument("gguf", type=Path)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--write", type=int, default=64)
    parser.add_argument("--vocab", type=int, default=32768)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--ways", nargs="+", default=[""], help='of the server, such as "-t 14"')
    arguments = parser.parse_args()
    random.seed(0)
    context = arguments.prompt + arguments.write + 8
    for way in arguments.ways:
        most = max(arguments.clients)
        with server(arguments.program, arguments.gguf, most, context, way.split()) as port:
            for count in arguments.clients:
                of = count, arguments.prompt, arguments.write, arguments.vocab
                a_round(port, count, arguments.prompt, min(8, arguments.write), arguments.vocab)
                rates, firsts = zip(*(a_round(port, *of) for _ in range(arguments.repeats)), strict=True)
                first = sorted(seconds for found in firsts for seconds in found)
                p99 = first[min(len(first) - 1, int(0.99 * len(first)))]
                print(
                    f"llama.cpp {way}: {count:3} clients: {statistics.median(rates):8.1f} tokens/s; "
                    f"first token: median {statistics.median(first):.3f} s, p99 {p99:.3f} s",
                    flush=True,
                )


if __name__ == "__main__":
    main()
