"""Whole models of many families from one .gguf file: config, weights, and what they compute."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

import ktinject
from ktinject.checkpoints.checkpoint import Checkpoint
from ktinject.checkpoints.formats import gguf_blocks
from ktinject.checkpoints.formats.base import Codes, Format
from ktinject.checkpoints.formats.made import MadeOfParts

pytest.importorskip("gguf")
import gguf_families as families
from models import AVAILABLE, REFUSED
from transformers import AutoConfig, AutoModelForCausalLM

torch.set_num_threads(1)
TOKENS = torch.arange(1, 13)[None]
NOTHING = {
    "name": "a",
    "match": {"path": "nothing"},
    "optional": True,
    "replace": {"operator": "cpu_experts"},
}
EXPERTS = {"name": "a", "match": {"path": r".*\.experts"}, "replace": {"operator": "cpu_experts"}}


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS).logits


def loaded(file: Path, rule: dict[str, Any]) -> Any:
    return ktinject.load(file, [rule], devices="cpu", dtype=torch.float32, progress=False)


def of_sizes(family: str) -> Any:
    return families.model(family, hidden_size=64, intermediate_size=96, moe_intermediate_size=32)


@pytest.mark.parametrize("family", [name for name in families.FAMILIES if name in {*AVAILABLE, *REFUSED}])
def test_a_file_alone_is_the_model(family: str, tmp_path: Path) -> None:
    made = families.model(family)
    want = logits(made)
    file = families.write(made, tmp_path / "a.gguf")
    model = loaded(file, NOTHING)
    assert model.config.model_type == family
    # Norms lose a bit where they are stored plus one, and heads that were put in another order sum in another.
    assert torch.allclose(logits(model), want, rtol=0, atol=2e-6 * float(want.abs().max()))


@pytest.mark.parametrize(
    "family, kind",
    [("gpt_oss", "MXFP4"), ("qwen3_5_moe_text", "Q8_0"), ("mixtral", "Q5_1"), ("granitemoeshared", "BF16")],
)
def test_blocks_are_their_values(family: str, kind: str, tmp_path: Path) -> None:
    """Also where recipes join experts, and put rows or inputs into another order."""
    made = of_sizes(family)
    blocks, values = (families.write(made, tmp_path / f"{n}.gguf", kind, decoded=bool(n)) for n in range(2))
    found = loaded(blocks, EXPERTS)
    assert len(found.ktinject.replacements) == 2 and (kind in str(found.ktinject.notes)) == (kind != "BF16")
    assert logits(found).equal(logits(loaded(values, EXPERTS)))


# What recipes make of rows, and of what they are kept: (family, kind, name of the weight, how its rows stand).
MOVED = [
    ("gpt_oss", "Q4_0", "mlp.experts.gate_up_proj", "across"),
    ("gpt_oss", "Q4_0", "mlp.experts.down_proj", "across"),
    ("llama4_text", "Q4_0", "feed_forward.experts.gate_up_proj", "across"),
    ("granitemoeshared", "Q4_0", "block_sparse_moe.input_linear.weight", "moved"),
    ("granitemoeshared", "Q4_0", "block_sparse_moe.output_linear.weight", "moved"),
    ("granitemoeshared", "Q4_0", "shared_mlp.input_linear.weight", "moved"),
    ("mixtral", "Q4_0", "self_attn.q_proj.weight", "moved"),
    ("qwen3_next", "Q4_0", "linear_attn.in_proj_qkvz.weight", "moved"),
    ("qwen3_5_moe_text", "Q4_0", "linear_attn.in_proj_qkv.weight", "moved"),
    ("gpt_oss", "Q8_0", "mlp.experts.down_proj", ""),
    ("qwen3_5_moe_text", "Q4_0", "linear_attn.out_proj.weight", ""),
    ("deepseek_v3", "Q4_0", "self_attn.kv_b_proj.weight", ""),
]


@pytest.mark.parametrize(
    "family, kind",
    [*(("qwen3_5_moe_text", kind) for kind in ("Q8_0", "Q4_0", "Q4_1")), ("qwen3_moe", "Q5_1")],
)
def test_transformers_makes_the_same_model_of_a_file(family: str, kind: str, tmp_path: Path) -> None:
    """The first family by dequantisers of its own, the other by the gguf package: every parameter, bit by bit."""
    made = of_sizes(family)
    file = families.write(made, tmp_path / "a.gguf", kind, words=True)
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=file.name, config=made.config, dtype=torch.float32
    ).eval()
    ours = loaded(file, NOTHING)
    want, found = theirs.state_dict(), ours.state_dict()
    assert found.keys() == want.keys()
    assert not [name for name in want if not found[name].equal(want[name])]
    assert logits(ours).equal(logits(theirs))
    # With experts in the file's format, or rounded to bf16.
    ours = ktinject.load(file, devices="cpu", dtype=torch.float32, progress=False)
    error = ((logits(ours) - logits(theirs)).norm(dim=-1) / logits(theirs).norm(dim=-1))[0]
    assert 0 < error.median() < 0.05


def values_of(stored: Codes, is_across: bool) -> torch.Tensor:
    codes, scales = (t.mT if is_across else t for t in (stored.codes, stored.scales))
    found = Codes(codes.reshape(-1, codes.shape[-1]), scales.reshape(-1, scales.shape[-1])).values()
    return found.view(codes.shape).mT if is_across else found.view(codes.shape)


@pytest.mark.parametrize(("family", "kind", "name", "rows"), MOVED)
def test_codes_come_through_recipes_that_move_rows(
    family: str, kind: str, name: str, rows: str, tmp_path: Path
) -> None:
    with Checkpoint.open(families.write(of_sizes(family), tmp_path / "a.gguf", kind)) as checkpoint:
        key = next(key for key in sorted(checkpoint.weights) if key.endswith(name))
        form, want = checkpoint.format_of(key), checkpoint.decode(key)
        assert form.name == ("q4_0" if rows else "made") and bool(form.encoding) == bool(rows)
        if not rows:
            return
        assert form.is_taken(["int4/32"]) and checkpoint.shape(key) == want.shape
        assert values_of(checkpoint.stored(key), rows == "across").equal(want)
        assert form.by_slice == (want.dim() == 3)
        for index in range(len(want) if form.by_slice else 0):
            assert values_of(checkpoint.stored(key, index), rows == "across").equal(want[index])


@pytest.mark.parametrize("kind", ["Q4_K", "Q8_0"])
def test_rows_of_blocks_come_through_recipes(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of blocks are moved whole. The gguf package makes no K-quants, so their codes are random."""
    quantize, name = families.gguf.quants.quantize, kind.lower()

    def drawn(values: Any, of: Any) -> Any:
        if of != families.gguf.GGMLQuantizationType.Q4_K:
            return quantize(values, of)
        return gguf_blocks.random_rows("q4_k", values.shape).rows.numpy()

    monkeypatch.setattr(families.gguf.quants, "quantize", drawn)
    heads = {"hidden_size": 256, "head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    file = families.write(families.model("mixtral", **heads), tmp_path / "a.gguf", kind)
    with Checkpoint.open(file) as checkpoint:
        key = "model.layers.0.self_attn.q_proj.weight"
        assert checkpoint.format_of(key).encoding == name
        rows = checkpoint.stored(key)
        assert gguf_blocks.values(kind, rows.rows).equal(checkpoint.decode(key))
    model = ktinject.load(file, devices="cpu", progress=False)
    (found,) = (r.runs for r in model.ktinject.replacements if r.path == key.removesuffix(".weight"))
    assert found["weights"] == name and found["values"] == f"kept ({name})"


@pytest.mark.parametrize("family", ["gpt_oss", "granitemoeshared", "mixtral", "llama4_text", "qwen3_moe"])
def test_q4_0_is_kept_by_default(family: str, tmp_path: Path) -> None:
    """By the bundled rules: every code as it is in the file, scales in bf16; and the logits of transformers."""
    made = of_sizes(family)
    blocks, values = (families.write(made, tmp_path / f"{n}.gguf", "Q4_0", decoded=bool(n)) for n in range(2))
    model = ktinject.load(blocks, devices="cpu", dtype=torch.bfloat16, progress=False)
    kept = 0
    with Checkpoint.open(blocks) as checkpoint:
        for replacement in model.ktinject.replacements:
            operator = model.get_submodule(replacement.path)
            for name in replacement.parameter_shapes:
                pieces = model.ktinject.mapping.targets.get(f"{replacement.path}.{name}", [])
                if name.endswith("bias") or len(pieces) != 1:
                    continue
                form = checkpoint.format_of(pieces[0].key)
                if form.encoding != "int4" or replacement.operator == "cpu_router":
                    continue
                assert replacement.runs["values"] == "kept, scales rounded to bf16 (q4_0)"
                stored = checkpoint.stored(pieces[0].key)
                rounded = replace(stored, scales=stored.scales.bfloat16())
                is_across = "experts" in replacement.path and family in ("gpt_oss", "llama4_text")
                assert operator.unpack(name).equal(values_of(rounded, is_across)), replacement.path
                kept += 1
    assert kept >= 8
    want, found = logits(loaded(values, NOTHING)), logits(model).float()
    # Scales lose 2^-9, activations are int8, and the rest of this model is bf16. A router of random weights may choose
    # another expert for a token by that.
    error = ((found - want).norm(dim=-1) / want.norm(dim=-1))[0]
    assert error.median() < 0.05


@pytest.mark.parametrize("family", ["gpt_oss", "mixtral"])
def test_a_packed_cache_of_decoded_codes_is_not_used(
    family: str, tmp_path: Path, cache_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was written when recipes had all codes decoded: int4 made of them anew has other values.

    Of codes that reach -8 in each block, as ggml makes them, the same would be made again; others may lack it.
    """
    quantize = families.gguf.quants.quantize

    def shifted(values: Any, kind: Any) -> Any:
        blocks = quantize(values, kind)
        if kind == families.gguf.GGMLQuantizationType.Q4_0:
            codes = blocks.reshape(-1, 18)[:, 2:]
            codes[:] = (codes & 0x77) + 0x33  # from -5 to 2
        return blocks

    monkeypatch.setattr(families.gguf.quants, "quantize", shifted)
    file = families.write(of_sizes(family), tmp_path / "a.gguf", "Q4_0")
    explicit = {"weights": "int4", "group_size": 32}
    rules = [{**EXPERTS, "replace": {"operator": "cpu_experts", **explicit}}]
    if family == "mixtral":
        linear = {"operator": "cpu_linear", **explicit}
        rules = [{"name": "b", "match": {"path": r".*self_attn\.q_proj"}, "replace": linear}]

    def load(cache: Literal["auto"] | None) -> torch.Tensor:
        model = ktinject.load(file, rules, devices="cpu", dtype=torch.float32, progress=False, cache=cache)
        assert model.ktinject.replacements
        return logits(model)

    with monkeypatch.context() as before:
        before.setattr(
            MadeOfParts,
            "detect",
            lambda self, reader, key, held: Format("made", held, shape=reader.made[key].shape),
        )
        decoded = load("auto")
    assert len(list(cache_folder.iterdir())) == 1
    kept = load(None)
    assert not kept.equal(decoded)
    for _ in range(2):  # packed anew, and from the file that was written then
        assert load("auto").equal(kept)
        assert len(list(cache_folder.iterdir())) == 2


def test_what_a_model_does_not_need_is_skipped_and_named(tmp_path: Path) -> None:
    """A layer that predicts further tokens, which the metadata announces."""
    made = families.model("glm4_moe")
    file = families.write(made, tmp_path / "a.gguf", block_count=2, nextn_predict_layers=1)
    model = loaded(
        file,
        {
            **NOTHING,
            "match": {"path": r"model.layers.0.self_attn.q_proj"},
            "replace": {"operator": "dense_linear"},
        },
    )
    assert model.config.num_hidden_layers == 1
    assert any(
        "blk.1.attn_norm.weight" in n and "which the model does not need; skipped" in n
        for n in model.ktinject.notes
    )
    (note,) = [
        n
        for n in loaded(
            families.write(families.model("mixtral"), tmp_path / "b.gguf"), NOTHING
        ).ktinject.notes
        if "skipped" in n
    ]
    assert note.startswith("the checkpoint has rope_freqs.weight, ")


def test_the_language_part_of_a_model_with_images(tmp_path: Path) -> None:
    """Also where the whole model's config.json lies beside it."""
    made = families.model("qwen3_moe")
    sections = {"rope.dimension_sections": [4, 2, 2, 0], "n_deepstack_layers": 2}
    file = families.write(made, tmp_path / "a.gguf", architecture="qwen3vlmoe", **sections)
    AutoConfig.for_model("qwen3_vl_moe").save_pretrained(tmp_path)
    model = loaded(file, NOTHING)
    assert model.config.model_type == "qwen3_moe"
    assert torch.allclose(logits(model), logits(made), rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", ["qwen2_moe", "mixtral"])
def test_fused_tensors_are_cut(family: str, tmp_path: Path) -> None:
    made = families.model(family)
    model = loaded(families.write(made, tmp_path / "a.gguf", fused=True), NOTHING)
    assert torch.allclose(logits(model), logits(made), rtol=0, atol=1e-5)
