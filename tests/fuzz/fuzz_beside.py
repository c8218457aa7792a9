"""Mutate files beside the weights, configs and profiles, in structure and in bytes, and look at them.

Only `CheckpointError` may come out for a config and `OperatorError` for a profile. A config that passes has no count
that is out of proportion, wherever it stands; a profile that passes is lists of counts.

    python tests/fuzz/fuzz_beside.py --runs 1000000 --seed 1
    python tests/fuzz/fuzz_beside.py --seed 1 --first 4711 --runs 1      # one run again
"""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import fuzzer
from fuzz_safetensors import Object, Raw, mutated

from ktinject.checkpoints import beside
from ktinject.errors import CheckpointError, OperatorError
from ktinject.operators.offload.gpu_experts import read_profile

KEYS = (
    "num_hidden_layers",
    "n_layer",
    "depth",
    "num_experts",
    "heads",
    "num_labels",
    "vocab_size",
    "layer_types",
    "a",
)
NUMBERS = (
    0,
    1,
    8,
    999,
    1000,
    1001,
    4096,
    4097,
    2**31,
    2**63,
    -1,
    0.5,
    1e9,
    True,
    None,
    "2000000",
    Raw("Infinity"),
)
PROFILE_EVERY = 4


def config(rng: random.Random, depth: int = 0) -> Object:
    pairs: list[tuple[str, Any]] = [("model_type", "qwen3_moe")]
    for _ in range(rng.randrange(6)):
        value: Any = rng.choice(NUMBERS) if rng.random() < 0.3 else rng.choice((2, 4, 8))
        if rng.random() < 0.2:
            value = [value, rng.choice(NUMBERS)]
        pairs.append((rng.choice(KEYS), value))
    if depth < 3 and rng.random() < 0.4:
        pairs.append(("text_config", config(rng, depth + 1)))
    rng.shuffle(pairs)
    return Object(pairs)


def profile(rng: random.Random) -> Object:
    layers = [(f"model.layers.{n}.mlp.experts", [rng.randrange(9) for _ in range(4)]) for n in range(3)]
    return Object([("tokens", 7), ("experts", Object(layers))])


def counts(value: Any, name: str = "") -> list[tuple[str, float]]:
    if isinstance(value, dict):
        return [found for key, item in value.items() for found in counts(item, key)]
    if isinstance(value, list):
        return [found for item in value for found in counts(item, name)]
    return [(name, value)] if isinstance(value, int | float) else []


def try_config(path: Path) -> str:
    try:
        beside.check_config(path)
    except CheckpointError as error:
        assert str(path) in str(error) and len(str(error)) < 25_000, error
        return "config refused"
    try:
        values = json.loads(path.read_bytes())
    except ValueError:
        return "not JSON"
    for name, number in counts(values):
        assert not name.endswith(("layers", "n_layer", "depth")) or number <= 1000, (name, number)
        assert not name.endswith(("experts", "heads", "labels")) or number <= 4096, (name, number)
    return "config accepted"


def try_profile(path: Path) -> str:
    try:
        found = read_profile(str(path))
    except OperatorError as error:
        assert str(path) in str(error) and len(str(error)) < 2000, error
        return "profile refused"
    assert all(type(count) is int and count >= 0 for layer in found.values() for count in layer)
    return "profile accepted"


def fuzz(runs: int, seed: int, first: int = 0) -> fuzzer.Outcomes:
    """Count the outcomes of `runs` runs from `first` on. Raises AssertionError, or whatever else came out."""
    fd = os.memfd_create("fuzz")
    path = Path(f"/proc/self/fd/{fd}")

    def make(run: int, rng: random.Random) -> bytes:
        return mutated(rng, config(rng) if run % PROFILE_EVERY else profile(rng))

    def attempt(run: int, content: bytes) -> str:
        os.ftruncate(fd, 0)
        os.pwrite(fd, content, 0)
        return try_config(path) if run % PROFILE_EVERY else try_profile(path)

    try:
        return fuzzer.count(range(first, first + runs), seed, make, attempt)
    finally:
        os.close(fd)


if __name__ == "__main__":
    fuzzer.main(__doc__, fuzz)
