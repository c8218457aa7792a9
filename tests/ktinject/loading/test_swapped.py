"""What a swapped model says about weights that its operators hold: counting, training, saving tied ones, resizing."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from double import EXPERTS, on_meta, peft_too_old, saved
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

import ktinject
from ktinject.errors import OperatorError

IDS = torch.arange(3, 15)[None]


def linear(operator: str, path: str, **arguments: Any) -> dict[str, Any]:
    return {"name": operator, "match": {"path": path}, "replace": {"operator": operator, **arguments}}


HEAD = linear("cpu_linear", "lm_head")


def tied(**config: Any) -> PreTrainedModel:
    return models.tiny("qwen3_moe", tie_word_embeddings=True, **config).bfloat16()


@pytest.mark.parametrize("rules", [[HEAD], "auto"])
def test_a_tied_matrix_may_be_called_by_either_name(rules: Any, tmp_path: Path) -> None:
    original = tied().eval()
    folder = saved(original, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    model = ktinject.load(folder, rules, devices="cpu", progress=False)
    assert model.get_input_embeddings().weight.equal(original.get_input_embeddings().weight)
    with torch.no_grad():
        want, got = original(IDS).logits.float(), model(IDS).logits.float()
    assert (got - want).norm() / want.norm() < 0.03


def swapped(original: PreTrainedModel, *rules: dict[str, Any]) -> PreTrainedModel:
    return ktinject.optimize(copy.deepcopy(original), list(rules), progress=False)


@pytest.mark.parametrize("tie", [False, True])
def test_parameters_are_counted_as_in_the_unswapped_model(tie: bool) -> None:
    original = models.tiny("qwen3_moe", tie_word_embeddings=tie)
    model = swapped(original, EXPERTS, HEAD)
    assert model.num_parameters() == original.num_parameters()
    assert model.num_parameters(exclude_embeddings=True) == original.num_parameters(exclude_embeddings=True)
    left = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert model.num_parameters(only_trainable=True) == left < original.num_parameters()
    assert model.get_memory_footprint() == sum(model.ktinject.bytes.values())


def test_training_says_once_what_is_not_trained(caplog: pytest.LogCaptureFixture) -> None:
    original = models.tiny("qwen3_moe")
    model = swapped(original.train(), EXPERTS, HEAD)
    model.eval()
    assert not caplog.records, "nobody trains yet"
    for _ in range(2):
        assert model.train() is model and model.training
    (record,) = caplog.records
    held = 2 * len(model.model.layers) + 1
    left = len(list(model.parameters())) - held
    assert held + left == len(list(original.parameters()))
    assert record.levelno == logging.WARNING
    assert f"train(): {held} of {held + left} parameters" in record.getMessage()
    assert (
        f"(cpu_linear, held_experts), which keep them as they are: only the other {left}"
        in record.getMessage()
    )
    swapped(original, EXPERTS).train()
    assert len(caplog.records) == 2, "another model"


def test_a_trainer_s_log_says_it_too(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """To who has configured no logging: on stderr, where the trainer's own lines are."""
    from transformers import Trainer, TrainingArguments

    random = torch.Generator().manual_seed(0)
    texts = [torch.randint(3, 90, (12,), generator=random) for _ in range(4)]
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=1,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
    )
    model = swapped(models.tiny("qwen3_moe"), EXPERTS, HEAD)
    before = model.lm_head.weight.clone()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logging.getLogger(), "handlers", [])  # pytest's own
        Trainer(model, arguments, train_dataset=[{"input_ids": ids, "labels": ids} for ids in texts]).train()
    assert (
        "are in operators (cpu_linear, held_experts), which keep them as they are" in capfd.readouterr().err
    )
    assert torch.equal(model.lm_head.weight, before)


def test_training_an_adapter_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj", "lm_head"], modules_to_save=["embed_tokens"])
    model = peft.get_peft_model(swapped(models.tiny("qwen3_moe"), EXPERTS, HEAD), config)
    assert any(parameter.requires_grad for parameter in model.parameters())
    model.train()
    assert not [record for record in caplog.records if "train()" in record.getMessage()]


