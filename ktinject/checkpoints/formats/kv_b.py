"""`kv_b_proj` of latent attention in the two halves in which GGUF keeps it.

<stem>.k_b  [heads, latent, d]     <stem>.v_b  [heads, v, latent]     ──►  [heads · (d + v), latent]
"""

from __future__ import annotations

import torch
from torch import Tensor

from ktinject.checkpoints.files import DOWNLOAD_AGAIN
from ktinject.checkpoints.formats.base import Format, OwnTensors, SourceFormat, refused
from ktinject.checkpoints.formats.floats import Floats
from ktinject.checkpoints.formats.gguf_blocks import GgufBlocks
from ktinject.checkpoints.reader import Reader

_HALVES = (GgufBlocks(), Floats())  # the formats that a half may be in


class KvB(SourceFormat):
    own = (OwnTensors((".k_b", ".v_b")),)

    def detect(self, reader: Reader, key: str, held: tuple[str, ...]) -> Format:
        if not reader.complete:
            return Format("kv_b", held)
        keys, values = (reader.tensors[name].shape for name in held)
        if (len(keys), len(values)) != (3, 3) or keys[0] != values[0] or keys[1] != values[2]:
            text = f"shapes {[[*keys], [*values]]}; [heads, latent, d] and [heads, v, latent] are needed"
            raise refused(reader, held[0], f"{text}. {DOWNLOAD_AGAIN}")
        for name in held:
            _half(reader, name)
        heads, latent, d = keys
        return Format("kv_b", held, shape=(heads * (d + values[1]), latent))

    def decode(self, reader: Reader, key: str, form: Format, index: int | None) -> Tensor:
        halves = ((name, *_half(reader, name)) for name in form.companions)
        keys, values = (source.decode(reader, name, half, None) for name, source, half in halves)
        return torch.cat((keys.mT, values), 1).flatten(0, 1)


def _half(reader: Reader, name: str) -> tuple[SourceFormat, Format]:
    source = next(source for source in _HALVES if source.held(reader, name))
    return source, source.detect(reader, name, (name,))
