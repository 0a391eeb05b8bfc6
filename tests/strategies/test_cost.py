from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kfcomm.core.graph import Graph, GraphPair
from kfcomm.core.signature import SHOWN_WHOLE_NBYTES
from kfcomm.simulate import simulate
from kfcomm.strategies import SizedStrategy, Strategy, build, from_edges, names
from kfcomm.strategies.auto import auto, choices
from kfcomm.strategies.base import DIRECT_NBYTES
from kfcomm.strategies.builtin import ALGORITHMS, BuiltinStrategy
from kfcomm.strategies.cost import Cost, NetworkModel, measure, predict_seconds
from kfcomm.strategies.moves import StepCosts
from kfcomm.strategies.price import Market, Priced
from kfcomm.types import Costs, Layout, Rates
from tests.strategies.layouts import LAYOUTS, trees

GRID = [1 << bit for bit in range(6, 31)]
EXACT = NetworkModel(
    local_alpha_s=1.0,
    local_beta_s_per_byte=0.5,
    cross_alpha_s=100.0,
    cross_beta_s_per_byte=2.0,
    overhead_s=0.25,
    gamma_s_per_byte=0.125,
    chunk_nbytes=64,
)


def closed_form(name: str, layout: Layout) -> Cost:
    """The formulas of the documentation, for a layout of several ranks."""
    n, h = layout.size, layout.num_hosts
    on_host = [len(layout.ranks_of(host)) for host in range(h)]
    first, most = on_host[0], max(on_host)
    onwards = [0] * h
    for rank, host in enumerate(layout.hosts):
        onwards[host] += host != layout.hosts[(rank + 1) % n]
    share, host_share = Fraction(2 * (n - 1), n), Fraction(2 * (h - 1), h)
    inside, between = int(most > 1), int(h > 1)
    shared = most - 1 + host_share
    match name:
        case "star":
            return Cost(2, Fraction(n - 1), Fraction(n - first))
        case "ring":
            return Cost(2 * (n - 1), share, share * max(onwards))
        case "direct":
            return Cost(1, Fraction(n - 1), Fraction(max(p * (n - p) for p in on_host)))
        case "clique":
            return Cost(2, share, Fraction(max(2 * p * (n - p) for p in on_host), n))
        case "chain_star":
            busiest = max((n - 1) * c + p * (n - p) for c, p in zip(onwards, on_host, strict=True))
            return Cost(n, share, Fraction(busiest, n))
        case "tree":
            depth = max([min(1, first - 1), *(min(2, p) for p in on_host[1:])])
            return Cost(2 * depth, Fraction(max(first + h - 2, *on_host[1:], 0)), Fraction(h - 1))
        case "multi_star":
            return Cost(2 * (between + inside), shared, host_share)
        case "multi_binary_tree_star":
            return Cost(2 * (h.bit_length() - 1 + inside), shared, host_share)
        case _:
            return counted_form(name, layout)


def counted_form(name: str, layout: Layout) -> Cost:
    """Formulas that are bounds, or have a part that depends on the numbering of ranks: that part is counted."""
    n, h = layout.size, layout.num_hosts
    on_host = [len(layout.ranks_of(host)) for host in range(h)]
    most, counted = max(on_host), measure(build(name, layout).select(0), layout)
    match name:
        case "double_tree":
            assert counted.steps <= 2 * ((h if h > 1 else n) // 2).bit_length() + 2 * (h > 1 and most > 1)
            assert counted.bytes <= most + 1
            assert counted.cross_host_bytes <= 2
            return counted
        case "binomial":
            return replace(counted, steps=2 * (n.bit_length() - 1), bytes=Fraction(2 * (n - 1), n))
        case "halving_doubling":
            is_even = min(on_host) == most
            steps = (most - 1).bit_length() + (h - 1).bit_length() if is_even else (n - 1).bit_length()
            assert not is_even or counted.cross_host_bytes == Fraction(2 * (h - 1), h)
            return replace(counted, steps=2 * steps, bytes=Fraction(2 * (n - 1), n))
        case "dissemination":
            return replace(counted, steps=(n - 1).bit_length(), bytes=Fraction(n - 1))
        case _:  # heaps
            steps = 2 * (n.bit_length() - 1) if name == "binary_tree" else counted.steps
            assert counted.bytes <= (3 if name == "binary_tree" else most + 2)
            assert name == "binary_tree" or counted.cross_host_bytes <= 3
            return replace(counted, steps=steps)


def by_name(name: str) -> BuiltinStrategy:
    return next(algorithm for algorithm in ALGORITHMS if algorithm.name == name)


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda algorithm: algorithm.name)
@given(layout=LAYOUTS)
def test_measured_cost_is_that_of_the_formula(algorithm: BuiltinStrategy, layout: Layout) -> None:
    assume(layout.size > 1)
    assert measure(algorithm.build(layout), layout) == closed_form(algorithm.name, layout)


