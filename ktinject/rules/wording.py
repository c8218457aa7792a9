"""How a refusal is worded: where, what was found; what is allowed. What to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ktinject.errors import LISTED, RuleError, few

_SHOWN = 80
_MOST_PROBLEMS = 100


@dataclass(frozen=True, slots=True)
class Place:
    """Where a refusal points: "file:line", and the rule that stands there."""

    where: str
    rule: str = ""

    def moved(self, where: str) -> Place:
        """Another line of the same rule."""
        return Place(where, self.rule)

    def refusal(self, text: str, kind: type[RuleError] = RuleError) -> RuleError:
        """The error to raise, `where: rule: text`."""
        error = kind(": ".join(part for part in (self.where, self.rule, text) if part))
        error.where = self.where
        return error


class Problems:
    """Refusals that are collected, so that all of them can be told at once."""

    def __init__(self) -> None:
        self._found: list[RuleError] = []

    def __len__(self) -> int:
        return len(self._found)

    def add(self, error: RuleError) -> None:
        """Collect a refusal, or those that it holds. Raises Enough when there are so many that nobody reads more."""
        self._found += error.parts or (error,)
        if len(self._found) >= _MOST_PROBLEMS:
            raise Enough

    def extend(self, other: Problems) -> None:
        """Collect those of another."""
        self._found += other._found

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Collect a refusal that is raised inside the `with` block, which it ends. Raises Enough."""
        try:
            yield
        except Unknown:
            pass
        except Enough as error:
            self.last(error)
            raise Enough from None
        except RuleError as error:
            self.add(error)

    def last(self, error: RuleError) -> None:
        """Collect the refusal that ended the reading."""
        if error.args:
            self._found += error.parts or (error,)

    def check(self) -> None:
        """Raise RuleError with all problems, in the order in which they were found, if there are any."""
        if self._found:
            raise self.together()

    def all(self) -> tuple[RuleError, ...]:
        """All problems, in the order in which they were found."""
        return tuple(self._found)

    def together(self) -> RuleError:
        """One refusal of all problems, of which there is one at least."""
        if len(self._found) == 1:
            return self._found[0]
        error = RuleError("\n".join(few(self._found)))
        error.parts = tuple(self._found)
        return error


class Enough(RuleError):
    """A refusal after which no more is read: what follows would cost too much, or be too much to tell."""


class Unknown(RuleError):
    """A value follows from another that was refused; nobody needs to be told twice."""


def show(value: object) -> str:
    """The value as a reader of the file knows it, on one line and cut to a sane length."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, list | tuple):
        return "a list" if value else "an empty list"
    if isinstance(value, dict):
        return "a mapping" if value else "an empty mapping"
    if isinstance(value, str):
        return repr(value if len(value) <= _SHOWN else value[:_SHOWN] + "…")
    text = repr(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "…"


def listing(words: Iterable[object], last: str = "or") -> str:
    """`a, b or c`."""
    texts = [str(word) for word in words]
    if len(texts) < 2:
        return "".join(texts)
    if len(texts) > LISTED:
        return f"{', '.join(texts[:LISTED])}, … ({len(texts)} in all)"
    return f"{', '.join(texts[:-1])} {last} {texts[-1]}"


def ranges(numbers: Iterable[int]) -> str:
    """3, 4, 5, 9 → 3-5, 9."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ", ".join("-".join(map(str, run)) for run in runs)


def closest(word: str, known: Iterable[str], count: int = 1) -> list[str]:
    """The known words nearest to `word`, nearest first; letter case does not count."""
    lowered = {name.lower(): name for name in known}
    found = difflib.get_close_matches(word[:_SHOWN].lower(), lowered, n=count, cutoff=0.55)
    return [lowered[name] for name in found]


def did_you_mean(word: object, known: Iterable[str]) -> str:
    """` Did you mean 'x'?`, or nothing."""
    near = closest(str(word), known)
    return f" Did you mean {near[0]!r}?" if near else ""
