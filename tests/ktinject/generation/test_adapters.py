"""LoRA adapters of PEFT beside what was swapped: every request has the adapters that act, however its steps run."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from byte_tokenizer import tokenizer
from double import peft_too_old
from test_generate import prompt, stock
from test_generate import swapped as on_device
from test_native_decoder import sure, swapped
from torch import Tensor
from transformers import PreTrainedModel, TextIteratorStreamer, pipeline

from ktinject import OperatorError
from ktinject.model_class import own_class
from tests.models import tiny

peft = pytest.importorskip("peft")
torch.set_num_threads(1)
ARGUMENTS = {**prompt(), "eos_token_id": None}


def lora(seed: int = 0, **options: Any) -> Any:
    torch.manual_seed(seed)
    given = {"target_modules": ["q_proj", "o_proj", "lm_head"], "r": 4, "init_lora_weights": False, **options}
    return peft.LoraConfig(task_type="CAUSAL_LM", **given)


def two_adapters(model: PreTrainedModel) -> Any:
    """ "default", which acts, and "other"."""
    tuned = peft.get_peft_model(model, lora(0))
    tuned.add_adapter("other", lora(1))
    with torch.no_grad():
        for name, parameter in tuned.named_parameters():
            if "lora_" in name:
                parameter.mul_(10)  # so that other tokens come
    return tuned.eval()


def answers(tuned: Any, arguments: Any = ARGUMENTS) -> dict[str, Tensor]:
    """With each adapter, with none, and with one again."""
    found = {"default": tuned.generate(**arguments)}
    tuned.set_adapter("other")
    found["other"] = tuned.generate(**arguments)
    with tuned.disable_adapter():
        found["none"] = tuned.generate(**arguments)
    tuned.set_adapter("default")
    found["again"] = tuned.generate(**arguments)
    return found


def assert_right(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert torch.equal(found["again"], found["default"])
    kinds = {tuple(found[name].flatten().tolist()) for name in ("default", "other", "none")}
    assert len(kinds) == 3, "the adapters tell"


class TestOnTheCpu:
    @pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
    def test_switched_and_off(self, family: str) -> None:
        model = sure(family)
        plain = model.generate(**ARGUMENTS)
        assert model.ktinject_decoding.last == "native loop"
        targets = {"target_modules": ["kv_a_proj_with_mqa", "o_proj"]} if family == "deepseek_v3" else {}
        tuned = peft.get_peft_model(model, lora(0, **targets))
        tuned.add_adapter("other", lora(1, **targets))
        found, decoding = answers(tuned.eval()), model.ktinject_decoding
        assert torch.equal(found["none"], plain)
        assert dict(decoding.requests) == {"native loop": 2, "eager loop": 3}
        assert decoding.reason.startswith("model.layers.0.self_attn.")
        assert "has the adapter 'default' (PEFT), which native steps do not compute" in decoding.reason
        assert torch.equal(found["default"], stock(model, **ARGUMENTS))
        tuned.delete_adapter("default")
        tuned.delete_adapter("other")
        assert torch.equal(model.generate(**ARGUMENTS), plain)

    def test_merged_and_taken_apart_again(self) -> None:
        model = swapped("qwen3_moe")
        tuned = peft.get_peft_model(model, lora()).eval()
        tuned.merge_adapter()
        tuned.generate(**ARGUMENTS)
        assert model.ktinject_decoding.last == "native loop", "in the weights"
        tuned.unmerge_adapter()
        tuned.generate(**ARGUMENTS)
        assert model.ktinject_decoding.last == "eager loop"

    def test_adapters_of_rows(self) -> None:
        """PEFT puts hooks on layers for them."""
        model = swapped("qwen3_moe")
        tuned = two_adapters(model)
        arguments = {**prompt(2, padding=0), "eos_token_id": None}
        given = {**arguments, "adapter_names": ["default", "other"]}
        found = tuned.generate(**given)
        ours, model.__class__ = type(model), own_class(model)
        assert torch.equal(found, tuned.generate(**given))
        assert not torch.equal(found, tuned.generate(**arguments))
        model.__class__ = ours

    def test_saved_and_loaded(self, tmp_path: Path) -> None:
        model = swapped("qwen3_moe")
        tuned = two_adapters(model)
        wanted = tuned.generate(**ARGUMENTS)
        tuned.save_pretrained(tmp_path, selected_adapters=["default"])
        again = swapped("qwen3_moe")
        assert torch.equal(peft.PeftModel.from_pretrained(again, tmp_path).generate(**ARGUMENTS), wanted)

    @pytest.mark.skipif(bool(peft_too_old()), reason=peft_too_old())
    def test_loaded_by_transformers(self, tmp_path: Path) -> None:
        tuned = two_adapters(swapped("qwen3_moe"))
        wanted = tuned.generate(**ARGUMENTS)
        tuned.save_pretrained(tmp_path, selected_adapters=["default"])
        third = swapped("qwen3_moe")
        plain = third.generate(**ARGUMENTS)
        third.load_adapter(str(tmp_path))
        assert torch.equal(third.generate(**ARGUMENTS), wanted)
        third.disable_adapters()
        assert torch.equal(third.generate(**ARGUMENTS), plain)

    def test_other_kinds_are_not_recorded(self) -> None:
        model = swapped("qwen3_moe")
        tuned = peft.get_peft_model(model, lora(use_dora=True)).eval()
        tuned.generate(**ARGUMENTS)
        assert "has the adapter 'default' with DoraLinearVariant" in model.ktinject_decoding.reason
        model = swapped("qwen3_moe")
        tuned = peft.get_peft_model(
            model, peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[])
        ).eval()
        tuned.generate(**ARGUMENTS)
        assert "is PEFT's Linear; of adapters" in model.ktinject_decoding.reason


class TestOfWhatAnOperatorHolds:
    """PEFT finds no parameter there, and would leave that part out."""

    CONFIG = {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj"]}
    SAYS = r"adapter 'default' of PEFT: it adapts model\.layers\.0\.mlp\.experts\.gate_up_proj, which hybrid_experts"

    @pytest.mark.filterwarnings("ignore:target_parameters")
    def test_refused_and_taken_off(self, tmp_path: Path) -> None:
        peft.get_peft_model(tiny("qwen3_moe").bfloat16(), lora(**self.CONFIG)).save_pretrained(tmp_path)
        model = swapped("qwen3_moe")
        plain = model.generate(**ARGUMENTS)
        with pytest.raises(OperatorError, match=self.SAYS):
            peft.get_peft_model(model, lora(**self.CONFIG))
        with pytest.raises(OperatorError, match=self.SAYS):
            peft.PeftModel.from_pretrained(model, tmp_path)
        with pytest.raises(OperatorError, match=self.SAYS):
            model.load_adapter(str(tmp_path))
        assert not hasattr(model, "peft_config")
        assert torch.equal(model.generate(**ARGUMENTS), plain)
        assert model.ktinject_decoding.last == "native loop"

    @pytest.mark.filterwarnings("ignore:target_parameters")
    def test_refused_beside_another(self) -> None:
        model = swapped("qwen3_moe")
        tuned = peft.get_peft_model(model, lora()).eval()
        wanted = tuned.generate(**ARGUMENTS)
        tuned.add_adapter("more", lora(**self.CONFIG))
        with pytest.raises(OperatorError, match=r"'more'.*delete_adapter\('more'\)"):
            tuned.generate(**ARGUMENTS)
        tuned.delete_adapter("more")
        assert torch.equal(tuned.generate(**ARGUMENTS), wanted)

    def test_experts_by_name(self) -> None:
        with pytest.raises(ValueError, match=r"Target module HybridExperts\(.* is not supported"):
            peft.get_peft_model(swapped("qwen3_moe"), lora(target_modules=["q_proj", "experts"]))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_in_graphs(family: str) -> None:
    """Switched, switched off and written to in place: what is captured has it."""
    model = on_device(family, device="cuda")
    arguments = {
        name: value.cuda() if isinstance(value, Tensor) else value for name, value in ARGUMENTS.items()
    }
    targets = ["q_proj", "o_proj"] if family == "qwen3_moe" else ["q_a_proj", "kv_b_proj", "o_proj"]
    tuned = peft.get_peft_model(model, lora(0, target_modules=targets))
    tuned.add_adapter("other", lora(1, target_modules=targets))
    tuned.eval()
    found, decoding = answers(tuned, arguments), model.ktinject_decoding
    assert dict(decoding.requests) == {"graph loop": 4}, decoding.reason
    wanted: dict[str, Tensor] = {}
    for name in ("default", "other"):
        tuned.set_adapter(name)
        wanted[name] = stock(model, **arguments)
    with tuned.disable_adapter():
        wanted["none"] = stock(model, **arguments)
    assert_right(found, wanted)
    tuned.set_adapter("default")
    tuned.generate(**arguments)
    runners = dict(decoding.runners)
    with torch.no_grad():
        for name, parameter in tuned.named_parameters():
            if "lora_B.default" in name:
                parameter.mul_(-3)
    found = {"now": tuned.generate(**arguments)}
    assert decoding.runners == runners, "nothing was captured again"
    assert torch.equal(found["now"], stock(model, **arguments))
    assert not torch.equal(found["now"], wanted["default"])


def test_friends_of_a_swapped_model() -> None:
    """transformers' pipeline, a chat template, and pieces of text for another thread."""
    words = tokenizer()
    words.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
    model = swapped("qwen3_moe", vocab_size=len(words))
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": words.pad_token_id}
    chat = [{"role": "user", "content": "a question"}]
    given = words.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    ids = model.generate(**given, **options)
    assert model.ktinject_decoding.last == "native loop"
    text = words.decode(ids[0, given["input_ids"].shape[1] :], skip_special_tokens=True)
    write = pipeline("text-generation", model=model, tokenizer=words)
    (answer,) = write(chat, **options)
    assert answer["generated_text"][-1] == {"role": "assistant", "content": text}
    assert model.ktinject_decoding.last == "native loop"
    streamer = TextIteratorStreamer(words, skip_prompt=True, skip_special_tokens=True, timeout=600)
    thread = threading.Thread(target=model.generate, kwargs={**given, **options, "streamer": streamer})
    thread.start()
    assert "".join(streamer) == text
    thread.join()
