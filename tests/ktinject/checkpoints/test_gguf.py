"""GGUF files as the gguf package writes them: names, values, configs, and whole models."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_by_hand import ARRAY, BOOL, F32, STRING, U16, U32, array, converted, entry, image, tensor
from safetensors.torch import load_file, save_file
from transformers.integrations.gguf import dequant

import ktinject
from ktinject import machine, rules
from ktinject.checkpoints.checkpoint import Checkpoint
from ktinject.checkpoints.formats import gguf_blocks
from ktinject.checkpoints.gguf import TYPES
from ktinject.checkpoints.gguf_architectures import ARCHITECTURES
from ktinject.checkpoints.gguf_configs import CONFIGS
from ktinject.errors import CheckpointError
from ktinject.hf import models
from ktinject.machine import Gpu
from ktinject.operators.linears import int4_layout
from ktinject.planning.planner import make

torch.set_num_threads(1)
gguf = pytest.importorskip("gguf")
ARCHITECTURE = entry("general.architecture", STRING, "qwen3moe")


# Upper bytes of the fp16 numbers of a block, of which some would be infinite; of IQ1_M in four parts; in MXFP4 e8m0.
_EXPONENTS = {
    "Q4_1": (1, 3), "Q5_1": (1, 3), "Q4_K": (1, 3), "Q5_K": (1, 3), "Q2_K": (81, 83), "Q3_K": (109,), "Q6_K": (209,),
    "IQ1_M": (55,), "MXFP4": (), "TQ2_0": (65,), "TQ1_0": (53,),
}  # fmt: skip
_NOT_IN_TRANSFORMERS = ("Q5_0", "Q5_1", "MXFP4", "TQ2_0", "TQ1_0")


@pytest.mark.parametrize("kind", gguf_blocks.TYPES)
def test_blocks_of_any_bits_are_what_two_others_make_of_them(kind: str) -> None:
    """The gguf package, and transformers' own dequantisers, which have 17 of the types."""
    generator = torch.Generator().manual_seed(0)
    wanted = gguf.GGMLQuantizationType[kind]
    inputs, size = gguf.GGML_QUANT_SIZES[wanted]
    rows = torch.randint(0, 256, (40, 30 * size), dtype=torch.uint8, generator=generator)
    for place in _EXPONENTS.get(kind, (1,)):
        rows[:, place::size] &= 0xBF
    if kind == "MXFP4":
        rows[:, ::size] = torch.arange(40 * 30, dtype=torch.int32).remainder(253).view(40, 30)
    found = gguf_blocks.values(kind, rows)
    want = torch.from_numpy(gguf.quants.dequantize(rows.numpy(), wanted))
    assert found.shape == (40, 30 * inputs) and found.equal(want) and found.abs().max() > 0
    assert (wanted in dequant.GGML_BLOCK) == (kind not in _NOT_IN_TRANSFORMERS)
    if kind not in _NOT_IN_TRANSFORMERS:
        assert found.flatten().equal(dequant.dequantize(rows.flatten(), wanted))
    assert gguf_blocks.values(kind, rows[0, :size].clone()).equal(want[0, :inputs]), "a block alone"


def quantised(folder: Path, into: Path, kind: str) -> Path:
    """The model's folder with values that `kind` holds without rounding, in fp32."""
    shutil.copytree(folder, into)
    wanted = gguf.GGMLQuantizationType[kind]
    found = {}
    for key, value in load_file(folder / "model.safetensors").items():
        plain = value.dim() == 1 or key.endswith("mlp.gate.weight") or value.shape[-1] % 32
        if not plain:
            blocks = gguf.quants.quantize(value.float().numpy(), wanted)
            value = torch.from_numpy(gguf.quants.dequantize(blocks, wanted))
        found[key] = value
    save_file(found, into / "model.safetensors")
    return into


def beside(folder: Path, into: Path) -> Path:
    """The config of a folder in another."""
    into.mkdir(exist_ok=True)
    shutil.copy(folder / "config.json", into)
    return into


KINDS = ["F32", "BF16", "F16", "Q8_0", "Q5_1", "Q4_0"]