@pytest.mark.parametrize("weights", ["bf16", "int4"])
def test_a_tied_head_stays_tied_in_what_is_saved(weights: str, tmp_path: Path) -> None:
    """The operator's copy is not written, rounded or not: the embedding is."""
    original = tied()
    folder = saved(original, tmp_path / "original")
    model = ktinject.optimize(on_meta(folder), [linear("cpu_linear", "lm_head", weights=weights)])
    assert "lm_head.weight is tied to model.embed_tokens.weight: the operator has a copy" in str(
        model.ktinject
    )
    model.save_pretrained(tmp_path / "again")
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("again", "original"))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert again.lm_head.weight is again.model.embed_tokens.weight


def test_a_head_that_is_no_longer_its_embedding_is_saved_beside_it(tmp_path: Path) -> None:
    original = tied()
    model = swapped(original, HEAD)
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(2)
        model.save_pretrained(tmp_path)
        again = AutoModelForCausalLM.from_pretrained(tmp_path)
        assert torch.equal(again.lm_head.weight, original.lm_head.weight)
        assert torch.equal(again.model.embed_tokens.weight, 2 * original.lm_head.weight)


@pytest.mark.skipif(bool(peft_too_old()), reason=peft_too_old())
def test_an_adapter_is_saved_alone(tmp_path: Path) -> None:
    """What transformers' add_adapter put around operators, rounded ones too."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["lm_head"])
    model = swapped(models.tiny("qwen3_moe"), linear("cpu_linear", "lm_head", weights="int4", group_size=32))
    model.add_adapter(config)
    model.save_pretrained(tmp_path)
    assert sorted(load_file(tmp_path / "adapter_model.safetensors")) == [
        f"base_model.model.lm_head.lora_{part}.weight" for part in "AB"
    ]


def test_what_peft_put_around_an_operator_is_not_saved(tmp_path: Path) -> None:
    """PEFT's own way leaves the model to us."""
    peft = pytest.importorskip("peft")
    model = swapped(models.tiny("qwen3_moe"), HEAD)
    peft.get_peft_model(model, peft.LoraConfig(target_modules=["lm_head"]))
    with pytest.raises(OperatorError, match="cpu_linear is inside the Linear that stands for lm_head now"):
        model.save_pretrained(tmp_path)


def test_a_module_that_took_an_operators_place_is_saved(tmp_path: Path) -> None:
    model = swapped(tied(), HEAD)
    head = torch.nn.Linear(
        model.config.hidden_size, model.config.vocab_size, bias=False, dtype=torch.bfloat16
    )
    model.set_output_embeddings(head)
    model.save_pretrained(tmp_path)
    assert torch.equal(load_file(tmp_path / "model.safetensors")["lm_head.weight"], head.weight)


def test_tying_again_leaves_the_operator_alone() -> None:
    model = swapped(tied(), HEAD)
    before = model(IDS).logits
    for arguments in ({}, {"recompute_mapping": False}):
        model.tie_weights(**arguments)
        assert not list(model.lm_head.parameters()) and torch.equal(model(IDS).logits, before)


@pytest.mark.parametrize("tie", [False, True])
def test_a_head_of_an_operator_is_not_resized(tie: bool) -> None:
    model = swapped(models.tiny("qwen3_moe", tie_word_embeddings=tie), HEAD)
    words, size = model.get_input_embeddings(), model.config.vocab_size
    for unchanged in ({}, {"new_num_tokens": size}, {"pad_to_multiple_of": 1}):
        assert model.resize_token_embeddings(**unchanged).weight.shape == words.weight.shape
    for arguments in ({"new_num_tokens": size + 1}, {"pad_to_multiple_of": size - 1}):
        with pytest.raises(
            OperatorError, match="lm_head is cpu_linear, whose weights cannot get another size"
        ):
            model.resize_token_embeddings(**arguments)
    assert model.get_input_embeddings().weight.shape == words.weight.shape and model.config.vocab_size == size


@pytest.mark.parametrize("tie", [False, True])
def test_other_heads_are(tie: bool) -> None:
    model = swapped(models.tiny("qwen3_moe", tie_word_embeddings=tie), EXPERTS)
    size = model.config.vocab_size + 3
    model.resize_token_embeddings(size)
    assert model(IDS).logits.shape[-1] == size
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tie


def test_a_shallow_copy_is_of_the_models_own_class() -> None:
    original = models.tiny("qwen3_moe")
    model = swapped(original, EXPERTS)
    assert type(copy.copy(model)) is type(original)
