"""GGUF files as the gguf package writes them: names, values, configs, and whole models."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_by_hand import STRING, U16, U32, converted, entry, image, tensor
from safetensors.torch import load_file, save_file

import ktinject
from ktinject import machine, rules
from ktinject.checkpoints.checkpoint import Checkpoint
from ktinject.checkpoints.formats import gguf_blocks
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


@pytest.mark.parametrize("kind", gguf_blocks.TYPES)
def test_blocks_of_any_bits_are_what_the_gguf_package_makes_of_them(kind: str) -> None:
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


@pytest.mark.parametrize("name", ["llama", "gemma3", ""])
def test_other_architectures(name: str, tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf", *([entry("general.architecture", STRING, name)] if name else []))
    message = refusal(path)
    assert (
        f"general.architecture is {name or None!r}" in message and "qwen3moe, deepseek2 are read" in message
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


@pytest.mark.parametrize("extents", [((8, 4, 2), (4, 8, 3)), ((8, 4, 2), (5, 8, 2)), ((8, 4), (4, 8, 2))])
def test_halves_of_kv_b_that_do_not_fit(extents: tuple[Any, Any], tmp_path: Path) -> None:
    k_b, v_b = (torch.Size(each).numel() * 4 for each in extents)
    both = (
        tensor("blk.0.attn_k_b.weight", extents[0]),
        tensor("blk.0.attn_v_b.weight", extents[1], offset=-(-k_b // 32) * 32),
    )
    path = write(
        tmp_path / "a.gguf",
        entry("general.architecture", STRING, "deepseek2"),
        tensors=both,
        data=bytes(-(-k_b // 32) * 32 + v_b),
    )
    with (
        Checkpoint.open(path) as checkpoint,
        pytest.raises(CheckpointError, match=r"kv_b_proj\.k_b.*are needed"),
    ):
        checkpoint.format_of("model.layers.0.self_attn.kv_b_proj.weight")


@pytest.mark.parametrize(
    "entries, words",
    [
        ((), "qwen3moe.embedding_length is None"),
        ((entry("qwen3moe.block_count", STRING, "2"),), "qwen3moe.block_count is '2'"),
        ((entry("qwen3moe.expert_count", U32, 0),), "qwen3moe.expert_count is 0"),
        ((), r"there is no token_embd\.weight"),
        (
            (entry("qwen3moe.rope.scaling.type", STRING, "yarn"),),
            "does not say all that a 'qwen3moe' model needs",
        ),
    ],
)
def test_metadata_that_makes_no_config(entries: tuple[bytes, ...], words: str, tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf", ARCHITECTURE, *entries)
    with pytest.raises(
        CheckpointError, match=f"{words}.*Put the config.json of the original model beside the file"
    ):
        ktinject.load(path, progress=False)


def test_deepseek_needs_its_config(tiny_deepseek_v3: Path, tmp_path: Path) -> None:
    file = converted(tiny_deepseek_v3, tmp_path / "a.gguf", "BF16")
    with pytest.raises(CheckpointError, match=r"all that a 'deepseek2' model needs\. Put the config\.json"):
        ktinject.load(file, progress=False)
