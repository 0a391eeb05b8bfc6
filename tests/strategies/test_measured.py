from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kfcomm.core.graph import Graph
from kfcomm.errors import ConfigError
from kfcomm.strategies import (
    Strategy,
    bound_seconds,
    build,
    from_edges,
    from_parents,
    hosts_of,
    minimum_spanning_tree,
    packed_trees,
)
from kfcomm.strategies.cost import NetworkModel, measure, network_of, predict_seconds
from kfcomm.strategies.matrices import rates_of
from kfcomm.strategies.tree_packing import balanced, ports_of
from kfcomm.types import Layout, Rates
from tests.strategies.layouts import LAYOUTS, assert_spans, links

Rows = list[list[float]]

MBIT = 1e6 / 8
NBYTES = 32 << 20
EIGHT = Layout.even(8, 8)


def between_ports(send: list[float], receive: list[float] | None = None) -> Rows:
    """Bandwidth between hosts of one rank each, with these rates of their ports."""
    return [[0.0 if a == b else min(s, r) for b, r in enumerate(receive or send)] for a, s in enumerate(send)]


def spread(layout: Layout, send: list[float], local: float = 5e9) -> Rows:
    """The same between ranks of hosts whose ports have these rates."""
    hosts = layout.hosts
    return [[local if here == there else min(send[here], send[there]) for there in hosts] for here in hosts]


def seconds_by_ports(strategy: Strategy, layout: Layout, bandwidth: Rows, nbytes: int) -> float:
    """How long the busiest port or link is busy: counted send by send."""
    nodes = ports_of(layout)
    rates = rates_of(nodes, bandwidth)
    shares = strategy.shares or (1,) * len(strategy.pairs)
    busy: dict[Any, float] = {}
    for pair, share in zip(strategy.pairs, shares, strict=True):
        sends = [(child, parent) for parent, child in pair.reduce.edges] + list(pair.broadcast.edges)
        for a, b in [(nodes.hosts[a], nodes.hosts[b]) for a, b in sends]:
            if a != b:
                places = {("out", a): rates.send[a], ("in", b): rates.receive[b], (a, b): rates.links[a][b]}
                for place, rate in places.items():
                    busy[place] = busy.get(place, 0.0) + share / sum(shares) * nbytes / rate
    return max(busy.values(), default=0.0)


rate = st.floats(1e5, 1e10)


@st.composite
def networks(draw: st.DrawFn, symmetric: bool = False) -> tuple[Layout, Rows]:
    layout = draw(LAYOUTS.filter(lambda layout: layout.size <= 16))
    hosts = ports_of(layout).hosts
    number = max(hosts) + 1
    send = draw(st.lists(rate, min_size=number, max_size=number))
    receive = send if symmetric else draw(st.lists(rate, min_size=number, max_size=number))
    return layout, [[1e10 if a == b else min(send[a], receive[b]) for b in hosts] for a in hosts]


# ---------------------------------------------------------------- the bound and the packing


@pytest.mark.parametrize("size", [2, 3, 5, 8, 16])
def test_equal_hosts_have_the_bound_of_the_ring_and_trees_as_good_as_a_clique(size: int) -> None:
    layout, bandwidth = Layout.even(size, size), between_ports([25e6] * size)
    assert bound_seconds(layout, bandwidth, NBYTES) == pytest.approx(2 * (size - 1) / size * NBYTES / 25e6)
    packed = packed_trees(layout, bandwidth)
    assert packed.digest == build("clique", layout).digest
    assert packed.name == "packed_trees"


@pytest.mark.parametrize("slow", [0, 3, 7])
def test_a_slow_host_is_a_leaf_of_all_trees(slow: int) -> None:
    ports = [200 * MBIT] * 8
    ports[slow] = 50 * MBIT
    bandwidth = between_ports(ports)
    bound = bound_seconds(EIGHT, bandwidth, NBYTES)
    assert bound == pytest.approx(NBYTES / (50 * MBIT))
    packed = packed_trees(EIGHT, bandwidth)
    for pair in packed.pairs:
        assert not pair.reduce.children[slow]
        assert not pair.broadcast.children[slow]
    assert len(packed.pairs) < 7  # chunks come back the sooner, the fewer trees they are strewn over
    network = network_of(EIGHT, [[1e-4] * 8] * 8, bandwidth)
    predicted = predict_seconds(packed, EIGHT, NBYTES, network)
    assert bound <= predicted <= bound / 0.8
    others = [predict_seconds(build(name, EIGHT), EIGHT, NBYTES, network) for name in ("ring", "star")]
    assert 1.5 * predicted <= min(others)


