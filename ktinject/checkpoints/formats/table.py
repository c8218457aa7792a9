"""The list of source formats, and which of them a weight is in."""

from __future__ import annotations

from ktinject.checkpoints.formats.base import SourceFormat, refused
from ktinject.checkpoints.formats.floats import Floats
from ktinject.checkpoints.formats.fp8_blocks import BlockFp8
from ktinject.checkpoints.formats.gguf_blocks import GgufBlocks
from ktinject.checkpoints.formats.int4 import Int4
from ktinject.checkpoints.formats.made import MadeOfParts
from ktinject.checkpoints.formats.mxfp4 import Mxfp4
from ktinject.checkpoints.formats.unsupported import Unsupported
from ktinject.checkpoints.reader import Reader

# The first one that holds a weight is its format.
SOURCES: tuple[SourceFormat, ...] = (
    Mxfp4(),
    Int4(),
    MadeOfParts(),
    Unsupported(),
    BlockFp8(),
    GgufBlocks(),
    Floats(),
)
# Values of quant_method in config.json that are read.
METHODS = tuple(method for source in SOURCES for method in source.methods)


def find(reader: Reader, key: str) -> tuple[SourceFormat, tuple[str, ...]]:
    """The format of a weight and the tensors that hold its values. Raises CheckpointError if it is absent."""
    for source in SOURCES:
        if held := source.held(reader, key):
            return source, held
    raise refused(reader, key, "not in the checkpoint.")


def weight_names(reader: Reader) -> set[str]:
    """The names of a checkpoint, with the weight's in place of the tensors that hold it where none has its name."""
    found = set(reader.names) - {part for made in reader.made.values() for part in made.parts}
    found |= reader.made.keys()
    for source in SOURCES:
        for own in source.own:
            own.replace_in(found)
    return found


def companions(key: str) -> tuple[str, ...]:
    """Names of tensors that may accompany a weight's own, in any format that is read."""
    return tuple(key + suffix for source in SOURCES for suffix in source.companions)
