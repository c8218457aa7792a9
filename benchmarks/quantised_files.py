"""A trained model with its experts stored in published formats: perplexity and KL beside transformers on their values.

    python benchmarks/quantised_files.py examples/models/tiny-qwen3-moe --tokens 4096
    python benchmarks/quantised_files.py examples/models/tiny-qwen3-moe --formats Q4_K_M Q3_K_M Q2_K

transformers gets the dequantised weights in fp32; ktinject loads the quantised file with the bundled rules, everything
but the experts in fp32. So what differs is what experts do with the codes, and with activations. The files are written
by plain rounding, as tests/ktinject/checkpoints/test_quantised_models.py writes them: what they cost against the
original model says nothing about the formats at their best.

K-quants are GGUF files with the types that llama.cpp's presets give experts. Their blocks are 256 inputs, and the tiny
models have 128 and 64. So each channel stands there twice and each inner value of an expert four times, with weights of
a half and a quarter, which are exact: the same function, in shapes that fit. (llama.cpp stores what does not fit in
types with blocks of 32: Q5_0 for Q4_K, Q8_0 for Q6_K.)
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
import gguf  # noqa: E402
import gguf_by_hand  # noqa: E402
import test_quantised_models as writers  # noqa: E402

SHOWN = ("nvfp4", "nvfp4 packed", "mxfp4", "fp8 channel", "int8", "packed zeros", "gptq", "awq")
PRESETS = ("Q6_K", "Q5_K", "Q4_K_M", "Q3_K_M", "Q2_K", "IQ4_XS")


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


def twice(key: str, t: Tensor, hidden: int, inner: int, tied: bool) -> Tensor:
    """A weight of a model whose channels stand there twice, and the inner values of experts four times."""
    name = key.removesuffix(".weight").rpartition(".")[2]
    if name in ("gate_proj", "up_proj") and len(t) == inner:
        t = t.repeat(4, 1)
    elif name == "down_proj" and t.shape[1] == inner:
        t = t.repeat(1, 4) / 4
    if name in ("o_proj", "down_proj"):
        return t.repeat(2, 1)
    if t.dim() == 1:
        # A tied head reads the table's columns twice.
        return t.repeat(2) / (2 if tied and key == "model.norm.weight" else 1) if len(t) == hidden else t
    if t.shape[1] != hidden or name == "kv_b_proj":
        return t
    return t.repeat(1, 2) / (1 if name == "embed_tokens" else 2)


def widen(plain: Path, folder: Path) -> None:
    """Write the same model with rows of 256 inputs for its experts."""
    config = json.loads((plain / "config.json").read_text())
    sizes = config["hidden_size"], config["moe_intermediate_size"], config["tie_word_embeddings"]
    weights = load_file(plain / "model.safetensors")
    save_file(
        {key: twice(key, t.float(), *sizes).contiguous() for key, t in weights.items()},
        folder / "model.safetensors",
    )
    config |= {"hidden_size": 2 * sizes[0], "moe_intermediate_size": 4 * sizes[1], "dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config))


def preset(name: str, layers: int) -> dict[str, str]:
    """Part of a tensor's name → its type. Source: llama.cpp's llama_tensor_get_type."""
    found = {}
    for layer in range(layers):
        more = layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2
        down = {"Q4_K_M": "Q6_K" if more else "Q4_K", "Q3_K_M": "Q4_K", "Q2_K": "Q3_K"}
        found[f"blk.{layer}.ffn_down_exps"] = down.get(name, name)
    return found | {"_exps": name.removesuffix("_M")}


def write_gguf(name: str, wide: Path, file: Path, decoded: Path) -> None:
    """Write `file` with experts in the types of a preset, and a folder with what the gguf package makes of them."""
    layers = json.loads((wide / "config.json").read_text())["num_hidden_layers"]
    gguf_by_hand.converted(wide, file, "F32", k_kinds=preset(name, layers))
    shutil.copy(wide / "config.json", file.parent)
    shutil.copy(wide / "config.json", decoded)
    tensors = load_file(wide / "model.safetensors")
    for tensor in gguf.GGUFReader(file).tensors:
        _, layer, part = (
            tensor.name.removesuffix(".weight").split(".") if "_exps" in tensor.name else ("",) * 3
        )
        if not part:
            continue
        values = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())
        projection = part.removeprefix("ffn_").removesuffix("_exps")
        for expert, weight in enumerate(values):
            key = f"model.layers.{layer}.mlp.experts.{expert}.{projection}_proj.weight"
            assert tensors[key].shape == weight.shape
            tensors[key] = weight.contiguous()
    save_file(tensors, decoded / "model.safetensors")


def measure(name: str, plain: Path, ids: Tensor, original: float) -> None:
    with tempfile.TemporaryDirectory() as where:
        wide, stored, decoded = Path(where, "wide"), Path(where, "stored"), Path(where, "decoded")
        for folder in (wide, stored, decoded):
            folder.mkdir()
        if name in PRESETS:
            widen(plain, wide)
            source = stored / "model.gguf"
            write_gguf(name, wide, source, decoded)
        else:
            source = stored
            save_file(write(name, plain, stored), decoded / "model.safetensors")
            shutil.copy(plain / "config.json", decoded)
        theirs = models.unswapped(decoded, dtype=torch.float32)
        ours = ktinject.load(source, devices="cpu", dtype="float32", progress=False)
        found = evaluate.divergence(theirs.eval(), ours, ids)
    runs = {
        (one.runs["weights"], one.runs["values"])
        for one in ours.ktinject.replacements
        if "values" in one.runs
    }
    weights, values = (" or ".join(sorted({one[side] for one in runs})) for side in (0, 1))
    print(
        f"| {name} | {weights} | {values} | {found.perplexity_a / original - 1:+.2%} | {found.perplexity_a:.4f} "
        f"| {found.perplexity_b:.4f} | {found.mean_nats:.1e} |",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--formats", nargs="+", default=(*SHOWN, *PRESETS))
    options = parser.parse_args()
    if unknown := {*options.formats} - {*writers.CASES, *PRESETS}:
        parser.error(f"no formats {sorted(unknown)}; there are {[*writers.CASES, *PRESETS]}")
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
