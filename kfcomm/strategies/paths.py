"""Path of one chunk along a graph pair: when the last rank has the result, if nothing else is under way.

Levels of a graph follow each other. Chunks that meet at a port, of a rank inside its host or of a host towards others,
share it fairly, as in the simulator: chunks that begin together arrive together. At a rank they are then folded one
after the other. Source of the port's model: L. Kleinrock, "Queueing systems" II (1976), for processor sharing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, Self

from kfcomm.core.graph import Graph, GraphPair
from kfcomm.strategies.network import NetworkModel
from kfcomm.types import Layout, Rates

_SIZES: Final = (0, 1 << 14, 1 << 19)
"""Bytes of a chunk at which paths are walked; in between they are taken as straight."""

Edge = tuple[int, int]
"""From rank to rank."""
Ports = tuple[tuple[tuple[int, int], float], ...]
"""Ports that a message passes, each with the seconds that one byte alone takes there."""


class Edges(NamedTuple):
    """Cost of messages between ranks."""

    alpha_s: Callable[[Edge], float]  # latency of a message
    ports: Callable[[Edge], Ports]
    overhead_s: float  # work of each message, at both ends
    fold_s: float  # work for each byte that is folded

    @classmethod
    def of(cls, layout: Layout, network: NetworkModel) -> Self:
        """Return the costs on a network; ``layout`` places the ranks on its hosts."""
        hosts, rates = layout.hosts, network.rates
        local_s, cross_s = network.local_beta_s_per_byte, network.cross_beta_s_per_byte
        latencies = rates.latency_s if rates is not None else ()
        size, racks = layout.size, rates.rack_of if rates is not None else ()

        def alpha_s(edge: Edge) -> float:
            here, there = hosts[edge[0]], hosts[edge[1]]
            if here == there:
                return network.local_alpha_s
            return latencies[here][there] if latencies else network.cross_alpha_s

        def ports(edge: Edge) -> Ports:
            here, there = hosts[edge[0]], hosts[edge[1]]
            if here == there:
                return ((0, edge[0]), local_s), ((1, edge[1]), local_s)
            if rates is None:
                return ((2, here), cross_s), ((3, there), cross_s)
            link = 6 + here, size + there
            between = uplink_ports(rates, racks[here], racks[there])
            return (
                ((2, here), 1 / rates.send[here]), ((3, there), 1 / rates.receive[there]),
                (link, 1 / rates.links[here][there]), *between,
            )  # fmt: skip

        return cls(alpha_s, ports, network.overhead_s, network.gamma_s_per_byte)

    def arrivals(self, sends: Sequence[tuple[Edge, float]], nbytes: int) -> list[float]:
        """Return the time at which each message of ``nbytes`` bytes arrives, given the times at which they leave."""
        if not nbytes:
            return [start_s + self.alpha_s(edge) for edge, start_s in sends]
        meeting: dict[tuple[int, int], tuple[float, list[tuple[float, int]]]] = {}
        for place, (edge, start_s) in enumerate(sends):
            for port, byte_s in self.ports(edge):
                meeting.setdefault(port, (byte_s, []))[1].append((start_s, place))
        passed = [start_s for _, start_s in sends]
        for byte_s, there in meeting.values():
            for place, end_s in _shared(sorted(there), byte_s * nbytes):
                passed[place] = max(passed[place], end_s)
        return [end_s + self.alpha_s(edge) for (edge, _), end_s in zip(sends, passed, strict=True)]


def _shared(starts: Sequence[tuple[float, int]], alone_s: float) -> list[tuple[int, float]]:
    """``(place, end)`` of equal messages that share a port from their ``(start, place)`` on."""
    if len(starts) == 1 or not alone_s:
        return [(place, start_s + alone_s) for start_s, place in starts]
    ends: list[tuple[int, float]] = []
    under_way: deque[tuple[float, int]] = deque()  # how much each will have been given at its end
    now_s = given = 0.0
    for start_s, place in (*starts, (float("inf"), -1)):
        while under_way:
            end, first = under_way[0]
            end_s = now_s + (end - given) * len(under_way) * alone_s
            if end_s > start_s:
                given += (start_s - now_s) / (len(under_way) * alone_s)
                break
            under_way.popleft()
            ends.append((first, end_s))
            now_s, given = end_s, end
        now_s = start_s
        under_way.append((given + 1, place))
    return ends


def uplink_ports(rates: Rates, here: int | None, there: int | None) -> Ports:
    """Uplinks that a message from one rack to another passes; None for a host without a rack."""
    if here == there:
        return ()
    up = () if here is None else (((4, here), 1 / rates.uplinks[here].send),)
    down = () if there is None else (((5, there), 1 / rates.uplinks[there].receive),)
    return (*up, *down)


class Path(NamedTuple):
    """Seconds that chunks take along the longest way, by their size."""

    at_sizes: tuple[float, ...]

    @classmethod
    def of(cls, pair: GraphPair, edges: Edges) -> Self:
        """Walk both graphs for each of three sizes: O(ranks · log ranks)."""
        up, down = _levels(pair.reduce), _levels(pair.broadcast)
        return cls(tuple(_down_s(pair, down, edges, n, _up_s(pair, up, edges, n)) for n in _SIZES))

    @classmethod
    def longest(cls, paths: Sequence[Path]) -> Path:
        """At each size the longest of several."""
        return cls(tuple(map(max, zip(*(path.at_sizes for path in paths), strict=True))))

    def seconds(self, nbytes: float) -> float:
        """For a chunk of this many bytes."""
        none_s, few_s, many_s = self.at_sizes
        low, high = _SIZES[1:]
        if nbytes <= low:
            return none_s + (few_s - none_s) * nbytes / low
        return few_s + (many_s - few_s) * (nbytes - low) / (high - low)


def _levels(graph: Graph) -> list[list[Edge]]:
    """The ``(parent, child)`` edges by the depth of the child, the root's first."""
    levels: list[list[Edge]] = []
    ranks = [graph.root]
    while ranks := [rank for rank in ranks if graph.children[rank]]:
        levels.append([(rank, child) for rank in ranks for child in graph.children[rank]])
        ranks = [child for _, child in levels[-1]]
    return levels


def _up_s(pair: GraphPair, levels: Sequence[Sequence[Edge]], edges: Edges, nbytes: int) -> float:
    """Moment at which the root has folded a chunk of all ranks."""
    ready = [0.0] * pair.size
    work_s = edges.overhead_s + edges.fold_s * nbytes
    for level in reversed(levels):
        sends = [((child, parent), ready[child] + edges.overhead_s) for parent, child in level]
        for arrived_s, ((_, parent), _) in sorted(zip(edges.arrivals(sends, nbytes), sends, strict=True)):
            ready[parent] = max(ready[parent], arrived_s) + work_s
    return ready[pair.root]


def _down_s(
    pair: GraphPair, levels: Sequence[Sequence[Edge]], edges: Edges, nbytes: int, start_s: float
) -> float:  # fmt: skip
    """Moment at which the last rank has a chunk of the result, which the root has at ``start_s``."""
    ready = [start_s] * pair.size
    children, overhead_s = pair.broadcast.children, edges.overhead_s
    for level in levels:
        # What a chunk makes a rank send leaves when all of its work is done.
        sends = [((parent, child), ready[parent] + len(children[parent]) * overhead_s) for parent, child in level]
        for arrived_s, ((_, child), _) in zip(edges.arrivals(sends, nbytes), sends, strict=True):
            ready[child] = arrived_s + overhead_s
    return max(ready)
