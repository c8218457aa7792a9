"""How many candidates are tried, by simulated costs; and candidates from the text itself."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from ktinject.generation.governor import Costs, Governor, Shadow
from ktinject.generation.lookup import Lookup

Seconds = Callable[[int], float]


class Text:
    """A text of which each candidate is right with some probability, and what steps take.

    price  seconds that candidates cost beside their step; None: nobody asks, and they cost nothing
    lost   in steps of one token, by not having written all of it in such steps
    """

    def __init__(
        self,
        seconds: Seconds,
        *,
        free: bool,
        switch: float = 0.0,
        costs: Costs | None = None,
        price: float | None = None,
    ) -> None:
        self.costs = costs or Costs(0.0 if price is None else None)
        self._price = price or 0.0
        self.governor = Governor(4, self.costs, is_shadowed=free)
        self._shadow = Shadow(self.governor)
        self._seconds, self._switch, self._free = seconds, switch, free
        self._random = random.Random(0)
        self._is_queued = False
        self.written, self.clock, self.tried = 0, 0.0, [0]

    def write(self, tokens: int, right: float) -> None:
        """So many more tokens, as the loop does it."""
        end = self.written + tokens
        while self.written < end:
            count = self.governor.count(4, queued=self._is_queued)
            if count and self.costs.price is None:
                self.costs.price = self._price / self.costs.of(1)
                self.clock += 3 * self._price
                self.governor.switched(3 * self._price)
                count = self.governor.count(4, queued=False)
            self.tried.append(count)
            if count:
                accepted = 0
                while accepted < count and self._random.random() < right:
                    accepted += 1
                self._take(count + 1, accepted + 1)
                self.governor.verified(count, accepted, self._seconds(count + 1) + self._price)
                self._is_queued = False
                continue
            if not self._is_queued and self.tried[-2]:
                self.clock += self._switch
                self.costs.note_switch(self._switch + self._seconds(1))
                self.governor.switched(self._switch)
            self._is_queued = True
            self._take(1, 1)
            self.governor.plain(self._seconds(1))
            if self._free:
                if self._shadow.is_idle:
                    self._shadow.begin([1, 1, 1, 1])
                self._shadow.see(int(self._random.random() < right))

    def _take(self, tokens: int, written: int) -> None:
        seconds = self._seconds(tokens) + self._price * (tokens > 1)
        self.clock += seconds
        self.costs.note(tokens, seconds)
        self.written += written

    @property
    def lost(self) -> float:
        return self.clock / self._seconds(1) - self.written


def linear(more: float) -> Seconds:
    return lambda tokens: 2e-3 * (1 + more * (tokens - 1))


# Of experts in the CPU's memory, which a token more reads anew, and of weights that are read once for all.
@pytest.mark.parametrize("more", [0.1, 0.6, 1.3])
@pytest.mark.parametrize("free", [True, False], ids=["lookup", "heads"])
def test_candidates_never_cost_more_than_a_little(more: float, free: bool) -> None:
    plain = linear(more)(1)
    for right in (0.0, 0.1, 0.3, 0.5, 0.8, 1.0):
        text = Text(linear(more), free=free, switch=2e-4)
        text.write(192, right)
        assert text.lost <= 0.03 * 192, (right, text.lost)
        text.write(600, right)
        assert text.lost <= 0.03 * 792, (right, text.lost)
        if not right and free:
            assert not any(text.tried), "what nothing speaks for is not tried"
        best = max(sum(right**k for k in range(m + 1)) * plain / linear(more)(m + 1) for m in range(5))
        if best > 1.15 and (free or right >= 0.8):
            assert text.written * plain / text.clock > 0.88 * best, (right, best)


@pytest.mark.parametrize(
    "step, price", [(5e-4, 3e-3), (5e-4, 8e-4), (2e-3, 2e-3), (1e-2, 3e-3), (2e-2, 2e-3)]
)
def test_what_candidates_cost_themselves_is_measured_first(step: float, price: float) -> None:
    """In short texts as in long ones, of one process; none is tried that could not pay."""
    costs = Costs(None)
    for right in (0.0, 0.85, 1.0):
        for tokens in (64, 64, 192, 1500):
            text = Text(
                lambda n: step * (1 + 0.3 * (n - 1)), free=False, switch=1e-5, costs=costs, price=price
            )
            text.write(tokens, right)
            assert text.lost <= 0.03 * tokens, (right, tokens, text.lost)
            if price >= 4 * step:
                assert not any(text.tried)
            if right > 0.8 and step >= 1e-2:
                assert text.lost < -0.2 * tokens, "they are still used where they pay"
    assert costs.price == pytest.approx(price / step, rel=0.01)


@pytest.mark.parametrize("free", [True, False], ids=["lookup", "heads"])
def test_a_text_that_begins_to_repeat_itself(free: bool) -> None:
    text = Text(linear(0.5), free=free, switch=2e-4)
    text.write(400, 0.0)
    gaps = [at for at, count in enumerate(text.tried) if count]
    if not free:
        assert len(gaps) < 10 and gaps[-1] - gaps[-2] > 2 * (gaps[2] - gaps[1]), "gaps grow"
    before = len(text.tried)
    text.write(800, 1.0)
    later = text.tried[before:]
    first = next(at for at, count in enumerate(later) if count)
    assert first <= (16 if free else 512) and later[-1] == 4
    assert later[first + 6 :].count(0) == 0
    before = len(text.tried)
    text.write(800, 0.0)
    assert sum(map(bool, text.tried[before:])) < 16, "and off it is again"


def test_costs_that_turn_out_lower_are_seen() -> None:
    """What was slow once, as on a busy machine, is tried again."""
    costs = Costs()
    for tokens, seconds in ((1, 1.0), (2, 3.0), (3, 4.0), (4, 5.0), (5, 6.0)):
        costs.note(tokens, seconds)
    text = Text(lambda tokens: 1 + 0.2 * (tokens - 1), free=True, costs=costs)
    text.write(600, 0.95)
    assert text.tried[-1] >= 2 and text.lost < 0


def test_costs_that_nobody_has_measured() -> None:
    costs = Costs()
    assert costs.of(1) == 1 < costs.of(2) < costs.of(5)
    costs.note(1, 10.0)
    assert costs.of(2) == 16
    costs.note(5, 30.0)
    assert costs.of(3) == 20 and costs.of(2) == 15 and costs.of(9) == 50
    for seconds in (12.0, 90.0, 11.0):
        costs.note(1, seconds)
    assert costs.of(1) == 11.5, "of some, the median"
    assert costs.switch == 0
    costs.note_switch(13.5)
    assert costs.switch == 2


def test_what_a_text_shows_may_be_risked() -> None:
    """A long step is a loss if nothing of it is right. It is tried where the text has shown candidates to be."""
    costs = Costs()
    for tokens, seconds in ((1, 1.0), (2, 1.6), (3, 2.1), (4, 2.5), (5, 2.9)):
        costs.note(tokens, seconds)
    governor = Governor(4, costs, is_shadowed=True)
    for _ in range(4):
        governor.note(4, 4)
    assert governor.count(4, queued=False) == 1, "more might lose more than may be lost at once"
    governor.shown(4, 4)
    assert governor.count(4, queued=False) == 4
    governor.verified(4, 0, 2.9)
    assert governor.count(4, queued=False) < 4, "it was lost"


def searched(text: list[int], longest: int, most: int) -> list[int]:
    """The same as `Lookup.candidates`, by search."""
    for size in range(min(longest, len(text) - 1), 0, -1):
        for start in range(len(text) - size - 1, -1, -1):
            if text[start : start + size] == text[-size:]:
                found = [*text]
                while len(found) < len(text) + most:
                    found.append(found[start + size + len(found) - len(text)])
                return found[len(text) :]
    return []


def test_candidates_are_what_followed_the_last_time() -> None:
    drawn = random.Random(0)
    for length in (1, 2, 3, 20):
        text = [drawn.randrange(5) for _ in range(length)]
        for longest in (1, 2, 3):
            lookup, known = Lookup(text, longest), [*text]
            for _ in range(30):
                assert [*lookup.candidates(6)] == searched(known, longest, 6)
                token = drawn.randrange(5)
                lookup.extend([token])
                known.append(token)
