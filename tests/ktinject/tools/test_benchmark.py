"""What `ktinject bench` makes of a trace: kernels that began early have waited, and count from their turn on."""

from __future__ import annotations

from ktinject.tools import benchmark
from ktinject.tools.benchmark import Part


def test_a_kernel_that_began_early_counts_from_its_turn() -> None:
    wait = "ktinject::wait_kernel"
    # Three that were all there from the start, one after a gap.
    spans = [(0, 10, "a"), (1, 30, wait), (2, 34, "b"), (40, 41, "c")]
    assert benchmark._one_after_another(spans) == [
        (0, 10, "a"),
        (10, 30, wait),
        (30, 34, "b"),
        (40, 41, "c"),
    ]


def test_a_step_is_cut_into_what_computes_what_waits_and_what_neither() -> None:
    events, spans = [], []
    for step in range(5):
        at = step * 100_000
        spans.append((at, at + 50_000, 7, 1))
        events += [
            (at - 3_000, at + 55_000, "ktinject wait"),
            (at + 55_000, at + 85_000, "attention"),
            (at + 90_000, at + 95_000, "router"),
        ]
    found = benchmark._break_down(events, spans, {7: "layer"}, 4)
    assert (found.step, found.gpu, found.cpu, found.handoff) == (100, 35, 50.0, 8.0)
    assert found.idle == 7.0
    # One layer has all of the step.
    assert found.layers == {"layer": Part(100, 35, 50.0, 8.0, 7.0)}


def test_a_layer_has_what_lies_between_the_experts_before_it_and_the_end_of_its_own() -> None:
    events, spans = [], []
    for step in range(5):
        at = step * 100_000
        spans += [
            (at + 10_000, at + 30_000, 1, 1),
            (at + 36_000, at + 60_000, 2, 1),
            (at + 61_000, at + 65_000, 1, 1),
        ]
        events += [
            (at, at + 9_000, "attention 1"),
            (at + 9_000, at + 31_000, "ktinject wait"),
            (at + 31_000, at + 35_000, "attention 2"),
            (at + 35_000, at + 62_000, "ktinject wait"),
            (at + 70_000, at + 95_000, "head"),
        ]
    found = benchmark._break_down(events, spans, {1: "one", 2: "two"}, 4)
    # Layer 1 has its late experts, the head and its own attention; layer 2 what is between its own and layer 1's.
    assert found.layers == {
        "one": Part(20 + 4 + 46, 9 + 25, 20 + 4, 1 + 1, 10), "two": Part(30, 4, 24, 1 + 1, 0)
    }  # fmt: skip
    for name in ("step", "gpu", "cpu", "handoff", "idle"):
        assert getattr(found, name) == sum(getattr(part, name) for part in found.layers.values())


def test_how_long_intervals_cover_the_time_before_a_moment() -> None:
    until = benchmark._covered([(5, 7), (0, 2), (1, 3), (1, 2), (7, 8)])
    assert [until(moment) for moment in (-1, 0, 2, 3, 4, 6, 8, 9)] == [0, 0, 2, 3, 3, 4, 6, 6]
    assert benchmark._covered([])(5) == 0
