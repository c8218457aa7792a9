"""A KTransformers 0.x file becomes version 1, with a comment above each rule on what changed.

Nothing is taken over that would mean something else here: what has no counterpart is left out, and said. Devices are
the planner's, so numbers of devices become devices and budgets on the command line. What a rule was meant for is
written as a role, since classes of the authors' own models are not transformers'.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ktinject.errors import RuleError
from ktinject.rules import document, known_modules, legacy, legacy_checks
from ktinject.rules.legacy import BACKENDS, OPS, LegacyRule
from ktinject.rules.node import Node
from ktinject.rules.pattern import compiled
from ktinject.rules.sources import locate
from ktinject.rules.wording import Enough, Place, Problems, listing, show

_WHAT = {
    "linear": "linear layers", "experts": "routed experts", "attention": "latent attention", "router": "router, exact",
    "norm": "norms", "default": "kept",
}  # fmt: skip
_ROLES = {"attention": "latent_attention", "router": "router", "norm": "norm"}
_LEFT_OUT = {
    "block": "the rule for the experts inside is enough; deferred_moe is the operator for whole blocks",
    "rotary": "transformers computes rotary embeddings",
    "mlp": "the rules for its linear layers are enough",
    "model": "a model has no operator here: long prompts and several GPUs are the planner's",
}


@dataclass
class Migrated:
    """A file of version 1.

    text      of the file
    problems  mistakes in the old file, by line
    devices   that the old file names
    rules     what became of each old rule: (number, what it was, what it is)
    """

    text: str
    problems: tuple[RuleError, ...]
    devices: list[str]
    rules: list[tuple[int, str, str]] = field(default_factory=list)


@dataclass
class _New:
    """A rule of version 1 in the making; `operator` is None if it is left out."""

    old: LegacyRule
    operator: str | None = None
    arguments: dict[str, Any] = field(default_factory=dict)
    match: dict[str, str] = field(default_factory=dict)
    kept: tuple[dict[str, str], ...] = ()
    notes: list[str] = field(default_factory=list)


def read_legacy(source: str | Path) -> tuple[Node, str] | None:
    """The document of a file of the old kind, and its name; None if it is of another kind. Raises RuleError."""
    path, name = locate(source)
    root = document.from_file(path, name, Problems(), number_keys=True)
    return (root, name) if legacy.is_legacy(root) else None


def migrate(source: str | Path) -> Migrated:
    """Migrate a file. Raises RuleError if it is of another kind or unreadable, or nothing can be carried over."""
    path, name = locate(source)
    problems = Problems()
    return _migrate(document.from_file(path, name, problems, number_keys=True), name, problems)


def migrate_bytes(data: bytes, source: str, parser: Any = document.PARSER) -> Migrated:
    """Migrate the bytes of a file, called `source` in refusals. Raises RuleError as `migrate`."""
    problems = Problems()
    root = document.from_bytes(data, source, parser, problems, number_keys=True)
    return _migrate(root, source, problems)


def _migrate(root: Node, source: str, problems: Problems) -> Migrated:
    if not legacy.is_legacy(root):
        raise legacy.refused_document(root)
    rules: list[LegacyRule] = []
    try:
        rules = legacy.read(root, problems)
        legacy_checks.check(rules, source, problems)
    except Enough:
        problems.check()
    new = _all_new(rules)
    if not any(each.operator for each in new):
        place = Place(root.where)
        with_reasons = [f"rule {each.old.number}: {each.notes[0]}" for each in new if each.notes]
        problems.last(
            place.refusal(
                f"nothing can be carried over; {'; '.join(with_reasons[:5]) or 'no rule can be read'}. "
                "Take bundled rules: `ktinject rules list`."
            )
        )
        problems.check()
    found = legacy.devices(rules)
    names = _names(new)
    text = "\n".join([*_head(source, found, len(problems)), *_rules(new, names)]) + "\n"
    said = [(each.old.number, _old(each.old), _short(each)) for each in new]
    return Migrated(text, problems.all(), found, said)


def _all_new(rules: Sequence[LegacyRule]) -> list[_New]:
    threshold = next(
        (limit for rule in rules if (limit := rule.arguments.get("per_layer_prefill_intput_threshold"))), None
    )
    new = [_new(rule, threshold) for rule in rules]
    for number, each in enumerate(new):
        if each.old.kind == "default":
            _keep(each, new[number + 1 :])
    return new


def _new(rule: LegacyRule, threshold: int | None) -> _New:
    new = _New(rule)
    if rule.path is not None:
        new.match["path"] = rule.path
        if rule.path.strip("^$") != (rule.name or "").strip("^$"):
            new.notes.append("the pattern is for the whole path, as patterns are here")
    if rule.of_class is not None:
        if rule.kind == "linear" or rule.kind not in _ROLES:
            new.match["class"] = rule.of_class
        else:
            new.notes.append(f"the role is in place of the class {rule.of_class}")
    if rule.kind in _ROLES:
        new.match["role"] = _ROLES[rule.kind]
    if rule.kind == "experts":
        new.match.pop("class", None)
        new.match["role"] = "routed_experts"
    if rule.kind in _LEFT_OUT:
        new.notes = [f"left out: {_LEFT_OUT[rule.kind]}"]
        if moved := rule.arguments.get("transfer_map"):
            new.notes.append(
                f"transfer_map ({', '.join(f'{k}: {v}' for k, v in moved.items())}): see the devices above"
            )
    elif rule.kind == "linear":
        _linear(new)
    elif rule.kind == "experts":
        _experts(new, threshold)
    elif rule.kind == "attention":
        new.operator = "absorbed_mla"
        absorbed = rule.arguments.get("absorb_for_prefill")
        if absorbed is not None:
            new.arguments["prefill"] = "absorbed" if absorbed else "expanded"
    elif rule.kind == "router":
        new.operator = "cpu_router"
        new.notes.append("a router keeps its weights; on a GPU it stays the model's own")
    elif rule.kind == "norm":
        new.operator = "rms_norm"
    if rule.kind not in _LEFT_OUT and rule.kind != "default":
        new.notes += _dropped(rule)
    if {str(rule.arguments[key]).partition(":")[0] for key in legacy.DEVICE_KEYS if key in rule.arguments} & {
        "xpu",
        "npu",
    }:
        new.notes.append("xpu and npu are not used: it runs on the GPU or the CPU")
    return new


def _linear(new: _New) -> None:
    rule = new.old
    op = rule.arguments.get("generate_op", "KLinearMarlin")
    if "class" not in new.match:
        new.match["class"] = "Linear"
        new.notes.append("class: Linear, for all that it can replace")
    on_cpu = rule.device == "cpu" or op == "KLinearCPUInfer"
    new.operator = "cpu_linear" if on_cpu else "dense_linear"
    new.arguments["weights"] = OPS[op][1]
    if "generate_op" not in rule.arguments:
        new.notes.append("no generate_op, which meant KLinearMarlin: int4")
    elif op == "KLinearCPUInfer":
        new.notes.append("KLinearCPUInfer computed in the GGUF's own format; weights says the format here")
    prefill = rule.arguments.get("prefill_op")
    if prefill is not None and OPS[prefill][1] != OPS[op][1]:
        new.notes.append(f"prefill_op {prefill}: prompts are computed with the same weights")


def _experts(new: _New, threshold: int | None) -> None:
    rule = new.old
    op = rule.arguments.get("generate_op", "KExpertsCPU")
    backend = rule.arguments.get("backend", "llamafile")
    new.operator = "hybrid_experts"
    if op == "KExpertsCPU":
        new.arguments["weights"] = BACKENDS[backend]
        if backend == "llamafile":
            new.notes.append(
                "llamafile computed in the GGUF's own format; int4 is nearest to the usual files"
            )
    else:
        new.arguments |= {"weights": OPS[op][1], "gpu_experts": "auto", "gpu_weights": OPS[op][1]}
        new.notes.append(f"{op}: as many experts as have room are on the GPU; the budget decides")
    if rule.arguments.get("prefill_device") == "cpu":
        new.arguments["prefill"] = "cpu"
    elif threshold:
        new.arguments["prefill"] = threshold
        new.notes.append(
            f"prompts of {threshold} tokens and more are streamed: per_layer_prefill_intput_threshold"
        )


def _dropped(rule: LegacyRule) -> list[str]:
    notes = []
    numbered = [key for key in legacy.DEVICE_KEYS if str(rule.arguments.get(key, "")).startswith("cuda")]
    if numbered:
        notes.append(f"{listing(numbered, 'and')} left out: the planner places")
    if not rule.recursive and rule.kind != "experts":
        notes.append("recursive: false is left out: nothing inside a replaced module is matched here")
    return notes


def _keep(new: _New, later: Sequence[_New]) -> None:
    """A rule that only places: it is needed where it keeps modules from a rule behind it."""
    rule = new.old
    after = [each for each in later if each.operator]
    found = known_modules.hits([rule, *(each.old for each in after)], True) if after else {}
    if not found or rule.number not in found:
        new.notes = ["left out: it only placed modules, which the planner does"]
        if after and rule.number not in (found or {}):
            new.notes.append("whether it kept modules from the rules behind it could not be found out")
        return
    mine = set(found[rule.number])
    if not rule.recursive:
        mine |= {
            path for path in known_modules.MODULES if any(path.startswith(f"{outer}.") for outer in mine)
        }
    shielded = [each for each in after if mine & set(found.get(each.old.number, ()))]
    if not shielded:
        new.notes = ["left out: it only placed modules, which the planner does"]
        return
    # Of all that it matches, only what the rules behind it are for need be kept, and only that may be: modules inside
    # a replaced one cannot.
    pattern = rule.path or ".*"
    path = pattern if rule.recursive else f"(?:{pattern})(\\..*)?"
    try:
        compiled(path)
    except ValueError as error:
        new.notes = [f"left out: its pattern, with what lies inside, {error}; write it anew"]
        return
    conditions = dict.fromkeys(
        ("role", each.match["role"]) if "role" in each.match else ("class", each.match["class"])
        for each in shielded
    )
    new.operator = "keep"
    new.kept = tuple({"path": path, key: value} for key, value in conditions)
    numbers = listing((each.old.number for each in shielded), "and")
    new.notes.append(f"it keeps modules from rule {numbers}; placing is the planner's")
    if not rule.recursive:
        new.notes.append("recursive: false, so the pattern goes on to what lies inside")


def _head(source: str, devices: Sequence[str], mistakes: int) -> list[str]:
    lines = [
        f"# Migrated from {show(Path(source).name)}, rules of KTransformers 0.x, by `ktinject rules migrate`.",
        "# Check it with your model: ktinject plan MODEL --rules THIS_FILE",
    ]
    gpus = [device for device in devices if device.startswith("cuda")]
    if devices:
        lines.append(
            f"# Devices: the old file names {listing(devices, 'and')}. Here the planner places. Say what it may use:"
        )
        named = " ".join(f"--device {device}" for device in gpus)
        sizes = ",".join([*(f"{device}=24GiB" for device in gpus), "cpu=384GiB"])
        lines.append(f"#   {f'{named} ' if named else ''}--budget {sizes}    (sizes are examples)")
    if mistakes:
        lines.append(f"# {mistakes} mistakes were found in the old file; `ktinject rules check` lists them.")
    return [*lines, "version: 1", "rules:"]


def _names(new: Sequence[_New]) -> dict[int, str]:
    """Number of an old rule → the name of the new one; names are unique."""
    counted = Counter(_WHAT[each.old.kind] for each in new if each.operator)
    return {
        each.old.number: what if counted[what] == 1 else f"{what}, rule {each.old.number}"
        for each in new
        if each.operator and (what := _WHAT[each.old.kind])
    }


def _rules(new: Sequence[_New], names: dict[int, str]) -> list[str]:
    lines: list[str] = []
    for each in new:
        comment = f"# Rule {each.old.number} ({_old(each.old)}): {'; '.join(each.notes) or 'as it was'}."
        lines += textwrap.wrap(
            comment,
            116,
            initial_indent="  ",
            subsequent_indent="  #   ",
            break_long_words=False,
            break_on_hyphens=False,
        )
        if not each.operator:
            continue
        name = names[each.old.number]
        if each.operator == "keep":
            for number, match in enumerate(each.kept):
                lines += _rule(name if not number else f"{name} ({number + 1})", match, "keep")
                lines.append("    optional: true")
        else:
            arguments = "".join(f", {key}: {value}" for key, value in each.arguments.items())
            lines += _rule(name, each.match, f"{{operator: {each.operator}{arguments}}}")
    return lines


def _rule(name: str, match: dict[str, str], replace: str) -> list[str]:
    conditions = ", ".join(f"{key}: {_text(value)}" for key, value in match.items())
    return [f"  - name: {_text(name)}", f"    match: {{{conditions}}}", f"    replace: {replace}"]


def _old(rule: LegacyRule) -> str:
    ops = ", ".join(str(rule.arguments[key]) for key in ("generate_op", "backend") if key in rule.arguments)
    return f"{rule.class_name}{f', {ops}' if ops else ''}"


def _short(new: _New) -> str:
    return f"{new.operator or 'left out'}\n{'; '.join(new.notes)}".strip()


def _text(value: str) -> str:
    return "'" + value.replace("'", "''") + "'"
