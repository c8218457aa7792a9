"""The rule language, version 1: a document becomes a `RuleSet`, or a refusal says where it does not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import regex

from ktinject.errors import RuleError
from ktinject.rules.conditions import IMPORT_MARKS, condition
from ktinject.rules.files import TOP_KEYS, Document, mapping, unknown_key
from ktinject.rules.node import Node
from ktinject.rules.pattern import Patterns, fullmatch
from ktinject.rules.roles import HasRole
from ktinject.rules.settings import Settings
from ktinject.rules.variables import NAME, Variables
from ktinject.rules.wording import Enough, Place, Problems, Unknown, closest, show

KEEP = "keep"
RULE_KEYS = ("name", "match", "replace", "optional")
MATCH_KEYS = ("path", "class", "role", "inside", "layers")

_MAX_NAME = 200
_MAX_RULES = 500
_OPERATOR = regex.compile(r"[A-Za-z_][A-Za-z0-9_-]*")


@dataclass(frozen=True)
class Match:
    """What a rule looks for; all conditions that are given must hold.

    path        a pattern for the whole dotted path of the module
    class_name  the name of the module's class or of one of its bases
    layers      numbers of decoder layers
    role        what the module is for: one of ROLES
    inside      the role of a module that it lies in
    """

    path: str | None = None
    class_name: str | None = None
    layers: frozenset[int] | None = None
    role: str | None = None
    inside: str | None = None

    @property
    def by_role(self) -> bool:
        """Whether modules are found by what they are for."""
        return self.role is not None or self.inside is not None

    def matches(self, path: str, class_names: Sequence[str], layer: int | None) -> bool:
        """Whether the module is meant, roles aside. Raises TimeoutError when a pattern backtracks for half a second."""
        if self.class_name is not None and self.class_name not in class_names:
            return False
        if self.layers is not None and layer not in self.layers:
            return False
        return self.path is None or fullmatch(self.path, path)

    def has_roles(self, path: str, has_role: HasRole) -> bool:
        """Whether the module has the role, and lies in one of the role `inside`."""
        if self.inside is not None and not any(has_role(outer, self.inside) for outer in holders(path)):
            return False
        return self.role is None or bool(has_role(path, self.role))


def holders(path: str) -> Iterator[str]:
    """The paths of the modules that a module lies in, from the inside out, but for the root."""
    end = path.rfind(".")
    while end > 0:
        yield path[:end]
        end = path.rfind(".", 0, end)


@dataclass(frozen=True)
class Rule:
    """One rule.

    where           its "file:line"
    argument_where  that of each argument
    operator_where  that of the operator
    depth           0 for the file that was asked for, 1 for the file that it extends, and so on
    """

    name: str
    match: Match
    operator: str
    arguments: dict[str, Any] = field(default_factory=dict)
    optional: bool = False
    where: str = "<python>"
    argument_where: dict[str, str] = field(default_factory=dict)
    depth: int = 0
    operator_where: str = ""

    def place(self, argument: str | None = None) -> Place:
        """Where a refusal about the rule, or about one of its arguments, points."""
        where = self.argument_where.get(argument, self.where) if argument else self.where
        return Place(where, f"rule {self.name!r}")


@dataclass(frozen=True)
class RuleSet:
    """The rules in the order in which they are tried: a file's own, then those of the file that it extends.

    source       the name of the file, in refusals
    model_types  the model types that the file serves; none means any
    bases        the names of the files that it extends, nearest first
    """

    source: str
    model_types: tuple[str, ...]
    variables: dict[str, Any]
    rules: tuple[Rule, ...]
    bases: tuple[str, ...] = ()


def rule_set(
    documents: Sequence[Document],
    overrides: Mapping[str, Any] | None = None,
    check: Callable[[Rule], None] | None = None,
    problems: Problems | None = None,
) -> RuleSet:
    """The meaning of a rule file.

    documents  the file itself, then the files that it extends, nearest first
    overrides  values for variables, and for arguments: "rule.argument" → value
    check      called for each rule; a RuleError that it raises is told with all others
    problems   what was found before, to be told with all others
    Raises     RuleError with everything that is not the rule language, version 1
    """
    problems = Problems() if problems is None else problems
    own = documents[0]
    settings = Settings(overrides or {}, own.source)
    reader = _Reader(settings, check, problems)
    try:
        reader.read(documents)
    except Enough:
        pass
    problems.check()
    bases = tuple(document.source for document in documents[1:])
    return RuleSet(
        own.source, reader.model_types or (), reader.variables.values, tuple(reader.rules.values()), bases
    )


class _Reader:
    """Reads files into rules, and collects problems."""

    def __init__(self, settings: Settings, check: Callable[[Rule], None] | None, problems: Problems) -> None:
        self.rules: dict[str, Rule] = {}
        self.model_types: tuple[str, ...] | None = None
        self.variables = Variables(problems)
        self._settings = settings
        self._check = check
        self._problems = problems
        self._patterns = Patterns()
        self._items = 0
        self._names: list[str] = []  # of refused rules, too

    def read(self, documents: Sequence[Document]) -> None:
        """Read a file and those that it extends. Raises Enough after what ends the reading."""
        for document in documents:
            for key, node in document.top().items():
                if key not in TOP_KEYS:
                    place = Place(document.root.where)
                    self._problems.add(unknown_key(key, node, place, "a rule file", TOP_KEYS))
        for document in reversed(documents):
            if "variables" in (top := document.top()):
                self.variables.declare(top["variables"])
        self.variables.override(self._settings.of_variables, documents[0].source)
        for depth, document in enumerate(documents):
            if self.model_types is None:
                with self._problems.kept():
                    self.model_types = document.model_types()
            with self._problems.kept():
                self._add(document, depth)
        self._settings.check(self._names, self._problems)

    def _add(self, document: Document, depth: int) -> None:
        """Read the rules of a file. Raises RuleError if it has none, or too many with those before."""
        items = document.rules()
        self._items += len(items)
        if self._items > _MAX_RULES:
            raise Place(document.top()["rules"].where).refusal(
                f"{self._items} rules, with those before; at most {_MAX_RULES} are read. Split them.", Enough
            )
        for number, item in enumerate(items, 1):
            with self._problems.kept():
                rule = self._rule(item, number, depth)
                if rule.name in self.rules:
                    raise _taken(self.rules[rule.name], rule)
                self.rules[rule.name] = rule

    def _rule(self, node: Node, number: int, depth: int) -> Rule:
        """Raises RuleError for a rule of which nothing can be told; Unknown after other problems."""
        place = Place(node.where, f"rule {number}")
        known = len(self._problems)
        name = self._name(node, place)
        if name is not None:
            place = Place(node.where, f"rule {name!r}")
            self._names.append(name)
            node = self._settings.applied(name, node)
        entries = mapping(node, place, "a rule", RULE_KEYS, self._problems)
        meant = _meant(node, RULE_KEYS)
        absent = [key for key in RULE_KEYS[:3] if key not in entries and key not in meant]
        for key in absent:
            self._problems.add(place.refusal(f"no {key}; a rule has a name, a match and a replace. Add it."))
        optional = entries.get("optional", Node(False, node.where))
        if not isinstance(optional.value, bool):
            self._problems.add(
                place.moved(optional.where).refusal(
                    f"optional is {show(optional.value)}; it is true or false. Write one, without quotes."
                )
            )
        match, replace = None, None
        if "match" in entries:
            with self._problems.kept():
                match = _match(entries["match"], place, self.variables, self._problems, self._patterns)
        if "replace" in entries:
            with self._problems.kept():
                replace = _replace(entries["replace"], place, self.variables, self._problems)
        if name is None or replace is None or "match" not in entries:
            raise Unknown
        operator, arguments, argument_where = replace
        rule = Rule(
            name=name,
            match=match or Match(),
            operator=str(operator.value),
            arguments=arguments,
            optional=bool(optional.value),
            where=node.where,
            argument_where=argument_where,
            depth=depth,
            operator_where=operator.where,
        )
        if self._check is not None:
            with self._problems.kept():
                self._check(rule)
        if match is None or len(self._problems) > known:
            raise Unknown
        return rule

    def _name(self, node: Node, place: Place) -> str | None:
        """The rule's name, read first, so that all problems of the rule have it."""
        named = node.value.get("name") if isinstance(node.value, dict) else None
        if named is None:
            return None
        if isinstance(named.value, str) and _is_name(named.value):
            return named.value
        self._problems.add(
            place.moved(named.where).refusal(
                f"name is {show(named.value)}; it is one line of at most {_MAX_NAME} characters. Write one."
            )
        )
        return None


