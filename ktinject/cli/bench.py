"""`ktinject bench`: tokens a second, by llama-bench's conventions."""

from __future__ import annotations

import csv
import io
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ktinject.cli import options
from ktinject.errors import PlanError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from ktinject.tools.benchmark import Breakdown, Result


def command(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="A model folder, a .gguf file, or a name in the Hub's cache; without it, give --shape.",
            autocompletion=options.files,
        ),
    ] = None,
    shape: Annotated[
        str | None,
        typer.Option("--shape", metavar="SHAPE", help="Measure random weights of this known shape instead."),
    ] = None,
    layers: Annotated[
        int | None, typer.Option("--layers", metavar="N", min=1, help="Take N layers of that shape.")
    ] = None,
    rules: options.Rules = None,
    variables: options.Set = None,
    device: options.Device = None,
    budget: options.Budget = None,
    ignore: options.Ignore = None,
    prompt: Annotated[
        list[str] | None,
        typer.Option(
            "-p",
            "--prompt",
            metavar="N,…",
            help="Read prompts of N tokens: 512,2048 or 64-512*2; may be repeated.",
        ),
    ] = None,
    write: Annotated[
        list[str] | None,
        typer.Option(
            "-n",
            "--write",
            metavar="N,…",
            help="Write N tokens; lists and ranges as for -p; may be repeated.",
        ),
    ] = None,
    depth: Annotated[
        int,
        typer.Option("-d", "--depth", metavar="N", min=0, help="Write behind a prompt of N tokens and one."),
    ] = 0,
    repetitions: Annotated[
        int, typer.Option("-r", "--repetitions", metavar="N", min=1, help="Measure each test N times.")
    ] = 5,
    batch: Annotated[
        int, typer.Option("--batch", metavar="N", min=1, help="Run N rows at the same time.")
    ] = 1,
    output: Annotated[
        Literal["md", "csv", "json"],
        typer.Option("-o", "--output", metavar="md|csv|json", help="The form of the results."),
    ] = "md",
    breakdown: Annotated[
        bool, typer.Option("--breakdown", help="Show where the time of a decode step goes, layer by layer.")
    ] = False,
    trace: Annotated[
        Path | None,
        typer.Option(
            "--trace",
            metavar="FILE",
            dir_okay=False,
            help="Write a Chrome trace of some decode steps.",
            autocompletion=options.files,
        ),
    ] = None,
    llama_bench: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            exists=True,
            dir_okay=False,
            help="Run llama.cpp's llama-bench, this program, in comparison, on --gguf.",
            autocompletion=options.files,
        ),
    ] = None,
    gguf: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            exists=True,
            dir_okay=False,
            help="The model that llama-bench runs.",
            autocompletion=options.files,
        ),
    ] = None,
    tp: options.Tp = False,
    plugins: options.Plugins = None,
) -> None:
    """Measure how fast a model reads prompts and writes tokens.

    Default: pp512, pp2048 (where the model was made for so many) and tg128, five times each, as mean ± standard
    deviation in tokens a second. As in llama-bench, a list or a range of numbers is several tests, and 0 is none.
    """
    with options.answers(output == "json"):
        if (model is None) == (shape is None):
            raise PlanError(
                f"found {'neither MODEL nor' if model is None else 'both MODEL and'} --shape; give one of them."
            )
        if (llama_bench is None) != (gguf is None):
            raise PlanError("--llama-bench and --gguf go together: the program, and the model that it runs.")
        if llama_bench is not None and not os.access(llama_bench, os.X_OK):
            raise PlanError(f"--llama-bench {llama_bench}: this is no program. Name llama.cpp's llama-bench.")
        if breakdown and output == "csv":
            raise PlanError("--breakdown is a second table, and -o csv prints one. Use -o md or -o json.")
        if trace is not None:
            options.check_writable(trace, "--trace")
        prompts, writes = options.parse_counts(prompt, "-p"), options.parse_counts(write, "-n")
        is_default = prompts is None and writes is None
        if depth and (not writes or (prompts and llama_bench is not None)):
            raise PlanError(
                "--depth is for -n: give it numbers of tokens to write"
                + (", and leave -p out: llama-bench reads prompts at that depth, too." if writes else ".")
            )
        if not (is_default or prompts or writes or breakdown or trace):
            raise PlanError("-p and -n: no test is left. Give one of them a number other than 0.")
        options.load_plugins(plugins)
        from ktinject.hf import hub
        from ktinject.tools import benchmark, evaluate

        folder, name = (None, "") if model is None else hub.find(model)
        config = _config(folder, shape, layers)
        if is_default:
            prompts = [count for count in (512, 2048) if count <= evaluate.longest_text(config)]
            writes = [128]
        benchmark.check_lengths(config, prompts or [], writes or [], depth)
        with options.one_voice(tp) as first:
            arguments = options.arguments(config, rules, variables, device, budget, ignore=ignore)
            title, swapped = _load(folder, name, shape, config, arguments, tp)
            found = benchmark.run(swapped, prompts or [], writes or [], repetitions, batch, depth)
            where = (
                benchmark.profile(swapped, batch=batch, trace=trace if first else None)
                if breakdown or trace
                else None
            )
            rows = [_row(title, swapped, result) for result in found]
            on_gpu = swapped.device.type == "cuda"
        if not first:
            return
        if llama_bench is not None:
            del swapped
            assert gguf is not None
            rows += llama_rows(
                llama_bench, gguf, prompts or [], writes or [], repetitions, on_gpu, depth=depth
            )
        _show(rows, where if breakdown else None, output)