@settings(max_examples=200)
@given(networks())
def test_packed_trees_reach_the_bound_of_the_ports(network: tuple[Layout, Rows]) -> None:
    layout, bandwidth = network
    packed = packed_trees(layout, bandwidth)
    for pair in packed.pairs:
        assert_spans(pair.reduce)
        assert_spans(pair.broadcast)
    bound = bound_seconds(layout, bandwidth, NBYTES)
    taken = seconds_by_ports(packed, layout, bandwidth, NBYTES)
    assert bound * 0.999 <= taken <= bound * 1.05 * 1.1  # what is left out as too small, and shares are whole numbers


@settings(max_examples=60)
@given(networks(), st.sampled_from(["ring", "star", "clique", "tree", "binomial", "multi_binary_tree_star"]))
def test_bound_is_a_lower_bound(network: tuple[Layout, Rows], name: str) -> None:
    layout, bandwidth = network
    bound = bound_seconds(layout, bandwidth, NBYTES)
    other = build(name, layout).select(NBYTES)
    assert seconds_by_ports(other, layout, bandwidth, NBYTES) >= bound * 0.999


def test_ports_that_send_and_receive_at_unlike_rates() -> None:
    send, receive = [100 * MBIT] * 4 + [300 * MBIT] * 4, [300 * MBIT] * 4 + [100 * MBIT] * 4
    bandwidth = [[0.0 if a == b else min(s, r) for b, r in enumerate(receive)] for a, s in enumerate(send)]
    packed = packed_trees(EIGHT, bandwidth)
    bound = bound_seconds(EIGHT, bandwidth, NBYTES)
    assert seconds_by_ports(packed, EIGHT, bandwidth, NBYTES) <= 1.05 * bound
    # Three ports are wide one way, three the other, and each tree can have a wide one on top for each way.
    send, receive = [1e8, 1e8, 1e8, 2e7, 2e7, 2e7], [2e7, 2e7, 2e7, 1e8, 1e8, 1e8]
    bandwidth = between_ports(send, receive)
    six = Layout.even(6, 6)
    wide = packed_trees(six, bandwidth)
    assert any(pair.reduce.parents != pair.broadcast.parents for pair in wide.pairs)
    assert seconds_by_ports(wide, six, bandwidth, NBYTES) <= 1.05 * bound_seconds(six, bandwidth, NBYTES)


def test_a_slow_link_is_gone_round() -> None:
    bandwidth = between_ports([200 * MBIT] * 8)
    bandwidth[0][1] = 2 * MBIT
    packed = packed_trees(EIGHT, bandwidth)
    bound = bound_seconds(EIGHT, bandwidth, NBYTES)
    assert seconds_by_ports(packed, EIGHT, bandwidth, NBYTES) <= 1.1 * bound
    assert seconds_by_ports(build("clique", EIGHT).select(NBYTES), EIGHT, bandwidth, NBYTES) > 10 * bound
    assert any(pair.reduce.depth == 2 for pair in packed.pairs)


def test_a_link_that_is_slow_but_little_used_is_left_alone() -> None:
    bandwidth = between_ports([200 * MBIT] * 8)
    bandwidth[0][1] = 150 * MBIT
    assert packed_trees(EIGHT, bandwidth).digest == build("clique", EIGHT).digest


def test_trees_stay_flat_without_a_better_detour() -> None:
    bandwidth = between_ports([200 * MBIT] * 4)
    for a, b in itertools.permutations(range(4), 2):
        if {a, b} != {0, 1}:
            bandwidth[a][b] = 2 * MBIT
    packed = packed_trees(Layout.even(4, 4), bandwidth)
    best = seconds_by_ports(packed, Layout.even(4, 4), bandwidth, NBYTES)
    assert best <= seconds_by_ports(build("clique", Layout.even(4, 4)).select(0), Layout.even(4, 4), bandwidth, NBYTES)


def test_a_root_without_one_good_link_is_a_star() -> None:
    """All links of host 0 are slow, and no detour helps."""
    bandwidth = between_ports([200 * MBIT] * 3)
    bandwidth[0][1], bandwidth[0][2], bandwidth[2][0] = 1 * MBIT, 60 * MBIT, 1 * MBIT
    packed = packed_trees(Layout.even(3, 3), bandwidth)
    for pair in packed.pairs:
        assert_spans(pair.reduce)


