"""Deadlines without a clock."""

from kfcomm.core.watch import QUIET_AT_ONCE, Due, Watch


def test_each_stage_is_due_once_and_in_order() -> None:
    watch: Watch[str] = Watch()
    assert watch.add("a", 100.0, 300.0, 10.0)
    assert watch.next_s == 100.75
    assert watch.look(100.7) == []
    assert watch.look(100.8) == [("a", Due.QUIET)]
    assert watch.next_s == 110.0
    assert watch.look(109.9) == []
    assert watch.look(110.0) == [("a", Due.STALLED)]
    assert watch.next_s == 399.0
    assert watch.look(500.0) == [("a", Due.ASK), ("a", Due.EXPIRED)]
    assert watch.look(501.0) == []
    assert watch.next_s == float("inf")


def test_what_is_posted_together_is_quiet_together() -> None:
    watch: Watch[str] = Watch()
    assert watch.add("a", 7.01, 300.0, 10.0)
    assert not watch.add("b", 7.24, 300.0, 10.0)
    assert watch.next_s == 7.75
    assert watch.look(7.75) == [("a", Due.QUIET), ("b", Due.QUIET)]


def test_of_very_many_few_are_quiet_at_a_time_the_oldest_first() -> None:
    watch: Watch[int] = Watch()
    for number in range(2 * QUIET_AT_ONCE + 1):
        watch.add(number, 0.0, 300.0, 10.0)
    watch.add(-1, 0.0, 1.2, 10.0)  # about which the others are asked before the next look
    quiet = [[what for what, due in watch.look(now_s) if due is Due.QUIET] for now_s in (0.75, 0.9, 1.0, 1.25, 1.5)]
    first, second = list(range(QUIET_AT_ONCE)), list(range(QUIET_AT_ONCE, 2 * QUIET_AT_ONCE))
    assert quiet == [[*first, -1], [], second, [2 * QUIET_AT_ONCE], []]
    assert watch.next_s == 10.0


def test_what_is_posted_at_one_time_has_stages_of_its_own() -> None:
    watch: Watch[str] = Watch()
    assert watch.add("a", 7.0, 300.0, 0.1)
    assert not watch.add("b", 7.0, 300.0, 0.1)
    assert watch.look(7.2) == [("a", Due.STALLED), ("b", Due.STALLED)]
    watch.drop("a")
    assert watch.add("c", 7.0, 300.0, 0.1)
    assert watch.look(7.8) == [("c", Due.STALLED), ("b", Due.QUIET), ("c", Due.QUIET)]


def test_a_short_timeout_is_asked_about_in_its_last_quarter_and_never_stalls() -> None:
    watch: Watch[str] = Watch()
    watch.add("a", 0.0, 0.4, 10.0)
    assert watch.next_s == 0.30000000000000004
    assert watch.look(0.35) == [("a", Due.QUIET), ("a", Due.ASK)]


def test_a_stall_time_in_the_last_second_comes_after_the_question() -> None:
    watch: Watch[str] = Watch()
    watch.add("a", 0.0, 10.0, 9.5)
    assert watch.look(9.7) == [("a", Due.QUIET), ("a", Due.ASK), ("a", Due.STALLED)]


def test_a_stall_time_that_is_very_short_comes_first() -> None:
    watch: Watch[str] = Watch()
    assert watch.add("a", 0.0, 10.0, 0.2)
    assert watch.next_s == 0.2
    assert watch.look(1.0) == [("a", Due.STALLED), ("a", Due.QUIET)]


def test_next_comes_nearer_only_for_nearer_deadlines() -> None:
    watch: Watch[str] = Watch()
    assert watch.add("a", 0.0, 100.0, 5.0)
    assert not watch.add("b", 1.0, 100.0, 5.0)
    watch.drop("a")
    watch.drop("a")
    assert len(watch) == 1
    assert watch.look(1.5) == []
    assert watch.look(5.5) == [("b", Due.QUIET)]
    assert watch.next_s == 6.0
