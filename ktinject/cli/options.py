"""What several commands take, and how they show what they found."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ktinject import rules as rule_language
from ktinject import typed
from ktinject.errors import CheckpointError, KTInjectError, PlanError
from ktinject.grid import Lines
from ktinject.rules import parse_overrides

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


def files(incomplete: str) -> list[str]:
    """What completes a path: nothing here, so that the shell's own completion does."""
    return []


def bundled_names(incomplete: str) -> list[str]:
    """What completes a name of rules; where nothing does, the shell goes on with files."""
    return [name for name in rule_language.bundled() if name.startswith(incomplete)]


Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A folder with config.json and weights, a .gguf file, or a name whose files are in the Hub's cache.",
        autocompletion=files,
    ),
]
Rules = Annotated[
    str | None,
    typer.Option(
        "--rules",
        metavar="RULES",
        help="The name of bundled rules, or a rule file; by default what config.json states, else auto, which serves "
        "any Mixture-of-Experts model.",
        show_default=False,
        autocompletion=bundled_names,
    ),
]
Plugins = Annotated[
    list[str] | None,
    typer.Option(
        "--plugin",
        metavar="MODULE",
        help="Import a module or .py file that registers operators; may be repeated.",
        autocompletion=files,
    ),
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        help="Set a variable of the rules, or RULE.ARGUMENT: an argument of the rule of that name; may be repeated.",
    ),
]
Device = Annotated[
    list[str] | None,
    typer.Option(
        "--device", metavar="DEVICE", help="Use this device, such as cpu or cuda:0; may be repeated."
    ),
]
Budget = Annotated[
    list[str] | None,
    typer.Option(
        "--budget",
        "--max-memory",
        metavar="DEVICE=SIZE,…",
        help="Use at most this much memory, such as cpu=64GiB,cuda:0=24GiB or cpu=64GiB,0=24GiB; may be repeated.",
    ),
]
Context = Annotated[
    int | None,
    typer.Option(
        "--context", metavar="N", min=1, help="Have room for a request of N tokens, prompt and answer."
    ),
]
Cache = Annotated[
    Literal["off", "auto"],
    typer.Option(
        "--cache",
        metavar="off|auto",
        help="auto: read packed weights from the cache if they are there, else write them; see `ktinject cache`.",
    ),
]
Ignore = Annotated[
    list[str] | None,
    typer.Option(
        "--ignore",
        metavar="PATTERN",
        help="Do without tensors of the checkpoint that no weight of the model is made of: a pattern of whole names; "
        "may be repeated.",
    ),
]
Images = Annotated[
    list[Path] | None,
    typer.Option(
        "--image",
        metavar="PATH",
        help="A picture before the first question, for a model that reads pictures; may be repeated.",
        autocompletion=files,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Tp = Annotated[
    bool,
    typer.Option("--tp", help="Share the model among the processes that torchrun started, one for each GPU."),
]
NewTokens = Annotated[
    int, typer.Option("--max-new-tokens", metavar="N", min=1, help="Write at most N tokens after a prompt.")
]
Temperature = Annotated[
    float | None,
    typer.Option(
        "--temperature",
        metavar="T",
        min=0.0,
        help="How much chance chooses; 0: none. By default the model's own.",
    ),
]
TopP = Annotated[
    float | None,
    typer.Option("--top-p", metavar="P", min=0.0, max=1.0, help="Choose from the likeliest, P together."),
]
Seed = Annotated[
    int | None, typer.Option("--seed", metavar="N", min=0, help="The same N gives the same choices.")
]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
RestDtype = Annotated[
    Dtype,
    typer.Option(
        metavar="auto|float32|bfloat16|float16",
        help="The type of everything that is not swapped; auto: what the checkpoint says.",
    ),
]


def parse_sizes(texts: list[str] | None, option: str) -> dict[str, int | str] | None:
    """`["cpu=1GiB,cuda:0=24GiB"]` as `{"cpu": "1GiB", "cuda:0": "24GiB"}`; the sizes are the planner's to read.

    Raises  PlanError naming the option
    """
    sizes: dict[str, int | str] = {}
    for text in (part for texts in texts or [] for part in texts.split(",")):
        device, equals, size = text.partition("=")
        if not (device and equals and size):
            raise PlanError(f"{option} {text!r}: allowed is DEVICE=SIZE, such as cuda:0=24GiB.")
        if device in sizes:
            raise PlanError(f"{option}: {device!r} is given twice. Give each device once.")
        sizes[device] = size
    return sizes or None


def sampling(temperature: float | None, top_p: float | None, seed: int | None) -> dict[str, Any]:
    """What `generate` is told for --temperature, --top-p and --seed; the latter sets torch's generators."""
    found: dict[str, Any] = {}
    if temperature is not None:
        found = {"do_sample": temperature > 0, **({"temperature": temperature} if temperature else {})}
    if top_p is not None and found.get("do_sample") is not False:
        found |= {"do_sample": True, "top_p": top_p}
    if seed is not None:
        import torch

        torch.manual_seed(seed)
    return found


_COUNT = re.compile(r"(\d{1,9})(?:-(\d{1,9})(?:([+*])(\d{1,9}))?)?")
_MOST_COUNTS = 1000


def parse_counts(texts: list[str] | None, option: str) -> list[int] | None:
    """Numbers as llama-bench takes them: `["32,64", "1-8*2"]` is 32, 64, 1, 2, 4, 8; a 0 stands for no test.

    Raises  PlanError naming the option
    """
    if texts is None:
        return None
    counts: list[int] = []
    for text in (part for texts in texts for part in texts.split(",")):
        found = _COUNT.fullmatch(text.strip())
        if found is None:
            raise PlanError(
                f"{option} {text!r}: allowed are whole numbers such as 32,64, and ranges: 1-4, 8-32+8, 8-64*2."
            )
        at, last = int(found[1]), int(found[2] or found[1])
        times, plus = (int(found[4]), 0) if found[3] == "*" else (1, int(found[4] or 1))
        if at > last or (found[2] and at * times + plus <= at):
            raise PlanError(
                f"{option} {text!r}: this range does not rise. Write one that does, such as 8-64*2."
            )
        while at <= last and len(counts) <= _MOST_COUNTS:
            counts.append(at)
            at = at * times + plus
    if len(counts) > _MOST_COUNTS:
        raise PlanError(
            f"{option}: these are more than {_MOST_COUNTS} tests. Name fewer, or take wider steps."
        )
    return [count for count in counts if count]


def find_model(model: str) -> Path:
    """The folder or file that MODEL stands for. Raises CheckpointError."""
    from ktinject.hf import hub

    return hub.find(model)[0]


def arguments(
    config: PreTrainedConfig,
    rules: str | None,
    variables: list[str] | Mapping[str, Any] | None = None,
    device: list[str] | None = None,
    budget: list[str] | None = None,
    context: int | None = None,
    ignore: list[str] | None = None,
    tell: bool = True,
) -> dict[str, Any]:
    """The arguments of `optimize` that the options ask for; for others what config.json states.

    tell    say on stderr what config.json states
    Raises  PlanError, RuleError
    """
    from ktinject.hf import models
    from ktinject.optimize import with_stated

    values = variables if isinstance(variables, Mapping) else parse_overrides(variables or [])
    found = with_stated(
        config,
        rules,
        variables=values,
        devices=device,
        budget=parse_sizes(budget, "--budget"),
        context=context,
        ignore=ignore or (),
    )
    if tell and rules is None and (stated := models.said_of_us(config)) is not None:
        texts = [f"rules {stated.rules if isinstance(stated.rules, str) else 'of its own'}"]
        texts += [f"{name}={value}" for name, value in (stated.variables or {}).items()]
        texts += [
            f"{name}={getattr(stated, name)}" for name in ("devices", "budget") if getattr(stated, name)
        ]
        typer.echo(f"ktinject: config.json states {', '.join(texts)}", err=True)
    return found


def load_plugins(names: list[str] | None) -> None:
    """Import what registers operators: modules by name, as from the current folder, and .py files by path.

    Raises  PlanError for what is not there or fails; what it raises itself if that is a KTInjectError. Both name the
            option, and the distribution that a module is from
    """
    for name in dict.fromkeys(names or []):
        try:
            if name.endswith(".py"):
                _import_file(Path(name).resolve())
            else:
                _find_in("")
                importlib.import_module(name)
        except KTInjectError as error:
            raise type(error)(f"--plugin {name}{_distribution(name)}: {error}") from error
        except Exception as error:
            raise PlanError(
                f"--plugin {name}{_distribution(name)}: importing it failed: {type(error).__name__}: {error}. "
                "Name a module that Python finds, or the path of a .py file."
            ) from error


def _distribution(name: str) -> str:
    from ktinject.operators import plugins

    found = None if name.endswith(".py") else plugins.distribution_of(name)
    return f" (of the distribution {found})" if found else ""


def _find_in(folder: str) -> None:
    """Let imports find what is in a folder, last: what is installed must not be hidden. "" is the current one."""
    if folder not in sys.path:
        sys.path.append(folder)


def _import_file(file: Path) -> None:
    name = f"ktinject_plugin_{file.stem}"
    if name in sys.modules and sys.modules[name].__file__ == str(file):
        return
    _find_in(str(file.parent))
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses look annotations up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise


def read_config(folder: Path) -> PreTrainedConfig:
    """The config of a folder or file. Raises CheckpointError."""
    from ktinject.checkpoints.checkpoint import Checkpoint
    from ktinject.hf import models

    with Checkpoint.open(folder) as checkpoint:
        return models.read_config(folder, checkpoint)


def is_packed(folder: Path) -> bool:
    """Whether a folder has packed weights, as `ktinject convert` writes them. Raises CheckpointError."""
    from ktinject.checkpoints.checkpoint import Checkpoint

    with Checkpoint.open(folder) as checkpoint:
        return checkpoint.packed is not None


def build_on_meta(folder: Path, dtype: str = "auto") -> PreTrainedModel:
    """The model of a folder, without weights. Raises CheckpointError or PlanError."""
    from ktinject.checkpoints.checkpoint import Checkpoint
    from ktinject.hf import models

    with Checkpoint.open(folder) as checkpoint:
        return models.meta_model(models.read_config(folder, checkpoint), dtype, checkpoint)


def load_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """The tokenizer in a model folder or beside a file, else the one in a GGUF file. Raises CheckpointError."""
    from transformers import AutoTokenizer

    from ktinject.checkpoints import beside
    from ktinject.checkpoints.checkpoint import Checkpoint
    from ktinject.hf import gguf_tokenizer, tokenizers

    folder = path if path.is_dir() else path.parent
    if path.is_dir():
        beside.refuse_adapter(path)
    beside.check_tokenizer(folder)
    if not beside.has_tokenizer(folder) and any(
        file.suffix == ".gguf" for file in (path, *folder.glob("*.gguf"))
    ):
        with Checkpoint.open(path) as checkpoint:
            vocabulary = checkpoint.vocabulary()
        if vocabulary is None:
            raise CheckpointError(
                f"{path}: it holds no tokenizer, nor does its folder. Put the model's tokenizer.json into the folder."
            )
        return gguf_tokenizer.tokenizer(vocabulary, str(path))
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        tokenizers.check(tokenizer)
        # A folder without tokenizer files gives a tokenizer that knows no word.
        knows_words = bool(tokenizer("text", add_special_tokens=False)["input_ids"])
    except Exception as error:  # transformers' own code on somebody's files
        raise CheckpointError(
            f"{folder}: its tokenizer cannot be used: {str(error).rstrip('. ')}. "
            "Put the model's tokenizer files into the folder."
        ) from error
    if not knows_words:
        raise CheckpointError(
            f"{folder}: there is no tokenizer. Put the model's tokenizer files into the folder."
        )
    return tokenizer


def typed_text(param: typer.CallbackParam, value: str | None) -> str | None:
    """The callback of an option that is a text. Raises PlanError."""
    return None if value is None else typed.text(value, param.opts[0])


def read_text(file: Path) -> str:
    """A file in UTF-8. Raises PlanError."""
    try:
        return file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"{file}: it cannot be read as text: {error}. Name a file in UTF-8.") from error


def read_prompts(
    tokenizer: PreTrainedTokenizerBase, file: Path, model: PreTrainedModel, new_tokens: int
) -> list[Tensor]:
    """The prompts of a JSON-lines file as token ids, as a base model gets them.

    model   on meta, too: each prompt and so many new tokens must fit it
    Raises  PlanError naming the line
    """
    import torch

    from ktinject.tools import evaluate

    prompts = []
    for number, line in enumerate(read_text(file).splitlines(), 1):
        if line.strip():
            try:
                prompt = json.loads(line)["prompt"]
            except (ValueError, KeyError, TypeError, RecursionError):
                prompt = None
            if not isinstance(prompt, str):
                raise PlanError(f'{file}:{number}: found {line[:60]!r}; allowed is {{"prompt": "…"}}.')
            ids = torch.tensor(tokenizer(prompt)["input_ids"], dtype=torch.long, device="cpu")
            try:
                evaluate.check_prompt(model, ids, new_tokens)
            except PlanError as error:
                raise PlanError(f"{file}:{number}: {error}") from error
            prompts.append(ids)
    return prompts


def check_writable(file: Path, option: str) -> None:
    """Before the work, which may take an hour. Raises PlanError."""
    able = os.access(file.parent, os.W_OK | os.X_OK) and (not file.exists() or os.access(file, os.W_OK))
    if file.is_dir() or not able:
        raise PlanError(f"{option} {file}: no file can be written there. Name another place.")


@contextmanager
def answers(as_json: bool) -> Iterator[None]:
    """With --json, what goes wrong within is on stdout, too, as JSON: {"ok": false, "problems": […]}."""
    try:
        yield
    except Exception as error:
        if as_json:
            said = str(error) if isinstance(error, KTInjectError) else f"{type(error).__name__}: {error}"
            show_json({"ok": False, "problems": said.splitlines()})
        raise


@contextmanager
def one_voice(tp: bool) -> Iterator[bool]:
    """Of several processes, only the first prints. Yields whether this is the first. Raises PlanError."""
    from ktinject.distributed import process_group

    if not tp or process_group.rank_and_size()[0] == 0:
        yield True
        return
    with open(os.devnull, "w", encoding="utf-8") as nowhere, redirect_stdout(nowhere):
        yield False


def show(thing: Any) -> None:
    """Print something that rich can: in colour and to the width of a terminal; else plain, at most 200 columns wide."""
    from rich.console import Console

    if sys.stdout.isatty():
        Console().print(thing)
        return
    console = Console(width=200, color_system=None)
    with console.capture() as capture:
        console.print(thing)
    typer.echo("\n".join(line.rstrip() for line in capture.get().splitlines()))


def say(*lines: str) -> None:
    """Print lines, which a terminal does not break within a word."""
    show(Lines(lines))


def show_json(value: object) -> None:
    """Print JSON."""
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False))