def test_ranks_of_a_host_take_turns() -> None:
    layout = Layout.even(16, 4)
    packed = packed_trees(layout, spread(layout, [25e6] * 4))
    assert len(packed.pairs) == 16
    assert sorted(pair.root for pair in packed.pairs) == list(range(16))
    # As little between hosts as can be, and each rank the one its host speaks through equally often.
    cost = measure(packed, layout)
    assert cost.cross_host_bytes == measure(build("multi_star", layout).select(0), layout).cross_host_bytes
    assert cost.bytes < measure(build("multi_star", layout).select(0), layout).bytes
    for pair in packed.pairs:
        crossing = [(a, b) for a, b in pair.reduce.edges if layout.hosts[a] != layout.hosts[b]]
        assert len(crossing) == 3


def test_not_every_rank_takes_turns_on_large_hosts() -> None:
    layout = Layout.even(66, 2)
    assert len(packed_trees(layout, spread(layout, [25e6, 25e6])).pairs) == 66
    layout = Layout.even(160, 2)
    assert len(packed_trees(layout, spread(layout, [25e6, 25e6])).pairs) == 2


def test_hosts_of_unlike_sizes() -> None:
    layout = Layout((0, 0, 0, 1, 2, 2))
    packed = packed_trees(layout, spread(layout, [1e8, 1e8, 2e7]))
    assert all(layout.hosts[pair.root] != 2 for pair in packed.pairs)
    assert len(packed.pairs) == len({layout.hosts[pair.root] for pair in packed.pairs})
    for pair in packed.pairs:
        assert_spans(pair.reduce)


def test_one_rank_needs_no_time() -> None:
    one = Layout((0,))
    assert bound_seconds(one, [[0.0]], NBYTES) == 0
    assert packed_trees(one, [[math.nan]]).size == 1
    assert minimum_spanning_tree([[0.0]]).size == 1
    assert hosts_of([[0.0]], [[0.0]]) == one


@given(st.integers(0, 7), st.floats(0.9, 1.1))
def test_noise_changes_little(where: int, noise: float) -> None:
    ports = [200 * MBIT] * 8
    ports[where] *= noise
    bandwidth = between_ports(ports)
    packed = packed_trees(EIGHT, bandwidth)
    assert len(packed.pairs) == 8
    assert seconds_by_ports(packed, EIGHT, bandwidth, NBYTES) <= 1.06 * bound_seconds(EIGHT, bandwidth, NBYTES)


@given(st.lists(st.dictionaries(st.integers(0, 4), st.floats(0.1, 10), min_size=1), min_size=1, max_size=4))
def test_weights_are_near_the_best_that_a_grid_finds(loads: list[dict[int, float]]) -> None:
    def busiest(weights: Any) -> float:
        return max(sum(w * load.get(place, 0.0) for w, load in zip(weights, loads, strict=True)) for place in range(5))

    weights = balanced(loads)
    assert sum(weights) == pytest.approx(1)
    grid = [parts for parts in itertools.product(range(11), repeat=len(loads)) if sum(parts) == 10]
    assert busiest(weights) <= 1.12 * min(busiest([part / 10 for part in parts]) for parts in grid)


# ---------------------------------------------------------------- minimum spanning tree


@st.composite
def latencies(draw: st.DrawFn) -> Rows:
    size = draw(st.integers(1, 7))
    return [[draw(st.integers(1, 50)) * 1e-6 for _ in range(size)] for _ in range(size)]


def total(graph: Graph, rows: Rows) -> float:
    return sum(rows[a][b] + rows[b][a] for a, b in graph.edges)


@given(latencies())
def test_no_spanning_tree_has_less_latency(rows: Rows) -> None:
    (pair,) = minimum_spanning_tree(rows).pairs
    assert_spans(pair.reduce)
    assert links(pair.reduce) == links(pair.broadcast)
    size = len(rows)
    best = math.inf
    if size <= 5:
        every = [frozenset(edge) for edge in itertools.combinations(range(size), 2)]
        for edges in itertools.combinations(every, size - 1):
            groups = list(range(size))
            for a, b in map(sorted, edges):
                groups = [groups[a] if group == groups[b] else group for group in groups]
            if len(set(groups)) == 1:
                best = min(best, sum(rows[a][b] + rows[b][a] for a, b in map(sorted, edges)))
        assert total(pair.reduce, rows) == pytest.approx(best)
    # No other root has its farthest rank nearer.
    depths = [_farthest(pair.reduce.rerooted(root), rows) for root in range(size)]
    assert depths[pair.root] == pytest.approx(min(depths))


