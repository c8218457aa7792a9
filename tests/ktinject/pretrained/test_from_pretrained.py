"""transformers' own door: what comes out is what `ktinject.load` gives, and what it cannot honour it refuses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub
import models
import pytest
import torch
from double import EXPERTS, saved
from gguf_by_hand import converted
from models import multimodal
from plan_cases import changed
from test_optimize import fp8  # noqa: F401  a fixture
from trained import trained_model
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    Qwen3MoeForCausalLM,
    pipeline,
)

import ktinject
from ktinject import KTInjectConfig
from ktinject.errors import CheckpointError, KTInjectError, PlanError, RuleError
from ktinject.hf import compat, plugin

torch.set_num_threads(1)
IDS = torch.randint(3, 90, (1, 12), generator=torch.Generator().manual_seed(0))
INT8 = {
    "name": "all",
    "match": {"path": r".*\.experts"},
    "replace": {"operator": "cpu_experts", "weights": "int8"},
}
EXACT = {**INT8, "replace": {"operator": "cpu_experts", "weights": "bf16"}}
OURS = KTInjectConfig([INT8])


def door(path: Path | str, config: Any = OURS, **arguments: Any) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(path, quantization_config=config, **arguments)


def as_text(plan: ktinject.Plan) -> dict[str, Any]:
    """A plan without where its rules stand, and what the machine had free at that moment."""
    said = plan.to_dict()
    for module in said["modules"]:
        module.pop("where", None)
    return {name: said[name] for name in ("matched", "modules", "rest", "bytes")}


@torch.no_grad()
def assert_same(model: PreTrainedModel, want: PreTrainedModel) -> None:
    assert type(model).__name__ == type(want).__name__ and model.dtype == want.dtype and not model.training
    assert as_text(model.ktinject) == as_text(want.ktinject) and model.ktinject.replacements
    assert torch.equal(model(IDS).logits, want(IDS).logits)
    tokens = [each.generate(IDS, max_new_tokens=6, do_sample=False) for each in (model, want)]
    assert torch.equal(*tokens)
    assert [name for name, tensor in model.named_parameters() if tensor.is_meta] == []


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(models.tiny("qwen3_moe"), tmp_path_factory.mktemp("door") / "model", max_shard_size="60KB")


def say(folder: Path, **quantization: Any) -> Path:
    """Let a folder's config.json hold a `quantization_config`."""
    file = folder / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, "quantization_config": quantization}))
    return folder


# The same model


def test_shards(folder: Path) -> None:
    want = ktinject.load(folder, [INT8], progress=False)
    assert_same(door(folder), want)
    assert_same(door(folder, {"quant_method": "ktinject", "rules": [INT8]}), want)
    assert_same(Qwen3MoeForCausalLM.from_pretrained(folder, quantization_config=OURS), want)


def test_a_checkpoint_that_is_quantised_already(fp8: tuple[Path, PreTrainedModel], tmp_path: Path) -> None:  # noqa: F811
    """Its own `quantization_config` says how to read it, whether ours is an argument or has taken its place."""
    theirs = json.loads((fp8[0] / "config.json").read_text())["quantization_config"]
    want = ktinject.load(fp8[0], [INT8], progress=False)
    assert_same(door(fp8[0]), want)
    assert_same(door(fp8[0], KTInjectConfig([INT8], stored=theirs)), want)
    with pytest.raises(
        PlanError, match=r"stored=\{'quant_method': 'gptq'\}, and config\.json says \{.*'fp8'"
    ):
        door(fp8[0], KTInjectConfig([INT8], stored={"quant_method": "gptq"}))
    copy = say(
        shutil.copytree(fp8[0], tmp_path / "copy"), quant_method="ktinject", rules=[INT8], stored=theirs
    )
    assert_same(AutoModelForCausalLM.from_pretrained(copy), want)
    assert_same(ktinject.load(copy, progress=False), want)


def test_gguf(tiny_deepseek_v3: Path, tmp_path: Path) -> None:
    shutil.copy(tiny_deepseek_v3 / "config.json", tmp_path)
    converted(tiny_deepseek_v3, tmp_path / "a.gguf", "Q8_0")
    assert_same(door(tmp_path), ktinject.load(tmp_path, [INT8], progress=False))


def test_images_and_text(tmp_path: Path) -> None:
    folder = saved(multimodal.tiny("qwen3_vl_moe"), tmp_path)
    model = AutoModelForImageTextToText.from_pretrained(folder, quantization_config=KTInjectConfig([EXPERTS]))
    assert_same(model, ktinject.load(folder, [EXPERTS], progress=False))


