"""The rule language, version 1: a document becomes a `RuleSet`, or a refusal says where it does not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import regex

from ktinject.errors import RuleError
from ktinject.rules.node import Node
from ktinject.rules.pattern import MAX_SIZES, compiled, fullmatch, size
from ktinject.rules.roles import ROLES, HasRole
from ktinject.rules.variables import NAME, Variables
from ktinject.rules.wording import Place, closest, did_you_mean, listing, show

VERSION = 1
KEEP = "keep"
TOP_KEYS = ("version", "extends", "model_types", "variables", "rules")
RULE_KEYS = ("name", "match", "replace", "optional")
MATCH_KEYS = ("path", "class", "role", "inside", "layers")

_MAX_NAME = 200
_MAX_LAYER = 999
_MAX_RULES = 500
_OPERATOR = regex.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
_MODEL_TYPE = regex.compile(r"[A-Za-z0-9_.-]+")
_LAYERS = regex.compile(r"\s*([0-9]{1,6})(?:-([0-9]{1,6}))?\s*")
_IMPORT_MARKS = regex.compile(r"[./:\\]+")


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


@dataclass(frozen=True)
class Document:
    """One rule file: its nodes, and its name in refusals."""

    root: Node
    source: str

    def top(self) -> dict[str, Node]:
        """The top keys. Raises RuleError for what is no rule file of version 1."""
        place = Place(self.root.where)
        if isinstance(self.root.value, list):
            raise _not_a_mapping(self.root.value, place)
        top = _mapping(self.root, place, "a rule file", TOP_KEYS)
        _check_version(top.get("version"), place)
        return top

    def extends(self) -> tuple[str, str] | None:
        """The name or path of the file that this one extends, and where it stands. Raises RuleError as `top`."""
        node = self.top().get("extends")
        if node is None:
            return None
        if not isinstance(node.value, str) or not node.value.strip() or "${" in node.value:
            raise Place(node.where).refusal(
                f"extends is {show(node.value)}; it is the name of bundled rules or the path of a rule file. Write one."
            )
        return node.value, node.where


def rule_set(documents: Sequence[Document], overrides: Mapping[str, Any] | None = None) -> RuleSet:
    """The meaning of a rule file.

    documents  the file itself, then the files that it extends, nearest first
    Raises     RuleError for everything that is not the rule language, version 1
    """
    tops = [document.top() for document in documents]
    own = documents[0]
    declared = [top["variables"] for top in reversed(tops) if "variables" in top]
    variables = Variables(declared, overrides or {}, own.source)
    model_types = next((_model_types(top["model_types"]) for top in tops if "model_types" in top), ())
    items = [(item, number, depth) for depth, top in enumerate(tops)
             for number, item in enumerate(_items(top, Place(documents[depth].root.where)), 1)]  # fmt: skip
    if len(items) > _MAX_RULES:
        raise Place(tops[0]["rules"].where if "rules" in tops[0] else own.root.where).refusal(
            f"{len(items)} rules; at most {_MAX_RULES} are read. Split them."
        )
    rules: dict[str, Rule] = {}
    left = MAX_SIZES
    for item, number, depth in items:
        rule = _rule(item, number, variables, depth)
        left -= size(rule.match.path or "")
        if left < 0:
            raise rule.place().refusal(
                f"all patterns together are too large; characters times counts may be at most {MAX_SIZES:,}. "
                "Write smaller counts, such as + in place of {1,1000}."
            )
        if rule.name in rules:
            raise _taken(rules[rule.name], rule)
        rules[rule.name] = rule
    bases = tuple(document.source for document in documents[1:])
    return RuleSet(own.source, model_types, variables.values, tuple(rules.values()), bases)


def _items(top: Mapping[str, Node], place: Place) -> list[Node]:
    """The nodes of a file's own rules; a file that extends another may have none."""
    if "rules" not in top:
        if "extends" in top:
            return []
        raise place.refusal("no rules; a rule file has a list of them. Write it under rules.")
    node = top["rules"]
    if not isinstance(node.value, list) or not node.value:
        raise Place(node.where).refusal(
            f"rules is {show(node.value)}; it is a list of rules. Begin each with - name."
        )
    return node.value


def _taken(first: Rule, second: Rule) -> RuleError:
    if first.depth < second.depth:  # the first is the one whose author can change it
        return first.place().refusal(
            f"the name is taken, at {second.where}, by a rule of the extended file; each rule has its own. "
            "Rename yours; the extended file's rule gets what yours leaves."
        )
    return second.place().refusal(f"the name is taken, at {first.where}; each rule has its own. Rename one.")


