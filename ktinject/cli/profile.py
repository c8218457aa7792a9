"""`ktinject profile`: which experts the user's own prompts use, for `gpu_experts`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ktinject.cli import options
from ktinject.errors import PlanError
from ktinject.hf import compat

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

SHARES = (0.05, 0.1, 0.25, 0.5)

Prompts = Annotated[
    Path,
    typer.Option(
        "--prompts",
        metavar="FILE",
        autocompletion=options.files,
        help='Lines of {"prompt": "…"} that show what you use it for.',
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(
        "--out",
        metavar="FILE",
        autocompletion=options.files,
        help="Write here; default: NAME.profile.json, NAME being the model's.",
    ),
]


def command(
    model: options.Model,
    prompts: Prompts,
    out: Out = None,
    rules: options.Rules = None,
    new_tokens: options.NewTokens = 64,
    variables: options.Set = None,
    device: options.Device = None,
    budget: options.Budget = None,
    ignore: options.Ignore = None,
    dtype: options.RestDtype = "auto",
    plugins: options.Plugins = None,
    as_json: options.AsJson = False,
) -> None:
    """Count how often each expert is chosen on your prompts and their greedy continuations.

    The file goes to a rule of hybrid_experts: `gpu_experts: FILE`, or `profile: FILE` beside a number or a share.
    """
    with options.answers(as_json):
        options.load_plugins(plugins)
        from rich.console import Console

        import ktinject
        from ktinject.hf import hub
        from ktinject.operators import REGISTRY

        folder, name = hub.find(model)
        target = out or Path(f"{name.rpartition('/')[2]}.profile.json")
        if target.suffix != ".json":
            raise PlanError(f"--out {target}: rules know a profile by its name. Let it end in .json.")
        options.check_writable(target, "--out")
        on_meta = options.build_on_meta(folder, dtype)
        starts = options.read_prompts(options.load_tokenizer(folder), prompts, on_meta, new_tokens)
        if not starts:
            raise PlanError(f'{prompts}: there is no prompt in it. Write lines of {{"prompt": "…"}}.')
        arguments = options.arguments(on_meta.config, rules, variables, device, budget, ignore=ignore)
        del arguments["check_tensors"], arguments["tp"]
        nothing = f"{model}: no rule gives routed experts to an operator; there is nothing to count."
        plan = ktinject.plan(on_meta, checkpoint=folder, **arguments)
        if not any(REGISTRY[replacement.operator].per_expert for replacement in plan.replacements):
            raise PlanError(nothing)
        swapped = ktinject.load(folder, dtype=dtype, progress=False, **arguments)
        counts: dict[str, Tensor] = {}
        _count(swapped, counts)
        if not counts:
            raise PlanError(nothing)
        tokens = 0
        with Console(stderr=True).status("counting") as status:
            for number, start in enumerate(starts, 1):
                status.update(f"prompt {number} of {len(starts)}")
                tokens += _run(swapped, start, new_tokens)
        experts = {path: count.tolist() for path, count in counts.items()}
        _write(
            target,
            {"version": 1, "model": model, "prompts": len(starts), "tokens": tokens, "experts": experts},
        )
        covered = {share: coverage(experts, share) for share in SHARES}
        if as_json:
            options.show_json(
                {"file": str(target), "tokens": tokens, "covered": {str(s): c for s, c in covered.items()}}
            )
            return
        options.say(f"{target}: {tokens:,} tokens of {len(starts)} prompts, {len(experts)} layers")
        for share, value in covered.items():
            options.say(f"the most used {share:4.0%} of each layer's experts take {value:.1%} of the routing")


def coverage(experts: dict[str, list[int]], share: float) -> float:
    """The part of all choices that fall on the most used experts of each layer."""
    hit = sum(sum(sorted(counts, reverse=True)[: round(share * len(counts))]) for counts in experts.values())
    return hit / max(1, sum(map(sum, experts.values())))


def _count(model: PreTrainedModel, counts: dict[str, Tensor]) -> None:
    """Let every operator of routed experts count what it is given, by the path of the module that it replaces."""
    import torch

    from ktinject.operators.cpu_experts import CpuExperts

    def counter(path: str, num_experts: int) -> Any:
        counts[path] = torch.zeros(num_experts, dtype=torch.int64, device="cpu")

        def hook(module: Any, args: tuple[Any, ...]) -> None:
            ids = args[1].reshape(-1).long().cpu()
            counts[path] += ids[(ids >= 0) & (ids < num_experts)].bincount(minlength=num_experts)

        return hook

    for path, module in model.named_modules():
        if isinstance(module, CpuExperts):
            # In a block of deferred_moe the operator stands inside the experts module, which cuts the routing in two.
            experts = path.removesuffix(".experts") if path.endswith(".experts.experts") else path
            hook = counter(experts, module.num_experts)
            model.get_submodule(experts).register_forward_pre_hook(hook)


def _run(model: PreTrainedModel, start: Tensor, new_tokens: int) -> int:
    """Read a prompt and continue it greedily; the number of tokens seen.

    Step by step, without `generate`: where that replays a CUDA graph, nothing in Python could count.
    """
    import torch

    end = model.generation_config.eos_token_id
    ends = set(end if isinstance(end, list) else [end])
    ids = start[None].to(model.device)
    seen, cache = 0, None
    with torch.inference_mode():
        for _ in range(new_tokens):
            seen += ids.shape[1]
            answer = model(input_ids=ids, use_cache=True, **{compat.CACHE: cache})
            cache = getattr(answer, compat.CACHE)
            ids = answer.logits[:, -1:].argmax(-1)
            if int(ids) in ends:
                break
    return seen


def _write(file: Path, value: dict[str, Any]) -> None:
    """Wholly or not at all."""
    part = file.with_name(f"{file.name}.part")
    try:
        part.write_text(json.dumps(value), "utf-8")
        part.replace(file)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise PlanError(f"{file}: it cannot be written: {error}. Give --out another place.") from error
