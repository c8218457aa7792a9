"""The packed cache: what it saves, what it depends on, and what becomes of files that are not what they should be."""

from __future__ import annotations

import errno
import json
import logging
import os
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from double import saved
from safetensors import safe_open
from transformers import PreTrainedModel

import ktinject
from ktinject import _native
from ktinject.checkpoints import packed
from ktinject.checkpoints.packed import PackedFile
from ktinject.checkpoints.reader import Reader
from ktinject.errors import CheckpointError, PlanError
from ktinject.loading import packed_cache

pytestmark = pytest.mark.usefixtures("cache_folder")
torch.set_num_threads(1)
IDS = torch.randint(3, 90, (1, 12), generator=torch.Generator().manual_seed(0))


@pytest.fixture()
def source(tmp_path: Path) -> Path:
    return saved(models.tiny("qwen3_moe"), tmp_path / "model")


@pytest.fixture()
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is read from checkpoints."""
    seen: list[str] = []
    original = Reader.read

    def read(self: Reader, name: str, index: int | None = None, rows: Any = None) -> torch.Tensor:
        seen.append(name)
        return original(self, name, index, rows)

    monkeypatch.setattr(Reader, "read", read)
    return seen


def load(source: Path, experts: str = "int4", **arguments: Any) -> PreTrainedModel:
    given = {"variables": {"experts": experts}, "devices": "cpu", "progress": False, "cache": "auto"}
    return ktinject.load(source, **{**given, **arguments})


def logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


def experts_read(reads: list[str]) -> int:
    return sum(".experts." in name for name in reads)


@pytest.mark.parametrize("experts", ["bf16", "int8", "int4", "fp8", "mxfp4", "mxfp8"])
def test_the_second_load_reads_the_cache_and_computes_the_same(
    source: Path, cache_folder: Path, reads: list[str], experts: str
) -> None:
    first = logits(load(source, experts))
    assert experts_read(reads) > 0 and len(list(cache_folder.iterdir())) == 1
    reads.clear()
    second = load(source, experts)
    assert experts_read(reads) == 0
    assert torch.equal(logits(second), first)
    assert len(list(cache_folder.iterdir())) == 1


def test_linear_layers_are_kept_too(source: Path, cache_folder: Path, reads: list[str]) -> None:
    linear = {"operator": "cpu_linear", "weights": "int8"}
    rules = [{"name": "attention", "match": {"path": r".*\.[qkvo]_proj"}, "replace": linear}]
    first = logits(load(source, rules=rules, variables=None))
    reads.clear()
    assert torch.equal(logits(load(source, rules=rules, variables=None)), first)
    assert not any("_proj" in name and "experts" not in name for name in reads)


def test_a_file_serves_any_number_of_nodes(
    source: Path, cache_folder: Path, reads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = logits(load(source))
    try:
        _native.set_nodes(2)
        reads.clear()
        two = load(source)
        assert experts_read(reads) == 0 and torch.equal(logits(two), first)
        next(cache_folder.iterdir()).unlink()
        load(source)  # written from two nodes' memory
        reads.clear()
    finally:
        _native.set_nodes(0)
    one = load(source)
    assert experts_read(reads) == 0 and torch.equal(logits(one), first)


def test_other_readers_show_what_is_in_it(source: Path, cache_folder: Path) -> None:
    load(source)
    with safe_open(next(cache_folder.iterdir()), "pt") as file:
        metadata = file.metadata()
        name = "model.layers.0.mlp.experts.gate_up"
        assert file.get_tensor(name).dtype == torch.uint8 and file.get_slice(name).get_shape()[0] == 6
    assert metadata["format"] == "ktinject packed" and metadata[f"form of {name[:-8]}"].startswith(
        "experts int4"
    )
    assert json.loads(metadata["file 0"])["name"] == "model.safetensors"


def change_time(source: Path) -> None:
    os.utime(source / "model.safetensors", (1, 1))


def change_data(source: Path) -> None:
    """One byte, the last; its time is set back."""
    path = source / "model.safetensors"
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("change", [change_time, change_data])
def test_a_changed_checkpoint_has_another_file(
    source: Path, cache_folder: Path, reads: list[str], change: Any
) -> None:
    load(source)
    change(source)
    reads.clear()
    load(source)
    assert experts_read(reads) > 0 and len(list(cache_folder.iterdir())) == 2


def cut_off(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def of_other_version(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b'"version":"1"', b'"version":"0"'))


def of_something_else(path: Path) -> None:
    key = packed_cache.key_of("another plan")
    with PackedFile(path) as file:
        found = file.metadata["key"]
    path.write_bytes(path.read_bytes().replace(found.encode(), key.encode()))


def no_safetensors(path: Path) -> None:
    path.write_bytes(b"something")


def a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("spoil", [cut_off, of_other_version, of_something_else, no_safetensors])
def test_what_cannot_be_used_is_built_anew(
    source: Path, cache_folder: Path, reads: list[str], spoil: Any, caplog: pytest.LogCaptureFixture
) -> None:
    first = logits(load(source))
    (path,) = cache_folder.iterdir()
    spoil(path)
    reads.clear()
    with caplog.at_level(logging.WARNING, "ktinject"):
        assert torch.equal(logits(load(source)), first)
    assert "is not used, and built anew" in caplog.text and experts_read(reads) > 0
    reads.clear()
    assert torch.equal(logits(load(source)), first)
    assert experts_read(reads) == 0


def test_a_file_that_cannot_be_replaced_costs_a_warning(
    source: Path, cache_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    load(source)
    (path,) = cache_folder.iterdir()
    a_folder(path)
    load(source)
    assert "no packed cache was written" in caplog.text
    assert list(cache_folder.iterdir()) == [path]


def test_a_full_disk_costs_a_warning(
    source: Path, cache_folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def pwrite(fd: int, data: Any, offset: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(packed.os, "pwrite", pwrite)
    assert logits(load(source)).isfinite().all()
    assert "No space left on device" in caplog.text and not list(cache_folder.iterdir())


def test_an_interrupt_leaves_no_file(
    source: Path, cache_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fsync(fd: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(packed.os, "fsync", fsync)
    with pytest.raises(KeyboardInterrupt):
        load(source)
    assert not list(cache_folder.iterdir())


def test_the_plan_is_part_of_the_key(source: Path, cache_folder: Path) -> None:
    load(source, "int4")
    load(source, "int8")
    load(
        source,
        rules=[
            {"name": "experts", "match": {"role": "routed_experts"}, "replace": {"operator": "cpu_experts"}}
        ],
        variables=None,
    )
    assert len(list(cache_folder.iterdir())) == 3


def test_verify_finds_a_changed_byte(source: Path, cache_folder: Path) -> None:
    load(source)
    (path,) = cache_folder.iterdir()
    with PackedFile(path) as file:
        assert file.wrong(lambda count: None) == []
        offset = file.entries["model.layers.1.mlp.experts.down"].offset
    with path.open("r+b") as raw:
        raw.seek(offset)
        byte = raw.read(1)
        raw.seek(offset)
        raw.write(bytes([byte[0] ^ 1]))
    with PackedFile(path) as file:
        assert file.wrong(lambda count: None) == ["model.layers.1.mlp.experts.down"]


def test_saving_a_model_from_the_cache(tmp_path: Path) -> None:
    """Weights in bf16 are the checkpoint's own, from the cache as well."""
    source = saved(models.tiny("qwen3_moe").to(torch.bfloat16), tmp_path / "model")
    for name in ("once", "twice"):
        model = load(source, "bf16", dtype="bfloat16")
        model.save_pretrained(tmp_path / name)
    once, twice = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("once", "twice"))
    assert once == twice


