"""The experts of one layer, from a checkpoint to packed weights.

Names are those of Hugging Face checkpoints, whatever model class SGLang has for them: an expert's own matrices in
several spellings, or all experts of a layer in one tensor. GGUF's reader gives the same names. So no model of
transformers is needed here, whose version SGLang chooses.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from ktinject.checkpoints import beside
from ktinject.checkpoints.checkpoint import Checkpoint
from ktinject.checkpoints.formats.base import Format, Fp8Blocks, Nvfp4
from ktinject.errors import CheckpointError, OperatorError
from ktinject.operators import expert_formats
from ktinject.operators.cpu_experts import CpuExperts, CpuExpertsConfig
from ktinject.operators.probes.experts import ExpertsSpec
from ktinject.sglang.arguments import ANEW, Arguments

log = logging.getLogger("ktinject")

_LAYERS = (
    "model.layers.{}",
    "layers.{}",
    "model.language_model.layers.{}",
    "language_model.model.layers.{}",
    "language_model.layers.{}",
)
_GATE_UP_DOWN = ("gate_proj", "up_proj", "down_proj")
_W132 = ("w1", "w3", "w2")
# Where a layer has its experts, and what gate, up and down are called there.
_EACH = (
    (".mlp.experts", _GATE_UP_DOWN),
    (".block_sparse_moe.experts", _W132),  # Mixtral, MiniMax
    (".feed_forward.experts", _W132),  # LFM2
    (".experts", _W132),
    (".ffn.experts", _W132),
)
_TOGETHER = ".mlp.experts"
# What packed weights may be larger than stored ones: bits of an int4 weight with its scale, of int8.
_INT4_BITS, _INT8_BITS = 6.0, 9.0
_CONVERTED = (
    "a folder converted for kt-kernel, whose layout its makers do not document. Give --kt-weight-path the checkpoint "
    "that it was made from, usually the folder of --model-path: weights are packed while they are loaded"
)


class Expert(NamedTuple):
    """Where the weights of an expert are: (parameter, key, slice of the key's first dimension, part)."""

    pieces: tuple[tuple[str, str, int | None, int | None], ...]


class _Opened:
    """A checkpoint that is open as long as layers wait for their weights. All layers of a model have the same."""

    def __init__(self) -> None:
        self._waiting: dict[str, int] = {}
        self._open: dict[str, tuple[Checkpoint, set[str]]] = {}
        self._lock = threading.RLock()

    def wait(self, path: str) -> None:
        """One more layer will take its weights from there."""
        with self._lock:
            self._waiting[path] = self._waiting.get(path, 0) + 1

    @contextmanager
    def take(self, path: str, is_first: bool) -> Iterator[tuple[Checkpoint, set[str]]]:
        """The checkpoint and the names of its weights. is_first: the layer was waiting, and does no more."""
        with self._lock:
            if path not in self._open:
                checkpoint = opened(path)
                self._open[path] = checkpoint, checkpoint.weights
            try:
                yield self._open[path]
            finally:
                if is_first:
                    self._waiting[path] = self._waiting.get(path, 0) - 1
                self._close(path)

    def leave(self, path: str) -> None:
        """A layer that was waiting will not take its weights."""
        with self._lock:
            self._waiting[path] -= 1
            self._close(path)

    def _close(self, path: str) -> None:
        if self._waiting.get(path, 0) <= 0 and path in self._open:
            self._open.pop(path)[0].close()


OPENED = _Opened()


def opened(path: str) -> Checkpoint:
    """Open --kt-weight-path. Raises CheckpointError, also for a folder that was converted for kt-kernel."""
    folder = Path(path)
    if not path or not os.path.exists(folder):
        raise CheckpointError(
            f"--kt-weight-path: {path or 'nothing'}: there is no such file or folder. Give the folder of the "
            "checkpoint, usually that of --model-path; names on the Hub are not resolved."
        )
    if os.path.isdir(folder) and any(name.startswith("_layer_") for name in os.listdir(folder)):
        raise CheckpointError(f"--kt-weight-path: {path}: {_CONVERTED}.")
    checkpoint = Checkpoint.open(folder, _quantization(folder), with_adapter=True)  # as SGLang itself
    if any(".numa." in name for name in checkpoint.names):
        checkpoint.close()
        raise CheckpointError(f"--kt-weight-path: {path}: {_CONVERTED}.")
    return checkpoint


def _quantization(path: Path) -> dict[str, Any] | None:
    """What config.json says of the weights; GGUF says it itself."""
    config = (path if path.is_dir() else path.parent) / "config.json"
    if not config.exists():
        return None
    beside.check_config(config)
    values = json.loads(beside.read(config, beside.MAX_CONFIG_BYTES))
    parts = (values, values.get("text_config") or {})
    return next((part["quantization_config"] for part in parts if part.get("quantization_config")), None)


def spec_of(given: Arguments) -> ExpertsSpec:
    """What the experts compute: SwiGLU."""
    limit, alpha = given.swiglu_limit, given.swiglu_alpha
    return ExpertsSpec(
        num_experts=given.num_experts,
        hidden_size=given.hidden_size,
        intermediate_size=given.intermediate_size,
        has_gate=True,
        has_bias=False,
        is_transposed=False,
        is_concatenated=True,
        activation="silu",
        alpha=alpha or 1.0,
        gate_max=limit or inf,
        up_limit=limit or inf,
        up_offset=1.0 if alpha else 0.0,
    )


def load(given: Arguments, logical: list[int], nodes: int, is_first: bool) -> CpuExperts:
    """The experts of a layer, packed; those of the GPU and of other processes are not read and take no memory.

    logical   place → the checkpoint's number of the expert that belongs there
    nodes     NUMA nodes to cut the weights for; 0: all
    is_first  the layer was announced by `OPENED.wait`
    Raises    CheckpointError, OperatorError
    """
    with OPENED.take(given.weight_path, is_first) as (checkpoint, names):
        made, experts, _ = _chosen(given, checkpoint, names, logical, nodes)
        made.allocate()
        kept: dict[str, Any] = {}
        for place, expert in experts.items():
            for name, key, index, part in expert.pieces:
                _load_piece(made, checkpoint, kept, place, name, key, index, part)
    said = made.describe()
    log.info(
        "layer %d: %d experts as %s, by %s", given.layer_idx, len(experts), said["weights"], said["kernel"]
    )
    return made


def planned(given: Arguments) -> tuple[CpuExperts, dict[str, str]]:
    """What `load` would make of a layer, of headers alone: the experts, without memory, and what becomes of values.

    The second is parameter → "kept", "exact" or "quantised again", as the plan's words are, and for values that are
    stored as they are "kept" or "rounded". The layer must have been announced by `OPENED.wait`.
    Raises  CheckpointError, OperatorError, as `load`
    """
    with OPENED.take(given.weight_path, True) as (checkpoint, names):
        made, experts, formats = _chosen(given, checkpoint, names, [*range(given.num_experts)], 0)
        forms = dict(formats)
        first = next(iter(experts.values()), Expert(()))
        return made, {key: _becomes(made, name, forms[key], part) for name, key, _, part in first.pieces}


def _chosen(
    given: Arguments, checkpoint: Checkpoint, names: set[str], logical: list[int], nodes: int
) -> tuple[CpuExperts, dict[int, Expert], list[tuple[str, Format]]]:
    """The operator, place → where its expert's weights are, and how those of the first one are stored, by key."""
    places = given.held
    find = _finder(checkpoint, names, given, logical[places[0]]) if places else None
    experts = {place: find(logical[place]) for place in places} if find else {}
    formats = [
        (key, checkpoint.format_of(key))
        for expert in [*experts.values()][:1]
        for _, key, _, _ in expert.pieces
    ]
    return CpuExperts(spec_of(given), _config(given, checkpoint, formats, nodes)), experts, formats


def _becomes(made: CpuExperts, name: str, form: Format, part: int | None) -> str:
    if _is_kept(made, name, form, part):
        return "kept"
    weights = made.config.weights
    if weights in form.exact_in:
        return "exact"
    if form.is_plain:
        return "kept" if weights == form.name else f"{form.name}, rounded"
    return f"{form.name}, " + ("rounded to bf16" if weights == "bf16" else "quantised again")


def _is_kept(made: CpuExperts, name: str, form: Format, part: int | None) -> bool:
    """Whether the operator takes a weight as the checkpoint stores it."""
    return (
        made.takes_codes(name) and form.is_taken(made.native_formats) and not made.misfit_of(name, form, part)
    )


def pack(
    given: Arguments, stacks: tuple[Tensor, Tensor, Tensor], logical: list[int], nodes: int
) -> CpuExperts:
    """As `load`, of weights in memory: gate and up [experts, intermediate, hidden], down [experts, hidden, inter…]."""
    h, i = given.hidden_size, given.intermediate_size
    shapes = [list(stack.shape[1:]) for stack in stacks]
    if shapes != [[i, h], [i, h], [h, i]] or len({len(stack) for stack in stacks}) != 1:
        raise OperatorError(
            f"load_weights_from_tensors: found experts of shapes {shapes}; expected {[[i, h], [i, h], [h, i]]}."
        )
    if given.method.weights not in ("bf16", "int8", "int4"):
        raise OperatorError(
            f"load_weights_from_tensors: --kt-method {given.method_name} needs a checkpoint in its own format. "
            "Name AMXINT4, AMXINT8 or BF16."
        )
    made = CpuExperts(spec_of(given), plain_config(given, nodes))
    made.allocate()
    for place in given.held:
        if logical[place] >= len(stacks[0]):
            raise OperatorError(f"load_weights_from_tensors: there is no expert {logical[place]}.")
        for (name, part), stack in zip(
            (("gate_up_proj", 0), ("gate_up_proj", 1), ("down_proj", None)), stacks
        ):
            made.load(name, stack[logical[place]].cpu(), place, part)
    return made


def _load_piece(
    made: CpuExperts,
    checkpoint: Checkpoint,
    kept: dict[str, Any],
    place: int,
    name: str,
    key: str,
    index: int | None,
    part: int | None,
) -> None:
    form = checkpoint.format_of(key)
    if not _is_kept(made, name, form, part):
        made.load(name, checkpoint.decode(key, index), place, part)
        return
    if index is None or form.by_slice:
        made.load_stored(name, checkpoint.stored(key, index), place, part)
        return
    if key not in kept:  # of all experts, and the next one is asked for next
        kept[key] = checkpoint.stored(key)
    stacked = kept[key]
    assert isinstance(stacked, Fp8Blocks | Nvfp4), "integers are stored expert by expert"
    made.load_stored(name, stacked.of_expert(index), place, part)


def _config(
    given: Arguments, checkpoint: Checkpoint, formats: list[tuple[str, Format]], nodes: int
) -> CpuExpertsConfig:
    """How the weights are packed."""
    method, forms = given.method, [form for _, form in formats]
    if wrong := sorted({form.name for form in forms if not method.reads(form)}):
        raise OperatorError(
            f"--kt-method {given.method_name}: {checkpoint.path} has its experts as {', '.join(wrong)}; "
            f"allowed: {', '.join(method.stored)}. {ANEW}."
        )
    config = plain_config(given, nodes)
    if method.weights not in ("kept", "near"):
        return config
    kept = (
        expert_formats.choices(dataclasses.replace(config, weights="kept"), forms)[0][1] if forms else config
    )
    if method.weights == "near" and kept.weights == "bf16":
        return dataclasses.replace(config, **_near(checkpoint, formats, given))
    return kept


def plain_config(given: Arguments, nodes: int) -> CpuExpertsConfig:
    """Without regard to how the checkpoint has the weights."""
    weights = given.method.weights if given.method.weights in ("bf16", "int8", "int4") else "bf16"
    group = _group(given) if weights == "int4" else 128
    return CpuExpertsConfig(weights=weights, group_size=group, numa=nodes or "auto")  # type: ignore[arg-type]


def _group(given: Arguments) -> int:
    """The largest group of inputs with a scale of their own that divides both widths."""
    sizes = given.hidden_size, given.intermediate_size
    return next((size for size in (128, 64) if not any(width % size for width in sizes)), 32)


def _near(checkpoint: Checkpoint, formats: list[tuple[str, Format]], given: Arguments) -> dict[str, Any]:
    """The most accurate format that is not much larger than what the checkpoint has."""
    stored = 8 * sum(
        checkpoint.bytes_of(key) // (shape[0] if len(shape := checkpoint.shape(key)) > 2 else 1)
        for key, _ in formats
    )
    bits = stored / (3 * given.hidden_size * given.intermediate_size)
    if bits <= _INT4_BITS:
        return {"weights": "int4", "group_size": 32}
    return {"weights": "int8" if bits <= _INT8_BITS else "bf16"}


def _finder(checkpoint: Checkpoint, names: set[str], given: Arguments, one: int) -> Callable[[int], Expert]:
    """A function from an expert's number to where its weights are. Raises CheckpointError if there are none.

    one      an expert by whose names the others' are found
    """
    layers = [layer.format(given.layer_idx) for layer in _LAYERS]
    tried = [f"{layer}{place}.{one}.{parts[0]}.weight" for layer in layers for place, parts in _EACH]
    stacked = next(
        (at for at in (f"{layer}{_TOGETHER}" for layer in layers) if f"{at}.gate_up_proj" in names), None
    )
    found = next(
        (
            (layer + place, parts)
            for layer in layers
            for place, parts in _EACH
            if f"{layer}{place}.{one}.{parts[0]}.weight" in names
        ),
        None,
    )
    if stacked is not None:
        return _stacked(checkpoint, names, stacked, given)
    if found is None:
        raise CheckpointError(
            f"--kt-weight-path: {checkpoint.path}: layer {given.layer_idx} has no experts by a name that is known: "
            f"{', '.join(tried[:3])}, … Give the checkpoint of the model that SGLang serves, as Hugging Face has it."
        )
    at, (gate, up, down) = found

    def find(expert: int) -> Expert:
        keys = [f"{at}.{expert}.{part}.weight" for part in (gate, up, down)]
        if absent := [key for key in keys if key not in names]:
            raise _absent(checkpoint, given, expert, absent)
        return Expert(
            (
                ("gate_up_proj", keys[0], None, 0),
                ("gate_up_proj", keys[1], None, 1),
                ("down_proj", keys[2], None, None),
            )
        )

    return find


def _stacked(checkpoint: Checkpoint, names: set[str], at: str, given: Arguments) -> Callable[[int], Expert]:
    keys, h, i = (f"{at}.gate_up_proj", f"{at}.down_proj"), given.hidden_size, given.intermediate_size
    if any(f"{key}_bias" in names for key in keys):
        raise CheckpointError(
            f"--kt-weight-path: {checkpoint.path}: {at} has biases, and SGLang hands over experts without. "
            "Serve this model with all experts on the GPU, or with `ktinject serve`."
        )
    if missing := [key for key in keys if key not in names]:
        raise CheckpointError(f"{checkpoint.path}: {missing[0]} is not in it. Download the checkpoint again.")
    shapes = [checkpoint.shape(key)[1:] for key in keys]
    if shapes != [(2 * i, h), (h, i)]:
        raise CheckpointError(
            f"{checkpoint.path}: {at}: experts of shapes {shapes}; expected {[(2 * i, h), (h, i)]}, gate above up. "
            "Give the checkpoint of the model that SGLang serves."
        )
    count = checkpoint.shape(keys[0])[0]

    def find(expert: int) -> Expert:
        if expert >= count:
            raise _absent(checkpoint, given, expert, [f"{keys[0]}[{expert}]"])
        return Expert((("gate_up_proj", keys[0], expert, None), ("down_proj", keys[1], expert, None)))

    return find


def _absent(checkpoint: Checkpoint, given: Arguments, expert: int, absent: Iterable[str]) -> CheckpointError:
    return CheckpointError(
        f"--kt-weight-path: {checkpoint.path}: layer {given.layer_idx} has no expert {expert} "
        f"({next(iter(absent))}), of {given.num_experts} that SGLang asks for. If shared experts are among them, "
        "start SGLang with --disable-shared-experts-fusion; else give the checkpoint of the model that it serves."
    )


def read_map(physical_to_logical: Tensor | None, count: int) -> list[int]:
    """Place → expert. Raises OperatorError for what is no such map."""
    if physical_to_logical is None:
        return [*range(count)]
    found = physical_to_logical.detach().cpu().flatten().tolist()
    if len(found) != count or any(not 0 <= number < 1 << 16 for number in found):
        raise OperatorError(
            f"load_weights: found a map of {len(found)} places {found[:8]}; expected {count} numbers of experts."
        )
    return [int(number) for number in found]
