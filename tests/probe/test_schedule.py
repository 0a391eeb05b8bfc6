from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given

from kfcomm.probe.live import slots_of
from kfcomm.types import Layout
from tests.strategies.layouts import LAYOUTS


@given(LAYOUTS.filter(lambda layout: layout.size <= 24))
def test_every_two_ranks_meet_once_and_no_two_pairs_share_a_port(layout: Layout) -> None:
    slots = slots_of(layout)
    met = Counter(frozenset(pair) for slot in slots for pair in slot)
    assert set(met.values()) <= {1}
    assert len(met) == layout.size * (layout.size - 1) // 2
    for slot in slots:
        assert slot
        across = [layout.hosts[rank] for a, b in slot for rank in (a, b) if layout.hosts[a] != layout.hosts[b]]
        inside = [layout.hosts[a] for a, b in slot if layout.hosts[a] == layout.hosts[b]]
        assert len(set(across)) == len(across)
        assert len(set(inside)) == len(inside)
        assert not (across and inside)


@pytest.mark.parametrize(
    ("size", "hosts", "number"), [(1, 1, 0), (2, 2, 1), (4, 1, 6), (8, 8, 7), (7, 7, 7), (8, 2, 22)]
)
def test_how_many_slots(size: int, hosts: int, number: int) -> None:
    assert len(slots_of(Layout.even(size, hosts))) == number
