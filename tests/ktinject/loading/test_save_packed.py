"""Folders with packed weights: what `convert` and `save_pretrained` write, and what reads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

import ktinject
from ktinject.errors import CheckpointError, KTInjectError

IDS = torch.randint(3, 90, (1, 12), generator=torch.Generator().manual_seed(0))


def load(source: Path, experts: str | None = None, **arguments: Any) -> PreTrainedModel:
    variables = None if experts is None else {"experts": experts}
    return ktinject.load(source, variables=variables, devices="cpu", progress=False, **arguments)


def logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


@pytest.fixture(scope="module")
def folder(tiny_qwen3_moe: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.Tensor]:
    """A saved model with experts in int4, and its logits."""
    model = load(tiny_qwen3_moe, "int4")
    path = tmp_path_factory.mktemp("packed") / "model"
    model.save_pretrained(path)
    return path, logits(model)


def test_a_saved_model_loads_without_an_argument(folder: tuple[Path, torch.Tensor], tmp_path: Path) -> None:
    path, wanted = folder
    assert not any(".experts." in name for name in open_names(path / "model.safetensors"))
    model = load(path)
    assert torch.equal(logits(model), wanted)
    assert {r.config.weights for r in model.ktinject.replacements if r.path.endswith("experts")} == {"int4"}
    model.save_pretrained(tmp_path / "again")
    first, second = ((p / "packed.safetensors").read_bytes() for p in (path, tmp_path / "again"))
    assert first == second


def open_names(path: Path) -> list[str]:
    raw = path.read_bytes()
    return [*json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])]


def test_from_pretrained_reads_it(folder: tuple[Path, torch.Tensor]) -> None:
    path, wanted = folder
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(path)), wanted)


def test_with_other_rules_it_is_refused(folder: tuple[Path, torch.Tensor]) -> None:
    path, _ = folder
    with pytest.raises(CheckpointError, match="packed as experts int4 group 128; the plan has experts int8"):
        load(path, "int8", rules="auto")
    keep = [{"name": "experts", "match": {"role": "routed_experts"}, "replace": "keep"}]
    with pytest.raises(CheckpointError, match="the plan has nothing that is packed"):
        load(path, rules=keep)


@pytest.mark.parametrize("cut", [1, 10_000])
def test_a_file_that_is_cut_off_is_refused(
    folder: tuple[Path, torch.Tensor], tmp_path: Path, cut: int
) -> None:
    for file in folder[0].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    packed = tmp_path / "packed.safetensors"
    packed.write_bytes(packed.read_bytes()[:-cut])
    with pytest.raises(CheckpointError, match="truncated"):
        load(tmp_path)


def test_rules_that_are_not_known_any_more_are_said(tiny_qwen3_moe: Path, tmp_path: Path) -> None:
    ruleset = ktinject.rules.read("auto", variables={"experts": "int4"})
    model = ktinject.load(tiny_qwen3_moe, ruleset, devices="cpu", progress=False)
    with pytest.raises(KTInjectError, match="given as a RuleSet"):
        model.save_pretrained(tmp_path / "saved")
