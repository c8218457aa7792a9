"""llama.cpp's server with 1, 32 … clients, as bench_batching.py counts: tokens a second, time to the first token.

    python benchmarks/gguf_file.py /dev/shm/a.gguf --layers 48 --tokenizer
    python benchmarks/llama_clients.py ./llama-server /dev/shm/a.gguf --clients 1 32 \\
        --ways "-t 14" "GGML_OP_OFFLOAD_MIN_BATCH=64 -t 14 -lm none -ub 2048"

All clients ask at once, each for a text of its own; prompts are numbers of tokens, so that nothing is tokenised. Each
way is a server of its own, one after the other, and may begin with variables for its environment; of its rounds the
median is shown, after one that does not count and writes a few tokens only. A round that takes longer than --limit is
ended: the line says so, what the clients had by then is its rate, and the way's further rounds are not run.

With 32 tokens in a step or more, llama.cpp copies the experts that these use to the GPU, which with 32 clients is
nearly all of them in each step. GGML_OP_OFFLOAD_MIN_BATCH sets that number; --no-op-offload never copies, in prompts
neither. `-lm none` has them in page-locked memory, which copies several times as fast as a mapped file.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import random
import socket
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

# Experts on the CPU, all else on the GPU; without a GPU, the server ignores both.
PLACES = ["-ngl", "99", "-ncmoe", "99"]


@contextlib.contextmanager
def server(program: Path, gguf: Path, slots: int, context: int, way: Sequence[str]) -> Iterator[int]:
    """Starts one, and gives the port once it answers.

    context  tokens of one slot
    way      variables of the environment as NAME=VALUE, then options
    Raises   SystemExit with the last lines it wrote if it ends before, or takes more than two minutes
    """
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    options = list(way)
    environment = dict(os.environ)
    while options and not options[0].startswith("-"):
        name, _, value = options.pop(0).partition("=")
        environment[name] = value
    command = [str(program), "-m", str(gguf), "--host", "127.0.0.1", "--port", str(port), *PLACES]
    command += ["--parallel", str(slots), "-c", str(slots * context), *options]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
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
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:  # it ends its step first, and a long one may be under way
                process.kill()
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
        self._connection.connect()
        self._socket = self._connection.sock  # which the connection forgets once a response begins
        self._body = {"prompt": prompt, "n_predict": write, "ignore_eos": True, "stream": True}
        self._body |= {"temperature": 0, "cache_prompt": False}
        self._ended = False
        self.first = self.last = 0.0
        self.tokens = 0

    def run(self) -> None:
        try:
            self._read()
        except (OSError, http.client.HTTPException):
            if not self._ended:
                raise
        finally:
            self._connection.close()

    def end(self) -> None:
        """Asks for no more."""
        self._ended = True
        with contextlib.suppress(OSError):  # it may be done, and closed, by now
            self._socket.shutdown(socket.SHUT_RDWR)

    def _read(self) -> None:
        headers = {"Content-Type": "application/json"}
        self._connection.request("POST", "/completion", json.dumps(self._body), headers)
        for line in self._connection.getresponse():
            if not line.startswith(b"data: ") or self._ended:
                continue
            written = json.loads(line[6:]).get("tokens_predicted", 0)
            if written > self.tokens:
                self.tokens, self.last = written, time.perf_counter()
                self.first = self.first or self.last


class Round(NamedTuple):
    rate: float  # tokens a second of all clients
    firsts: list[float]  # seconds to the first token, of those that got one
    ended: bool  # at the limit


def a_round(port: int, count: int, prompt: int, write: int, vocab: int, limit: float) -> Round:
    """All clients once.

    limit    seconds after which it is ended: its rate is then of what was written by then
    Raises   SystemExit if a client got another number of tokens though there was time
    """
    clients = [
        Client(port, [random.randrange(256, vocab) for _ in range(prompt)], write) for _ in range(count)
    ]
    begin = time.perf_counter()
    for client in clients:
        client.start()
    for client in clients:
        client.join(max(0.0, begin + limit - time.perf_counter()))
    ended = any(client.is_alive() for client in clients)
    if ended:
        written, seconds = sum(client.tokens for client in clients), time.perf_counter() - begin
        for client in clients:
            client.end()
        for client in clients:
            client.join()
    else:
        if any(client.tokens != write for client in clients):
            raise SystemExit(
                f"not all {count} clients got {write} tokens: {[client.tokens for client in clients]}"
            )
        written, seconds = count * write, max(client.last for client in clients) - begin
    return Round(written / seconds, [client.first - begin for client in clients if client.first], ended)


def rounds(port: int, count: int, arguments: argparse.Namespace) -> list[Round]:
    """Those that count; the one before them if it came to the limit, as the others would."""
    found: list[Round] = []
    for write in [min(8, arguments.write)] + [arguments.write] * arguments.repeats:
        one = a_round(port, count, arguments.prompt, write, arguments.vocab, arguments.limit)
        found.append(one)
        if one.ended:
            return found[1:] or found
    return found[1:]


def show(way: str, count: int, found: Sequence[Round], limit: float) -> None:
    rate = statistics.median(one.rate for one in found)
    line = f"llama.cpp {way}: {count:3} clients: {rate:8.1f} tokens/s; "
    first = sorted(seconds for one in found for seconds in one.firsts)
    if first:
        p99 = first[min(len(first) - 1, int(0.99 * len(first)))]
        line += f"first token: median {statistics.median(first):.3f} s, p99 {p99:.3f} s"
    else:
        line += "no first token"
    if found[-1].ended:
        line += f"; ended after {limit:g} s"
    print(line, flush=True)


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
    parser.add_argument("--limit", type=float, default=120, help="seconds that one round may take")
    parser.add_argument(
        "--ways", nargs="+", default=[""], help='of the server, such as "-t 14" or "NAME=VALUE -t 14"'
    )
    arguments = parser.parse_args()
    random.seed(0)
    context = arguments.prompt + arguments.write + 8
    for way in arguments.ways:
        most = max(arguments.clients)
        with server(arguments.program, arguments.gguf, most, context, way.split()) as port:
            for count in arguments.clients:
                found = rounds(port, count, arguments)
                show(way, count, found, arguments.limit)
                if found[-1].ended:
                    break  # the server still works on what was asked


if __name__ == "__main__":
    main()
