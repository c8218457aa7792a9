"""What is launched fits the limits of every device that wheels are built for, and is never concluded from its age.

No GPU is needed: the limits are those that NVIDIA documents, and the choices are plain C++. Tests marked gpu launch the
same choices on a larger device.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from device_limits import DEVICES, KIB, MIB

from ktinject import _native

NATIVE = Path(__file__).parents[2] / "native"
OUTPUTS = [1, 8, 9, 64, 512, 1000, 1056, 2048, 4096, 5120, 6400, 8192, 12288, 18432, 65536, 151936, 262144]


@pytest.fixture(params=DEVICES, ids=lambda name: name.replace(" ", "_"))
def device(request: pytest.FixtureRequest) -> dict[str, Any]:
    return DEVICES[request.param]


def test_every_architecture_of_wheels_is_here() -> None:
    script = (NATIVE.parent / "packaging/build_wheels").read_text("utf-8")
    built = re.search(r'CUDAARCHS:-"([^"]*)"', script)
    assert built
    assert {f"sm_{arch.removesuffix('-real')}" for arch in built[1].split(";")} <= {
        n.split()[0] for n in DEVICES
    }


def test_linear_layers_of_a_decode_step_fit(device: dict[str, Any]) -> None:
    """decode_linear: a block's shared memory, and groups of tiles that cover the outputs in blocks that all run."""
    for outputs in OUTPUTS:
        shape = _native.linear_shape(outputs, device)
        assert shape["shared_bytes"] <= device["block_shared_bytes"], shape
        assert shape["tiles"] in (1, 2, 3, 4, 5, 6, 8) and shape["tiles"] * 2 <= shape["held"]
        assert 1 <= shape["blocks"] <= device["multiprocessors"]
        groups = -(-outputs // (8 * shape["tiles"]))
        assert shape["blocks"] == min(groups, device["multiprocessors"])
        assert shape["l2_bytes"] < device["l2_bytes"]


def test_those_of_large_devices_have_most_on_their_way() -> None:
    """What was measured on Hopper stays: pieces that a thread has on their way, and bytes that are fetched into L2."""
    for name, device in DEVICES.items():
        found = {_native.linear_shape(outputs, device)["held"] for outputs in OUTPUTS}
        assert found == ({24} if name.startswith(("sm_90", "sm_100")) else {8})
    hopper = DEVICES["sm_90 H200"]
    shapes = {n: _native.linear_shape(n, hopper) for n in (512, 1056, 2048, 4096, 5120, 8448, 151936)}
    assert {n: (shape["tiles"], shape["blocks"]) for n, shape in shapes.items()} == {
        512: (1, 64), 1056: (1, 132), 2048: (2, 128), 4096: (4, 128), 5120: (5, 128), 8448: (8, 132), 151936: (8, 132),
    }  # fmt: skip
    assert all(shape["l2_bytes"] == 32 * MIB for shape in shapes.values())


def test_a_device_between_those_gets_what_fits() -> None:
    """One byte of shared memory decides."""
    hopper = DEVICES["sm_90 H200"]
    needed = _native.linear_shape(8 * 8 * 132, hopper)["shared_bytes"]
    assert _native.linear_shape(8 * 8 * 132, {**hopper, "block_shared_bytes": needed})["held"] == 24
    assert _native.linear_shape(8 * 8 * 132, {**hopper, "block_shared_bytes": needed - 1})["held"] == 8


@pytest.mark.parametrize("half_groups", [False, True])
def test_int4_layers_fit(device: dict[str, Any], half_groups: bool) -> None:
    """int4_linear's kernel for all but Hopper: as many blocks as it counts with do run at a time."""
    for m in (1, 8, 9, 16, 17, 32, 33, 64, 256, 4096):
        for n, k in ((64, 64), (512, 2048), (4096, 4096), (18432, 7168), (7168, 18432)):
            shape = _native.int4_shape(n, k, m, half_groups, device)
            assert shape["shared_bytes"] <= device["block_shared_bytes"], shape
            at_once = _native.blocks_at_once(shape["shared_bytes"], shape["threads"], device)
            assert 1 <= shape["room"] <= at_once
            assert shape["room"] == (2 if m <= 16 else 1), "with few tokens, two hide each other's waits"
            assert shape["blocks"] <= shape["room"] * device["multiprocessors"]
            units = -(-n // 256) * -(-m // shape["tokens"])
            assert shape["blocks"] * shape["share"] >= units * (k // 64), "all stages are somebody's"


def test_int4_rings_are_as_long_as_two_blocks_may_have_them() -> None:
    for name, device in DEVICES.items():
        found = [_native.int4_shape(4096, 4096, m, True, device)["stages"] for m in (1, 16, 32, 64)]
        assert found == ([6, 6, 5, 4] if name.startswith(("sm_80", "sm_90", "sm_100")) else [4, 4, 5, 4]), (
            name
        )
    # Where not even short rings are for two, one block has a long one, and is not counted twice.
    tight = {**DEVICES["sm_89 RTX 4090"], "multiprocessor_shared_bytes": 90 * KIB}
    shape = _native.int4_shape(4096, 4096, 1, True, tight)
    assert (shape["stages"], shape["room"]) == (6, 1) and shape["blocks"] <= tight["multiprocessors"]


def test_attention_fits(device: dict[str, Any]) -> None:
    for size in (32, 64, 128, 256):
        assert _native.attention_shared_bytes(size) <= device["block_shared_bytes"]


def test_blocks_at_once() -> None:
    ada = DEVICES["sm_89 RTX 4090"]
    assert [_native.blocks_at_once(kib * KIB, 256, ada) for kib in (99, 50, 49, 10, 1)] == [1, 1, 2, 6, 6]


def test_limits_are_named_in_full() -> None:
    ada = DEVICES["sm_89 RTX 4090"]
    with pytest.raises(ValueError, match="no l2_bytes"):
        _native.linear_shape(8, {name: value for name, value in ada.items() if name != "l2_bytes"})
    with pytest.raises(ValueError, match="other names"):
        _native.linear_shape(8, {**ada, "l3_bytes": 0})
    with pytest.raises(ValueError, match="at least 1"):
        _native.linear_shape(8, {**ada, "multiprocessors": 0})
    with pytest.raises(ValueError, match="outputs: found 0"):
        _native.linear_shape(0, ada)


# Code of one architecture alone may conclude from it.
OF_ONE_ARCHITECTURE = re.compile(r"_sm90\.cuh?$|^hopper\.cuh$")


def sources() -> Iterator[tuple[str, str]]:
    for path in sorted([*NATIVE.rglob("*.cu"), *NATIVE.rglob("*.cuh")]):
        if not OF_ONE_ARCHITECTURE.search(path.name):
            yield path.name, re.sub(r"//.*", "", path.read_text("utf-8"))


@pytest.mark.parametrize(
    "asked, files",
    [
        # Shared memory beyond 48 KB is asked for in one place, which compares it with what the device allows.
        (r"cudaFuncSetAttribute", {"shared_memory.cuh"}),
        (r"cudaGetDeviceProperties|ComputeCapability|MultiProcessorCount|SharedMemoryPer", {"devices.cu"}),
        # Whether code has an instruction is known when it is compiled; how much memory there is, is not.
        (r"__CUDA_ARCH__", {"early.cuh", "prefetch.cuh"}),
    ],
)
def test_devices_are_asked_in_one_place(asked: str, files: set[str]) -> None:
    assert {name for name, text in sources() if re.search(asked, text)} == files
