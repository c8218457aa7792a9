"""Every refusal of ktinject is one of these; all are `ValueError`s.

A message says where, what was found, what is allowed and what to do, in that order.
"""

from __future__ import annotations


class KTInjectError(ValueError):
    """Base of all refusals. The model is untouched and the process usable when one is raised."""


class RuleError(KTInjectError):
    """A rule file, or a list of rules, that cannot be read or means nothing."""


class PlanError(KTInjectError):
    """Rules that are well formed but do not fit this model, checkpoint, machine or budget."""


class CheckpointError(KTInjectError):
    """A checkpoint that is damaged, incomplete, unsafe or in a format that is not read."""


class OperatorError(KTInjectError):
    """An operator asked for work it cannot do."""
