"""A conversation: what is read anew in a turn, what is written, and what an interrupt leaves."""

from __future__ import annotations

from typing import Any

import models
import pytest
import torch
from byte_tokenizer import tokenizer
from double import EXPERTS
from trained import trained_model
from transformers import AutoTokenizer, PreTrainedModel

import ktinject
from ktinject.errors import PlanError
from ktinject.serving.conversation import Conversation, _Streamer

torch.set_num_threads(1)
ROLES = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
TEMPLATE = ROLES + "{% if add_generation_prompt %}<assistant>{% endif %}"


def swapped(name: str = "qwen3_moe", **config: Any) -> PreTrainedModel:
    model = models.tiny(name, vocab_size=257, eos_token_id=256, pad_token_id=256, **config)
    return ktinject.optimize(model, [EXPERTS], progress=False)


def begun(name: str = "qwen3_moe", template: str | None = TEMPLATE, **arguments: Any) -> Conversation:
    words = tokenizer()
    words.chat_template = template
    return Conversation(swapped(name), words, **{"longest": 8, "do_sample": False, **arguments})


def nothing(text: str) -> None:
    pass


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3", "qwen3_next", "gpt_oss"])
def test_a_turn_reads_what_is_new_and_writes_what_it_would_anyway(name: str) -> None:
    chat, pieces = begun(name), []
    first = chat.ask("What is it?", pieces.append)
    assert first.read == first.prompt and first.tokens == 8 and pieces
    before, new = chat._all, chat._encode("<user>And that?<assistant>")
    second = chat.ask("And that?", nothing)
    assert second.read == 1 + len(new) < second.prompt == len(before) + len(new)
    whole = chat.model.generate(torch.tensor([before + new]), max_new_tokens=8, do_sample=False)
    assert whole[0].tolist() == chat._all
    assert [message["role"] for message in chat.messages] == ["user", "assistant"] * 2


def test_without_a_template_it_goes_on_with_the_text() -> None:
    chat = begun(template=None)
    assert not chat.has_template
    chat.ask("def f(", nothing)
    written = chat.messages[1]["content"]
    assert chat._text.startswith("def f(")
    chat.ask(" more", nothing)
    assert chat._text.startswith(f"def f({written} more") or "\ufffd" in written


def test_other_messages_than_before_are_read_from_where_they_differ() -> None:
    chat = begun(system="Short.")
    chat.ask("What is it?", nothing)
    assert chat.undo() == "What is it?"
    again = chat.ask("What is that?", nothing)
    assert again.read == len("that?<assistant>")
    fresh = begun(system="Short.")
    fresh.ask("What is that?", nothing)
    assert fresh._all == chat._all
    chat.clear()
    assert chat.system == "Short." and chat.messages == [{"role": "system", "content": "Short."}]
    assert chat.undo() is None
    chat.system = None
    assert chat.messages == []


def test_states_that_cannot_be_cut_are_computed_anew() -> None:
    chat = begun("qwen3_next")
    chat.ask("What is it?", nothing)
    chat.undo()
    again = chat.ask("What is that?", nothing)
    assert again.read == again.prompt


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_next"])
def test_an_interrupted_answer_stays_and_the_next_turn_is_right(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat, put = begun(name), _Streamer.put
    chat.ask("What is it?", nothing)

    def interrupt(streamer: Any, value: torch.Tensor) -> None:
        put(streamer, value)
        if len(streamer.tokens) == 3:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(_Streamer, "put", interrupt)
        answer = chat.ask("And that?", nothing)
    assert answer.ended == "interrupted" and answer.tokens == 3
    assert chat.messages[-1] == {"role": "assistant", "content": answer.text}
    next_one = chat.ask("Go on", nothing)
    prompt = torch.tensor([chat._all[: next_one.prompt]])
    assert chat.model.generate(prompt, max_new_tokens=8, do_sample=False)[0].tolist() == chat._all


def test_what_does_not_fit_is_refused_and_the_conversation_goes_on() -> None:
    chat = begun()
    chat.ask("What is it?", nothing)
    before = list(chat.messages)
    with pytest.raises(PlanError, match=r"the conversation has \d+ tokens, and the model was made for"):
        chat.ask("x" * chat.limit, nothing)
    assert chat.messages == before
    assert chat.ask("And that?", nothing).read < 40


@pytest.mark.gpu
def test_on_a_gpu_a_turn_reads_what_is_new() -> None:
    folder = trained_model("tiny-qwen3-moe")
    words = AutoTokenizer.from_pretrained(folder)
    chat = Conversation(
        ktinject.load(folder, devices="cuda:0", progress=False), words, longest=8, do_sample=False
    )
    first = chat.ask("def f(", nothing)
    prompt = torch.tensor([chat._all[: first.prompt]], device="cuda:0")
    assert chat.model.generate(prompt, max_new_tokens=8, do_sample=False)[0].tolist() == chat._all
    before, new = chat._all, chat._encode("    return")
    second = chat.ask("    return", nothing)
    assert second.read == 1 + len(new) < second.prompt == len(before) + len(new)
