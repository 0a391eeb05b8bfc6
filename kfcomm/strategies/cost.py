"""Cost of a strategy: counted on its graphs, and predicted in seconds.

Two measures. `Cost` is exact and free of hardware: steps and bytes of one all_reduce whose message is shared
out among the pairs. `predict_seconds` turns counts into time with a `NetworkModel`, which ``auto`` compares.
Both look at graphs and layouts only, not at links, clocks, or how a message is really cut.

The time model is that of `price`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, replace
from fractions import Fraction

from kfcomm.strategies.base import AnyStrategy, Strategy
from kfcomm.strategies.matrices import Matrix, checked_bandwidth, checked_latency, rates_of
from kfcomm.strategies.moves import goes_in_steps, moves_of, num_parts, num_steps
from kfcomm.strategies.network import NetworkModel
from kfcomm.strategies.price import Market, sends
from kfcomm.strategies.profile import shares_of
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
    if goes_in_steps(strategy):
        steps, parts = num_steps(strategy), num_parts(strategy)
        moves = [(move.source, move.target, move.parts) for move in moves_of(strategy)]
    else:
        shares, whole = shares_of(strategy), strategy.goes_whole
        steps = max(pair.reduce.depth + (0 if whole else pair.broadcast.depth) for pair in strategy.pairs)
        parts = 1 if whole else sum(shares)
        moves = list(sends(strategy.pairs, shares, goes_whole=whole))
    between = [(hosts[a], hosts[b], number) for a, b, number in moves if hosts[a] != hosts[b]]
    return Cost(
        steps=steps,
        bytes=Fraction(_busiest(strategy.size, moves), parts),
        cross_host_bytes=Fraction(_busiest(max(hosts) + 1, between), parts),
    )


def predict_seconds(strategy: AnyStrategy, layout: Layout, nbytes: int, network: NetworkModel | None = None) -> float:
    """How long an all_reduce of ``nbytes`` bytes should take by the model; ``network`` defaults to the layout's.

    An estimate for comparing strategies with each other, not a promise of a time.

    Raises:
        ConfigError: the network has rates of another number of hosts than the layout has.
    """
    return Market(layout, network or NetworkModel.of(layout.costs)).seconds(strategy.select(nbytes), nbytes)


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


def _alone(strategy: Strategy) -> list[Strategy]:
    """Each pair as a strategy of its own."""
    return [Strategy(strategy.name, (pair,)) for pair in strategy.pairs]


def _ports(size: int, sends: Iterable[tuple[int, int, int]]) -> tuple[list[int], list[int]]:
    """How much each of ``size`` places sends, and how much it receives."""
    out, into = [0] * size, [0] * size
    for a, b, parts in sends:
        out[a] += parts
        into[b] += parts
    return out, into


def _busiest(size: int, sends: Iterable[tuple[int, int, int]]) -> int:
    return max(map(max, _ports(size, sends)))
