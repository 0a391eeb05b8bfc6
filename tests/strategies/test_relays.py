"""Relays: for how long others fill their ports, and what they bring to the next port."""

from __future__ import annotations

import pytest

from kfcomm.strategies.matrices import rates_of
from kfcomm.strategies.relays import Folding, Relays
from kfcomm.types import Layout

RATES = [50.0, 100.0, 400.0, 400.0, 400.0]


def relays_of(*graphs: tuple[int, ...], ranks: int = 1) -> Relays:
    hosts = [host for host in range(5) for _ in range(ranks)]
    rows = [[0.0 if a == b else min(s, r) for b, r in enumerate(RATES)] for a, s in enumerate(RATES)]
    rates = rates_of(Layout.even(5, 5), rows)
    return Relays.of([Folding(parents, 400.0) for parents in graphs], hosts, rates)


def test_relay_of_a_slow_host_brings_what_that_brings():
    relays = relays_of((3, 1, 1, 1, 1))
    assert relays.paces == {(3, 1): pytest.approx(50.0)}
    assert relays.full_s[3] == 0.0


def test_pace_goes_along_a_chain():
    assert relays_of((4, 1, 1, 2, 3)).paces == {(4, 3): 50.0, (3, 2): 50.0, (2, 1): 50.0}


def test_fast_hosts_fill_the_port_of_a_relay_and_do_not_slow_it_down():
    relays = relays_of((1, 1, 3, 1, 3))
    assert relays.paces == {}  # 200 of each of two: more than the next port has
    assert relays.full_s[3] == pytest.approx(2.0)


def test_host_that_is_a_leaf_of_another_graph_has_no_pace():
    assert relays_of((3, 1, 1, 1, 1), (1, 1, 1, 1, 1)).paces == {}


def test_ranks_of_a_host_pass_on_the_pace_of_those_below():
    # ranks 6 and 7 are on host 3: 0 and 1, on host 0, are below 7, which is below 6
    relays = relays_of((7, 0, 2, 2, 2, 2, 2, 6, 2, 2), ranks=2)
    assert relays.paces == {(3, 1): pytest.approx(50.0)}


def test_rank_without_others_below_it_has_no_relays():
    assert relays_of((0, 1, 2, 3, 4)) == Relays({}, {})