def _meant(node: Node, allowed: Sequence[str]) -> set[str]:
    """The keys that unknown ones seem to be, which are told already: nobody misses them."""
    keys = node.value if isinstance(node.value, dict) else {}
    return {near for key in keys if key not in allowed for near in closest(key, allowed)}


def _taken(first: Rule, second: Rule) -> RuleError:
    if first.depth < second.depth:  # the first is the one whose author can change it
        return first.place().refusal(
            f"the name is taken, at {second.where}, by a rule of the extended file; each rule has its own. "
            "Rename yours; the extended file's rule gets what yours leaves."
        )
    return second.place().refusal(f"the name is taken, at {first.where}; each rule has its own. Rename one.")


def _is_name(name: str) -> bool:
    return bool(name.strip()) and "\n" not in name and "${" not in name and len(name) <= _MAX_NAME


def _match(node: Node, place: Place, variables: Variables, problems: Problems, patterns: Patterns) -> Match:
    entries = mapping(node, place.moved(node.where), "match", MATCH_KEYS, problems)
    if not {"path", "class", "role"} & (entries.keys() | _meant(node, MATCH_KEYS)):
        raise place.moved(node.where).refusal(
            "match has no path, class or role; it needs one of them or more. Add one."
        )
    values: dict[str, Any] = {}
    for key, item in entries.items():
        with problems.kept():
            values[key] = condition(key, item, place.moved(item.where), variables, patterns)
    return Match(
        values.get("path"),
        values.get("class"),
        values.get("layers"),
        values.get("role"),
        values.get("inside"),
    )


