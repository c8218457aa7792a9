"""Weights cut by NUMA node: virtual nodes give the same bits, odd sizes are cut unevenly."""

from __future__ import annotations

import math

import pytest
import torch

from ktinject import _native


@pytest.fixture(autouse=True)
def automatic():
    yield
    _native.set_nodes(0)
    _native.set_threads(0)


def layer(
    weights: str, hidden: int, inner: int, *, experts: int = 6, nodes: int = 0, **changes
) -> _native.Experts:
    arguments = {
        "experts": experts,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "weights": weights,
        "group_size": 32 if weights == "int4" else 0,
        "has_gate": True,
        "has_bias": True,
        "activation": "silu",
        "alpha": 1.0,
        "gate_max": math.inf,
        "up_limit": math.inf,
        "up_offset": 0.0,
        "kernel": "auto",
        "nodes": nodes,
    }
    arguments |= changes
    native = _native.Experts(**arguments)
    native.allocate()
    torch.manual_seed(1)
    shapes = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
    if not arguments["has_gate"]:
        del shapes["gate"]
    for e in range(experts):
        for projection, shape in shapes.items():
            native.load(projection, e, torch.randn(shape) / math.sqrt(shape[1]))
            if arguments["has_bias"]:
                native.load_bias(projection, e, torch.randn(shape[0]) * 0.1)
    return native


def run(native: _native.Experts, hidden: int, tokens: int, experts: int = 6) -> torch.Tensor:
    torch.manual_seed(tokens)
    x = torch.randn(tokens, hidden).bfloat16()
    index = torch.rand(tokens, experts).topk(3).indices
    index[torch.rand(index.shape) < 0.1] = -1
    out = torch.full_like(x, math.nan)
    native.forward(x, index, torch.rand(tokens, 3), out)
    return out


@pytest.mark.parametrize("weights", ["bf16", "int8", "int4", "fp8", "mxfp4", "mxfp8"])
@pytest.mark.parametrize("sizes", [(256, 128), (100, 200), (33, 17), (160, 1)])
@pytest.mark.parametrize("has_gate", [True, False])
def test_results_do_not_depend_on_the_number_of_nodes(weights, sizes, has_gate):
    hidden, inner = sizes
    want = None
    for nodes in (1, 2, 3, 4):
        for threads in (1, 2, 5):
            _native.set_nodes(nodes)
            _native.set_threads(threads, crowded=True)
            native = layer(weights, hidden, inner, has_gate=has_gate)
            assert len(native.shards) == nodes
            found = [run(native, hidden, tokens) for tokens in (1, 2, 7, 90)]
            want = want or found
            assert not any(out.isnan().any() for out in found)
            assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))


def test_shards_are_whole_panels_and_together_the_layer():
    _native.set_nodes(3)
    native = layer("int8", 320, 208)  # 13 panels of gate and up, 10 of down
    assert native.shards == [(4, 3), (5, 4), (4, 3)]
    assert native.bytes == layer("int8", 320, 208, nodes=1).bytes


def test_a_layer_outlives_a_change_of_nodes_and_threads():
    """Shards stay where they are; whoever is there works on them."""
    _native.set_nodes(4)
    native = layer("int8", 256, 128)
    want = [run(native, 256, tokens) for tokens in (1, 40)]
    for nodes, threads in ((1, 1), (2, 3), (0, 0), (6, 4)):
        _native.set_nodes(nodes)
        _native.set_threads(threads, crowded=True)
        found = [run(native, 256, tokens) for tokens in (1, 40)]
        assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))
        assert torch.equal(unpacked(native, 128, 256), unpacked(layer("int8", 256, 128, nodes=1), 128, 256))


def unpacked(native: _native.Experts, n: int, k: int) -> torch.Tensor:
    out = torch.empty(n, k)
    native.unpack("gate", 3, out)
    return out


def test_more_nodes_than_there_are_is_refused():
    _native.set_nodes(2)
    with pytest.raises(ValueError, match=r"numa: found 3; allowed: auto, or 1 to 2"):
        layer("bf16", 64, 64, nodes=3)
    with pytest.raises(ValueError, match=r"found 1025; allowed: 0"):
        _native.set_nodes(1025)


