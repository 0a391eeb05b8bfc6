"""Ports: who gets how much of them, and when chunks are through."""

import random

import pytest

from kfcomm.simulate.ports import Agenda, Flow, Pass, Port
from tests.simulate.fluid import end_times

RATE = 1024.0


class Wires:
    """Flows over ports, and when their chunks arrived."""

    def __init__(self, *rates: float) -> None:
        self.agenda = Agenda()
        self.ports = [Port(self.agenda, f"port {number}", rate) for number, rate in enumerate(rates)]
        self.arrivals: list[tuple[object, float]] = []
        self.reads: list[float] = []

    def flow(self, *way: int, latency_s: float = 0.0) -> Flow:
        return Flow(
            self.agenda,
            [Pass(self.ports[port]) for port in way],
            latency_s,
            lambda chunk: self.arrivals.append((chunk, self.agenda.now_s)),
            lambda _: self.reads.append(self.agenda.now_s),
        )

    def run(self) -> dict[object, float]:
        self.agenda.run()
        return dict(self.arrivals)


def test_a_flow_alone_has_the_whole_rate_and_keeps_its_order():
    wires = Wires(RATE)
    flow = wires.flow(0)
    for chunk in "abc":
        flow.send(chunk, 512)
    wires.run()
    assert wires.arrivals == [("a", 0.5), ("b", 1.0), ("c", 1.5)]
    assert wires.ports[0].nbytes == 1536
    assert wires.ports[0].busy_s == 1.5


def test_two_flows_in_one_port_get_half_each():
    wires = Wires(RATE)
    wires.flow(0).send("a", 1024)
    wires.flow(0).send("b", 1024)
    assert wires.run() == {"a": 2.0, "b": 2.0}


def test_the_shorter_of_two_leaves_the_rest_to_the_longer():
    wires = Wires(RATE)
    wires.flow(0).send("long", 1024)
    wires.flow(0).send("short", 256)
    assert wires.run() == {"short": 0.5, "long": 1.25}


def test_later_flow_shares_from_its_start():
    wires = Wires(RATE)
    late = wires.flow(0)
    wires.flow(0).send("early", 1024)
    wires.agenda.at(0.5, lambda chunk: late.send(chunk, 1024), "late")
    assert wires.run() == {"early": 1.5, "late": 2.0}


def test_later_but_shorter_flow_ends_first():
    wires = Wires(RATE)
    late = wires.flow(0)
    wires.flow(0).send("early", 1024)
    wires.agenda.at(0.5, lambda chunk: late.send(chunk, 64), "late")
    assert wires.run() == {"late": 0.625, "early": 1.0625}


def test_the_narrowest_port_decides_and_ports_are_cut_through():
    wires = Wires(RATE, RATE / 4, RATE)
    wires.flow(0, 1, 2).send("a", 1024)
    assert wires.run() == {"a": 4.0}


def test_flow_held_up_elsewhere_leaves_port_to_others():
    wires = Wires(RATE, RATE / 16, RATE)
    slow, fast = wires.flow(0, 1), wires.flow(0, 2)
    for number in range(16):
        slow.send(("slow", number), 64)
    for number in range(15):
        fast.send(("fast", number), 1024)
    arrivals = wires.run()
    assert arrivals["slow", 15] == 16.0  # as if it were alone
    assert arrivals["fast", 14] == 16.0  # all that the other leaves: 15/16 of the rate


def test_incast_shares_the_receiving_port():
    wires = Wires(*[RATE] * 4)
    for sender in range(3):
        wires.flow(sender, 3).send(sender, 1024)
    assert wires.run() == dict.fromkeys(range(3), 3.0)


def test_latency_delays_what_arrives_and_not_what_follows():
    wires = Wires(RATE)
    flow = wires.flow(0, latency_s=8.0)
    flow.send("a", 1024)
    flow.send("b", 1024)
    assert wires.run() == {"a": 9.0, "b": 10.0}
    assert wires.reads == [1.0, 2.0]


def test_a_chunk_without_bytes_takes_no_time_in_a_port():
    wires = Wires(RATE)
    wires.flow(0, latency_s=1.0).send("a", 0)
    assert wires.run() == {"a": 1.0}


def test_after_a_pause_a_token_bucket_lets_a_burst_through():
    wires = Wires(RATE)
    wires.ports[0] = Port(wires.agenda, "bucket", RATE, burst_nbytes=512)
    flow = wires.flow(0)
    for chunk, when_s in (("first", 0.0), ("after a pause", 4.0), ("after a shorter one", 4.75)):
        wires.agenda.at(when_s, lambda chunk: flow.send(chunk, 1024), chunk)
    assert wires.run() == {"first": 0.5, "after a pause": 4.5, "after a shorter one": 5.5}


def test_simultaneous_events_keep_their_order():
    wires = Wires(*[RATE] * 5)
    for sender in (3, 1, 4, 0, 2):
        wires.flow(sender).send(sender, 1024)
    wires.run()
    assert [chunk for chunk, _ in wires.arrivals] == [3, 1, 4, 0, 2]


@pytest.mark.parametrize("seed", range(40))
def test_rates_are_near_those_of_max_min_fairness(seed):
    chance = random.Random(seed)
    ends = chance.randint(2, 8)
    rates = [RATE * chance.choice((0.25, 1, 1, 1, 2, 4)) for _ in range(2 * ends)]
    ways = [(a, ends + b) for a in range(ends) for b in range(ends) if a != b and chance.random() < 0.5]
    ways = ways or [(0, ends + 1)]
    num_chunks = [chance.choice((64, 64, 128)) for _ in ways]
    wires = Wires(*rates)
    for number, (way, chunks) in enumerate(zip(ways, num_chunks, strict=True)):
        flow = wires.flow(*way)
        for _ in range(chunks):
            flow.send(number, 64)
    found, due = wires.run(), end_times(rates, ways, [64 * chunks for chunks in num_chunks])
    assert max(found.values()) == pytest.approx(max(due), rel=0.01)
    assert [found[number] for number in range(len(ways))] == pytest.approx(due, rel=0.25)
