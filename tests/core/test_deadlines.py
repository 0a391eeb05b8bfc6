"""Deadlines without a clock."""

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from kfcomm.core.deadlines import NEVER, QUIET_AT_ONCE, Due, first_due_s, look


@dataclass
class Waiting:
    name: object
    posted_s: float
    timeout_s: float = 300.0
    stall_after_s: float = 10.0
    told: int = 0

    def __post_init__(self) -> None:
        self.due_s = self.posted_s + first_due_s(self.timeout_s, self.stall_after_s)


def told(waiting: list[Waiting], now_s: float, stall_after_s: float = 10.0) -> list[tuple[object, Due]]:
    return [(one.name, why) for one, why in look(waiting, now_s, stall_after_s)[0]]


def test_each_stage_is_due_once_and_in_order() -> None:
    one = [Waiting("a", 100.0)]
    assert one[0].due_s == 100.5
    assert look(one, 100.4, 10.0) == ([], 100.5)
    assert told(one, 100.6) == [("a", Due.QUIET)]
    assert look(one, 109.9, 10.0) == ([], 110.0)
    assert told(one, 110.0) == [("a", Due.STALLED)]
    assert one[0].due_s == 399.0
    assert told(one, 500.0) == [("a", Due.ASK), ("a", Due.EXPIRED)]
    assert look(one, 501.0, 10.0) == ([], NEVER)


def test_the_next_look_is_for_whoever_is_due_first() -> None:
    assert look([], 1.0, 10.0) == ([], NEVER)
    assert look([Waiting("a", 7.0), Waiting("b", 6.0), Waiting("c", 8.0)], 6.1, 10.0) == ([], 6.5)


def test_of_very_many_few_are_quiet_at_a_time_the_oldest_first() -> None:
    waiting = [Waiting(number, 0.0) for number in range(2 * QUIET_AT_ONCE + 1)]
    waiting.append(Waiting(-1, 0.0, 1.2))  # about which the others are asked before the next look
    quiet = [[name for name, why in told(waiting, now_s) if why is Due.QUIET] for now_s in (0.75, 0.9, 1.0, 1.25, 1.5)]
    first, second = list(range(QUIET_AT_ONCE)), list(range(QUIET_AT_ONCE, 2 * QUIET_AT_ONCE))
    assert quiet == [[*first, -1], [], second, [2 * QUIET_AT_ONCE], []]
    assert look(waiting[:-1], 1.5, 10.0) == ([], 10.0)


def test_a_short_timeout_is_asked_about_in_its_last_quarter_and_never_stalls() -> None:
    one = [Waiting("a", 0.0, 0.4)]
    assert one[0].due_s == 0.30000000000000004
    assert told(one, 0.35) == [("a", Due.QUIET), ("a", Due.ASK)]
    assert told(one, 0.4) == [("a", Due.EXPIRED)]


def test_no_time_at_all() -> None:
    assert told([Waiting("a", 5.0, 0.0)], 5.0) == [("a", Due.QUIET), ("a", Due.ASK), ("a", Due.EXPIRED)]


def test_a_stall_time_in_the_last_second_comes_after_the_question() -> None:
    assert told([Waiting("a", 0.0, 10.0, 9.5)], 9.7, 9.5) == [("a", Due.QUIET), ("a", Due.ASK), ("a", Due.STALLED)]


def test_a_stall_time_that_is_very_short_comes_first() -> None:
    one = [Waiting("a", 0.0, 10.0, 0.2)]
    assert one[0].due_s == 0.2
    assert told(one, 1.0, 0.2) == [("a", Due.STALLED), ("a", Due.QUIET)]


def test_a_part_of_something_with_a_deadline_is_quiet_and_nothing_else() -> None:
    one = [Waiting("a", 0.0, NEVER)]
    assert told(one, 1e9) == [("a", Due.QUIET)]
    assert one[0].due_s == NEVER


@given(
    st.lists(st.tuples(st.floats(0, 10), st.floats(0, 50)), max_size=QUIET_AT_ONCE),
    st.floats(0.01, 60),
    st.lists(st.floats(0, 100), min_size=1).map(sorted),
)
def test_whenever_one_looks_each_stage_comes_once_and_none_is_passed_over(given_, stall_after_s, looks) -> None:
    waiting = [Waiting(number, *times, stall_after_s) for number, times in enumerate(given_)]
    seen: list[tuple[object, Due]] = []
    for now_s in looks:
        seen += told(waiting, now_s, stall_after_s)
    assert len(set(seen)) == len(seen)
    for one in waiting:
        expired = one.posted_s + one.timeout_s <= looks[-1]
        assert ((one.name, Due.EXPIRED) in seen) == expired
        assert one.due_s > looks[-1]
