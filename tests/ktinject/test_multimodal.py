"""Models of text and images: which class a config makes, and each family from its checkpoint to the tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from double import EXPERTS, saved
from models import COMMON, OF_ROWS, multimodal
from safetensors.torch import load_file, save_file
from test_generate import stock
from test_native_decoder import TOLERANCE, difference
from test_optimize import quantise
from transformers import PreTrainedModel

import ktinject
from ktinject.hf import models as hf
from ktinject.operators import Operator
from ktinject.support import SUPPORTED

torch.set_num_threads(1)
IDS = torch.randint(3, 88, (1, 12), generator=torch.Generator().manual_seed(0))


def load(folder: Path, rules: Any = "auto", **arguments: Any) -> PreTrainedModel:
    return ktinject.load(
        folder, rules, **{"devices": "cpu", "progress": False, "dtype": "float32", **arguments}
    )


def written(model: PreTrainedModel, **prompt: Any) -> list[list[int]]:
    found: list[list[int]] = model.generate(**prompt, max_new_tokens=10, do_sample=False).tolist()
    return found


@pytest.mark.parametrize("name", multimodal.AVAILABLE)
def test_a_checkpoint_is_planned_loaded_and_writes_what_transformers_does(name: str, tmp_path: Path) -> None:
    plain = multimodal.tiny(name)
    model = load(saved(plain, tmp_path))
    assert isinstance(model, type(plain))
    plan = model.ktinject
    assert plan.ruleset.source == "auto.yaml"
    experts = {path for path, _ in plain.named_modules() if path.endswith(".experts")}
    language = {path for path in experts if "vision_tower" not in path}
    swapped = {path for path, module in model.named_modules() if isinstance(module, Operator)}
    assert swapped & experts == language != set()
    # The tower is there, as it was, and the plan counts it.
    held = {**dict(plain.named_parameters()), **dict(plain.named_buffers())}
    kept = {key: value for key, value in held.items() if key not in plan.swapped}
    assert plan.rest_bytes == {"cpu": sum(value.nbytes for value in kept.values())}
    assert all(torch.equal(model.get_parameter_or_buffer(key), value) for key, value in kept.items())
    assert written(model, input_ids=IDS) == written(plain, input_ids=IDS)


IMAGES = ["glm4v_moe", "kimi_k25", "qwen3_5_moe", "qwen3_vl_moe"]
ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.mark.parametrize("name", IMAGES)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_GPU)])
def test_a_prompt_with_images(name: str, device: str, tmp_path: Path) -> None:
    """In transformers' steps, and on the tensors of recorded ones, whose positions are behind the images."""
    if name not in multimodal.AVAILABLE:
        pytest.skip(f"this transformers has no {name}")
    plain = multimodal.tiny(name)
    model = load(saved(plain, tmp_path), devices=device)
    decoding, plain = model.ktinject_decoding, plain.to(device)
    prompt = {
        key: value.to(device) for key, value in multimodal.image_prompt(name, rows=2, padding=3).items()
    }
    other = {**prompt, "pixel_values": -prompt["pixel_values"]}
    expected = written(plain, **prompt)
    assert written(plain, **other) != expected, "an image that changes nothing shows nothing"
    if device == "cpu":
        assert written(model, **prompt) == expected
        decoding.graphs = SUPPORTED
    assert written(model, **prompt) == expected
    [runner] = decoding.runners.values()
    assert decoding.reason == runner.graphs.reason and bool(runner.graphs) == (device == "cuda")
    assert written(model, **other) == written(plain, **other)
    assert [*decoding.runners.values()] == [runner] and not runner.changed
    assert written(model, input_ids=IDS.to(device)) == written(plain, input_ids=IDS.to(device))
    if name == "qwen3_vl_moe":
        alone = {key: value.to(device) for key, value in multimodal.image_prompt(name).items()}
        for way in ({"prompt_lookup_num_tokens": 3}, {"num_beams": 3}):
            assert written(model, **alone, **way) == written(plain, **alone, **way)
            assert decoding.last.startswith(("eager loop", "graph"))


@pytest.mark.parametrize("name", [name for name in multimodal.AVAILABLE if name not in IMAGES])
def test_a_prompt_with_a_picture_in_every_family(name: str, tmp_path: Path) -> None:
    plain = multimodal.tiny(name)
    model, prompt = load(saved(plain, tmp_path)), multimodal.image_prompt(name)
    other = {**prompt, "pixel_values": -prompt["pixel_values"]}
    assert written(plain, **other) != written(plain, **prompt), "an image that changes nothing shows nothing"
    for asked in (prompt, other, prompt):
        # Experts round activations to bf16, so of two tokens that are nearly even the other may come.
        with torch.no_grad():
            found, wanted = model(**asked).logits, plain(**asked).logits
        assert (found - wanted).norm() <= 0.02 * wanted.norm()
        assert written(model, **asked) == stock(model, **asked, max_new_tokens=10, do_sample=False).tolist()


