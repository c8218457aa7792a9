"""A request becomes tokens: the tokenizer that transformers' handlers are given.

It refuses what does not fit, renders the model's chat template within limits, and gives the message of an answer back
that was made as the answer was written.
"""

from __future__ import annotations

import copy
import functools
import inspect
from typing import Any, cast

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ktinject.hf import compat, templates
from ktinject.serving.answers import Written

# What handlers say beside a template's variables, and what transformers takes with them.
RESERVED = frozenset(
    {*inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters, "load_audio_from_video"}
)


def refused(status: int, message: str) -> Exception:
    """What a handler raises so that a client gets this answer."""
    from fastapi import HTTPException

    return HTTPException(status_code=status, detail=message)


def served(tokenizer: PreTrainedTokenizerBase, context: int) -> PreTrainedTokenizerBase:
    """A copy of a tokenizer that refuses what does not fit, and whose chat template runs within limits."""
    found: Any = copy.copy(tokenizer)
    found.__class__ = _tokenizer_class(type(tokenizer))
    found.ktinject_context = context
    # The first call turns off what tokenizer.json says of lengths, which no other thread may see half done.
    tokenizer("a")
    return found


@cast(Any, functools.cache)
def _tokenizer_class(stock: Any) -> Any:
    class Served(stock):
        def __call__(self, text: str, **kwargs: Any) -> Any:
            room = self.ktinject_context
            found = stock.__call__(self, text, **kwargs)
            count = found["input_ids"].shape[-1]
            if not 0 < count < room:
                raise refused(
                    400, f"the prompt has {count} tokens; there is room for {room}, the answer included."
                )
            return found

        def apply_chat_template(self, conversation: Any, tools: Any = None, **kwargs: Any) -> Any:
            variables = {name: value for name, value in kwargs.items() if name not in RESERVED}
            text = templates.render(self, conversation, tools, variables)
            return self(text, add_special_tokens=False, return_tensors="pt")

        def parse_response(self, response: Written, *_: Any, **__: Any) -> dict[str, Any]:
            return response.message

    Served.__name__, Served.__qualname__ = stock.__name__, stock.__qualname__
    return Served


def keep_prompts_out(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> None:
    """Give a tokenizer a template of answers where transformers has one of the model's type that does not fit.

    It is found by the type of the model, and made for the chat template that such models come with. It takes what
    stands behind a mark as the beginning of the answer. With another chat template there is no such mark, and answers
    would begin with the whole prompt.
    """
    probe = templates.render(tokenizer, [{"role": "user", "content": "a"}])  # refuses one that has no end
    found = compat.get_response_template(tokenizer, model)
    if found is None or "start_anchor" not in found:
        return
    marks = found["start_anchor"]
    if not any(mark in probe for mark in ([marks] if isinstance(marks, str) else marks)):
        ends = model.generation_config.eos_token_id
        ids = ends if isinstance(ends, list) else [tokenizer.eos_token_id if ends is None else ends]
        tokenizer.response_template = {
            "defaults": {"role": "assistant"},
            "start_anchor_pattern": r"\Z",  # where the prompt ends
            "fields": {"content": {"close": tokenizer.convert_ids_to_tokens(ids), "content": "text"}},
        }
