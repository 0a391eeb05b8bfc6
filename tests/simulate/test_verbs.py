"""All verbs, and ranks that post late."""

import pytest

from kfcomm.errors import ConfigError
from kfcomm.simulate import Host, Local, SimulatedNetwork, late, simulate
from kfcomm.types import Layout

RATE = 2.0**30
NBYTES = 1 << 20
FREE = Local(bandwidth=RATE, latency_s=0.0, overhead_s=0.0, fold=float("inf"))


def on(hosts, latency_s=0.0):
    return SimulatedNetwork(default=Host("", RATE, latency_s), local=FREE).of_hosts(hosts)


def seconds(verb, strategy="star", hosts=4, nbytes=NBYTES, **options):
    return simulate(strategy, Layout.even(hosts, hosts), nbytes, on(hosts), verb=verb, **options).seconds


@pytest.mark.parametrize(
    ("verb", "parts"),
    [
        ("reduce", 3),  # of the message: what goes through the root's port
        ("broadcast", 3),
        ("all_gather", 3),
        ("gather", 3),
        ("reduce_scatter", 3 / 4),
        ("all_to_all", 3 / 4),
        ("all_reduce", 3),  # chunks go up and down at once
    ],
)
def test_the_busiest_port_is_as_busy_as_the_verb_says(verb, parts):
    strategy = "clique" if verb in ("reduce_scatter", "all_gather") else "star"
    found = seconds(verb, strategy)
    assert found == pytest.approx(parts * NBYTES / RATE, rel=0.7)
    assert found >= parts * NBYTES / RATE * (1 - 1e-9)


def test_a_broadcast_has_a_root():
    slow = SimulatedNetwork(
        hosts=(Host("h0", RATE, 0.0), Host("h1", RATE, 0.0), Host("slow", RATE / 8, 0.0)), local=FREE
    )
    times = [simulate("star", Layout.even(3, 3), NBYTES, slow, verb="broadcast", root=root).seconds for root in (0, 2)]
    assert times[0] == pytest.approx(8 * NBYTES / RATE)
    assert times[1] > times[0]


def test_a_late_rank_delays_all_of_an_all_reduce():
    early = simulate("ring", Layout.even(4, 4), NBYTES, on(4))
    delayed = simulate("ring", Layout.even(4, 4), NBYTES, on(4), starts_s=(0, 0, 5.0, 0))
    assert min(delayed.rank_seconds) > 5.0
    assert 5.0 + early.seconds / 2 < delayed.seconds <= 5.0 + early.seconds * (1 + 1e-9)


def test_a_late_leaf_of_a_broadcast_is_done_later_than_others_with_its_part():
    found = simulate("star", Layout.even(3, 3), NBYTES, on(3), verb="all_gather", starts_s=(0, 0, 2.0))
    assert found.rank_seconds[0] >= 2.0


def test_starts_are_drawn_from_a_seed():
    first = late(1000, 1e-3, seed=1)
    assert first == late(1000, 1e-3, seed=1) != late(1000, 1e-3, seed=2)
    assert min(first) == 0.0
    assert sum(first) / 1000 == pytest.approx(1e-3, rel=0.15)
    assert late(3, 0.0) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"verb": "all_reduec"}, "verb 'all_reduec' is not simulated; these are: all_reduce, reduce"),
        ({"verb": "broadcast", "root": 4}, "root 4 is outside 0..3"),
        ({"starts_s": (0.0,)}, "starts_s: expected 4 finite numbers"),
        ({"starts_s": (0.0, -1.0, 0.0, 0.0)}, "starts_s: expected 4 finite numbers"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(ConfigError, match=message):
        simulate("star", Layout.even(4, 4), NBYTES, **options)


def test_a_negative_mean():
    with pytest.raises(ConfigError, match="late by -1"):
        late(4, -1)
