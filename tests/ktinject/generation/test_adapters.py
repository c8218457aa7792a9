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

import ktinject
from ktinject import OperatorError, PlanError
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

    def test_what_does_not_act_keeps_no_request_from_native_steps(self) -> None:
        """DoRA that is off or merged; and one that was added to a model in evaluation mode, in training mode itself."""
        model = swapped("qwen3_moe")
        tuned = peft.get_peft_model(model, lora(use_dora=True)).eval()
        tuned.add_adapter("other", lora(1, lora_dropout=0.5))
        assert not tuned.training and any(module.training for module in tuned.modules())
        with tuned.disable_adapter():
            tuned.generate(**ARGUMENTS)
        assert model.ktinject_decoding.last == "native loop", model.ktinject_decoding.reason
        tuned.merge_adapter()
        tuned.generate(**ARGUMENTS)
        assert model.ktinject_decoding.last == "native loop", model.ktinject_decoding.reason
        tuned.unmerge_adapter()
        tuned.set_adapter("other")
        tuned.generate(**ARGUMENTS)
        reason = model.ktinject_decoding.reason
        assert "has the adapter 'other' (PEFT)" in reason, reason


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


def changed(tuned: Any) -> Any:
    """Whatever is trained moves, so that a part that is lost shows."""
    with torch.no_grad():
        for _, parameter in sorted(tuned.named_parameters()):
            if parameter.requires_grad:
                noise = torch.randn(
                    parameter.shape, generator=torch.Generator().manual_seed(parameter.numel())
                )
                parameter.add_((0.1 * noise).to(parameter.dtype))
    return tuned.eval()


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(input_ids=ARGUMENTS["input_ids"]).logits.float()
    return found


def off(found: Tensor, want: Tensor) -> float:
    return ((found - want).norm(dim=-1) / want.norm(dim=-1)).median().item()


ONE = ["o_proj"]
KINDS: dict[str, Any] = {
    "ia3": lambda: peft.IA3Config(target_modules=["q_proj", "o_proj"], feedforward_modules=ONE),
    "oft": lambda: peft.OFTConfig(r=0, oft_block_size=4, target_modules=ONE),
    "vera": lambda: peft.VeraConfig(r=4, target_modules=ONE),
    "loha": lambda: peft.LoHaConfig(r=4, target_modules=ONE),
    "lokr": lambda: peft.LoKrConfig(r=4, target_modules=ONE),
    "boft": lambda: peft.BOFTConfig(boft_block_size=4, target_modules=ONE),
    "hra": lambda: peft.HRAConfig(r=4, target_modules=ONE),
    "fourier": lambda: peft.FourierFTConfig(n_frequency=20, target_modules=ONE),
    "miss": lambda: peft.MissConfig(r=4, target_modules=ONE),
    "shira": lambda: peft.ShiraConfig(r=2, target_modules=ONE, random_seed=3),
    "randlora": lambda: peft.RandLoraConfig(r=4, target_modules=ONE),
    "norms": lambda: peft.LNTuningConfig(target_modules=["input_layernorm", "norm"]),
    "dora": lambda: lora(use_dora=True),
    **{
        name: (lambda name=name: lora(modules_to_save=[name]))
        for name in ("lm_head", "norm", "gate", "experts")
    },
}
QUICK = ("ia3", "oft", "norms", "lm_head", "norm")
ALL = [pytest.param(name, marks=() if name in QUICK else pytest.mark.nightly) for name in KINDS]


class TestBesideTheUnswappedModel:
    """Trained on the unswapped model, put on the swapped one, merged into it, and taken off it."""

    @pytest.mark.filterwarnings("ignore")
    @pytest.mark.parametrize("kind", ALL)
    def test_of_every_kind(self, kind: str, tmp_path: Path) -> None:
        original = tiny("qwen3_moe", num_experts_per_tok=6).bfloat16().eval()
        plain = logits(original)
        tuned = changed(peft.get_peft_model(original, KINDS[kind]()))
        tuned.save_pretrained(tmp_path)
        wanted = logits(tuned)
        assert off(wanted, plain) > 0.08, "it makes a difference"
        model = swapped_as_it_is("qwen3_moe")
        before = logits(model)
        loaded = peft.PeftModel.from_pretrained(model, tmp_path).eval()
        assert off(logits(loaded), wanted) < 0.03
        merged = loaded.merge_and_unload()
        assert off(logits(merged), wanted) < 0.03
        assert not any(type(module).__module__.startswith("peft") for module in merged.modules())
        model = swapped_as_it_is("qwen3_moe")
        taken_off = peft.PeftModel.from_pretrained(model, tmp_path).unload()
        if kind not in ("lm_head", "norm", "gate", "experts"):  # of which PEFT leaves the trained copy
            assert torch.equal(logits(taken_off), before)
            taken_off.generate(**ARGUMENTS)
            assert model.ktinject_decoding.last == "native loop"

    def test_a_saved_module_is_trained_and_the_operator_is_not(self) -> None:
        model = swapped_as_it_is("qwen3_moe")
        tuned = peft.get_peft_model(model, lora(modules_to_save=["lm_head", "norm"]))
        held = tuned.base_model.model.lm_head
        assert type(held.modules_to_save["default"]) is torch.nn.Linear
        before = held.original_module.weight.clone()
        tuned(input_ids=ARGUMENTS["input_ids"], labels=ARGUMENTS["input_ids"]).loss.backward()
        for module in (held, tuned.base_model.model.model.norm):
            assert module.modules_to_save["default"].weight.grad.abs().sum() > 0
        changed(tuned)
        assert torch.equal(held.original_module.weight, before)

    @pytest.mark.filterwarnings("ignore")
    @pytest.mark.parametrize("bias", ["all", "lora_only"])
    def test_biases(self, bias: str, tmp_path: Path) -> None:
        original = tiny("gpt_oss", num_experts_per_tok=6).bfloat16().eval()
        tuned = changed(peft.get_peft_model(original, lora(bias=bias)))
        tuned.save_pretrained(tmp_path)
        loaded = peft.PeftModel.from_pretrained(swapped_as_it_is("gpt_oss"), tmp_path).eval()
        assert off(logits(loaded), logits(tuned)) < 0.03
        model = swapped_as_it_is("gpt_oss")
        before = logits(model)
        says = (
            rf"adapter 'default' of PEFT: bias='{bias}' trains .*bias, which an operator holds.*replace: keep"
        )
        with pytest.raises(OperatorError, match=says):
            peft.get_peft_model(model, lora(bias=bias))
        assert not hasattr(model, "peft_config") and torch.equal(logits(model), before)

    def test_a_model_with_an_adapter_is_not_swapped(self) -> None:
        model = tiny("qwen3_moe").bfloat16()
        peft.get_peft_model(model, lora())
        with pytest.raises(
            PlanError, match=r"has an adapter of PEFT \(model\.layers\.0\.self_attn\.q_proj\)"
        ):
            ktinject.optimize(model, "auto", devices="cpu", progress=False)


def swapped_as_it_is(family: str) -> PreTrainedModel:
    model = tiny(family, num_experts_per_tok=6).bfloat16()
    return ktinject.optimize(model, "auto", devices="cpu", progress=False).eval()


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