def _not_a_mapping(items: list[Node], place: Place) -> Exception:
    if any(_is_legacy(item.value) for item in items):
        return place.refusal(
            "a KTransformers 0.x rule file, a list whose rules name classes by import path; version 1 is a "
            "mapping with version: 1 and rules that name operators. "
            "Rewrite it as docs/reference/rules.md describes."
        )
    return place.refusal(
        "the document is a list; a rule file is a mapping. Write version: 1 and put the list under rules."
    )


def _is_legacy(rule: object) -> bool:
    if not isinstance(rule, dict) or "match" not in rule:
        return False
    replace = rule["replace"].value if "replace" in rule else None
    return "recursive" in rule or (isinstance(replace, dict) and bool({"class", "kwargs"} & replace.keys()))


def _mapping(node: Node, place: Place, what: str, allowed: Sequence[str]) -> dict[str, Node]:
    if not isinstance(node.value, dict):
        raise place.refusal(
            f"{what} is {show(node.value)}; it is a mapping of {listing(allowed, 'and')}. Write key: value."
        )
    for key, value in node.value.items():
        if key not in allowed:
            raise place.moved(value.where).refusal(
                f"unknown key {show(key)}; {what} has {listing(allowed, 'and')}. "
                f"Correct or remove it.{did_you_mean(key, allowed)}"
            )
    return node.value


def _check_version(node: Node | None, place: Place) -> None:
    if node is None:
        raise place.refusal(f"no version; the rule language has version {VERSION}. Write version: {VERSION}.")
    if type(node.value) is not int or node.value != VERSION:
        raise Place(node.where).refusal(
            f"version is {show(node.value)}; the number {VERSION} is read. Write version: {VERSION}, "
            "or use the ktinject that the file was written for."
        )


def _model_types(node: Node) -> tuple[str, ...]:
    items = node.value if isinstance(node.value, list) else []
    types = tuple(i.value for i in items if isinstance(i.value, str) and _MODEL_TYPE.fullmatch(i.value))
    if not types or len(types) != len(items):
        found = show(node.value) if not items else f"a list with {show(_first_bad(items, types))}"
        raise Place(node.where).refusal(
            f"model_types is {found}; it is a list of transformers model types. "
            "Write [deepseek_v3], for example, or leave it out for any model."
        )
    return types


def _first_bad(items: list[Node], good: tuple[str, ...]) -> object:
    return next(item.value for item in items if item.value not in good)


def _rule(node: Node, number: int, variables: Variables, depth: int) -> Rule:
    place = _rule_place(node, number)
    entries = _mapping(node, place, "a rule", RULE_KEYS)
    for key in ("name", "match", "replace"):
        if key not in entries:
            raise place.refusal(f"no {key}; a rule has a name, a match and a replace. Add it.")
    optional = entries.get("optional", Node(False, node.where))
    if not isinstance(optional.value, bool):
        raise place.moved(optional.where).refusal(
            f"optional is {show(optional.value)}; it is true or false. Write one, without quotes."
        )
    operator, arguments, argument_where = _replace(entries["replace"], place, variables)
    return Rule(
        name=str(entries["name"].value),
        match=_match(entries["match"], place, variables),
        operator=operator,
        arguments=arguments,
        optional=optional.value,
        where=node.where,
        argument_where=argument_where,
        depth=depth,
    )


def _rule_place(node: Node, number: int) -> Place:
    """Where refusals of a rule point: its name is read first, so that all of them have it."""
    place = Place(node.where, f"rule {number}")
    named = node.value.get("name") if isinstance(node.value, dict) else None
    if named is None:
        return place
    if not isinstance(named.value, str) or not _is_name(named.value):
        raise place.moved(named.where).refusal(
            f"name is {show(named.value)}; it is one line of at most {_MAX_NAME} characters. Write one."
        )
    return Place(node.where, f"rule {named.value!r}")


def _is_name(name: str) -> bool:
    return bool(name.strip()) and "\n" not in name and "${" not in name and len(name) <= _MAX_NAME


