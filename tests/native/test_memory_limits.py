"""Memory that is not there is refused with numbers, before the system ends the process; and what RLIMIT_AS leaves."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from silu_layers import silu_experts

from ktinject import OperatorError, _native, machine
from ktinject.operators.cpu_linear import CpuLinear, CpuLinearConfig

GIB = 2**30


def tree(root: Path, files: dict[str, str]) -> str:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(root)


MEMINFO = {
    "proc/meminfo": f"MemTotal: 99 kB\nMemAvailable: {48 * GIB >> 10} kB\nSwapFree: {2 * GIB >> 10} kB\n"
}
CGROUP = {
    "proc/self/cgroup": "0::/user/job\n",
    "sys/fs/cgroup/user/job/memory.max": f"{8 * GIB}\n",
    "sys/fs/cgroup/user/job/memory.current": f"{5 * GIB}\n",
    "sys/fs/cgroup/user/job/memory.stat": f"anon 7\ninactive_file {GIB}\nactive_file {GIB}\n",
    "sys/fs/cgroup/user/job/memory.swap.max": "0\n",
}


@pytest.mark.parametrize(
    "files,want",
    [
        pytest.param(MEMINFO, (50 * GIB, "the memory and swap that are free"), id="the system's"),
        pytest.param(MEMINFO | CGROUP, (5 * GIB, "the cgroup's memory limit"), id="a cgroup's"),
        pytest.param(
            MEMINFO | CGROUP | {"sys/fs/cgroup/user/job/memory.swap.max": "max\n"},
            (7 * GIB, "the cgroup's memory limit"),
            id="which may swap",
        ),
        pytest.param(
            MEMINFO
            | {"proc/self/cgroup": "0::/user/job\n"}
            | {"sys/fs/cgroup/user/job/memory.max": "max\n", "sys/fs/cgroup/user/memory.max": f"{GIB}\n"},
            (3 * GIB, "the cgroup's memory limit"),
            id="a parent's",
        ),
        pytest.param(
            MEMINFO
            | {
                "proc/self/cgroup": "4:memory:/\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{8 * GIB}\n",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{5 * GIB}\n",
            },
            (5 * GIB, "the cgroup's memory limit"),
            id="version 1",
        ),
        pytest.param(
            MEMINFO | {"sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n"},
            (50 * GIB, "the memory and swap that are free"),
            id="version 1 without a limit",
        ),
        pytest.param({}, (2**64 - 1, "nothing"), id="not known"),
    ],
)
def test_what_can_be_filled(tmp_path: Path, files: dict[str, str], want: tuple[int, str]) -> None:
    assert _native.memory_headroom(tree(tmp_path, files)) == want


def test_this_machine_says_what_can_be_filled() -> None:
    found, _ = _native.memory_headroom()
    assert machine.detect(with_gpus=False).memory_available_bytes < 1.2 * found


def test_experts_that_do_not_fit_are_refused() -> None:
    """More than any machine has; the system itself would promise it."""
    experts = silu_experts(experts=60_000, hidden_size=8192, intermediate_size=4096, weights="bf16")
    with pytest.raises(MemoryError, match=r"[\d.]+ MiB were asked for, and .* leaves? [\d.]+ MiB"):
        experts.allocate()


def test_layers_that_fit_one_by_one_are_refused_together() -> None:
    """Each is promised its memory before the first is filled."""
    free, _ = _native.memory_headroom()
    count = int(free * 0.4) // (3 * 4096 * 4096 * 2)
    layers = [silu_experts(count, 4096, 4096, "bf16") for _ in range(4)]
    layers[0].allocate()
    with pytest.raises(
        MemoryError, match=r"beside [\d.]+ MiB that were asked for before and are not filled yet"
    ):
        for layer in layers[1:]:
            layer.allocate()
    del layers
    silu_experts(count, 4096, 4096, "bf16").allocate()  # what was promised is free again


def test_an_operator_says_what_leaves_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = torch.nn.Linear(64, 64, device="meta", dtype=torch.bfloat16)
    operator = CpuLinear.build(layer, CpuLinearConfig(device="cpu"))

    class Full:
        bytes = 4 << 20

        def allocate(self) -> None:
            raise MemoryError("4.0 MiB were asked for, and RLIMIT_AS (ulimit -v) leaves 1.0 MiB")

    monkeypatch.setattr(operator, "native", Full())
    with pytest.raises(OperatorError, match=r"no room for 4.0 MiB .*: 4.0 MiB were asked for, and RLIMIT_AS"):
        operator.allocate()


LIMITED = """
    import os, resource, sys
    from ktinject import _native, machine
    assert machine.detect(with_gpus=False).address_room_bytes is None
    taken = int(open("/proc/self/statm").read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (taken + (600 << 20), resource.RLIM_INFINITY))
    sys.path[:0] = HERE
    from silu_layers import silu_experts
    found = machine.detect(with_gpus=False)
    assert 400 << 20 < found.memory_available_bytes == found.address_room_bytes <= 600 << 20, found
    try:
        silu_experts(64, 1024, 4096, "bf16").allocate()
    except MemoryError as error:
        print(error)
        print(machine.no_memory(error))
        print(machine.no_memory(MemoryError()))
"""


def test_what_a_limit_of_addresses_leaves_is_what_there_is() -> None:
    code = textwrap.dedent(LIMITED).replace("HERE", repr([str(Path(__file__).parent)]))
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr
    refused, words, bare = answer.stdout.splitlines()
    assert "MiB were asked for, and RLIMIT_AS (ulimit -v) leaves " in refused
    assert refused in words and "MiB of addresses (RLIMIT_AS, `ulimit -v`)" in words
    assert bare.startswith("out of memory: an allocation failed. Left to this process: ")
