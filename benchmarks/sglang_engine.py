"""One engine of SGLang in a process of its own: what it answers, and what a soak of requests leaves behind.

`Engine` starts this file again as that process, by the Python of an environment with SGLang.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

AT_ONCE = 32
COMPILER = "torch's compiler"
MOST_GROWTH = 64.0  # MiB of a process, after the first part of a soak


def options_of(device: str, graphs: bool, tp: int = 1, **others: Any) -> dict[str, Any]:
    """Arguments of sglang.Engine. tp: its processes, each with a GPU where there are GPUs."""
    common = {
        "tp_size": tp,
        "dtype": "bfloat16",
        "skip_tokenizer_init": True,
        "random_seed": 0,
        "log_level": "info",
        **others,
    }
    if device == "cpu":
        return common | {
            "device": "cpu",
            "attention_backend": "torch_native",
            "disable_cuda_graph": True,
            "mem_fraction_static": 0.2,
        }
    common |= {
        "attention_backend": "triton",
        "sampling_backend": "pytorch",
        "moe_runner_backend": "triton",
        "grammar_backend": "none",
        "enforce_disable_flashinfer_allreduce_fusion": True,  # it would be compiled at the first start, for minutes
    }
    return common | ({"cuda_graph_max_bs_decode": AT_ONCE} if graphs else {"disable_cuda_graph": True})


def environ_of(apart: bool) -> dict[str, str]:
    """The environment of an engine. apart: SGLang gives each of its processes its own CPUs, so each has a part of the
    CPU's experts; else they share them all and the first one has these experts, but where SGLang binds them to NUMA
    nodes."""
    return os.environ | ({"SGLANG_SET_CPU_AFFINITY": "1"} if apart else {})


def engine(given: dict[str, Any], out: Path) -> None:
    """Ask, and put what is known into the file after each round, since time may be over before the next.

    model, options  of sglang.Engine
    prompts         lists of ids
    new             tokens of each answer
    at_once         prompts are asked together by so many, or all of them
    requests        of a soak
    margins         also say how much likelier each token was than the next best one
    rounds          their names: "alone" asks one prompt at a time, "soak" and "killed" are what `soak` does, and any
                    other asks all prompts together
    """
    begun = time.monotonic()
    import sglang  # type: ignore[import-not-found]

    made = sglang.Engine(model_path=given["model"], **given["options"])
    found: dict[str, Any] = {"start_s": time.monotonic() - begun}

    def keep() -> None:
        out.with_suffix(".part").write_text(json.dumps(found))
        out.with_suffix(".part").rename(out)

    keep()
    every = given["prompts"]
    together = (every * given["at_once"])[: max(given["at_once"], len(every))]
    for name in given["rounds"]:
        if name == "alone":
            found[name] = [answer for prompt in every for answer in ask(made, [prompt], given)]
        elif name in ("soak", "killed"):
            kill_after = given["requests"] // 10 if name == "killed" else None
            found[name] = made.loop.run_until_complete(soak(made, given, kill_after))
        else:
            found[name] = ask(made, together, given)[: len(every)]
        keep()


def ask(made: Any, prompts: list[list[int]], given: dict[str, Any]) -> list[dict[str, Any]]:
    """Each answer's `ids`, and its `margins` if these are wanted; or, of all together, one `error`."""
    sampling = {"temperature": 0, "max_new_tokens": given["new"], "ignore_eos": True}
    more = {"return_logprob": True, "top_logprobs_num": 2} if given["margins"] else {}
    try:
        said = made.generate(input_ids=prompts, sampling_params=sampling, **more)
    except Exception as error:  # fastapi's, that a client gets
        return [{"error": f"{type(error).__name__}: {error}"}]
    answers = []
    for answer in said:
        tops = answer["meta_info"].get("output_top_logprobs") or []
        answers.append({"ids": answer["output_ids"], "margins": [abs(top[0][0] - top[1][0]) for top in tops]})
    return answers


