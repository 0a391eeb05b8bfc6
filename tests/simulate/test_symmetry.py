"""Ranks that are alike are simulated once: the results are those of all ranks, simulated one by one."""

import random
from dataclasses import replace

import pytest

from kfcomm.simulate import Call, Host, Local, SimulatedNetwork, simulate, simulate_step
from kfcomm.strategies import build, names
from kfcomm.types import Layout

NAMES = [name for name in names() if name != "auto"]


def network_of(chance, hosts, local):
    """Hosts that are all alike, with costs that make no two events coincide but by symmetry."""
    inside = Local(
        bandwidth=chance.uniform(1e8, 1e10),
        latency_s=chance.uniform(0, 1e-4),
        overhead_s=chance.choice([0.0, chance.uniform(1e-6, 1e-4)]),
        fold=chance.uniform(1e8, 1e10),
        copy=chance.choice([None, chance.uniform(1e8, 1e10)]),
        memory=chance.choice([None, chance.uniform(1e9, 1e10)]),
    )
    host = Host("", chance.uniform(1e7, 1e9), chance.uniform(0, 1e-3), local)
    return SimulatedNetwork(default=host, local=inside).of_hosts(hosts)


def check_same(strategy, network, nbytes):
    """Returns how many ranks were simulated."""
    layout = network.layout
    found = simulate(strategy, layout, nbytes, network)
    due = simulate(strategy, layout, nbytes, network, one_by_one=True)
    assert due.simulated_ranks == layout.size
    assert found.is_exact
    assert found.seconds == pytest.approx(due.seconds, rel=1e-9)
    assert found.rank_seconds == pytest.approx(due.rank_seconds, rel=1e-9)
    assert (found.messages, found.nbytes_sent) == (due.messages, due.nbytes_sent)
    assert (found.busiest.port, found.busiest.nbytes) == (due.busiest.port, due.busiest.nbytes)
    assert found.bound_s == pytest.approx(due.bound_s)
    return found.simulated_ranks


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("name", NAMES)
def test_results_are_those_of_all_ranks(name, seed):
    chance = random.Random(f"{name} {seed}")
    hosts, local = chance.choice([(2, 1), (5, 1), (8, 1), (12, 1), (16, 1), (3, 2), (4, 2), (4, 4), (5, 3), (6, 2)])
    network = network_of(chance, hosts, local)
    parts = hosts * local
    nbytes = 4 * chance.choice([1, 100, 4096 * parts, 40000 * parts, 5000 * parts + 3])
    check_same(name, network, nbytes)


@pytest.mark.parametrize("name", ["clique", "chain_star", "multi_star", "direct"])
@pytest.mark.parametrize("seed", range(6))
def test_messages_that_go_whole_take_the_children_of_a_star_in_their_order(name, seed):
    chance = random.Random(f"{name} {seed}")
    hosts, local = chance.choice([(2, 5), (3, 3), (4, 4), (4, 1)])
    network = network_of(chance, hosts, local)
    step = [Call(4000, str(seed), priority=1), Call(12000, f"{seed} too")]
    found = simulate_step(step, network.layout, network, strategy=name)
    due = simulate_step(step, network.layout, network, strategy=name, one_by_one=True)
    assert found.rank_seconds == pytest.approx(due.rank_seconds, rel=1e-9)
    check_same(name, network, 8000)


@pytest.mark.parametrize("name", ["star", "tree", "binary_tree", "binary_tree_star"])
@pytest.mark.parametrize("seed", range(8))
def test_graphs_on_unlike_hosts_have_classes_too(name, seed):
    chance = random.Random(f"{name} {seed}")
    rates = [chance.choice([1e8, 3e8]) for _ in range(chance.randint(4, 40))]
    hosts = tuple(Host(f"h{number}", rate, 3e-5) for number, rate in enumerate(rates))
    check_same(name, SimulatedNetwork(hosts=hosts), 4 * chance.choice([500, 300_000]))


def test_of_many_ranks_that_are_alike_one_is_simulated():
    network = SimulatedNetwork().of_hosts(64)
    assert check_same("ring", network, 64 * 4000) == 1
    assert check_same("star", network, 64 * 4000) == 2
    assert check_same("binary_tree", network, 64 * 4000) < 32
    assert check_same("ring", SimulatedNetwork().of_hosts(8, 4), 32 * 4000) == 4


@pytest.mark.parametrize(
    "text",
    [
        '[[host]]\ncount = 7\n[[host]]\nbandwidth = "1 Gbit/s"',
        '[[host]]\ncount = 8\n[[link]]\nbetween = ["h0", "h5"]\nlatency = "5 ms"',
        '[[host]]\ncount = 8\n[[switch]]\nhosts = ["h0", "h1"]\nuplink = "1 Gbit/s"',
        "[testbed]\ncpus = 2\n[[host]]\ncount = 8",
    ],
)
def test_rings_of_unlike_hosts_are_simulated_one_by_one(text):
    assert check_same("ring", SimulatedNetwork.parse(text), 8 * 4000) == 8


