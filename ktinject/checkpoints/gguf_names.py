"""The names of GGUF's tensors as the same model has them in safetensors.

    blk.3.ffn_up_exps.weight [experts, n, k]  ──►  model.layers.3.mlp.experts.{0 …}.up_proj.weight [n, k]
    blk.3.attn_q.weight                       ──►  model.layers.3.self_attn.q_proj.weight
    blk.3.attn_k_b.weight, attn_v_b.weight    ──►  model.layers.3.self_attn.kv_b_proj.weight, made of both

Behind the reader, a GGUF file looks like a safetensors file of the same model. What llama.cpp's converter only renames
is one of the reader's tensors. What it changes keeps its name, and the weight is one of `Named.made`. What a language
model without it computes alike is skipped.

gguf_architectures.py has the tables.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ktinject.checkpoints.files import DOWNLOAD_AGAIN
from ktinject.checkpoints.formats import gguf_blocks
from ktinject.checkpoints.gguf_architectures import ARCHITECTURES, TOP, Architecture
from ktinject.checkpoints.gguf_recipes import Misfit, Recipe, number_of
from ktinject.checkpoints.reader import MAX_TENSORS, Entry, Made
from ktinject.errors import CheckpointError, shown

MAX_EXPERTS = 4096  # of a layer; known models have up to 512
TYPES = ("F32", "F16", "BF16", *gguf_blocks.TYPES)

_IN_LAYER = re.compile(r"blk\.(0|[1-9][0-9]{0,5})\.(.+)")
_OF_EXPERTS = re.compile(r"ffn_(gate|up|down|gate_up)_exps\.weight")
_UNSTACKED = re.compile(r"ffn_(gate|up|down)\.[0-9]+\.weight")
_QKV = re.compile(r"attn_qkv\.(weight|bias)")
ROPE = "rope_freqs.weight"  # its factors, which a config says in another way
_TOWER = re.compile(r"(v|a|mm)\..+")  # for images and sound


class Named(NamedTuple):
    """What the files hold.

    tensors  file → its tensors by the names that they have in safetensors, stacked experts one by one; parts of
             weights and unknown tensors by GGUF's names
    made     weight → what it is made of
    skipped  file → tensors that are not needed
    """

    tensors: dict[str, dict[str, Entry]]
    made: dict[str, Made]
    skipped: dict[str, dict[str, Entry]]


class _Wanted(NamedTuple):
    """A weight that a recipe makes: what it is called, and what its parts' names begin with."""

    name: str
    prefix: str
    recipe: Recipe


def rename(headers: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Entry]]], path: Path) -> Named:
    """Names as in safetensors.

    headers  file → metadata and tensors; of a model in parts, all of them in order
    path     what was opened, for messages
    Raises   CheckpointError for architectures and types that are not served, experts that are not stacked, parts of a
             weight that do not fit, and files that do not belong together
    """
    _check_parts([metadata for metadata, _ in headers.values()], path)
    metadata = next(iter(headers.values()))[0]
    name = metadata.get("general.architecture")
    if name not in ARCHITECTURES:
        raise CheckpointError(
            f"{path}: general.architecture is {shown(name)}; of GGUF, {', '.join(ARCHITECTURES)} are read. "
            "Use the safetensors checkpoint that the file was made from."
        )
    namer = _Namer(name, metadata, path)
    seen: dict[str, str] = {}
    found = Named({}, {}, {})
    for file, (_, tensors) in headers.items():
        needed = {key: entry for key, entry in tensors.items() if not namer.needless(key)}
        found.skipped[file] = {key: entry for key, entry in tensors.items() if key not in needed}
        _check_types(needed, f"{path}: {file}")
        of_file = found.tensors[file] = {}
        for key, entry in (pair for item in needed.items() for pair in namer.named(*item)):
            if len(seen) >= MAX_TENSORS:
                raise CheckpointError(
                    f"{path}: more than {MAX_TENSORS:,} tensors, each expert counted as one. {DOWNLOAD_AGAIN}"
                )
            if key in seen:
                raise CheckpointError(
                    f"{path}: two tensors stand for {shown(key)}, in {seen[key]} and in {file}. {DOWNLOAD_AGAIN}"
                )
            of_file[key], seen[key] = entry, file
    entries = {key: entry for tensors in found.tensors.values() for key, entry in tensors.items()}
    for wanted in namer.wanted.values():
        if wanted.name in entries:
            raise CheckpointError(
                f"{path}: tensor {shown(wanted.name)} is there, and its parts are, too. {DOWNLOAD_AGAIN}"
            )
        found.made[wanted.name] = _made(wanted, entries, namer, path)
    return found


