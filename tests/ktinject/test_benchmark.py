"""What `ktinject bench` makes of a trace: kernels that began early have waited, and count from their turn on."""

from __future__ import annotations

from ktinject import benchmark


def test_a_kernel_that_began_early_counts_from_its_turn() -> None:
    wait = "ktinject::wait_kernel"
    # Three that were all there from the start, one after a gap.
    spans = [(0.0, 10.0, "a"), (1.0, 30.0, wait), (2.0, 34.0, "b"), (40.0, 41.0, "c")]
    assert benchmark._one_after_another(spans) == [
        (0.0, 10.0, "a"),
        (10.0, 30.0, wait),
        (30.0, 34.0, "b"),
        (40.0, 41.0, "c"),
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
    assert (found.step, found.gpu, found.cpu, found.handoff) == (100.0, 35.0, 50.0, 8.0)
    assert found.idle == 7.0 and found.layers[0][0] == "layer"
