"""`replace: keep`: the modules of this rule stay as they are, whatever later rules say."""

from __future__ import annotations

from ktinject.operators.base import NeverBuilt, register_operator


@register_operator("keep")
class Keep(NeverBuilt):
    """The planner lists what the rule matched and leaves it to transformers."""

    replaces = False
