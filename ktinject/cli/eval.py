"""`ktinject eval`: how close a swapped model stays to the unswapped one."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ktinject.cli import options
from ktinject.errors import CheckpointError, PlanError
from ktinject.grid import Grid
from ktinject.rules import parse_overrides

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ktinject.tools.evaluate import Agreement, Divergence

UNSWAPPED = "unswapped"

Variants = Annotated[
    list[str] | None,
    typer.Option(
        "--variant",
        metavar="NAME=VALUE,…",
        help="Add a row to the table: these settings of the rules, on top of --set; may be repeated.",
    ),
]
Against = Annotated[
    str,
    typer.Option(
        metavar="RULES",
        help="Compare with the model under these rules, not with the unswapped model.",
        autocompletion=options.bundled_names,
    ),
]
TextFile = Annotated[
    Path | None,
    typer.Option(
        "--text",
        metavar="FILE",
        help="The text to measure on; default: heldout.txt, in MODEL or beside it.",
        autocompletion=options.files,
    ),
]
PromptFile = Annotated[
    Path | None,
    typer.Option(
        "--prompts",
        metavar="FILE",
        help='Prompts to continue, lines of {"prompt": "…"}; default: prompts.jsonl, in MODEL or beside it.',
        autocompletion=options.files,
    ),
]
Tokens = Annotated[
    int, typer.Option("--tokens", metavar="N", min=2, help="Measure on the first N tokens of the text.")
]
Decode = Annotated[
    bool | None,
    typer.Option(
        "--decode/--no-decode",
        help="Read the text token by token, as generate does; default: only where experts are deferred.",
        show_default=False,
    ),
]
Window = Annotated[int, typer.Option("--window", metavar="N", min=2, help="Show the model N tokens at once.")]


@dataclass(frozen=True)
class Result:
    """One variant against the reference; no agreement without prompts."""

    variant: str
    variables: dict[str, Any]
    decode: bool
    divergence: Divergence
    agreement: Agreement | None


def command(
    model: options.Model,
    rules: options.Rules = "auto",
    variables: options.Set = None,
    variants: Variants = None,
    against: Against = UNSWAPPED,
    text: TextFile = None,
    tokens: Tokens = 8192,
    window: Window = 512,
    decode: Decode = None,
    prompts: PromptFile = None,
    new_tokens: options.NewTokens = 64,
    device: options.Device = None,
    budget: options.Budget = None,
    ignore: options.Ignore = None,
    dtype: options.RestDtype = "float32",
    plugins: options.Plugins = None,
    as_json: options.AsJson = False,
) -> None:
    """Measure perplexity, KL divergence and greedy agreement against the unswapped model in float32."""
    # Spinning OpenMP threads gain a little speed on idle cores and lose nearly all of it on shared ones. Speed is
    # not measured here; `run` measures it and leaves this alone.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    with options.answers(as_json):
        options.load_plugins(plugins)
        import torch
        from rich.console import Console

        import ktinject
        from ktinject.tools import evaluate

        chosen = _variants(variables or [], variants or [])
        text_file = text or _beside(model, "heldout.txt")
        if text_file is None:
            raise PlanError(f"{model}: there is no heldout.txt in it or beside it. Name a text: --text FILE.")
        prompt_file = prompts or _beside(model, "prompts.jsonl")
        tokenizer = options.load_tokenizer(model)
        ids = torch.tensor(
            tokenizer(options.read_text(text_file), add_special_tokens=False)["input_ids"][:tokens],
            dtype=torch.int64,
            device="cpu",
        )
        places: dict[str, Any] = {
            "devices": device,
            "budget": options.parse_sizes(budget, "--budget"),
            "ignore": ignore or (),
        }

        # All that can be refused, before the first model is loaded.
        on_meta = options.build_on_meta(model, dtype)
        evaluate.check_text(on_meta, ids, window)
        starts = (
            [] if prompt_file is None else options.read_prompts(tokenizer, prompt_file, on_meta, new_tokens)
        )
        wanted: list[tuple[str, dict[str, Any]]] = [(rules, values) for values in chosen.values()]
        for file, values in [*wanted, *([] if against == UNSWAPPED else [(against, {})])]:
            ktinject.plan(on_meta, file, checkpoint=model, variables=values, **places).check()

        with Console(stderr=True).status(f"{against}: loading") as status:
            if against == UNSWAPPED:
                reference = _load_unswapped(model, device)
            else:
                reference = ktinject.load(model, against, dtype=dtype, progress=False, **places)
            status.update(f"{against}: writing")
            expected = [evaluate.greedy(reference, start, new_tokens) for start in starts]
            results = []
            for name, values in chosen.items():
                status.update(f"{name}: loading")
                swapped = ktinject.load(model, rules, dtype=dtype, variables=values, progress=False, **places)
                status.update(f"{name}: reading the text")
                steps = _defers(reference) or _defers(swapped) if decode is None else decode
                divergence = evaluate.divergence(reference, swapped, ids, window=window, decode=steps)
                status.update(f"{name}: writing")
                written = [evaluate.greedy(swapped, start, new_tokens) for start in starts]
                agreement = evaluate.greedy_agreement(expected, written) if starts else None
                results.append(Result(name, values, steps, divergence, agreement))
                del swapped
        if as_json:
            about = {
                "model": str(model),
                "rules": rules,
                "against": against,
                "dtype": dtype,
                "text": str(text_file),
            }
            options.show_json({**about, "window": window, "results": [asdict(result) for result in results]})
            return
        options.show(_table(against, results))
        counted = (
            f"{results[0].divergence.tokens:,} predictions on {text_file}, in windows of {window} tokens"
        )
        options.say(f"{counted}; {len(starts)} prompts, at most {new_tokens} new tokens each")
        if stepped := [result.variant for result in results if result.decode]:
            options.say(f"the text was read token by token for {', '.join(stepped)}")


def _defers(model: PreTrainedModel) -> bool:
    """Whether a model does something at decode that it does not do with a prompt."""
    return any(getattr(module, "defers", 0) for module in model.modules())


def _variants(base: list[str], variants: list[str]) -> dict[str, dict[str, Any]]:
    """Name of a row → variables. Raises RuleError as `parse_overrides` does; PlanError for equal rows."""
    common = parse_overrides(base)
    if not variants:
        return {", ".join(base) or "swapped": common}
    found: dict[str, dict[str, Any]] = {}
    for text in variants:
        if text in found:
            raise PlanError(f"--variant {text!r} is given twice. Give each variant once.")
        found[text] = {**common, **parse_overrides(_split(text))}
    return found


def _split(text: str) -> list[str]:
    """The settings of a variant. Names of rules may have commas, too."""
    parts: list[str] = []
    for part in text.split(","):
        if parts and "=" not in parts[-1]:
            parts[-1] += f",{part}"
        else:
            parts.append(part)
    return parts


def _beside(model: Path, name: str) -> Path | None:
    beside = Path(os.path.normpath(model / ".." / name))
    return next((file for file in (model / name, beside) if file.is_file()), None)


def _load_unswapped(folder: Path, device: list[str] | None) -> PreTrainedModel:
    import torch
    from transformers.utils import logging

    from ktinject.hf import models

    logging.disable_progress_bar()
    try:
        model = models.unswapped(folder, dtype=torch.float32)
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{folder}: transformers cannot load it unswapped: {error}") from error
    return model.to(device[0] if device else "cpu").eval()


def _table(against: str, results: list[Result]) -> Grid:
    titles = ("perplexity", "change", "mean KL", "p99 KL", "same top-1", "same prompts", "same tokens")
    rows = [(against, f"{results[0].divergence.perplexity_a:.4f}", *["–"] * 6)]
    for result in results:
        d, a = result.divergence, result.agreement
        rows.append(
            (
                result.variant,
                f"{d.perplexity_b:.4f}",
                f"{d.perplexity_b / d.perplexity_a - 1:+.3%}",
                f"{d.mean_nats:.2e}",
                f"{d.p99_nats:.2e}",
                f"{d.top1:.2%}",
                f"{a.identical} of {a.prompts}" if a else "–",
                f"{a.same / a.tokens:.1%}" if a and a.tokens else "–",
            )
        )
    return Grid(("", *titles), rows, titles)
