"""Path of one chunk along a graph pair: when the last rank has the result, if nothing else is under way.

Levels of a graph follow each other. Chunks that meet at a port, of a rank inside its host or of a host towards others,
share it fairly, as in the simulator: chunks that begin together arrive together. At a rank they are then folded one
after the other. Source of the port's model: L. Kleinrock, "Queueing systems" II (1976), for processor sharing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from operator import add
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

    def step(self, ends: Sequence[Edge]) -> StepForm:
        """Messages along these edges at the same time, and the ports where they meet."""
        alone, meeting = [0.0] * len(ends), dict[tuple[int, int], tuple[float, list[int]]]()
        for place, edge in enumerate(ends):
            for port, byte_s in self.ports(edge):
                there = meeting.get(port)
                if there is None:
                    meeting[port] = byte_s, [place]
                else:
                    there[1].append(place)
        shared = []
        for byte_s, places in meeting.values():
            if len(places) > 1:
                shared.append((byte_s, places))
            else:
                alone[places[0]] = max(alone[places[0]], byte_s)
        return StepForm(ends, [self.alpha_s(edge) for edge in ends], alone, shared)


class StepForm(NamedTuple):
    """Messages at the same time, in the form that is the same for any size."""

    ends: Sequence[Edge]
    alphas: list[float]
    alone: list[float]  # seconds for each byte of the slowest port that a message has to itself
    shared: list[tuple[float, list[int]]]  # of each port where several meet, seconds for each byte, and the messages

    def arrivals(self, starts: Sequence[float], nbytes: int) -> list[float]:
        """Return the time at which each message of ``nbytes`` bytes arrives, given the times at which they leave."""
        if not nbytes:
            return list(map(add, starts, self.alphas))
        passed = [start_s + byte_s * nbytes for start_s, byte_s in zip(starts, self.alone, strict=True)]
        for byte_s, places in self.shared:
            begun = [starts[place] for place in places]
            if min(begun) == max(begun):  # fair shares of equal messages: all end together
                end_s = begun[0] + len(places) * (byte_s * nbytes)
                for place in places:
                    passed[place] = max(passed[place], end_s)
            else:
                for place, end_s in _shared(sorted(zip(begun, places, strict=True)), byte_s * nbytes):
                    passed[place] = max(passed[place], end_s)
        return list(map(add, passed, self.alphas))


def _shared(starts: Sequence[tuple[float, int]], alone_s: float) -> list[tuple[int, float]]:
    """``(place, end)`` of equal messages that share a port from their ``(start, place)`` on."""
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
        up = [edges.step([(child, parent) for parent, child in level]) for level in _levels(pair.reduce)]
        down = [edges.step(level) for level in _levels(pair.broadcast)]
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


def _up_s(pair: GraphPair, steps: Sequence[StepForm], edges: Edges, nbytes: int) -> float:
    """Moment at which the root has folded a chunk of all ranks."""
    ready = [0.0] * pair.size
    overhead_s, work_s = edges.overhead_s, edges.overhead_s + edges.fold_s * nbytes
    for step in reversed(steps):
        arrived = step.arrivals([ready[child] + overhead_s for child, _ in step.ends], nbytes)
        for arrived_s, (_, parent) in sorted(zip(arrived, step.ends, strict=True)):
            ready[parent] = max(ready[parent], arrived_s) + work_s
    return ready[pair.root]


def _down_s(pair: GraphPair, steps: Sequence[StepForm], edges: Edges, nbytes: int, start_s: float) -> float:
    """Moment at which the last rank has a chunk of the result, which the root has at ``start_s``."""
    ready = [start_s] * pair.size
    children, overhead_s = pair.broadcast.children, edges.overhead_s
    for step in steps:
        # What a chunk makes a rank send leaves when all of its work is done.
        starts = [ready[parent] + len(children[parent]) * overhead_s for parent, _ in step.ends]
        for arrived_s, (_, child) in zip(step.arrivals(starts, nbytes), step.ends, strict=True):
            ready[child] = arrived_s + overhead_s
    return max(ready)
