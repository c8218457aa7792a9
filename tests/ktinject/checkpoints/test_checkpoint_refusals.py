"""What is not a checkpoint, and every fault of an index, its shards and links, is refused in one report."""

from __future__ import annotations

import json
import os
import resource
from pathlib import Path
from typing import Any

import pytest
from handmade import INDEX, hub_cache, sharded, tensors, write_index
from safetensors.torch import save_file

from ktinject.checkpoints.checkpoint import Checkpoint
from ktinject.errors import CheckpointError


@pytest.fixture
def two_shards(tmp_path: Path) -> Path:
    sharded(tmp_path, one=tensors("a", "b"), two=tensors("c"))
    return tmp_path


def refusal(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(path)
    return str(caught.value)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth", "model.ckpt", "model.BIN"])
def test_pickles_are_refused_with_how_to_convert(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"\x80")
    message = refusal(tmp_path / name)
    assert str(tmp_path / name) in message and "save_pretrained(new_path)" in message
    if name != "model.BIN":
        message = refusal(tmp_path)
        assert str(tmp_path) in message and f"'{name}'" in message and "save_pretrained(new_path)" in message


def test_a_folder_without_weights_is_refused_with_what_is_there(tmp_path: Path) -> None:
    assert "no weights here" in refusal(tmp_path) and refusal(tmp_path).endswith("Found: nothing.")
    for i in range(30):
        (tmp_path / f"config-{i:02}.json").touch()
    message = refusal(tmp_path)
    assert "'config-00.json'" in message and "and 10 more" in message and message.count("\n") == 21


def test_several_files_without_an_index_are_refused(tmp_path: Path) -> None:
    for name in ("a", "b"):
        save_file(tensors(name), tmp_path / f"{name}.safetensors")
    message = refusal(tmp_path)
    assert "2 safetensors files but no model.safetensors.index.json" in message
    assert "a.safetensors" in message and "b.safetensors" in message


def test_paths_that_are_nothing(tmp_path: Path) -> None:
    assert "hf download" in refusal(Path("deepseek-ai/DeepSeek-V3"))
    assert "no such file" in refusal(tmp_path / "m.safetensors")
    assert "no such file" in refusal(tmp_path / ("n" * 300))
    assert "no such file" in refusal(tmp_path / "a\0b")
    (tmp_path / "weights.npz").touch()
    assert "not a checkpoint; allowed: a folder" in refusal(tmp_path / "weights.npz")
    (tmp_path / "x.safetensors").mkdir()
    assert "cannot be opened" in refusal(tmp_path) or "not a regular file" in refusal(tmp_path)


# Index


INDEX_FAULTS: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "not JSON"),
    "not JSON": (b"{]", "brackets"),
    "not UTF-8": (b'{"weight_map": "\xff"}', "not UTF-8"),
    "a list": (b"[]", "a JSON object is needed"),
    "a number": (b"7", "a JSON object is needed"),
    "NaN": (b'{"metadata": {"total_size": NaN}, "weight_map": {"a": "one.safetensors"}}', "NaN"),
    "deep": (b'{"metadata": ' + b"[" * 10**6 + b"]" * 10**6 + b"}", "nest too deep"),
    "map twice": (b'{"weight_map": {}, "weight_map": {}}', "'weight_map' is given twice"),
    "tensor twice": (b'{"weight_map": {"a": "1.safetensors", "a": "2.safetensors"}}', "'a' is given twice"),
    "no map": (b'{"metadata": {}}', "weight_map is None"),
    "map is a list": (b'{"weight_map": ["a"]}', "weight_map is ['a']"),
    "empty map": (b'{"weight_map": {}}', "weight_map is {}"),
    "metadata null": (b'{"metadata": null, "weight_map": {"a": "one.safetensors"}}', "metadata is None"),
    "metadata list": (b'{"metadata": [], "weight_map": {"a": "one.safetensors"}}', "metadata is []"),
    "half surrogate pair": (b'{"weight_map": {"a": "\\ud800.safetensors"}}', "surrogate"),
}  # fmt: skip


@pytest.mark.parametrize("fault", INDEX_FAULTS)
def test_a_corrupt_index_is_refused(fault: str, two_shards: Path) -> None:
    content, words = INDEX_FAULTS[fault]
    (two_shards / INDEX).write_bytes(content)
    message = refusal(two_shards)
    assert message.startswith(str(two_shards / INDEX)) and words in message
    assert message.endswith("Download the index again.")


@pytest.mark.parametrize(
    "shard",
    [
        "/etc/passwd.safetensors", "../one.safetensors", "sub/one.safetensors", "\\\\host\\one.safetensors",
        "C:\\one.safetensors", "file:///one.safetensors", "..", ".", "", "one", "one.json",
        "one.safetensors\0", "one\0.safetensors", 7, None, True, ["one.safetensors"], {"file": "one"},
    ],
)  # fmt: skip
def test_shard_names_that_are_not_file_names_are_refused(shard: Any, two_shards: Path) -> None:
    write_index(two_shards, {"a": "one.safetensors", "b": shard})
    message = refusal(two_shards)
    assert str(two_shards / INDEX) in message and "tensor 'b' is in" in message and "needed" in message


def test_an_index_of_pickles_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "pytorch_model.bin.index.json"
    path.write_text(json.dumps({"weight_map": {"a": "pytorch_model-00001-of-00002.bin"}}))
    message = refusal(path)
    assert "'pytorch_model-00001-of-00002.bin'" in message and "save_pretrained(new_path)" in message


def test_an_index_over_the_cap_is_refused_unread(tmp_path: Path) -> None:
    path = write_index(tmp_path, {})
    os.truncate(path, 2**33)
    assert "8589934592 bytes; an index of at most 33554432 is read" in refusal(path)