@pytest.mark.parametrize(
    ("hosts", "local", "simulated"),
    [(16, 1, 1), (12, 1, 3), (40, 1, 5), (8, 4, 1), (6, 4, 3), (5, 6, 15), (12, 3, 9), (7, 2, 7)],
)
def test_exchanges_turn_by_the_upper_digits_of_hosts_and_ranks(hosts, local, simulated):
    network = network_of(random.Random(hosts), hosts, local)
    assert check_same("halving_doubling", network, hosts * local * 4 * 3000) == simulated


def test_short_exchanges_of_all_contributions_turn_host_by_host():
    assert check_same("dissemination", network_of(random.Random(1), 40, 1), 4000) == 1
    assert check_same("dissemination", network_of(random.Random(2), 6, 4), 4000) == 4


def test_exchanges_of_ranks_that_share_processors_turn_host_by_host():
    network = SimulatedNetwork.parse('[local]\ncpus = 2\noverhead = "7 us"\nlatency = "11 us"').of_hosts(8, 4)
    assert check_same("halving_doubling", network, 32 * 4000) == 4


@pytest.mark.parametrize(("hosts", "least"), [(101, 0.95), (1001, 0.75)])
def test_among_many_hosts_of_odd_number_every_block_is_cut(hosts, least, monkeypatch):
    network = SimulatedNetwork().of_hosts(hosts)
    due = simulate("halving_doubling", network.layout, 1 << 20, network, one_by_one=True)
    monkeypatch.setattr("kfcomm.simulate.symmetry.MANY_MESSAGES", 0)
    found = simulate("halving_doubling", network.layout, 1 << 20, network)
    assert (found.simulated_ranks, found.is_exact) == (1, False)
    assert least * due.seconds < found.seconds < 1.05 * due.seconds


@pytest.mark.parametrize(("hosts", "local"), [(300, 1), (511, 1), (150, 4)])
@pytest.mark.parametrize("name", ["double_tree", "built"])
def test_double_trees_grow_by_levels(name, hosts, local, monkeypatch):
    network = network_of(random.Random(hosts), hosts, local)
    strategy = build("double_tree", network.layout) if name == "built" else name
    due = simulate(strategy, network.layout, 1 << 18, network, one_by_one=True)
    monkeypatch.setattr("kfcomm.simulate.levels.MANY_MESSAGES", 0)
    monkeypatch.setattr("kfcomm.simulate.levels._RANKS", 128 * local)
    found = simulate(strategy, network.layout, 1 << 18, network)
    assert not found.is_exact
    assert found.simulated_ranks == (127 + 31) * local
    assert (found.size, found.messages, found.nbytes_sent) == (due.size, due.messages, due.nbytes_sent)
    assert found.bound_s == pytest.approx(due.bound_s)
    assert found.seconds == pytest.approx(due.seconds, rel=0.08)


def test_other_trees_of_that_name_are_simulated_as_they_are(monkeypatch):
    monkeypatch.setattr("kfcomm.simulate.levels.MANY_MESSAGES", 0)
    monkeypatch.setattr("kfcomm.simulate.levels._RANKS", 16)
    network = SimulatedNetwork().of_hosts(40)
    other = replace(build("tree", network.layout), name="double_tree")
    assert simulate(other, network.layout, 1 << 20, network).is_exact
    slow = replace(network, hosts=(replace(network.hosts[0], bandwidth=1e8), *network.hosts[1:]))
    assert simulate("double_tree", slow.layout, 1 << 20, slow).simulated_ranks == 40


def test_switches_of_equally_many_hosts_turn_into_each_other():
    network = SimulatedNetwork.parse('[switch]\nhosts = 2\nuplink = "1 Gbit/s"').of_hosts(8)
    assert check_same("ring", network, 8 * 4000) == 2


def test_ranks_that_share_processors_are_alike_host_by_host():
    network = SimulatedNetwork.parse('[local]\ncpus = 2\noverhead = "7 us"\nlatency = "11 us"').of_hosts(4, 4)
    assert check_same("ring", network, 16 * 4000) == 4
    assert check_same("tree", network, 16 * 4000) == 16


def test_unequal_parts_are_simulated_one_by_one_while_they_are_few():
    network = SimulatedNetwork().of_hosts(16)
    assert check_same("ring", network, 4 * (16 * 5000 + 3)) == 16


def test_unequal_parts_of_too_many_ranks_count_as_the_largest():
    network = SimulatedNetwork().of_hosts(400)
    layout = network.layout
    found = simulate("ring", layout, 4 * (400 * 50 + 1), network)
    assert (found.is_exact, found.simulated_ranks, found.messages) == (False, 1, 2 * 399 * 400)
    assert found.seconds == simulate("ring", layout, 4 * 400 * 51, network).seconds
    assert found.seconds >= simulate("ring", layout, 4 * 400 * 50, network).seconds


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_100000_ranks_are_simulated(name):
    network = SimulatedNetwork().of_hosts(100_000)
    found = simulate(name, network.layout, 1 << 20, network)
    assert found.size == len(found.rank_seconds) == 100_000
    assert found.simulated_ranks <= 5**5  # the odd part of 100,000, in an exchange
    assert found.seconds >= found.bound_s


def test_progress_is_told_until_the_end():
    shares = []
    simulate("clique", Layout.even(100, 100), 400 * 5000, one_by_one=True, progress=shares.append)
    assert shares == sorted(shares)
    assert 0 < shares[0] < 0.9
    assert shares[-1] == 1.0