@pytest.mark.parametrize("kind", KINDS)
def test_every_tensor_has_its_name_shape_and_values(kind: str, tiny_qwen3_moe: Path, tmp_path: Path) -> None:
    folder = quantised(tiny_qwen3_moe, tmp_path / "a", kind)
    file = converted(tiny_qwen3_moe, tmp_path / "a.gguf", kind)
    with Checkpoint.open(file) as checkpoint:
        want = load_file(folder / "model.safetensors")
        assert {name: info.shape for name, info in checkpoint.tensors.items()} == {
            name: tuple(value.shape) for name, value in want.items()
        }
        expected = {"F32": "fp32", "F16": "fp16"}.get(kind, kind.lower())
        assert checkpoint.format_of("model.layers.1.mlp.experts.3.up_proj.weight").name == expected
        for name, value in want.items():
            found = checkpoint.decode(name)
            assert found.shape == value.shape and torch.equal(found.float(), value.float()), name
        config = checkpoint.config_values()
        assert config is not None and config["num_hidden_layers"] == 3


@pytest.mark.parametrize("split_kv_b", [True, False])
def test_deepseek_is_the_model_it_was(split_kv_b: bool, tiny_deepseek_v3: Path, tmp_path: Path) -> None:
    """Latent attention's kv_b_proj in one tensor, or in two as llama.cpp has it today."""
    folder = beside(tiny_deepseek_v3, tmp_path / "a")
    file = converted(tiny_deepseek_v3, folder / "a.gguf", "F32", split_kv_b=split_kv_b)
    assert logits(file).equal(logits(tiny_deepseek_v3))
    assert logits(folder).equal(logits(tiny_deepseek_v3)), "the folder stands for its only file"


def logits(path: Path, operator: str = "cpu_experts", **arguments: Any) -> torch.Tensor:
    rule = {"name": "a", "match": {"path": r".*\.experts"}, "replace": {"operator": operator, **arguments}}
    model = ktinject.load(path, [rule], devices="cpu", dtype=torch.float32, progress=False)
    with torch.no_grad():
        return model(torch.arange(12)[None]).logits


@pytest.mark.parametrize("kind", ["BF16", "Q8_0", "Q4_0", "MXFP4"])
def test_a_model_is_the_model_of_its_values(kind: str, tiny_qwen3_moe: Path, tmp_path: Path) -> None:
    """Without config.json: the metadata says it all."""
    file = converted(tiny_qwen3_moe, tmp_path / "a.gguf", kind)
    plain = quantised(tiny_qwen3_moe, tmp_path / "a", kind)
    assert logits(file).equal(logits(plain))


def test_the_config_of_a_file_is_the_models_own(tiny_qwen3_moe: Path, tmp_path: Path) -> None:
    file = converted(tiny_qwen3_moe, tmp_path / "a.gguf", "Q8_0")
    with Checkpoint.open(file) as checkpoint:
        found = models.read_config(file, checkpoint)
    want = models.read_config(tiny_qwen3_moe)
    same = [
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "vocab_size",
    ]
    same += [
        "intermediate_size",
        "moe_intermediate_size",
        "num_experts",
        "num_experts_per_tok",
        "norm_topk_prob",
    ]
    same += [
        "max_position_embeddings",
        "tie_word_embeddings",
        "eos_token_id",
        "rope_parameters",
        "model_type",
    ]
    assert {name: getattr(found, name) for name in same} == {name: getattr(want, name) for name in same}
    assert found.rms_norm_eps == pytest.approx(want.rms_norm_eps, rel=1e-7)
    assert found.name_or_path == str(file)


