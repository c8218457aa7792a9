"""Safetensors files written by hand, so that they can be wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

INDEX = "model.safetensors.index.json"


def field(dtype: Any = "U8", shape: Any = (4,), begin: Any = 0, end: Any = 4, **more: Any) -> dict[str, Any]:
    shape = list(shape) if isinstance(shape, tuple) else shape
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end], **more}


def image(header: dict | bytes, data: bytes = b"", length: int | None = None) -> bytes:
    """The bytes of a file; `length` is what it says about its header, the truth if None."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(raw) if length is None else length).to_bytes(8, "little") + raw + data


def tensors(*names: str) -> dict[str, torch.Tensor]:
    return {name: torch.arange(6.0).reshape(2, 3) + i for i, name in enumerate(names)}


def sharded(folder: Path, **shards: dict[str, torch.Tensor]) -> dict[str, str]:
    """Write shards and the index that fits them; returns name → file."""
    weight_map = {}
    for stem, tensors in shards.items():
        save_file(tensors, folder / f"{stem}.safetensors")
        weight_map |= dict.fromkeys(tensors, f"{stem}.safetensors")
    write_index(folder, weight_map)
    return weight_map


def write_index(folder: Path, weight_map: Any, **more: Any) -> Path:
    path = folder / INDEX
    path.write_text(json.dumps({"metadata": {}, "weight_map": weight_map, **more}))
    return path


def hub_cache(root: Path) -> tuple[Path, Path]:
    """A model as huggingface_hub lays it out: real files in blobs, links in the snapshot."""
    blobs, snapshot = root / "models--o--m" / "blobs", root / "models--o--m" / "snapshots" / "0123abcd"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    sharded(snapshot, one=tensors("a"), two=tensors("b"))
    for i, path in enumerate(sorted(snapshot.iterdir())):
        path.rename(blobs / f"{i:040x}")
        path.symlink_to(Path("../../blobs") / f"{i:040x}")
    return snapshot, blobs