def _check_parts(metadata: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Refuse parts that say themselves that they do not belong together, or that there are more."""
    for number, each in enumerate(metadata):
        said = each.get("split.no", 0), each.get("split.count", 1) or 1
        if said != (number, len(metadata)):
            raise CheckpointError(
                f"{path}: part {number + 1} of {len(metadata)} says it is number {shown(said[0])} (from 0) of "
                f"{shown(said[1])}. Keep the names the files came with (…-00001-of-00003.gguf), and download all."
            )


def _check_types(tensors: Mapping[str, Entry], where: str) -> None:
    if other := {name: entry.dtype for name, entry in tensors.items() if entry.dtype not in TYPES}:
        raise CheckpointError(
            f"{where}: {len(other)} of {len(tensors)} tensors are {', '.join(sorted({*other.values()}))}, such as "
            f"{shown(next(iter(other)))}; of GGUF, {', '.join(TYPES)} are read. Use such a file of the same model, "
            "or the safetensors checkpoint that it was made from."
        )


def _made(wanted: _Wanted, entries: Mapping[str, Entry], namer: _Namer, path: Path) -> Made:
    parts = tuple(wanted.prefix + part for part in wanted.recipe.parts)
    if absent := [part for part in parts if part not in entries]:
        there = next(part for part in parts if part in entries)
        raise CheckpointError(
            f"{path}: tensor {shown(there)} is there, but {shown(absent[0])}, which belongs to it, is not. "
            f"{DOWNLOAD_AGAIN}"
        )
    try:
        shape, make = wanted.recipe.find(namer.number, *(entries[part].shape for part in parts))
    except Misfit as error:
        raise CheckpointError(f"{path}: tensor {shown(parts[0])} {error}. {DOWNLOAD_AGAIN}") from None
    return Made(parts, shape, make, wanted.recipe.by_slice, wanted.recipe.rows)


class _Namer:
    """Names the tensors of one architecture, one after the other, and collects the weights to be made.

    wanted   weight → what is to be made, as far as one of its parts was there
    """

    def __init__(self, name: str, metadata: Mapping[str, Any], path: Path) -> None:
        self._architecture: Architecture = ARCHITECTURES[name]
        self._name, self._metadata = name, metadata
        self._path = path
        self._stems, self._wholes = self._architecture.stems(), self._architecture.wholes()
        self._of_part = {
            part: (weight, recipe)
            for weight, recipe in self._architecture.made.items()
            for part in recipe.parts
        }
        self._of_top = {
            part: (weight, recipe)
            for weight, recipe in self._architecture.top.items()
            for part in recipe.parts
        }
        self.number = number_of(metadata, name)
        self._layers = layers(metadata, name)
        self.wanted: dict[str, _Wanted] = {}

    def needless(self, name: str) -> bool:
        """Whether it is of a tower, the rope's, or of a layer behind the model's, which predicts further tokens."""
        if name == ROPE or _TOWER.fullmatch(name):
            return True
        found = _IN_LAYER.fullmatch(name)
        return bool(found) and self._layers is not None and int(found[1]) >= self._layers  # type: ignore[index]

    def named(self, name: str, entry: Entry) -> Iterator[tuple[str, Entry]]:
        """A tensor's names, and what each of them stands for."""
        found = _IN_LAYER.fullmatch(name)
        if not found:
            yield self._outside(name, entry)
            return
        prefix, layer, inner = f"blk.{found[1]}.", f"model.layers.{found[1]}.", found[2]
        if (fused := _QKV.fullmatch(inner)) and inner not in self._of_part:
            for part, rows in self._cut(name, entry):
                yield self._inside(prefix, layer, f"attn_{part}.{fused[1]}", rows)
        elif self._architecture.experts and (experts := _OF_EXPERTS.fullmatch(inner)):
            yield from self._one_by_one(name, entry, layer, experts[1])
        else:
            yield self._inside(prefix, layer, inner, entry)

    def _outside(self, name: str, entry: Entry) -> tuple[str, Entry]:
        if name in self._of_top:
            weight, recipe = self._of_top[name]
            self.wanted[weight] = _Wanted(weight, "", recipe)
            return name, entry
        stem, _, end = name.rpartition(".")
        return (f"{TOP[stem]}.{end}" if stem in TOP else name), entry

    def _inside(self, prefix: str, layer: str, inner: str, entry: Entry) -> tuple[str, Entry]:
        if inner in self._of_part:
            weight, recipe = self._of_part[inner]
            self.wanted[layer + weight] = _Wanted(layer + weight, prefix, recipe)
            return prefix + inner, entry
        # GGUF drops an outermost extent of one.
        if len(entry.shape) == 1 and inner in self._architecture.flat:
            entry = entry._replace(shape=(1, *entry.shape))
        if inner in self._wholes:
            return layer + self._wholes[inner], entry
        if _UNSTACKED.fullmatch(inner):
            raise CheckpointError(
                f"{self._path}: tensor {shown(prefix + inner)}: experts one by one, as in files from before 2024; "
                "stacked ones are read. Use a newer file of the same model."
            )
        stem, _, end = inner.rpartition(".")
        return (f"{layer}{self._stems[stem]}.{end}" if stem in self._stems else prefix + inner), entry

    def _cut(self, name: str, entry: Entry) -> Iterator[tuple[str, Entry]]:
        """q, k and v of a tensor that has the rows of all three."""
        try:
            heads, groups = self.number("attention.head_count"), self.number("attention.head_count_kv")
            if f"{self._name}.attention.key_length" in self._metadata:
                widths = [self.number(f"attention.{what}_length") for what in ("key", "key", "value")]
            else:
                widths = 3 * [self.number("embedding_length") // heads]
        except Misfit as error:
            raise CheckpointError(f"{self._path}: tensor {shown(name)} {error}. {DOWNLOAD_AGAIN}") from None
        rows = [count * width for count, width in zip((heads, groups, groups), widths)]
        if entry.shape[0] != sum(rows):
            raise CheckpointError(
                f"{self._path}: tensor {shown(name)}: shape {list(entry.shape)}; {sum(rows)} rows are needed. "
                f"{DOWNLOAD_AGAIN}"
            )
        start = 0
        for part, count in zip("qkv", rows):
            yield part, _rows(entry, start, count)
            start += count

    def _one_by_one(self, name: str, entry: Entry, layer: str, which: str) -> Iterator[tuple[str, Entry]]:
        if len(entry.shape) != 3 or (which == "gate_up" and entry.shape[1] % 2):
            raise CheckpointError(
                f"{self._path}: tensor {shown(name)}: shape {list(entry.shape)}; [experts, outputs, inputs] is needed. "
                "Convert the original checkpoint again."
            )
        count, *shape = entry.shape
        if count > MAX_EXPERTS:
            raise CheckpointError(
                f"{self._path}: tensor {shown(name)}: {count} experts; at most {MAX_EXPERTS} are read. {DOWNLOAD_AGAIN}"
            )
        gate, up, down = self._architecture.projections
        names = {"gate": (gate,), "up": (up,), "down": (down,), "gate_up": (gate, up)}[which]
        size, rows = entry.bytes // count, shape[0] // len(names)
        for expert in range(count):
            whole = Entry(entry.dtype, tuple(shape), entry.offset + expert * size, size)
            for part, projection in enumerate(names):
                path = f"{layer}{self._architecture.moe}.{self._architecture.experts}.{expert}.{projection}.weight"
                yield path, _rows(whole, part * rows, rows)


def _rows(entry: Entry, start: int, count: int) -> Entry:
    """Some rows, along the first dimension."""
    size = entry.bytes // entry.shape[0]
    return Entry(entry.dtype, (count, *entry.shape[1:]), entry.offset + start * size, count * size)


def layers(metadata: Mapping[str, Any], architecture: str) -> int | None:
    """Layers of the model, less those that predict further tokens; None if the metadata does not say."""
    count = metadata.get(f"{architecture}.block_count")
    further = metadata.get(f"{architecture}.nextn_predict_layers", 0)
    if type(count) is not int or type(further) is not int or not 0 <= further < count:
        return None
    return count - further
