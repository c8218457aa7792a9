"""`ktinject fit`: the file that it writes is read by the other commands, and is the same plan."""

import json

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from trained import trained_model

from ktinject.errors import PlanError
from ktinject.tools import fit

# For int8 experts, of 8.3 MiB, with all else, and for bf16 ones without.
TIGHT = "15MiB"


def decided(plan):
    """What a plan comes to, without the words in which the rules say it."""
    names = ("path", "operator", "runs", "device", "bytes")
    modules = [{name: module[name] for name in names} for module in plan["modules"]]
    return modules, {name: plan[name] for name in ("to_load", "runtime_memory", "limits", "rest", "problems")}


@pytest.mark.parametrize(
    "options",
    [
        ["--budget", "cpu=1GiB"],
        ["--budget", f"cpu={TIGHT}", "--set", "dense=int8", "--context", "300"],
        ["--machine", f"cpu={TIGHT},cuda:0=4GiB", "--set", "gpu_experts=auto"],
    ],
)
def test_the_file_is_the_same_plan(as_json, ktinject, tmp_path, options):
    file = tmp_path / "fitted.yaml"
    found = as_json("fit", trained_model("tiny-qwen3-moe"), *options, "--out", file)
    text = file.read_text()
    assert text == found["rules"]
    read = yaml.safe_load(text)
    assert read["extends"] == "auto" and read["variables"] == found["variables"]
    assert read["variables"]["experts"] == ("bf16" if "cpu=1GiB" in options else "int8")
    assert ("Given up: bf16: cpu needs " in text) == ("cpu=1GiB" not in options)
    assert read["variables"].get("gpu_experts", 1) != "auto"
    without, again = iter(options), []
    for word in without:
        if word == "--set":
            next(without)  # the file says it
        else:
            again.append(word)
    plan = as_json("plan", trained_model("tiny-qwen3-moe"), "--rules", file, *again)
    assert decided(plan) == decided(found["plan"]) and not plan["problems"]
    assert ktinject("rules", "check", file).stdout


def test_what_only_the_checkpoint_can_give_is_kept(as_json, tiny_qwen3_moe, tmp_path):
    tensors = {}
    for key, value in load_file(tiny_qwen3_moe / "model.safetensors").items():
        tensors[key] = value
        if ".experts." in key:
            n, k = value.shape
            tensors[key] = value.to(torch.float8_e4m3fn)
            tensors[f"{key}_scale_inv"] = torch.full((n, -(-k // 32)), 127, dtype=torch.uint8)
    save_file(tensors, tmp_path / "model.safetensors")
    config = json.loads((tiny_qwen3_moe / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [1, 32]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = as_json("fit", tmp_path, "--budget", "cpu=1GiB")
    assert found["variables"]["experts"] == "kept"
    runs = [module["runs"] for module in found["plan"]["modules"] if module["path"].endswith(".experts")]
    assert runs and {(one["weights"], one["values"]) for one in runs} == {("mxfp8", "kept (mxfp8)")}


def test_without_a_place_the_file_is_printed(ktinject, tiny_qwen3_moe):
    text = ktinject("fit", tiny_qwen3_moe, "--rules", "qwen3-moe", "--context", 300).stdout
    assert text.startswith(
        f"# Found by: ktinject fit {tiny_qwen3_moe} --rules qwen3-moe --context 300\n# With the"
    )
    assert yaml.safe_load(text) == {"version": 1, "extends": "qwen3-moe", "variables": {"experts": "bf16"}}


def test_a_file_of_ones_own_is_extended_by_its_whole_path(ktinject, tiny_qwen3_moe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    own = tmp_path / "own: rules.yaml"
    own.write_text("version: 1\nextends: auto\nvariables: {experts: int4}\n")
    read = yaml.safe_load(ktinject("fit", tiny_qwen3_moe, "--rules", own.name).stdout)
    assert read["extends"] == str(own) and read["variables"] == {"experts": "bf16"}


def test_what_cannot_be_fitted_is_refused(ktinject, tiny_qwen3_moe, tmp_path):
    def refused(*arguments):
        return ktinject("fit", tiny_qwen3_moe, *arguments, exit_code=2).stderr

    said = refused("--budget", "cpu=1KiB")
    assert "the plan does not fit:\n  cpu needs" in said and "\nIt fits with" in said
    own = tmp_path / "own.yaml"
    own.write_text(
        "version: 1\nrules:\n  - {name: e, match: {class: Qwen3MoeExperts}, replace: {operator: cpu_experts}}\n"
    )
    assert "own.yaml declares no variable 'experts', by which fit chooses a format" in refused("--rules", own)
    with pytest.raises(PlanError, match=r"values of variables. Write a rule file that extends"):
        fit.find(lambda values: pytest.fail("planned"), {"routed experts.prefill": "cpu"})
    assert "--out" in refused("--out", tmp_path)