def _farthest(graph: Graph, rows: Rows) -> float:
    far = dict.fromkeys(range(graph.size), 0.0)
    for a, b in graph.edges:
        far[b] = far[a] + rows[a][b] + rows[b][a]
    return max(far.values())


def test_a_chain_hangs_from_its_middle_and_folds_what_comes_first() -> None:
    chain = [[abs(a - b) * 1e-5 for b in range(6)] for a in range(6)]
    (pair,) = minimum_spanning_tree(chain, name="mine").pairs
    assert pair.root == 2
    assert pair.reduce.children[2] == (1, 3)
    assert pair.broadcast.children[2] == (3, 1)
    assert minimum_spanning_tree(chain, name="mine").name == "mine"
    assert minimum_spanning_tree(chain).digest == minimum_spanning_tree([row[:] for row in chain]).digest


def test_the_tree_keeps_off_a_slow_link() -> None:
    rows = [[1e-5] * 4 for _ in range(4)]
    for other in range(3):
        rows[3][other] = 1e-3
    rows[3][1] = 2e-5
    (pair,) = minimum_spanning_tree(rows).pairs
    assert pair.reduce.parents[3] == 1 or pair.reduce.children[3] == (1,)


# ---------------------------------------------------------------- hosts found


@pytest.mark.parametrize("names", ["AABB", "ABAB", "AAAABBBBCCCC", "ABCABC", "AAB", "AAAB"])
def test_hosts_show_in_both_matrices(names: str) -> None:
    layout = Layout.of(names)
    latency = [[2e-5 if a == b else 1e-4 for b in layout.hosts] for a in layout.hosts]
    same = [[1e9] * layout.size] * layout.size
    flat = [[5e-5] * layout.size] * layout.size
    assert hosts_of(latency, same) == layout
    if min(map(names.count, names)) > 1:  # else a slow link is as well a slow port
        assert hosts_of(flat, spread(layout, [1e9] * layout.num_hosts)) == layout
    assert hosts_of(latency, spread(layout, [1e9] * layout.num_hosts)) == layout


@given(st.data())
def test_noise_of_one_kind_is_no_gap(data: st.DataObject) -> None:
    entry = st.floats(0.8, 1.25)
    noise = [[data.draw(entry) for _ in range(5)] for _ in range(5)]
    latency = [[5e-5 * x for x in row] for row in noise]
    assert hosts_of(latency, [[1e8 * x for x in row] for row in noise]) == Layout.even(5, 5)


def test_a_slow_port_is_no_distance() -> None:
    slow = between_ports([200 * MBIT] * 7 + [50 * MBIT])
    assert hosts_of([[1e-4] * 8] * 8, slow) == EIGHT


def test_two_ranks_are_two_hosts() -> None:
    assert hosts_of([[0, 1e-5], [1e-5, 0]], [[0, 1e9], [1e9, 0]]) == Layout.even(2, 2)


def test_strategies_for_hosts_that_were_found() -> None:
    layout = Layout.of("ABAB")
    latency = [[2e-5 if a == b else 1e-4 for b in layout.hosts] for a in layout.hosts]
    found = hosts_of(latency, spread(layout, [1e8, 1e8]))
    assert measure(build("tree", found).select(0), layout).cross_host_bytes == 1


# ---------------------------------------------------------------- the time model of unlike hosts


def test_rates_of_hosts_are_those_of_the_fastest_of_their_ranks() -> None:
    layout = Layout((0, 0, 1))
    bandwidth = [[0, 9e9, 1e8], [9e9, 0, 2e8], [3e8, 1e8, 0]]
    latency = [[0, 1e-6, 5e-5], [1e-6, 0, 4e-5], [6e-5, 7e-5, 0]]
    rates = rates_of(layout, bandwidth, latency)
    assert rates.send == (2e8, 3e8)
    assert rates.receive == (3e8, 2e8)
    assert rates.links == ((0.0, 2e8), (3e8, 0.0))
    assert rates.latency_s == ((0, 4e-5), (6e-5, 0))
    assert rates_of(layout, bandwidth).latency_s == ()


