"""A process with a SGLang engine: prompts in, tokens out. Arguments: a JSON of settings, and the file for the answer.

model      folder
options    of sglang.Engine
prompts    lists of ids
rounds     how often all of them are asked
new        tokens of each answer
soak       so many requests of random lengths between the first round and the second, of which some are cancelled
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    given = json.loads(sys.argv[1])
    import sglang  # type: ignore[import-not-found]

    engine = sglang.Engine(model_path=given["model"], log_level="info", random_seed=0, **given["options"])
    sampling = {"temperature": 0, "max_new_tokens": given["new"], "ignore_eos": True}
    rounds: list[Any] = []
    for _ in range(given["rounds"]):
        if rounds and given["soak"]:
            rounds.append(engine.loop.run_until_complete(soak(engine, given["soak"], Path(sys.argv[2]))))
        try:
            answers = engine.generate(
                input_ids=given["prompts"], sampling_params=sampling, return_logprob=True, top_logprobs_num=2
            )
            rounds.append([said(answer) for answer in answers])
        except Exception as error:  # fastapi's, that a client gets
            rounds.append([{"error": f"{type(error).__name__}: {error}"}])
    Path(sys.argv[2]).write_text(json.dumps(rounds))
    engine.shutdown()


async def soak(engine: Any, count: int, out: Path) -> dict[str, Any]:
    """How many requests ended how, and the MiB that the schedulers hold after a quarter of them and after all.

    out  beside it, a file says how many have ended
    """
    numbers, ended, held = random.Random(0), {"stop": 0, "cancelled": 0, "failed": 0}, []
    waiting = iter(range(count))

    async def client() -> None:
        for number in waiting:
            ids = [numbers.randrange(2, 2000) for _ in range(numbers.randrange(1, 60))]
            sampling = {"temperature": 0, "max_new_tokens": numbers.randrange(1, 13), "ignore_eos": True}
            asked = asyncio.create_task(
                engine.async_generate(input_ids=ids, sampling_params=sampling, rid=f"soak{number}")
            )
            if numbers.random() < 0.4:
                await asyncio.sleep(numbers.random() * 0.3)
                engine.tokenizer_manager.abort_request(rid=f"soak{number}")
            try:
                answer = await asked
                reason = answer["meta_info"]["finish_reason"]["type"]
                ended["cancelled" if reason == "abort" else "stop"] += 1
                if reason != "abort" and len(answer["output_ids"]) != sampling["max_new_tokens"]:
                    ended["failed"] += 1
            except ValueError as error:
                ended["cancelled" if "bort" in str(error) else "failed"] += 1
            if sum(ended.values()) % (count // 4) == 0:
                held.append(mebibytes())
            out.with_suffix(".count").write_text(str(sum(ended.values())))

    await asyncio.gather(*(client() for _ in range(16)))
    return {"ended": ended, "held": held}


def mebibytes() -> float:
    """Of this process's children, shared pages counted once each."""
    import psutil

    children = psutil.Process().children(recursive=True)
    return sum(child.memory_info().rss for child in children) / 2**20


def said(answer: Any) -> dict[str, Any]:
    """Tokens, and how much likelier each was than the next best one."""
    meta = answer["meta_info"]
    tops = meta.get("output_top_logprobs") or []
    return {
        "ids": answer["output_ids"],
        "margins": [abs(top[0][0] - top[1][0]) for top in tops],
    }


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)
