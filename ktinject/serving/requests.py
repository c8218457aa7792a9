"""What a request may say: looked at before the app, which would ignore some of it or fail.

transformers' server drops what it does not know how to do, with a line in its log. Who asked for two answers, or for
JSON, would not learn that they got neither: so that is refused here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from typing import Any

from ktinject.serving.answers import LONGEST_STOP, MOST_STOPS

# A temperature below it is greedy, as 0 is: scores divided by less need not be finite, and what is drawn is the most
# likely token anyway.
LEAST_TEMPERATURE = 1e-5
_ROLES = ("system", "developer", "user", "assistant", "tool")
_TEXT = ("text", "input_text", "output_text")


class BadRequest(ValueError):
    """A request that cannot be served as it asks."""


def _number(low: float, high: float, above: bool = False) -> Callable[[Any], bool]:
    """above   low itself is not allowed"""

    def allowed(value: Any) -> bool:
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        # Infinite and NaN are within no bounds, and a whole number may be too long for a float.
        return low <= value <= high and not (above and value == low)

    return allowed


def _count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value < 2**31


def _bool(value: Any) -> bool:
    return isinstance(value, bool)


def _stop(value: Any) -> bool:
    texts = value if isinstance(value, list) else [value]
    return 0 < len(texts) <= MOST_STOPS and all(
        isinstance(text, str) and 0 < len(text) <= LONGEST_STOP for text in texts
    )


def _bias(value: Any) -> bool:
    return isinstance(value, Mapping) and all(
        key.isdecimal() and len(key) < 12 and _number(-100, 100)(bias) for key, bias in value.items()
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
    "stop": (f"a text of at most {LONGEST_STOP} characters, or at most {MOST_STOPS} of them", _stop),
    "stream": ("true or false", _bool),
    "stream_options": (
        "an object, in which include_usage is true or false",
        lambda value: isinstance(value, Mapping) and _bool(value.get("include_usage", False)),
    ),
    "logit_bias": ("an object of token ids and numbers from -100 to 100", _bias),
    "tools": ("a list of objects", lambda value: _is_list(value, lambda tool: isinstance(tool, Mapping))),
    "model": ("a name", lambda value: isinstance(value, str)),
    "suffix": ("a text", lambda value: isinstance(value, str)),
    "instructions": ("a text", lambda value: isinstance(value, str)),
    "chat_template_kwargs": ("an object", lambda value: isinstance(value, Mapping)),
    "generation_config": ("the JSON text of an object", lambda value: isinstance(_object(value), Mapping)),
}
# The same of `generation_config`, by which clients of `transformers serve` say what OpenAI has no names for.
_GENERATION: dict[str, tuple[str, Callable[[Any], bool]]] = {
    **{name: _VALUES[name] for name in ("temperature", "top_p")},
    "max_new_tokens": _VALUES["max_tokens"],
    "do_sample": ("true or false", _bool),
    "top_k": ("a whole number of at least 0", lambda value: value == 0 or _count(value)),
    "min_p": ("a number from 0 to 1", _number(0, 1)),
    "repetition_penalty": ("a number above 0, at most 3", _number(0, 3, above=True)),
}
# Name → what of it changes nothing; anything else asks for what is not done here.
_UNSERVED: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "background": (False,),
    "best_of": (1,),
    "echo": (False,),
    "function_call": (),
    "functions": (),
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


def check(path: str, body: Mapping[str, Any], variables: Collection[str] = ()) -> None:
    """Whether a request can be served as it asks.

    variables  of the model's chat template, which `chat_template_kwargs` may set
    Raises     BadRequest
    """
    _check_characters(body)
    for name, neutral in _UNSERVED.items():
        value = body.get(name)
        if value is not None and value not in neutral:
            raise BadRequest(f"{name}: {short(value)} is not served here. Leave it out.")
    _check_values("", body, _VALUES)
    for name in body.get("chat_template_kwargs") or ():
        if name not in variables:
            known = ", ".join(sorted(variables)) or "none"
            raise BadRequest(
                f"chat_template_kwargs.{name}: the model's chat template has no such variable; it has {known}."
            )
    for name in (asked := generation(body)):
        if name not in _GENERATION:
            raise BadRequest(f"generation_config.{name}: it is not served here. Leave it out.")
    _check_values("generation_config.", asked, _GENERATION)
    if path == "/v1/completions":
        if not isinstance(body.get("prompt"), str) or not body["prompt"]:
            raise BadRequest(f"prompt: found {short(body.get('prompt'))}; needed is one text.")
    elif path == "/v1/chat/completions":
        _check_messages("messages", body.get("messages"))
    else:
        found = body.get("input")
        if not (isinstance(found, str) and found):
            _check_messages("input", found)


def generation(body: Mapping[str, Any]) -> dict[str, Any]:
    """What a request's `generation_config` asks for."""
    asked = _object(body.get("generation_config") or "{}")
    asked.pop("transformers_version", None)
    return {name: value for name, value in asked.items() if value is not None and name[:1] != "_"}


