"""The packed cache: what operators made of a checkpoint, in a file that the next load reads straight into their memory.

    checkpoint ── pack ──► operators ── write ──► cache ── read ──► operators

A file is for one checkpoint and one plan. Its key is a hash of all that its bytes depend on:

- of each file of the checkpoint the name, size and time of change, a hash of its header, and a few samples of its data;
- what config.json says of the weights that are stored;
- of each operator the format, the shapes, which tensors it takes, and in which encoding, where they are not decoded;
- the version of the packed layout and of the file.

The data itself is not hashed at every start. `ktinject cache verify` reads all of a file.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ktinject import _native, env
from ktinject.checkpoints.checkpoint import Checkpoint
from ktinject.checkpoints.packed import Block, PackedFile, PackedTensor, PackedWeights, Writer
from ktinject.errors import CheckpointError
from ktinject.loading.fill import encoding_taken
from ktinject.loading.progress import progress
from ktinject.loading.read_ahead import Pace, ReadAhead, packing_threads
from ktinject.operators import Operator
from ktinject.planning.devices import show_bytes
from ktinject.planning.plan import Plan

logger = logging.getLogger("ktinject")

SUFFIX = ".packed.safetensors"
_STATE = "state of "
# Of what a key says. 2: in which encoding each weight is taken.
_KEY_VERSION = 2
# Left free on a disk, for whoever else writes there.
_SPARE_BYTES = 1 << 30
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def folder_of_caches() -> Path:
    """Where files are kept, which need not exist yet."""
    return env.settings().cache / "packed"


@dataclass(frozen=True)
class PackedCache:
    """The file of one checkpoint and one plan, which may be there or not.

    path       where it is, or would be
    identity   what its bytes depend on
    held       module path → what the operator holds; of the operators that can be kept in a file
    source     the checkpoint's path, for people
    """

    path: Path
    identity: Mapping[str, Any]
    held: Mapping[str, PackedWeights]
    source: str

    @classmethod
    def of(cls, plan: Plan, operators: Mapping[str, Operator], checkpoint: Checkpoint) -> PackedCache:
        """The file for what a plan makes of a checkpoint.

        operators  allocated, and not yet finished
        Raises     CheckpointError if a file of the checkpoint cannot be read
        """
        held = held_by(operators)
        found = identity(plan, operators, held, checkpoint)
        source = checkpoint.path.resolve()
        title = re.sub(r"[^A-Za-z0-9._-]+", "-", source.name if source.is_dir() else source.stem).strip("-.")
        path = folder_of_caches() / f"{title[:80] or 'model'}-{key_of(found)[:20]}{SUFFIX}"
        return cls(path, found, held, str(source))

    @property
    def tensors(self) -> dict[str, PackedTensor]:
        """All tensors of the file, by their names there."""
        return tensors_of(self.held)

    def restore(self, operators: Mapping[str, Operator], shown: bool) -> Pace | None:
        """Fill the operators of `held` from the file.

        shown    show a progress bar on stderr
        Returns  how fast it went; None if there is no file that can be used: then all of them are to be loaded
        """
        if not self.path.exists():
            logger.info("%s: no packed cache yet", self.path)
            return None
        try:
            with PackedFile(self.path) as file:
                self._check(file)
                return fill_from(file, self.held, operators, shown)
        except CheckpointError as error:
            logger.warning("the packed cache is not used, and built anew: %s", error)
            return None

    def _check(self, file: PackedFile) -> None:
        status = file.status
        if status.st_uid not in (os.geteuid(), 0):
            raise CheckpointError(f"{self.path}: it belongs to another user. Delete the file.")
        if status.st_mode & _OTHERS_WRITE:
            raise CheckpointError(f"{self.path}: other users may write to it. Delete the file.")
        if file.metadata.get("key") != key_of(self.identity):
            raise CheckpointError(f"{self.path}: it was packed from something else. Delete the file.")
        if file.entries.keys() != self.tensors.keys():
            raise CheckpointError(
                f"{self.path}: it holds other tensors than the plan needs. Delete the file."
            )
        file.check(self.tensors)

    def save(self, operators: Mapping[str, Operator], shown: bool) -> bool:
        """Write the file, from operators that are filled. A full disk is no reason to refuse a model that is loaded.

        Returns  whether it is there now
        """
        size = sum(tensor.bytes for tensor in self.tensors.values())
        try:
            self.path.parent.mkdir(mode=0o777 & ~_OTHERS_WRITE, parents=True, exist_ok=True)
            free = shutil.disk_usage(self.path.parent).free
            if free < size + _SPARE_BYTES:
                raise OSError(f"{show_bytes(size)} are needed, and {show_bytes(free)} are free")
            metadata = {"key": key_of(self.identity), "source": self.source, **describe(self.identity)}
            held = held_by({path: operators[path] for path in self.held})
            write(self.path, held, metadata, shown, 0o666 & ~_OTHERS_WRITE)
        except OSError as error:
            logger.warning("no packed cache was written to %s: %s", self.path, error)
            return False
        logger.info("wrote the packed cache %s", self.path)
        return True


def held_by(operators: Mapping[str, Operator]) -> dict[str, PackedWeights]:
    """Module path → what the operator holds, of those that can be kept in a file."""
    found = {path: operator.packed_weights() for path, operator in operators.items()}
    return {path: weights for path, weights in found.items() if weights is not None}


def tensors_of(held: Mapping[str, PackedWeights]) -> dict[str, PackedTensor]:
    return {
        f"{path}.{name}": tensor for path, weights in held.items() for name, tensor in weights.tensors.items()
    }


def fill_from(
    file: PackedFile, held: Mapping[str, PackedWeights], operators: Mapping[str, Operator], shown: bool
) -> Pace:
    """Read a file that was checked into the memory of operators. Raises CheckpointError."""
    tensors = tensors_of(held)
    blocks = [*file.blocks(tensors)]
    total = sum(tensor.bytes for tensor in tensors.values())
    with progress(total, shown, "reading packed weights") as advance:

        def read(block: Block) -> None:
            advance(file.read(block))

        # Each block goes to where it stays, so more threads take no more memory; most of a hot file's time is that of
        # the pages it is copied to, which the system clears first.
        with ReadAhead(blocks, read, lambda block: 0, packing_threads()) as ahead:
            for _ in ahead:
                pass
    for path in held:
        operators[path].restored(json.loads(file.metadata.get(_STATE + path, "{}")))
    return ahead.pace(total)


def write(
    path: Path,
    held: Mapping[str, PackedWeights],
    metadata: Mapping[str, str],
    shown: bool,
    mode: int = 0o666,
) -> None:
    """Write what operators hold, to a file of a mode, less the umask. Raises OSError, with nothing left of the file."""
    tensors = tensors_of(held)
    states = {_STATE + name: json.dumps(dict(weights.state)) for name, weights in held.items()}
    with (
        progress(
            sum(tensor.bytes for tensor in tensors.values()), shown, "writing packed weights"
        ) as advance,
        Writer(path, tensors, {**metadata, **states}, mode) as writer,
        ReadAhead([*tensors], writer.write, lambda name: 0) as ahead,
    ):
        try:
            for name, _ in ahead:
                advance(tensors[name].bytes)
        except BaseException:
            writer.stop()
            raise
        writer.finish()


def layout() -> str:
    """The version of the packed layout and of the key, as a file's metadata has it. Files of others are not used."""
    return f"{_native.packed_version()}, key {_KEY_VERSION}"


