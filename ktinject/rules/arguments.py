"""Arguments of operators, typed by the operator's config class, and the JSON Schema of the same types."""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar, get_args, get_origin

from ktinject.errors import RuleError
from ktinject.rules.language import KEEP, Rule
from ktinject.rules.wording import Place, Problems, did_you_mean, listing, show

C = TypeVar("C")

_WORDS = {str: "text", int: "a whole number", float: "a number", bool: "true or false", type(None): "null"}
_JSON = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}


def check_arguments(rule: Rule, config_class: type[C]) -> C:
    """The rule's arguments as an instance of the operator's config, a dataclass.

    Annotations may be str, int, float, bool, None, Literal, list[…] and unions of these; true and false are
    no numbers. A ValueError from the config's `__post_init__` becomes a refusal of the rule.

    Raises   RuleError, at the arguments' lines, for unknown and missing arguments and those of another type
    """
    config: Any = config_class
    kinds = _kinds(config)
    values: dict[str, Any] = {}
    problems = Problems()
    for name, value in rule.arguments.items():
        with problems.kept():
            values[name] = _argument(rule, name, value, kinds)
    missing = [
        field.name
        for field in dataclasses.fields(config)
        if field.name in kinds and field.name not in rule.arguments
        and field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    ]  # fmt: skip
    if missing:
        problems.add(
            rule.place().refusal(
                f"{rule.operator} needs {listing(missing, 'and')}; no default is there. Add it."
            )
        )
    problems.check()
    try:
        return config_class(**values)
    except ValueError as error:
        raise rule.place(argument_of(str(error), config_class)).refusal(str(error)) from error


def _argument(rule: Rule, name: str, value: Any, kinds: Mapping[str, Any]) -> Any:
    place = rule.place(name)
    if name not in kinds:
        raise place.refusal(
            f"{rule.operator} has no argument {show(name)}; it has {listing(kinds, 'and')}. "
            f"Correct or remove it.{did_you_mean(name, kinds)}"
        )
    if not _accepts(kinds[name], value):
        found = listing(map(show, value), "and") if isinstance(value, list) and value else show(value)
        words = [option for option in _literals(kinds[name]) if isinstance(option, str)]
        hint = did_you_mean(value, words) if isinstance(value, str) else ""
        raise place.refusal(f"{name} is {found}; it is {_describe(kinds[name])}. Write one of these.{hint}")
    return float(value) if kinds[name] is float else value


def argument_of(reason: str, config_class: type) -> str | None:
    """The argument that a reason is about: one that it begins with."""
    first = reason.partition(" ")[0].rstrip(":")
    return first if first in _kinds(config_class) else None


def unknown_operator(rule: Rule, known: Iterable[str]) -> RuleError:
    """The refusal of an operator that nobody registered."""
    names = sorted({*known, KEEP})
    return Place(rule.operator_where or rule.where, f"rule {rule.name!r}").refusal(
        f"unknown operator {show(rule.operator)}; registered are {listing(names, 'and')}. "
        f"Name one of them, or add yours with register_operator.{did_you_mean(rule.operator, names)}"
    )


def argument_schema(config_class: type) -> dict[str, dict[str, Any]]:
    """A JSON Schema for each argument of an operator; a reference to a variable stands for any of them."""
    defaults = {field.name: field.default for field in dataclasses.fields(config_class)}
    schemas: dict[str, dict[str, Any]] = {}
    for name, kind in _kinds(config_class).items():
        schemas[name] = {"anyOf": [*_json(kind), {"$ref": "#/definitions/reference"}]}
        if defaults[name] is not dataclasses.MISSING:
            schemas[name]["default"] = defaults[name]
    return schemas


@functools.cache
def _kinds(config_class: type) -> Mapping[str, Any]:
    if not dataclasses.is_dataclass(config_class):
        raise TypeError(f"{config_class.__qualname__} is not a dataclass")
    hints = typing.get_type_hints(config_class)
    kinds = {field.name: hints[field.name] for field in dataclasses.fields(config_class) if field.init}
    for name, kind in kinds.items():
        for member in _members(kind):
            inner = get_args(member)[0] if get_origin(member) is list else member
            if any(m not in _WORDS and get_origin(m) is not typing.Literal for m in _members(inner)):
                raise TypeError(f"{config_class.__qualname__}.{name}: {kind} is no type of the rule language")
    return kinds


def _members(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in (typing.Union, types.UnionType) else (kind,)


def _literals(kind: Any) -> list[Any]:
    return [v for member in _members(kind) if get_origin(member) is typing.Literal for v in get_args(member)]


def _accepts(kind: Any, value: object) -> bool:
    for member in _members(kind):
        origin = get_origin(member)
        if origin is typing.Literal:
            if any(type(value) is type(option) and value == option for option in get_args(member)):
                return True
        elif origin is list:
            if isinstance(value, list) and all(_accepts(get_args(member)[0], item) for item in value):
                return True
        elif type(value) is member or (member is float and type(value) is int):
            return True
    return False


def _describe(kind: Any) -> str:
    words = []
    for member in _members(kind):
        if get_origin(member) is typing.Literal:
            words += [str(option) for option in get_args(member)]
        elif get_origin(member) is list:
            words.append(f"a list, each {_describe(get_args(member)[0])}")
        else:
            words.append(_WORDS[member])
    return listing(words)


def _json(kind: Any) -> list[dict[str, Any]]:
    schemas: list[dict[str, Any]] = []
    for member in _members(kind):
        if get_origin(member) is typing.Literal:
            schemas.append({"enum": list(get_args(member))})
        elif get_origin(member) is list:
            schemas.append({"type": "array", "items": {"anyOf": _json(get_args(member)[0])}})
        else:
            schemas.append({"type": _JSON[member]})
    return schemas