def _check_values(
    where: str, given: Mapping[str, Any], allowed: Mapping[str, tuple[str, Callable[[Any], bool]]]
) -> None:
    for name, (words, is_allowed) in allowed.items():
        value = given.get(name)
        if value is not None and not is_allowed(value):
            raise BadRequest(f"{where}{name}: found {short(value)}; allowed is {words}.")


def _check_characters(body: Mapping[str, Any]) -> None:
    """Refuse halves of characters: JSON can name them one by one, and no text of a prompt or an answer has them."""
    left: list[tuple[str, Any]] = [("", body)]
    while left:
        where, value = left.pop()
        if isinstance(value, str):
            try:
                value.encode()
            except UnicodeEncodeError as error:
                found = ord(value[error.start])
                raise BadRequest(
                    f"{where or 'a name'}: character {error.start} is \\u{found:04x}, half of a character alone. Send "
                    "both halves."
                ) from None
        elif isinstance(value, Mapping):
            left += ((f"{where}.{name}".lstrip("."), one) for name, one in value.items())
            left += (("", name) for name in value)
        elif isinstance(value, list):
            left += ((f"{where}[{number}]", one) for number, one in enumerate(value))


def _check_messages(name: str, messages: Any) -> None:
    if not isinstance(messages, list) or not messages:
        raise BadRequest(f"{name}: found {short(messages)}; needed is a list of messages.")
    for number, message in enumerate(messages):
        where = f"{name}[{number}]"
        if not isinstance(message, Mapping):
            raise BadRequest(
                f"{where}: found {short(message)}; a message is an object with role and content."
            )
        if name == "input" and message.get("type", "message") != "message":
            _check_item(where, message)
            continue
        if message.get("role") not in _ROLES:
            raise BadRequest(
                f"{where}.role: found {short(message.get('role'))}; there are {', '.join(_ROLES)}."
            )
        _check_content(where, message)
        calls = message.get("tool_calls")
        if calls is not None and not isinstance(calls, list):
            raise BadRequest(f"{where}.tool_calls: found {short(calls)}; needed is a list of calls.")
        for call in calls or ():
            _check_call(where, call)


def _check_content(where: str, message: Mapping[str, Any]) -> None:
    content = message.get("content")
    if content is None and message.get("tool_calls"):
        return
    if isinstance(content, str):
        return
    if not _is_list(content, lambda part: isinstance(part, Mapping)):
        raise BadRequest(f"{where}.content: found {short(content)}; needed is a text, or a list of parts.")
    for part in content or ():
        if part.get("type") not in _TEXT or not isinstance(part.get("text"), str):
            raise BadRequest(f"{where}.content: found {short(part)}; only parts of text are read here.")


def _check_item(where: str, item: Mapping[str, Any]) -> None:
    """A call of a tool or its result, for which the interface of responses has objects of its own."""
    kind = item["type"]
    needed = {"function_call": ("call_id", "name"), "function_call_output": ("call_id",)}.get(kind, ())
    for name in needed:
        if not isinstance(item.get(name), str):
            raise BadRequest(f"{where}.{name}: found {short(item.get(name))}; needed is a text.")
    if kind == "function_call":
        _check_call(where, item)
    if kind == "function_call_output":
        _check_content(where, {"content": item.get("output")})


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
        f"{where}.tool_calls: found {short(call)}; a call has a function with a name and arguments as JSON."
    )


def _object(text: Any) -> Any:
    try:
        return json.loads(text) if isinstance(text, str) else None
    except (ValueError, RecursionError):
        return None


def _is_list(value: Any, of: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and all(map(of, value))


def short(value: Any) -> str:
    """What a refusal shows of a value."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 80 else f"{text[:80]}…"
