"""The variables of a rule document, and the one way in which they are filled in."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import regex
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ktinject.rules import document
from ktinject.rules.node import Node
from ktinject.rules.wording import Enough, Place, Problems, Unknown, did_you_mean, listing, show

REFERENCE = r"\$\{variables\.([A-Za-z_][A-Za-z0-9_]*)\}"
NAME = regex.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_REFERENCE = regex.compile(REFERENCE)
# OmegaConf parses in Python, a third of a millisecond for each reference and longer for long text.
_MAX_REFERENCES = 1000
_MAX_TEXT = 1000


class Variables:
    """Declared values, with some overridden.

    problems  gets what is not allowed
    """

    def __init__(self, problems: Problems) -> None:
        self.values: dict[str, Any] = {}
        self._problems = problems
        self._left = _MAX_REFERENCES
        self._refused: set[str] = set()

    def fill(self, node: Node, place: Place) -> Any:
        """The node's plain value, every `${variables.name}` filled in; one alone keeps its variable's type.

        Raises   RuleError for any other interpolation and for variables that are not declared; Unknown for a variable
                 whose value was refused
        """
        if isinstance(node.value, list):
            return [self.fill(item, place.moved(item.where)) for item in node.value]
        if isinstance(node.value, dict):
            return {key: self.fill(item, place.moved(item.where)) for key, item in node.value.items()}
        if not isinstance(node.value, str) or "${" not in node.value:
            return node.value
        text = node.value
        # OmegaConf would resolve environment variables, other nodes and what resolvers the process has.
        if "${" in _REFERENCE.sub("", text) or "\\${" in text:
            raise place.refusal(
                f"{show(text)} interpolates something else; only ${{variables.name}} is filled in. "
                "Declare a variable with the value, or write the value out."
            )
        names = _REFERENCE.findall(text)
        self._left -= len(names)
        if len(text) > _MAX_TEXT or self._left < 0:
            raise place.refusal(
                f"{show(text)} is too much to fill in; a file may refer to variables {_MAX_REFERENCES:,} "
                f"times, in texts of at most {_MAX_TEXT:,} characters. Write values out.",
                Enough,
            )
        for name in names:
            if name in self._refused:
                raise Unknown
            if name not in self.values:
                raise place.refusal(
                    f"${{variables.{name}}} is not declared; {self._declared()}. "
                    f"Declare it under variables.{did_you_mean(name, self.values)}"
                )
        try:
            self._config.text = text
            return self._config.text
        except OmegaConfBaseException as error:
            raise place.refusal(f"{show(text)} cannot be filled in: {error}; write the value out.") from error

    @functools.cached_property
    def _config(self) -> DictConfig:
        return OmegaConf.create({"variables": self.values, "text": None})

    def declare(self, node: Node) -> None:
        """Take defaults from a mapping of names to values; what is declared already gets another default."""
        with self._problems.kept():
            if not isinstance(node.value, dict):
                raise Place(node.where).refusal(
                    f"variables is {show(node.value)}; it is a mapping of names to values. Write name: value."
                )
            for name, item in node.value.items():
                with self._problems.kept():
                    self._declare(name, item)

    def override(self, values: Mapping[str, Any], source: str) -> None:
        """Take values in place of the defaults."""
        for name, value in values.items():
            with self._problems.kept():
                self._override(name, value, source)

    def _declare(self, name: str, item: Node) -> None:
        if not NAME.fullmatch(name):
            raise Place(item.key or item.where).refusal(
                f"the variable name {show(name)}; a name has letters, digits and _, and begins with "
                "no digit. Rename it."
            )
        place = Place(item.where, f"variable {name!r}")
        self._refused.add(name)
        _check(item.value, place)
        self._set(name, item.value, place)
        self._refused.discard(name)

    def _override(self, name: str, value: object, source: str) -> None:
        if name not in self.values:
            raise Place(source).refusal(
                f"no variable {show(name)} to set; {self._declared()}. "
                f"Set one that is declared.{did_you_mean(name, self.values)}"
            )
        place = Place(source, f"variable {name!r}")
        given = document.from_python(value, source, f"variables.{name}").value
        _check(given, place)
        self._set(name, given, place)

    def _set(self, name: str, value: Any, place: Place) -> None:
        default = self.values.get(name, value)
        if isinstance(default, bool) != isinstance(value, bool):
            raise place.refusal(
                f"set to {show(value)}; its default is {show(default)}, and true or false take the place of each "
                "other only. Set a value of the default's kind."
            )
        # Numbers and text give way to each other, for arguments such as `0 | 16 | 0.25 | auto`.
        self.values[name] = value

    def _declared(self) -> str:
        return f"the file declares {listing(self.values, 'and')}" if self.values else "the file declares none"


def _check(value: object, place: Place) -> None:
    if not isinstance(value, str | int | float):
        raise place.refusal(
            f"its value is {show(value)}; a variable is text, a number, true or false. Write one."
        )
    if isinstance(value, str) and len(value) > _MAX_TEXT:
        raise place.refusal(
            f"its value has {len(value):,} characters; at most {_MAX_TEXT:,} are allowed. Cut it."
        )
    if isinstance(value, str) and ("${" in value or value == "???"):
        raise place.refusal(
            f"its value is {show(value)}; a variable refers to no other. Write the value out."
        )
