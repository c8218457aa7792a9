"""What clients of OpenAI's interface and of `transformers serve` expect, and what a request cannot do to others."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from test_batches import PROMPTS
from test_server import MODEL, TEMPLATE, Running, openai, running
from transformers import AutoTokenizer, GenerationConfig, StopStringCriteria

import ktinject
from ktinject.errors import OperatorError
from ktinject.generation import batching
from ktinject.hf.templates import TemplateError
from ktinject.serving.batches import Batches
from ktinject.serving.gate import Limits
from ktinject.serving.server import Server, Settings

RULES = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role is not known') }}{% endif %}"
    "{% if spins %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}{% endif %}"
    "{{ preface }}"
)
CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
HELLO = [{"role": "user", "content": "class Queue:\n    def"}]
FIELDS: dict[str, dict[str, Any]] = {
    CHAT: {"model": "tiny", "messages": HELLO, "temperature": 0, "max_tokens": 8},
    TEXT: {"model": "tiny", "prompt": HELLO[0]["content"], "temperature": 0, "max_tokens": 8},
    RESPONSES: {"model": "tiny", "input": HELLO[0]["content"], "temperature": 0, "max_output_tokens": 8},
}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    torch.set_num_threads(1)
    model = ktinject.load(MODEL, devices="cpu", progress=False, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    tokenizer.chat_template = RULES + TEMPLATE
    with running(model, tokenizer, most=200, batch=4, limits=Limits(queue=12, key="12345678")) as found:
        yield found


@pytest.fixture
def together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests wait until there are three."""
    barrier, generate = threading.Barrier(3), Batches.generate

    def held(*arguments: Any) -> Any:
        barrier.wait(60)
        return generate(*arguments)

    monkeypatch.setattr(Batches, "generate", held)


def posted(server: Running, path: str, **fields: Any) -> tuple[int, Any]:
    """The status, and the answer; of a stream, its events."""
    status, said = server.get(path, json.dumps({**FIELDS.get(path, {}), **fields}).encode())
    if not said.startswith(("data:", "event:")):
        return status, json.loads(said)
    lines = (line.removeprefix("data: ") for line in said.splitlines() if line.startswith("data: "))
    return status, [json.loads(line) for line in lines if line != "[DONE]"]


def refusal(server: Running, path: str, **fields: Any) -> str:
    status, said = posted(server, path, **fields)
    assert status == 400, said
    return str(said["error"]["message"])


def text(server: Running, path: str, stream: bool = False, **fields: Any) -> tuple[str, str]:
    """Of an answer, and why it ended."""
    status, found = posted(server, path, stream=stream, **fields)
    assert status == 200, found
    if path == RESPONSES and stream:
        return "".join(one["delta"] for one in found if one["type"].endswith("text.delta")), ""
    if path == RESPONSES:
        return found["output"][0]["content"][0]["text"], ""
    if not stream:
        choice = found["choices"][0]
        return choice["text"] if path == TEXT else choice["message"]["content"], choice["finish_reason"]
    choices = [one["choices"][0] for one in found]
    pieces = (one["text"] if path == TEXT else one["delta"].get("content") or "" for one in choices)
    return "".join(pieces), choices[-1]["finish_reason"]


