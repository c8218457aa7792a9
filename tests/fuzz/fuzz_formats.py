"""Mutate the tensors of a quantised weight and what config.json says of them, and read the weight.

Only `CheckpointError` may come out, within 20 lines. What is accepted has the shape that it says, and no values that
are NaN. The files mutated are those of tests/ktinject/checkpoints/golden.

    python tests/fuzz/fuzz_formats.py --runs 1000000 --seed 1
    python tests/fuzz/fuzz_formats.py --seed 1 --first 4711 --runs 1      # one run again
"""

from __future__ import annotations

import copy
import json
import os
import random
import tempfile
from pathlib import Path
from typing import Any

import fuzzer

from ktinject.checkpoints.checkpoint import Checkpoint
from ktinject.checkpoints.safetensors import BITS
from ktinject.errors import CheckpointError

GOLDEN = Path(__file__).parents[1] / "ktinject" / "checkpoints" / "golden"
SUFFIXES = (
    ".weight", ".weight_scale", ".weight_scale_inv", ".weight_scale_2", ".weight_packed", ".weight_global_scale",
    ".weight_zero_point", ".weight_shape", ".weight_g_idx", ".qweight", ".qzeros", ".scales", ".g_idx", ".scale",
    ".bias", "_blocks", "_scales", ".weight.absmax", "",
)  # fmt: skip
EXTENTS = (0, 1, 2, 3, 4, 7, 8, 16, 31, 32, 33, 64, 128, 129)
VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, 2, 3, 4, 8, 16, 32, 64, 127, 128, -1, -8, 2**40, 0.5, 1e308, "", "int", "float", "a",
    "gptq", "awq", "auto-round", "auto_round:auto_awq", "modelopt", "compressed-tensors", "fp8", "mxfp4", "gptq_v2",
    "Linear", "re:.*", "re:(a+)+$", "re:(", [], [1], [16, 64], [128, 128], [1, 32], [0, -1], ["Linear"], {}, {"a": 1},
)  # fmt: skip


def originals() -> list[tuple[dict[str, Any], bytes, dict[str, Any]]]:
    """Entries of the header, data and config of each golden file, without the values."""
    found = []
    for path in sorted(GOLDEN.glob("*.safetensors")):
        raw = path.read_bytes()
        size = int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8 : 8 + size])
        config = json.loads(header.pop("__metadata__")["quantization_config"])
        del header["values"]
        found.append((header, raw[8 + size :], config))
    return found


def mutate_config(rng: random.Random, value: Any) -> Any:
    """The value with one item of it, at any depth, exchanged or gone."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        key = rng.choice(list(value))
        if rng.random() < 0.15:
            return {name: inner for name, inner in value.items() if name != key}
        return value | {key: mutate_config(rng, value[key])}
    if isinstance(value, list) and value and rng.random() < 0.5:
        at = rng.randrange(len(value))
        return [mutate_config(rng, inner) if i == at else inner for i, inner in enumerate(value)]
    return copy.deepcopy(rng.choice(VALUES))


def mutated(rng: random.Random, original: tuple[dict[str, Any], bytes, dict[str, Any]]) -> bytes:
    header, data, config = original
    tensors = {
        name: (e["dtype"], list(e["shape"]), data[slice(*e["data_offsets"])]) for name, e in header.items()
    }
    for _ in range(rng.choice((0, 1, 1, 2, 3))):
        name = rng.choice(list(tensors))
        dtype, shape, content = tensors.pop(name)
        action = rng.randrange(6)
        if action == 0 and tensors:
            continue
        if action == 1:
            name = "x" + rng.choice(SUFFIXES)
        elif action == 2 and shape:
            shape[rng.randrange(len(shape))] = rng.choice(EXTENTS)
        elif action == 3:
            shape.insert(rng.randrange(len(shape) + 1), rng.choice((1, 1, 2, 3)))
        elif action == 4 and shape:
            del shape[rng.randrange(len(shape))]
        else:
            dtype = rng.choice([name for name, bits in BITS.items() if bits >= 8])
        tensors[name] = dtype, shape, content
    for _ in range(rng.choice((0, 0, 1, 1, 2))):
        config = mutate_config(rng, config)
    entries, parts, end = {}, [], 0
    for name, (dtype, shape, content) in tensors.items():
        size = BITS[dtype] // 8
        for extent in shape:
            size *= extent
        size = min(size, 1 << 20)
        part = bytearray((content * (size // max(1, len(content)) + 1))[:size] if content else bytes(size))
        for _ in range(rng.choice((0, 0, 1, 4)) if part else 0):
            part[rng.randrange(len(part))] = rng.choice((0, 1, 127, 128, 255, rng.randrange(256)))
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        parts.append(bytes(part))
        end += size
    raw = json.dumps(entries).encode()
    return json.dumps(config).encode() + b"\n" + len(raw).to_bytes(8, "little") + raw + b"".join(parts)


def attempt(content: bytes, folder: Path) -> str:
    config, _, file = content.partition(b"\n")
    said = json.loads(config)
    (folder / "model.safetensors").write_bytes(file)
    outcome = "accepted"
    try:
        with Checkpoint.open(folder, said if isinstance(said, dict) else {}) as checkpoint:
            for key in sorted(checkpoint.weights):
                form, shape = checkpoint.format_of(key), checkpoint.shape(key)
                values = checkpoint.decode(key)
                assert values.shape == shape, f"{key}: {form}: {shape}, decoded to {list(values.shape)}"
                if not form.is_plain:
                    outcome = f"accepted as {form.name}"
                    # A code of FP8 may be NaN, which is looked for on request only, as in weights of floats.
                    assert "fp8" in form.name or bool((values == values).all()), f"{key}: {form}: NaN"
                if form.encoding in ("int4", "int8", "fp8", "fp8_channel", "mxfp8", "nvfp4", "nvfp4_across"):
                    checkpoint.stored(key)
    except CheckpointError as error:
        assert str(folder) in str(error) and str(error).count("\n") < 20 and len(str(error)) < 5000, error
        return "refused"
    return outcome


def fuzz(runs: int, seed: int, first: int = 0) -> fuzzer.Outcomes:
    """Count the outcomes of `runs` runs from `first` on. Raises AssertionError, or whatever else came out."""
    files = originals()
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
        return fuzzer.count(
            range(first, first + runs),
            seed,
            lambda run, rng: mutated(rng, rng.choice(files)),
            lambda run, content: attempt(content, Path(folder)),
        )


if __name__ == "__main__":
    fuzzer.main(__doc__, fuzz)