def test_the_constants_are_measured_where_there_is_something_to_measure() -> None:
    layout = Layout((0, 0, 1))
    network = network_of(layout, [[0, 1, 5], [1, 0, 4], [6, 7, 0]], [[0, 4, 8], [4, 0, 8], [8, 8, 0]])
    assert (network.local_alpha_s, network.local_beta_s_per_byte) == (1, 1 / 4)
    assert (network.cross_alpha_s, network.cross_beta_s_per_byte) == (6, 1 / 8)
    alone = network_of(Layout((0,)), [[0]], [[0]])
    assert replace(alone, rates=None) == NetworkModel()


def test_seconds_by_rates_counted_by_hand() -> None:
    layout = Layout((0, 0, 1, 2))
    links = ((math.inf, 8.0, 4.0), (8.0, math.inf, 1.0), (4.0, 1.0, math.inf))
    latency = ((0.0, 10.0, 20.0), (11.0, 0.0, 40.0), (21.0, 40.0, 0.0))
    rates = Rates(send=(8.0, 8.0, 4.0), receive=(8.0, 8.0, 4.0), links=links, latency_s=latency)
    network = NetworkModel(
        local_alpha_s=1.0,
        local_beta_s_per_byte=0.125,
        overhead_s=0.25,
        gamma_s_per_byte=0.0,
        chunk_nbytes=64,
        rates=rates,
    )
    star = build("star", layout)

    def star_path(nbytes: int) -> float:
        # Hosts 1 and 2 share host 0's port, at 8 bytes/s; host 2 sends 4, so that both take as long. Host 2 is farther.
        up = 0.25 + 2 * nbytes / 8 + 21 + 0.25
        return up + 3 * 0.25 + 2 * nbytes / 8 + 20 + 0.25

    assert predict_seconds(star, layout, 16, network) == star_path(16)
    # Windows keep hosts 1 and 2 at one pace, so that host 0's port is full.
    assert predict_seconds(star, layout, 640, network) == star_path(64) + 9 / 10 * 640 * 2 / 8
    chain = from_edges(4, [(0, 1), (0, 2), (2, 3)])

    def chain_path(nbytes: int) -> float:
        up = 0.25 + nbytes / 1 + 40 + 0.25 + 0.25 + nbytes / 8 + 11 + 0.25
        return up + 2 * 0.25 + nbytes / 8 + 10 + 0.25 + 0.25 + nbytes / 1 + 40 + 0.25

    assert predict_seconds(chain, layout, 640, network) == chain_path(64) + 9 / 10 * 640 / 1
    unknown = replace(network, rates=rates._replace(latency_s=()), cross_alpha_s=100.0)
    assert predict_seconds(chain, layout, 0, unknown) == 400 + 9 * 0.25
    clique = build("clique", layout).select(0)
    alone = [predict_seconds(Strategy("one", (pair,)), layout, 640, network) for pair in clique.pairs]
    assert predict_seconds(replace(clique, is_whole=True), layout, 640, network) == max(alone)


@settings(max_examples=40)
@given(LAYOUTS.filter(lambda layout: layout.size > 1), st.integers(0, 1 << 26))
def test_hosts_that_are_alike_are_predicted_as_if_they_had_no_rates(layout: Layout, nbytes: int) -> None:
    plain = NetworkModel(cross_beta_s_per_byte=4e-8, cross_alpha_s=1e-4)
    rates = rates_of(layout, spread(layout, [25e6] * layout.num_hosts))
    for name in ("ring", "clique", "tree", "binomial"):
        strategy = build(name, layout)
        alike = predict_seconds(strategy, layout, nbytes, replace(plain, rates=rates))
        assert alike == pytest.approx(predict_seconds(strategy, layout, nbytes, plain))


def test_rates_of_another_number_of_hosts() -> None:
    network = network_of(Layout.even(2, 2), [[0, 1], [1, 0]], [[0, 1], [1, 0]])
    with pytest.raises(ConfigError, match="the network has 2 hosts, the layout 3"):
        predict_seconds(build("ring", Layout.even(3, 3)), Layout.even(3, 3), 1, network)


# ---------------------------------------------------------------- what cannot be

GOOD: Rows = [[0, 1e-5], [1e-5, 0]]


