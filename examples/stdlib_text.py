"""The text that train_tiny.py trains on, CPython's own standard library, and a tokenizer for it."""

from __future__ import annotations

import hashlib
import json
import re
import sysconfig
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

VOCAB = 2048
END, PAD = "<|endoftext|>", "<|pad|>"  # ids 0 and 1

# How text is cut before byte-pair encoding. A line break is always alone, so a prompt may end in one: a token
# that held a line break and the next line's indentation would leave such a prompt without its continuation.
PIECES = r"\n|[ _]?\p{L}+| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|[^\S\n]+(?!\S)|[^\S\n]+"

# Not in the text: packages that are not CPython's, files that differ between builds, and generated tables.
SKIP = re.compile(
    r"(.*/)?(site-packages|dist-packages)/.*|_sysconfigdata.*|config-.*|(encodings|pydoc_data)/.*"
)


def stdlib_files(stdlib: str | Path | None = None) -> list[tuple[str, str]]:
    """The standard library as (path relative to its root, text), sorted by path; what is not UTF-8 is left out."""
    root = Path(stdlib or sysconfig.get_path("stdlib"))
    files = []
    for path in root.rglob("*.py"):
        name = path.relative_to(root).as_posix()
        if SKIP.fullmatch(name):
            continue
        try:
            text = path.read_bytes().decode("utf-8").replace("\r\n", "\n")
        except UnicodeDecodeError:
            continue
        if text.strip():
            files.append((name, text))
    return sorted(files)


def _digest(name: str) -> int:
    return int(hashlib.sha256(name.encode()).hexdigest()[:8], 16)


def split(files: list[tuple[str, str]]) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """(training files, held-out files): a tenth is held out, by the hash of the path alone."""
    heldout = [f for f in files if _digest(f[0]) % 10 == 0]
    return [f for f in files if _digest(f[0]) % 10], heldout


def write_heldout(folder: Path, stdlib: str | Path | None, limit_bytes: int = 200_000) -> None:
    """Write heldout.txt (whole held-out files, about `limit_bytes`) and prompts.jsonl (20, of different files)."""
    files = sorted(split(stdlib_files(stdlib))[1], key=lambda f: _digest(f[0] + "#order"))
    chosen: list[tuple[str, str]] = []
    for name, text in files:
        size_bytes = sum(len(t.encode()) for _, t in chosen) + len(text.encode())
        if 2_000 <= len(text.encode()) <= 30_000 and size_bytes <= limit_bytes:
            chosen.append((name, text))
    prompts = [{"prompt": p, "file": name} for name, text in files if (p := start_of_function(text))][:20]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "heldout.txt").write_text("".join(text for _, text in sorted(chosen)), encoding="utf-8")
    (folder / "prompts.jsonl").write_text("".join(json.dumps(p) + "\n" for p in prompts), encoding="utf-8")


def start_of_function(text: str) -> str | None:
    """From the middle of a file, 40 to 70 lines of whole definitions, then a `def` line and its body's first line."""
    lines = text.split("\n")
    defs = [i for i, line in enumerate(lines) if re.match(r" *(async )?def \w+\(.*\).*:$", line)]
    spans = [(max(starts), end) for end in defs if (starts := [i for i in defs if 40 <= end - i <= 70])]
    if not spans:
        return None
    start, end = spans[len(spans) // 2]
    return "\n".join(lines[start : end + 2]) + "\n"


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE: any text goes in and comes back unchanged."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=VOCAB, special_tokens=[END, PAD], initial_alphabet=alphabet, show_progress=False
        ),
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=END,
        eos_token=END,
        pad_token=PAD,
        clean_up_tokenization_spaces=False,
    )
    # A model that continues text: a chat is the messages' text, as it stands.
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    return tokenizer


def encode(tokenizer: PreTrainedTokenizerFast, texts: list[str], end: bool) -> torch.Tensor:
    """[n] int64: the tokens of all texts, each followed by the end token if `end`."""
    ids: list[int] = []
    for encoding in tokenizer.backend_tokenizer.encode_batch(texts, add_special_tokens=False):
        ids += encoding.ids + [tokenizer.eos_token_id] * end
    return torch.tensor(ids)
