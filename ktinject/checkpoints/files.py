"""Which files a checkpoint is made of, and what its index says of them; nothing but the index is opened.

folder ─┬─ model.safetensors
        ├─ model.safetensors.index.json ── its shards
        ├─ the only *.safetensors file
        └─ the only *.gguf file, or all its parts
"""

from __future__ import annotations

import os
from pathlib import Path

from ktinject.checkpoints import gguf_names
from ktinject.checkpoints.safetensors import open_file, parse_json, shown
from ktinject.errors import CheckpointError, listed

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_INDEX_BYTES = 32 << 20  # the index of DeepSeek-V3, with some 91,000 names, has 9 MB

_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_CONVERT = (
    "Only safetensors is read, since the others can run code when loaded. Convert once with "
    "`AutoModelForCausalLM.from_pretrained(path).save_pretrained(new_path)`, which writes safetensors."
)


def find(path: Path) -> tuple[Path, list[str], Path | None]:
    """The folder, and either the files in it or the index that names them. Raises CheckpointError."""
    if not os.path.isdir(path):
        return _find_file(path)
    # In the order of transformers, which loads what is not swapped.
    if os.path.isfile(path / SINGLE):
        check_inside(path, SINGLE)
        return path, [SINGLE], None
    if os.path.isfile(path / INDEX):
        check_inside(path, INDEX)
        return path, [], path / INDEX
    try:
        found = sorted(name for name in os.listdir(path) if not name.startswith("."))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be listed: {error}.") from error
    single = [name for name in found if name.endswith(".safetensors")]
    if len(single) == 1:
        check_inside(path, single[0])
        return path, single, None
    if single:
        raise CheckpointError(
            f"{path}: {len(single)} safetensors files but no {INDEX}, which says what belongs together:"
            f"{listed(map(shown, single))}\nDownload the index, or give the path of one file or index."
        )
    if gguf := [name for name in found if name.endswith(".gguf")]:
        parts = gguf_names.parts(path, gguf[0])
        if parts != gguf:
            raise CheckpointError(
                f"{path}: {len(gguf)} GGUF files that are not one model:{listed(map(shown, gguf))}\n"
                "Give the path of one, of several parts the first."
            )
        for name in parts:
            check_inside(path, name)
        return path, parts, None
    if weights := [name for name in found if name.endswith(_PICKLES)]:
        raise CheckpointError(
            f"{path}: found no safetensors file but these:{listed(map(shown, weights))}\n{_CONVERT}"
        )
    raise CheckpointError(
        f"{path}: no weights here; needed is {SINGLE}, {INDEX} with its shards, or a .gguf file. Found:"
        f"{listed(map(shown, found)) if found else ' nothing.'}"
    )


def _find_file(path: Path) -> tuple[Path, list[str], Path | None]:
    suffix = path.suffix.lower()
    if suffix in _PICKLES:
        raise CheckpointError(f"{path}: a {suffix} file. {_CONVERT}")
    if not os.path.exists(path):
        raise CheckpointError(
            f"{path}: there is no such file or folder. A model of the Hugging Face Hub must be downloaded "
            "first: `hf download <model>` prints the folder to give here."
        )
    if suffix == ".json":
        return path.parent, [], path
    if suffix == ".safetensors":
        return path.parent, [path.name], None
    if suffix == ".gguf":
        parts = gguf_names.parts(path.parent, path.name)
        for name in parts:
            if name != path.name:  # a link that the user named is followed, others are the folder's
                check_inside(path.parent, name)
        return path.parent, parts, None
    raise CheckpointError(
        f"{path}: not a checkpoint; allowed: a folder, a .safetensors or .gguf file, an .index.json file."
    )


def read_index(path: Path) -> tuple[dict[str, str], int | None]:
    """name → file name, and the bytes of all tensors if the index says so. Raises CheckpointError."""
    remedy = "Download the index again."
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > MAX_INDEX_BYTES:
            raise CheckpointError(
                f"{path}: {size} bytes; an index of at most {MAX_INDEX_BYTES} is read. {remedy}"
            )
        index = parse_json(os.pread(file.fileno(), size, 0), str(path), remedy)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(
            f"{path}: weight_map is {shown(weight_map)}; tensor names with files are needed. {remedy}"
        )
    metadata = index.get("metadata", {})
    if not isinstance(metadata, dict):
        raise CheckpointError(f"{path}: metadata is {shown(metadata)}; an object is allowed. {remedy}")
    for name, shard in weight_map.items():
        if not isinstance(shard, str):
            raise CheckpointError(
                f"{path}: tensor {shown(name)} is in {shown(shard)}; a file name is needed. {remedy}"
            )
        if shard.endswith(_PICKLES):
            raise CheckpointError(f"{path}: tensor {shown(name)} is in {shown(shard)}. {_CONVERT}")
        if not shard.endswith(".safetensors") or not {"/", "\\", "\0"}.isdisjoint(shard):
            raise CheckpointError(
                f"{path}: tensor {shown(name)} is in {shown(shard)}; "
                f"the name of a .safetensors file in the same folder is needed. {remedy}"
            )
    total = metadata.get("total_size")
    return weight_map, total if type(total) is int and total >= 0 else None


def check_inside(folder: Path, name: str) -> None:
    """Refuse a link that leaves the folder, unless into the blobs of the Hub cache that the folder is in.

    The cache is laid out as …/snapshots/<revision>/<name> -> …/blobs/<hash>.
    """
    path = folder / name
    if os.path.islink(path):
        home, target = Path(os.path.realpath(folder)), Path(os.path.realpath(path))
        blobs = [p.parent.parent / "blobs" for p in (home, *home.parents) if p.parent.name == "snapshots"]
        if not any(target.is_relative_to(allowed) for allowed in (home, *blobs)):
            raise CheckpointError(
                f"{path}: a link to {target}, outside the model's folder. Put the file itself there."
            )
