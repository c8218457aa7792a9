"""What a request may say: looked at before the app, which would ignore some of it or fail.

transformers' server drops what it does not know how to do, with a line in its log. Who asked for two answers, or for
JSON, would not learn that they got neither: so that is refused here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

_ROLES = ("system", "developer", "user", "assistant", "tool")
_TEXT = ("text", "input_text", "output_text")


class BadRequest(ValueError):
    """A request that cannot be served as it asks."""


def _number(low: float, high: float, above: bool = False) -> Callable[[Any], bool]:
    """above   low itself is not allowed"""

    def allowed(value: Any) -> bool:
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            return False
        return low <= value <= high and not (above and value == low)

    return allowed


def _count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value < 2**31


def _stop(value: Any) -> bool:
    texts = value if isinstance(value, list) else [value]
    return 0 < len(texts) <= 16 and all(isinstance(text, str) and text for text in texts)


def _bias(value: Any) -> bool:
    return isinstance(value, Mapping) and all(
        str(key).isdecimal() and _number(-100, 100)(bias) for key, bias in value.items()
    )


# Name → what it may be, in words and as a check.
_VALUES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "temperature": ("a number from 0 to 100", _number(0, 100)),
    "top_p": ("a number above 0, at most 1", _number(0, 1, above=True)),
    "frequency_penalty": ("a number above -1, at most 2", _number(-1, 2, above=True)),
    "max_tokens": ("a whole number of at least 1", _count),
    "max_completion_tokens": ("a whole number of at least 1", _count),
    "max_output_tokens": ("a whole number of at least 1", _count),
    "seed": ("a whole number", lambda value: isinstance(value, int) and 0 <= value < 2**63),
    "stop": ("a text, or at most 16", _stop),
    "stream": ("true or false", lambda value: isinstance(value, bool)),
    "logit_bias": ("an object of token ids and numbers from -100 to 100", _bias),
    "tools": ("a list of objects", lambda value: _is_list(value, lambda tool: isinstance(tool, Mapping))),
    "model": ("a name", lambda value: isinstance(value, str)),
    "suffix": ("a text", lambda value: isinstance(value, str)),
    "instructions": ("a text", lambda value: isinstance(value, str)),
    "chat_template_kwargs": ("an object", lambda value: isinstance(value, Mapping)),
}
# Name → what of it changes nothing; anything else asks for what is not done here.
_UNSERVED: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "background": (False,),
    "best_of": (1,),
    "echo": (False,),
    "function_call": (),
    "functions": (),
    "generation_config": (),
    "logprobs": (False, 0),
    "modalities": (["text"],),
    "n": (1,),
    "prediction": (),
    "presence_penalty": (0,),
    "previous_response_id": (),
    "prompt_cache_retention": (),
    "response_format": ({"type": "text"},),
    "text": ({"format": {"type": "text"}},),
    "tool_choice": ("auto",),
    "top_logprobs": (0,),
    "web_search_options": (),
}


def check(path: str, body: Mapping[str, Any]) -> None:
    """Raises BadRequest."""
    for name, neutral in _UNSERVED.items():
        value = body.get(name)
        if value is not None and value not in neutral:
            raise BadRequest(f"{name}: {_short(value)} is not served here. Leave it out.")
    for name, (allowed, is_allowed) in _VALUES.items():
        value = body.get(name)
        if value is not None and not is_allowed(value):
            raise BadRequest(f"{name}: found {_short(value)}; allowed is {allowed}.")
    if path == "/v1/completions":
        if not isinstance(body.get("prompt"), str) or not body["prompt"]:
            raise BadRequest(f"prompt: found {_short(body.get('prompt'))}; needed is one text.")
    elif path == "/v1/chat/completions":
        _check_messages("messages", body.get("messages"))
    else:
        found = body.get("input")
        if not (isinstance(found, str) and found):
            _check_messages("input", found)


def _check_messages(name: str, messages: Any) -> None:
    if not isinstance(messages, list) or not messages:
        raise BadRequest(f"{name}: found {_short(messages)}; needed is a list of messages.")
    for number, message in enumerate(messages):
        where = f"{name}[{number}]"
        if not isinstance(message, Mapping):
            raise BadRequest(
                f"{where}: found {_short(message)}; a message is an object with role and content."
            )
        if name == "input" and message.get("type", "message") != "message":
            continue  # a call of a tool or its result, for which that interface has objects of its own
        if message.get("role") not in _ROLES:
            raise BadRequest(
                f"{where}.role: found {_short(message.get('role'))}; there are {', '.join(_ROLES)}."
            )
        _check_content(where, message)
        for call in message.get("tool_calls") or ():
            _check_call(where, call)


def _check_content(where: str, message: Mapping[str, Any]) -> None:
    content = message.get("content")
    if content is None and message.get("tool_calls"):
        return
    if isinstance(content, str):
        return
    if not _is_list(content, lambda part: isinstance(part, Mapping)):
        raise BadRequest(f"{where}.content: found {_short(content)}; needed is a text, or a list of parts.")
    for part in content or ():
        if part.get("type") not in _TEXT or not isinstance(part.get("text"), str):
            raise BadRequest(f"{where}.content: found {_short(part)}; only parts of text are read here.")


def _check_call(where: str, call: Any) -> None:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if isinstance(function, Mapping) and isinstance(function.get("name"), str):
        given = function.get("arguments")
        try:
            given = json.loads(given) if isinstance(given, str) else given
        except (ValueError, RecursionError):
            given = None
        if isinstance(given, Mapping):
            return
    raise BadRequest(
        f"{where}.tool_calls: found {_short(call)}; a call has a function with a name and arguments as JSON."
    )


def _is_list(value: Any, of: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and all(map(of, value))


def _short(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 80 else f"{text[:80]}…"
