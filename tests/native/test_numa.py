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
    assert _native.find_nodes(machine(tmp_path, nodes), cpus, mems) == want


def test_a_machine_that_does_not_say(tmp_path):
    assert _native.find_nodes(str(tmp_path), [3, 5], []) == [(-1, [3, 5])]
