"""benchmarks/bench_moe.py and its plot: what they record holds together."""

from __future__ import annotations

import builtins
import csv
import importlib.util
import math
import sys
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def bench_moe(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    for name in ("bench_moe", "moe_cells", "moe_peers", "plot_moe"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import bench_moe

    tiny = bench_moe.Shape("tiny", experts=8, top_k=2, hidden=96, intermediate=64)
    monkeypatch.setattr(bench_moe, "SHAPES", {"tiny": tiny})
    # Ceilings far below what any machine does: cells must raise them.
    monkeypatch.setattr(bench_moe._native, "read_bandwidth", lambda _: 1.0)
    monkeypatch.setattr(bench_moe._native, "multiply_rate", lambda _: 1.0)
    return bench_moe


@pytest.fixture
def rows(bench_moe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, str]]:
    path = tmp_path / "out.csv"
    command = "bench_moe.py --shapes tiny --tokens 1 16 --routing uniform skewed --seconds 0 --weights bf16 int4-g32"
    monkeypatch.setattr(sys, "argv", [*command.split(), "--csv", str(path)])
    bench_moe.main()
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_rows_have_the_columns_of_the_kept_results(rows: list[dict[str, str]]) -> None:
    with (FOLDER / "results.csv").open(newline="") as file:
        assert next(csv.reader(file)) == list(rows[0])
    cells = {(row["routing"], row["tokens"], row["weights"]) for row in rows}
    assert len(cells) == 2 * 2 * 2
    assert any(row["peer"].startswith("torch") for row in rows)


def test_kept_results_are_whole() -> None:
    with (FOLDER / "results.csv").open(newline="") as file:
        header, *kept = csv.reader(file)
    assert kept
    assert {len(row) for row in kept} == {len(header)}


def test_no_share_exceeds_one_and_the_fastest_cell_is_the_ceiling(rows: list[dict[str, str]]) -> None:
    shares = [float(row["share"]) for row in rows]
    assert max(shares) == 1.0
    assert min(shares) > 0.0
    for row in rows:
        assert float(row["share"]) == pytest.approx(float(row["roofline_us"]) / float(row["us"]), abs=0.02)


def test_a_peer_that_computes_something_else_is_refused(bench_moe, monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong:
        name = "wrong"

        def error(self, *_: object) -> float:
            return 0.9

    class Kt:
        def layer(self, *_: object) -> Wrong:
            return Wrong()

    weight = torch.zeros(1, 2, 2)
    with pytest.raises(RuntimeError, match=r"wrong: relative error 0\.90"):
        bench_moe.peers_of(Kt(), "int8", weight, weight, bench_moe.SHAPES["tiny"], 1, 1)


def test_torch_layer_is_the_reference(bench_moe) -> None:
    torch.manual_seed(0)
    gate_up, down = bench_moe.random_weights(bench_moe.SHAPES["tiny"])
    x, weight = torch.randn(5, 96).bfloat16(), torch.rand(5, 2)
    index = torch.stack([torch.randperm(8)[:2] for _ in range(5)])
    out = bench_moe.torch_layer(gate_up, down, x, weight, index)
    layer = bench_moe.build(bench_moe.SHAPES["tiny"], "bf16", "auto", gate_up, down)
    ours = torch.empty_like(x)
    layer.forward(x, index, weight, ours)
    assert float((ours.float() - out).norm() / out.norm()) < 0.02
    assert math.isfinite(float(out.norm()))


def test_plot_or_how_to_get_it(
    bench_moe, rows: list[dict[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import plot_moe

    if importlib.util.find_spec("matplotlib") is not None:
        plot_moe.draw(rows, tmp_path / "out.png")
        assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    imported = builtins.__import__

    def without(name: str, *rest, **named):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return imported(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(SystemExit, match="pip install matplotlib"):
        plot_moe.draw(rows, tmp_path / "out.png")
