"""How many candidates a step of a greedy text verifies, if any: as many as pay, by what was measured.

    tokens a step, expected = 1 + a₁ + a₁a₂ + …   aᵢ: how often candidate i was right where those before it were
    cost of a step          = what steps of so many tokens took, with all that comes between two of them

The greatest ratio of the two is chosen; none is tried where steps of one token write more. What is chosen changes no
token of the text. Outcomes come from steps that verified candidates, and, of candidates that cost nothing, also from
the text itself: `Shadow` compares them with what steps of one token write. So nothing has to be tried to see that
candidates became better. Where that is not known, trials with growing gaps show it.

What candidates cost themselves is measured without trying any, where they are not free, as soon as steps have lasted so
long that this may be lost. Where even candidates that are always right could not make up for it, none is tried.

Whatever was expected: steps that wrote less than steps of one token would have in that time are a loss, and while
losses exceed a share of the request's time, nothing is tried.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence

# Of steps of one number of tokens, so many times are remembered.
_TIMES = 9
# What a token more costs, relative to a step of one, while nobody has measured it: experts of other tokens are others.
_GUESS = 0.6
# The least that a token more may turn out to cost: what a trial must promise at that price.
_CHEAP = 0.25
# What candidates that are not free cost beside their step while nobody has measured it, in seconds: an MTP head is one
# layer, but computed by transformers, whose own time hardly depends on the model.
_PRICE_S = 3e-3
# How often the first candidate is right, before one was seen; the others are expected to be as good as those before.
# Where the text shows it soon, nothing is tried before it has.
_FIRST, _FIRST_OF_SHADOWED = 0.6, 0.2
# An outcome counts so much less with each that follows.
_DECAY = 0.9
# Candidates must promise so much more than steps of one token: both costs are measured.
_MARGIN = 1.03
# Losses that are allowed: as a share of the time of all steps, and at once, in steps of one token. What was gained
# allows so many more.
_SHARE, _AT_ONCE, _GAINED = 0.01, 1.0, 6.0
# And so many more where the text shows that candidates which nobody tried would have gained them.
_SHOWN = 1.5
# Steps between two trials of what does not seem to pay. A failed one doubles them.
_GAP, _LONGEST_GAP = 8, 512


class Costs:
    """What steps cost, by their tokens, and what it costs to go from one kind to the other.

    price   of candidates that no step has verified yet, in steps of one token; None: not measured
    """

    def __init__(self, price: float | None = 0.0) -> None:
        self.price = price
        self._seconds: dict[int, deque[float]] = {}
        self._known: dict[int, float] = {}  # their medians
        self._switches: deque[float] = deque(maxlen=_TIMES)

    def note(self, tokens: int, seconds: float) -> None:
        """A step of so many tokens took so long."""
        times = self._seconds.setdefault(tokens, deque(maxlen=_TIMES))
        times.append(seconds)
        self._known[tokens] = statistics.median(times)

    def note_switch(self, seconds: float) -> None:
        """The first of the steps that are queued ahead took so long."""
        self._switches.append(max(0.0, seconds - self.of(1)))

    def knows(self, tokens: int) -> bool:
        return tokens in self._known

    @property
    def switch(self) -> float:
        """What is lost where steps are no longer queued ahead, in seconds."""
        return statistics.median(self._switches) if self._switches else 0.0

    @property
    def price_s(self) -> float:
        return _PRICE_S if self.price is None else self.price * self.of(1)

    def of(self, tokens: int) -> float:
        """Of a step of so many tokens, in seconds; while nothing was measured, relative to a step of one.

        Between and beyond numbers that were measured, costs are on a line.
        """
        known = self._known
        if tokens in known:
            return known[tokens]
        if len(known) < 2:
            count, seconds = next(iter(known.items()), (1, 1.0))
            return seconds * _guess(tokens) / _guess(count) + (self.price_s if count == 1 < tokens else 0.0)
        below, above = (n for n in known if n < tokens), (n for n in known if n > tokens)
        a, b = max(below, default=min(known)), min(above, default=max(known))
        if a == b or not min(known) < tokens < max(known):
            a, b = min(known), max(known)
        slope = max(0.0, (known[b] - known[a]) / (b - a))
        return known[a] + slope * (tokens - a) if tokens > a else known[a] * _guess(tokens) / _guess(a)


def _guess(tokens: int) -> float:
    return 1 + _GUESS * (tokens - 1)


class _Trials:
    """When to try again what does not seem to pay.

    waits  steps until then
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """It may be tried at once."""
        self.waits, self._gap = 0, _GAP

    def step(self) -> None:
        self.waits = max(0, self.waits - 1)

    def wait(self) -> None:
        self.waits = self._gap

    def fail(self) -> None:
        """It was tried, and did not pay."""
        self.waits, self._gap = self._gap, min(_LONGEST_GAP, 2 * self._gap)


