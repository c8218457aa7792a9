"""A checkpoint on disk: its container is found and every check of headers is done by `Checkpoint.open`.

    path ── open_reader ──► Reader (safetensors.py, gguf.py): tensors as they lie in files
                              │
                              └── formats/ ──► weights: shapes, formats, values

Everything else in ktinject sees a `Checkpoint`, and knows neither containers nor formats.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import torch

from ktinject.checkpoints import beside
from ktinject.checkpoints.files import CONVERT, PICKLES, check_inside, names_in
from ktinject.checkpoints.formats import table
from ktinject.checkpoints.formats.base import Format, SourceFormat, Stored
from ktinject.checkpoints.formats.gguf_blocks import random_rows as random_rows
from ktinject.checkpoints.gguf import GgufReader
from ktinject.checkpoints.json_text import parse_json
from ktinject.checkpoints.packed import PackedFile
from ktinject.checkpoints.reader import INTEGERS, Reader, Vocabulary
from ktinject.checkpoints.safetensors import INDEX, SINGLE, SafetensorsReader
from ktinject.errors import CheckpointError, listed, shown

# A folder with files of several kinds is read as the first of these.
READERS: tuple[type[Reader], ...] = (SafetensorsReader, GgufReader)


def open_reader(path: Path, quantization: Mapping[str, Any]) -> Reader:
    """Find out what container a path holds, and open it. Raises CheckpointError."""
    if not os.path.isdir(path):
        return _reader_of_file(path).open(path, path, quantization)
    for reader in READERS:
        if (name := reader.main_file(path)) is not None:
            check_inside(path, name)
            return reader.open(path, path / name, quantization)
    found = names_in(path)
    if weights := [name for name in found if name.endswith(PICKLES)]:
        raise CheckpointError(
            f"{path}: found no safetensors file but these:{listed(map(shown, weights))}\n{CONVERT}"
        )
    raise CheckpointError(
        f"{path}: no weights here; needed is {SINGLE}, {INDEX} with its shards, or a .gguf file. Found:"
        f"{listed(map(shown, found)) if found else ' nothing.'}"
    )


def _reader_of_file(path: Path) -> type[Reader]:
    suffix = path.suffix.lower()
    if suffix in PICKLES:
        raise CheckpointError(f"{path}: a {suffix} file. {CONVERT}")
    if not os.path.exists(path):
        raise CheckpointError(
            f"{path}: there is no such file or folder. A model of the Hugging Face Hub must be downloaded "
            "first: `hf download <model>` prints the folder to give here."
        )
    for reader in READERS:
        if suffix in reader.suffixes:
            return reader
    raise CheckpointError(
        f"{path}: not a checkpoint; allowed: a folder, a .safetensors or .gguf file, an .index.json file."
    )


# Beside the files of a container: weights that are there packed alone, see packed.py.
PACKED = "packed.safetensors"
_PARAMETERS = "parameters of "


class Checkpoint:
    """The weights of a checkpoint, and the tensors that hold them, by name. Use `Checkpoint.open`; close it.

    path, tensors, names, complete, total_bytes, quantization, skipped, container, states_formats: as `Reader` says

    packed          the open file of weights that are there packed alone; None if all can be read
    methods         values of quant_method in config.json that are read
    """

    methods = table.METHODS

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self.packed: PackedFile | None = None
        self._found: dict[str, tuple[SourceFormat, Format]] = {}
        self._held: dict[str, tuple[SourceFormat, tuple[str, ...]]] = {}
        self.path, self.tensors, self.names = reader.path, reader.tensors, reader.names
        self.complete, self.total_bytes = reader.complete, reader.total_bytes
        self.container, self.states_formats = reader.container, reader.states_formats
        self.quantization, self.skipped = reader.quantization, reader.skipped

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        quantization: Mapping[str, Any] | None = None,
        with_adapter: bool = False,
    ) -> Self:
        """Find the files of a checkpoint, read their headers and check everything but the data.

        path          a folder, a .safetensors or .gguf file, or an index (*.index.json) with its shards beside it
        quantization  the model config's `quantization_config`
        with_adapter  an adapter of PEFT may lie in the folder: the caller sees to it
        Raises        CheckpointError with all faults of the same kind in one report
        """
        if not with_adapter and os.path.isdir(path):
            beside.refuse_adapter(Path(path))
        reader = open_reader(Path(path), quantization or {})
        folder = reader.path if reader.path.is_dir() else reader.path.parent
        try:
            found = cls(reader)
            if (folder / PACKED).is_file():
                check_inside(folder, PACKED)
                found._add(PackedFile(folder / PACKED))
        except BaseException:
            reader.close()
            raise
        return found

    def say_quantization(self, quantization: Mapping[str, Any] | None) -> None:
        """What `open` takes, of a config that is read after the files are open.

        Raises   CheckpointError if weights were looked at already as something else says
        """
        said = {} if self.states_formats else quantization or {}
        if said == self.quantization:
            return
        if self._held or "weights" in vars(self):
            raise CheckpointError(
                f"{self.path}: its weights were looked at as quantization_config {shown(self.quantization)} says, and "
                f"the model's config has {shown(said)}. Open it again."
            )
        self._reader.quantization = self.quantization = said

    def _add(self, packed: PackedFile) -> None:
        """Take the parameters that a file of packed weights stands for among the tensors. Raises CheckpointError."""
        self.packed = packed
        for title, text in packed.metadata.items():
            if not title.startswith(_PARAMETERS):
                continue
            table = parse_json(text.encode(), f"{packed.path}: {title}", "Convert the checkpoint again.")
            form = packed.metadata.get(f"form of {title.removeprefix(_PARAMETERS)}", "")
            for name, said in table.items():
                self._reader.add_packed(name, said, f"{packed.path.name}, as {form}")

    def read(self, name: str, index: int | None = None, rows: tuple[int, int] | None = None) -> torch.Tensor:
        """Read one tensor as it lies in the file, one slice of its first dimension, or some of its rows.

        rows     start and number along the first dimension
        Returns  as `Reader.read`; raises CheckpointError
        """
        return self._reader.read(name, index, rows)

    def files(self) -> list[str]:
        """Paths of the files with the tensors, in reading order; none if not complete."""
        return self._reader.files()

    def fingerprints(self) -> list[dict[str, Any]]:
        """As `Reader.fingerprints`. Raises CheckpointError."""
        return self._reader.fingerprints()

    def config_values(self) -> dict[str, Any] | None:
        """What config.json would say, as far as the files state it; None if they never do. Raises CheckpointError."""
        return self._reader.config_values()

    def vocabulary(self) -> Vocabulary | None:
        """The tokenizer that the files hold, if any. Raises CheckpointError."""
        return self._reader.vocabulary()

    def close(self) -> None:
        """Close the files. Tensors read before stay valid. Closing twice is allowed."""
        if self.packed is not None:
            self.packed.close()
        self._reader.close()

    @cached_property
    def weights(self) -> set[str]:
        """All names, with the weight's in place of those of the tensors that hold it."""
        return table.weight_names(self._reader, self._sources)

    @cached_property
    def _sources(self) -> tuple[SourceFormat, ...]:
        # Asked for once all names are there: of thousands of weights each would be asked for in each format.
        return table.sources_in(self._reader)

    @property
    def block_dtypes(self) -> list[str]:
        """The dtypes in it whose values come in blocks of bytes."""
        return sorted({info.dtype for info in self.tensors.values()} & {*self._reader.block_dtypes})

    def holds_integers(self, key: str) -> bool:
        """Whether a tensor is integers, which are no weights; codes with scales are."""
        info = self.tensors.get(key)
        return info is not None and info.dtype in INTEGERS and self.tensors_of(key) == (key,)

    def format_of(self, key: str) -> Format:
        """How a weight is stored, from headers alone, or names alone if the checkpoint is not complete.

        Raises   CheckpointError if the weight is absent, in a format that is not read, or its tensors do not fit
        """
        return self._source(key)[1]

    def _source(self, key: str) -> tuple[SourceFormat, Format]:
        if key not in self._found:
            source, held = self._holder(key)
            self._found[key] = source, source.detect(self._reader, key, held)
        return self._found[key]

    def _holder(self, key: str) -> tuple[SourceFormat, tuple[str, ...]]:
        if key not in self._held:
            self._held[key] = table.find(self._reader, key, self._sources)
        return self._held[key]

    def shape(self, key: str) -> tuple[int, ...]:
        """The shape of a weight as a model has it; of a complete checkpoint. Raises CheckpointError as `format_of`."""
        if key in self.tensors and (self.tensors_of(key) == (key,) or self.format_of(key).shape is None):
            return self.tensors[key].shape
        found = self.format_of(key).shape
        assert found is not None, "a format in tensors of its own says the weight's shape"
        return found

    def tensors_of(self, key: str) -> tuple[str, ...]:
        """The tensors that hold a weight's values: itself, or those of its format."""
        return self._holder(key)[1]

    def bytes_of(self, key: str) -> int:
        """Bytes of the tensors that hold a weight's values."""
        return sum(self.tensors[name].bytes for name in self.tensors_of(key))

    def decode(self, key: str, index: int | None = None) -> torch.Tensor:
        """Read one weight, or one slice of its first dimension, as floats.

        Returns  [..., n, k] on the CPU, in the dtype that the format decodes to
        Raises   CheckpointError as `format_of` and `read`, and if scales or codes make no sense
        """
        source, form = self._source(key)
        self._reader.check_complete(key)
        return source.decode(self._reader, key, form, index)

    def stored(self, key: str, index: int | None = None) -> Stored:
        """Read one weight undecoded; of a format that can be. Raises CheckpointError as `decode`.

        index   that slice of its first dimension alone, of a format that is `by_slice`
        """
        source, form = self._source(key)
        self._reader.check_complete(key)
        if index is None:
            return source.stored(self._reader, key, form)
        return source.stored_slice(self._reader, key, form, index)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
