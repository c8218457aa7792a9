"""Nothing of ours depends on torch's global state: what users set for the process, or for a thread."""

from __future__ import annotations

import ast
import functools
import json
from pathlib import Path
from typing import Any

import global_states
import models
import prepared
import pytest
import torch

from ktinject.operators.linears import int4_layout

ROOT = Path(__file__).parents[2]
# Of each kind of layer one: grouped attention, sinks and windows, latent attention and an index over it, compressed
# keys, gated delta, Mamba.
KINDS = [
    *("qwen3_moe", "gpt_oss", "deepseek_v3", "deepseek_v32"),
    *("deepseek_v4", "qwen3_next", "granitemoehybrid"),
]
# States in which the unswapped model computes something else, too.
LESS_EXACT = {"products", "autocast"}
# Roundings of weights and activations to bf16.
APART = 0.05

# Factories of tensors, of which some make floats unless they are told otherwise.
FLOATS = {"empty", "eye", "full", "linspace", "logspace", "ones", "rand", "randn", "scalar_tensor", "zeros"}
OTHERS = {"arange", "as_tensor", "asarray", "randint", "randperm", "tril_indices", "triu_indices"}


@functools.cache
def answers(state: str, families: tuple[str, ...]) -> dict[str, Any]:
    done = prepared.run(Path(global_states.__file__), state, *families)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def is_as_in_quiet(state: str, families: tuple[str, ...]) -> None:
    quiet, found = answers("quiet", families), answers(state, families)
    for family in families:
        said = f"{state}, {family}: {found[family]}; quiet: {quiet[family]}"
        assert "failed" not in quiet[family] and not quiet[family]["draws"], said
        assert "failed" not in found[family], said
        if state in LESS_EXACT:
            assert found[family]["apart"] < APART, said
            assert state == "autocast" or found[family]["how"] == quiet[family]["how"], said
        else:
            assert found[family]["how"] == quiet[family]["how"], said
            assert found[family]["bits"] == quiet[family]["bits"], said


@pytest.mark.parametrize(
    "state",
    [
        pytest.param(name, marks=pytest.mark.gpu if name == "cuda" else [])
        for name in global_states.STATES
        if name != "quiet"
    ],
)
def test_a_model_answers_as_in_a_fresh_process(state: str) -> None:
    families = tuple(family for family in KINDS if family in models.AVAILABLE)
    if state not in ("bfloat16", "float64", "meta", "autocast"):
        families = families[1:2] + families[5:6]
    is_as_in_quiet(state, families)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("state", [name for name in global_states.STATES if name not in ("quiet", "cuda")])
def test_a_model_of_any_family_answers_as_in_a_fresh_process(state: str) -> None:
    is_as_in_quiet(state, tuple(models.AVAILABLE))


def test_weights_are_rounded_to_scales_of_the_same_dtype() -> None:
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    want = int4_layout._quantise(weight, 32, True)
    with global_states.STATES["float64"]():
        found = int4_layout._quantise(weight, 32, True)
    assert found.scales.dtype == want.scales.dtype and torch.equal(found.scales, want.scales)
    assert torch.equal(found.codes, want.codes)


@pytest.mark.parametrize("folder", ["ktinject", "operators"])
def test_tensors_are_made_with_dtype_and_device(folder: str) -> None:
    """torch's defaults belong to the process: users set them, and so does transformers while a model is built."""
    found = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            lacks = lacking(node)
            if lacks:
                found.append(f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}: {' and '.join(lacks)}")
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("code", "want"),
    [
        ("torch.zeros(3)", ["dtype", "device"]),
        ("torch.zeros(3, dtype=d)", ["device"]),
        ("torch.tensor([1, 2], device=d)", []),
        ("torch.tensor([1.0], device=d)", ["dtype"]),
        ("torch.tensor(values, device=d)", ["dtype"]),
        ("torch.arange(3)", ["device"]),
        ("torch.empty(3, dtype=d, pin_memory=True)", []),
        ("torch.empty(3, **kind)", []),
        ("torch.where(x > 0, 1.0, -1.0)", ["dtype"]),
        ("torch.where(x > 0, x, 1.0)", []),
        ("nn.Linear(3, 4)", ["dtype", "device"]),
        ("torch.zeros_like(x)", []),
    ],
)
def test_what_a_factory_lacks(code: str, want: list[str]) -> None:
    assert lacking(ast.parse(code, mode="eval").body) == want


def lacking(node: ast.AST) -> list[str]:
    """What a call leaves to torch's defaults."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return []
    name, owner = node.func.attr, node.func.value
    given = {keyword.arg for keyword in node.keywords}
    if None in given or not isinstance(owner, ast.Name):  # None: of **kwargs
        return []
    if owner.id == "nn" and name in ("Linear", "Embedding", "LayerNorm", "RMSNorm"):
        return [each for each in ("dtype", "device") if each not in given]
    if owner.id != "torch":
        return []
    if name == "where":  # of two numbers
        return ["dtype"] if len(node.args) == 3 and all(map(is_number, node.args[1:])) else []
    if name not in FLOATS | OTHERS | {"tensor"}:
        return []
    is_float = name in FLOATS or (name == "tensor" and not is_whole(node.args[0]))
    lacks = ["dtype"] if is_float and "dtype" not in given else []
    return lacks + (["device"] if not given & {"device", "pin_memory"} else [])


def is_number(node: ast.AST) -> bool:
    return isinstance(node.operand if isinstance(node, ast.UnaryOp) else node, ast.Constant)


def is_whole(node: ast.AST) -> bool:
    """Whether a literal holds whole numbers alone."""
    if isinstance(node, (ast.List, ast.Tuple)):
        return bool(node.elts) and all(map(is_whole, node.elts))
    node = node.operand if isinstance(node, ast.UnaryOp) else node
    return isinstance(node, ast.Constant) and isinstance(node.value, int)
