"""Layouts that are read, what reading gives, and files that change under the reader."""

from __future__ import annotations

import copy
import os
import pickle
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from handmade import INDEX, field, hub_cache, image, sharded, tensors, write_index
from safetensors.torch import load_file, save_file

from ktinject.checkpoints import files
from ktinject.checkpoints.checkpoint import Checkpoint
from ktinject.checkpoints.reader import TORCH_DTYPES, TensorInfo
from ktinject.errors import CheckpointError


@pytest.fixture
def two_shards(tmp_path: Path) -> Path:
    sharded(tmp_path, one=tensors("a", "b"), two=tensors("c"))
    return tmp_path


# Layouts


def test_single_file(tmp_path: Path) -> None:
    saved = tensors("b", "a")
    save_file(saved, tmp_path / "model.safetensors")
    for path in (tmp_path, tmp_path / "model.safetensors", str(tmp_path)):
        with Checkpoint.open(path) as checkpoint:
            assert checkpoint.path == Path(path) and checkpoint.complete
            assert checkpoint.names == {"a", "b"} and checkpoint.total_bytes == 48
            assert checkpoint.tensors["a"] == TensorInfo("a", "F32", (2, 3), "model.safetensors", 24)
            assert checkpoint.files() == [str(tmp_path / "model.safetensors")]
            assert all(torch.equal(checkpoint.read(name), saved[name]) for name in saved)


def test_shards(two_shards: Path) -> None:
    for path in (two_shards, two_shards / INDEX):
        with Checkpoint.open(path) as checkpoint:
            assert checkpoint.complete and list(checkpoint.tensors) == ["a", "b", "c"]
            assert checkpoint.tensors["c"].shard == "two.safetensors"
            assert checkpoint.files() == [str(two_shards / f"{name}.safetensors") for name in ("one", "two")]
            assert all(torch.equal(checkpoint.read(n), t) for n, t in tensors("a", "b").items())


def test_the_only_safetensors_file_of_a_folder(tmp_path: Path) -> None:
    save_file(tensors("a"), tmp_path / "anything.safetensors")
    (tmp_path / "._anything.safetensors").write_bytes(b"what macOS leaves on foreign disks")
    (tmp_path / "pytorch_model.bin").write_bytes(b"not looked at")
    with Checkpoint.open(tmp_path) as checkpoint:
        assert checkpoint.names == {"a"}


def test_a_single_file_is_preferred_to_an_index_as_transformers_does(two_shards: Path) -> None:
    save_file(tensors("z"), two_shards / "model.safetensors")
    with Checkpoint.open(two_shards) as checkpoint:
        assert checkpoint.names == {"z"}


@pytest.mark.parametrize("total, expected", [(72, 72), (None, None), ("72", None), (-1, None), (7.2e1, None)])
def test_an_index_alone_gives_names(total: Any, expected: int | None, tmp_path: Path) -> None:
    metadata = {} if total is None else {"total_size": total}
    path = write_index(tmp_path, {"b": "two.safetensors", "a": "one.safetensors"}, metadata=metadata)
    for where in (tmp_path, path):
        with Checkpoint.open(where) as checkpoint:
            assert not checkpoint.complete and checkpoint.total_bytes == expected
            assert list(checkpoint.names) == ["b", "a"]
            assert checkpoint.tensors == {} and checkpoint.files() == []
            with pytest.raises(CheckpointError, match=r"'a': only the index is there. Download"):
                checkpoint.read("a")


def test_hub_cache(tmp_path: Path) -> None:
    snapshot, blobs = hub_cache(tmp_path)
    (tmp_path / "link").symlink_to(snapshot)
    for path in (snapshot, snapshot / INDEX, snapshot / "one.safetensors", tmp_path / "link"):
        with Checkpoint.open(path) as checkpoint:
            assert torch.equal(checkpoint.read("a"), tensors("a")["a"])
            assert checkpoint.tensors["a"].shard == "one.safetensors"
    for blob in list(blobs.iterdir()):
        if blob.stat().st_size != (snapshot / INDEX).stat().st_size:
            blob.unlink()
    with Checkpoint.open(snapshot) as checkpoint:
        assert not checkpoint.complete and checkpoint.names == {"a", "b"}


