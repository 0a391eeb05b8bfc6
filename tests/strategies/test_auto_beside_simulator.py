"""`auto` and its time model beside the simulator, which moves every message."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from kfcomm.simulate import Host, SimulatedNetwork, num_messages, simulate
from kfcomm.strategies import AnyStrategy, build
from kfcomm.strategies.auto import auto
from kfcomm.strategies.builtin import ALGORITHMS
from kfcomm.strategies.cost import predict_seconds
from kfcomm.strategies.matrices import rates_of
from kfcomm.types import Costs, Layout

KIB, MIB = 1 << 10, 1 << 20
MOST_MESSAGES = 30_000
"""Strategies that move more are left out, but for three: to simulate one takes a second and more."""
INSIDE, BETWEEN = ("star", "ring", "binomial", "binary_tree"), ("star", "ring", "clique", "double_tree", "binomial")


def rivals(layout: Layout, nbytes: int) -> list[AnyStrategy]:
    """All built-in strategies, and combinations, that are quick to build and to simulate."""
    many = layout.size > 128
    built: list[AnyStrategy] = [
        one.build(layout) for one in ALGORITHMS if not (many and (one.pair_per_rank or "multi" in one.name))
    ]
    if layout.num_hosts < layout.size <= 64:
        built += [build(f"inside: {a}, between: {b}", layout).select(nbytes) for a in INSIDE for b in BETWEEN]
    # Without slots a direct strategy sends every message to every rank.
    shared = [one for one in built if not one.select(nbytes).direct]
    if nbytes >= 256 * KIB:
        # Real ports drop what ends a step of an exchange, and then it takes longer: see `auto`.
        shared = [one for one in shared if one.select(nbytes).exchange is None]
    messages = [num_messages(one, nbytes, layout=layout) for one in shared]
    most = max(MOST_MESSAGES, sorted(messages)[2])
    return [one for one, number in zip(shared, messages, strict=True) if number <= most]


def ratio(layout: Layout, nbytes: int, network: SimulatedNetwork | None = None) -> float:
    """Simulated time of `auto`'s choice, as a multiple of the best rival's."""
    chosen = simulate(auto(layout), layout, nbytes, network).seconds
    return chosen / min(simulate(one, layout, nbytes, network).seconds for one in rivals(layout, nbytes))


@pytest.mark.slow
@pytest.mark.parametrize("hosts", ["16x1", "8x4", "4x2", "24x1", "64x1", "16x8", "3x5", "2x8", "8x2"])
@pytest.mark.parametrize("nbytes", [KIB, 16 * KIB, 128 * KIB, MIB, 8 * MIB, 100 * MIB])
def test_auto_is_within_a_tenth_of_the_best_strategy(hosts: str, nbytes: int) -> None:
    num_hosts, each = map(int, hosts.split("x"))
    assert ratio(Layout.even(num_hosts * each, num_hosts), nbytes) <= 1.10


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "nbytes"),
    [(128, MIB), (128, 100 * MIB), (256, 8 * MIB), (1024, KIB), (1024, 256 * KIB), (1024, 8 * MIB), (4096, KIB)],
)
def test_auto_is_within_a_tenth_of_the_best_among_many_ranks(size: int, nbytes: int) -> None:
    assert ratio(Layout.even(size, size), nbytes) <= 1.10


BEDS = {
    "alike": [400.0] * 5,
    "unlike": [400.0, 400.0, 400.0, 100.0, 50.0],
    "slow first": [50.0, 100.0, 400.0, 400.0, 400.0],
    "an eighth": [50.0, 50.0, 50.0, 12.5, 6.25],
    "one slow of eight": [200.0] * 7 + [50.0],
}


def bed(ports: list[float]) -> tuple[SimulatedNetwork, Layout]:
    """Hosts with these ports in Mbit/s, and a layout that knows what a probe would find there."""
    hosts = tuple(Host(f"h{at}", bandwidth=rate * 1e6 / 8, latency_s=1e-4) for at, rate in enumerate(ports))
    network = SimulatedNetwork(hosts=hosts)
    inside = [rate * 1e6 / 8 * network.efficiency for rate in ports]
    layout = network.layout
    rates = rates_of(layout, [[min(a, b) for b in inside] for a in inside], [[1e-4] * len(ports)] * len(ports))
    middle = sorted(inside)[len(inside) // 2]
    return network, replace(layout, costs=Costs(cross_alpha_s=1e-4, cross_beta_s_per_byte=1 / middle, rates=rates))


@pytest.mark.slow
@pytest.mark.parametrize("ports", BEDS.values(), ids=BEDS)
@pytest.mark.parametrize("nbytes", [64 * KIB, MIB, 16 * MIB, 64 * MIB])
def test_auto_is_within_a_tenth_of_the_best_after_a_probe(ports: list[float], nbytes: int) -> None:
    network, layout = bed(ports)
    assert ratio(layout, nbytes, network) <= 1.10


@pytest.mark.slow
@pytest.mark.parametrize("ports", BEDS.values(), ids=BEDS)
@pytest.mark.parametrize("seed", range(3))
def test_noise_of_a_probe_does_not_mislead_auto(ports: list[float], seed: int) -> None:
    """Rates up to 15 % too low, and latencies up to four times too long."""
    network, layout = bed(ports)
    chance, rates = random.Random(seed), layout.costs.rates
    assert rates is not None
    links = [[rate * chance.uniform(0.85, 1.0) for rate in row] for row in rates.links]
    latencies = [[seconds * chance.uniform(1.0, 4.0) for seconds in row] for row in rates.latency_s]
    noisy = replace(layout, costs=layout.costs._replace(rates=rates_of(layout, links, latencies)))
    for nbytes in (64 * KIB, MIB, 16 * MIB):
        chosen = simulate(auto(noisy), layout, nbytes, network).seconds
        assert chosen <= 1.20 * min(simulate(one, layout, nbytes, network).seconds for one in rivals(layout, nbytes))


@pytest.mark.parametrize("ports", BEDS.values(), ids=BEDS)
@pytest.mark.parametrize("name", ["star", "tree", "binary_tree", "ring", "clique"])
def test_predictions_are_those_of_the_simulator(name: str, ports: list[float]) -> None:
    network, layout = bed(ports)
    strategy = build(name, layout)
    for nbytes in (MIB, 16 * MIB):
        simulated = simulate(strategy, layout, nbytes, network).seconds
        assert predict_seconds(strategy, layout, nbytes) == pytest.approx(simulated, rel=0.15)