def identity(
    plan: Plan,
    operators: Mapping[str, Operator],
    held: Mapping[str, PackedWeights],
    checkpoint: Checkpoint,
) -> dict[str, Any]:
    """All that the bytes of a file depend on, ready for JSON."""
    assert plan.mapping is not None
    taken = {}
    for path, weights in held.items():
        names = [name for name in plan.swapped if name.startswith(f"{path}.")]
        # What is taken as it is stored is not rounded again; and which formats are is this version's to say.
        sources = [
            [
                name,
                piece.key,
                piece.expert,
                piece.part,
                repr(plan.cuts.get(piece.key)),
                encoding_taken(operators[path], name.removeprefix(f"{path}."), checkpoint, piece.key),
            ]
            for name in names
            for piece in plan.mapping.targets.get(name, ())
        ]
        sources += [
            [name, repr(plan.mapping.conversions[name].sources)]
            for name in names
            if name in plan.mapping.conversions
        ]
        shapes = {name: [tensor.dtype, *tensor.shape] for name, tensor in weights.tensors.items()}
        taken[path] = {"form": weights.form, "tensors": shapes, "takes": key_of(sources)}
    return {
        "layout": layout(),
        "files": checkpoint.fingerprints(),
        "quantization": json.loads(json.dumps(dict(checkpoint.quantization), default=str)),
        "operators": taken,
    }


def key_of(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def describe(identity: Mapping[str, Any]) -> dict[str, str]:
    """The identity as metadata, for people and for `ktinject cache list`."""
    forms = {name: found["form"] for name, found in identity["operators"].items()}
    return {
        "layout": identity["layout"],
        "quantization": json.dumps(identity["quantization"])[:10_000],
        **{f"file {number}": json.dumps(file) for number, file in enumerate(identity["files"])},
        **{f"form of {name}": form for name, form in forms.items()},
    }