def test_what_transformers_saves(tiny_deepseek_v3: Path) -> None:
    saved = load_file(tiny_deepseek_v3 / "model.safetensors")
    with Checkpoint.open(tiny_deepseek_v3) as checkpoint:
        assert checkpoint.names == saved.keys()
        assert all(torch.equal(checkpoint.read(name), saved[name]) for name in saved)


# Reading


@pytest.mark.parametrize("dtype", TORCH_DTYPES)
def test_every_dtype_reads_as_the_library_reads_it(dtype: str, tmp_path: Path) -> None:
    torch_dtype = TORCH_DTYPES[dtype]
    generator = torch.Generator().manual_seed(1)
    data = torch.randint(0, 2 if dtype == "BOOL" else 256, (3, 5, 16), dtype=torch.uint8, generator=generator)
    saved = {"x": data.view(torch_dtype), "scalar": data[0, 0].view(torch_dtype)[0].clone()}
    saved["empty"] = saved["x"][:, :0].clone()
    save_file(saved, tmp_path / "model.safetensors")
    with Checkpoint.open(tmp_path) as checkpoint:
        for name, tensor in saved.items():
            got = checkpoint.read(name)
            assert checkpoint.tensors[name].dtype == dtype
            assert (got.dtype, got.shape) == (tensor.dtype, tensor.shape)
            assert got.reshape(-1).view(torch.uint8).equal(tensor.reshape(-1).view(torch.uint8))
        for i in range(3):
            assert checkpoint.read("x", i).view(torch.uint8).equal(data[i])
        assert checkpoint.read("empty", 2).shape == (0, *saved["empty"].shape[2:])


def test_tensors_own_their_memory(tmp_path: Path) -> None:
    save_file(tensors("a"), tmp_path / "model.safetensors")
    checkpoint = Checkpoint.open(tmp_path)
    first, second = checkpoint.read("a"), checkpoint.read("a")
    first.fill_(9)
    assert torch.equal(second, tensors("a")["a"]) and torch.equal(checkpoint.read("a"), second)
    assert first.is_contiguous() and first.untyped_storage().nbytes() == 24
    assert checkpoint.read("a", 1).untyped_storage().nbytes() == 12
    checkpoint.close()
    checkpoint.close()
    second += 1
    with pytest.raises(CheckpointError, match=r"closed\. Open it again"):
        checkpoint.read("a")


def test_reading_under_a_meta_default_device(tmp_path: Path) -> None:
    save_file(tensors("a"), tmp_path / "model.safetensors")
    with Checkpoint.open(tmp_path) as checkpoint, torch.device("meta"):
        assert checkpoint.read("a", 1).tolist() == [3, 4, 5]


@pytest.mark.parametrize("index", [-1, 2, 10**30])
def test_no_such_slice(index: int, tmp_path: Path) -> None:
    save_file({**tensors("a"), "s": torch.tensor(1.0)}, tmp_path / "model.safetensors")
    with Checkpoint.open(tmp_path) as checkpoint:
        with pytest.raises(CheckpointError, match=rf"'a': there is no slice {index}; its shape is \[2, 3\]"):
            checkpoint.read("a", index)
        with pytest.raises(CheckpointError, match=r"'s': there is no slice 0; its shape is \[\]"):
            checkpoint.read("s", 0)


def test_no_such_tensor(tmp_path: Path) -> None:
    save_file(tensors("a"), tmp_path / "model.safetensors")
    with (
        Checkpoint.open(tmp_path) as checkpoint,
        pytest.raises(CheckpointError, match=r"no tensor 'model\.b'"),
    ):
        checkpoint.read("model.b")


