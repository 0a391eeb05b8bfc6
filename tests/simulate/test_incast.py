"""Incast: shares of a drop-tail port, in closed form and in the simulator, beside times of real beds."""

import random
from dataclasses import replace

import pytest

from kfcomm.simulate import Host, Local, PortQueue, SimulatedNetwork, simulate
from kfcomm.simulate.network import TCP_EFFICIENCY
from kfcomm.strategies import build
from kfcomm.strategies.incast import RELAY, Sender, drain_s, pipelined_s

MBIT = 125e3


def bed(*mbits, queue=PortQueue.TAIL):
    hosts = tuple(Host(f"h{number}", mbit * MBIT, 5e-5) for number, mbit in enumerate(mbits))
    return SimulatedNetwork(hosts=hosts, efficiency=TCP_EFFICIENCY, cpus=2, queue=queue)


# tbf with 50 ms of queue in network namespaces; seconds
MEASURED = [
    ((400, 400, 400, 100, 50), 16, "star", 3.27),
    ((400, 400, 400, 100, 50), 64, "star", 13.26),
    ((400, 400, 400, 100, 50), 64, "tree", 13.56),
    ((400, 400, 400, 100, 50), 64, "binary_tree", 11.56),
    ((400, 400, 400, 100, 50), 64, "ring", 18.20),
    ((400, 400, 400, 100, 50), 64, "clique", 18.37),
    ((50, 100, 400, 400, 400), 16, "binary_tree", 8.2),
    ((50, 100, 400, 400, 400), 16, "clique", 4.54),
    ((50, 50, 50, 12.5, 6.25), 4, "star", 7.1),
    ((50, 50, 50, 12.5, 6.25), 4, "binary_tree", 6.9),
    ((6.25, 12.5, 50, 50, 50), 4, "binary_tree", 18.19),
]


@pytest.mark.parametrize(("mbits", "mib", "strategy", "seconds"), MEASURED)
def test_simulated_times_are_near_those_of_beds(mbits, mib, strategy, seconds):
    network = bed(*mbits)
    graphs = replace(build(strategy, network.layout), chunk_nbytes=1 << 19)  # as they were then
    assert simulate(graphs, network.layout, mib << 20, network).seconds == pytest.approx(seconds, rel=0.1)


def test_fair_queues_give_a_slow_sender_its_equal_part():
    tail, fair = bed(400, 400, 400, 100, 50), bed(400, 400, 400, 100, 50, queue=PortQueue.FAIR)
    times = [simulate("star", network.layout, 64 << 20, network).seconds for network in (fair, tail)]
    assert times[1] > 1.1 * times[0]


@pytest.mark.parametrize("strategy", ["star", "ring", "clique", "binary_tree", "multi_star"])
def test_queues_make_no_difference_where_hosts_are_alike(strategy):
    times = [
        simulate(strategy, network.layout, 3 << 20, network).seconds
        for network in (bed(*[100] * 6), bed(*[100] * 6, queue=PortQueue.FAIR))
    ]
    assert times[0] == times[1]


@pytest.mark.parametrize("seed", range(30))
def test_the_closed_form_is_the_simulation_of_one_port(seed):
    chance = random.Random(seed)
    rates = [float(chance.choice((10, 20, 40, 80, 160))) for _ in range(chance.randint(2, 6))]
    port = float(chance.choice((20, 50, 160)))
    local = Local(overhead_s=0.0, fold=float("inf"))
    hosts = tuple(Host(f"h{number}", rate * 1e6, 0.0) for number, rate in enumerate([port, *rates]))
    network = SimulatedNetwork(hosts=hosts, local=local)
    nbytes = 32 << 20
    # up only: what each sends arrives at the root, which is the bottleneck or not
    found = simulate("star", network.layout, nbytes, network, verb="reduce").seconds
    due = drain_s([Sender(nbytes, rate * 1e6) for rate in rates], port * 1e6)
    assert found == pytest.approx(due, rel=0.05)


def test_equal_senders_need_no_more_than_the_port():
    senders = [Sender(1e6, 1e5)] * 4
    assert drain_s(senders, 1e5) == pytest.approx(40.0)
    assert drain_s(senders, 1e7) == pytest.approx(10.0)
    assert drain_s([], 1e7) == 0.0


def test_a_slow_sender_is_alone_after_the_fast_ones():
    # 3 : 1 of the port until the fast one is done
    assert drain_s([Sender(300.0, 3.0), Sender(300.0, 1.0)], 3.0) == pytest.approx(300 / (9 / 4) + (300 - 100) / 1.0)


def test_a_relay_gets_a_quarter():
    # alone after the other, with what it had not sent by then
    assert RELAY == 0.25
    both = [Sender(400.0, 10.0), Sender(400.0, 10.0, is_relay=True)]
    assert drain_s(both, 5.0) == pytest.approx(160.0)
    # the other takes 100 s; then 300 are missing of the relay's, and of the result
    assert pipelined_s(both, 5.0, 0.4) == pytest.approx(100 + 300 * 0.4)
    assert pipelined_s([Sender(400.0, 10.0)] * 2, 5.0, 0.1) == pytest.approx(160.0)