def _replace(
    node: Node, place: Place, variables: Variables, problems: Problems
) -> tuple[Node, dict[str, Any], dict[str, str]]:
    """The operator, its arguments, and where each of them stands."""
    place = place.moved(node.where)
    if node.value == KEEP:
        return node, {}, {}
    if not isinstance(node.value, dict):
        word = "keep" if node.value == "default" else "{operator: cpu_experts}, for example"
        raise place.refusal(
            f"replace is {show(node.value)}; it is keep, or a mapping with operator and arguments. "
            f"Write {word}."
        )
    entries = dict(node.value)
    if "operator" not in entries:
        near = [key for key in node.value if closest(key, ["operator"])]
        hint = f" Did you mean 'operator' where {show(near[0])} stands?" if near else ""
        raise place.refusal(f"replace has no operator; it needs the name of one. Add it.{hint}")
    item = entries.pop("operator")
    at = place.moved(item.where)
    operator = variables.fill(item, at)
    if not isinstance(operator, str) or not _OPERATOR.fullmatch(operator):
        path = "an import path, " if isinstance(operator, str) and IMPORT_MARKS.search(operator) else ""
        raise at.refusal(
            f"operator is {path}{show(operator)}; only registry keys are allowed, and nothing is imported "
            "because a rule says so. Write a key such as cpu_experts; register_operator adds your own."
        )
    arguments: dict[str, Any] = {}
    for key, argument in entries.items():
        with problems.kept():
            arguments[key] = _argument(key, argument, operator, place, variables)
    return Node(operator, item.where), arguments, {key: argument.where for key, argument in entries.items()}


def _argument(key: str, item: Node, operator: str, place: Place, variables: Variables) -> Any:
    place, at_key = place.moved(item.where), place.moved(item.key or item.where)
    if operator == KEEP:
        raise at_key.refusal(f"keep has the argument {show(key)}; keep takes none. Remove it.")
    if not NAME.fullmatch(key):
        raise at_key.refusal(f"the argument name {show(key)}; a name has letters, digits and _. Correct it.")
    value = variables.fill(item, place)
    if value == "None":
        raise place.refusal(f"{key} is the text 'None'; no value is null. Write null, or leave {key} out.")
    return value
