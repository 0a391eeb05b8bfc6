"""Incast: where unlike senders meet at a drop-tail port, beside times of real beds."""

from dataclasses import replace

import pytest

from kfcomm.simulate import Host, PortQueue, SimulatedNetwork, simulate
from kfcomm.simulate.network import TCP_EFFICIENCY
from kfcomm.strategies import build
from kfcomm.types import Costs

MBIT = 125e3


def bed(*mbits, queue=PortQueue.TAIL):
    hosts = tuple(Host(f"h{number}", mbit * MBIT, 5e-5) for number, mbit in enumerate(mbits))
    return SimulatedNetwork(hosts=hosts, efficiency=TCP_EFFICIENCY, cpus=2, queue=queue)


# tbf with 50 ms of queue in network namespaces, after a probe; seconds
MEASURED = [
    ((200,) * 5, 1, "star", 0.185),
    ((200,) * 5, 1, "binary_tree", 0.142),
    ((200,) * 5, 16, "star", 2.853),
    ((200,) * 5, 16, "binary_tree", 2.153),
    ((400, 400, 400, 100, 50), 1, "binary_tree", 0.185),
    ((400, 400, 400, 100, 50), 16, "star", 2.894),
    ((400, 400, 400, 100, 50), 16, "binary_tree", 2.902),
    ((400, 400, 400, 100, 50), 16, "clique", 4.674),
    ((400, 400, 400, 100, 50), 64, "ring", 18.20),
    ((50, 100, 400, 400, 400), 1, "star", 0.746),
    ((50, 100, 400, 400, 400), 1, "binary_tree", 0.371),
    ((50, 100, 400, 400, 400), 16, "star", 11.607),
    ((50, 100, 400, 400, 400), 16, "binary_tree", 5.811),
]


@pytest.mark.parametrize(("mbits", "mib", "strategy", "seconds"), MEASURED)
def test_simulated_times_are_near_those_of_beds(mbits, mib, strategy, seconds):
    network = bed(*mbits)
    layout = network.layout
    if network.is_even:  # hosts that are alike have no rates, but the probe has told the rate
        layout = replace(layout, costs=Costs(cross_beta_s_per_byte=1 / network.hosts[0].bandwidth))
    found = simulate(build(strategy, layout), layout, mib << 20, network).seconds
    assert found == pytest.approx(seconds, rel=0.05)


def test_fast_senders_hold_up_slow_ones_where_no_results_come_back():
    tail, fair = bed(400, 400, 400, 100, 50), bed(400, 400, 400, 100, 50, queue=PortQueue.FAIR)
    reduced = [simulate("star", network.layout, 64 << 20, network, verb="reduce").seconds for network in (fair, tail)]
    assert reduced[1] > 1.1 * reduced[0]


@pytest.mark.parametrize("strategy", ["star", "tree", "binary_tree", "double_tree"])
def test_windows_keep_unlike_senders_at_one_pace(strategy):
    tail, fair = bed(400, 400, 400, 100, 50), bed(400, 400, 400, 100, 50, queue=PortQueue.FAIR)
    times = [simulate(strategy, network.layout, 64 << 20, network).seconds for network in (fair, tail)]
    assert times[1] < 1.02 * times[0]


@pytest.mark.parametrize("strategy", ["star", "ring", "clique", "binary_tree", "multi_star"])
def test_queues_make_no_difference_where_hosts_are_alike(strategy):
    times = [
        simulate(strategy, network.layout, 3 << 20, network).seconds
        for network in (bed(*[100] * 6), bed(*[100] * 6, queue=PortQueue.FAIR))
    ]
    assert times[0] == times[1]
