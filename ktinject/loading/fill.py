"""Loads weights into operators, one tensor at a time, in the order in which they lie on disk.

    checkpoint ── read, decode ──► one tensor or one expert of it ──► operator.load ──► packed; the tensor is freed

So memory never holds more than the weights that are packed already, one tensor as stored, and its decoded copy.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from ktinject.checkpoints.checkpoint import Checkpoint
from ktinject.checkpoints.formats.base import Stored, check_finite
from ktinject.distributed.tensor_parallel import Cut
from ktinject.errors import CheckpointError
from ktinject.operators import Operator
from ktinject.planning.plan import Plan

Advance = Callable[[int], None]


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

    def stored(self, key: str, takes: Collection[str]) -> Stored | None:
        """Read a weight without decoding it, or its part from `cuts`.

        takes    the encodings that the operator loads without decoding
        Returns  None if the weight is stored in another one
        Raises   CheckpointError
        """
        if not takes or not self._checkpoint.format_of(key).is_taken(takes):
            return None
        value = self._checkpoint.stored(key)
        self._advance(self._checkpoint.bytes_of(key))
        cut = self._cuts.get(key)
        try:
            return value if cut is None else value.narrow(cut.dim, cut.start, cut.length)
        except ValueError as error:
            raise CheckpointError(f"{self._checkpoint.path}: {key}: {error}.") from None


def from_checkpoint(
    plan: Plan,
    operators: Mapping[str, Operator],
    model: PreTrainedModel,
    checkpoint: Checkpoint,
    read: WeightReader,
) -> None:
    """Fill the operators from a checkpoint, shard by shard.

    model    not swapped; only its shapes are used
    read     reads `checkpoint`
    Raises   CheckpointError, or OperatorError that names rule, module and operator if an operator refuses its weights
    """
    assert plan.mapping is not None
    targets, conversions = plan.mapping.targets, plan.mapping.conversions
    wanted = [
        (replacement.path, name)
        for replacement in plan.replacements
        if not replacement.elsewhere
        for name in replacement.parameter_shapes
    ]
    pieces = [(path, name, piece) for path, name in wanted for piece in targets.get(f"{path}.{name}", ())]
    positions = {key: position for position, key in enumerate(checkpoint.tensors)}
    pieces.sort(key=lambda item: positions[checkpoint.tensors_of(item[2].key)[0]])

    def load(path: str, call: Callable[..., None], *arguments: Any) -> None:
        with plan.blaming(path):
            call(*arguments)

    _allocate(plan, operators)
    for path, name, piece in pieces:
        operator = operators[path]
        if (stored := read.stored(piece.key, operator.native_formats)) is not None:
            load(path, operator.load_stored, name, stored, piece.expert, piece.part)
        elif piece.expert is None and operator.per_expert:
            for expert in range(read.shape(piece.key)[0]):
                load(path, operator.load, name, read(piece.key, expert), expert, piece.part)
        else:
            load(path, operator.load, name, read(piece.key), piece.expert, piece.part)
    taken = {f"{path}.{name}" for path, name in wanted}
    for first in dict.fromkeys(conversions[name].name for name in taken & conversions.keys()):
        converted = conversions[first].run(read, model)
        for path, name in wanted:
            if (tensor := converted.pop(f"{path}.{name}", None)) is not None:
                _load_whole(plan, path, operators[path], name, tensor)
    _finish(plan, operators)


def from_model(
    plan: Plan,
    operators: Mapping[str, Operator],
    model: PreTrainedModel,
    advance: Advance,
    check: bool = False,
) -> None:
    """Fill the operators from the weights that the model already has.

    advance  called with the number of bytes of each tensor after it was loaded
    check    refuse values that are not finite
    Raises   CheckpointError for a value that is not finite; OperatorError that names rule, module and operator if an
             operator refuses its weights
    """
    _allocate(plan, operators)
    for replacement in plan.replacements:
        for name in replacement.parameter_shapes:
            tensor = model.get_parameter_or_buffer(f"{replacement.path}.{name}").detach()
            if check:
                check_finite(f"{replacement.path}.{name}", tensor)
            _load_whole(plan, replacement.path, operators[replacement.path], name, tensor)
            advance(tensor.nbytes)
    _finish(plan, operators)


def _allocate(plan: Plan, operators: Mapping[str, Operator]) -> None:
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


@contextmanager
def progress(total: int, shown: bool) -> Iterator[Advance]:
    """Show a progress bar on stderr with bytes, rate and time left.

    total    bytes to read
    shown    False: show nothing
    Yields   the function to call with the number of bytes of each read
    """
    if not shown:
        yield lambda count: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn("loading"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("loading", total=total)
        yield lambda count: bar.advance(task, count)
