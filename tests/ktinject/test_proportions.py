"""Whatever a file holds: refused within 256 MiB and 5 s, by one of our errors."""

from __future__ import annotations

import json
from pathlib import Path

import models
import prepared
import proportions
import pytest
from once import made_once

from ktinject.checkpoints.beside import check_counts
from ktinject.errors import CheckpointError, PlanError
from ktinject.hf import models as hf

Costs = dict[str, tuple[str, float, int]]


@pytest.fixture(scope="module")
def costs(tmp_path_factory: pytest.TempPathFactory) -> Costs:
    def make(file: Path) -> None:
        done = prepared.run(Path(proportions.__file__), tmp_path_factory.mktemp("proportions"))
        assert done.returncode == 0, done.stderr
        file.write_text(done.stdout)

    return json.loads(made_once(tmp_path_factory, "proportions.json", make).read_text())


@pytest.mark.parametrize("case", proportions.CASES)
def test_it_is_refused_in_little_time_and_memory(case: str, costs: Costs) -> None:
    said, seconds, used = costs[case]
    assert said.startswith(("CheckpointError: ", "OperatorError: ")), said
    # Processor time, and twice of it, for machines that do other things.
    assert seconds < 10 and used < 256 << 20, f"{seconds:.1f} s, {used >> 20} MiB"


def test_a_config_of_too_many_modules_makes_no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    config = models.config("qwen3_moe")
    assert hf.meta_model(config)
    monkeypatch.setattr(hf, "MAX_MODULES", 20)
    with pytest.raises(PlanError, match="the config makes no model: it has more than 20 modules"):
        hf.meta_model(config)
    monkeypatch.undo()
    assert hf.meta_model(config), "nothing is left behind"


@pytest.mark.parametrize("name", models.AVAILABLE)
def test_what_models_have_is_in_proportion(name: str) -> None:
    check_counts(models.config(name).to_dict(), name)


@pytest.mark.parametrize(
    "values", [{"vision_config": {"depth": 1001}}, {"sizes": [{"n_layer": 1e9}]}, {"num_experts": 5000}]
)
def test_counts_are_found_wherever_they_are(values: dict) -> None:
    with pytest.raises(CheckpointError, match=r"where: out of proportion:\n  (depth|n_layer|num_experts) is"):
        check_counts(values, "where")


@pytest.mark.parametrize(
    "values",
    [
        {"attn_implementation": "org/kernel"},
        {"_attn_implementation": "paged|org/kernel@main:function"},
        {"text_config": {"attn_implementation": "org/kernel"}},
        {"attn_implementation": {"text_config": "org/kernel"}},
        {"_experts_implementation_internal": "org/kernel"},
    ],
)
def test_a_config_does_not_choose_native_code(values: dict, tmp_path: Path) -> None:
    """transformers would fetch it from the Hub and run it, without a question."""
    made = models.config("qwen3_moe").to_dict()
    (tmp_path / "config.json").write_text(json.dumps({**made, **values}))
    with pytest.raises(CheckpointError, match=r"(?s)asks for code of the Hub:.*org/kernel.*Remove the line"):
        hf.read_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**made, "attn_implementation": "eager"}))
    assert hf.read_config(tmp_path)._attn_implementation == "eager"
