"""Mistakes in a KTransformers 0.x file that only show when all its rules are seen together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from ktinject.rules import known_modules
from ktinject.rules.legacy import OPS, LegacyRule
from ktinject.rules.wording import Place, Problems, show


def check(rules: Sequence[LegacyRule], source: str, problems: Problems) -> None:
    """Mistakes that only show when all rules are seen together."""
    _check_families(rules, problems)
    for rule in rules:
        backend = rule.arguments.get("backend")
        if backend == "llamafile" and "amx" in Path(source).name.lower():
            problems.add(
                rule.place("backend").refusal(
                    "backend is llamafile in a file that is named for AMX; AMX has AMXInt8 and AMXBF16. "
                    "Write one of them."
                )
            )
        if rule.arguments.get("per_layer_prefill_intput_threshold") == 0 and "prefill_op" in rule.arguments:
            problems.add(
                rule.place("prefill_op").refusal(
                    "prefill_op has no effect: per_layer_prefill_intput_threshold is 0; it turns them off. Remove one."
                )
            )
    _check_hits(rules, source, problems)


def _check_hits(rules: Sequence[LegacyRule], source: str, problems: Problems) -> None:
    """Rules that match nothing, or nothing that is left; routers in 4 bits."""
    found = known_modules.hits(rules, _has_linear_routers(rules))
    if found is None:
        where = rules[0].where if rules else source
        problems.add(
            Place(where).refusal(
                "the patterns take too long to look for rules that match nothing; backtracking is limited. "
                "Simplify them."
            )
        )
        return
    winners: dict[str, LegacyRule] = {}
    for rule in rules:
        if rule.number not in found:
            continue
        mine = found[rule.number]
        owners = Counter(winners[path].number for path in mine if path in winners)
        free = [path for path in mine if path not in winners]
        winners.update(dict.fromkeys(free, rule))
        if not mine:
            of_class = f" of the class {rule.of_class}" if rule.of_class else ""
            problems.add(
                rule.place("name").refusal(
                    f"it matches nothing{of_class} in any layout of a model that is known, so its modules silently "
                    f"stayed as they were: {show(rule.name or rule.of_class)}; a rule is for modules that are there. "
                    "Correct the pattern."
                )
            )
        elif not free:
            problems.add(
                rule.place("name").refusal(
                    f"all that it matches, such as {mine[0]!r}, goes to rule {owners.most_common(1)[0][0]} before it; "
                    "the first rule that matches wins. Move it up, or narrow the other."
                )
            )
        routers = [path for path in free if "router" in known_modules.MODULES[path]]
        if (
            rule.kind == "linear"
            and routers
            and OPS[rule.arguments.get("generate_op", "KLinearMarlin")][1] == "int4"
        ):
            problems.add(
                rule.place("generate_op").refusal(
                    f"it sends the router ({routers[0]!r}) through 4-bit weights; routers are kept exact, for their "
                    "choices turn over otherwise. Exclude it from the pattern."
                )
            )
    _check_ends(winners, problems)


def _has_linear_routers(rules: Sequence[LegacyRule]) -> bool:
    """Whether routers are linear layers in the model of the file: in DeepSeek's they are a class of their own."""
    return not any(
        rule.kind == "router" or "deepseek" in f"{rule.family} {rule.class_name}".lower() for rule in rules
    )


def _check_families(rules: Sequence[LegacyRule], problems: Problems) -> None:
    counted = Counter(rule.family for rule in rules if rule.family)
    if len(counted) < 2:
        return
    (usual, _), *_ = counted.most_common(1)
    for rule in rules:
        if rule.family and rule.family != usual:
            problems.add(
                rule.place("class").refusal(
                    f"the class {rule.of_class} is {rule.family}'s, and the others are {usual}'s; a file is for one "
                    f"model, and this rule matches nothing in it. Name {usual}'s class."
                )
            )


def _check_ends(winners: dict[str, LegacyRule], problems: Problems) -> None:
    """The last norm and the output layer on different devices."""
    norm, head = winners.get("model.norm"), winners.get("lm_head")
    placed = [rule.device if rule else "cuda:0" for rule in (norm, head)]
    first, second = (device if ":" in device else f"{device}:0" for device in placed)
    if first != second and "cpu:0" not in (first, second):
        rule = norm or head
        assert rule is not None
        problems.add(
            rule.place("generate_device").refusal(
                f"the last norm is on {placed[0]} and lm_head on {placed[1]}; what one computes the other needs. "
                "Put both on one device."
            )
        )