@given(LAYOUTS, st.sampled_from(ALGORITHMS))
def test_every_strategy_costs_at_least_the_lower_bounds(layout: Layout, algorithm: BuiltinStrategy) -> None:
    cost = measure(algorithm.build(layout), layout)
    assert cost.bytes >= Fraction(2 * (layout.size - 1), layout.size)
    assert cost.cross_host_bytes >= Fraction(2 * (layout.num_hosts - 1), layout.num_hosts)
    assert cost.steps >= (1 if algorithm.name in ("direct", "dissemination") else 2) * min(1, layout.size - 1)


def test_costs_of_eight_ranks_on_two_hosts() -> None:
    two_by_four = Layout.even(8, 2)
    figures = {
        "star": Cost(2, Fraction(7), Fraction(4)),
        "ring": Cost(14, Fraction(7, 4), Fraction(7, 4)),
        "direct": Cost(1, Fraction(7), Fraction(16)),
        "clique": Cost(2, Fraction(7, 4), Fraction(4)),
        "chain_star": Cost(8, Fraction(7, 4), Fraction(23, 8)),
        "tree": Cost(4, Fraction(4), Fraction(1)),
        "binary_tree": Cost(6, Fraction(3), Fraction(4)),
        "binary_tree_star": Cost(4, Fraction(4), Fraction(1)),
        "multi_binary_tree_star": Cost(4, Fraction(4), Fraction(1)),
        "multi_star": Cost(4, Fraction(4), Fraction(1)),
        "double_tree": Cost(4, Fraction(4), Fraction(1)),
        "binomial": Cost(6, Fraction(7, 4), Fraction(1)),
        "halving_doubling": Cost(6, Fraction(7, 4), Fraction(1)),
        "dissemination": Cost(3, Fraction(7), Fraction(21)),
    }
    assert {algorithm.name: measure(algorithm.build(two_by_four), two_by_four) for algorithm in ALGORITHMS} == figures


def test_measure_without_a_layout_sees_one_host() -> None:
    chain = from_edges(3, [(0, 1), (1, 2)])
    assert measure(chain) == Cost(4, Fraction(2))
    assert measure(chain, Layout((0, 1, 0))) == Cost(4, Fraction(2), Fraction(2))


@given(trees())
def test_a_tree_costs_its_depth_and_its_busiest_rank(tree: Graph) -> None:
    degrees = [len(below) + (rank != tree.root) for rank, below in enumerate(tree.children)]
    assert measure(Strategy("any", (GraphPair.of(tree),))) == Cost(2 * tree.depth, Fraction(max(degrees)))


