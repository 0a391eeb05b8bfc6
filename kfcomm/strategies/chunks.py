"""Chunk size of a message, from the depth of its graphs, the rates of their edges, and the work of a message.

Chunks follow each other along a graph (pipelining). Large ones pass slowly from the leaves to the root and back,
while ports idle; small ones cost work, since each is a message. For parts of B bytes, one for each of k pairs, chunks
of c bytes take about

    max(latency + c · chain + (B − c) · port, B · ports + c · fill, work) + work / 2
    work = ⌈B / c⌉ · messages · overhead

seconds, where *latency* is that of the furthest leaf to the root and on to a leaf, *chain* the time of one byte on
that way (what several children send to one rank, and what one sends to several, passes one after the other), *port*
that at the busiest rank of one pair, *ports* the sum over all pairs, and *messages* those of the busiest rank. *fill*
is chain − port where first chunks wait at several ranks one after the other (trees), and 0 for stars and chains,
where another pair always has something to send. Half of the work is taken to delay the rest: it is done beside it,
but by a processor that has other things to do. With one pair the best size is about √(B · messages · overhead / (2 ·
(chain − port))), the optimum of pipelining; where many pairs keep all ports busy, as in a ring, the largest is. The
choice is the best power of two.

Results do not depend on it: which pair reduces an element follows from the parts alone.

Where several senders meet at a port, each gets the part of it that its traffic has of the queue, and a rank can pass on
no more than the slowest of its children has sent. So that none is far ahead, a leaf has a *window*: the chunks that it
sends before the first result has come back. It holds twice what is under way while the ports of a pair are full,

    2 · (latency + c · chain + pause) / (c · port)    chunks of c bytes,

for programs that pause that long, and of several stars ports / port times as much, since they take turns. Chains have
none: only one sender comes to each rank.

Sources: S. L. Johnsson and C.-T. Ho, "Optimum broadcasting and personalized communication in hypercubes" (1989);
A. Phanishayee et al., "Measurement and analysis of TCP throughput collapse in cluster-based storage systems" (2008),
for senders that meet.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from operator import mul
from typing import Final, NamedTuple

from kfcomm.core.graph import Graph, GraphPair
from kfcomm.strategies.base import Strategy
from kfcomm.strategies.moves import goes_in_steps
from kfcomm.strategies.network import NetworkModel
from kfcomm.types import Layout

_SLACK: Final = 2
"""Windows hold that many times what is under way, since shares of a port change."""
_PAUSE_S: Final = 2e-3
"""For which a program may pause without idle ports."""
LEAST_CHUNK_NBYTES: Final = 1 << 13
"""Smaller chunks are more work than they save."""

_LEAST_OF_TREES: Final = 1 << 16
"""The same where several trees share the ports: each rank works for all of them. Binomial trees of five hosts of 200
Mbit/s took 0.120 s for 1 MiB with chunks of 16 KiB, and 0.081 s with 128 KiB."""
_FLAT_DEPTH: Final = 3
"""In shared memory, graphs up to this depth have the largest chunks, and all graphs where ranks share processors."""
_FEWEST_SENDERS: Final = 2
_MAX_PAIRS: Final = 8
"""Pairs of a strategy that are looked at; where there are more, they are alike."""


def chunk_nbytes_of(strategy: Strategy, nbytes: int, layout: Layout) -> int:
    """Bytes of a chunk of an all_reduce, reduce or broadcast of ``nbytes`` bytes; the same on all ranks.

    The strategy's own ``chunk_nbytes``, if set. O(ranks); `ChunkSizes` remembers what depends on the strategy alone.
    """
    return ChunkSizes(layout).of(strategy, nbytes)


class Pipeline(NamedTuple):
    """Input of the formula, of one strategy on one layout; by byte: in seconds for each byte of a part."""

    share: float  # of the message: the part of the pair that has most
    latency_s: float  # of the longest way, whatever it carries
    chain: float  # by byte, from the furthest leaf to the root and on to a leaf
    port: float  # by byte, at the busiest rank of one pair
    ports: float  # by byte, at the busiest rank of all pairs together
    messages: float  # that the busiest rank sends and receives, for a chunk on each pair
    fill: float  # by byte of a chunk, in which ports are idle whatever other pairs do
    fan_in: int  # most senders whose chunks meet at a rank

    @classmethod
    def of(cls, strategy: Strategy, cost_of: Callable[[GraphPair], _PairCost]) -> Pipeline:
        """Look at up to `_MAX_PAIRS` of the pairs: O(ranks)."""
        pairs, shares = strategy.pairs, strategy.shares or (1,) * len(strategy.pairs)
        every = -(-len(pairs) // _MAX_PAIRS)
        costs = [cost_of(pair) for pair in pairs[::every]]
        latency_s, chain = max(cost.latency_s for cost in costs), max(cost.chain for cost in costs)
        port = max(max(cost.ports) for cost in costs)
        fan_in = max(cost.fan_in for cost in costs)
        fill = chain - port if fan_in >= _FEWEST_SENDERS and not all(cost.is_flat for cost in costs) else 0.0
        if strategy.is_whole or strategy.goes_whole:
            return cls(1.0, latency_s, chain, port, port, max(max(cost.messages) for cost in costs), fill, fan_in)
        largest = max(shares)
        # Of pairs that are not looked at, the busiest rank has as much as the mean of those that are.
        scales = [share / largest * every for share in shares[::every]]
        ports = _busiest([cost.ports for cost in costs], scales, mean=every > 1)
        messages = _busiest([cost.messages for cost in costs], [every] * len(costs), mean=every > 1)
        return cls(largest / sum(shares), latency_s, chain, port, ports, messages, fill, fan_in)

    def seconds(self, nbytes: int, chunk_nbytes: int, overhead_s: float) -> float:
        """The formula of the module's docstring, for a message of ``nbytes`` bytes."""
        part = nbytes * self.share
        chunk = min(part, chunk_nbytes)
        work_s = -(-part // chunk_nbytes) * self.messages * overhead_s
        chain_s = self.latency_s + chunk * self.chain + (part - chunk) * self.port
        return max(chain_s, part * self.ports + chunk * self.fill, work_s) + work_s / 2

    def window(self, chunk_nbytes: int) -> int:
        """Chunks that a leaf sends before the first result: see the module's docstring; 0 for all."""
        if self.fan_in < _FEWEST_SENDERS or not self.port:
            return 0
        loop_s = self.latency_s + chunk_nbytes * self.chain + _PAUSE_S
        turns = 1.0 if self.fill else self.ports / self.port
        return math.ceil(_SLACK * turns * loop_s / (chunk_nbytes * self.port))


class ChunkSizes:
    """Chunk sizes of one group of ranks.

    Args:
        layout: where they are.
        network: constants of the time model; those of the layout's costs by default.
    """

    __slots__ = ("_costs", "_edges", "_layout", "_network", "_pipelines")

    def __init__(self, layout: Layout, network: NetworkModel | None = None) -> None:
        self._layout = layout
        self._network = network or NetworkModel.of(layout.costs)
        # By identity, since a hash would cost O(pairs x ranks). The strategy is kept, so that its number stays its own.
        self._pipelines: dict[int, tuple[Strategy, Pipeline | None]] = {}
        self._edges = _Edges.of(layout, self._network)
        self._costs: dict[int, tuple[GraphPair, _PairCost]] = {}  # likewise: several strategies may have a pair

    def of(self, strategy: Strategy, nbytes: int) -> int:
        """The chunk size of a message: as `chunk_nbytes_of`."""
        if strategy.chunk_nbytes:
            return strategy.chunk_nbytes
        network, pipeline = self._network, self._pipeline(strategy)
        if pipeline is None or nbytes <= LEAST_CHUNK_NBYTES:
            return network.chunk_nbytes
        best, least_s = network.chunk_nbytes, pipeline.seconds(nbytes, network.chunk_nbytes, network.overhead_s)
        size = network.chunk_nbytes // 2
        while size >= (_LEAST_OF_TREES if pipeline.fill and len(strategy.pairs) > 1 else LEAST_CHUNK_NBYTES):
            seconds = pipeline.seconds(nbytes, size, network.overhead_s)
            if seconds < least_s:
                best, least_s = size, seconds
            size //= 2
        return best

    def window(self, strategy: Strategy, chunk_nbytes: int) -> int:
        """Chunks of an all_reduce that a leaf sends before the first result; 0 for all, and inside one host."""
        pipeline = self._pipeline(strategy) if self._layout.num_hosts > 1 else None
        return 0 if pipeline is None else pipeline.window(chunk_nbytes)

    def _is_flat_here(self, strategy: Strategy) -> bool:
        """Whether chunks on one host wait for processors rather than ports."""
        pair, num_cpus = strategy.pairs[0], self._layout.num_cpus
        is_flat = max(pair.reduce.depth, pair.broadcast.depth) <= _FLAT_DEPTH
        return is_flat or 0 < num_cpus < self._layout.size

    def _pipeline(self, strategy: Strategy) -> Pipeline | None:
        """None where chunks are as large as they may be."""
        known = self._pipelines.get(id(strategy))
        if known is None:
            # Steps of an exchange keep ports busy by themselves.
            is_flat = goes_in_steps(strategy) or (self._layout.num_hosts == 1 and self._is_flat_here(strategy))
            pipeline = None if is_flat else Pipeline.of(strategy, self._cost)
            known = self._pipelines[id(strategy)] = strategy, pipeline
        return known[1]

    def _cost(self, pair: GraphPair) -> _PairCost:
        known = self._costs.get(id(pair))
        if known is None:
            known = self._costs[id(pair)] = pair, _PairCost.of(pair, self._edges)
        return known[1]


class _Edges(NamedTuple):
    """Seconds that edges cost."""

    latency_s: Callable[[int, int], float]  # of a message from one rank to another, work included
    beta: Callable[[int, int], float]  # of a byte from one rank to another
    fold_s: float  # of folding a byte
    is_far: Callable[[int, int], bool]  # whether it is between hosts

    @classmethod
    def of(cls, layout: Layout, network: NetworkModel) -> _Edges:
        hosts, rates, work_s = layout.hosts, network.rates, 2 * network.overhead_s
        local, cross = network.local_alpha_s + work_s, network.cross_alpha_s + work_s
        local_s, cross_s = network.local_beta_s_per_byte, network.cross_beta_s_per_byte

        def latency_s(a: int, b: int) -> float:
            if hosts[a] == hosts[b]:
                return local
            return rates.latency_s[hosts[a]][hosts[b]] + work_s if rates and rates.latency_s else cross

        def beta(a: int, b: int) -> float:
            here, there = hosts[a], hosts[b]
            if here == there:
                return local_s
            if rates is None:
                return cross_s
            return 1 / min(rates.send[here], rates.receive[there], rates.links[here][there])

        return cls(latency_s, beta, network.gamma_s_per_byte, lambda a, b: hosts[a] != hosts[b])


class _PairCost(NamedTuple):
    """Costs of a chunk along one pair: seconds for each byte, and messages."""

    latency_s: float
    chain: float
    ports: Sequence[float]  # by rank: what it sends or what it receives, the greater
    messages: Sequence[int]
    fan_in: int
    is_flat: bool  # no rank between the root and a leaf, as far as hosts are crossed

    @classmethod
    def of(cls, pair: GraphPair, edges: _Edges) -> _PairCost:
        """Walk both graphs: O(ranks)."""
        up, down = _WayCost.of(pair.reduce, edges, is_up=True), _WayCost.of(pair.broadcast, edges, is_up=False)
        many, one = zip(up.many, down.one, strict=True), zip(up.one, down.many, strict=True)
        ports = [max(sum(a), sum(b)) for a, b in zip(many, one, strict=True)]
        messages = [
            2 * (rank != pair.root) + len(pair.reduce.children[rank]) + len(pair.broadcast.children[rank])
            for rank in range(pair.size)
        ]
        fan_in, is_flat = max(map(len, pair.reduce.children)), up.depth <= 1 and down.depth <= 1
        return cls(up.latency_s + down.latency_s, up.chain + down.chain, ports, messages, fan_in, is_flat)


class _WayCost(NamedTuple):
    """Costs of a chunk on its way up or down one graph: seconds for each byte, and latency."""

    latency_s: float  # between the root and the furthest rank
    chain: float  # the same for a byte, beside those of the other children on its way
    one: Sequence[float]  # by rank: to or from its parent
    many: Sequence[float]  # by rank: from or to its children, together
    depth: int  # edges between hosts, from the root to the furthest rank

    @classmethod
    def of(cls, graph: Graph, edges: _Edges, *, is_up: bool) -> _WayCost:
        size, fold_s = graph.size, edges.fold_s if is_up else 0.0
        latency, chain, one, many = ([0.0] * size for _ in range(4))
        depth = [0] * size
        for rank in graph.preorder:
            below = graph.children[rank]
            ways = [(child, rank) if is_up else (rank, child) for child in below]
            costs = [edges.beta(*way) for way in ways]
            many[rank] = sum(costs)
            step = many[rank] + fold_s * len(below)
            for child, way, cost in zip(below, ways, costs, strict=True):
                one[child] = cost
                chain[child] = chain[rank] + step
                latency[child] = latency[rank] + edges.latency_s(*way)
                depth[child] = depth[rank] + edges.is_far(*way)
        return cls(max(latency), max(chain), one, many, max(depth))


def _busiest(rows: Sequence[Sequence[float]], scales: Sequence[float], *, mean: bool) -> float:
    """The greatest sum over the rows, or the mean sum."""
    sums: list[float] = [sum(map(mul, scales, column)) for column in zip(*rows, strict=True)]
    return sum(sums) / len(sums) if mean else max(sums)
