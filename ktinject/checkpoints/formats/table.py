"""The registry of source formats, and which of them a weight is in. A format is added here and in a file of its own."""

from __future__ import annotations

from ktinject.checkpoints.formats.base import SourceFormat, refused
from ktinject.checkpoints.formats.floats import Floats
from ktinject.checkpoints.formats.fp8 import BlockFp8
from ktinject.checkpoints.formats.gguf_blocks import GgufBlocks
from ktinject.checkpoints.formats.gptq import Int4
from ktinject.checkpoints.formats.made import MadeOfParts
from ktinject.checkpoints.formats.mxfp4 import Mxfp4
from ktinject.checkpoints.formats.unsupported import Unsupported
from ktinject.checkpoints.reader import Reader

# The formats that are read. The first one that holds a weight is its format.
READ: tuple[SourceFormat, ...] = (Mxfp4(), Int4(), BlockFp8(), GgufBlocks())
SOURCES: tuple[SourceFormat, ...] = (MadeOfParts((*READ, Floats())), *READ, Unsupported(READ), Floats())
# Values of quant_method in config.json that are read.
METHODS = tuple(dict.fromkeys(method for source in READ for method in source.methods))


def find(reader: Reader, key: str) -> tuple[SourceFormat, tuple[str, ...]]:
    """The format of a weight and the tensors that hold its values. Raises CheckpointError if it is absent."""
    for source in SOURCES:
        if held := source.held(reader, key):
            return source, held
    raise refused(reader, key, "not in the checkpoint.")


def weight_names(reader: Reader) -> set[str]:
    """The names of a checkpoint, with the weight's in place of the tensors that hold it."""
    found = set(reader.names) - {part for made in reader.made.values() for part in made.parts}
    found |= reader.made.keys()
    for source in READ:
        for own in source.own:
            own.replace_in(found)
    return found
