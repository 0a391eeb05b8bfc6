"""Arrays in device memory: copies to the host and back, in segments, beside the network."""

from dataclasses import replace

import pytest

from kfcomm.simulate import Await, Call, Compute, Host, Local, SimulatedNetwork, simulate, simulate_step

RATE = 2.0**30
MIB = 1 << 20
FREE = Local(bandwidth=RATE, latency_s=0.0, overhead_s=0.0, fold=float("inf"))


def on(hosts, device=None, rate=RATE):
    return SimulatedNetwork(default=Host("", rate, 0.0), local=replace(FREE, device=device)).of_hosts(hosts)


def seconds(nbytes, network, strategy="star", **options):
    return simulate(strategy, network.layout, nbytes, network, **options).seconds


def test_a_short_call_is_copied_before_and_after():
    plain = seconds(4 * MIB, on(3))
    assert seconds(4 * MIB, on(3, RATE / 4)) == pytest.approx(plain + 2 * 4 * MIB / (RATE / 4))


def test_copies_of_a_long_call_are_hidden_by_a_slow_network():
    plain, staged = (seconds(256 * MIB, on(2, device)) for device in (None, 4 * RATE))
    segment_s = 4 * MIB / (4 * RATE)
    assert plain < staged < plain * 1.2
    assert staged - seconds(128 * MIB, on(2, 4 * RATE)) == pytest.approx(plain / 2, rel=0.15)
    assert staged > plain + 2 * segment_s * (1 - 1e-9)


def test_a_slow_bus_is_what_counts():
    bus = RATE / 100
    staged = seconds(64 * MIB, on(2, bus))
    # directions do not disturb each other: what remains of the second is that of the last segments
    assert 64 * MIB / bus < staged < 64 * MIB / bus + 2 * 4 * MIB / bus


@pytest.mark.parametrize(
    ("verb", "copies"),
    [
        ("all_reduce", 2),
        ("reduce", 2),  # to the host on all ranks, back on the root
        ("broadcast", 2),
        ("all_gather", 1 + 4),
        ("gather", 1 + 4),
        ("reduce_scatter", 1 + 1 / 4),
        ("all_to_all", 2),
    ],
)
def test_every_verb_copies_its_input_and_its_result(verb, copies):
    network = on(4, RATE / 1000, rate=1e15)
    found = seconds(4 * MIB, network, verb=verb)
    assert found == pytest.approx(copies * 4 * MIB / (RATE / 1000), rel=0.01)


def test_ranks_that_are_alike_are_simulated_once():
    network = on(8, 2 * RATE)
    found = simulate("ring", network.layout, 32 * MIB, network)
    due = simulate("ring", network.layout, 32 * MIB, network, one_by_one=True)
    assert (found.simulated_ranks, due.simulated_ranks) == (1, 8)
    assert found.seconds == pytest.approx(due.seconds)
    assert (found.messages, found.nbytes_sent) == (due.messages, due.nbytes_sent)


def test_calls_of_a_step_share_the_bus():
    network = on(2, RATE / 100)
    one = seconds(16 * MIB, network)
    both = simulate_step([Call(16 * MIB, "a"), Call(16 * MIB, "b")], network.layout, network, strategy="star")
    assert both.seconds > 2 * 16 * MIB / (RATE / 100)
    waits = [Call(16 * MIB, "a"), Await(), Compute(1.0)]
    assert simulate_step(waits, network.layout, network, strategy="star").seconds == pytest.approx(one + 1)
    follows = [Call(16 * MIB, "a"), Call(16 * MIB, "b", after=("a",))]
    chained = simulate_step(follows, network.layout, network, strategy="star")
    assert chained.calls[1].posted_s == pytest.approx(one) == chained.calls[0].done_s
    assert chained.seconds == pytest.approx(2 * one)


def test_a_network_file_has_the_rate_of_devices():
    assert SimulatedNetwork.parse('[local]\ndevice = "52 GB/s"').local.device == 52e9
    assert SimulatedNetwork.parse("").local.device is None
