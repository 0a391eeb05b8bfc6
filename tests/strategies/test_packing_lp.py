"""Packings by a linear program: they reach the bound of the ports, with few hosts below each, the same everywhere."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kfcomm.core.graph import Graph
from kfcomm.strategies import bound_seconds, build, packed_trees, packing_lp
from kfcomm.strategies.cost import network_of, predict_seconds
from kfcomm.strategies.matrices import rates_of
from kfcomm.strategies.packing_lp import Tree, loads_of, packed_with_fans
from kfcomm.types import Layout, Rates

MBIT = 1e6 / 8
NBYTES = 64 << 20
rate = st.sampled_from([12.5, 50.0, 100.0, 400.0, 1000.0]) | st.floats(10.0, 1000.0)


def rows(ports: list[float]) -> list[list[float]]:
    return [[0.0 if a == b else min(s, r) * MBIT for b, r in enumerate(ports)] for a, s in enumerate(ports)]


def hosts_with(ports: list[float]) -> tuple[Layout, Rates]:
    layout = Layout.even(len(ports), len(ports))
    return layout, rates_of(layout, rows(ports))


def busiest(packed: list[tuple[Tree, float]], rates: Rates) -> float:
    sums: Counter[tuple[int, ...]] = Counter()
    for tree, weight in packed:
        for place, seconds in loads_of(tree, rates).items():
            sums[place] += weight * seconds
    return max(sums.values())


@settings(deadline=None, max_examples=40)
@given(st.lists(rate, min_size=4, max_size=8), st.sampled_from([2, 3]))
def test_packings_with_few_hosts_below_each_reach_their_optimum(ports: list[float], fan: int) -> None:
    layout, rates = hosts_with(ports)
    packed = packed_with_fans(rates, fan)
    assert sum(weight for _, weight in packed) == pytest.approx(1)
    assert len(packed) <= 2 * len(ports)
    for tree, weight in packed:
        assert weight > 0
        for parents in (tree.up, tree.down):
            assert Graph.from_parents(parents).root == tree.root
            assert max(Counter(above for host, above in enumerate(parents) if host != above).values()) <= fan
    # Ports that send and receive alike: hosts with more to spare than `fan` copies are all that can miss the bound.
    taken = busiest(packed, rates)
    assert taken >= bound_seconds(layout, rows(ports), 1) * 0.999
    assert taken <= best_by_program(rates, fan) * 1.002
    assert packed == packed_with_fans(rates, fan)


def best_by_program(rates: Rates, fan: int) -> float:
    """The least time of a byte by another program: weights of ports' copies instead of trees.

    Each host i is the root with the weight w[i] and has x[i] hosts below it on the way up and y[i] on the way down.
    """
    optimize = pytest.importorskip("scipy.optimize")
    h = len(rates.send)
    up, down = np.asarray(rates.receive), np.asarray(rates.send)
    # Variables: w, x, y, time.
    cost = np.zeros(3 * h + 1)
    cost[-1] = 1
    zero, one = np.zeros((h, h)), np.eye(h)
    minus = -np.ones((h, 1))
    above = np.block([
        [-one, one, zero, minus * up[:, None]],  # receives x and, where it is not the root, the result
        [-one, zero, one, minus * down[:, None]],  # sends y and, where it is not the root, its part
        [one, -one, zero, np.zeros((h, 1))],  # a root has a host below it
        [one, zero, -one, np.zeros((h, 1))],
    ])  # fmt: skip
    limits = np.concatenate([-np.ones(2 * h), np.zeros(2 * h)])
    equal = np.zeros((3, 3 * h + 1))
    for row in range(3):
        equal[row, row * h : (row + 1) * h] = 1
    bounds = [(0, 1)] * h + [(0, fan)] * (2 * h) + [(0, None)]
    found = optimize.linprog(cost, above, limits, equal, [1, h - 1, h - 1], bounds, method="highs")
    return float(found.fun)


BEDS = {
    "unlike": [400.0, 400.0, 400.0, 100.0, 50.0],
    "slow first": [50.0, 100.0, 400.0, 400.0, 400.0],
    "equal": [200.0] * 8,
    "one slow": [200.0] * 7 + [50.0],
}


@pytest.mark.parametrize("ports", BEDS.values(), ids=BEDS)
def test_beds_are_used_to_nine_tenths_of_the_bound(ports: list[float]) -> None:
    layout, _ = hosts_with(ports)
    packed = packed_trees(layout, rows(ports))
    network = network_of(layout, [[1e-4] * len(ports)] * len(ports), rows(ports))
    seconds = predict_seconds(packed, layout, NBYTES, network)
    bound = bound_seconds(layout, rows(ports), NBYTES)
    assert bound <= seconds <= bound / 0.9
    for name in ("ring", "clique", "star", "binary_tree"):
        assert seconds <= 1.01 * predict_seconds(build(name, layout), layout, NBYTES, network)


def test_links_between_racks_and_slow_pairs_are_spared() -> None:
    layout, _ = hosts_with([200.0] * 8)
    for slow, speed in (
        ([(a, b) for a, b in itertools.permutations(range(8), 2) if (a < 4) != (b < 4)], 50.0), ([(0, 1), (1, 0)], 2.0),
    ):  # fmt: skip
        matrix = rows([200.0] * 8)
        for a, b in slow:
            matrix[a][b] = speed * MBIT
        best = busiest(packed_with_fans(rates_of(layout, matrix), 2), rates_of(layout, matrix))
        assert best <= 1.01 * bound_seconds(layout, matrix, 1)


def test_any_rates_end_in_a_bounded_time() -> None:
    chance = random.Random(7)
    for size in (12, 16):
        layout, rates = hosts_with([chance.uniform(300, 1000) for _ in range(size)])
        matrix = [[0.0 if a == b else row[b] * chance.uniform(0.5, 1) for b in range(size)] for a, row in
                  enumerate(rates.links)]  # fmt: skip
        rates = rates_of(layout, matrix)
        for packed in (packed_with_fans(rates, 2), packed_with_fans(rates, 3)):
            assert busiest(packed, rates) < 1.5 * bound_seconds(layout, matrix, 1)


@pytest.mark.parametrize("limit", ["_MOST_ROUNDS", "_MOST_EXCHANGES"])
def test_a_search_that_is_cut_short_packs_the_whole_message(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(3)
    _, rates = hosts_with([chance.uniform(300, 1000) for _ in range(6)])
    assert len(packed_with_fans(rates, 2)) > 2
    monkeypatch.setattr(packing_lp, limit, 1)
    packed = packed_with_fans(rates, 2)
    assert 1 <= len(packed) <= 2
    assert sum(weight for _, weight in packed) == pytest.approx(1)


def test_a_tree_that_loads_no_port_ends_the_search() -> None:
    program = packing_lp._Program(2)
    program.add([0.0, 0.0])
    assert program.solve() == [0.0, 0.0]
    assert program.weights() == {}