def test_seconds_counted_by_hand() -> None:
    star = build("star", Layout.even(4, 2))

    def path(nbytes: int) -> float:
        # Up: a message leaves, two share the port of host 0, and both are folded; the local one was before. Down: three
        # are sent, two share the port, and one is received.
        up = 0.25 + 2 * nbytes * 2.0 + 100.0 + 2 * (0.25 + nbytes * 0.125)
        return up + 3 * 0.25 + 2 * nbytes * 2.0 + 100.0 + 0.25

    assert predict_seconds(star, Layout.even(4, 2), 16, EXACT) == path(16)
    # Ten chunks: the first takes the path, and the port of host 0 is busy with the others.
    assert predict_seconds(star, Layout.even(4, 2), 640, EXACT) == path(64) + 2 * 9 * 64 * 2.0
    # Work: 6 messages for each chunk and 3 folds at rank 0, 3 seconds for each of 1,000 chunks of a byte.
    slow = replace(EXACT, overhead_s=100.0, chunk_nbytes=1)
    by_work = predict_seconds(star, Layout.even(4, 2), 1000, slow)
    assert by_work == pytest.approx(1000 * (6 * 100.0 + 3 * 0.125), rel=0.01)
    # Clique on one host: 4 pairs of 4 bytes; each rank 12 messages, 3 folds, and as copies 3 contributions that it
    # shows, 3 results that it keeps, and one that it shows.
    clique = build("clique", Layout.even(4))
    assert predict_seconds(clique, Layout.even(4), 16, EXACT) == 2 + 12 * 0.25 + 3 * 4 * 0.125 + 7 * 4 * 0.5
    # Chains show one contribution, and fold what they pass on where it is shown: 1 + 3 + 1 copies, but rank 0 still
    # sends 6 parts.
    chains = build("chain_star", Layout.even(4))
    assert predict_seconds(chains, Layout.even(4), 16, EXACT) == 4 + 12 * 0.25 + 3 * 4 * 0.125 + 6 * 4 * 0.5


def test_shares_weigh_what_each_pair_costs() -> None:
    layout = Layout.even(4)
    clique = build("clique", layout).select(0)
    shared = replace(clique, shares=(5, 1, 1, 1))
    # Rank 0 sends 5/8 of the message to three ranks as a root, and 3/8 of it to the other roots.
    assert measure(shared, layout) == Cost(2, Fraction(3 * 5 + 3, 8))
    # 8 parts of 2 bytes: rank 0 folds 3 * 5 of them and moves 18, in as many messages as with equal parts.
    assert predict_seconds(shared, layout, 16, EXACT) == 2 + 12 * 0.25 + 15 * 2 * 0.125 + 18 * 2 * 0.5
    assert measure(replace(shared, is_whole=True)) == measure(replace(clique, is_whole=True))


@given(LAYOUTS, st.sampled_from(ALGORITHMS), st.integers(1, 5), st.integers(1 << 10, 1 << 24))
def test_a_share_of_several_parts_is_as_many_pairs(
    layout: Layout, algorithm: BuiltinStrategy, times: int, nbytes: int
) -> None:
    built = algorithm.build(layout)
    assume(not built.direct)  # its pairs carry all of a message
    shares = (times, *(1 for _ in built.pairs[1:]))
    shared = replace(built, shares=shares)
    apart = replace(built, pairs=(*[built.pairs[0]] * times, *built.pairs[1:]))
    assert measure(shared, layout) == measure(apart, layout)
    free = NetworkModel(overhead_s=0.0, chunk_nbytes=1)
    one, other = (predict_seconds(strategy, layout, nbytes, free) for strategy in (shared, apart))
    # Between hosts, trees that share ports wait for each other, more so with fewer chunks.
    assert one == pytest.approx(other, rel=1e-6 if layout.num_hosts == 1 else 0.25)


def test_the_slowest_way_counts_whichever_kind_of_hop_is_slow() -> None:
    # From the root: three hops inside the host to rank 3, or one hop to another host.
    layout = Layout.of("AAAAB")
    strategy = from_edges(5, [(0, 1), (1, 2), (2, 3), (0, 4)])
    slow_network = NetworkModel(local_alpha_s=1.0, cross_alpha_s=10.0, overhead_s=0.0)
    slow_host = NetworkModel(local_alpha_s=10.0, cross_alpha_s=1.0, overhead_s=0.0)
    assert predict_seconds(strategy, layout, 0, slow_network) == pytest.approx(20.0)
    assert predict_seconds(strategy, layout, 0, slow_host) == pytest.approx(60.0)


@given(LAYOUTS, st.sampled_from(names()), st.integers(0, 1 << 28), st.integers(0, 1 << 28))
def test_more_bytes_take_more_time(layout: Layout, name: str, one: int, two: int) -> None:
    strategy = build(name, layout).select(one)
    less, more = sorted((one, two))
    # A message that is just long enough to be shared out, or to be cut, may take less than a shorter one.
    assert 0 <= predict_seconds(strategy, layout, less) <= 1.25 * predict_seconds(strategy, layout, more)


