"""Silence: who is asked, who is given up, and that time which this process has slept counts for nobody."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from kfcomm.core.silence import LONGEST_INTERVAL_S, Silence

LOST_S = 6.0


def test_who_is_heard_of_is_never_given_up() -> None:
    silence = Silence(LOST_S)
    silence.watch((1, 2), 0.0)
    now_s = 0.0
    for _ in range(100):
        found = silence.look(now_s)
        assert found.gone == []
        for peer in found.quiet:
            silence.heard(peer, now_s)
        now_s = found.next_s


def test_who_is_silent_is_asked_and_then_given_up_in_time() -> None:
    silence = Silence(LOST_S)
    silence.watch((1, 2), 0.5)
    now_s, asked = 0.5, 0
    while not (found := silence.look(now_s)).gone:
        silence.heard(2, now_s)
        asked += 1 in found.quiet
        now_s = found.next_s
    assert found.gone == [(1, LOST_S)]
    assert now_s == 0.5 + LOST_S
    assert asked >= 4
    silence.watch((2,), now_s)
    assert silence.look(now_s).gone == []


def test_nobody_is_silent_while_this_process_sleeps() -> None:
    silence = Silence(LOST_S)
    silence.watch((1,), 0.0)
    next_s = silence.look(0.0).next_s
    found = silence.look(next_s + 1000.0)
    assert found.gone == []
    assert found.quiet == [1]
    while not found.gone:
        found = silence.look(found.next_s)
    assert 1000.0 + LOST_S <= found.next_s <= 1000.0 + 2 * LOST_S


def test_who_is_not_watched_does_not_count() -> None:
    silence = Silence(LOST_S)
    silence.heard(3, 0.0)
    silence.watch((), 0.0)
    assert silence.look(100.0) == ([], [], 101.0)


def test_for_ever_is_possible() -> None:
    silence = Silence(math.inf)
    silence.watch((1,), 0.0)
    assert silence.look(0.0).next_s == LONGEST_INTERVAL_S
    assert silence.look(1e9).gone == []


@given(
    st.floats(0.5, 100.0),
    st.lists(st.tuples(st.floats(0.0, 1.0), st.booleans(), st.booleans()), max_size=60),
)
def test_a_peer_is_given_up_at_its_time_and_not_before(
    lost_after_s: float, steps: list[tuple[float, bool, bool]]
) -> None:
    """Looks that come a little late give nobody up early, and no look that is in time comes after the time is over."""
    silence = Silence(lost_after_s)
    interval_s = min(lost_after_s / 6, LONGEST_INTERVAL_S)
    silence.watch((1,), 0.0)
    heard_s = now_s = 0.0
    for late, hears, rewatches in steps:
        now_s = silence.look(now_s).next_s + late * interval_s * 0.99
        if hears:
            silence.heard(1, now_s)
            heard_s = now_s
        if rewatches:
            silence.watch((0, 1), now_s)
        gone = dict(silence.look(now_s).gone)
        if 1 in gone:
            assert now_s - heard_s >= lost_after_s * (1 - 1e-9)
            return
        assert now_s - heard_s < lost_after_s
