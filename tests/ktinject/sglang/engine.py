"""A process with a SGLang engine: prompts in, tokens out. Arguments: a JSON of settings, and the file for the answer.

model      folder
options    of sglang.Engine
prompts    lists of ids
rounds     how often all of them are asked
new        tokens of each answer
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    given = json.loads(sys.argv[1])
    import sglang  # type: ignore[import-not-found]

    engine = sglang.Engine(model_path=given["model"], log_level="info", random_seed=0, **given["options"])
    sampling = {"temperature": 0, "max_new_tokens": given["new"], "ignore_eos": True}
    rounds = []
    for _ in range(given["rounds"]):
        try:
            answers = engine.generate(
                input_ids=given["prompts"], sampling_params=sampling, return_logprob=True, top_logprobs_num=2
            )
            rounds.append([said(answer) for answer in answers])
        except Exception as error:  # fastapi's, that a client gets
            rounds.append([{"error": f"{type(error).__name__}: {error}"}])
    Path(sys.argv[2]).write_text(json.dumps(rounds))
    engine.shutdown()


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
