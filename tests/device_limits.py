"""The limits of CUDA devices, and a device that is taken for another one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ktinject import _native

KIB, MIB = 1 << 10, 1 << 20


def limits(
    multiprocessors: int, block_kib: int, multiprocessor_kib: int, threads: int, l2_mib: int, early: bool
) -> dict[str, Any]:
    return {
        "multiprocessors": multiprocessors,
        "block_shared_bytes": block_kib * KIB,
        "multiprocessor_shared_bytes": multiprocessor_kib * KIB,
        "reserved_shared_bytes": 1 * KIB,
        "multiprocessor_threads": threads,
        "l2_bytes": l2_mib * MIB,
        "has_dependent_launch": early,
        "ends_long_kernels": False,
    }


# Of each architecture of packaging/build_wheels, one that is much used and one that is small.
DEVICES = {
    "sm_80 A100": limits(108, 163, 164, 2048, 40, False),
    "sm_80 A30": limits(56, 163, 164, 2048, 24, False),
    "sm_86 RTX 3090": limits(82, 99, 100, 1536, 6, False),
    "sm_86 RTX 3050": limits(18, 99, 100, 1536, 2, False),
    "sm_89 RTX 4090": limits(128, 99, 100, 1536, 72, False),
    "sm_89 RTX 4060": limits(24, 99, 100, 1536, 24, False),
    "sm_90 H200": limits(132, 227, 228, 2048, 60, True),
    "sm_90 H100 PCIe": limits(114, 227, 228, 2048, 50, True),
    "sm_100 B200": limits(148, 227, 228, 2048, 126, True),
    "sm_120 RTX 5090": limits(170, 99, 100, 1536, 96, True),
    "sm_120 RTX 5060": limits(30, 99, 100, 1536, 32, True),
    "sm_121 DGX Spark": limits(48, 99, 100, 1536, 24, True),
}


@contextmanager
def pretended(name: str, index: int = 0, **changed: Any) -> Iterator[None]:
    """Launches on a CUDA device are those for another one, which has less: they run, if not as fast as there.

    changed  of its limits
    """
    digits = name.split()[0].removeprefix("sm_")
    _native.pretend_device(index, (int(digits[:-1]), int(digits[-1])), {**DEVICES[name], **changed})
    try:
        yield
    finally:
        _native.pretend_device(index)
