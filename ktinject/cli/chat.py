"""`ktinject chat`: a conversation in the terminal."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ktinject.cli import loaded, options

System = Annotated[
    str | None,
    typer.Option(
        "--system",
        metavar="TEXT",
        callback=options.typed_text,
        help="What the model is told before the conversation.",
    ),
]
File = Annotated[
    list[Path] | None,
    typer.Option("--file", metavar="PATH", help="A text file before the first question; may be repeated."),
]
Plain = Annotated[bool, typer.Option("--plain", help="Show answers as they are written, not as Markdown.")]


def command(
    model: options.Model,
    rules: options.Rules = None,
    system: System = None,
    file: File = None,
    images: options.Images = None,
    new_tokens: options.NewTokens = 1024,
    temperature: options.Temperature = None,
    top_p: options.TopP = None,
    seed: options.Seed = None,
    plain: Plain = False,
    variables: options.Set = None,
    device: options.Device = None,
    budget: options.Budget = None,
    ignore: options.Ignore = None,
    dtype: options.RestDtype = "auto",
    cache: options.Cache = "off",
    plugins: options.Plugins = None,
) -> None:
    """Talk with a model: streamed Markdown, history, files. Lines of stdin are questions where it is no terminal."""
    from ktinject.serving.conversation import Conversation
    from ktinject.serving.terminal import Session

    name, swapped, tokenizer = loaded.load(
        model, rules, device, budget, dtype, variables, plugins, cache=cache, ignore=ignore
    )
    sampling: dict[str, Any] = options.sampling(temperature, top_p, seed)
    session = Session(Conversation(swapped, tokenizer, system, new_tokens, **sampling), name, not plain)
    for path in file or []:
        session.attach(path)
    for path in images or []:
        session.show(path)
    session.run()
