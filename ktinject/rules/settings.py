"""Values that the command line and Python give in place of the file's: for variables, and for arguments of rules.

`experts` names a variable, `routed experts.prefill` an argument of the rule of that name. `operator`, `replace` and
`optional` are set in the same way, so that whatever a refusal advises can be tried without changing a file.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ktinject.rules import document
from ktinject.rules.node import Node, scalar
from ktinject.rules.variables import NAME
from ktinject.rules.wording import Place, Problems, did_you_mean, listing, show

_KEEP = "keep"


class Settings:
    """Overrides, sorted into those of variables and those of rules.

    of_variables  name → value, as given
    """

    def __init__(self, overrides: Mapping[str, Any], source: str) -> None:
        self.of_variables: dict[str, Any] = {}
        self._source = source
        self._of_rules: dict[str, dict[str, Node]] = {}
        if not isinstance(overrides, Mapping):
            raise Place(source).refusal(
                f"variables are given as {type(overrides).__name__}; they are a mapping of names to values. "
                'Write {"experts": "int8"}, for example.'
            )
        for name, value in overrides.items():
            rule, dot, argument = name.rpartition(".") if isinstance(name, str) else ("", "", "")
            if not dot or not NAME.fullmatch(argument):
                self.of_variables[name] = value
                continue
            where = f"override {name!r}"
            node = Node(document.from_python(value, where).value, where)
            self._of_rules.setdefault(rule, {})[argument] = node

    def applied(self, name: str, node: Node) -> Node:
        """The rule's node with what is set for it."""
        wanted = self._of_rules.pop(name, None)
        if wanted is None or not isinstance(node.value, dict):
            return node
        entries = dict(node.value)
        if "optional" in wanted:
            entries["optional"] = wanted.pop("optional")
        for key in ("replace", "operator"):
            if key in wanted and (key == "replace" or wanted[key].value == _KEEP):
                entries["replace"] = wanted.pop(key)
        if wanted:
            replace = entries.get("replace", Node({}, node.where))
            before = replace.value if isinstance(replace.value, dict) else {}
            if not before and "operator" not in wanted:  # replace: keep, to which nothing can be given
                before = {"operator": replace}
            entries["replace"] = Node({**before, **wanted}, replace.where, replace.key)
        return Node(entries, node.where, node.key)

    def check(self, names: list[str], problems: Problems) -> None:
        """Collect a problem for each setting of a rule that is not there."""
        for rule, wanted in self._of_rules.items():
            place = Place(f"override {f'{rule}.{next(iter(wanted))}'!r}")
            problems.add(
                place.refusal(
                    f"{self._source} has no rule {show(rule)}; its rules are {listing(map(repr, names), 'and')}. "
                    f"Name one of them.{did_you_mean(rule, names)}"
                )
            )


def parse_overrides(texts: Iterable[str]) -> dict[str, Any]:
    """Overrides from a command line: `experts=int8`, `routed experts.prefill=cpu`, the value typed as in YAML.

    Raises RuleError
    """
    values: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not (
            NAME.fullmatch(name) or (NAME.fullmatch(name.rpartition(".")[2]) and "." in name)
        ):
            raise Place("").refusal(
                f"the override {show(text)}; it is name=value, of a variable or of a rule's argument. "
                "Write experts=int8 or 'routed experts.prefill=cpu', for example."
            )
        if name in values:
            raise Place("").refusal(f"{name!r} is set twice; it has one value. Set it once.")
        if value.startswith("["):
            values[name] = document.from_bytes(value.encode(), f"{name}=").plain()
        else:
            values[name] = scalar(value, f"{name}=")
    return values
