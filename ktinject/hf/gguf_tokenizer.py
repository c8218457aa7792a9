"""A tokenizer of transformers from the vocabulary that a GGUF file keeps.

The file has words, pairs and special tokens. How text is cut before is only a name there: a table says what it means.
Text is not normalised but for Qwen's, which is composed (NFC), and that of "llama" vocabularies, in which blanks are ▁.

Source: the expressions are those of the models' own tokenizer.json, as llama.cpp's src/llama-vocab.cpp cites them under
the same names; Kimi-K2's is that of its tokenization_kimi.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers import models as algorithms
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from ktinject.checkpoints.checkpoint import Vocabulary
from ktinject.errors import CheckpointError, shown

_NORMAL, _CONTROL, _USERS = 1, 3, 4
_MOST_UNMADE = 0.1  # of a vocabulary's words; those of published ones are nearly all made of pairs
_BESIDE = "Put the model's tokenizer files beside the file."

_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_END = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _letters(digits: str) -> str:
    return rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*{_END}"


def _cases(upper: str, lower: str, short: str, digits: str, signs: str) -> str:
    """Words in which upper case comes before lower case."""
    before = r"[^\r\n\p{L}\p{N}]?"
    return rf"{before}{upper}*{lower}+{short}|{before}{upper}+{lower}*{short}|{digits}|{signs}{_END}"


_PUNCTUATION = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    _PUNCTUATION + r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*" + _END,
)
# Letters that have cases; as numbers, since some of them look alike.
_DEEPSEEK_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370"
    "-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-"
    "\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-"
    "\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-"
    "\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4"
    "\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a"
    "-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-"
    "\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-"
    "\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-"
    "\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-"
    "\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?[{_DEEPSEEK_LETTERS}]+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
    r"\p{N}",
)
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = _letters(r"\p{N}{1,3}")
_QWEN2 = _letters(r"\p{N}")
_QWEN35 = (
    rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*{_END}"
)
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_GPT4O = _cases(_UPPER, _LOWER, _SHORT + "?", r"\p{N}{1,3}", _SIGNS)
_TEKKEN = _cases(_UPPER, _LOWER, "", r"\p{N}", _SIGNS)
_NOT_HAN = r"&&[^\p{Han}]]"
_KIMI = r"[\p{Han}]+|" + _cases(
    _UPPER[:-1] + _NOT_HAN, _LOWER[:-1] + _NOT_HAN, _SHORT + "?", r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n]*"
)


class _Split(NamedTuple):
    """How text is cut: by each expression in turn. `words_first`: a piece that is a word is not joined from pairs."""

    expressions: tuple[str, ...]
    words_first: bool = False
    begins: bool = False  # with a token, where the file does not say
    composed: bool = False


_SPLITS: dict[str, _Split] = {
    **dict.fromkeys(
        ("llama3", "llama-v3", "llama-bpe", "pixtral"), _Split((_LLAMA3,), words_first=True, begins=True)
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe"), _Split((_LLAMA3,))),
    **dict.fromkeys(("glm4", "glm5"), _Split((_LLAMA3,), words_first=True)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), _Split((_QWEN2,), composed=True)),
    "qwen35": _Split((_QWEN35,), composed=True),
    **dict.fromkeys(("gpt-4o", "llama4", "minimax-m2"), _Split((_GPT4O,))),
    "tekken": _Split((_TEKKEN,), words_first=True, begins=True),
    "deepseek-v3": _Split(_DEEPSEEK_V3),
    "deepseek-llm": _Split(_DEEPSEEK_LLM),
    "kimi-k2": _Split((_KIMI,)),
    **dict.fromkeys(("gpt-2", "olmo", "mpt"), _Split((_GPT2,))),
    **dict.fromkeys(("starcoder", "refact", "command-r", "smollm"), _Split((r"\p{N}", _GPT2))),
}


def tokenizer(vocabulary: Vocabulary, where: str) -> PreTrainedTokenizerBase:
    """Build it. Raises CheckpointError for what is not known here, or what tokenizers refuses."""
    try:
        if vocabulary.kind == "gpt2":
            made, begins = _by_pairs(vocabulary, where)
        elif vocabulary.kind == "llama":
            made, begins = _by_scores(vocabulary, where)
        else:
            raise CheckpointError(
                f"{where}: its tokenizer is of kind {shown(vocabulary.kind)}; gpt2 and llama are read. {_BESIDE}"
            )
        return _finished(made, vocabulary, vocabulary.flags.get("add_bos_token", begins))
    except CheckpointError:
        raise
    except Exception as error:  # tokenizers' own code on somebody's words
        raise CheckpointError(
            f"{where}: its tokenizer cannot be used: {str(error)[:200].rstrip('. ')}. {_BESIDE}"
        ) from error


def _numbers(vocabulary: Vocabulary) -> dict[str, int]:
    """Word → number; of a word that is there twice the first."""
    found: dict[str, int] = {}
    for number, word in enumerate(vocabulary.words):
        found.setdefault(word, number)
    return found


def _check_bytes(alphabet: Iterable[str], numbers: Mapping[str, int], where: str) -> None:
    """Refuse a vocabulary that lacks words for single bytes: what they stand for in a text would be lost."""
    if absent := sorted(set(alphabet) - numbers.keys()):
        raise CheckpointError(
            f"{where}: its tokenizer has no word for {len(absent)} of the 256 bytes, such as {shown(absent[0])}; text "
            f"would be lost. {_BESIDE}"
        )


def _check_merges(vocabulary: Vocabulary, where: str) -> None:
    """Refuse a vocabulary with words that no pair makes: text would be cut into smaller pieces than the model knows."""
    types = vocabulary.types or (_NORMAL,) * len(vocabulary.words)
    longer = [
        word for word, kind in zip(vocabulary.words, types, strict=True) if kind == _NORMAL and len(word) > 1
    ]
    made = {first + second for first, second in vocabulary.merges}
    unmade = sum(word not in made for word in longer)
    if unmade > _MOST_UNMADE * len(longer):
        raise CheckpointError(
            f"{where}: {unmade:,} of {len(longer):,} words of its tokenizer are made by no merge; some merges are "
            f"missing. {_BESIDE}"
        )


def _by_pairs(vocabulary: Vocabulary, where: str) -> tuple[Tokenizer, bool]:
    split = _SPLITS.get(vocabulary.split)
    if split is None:
        raise CheckpointError(
            f"{where}: its tokenizer cuts text as {shown(vocabulary.split)} does, which is not known. {_BESIDE}"
        )
    numbers = _numbers(vocabulary)
    _check_bytes(pre_tokenizers.ByteLevel.alphabet(), numbers, where)
    _check_merges(vocabulary, where)
    made = Tokenizer(algorithms.BPE(numbers, list(vocabulary.merges), ignore_merges=split.words_first))
    if split.composed:
        made.normalizer = normalizers.NFC()
    cuts: list[Any] = [pre_tokenizers.Split(Regex(each), "isolated") for each in split.expressions]
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    made.decoder = decoders.ByteLevel()
    return made, split.begins


def _by_scores(vocabulary: Vocabulary, where: str) -> tuple[Tokenizer, bool]:
    """As SentencePiece joins: of all pairs that make a word the one with the greatest score first."""
    if not vocabulary.scores:
        raise CheckpointError(f"{where}: its tokenizer has no scores. {_BESIDE}")
    numbers = _numbers(vocabulary)
    _check_bytes([f"<0x{byte:02X}>" for byte in range(256)], numbers, where)
    pairs = []
    for word, number in numbers.items():
        cuts = ((word[:i], word[i:]) for i in range(1, len(word)))
        here = [pair for pair in cuts if pair[0] in numbers and pair[1] in numbers]
        here.sort(key=lambda pair: (numbers[pair[0]], numbers[pair[1]]))
        pairs += [(-vocabulary.scores[number], pair) for pair in here]
    pairs.sort(key=lambda item: item[0])
    unknown = vocabulary.words[vocabulary.tokens["unk"]] if "unk" in vocabulary.tokens else None
    made = Tokenizer(
        algorithms.BPE(
            numbers, [pair for _, pair in pairs], unk_token=unknown, fuse_unk=True, byte_fallback=True
        )
    )
    prefix = vocabulary.flags.get("add_space_prefix", True)
    blanks = normalizers.Replace(" ", "▁")
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), blanks]) if prefix else blanks
    back: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence([*back, *([decoders.Strip(" ", 1, 0)] if prefix else [])])
    return made, True


def _finished(made: Tokenizer, vocabulary: Vocabulary, begins: bool) -> PreTrainedTokenizerBase:
    """With its special tokens, and transformers' face."""
    words = vocabulary.words
    for wanted, special in ((_CONTROL, True), (_USERS, False)):
        found = [
            AddedToken(words[number], normalized=False, special=special)
            for number, kind in enumerate(vocabulary.types)
            if kind == wanted and made.token_to_id(words[number]) == number
        ]
        (made.add_special_tokens if special else made.add_tokens)(found)
    _surround(made, vocabulary, begins)
    named = {f"{name}_token": words[number] for name, number in vocabulary.tokens.items()}
    face = PreTrainedTokenizerFast(tokenizer_object=made, clean_up_tokenization_spaces=False, **named)
    face.chat_template = vocabulary.template
    return face


def _surround(made: Tokenizer, vocabulary: Vocabulary, begins: bool) -> None:
    """Put the tokens around a text that the file asks for."""
    ends = vocabulary.flags.get("add_eos_token", False)
    used = {
        mark: vocabulary.tokens[name]
        for mark, name, is_used in (("<0>", "bos", begins), ("<1>", "eos", ends))
        if is_used and name in vocabulary.tokens
    }
    if not used:
        return
    text = [*(["<0>"] if "<0>" in used else []), "$A", *(["<1>"] if "<1>" in used else [])]
    made.post_processor = processors.TemplateProcessing(
        single=text,
        pair=[*text, *(part.replace("$A", "$B") for part in text)],
        special_tokens=[
            {"id": mark, "ids": [number], "tokens": [vocabulary.words[number]]}
            for mark, number in used.items()
        ],
    )