def test_what_cannot_be_asked_for(source: Path) -> None:
    with pytest.raises(PlanError, match="cache: found 'always'; allowed are 'auto' and None"):
        load(source, cache="always")
    with pytest.raises(PlanError, match="cache: with tp"):
        load(source, tp=True)
    with pytest.raises(PlanError, match="cache: the model has its weights"):
        ktinject.optimize(models.tiny("qwen3_moe"), "auto", devices="cpu", cache="auto")


def test_checked_weights_are_read_from_the_checkpoint(source: Path, reads: list[str]) -> None:
    load(source)
    reads.clear()
    load(source, check_tensors=True)
    assert experts_read(reads) > 0


def test_a_file_in_use_that_changes_is_not_believed(source: Path, cache_folder: Path) -> None:
    load(source)
    (path,) = cache_folder.iterdir()
    with PackedFile(path) as file:
        os.utime(path, (1, 1))
        with pytest.raises(CheckpointError, match="changed while it was in use"):
            file.wrong(lambda count: None)


@pytest.mark.parametrize("mode", [0o664, 0o646, 0o666])
def test_a_file_that_others_may_write_to_is_not_believed(
    mode: int, source: Path, cache_folder: Path, reads: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    before = os.umask(0)
    try:
        want = logits(load(source))
    finally:
        os.umask(before)
    (path,) = cache_folder.iterdir()
    assert [found.stat().st_mode & 0o022 for found in (path, cache_folder)] == [0, 0], "whatever the umask is"
    path.chmod(mode)
    reads.clear()
    assert torch.equal(logits(load(source)), want) and experts_read(reads) > 0
    assert "other users may write to it" in caplog.text
    reads.clear()
    load(source)
    assert experts_read(reads) == 0, "a new one is there"


def test_a_file_that_is_deleted_once_it_is_open_is_not_believed(
    source: Path, reads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    want = logits(load(source))
    opened = PackedFile.__init__

    def vanishing(self: PackedFile, path: Path) -> None:
        opened(self, path)
        path.unlink()

    monkeypatch.setattr(PackedFile, "__init__", vanishing)
    reads.clear()
    assert torch.equal(logits(load(source)), want) and experts_read(reads) > 0