@pytest.mark.parametrize(
    ("latency", "message"),
    [
        ([], "latency is a matrix with one row for each rank, not an empty one"),
        ([[0, 1], [1, 0, 2]], "latency is a square matrix, but has 2 rows, and row 1 has 3 entries"),
        ([[0, 1, 2], [1, 0, 2]], "latency is a square matrix, but has 2 rows, and row 0 has 3 entries"),
        ([[0, -1e-6], [1, 0]], r"latency\[0\]\[1\] is -1e-06: a latency is a finite number of seconds, at least 0"),
        ([[0, 1], [math.nan, 0]], r"latency\[1\]\[0\] is nan"),
        ([[0, math.inf], [1, 0]], r"latency\[0\]\[1\] is inf"),
        ([[0, "a"], [1, 0]], "latency is a matrix of numbers, one row for each rank: could not convert"),
        ([0, 1], "latency is a matrix of numbers, one row for each rank: 'int' object is not iterable"),
        (None, "latency is a matrix of numbers"),
    ],
)
def test_matrices_that_are_no_latencies(latency: Any, message: str) -> None:
    for make in (minimum_spanning_tree, lambda rows: hosts_of(rows, GOOD)):
        with pytest.raises(ConfigError, match=message):
            make(latency)


@pytest.mark.parametrize(
    ("bandwidth", "message"),
    [
        ([], "bandwidth is a matrix with one row for each rank, not an empty one"),
        ([[0, 1], [1]], "bandwidth is a square matrix, but has 2 rows, and row 1 has 1 entries"),
        ([[0, 0], [1, 0]], r"bandwidth\[0\]\[1\] is 0.0: a bandwidth is a finite number of bytes/s above 0"),
        ([[0, 1], [-5, 0]], r"bandwidth\[1\]\[0\] is -5.0"),
        ([[0, math.nan], [1, 0]], r"bandwidth\[0\]\[1\] is nan"),
        ([[0, math.inf], [1, 0]], r"bandwidth\[0\]\[1\] is inf"),
        ([[0, 1, 1]] * 3, r"bandwidth"),
    ],
)
def test_matrices_that_are_no_bandwidths(bandwidth: Any, message: str) -> None:
    two = Layout.even(2, 2)
    for make in (lambda rows: packed_trees(two, rows), lambda rows: bound_seconds(two, rows, 1)):
        with pytest.raises(ConfigError, match=message):
            make(bandwidth)


def test_matrices_of_another_size() -> None:
    good = [[1.0] * 3] * 3
    with pytest.raises(ConfigError, match="bandwidth is of 3 ranks, the layout of 2"):
        packed_trees(Layout.even(2), good)
    with pytest.raises(ConfigError, match="latency is of 3 ranks, the layout of 2"):
        network_of(Layout.even(2), good, good)
    with pytest.raises(ConfigError, match="latency is of 2 ranks, bandwidth of 3"):
        hosts_of(GOOD, good)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: from_edges(3, [(0, 1), (1, 2), (2, 0)]), r"exactly one root, got none \(a cycle\)"),
        (
            lambda: from_edges(4, [(0, 1), (2, 3), (3, 2)]),
            r"ranks \[2, 3\] are on or below a cycle: the root 0 does not",
        ),
        (lambda: from_edges(4, [(0, 1), (2, 3)]), r"exactly one root, got \[0, 2\]"),
        (lambda: from_edges(4, [(0, 1)]), r"exactly one root, got \[0, 2, 3\]: no edge names 2, 3"),
        (lambda: from_edges(3, [(0, 1), (0, 3)]), r"edge \(0, 3\) names rank 3, outside 0\.\.2"),
        (lambda: from_edges(3, [(0, 1), (0, -1)]), r"edge \(0, -1\) names rank -1, outside 0\.\.2"),
        (lambda: from_parents([0, 2, 1]), r"ranks \[1, 2\] are on or below a cycle"),
        (lambda: from_parents([0, 1, 0]), r"exactly one root \(a rank that is its own parent\), got \[0, 1\]"),
        (lambda: from_parents([1, 0]), r"exactly one root .*, got none"),
        (lambda: from_parents([0, 7]), r"rank 1 has parent 7, outside 0\.\.1"),
    ],
)
def test_graphs_that_are_no_trees(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=f"strategy 'custom': .*{message}"):
        make()


@pytest.mark.parametrize("name", ["packed_trees", "minimum_spanning_tree"])
def test_a_name_alone_is_no_measurement(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"made from measurement: \(await comm.probe\(\)\)\.{name}\(\)"):
        build(name, EIGHT)
