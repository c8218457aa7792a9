"""Prompts that cannot fit are refused before they become tokens, and none that can."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers
from tokenizers.models import BPE, Unigram, WordLevel
from transformers import AutoTokenizer, PreTrainedTokenizerFast

pytest.importorskip("fastapi", reason="pip install 'ktinject[serve]'")

from ktinject.serving.bounds import bounded, longest_token

MODEL = Path(__file__).parents[3] / "examples/models/tiny-qwen3-moe"
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


def made(model: Any, before: Any = None, normalizer: Any = None) -> PreTrainedTokenizerFast:
    backend = Tokenizer(model)
    backend.pre_tokenizer = before
    if normalizer is not None:
        backend.normalizer = normalizer
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def of_bytes(*merged: str, **arguments: Any) -> Any:
    words = [*ALPHABET, *merged]
    merges = [(word[:-1], word[-1]) for word in merged]
    return BPE({word: number for number, word in enumerate(words)}, merges, **arguments)


BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False)


def test_no_text_of_fewer_tokens_is_longer_than_the_bound() -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    longest = longest_token(tokenizer)
    assert longest is not None
    draw, words = random.Random(0), [*tokenizer.get_vocab()]
    for _ in range(50):
        ids = [tokenizer.get_vocab()[draw.choice(words)] for _ in range(20)]
        for text in (tokenizer.decode(ids), "".join(map(chr, draw.choices(range(32, 0x2FFF), k=50)))):
            count = len(tokenizer(text, add_special_tokens=False)["input_ids"])
            assert len(text) <= longest * count


@pytest.mark.parametrize(
    "tokenizer, longest",
    [
        (made(of_bytes("ab", "abc"), BYTES), 3),
        (made(of_bytes("ab"), BYTES, normalizers.NFC()), 8),
        (made(of_bytes("ab"), pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(" "), "isolated"), BYTES])), 2),
        (made(of_bytes("ab"), pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(" "), "removed"), BYTES])), None),
        (made(of_bytes("ab"), BYTES, normalizers.Strip()), None),
        (made(of_bytes("ab"), BYTES, normalizers.Replace("aa", "a")), None),
        (made(BPE({"a": 0}, []), BYTES), None),
        (made(BPE({"a": 0, "?": 1}, [], unk_token="?", fuse_unk=True)), None),
        (made(WordLevel({"a": 0, "?": 1}, unk_token="?"), pre_tokenizers.Whitespace()), None),
        (made(Unigram([("?", 0.0), ("a", -1.0)], unk_id=0)), None),
    ],
)  # fmt: skip
def test_where_a_token_may_stand_for_any_text_there_is_no_bound(tokenizer: Any, longest: int | None) -> None:
    assert longest_token(tokenizer) == longest


def test_a_long_text_is_refused_without_a_token_and_one_that_fits_is_as_it_was() -> None:
    tokenizer = made(of_bytes("ab", "abc"), BYTES)
    found: Any = bounded(tokenizer, 10)
    for text in ("abc" * 10, "abc", "x"):
        assert found(text)["input_ids"] == tokenizer(text)["input_ids"]
    with pytest.raises(Exception) as refused:
        found("abc" * 20_000_000)
    assert refused.value.status_code == 400 and "there is room for 10" in refused.value.detail  # type: ignore[attr-defined]
    with pytest.raises(Exception, match="room for 10"):
        found("abcx" * 20)
    assert type(found).__name__ == type(tokenizer).__name__ and tokenizer("abcx" * 20)["input_ids"]
