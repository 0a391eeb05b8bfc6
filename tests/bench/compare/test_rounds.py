"""Turns, their order, medians; what happens when a world fails."""

import pytest

from bench.compare.rounds import Figures, Plan, calls_for, measure, rotated
from bench.compare.rows import Case
from bench.compare.works import Entry, Mode, Work
from bench.compare.world import Turn, WorldError

WORK = Work("some", (1,), most_calls=10)
A, B, C = Entry("a"), Entry("b"), Entry("c", Mode.ALL)


class Scripted:
    """A world whose turns take what the script says; it fails where the script ends."""

    def __init__(self, name: str, log: list[str], spans: list[float]) -> None:
        self.name, self.log, self.spans = name, log, spans
        self.calls: list[int] = []

    def turn(self, work: Work, mode: Mode, calls: int) -> Turn:
        self.log.append(self.name)
        self.calls.append(calls)
        if not self.spans:
            raise WorldError("over")
        return Turn(self.spans.pop(0), 0.5, 0.25, parked_s=2.0, parked_cpu_s=0.5)


def test_a_turn_lasts_from_the_first_start_to_the_last_end() -> None:
    replies = [
        {"start_s": 1.0, "end_s": 3.0, "cpu_s": 0.5, "parked_s": 1.0, "parked_cpu_s": 0.0},
        {"start_s": 2.0, "end_s": 5.0, "cpu_s": 1.5, "parked_s": 1.0, "parked_cpu_s": 0.5},
    ]
    assert Turn.of(replies, calls=2) == Turn(2.0, 1.5, 1.0, parked_s=2.0, parked_cpu_s=0.5)


def test_the_order_moves_on() -> None:
    assert [rotated("abc", number) for number in (0, 1, 2, 3)] == [[*"abc"], [*"bca"], [*"cab"], [*"abc"]]
    assert rotated([], 2) == []


@pytest.mark.parametrize(("call_s", "calls"), [(1.0, 1), (0.1, 2), (0.0, 10), (1e-3, 10)])
def test_short_calls_are_repeated(call_s: float, calls: int) -> None:
    assert calls_for(0.2, call_s, most_calls=10) == calls


def test_everybody_takes_turns_and_medians_count() -> None:
    log: list[str] = []
    worlds = {
        "a": Scripted("a", log, [9.0, 0.05, 3.0, 1.0, 2.0]),
        "b": Scripted("b", log, [9.0, 9.0, 7.0, 5.0, 6.0]),
    }
    given = dict(worlds)
    found = measure(Case(WORK, 2, (A, B, C)), given, Plan(rounds=3, turn_s=0.1), pytest.fail)
    assert "".join(log) == "aabb" + "ab" + "ba" + "ab"
    assert worlds["a"].calls == [1, 1, 2, 2, 2]
    assert found == {
        A: Figures(2.0, 1.0, 3.0, 0.5, 0.25, calls=2, rounds=3, parked=0.25),
        B: Figures(6.0, 5.0, 7.0, 0.5, 0.25, calls=1, rounds=3, parked=0.25),
    }


@pytest.mark.parametrize("good_turns", [0, 1, 2, 3])
def test_failing_contender_is_left_out_and_others_continue(good_turns: int) -> None:
    failed: list[Entry] = []
    worlds = {"a": Scripted("a", [], [1.0] * good_turns), "b": Scripted("b", [], [1.0] * 4)}
    given = dict(worlds)
    found = measure(Case(WORK, 2, (A, B)), given, Plan(rounds=2), lambda entry, error: failed.append(entry))
    assert failed == [A]
    assert list(given) == ["b"]
    assert list(found) == [B]
