"""The registry of source formats, and which of them a weight is in. A format is added here and in a file of its own."""

from __future__ import annotations

from collections.abc import Sequence

from ktinject.checkpoints.formats.awq import Awq
from ktinject.checkpoints.formats.base import SourceFormat, ending_of, refused
from ktinject.checkpoints.formats.floats import Floats
from ktinject.checkpoints.formats.fp4 import Fp4
from ktinject.checkpoints.formats.fp8 import Fp8
from ktinject.checkpoints.formats.gguf_blocks import GgufBlocks
from ktinject.checkpoints.formats.gptq import Gptq
from ktinject.checkpoints.formats.int8 import Int8
from ktinject.checkpoints.formats.made import MadeOfParts
from ktinject.checkpoints.formats.mxfp4 import Mxfp4
from ktinject.checkpoints.formats.packed import Packed
from ktinject.checkpoints.formats.unsupported import Unsupported
from ktinject.checkpoints.reader import Reader

# The formats that are read. The first one that holds a weight is its format.
READ: tuple[SourceFormat, ...] = (
    Mxfp4(),
    Fp4(),
    Awq(),
    Gptq(),
    Packed(),
    Int8(),
    Fp8(),
    GgufBlocks(),
)
SOURCES: tuple[SourceFormat, ...] = (MadeOfParts((*READ, Floats())), *READ, Unsupported(READ), Floats())
# Values of quant_method in config.json that are read.
METHODS = tuple(dict.fromkeys(method for source in READ for method in source.methods))


def sources_in(reader: Reader) -> tuple[SourceFormat, ...]:
    """Those of SOURCES that a weight of this checkpoint may be in, by the endings of its names."""
    endings = {ending_of(name) for name in reader.names}
    return tuple(source for source in SOURCES if source.may_be_in(endings))


def find(
    reader: Reader, key: str, sources: Sequence[SourceFormat] = SOURCES
) -> tuple[SourceFormat, tuple[str, ...]]:
    """The format of a weight and the tensors that hold its values. Raises CheckpointError if it is absent.

    sources   as `sources_in` gives them, or all
    """
    for source in sources:
        if held := source.held(reader, key):
            return source, held
    raise refused(reader, key, "not in the checkpoint.")


def weight_names(reader: Reader, sources: Sequence[SourceFormat] = SOURCES) -> set[str]:
    """The names of a checkpoint, with the weight's in place of the tensors that hold it; `sources` as in `find`."""
    found = set(reader.names) - {part for made in reader.made.values() for part in made.parts}
    found |= reader.made.keys()
    for source in sources:
        for own in source.own:
            for key in [*own.weights(found)]:
                if held := source.held(reader, key):
                    found.difference_update(held)
                    found.add(key)
    return found
