"""A choice is a value with a reason."""

from __future__ import annotations

import pytest

from ktinject.support import SUPPORTED, Support


def test_its_truth_is_the_answer() -> None:
    assert SUPPORTED and SUPPORTED.reason == ""
    assert Support(True, "only with one row")
    refused = Support.no("the cache is quantised")
    assert not refused and refused.reason == "the cache is quantised"


def test_answers_are_compared_by_value_and_do_not_change() -> None:
    assert Support(False, "why") == Support.no("why") != SUPPORTED
    with pytest.raises(AttributeError):
        SUPPORTED.ok = False  # type: ignore[misc]


def test_a_refusal_has_a_reason() -> None:
    with pytest.raises(ValueError, match="Say why"):
        Support(False, "")