def _config(folder: Path | None, shape: str | None, layers: int | None) -> PreTrainedConfig:
    from ktinject.tools import random_models

    if folder is None:
        assert shape is not None
        return random_models.config(shape, layers)
    if layers is not None:
        raise PlanError("--layers is for --shape; a model folder has the layers it has.")
    return options.read_config(folder)


def _load(
    folder: Path | None,
    name: str,
    shape: str | None,
    config: PreTrainedConfig,
    arguments: dict[str, Any],
    tp: bool,
) -> tuple[str, PreTrainedModel]:
    import torch

    import ktinject
    from ktinject.tools import random_models

    if tp:
        torch.manual_seed(0)  # all processes read the same prompts
    arguments["tp"] |= tp
    if folder is not None:
        return name, ktinject.load(folder, progress=sys.stderr.isatty(), **arguments)
    assert shape is not None
    taken = {key: arguments[key] for key in ("devices", "budget", "variables", "tp")}
    built = random_models.build(config, arguments["rules"], **taken)
    return f"{shape} ({config.num_hidden_layers} layers)", built


def _row(title: str, model: PreTrainedModel, result: Result) -> dict[str, Any]:
    from ktinject import _native
    from ktinject.operators import REGISTRY

    plan: Any = model.ktinject
    of_experts = [
        replacement.runs for replacement in plan.replacements if REGISTRY[replacement.operator].per_expert
    ]
    runs = sorted({runs["weights"] for runs in of_experts if "weights" in runs})
    return {
        "model": title,
        "backend": f"ktinject, {model.device}",
        "experts": ", ".join(runs),
        "bytes": sum(plan.bytes.values()),
        "threads": _native.threads(),
        "test": result.test,
        "tokens_per_second": result.mean,
        "deviation": result.deviation,
        "repetitions": list(result.rates),
        "how": result.how,
    }


def llama_rows(
    program: Path,
    gguf: Path,
    prompts: list[int],
    writes: list[int],
    repetitions: int,
    on_gpu: bool = True,
    options: Sequence[str] = (),
    depth: int = 0,
) -> list[dict[str, Any]]:
    """llama-bench's own results for the same tests, of several ways to run one the fastest.

    on_gpu   all but the experts on the GPU; else no GPU is shown to it
    options  more of its own, such as -t 15,16
    Raises   PlanError with the last line it wrote if it fails
    """
    command = [str(program), "-m", str(gguf), "-r", str(repetitions), "-o", "json"]
    command += ["-ngl", "99", "-ncmoe", "99"] if on_gpu else ["-ngl", "0"]
    command += ["-p", ",".join(map(str, prompts or [0])), "-n", ",".join(map(str, writes or [0]))]
    command += [*(["-d", str(depth)] if depth else []), *options]
    hidden = {} if on_gpu else {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **hidden})
    if done.returncode:
        last = done.stderr.strip().rpartition("\n")[2]
        raise PlanError(f"{program}: ended with code {done.returncode}: {last}. Run it alone to see why.")
    try:
        answers = json.loads(done.stdout)
    except ValueError:
        raise PlanError(
            f"{program}: wrote {done.stdout[:60]!r} where llama-bench writes JSON. Name llama.cpp's llama-bench."
        ) from None
    rows: dict[str, dict[str, Any]] = {}
    for found in sorted(answers, key=lambda each: each["avg_ts"]):
        test = f"pp{found['n_prompt']}" if found["n_prompt"] else f"tg{found['n_gen']}"
        test += f" @ d{depth}" if depth else ""
        rows[test] = {
            "model": found["model_type"],
            "backend": f"llama.cpp {found['build_commit']}, {found['backends'] if on_gpu else 'CPU'}",
            "experts": gguf.name,
            "bytes": found["model_size"],
            "threads": found["n_threads"],
            "test": test,
            "tokens_per_second": found["avg_ts"],
            "deviation": found["stddev_ts"],
            "repetitions": found["samples_ts"],
            "how": f"llama-bench, {found['n_threads']} threads, -ub {found['n_ubatch']}",
        }
    return list(rows.values())


def _show(rows: list[dict[str, Any]], where: Breakdown | None, output: str) -> None:
    if output == "json":
        options.show_json({"results": rows, "breakdown": None if where is None else asdict(where)})
        return
    if output == "csv":
        text = io.StringIO()
        columns = [name for name in rows[0] if name != "repetitions"] if rows else []
        writer = csv.DictWriter(text, columns, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        typer.echo(text.getvalue(), nl=False)
    else:
        _markdown(
            ["model", "backend", "experts", "size", "threads", "test", "t/s"],
            [
                [
                    row["model"],
                    row["backend"],
                    row["experts"],
                    f"{row['bytes'] / 2**30:.2f} GiB",
                    str(row["threads"]),
                    row["test"],
                    f"{row['tokens_per_second']:.2f} ± {row['deviation']:.2f}",
                ]
                for row in rows
            ],
        )
    if where is not None:
        typer.echo()
        _markdown(
            ["µs of a decode step", "together", "GPU busy", "experts on the CPU", "handoff", "neither"],
            [
                [name, *(f"{getattr(part, of):.0f}" for of in ("step", "gpu", "cpu", "handoff", "idle"))]
                for name, part in [("all", where), *where.layers.items()]
            ],
        )


def _markdown(columns: list[str], rows: list[list[str]]) -> None:
    typer.echo("| " + " | ".join(columns) + " |")
    typer.echo("|" + " --- |" * len(columns))
    for row in rows:
        typer.echo("| " + " | ".join(row) + " |")
