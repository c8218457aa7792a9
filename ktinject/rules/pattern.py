"""The dialect of `match.path`: the `regex` module's, less what its timeout cannot bound."""

from __future__ import annotations

import functools

import regex

from ktinject.rules.wording import show

MATCH_SECONDS = 0.5

_MAX_LENGTH = 1000
_MAX_DEPTH = 20
_MAX_REPEATS = 1000
MAX_SIZES = 1_000_000  # of all patterns of a rule file
# Escapes and character classes are stepped over whole, so that every `(?` and `{` that is left is syntax.
_TOKEN = regex.compile(
    r"\\. | \[\^?\]?(?:\\.|[^\]\\])*\] | \((?:\?(?:[:=!]|<[=!]|i[:)])?)? | \) | \{[^}]*\}?",
    regex.DOTALL | regex.VERBOSE,
)
_COUNT = regex.compile(r"\{([0-9]{1,4})(?:,([0-9]{0,4}))?\}")


class Patterns:
    """The patterns of a rule set, which together may take so much time and memory."""

    def __init__(self) -> None:
        self._left = MAX_SIZES

    def has_room(self, pattern: str) -> bool:
        """Whether one more may be compiled. Raises ValueError as `compiled`."""
        self._left -= size(pattern)
        return self._left >= 0


@functools.lru_cache(maxsize=512)
def compiled(pattern: str) -> regex.Pattern[str]:
    """The compiled pattern.

    Left out are recursion, fuzzy matching and large or multiplied counts, which take memory without bound
    before a timeout is looked at: compiling `(?:(?:.?){1000}){1000}` takes 600 MiB.

    Raises   ValueError, with what was found and what is allowed, for a pattern outside the dialect
    """
    size(pattern)
    try:
        return regex.compile(pattern)
    except regex.error as error:
        raise ValueError(
            f"is not a regular expression: {error}; the regex module's syntax is allowed"
        ) from error


@functools.lru_cache(maxsize=512)
def size(pattern: str) -> int:
    """Characters times counts, which the time and the memory of compiling follow: 800,000 take 0.3 s and 120 MiB.

    Raises   ValueError as `compiled`
    """
    if len(pattern) > _MAX_LENGTH:
        raise ValueError(f"has {len(pattern):,} characters; at most {_MAX_LENGTH:,} are allowed")
    depth, repeats = 0, 1
    for token in _TOKEN.findall(pattern):
        if token == "(?":
            raise ValueError(
                "has an extension; of the groups that begin with (? only (?: (?= (?! (?<= (?<! (?i) and (?i: "
                "are allowed"
            )
        if token == ")":
            depth -= 1
        elif token[0] == "(" and token[-1] != ")":
            depth += 1
            if depth > _MAX_DEPTH:
                raise ValueError(f"nests groups too deeply; at most {_MAX_DEPTH} levels are allowed")
        elif token[0] == "{":
            count = _COUNT.fullmatch(token)
            if not count:
                raise ValueError(
                    f"has {show(token)}; a count is {{n}}, {{n,}} or {{n,m}}, and a brace is \\{{"
                )
            repeats *= max(1, int(count[1]), int(count[2] or 0))
            if repeats > _MAX_REPEATS:
                raise ValueError(f"repeats too much; its counts may multiply to at most {_MAX_REPEATS:,}")
    return len(pattern) * repeats


def fullmatch(pattern: str, text: str) -> bool:
    """Whether the pattern matches all of the text. Raises TimeoutError after half a second."""
    return compiled(pattern).fullmatch(text, timeout=MATCH_SECONDS) is not None