class Governor:
    """The candidates that the steps of one request try.

    costs        what its steps cost
    is_shadowed  outcomes are also seen where none is tried
    """

    def __init__(self, most: int, costs: Costs, *, is_shadowed: bool) -> None:
        self.costs, self.is_shadowed = costs, is_shadowed
        # Of each candidate, how often it was tried and right, and what the expectation before still counts.
        self._tried, self._right, self._unknown = [0.0] * most, [0.0] * most, [1.0] * most
        self._spent = self._lost = 0.0
        self._shown = 0.0  # what candidates that nobody tried would have gained, in seconds
        self._any, self._more = _Trials(), _Trials()  # of any candidates, and of more than seem to pay
        self._trial: _Trials | None = None  # what the next step is, beside what pays

    def count(self, found: int, *, queued: bool) -> int:
        """How many of so many candidates the next step verifies.

        queued  steps of one token are queued ahead now, which ends if one is verified
        """
        self._trial = None
        if not self.costs.knows(1):
            return 0
        one, found = self.costs.of(1), min(found, len(self._tried))
        allowed = self._allowed - self._lost + one
        while found > 0 and self.costs.of(found + 1) > allowed:  # if all of them are wrong
            found -= 1
        if found <= 0:
            return 0
        expected = self._expected(found)
        rates = self._rates(expected, self.costs.switch if queued else 0.0)
        best = max(range(found), key=rates.__getitem__)
        price = self.costs.price_s / self.costs.of(1)
        hoped = [tokens / (1 + _CHEAP * (at + 1) + price) for at, tokens in enumerate(expected)]
        hope = max(range(found), key=hoped.__getitem__)
        if rates[best] > _MARGIN:
            # What was slow once may be faster now.
            if hope != best and hoped[hope] > rates[best] and not self._more.waits:
                self._trial, best = self._more, hope
            return best + 1
        if self._any.waits or self.is_hopeless or (self.is_shadowed and hoped[hope] <= _MARGIN):
            return 0
        # Where nobody knows how good candidates are, one is tried in any case.
        self._trial = self._any
        return hope + 1 if hoped[hope] > _MARGIN else 1

    @property
    def is_hopeless(self) -> bool:
        """Whether candidates could not pay if all of them were right, by what they cost themselves."""
        price, most = self.costs.price, len(self._tried)
        return price is not None and (1 + most) / (1 + _CHEAP * most + price) <= _MARGIN

    def note(self, tried: int, accepted: int) -> None:
        """So many of the candidates that were tried, or compared with the text, were right."""
        for at in range(min(tried, accepted + 1, len(self._tried))):
            self._tried[at] = 1 + _DECAY * self._tried[at]
            self._right[at] = (at < accepted) + _DECAY * self._right[at]
            self._unknown[at] *= _DECAY

    def shown(self, found: int, right: int) -> None:
        """Of so many candidates that nobody tried, the text had the first ones."""
        most = min(found, len(self._tried))
        if self.costs.knows(1) and most:
            rates = self._rates(self._expected(most), 0.0)
            best = max(range(most), key=rates.__getitem__)
            one = self.costs.of(1)
            gained = (1 + min(right, best + 1)) * one - self.costs.of(best + 2)
            self._shown = min(max(0.0, self._shown + gained), _SHOWN * one)
        self.note(min(found, right + 1), right)

    def verified(self, tried: int, accepted: int, seconds: float) -> None:
        """A step that tried some took so long; `seconds` of 0 tell nothing."""
        self.note(tried, accepted)
        if not seconds:
            return
        lost = seconds - (accepted + 1) * self.costs.of(1)
        self._spend(seconds, lost)
        self._more.step()
        if self._trial is self._any and lost <= 0:
            self._any.reset()
        elif self._trial is not None:
            self._trial.fail()
        elif lost <= 0:
            self._any.reset()
        else:
            self._any.wait()

    def switched(self, seconds: float) -> None:
        """So much was lost where steps were not queued ahead."""
        self._spend(seconds, seconds)

    def plain(self, seconds: float) -> None:
        """A step of one token took so long."""
        self._spend(seconds, 0.0)
        self._any.step()

    @property
    def _allowed(self) -> float:
        return _AT_ONCE * self.costs.of(1) + _SHARE * self._spent + self._shown

    def _spend(self, seconds: float, lost: float) -> None:
        self._spent += seconds
        self._lost = max(self._lost + lost, -_GAINED * self.costs.of(1))

    def _rates(self, expected: Sequence[float], price: float) -> list[float]:
        """Tokens of one candidate, two, … in the time of a step of one token; `price` is paid beside each."""
        one = self.costs.of(1)
        return [tokens * one / (self.costs.of(at + 2) + price) for at, tokens in enumerate(expected)]

    def _expected(self, most: int) -> list[float]:
        """Tokens of a step that tries one candidate, two, …"""
        found, total, chance = [], 1.0, 1.0
        share = _FIRST_OF_SHADOWED if self.is_shadowed else _FIRST
        for tried, right, unknown in zip(self._tried[:most], self._right, self._unknown):
            share = (unknown * share + right) / (unknown + tried)
            chance *= share
            total += chance
            found.append(total)
        return found


class Shadow:
    """Compares candidates that nobody tried with what the text became."""

    def __init__(self, governor: Governor) -> None:
        self._governor = governor
        self._expected: list[int] = []
        self._right = 0

    @property
    def is_idle(self) -> bool:
        """Whether it has nothing to compare."""
        return not self._expected

    def begin(self, candidates: Sequence[int]) -> None:
        """The text may go on with these."""
        self._expected, self._right = [*candidates], 0

    def see(self, token: int) -> None:
        """The text goes on with a token."""
        if not self._expected:
            return
        is_right = self._expected[self._right] == token
        self._right += is_right
        if not is_right or self._right == len(self._expected):
            self._governor.shown(len(self._expected), self._right)
            self._expected = []

    def forget(self) -> None:
        """The text went on in another way."""
        self._expected = []