async def soak(made: Any, given: dict[str, Any], kill_after: int | None) -> dict[str, Any]:
    """Requests of random lengths, of which some are cancelled, in four parts with a pause after each.

    kill_after  so many, end all processes at once
    Returns     ended  how many requests came to their end, were cancelled, failed
                held   after each part what the processes held, by their ids; see `held`
                left   after each part, requests that SGLang still knows
                gpu    after each part, MiB that are taken of the GPU; None: there is none
    """
    numbers, ended = random.Random(0), {"stop": 0, "cancelled": 0, "failed": 0}
    count, patience = given["requests"], 0.3 if given["options"].get("device") == "cpu" else 0.1
    found: dict[str, Any] = {"ended": ended, "held": [], "left": [], "gpu": []}

    async def client(waiting: Iterator[int]) -> None:
        for number in waiting:
            ids = [numbers.randrange(2, 2000) for _ in range(numbers.randrange(1, 60))]
            new = numbers.randrange(1, given["new"] + 1)
            sampling = {"temperature": 0, "max_new_tokens": new, "ignore_eos": True}
            name = f"soak{number}"
            asked = asyncio.create_task(
                made.async_generate(input_ids=ids, sampling_params=sampling, rid=name)
            )
            if numbers.random() < 0.4:
                await asyncio.sleep(numbers.random() * patience)
                made.tokenizer_manager.abort_request(rid=name)
            try:
                answer = await asked
                is_cut = answer["meta_info"]["finish_reason"]["type"] == "abort"
                is_short = len(answer["output_ids"]) != new
                ended["cancelled" if is_cut else "failed" if is_short else "stop"] += 1
            except ValueError as error:
                ended["cancelled" if "bort" in str(error) else "failed"] += 1
            if kill_after is not None and sum(ended.values()) >= kill_after:
                os.killpg(os.getpgid(0), signal.SIGKILL)

    for part in range(4):
        waiting = iter(range(part * count // 4, (part + 1) * count // 4))
        await asyncio.gather(*(client(waiting) for _ in range(16)))
        await asyncio.sleep(
            1
        )  # without work, SGLang looks whether all its places for tokens and requests are free
        found["held"].append(held())
        found["left"].append(len(made.tokenizer_manager.rid_to_state))
        found["gpu"].append(taken())
    return found


def held() -> dict[int, dict[str, Any]]:
    """Of this process and each that it has started: its name, MiB in RAM, those that are its own, threads and files."""
    import psutil

    found = {}
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        try:
            memory, line = process.memory_full_info(), " ".join(process.cmdline())
            found[process.pid] = {
                "name": _name(process.name(), line),
                "rss": memory.rss / 2**20,
                "own": memory.uss / 2**20,
                "threads": process.num_threads(),
                "files": process.num_fds(),
            }
        except psutil.Error:  # it has ended
            pass
    return found


def _name(name: str, line: str) -> str:
    """Of a process with this name and command line, what it is for: SGLang has put a title in place of the line."""
    if "compile_worker" in line:
        return COMPILER
    return line.split()[0] if line.startswith("sglang::") else name


def taken() -> float | None:
    """MiB that all processes together have of the first GPU; None where there is none that says so."""
    asks = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        return float(subprocess.run(asks, capture_output=True, text=True, timeout=20).stdout.split()[0])
    except (OSError, ValueError, IndexError, subprocess.TimeoutExpired):
        return None


def grown(each: list[dict[Any, dict[str, Any]]]) -> float:
    """MiB of its own that the process which grew most had more after the last part of a soak than after the first.

    torch's compiler, which has some processes at times and ends them again, is left out.
    """
    first, last = each[0], each[-1]
    kept = [one for one in first.keys() & last.keys() if first[one]["name"] != COMPILER]
    return max(last[one]["own"] - first[one]["own"] for one in kept)


class Engine:
    """Such a process, and what it found.

    given   see `engine`
    python  of the environment with SGLang
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        given: dict[str, Any],
        python: str = sys.executable,
        environ: dict[str, str] | None = None,
    ) -> None:
        self.name, self.began = name, time.monotonic()
        self._told: list[str] = []
        file = name.replace(" ", "-").replace(",", "").replace("'", "")
        self.out, self.log = folder / f"{file}.json", folder / f"{file}.log"
        with self.log.open("w") as log:
            self.running = subprocess.Popen(
                [python, __file__, json.dumps(given), str(self.out)],
                env=environ,
                cwd=folder,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def stop(self) -> None:
        """Also its own processes, whether it has ended or not."""
        try:
            os.killpg(self.running.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.running.wait()

    def tell(self) -> None:
        """Print which rounds have come to their end since the last time."""
        for name, value in self.found().items():
            if name not in self._told:
                what = f"started in {value:.0f} s" if name == "start_s" else f"{name} done"
                print(f"# {self.name}: {what}; {time.monotonic() - self.began:.0f} s", flush=True)
                self._told.append(name)

    def found(self) -> dict[str, Any]:
        return json.loads(self.out.read_text()) if self.out.exists() else {}

    def having(self) -> int:
        """How many of its processes had experts on the CPU."""
        return len(re.findall(r"layer 0: \d+ experts as bf16", self.log.read_text(errors="replace")))

    def why(self) -> str:
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        errors = [line for line in lines if "Error" in line or "error:" in line]
        return " | ".join((errors or lines)[-3:])[-500:]


if __name__ == "__main__":
    try:
        engine(json.loads(sys.argv[1]), Path(sys.argv[2]))
    except BaseException as error:
        print(f"Error: {type(error).__name__}: {error}", flush=True)
    os.killpg(os.getpgid(0), signal.SIGKILL)
