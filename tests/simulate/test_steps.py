"""Several calls at once, and compute beside them."""

import random

import pytest

from kfcomm.errors import ConfigError
from kfcomm.simulate import (
    Await,
    Call,
    Compute,
    Host,
    Local,
    SimulatedNetwork,
    late,
    parse_workload,
    simulate,
    simulate_step,
)
from kfcomm.strategies import names
from kfcomm.types import Layout

RATE = 2.0**30
MIB = 1 << 20
FREE = Local(bandwidth=RATE, latency_s=0.0, overhead_s=0.0, fold=float("inf"))
NAMES = [name for name in names() if name != "auto"]


def on(hosts, ranks=1, **host):
    return SimulatedNetwork(default=Host("", RATE, **{"latency_s": 0.0, **host}), local=FREE).of_hosts(hosts, ranks)


def random_network(chance, hosts, local):
    inside = Local(
        bandwidth=chance.uniform(1e8, 1e10),
        latency_s=chance.uniform(0, 1e-4),
        overhead_s=chance.uniform(1e-6, 1e-4),
        fold=chance.uniform(1e8, 1e10),
        copy=chance.choice([None, 1e9]),
        memory=chance.choice([None, 5e9]),
    )
    some = tuple(Host(f"s{number}", chance.uniform(1e7, 1e9), chance.uniform(0, 1e-3)) for number in range(2))
    default = Host("", chance.uniform(1e7, 1e9), chance.uniform(0, 1e-3), local)
    return SimulatedNetwork(hosts=chance.choice([(), some]), default=default, local=inside).of_hosts(hosts, local)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", NAMES)
def test_a_step_of_one_call_is_that_call(name, seed):
    chance = random.Random(f"{name} {seed}")
    network = random_network(chance, chance.randint(2, 9), chance.randint(1, 3))
    nbytes, starts_s = chance.choice([4, 400, 300_000, 3 * MIB]), chance.choice([(), late(network.layout.size, 1e-3)])
    alone = simulate(name, network.layout, nbytes, network, starts_s=starts_s)
    step = simulate_step([Call(nbytes)], network.layout, network, strategy=name, starts_s=starts_s)
    assert (step.seconds, step.events, step.busiest) == (alone.seconds, alone.events, alone.busiest)
    assert step.calls[0].rank_seconds == step.rank_seconds == alone.rank_seconds
    assert (step.calls[0].messages, step.calls[0].nbytes_sent) == (alone.messages, alone.nbytes_sent)
    assert (step.simulated_ranks, step.is_exact) == (alone.simulated_ranks, alone.is_exact)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", NAMES)
def test_ranks_that_are_alike_in_all_calls_are_simulated_once(name, seed):
    chance = random.Random(f"{name} {seed}")
    hosts = chance.choice([4, 8, 12])
    network = random_network(chance, hosts, 1)
    workload = [Compute(1e-3)]
    for number in range(3):
        workload += [Call(4 * hosts * chance.choice([100, 2000, 30_000]), f"{number}", priority=number), Compute(5e-4)]
    workload[4:4] = [Await(("0",))]
    found = simulate_step(workload, network.layout, network, strategy=name)
    due = simulate_step(workload, network.layout, network, strategy=name, one_by_one=True)
    assert due.simulated_ranks == hosts
    assert found.is_exact
    assert found.seconds == pytest.approx(due.seconds, rel=1e-9)
    assert found.rank_seconds == pytest.approx(due.rank_seconds, rel=1e-9)
    for one, other in zip(found.calls, due.calls, strict=True):
        assert one.rank_seconds == pytest.approx(other.rank_seconds, rel=1e-9)
        assert (one.messages, one.nbytes_sent) == (other.messages, other.nbytes_sent)


def test_trees_of_several_kinds_have_classes_in_common(monkeypatch):
    network = on(64)
    workload = [Call(MIB, strategy="star"), Call(MIB, strategy="tree"), Call(MIB, strategy="binary_tree")]
    due = simulate_step(workload, network.layout, network)
    assert (due.simulated_ranks, due.is_exact) == (64, True)
    monkeypatch.setattr("kfcomm.simulate.symmetry.MANY_MESSAGES", 100)
    found = simulate_step(workload, network.layout, network)
    assert found.simulated_ranks < 40
    assert not found.is_exact
    assert found.seconds == pytest.approx(due.seconds, rel=0.01)
    mixed = [Call(64 * 4000, strategy="ring"), Call(MIB, strategy="star")]
    assert simulate_step(mixed, network.layout, network).simulated_ranks == 64


def test_calls_that_share_no_port_take_the_longer_time():
    # the one fills the root's port outwards, the other that inwards; the empty answers of each go before its data
    out, into = Call(4 * MIB, verb="broadcast"), Call(3 * MIB, verb="reduce", priority=1)
    alone = [simulate("star", on(4).layout, each.nbytes, on(4), verb=each.verb).seconds for each in (out, into)]
    both = simulate_step([out, into], on(4).layout, on(4), strategy="star")
    assert both.seconds == pytest.approx(max(alone))
    assert [call.done_s for call in both.calls] == pytest.approx(alone, rel=0.01)  # empty answers queue in ports


@pytest.mark.parametrize("seed", range(20))
def test_calls_that_share_ports_take_as_long_as_all_their_bytes(seed):
    chance = random.Random(seed)
    network = random_network(chance, chance.randint(2, 8), chance.randint(1, 2))
    calls = [Call(chance.choice([4000, 200_000, MIB]), strategy=chance.choice(NAMES)) for _ in range(3)]
    step = simulate_step(calls, network.layout, network)
    alone = [simulate(call.strategy, network.layout, call.nbytes, network) for call in calls]
    assert step.seconds >= step.bound_s >= max(result.bound_s for result in alone)
    assert sum(call.nbytes_sent for call in step.calls) == sum(result.nbytes_sent for result in alone)
    assert step.seconds <= sum(result.seconds for result in alone) * 1.25
    same = simulate_step([calls[0]] * 2, network.layout, network)
    assert same.bound_s == pytest.approx(2 * alone[0].bound_s)


