"""How many candidates a step of a greedy prompt lookup verifies: as many as pay, by what was measured.

    tokens a step, expected = 1 + a₁ + a₁a₂ + …   aᵢ: how often candidate i was right where those before it were
    cost of a step          = what steps of so many tokens took

The greatest ratio of the two is chosen. What is chosen changes no token of the text.
"""

from __future__ import annotations

import math
import statistics
from collections import deque

# Of steps of one number of tokens, so many times are remembered.
_TIMES = 9
# What a token more costs, relative to a step of one, while nobody has measured it: experts of other tokens are others.
_GUESS = 0.6
# How often the first candidate is right, before one was tried; the others are expected to be as good as those before.
_FIRST = 0.7
# An outcome counts so much less with each that follows.
_DECAY = 0.8
# Steps of one token that show what those cost, with which all others are compared.
_MEASURED = 2
# Steps between two trials of a candidate more than pays. A failed one doubles them.
_PAUSE, _LONGEST_PAUSE = 4, 64
# What such trials may cost, as a share of what steps cost, while they fail.
_SHARE = 0.05
# Steps that look for no candidates after one that found none. Each that follows doubles them.
_REST, _LONGEST_REST = 1, 8


class Costs:
    """What steps cost, by their tokens."""

    def __init__(self) -> None:
        self._seconds: dict[int, deque[float]] = {}

    def note(self, tokens: int, seconds: float) -> None:
        """A step of so many tokens took so long."""
        self._seconds.setdefault(tokens, deque(maxlen=_TIMES)).append(seconds)

    def knows(self, tokens: int) -> bool:
        return tokens in self._seconds

    def of(self, tokens: int) -> float:
        """Of a step of so many tokens, in seconds; while nothing was measured, relative to a step of one."""
        known = {count: statistics.median(times) for count, times in self._seconds.items()}
        if tokens in known:
            return known[tokens]
        below = max((count for count in known if count < tokens), default=None)
        above = min((count for count in known if count > tokens), default=None)
        if below is not None and above is not None:
            return known[below] + (known[above] - known[below]) * (tokens - below) / (above - below)
        nearest = below or above
        return _guess(tokens) if nearest is None else known[nearest] * _guess(tokens) / _guess(nearest)


def _guess(tokens: int) -> float:
    return 1 + _GUESS * (tokens - 1)


class Trials:
    """The candidates that the steps of one request try.

    limit   how many the next step tries
    pauses  so many steps from now on try none
    """

    def __init__(self, most: int, costs: Costs) -> None:
        self._most, self._costs = most, costs
        # Of each candidate, how often it was tried and right, and what the expectation before still counts.
        self._tried, self._right, self._unknown = [0.0] * most, [0.0] * most, [1.0] * most
        self._pause, self._rest, self._rests = _PAUSE, _REST, 0
        self._choose()
        self._waits = _PAUSE if self._paying else 0  # in any case, the first one is tried

    @property
    def limit(self) -> int:
        if self.pauses:
            return 0
        return min(self._most, self._paying + (not self._waits))

    @property
    def pauses(self) -> int:
        if not self._costs.knows(1):
            return _MEASURED
        return max(self._rests, 0 if self._paying else self._waits)

    def note(self, tried: int, accepted: int, steps: int = 1) -> None:
        """The outcome of a step, or of steps that tried none."""
        is_probe = tried > self._paying
        for at in range(min(tried, accepted + 1)):
            self._tried[at] = 1 + _DECAY * self._tried[at]
            self._right[at] = (at < accepted) + _DECAY * self._right[at]
            self._unknown[at] *= _DECAY
        self._waits, self._rests = max(0, self._waits - steps), max(0, self._rests - steps)
        self._rest = _REST if tried else self._rest
        extra = self._costs.of(tried + 1) / self._costs.of(self._paying + 1) - 1
        self._choose()
        if is_probe and accepted < tried:
            self._waits = min(_LONGEST_PAUSE, max(self._pause, math.ceil(extra / _SHARE)))
            self._pause = min(_LONGEST_PAUSE, 2 * self._waits)
        elif is_probe:
            self._pause = _PAUSE
            self._waits = 0 if self._is_hopeful else _LONGEST_PAUSE

    def miss(self) -> None:
        """No candidates were found, where looking for them costs time."""
        self._rests, self._rest = self._rest, min(_LONGEST_REST, 2 * self._rest)

    def _choose(self) -> None:
        """Find the number of candidates with which a token costs least, and whether more would if they were right."""
        costs = [self._costs.of(tokens) for tokens in range(1, self._most + 2)]
        expected, chance, share = [1.0], [1.0], _FIRST
        for tried, right, unknown in zip(self._tried, self._right, self._unknown):
            share = (unknown * share + right) / (unknown + tried)
            chance.append(chance[-1] * share)
            expected.append(expected[-1] + chance[-1])
        rates = [tokens / cost for tokens, cost in zip(expected, costs)]
        self._paying = paying = rates.index(max(rates))
        hoped = (
            (expected[paying] + chance[paying] * more) / costs[paying + more]
            for more in range(1, len(costs) - paying)
        )
        self._is_hopeful = any(rate > rates[paying] for rate in hoped)
