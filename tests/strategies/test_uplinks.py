"""Racks whose hosts share an uplink: in rates, prices, packed trees, and in what `auto` takes."""

from __future__ import annotations

import json
import random
from collections import Counter

import pytest

from kfcomm.simulate import Host, SimulatedNetwork, Switch, simulate
from kfcomm.strategies import build
from kfcomm.strategies.auto import auto
from kfcomm.strategies.builtin import ALGORITHMS
from kfcomm.strategies.cost import NetworkModel, predict_seconds
from kfcomm.strategies.packing_lp import loads_of, packed_with_fans
from kfcomm.strategies.racks import by_rack
from kfcomm.strategies.tree_packing import packed_by, packings
from kfcomm.types import Costs, Layout, Rates, Uplink
from tests.conformance import oracle
from tests.conformance.worlds import everywhere, same_bits, world
from tests.strategies.layouts import assert_spans

MIB = 1 << 20
PORT = 25e6


def racked(racks: list[list[int]], uplink: float, port: float = PORT) -> SimulatedNetwork:
    """Hosts with equal ports behind switches."""
    number = sum(map(len, racks))
    return SimulatedNetwork(
        hosts=tuple(Host(f"h{at}", port, 1e-4) for at in range(number)),
        switches=tuple(Switch(tuple(f"h{at}" for at in rack), uplink) for rack in racks),
    )


def test_uplinks_of_a_network_are_in_its_costs() -> None:
    rates = racked([[0, 2], [1, 3]], 30e6).costs().rates
    assert rates is not None
    assert rates.uplinks == (Uplink((0, 2), 30e6, 30e6), Uplink((1, 3), 30e6, 30e6))
    assert rates.rack_of == (0, 1, 0, 1)
    assert rates.links[0][1] == PORT
    wide = racked([[0, 2], [1, 3]], 50e6).costs().rates
    assert wide is not None
    assert wide.uplinks == ()


def test_a_part_of_the_hosts_keeps_the_racks_that_it_shares() -> None:
    rates = racked([[0, 1, 2], [3, 4, 5]], PORT).costs().rates
    assert rates is not None
    assert rates.part([5, 0, 4]).uplinks == (Uplink((0, 2), PORT, PORT),)
    assert rates.part([0, 1]).uplinks == ()
    assert rates.part([0, 3]).uplinks == ()
    costs = Costs(rates=rates)
    assert Costs.of_record(json.loads(json.dumps(costs))) == costs
    assert hash(costs)


@pytest.mark.parametrize(
    ("uplinks", "message"),
    [
        ((Uplink((0, 4), 1.0, 1.0),), "a rack names host 4, the layout has 4: 0..3"),
        ((Uplink((0, 1), 1.0, 1.0), Uplink((1, 2), 1.0, 1.0)), "host 1 is in two racks"),
    ],
)
def test_racks_of_unknown_hosts_are_refused(uplinks: tuple[Uplink, ...], message: str) -> None:
    rates = Rates((1.0,) * 4, (1.0,) * 4, ((1.0,) * 4,) * 4, (), uplinks)
    with pytest.raises(ValueError, match=message):
        Layout.of(range(4), costs=Costs(rates=rates))


def test_an_uplink_is_priced_as_a_port() -> None:
    """Of a star, three hosts of another rack send to the root's rack, and it sends to them, through one uplink."""
    network = racked([[0, 1, 2], [3, 4, 5]], PORT / 2)
    star = build("star", network.layout)
    model = NetworkModel.of(network.costs())
    seconds = predict_seconds(star, network.layout, 64 * MIB, model)
    # Five copies through the root's port at its rate, or three through the uplink at half of it: these last longer.
    assert seconds == pytest.approx(2 * 3 * 64 * MIB / (PORT / 2) / 2, rel=0.1)
    assert seconds == pytest.approx(simulate(star, network.layout, 64 * MIB, network).seconds, rel=0.1)


@pytest.mark.parametrize("name", ["star", "tree", "ring", "clique", "binary_tree", "halving_doubling"])
@pytest.mark.parametrize("racks", [[[0, 1, 2, 3], [4, 5, 6, 7]], [[0, 2, 4, 6], [1, 3, 5, 7]]])
def test_predictions_are_those_of_the_simulator(name: str, racks: list[list[int]]) -> None:
    network = racked(racks, PORT)
    strategy = build(name, network.layout)
    simulated = simulate(strategy, network.layout, 16 * MIB, network).seconds
    assert predict_seconds(strategy, network.layout, 16 * MIB) == pytest.approx(simulated, rel=0.15)


