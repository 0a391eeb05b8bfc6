"""Strangers at a port: bounded in all and of each address, and a newcomer always gets in."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from kfcomm.core.strangers import Strangers


@given(st.lists(st.tuples(st.integers(0, 4), st.booleans()), max_size=100), st.integers(1, 8), st.integers(1, 8))
def test_there_are_never_too_many(steps: list[tuple[int, bool]], limit: int, of_one: int) -> None:
    strangers: Strangers[int] = Strangers(limit, of_one)
    here: dict[int, int] = {}
    for number, (address, leaves) in enumerate(steps):
        victim = strangers.came(number, address)
        assert strangers.is_flood == (victim is not None)
        if victim is not None:
            same = [who for who, where in here.items() if where == here[victim]]
            assert victim == same[0]
            assert len(here) == limit or len(same) == of_one
            if Counter(here.values())[address] < of_one:
                assert len(same) == max(Counter(here.values()).values())
            del here[victim]
        here[number] = address
        if leaves:
            gone = next(iter(here))
            strangers.gone(gone)
            strangers.gone(gone)
            del here[gone]
        assert len(strangers) == len(here) <= limit
        assert all(count <= of_one for count in Counter(here.values()).values())


def test_one_address_keeps_no_other_out() -> None:
    strangers: Strangers[str] = Strangers(4, 3)
    assert [strangers.came(f"flood {number}", "there") for number in range(4)] == [None, None, None, "flood 0"]
    assert strangers.came("mine", "here") is None
    assert strangers.came("flood 4", "there") == "flood 1"
    assert strangers.came("other", "elsewhere") == "flood 2"