def test_nodes_cover_the_cpus():
    _native.set_nodes(2)
    cpus = [cpu for _, cpus in _native.nodes() for cpu in cpus]
    assert sorted(cpus) == sorted(set(cpus))
    assert [node for node, _ in _native.nodes()] == [-1, -1]


def machine(root, nodes: dict[int, tuple[str, int, str]]) -> str:
    """A /sys with these nodes: CPUs, KiB of memory, distances."""
    for number, (cpus, kib, distance) in nodes.items():
        folder = root / f"sys/devices/system/node/node{number}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{cpus}\n")
        (folder / "meminfo").write_text(f"Node {number} MemTotal:       {kib} kB\n")
        (folder / "distance").write_text(f"{distance}\n")
    (root / "sys/devices/system/node/possible").write_text("0-7\n")
    return str(root)


ALL = list(range(8))


@pytest.mark.parametrize(
    "nodes,cpus,mems,want",
    [
        pytest.param({0: ("0-7", 9, "10")}, ALL, [], [(-1, ALL)], id="one node: nothing to place"),
        pytest.param(
            {0: ("0-3", 9, "10 20"), 2: ("4-7", 9, "20 10")},
            ALL,
            [],
            [(0, [0, 1, 2, 3]), (2, [4, 5, 6, 7])],
            id="a gap",
        ),
        pytest.param(
            {0: ("0-3", 9, "10 20 30"), 1: ("4-7", 9, "20 10 30"), 2: ("", 9, "30 30 10")},
            ALL,
            [],
            [(0, [0, 1, 2, 3]), (1, [4, 5, 6, 7])],
            id="memory and no CPU",
        ),
        pytest.param(
            {0: ("0-1", 9, "10 20 15"), 1: ("2-3", 9, "20 10 12"), 3: ("4-7", 0, "15 12 10")},
            ALL,
            [],
            [(0, [0, 1]), (1, [2, 3, 4, 5, 6, 7])],
            id="CPUs and no memory",
        ),
        pytest.param(
            {0: ("0-3", 9, "10 20"), 1: ("4-7", 9, "20 10")},
            [1, 5, 6],
            [],
            [(0, [1]), (1, [5, 6])],
            id="a cpuset of CPUs",
        ),
        pytest.param(
            {0: ("0-3", 9, "10 20"), 1: ("4-7", 9, "20 10")},
            [5, 6],
            [],
            [(-1, [5, 6])],
            id="a cpuset of one node",
        ),
        pytest.param(
            {0: ("0-3", 9, "10 20"), 1: ("4-7", 9, "20 10")},
            ALL,
            [1],
            [(-1, [4, 5, 6, 7, 0, 1, 2, 3])],
            id="of memory",
        ),
    ],
)
def test_usable_nodes(tmp_path, nodes, cpus, mems, want):
    found = _native.find_nodes(machine(tmp_path, nodes), cpus, mems)
    assert found == [(number, here, []) for number, here in want]


def test_a_machine_that_does_not_say(tmp_path):
    assert _native.find_nodes(str(tmp_path), [3, 5], []) == [(-1, [3, 5], [])]


def cores(root, siblings: list[str], *, name: str = "core_cpus_list", fast: str = "", capacities=()) -> None:
    """A /sys whose CPUs have these siblings, of which those named `fast` are the performance cores."""
    for cpu, line in enumerate(siblings):
        folder = root / f"sys/devices/system/cpu/cpu{cpu}"
        (folder / "topology").mkdir(parents=True)
        (folder / "topology" / name).write_text(f"{line}\n")
        if capacities:
            (folder / "cpu_capacity").write_text(f"{capacities[cpu]}\n")
    if fast:
        (root / "sys/devices/cpu_core").mkdir(parents=True)
        (root / "sys/devices/cpu_core/cpus").write_text(f"{fast}\n")


NEIGHBOURS = ["0-1", "0-1", "2-3", "2-3", "4-5", "4-5", "6-7", "6-7"]
HALVES = [f"{cpu % 4},{cpu % 4 + 4}" for cpu in range(8)]
HYBRID = ["0-1", "0-1", "2-3", "2-3", "4", "5", "6", "7"]  # two performance cores, four others


