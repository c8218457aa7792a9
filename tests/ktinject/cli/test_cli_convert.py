"""`ktinject convert`, and every other command on the folder that it writes."""

from __future__ import annotations

import json
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ktinject.hf import models

ROOT = Path(__file__).parents[3]
TEXT = ("--text", ROOT / "examples/models/heldout.txt", "--tokens", 128)


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with int4 experts, as `convert` writes it."""
    from typer.testing import CliRunner

    from ktinject.cli import app

    out = tmp_path_factory.mktemp("packed") / "out"
    model = ROOT / "examples/models/tiny-qwen3-moe"
    result = CliRunner().invoke(app, ["convert", str(model), str(out), "--set", "experts=int4"])
    assert result.exit_code == 0, result.output
    return out


@pytest.fixture
def stating(tiny_qwen3_moe: Path, tmp_path: Path) -> Path:
    """A folder of plain weights whose config.json states a format of the experts."""
    folder = tmp_path / "stating"
    shutil.copytree(tiny_qwen3_moe, folder)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "ktinject", "variables": {"experts": "int4"}}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def spoken(folder: Path, monkeypatch: pytest.MonkeyPatch, *options: str) -> Any:
    """The plan of the model that `chat` loads."""
    from ktinject.cli import loaded

    plans = []
    of = loaded.load

    def load(*arguments: Any, **more: Any) -> Any:
        found = of(*arguments, **more)
        plans.append(found[1].ktinject)
        return found

    monkeypatch.setattr(loaded, "load", load)
    from typer.testing import CliRunner

    from ktinject.cli import app

    result = CliRunner().invoke(app, ["chat", str(folder), *options], input="")
    assert result.exit_code == 0, result.output
    assert "config.json states rules auto" in result.stderr
    return plans[0]


def weights_of(plan: dict[str, Any]) -> set[str]:
    return {row["runs"]["weights"] for row in plan["modules"] if row["rule"] == "routed experts"}


@pytest.mark.parametrize(
    "command",
    [
        ("plan",),
        ("run", "--max-new-tokens", 2, "--no-compare"),
        ("bench", "-p", 8, "-n", 2, "-r", 1),
        ("modules",),
        (
            "profile",
            "--prompts",
            ROOT / "examples/models/prompts.jsonl",
            "--max-new-tokens",
            1,
            "--out",
            "p.json",
        ),
        ("eval", *TEXT, "--against", ROOT / "examples/models/tiny-qwen3-moe"),
    ],
    ids=lambda command: command[0],
)
def test_every_command_runs_what_convert_wrote(
    ktinject: Callable[..., Any], packed: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    name, *options = command
    result = ktinject(name, packed, *options)
    assert ("config.json states rules auto" in result.stderr) == (name != "modules")


def test_chat_runs_what_convert_wrote(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert weights_of(spoken(packed, monkeypatch).to_dict()) == {"int4 group 128"}


def test_what_packed_weights_cannot_do_is_refused(ktinject: Callable[..., Any], packed: Path) -> None:
    assert "--against FOLDER" in ktinject("eval", packed, *TEXT, exit_code=2).stderr
    assert "packed in one format already" in ktinject("fit", packed, exit_code=2).stderr
    for option in (("--set", "experts=int8"), ("--rules", "auto")):
        refused = ktinject("run", packed, "--no-compare", *option, exit_code=2).stderr
        assert "packed as experts int4 group 128; the plan has experts" in refused


def test_what_convert_writes_has_one_mode(packed: Path) -> None:
    modes = {stat.S_IMODE(file.stat().st_mode) for file in packed.glob("*.safetensors")}
    assert modes == {stat.S_IMODE((packed / "config.json").stat().st_mode)}


def test_every_command_obeys_config_json(
    ktinject: Callable[..., Any], as_json: Callable[..., Any], stating: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert weights_of(as_json("plan", stating)) == {"int4 group 128"}
    assert weights_of(spoken(stating, monkeypatch).to_dict()) == {"int4 group 128"}
    assert "int4 group 128" in ktinject("bench", stating, "-p", 8, "-n", 0, "-r", 1).stdout
    assert "  experts: int4" in ktinject("fit", stating).stdout


def test_the_unswapped_model_is_not_swapped(
    ktinject: Callable[..., Any], packed: Path, stating: Path
) -> None:
    said = ktinject("run", packed, "--max-new-tokens", 2).stdout
    assert "unswapped: not measured: transformers alone loads plain weights" in said
    model = models.unswapped(stating)
    assert not hasattr(model, "ktinject") and any("experts" in name for name, _ in model.named_parameters())


def test_what_is_given_is_set_on_top_of_what_config_json_states(
    as_json: Callable[..., Any], stating: Path, packed: Path
) -> None:
    assert weights_of(as_json("plan", stating, "--set", "routed experts.group_size=32")) == {"int4 group 32"}
    assert weights_of(as_json("plan", stating, "--set", "experts=int8")) == {"int8"}
    assert weights_of(as_json("plan", packed, "--set", "experts=int8")) == {"int8"}
    assert weights_of(as_json("plan", stating, "--rules", "auto")) == {"bf16"}


def test_rules_of_its_own_in_config_json_are_no_base_for_fit(
    ktinject: Callable[..., Any], stating: Path
) -> None:
    config = json.loads((stating / "config.json").read_text())
    config["quantization_config"]["rules"] = {
        "version": 1,
        "extends": "auto",
        "variables": {"experts": "bf16"},
    }
    (stating / "config.json").write_text(json.dumps(config))
    assert "states rules of its own" in ktinject("fit", stating, exit_code=2).stderr
