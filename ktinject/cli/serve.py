"""`ktinject serve`: OpenAI's interface to a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ktinject.cli import loaded, options
from ktinject.errors import PlanError

Host = Annotated[
    str, typer.Option("--host", metavar="HOST", help="Listen there; 0.0.0.0 is for the network.")
]
Port = Annotated[int, typer.Option("--port", metavar="PORT", min=0, max=65535, help="0: any that is free.")]
Name = Annotated[
    str | None,
    typer.Option("--name", metavar="NAME", help="What requests call the model; by default as its folder."),
]
Context = Annotated[
    int | None,
    typer.Option(
        "--context",
        metavar="N",
        min=16,
        help="Tokens of a request, prompt and answer. By default as many as go.",
    ),
]
Most = Annotated[
    int | None, typer.Option("--max-new-tokens", metavar="N", min=1, help="Tokens of an answer at most.")
]
Queue = Annotated[
    int,
    typer.Option("--queue", metavar="N", min=0, help="So many requests wait while others run; more get 429."),
]
Batch = Annotated[
    int, typer.Option("--batch", metavar="N", min=1, help="Requests that are computed at once, at most.")
]
Prefixes = Annotated[
    float,
    typer.Option(
        "--prefix-cache-gib",
        metavar="GIB",
        min=0,
        help="RAM for what was read of earlier texts, with which next turns begin; 0: none.",
    ),
]
NoBatching = Annotated[
    bool, typer.Option("--no-continuous-batching", help="Compute one request after the other.")
]
Timeout = Annotated[
    float, typer.Option("--timeout", metavar="SECONDS", min=0.1, help="End a request after that.")
]
Grace = Annotated[
    int, typer.Option("--grace", metavar="SECONDS", min=0, help="What requests get when the server ends.")
]
MaxBody = Annotated[int, typer.Option("--max-body-mib", metavar="N", min=1, help="Refuse larger requests.")]
Key = Annotated[
    Path | None,
    typer.Option("--api-key-file", metavar="PATH", help="A file with the key that requests must bring."),
]
AllowOrigin = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-origin",
        metavar="URL",
        help="A page from there may use the server, as https://host:port; may be given several times; *: any page.",
    ),
]


def command(
    model: options.Model,
    rules: options.Rules = None,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    name: Name = None,
    context: Context = None,
    new_tokens: Most = None,
    queue: Queue = 32,
    batch: Batch = 16,
    no_batching: NoBatching = False,
    prefix_cache_gib: Prefixes = 2.0,
    timeout: Timeout = 600.0,
    grace: Grace = 30,
    max_body_mib: MaxBody = 8,
    api_key_file: Key = None,
    allow_origin: AllowOrigin = None,
    variables: options.Set = None,
    device: options.Device = None,
    budget: options.Budget = None,
    ignore: options.Ignore = None,
    dtype: options.RestDtype = "auto",
    cache: options.Cache = "off",
    plugins: options.Plugins = None,
) -> None:
    """Serve a model: chat completions, completions, responses, models, health and metrics over HTTP."""
    from ktinject.serving import stock

    stock.require_packages()  # before the model is loaded
    key, origins = _key(api_key_file), _origins(allow_origin or [])

    from ktinject.serving.gate import Limits
    from ktinject.serving.server import Server, Settings

    folder_name, swapped, tokenizer = loaded.load(
        model, rules, device, budget, dtype, variables, plugins, context, cache, ignore
    )
    limits = Limits(queue=queue, seconds=timeout, body=max_body_mib << 20, key=key, origins=origins)
    at_once = 1 if no_batching else batch
    settings = Settings(
        host, port, context, new_tokens, grace, at_once, int(prefix_cache_gib * 2**30), limits
    )
    known_as = name or folder_name
    server = Server(swapped, tokenizer, known_as, settings)
    for note in server.notes:
        typer.echo(f"ktinject: {note}", err=True)
    server.run(
        lambda address: typer.echo(
            f"{known_as} at {address}/v1, page at {address}, metrics at {address}/metrics"
        )
    )


def _origins(given: list[str]) -> frozenset[str]:
    """Raises PlanError."""
    from ktinject.serving import origins

    try:
        return frozenset(map(origins.origin, given))
    except ValueError as error:
        raise PlanError(
            f"--allow-origin: {error}; it is what a browser calls a page's server, such as https://chat.example or "
            "http://localhost:3000, or *. Write that, without a path."
        ) from None


def _key(file: Path | None) -> str | None:
    """Raises PlanError."""
    if file is None:
        return None
    key = options.read_text(file).strip()
    if len(key) < 8 or not key.isascii() or not key.isprintable():
        raise PlanError(
            f"--api-key-file {file}: a key has at least 8 ASCII characters. Write a longer one there."
        )
    return key
