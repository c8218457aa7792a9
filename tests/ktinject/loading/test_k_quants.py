"""K-quants of GGUF files as weights of their own: every value is the file's, and what is computed follows from it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import k_quants
import models
import pytest
import reference
import torch
from double import on_meta, saved
from gguf_by_hand import converted

import ktinject
from ktinject import _native
from ktinject.checkpoints.checkpoint import Checkpoint
from ktinject.errors import PlanError

torch.set_num_threads(1)
gguf = pytest.importorskip("gguf")
SIZE = 256


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    return saved(wide(), tmp_path_factory.mktemp("k_quants"))


def wide() -> Any:
    return models.tiny(
        "qwen3_moe",
        hidden_size=SIZE,
        intermediate_size=SIZE,
        moe_intermediate_size=SIZE,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=SIZE // 4,
    )


def mixed(folder: Path, file: Path, gate_up: str, down: str, **others: str) -> Path:
    kinds = {"ffn_gate_exps": gate_up, "ffn_up_exps": gate_up, "ffn_down_exps": down} | others
    return converted(folder, file, "F32", k_kinds=kinds)


def rules(operator: str = "cpu_experts", **arguments: Any) -> list[dict[str, Any]]:
    return [
        {"name": "experts", "match": {"path": r".*\.experts"}, "replace": {"operator": operator, **arguments}}
    ]


def loaded(file: Path, found: list[dict[str, Any]]) -> Any:
    return ktinject.load(file, found, devices="cpu", dtype=torch.float32, progress=False)


def plan(path: Path, folder: Path, found: list[dict[str, Any]]) -> ktinject.Plan:
    return ktinject.plan(on_meta(folder), found, checkpoint=path, devices="cpu")


def values(file: Path) -> Mapping[str, torch.Tensor]:
    """As the gguf package dequantises them."""
    return {
        tensor.name: torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())
        for tensor in gguf.GGUFReader(file).tensors
    }


@pytest.mark.parametrize("kind", k_quants.KINDS)
@pytest.mark.parametrize("kernel", ["auto", "reference"])
def test_values_are_the_gguf_packages_bit_by_bit(kind: str, kernel: str) -> None:
    torch.manual_seed(0)
    rows = k_quants.quantised(torch.randn(50, 2 * SIZE) * torch.rand(50, 1), kind)
    linear = _native.Linear(
        out_features=50, in_features=2 * SIZE, weights=kind, group_size=0, has_bias=False,
        kernel=kernel if kernel == "auto" else f"reference_{kind}",
    )  # fmt: skip
    linear.allocate()
    linear.load_blocks(rows)
    found = torch.empty(50, 2 * SIZE)
    linear.unpack(found)
    want = torch.from_numpy(gguf.quants.dequantize(rows.numpy(), gguf.GGMLQuantizationType[kind.upper()]))
    assert found.equal(want) and want.abs().max() > 0
    x, out = torch.randn(21, 2 * SIZE), torch.empty(21, 50)
    linear.forward(x, out)
    want = reference.rounded(x, reference.rounding(kind)) @ want.double().T
    assert reference.relative_error(out, want) <= 1e-5
    alone = torch.empty(1, 50)
    for row in (0, 17):
        linear.forward(x[row : row + 1].clone(), alone)
        assert alone[0].equal(out[row]), "who else is there changes nothing"


@pytest.mark.parametrize(
    "gate_up,down", [("Q4_K", "Q6_K"), ("Q2_K", "Q3_K"), ("IQ4_XS", "Q5_K"), ("Q8_0", "Q8_0")]
)
def test_kept_experts_are_the_files_own(gate_up: str, down: str, folder: Path, tmp_path: Path) -> None:
    file = mixed(folder, tmp_path / "a.gguf", gate_up, down)
    model = loaded(file, rules(weights="kept"))
    want = values(file)
    for layer, replacement in enumerate(model.ktinject.replacements):
        words = gate_up.lower() if gate_up == down else f"{gate_up.lower()}, down {down.lower()}"
        assert replacement.runs["weights"] == words
        operator = model.get_submodule(replacement.path)
        parts = [want[f"blk.{layer}.ffn_{part}_exps.weight"] for part in ("gate", "up", "down")]
        assert operator.unpack("gate_up_proj").equal(torch.cat(parts[:2], 1))
        assert operator.unpack("down_proj").equal(parts[2])
        assert not operator.is_lossless()
        spec, x = operator.spec, torch.randn(9, SIZE)
        index = torch.rand(9, spec.num_experts).topk(2).indices
        exact = reference.weights_of(
            spec, {name: operator.unpack(name) for name in operator.parameter_shapes()}
        )
        out = reference.experts(x, index, torch.ones(9, 2), exact, spec, reference.rounding(gate_up.lower()))
        assert reference.relative_error(operator(x, index, torch.ones(9, 2)), out) <= 3e-3
    ids = torch.arange(3, 23)[None]
    assert model.generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=0).shape == (1, 23)


def test_dense_layers_of_the_bundled_rules_are_the_files_own(folder: Path, tmp_path: Path) -> None:
    kinds = {"attn_q.": "Q4_K", "attn_v.": "Q6_K", "attn_output.": "Q3_K"}
    file = mixed(folder, tmp_path / "a.gguf", "Q4_K", "Q4_K", **kinds)
    model = ktinject.load(file, devices="cpu", dtype=torch.bfloat16, progress=False)
    runs = {replacement.path: replacement.runs["weights"] for replacement in model.ktinject.replacements}
    want = values(file)
    for ours, theirs, weights in (
        ("q", "q", "q4_k"),
        ("k", "k", "bf16"),
        ("v", "v", "q6_k"),
        ("o", "output", "q3_k"),
    ):
        path = f"model.layers.1.self_attn.{ours}_proj"
        assert runs[path] == weights
        if weights != "bf16":
            assert model.get_submodule(path).unpack("weight").equal(want[f"blk.1.attn_{theirs}.weight"])
    assert runs["model.layers.0.mlp.gate"] == "bf16", "a router is exact"
    given = ktinject.load(
        file, devices="cpu", dtype=torch.bfloat16, progress=False, variables={"dense": "bf16"}
    )
    assert {
        given.get_submodule(f"model.layers.0.self_attn.{name}_proj").config.weights for name in "qkvo"
    } == {"bf16"}


@pytest.mark.parametrize("operator", ["hybrid_experts", "cpu_experts"])
def test_a_format_that_is_named_is_that_of_the_file(operator: str, folder: Path, tmp_path: Path) -> None:
    file = mixed(folder, tmp_path / "a.gguf", "Q4_K", "Q4_K")
    model = loaded(file, rules(operator, weights="q4_k"))
    assert {replacement.runs["weights"] for replacement in model.ktinject.replacements} == {"q4_k"}
    other = mixed(folder, tmp_path / "b.gguf", "Q4_K", "Q6_K")
    with pytest.raises(
        PlanError, match=r"weights q4_k are kept .* down_proj is q6_k .* kept takes what it has"
    ):
        plan(other, folder, rules(operator, weights="q4_k"))
    plan(other, folder, rules(operator, weights="q4_k", down_weights="q6_k"))
    with pytest.raises(PlanError, match="gate_up_proj is fp32"):
        plan(converted(folder, tmp_path / "c.gguf", "F32"), folder, rules(operator, weights="q4_k"))
    with pytest.raises(PlanError, match="kept from a checkpoint, and none is loaded"):
        ktinject.plan(wide(), rules(operator, weights="q4_k"))


def test_what_is_no_k_quant_is_kept_as_before(folder: Path, tmp_path: Path) -> None:
    """Gate and up of two formats share panels: they are decoded. Without K-quants, kept is what auto takes first."""
    file = converted(
        folder, tmp_path / "a.gguf", "F32", k_kinds={"ffn_gate_exps": "Q4_K", "ffn_up_exps": "Q6_K"}
    )
    plans = [plan(path, folder, rules(weights="kept")) for path in (file, folder)]
    plans.append(ktinject.plan(on_meta(folder), rules(weights="kept"), devices="cpu"))
    assert {r.runs["weights"] for each in plans for r in each.replacements} == {"bf16"}


def test_linears_keep_k_quants(folder: Path, tmp_path: Path) -> None:
    file = converted(folder, tmp_path / "a.gguf", "F32", k_kinds={"attn_output": "Q5_K", "attn_k.": "Q6_K"})
    found = [
        {
            "name": "a",
            "match": {"path": r".*\.self_attn\.(o|k|v)_proj"},
            "replace": {"operator": "cpu_linear", "weights": "kept"},
        }
    ]
    with Checkpoint.open(file) as checkpoint:
        assert checkpoint.shape("model.layers.0.self_attn.o_proj.weight")[1] % SIZE == 0
    model, want = loaded(file, found), values(file)
    runs = {r.path.rpartition(".")[2]: r.runs["weights"] for r in model.ktinject.replacements}
    assert runs == {"o_proj": "q5_k", "k_proj": "q6_k", "v_proj": "bf16"}
    operator = model.model.layers[1].self_attn.o_proj
    assert operator.unpack("weight").equal(want["blk.1.attn_output.weight"])
    with pytest.raises(PlanError, match="the weight is fp32 in the checkpoint"):
        plan(
            converted(folder, tmp_path / "b.gguf", "F32"),
            folder,
            [{**found[0], "replace": {"operator": "cpu_linear", "weights": "q5_k"}}],
        )


def test_results_do_not_depend_on_threads_and_nodes() -> None:
    torch.manual_seed(0)
    shapes = {"gate": (3 * SIZE, SIZE), "up": (3 * SIZE, SIZE), "down": (SIZE, 3 * SIZE)}
    rows = {
        (name, expert): k_quants.quantised(torch.randn(shape) * 0.05, "q6_k" if name == "down" else "q4_k")
        for expert in range(3)
        for name, shape in shapes.items()
    }
    x, weight = torch.randn(19, SIZE).bfloat16(), torch.rand(19, 2)
    index = torch.rand(19, 3).topk(2).indices
    found = []
    before = _native.threads()
    try:
        for nodes, threads in ((0, 1), (0, 3), (2, 2), (2, 4)):
            _native.set_nodes(nodes)
            _native.set_threads(threads, True)
            experts = _native.Experts(
                experts=3, hidden_size=SIZE, intermediate_size=3 * SIZE, weights="q4_k", down_weights="q6_k",
                group_size=0, has_gate=True, has_bias=False, activation="silu", alpha=1.0, gate_max=math.inf,
                up_limit=math.inf, up_offset=0.0, kernel="auto",
            )  # fmt: skip
            experts.allocate()
            for (name, expert), blocks in rows.items():
                experts.load_blocks(name, expert, blocks)
            found.append(torch.empty_like(x))
            experts.forward(x, index, weight, found[-1])
            found.append(torch.empty_like(x))
            for token in range(len(x)):
                one = slice(token, token + 1)
                experts.forward(x[one], index[one], weight[one], found[-1][one])
    finally:
        _native.set_nodes(0)
        _native.set_threads(before)
    assert all(other.equal(found[0]) for other in found)
