"""An emulated machine with two NUMA nodes and a third without CPUs: where are pages and workers, by its kernel?

`native_test` is the machine's only program; it prints what it finds and switches the machine off. Needs
qemu-system-x86_64, a Linux kernel (KTINJECT_TEST_KERNEL, or /boot/vmlinuz-* that may be read), cmake and a compiler.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def kernel() -> Path | None:
    named = os.environ.get("KTINJECT_TEST_KERNEL")
    found = [Path(named)] if named else sorted(Path("/boot").glob("vmlinuz-*"))
    return next((path for path in reversed(found) if os.access(path, os.R_OK)), None)


def archive(program: bytes) -> bytes:
    """A cpio archive (newc) with /init, and /dev/console for its output."""

    def entry(name: str, mode: int, data: bytes = b"", device: tuple[int, int] = (0, 0)) -> bytes:
        fields = (0, mode, 0, 0, 1, 0, len(data), 0, 0, *device, len(name) + 1, 0)
        head = b"070701" + "".join(f"{field:08x}" for field in fields).encode() + name.encode() + b"\0"
        head += b"\0" * (-len(head) % 4)
        return head + data + b"\0" * (-len(data) % 4)

    return (
        entry("dev", 0o040755)
        + entry("dev/console", 0o020600, device=(5, 1))
        + entry("init", 0o100755, program)
        + entry("TRAILER!!!", 0)
    )


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Path:
    """native_test, linked statically; KTINJECT_NATIVE_TEST names one that is built already."""
    if built := os.environ.get("KTINJECT_NATIVE_TEST"):
        return Path(built)
    folder = tmp_path_factory.mktemp("native")
    options = ["-DKTINJECT_NATIVE_TESTS=ON", "-DKTINJECT_CUDA=OFF"]
    subprocess.run(["cmake", "-S", ROOT, "-B", folder, *options], check=True, capture_output=True)
    subprocess.run(["cmake", "--build", folder, "-j", "2"], check=True, capture_output=True)
    return folder / "native_test"


@pytest.mark.skipif(shutil.which("qemu-system-x86_64") is None, reason="no qemu-system-x86_64")
@pytest.mark.skipif(kernel() is None, reason="no kernel image: set KTINJECT_TEST_KERNEL")
@pytest.mark.skipif(shutil.which("cmake") is None, reason="no cmake")
def test_pages_and_workers_are_on_their_nodes(program, tmp_path):
    image = tmp_path / "initramfs"
    image.write_bytes(archive(program.read_bytes()))
    nodes = []
    for number, cpus in ((0, "cpus=0-1"), (1, "cpus=2-3"), (2, None)):
        nodes += ["-object", f"memory-backend-ram,id=m{number},size=512M"]
        nodes += ["-numa", ",".join(filter(None, ["node", f"nodeid={number}", cpus, f"memdev=m{number}"]))]
    answer = subprocess.run(
        ["qemu-system-x86_64", "-accel", "tcg", "-cpu", "max", "-smp", "4", "-m", "1536M", *nodes]
        + [
            "-kernel",
            str(kernel()),
            "-initrd",
            str(image),
            "-append",
            "console=ttyS0 quiet panic=-1 numa_balancing=disable",
        ]
        + ["-nographic", "-no-reboot", "-nodefaults", "-serial", "stdio"],
        capture_output=True,
        text=True,
        errors="replace",
        stdin=subprocess.DEVNULL,
    )
    print(answer.stdout)
    last = answer.stdout.strip().splitlines()[-1] if answer.stdout.strip() else ""
    assert "FAILED" not in answer.stdout
    assert "placement: " in answer.stdout and " checks, 0 failed" in answer.stdout, last
    assert answer.stdout.count("1000 of 1000 sampled pages there") == 8
