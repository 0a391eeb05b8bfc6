"""Clustering of ranks into hosts by measured matrices.

Ranks are joined, nearest first, as long as the next nearest are not much farther (single linkage, cut at the widest
gap). The distance of two ranks is their latency, divided by what part of their ports the link between them can fill: so
that a host with a slow port is not taken for a far one: all its links are as slow as the port. (Hence a host of one
rank differs from others by latency alone.)

Source: P. Sneath, "The application of computers to taxonomy" (1957), for single linkage.
"""

from __future__ import annotations

from typing import Final

from kfcomm.errors import ConfigError
from kfcomm.strategies.matrices import Matrix, Rates, checked_bandwidth, checked_latency
from kfcomm.types import Layout

_GAP: Final = 2.5
"""Neighbouring distances that differ by this factor are of two kinds; noise of one kind differs by less."""
_LEAST_S: Final = 1e-7
"""Latencies below are all alike."""


def hosts_of(latency_s: Matrix, bandwidth: Matrix) -> Layout:
    """The hosts (or racks) that measured distances show, as a layout for strategies that look at hosts.

    Where no two kinds of distance can be told apart, every rank is a host by itself. Two ranks alone are, too: there is
    nothing to compare their one distance with.

    Args:
        latency_s: seconds from rank (row) to rank (column).
        bandwidth: bytes/s from rank (row) to rank (column).

    Raises:
        ConfigError: a matrix is not square, they are of different sizes, or an entry is not a latency or bandwidth.
    """
    latencies = checked_latency(latency_s)
    size = len(latencies)
    rates = Rates.of(Layout.even(size, size), _of_size(bandwidth, size))

    def distance(a: int, b: int) -> float:
        """Of one direction."""
        return max(latencies[a][b], _LEAST_S) * min(rates.send[a], rates.receive[b]) / rates.links[a][b]

    pairs = sorted((max(distance(a, b), distance(b, a)), a, b) for b in range(size) for a in range(b))
    joins = _joins(size, pairs)
    gaps = [after[0] / before[0] for before, after in zip(joins, joins[1:], strict=False)]
    if not gaps or max(gaps) < _GAP:
        return Layout.even(size, size)
    near = joins[: gaps.index(max(gaps)) + 1]
    groups = list(range(size))
    for _, a, b in near:
        old, new = groups[b], groups[a]
        groups = [new if group == old else group for group in groups]
    return Layout.of(groups)


def _of_size(bandwidth: Matrix, size: int) -> Matrix:
    rows = checked_bandwidth(bandwidth)
    if len(rows) != size:
        raise ConfigError(f"latency is of {size} ranks, bandwidth of {len(rows)}")
    return rows


def _joins(size: int, pairs: list[tuple[float, int, int]]) -> list[tuple[float, int, int]]:
    """The pairs that join separate groups, nearest first: the edges of a minimum spanning tree."""
    groups = list(range(size))
    joins = []
    for distance, a, b in pairs:
        old, new = groups[b], groups[a]
        if old != new:
            groups = [new if group == old else group for group in groups]
            joins.append((distance, a, b))
    return joins
