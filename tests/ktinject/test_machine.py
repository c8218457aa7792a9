"""ktinject.machine on made-up /proc and /sys trees, and on the machine that runs the tests."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

import pytest

from ktinject import _native, env, machine

GIB = 2**30


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    monkeypatch.setattr(env, "settings", env.Settings)


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def node(number: int, cpus: str, gib: int) -> dict[str, str]:
    folder = f"sys/devices/system/node/node{number}"
    memory = "".join(
        f"Node {number} {key}: {kib:>12} kB\n"
        for key, kib in (("MemTotal", gib * GIB >> 10), ("MemFree", gib * GIB >> 11))
    )
    return {f"{folder}/cpulist": f"{cpus}\n", f"{folder}/meminfo": memory}


EIGHT = tuple(range(8))
EIGHT_CPUS = {
    "proc/meminfo": f"MemTotal: {64 * GIB >> 10} kB\nMemFree: 1 kB\nMemAvailable: {48 * GIB >> 10} kB\n",
    "proc/cpuinfo": "processor\t: 0\nmodel name\t: Made Up 9000\n",
    "proc/self/cgroup": "0::/user/job\n",
    "sys/devices/system/cpu/online": "0-7\n",
    "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
}


def detect(root: Path, *files: dict[str, str], affinity: Collection[int] = EIGHT) -> machine.Machine:
    for some in (EIGHT_CPUS, *files):
        tree(root, some)
    return machine.detect(root, affinity=affinity)


def test_one_node(tmp_path):
    found = detect(tmp_path, node(0, "0-7", 64))
    assert found.cpu == "Made Up 9000"
    assert (found.cpus, found.cpu_count, found.cpu_quota, found.threads) == (tuple(range(8)), 8, None, 8)
    assert found.nodes == (machine.Node(0, tuple(range(8)), 64 * GIB, 32 * GIB),)
    assert (found.memory_bytes, found.memory_available_bytes) == (64 * GIB, 48 * GIB)
    assert found.memory_limit_bytes is None
    assert found.huge_pages == "madvise"


def test_sparse_node_ids_and_a_memory_only_node(tmp_path):
    found = detect(tmp_path, node(0, "0-1,4-5", 32), node(2, "2-3,6-7", 32), node(10, "", 128))
    assert [(n.id, n.cpus) for n in found.nodes] == [(0, (0, 1, 4, 5)), (2, (2, 3, 6, 7)), (10, ())]
    assert [n.id for n in found.usable_nodes] == [0, 2]


def test_affinity_excludes_a_node(tmp_path):
    found = detect(tmp_path, node(0, "0-3", 32), node(1, "4-7", 32), affinity={1, 2})
    assert (found.cpus, found.threads) == ((1, 2), 2)
    assert [n.id for n in found.usable_nodes] == [0]


@pytest.mark.parametrize(
    ("files", "quota", "threads"),
    [
        ({"sys/fs/cgroup/user/job/cpu.max": "150000 100000\n"}, 1.5, 2),
        ({"sys/fs/cgroup/user/job/cpu.max": "10000 100000\n"}, 0.1, 1),
        ({"sys/fs/cgroup/user/job/cpu.max": "max 100000\n"}, None, 8),
        # The parent's limit binds the child.
        (
            {
                "sys/fs/cgroup/user/job/cpu.max": "600000 100000\n",
                "sys/fs/cgroup/user/cpu.max": "300000 100000\n",
            },
            3.0,
            3,
        ),
        ({"sys/fs/cgroup/user/job/cpu.max": "9900000 100000\n"}, 99.0, 8),
        # A container shows the host's path; the mount is the container's own cgroup.
        ({"proc/self/cgroup": "0::/../elsewhere\n", "sys/fs/cgroup/cpu.max": "400000 100000\n"}, 4.0, 4),
        (
            {
                "proc/self/cgroup": "4:cpu,cpuacct:/job\n0::/\n",
                "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us": "250000\n",
                "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us": "100000\n",
            },
            2.5,
            3,
        ),
        (
            {
                "proc/self/cgroup": "4:cpu:/\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            None,
            8,
        ),
    ],
)
def test_cpu_quota(tmp_path, files, quota, threads):
    found = detect(tmp_path, files)
    assert (found.cpu_quota, found.threads) == (quota, threads)


@pytest.mark.parametrize(
    "files",
    [
        {
            "sys/fs/cgroup/user/job/memory.max": f"{8 * GIB}\n",
            "sys/fs/cgroup/user/job/memory.current": f"{5 * GIB}\n",
            "sys/fs/cgroup/user/job/memory.stat": f"anon 7\ninactive_file {GIB}\nactive_file {GIB}\n",
        },
        {
            "proc/self/cgroup": "4:memory:/job\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/memory/job/memory.limit_in_bytes": f"{8 * GIB}\n",
            "sys/fs/cgroup/memory/job/memory.usage_in_bytes": f"{5 * GIB}\n",
            "sys/fs/cgroup/memory/job/memory.stat": f"inactive_file {GIB}\nactive_file {GIB}\n",
        },
    ],
    ids=["version 2", "version 1"],
)
def test_memory_limit(tmp_path, files):
    found = detect(tmp_path, files)
    assert found.memory_limit_bytes == found.memory_bytes == 8 * GIB
    assert found.memory_available_bytes == 5 * GIB


def test_nothing_to_read(tmp_path):
    found = machine.detect(tmp_path, affinity={3, 5})
    assert (found.cpu, found.cpu_count, found.threads) == ("unknown CPU", 2, 2)
    assert [(n.id, n.cpus) for n in found.nodes] == [(0, (3, 5))]
    assert found.memory_bytes >= found.memory_available_bytes > 0
    assert found.huge_pages == "absent"


def test_settings_win(tmp_path, monkeypatch):
    monkeypatch.setattr(env, "settings", lambda: env.Settings(threads=12, numa=4))
    found = detect(tmp_path, node(0, "0-7", 64))
    assert (found.threads, found.virtual_nodes) == (8, 4)  # no more threads than CPUs


def test_this_machine_agrees_with_the_native_pool():
    found = machine.detect()
    assert found.threads == _native.default_threads()
    assert set(found.cpus) == os.sched_getaffinity(0)
    assert found.usable_nodes
