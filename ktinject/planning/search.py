"""Looks for the plan that fits: formats that rules leave open, from the most accurate one down.

What a layout depends on and what does not change in the search is kept here; so are the operators that were built for
modules whose arguments stay the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel

from ktinject.distributed.process_group import ProcessGroup
from ktinject.errors import PlanError
from ktinject.machine import Machine
from ktinject.planning import layout
from ktinject.planning.devices import Devices
from ktinject.planning.formats import Level, levels
from ktinject.planning.layout import Layout
from ktinject.planning.memory import Kept
from ktinject.planning.modules import MatchedModule
from ktinject.planning.replacements import Replacer


@dataclass(frozen=True)
class Found:
    """What a search has come to.

    level     the formats of the layout
    given_up  more accurate levels, each with the reason why it does not fit
    """

    layout: Layout
    level: Level
    given_up: tuple[tuple[Level, str], ...]

    def notes(self) -> list[str]:
        """For each rule that leaves a format open: what it takes, what it gives up and why."""
        found = []
        for rule, words in self.level.settled.items():
            better: dict[str, str] = {}
            for level, reason in self.given_up:
                better.setdefault(level.settled[rule], reason)
            better.pop(words, None)
            lost = "; ".join(f"{name}: {reason}" for name, reason in better.items())
            found.append(f"{rule}: weights: auto is {words}" + (f". Given up: {lost}" if lost else ""))
        return found


class Search:
    """Makes layouts of one model, for other arguments, budgets and lengths of a request.

    candidates   devices for the modules that are not replaced, best first
    has_weights  True: the modules that are not replaced are in memory already
    kv_values    as `memory.cached_values` returns them
    """

    def __init__(
        self,
        model: PreTrainedModel,
        machine: Machine,
        decoder: nn.Module,
        group: ProcessGroup | None,
        candidates: Sequence[tuple[str, ...]],
        has_weights: bool,
        kv_values: Sequence[Kept] | None,
    ) -> None:
        self._model = model
        self._machine = machine
        self._decoder = decoder
        self._group = group
        self._candidates = candidates
        self._has_weights = has_weights
        self._kv_values = kv_values
        self._replacer: Replacer | None = None

    def layout(self, modules: Sequence[MatchedModule], where: Devices, context: int) -> Layout:
        """The layout of modules whose formats are settled.

        where     the devices with their limits; the same ones in every call
        context   tokens of a request for which there has to be room
        Raises    PlanError if an operator refuses a module
        """
        if self._replacer is None:
            self._replacer = Replacer(modules, where, self._machine, self._decoder, self._group)
        else:
            self._replacer = self._replacer.changed(modules)
        return layout.choose(
            self._model, self._replacer, where, self._candidates, self._has_weights, self._kv_values, context
        )

    def run(self, modules: Sequence[MatchedModule], where: Devices, context: int) -> Found:
        """The first level that fits, or the last one. Raises PlanError if operators refuse modules at every level."""
        found: Found | None = None
        refusal: PlanError | None = None
        given_up: list[tuple[Level, str]] = []
        for level in levels(modules):
            try:
                made = self.layout(level.modules, where, context)
            except PlanError as error:
                refusal = refusal or error
                given_up.append((level, str(error).partition("\n")[0].rstrip(".")))
                continue
            found = Found(made, level, tuple(given_up))
            if made.fits:
                break
            given_up.append((level, made.problems[0].rstrip(".")))
        if found is None:
            assert refusal is not None
            raise refusal
        return found
