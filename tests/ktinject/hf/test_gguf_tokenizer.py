"""Tokenizers from the vocabulary in a GGUF file: the same numbers as the tokenizer that it was written from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

from ktinject.cli import options
from ktinject.errors import CheckpointError
from ktinject.hf import gguf_tokenizer

gguf = pytest.importorskip("gguf")
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
TEXT = "The theory: they're 1234 things, and äöü or 日本語 — IT'S 12 in\n\n  the\tother.  <think>no</think>"
CORPUS = [TEXT, "other theories, there, then, and others; it is what it is", "12 123 1234"] * 3


def written(folder: Path, words: list[str], **more: Any) -> Path:
    file = folder / "a.gguf"
    writer = gguf.GGUFWriter(file, "qwen3moe")
    writer.add_tokenizer_model(more.pop("kind", "gpt2"))
    writer.add_tokenizer_pre(more.pop("split", "qwen2"))
    writer.add_token_list(words)
    for name, value in more.items():
        getattr(writer, f"add_{name}")(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def trained() -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.normalizer = normalizers.NFC()
    byte = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), "isolated"), byte]
    )
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, show_progress=False)
    )
    made.add_tokens(["<think>", "</think>"])
    made.add_special_tokens(["<|end|>"])
    return made


def test_pairs_over_bytes(tmp_path: Path) -> None:
    made = trained()
    state = json.loads(made.to_str())
    words = [made.id_to_token(number) for number in range(made.get_vocab_size())]
    types = [4 if word.endswith("think>") else 3 if word == "<|end|>" else 1 for word in words]
    end = made.token_to_id("<|end|>")
    file = written(
        tmp_path,
        words,
        token_types=types,
        token_merges=[" ".join(pair) for pair in state["model"]["merges"]],
        eos_token_id=end,
        bos_token_id=end,
        chat_template="{{ messages[0]['content'] }}",
    )
    found = options.load_tokenizer(file)
    assert found(TEXT)["input_ids"] == made.encode(TEXT).ids and found.decode(made.encode(TEXT).ids) == TEXT
    assert len(made.encode(TEXT).ids) < len(TEXT.encode()), "pairs were joined"
    assert found("the<|end|>")["input_ids"][-1] == end and found.eos_token == "<|end|>"
    assert found.decode([*made.encode("then").ids, end], skip_special_tokens=True) == "then"
    assert found.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi"
    (tmp_path / "b").mkdir()
    merges = [" ".join(pair) for pair in state["model"]["merges"]]
    first = written(tmp_path / "b", words, token_merges=merges, bos_token_id=end, add_bos_token=True)
    assert options.load_tokenizer(first)("then")["input_ids"] == [end, *made.encode("then").ids]


def test_words_with_scores(tmp_path: Path) -> None:
    """As SentencePiece's: the pair whose word has the greatest score first; what has no word is bytes."""
    words = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        *"▁thea",
        "th",
        "▁t",
        "▁th",
        "he",
        "▁the",
    ]
    scores = [0.0] * 259 + [-20.0] * 5 + [-4.0, -3.0, -2.0, -1.0, -5.0]
    types = [2, 3, 3, *([6] * 256), *([1] * 10)]
    file = written(
        tmp_path, words, kind="llama", split="default", token_scores=scores, token_types=types, bos_token_id=1,
        eos_token_id=2, unk_token_id=0,
    )  # fmt: skip
    found = options.load_tokenizer(file)
    numbers = found("the tea é")["input_ids"]
    assert [words[n] for n in numbers[:4]] == ["<s>", "▁the", "▁t", "e"]
    # "he" is joined before "th", which leaves no word that has both.
    assert [words[n] for n in found("athe")["input_ids"][1:]] == ["▁", "a", "t", "he"]
    assert [words[n] for n in numbers[-2:]] == ["<0xC3>", "<0xA9>"]
    assert found.decode(numbers, skip_special_tokens=True) == "the tea é"


@pytest.mark.parametrize("split", sorted(gguf_tokenizer._SPLITS))
def test_every_way_to_split_keeps_the_text(split: str, tmp_path: Path) -> None:
    found = options.load_tokenizer(written(tmp_path, ALPHABET, split=split))
    assert found.decode(found(TEXT, add_special_tokens=False)["input_ids"]) == TEXT
    pieces = [
        piece for piece, _ in found.backend_tokenizer.pre_tokenizer.pre_tokenize_str("it's 1234 日本 end")
    ]
    assert len(pieces) >= 4 and pieces[0] in ("it", "it's")


@pytest.mark.parametrize(
    "more, words",
    [
        ({"split": "nobody's"}, r"cuts text as \"nobody's\" does, which is not known"),
        ({"kind": "bert"}, "of kind 'bert'; gpt2 and llama are read"),
        ({"kind": "llama"}, "has no scores"),
        ({"words": [*ALPHABET, "ab"], "token_merges": ["a q", "a b"]}, "its tokenizer cannot be used: "),
        ({}, "no word for 254 of the 256 bytes, such as"),
        ({"words": [*ALPHABET, "ab", "cd"]}, "2 of 2 words of its tokenizer are made by no merge"),
        (
            {"words": [*ALPHABET, "ab", "cd"], "token_merges": ["a b"]},
            "1 of 2 words of its tokenizer are made by",
        ),
        (
            {"kind": "llama", "token_scores": [0.0, -1.0]},
            "no word for 256 of the 256 bytes, such as '<0x00>'",
        ),
        ({"kind": "llama", "token_scores": [0.0, float("nan")]}, "scores has a value that is not finite"),
        ({"token_merges": ["ab"]}, "has 'ab'; two words with a blank"),
        ({"token_types": [1]}, "has 1 values, for 2 words"),
        ({"eos_token_id": 2}, "eos_token_id is 2, of 2 words"),
    ],
)
def test_vocabularies_that_are_refused(more: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=words):
        options.load_tokenizer(written(tmp_path, **{"words": ["a", "b"], **more}))


def test_a_file_without_a_vocabulary_says_so(tmp_path: Path) -> None:
    file = written(tmp_path, ["a"], kind="no_vocab")
    with pytest.raises(CheckpointError, match=r"a\.gguf: it holds no tokenizer, nor does its folder"):
        options.load_tokenizer(file)