def test_dtypes_that_torch_lacks_are_refused_when_read(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(image({"a": field("F6_E2M3", (4,), end=3)}, b"123"))
    with Checkpoint.open(tmp_path) as checkpoint:
        assert checkpoint.tensors["a"].bytes == 3
        with pytest.raises(CheckpointError, match="'a': dtype F6_E2M3 is not read; allowed: F64"):
            checkpoint.read("a")


def test_threads_and_forks_share_a_checkpoint(tmp_path: Path) -> None:
    saved = {str(i): torch.full((500,), float(i)) for i in range(16)}
    save_file(saved, tmp_path / "model.safetensors")
    wrong: list[str] = []
    with Checkpoint.open(tmp_path) as checkpoint:

        def work() -> None:
            for _ in range(20):
                wrong.extend(n for n in saved if not torch.equal(checkpoint.read(n), saved[n]))

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        child = os.fork()
        if child == 0:
            same = checkpoint.read("7")[0] == 7
            checkpoint.close()
            os._exit(0 if same else 1)
        for thread in threads:
            thread.join()
        assert os.waitpid(child, 0)[1] == 0 and not wrong
        assert torch.equal(checkpoint.read("3"), saved["3"])


def test_descriptors_are_neither_copied_nor_leaked(two_shards: Path) -> None:
    def opened() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = opened()
    checkpoint = Checkpoint.open(two_shards)
    assert opened() == before + 2
    with pytest.raises(TypeError):
        copy.deepcopy(checkpoint)
    with pytest.raises(TypeError):
        pickle.dumps(checkpoint)
    del checkpoint
    assert opened() == before
    (two_shards / "two.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError):
        Checkpoint.open(two_shards)
    assert opened() == before


def test_a_tensor_larger_than_one_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_READ_BYTES", 7)
    save_file(tensors("a"), tmp_path / "model.safetensors")
    with Checkpoint.open(tmp_path) as checkpoint:
        assert torch.equal(checkpoint.read("a"), tensors("a")["a"])


# Files that change


def append(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"1")


def overwrite(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"1")
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))


def overwrite_unseen(path: Path) -> None:
    """With the size and the time of change that it had."""
    old = path.stat()
    overwrite(path)
    os.utime(path, ns=(old.st_atime_ns, old.st_mtime_ns))


def replace(path: Path) -> None:
    old = path.stat()
    new = path.with_name("new")
    shutil.copy(path, new)
    os.utime(new, ns=(old.st_atime_ns, old.st_mtime_ns))
    new.rename(path)


CHANGES = {
    "truncated": lambda path: os.truncate(path, path.stat().st_size - 1),
    "emptied": lambda path: os.truncate(path, 0),
    "longer": append,
    "overwritten": overwrite,
    "overwritten, and its time set back": overwrite_unseen,
    "replaced": replace,
    "removed": os.unlink,
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_file_that_changed_is_refused(change: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file(tensors("a", "b"), path)
    with Checkpoint.open(tmp_path) as checkpoint:
        checkpoint.read("b")
        CHANGES[change](path)
        with pytest.raises(CheckpointError, match=f"{path}: tensor 'b': .*[Ll]oad") as caught:
            checkpoint.read("b")
        assert change == "removed" or "changed while it was in use" in str(caught.value)


def test_a_file_truncated_during_a_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.safetensors"
    save_file(tensors("a"), path)
    preadv = os.preadv

    def cut(fd: int, buffers: list[memoryview], offset: int) -> int:
        got = preadv(fd, [buffers[0][:5]], offset)
        os.truncate(path, offset + 5)
        return got

    with Checkpoint.open(tmp_path) as checkpoint:
        monkeypatch.setattr(os, "preadv", cut)
        with pytest.raises(CheckpointError, match="'a': the file changed"):
            checkpoint.read("a")


def test_an_error_of_the_disk_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> int:
        raise OSError(5, "Input/output error")

    save_file(tensors("a"), tmp_path / "model.safetensors")
    with Checkpoint.open(tmp_path) as checkpoint:
        monkeypatch.setattr(os, "preadv", broken)
        with pytest.raises(CheckpointError, match=r"'a': cannot be read: .*Input/output error"):
            checkpoint.read("a")