def test_a_tensor_too_many_is_left_out_as_the_refusal_says(tiny_qwen3_moe: Path, tmp_path: Path) -> None:
    """By transformers' door, and from a config.json; what is saved has no such tensor and does not speak of it."""
    path = changed(
        tiny_qwen3_moe, tmp_path / "more", lambda tensors: tensors.update({"model.odd": torch.ones(2)})
    )
    with pytest.raises(CheckpointError, match=r"model\.odd\n.*ignore=\[patterns\]"):
        door(path)
    model = door(path, KTInjectConfig([EXACT], ignore=[r"model\.odd"]))
    assert_same(model, door(tiny_qwen3_moe, KTInjectConfig([EXACT])))
    model.save_pretrained(tmp_path / "saved")
    assert "ignore" not in json.loads((tmp_path / "saved" / "config.json").read_text())["quantization_config"]
    config = json.loads((path / "config.json").read_text())
    said = KTInjectConfig([EXACT], ignore=[r"model\.odd"]).to_dict()
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": said}))
    assert_same(ktinject.load(path, progress=False), model)


def test_a_name_in_the_cache(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository, revision = tmp_path / "models--somebody--tiny", "0123456789" * 4
    snapshot = repository / "snapshots" / revision
    for made in (snapshot, repository / "blobs", repository / "refs"):
        made.mkdir(parents=True)
    (repository / "refs/main").write_text(revision)
    for number, file in enumerate(sorted(folder.iterdir())):
        shutil.copy(file, repository / f"blobs/{number}")
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    want = ktinject.load(folder, [INT8], progress=False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    model = door("somebody/tiny", cache_dir=tmp_path)
    assert_same(model, want)
    assert model.config.name_or_path == "somebody/tiny"
    with pytest.raises(CheckpointError, match=r"somebody/tiny: no such folder or file"):
        ktinject.load("somebody/tiny")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    assert_same(ktinject.load("somebody/tiny", [INT8], progress=False), want)
    with pytest.raises(CheckpointError, match=r"somebody/other: no such folder here, and not to be had"):
        Qwen3MoeForCausalLM.from_pretrained("somebody/other", quantization_config=OURS)


def test_what_is_saved_loads_without_an_argument(tmp_path: Path) -> None:
    folder = saved(models.tiny("qwen3_moe").bfloat16(), tmp_path / "model")
    rules = tmp_path / "mine.yaml"
    rules.write_text(json.dumps({"version": 1, "variables": {"weights": "int8"}, "rules": [
        {**EXACT, "replace": {"operator": "cpu_experts", "weights": "${variables.weights}"}}
    ]}))  # fmt: skip
    asked = KTInjectConfig(rules, budget={"cpu": "1GiB"}, variables={"weights": "bf16"}, context=100)
    model = door(folder, asked)
    model.save_pretrained(tmp_path / "saved")
    AutoTokenizer.from_pretrained(trained_model("tiny-qwen3-moe")).save_pretrained(tmp_path / "saved")
    rules.unlink()
    said = json.loads((tmp_path / "saved/config.json").read_text())["quantization_config"]
    assert said["context"] == 100 and said["rules"]["variables"] == {"weights": "int8"}
    for again in (
        AutoModelForCausalLM.from_pretrained(tmp_path / "saved"),
        ktinject.load(tmp_path / "saved", progress=False),
        pipeline("text-generation", model=str(tmp_path / "saved")).model,
    ):
        assert_same(again, model)
        assert again.ktinject.replacements[0].runs["weights"] == "bf16"
    other = ktinject.load(tmp_path / "saved", [INT8], progress=False)
    assert other.ktinject.replacements[0].runs["weights"] == "int8", "what the call says counts"


# What transformers' arguments mean


def test_arguments_are_honoured(folder: Path) -> None:
    model, report = door(
        folder,
        torch_dtype=torch.bfloat16,
        attn_implementation="eager",
        device_map={"": "cpu"},
        generation_config=GenerationConfig(max_new_tokens=3, do_sample=False),
        output_loading_info=True,
        max_memory={"cpu": "1GiB"},
        output_router_logits=True,
    )
    assert model.dtype == torch.bfloat16 and model.config._attn_implementation == "eager"
    assert model.config.output_router_logits
    assert model.generate(IDS).shape == (1, 15)
    assert not any(report.values())
    for devices in ("cpu", ["cpu"]):
        assert door(folder, KTInjectConfig([INT8], devices=devices), device_map="cpu").device.type == "cpu"
    assert AutoModelForCausalLM.from_pretrained(folder).get_parameter("lm_head.weight").dtype == torch.float32


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "map": ({"device_map": {"model": "cpu", "lm_head": "cpu"}}, "allowed is auto or one device"),
    "other": ({"device_map": 0, "config": KTInjectConfig(devices="cpu")}, "'cuda:0' contradicts devices='cpu'"),
    "absent": ({"device_map": "cuda:7"}, "there is no device 'cuda:7'"),
    "dtype": ({"dtype": torch.int8}, r"dtype: found torch\.int8"),
    "attention": ({"attn_implementation": "fast"}, "the config makes no model.*fast"),
    "twice": ({"max_memory": {"cpu": 1}, "config": KTInjectConfig(budget={"cpu": 1})}, "max_memory, and budget"),
    "small": ({"max_memory": {"cpu": "1KiB"}}, r"does not fit(.|\n)*the budget is 1\.0 KiB"),
    "variant": ({"variant": "fp16"}, "variant='fp16' means nothing with ktinject"),
    "unknown": ({"divice": "cpu"}, "found 'divice', which are neither arguments"),
    "file": ({"config": KTInjectConfig("no/such.yaml")}, "is not there; a path or a bundled name"),
    "subfolder": ({"subfolder": "nothing"}, "nothing"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_honoured_is_refused(case: str, folder: Path) -> None:
    arguments, message = REFUSED[case]
    arguments = dict(arguments)
    config = arguments.pop("config", OURS)
    with pytest.raises(KTInjectError, match=message):
        Qwen3MoeForCausalLM.from_pretrained(folder, quantization_config=config, **arguments)


def test_meta_is_refused(folder: Path) -> None:
    with torch.device("meta"), pytest.raises(PlanError, match=r"the default device is meta"):
        door(folder)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"rule": "auto"}, r"found 'rule'; arguments are rules, devices, .*Did you mean 'rules'\?"),
        ({"devices": 3}, "devices: found 3; allowed is a device or a list"),
        ({"rules": ktinject.RuleSet("", (), {}, ())}, "rules: found RuleSet.*; allowed is a path, a name"),
        ({"quant_method": "fp8"}, "found quant_method 'fp8'"),
    ],
)
def test_a_config_refuses_what_it_does_not_know(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        KTInjectConfig(**arguments)


def test_a_config_json_names_no_file_of_rules(folder: Path, tmp_path: Path) -> None:
    copy = say(shutil.copytree(folder, tmp_path / "copy"), quant_method="ktinject", rules="/etc/passwd")
    for load in (AutoModelForCausalLM.from_pretrained, ktinject.load):
        with pytest.raises(PlanError, match=r"found rules '/etc/passwd'; allowed are auto, a bundled name"):
            load(copy)
    say(copy, quant_method="ktinject", rules=[{"name": "a"}])
    with pytest.raises(RuleError, match="match"):
        AutoModelForCausalLM.from_pretrained(copy)


def test_without_what_it_needs_of_transformers_it_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = compat.Private("transformers.modeling_utils:PreTrainedModel", "_gone", compat.THERE, "nothing")
    monkeypatch.setitem(compat.PRIVATE, "from_pretrained", (gone,))
    compat.support.cache_clear()
    with pytest.raises(PlanError, match=r"from pretrained: in .*PreTrainedModel\._gone is gone"):
        door(folder)
    compat.support.cache_clear()


def test_the_quantizer_alone_says_who_loads() -> None:
    with pytest.raises(PlanError, match=r"loads by PreTrainedModel\.from_pretrained, and by nothing else"):
        plugin.KTInjectQuantizer(OURS).validate_environment()


@pytest.mark.gpu
@pytest.mark.parametrize("device_map", [0, "cuda", {"": "cuda:0"}, "auto"])
def test_a_device_map_names_the_gpu(device_map: Any) -> None:
    folder = trained_model("tiny-qwen3-moe")
    model = door(folder, KTInjectConfig(), device_map=device_map)
    want = ktinject.load(folder, devices=None if device_map == "auto" else "cuda:0", progress=False)
    assert as_text(model.ktinject) == as_text(want.ktinject) and model.device == torch.device("cuda:0")
