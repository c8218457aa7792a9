"""What the catalogue says of an operator's arguments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ktinject.operators import REGISTRY
from ktinject.operators.base import Config
from ktinject.operators.expert_formats import K_QUANTS
from ktinject.tools import catalogue

Some = Literal["a", "b"]


@dataclass(frozen=True)
class _Config(Config):
    """Arguments of many kinds."""

    # The first line of it,
    # and the second. The end.
    alias: Literal[Some, "c"] = "a"
    number: int | Some = 1  # Behind it.
    text: str | None = None
    words: tuple[str, ...] = ()


class _Operator:
    Config = _Config


def test_arguments_with_their_values_and_whole_comments() -> None:
    found = {a.name: (a.allowed, a.meaning) for a in catalogue.arguments(_Operator)}  # type: ignore[arg-type]
    found.pop("device")
    assert found == {
        "alias": ("a | b | c", "the first line of it, and the second. The end"),
        "number": ("int | a | b", "behind it"),
        "text": ("str | None", ""),
        "words": ("tuple[str, ...]", ""),
    }


def test_the_cpus_formats_stand_once() -> None:
    """Linears and experts take the same ones; experts find out what fits, too."""
    linear, experts = (
        next(a.allowed for a in catalogue.arguments(REGISTRY[name]) if a.name == "weights").split(" | ")
        for name in ("cpu_linear", "cpu_experts")
    )
    assert experts == [*linear, "auto"] and {*K_QUANTS, "int4", "kept"} <= {*linear}