@pytest.mark.parametrize("name", ["star", "ring", "tree"])
@pytest.mark.parametrize("seed", range(5))
def test_later_ranks_end_no_earlier(name, seed):
    network = on(6)
    starts_s = late(6, 1e-3, seed)
    ends = [
        simulate(name, network.layout, 60_000, network, starts_s=[scale * each for each in starts_s]).seconds
        for scale in (0, 1, 2, 5)
    ]
    assert ends == sorted(ends)


def test_compute_hides_communication():
    network = on(2)
    alone = simulate("star", network.layout, 8 * MIB, network).seconds
    hidden = simulate_step([Call(8 * MIB), Compute(2 * alone)], network.layout, network, strategy="star")
    assert hidden.seconds == hidden.compute_s == 2 * alone
    assert (hidden.exposed_s, hidden.communication_s, hidden.overlapped_s) == (0, alone, alone)
    half = simulate_step([Compute(1.0), Call(8 * MIB), Compute(alone / 2)], network.layout, network, strategy="star")
    assert half.seconds == pytest.approx(1 + alone)
    assert half.exposed_s == pytest.approx(alone / 2)
    assert half.overlapped_s == pytest.approx(alone / 2)
    assert half.calls[0].posted_s == 1.0
    late_ones = simulate_step([Compute(1.0), Call(8 * MIB)], network.layout, network, strategy="star")
    assert late_ones.overlapped_s == pytest.approx(0, abs=1e-9)


def test_a_wait_stops_the_rank_and_after_only_the_call():
    network = on(2)
    alone = simulate("star", network.layout, 8 * MIB, network).seconds
    first, second = Call(8 * MIB, "a"), Call(8 * MIB, "b")
    waits = simulate_step([first, Await(("a",)), second, Compute(3.0)], network.layout, network, strategy="star")
    assert waits.calls[1].posted_s == pytest.approx(alone)
    assert waits.seconds == pytest.approx(alone + 3)
    follows = simulate_step(
        [first, Call(8 * MIB, "b", after=("a",)), Compute(3.0)], network.layout, network, strategy="star"
    )
    assert follows.calls[1].posted_s == pytest.approx(alone)
    assert follows.seconds == pytest.approx(3)
    everything = simulate_step([first, second, Await(), Compute(3.0)], network.layout, network, strategy="star")
    assert everything.seconds == pytest.approx(max(call.done_s for call in everything.calls) + 3)


def test_urgent_chunks_overtake_on_each_link():
    network = on(2)
    long, short = Call(64 * MIB), Call(MIB, priority=1)
    urgent = simulate_step([long, short], network.layout, network, strategy="star").calls[1]
    equal = simulate_step([long, Call(MIB)], network.layout, network, strategy="star").calls[1]
    assert urgent.seconds < equal.seconds / 4
    assert equal.seconds >= 64 * MIB / RATE


def test_a_step_at_100000_ranks():
    network = SimulatedNetwork().of_hosts(100_000)
    step = simulate_step(parse_workload("compute 5ms, 4MB, compute 3ms, 8MB"), network.layout, network, strategy="tree")
    assert (step.size, step.simulated_ranks) == (100_000, 2)
    assert step.seconds > 8e-3


def test_workloads_are_read():
    text = """
    compute 5 ms          # the last layers
    4 MiB, 16MiB by ring as grads priority -1
    broadcast 1KiB as x after grads
    wait x grads, wait
    """
    assert parse_workload(text) == (
        Compute(0.005),
        Call(4 * MIB),
        Call(16 * MIB, "grads", "ring", priority=-1),
        Call(1024, "x", verb="broadcast", after=("grads",)),
        Await(("x", "grads")),
        Await(),
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("compute 5ms", "expected at least one call, got none"),
        ("compute 5", "'compute 5': expected a time, got '5'"),
        ("compute soon, 4MiB", "'compute soon': expected a time"),
        ("4 furlongs", "'4 furlongs'"),
        ("4MiB with ring", "'4MiB with ring': write 'compute 5 ms'"),
        ("4MiB after grads", "after 'grads': expected a call before it .known: none."),
        ("4MiB as a, wait b", "wait 'b': expected a call before it .known: a."),
        ("4MiB as a, 4MiB as a", "two calls have the name 'a'"),
    ],
)
def test_wrong_workloads(text, message):
    with pytest.raises(ConfigError, match=message):
        parse_workload(text)


@pytest.mark.parametrize(
    ("workload", "message"),
    [
        ([Call(2)], "less than one float32"),
        ([Call(MIB, verb="scatter")], "verb 'scatter' is not simulated"),
        ([Call(MIB, strategy="rong")], "rong"),
        ([Call(MIB, root=7, verb="broadcast")], "root 7 is outside 0..3"),
        ([], "at least one call"),
        ("4MiB", "expected Compute, Call or Await, got str; parse_workload reads text"),
        ([Call(MIB, after=("x",))], "after 'x'"),
    ],
)
def test_wrong_calls(workload, message):
    with pytest.raises(ConfigError, match=message):
        simulate_step(workload, Layout.even(4, 4))


@pytest.mark.parametrize("seconds", [-1.0, float("inf"), float("nan")])
def test_wrong_compute(seconds):
    with pytest.raises(ConfigError, match="expected a finite number"):
        Compute(seconds)
