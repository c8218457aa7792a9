"""A process with a SGLang engine: prompts in, tokens out. Arguments: a JSON of settings, and the file for the answer.

model      folder
options    of sglang.Engine
prompts    lists of ids
new        tokens of each answer
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path


def main() -> None:
    given = json.loads(sys.argv[1])
    import sglang

    engine = sglang.Engine(model_path=given["model"], log_level="info", random_seed=0, **given["options"])
    sampling = {"temperature": 0, "max_new_tokens": given["new"], "ignore_eos": True}
    answers = engine.generate(
        input_ids=given["prompts"], sampling_params=sampling, return_logprob=True, top_logprobs_num=2
    )
    found = []
    for answer in answers:
        tops = answer["meta_info"]["output_top_logprobs"]
        margins = [abs(top[0][0] - top[1][0]) for top in tops]
        found.append({"ids": answer["output_ids"], "margins": margins})
    Path(sys.argv[2]).write_text(json.dumps(found))
    engine.shutdown()


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)