@pytest.mark.parametrize("seed", range(8))
def test_packed_trees_cross_uplinks_once(seed: int) -> None:
    """By the bound: each rack has to send, and to receive, one copy of everything."""
    chance = random.Random(seed)
    hosts = list(range(chance.choice([4, 6, 8, 9, 12])))
    chance.shuffle(hosts)
    half = len(hosts) // 2
    rates = racked([hosts[:half], hosts[half:]], PORT / chance.choice([1, 2, 4])).costs().rates
    assert rates is not None
    packed = packed_with_fans(rates, 2)
    sums: Counter[tuple[int, ...]] = Counter()
    for tree, weight in packed:
        for place, load in loads_of(tree, rates).items():
            sums[place] += weight * load
    bound = max(1 / rates.uplinks[0].send, 2 * (len(hosts) - 1) / len(hosts) / PORT)
    assert max(sums.values()) <= 1.03 * bound
    layout = Layout.even(len(hosts), len(hosts))
    assert packed_by(layout, rates) == packed_by(layout, rates)


RACKS = {
    "two of four": ([[0, 1, 2, 3], [4, 5, 6, 7]], 1.0),
    "in turns": ([[0, 2, 4, 6], [1, 3, 5, 7]], 1.0),
    "half of that": ([[0, 2, 4, 6], [1, 3, 5, 7]], 0.5),
    "uneven": ([[0, 2, 4, 6, 7], [1, 3, 5]], 1.0),
    "three": ([[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8, 11]], 1.0),
}


@pytest.mark.slow
@pytest.mark.parametrize(("racks", "ports"), RACKS.values(), ids=RACKS)
@pytest.mark.parametrize("nbytes", [MIB // 16, MIB, 16 * MIB, 64 * MIB])
def test_auto_is_within_a_tenth_of_the_best_in_racks(racks: list[list[int]], ports: float, nbytes: int) -> None:
    network = racked(racks, PORT * ports)
    layout, rates = network.layout, network.costs().rates
    assert rates is not None
    rivals = [one.build(layout) for one in ALGORITHMS] + packings(layout, rates)
    rivals += by_rack(layout, rates, 1 << 14)
    chosen = simulate(auto(layout), layout, nbytes, network).seconds
    assert chosen <= 1.10 * min(simulate(one, layout, nbytes, network).seconds for one in rivals)


def test_graphs_by_racks_cross_uplinks_as_often_as_racks_have_to() -> None:
    network = racked([[0, 2, 4, 6], [1, 3, 5, 7]], PORT)
    layout, rates = network.layout, network.costs().rates
    assert rates is not None
    made = list(by_rack(layout, rates, 1 << 14))
    assert {"ring by racks", "inside racks: clique, between racks: ring"} <= {one.name for one in made}
    for strategy in made:
        for pair in strategy.pairs:
            for graph in (pair.reduce, pair.broadcast):
                assert_spans(graph)
                # A chain that begins within a rack comes back to it.
                most = 2 if strategy.name == "ring by racks" else 1
                assert sum(a % 2 != b % 2 for a, b in graph.edges) <= most
    assert list(by_rack(layout, rates._replace(uplinks=()), 1 << 14)) == []
    assert list(by_rack(layout, rates, layout.size**2 - 1)) == []


@pytest.mark.asyncio
async def test_results_of_graphs_by_racks_are_those_of_all_ranks() -> None:
    network = racked([[0, 2, 4], [1, 3, 5]], PORT)
    rates = network.costs().rates
    assert rates is not None
    async with world(6, hosts=6) as comms:
        for strategy in by_rack(network.layout, rates, 1 << 14):
            xs = [oracle.data("float32", 20_000, rank) for rank in range(6)]
            results = await everywhere(
                comms, lambda comm, xs=xs, strategy=strategy: comm.all_reduce(xs[comm.rank], "x", strategy=strategy)
            )
            wanted = oracle.all_reduced("sum", xs, strategy, "x")
            assert all(same_bits(result, wanted) for result in results)


@pytest.mark.asyncio
@pytest.mark.parametrize("length", [0, 1, 3, 5000])
async def test_more_trees_than_elements_reduce_all_of_them(length: int) -> None:
    rates = racked([[0, 2, 4], [1, 3, 5]], PORT).costs().rates
    assert rates is not None
    trees = max(packings(Layout.even(6, 6), rates), key=lambda one: len(one.pairs))
    assert len(trees.pairs) > 3
    async with world(6, hosts=6, strategy=trees) as comms:
        xs = [oracle.data("float32", length, rank) for rank in range(6)]
        results = await everywhere(comms, lambda comm: comm.all_reduce(xs[comm.rank], "x"))
        wanted = oracle.all_reduced("sum", xs, trees, "x")
        assert all(same_bits(result, wanted) for result in results)