def test_a_sized_strategy_is_predicted_by_its_choice() -> None:
    layout = Layout.even(4)
    star, ring = (build(name, layout).select(0) for name in ("star", "ring"))
    sized = SizedStrategy("mine", ((100, star), (None, ring)))
    assert predict_seconds(sized, layout, 100) == predict_seconds(star, layout, 100)
    assert predict_seconds(sized, layout, 101) == predict_seconds(ring, layout, 101)


@pytest.mark.slow
@given(LAYOUTS)
def test_auto_is_never_slower_by_the_model_than_another_choice(layout: Layout) -> None:
    chosen = auto(layout)
    market = Market(layout, NetworkModel())
    priced = [Priced(replace(algorithm.build(layout), for_long=None), market) for algorithm in ALGORITHMS]
    for choice in choices(layout):
        nbytes = choice.nbytes
        for one in priced:
            if one.strategy.exchange is not None and nbytes >= 1 << 18:
                continue  # steps may take longer than the model says
            if (
                not one.strategy.direct
                or layout.num_hosts == 1
                or (layout.num_hosts == layout.size and nbytes <= SHOWN_WHOLE_NBYTES)
            ):
                # Where messages that are shared out take about as long, they are.
                assert choice.seconds <= 1.08 * one.seconds(nbytes)
        assert chosen.select(nbytes) == choice.strategy.select(nbytes)
        assert choice.seconds <= 1.08 * choice.runner_up_s
    used = [(strategy.name, strategy.is_whole) for _, strategy in chosen.rules]
    assert all(one != two for one, two in zip(used, used[1:], strict=False))


def test_among_hosts_with_several_ranks_short_messages_go_by_way_of_hubs() -> None:
    """Stars inside hosts have slots; a host's only rank sends to all others at once."""
    assert auto(Layout.even(4, 4)).select(64).name == "direct"
    for layout in (Layout.even(4, 2), Layout.even(8, 2), Layout.even(5, 4)):
        assert not any(strategy.direct for _, strategy in auto(layout).rules)


def test_auto_prefers_few_steps_for_short_and_idle_ports_for_long_messages() -> None:
    for layout in (Layout.even(4), Layout.even(8), Layout.even(16)):
        short, long = (measure(auto(layout).select(nbytes), layout) for nbytes in (64, 1 << 28))
        assert long.bytes == Fraction(2 * (layout.size - 1), layout.size) < short.bytes
    for layout in (Layout.even(16, 4), Layout.even(24, 3), Layout.of([0, 1] * 8)):
        few, many = (auto(layout).select(nbytes) for nbytes in (64, 1 << 28))
        assert few.name in {
            "tree",
            "binary_tree_star",
            "multi_star",
            "multi_binary_tree_star",
            "halving_doubling",
            "binomial",
            "inside: binary_tree, between: star",
        }
        hosts = layout.num_hosts
        assert measure(many, layout).cross_host_bytes == Fraction(2 * (hosts - 1), hosts)


def test_auto_follows_the_constants() -> None:
    layout = Layout.even(16, 16)
    measured = replace(layout, costs=Costs(overhead_s=1.0))
    assert auto(measured) == auto(layout, NetworkModel(overhead_s=1.0)) != auto(layout)
    assert predict_seconds(auto(layout), measured, 100) > 1
    costly_messages = auto(layout, NetworkModel(overhead_s=1.0))
    # Along a ring each message waits for the one before: there are few at each rank, but 30 one after the other.
    assert costly_messages.select(1 << 14) == build("dissemination", layout)
    assert costly_messages.select(1 << 16).name == "halving_doubling"
    assert auto(layout).select(1 << 26).name in {"ring", "clique", "halving_doubling"}
    free_messages = auto(layout, NetworkModel(overhead_s=0.0))
    assert free_messages.select(1 << 14) == build("clique", layout)


@pytest.mark.parametrize("num_cpus", [0, 2, 64])
@pytest.mark.parametrize("size", [2, 4, 16])
def test_on_one_host_all_sizes_are_direct(size: int, num_cpus: int) -> None:
    """So that they use slots where memory is shared."""
    layout = Layout.even(size, num_cpus=num_cpus)
    assert {strategy.name for _, strategy in auto(layout).rules} == {"direct"}


