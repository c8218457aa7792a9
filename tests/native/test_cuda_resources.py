"""What the compiler gives kernels for each architecture of wheels: no GPU is needed, but nvcc and minutes."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from device_limits import DEVICES

from ktinject import _native

NATIVE = Path(__file__).parents[2] / "native"
REGISTERS = 1 << 16  # of a multiprocessor, of all these architectures
# "Compiling entry function 'NAME' for 'sm_90'", …, "Used 106 registers, used 1 barriers, 4608 bytes smem"
ENTRY = re.compile(
    r"Compiling entry function '(\w+)' for '(sm_\d+)'.*?(\d+) bytes spill stores"
    r".*?Used (\d+) registers[^\n]*?(?:(\d+) bytes smem[^\n]*)?\n",
    re.DOTALL,
)


def compiled(file: str, folder: Path) -> list[tuple[str, str, int, int, int]]:
    """Name, architecture, bytes that were spilled, registers and static shared memory of each kernel."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("no nvcc")
    architectures = sorted(
        {name.split()[0].removeprefix("sm_") for name in DEVICES} - {"121"}
    )  # 120 runs there
    targets = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in architectures]
    command = [nvcc, "-std=c++20", "-O3", f"-I{NATIVE}", *targets, "-Xptxas", "-v", "-c", str(NATIVE / file)]
    run = subprocess.run(
        [*command, "-o", str(folder / "object.o")], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    found = [
        (name, arch, int(spilled), int(registers), int(shared or 0))
        for name, arch, spilled, registers, shared in ENTRY.findall(run.stderr)
    ]
    assert {arch for _, arch, *_ in found} == {f"sm_{a}" for a in architectures}
    return found


@pytest.mark.nightly
@pytest.mark.slow
def test_linear_layers_of_a_decode_step(tmp_path: Path) -> None:
    seen = set()
    for name, arch, spilled, registers, static in compiled("cuda/decode_linear.cu", tmp_path):
        tiles, held = map(int, re.findall(r"Li(\d+)E", name)[:2])
        for device in (limits for device, limits in DEVICES.items() if device.startswith(arch)):
            shape = _native.linear_shape(8 * tiles * device["multiprocessors"], device)
            if (shape["tiles"], shape["held"]) != (tiles, held):
                continue
            seen.add((arch, tiles))
            assert static + held // tiles * tiles * 512 * 16 <= shape["shared_bytes"], name
            assert spilled == 0 and registers * 512 <= REGISTERS, name
    # Groups of at most four tiles where little is on its way, and of all sizes elsewhere.
    assert {tiles for arch, tiles in seen if arch == "sm_120"} == {1, 2, 3, 4}
    assert {tiles for arch, tiles in seen if arch == "sm_90"} == {1, 2, 3, 4, 5, 6, 8}


@pytest.mark.nightly
@pytest.mark.slow
def test_int4_layers(tmp_path: Path) -> None:
    seen = set()
    for name, arch, _, registers, static in compiled("cuda/int4_linear.cu", tmp_path):
        arguments = re.search(r"int4_linear_sm80I\w+?Li(\d+)ELb(\d)ELi(\d)E", name)
        if arguments is None:  # it unpacks, and has no ring
            continue
        tokens, half, stages = map(int, arguments.groups())
        for device in (limits for device, limits in DEVICES.items() if device.startswith(arch)):
            shape = _native.int4_shape(4096, 4096, tokens, bool(half), device)
            if shape["stages"] != stages:
                continue
            seen.add((arch, tokens, half))
            ring = stages * (256 * 64 // 2 + tokens * 128 + (1 + half) * 1024)
            assert ring + static <= shape["shared_bytes"], name
            assert registers * shape["threads"] * shape["room"] <= REGISTERS, name
    assert len(seen) == len({arch for arch, *_ in seen}) * 8, (
        "tokens of four blocks, of whole groups and of halves"
    )


@pytest.mark.nightly
@pytest.mark.slow
def test_attention(tmp_path: Path) -> None:
    for name, arch, _, registers, static in compiled("cuda/decode_attention.cu", tmp_path):
        arguments = re.search(r"attention_kernelI\w+?Li(\d+)E", name)
        if arguments is None:
            continue
        size = int(arguments[1])
        warps = 8 if size > 128 else 16
        needed = static + warps * 8 * (size + 4) * 4
        assert needed <= _native.attention_shared_bytes(size), name
        assert registers * warps * 32 <= REGISTERS, name
        assert all(
            needed <= limits["block_shared_bytes"]
            for device, limits in DEVICES.items()
            if device.startswith(arch)
        )
