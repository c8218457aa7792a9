"""What a request may say, and what is said to those that say something else."""

from __future__ import annotations

from typing import Any

import pytest

from ktinject.serving.requests import BadRequest, check

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello"}]
CALL = {"id": "a", "type": "function", "function": {"name": "now", "arguments": "{}"}}

GOOD: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": HELLO, "n": 1, "stop": "a", "temperature": 0, "top_p": 1, "tool_choice": "auto", "seed": 1}),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}], "user": "me"}),
    (CHAT, {"messages": [*HELLO, {"role": "assistant", "content": None, "tool_calls": [CALL]},
                         {"role": "tool", "tool_call_id": "a", "content": "noon"}], "tools": [{}]}),
    (CHAT, {"messages": HELLO, "response_format": {"type": "text"}, "stream_options": {"include_usage": True}}),
    ("/v1/completions", {"prompt": "a", "stop": ["a", "b"], "echo": False, "logprobs": None}),
    ("/v1/responses", {"input": "a", "instructions": "b", "text": {"format": {"type": "text"}}}),
    ("/v1/responses", {"input": [{"type": "function_call_output", "call_id": "a", "output": "b"}]}),
]  # fmt: skip


@pytest.mark.parametrize("path, body", GOOD)
def test_what_is_served(path: str, body: dict[str, Any]) -> None:
    check(path, body)


BAD: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {}, "messages: found null"),
    (CHAT, {"messages": "hello"}, "messages: found"),
    (CHAT, {"messages": ["hello"]}, r"messages\[0\]: found"),
    (CHAT, {"messages": [{"role": "god", "content": "a"}]}, "role: found .*god.*there are system"),
    (CHAT, {"messages": [{"role": "user"}]}, "content: found null"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "only parts of text"),
    (CHAT, {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": "{"}}]}]},
     "a call has a function with a name"),
    (CHAT, {"messages": HELLO, "n": 2}, "n: 2 is not served here"),
    (CHAT, {"messages": HELLO, "logprobs": True}, "logprobs: true is not served"),
    (CHAT, {"messages": HELLO, "response_format": {"type": "json_object"}}, "response_format"),
    (CHAT, {"messages": HELLO, "tool_choice": "required"}, "tool_choice"),
    (CHAT, {"messages": HELLO, "generation_config": "{"}, "generation_config: found"),
    (CHAT, {"messages": HELLO, "generation_config": '{"max_time": 3}'}, "generation_config.max_time: it is not"),
    (CHAT, {"messages": HELLO, "temperature": -1}, "temperature: found -1; allowed is a number from 0"),
    (CHAT, {"messages": HELLO, "temperature": float("nan")}, "temperature: found NaN"),
    (CHAT, {"messages": HELLO, "temperature": "1"}, "temperature"),
    (CHAT, {"messages": HELLO, "top_p": 0}, "top_p: found 0"),
    (CHAT, {"messages": HELLO, "max_tokens": 0}, "max_tokens: found 0"),
    (CHAT, {"messages": HELLO, "max_tokens": True}, "max_tokens: found true"),
    (CHAT, {"messages": HELLO, "frequency_penalty": -1}, "frequency_penalty"),
    (CHAT, {"messages": HELLO, "stop": []}, "stop"),
    (CHAT, {"messages": HELLO, "stop": [""]}, "stop"),
    (CHAT, {"messages": HELLO, "seed": -1}, "seed"),
    (CHAT, {"messages": HELLO, "stream": "yes"}, "stream"),
    (CHAT, {"messages": HELLO, "tools": {}}, "tools"),
    (CHAT, {"messages": HELLO, "logit_bias": {"a": 1}}, "logit_bias"),
    ("/v1/completions", {}, "prompt: found null; needed is one text"),
    ("/v1/completions", {"prompt": ["a", "b"]}, "prompt"),
    ("/v1/completions", {"prompt": ""}, "prompt"),
    ("/v1/completions", {"prompt": "a", "echo": True}, "echo: true is not served"),
    ("/v1/responses", {"input": ""}, "input"),
    ("/v1/responses", {"input": "a", "previous_response_id": "b"}, "previous_response_id"),
]  # fmt: skip


@pytest.mark.parametrize("path, body, message", BAD)
def test_what_is_refused_says_why(path: str, body: dict[str, Any], message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        check(path, body)
