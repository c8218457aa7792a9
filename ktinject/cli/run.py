"""`ktinject run`: one prompt, and what swapping changed."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ktinject.cli import options
from ktinject.cli.measure import Measurement, measure, measure_unswapped, resident_bytes
from ktinject.grid import Grid

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

PROMPT = "import unittest\n\n\nclass QueueTest(unittest.TestCase):\n    def setUp(self):\n"
OF_PICTURES = "What is this?"

Prompt = Annotated[
    str,
    typer.Option(
        "--prompt",
        metavar="TEXT",
        callback=options.typed_text,
        help="The text to continue, or the question to answer.",
        show_default=False,
    ),
]
Compare = Annotated[bool, typer.Option(help="Measure the unswapped model, too, in a process of its own.")]
CheckTensors = Annotated[
    bool, typer.Option("--check-tensors", help="Refuse NaN and infinity in the weights.")
]


def command(
    model: options.Model,
    rules: options.Rules = None,
    prompt: Prompt = PROMPT,
    images: options.Images = None,
    new_tokens: options.NewTokens = 64,
    compare: Compare = True,
    variables: options.Set = None,
    device: options.Device = None,
    budget: options.Budget = None,
    context: options.Context = None,
    ignore: options.Ignore = None,
    dtype: options.RestDtype = "auto",
    check_tensors: CheckTensors = False,
    tp: options.Tp = False,
    cache: options.Cache = "off",
    plugins: options.Plugins = None,
) -> None:
    """Show the plan, load the model, write greedily, and compare with the unswapped model."""
    import torch
    from transformers import TextStreamer

    import ktinject
    from ktinject.tools import evaluate

    options.load_plugins(plugins)
    folder = options.find_model(model)
    config = options.read_config(folder)
    tokenizer = options.load_tokenizer(folder)
    arguments = options.arguments(config, rules, variables, device, budget, context, ignore)
    arguments |= {"checkpoint": folder, "tp": tp}
    check_tensors |= arguments.pop("check_tensors")
    with options.one_voice(tp) as first:
        before_bytes = resident_bytes()
        swapped = options.build_on_meta(folder, dtype)
        if images and prompt == PROMPT:
            prompt = OF_PICTURES
        text, ids, more = (
            _see(swapped, folder, prompt, images) if images else (*_encode(tokenizer, prompt), {})
        )
        evaluate.check_prompt(swapped, torch.tensor(ids, dtype=torch.int64, device="cpu"), new_tokens)
        plan = ktinject.plan(swapped, **arguments)
        options.show(plan)
        kept: Any = {"cache": None if cache == "off" else cache, "check_tensors": check_tensors}
        ktinject.optimize(swapped, **arguments, **kept)

        typer.echo(f"\n{prompt}", nl=text != prompt)
        streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
        evaluate.greedy(
            swapped,
            torch.tensor(ids, dtype=torch.int64, device="cpu"),
            new_tokens,
            streamer=streamer,
            more=more,
        )
        ours = measure(swapped, ids, new_tokens, before_bytes, more)
        columns: dict[str, Measurement | str] = {"swapped": ours}
        if compare and first:
            # Both models at once may not fit into memory.
            del swapped
            gc.collect()
            device_map = None if plan.device_map == {"": "cpu"} else "auto"
            theirs = measure_unswapped(folder, ids, new_tokens, dtype=dtype, device_map=device_map, more=more)
            columns = {"unswapped": theirs, "swapped": ours}
        options.show(_table(columns))
        for title, value in columns.items():
            if isinstance(value, str):
                options.say(f"{title}: not measured: {value}")


def _encode(tokenizer: PreTrainedTokenizerBase, prompt: str) -> tuple[str, list[int]]:
    """The prompt as the model gets it, a base model without a chat template too: text and token ids.

    Raises  TemplateError for a chat template that gives no text
    """
    if not tokenizer.chat_template:
        return prompt, tokenizer(prompt)["input_ids"]
    from ktinject.hf import templates

    text = templates.render(tokenizer, [{"role": "user", "content": prompt}])
    return text, tokenizer(text, add_special_tokens=False)["input_ids"]


def _see(
    swapped: PreTrainedModel, folder: Path, prompt: str, images: list[Path]
) -> tuple[str, list[int], dict[str, Any]]:
    """The same of a question about pictures, with what `generate` takes beside ids. Raises KTInjectError."""
    from ktinject.hf import pictures

    pictures.check_reads(swapped)
    message = {"role": "user", "content": prompt, "images": images}
    return "", *pictures.encode(pictures.load_processor(folder), [message])


def _table(columns: dict[str, Measurement | str]) -> Grid:
    """A column for each measurement, or for what has none."""

    def row(title: str, show: Callable[[Measurement], str]) -> tuple[str, ...]:
        cells = (show(value) if isinstance(value, Measurement) else "–" for value in columns.values())
        return title, *cells

    rows = [
        row("tokens/s", lambda m: f"{len(m.tokens) / m.seconds:.1f}"),
        row("resident memory", lambda m: f"{m.resident_bytes / 2**20:,.0f} MiB"),
        row("of that, the model", lambda m: f"{m.model_bytes / 2**20:,.0f} MiB"),
    ]
    if any(isinstance(m, Measurement) and m.gpu_bytes for m in columns.values()):
        rows.append(row("GPU memory", lambda m: f"{m.gpu_bytes / 2**20:,.0f} MiB"))
    reference = columns.get("unswapped")
    if isinstance(reference, Measurement):
        rows.append(row("identical greedy tokens", lambda m: _share(m.tokens, reference.tokens)))
    return Grid(("", *columns), rows, columns)


def _share(tokens: list[int], reference: list[int]) -> str:
    from ktinject.tools import evaluate

    found = evaluate.greedy_agreement([reference], [tokens])
    return f"{found.same / found.tokens:.0%} ({found.same} of {found.tokens})"
