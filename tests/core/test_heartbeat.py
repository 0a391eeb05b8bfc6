"""Failure detector: peers to be asked, peers that are lost, and time asleep, which does not count."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from kfcomm.core.membership import LONGEST_INTERVAL_S, FailureDetector

LOST_S = 6.0


def test_peer_that_answers_is_never_lost() -> None:
    detector = FailureDetector(LOST_S)
    detector.watch((1, 2), 0.0)
    now_s = 0.0
    for _ in range(100):
        found = detector.look(now_s)
        assert found.gone == []
        for peer in found.quiet:
            detector.heard(peer, now_s)
        now_s = found.next_s


def test_silent_peer_is_asked_then_lost_in_time() -> None:
    detector = FailureDetector(LOST_S)
    detector.watch((1, 2), 0.5)
    now_s, asked = 0.5, 0
    while not (found := detector.look(now_s)).gone:
        detector.heard(2, now_s)
        asked += 1 in found.quiet
        now_s = found.next_s
    assert found.gone == [(1, LOST_S)]
    assert now_s == 0.5 + LOST_S
    assert asked >= 4
    detector.watch((2,), now_s)
    assert detector.look(now_s).gone == []


def test_time_asleep_does_not_count_as_silence() -> None:
    detector = FailureDetector(LOST_S)
    detector.watch((1,), 0.0)
    next_s = detector.look(0.0).next_s
    found = detector.look(next_s + 1000.0)
    assert found.gone == []
    assert found.quiet == [1]
    while not found.gone:
        found = detector.look(found.next_s)
    assert 1000.0 + LOST_S <= found.next_s <= 1000.0 + 2 * LOST_S


def test_unwatched_peer_is_ignored() -> None:
    detector = FailureDetector(LOST_S)
    detector.heard(3, 0.0)
    detector.watch((), 0.0)
    assert detector.look(100.0) == ([], [], 101.0)


def test_infinite_limit_never_loses_a_peer() -> None:
    detector = FailureDetector(math.inf)
    detector.watch((1,), 0.0)
    assert detector.look(0.0).next_s == LONGEST_INTERVAL_S
    assert detector.look(1e9).gone == []


@given(
    st.floats(0.5, 100.0),
    st.lists(st.tuples(st.floats(0.0, 1.0), st.booleans(), st.booleans()), max_size=60),
)
def test_peer_is_lost_at_its_time_and_not_before(lost_after_s: float, steps: list[tuple[float, bool, bool]]) -> None:
    """Looks that come a little late give nobody up early, and no look that is in time comes after the time is over."""
    detector = FailureDetector(lost_after_s)
    interval_s = min(lost_after_s / 6, LONGEST_INTERVAL_S)
    detector.watch((1,), 0.0)
    heard_s = now_s = 0.0
    for late, hears, rewatches in steps:
        now_s = detector.look(now_s).next_s + late * interval_s * 0.99
        if hears:
            detector.heard(1, now_s)
            heard_s = now_s
        if rewatches:
            detector.watch((0, 1), now_s)
        gone = dict(detector.look(now_s).gone)
        if 1 in gone:
            assert now_s - heard_s >= lost_after_s * (1 - 1e-9)
            return
        assert now_s - heard_s < lost_after_s
