"""Whole models of many families from one .gguf file: config, weights, and what they compute."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import ktinject

pytest.importorskip("gguf")
import gguf_families as families
from models import AVAILABLE, REFUSED
from transformers import AutoConfig

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
    made = families.model(family, hidden_size=64, intermediate_size=96, moe_intermediate_size=32)
    blocks, values = (families.write(made, tmp_path / f"{n}.gguf", kind, decoded=bool(n)) for n in range(2))
    found = loaded(blocks, EXPERTS)
    assert len(found.ktinject.replacements) == 2 and (kind in str(found.ktinject.notes)) == (kind != "BF16")
    assert logits(found).equal(logits(loaded(values, EXPERTS)))


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