@pytest.mark.parametrize("name", ["core_cpus_list", "thread_siblings_list"])
@pytest.mark.parametrize(
    "siblings,cpus,want,first",
    [
        pytest.param(
            NEIGHBOURS, ALL, [0, 2, 4, 6, 1, 3, 5, 7], [0, 2, 4, 6, 0, 2, 4, 6], id="neighbours are siblings"
        ),
        pytest.param(HALVES, ALL, ALL, [0, 1, 2, 3, 0, 1, 2, 3], id="halves are"),
        pytest.param([str(cpu) for cpu in ALL], ALL, ALL, ALL, id="no siblings"),
        pytest.param(NEIGHBOURS, [1, 2, 3, 7], [1, 2, 7, 3], [0, 2, 6, 2], id="some of the CPUs"),
    ],
)
def test_a_core_each_comes_before_its_other_threads(tmp_path, siblings, cpus, want, first, name):
    cores(tmp_path, siblings, name=name)
    assert _native.find_nodes(str(tmp_path), cpus, []) == [(-1, want, first)]


def test_each_nodes_cpus_are_ordered(tmp_path):
    cores(tmp_path, NEIGHBOURS)
    nodes = {0: ("0-3", 9, "10 20"), 1: ("4-7", 9, "20 10")}
    assert _native.find_nodes(machine(tmp_path, nodes), ALL, []) == [
        (0, [0, 2, 1, 3], [0, 2, 0, 2]),
        (1, [4, 6, 5, 7], [4, 6, 4, 6]),
    ]


@pytest.mark.parametrize(
    "kinds", [{"fast": "0-3"}, {"capacities": [1024] * 4 + [500] * 4}], ids=["hybrid", "capacities"]
)
@pytest.mark.parametrize("at_end", [False, True])
def test_fast_cores_come_first_and_their_siblings_last(tmp_path, kinds, at_end):
    siblings, want = HYBRID, [0, 2, 4, 5, 6, 7, 1, 3]
    if at_end:  # numbered the other way round
        siblings, want = ["0", "1", "2", "3", "4-5", "4-5", "6-7", "6-7"], [4, 6, 0, 1, 2, 3, 5, 7]
        kinds = {"fast": "4-7"} if "fast" in kinds else {"capacities": [500] * 4 + [1024] * 4}
    cores(tmp_path, siblings, **kinds)
    [(_, found, _)] = _native.find_nodes(str(tmp_path), ALL, [])
    assert found == want


@pytest.mark.parametrize(
    "caches,cpus,want",
    [
        pytest.param([("2048K", "0-1"), ("2048K", "0-1")], [0, 1], 1 << 20, id="two threads of a core"),
        pytest.param([("2048K", "0-1"), ("2048K", "0-1")], [0], 1 << 20, id="of which one is ours"),
        pytest.param([("1M", "0"), ("1M", "1")], [0, 1], 1 << 20, id="a core each"),
        pytest.param([("2M", "0"), *[("2M", "1-4")] * 4], [0, 1, 2, 3, 4], 512 << 10, id="a cluster"),
        pytest.param([], [0, 1], 0, id="not known"),
    ],
)
def test_the_share_of_the_second_cache(tmp_path, caches, cpus, want):
    for cpu, (size, sharing) in enumerate(caches):
        for index, (level, kind, bytes_) in enumerate(
            [(1, "Data", "48K"), (1, "Instruction", "32K"), (2, "Unified", size), (3, "Unified", "99M")]
        ):
            folder = tmp_path / f"sys/devices/system/cpu/cpu{cpu}/cache/index{index}"
            folder.mkdir(parents=True)
            (folder / "level").write_text(f"{level}\n")
            (folder / "type").write_text(f"{kind}\n")
            (folder / "size").write_text(f"{bytes_}\n")
            (folder / "shared_cpu_list").write_text(f"{sharing}\n")
    assert _native.level2_share(str(tmp_path), cpus) == want