def test_absent_shards_are_listed(two_shards: Path) -> None:
    names = {f"t{i}": f"s{i:02}.safetensors" for i in range(30)}
    write_index(two_shards, {"a": "one.safetensors", "b": "one.safetensors", **names})
    message = refusal(two_shards)
    assert "30 of its 31 shards are not there" in message
    assert "'s00.safetensors'" in message and "'s19.safetensors'" in message and "s20" not in message
    assert "and 10 more" in message and "Download them" in message


def test_a_shard_name_too_long_for_the_disk_counts_as_absent(two_shards: Path) -> None:
    write_index(two_shards, {"a": "one.safetensors", "b": "n" * 5000 + ".safetensors"})
    message = refusal(two_shards)
    assert "1 of its 2 shards are not there" in message and len(message) < 1000


def test_damaged_shards_are_listed_together(two_shards: Path) -> None:
    os.truncate(two_shards / "one.safetensors", 100)
    assert refusal(two_shards).startswith(f"{two_shards / 'one.safetensors'}: ")
    (two_shards / "two.safetensors").write_bytes(b"<html>")
    message = refusal(two_shards)
    assert "2 of 2 files cannot be used" in message
    assert "one.safetensors: " in message and "two.safetensors: " in message


def test_every_disagreement_of_index_and_shards_is_in_one_report(tmp_path: Path) -> None:
    sharded(tmp_path, one=tensors("a", "both", "moved", "unnamed"), two=tensors("c", "both"))
    absent = dict.fromkeys((f"absent.{i:02}" for i in range(25)), "two.safetensors")
    named = dict.fromkeys(("c", "both", "moved"), "two.safetensors")
    write_index(tmp_path, {"a": "one.safetensors"} | named | absent)
    assert refusal(tmp_path) == "\n".join(
        [
            f"{tmp_path / INDEX}: the index and its shards do not agree.",
            "25 tensors are named by the index but in no shard:",
            *(f"  'absent.{i:02}' (should be in two.safetensors)" for i in range(20)),
            "  and 5 more",
            "1 tensors are in more than one shard:",
            "  'both' (in one.safetensors and two.safetensors)",
            "1 tensors are not in the shard that the index names:",
            "  'moved' (in one.safetensors, not in two.safetensors)",
            "1 tensors are in a shard but not named by the index:",
            "  'unnamed' (in one.safetensors)",
            "Download the index and the shards again, from one revision.",
        ]
    )


# Links


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    folder = tmp_path / "outside"
    folder.mkdir()
    sharded(folder, one=tensors("a"))
    save_file(tensors("a"), folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("name", ["model.safetensors", INDEX, "one.safetensors", "shard"])
@pytest.mark.parametrize("relative", [False, True])
def test_links_out_of_the_folder(name: str, relative: bool, outside: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    if name == "shard":
        name = "one.safetensors"
        write_index(folder, {"a": name})
    (folder / name).symlink_to(Path("..") / "outside" / name if relative else outside / name)
    message = refusal(folder)
    assert f"{folder / name}: a link to {outside / name}, outside the model's folder" in message


def test_links_within_the_folder_are_allowed(two_shards: Path) -> None:
    (two_shards / "one.safetensors").rename(two_shards / "real")
    (two_shards / "one.safetensors").symlink_to("real")
    with Checkpoint.open(two_shards) as checkpoint:
        assert checkpoint.names == {"a", "b", "c"}


def test_a_link_given_by_the_user_is_followed(outside: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.safetensors").symlink_to(outside / "model.safetensors")
    (tmp_path / "folder").symlink_to(outside)
    for path in (tmp_path / "mine.safetensors", tmp_path / "folder"):
        with Checkpoint.open(path) as checkpoint:
            assert checkpoint.names == {"a"}


@pytest.mark.parametrize("target", ["outside", "blobs of another model", "blob that links out"])
def test_the_hub_cache_allows_its_own_blobs_only(target: str, outside: Path, tmp_path: Path) -> None:
    snapshot, _ = hub_cache(tmp_path)
    shard = snapshot / "one.safetensors"
    if target == "outside":
        shard.unlink()
        shard.symlink_to(outside / "one.safetensors")
    elif target == "blobs of another model":
        other, _ = hub_cache(tmp_path / "other")
        shard.unlink()
        shard.symlink_to(os.path.realpath(other / "one.safetensors"))
    else:
        blob = Path(os.path.realpath(shard))
        blob.unlink()
        blob.symlink_to(outside / "one.safetensors")
    assert f"{shard}: a link to" in refusal(snapshot)


@pytest.mark.parametrize("target", ["one.safetensors", "absent"])
def test_links_to_nothing(target: str, two_shards: Path) -> None:
    (two_shards / "one.safetensors").unlink()
    (two_shards / "one.safetensors").symlink_to(target)
    assert "1 of its 2 shards are not there" in refusal(two_shards)
    (two_shards / INDEX).unlink()
    (two_shards / "two.safetensors").unlink()
    assert "cannot be opened" in refusal(two_shards)


def test_a_pipe_does_not_block(two_shards: Path) -> None:
    (two_shards / "one.safetensors").unlink()
    os.mkfifo(two_shards / "one.safetensors")
    assert "one.safetensors: not a regular file" in refusal(two_shards)
    (two_shards / INDEX).unlink()
    os.mkfifo(two_shards / INDEX)
    assert "not a regular file" in refusal(two_shards / INDEX)


def test_too_many_open_files(two_shards: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (free + 1, limits[1]))
        message = refusal(two_shards)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert "Too many open files" in message
    Checkpoint.open(two_shards).close()
