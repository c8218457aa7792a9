"""MTP heads of a trained model: how often what they draft is right, and tokens a second beside a plain request.

    python benchmarks/bench_heads.py examples/models/tiny-deepseek-v3
    python benchmarks/bench_heads.py examples/models/tiny-deepseek-v3 --devices cuda:0 --all

examples/train_mtp.py trains heads. The prompts are examples/models/prompts.jsonl; plain requests and those with heads
take turns, and their greedy texts must be the same. Times are those of decode: of --write tokens less those of one, for
each request loads its heads. --all has every step verify a candidate, whether that pays or not: so the acceptance is
that of all tokens, not of those behind which the governor has let one be tried.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from transformers import AutoTokenizer
from transformers.utils import logging

import ktinject
from ktinject.generation.governor import Governor

EXAMPLES = Path(__file__).parents[1] / "examples"


class Heard:
    """What heads have drafted, and how much of it was right."""

    def __init__(self) -> None:
        self.tried = self.right = 0
        self._verified = Governor.verified

    def verified(self, governor: Governor, tried: int, accepted: int, seconds: float) -> None:
        self.tried, self.right = self.tried + tried, self.right + accepted
        self._verified(governor, tried, accepted, seconds)


class Requests:
    """Greedy requests to a model, with heads and without."""

    def __init__(self, folder: Path, devices: str) -> None:
        self.model: Any = ktinject.load(folder, devices=devices)
        self._clock = time.process_time if devices == "cpu" else time.perf_counter

    def text(self, ids: torch.Tensor, new: int, use_mtp: bool) -> tuple[torch.Tensor, float]:
        """So many new tokens, and what they took behind the first one."""
        taken = {}
        for count in (1, new):
            start = self._clock()
            found = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=count,
                do_sample=False,
                eos_token_id=None,
                **({"use_mtp": True} if use_mtp else {}),
            )
            taken[count] = self._clock() - start
        return found, taken[new] - taken[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--devices", default="cpu")
    parser.add_argument("-n", "--write", type=int, default=64)
    parser.add_argument("--prompts", type=int, default=10)
    parser.add_argument("--all", action="store_true")
    arguments = parser.parse_args()
    logging.disable_progress_bar()
    requests, heard = Requests(arguments.model, arguments.devices), Heard()
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    lines = (EXAMPLES / "models" / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    texts = [json.loads(line)["prompt"] for line in lines[: arguments.prompts]]
    prompts = [tokenizer(text, return_tensors="pt").input_ids[:, -256:] for text in texts]
    taken, same = {False: 0.0, True: 0.0}, 0
    counts = {"count": lambda self, found, queued: found} if arguments.all else {}
    with patch.multiple(Governor, verified=lambda *given: heard.verified(*given), **counts):
        for at, ids in enumerate([prompts[0], *prompts]):  # the first time, steps are captured and proven
            found = []
            for use_mtp in (False, True):
                text, seconds = requests.text(ids.to(requests.model.device), arguments.write, use_mtp)
                found.append(text)
                taken[use_mtp] += seconds * (at > 0)
            same += torch.equal(*found)
    share = heard.right / max(1, heard.tried)
    print(f"{requests.model.ktinject_decoding.last}: {heard.tried} candidates, {share:.3f} of them right")
    print(
        f"plain / with heads: {taken[False] / taken[True]:.2f}; {same} of {len(prompts) + 1} texts are the same"
    )


if __name__ == "__main__":
    main()
