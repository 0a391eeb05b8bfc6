"""Cost of a strategy: counted on its graphs, and predicted in seconds.

Two measures. `Cost` is exact and free of hardware: steps and bytes of one all_reduce whose message is shared
out among the pairs. `predict_seconds` turns counts into time with a `NetworkModel`, which ``auto`` compares.
Both look at graphs and layouts only, not at links, clocks, or how a message is really cut.

The time model is that of `auto`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from fractions import Fraction

from kfcomm.core.graph import GraphPair
from kfcomm.errors import ConfigError
from kfcomm.strategies.auto import Profile, shares_of
from kfcomm.strategies.base import AnyStrategy, Strategy
from kfcomm.strategies.matrices import Matrix, checked_bandwidth, checked_latency, rates_of
from kfcomm.strategies.network import NetworkModel
from kfcomm.types import Costs, Layout, Rates

__all__ = ["Cost", "NetworkModel", "costs_of", "measure", "network_of", "predict_seconds"]

_LEAST_ALPHA = 0.1
"""Of a latency, however much work was measured."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Steps and bytes of one unpipelined all_reduce.

    Attributes:
        steps: edges on the longest chain of sends that wait for each other.
        bytes: what the busiest rank sends or receives (the greater), per byte of message.
        cross_host_bytes: what the busiest host sends to or receives from other hosts, per byte of message.
    """

    steps: int
    bytes: Fraction
    cross_host_bytes: Fraction = Fraction(0)


def measure(strategy: Strategy, layout: Layout | None = None) -> Cost:
    """Count the cost of a strategy on its graphs; without a layout all ranks are on one host."""
    if strategy.is_whole:
        costs = [measure(alone, layout) for alone in _alone(strategy)]
        return Cost(*(max(values) for values in zip(*map(astuple, costs), strict=True)))
    hosts = layout.hosts if layout is not None else (0,) * strategy.size
    shares = shares_of(strategy)
    sends = list(_sends(strategy.pairs, shares, goes_whole=strategy.goes_whole))
    num_parts = 1 if strategy.goes_whole else sum(shares)
    between = [(hosts[a], hosts[b], parts) for a, b, parts in sends if hosts[a] != hosts[b]]
    return Cost(
        steps=max(pair.reduce.depth + (0 if strategy.goes_whole else pair.broadcast.depth) for pair in strategy.pairs),
        bytes=Fraction(_busiest(strategy.size, sends), num_parts),
        cross_host_bytes=Fraction(_busiest(max(hosts) + 1, between), num_parts),
    )


def predict_seconds(strategy: AnyStrategy, layout: Layout, nbytes: int, network: NetworkModel | None = None) -> float:
    """How long an all_reduce of ``nbytes`` bytes should take by the model; ``network`` defaults to the layout's.

    An estimate for comparing strategies with each other, not a promise of a time.

    Raises:
        ConfigError: the network has rates of another number of hosts than the layout has.
    """
    network = network or NetworkModel.of(layout.costs)
    chosen = strategy.select(nbytes)
    if network.rates is None:
        return Profile.of(chosen, layout).seconds(nbytes, network)
    if len(network.rates.send) != layout.num_hosts:
        raise ConfigError(f"the network has {len(network.rates.send)} hosts, the layout {layout.num_hosts}")
    ways = _alone(chosen) if chosen.is_whole else [chosen]
    return max(_seconds_by_rates(way, layout, nbytes, network, network.rates) for way in ways)


def network_of(
    layout: Layout, latency_s: Matrix, bandwidth: Matrix, overhead_s: Matrix | None = None,
    fold_s_per_byte: Sequence[float] | None = None,
) -> NetworkModel:  # fmt: skip
    """The constants of the time model as they were measured; those that were not are the defaults.

    Args:
        layout: where the ranks are.
        latency_s: seconds from rank (row) to rank (column).
        bandwidth: bytes/s from rank (row) to rank (column).
        overhead_s: seconds of work for each message from rank (row) to rank (column).
        fold_s_per_byte: seconds of work for each byte that is folded, by rank.

    Raises:
        ConfigError: a matrix is not square or of another size than the layout, or an entry is out of range.
    """
    costs = costs_of(layout, latency_s, bandwidth, overhead_s, fold_s_per_byte)
    return replace(NetworkModel.of(costs), rates=host_rates(layout, latency_s, bandwidth, overhead_s))


def host_rates(layout: Layout, latency_s: Matrix, bandwidth: Matrix, overhead_s: Matrix | None = None) -> Rates:
    """Rates between hosts, arguments as in `network_of`; work is subtracted from latency."""
    return rates_of(layout, bandwidth, _without_work(layout, latency_s, overhead_s))


def costs_of(
    layout: Layout, latency_s: Matrix, bandwidth: Matrix, overhead_s: Matrix | None = None,
    fold_s_per_byte: Sequence[float] | None = None,
) -> Costs:  # fmt: skip
    """Medians of the measured values, arguments as in `network_of`; work is subtracted from latency."""
    latencies, rates = _without_work(layout, latency_s, overhead_s), checked_bandwidth(bandwidth, layout.size)
    works = None if overhead_s is None else checked_latency(overhead_s, layout.size)
    pairs = [(a, b) for a in range(layout.size) for b in range(layout.size) if a != b]
    local = [(a, b) for a, b in pairs if layout.hosts[a] == layout.hosts[b]]
    cross = [(a, b) for a, b in pairs if layout.hosts[a] != layout.hosts[b]]
    return Costs(
        local_alpha_s=_median(latencies[a][b] for a, b in local),
        local_beta_s_per_byte=_median(1 / rates[a][b] for a, b in local),
        cross_alpha_s=_median(latencies[a][b] for a, b in cross),
        cross_beta_s_per_byte=_median(1 / rates[a][b] for a, b in cross),
        overhead_s=None if works is None else _median(works[a][b] for a, b in cross or local),
        gamma_s_per_byte=None if fold_s_per_byte is None else _median(fold_s_per_byte),
    )


def _without_work(layout: Layout, latency_s: Matrix, overhead_s: Matrix | None) -> list[list[float]]:
    """Latencies without the work of a message, which the model counts by itself."""
    latencies = checked_latency(latency_s, layout.size)
    if overhead_s is None:
        return latencies
    works = checked_latency(overhead_s, layout.size)
    return [
        [max(seconds - work, seconds * _LEAST_ALPHA) for seconds, work in zip(row, worked, strict=True)]
        for row, worked in zip(latencies, works, strict=True)
    ]


def _median(values: Iterable[float]) -> float | None:
    """The upper median; None of nothing."""
    ranked = sorted(values)
    return ranked[len(ranked) // 2] if ranked else None


def _seconds_by_rates(strategy: Strategy, layout: Layout, nbytes: int, network: NetworkModel, rates: Rates) -> float:
    """The time model where hosts are unlike, of a strategy that shares messages out."""
    profile, hosts, shares = Profile.of(strategy, layout), layout.hosts, shares_of(strategy)
    part = nbytes / profile.num_parts
    chunk = min(part * profile.largest, network.chunk_nbytes)

    def alpha(a: int, b: int) -> float:
        here, there = hosts[a], hosts[b]
        if here == there:
            return network.local_alpha_s
        return rates.latency_s[here][there] if rates.latency_s else network.cross_alpha_s

    def beta(a: int, b: int) -> float:
        here, there = hosts[a], hosts[b]
        if here == there:
            return network.local_beta_s_per_byte
        return 1 / min(rates.send[here], rates.receive[there], rates.links[here][there])

    moved: dict[tuple[int, int], int] = {}
    for a, b, parts in _sends(strategy.pairs, shares):
        if hosts[a] != hosts[b]:
            moved[hosts[a], hosts[b]] = moved.get((hosts[a], hosts[b]), 0) + parts
    cross = [parts / rates.links[a][b] for (a, b), parts in moved.items()]
    for host in range(layout.num_hosts):
        cross.append(sum(parts for (a, _), parts in moved.items() if a == host) / rates.send[host])
        cross.append(sum(parts for (_, b), parts in moved.items() if b == host) / rates.receive[host])
    latency = max(_longest_way(pair, alpha) for pair in strategy.pairs)
    chain = chunk * max(_longest_way(pair, beta) for pair in strategy.pairs)
    return profile.sum_up(nbytes, network, latency, chain, part * max(cross))


def _longest_way(pair: GraphPair, hop: Callable[[int, int], float]) -> float:
    """From a leaf to the root and on to a leaf, if the way from ``a`` to ``b`` takes ``hop(a, b)``."""
    up, down = [0.0] * pair.size, [0.0] * pair.size
    for above, below in pair.reduce.edges:
        up[below] = up[above] + hop(below, above)
    for above, below in pair.broadcast.edges:
        down[below] = down[above] + hop(above, below)
    return max(up) + max(down)


def _alone(strategy: Strategy) -> list[Strategy]:
    """Each pair as a strategy of its own."""
    return [Strategy(strategy.name, (pair,)) for pair in strategy.pairs]


def _sends(
    pairs: Sequence[GraphPair], shares: Sequence[int], *, goes_whole: bool = False
) -> Iterator[tuple[int, int, int]]:
    """``(from, to, parts)`` of everything that moves in an all_reduce."""
    for pair, parts in zip(pairs, shares, strict=True):
        yield from ((child, parent, parts) for parent, child in pair.reduce.edges)
        if not goes_whole:
            yield from ((parent, child, parts) for parent, child in pair.broadcast.edges)


def _ports(size: int, sends: Iterable[tuple[int, int, int]]) -> tuple[list[int], list[int]]:
    """How much each of ``size`` places sends, and how much it receives."""
    out, into = [0] * size, [0] * size
    for a, b, parts in sends:
        out[a] += parts
        into[b] += parts
    return out, into


def _busiest(size: int, sends: Iterable[tuple[int, int, int]]) -> int:
    return max(map(max, _ports(size, sends)))
