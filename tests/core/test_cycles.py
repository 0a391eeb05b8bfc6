from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from kfcomm.core import launch_order
from kfcomm.core.launch_order import Cycles


def first_found(names: str, **options) -> tuple[int, int]:
    """After how many names a pass is found, and how long it is."""
    watched: Cycles[str] = Cycles(**options)
    for number, name in enumerate(names, 1):
        if length := watched.add(name):
            return number, length
    return 0, 0


def test_the_first_name_that_comes_again_begins_a_second_pass() -> None:
    assert first_found("abcb") == (4, 3)
    assert first_found("aa") == (2, 1)
    assert first_found("abcd") == (0, 0)
    watched: Cycles[str] = Cycles()
    assert [watched.add(name) for name in "abba"] == [0, 0, 2, 2]
    assert watched.names == ["a", "b"]


def test_two_whole_passes_have_the_same_names_as_often_in_any_order() -> None:
    assert first_found("abacabac", is_first=False) == (8, 4)
    assert first_found("abab", is_first=False) == (4, 2)
    assert first_found("aabb", is_first=False) == (2, 1)
    assert first_found("aabaab", is_first=False, shortest=3) == (6, 3)
    assert first_found("abcd", is_first=False) == (0, 0)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=12), st.integers(0, 99), st.integers(0, 9))
def test_repeated_sequence_is_found(names: list[int], seed: int, before: int) -> None:
    """Also after other names; never later than two passes after them, if nothing shorter repeats within it."""
    rng = random.Random(seed)
    watched: Cycles[int] = Cycles(is_first=False, shortest=len(names))
    sequence = [-number - 1 for number in range(before)]
    for _ in range(2):
        sequence += rng.sample(names, len(names))
    found = [watched.add(name) for name in sequence]
    assert found[-1] == len(names)
    assert not any(found[: before + len(names)])


def test_sequence_without_repetition_takes_bounded_memory(monkeypatch) -> None:
    monkeypatch.setattr(launch_order, "MAX_CYCLE", 4)
    watched: Cycles[int] = Cycles()
    assert not any(watched.add(number) for number in range(20))
    assert watched.names == list(range(8))
    watched = Cycles()
    assert [watched.add(number % 5) for number in range(10)] == [0] * 10  # a pass of five is too long
