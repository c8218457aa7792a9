"""`ktinject cache` and `ktinject convert`: what is kept, what fits, what is damaged."""

from __future__ import annotations

import os
from pathlib import Path

import ktinject as package
from ktinject.loading.packed_cache import layout


def test_nothing_is_kept(ktinject, as_json, cache_folder: Path):
    assert "0 files" in ktinject("cache", "list").stdout
    assert as_json("cache", "list") == [] and as_json("cache", "clear") == []
    assert "0 files are as they were written" in ktinject("cache", "verify").stdout


def test_list_verify_clear(ktinject, as_json, cache_folder: Path, tmp_path: Path, tiny_qwen3_moe: Path):
    model = tmp_path / "model"
    model.mkdir()
    for file in tiny_qwen3_moe.iterdir():
        (model / file.name).write_bytes(file.read_bytes())
    package.load(model, variables={"experts": "int8"}, devices="cpu", progress=False, cache="auto")
    (kept,) = as_json("cache", "list")
    assert kept["state"] == "current" and kept["source"] == str(model) and "experts int8" in kept["weights"]
    assert "1 files are as they were written" in ktinject("cache", "verify").stdout

    path = Path(kept["path"])
    with path.open("r+b") as raw:
        raw.seek(-1, os.SEEK_END)
        last = raw.read(1)
        raw.seek(-1, os.SEEK_END)
        raw.write(bytes([last[0] ^ 1]))
    assert "damaged" in ktinject("cache", "verify", path, exit_code=2).stderr
    assert as_json("cache", "clear", "--stale") == []

    content, version = path.read_bytes(), layout().encode()
    path.write_bytes(content.replace(version, b"0" * len(version), 1))
    assert "of another version of ktinject" in ktinject("cache", "list").stdout
    path.write_bytes(content)

    os.utime(model / "model.safetensors", (1, 1))
    assert "the checkpoint has changed" in ktinject("cache", "list").stdout
    (model / "model.safetensors").unlink()
    assert "the checkpoint is not there any more" in ktinject("cache", "list").stdout
    (cache_folder / "broken.packed.safetensors").write_bytes(b"nothing")
    assert "cannot be used" in ktinject("cache", "list").stdout
    assert "2 files deleted" in ktinject("cache", "clear", "--stale").stdout
    assert not list(cache_folder.iterdir())
    ktinject("cache", "verify", path, exit_code=2)


def test_convert(ktinject, tmp_path: Path, tiny_qwen3_moe: Path):
    out = tmp_path / "packed"
    ktinject("convert", tiny_qwen3_moe, out, "--set", "experts=int4")
    names = {file.name for file in out.iterdir()}
    assert {"packed.safetensors", "model.safetensors", "config.json"} <= names
    assert {file.name for file in tiny_qwen3_moe.iterdir()} - names == set()
    model = package.load(out, devices="cpu", progress=False)
    assert any(r.runs["weights"] == "int4 group 128" for r in model.ktinject.replacements)
    assert "it exists" in ktinject("convert", tiny_qwen3_moe, out, exit_code=2).stderr