@pytest.mark.parametrize("path", [CHAT, TEXT, RESPONSES])
def test_an_answer_has_the_same_text_whole_and_streamed(server: Running, path: str) -> None:
    want = server.written(str(HELLO[0]["content"]), 8)
    assert want != want.strip(), "else this shows nothing"
    assert text(server, path)[0] == want == text(server, path, stream=True)[0]


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("stream", [False, True])
def test_no_answer_has_the_stop_string(
    server: Running, path: str, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise AssertionError("of a vocabulary's size, and kept for ever")

    monkeypatch.setattr(StopStringCriteria, "__init__", fail)
    whole = server.written(str(HELLO[0]["content"]), 40)
    for at in (5, 17):  # each of several tokens' texts
        stop = whole[at : at + 7]
        asked: dict[str, Any] = {"max_tokens": 40, "stop": ["never there", stop], "stream": stream}
        assert text(server, path, **asked) == (whole[: whole.index(stop)], "stop")
    never = {"max_tokens": 40, "stop": whole[-1] + "and more", "stream": stream}
    assert text(server, path, **never) == (whole, "length"), "what was held back is given at the end"


def test_no_answer_of_a_batch_has_the_stop_string(server: Running, together: None) -> None:
    whole = [server.written(prompt, 40) for prompt in PROMPTS[:3]]
    stops = [one[9:14] for one in whole]
    before = server.server._batches._number
    with ThreadPoolExecutor(3) as clients:
        asked = [
            clients.submit(text, server, TEXT, prompt=prompt, stop=stop, max_tokens=40, stream=number == 1)
            for number, (prompt, stop) in enumerate(zip(PROMPTS, stops))
        ]
        found = [one.result() for one in asked]
    assert found == [(one[: one.index(stop)], "stop") for one, stop in zip(whole, stops)]
    assert server.server._batches._number > before


def test_usage_comes_when_it_is_asked_for_as_a_last_chunk(server: Running) -> None:
    for path in (CHAT, TEXT):
        for options in (None, {}, {"include_usage": False}):
            _, chunks = posted(server, path, stream=True, stream_options=options)
            assert all("usage" not in chunk and chunk["choices"] for chunk in chunks)
        _, chunks = posted(server, path, stream=True, stream_options={"include_usage": True})
        *others, last = chunks
        assert last["choices"] == [] and last["usage"]["completion_tokens"] == 8
        assert all(chunk["usage"] is None and chunk["choices"] for chunk in others)
        assert others[-1]["choices"][0]["finish_reason"] == "length"
        assert "include_usage" in refusal(server, path, stream_options={"include_usage": 1})


def test_clients_of_transformers_serve(server: Running) -> None:
    """As `transformers chat` does it: the model is loaded first, and each request has a generation config."""
    assert posted(server, "/load_model", model="tiny") == (
        200,
        [{"status": "ready", "model": "tiny", "cached": True}],
    )
    assert "this server has 'tiny' alone" in refusal(server, "/load_model", model="org/other")
    assert server.get("/load_model", b"{}")[0] == server.get("/load_model", b"3")[0] == 400
    assert server.get("/load_model")[0] == 405
    config = GenerationConfig()
    config.update(do_sample=False, max_new_tokens=8)
    asked = {"generation_config": config.to_json_string(), "temperature": None, "max_tokens": None}
    want = server.written(str(HELLO[0]["content"]), 8)
    assert text(server, CHAT, stream=True, **asked) == (want, "length")
    asked["generation_config"] = '{"do_sample": true, "top_k": 1, "max_new_tokens": 3}'
    assert server.tokenizer.decode(server.tokenizer(want)["input_ids"][:3]) == text(server, CHAT, **asked)[0]
    asked["generation_config"] = '{"num_beams": 4}'
    assert "generation_config.num_beams: it is not served here" in refusal(server, CHAT, **asked)
    for wrong in ("[]", "{", 3, '{"temperature": -1}', '{"max_new_tokens": 900}'):
        assert refusal(server, CHAT, **{**asked, "generation_config": wrong})


HALF = "\ud83d"


@pytest.mark.parametrize(
    "path, fields, where",
    [
        (CHAT, {"messages": [{"role": "user", "content": f"a{HALF}"}]}, "messages[0].content"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": HALF}]}]}, "content[0].text"),
        (TEXT, {"prompt": HALF}, "prompt"),
        (TEXT, {"stop": ["a", HALF]}, "stop[1]"),
        (RESPONSES, {"input": HALF}, "input"),
        (RESPONSES, {"instructions": HALF}, "instructions"),
        (CHAT, {"model": HALF}, "model"),
        (CHAT, {HALF: 1}, "a name"),
        (CHAT, {"tools": [{"function": {HALF: 1}}]}, "a name"),
        ("/load_model", {"model": HALF}, "model"),
    ],
)  # fmt: skip
def test_half_of_a_character_is_refused(
    server: Running, path: str, fields: dict[str, Any], where: str
) -> None:
    said = refusal(server, path, **fields)
    assert where in said and "\\ud83d" in said
    assert refusal(server, path, **fields, stream=True) == said or path == "/load_model"


def test_a_template_s_own_words_are_a_client_s_to_read(server: Running) -> None:
    system = [{"role": "system", "content": "Be brief."}, *HELLO]
    for stream in (False, True):
        for path, fields in ((CHAT, {"messages": system}), (RESPONSES, {"instructions": "Be brief."})):
            said = refusal(server, path, stream=stream, **fields)
            assert said == "the model's chat template refuses these messages: System role is not known."


@pytest.mark.parametrize(
    "name", ["chat_template", "messages", "tokenize", "conversation", "tools", "return_tensors", "padding",
             "max_length", "bos_token", "add_generation_prompt", "load_audio_from_video", "unknown"],
)  # fmt: skip
def test_a_client_brings_no_template_and_nothing_but_its_variables(server: Running, name: str) -> None:
    value = "{% for i in range(10) %}HELLO{% endfor %}"
    for path in (CHAT, RESPONSES):
        if path == CHAT:
            said = refusal(server, path, chat_template_kwargs={name: value})
            assert said.startswith(f"chat_template_kwargs.{name}: ") and "it has preface, spins" in said


def test_a_template_s_variables_are_set(server: Running) -> None:
    plain, longer = (
        posted(server, CHAT, chat_template_kwargs=more)[1]["usage"]["prompt_tokens"]
        for more in ({}, {"preface": "import os\n" * 9})
    )
    assert longer >= plain + 9


def test_a_template_without_end_is_refused_and_others_go_on(server: Running) -> None:
    with ThreadPoolExecutor(1) as client:
        spinning = client.submit(refusal, server, CHAT, chat_template_kwargs={"spins": True})
        gaps = []
        while not spinning.done():
            began = time.monotonic()
            assert server.get("/health")[0] == 200
            gaps.append(time.monotonic() - began)
            time.sleep(0.02)
    assert "chat template did not end within 1.0 s" in spinning.result()
    assert len(gaps) > 5, "it blocks the event loop"
    assert text(server, CHAT)[0] == server.written(str(HELLO[0]["content"]), 8)


def test_a_server_does_not_start_with_a_template_without_end(server: Running) -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    tokenizer.chat_template = RULES.replace("{% if spins %}", "{% if true %}")
    with pytest.raises(TemplateError, match=r"did not end within 1\.0 s") as refused:
        Server(server.model, tokenizer, "tiny", Settings(port=0))
    assert str(MODEL) in str(refused.value) and "chat_template.jinja" in str(refused.value)


def test_a_prompt_of_megabytes_is_refused_by_its_beginning(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    encode = type(server.tokenizer).__call__

    def counted(self: Any, text: str, **kwargs: Any) -> Any:
        read.append(len(text))
        return encode(self, text, **kwargs)

    monkeypatch.setattr(type(server.tokenizer), "__call__", counted)
    for path, field in ((TEXT, "prompt"), (CHAT, "messages"), (RESPONSES, "input")):
        long: Any = "a " * 1_000_000
        long = [{"role": "user", "content": long}] if path == CHAT else long
        assert "has more than 1024 tokens; there is room for 1024" in refusal(server, path, **{field: long})
    assert sum(read) < 3 * 200_000


def test_next_to_no_temperature_is_greedy_and_ends_nobody_else(
    server: Running,
    together: None,
) -> None:
    want = [server.written(prompt, 8) for prompt in PROMPTS[:3]]
    with ThreadPoolExecutor(3) as clients:
        asked = [
            clients.submit(text, server, TEXT, prompt=prompt, temperature=value)
            for prompt, value in zip(PROMPTS, (0, 1e-38, 5e-324))
        ]
        assert [one.result()[0] for one in asked] == want


def test_a_row_that_is_not_finite_ends_its_request_alone(
    server: Running,
    together: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    want = [server.written(prompt, 40) for prompt in PROMPTS[:3]]
    step, broken = batching._Step.__call__, []

    def breaks(model: Any, **inputs: Any) -> Any:
        found = step(model, **inputs)
        if not broken and found.logits.shape[1] > 1 and inputs["input_ids"].shape[1] < 6:
            broken.append(True)
            found.logits[:, 0] = torch.nan
        return found

    monkeypatch.setattr(batching._Step, "__call__", breaks)
    with ThreadPoolExecutor(3) as clients:
        asked = [clients.submit(posted, server, TEXT, prompt=one, max_tokens=40) for one in PROMPTS[:3]]
        found = [one.result() for one in asked]
    assert broken and sorted(status for status, _ in found) == [200, 200, 500]
    for (status, said), whole in zip(found, want):
        if status == 200:
            assert said["choices"][0]["text"] == whole
        else:
            assert "scores are not finite" in said["error"]["message"]


def test_biases_are_whole_numbers_or_not(server: Running) -> None:
    first = server.tokenizer(server.written(str(HELLO[0]["content"]), 1))["input_ids"][0]
    for path in (CHAT, TEXT):
        plain = text(server, path)[0]
        found = {text(server, path, logit_bias={str(first): bias})[0] for bias in (-100, -100.0)}
        assert len(found) == 1 and plain not in found
        assert text(server, path, logit_bias={})[0] == plain
        count = server.model.config.vocab_size
        for unknown in (str(count), "99999999999"):
            assert f"logit_bias: token {unknown}" in refusal(server, path, logit_bias={unknown: 1})
        for wrong in ({"a": 1}, {"1": 101}, {"9" * 5000: 1}, {"-1": 1}, {"1": "1"}):
            assert "logit_bias: found" in refusal(server, path, logit_bias=wrong)


@pytest.mark.parametrize(
    "fields, said",
    [
        ({"temperature": 10**400}, "temperature: found 1000"),
        ({"temperature": -(10**400)}, "temperature"),
        ({"seed": 10**400}, "seed"),
        ({"stop": "a" * 257}, "stop"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"messages": [{"role": "assistant", "content": "a", "tool_calls": 5}]}, "tool_calls: found 5"),
        ({"messages": [{"role": "assistant", "content": "a", "tool_calls": {"a": 1}}]}, "tool_calls"),
        ({"chat_template_kwargs": 3}, "chat_template_kwargs"),
    ],
)
def test_what_is_refused_by_name(server: Running, fields: dict[str, Any], said: str) -> None:
    assert said in refusal(server, CHAT, **fields)


@pytest.mark.parametrize(
    "item, said",
    [
        ({"type": "function_call", "name": "a", "arguments": "{}"}, r"input[1].call_id"),
        ({"type": "function_call", "call_id": "a", "name": "a", "arguments": "{"}, "input[1].tool_calls"),
        ({"type": "function_call", "call_id": "a", "arguments": "{}"}, "input[1].name"),
        ({"type": "function_call_output", "call_id": "a"}, "input[1].content"),
    ],
)
def test_items_of_responses_are_looked_at(server: Running, item: dict[str, Any], said: str) -> None:
    assert said in refusal(server, RESPONSES, input=[HELLO[0], item])


def test_an_error_in_a_stream_has_the_form_of_an_error(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OperatorError('it says "no"\nand why')

    monkeypatch.setattr(Batches, "generate", fail)
    for path in (CHAT, TEXT):
        status, said = posted(server, path)
        assert status == 500 and said["error"]["message"] == 'it says "no"\nand why'
        _, events = posted(server, path, stream=True)
        assert events[-1] == {"error": {"message": said["error"]["message"], "type": "server_error",
                                        "param": None, "code": 500}}  # fmt: skip
    with pytest.raises(openai.APIError, match='it says "no"'):
        [*server.client.chat.completions.create(model="tiny", messages=HELLO, stream=True)]
