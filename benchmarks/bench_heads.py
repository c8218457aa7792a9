"""MTP heads of a trained model: how often what they draft is right, and tokens a second beside a plain request.

    python benchmarks/bench_heads.py examples/models/tiny-deepseek-v3 --head mtp.safetensors
    python benchmarks/bench_heads.py examples/models/tiny-deepseek-v3 --head mtp.safetensors --devices cuda:0 --all

examples/train_mtp.py trains heads. The prompts are examples/models/prompts.jsonl; plain requests and those with heads
take turns, and their greedy texts must be the same. --all has every step verify a candidate, whether that pays or not:
so the acceptance is that of all tokens, not of those behind which the governor has let one be tried.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_layers import MtpModel

import ktinject
from ktinject.generation.governor import Governor

EXAMPLES = Path(__file__).parents[1] / "examples"
sys.path.insert(0, str(EXAMPLES))
from train_mtp import load_head  # noqa: E402


class Heard:
    """What heads have drafted, and how much of it was right."""

    def __init__(self) -> None:
        self.tried = self.right = 0
        self._verified = Governor.verified

    def verified(self, governor: Governor, tried: int, accepted: int, seconds: float) -> None:
        self.tried, self.right = self.tried + tried, self.right + accepted
        self._verified(governor, tried, accepted, seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--head", type=Path, required=True)
    parser.add_argument("--devices", default="cpu")
    parser.add_argument("-n", "--write", type=int, default=64)
    parser.add_argument("--prompts", type=int, default=10)
    parser.add_argument("--all", action="store_true")
    arguments = parser.parse_args()
    model: Any = ktinject.load(arguments.model, devices=arguments.devices)
    own = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.bfloat16)
    head, heard = load_head(own, arguments.head).to(model.device), Heard()
    head.tie_with_main_model(model)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    lines = (EXAMPLES / "models" / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    texts = [json.loads(line)["prompt"] for line in lines[: arguments.prompts]]
    prompts = [tokenizer(text, return_tensors="pt").input_ids[:, -256:].to(model.device) for text in texts]
    clock = time.process_time if arguments.devices == "cpu" else time.perf_counter
    taken, same = {False: 0.0, True: 0.0}, 0
    model.config.num_mtp_layers = 1
    counts = {"count": lambda self, found, queued: found} if arguments.all else {}
    with (
        patch.object(MtpModel, "from_pretrained", lambda *_, **__: head),
        patch.multiple(Governor, verified=lambda *given: heard.verified(*given), **counts),
    ):
        for at, ids in enumerate([prompts[0], *prompts]):  # the first time, steps are captured and proven
            found = []
            for use_mtp in (False, True):
                start = clock()
                asked = {"use_mtp": True} if use_mtp else {}
                found.append(
                    model.generate(
                        ids,
                        attention_mask=torch.ones_like(ids),
                        max_new_tokens=arguments.write,
                        do_sample=False,
                        eos_token_id=None,
                        **asked,
                    )
                )
                taken[use_mtp] += (clock() - start) * (at > 0)
            same += torch.equal(*found)
    share = heard.right / max(1, heard.tried)
    print(f"{model.ktinject_decoding.last}: {heard.tried} candidates, {share:.3f} of them right")
    print(
        f"plain / with heads: {taken[False] / taken[True]:.2f}; {same} of {len(prompts) + 1} texts are the same"
    )


if __name__ == "__main__":
    main()
