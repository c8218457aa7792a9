"""Loads weights into operators, one tensor at a time, in the order in which they lie on disk.

    checkpoint ── read, decode ──► one tensor or one expert of it ──► operator.load ──► packed; the tensor is freed

Threads read and decode the next tensors while one is packed on all cores (read_ahead.py); or, of operators that allow
it, pack what they have read, each its own, where pieces are small. So memory never holds more than the weights that are
packed already, and what was read ahead, which is bounded.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from ktinject.checkpoints.checkpoint import Checkpoint
from ktinject.checkpoints.formats.base import Stored, check_finite
from ktinject.distributed.tensor_parallel import Cut
from ktinject.errors import CheckpointError
from ktinject.loading.read_ahead import ROOM, Pace, ReadAhead, packing_threads
from ktinject.operators import Operator
from ktinject.planning.plan import Plan

Advance = Callable[[int], None]
_LOADED = object()  # in place of a value that was loaded already


@dataclass(frozen=True, slots=True)
class Portion:
    """What is read of a checkpoint, and loaded into an operator, in one go.

    path, name     of the operator, and of its parameter
    key, index     the weight, and the slice of its first dimension to read; None: all of it
    is_stored      it is loaded without decoding
    expert, part   what of the parameter it is, as `Operator.load` takes them
    """

    path: str
    name: str
    key: str
    index: int | None
    is_stored: bool
    expert: int | None
    part: int | None


class WeightReader:
    """Reads tensors of a checkpoint as floats. Reports the bytes read and, on request, refuses NaN and infinity.

    advance  called with the number of bytes of each tensor after it was read; may be called from several threads
    check    refuse values that are not finite; scales are always checked
    cuts     checkpoint key → the part of the tensor to read; keys that are absent are read whole
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        advance: Advance,
        check: bool = False,
        cuts: Mapping[str, Cut] | None = None,
    ) -> None:
        self._checkpoint = checkpoint
        self._advance = advance
        self._check = check
        self._cuts = cuts or {}

    def __call__(self, key: str, index: int | None = None) -> Tensor:
        """Read a tensor, or its part from `cuts`. With `index`, only that slice of the tensor's first dimension.

        Returns  floats on the CPU; integers (counters, tables of indices) are returned as stored
        Raises   CheckpointError
        """
        cut = self._cuts.get(key)
        if cut is None:
            return self._whole(key, index)
        if cut.dim == 0 and cut.length and self._checkpoint.format_of(key).is_plain:
            tensor = self._checkpoint.read(key, rows=(cut.start, cut.length))
            if self._check:
                check_finite(key, tensor)
            self._advance(tensor.nbytes)
            return tensor
        # The columns of a part are not contiguous on disk, and quantised tensors can only be decoded as a whole.
        return cut.of(self._whole(key, index))

    def _whole(self, key: str, index: int | None) -> Tensor:
        # Integers are not weights but counters and tables of indices, so nothing has to be decoded.
        are_integers = self._checkpoint.holds_integers(key)
        tensor = (self._checkpoint.read if are_integers else self._checkpoint.decode)(key, index)
        if self._check:
            check_finite(key, tensor)
        self._advance(self._checkpoint.bytes_of(key) // (1 if index is None else self.shape(key)[0]))
        return tensor

    def shape(self, key: str) -> tuple[int, ...]:
        """The shape of a whole weight after decoding. Raises CheckpointError."""
        return self._checkpoint.shape(key)

    def portion(self, portion: Portion) -> Any:
        """Read a portion as its operator takes it. Raises CheckpointError."""
        read = self.stored if portion.is_stored else self
        return read(portion.key, portion.index)

    def bytes_of(self, portion: Portion) -> int:
        """Bytes that reading a portion takes, about: as stored and, where it is decoded, as floats."""
        key = portion.key
        if self._checkpoint.holds_integers(key) or self._checkpoint.format_of(key).is_plain:
            return self.stored_bytes_of(portion)
        slices = 1 if portion.index is None else self.shape(key)[0]
        return self.stored_bytes_of(portion) + 4 * prod(self.shape(key)) // slices

    def stored_bytes_of(self, portion: Portion) -> int:
        """Bytes of a portion in the file."""
        whole = self._checkpoint.bytes_of(portion.key)
        return whole if portion.index is None else whole // self.shape(portion.key)[0]

    def is_by_slice(self, key: str) -> bool:
        """Whether a weight that is `encoding_taken` is a stack that can be read so, one matrix at a time."""
        return self._checkpoint.format_of(key).by_slice and key not in self._cuts

    def stored(self, key: str, index: int | None = None) -> Stored:
        """Read a weight that is `encoding_taken`, its part from `cuts`, or a slice. Raises CheckpointError."""
        value = self._checkpoint.stored(key, index)
        self._advance(self._checkpoint.bytes_of(key) // (1 if index is None else self.shape(key)[0]))
        cut = self._cuts.get(key)
        try:
            return value if cut is None else value.narrow(cut.dim, cut.start, cut.length)
        except ValueError as error:
            raise CheckpointError(f"{self._checkpoint.path}: {key}: {error}.") from None


def encoding_taken(operator: Operator, name: str, checkpoint: Checkpoint, key: str) -> str:
    """The encoding in which an operator loads a weight without decoding it; "" if it is decoded.

    name     the operator's parameter that the weight `key` of the checkpoint fills, or a part of it
    Raises   CheckpointError as `Checkpoint.format_of`
    """
    if not operator.takes_codes(name):
        return ""
    form = checkpoint.format_of(key)
    return form.encoding if form.is_taken(operator.native_formats) else ""


def from_checkpoint(
    plan: Plan,
    operators: Mapping[str, Operator],
    model: PreTrainedModel,
    checkpoint: Checkpoint,
    read: WeightReader,
    filled: Collection[str] = (),
) -> Pace:
    """Fill the operators, which are allocated, from a checkpoint, shard by shard; and finish them.

    model    not swapped; only its shapes are used
    read     reads `checkpoint`
    filled   paths of operators that have their weights already
    Returns  how fast it went, and what was waited for
    Raises   CheckpointError, or OperatorError that names rule, module and operator if an operator refuses its weights
    """
    assert plan.mapping is not None
    conversions = plan.mapping.conversions
    wanted = [
        (replacement.path, name)
        for replacement in plan.replacements
        if not replacement.elsewhere and replacement.path not in filled
        for name in replacement.parameter_shapes
    ]
    portions = _portions(plan, wanted, operators, checkpoint, read)
    sizes = {portion: read.bytes_of(portion) for portion in portions}
    threads = packing_threads()
    alone = {
        portion
        for portion, size in sizes.items()
        if threads and operators[portion.path].packs_alone and size * threads <= ROOM
    }

    def load(portion: Portion, value: Any) -> None:
        operator = operators[portion.path]
        with plan.blaming(portion.path):
            load = operator.load_stored if portion.is_stored else operator.load
            load(portion.name, value, portion.expert, portion.part)

    # Of the threads that pack, too: seconds for which each piece was read, and packed.
    reading: list[float] = []
    packing: list[float] = []

    def made(portion: Portion) -> Any:
        if portion not in alone:
            return read.portion(portion)
        start = time.perf_counter()
        value = read.portion(portion)
        middle = time.perf_counter()
        load(portion, value)
        packing.append(time.perf_counter() - middle)
        reading.append(middle - start)
        return _LOADED

    with ReadAhead(portions, made, sizes.__getitem__, threads if alone else None) as ahead:
        for portion, value in ahead:
            if value is not _LOADED:
                load(portion, value)
            del value
    taken = {f"{path}.{name}" for path, name in wanted}
    for first in dict.fromkeys(conversions[name].name for name in taken & conversions.keys()):
        converted = conversions[first].run(read, model)
        for path, name in wanted:
            if (tensor := converted.pop(f"{path}.{name}", None)) is not None:
                _load_whole(plan, path, operators[path], name, tensor)
    _finish(plan, operators)
    pace = ahead.pace(sum(map(read.stored_bytes_of, portions)))
    if not packing:
        return pace
    # A thread that reads does not pack meanwhile, and the other way round.
    return dataclasses.replace(pace, waited=sum(reading) / threads, stalled=sum(packing) / threads)


def _portions(
    plan: Plan,
    wanted: Sequence[tuple[str, str]],
    operators: Mapping[str, Operator],
    checkpoint: Checkpoint,
    read: WeightReader,
) -> list[Portion]:
    """What is read and loaded in one go, in the order in which it lies on disk."""
    assert plan.mapping is not None
    found = []
    for path, name in wanted:
        operator = operators[path]
        for source in plan.mapping.targets.get(f"{path}.{name}", ()):
            key, expert, part = source.key, source.expert, source.part
            stored = bool(encoding_taken(operator, name, checkpoint, key))
            by_slice = read.is_by_slice(key) if stored else True
            if expert is None and operator.per_expert and by_slice:
                experts = range(read.shape(key)[0])
                found += [Portion(path, name, key, index, stored, index, part) for index in experts]
            else:
                found.append(Portion(path, name, key, None, stored, expert, part))
    positions = {key: position for position, key in enumerate(checkpoint.tensors)}
    found.sort(key=lambda portion: positions[checkpoint.tensors_of(portion.key)[0]])
    return found


def from_model(
    plan: Plan,
    operators: Mapping[str, Operator],
    model: PreTrainedModel,
    advance: Advance,
    check: bool = False,
) -> None:
    """Fill the operators, which are allocated, from the weights that the model already has; and finish them.

    advance  called with the number of bytes of each tensor after it was loaded
    check    refuse values that are not finite
    Raises   CheckpointError for a value that is not finite; OperatorError that names rule, module and operator if an
             operator refuses its weights
    """
    for replacement in plan.replacements:
        for name in replacement.parameter_shapes:
            tensor = model.get_parameter_or_buffer(f"{replacement.path}.{name}").detach()
            if check:
                check_finite(f"{replacement.path}.{name}", tensor)
            _load_whole(plan, replacement.path, operators[replacement.path], name, tensor)
            advance(tensor.nbytes)
    _finish(plan, operators)


def allocate(plan: Plan, operators: Mapping[str, Operator]) -> None:
    """Take the memory of all operators. Raises OperatorError that names rule, module and operator."""
    for path, operator in operators.items():
        with plan.blaming(path):
            operator.allocate()


def _load_whole(plan: Plan, path: str, operator: Operator, name: str, tensor: Tensor) -> None:
    with plan.blaming(path):
        if operator.per_expert:
            for expert in range(tensor.shape[0]):
                operator.load(name, tensor[expert].cpu(), expert, None)
        else:
            operator.load(name, tensor.cpu(), None, None)


def _finish(plan: Plan, operators: Mapping[str, Operator]) -> None:
    for path, operator in operators.items():
        with plan.blaming(path):
            operator.finish()
