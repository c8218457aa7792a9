"""benchmarks/bench_moe.py and its plot: what they record holds together."""

from __future__ import annotations

import builtins
import csv
import importlib.util
import math
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from ktinject.tools import benchmark

FOLDER = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def bench_moe(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    for name in ("bench_moe", "moe_cells", "moe_peers", "plot_moe", "rows"):
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


def test_every_kernel_that_can_run_has_a_ceiling(bench_moe) -> None:
    here = bench_moe._native.multiply_units()
    floats = ("bf16", "fp8", "fp8_channel", "mxfp4", "nvfp4", "mxfp8")
    for row in bench_moe._native.kernels():
        unit = bench_moe.unit_of(row["name"])
        assert not row["available"] or unit in here, row
        if row["name"].startswith("amx"):
            assert unit == ("amx_bf16" if row["weights"] in floats else "amx_int8")


def test_a_line_of_a_model(bench_moe, tmp_path: Path) -> None:
    import rows

    run = {**dict.fromkeys(rows.COLUMNS, ""), "shape": "tiny x2"}
    wrote = rows.of_model(
        run, benchmark.Result("tg8", 8, (100.0, 200.0, 150.0), ""), True, (1e6, 2e8), weights="bf16"
    )
    assert (wrote["tokens"], wrote["us"], wrote["us_p10"], wrote["us_p90"]) == (1, 6666.7, 5000.0, 10000.0)
    assert (wrote["roofline_us"], wrote["share"], wrote["gb_s"]) == (5000.0, 0.75, 0.15)
    hot = rows.of_model(run, benchmark.Result("tg8", 8, (100.0,), ""), share=0.9, bound="CPU bytes left")
    assert (hot["share"], hot["bound"]) == (0.9, "CPU bytes left")
    read = rows.of_model(run, benchmark.Result("pp64", 64, (6400.0,), ""), False)
    assert (read["benchmark"], read["tokens"], read["us"], read["share"]) == (
        "pp64, CPU only",
        64,
        10000.0,
        "",
    )
    for _ in range(2):
        rows.record([wrote, read], tmp_path / "out.csv")
    with (tmp_path / "out.csv").open(newline="") as file:
        assert [row["weights"] for row in csv.DictReader(file)] == ["bf16", ""] * 2


# module → what it measured
MEASURED = {
    "bench_handoff": [(2048, 1, "flags", 4.0), (2048, 1, "host_func", 8.0)],
    "bench_mla": [(1024, 4.0, 8.0)],
}


@pytest.mark.parametrize("name", MEASURED)
def test_a_file_that_does_not_exist_yet_begins_with_the_columns(
    bench_moe, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import rows

    monkeypatch.delitem(sys.modules, name, raising=False)
    wrote = importlib.import_module(name).lines("abc", "a machine", MEASURED[name])
    for _ in range(2):
        rows.record(wrote, tmp_path / "new.csv")
    with (tmp_path / "new.csv").open(newline="") as file:
        read = csv.DictReader(file)
        found = [(row["commit"], row["us"], row["ratio"]) for row in read]
        assert read.fieldnames == rows.COLUMNS
    assert found[:1] == [("abc", found[0][1], "2.00")] and len(found) == 2 * len(MEASURED[name])


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


@pytest.mark.parametrize(
    "kind, hidden, inner",
    [("bf16", 64, 96), ("q8_0", 64, 96), ("q4_0", 64, 96), ("q4_k", 256, 256), ("q6_k", 256, 256)],
)
def test_gguf_files_hold_a_model_whose_tokens_differ(
    kind: str, hidden: int, inner: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With rows that repeat, or weights with a mean, all tokens would choose the same experts: nothing to measure."""
    monkeypatch.syspath_prepend(str(FOLDER))
    import gguf_file
    import numpy

    import ktinject
    from ktinject.checkpoints.checkpoint import Checkpoint

    config = ktinject.tools.random_models.config(
        "qwen3-30b-a3b",
        2,
        hidden_size=hidden,
        moe_intermediate_size=inner,
        num_experts=16,
        head_dim=32,
        vocab_size=600,
    )
    metadata, tensors = gguf_file.qwen3_moe(config, kind)
    tensors = gguf_file.with_head(tensors, kind)
    metadata |= gguf_file.tokenizer(600)
    path = tmp_path / "a.gguf"
    pieces = gguf_file.data(tensors, numpy.random.default_rng(0))
    path.write_bytes(gguf_file.header(metadata, tensors) + b"".join(pieces))
    with Checkpoint.open(path) as checkpoint:
        expert = checkpoint.decode("model.layers.1.mlp.experts.15.down_proj.weight").float()
        embeddings = checkpoint.decode("model.embed_tokens.weight").float()
        types = {name: checkpoint.bytes_of(name) for name in ("lm_head.weight", "model.embed_tokens.weight")}
    _, values, size = gguf_file.TYPES[kind]
    assert types == {
        "lm_head.weight": 600 * hidden // values * size,
        "model.embed_tokens.weight": 600 * hidden * 2,
    }
    assert expert.shape == (hidden, inner) and abs(expert.mean()) < 0.002 and 0.017 < expert.std() < 0.023
    assert len(embeddings.unique(dim=0)) == 600 and 0.9 < embeddings.std() < 1.1
    model = ktinject.load(path, devices="cpu", progress=False)
    chosen: list[torch.Tensor] = []
    router = model.get_submodule("model.layers.1.mlp.gate")
    router.register_forward_hook(lambda *found: chosen.append(found[-1][-1]))
    with torch.no_grad():
        model(torch.arange(600)[None])
    shares = torch.bincount(chosen[0].flatten().long(), minlength=16) / chosen[0].numel() * 16
    assert shares.shape == (16,) and 0.5 < shares.min() and shares.max() < 2


def test_gguf_files_have_all_weights_of_their_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    import gguf_file

    from ktinject.hf import models
    from ktinject.tools import random_models

    for shape, writer in gguf_file.WRITERS.items():
        config = random_models.config(shape, 4, vocab_size=96)
        _, tensors = writer(config, "q4_0")
        weights = sum(math.prod(extents) for _, _, extents in tensors)
        assert weights == sum(p.numel() for p in models.meta_model(config, torch.bfloat16).parameters())


LLAMA_SERVER = """#!{python}
import http.server, json, os, sys, time
assert sys.argv[sys.argv.index("--parallel") + 1] == "3" and sys.argv[sys.argv.index("-c") + 1] == "48"
assert sys.argv[-2:] == ["-t", "2"] and os.environ["GGML_OP_OFFLOAD_MIN_BATCH"] == "64"

class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *_): pass
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert len(asked["prompt"]) == 5 and asked["ignore_eos"]
        self.send_response(200); self.end_headers()
        for written in range(asked["n_predict"] - {short} + 1):
            time.sleep({slow} if written == 3 else 0)
            answer = {{"stop": written == asked["n_predict"], "tokens_predicted": written}}
            self.wfile.write(b"data: " + json.dumps(answer).encode() + b"\\n\\n")
            self.wfile.flush()

http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


@pytest.fixture
def llama_clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Runs it beside a server whose texts are so many tokens short, or slow from their third token on."""
    monkeypatch.syspath_prepend(str(FOLDER))
    import llama_clients

    def run(more: str = "", short: int = 0, slow: float = 0.0) -> None:
        program = tmp_path / "llama-server"
        program.write_text(LLAMA_SERVER.format(python=sys.executable, short=short, slow=slow))
        program.chmod(0o755)
        command = f"x {program} a.gguf --clients 1 3 --prompt 5 --write 3 --repeats 1 {more}"
        way = "GGML_OP_OFFLOAD_MIN_BATCH=64 -t 2"
        monkeypatch.setattr(sys, "argv", [*command.split(), "--ways", way])
        llama_clients.main()

    return run


def test_clients_of_llama_cpps_server(llama_clients, capsys: pytest.CaptureFixture[str]) -> None:
    """Each text counts with what was asked for."""
    llama_clients()
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(" clients: ")[0].split()[-1] for line in lines] == ["1", "3"]
    assert all(float(line.partition(" clients: ")[2].split()[0]) > 0 for line in lines)
    assert not any("ended" in line for line in lines)


def test_a_text_of_llama_cpps_server_that_is_too_short_is_no_result(llama_clients) -> None:
    with pytest.raises(SystemExit, match=r"not all 1 clients got 3 tokens: \[2\]"):
        llama_clients(short=1)


def test_a_round_of_llama_cpps_server_that_takes_too_long_counts_what_was_written(
    llama_clients, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two of three tokens in two seconds and a little, and nobody waits for the rest or for more clients."""
    begin = time.monotonic()
    llama_clients("--limit 2", slow=60.0)
    assert time.monotonic() - begin < 30
    (line,) = capsys.readouterr().out.splitlines()
    assert line.endswith("; ended after 2 s")
    assert 0.5 < float(line.partition(" clients: ")[2].split()[0]) <= 1.0


def test_where_the_gpu_is_in_a_step_of_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt's pass, three steps of two layers, and the begin of another."""
    monkeypatch.syspath_prepend(str(FOLDER))
    import sglang_speed

    events, now = [{"cat": "cpu_op", "name": "forward", "ts": 0, "dur": 9000}], 0.0

    def step(layers: int, scale: float) -> None:
        nonlocal now
        for _ in range(layers):
            for name, gap, took in (("gemm", 1, 10), ("wait_kernel<bf16>", 2, 50)):
                now += gap * scale
                events.append({"cat": "kernel", "name": name, "ts": now, "dur": took * scale})
                now += took * scale

    step(2, 7)
    for _ in range(3):
        step(2, 1)
    said = sglang_speed.parts(events, 2)
    assert said.endswith("126 µs; 100 waiting for the CPU, 20 in other kernels, 6 in none")
    assert "too few" in sglang_speed.parts(events[:4], 2)


def test_layers_of_sglang_are_filled_without_a_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `bench_sglang_engine.py speed` has SGLang's processes do it."""
    monkeypatch.syspath_prepend(str(FOLDER))
    import sglang_speed

    from ktinject.sglang import KTMoEWrapper, wrapper

    monkeypatch.setattr(
        wrapper.KTMoEWrapper, "load_weights", KTMoEWrapper.load_weights
    )  # put back afterwards
    filled: dict[str, Any] = {}
    exec(sglang_speed.FILLED, filled)
    filled["register"]()
    made = KTMoEWrapper(0, 4, 2, 64, 32, num_gpu_experts=0, method="AMXINT4", threadpool_count=1)
    made.load_weights()
    x, ids = torch.randn(3, 64).bfloat16(), torch.tensor([[0, 3], [1, 2], [2, 0]])
    out = made.forward(x, ids, torch.full((3, 2), 0.5))
    assert out.shape == x.shape and out.float().abs().min() > 0
    assert torch.equal(out, made.forward(x, ids.flip(0), torch.full((3, 2), 0.5))), "all experts are alike"
    some = KTMoEWrapper(0, 4, 2, 64, 32, num_gpu_experts=1, method="AMXINT4", threadpool_count=1)
    some.load_weights()
    of_each = some.forward(x, torch.tensor([[0, 0], [1, 0], [2, 3]]), torch.full((3, 2), 0.5)).float()
    assert not of_each[0].any() and torch.equal(of_each[2], out[2].float()), "the first one is on the GPU"
    torch.testing.assert_close(of_each[1], out[1].float() / 2)


def test_growth_of_the_processes_of_a_soak(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each process by itself: those that have ended or begun are not growth, nor is torch's compiler."""
    monkeypatch.syspath_prepend(str(FOLDER))
    import sglang_answers
    import sglang_engine

    def process(name: str, own: float) -> dict[str, Any]:
        return {"name": name, "own": own, "rss": own + 100, "threads": 3, "files": 7}

    compiler = sglang_engine.COMPILER
    before = {
        "1": process("scheduler", 500),
        "2": process("router", 90),
        "3": process(compiler, 10),
        "4": process("x", 1),
    }
    after = {
        "1": process("scheduler", 512),
        "2": process("router", 80),
        "3": process(compiler, 400),
        "5": process("y", 999),
    }
    assert sglang_engine.grown([before, before, after]) == 12
    found = {"ended": {"stop": 3}, "left": [0, 0], "gpu": [None, None], "held": [before, after]}
    said = sglang_answers.leavings(found).splitlines()
    assert "scheduler                own 500 to 512, rss 600 to 612, threads 3 to 3, files 7 to 7" in said
    assert "x                        ended between the first part and the last" in said
    assert "y                        began between the first part and the last" in said
    assert sglang_engine._name("python", "python -m torch._inductor.compile_worker --workers=16") == compiler
    assert sglang_engine._name("python", "sglang::scheduler  ") == "sglang::scheduler"
    assert said[-1] == "12 MiB more of its own in the process that grew most"


def test_cells_behind_cublas_are_counted_with_and_without_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    for name in ("bench_linear", "rows"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import bench_linear

    def row(label: str, tokens: int, us: float, peer_us: float) -> dict[str, object]:
        ratio = round(peer_us / us, 3)
        cell = {"shape": "512x2048", "tokens": tokens, "weights": label}
        return cell | {"us": us, "peer_us": peer_us, "ratio": ratio}

    times = [(64, 5.0, 5.0, 7.0), (128, 10.2, 10.2, 10.0), (256, 12.0, 10.3, 10.0)]
    rows = [row("int4-g128", m, alone, peer) for m, alone, _, peer in times]
    rows += [row("int4-g128+bf16", m, both, peer) for m, _, both, peer in times]
    assert bench_linear.behind(rows) == [
        "# int4 alone: behind cuBLAS by more than 2 % in 1 of 3 cells, least 0.83",
        "# with bf16_copy: behind cuBLAS by more than 2 % in 1 of 3 cells, least 0.97; 512x2048 at 256: 0.971",
    ]
