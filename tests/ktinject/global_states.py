"""What a swapped model answers while torch's global state is another one.

    python tests/ktinject/global_states.py STATE FAMILY…    JSON: family → answer

It is loaded, and asked for the first time, within that state, in a process that has tried out nothing before.
"""

from __future__ import annotations

import json
import runpy
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

import ktinject

NEW = 6
# All that a native step holds.
RULES = {
    "version": 1,
    "extends": "auto",
    "rules": [
        *(
            {
                "name": f"my {part}",
                "match": {"role": "linear", "inside": part, "path": r".*\.(?!kv_b_proj$)\w+"},
                "replace": {"operator": "cpu_linear", "weights": "bf16"},
                "optional": True,
            }
            for part in ("attention", "shared_experts", "dense_mlp")
        ),
        {
            "name": "my head",
            "match": {"role": "output_layer"},
            "replace": {"operator": "cpu_linear", "weights": "bf16"},
            "optional": True,
        },
    ],
}
# Layers that the row of a family in tests/models leaves out.
LAYERS: dict[str, dict[str, Any]] = {
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "kimi_linear": {"layer_types": ["linear_attention", "full_attention"]},
}


@contextmanager
def having(get: Callable[[], Any], put: Callable[[Any], Any], value: Any) -> Iterator[None]:
    before = get()
    put(value)
    try:
        yield
    finally:
        put(before)


@contextmanager
def device(name: str) -> Iterator[None]:
    torch.set_default_device(name)
    try:
        yield
    finally:
        torch.set_default_device(None)


def dtype(value: torch.dtype) -> Callable[[], AbstractContextManager[None]]:
    return lambda: having(torch.get_default_dtype, torch.set_default_dtype, value)


STATES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "quiet": nullcontext,
    "bfloat16": dtype(torch.bfloat16),
    "float16": dtype(torch.float16),
    "float64": dtype(torch.float64),
    "meta": lambda: device("meta"),
    "cuda": lambda: device("cuda"),
    "inference mode": torch.inference_mode,
    "no gradients": lambda: having(torch.is_grad_enabled, torch.set_grad_enabled, False),
    "deterministic": lambda: having(
        torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True
    ),
    "threads": lambda: having(torch.get_num_threads, torch.set_num_threads, 2),
    "denormals": lambda: having(lambda: False, torch.set_flush_denormal, True),
    "products": lambda: having(
        torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "medium"
    ),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}


def ask(model: Any) -> tuple[Tensor, Tensor]:
    """The tokens of a greedy text, and their logits."""
    ids = torch.randint(3, 60, (1, 20), generator=torch.Generator().manual_seed(3), device="cpu")
    found = model.generate(
        ids,
        max_new_tokens=NEW,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return found.sequences[0, 20:], torch.stack(found.logits, 1)[0].float()


def tried(work: Callable[[], Any]) -> Any:
    """What it gives, or how it fails."""
    try:
        return work()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def answer(family: str, state: str, models: Any) -> dict[str, Any]:
    plain = models.tiny(family, **LAYERS.get(family, {}))
    with torch.no_grad():
        for parameter in plain.parameters():
            if parameter.dim() > 1:  # so that packing rounds nothing
                parameter.copy_(parameter.bfloat16())
    folder = tempfile.mkdtemp()
    plain.save_pretrained(folder)

    def load() -> Any:
        with torch.device("meta"):
            config = AutoConfig.from_pretrained(folder)
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        return ktinject.optimize(model, RULES, checkpoint=folder, devices="cpu", progress=False)

    with STATES[state]():
        wanted = tried(lambda: ask(plain))
        model = tried(load)
        drawn = torch.get_rng_state()  # loading may draw, as transformers' own does
        found = model if isinstance(model, str) else tried(lambda: ask(model))
    if isinstance(found, str):
        return {"failed": found, "unswapped": wanted if isinstance(wanted, str) else ""}
    tokens, logits = found
    decoding: Any = model.ktinject_decoding
    apart = -1.0
    if not isinstance(wanted, str):
        alike = (tokens == wanted[0]).long().cumprod(0).sum()
        steps = min(NEW, int(alike) + 1)
        errors = (logits - wanted[1]).norm(dim=-1) / wanted[1].norm(dim=-1)
        apart = float(errors[:steps].median())
    return {
        "draws": not torch.equal(drawn, torch.get_rng_state()),
        "how": [decoding.last, decoding.reason],
        "bits": sha256(logits.numpy().tobytes()).hexdigest(),
        "apart": apart,
        "unswapped": wanted if isinstance(wanted, str) else "",
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    tests = Path(__file__).parents[1]
    rows = runpy.run_path(str(tests / "models" / "__init__.py"))
    tiny = type("models", (), {"tiny": staticmethod(rows["tiny"])})
    print(json.dumps({family: answer(family, sys.argv[1], tiny) for family in sys.argv[2:]}))