def _match(node: Node, place: Place, variables: Variables) -> Match:
    entries = _mapping(node, place.moved(node.where), "match", MATCH_KEYS)
    if not {"path", "class", "role"} & entries.keys():
        raise place.moved(node.where).refusal(
            "match has no path, class or role; it needs one of them or more. Add one."
        )
    values: dict[str, Any] = {}
    for key, item in entries.items():
        at = place.moved(item.where)
        value = values[key] = variables.fill(item, at)
        if key == "layers":
            continue
        if not isinstance(value, str) or not value:
            raise at.refusal(f"{key} is {show(value)}; it is text. Write it in single quotes.")
        try:
            _CHECKS[key](value)
        except ValueError as error:
            raise at.refusal(f"{key} {show(value)} {error}. Correct it.") from error
    layers = _layers(values["layers"], place.moved(entries["layers"].where)) if "layers" in values else None
    return Match(values.get("path"), values.get("class"), layers, values.get("role"), values.get("inside"))


def _check_role(name: str) -> None:
    if name not in ROLES:
        near = closest(name, ROLES)
        hint = f" (closest: {near[0]})" if near else ""
        raise ValueError(f"is no role{hint}; it is {listing(ROLES)}")


def _check_class(name: str) -> None:
    if _IMPORT_MARKS.search(name):
        last = next((part for part in reversed(_IMPORT_MARKS.split(name)) if part), "Linear")
        raise ValueError(
            f"is an import path; classes are compared by name and nothing is imported: write {last!r}"
        )
    if not name.isidentifier():
        raise ValueError("is not the name of a class; a name has letters, digits and _")


_CHECKS: dict[str, Callable[[str], object]] = {
    "path": compiled,
    "class": _check_class,
    "role": _check_role,
    "inside": _check_role,
}


def _layers(value: object, place: Place) -> frozenset[int]:
    """`3-60`, `3`, `[3, 5, 7]` or `'3-10,20-30'`."""
    if isinstance(value, list):
        parts = [str(item) if type(item) is int else "" for item in value]
    else:
        parts = value.split(",") if isinstance(value, str) else [str(value)]
    numbers: list[int] = []
    for part in parts:
        found = _LAYERS.fullmatch(part)
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
        if not first <= last <= _MAX_LAYER:
            numbers.clear()
            break
        numbers.extend(range(first, last + 1))
        if len(numbers) > _MAX_LAYER + 1:
            break
    if not numbers or len(set(numbers)) < len(numbers):
        found_text = listing(map(show, value), "and") if isinstance(value, list) and value else show(value)
        raise place.refusal(
            f"layers is {found_text}; it is 3-60 (first to last), 3, [3, 5, 7] or '3-10,20-30', "
            f"each layer once, none above {_MAX_LAYER}. Write one of these forms."
        )
    return frozenset(numbers)


def _replace(node: Node, place: Place, variables: Variables) -> tuple[str, dict[str, Any], dict[str, str]]:
    """The operator, its arguments, and where each of them stands."""
    place = place.moved(node.where)
    if node.value == KEEP:
        return KEEP, {}, {}
    if not isinstance(node.value, dict):
        word = "keep" if node.value == "default" else "{operator: cpu_experts}, for example"
        raise place.refusal(
            f"replace is {show(node.value)}; it is keep, or a mapping with operator and arguments. "
            f"Write {word}."
        )
    entries = dict(node.value)
    if "operator" not in entries:
        near = [key for key in entries if closest(key, ["operator"])]
        hint = f" Did you mean 'operator' where {show(near[0])} stands?" if near else ""
        raise place.refusal(f"replace has no operator; it needs the name of one. Add it.{hint}")
    item = entries.pop("operator")
    at = place.moved(item.where)
    operator = variables.fill(item, at)
    if not isinstance(operator, str) or not _OPERATOR.fullmatch(operator):
        path = "an import path, " if isinstance(operator, str) and _IMPORT_MARKS.search(operator) else ""
        raise at.refusal(
            f"operator is {path}{show(operator)}; only registry keys are allowed, and nothing is imported "
            "because a rule says so. Write a key such as cpu_experts; register_operator adds your own."
        )
    arguments = {key: _argument(key, item, operator, place, variables) for key, item in entries.items()}
    return operator, arguments, {key: item.where for key, item in entries.items()}


def _argument(key: str, item: Node, operator: str, place: Place, variables: Variables) -> Any:
    place = place.moved(item.where)
    if operator == KEEP:
        raise place.refusal(f"keep has the argument {show(key)}; keep takes none. Remove it.")
    if not NAME.fullmatch(key):
        raise place.refusal(f"the argument name {show(key)}; a name has letters, digits and _. Correct it.")
    value = variables.fill(item, place)
    if value == "None":
        raise place.refusal(f"{key} is the text 'None'; no value is null. Write null, or leave {key} out.")
    return value