def test_long_direct_messages_go_along_chains_and_stars() -> None:
    for layout in (Layout.even(1), Layout.even(5), Layout.even(6, 3)):
        short, long = (build("direct", layout).select(nbytes) for nbytes in (DIRECT_NBYTES, DIRECT_NBYTES + 1))
        assert short.goes_whole
        assert not long.goes_whole
        assert long.pairs == long.pairs_of_direct == build("chain_star", layout).select(0).pairs
        assert short.pairs_of_direct == short.pairs[:1]
        assert measure(long, layout) == measure(by_name("chain_star").build(layout), layout)
        assert len({short.digest, long.digest, replace(short, for_long=None).digest}) == 3


def test_a_message_left_whole_costs_what_its_pair_does() -> None:
    for layout in (Layout.even(5), Layout.even(6, 2), Layout.even(7, 3, num_cpus=2)):
        star, clique = build("star", layout).select(0), build("clique", layout).select(0)
        whole = replace(clique, is_whole=True)
        alone = [Strategy("one", (pair,)) for pair in clique.pairs]
        assert measure(whole, layout).bytes == max(measure(one, layout).bytes for one in alone) == layout.size - 1
        for nbytes in (64, 1 << 24):
            worst = max(predict_seconds(one, layout, nbytes) for one in alone)
            assert predict_seconds(whole, layout, nbytes) >= worst >= predict_seconds(star, layout, nbytes)
        assert whole.digest != clique.digest


def test_with_few_processors_the_whole_work_of_a_host_counts() -> None:
    clique = build("clique", Layout.even(4))
    # 48 messages, 12 folds and 28 copies of 4 bytes among 2 processors; see the test above for one rank's.
    crowded = 2 + (48 * 0.25 + 12 * 4 * 0.125 + 28 * 4 * 0.5) / 2
    assert predict_seconds(clique, Layout.even(4, num_cpus=2), 16, EXACT) == crowded
    assert predict_seconds(clique, Layout.even(4, num_cpus=64), 16, EXACT) == predict_seconds(
        clique, Layout.even(4), 16, EXACT
    )


def test_auto_takes_fewer_messages_where_processors_are_few() -> None:
    for nbytes in (1 << 14, 1 << 15):
        layouts = [Layout.even(8, 2, num_cpus=cpus) for cpus in (0, 4, 1)]
        enough, one_each, few = (simulate(auto(layout), layout, nbytes).messages for layout in layouts)
        assert few < enough == one_each


def test_auto_makes_no_pair_for_each_of_many_ranks() -> None:
    many = auto(Layout.even(129, 3))
    assert max(len(strategy.pairs) for _, strategy in many.rules) <= 3
    assert auto(Layout.even(129, 3)).digest == many.digest
    assert max(len(strategy.pairs) for _, strategy in auto(Layout.even(128)).rules) == 128


@settings(deadline=None, max_examples=40)
@given(st.integers(2, 80), st.sampled_from([0, 1, 4]))
def test_steps_among_hosts_that_are_alike_cost_what_each_message_does(size: int, cpus: int) -> None:
    """Prices of one place are those of all: with rates that are all the same, every message is looked at."""
    layout = Layout.even(size, size, cpus)
    network = NetworkModel()
    rate, row = 1 / network.cross_beta_s_per_byte, (network.cross_alpha_s,) * size
    ports = (rate,) * size
    each = replace(network, rates=Rates(ports, ports, (ports,) * size, (row,) * size))
    for name in ("halving_doubling", "dissemination"):
        strategy = build(name, layout).select(64)
        alike, one_by_one = StepCosts(strategy, layout, network), StepCosts(strategy, layout, each)
        for nbytes in (1, 1 << 12, 1 << 24):
            assert alike.seconds(nbytes) == pytest.approx(one_by_one.seconds(nbytes))


def test_auto_among_many_ranks_builds_shared_graphs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chain and a star for each rank, two binomial trees, and one tree for each host, beside some single ones."""
    built = 0
    check = Graph.__post_init__

    def counted(graph: Graph) -> None:
        nonlocal built
        built += 1
        check(graph)

    monkeypatch.setattr(Graph, "__post_init__", counted)
    auto(Layout.even(64, 64))
    assert built <= 6 * 64 + 20