def test_another_quantisation_in_the_config_is_not_the_files(tiny_qwen3_moe: Path, tmp_path: Path) -> None:
    file = converted(tiny_qwen3_moe, beside(tiny_qwen3_moe, tmp_path / "a") / "a.gguf", "Q8_0")
    config = json.loads((file.parent / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (file.parent / "config.json").write_text(json.dumps(config))
    rule = {"name": "a", "match": {"path": r".*\.experts"}, "replace": {"operator": "cpu_experts"}}
    model = ktinject.load(file, [rule], devices="cpu", progress=False)
    assert any("GGUF with Q8_0" in note for note in model.ktinject.notes)
    assert models.quantization(model.config) is None


@pytest.mark.parametrize(
    "operator", [{"operator": "int4_linear"}, {"operator": "dense_linear", "weights": "int4"}]
)
def test_q4_0_is_kept_value_for_value_by_int4_linear(
    operator: dict[str, Any], tiny_qwen3_moe: Path, tmp_path: Path
) -> None:
    file = converted(tiny_qwen3_moe, tmp_path / "a.gguf", "Q4_0")
    box = dataclasses.replace(
        machine.detect(), gpus=(Gpu(0, "a GPU", 1 << 34, 1 << 34, (9, 0)),), cuda_built=True
    )
    rule = {"name": "a", "match": {"path": r".*\.[qo]_proj"}, "replace": operator}
    with Checkpoint.open(file) as checkpoint:
        model = models.meta_model(models.read_config(file, checkpoint), "auto", checkpoint)
        decided = make(model, rules.read([rule]), checkpoint, box)
        (runs,) = {replacement.runs["weights"] for replacement in decided.replacements}
        assert runs == "int4 group 32, as stored (q4_0)" and len(decided.replacements) == 6
        assert decided.notes[-1].startswith(
            "the checkpoint is GGUF with Q4_0; weights that do not run as stored"
        )
        key = "model.layers.0.self_attn.q_proj.weight"
        codes = checkpoint.stored(key)
        values = checkpoint.decode(key)
    dtype = int4_layout.scale_dtype(codes.scales)
    assert dtype == torch.float16
    n, k = codes.codes.shape
    scales, _ = int4_layout.unpack_scales(
        int4_layout.pack_scales(codes.scales, None, dtype), n, k // 32, dtype
    )
    packed = int4_layout.unpack_codes(int4_layout.pack_codes(codes.codes), n, k)
    assert torch.equal(dataclasses.replace(codes, codes=packed, scales=scales).values(), values)


def test_q4_0_loses_its_scales_last_bits_in_cpu_experts(tiny_qwen3_moe: Path, tmp_path: Path) -> None:
    """Quantised again in the same groups, every code is found again; scales are bf16 there and fp16 in the file."""
    file = converted(tiny_qwen3_moe, tmp_path / "a.gguf", "Q4_0")
    replace = {"operator": "cpu_experts", "weights": "int4", "group_size": 32}
    rule = {"name": "a", "match": {"path": r".*\.experts"}, "replace": replace}
    model = ktinject.load(file, [rule], devices="cpu", progress=False)
    found = model.get_submodule("model.layers.1.mlp.experts").unpack("down_proj")
    with Checkpoint.open(file) as checkpoint:
        names = [f"model.layers.1.mlp.experts.{e}.down_proj.weight" for e in range(8)]
        want = torch.stack([checkpoint.decode(name) for name in names])
    assert ((found - want).abs() <= want.abs() * 2**-8).all() and not found.equal(want)


def test_parts_are_one_model(tiny_qwen3_moe: Path, tmp_path: Path) -> None:
    """As gguf-split cuts it: all metadata in the first, tensors anywhere."""
    whole = converted(tiny_qwen3_moe, tmp_path / "whole.gguf", "Q8_0")
    folder = tmp_path / "parts"
    folder.mkdir()
    files = split(whole, folder)
    for path in (folder, *files):
        assert logits(path).equal(logits(whole))
    files[1].unlink()
    with pytest.raises(
        CheckpointError, match=r"one of 3 files, of which are not there: m-00002-of-00003\.gguf\."
    ):
        Checkpoint.open(files[0])
    nobody = files[0].rename(folder / "m-00000-of-00000.gguf")
    with pytest.raises(CheckpointError, match=r"the name says part 0 of 0; they are counted from 1"):
        Checkpoint.open(nobody)


def split(whole: Path, folder: Path) -> list[Path]:
    reader = gguf.GGUFReader(whole)
    tensors = list(reader.tensors)
    files = []
    for number in range(3):
        path = folder / f"m-{number + 1:05}-of-00003.gguf"
        # Only the first part knows the architecture.
        writer = gguf.GGUFWriter(path, "qwen3moe")
        if number == 0:
            for name, found in reader.fields.items():
                if name.startswith("qwen3moe."):
                    kind = found.types[0]
                    writer.add_key_value(name, found.parts[-1][0].item(), kind)
        else:
            del writer.kv_data[0]["general.architecture"]
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", 3)
        for found in tensors[number::3]:
            writer.add_tensor(found.name, found.data, raw_dtype=found.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        files.append(path)
    return files


# Refusals


def refusal(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(path)
    return str(caught.value)


def write(path: Path, *entries: bytes, tensors: tuple[bytes, ...] = (), data: bytes = b"") -> Path:
    path.write_bytes(image(entries, tensors, data))
    return path


@pytest.mark.parametrize("name", ["gpt2", "gemma3", ""])
def test_other_architectures(name: str, tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf", *([entry("general.architecture", STRING, name)] if name else []))
    message = refusal(path)
    assert (
        f"general.architecture is {name or None!r}" in message and "qwen2moe, qwen3moe, qwen3vlmoe" in message
    )


def test_experts_must_be_stacked(tmp_path: Path) -> None:
    one = tensor("blk.0.ffn_up_exps.weight", (4,))
    message = refusal(write(tmp_path / "a.gguf", ARCHITECTURE, tensors=(one,), data=bytes(16)))
    assert "blk.0.ffn_up_exps.weight" in message and "[experts, outputs, inputs] is needed" in message


def test_two_tensors_for_one_name(tmp_path: Path) -> None:
    both = tensor("output.weight", (4,)), tensor("lm_head.weight", (4,), offset=32)
    message = refusal(write(tmp_path / "a.gguf", ARCHITECTURE, tensors=both, data=bytes(48)))
    assert "two tensors stand for 'lm_head.weight'" in message


def test_parts_that_do_not_belong_together(tmp_path: Path) -> None:
    names = [tmp_path / f"m-0000{number}-of-00002.gguf" for number in (1, 2)]
    for number, path in enumerate(names):
        write(path, ARCHITECTURE, entry("split.no", U16, number), entry("split.count", U16, 3))
    assert "part 1 of 2 says it is number 0 (from 0) of 3" in refusal(names[0])
    write(names[0], ARCHITECTURE, entry("split.no", U16, 0), entry("split.count", U16, 2))
    write(names[1], entry("split.no", U16, 0), entry("split.count", U16, 2))
    assert "part 2 of 2 says it is number 0 (from 0) of 2" in refusal(names[0])
    same = tensor("output.weight", (4,))
    for number, path in enumerate(names):
        counts = entry("split.no", U16, number), entry("split.count", U16, 2)
        write(path, ARCHITECTURE, *counts, tensors=(same,), data=bytes(16))
    assert "two tensors stand for 'lm_head.weight', in m-00001-of-00002.gguf and in m-00002" in refusal(
        names[1]
    )


def test_several_models_in_a_folder(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write(tmp_path / f"{name}.gguf", ARCHITECTURE)
    message = refusal(tmp_path)
    assert "2 GGUF files that are not one model" in message and "Give the path of one" in message


def test_a_link_out_of_the_folder(tmp_path: Path) -> None:
    write(tmp_path / "a.gguf", ARCHITECTURE)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "a.gguf").symlink_to(tmp_path / "a.gguf")
    assert "outside the model's folder" in refusal(tmp_path / "model")


def test_another_part_that_is_a_link_out_of_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    inside, outside = folder / "m-00001-of-00002.gguf", tmp_path / "elsewhere.gguf"
    write(inside)
    write(outside)
    (folder / "m-00002-of-00002.gguf").symlink_to(outside)
    for path in (folder, inside):
        assert "m-00002-of-00002.gguf: a link to" in refusal(path)
    # What the user names is followed: here it refuses for what the first part says.
    assert "says it is number 0" in refusal(folder / "m-00002-of-00002.gguf")


def test_types_that_are_not_read_are_named(tmp_path: Path) -> None:
    both = tensor("token_embd.weight", (4,)), tensor("output.weight", (64,), 40, offset=32)
    message = refusal(write(tmp_path / "a.gguf", ARCHITECTURE, tensors=both, data=bytes(68)))
    assert (
        "1 of 2 tensors are NVFP4, such as 'output.weight'; of GGUF, F32, F16, BF16, Q4_0, Q4_1, " in message
    )


def test_scales_must_be_finite(tmp_path: Path) -> None:
    for kind, size, name in ((2, 18, "q4_0"), (8, 34, "q8_0")):
        data = b"\x00\x7c" + bytes(size - 2)  # infinity
        path = write(
            tmp_path / "a.gguf", ARCHITECTURE, tensors=(tensor("output.weight", (32,), kind),), data=data
        )
        with (
            Checkpoint.open(path) as checkpoint,
            pytest.raises(CheckpointError, match=r"inf at .* must be finite"),
        ):
            assert checkpoint.format_of("lm_head.weight").name == name
            checkpoint.decode("lm_head.weight")


LAYER, KV_B = "blk.0.", "model.layers.0.self_attn.kv_b_proj.weight"


def halves(path: Path, keys: tuple[int, ...], values: tuple[int, ...]) -> Path:
    """A file with the two halves of kv_b_proj; shapes with the innermost first."""
    size = -(-math.prod(keys) * 4 // 32) * 32
    both = tensor(f"{LAYER}attn_k_b.weight", keys), tensor(f"{LAYER}attn_v_b.weight", values, offset=size)
    data = torch.arange(size // 4 + math.prod(values), dtype=torch.float32)
    return write(
        path,
        entry("general.architecture", STRING, "deepseek2"),
        tensors=both,
        data=data.numpy().tobytes(),
    )


@pytest.mark.parametrize("extents", [((8, 4, 2), (4, 8, 3)), ((8, 4, 2), (5, 8, 2)), ((8, 4), (4, 8, 2))])
def test_halves_of_kv_b_that_do_not_fit(extents: tuple[Any, Any], tmp_path: Path) -> None:
    message = refusal(halves(tmp_path / "a.gguf", *extents))
    assert "tensor 'blk.0.attn_k_b.weight' has shapes" in message and "v, latent] is needed" in message


def test_halves_of_kv_b_are_put_together_and_checked(tmp_path: Path) -> None:
    path = halves(tmp_path / "a.gguf", (8, 4, 2), (4, 8, 2))
    with Checkpoint.open(path) as checkpoint:
        assert checkpoint.weights == {KV_B} and checkpoint.shape(KV_B) == (32, 4)
        assert checkpoint.bytes_of(KV_B) == 512
        parts = checkpoint.decode(KV_B).view(2, 16, 4)
        assert parts[:, :8].equal(checkpoint.read(f"{LAYER}attn_k_b.weight").mT)
        assert parts[:, 8:].equal(checkpoint.read(f"{LAYER}attn_v_b.weight"))
        assert checkpoint.decode(KV_B, 17).equal(checkpoint.decode(KV_B)[17])


@pytest.mark.parametrize(
    "entries, words",
    [
        ((), r"qwen3moe\.embedding_length is None"),
        ((entry("qwen3moe.block_count", STRING, "2"),), r"qwen3moe\.block_count is '2'"),
        ((entry("qwen3moe.expert_count", U32, 0),), r"qwen3moe\.expert_count is 0"),
        ((), r"there is no token_embd\.weight"),
        ((entry("qwen3moe.rope.scaling.type", STRING, "su"),), r"qwen3moe\.rope\.scaling\.type is 'su'"),
        ((entry("qwen3moe.rope.scaling.type", STRING, "yarn"),), r"qwen3moe\.rope\.scaling\.factor is None"),
    ],
)
def test_metadata_that_makes_no_config(entries: tuple[bytes, ...], words: str, tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf", ARCHITECTURE, *entries)
    with pytest.raises(CheckpointError, match=words) as caught:
        ktinject.load(path, progress=False)
    assert str(caught.value).endswith("\nPut the config.json of the original model beside the file.")
    assert len(str(caught.value).splitlines()) <= 22


def broken(architecture: str, *tensors: tuple[Any, ...], **said: Any) -> bytes:
    """A file of an architecture: tensors (name, extents, type, data) in their order, metadata behind its name."""
    entries = [entry("general.architecture", STRING, architecture)]
    for key, value in said.items():
        name = f"{architecture}.{key.replace('__', '.')}"
        kind = {str: STRING, bool: BOOL, float: F32, bytes: ARRAY}.get(type(value), U32)
        entries.append(entry(name, kind, value))
    found, data = [], b""
    for name, extents, *more in tensors:
        kind = more[0] if more else 0
        _, values, size = TYPES[kind]
        found.append(tensor(name, extents, kind, len(data)))
        raw = more[1] if len(more) > 1 else bytes(math.prod(extents) // values * size)
        data += raw + bytes(-len(raw) % 32)
    return image(entries, found, data)


B0, M2, LINEAR = (
    "blk.0.",
    "minimax-m2",
    {"ssm__group_count": 2, "ssm__time_step_rank": 4, "ssm__inner_size": 16},
)
NAN = b"\x00\x7e"
# id: a file, and what its refusal says: when it is opened, or when a weight is decoded or a config is made.
BROKEN: dict[str, tuple[bytes, str]] = {
    "llama's q of odd heads": (
        broken("llama", (B0 + "attn_q.weight", (8, 6)), attention__head_count=4), "rows of 4 heads of even width"),
    "llama's k without a number of heads": (
        broken("llama", (B0 + "attn_k.weight", (8, 8))), "needs a number as llama.attention.head_count_kv"),
    "llama's heads as text": (
        broken("llama", (B0 + "attn_q.weight", (8, 8)), attention__head_count="4"), "which is '4'"),
    "no heads": (broken("llama", (B0 + "attn_q.weight", (8, 8)), attention__head_count=0), "which is 0"),
    "experts one by one": (broken("llama", (B0 + "ffn_up.0.weight", (8, 8))), "experts one by one"),
    "gate and up in odd rows": (
        broken("qwen3moe", (B0 + "ffn_gate_up_exps.weight", (8, 3, 2))), "[experts, outputs, inputs] is needed"),
    "gate and up twice": (
        broken(M2, (B0 + "ffn_gate_up_exps.weight", (8, 4, 2)), (B0 + "ffn_up_exps.weight", (8, 2, 2))),
        "two tensors stand for"),
    "gate without up": (broken("gpt-oss", (B0 + "ffn_gate_exps.weight", (8, 4, 2))), "which belongs to it, is not"),
    "gate and up of two shapes": (
        broken("gpt-oss", (B0 + "ffn_gate_exps.weight", (8, 4, 2)), (B0 + "ffn_up_exps.weight", (8, 6, 2))),
        "twice [experts, outputs, inputs]"),
    "biases of two shapes": (
        broken("gpt-oss", (B0 + "ffn_gate_exps.bias", (4, 2)), (B0 + "ffn_up_exps.bias", (8,))),
        "twice [experts, outputs]"),
    "down of one expert": (broken("gpt-oss", (B0 + "ffn_down_exps.weight", (8, 4))), "inputs] is needed"),
    "shared gate and up": (
        broken("granitemoe", (B0 + "ffn_gate_shexp.weight", (8,)), (B0 + "ffn_up_shexp.weight", (8,))),
        "twice [outputs, inputs]"),
    "k_b alone": (broken("deepseek2", (B0 + "attn_k_b.weight", (8, 4, 2))), "attn_v_b.weight', which belongs"),
    "a weight and its parts": (
        broken("deepseek2", (B0 + "attn_k_b.weight", (8, 4, 2)), (B0 + "attn_v_b.weight", (4, 8, 2)),
               (B0 + "attn_kv_b.weight", (4, 32))),
        "is there, and its parts are, too"),
    "heads that do not divide": (
        broken("qwen35moe", (B0 + "ssm_a", (4,)), ssm__group_count=3, ssm__time_step_rank=4, ssm__inner_size=16),
        "which do not divide"),
    "too few heads": (
        broken("qwen35moe", (B0 + "ssm_a", (3,)), **LINEAR, ssm__state_size=8), "4 rows is needed"),
    "q, k and v of another width": (
        broken("qwen35moe", (B0 + "attn_qkv.weight", (8, 40)), **LINEAR, ssm__state_size=8), "48 rows is needed"),
    "values of another width": (
        broken("qwen35moe", (B0 + "ssm_out.weight", (8, 8)), **LINEAR, ssm__state_size=8), "16 columns is needed"),
    "z of another width": (
        broken("qwen3next", (B0 + "attn_qkv.weight", (8, 48)), (B0 + "attn_gate.weight", (8, 8)), **LINEAR,
               ssm__state_size=8),
        "[48, 8] and [16, 8] is needed"),
    "a kernel of one dimension": (broken("qwen3next", (B0 + "ssm_conv1d.weight", (8,))), "[channels, kernel]"),
    "A that is positive": (
        broken("qwen3next", (B0 + "ssm_a", (2,), 0, struct.pack("<2f", -1, 1))), "a value that is not negative"),
    "fused rows of another number": (
        broken("qwen3moe", (B0 + "attn_qkv.weight", (8, 10)), attention__head_count=2, attention__head_count_kv=1,
               attention__key_length=4, attention__value_length=4),
        "16 rows are needed"),
    "fused rows of unknown heads": (broken("qwen3moe", (B0 + "attn_qkv.weight", (8, 10))), "needs a number as"),
    "MXFP4 with NaN": (
        broken("gpt-oss", ("output.weight", (32,), 39, b"\xff" + bytes(16))), "scale 255 at [0]; at most 252"),
    "Q2_K with NaN": (broken(M2, ("output.weight", (256,), 10, bytes(80) + NAN + bytes(2))), "nan at [0, 0]"),
    "Q3_K with NaN": (broken(M2, ("output.weight", (256,), 11, bytes(108) + NAN)), "nan at [0, 0]"),
    "IQ4_XS with NaN": (broken(M2, ("output.weight", (256,), 23, NAN + bytes(134))), "nan at [0, 0]"),
    "IQ1_M with infinity": (
        broken(M2, ("output.weight", (256,), 29, bytes(53) + b"\xc0\x00\x70" )), "must be finite"),
    "TQ1_0 with NaN": (broken(M2, ("output.weight", (256,), 34, bytes(52) + NAN)), "nan at [0, 0]"),
    "NVFP4": (broken(M2, ("output.weight", (64,), 40)), "1 of 1 tensors are NVFP4"),
    "integers as a norm": (broken(M2, (B0 + "attn_norm.weight", (4,), 26)), "1 of 1 tensors are I32"),
    "all layers predict": (broken(M2, block_count=1, nextn_predict_layers=1), "of which 1 predict further tokens"),
    "layers without end": (broken(M2, block_count=5000), "block_count is 5000"),
    "rope's factors in fp16": (
        broken("llama", ("rope_freqs.weight", (4,), 1)), "rope_freqs.weight': F16 [4]; F32 of at most"),
    "rope's factors of nothing": (
        broken("llama", ("rope_freqs.weight", (4,), 0, struct.pack("<4f", 1, 0, 1, 1))), "that are not from 1 on"),
    "rope's factors nobody knows": (
        broken("llama", ("rope_freqs.weight", (4,), 0, struct.pack("<4f", 1, 3, 1, 1))),
        "in a way that the metadata does not say"),
    "epsilon as a count": (broken(M2, attention__layer_norm_rms_epsilon=1), "layer_norm_rms_epsilon is 1"),
    "another way to choose": (broken(M2, expert_gating_func=1), "expert_gating_func is 1, for 0 or 2"),
    "heads narrower than their rotated part": (
        broken("deepseek2", attention__key_length_mla=8, rope__dimension_count=8),
        "heads of 8, of which 8 are rotated"),
    "no number of groups": (broken("deepseek2"), "deepseek2.expert_group_count is None"),
    "layers of an unknown kind": (
        broken("qwen3next", attention__recurrent_layers=array(U32, [1])), "recurrent_layers is (1,)"),
    "sections as text": (broken("qwen35moe", rope__dimension_sections="1"), "dimension_sections is '1'"),
    "scores that are capped": (
        broken("qwen3moe", attn_logit_softcapping=30.0), "attn_logit_softcapping is 30.0, for 0.0"),
    "a window that is not the model's": (
        broken("glm4moe", attention__sliding_window=128), "attention.sliding_window is 128, for 0"),
    "gates that are clamped": (
        broken("qwen3moe", swiglu_clamp_exp=array(F32, [7.0])), "is (7.0,), which the model does not know"),
    "another base for windows": (
        broken("gpt-oss", rope__freq_base=1e4, rope__freq_base_swa=1e3), "freq_base_swa is 1000.0, for 10000.0"),
    "a scaled Mixtral": (broken("llama", logit_scale=2.0), "logit_scale is 2.0, for 1.0"),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_model_is_refused(case: str, tmp_path: Path) -> None:
    content, words = BROKEN[case]
    path = tmp_path / "a.gguf"
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as caught, Checkpoint.open(path) as checkpoint:
        for key in checkpoint.weights:
            checkpoint.decode(key)
        checkpoint.config_values()
    message = str(caught.value)
    assert words in message and len(message.splitlines()) <= 22 and message.endswith(".")


def test_every_architecture_has_a_config() -> None:
    assert CONFIGS.keys() == ARCHITECTURES.keys()
