"""A trained model with its experts stored in published formats: perplexity and KL beside transformers on their values.

    python benchmarks/quantised_files.py examples/models/tiny-qwen3-moe --tokens 4096

transformers gets the dequantised weights in fp32; ktinject loads the quantised file with the bundled rules, everything
but the experts in fp32. So what differs is what experts do with the codes, and with activations. The files are written
by plain rounding, as tests/ktinject/checkpoints/test_quantised_models.py writes them: what they cost against the
original model says nothing about the formats at their best.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

import ktinject
from ktinject.checkpoints.checkpoint import Checkpoint
from ktinject.hf import models
from ktinject.tools import evaluate

TESTS = Path(__file__).parents[1] / "tests"
sys.path[:0] = [str(TESTS / "ktinject" / "checkpoints"), str(TESTS)]
import test_quantised_models as writers  # noqa: E402

SHOWN = ("nvfp4", "nvfp4 packed", "mxfp4", "fp8 channel", "int8", "packed zeros", "gptq", "awq")


def write(name: str, plain: Path, folder: Path) -> dict[str, Tensor]:
    """Write the model with quantised experts. Returns all its weights as they are decoded."""
    parts_of, _, config, *_ = writers.CASES[name]
    tensors: dict[str, Tensor] = {}
    for key, tensor in load_file(plain / "model.safetensors").items():
        if ".experts." not in key:
            tensors[key] = tensor
            continue
        tensors |= {
            key.removesuffix(".weight") + part: t.contiguous() for part, t in parts_of(tensor.float()).items()
        }
    save_file(tensors, folder / "model.safetensors")
    said = json.loads((plain / "config.json").read_text()) | {"quantization_config": config}
    (folder / "config.json").write_text(json.dumps(said))
    with Checkpoint.open(folder, config) as checkpoint:
        return {key: checkpoint.decode(key).float() for key in checkpoint.weights}


def measure(name: str, plain: Path, ids: Tensor, original: float) -> None:
    with tempfile.TemporaryDirectory() as where:
        stored, decoded = Path(where, "stored"), Path(where, "decoded")
        stored.mkdir()
        decoded.mkdir()
        save_file(write(name, plain, stored), decoded / "model.safetensors")
        shutil.copy(plain / "config.json", decoded)
        theirs = models.unswapped(decoded, dtype=torch.float32)
        ours = ktinject.load(stored, devices="cpu", dtype="float32", progress=False)
        found = evaluate.divergence(theirs.eval(), ours, ids)
    (runs,) = {
        (one.runs["weights"], one.runs["values"])
        for one in ours.ktinject.replacements
        if "values" in one.runs
    }
    print(
        f"| {name} | {runs[0]} | {runs[1]} | {found.perplexity_a / original - 1:+.2%} | {found.perplexity_a:.4f} "
        f"| {found.perplexity_b:.4f} | {found.mean_nats:.1e} |",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--formats", nargs="+", default=SHOWN, choices=writers.CASES)
    options = parser.parse_args()
    text = (options.model.parent / "heldout.txt").read_text()
    ids = torch.tensor(
        Tokenizer.from_file(str(options.model / "tokenizer.json")).encode(text).ids[: options.tokens]
    )
    original = evaluate.perplexity(models.unswapped(options.model, dtype=torch.float32).eval(), ids)
    print(
        f"{options.model.name}: {len(ids)} tokens, perplexity {original:.4f} before its experts are quantised"
    )
    print(
        "| file | runs as | values | file's cost | transformers | ktinject | mean KL |\n|---|---|---|---|---|---|---|"
    )
    for name in options.formats:
        measure(name, options.model, ids, original)


if __name__ == "__main__":
    main()
