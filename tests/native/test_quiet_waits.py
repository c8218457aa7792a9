"""How kernels that wait for the CPU wait, as far as that is decided on the host or in arithmetic."""

from __future__ import annotations

from ktinject import _native


def test_a_wait_reads_one_word_until_an_answer_can_be_expected() -> None:
    """Waits alike: three quarters of each are quiet, and no answer comes in one of these. Then a sudden short one."""
    quiet = early = 0
    for _ in range(200):
        early += quiet > 200_000
        quiet = _native.next_quiet_ns(quiet, 200_000, False)
    assert early == 0 and 140_000 < quiet <= 150_000
    quiet = _native.next_quiet_ns(quiet, 80_000, True)
    assert quiet == 40_000, "it came while one word was read, a way over the bus too late"
    assert _native.next_quiet_ns(quiet, 40_000, False) == 30_000
    assert _native.next_quiet_ns(0, 0, False) == 0, "answers that are there already"
    assert _native.next_quiet_ns(0, 60 * 10**9, True) == 10**8, "who gives up is heard of within 0.1 s"


def test_waits_that_differ_are_seldom_late() -> None:
    """As those of layers of whose experts some, and seldom all, lie on the GPU."""
    state, quiet, late, total, waited = 1, 0, 0, 0, 0
    for _ in range(5000):
        state = state * 1103515245 + 12345 & 0x7FFFFFFF
        took = 60_000 + state % 140_000
        late += took < quiet
        total, waited = total + min(quiet, took), waited + took
        quiet = _native.next_quiet_ns(quiet, took, took < quiet)
    assert late < 5000 // 16 and total > waited // 3


def test_kernels_do_not_wait_for_long_where_the_driver_ends_them() -> None:
    assert _native.LONGEST_KERNEL_SECONDS < 2, "Windows ends them after two seconds"
    assert _native.kernel_wait_seconds(60, True) == _native.LONGEST_KERNEL_SECONDS
    assert _native.kernel_wait_seconds(60, False) == 60
    assert _native.kernel_wait_seconds(0.3, True) == 0.3
