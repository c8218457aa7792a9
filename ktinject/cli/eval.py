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
        metavar="RULES|MODEL",
        help="Compare with the model under these rules, or with the unswapped model of another folder.",
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


EvalDtype = Annotated[
    options.Dtype | None,
    typer.Option(
        metavar="auto|float32|bfloat16|float16",
        help="The type of everything that is not swapped; default: float32, and auto where weights are packed.",
        show_default=False,
    ),
]


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
    rules: options.Rules = None,
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
    dtype: EvalDtype = None,
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
        folder = options.find_model(model)
        text_file = text or _beside(folder, "heldout.txt")
        if text_file is None:
            raise PlanError(f"{model}: there is no heldout.txt in it or beside it. Name a text: --text FILE.")
        prompt_file = prompts or _beside(folder, "prompts.jsonl")
        dtype = dtype or ("auto" if options.is_packed(folder) else "float32")
        on_meta = options.build_on_meta(folder, dtype)
        tokenizer = options.load_tokenizer(folder)
        ids = torch.tensor(
            tokenizer(options.read_text(text_file), add_special_tokens=False)["input_ids"][:tokens],
            dtype=torch.int64,
            device="cpu",
        )

        def arguments(rules: str | None, values: dict[str, Any], tell: bool = False) -> dict[str, Any]:
            found = options.arguments(on_meta.config, rules, values, device, budget, ignore=ignore, tell=tell)
            del found["check_tensors"], found["tp"]
            return found

        # All that can be refused, before the first model is loaded.
        evaluate.check_text(on_meta, ids, window)
        starts = (
            [] if prompt_file is None else options.read_prompts(tokenizer, prompt_file, on_meta, new_tokens)
        )
        wanted = {
            name: arguments(rules, values, tell=not number)
            for number, (name, values) in enumerate(chosen.items())
        }
        original = _original(folder, against)
        under = arguments(against, {}) if original is None else None
        for each in [*wanted.values(), *([] if under is None else [under])]:
            ktinject.plan(on_meta, checkpoint=folder, **each).check()

        with Console(stderr=True).status(f"{against}: loading") as status:
            if under is None:
                assert original is not None
                reference = _load_unswapped(original, device)
            else:
                reference = ktinject.load(folder, dtype=dtype, progress=False, **under)
            status.update(f"{against}: writing")
            expected = [evaluate.greedy(reference, start, new_tokens) for start in starts]
            results = []
            for name, values in chosen.items():
                status.update(f"{name}: loading")
                swapped = ktinject.load(folder, dtype=dtype, progress=False, **wanted[name])
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
                "model": model,
                "rules": next(iter(wanted.values()))["rules"],
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


def _original(folder: Path, against: str) -> Path | None:
    """The folder whose unswapped model is the reference; None where that is the model under other rules.

    Raises  CheckpointError if transformers cannot read its weights
    """
    if against != UNSWAPPED and not (Path(against) / "config.json").is_file():
        return None
    original = folder if against == UNSWAPPED else Path(against)
    if options.is_packed(original):
        raise CheckpointError(
            f"{original}: its weights are packed, and transformers reads plain ones. Compare with the model that it "
            "was converted from: --against FOLDER."
        )
    return original


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
