"""Measured matrices: checks, and the rates of ports and links.

A matrix comes from a measurement or from a user. It is a sequence of rows; entry ``[a][b]`` is about the way from rank
``a`` to rank ``b``, and the diagonal does not matter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

from kfcomm.errors import ConfigError
from kfcomm.types import Layout, Rates

Matrix: TypeAlias = Sequence[Sequence[float]]


def checked_latency(latency_s: Matrix, size: int | None = None) -> list[list[float]]:
    """Latencies in seconds, with a diagonal of 0.

    Raises:
        ConfigError: the matrix is not square (of ``size`` rows), or an entry is not a finite number from 0 on.
    """
    rows = _square("latency", latency_s, size)
    for a, row in enumerate(rows):
        row[a] = 0.0
        for b, seconds in enumerate(row):
            if not 0 <= seconds < math.inf:
                raise ConfigError(
                    f"latency[{a}][{b}] is {seconds}: a latency is a finite number of seconds, at least 0"
                )
    return rows


def checked_bandwidth(bandwidth: Matrix, size: int | None = None) -> list[list[float]]:
    """Bandwidths in bytes per second, with a diagonal of infinity.

    Raises:
        ConfigError: the matrix is not square (of ``size`` rows), or a rate off the diagonal is not above 0 and finite.
    """
    rows = _square("bandwidth", bandwidth, size)
    for a, row in enumerate(rows):
        row[a] = math.inf
        for b, rate in enumerate(row):
            if a != b and not 0 < rate < math.inf:
                raise ConfigError(f"bandwidth[{a}][{b}] is {rate}: a bandwidth is a finite number of bytes/s above 0")
    return rows


def _square(what: str, matrix: Matrix, size: int | None) -> list[list[float]]:
    try:
        rows = [[float(entry) for entry in row] for row in matrix]
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{what} is a matrix of numbers, one row for each rank: {error}") from error
    if not rows:
        raise ConfigError(f"{what} is a matrix with one row for each rank, not an empty one")
    for rank, row in enumerate(rows):
        if len(row) != len(rows):
            raise ConfigError(
                f"{what} is a square matrix, but has {len(rows)} rows, and row {rank} has {len(row)} entries"
            )
    if size is not None and len(rows) != size:
        raise ConfigError(f"{what} is of {len(rows)} ranks, the layout of {size}")
    return rows


def rates_of(layout: Layout, bandwidth: Matrix, latency_s: Matrix | None = None) -> Rates:
    """Rates of ports and links between hosts, from what was measured between ranks, one pair at a time.

    Raises:
        ConfigError: see `checked_bandwidth` and `checked_latency`; the size must be the layout's.
    """
    rows = checked_bandwidth(bandwidth, layout.size)
    # A link is as fast as the fastest pair of ranks on its two hosts (negated, since the least entry is taken), a
    # port as the fastest of its links: no pair can have gone faster than what it shares with others. A port that is
    # faster than all ports at the other ends of its links goes unnoticed.
    links = _between_hosts(layout, [[-rate for rate in row] for row in rows])
    send = tuple(_fastest(row, host) for host, row in enumerate(links))
    receive = tuple(_fastest(column, host) for host, column in enumerate(zip(*links, strict=True)))
    latencies = () if latency_s is None else _between_hosts(layout, checked_latency(latency_s, layout.size))
    return Rates(send, receive, tuple(tuple(abs(rate) for rate in row) for row in links), latencies)


def _fastest(negative: Sequence[float], host: int) -> float:
    """Of a host's links, whose rates come with their signs turned."""
    return max((-rate for other, rate in enumerate(negative) if other != host), default=math.inf)


def _between_hosts(layout: Layout, rows: list[list[float]]) -> tuple[tuple[float, ...], ...]:
    """The least entry between any two ranks of two hosts; 0 on the diagonal."""
    hosts = layout.num_hosts
    least = [[0.0 if a == b else math.inf for b in range(hosts)] for a in range(hosts)]
    for a, row in enumerate(rows):
        for b, entry in enumerate(row):
            here, there = layout.hosts[a], layout.hosts[b]
            if here != there:
                least[here][there] = min(least[here][there], entry)
    return tuple(map(tuple, least))