@pytest.mark.parametrize(
    "name", [*IMAGES, "internvl", "qwen3_omni_moe_thinker", "minimax_m3_vl", "nemotron_h_omni"]
)
def test_native_steps_behind_images(name: str, tmp_path: Path) -> None:
    """Their logits are those of transformers' steps, but for roundings."""
    if name not in multimodal.AVAILABLE:
        pytest.skip(f"this transformers has no {name}")
    # All experts are taken, so none can turn over.
    plain = multimodal.tiny(name, num_experts_per_tok=6, n_group=1, topk_group=1)
    model = load(saved(plain.bfloat16(), tmp_path), dtype="bfloat16")
    prompt: dict[str, Any] = {"input_ids": IDS}
    if name in (*IMAGES, "minimax_m3_vl", "nemotron_h_omni"):
        prompt = multimodal.image_prompt(name, rows=2, padding=3)
        prompt["pixel_values"] = prompt["pixel_values"].bfloat16()
    asked: dict[str, Any] = {
        **prompt,
        "max_new_tokens": 6,
        "do_sample": False,
        "return_dict_in_generate": True,
        "output_logits": True,
    }
    ours = model.generate(**asked)
    assert (model.ktinject_decoding.last, model.ktinject_decoding.reason) == ("native loop", "")
    theirs = stock(model, **asked)
    first = prompt["input_ids"].shape[1]
    steps = list(zip(ours.logits, theirs.logits))
    for step, (found, wanted) in enumerate(steps):
        if not torch.equal(ours.sequences[:, : first + step], theirs.sequences[:, : first + step]):
            break  # a token that roundings decide
        assert difference(found, wanted) <= TOLERANCE
    assert step >= 3


def test_the_config_says_which_class_it_is(tmp_path: Path) -> None:
    config = multimodal.config("qwen3_5_moe")

    def built(*architectures: str) -> str:
        config.architectures = [*architectures] or None
        return type(hf.meta_model(config)).__name__

    assert built("Qwen3_5MoeForCausalLM") == "Qwen3_5MoeForCausalLM"
    assert built("Qwen3_5MoeForConditionalGeneration") == "Qwen3_5MoeForConditionalGeneration"
    assert built("SomebodysForConditionalGeneration") == "Qwen3_5MoeForConditionalGeneration"
    assert built("SomebodysModel") == built() == "Qwen3_5MoeForCausalLM"


def test_of_a_model_that_speaks_the_part_that_writes_is_loaded(tmp_path: Path) -> None:
    from transformers import Qwen3OmniMoeConfig, Qwen3OmniMoeForConditionalGeneration

    thinker = multimodal.config("qwen3_omni_moe_thinker").to_dict()
    torch.manual_seed(0)
    plain = Qwen3OmniMoeForConditionalGeneration(
        Qwen3OmniMoeConfig(thinker_config=thinker, enable_audio_output=False)
    ).eval()
    saved(plain, tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({**load_file(file), "talker.model.norm.weight": torch.ones(4)}, file, {"format": "pt"})
    model = load(tmp_path)
    assert isinstance(model, type(plain.thinker))
    assert written(model, input_ids=IDS) == written(plain.thinker, input_ids=IDS)


def test_llama_4_whose_experts_take_rows_alone() -> None:
    from transformers import Llama4Config, Llama4ForConditionalGeneration

    vision = {**multimodal.CLIP_LIKE, "vision_output_dim": 32, "projector_output_dim": 40}
    config = Llama4Config(text_config={**COMMON, **OF_ROWS["llama4_text"]}, vision_config=vision)
    with torch.device("meta"):
        model = Llama4ForConditionalGeneration(config)
    replaced = {replacement.path for replacement in ktinject.plan(model, "auto", devices="cpu").replacements}
    assert {f"language_model.model.layers.{layer}.feed_forward.experts" for layer in (0, 1)} <= replaced
    assert not any("vision" in path for path in replaced)


def test_a_quantised_language_part_beside_a_tower_that_is_not(tmp_path: Path) -> None:
    """As FP8 checkpoints are published: the tower for images is named as left alone."""
    folder = saved(multimodal.tiny("glm4v_moe"), tmp_path / "fp8")
    meaning = tmp_path / "meaning"
    meaning.mkdir()
    tensors = load_file(folder / "model.safetensors")
    meant = dict(tensors)
    for name in meant:
        if ".language_model." in name and name.endswith("_proj.weight"):
            tensors[name], tensors[f"{name}_scale_inv"], meant[name] = quantise(meant[name], 16)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    save_file(meant, meaning / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (meaning / "config.json").write_text(json.dumps(config))
    config["quantization_config"] = {
        "quant_method": "fp8",
        "weight_block_size": [16, 16],
        "modules_to_not_convert": ["model.visual", "lm_head"],
    }
    (folder / "config.json").write_text(json.dumps(config))
    prompt = multimodal.image_prompt("glm4v_moe")
    with torch.no_grad():
        found, wanted = (load(path, [EXPERTS])(**prompt).logits for path in (folder, meaning))
    assert torch.equal(found, wanted)
