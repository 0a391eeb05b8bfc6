"""Whole worlds: times that can be computed by hand, values against an oracle, and what is refused."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kfcomm.core.graph import GraphPair
from kfcomm.core.machine import Do
from kfcomm.core.signature import split
from kfcomm.errors import ConfigError
from kfcomm.simulate import Host, Local, SimulatedNetwork, num_messages, simulate
from kfcomm.strategies import Strategy, build, names
from kfcomm.strategies.base import SizedStrategy, from_parents
from kfcomm.types import Layout

RATE = 2.0**30
NBYTES = 1 << 16
FREE = Local(bandwidth=RATE, latency_s=0.0, overhead_s=0.0, fold=float("inf"))


def network(latency_s=0.0, local=FREE, **host):
    return SimulatedNetwork(default=Host("", bandwidth=RATE, latency_s=latency_s, **host), local=local)


CHUNK = 1 << 19
IN_STEPS = ("halving_doubling", "dissemination")


def in_large_chunks(strategy, layout):
    """The strategy with chunks whose number does not depend on its depth: times can be computed by hand."""
    return replace(build(strategy, layout), chunk_nbytes=CHUNK)


def seconds(strategy, size, nbytes=NBYTES, on=None, hosts=None):
    layout = Layout.even(size, hosts or size)
    return simulate(in_large_chunks(strategy, layout), layout, nbytes, on or network()).seconds


def test_two_ranks_wait_for_each_other():
    assert seconds("star", 2) == 2 * NBYTES / RATE


def test_of_a_star_the_root_receives_all_and_sends_all():
    assert seconds("star", 5) == 4 * NBYTES / RATE + 4 * NBYTES / RATE


def test_a_ring_takes_as_many_steps_as_it_says():
    # 4096 elements and more are shared out, so that every step moves a part of four
    assert seconds("ring", 4) == 6 * (NBYTES / 4) / RATE


def test_latency_counts_on_every_step():
    assert seconds("ring", 4, on=network(latency_s=0.5)) == pytest.approx(6 * (0.5 + NBYTES / 4 / RATE))


def test_work_of_a_rank_takes_time():
    local = Local(bandwidth=RATE, latency_s=0.0, overhead_s=0.25, fold=RATE / 16)
    # send; receive, fold and send; receive
    assert seconds("star", 2, on=network(local=local)) == 4 * 0.25 + 16 * NBYTES / RATE + 2 * NBYTES / RATE


def test_messages_between_hosts_are_copied_by_both():
    local = Local(bandwidth=RATE, latency_s=0.0, overhead_s=0.0, fold=float("inf"), copy=RATE / 8)
    assert seconds("star", 2, on=network(local=local)) == 4 * 8 * NBYTES / RATE + 2 * NBYTES / RATE
    assert seconds("star", 2, on=network(local=local), hosts=1) == 2 * NBYTES / RATE


def test_thousands_wait_for_a_processor_to_do_what_takes_no_time():
    # while the root folds the second chunk, the first is there for all others, which only have to store it
    local = Local(bandwidth=1000 * RATE, latency_s=0.0, overhead_s=0.0, fold=RATE)
    result = simulate("star", Layout.even(2000, 1), 1 << 20, network(local=local, cpus=1))
    assert result.seconds >= 1999 * (1 << 20) / RATE


def test_on_a_test_bed_all_hosts_share_processors():
    local = Local(bandwidth=RATE, latency_s=0.0, overhead_s=1.0, fold=float("inf"))
    bed = replace(network(local=local), cpus=1)
    # every message costs its sender and its receiver a second of the only processor
    assert seconds("clique", 4, 64, on=bed) == pytest.approx(12.0)


def test_folds_of_one_rank_follow_each_other():
    local = Local(bandwidth=RATE, latency_s=0.0, overhead_s=0.0, fold=RATE / 16)
    arrived, fold = 3 * NBYTES / RATE, 16 * NBYTES / RATE
    assert seconds("star", 4, on=network(local=local)) == arrived + 3 * fold + 3 * NBYTES / RATE


def test_ranks_of_a_host_share_its_port():
    on = network(local=Local(bandwidth=4 * RATE, latency_s=0.0, overhead_s=0.0, fold=float("inf")))
    layout = Layout.even(4, 2)
    result = simulate(in_large_chunks("star", layout), layout, NBYTES, on)
    assert (result.busiest.port, result.busiest.nbytes) == ("h0 out", 2 * NBYTES)
    # two flows into h0 and one inside of it, all at once; then the same back
    assert result.seconds == 4 * NBYTES / RATE
    assert result.bound_s == 2 * NBYTES / RATE


def test_ranks_of_a_host_share_its_memory():
    limited = replace(FREE, memory=RATE)
    assert seconds("clique", 4, hosts=1) == 6 * (NBYTES / 4) / RATE
    assert seconds("clique", 4, hosts=1, on=network(local=limited)) == 24 * (NBYTES / 4) / RATE


def test_ranks_that_share_processors_take_turns():
    local = Local(bandwidth=RATE, latency_s=0.0, overhead_s=1.0, fold=float("inf"))
    one_each = simulate("clique", Layout.even(4, 1), 64, network(local=local))
    layout = Layout.even(4, 1, num_cpus=2)
    shared = simulate("clique", layout, 64, network(local=local))
    # three send; the root receives two, then one, after which it sends three; three receive
    assert one_each.seconds == pytest.approx(1 + 2 + (1 + 3) + 1)
    # the third sends after the others, which delays nobody; of the receivers one waits
    assert shared.seconds == pytest.approx(1 + 2 + (1 + 3) + 2)
    assert simulate("clique", Layout.even(4, 1), 64, network(local=local, cpus=2)).seconds == shared.seconds


def test_chunks_of_a_long_message_follow_each_other():
    # a port sends and receives at once: the first chunk is on its way back while the others come
    assert seconds("star", 2, 8 * CHUNK) == (8 + 1) * CHUNK / RATE


def test_the_slow_host_is_the_busiest_port():
    on = SimulatedNetwork(hosts=(Host("h0", RATE), Host("slow", RATE / 4), Host("h2", RATE)), local=FREE)
    result = simulate("ring", Layout.even(3, 3), 3 << 20, on)
    assert result.busiest.port == "slow out"
    assert result.bound_s == 4 * (1 << 20) / (RATE / 4)
    assert result.seconds >= result.bound_s


def test_figures_are_those_of_the_field():
    layout = Layout.even(4, 4)
    result = simulate(in_large_chunks("ring", layout), layout, 1 << 20, network())
    assert result.algbw == (1 << 20) / result.seconds / 1e9
    assert result.busbw == result.algbw * 2 * 3 / 4
    assert (result.messages, result.size, result.num_hosts) == (4 * 3 * 2, 4, 4)
    assert max(result.rank_seconds) == result.seconds
    assert result.as_json()["bound_s"] == result.bound_s


@pytest.mark.parametrize("name", ["ring", "star", "multi_binary_tree_star", "halving_doubling"])
def test_the_number_of_messages_is_known_before(name):
    layout = Layout.even(6, 3)
    for nbytes in (4, 1 << 20, 5 << 20):
        assert num_messages(build(name, layout), nbytes, layout=layout) == simulate(name, layout, nbytes).messages


def test_the_same_input_gives_the_same_result():
    layout = Layout.even(12, 4, num_cpus=2)
    first, again = (simulate("multi_binary_tree_star", layout, 3 << 20) for _ in range(2))
    assert first == again


def test_a_strategy_by_size_is_the_one_for_this_size():
    layout = Layout.even(4, 4)
    sized = SizedStrategy("mine", ((NBYTES, build("star", layout)), (None, build("ring", layout))))
    assert simulate(sized, layout, NBYTES, network()).graphs == "star"
    assert simulate(sized, layout, NBYTES + 4, network()).graphs == "ring"


def test_whole_message_takes_the_pair_of_its_key():
    layout = Layout.even(3, 3)
    pairs = (build("star", layout).pairs[0], GraphPair.of(from_parents([0, 0, 1]).pairs[0].reduce))
    either = Strategy("either", pairs, is_whole=True, chunk_nbytes=CHUNK)
    found = {simulate(either, layout, NBYTES, network(), key=str(number)).seconds for number in range(16)}
    assert found == {seconds("star", 3), seconds(from_parents([0, 0, 1]), 3)}


class Values:
    """Carries what each element is made of: the ranks, in the order in which they were folded."""

    def __init__(self) -> None:
        self.partial = {}
        self.result = {}

    def __call__(self, rank, effect):
        tag, _, *fields = effect
        if tag == Do.SEND:
            _, lane, index, _, source, _ = fields
            where = (rank, lane.number, index)
            return ((rank,), self.partial.get(where), self.result.get(where))[source]
        if tag in (Do.FOLD, Do.FOLD_UP, Do.FOLD_LAST):
            lane, index, payload, first = fields
            where = (rank, lane.number, index)
            folded = ((rank,) if first else self.partial[where]) + payload
            (self.result if tag == Do.FOLD_LAST else self.partial)[where] = folded
        elif tag == Do.STORE:
            lane, index, payload = fields
            self.result[rank, lane.number, index] = payload
        return None


def folded(graph, rank):
    """The ranks below and at ``rank``, in the order of a fold along the graph."""
    return sum((folded(graph, child) for child in graph.children[rank]), (rank,))


@settings(deadline=None, max_examples=60)
@given(
    # Exchanges in steps have tests of their own.
    name=st.sampled_from([name for name in names() if name not in ("auto", "direct", *IN_STEPS)]),
    size=st.integers(2, 9),
    hosts=st.integers(1, 9),
    nbytes=st.sampled_from([4, 1 << 12, 1 << 20, (1 << 20) + 4, 3 << 20]),
)
def test_every_rank_ends_with_the_fold_of_all_in_the_order_of_the_graphs(name, size, hosts, nbytes):
    layout = Layout.even(size, min(hosts, size))
    values = Values()
    strategy = in_large_chunks(name, layout)
    result = simulate(strategy, layout, nbytes, carry=values)
    pairs = strategy.pairs
    if len({lane for _, lane, _ in values.result}) == 1 and len(pairs) > 1:
        due = {folded(pair.reduce, pair.root) for pair in pairs}
        assert len(set(values.result.values())) == 1
        assert set(values.result.values()) <= due
    else:
        for (_, lane, _), found in values.result.items():
            assert found == folded(pairs[lane].reduce, pairs[lane].root)
    assert {rank for rank, _, _ in values.result} == set(range(size))
    num_chunks = sum(-(-count // (1 << 17)) for _, count in split(nbytes // 4, len(pairs)))
    assert len(values.result) in (size * num_chunks, size)
    assert result.seconds >= result.bound_s


@pytest.mark.parametrize(("num_cpus", "messages"), [(0, 4 * 3), (2, 2 * 3)])
def test_direct_is_one_step_where_each_rank_has_a_processor(num_cpus, messages):
    result = simulate("direct", Layout.even(4, num_cpus=num_cpus), 1 << 10)
    assert result.messages == messages


def test_messages_of_fewer_bytes_than_an_element():
    with pytest.raises(ConfigError, match="a message of 3 bytes has less than one float32"):
        simulate("ring", Layout.even(2), 3)


def test_a_world_of_one():
    with pytest.raises(ConfigError, match="at least 2"):
        simulate("ring", Layout.even(1), 4)


def test_an_unknown_strategy():
    with pytest.raises(ConfigError, match="did you mean ring"):
        simulate("rign", Layout.even(2), 4)


def test_a_network_of_more_hosts_than_there_are_ranks_on():
    with pytest.raises(ConfigError, match="the network has 3 hosts, and the ranks are on 2"):
        simulate("ring", Layout.even(2, 2), 4, network().of_hosts(3))
