"""A rule file as a whole: its version, what it extends, the models that it serves, and where its rules are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import regex

from ktinject.errors import RuleError
from ktinject.rules.node import Node
from ktinject.rules.wording import Place, Problems, did_you_mean, listing, show

VERSION = 1
TOP_KEYS = ("version", "extends", "model_types", "variables", "rules")

_MODEL_TYPE = regex.compile(r"[A-Za-z0-9_.-]+")


@dataclass(frozen=True)
class Document:
    """One rule file: its nodes, and its name in refusals."""

    root: Node
    source: str

    def top(self) -> dict[str, Node]:
        """The top keys, known or not. Raises RuleError for what is no rule file of version 1."""
        place = Place(self.root.where)
        if isinstance(self.root.value, list):
            raise _not_a_mapping(self.root.value, place)
        if not isinstance(self.root.value, dict):
            raise no_mapping(self.root, place, "a rule file", TOP_KEYS)
        if "version" not in self.root.value:
            for key, node in self.root.value.items():  # a mistyped one is the likelier
                if did_you_mean(key, ["version"]):
                    raise unknown_key(key, node, place, "a rule file", TOP_KEYS)
        _check_version(self.root.value.get("version"), place)
        return self.root.value

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

    def model_types(self) -> tuple[str, ...] | None:
        """The types of model that the file names; None if it names none. Raises RuleError."""
        node = self.top().get("model_types")
        return None if node is None else _model_types(node)

    def rules(self) -> list[Node]:
        """The file's own rules, none if it only extends another. Raises RuleError."""
        top = self.top()
        if "rules" not in top:
            if "extends" in top:
                return []
            raise Place(self.root.where).refusal(
                "no rules; a rule file has a list of them. Write it under rules."
            )
        node = top["rules"]
        if not isinstance(node.value, list) or not node.value:
            raise Place(node.where).refusal(
                f"rules is {show(node.value)}; it is a list of rules. Begin each with - name."
            )
        return node.value


def mapping(
    node: Node, place: Place, what: str, allowed: Sequence[str], problems: Problems
) -> dict[str, Node]:
    """The entries that are allowed; others are problems. Raises RuleError for what is no mapping."""
    if not isinstance(node.value, dict):
        raise no_mapping(node, place, what, allowed)
    for key, value in node.value.items():
        if key not in allowed:
            problems.add(unknown_key(key, value, place, what, allowed))
    return {key: value for key, value in node.value.items() if key in allowed}


def no_mapping(node: Node, place: Place, what: str, allowed: Sequence[str]) -> RuleError:
    return place.refusal(
        f"{what} is {show(node.value)}; it is a mapping of {listing(allowed, 'and')}. Write key: value."
    )


def unknown_key(key: str, node: Node, place: Place, what: str, allowed: Sequence[str]) -> RuleError:
    return place.moved(node.key or node.where).refusal(
        f"unknown key {show(key)}; {what} has {listing(allowed, 'and')}. "
        f"Correct or remove it.{did_you_mean(key, allowed)}"
    )


def _not_a_mapping(items: list[Node], place: Place) -> Exception:
    if any(_is_legacy(item.value) for item in items):
        return place.refusal(
            "a KTransformers 0.x rule file, a list whose rules name classes by import path; version 1 is a "
            "mapping with version: 1 and rules that name operators. "
            "`ktinject rules migrate` turns it into version 1."
        )
    return place.refusal(
        "the document is a list; a rule file is a mapping. Write version: 1 and put the list under rules."
    )


def _is_legacy(rule: object) -> bool:
    if not isinstance(rule, dict) or "match" not in rule:
        return False
    replace = rule["replace"].value if "replace" in rule else None
    return "recursive" in rule or (isinstance(replace, dict) and bool({"class", "kwargs"} & replace.keys()))


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
