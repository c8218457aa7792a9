"""Two models on the CPU, two threads: whatever they do at once, they answer as alone.

    python tests/native/soak.py SECONDS [MODEL MODEL]

Each thread has its own model and mixes long prompts with decoding. Without folders of models, they are a Qwen3-MoE and
a DeepSeek-V3 of random weights, whose long prompts compute for a good part of a second in a layer. It prints how many
answers were compared, and exits with 1 if one was another than that of the model alone, or if a thread gave no answer
for ten minutes.
"""

from __future__ import annotations

import faulthandler
import os
import random
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

import ktinject

HANGS_SECONDS = 600
# (share of the longest prompt, tokens to generate, sampled)
REQUESTS = [
    (0.01, 24, False),
    (0.01, 16, True),
    (0.8, 2, False),
    (0.1, 12, False),
    (0.002, 8, True),
    (0.95, 1, False),
]
SHARED = {
    "vocab_size": 257,
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 1024,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_experts_per_tok": 4,
    "max_position_embeddings": 2048,
    "initializer_range": 0.1,  # with the default logits are so flat that a rounding error decides
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


@dataclass
class Thread:
    """What one thread does, and how far it has come."""

    name: str
    model: Any
    answers: dict[int, Tensor] = field(default_factory=dict)
    compared: int = 0
    tokens: int = 0
    different: list[str] = field(default_factory=list)
    error: BaseException | None = None

    def ask(self, number: int) -> Tensor:
        share, new, sampled = REQUESTS[number]
        length = max(1, int(share * self.model.config.max_position_embeddings))
        ids = torch.randint(5, 200, (1, length), generator=torch.Generator().manual_seed(number))
        answer: Tensor = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new,
            min_new_tokens=new,
            do_sample=sampled,
            pad_token_id=0,
        )
        return answer

    def run(self, until: float) -> None:
        order = random.Random(self.name)
        try:
            while time.monotonic() < until or not self.compared:
                number = order.randrange(len(REQUESTS))
                answer = self.ask(number)
                # Threads draw from one generator, so of what is drawn only the prompt and the length are known.
                drawn = REQUESTS[number][2]
                same = (
                    answer.shape == self.answers[number].shape
                    if drawn
                    else answer.equal(self.answers[number])
                )
                if not same:
                    self.different.append(f"{self.name}: request {number}, after {self.compared} answers")
                self.compared += 1
                self.tokens += answer.shape[1]
        except BaseException as error:
            self.error = error


def make_models(folder: Path) -> list[Path]:
    qwen = Qwen3MoeConfig(**SHARED, num_key_value_heads=2, head_dim=64, num_experts=8, decoder_sparse_step=1)
    deepseek = DeepseekV3Config(
        **SHARED, num_key_value_heads=4, n_routed_experts=8, n_shared_experts=1, n_group=2, topk_group=1,
        first_k_dense_replace=1, q_lora_rank=64, kv_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=16,
        v_head_dim=32,
    )  # fmt: skip
    paths = [folder / "qwen3-moe", folder / "deepseek-v3"]
    for path, config, kind in zip(paths, [qwen, deepseek], [Qwen3MoeForCausalLM, DeepseekV3ForCausalLM]):
        torch.manual_seed(0)
        kind(config).eval().bfloat16().save_pretrained(path)
    return paths


def soak(seconds: float, paths: list[Path]) -> bool:
    """Whether all answers were those of the models alone."""
    threads = [Thread(path.name, ktinject.load(path, devices=["cpu"], progress=False)) for path in paths]
    for thread in threads:
        for _ in range(3):  # first steps are compared with transformers', and later ones are ours
            thread.answers = {number: thread.ask(number) for number in range(len(REQUESTS))}
    until = time.monotonic() + seconds
    running = [threading.Thread(target=thread.run, args=(until,), daemon=True) for thread in threads]
    for one in running:
        one.start()
    seen, moved = 0, time.monotonic()
    while any(one.is_alive() for one in running):
        time.sleep(0.05)
        now = sum(thread.compared for thread in threads)
        if now != seen:
            seen, moved = now, time.monotonic()
        if time.monotonic() - moved > HANGS_SECONDS:
            print(f"no answer for {HANGS_SECONDS} s", flush=True)
            faulthandler.dump_traceback(all_threads=True)
            os._exit(1)
    for thread in threads:
        print(
            f"{thread.name}: {thread.compared} answers of {thread.tokens} tokens, {len(thread.different)} different"
        )
        for line in thread.different[:20]:
            print(line)
        if thread.error is not None:
            print(f"{thread.name}: {type(thread.error).__name__}: {thread.error}")
    return all(thread.compared and not thread.different and thread.error is None for thread in threads)


if __name__ == "__main__":
    if len(sys.argv) not in (2, 4):
        sys.exit(__doc__)
    with tempfile.TemporaryDirectory() as folder:
        chosen = [Path(name) for name in sys.argv[2:]] or make_models(Path(folder))
        fine = soak(float(sys.argv[1]), chosen)
    sys.exit(0 if fine else 1)
