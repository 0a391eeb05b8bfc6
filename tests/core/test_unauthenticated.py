"""Unauthenticated connections: bounded in all and per address, and a new one is always let in."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from kfcomm.core.auth import Unauthenticated


@given(st.lists(st.tuples(st.integers(0, 4), st.booleans()), max_size=100), st.integers(1, 8), st.integers(1, 8))
def test_limits_hold_and_oldest_connection_is_closed(steps: list[tuple[int, bool]], limit: int, of_one: int) -> None:
    unauthenticated: Unauthenticated[int] = Unauthenticated(limit, of_one)
    here: dict[int, int] = {}
    for number, (address, leaves) in enumerate(steps):
        evicted = unauthenticated.add(number, address)
        assert unauthenticated.is_flood == (evicted is not None)
        if evicted is not None:
            same = [who for who, where in here.items() if where == here[evicted]]
            assert evicted == same[0]
            assert len(here) == limit or len(same) == of_one
            if Counter(here.values())[address] < of_one:
                assert len(same) == max(Counter(here.values()).values())
            del here[evicted]
        here[number] = address
        if leaves:
            gone = next(iter(here))
            unauthenticated.remove(gone)
            unauthenticated.remove(gone)
            del here[gone]
        assert len(unauthenticated) == len(here) <= limit
        assert all(count <= of_one for count in Counter(here.values()).values())


def test_one_address_cannot_keep_others_out() -> None:
    unauthenticated: Unauthenticated[str] = Unauthenticated(4, 3)
    assert [unauthenticated.add(f"flood {number}", "there") for number in range(4)] == [None, None, None, "flood 0"]
    assert unauthenticated.add("mine", "here") is None
    assert unauthenticated.add("flood 4", "there") == "flood 1"
    assert unauthenticated.add("other", "elsewhere") == "flood 2"
