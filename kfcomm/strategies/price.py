"""Predicted time of an all_reduce: the simulator's network model in closed form.

On one host the time is that of `profile`. Between hosts it is the greater of two bounds:

    path of one chunk + (1 − 1/m) · max(work, ports)                         (pipelined)
    fill + max(work, ports) + min(work, ports) / max(m, 2, or 1 for stars)   (busy)

for m chunks on the pair that has most. *path* is the time of one chunk from the leaves to the root and back, alone,
with its queues at ports and ranks (see `paths`); *work* is that of the busiest rank's messages and folds, *ports* the
time that the busiest port or link needs for its bytes; *fill* is the latency of the first steps, in which nothing else
can be done. Chains, one from each rank, take the longest of path, work and ports: each port always has a chunk of some
pair. So it is nearly with stars and chains of hosts where each rank of hosts with several is a root: they take the
longer of path and busiest port, two fifths of the shorter, and (1 + 1/m)/4 of the rest (fitted to the simulator).
To the others come

    the time in which a host's ranks give one of them what it passes on, beside the first of them, if several pairs
    wait for it; and
    where trees of several steps share ports, the idle time of ports in which they wait for each other, a fifth of
    ``ports`` over m^¾, and two fifths over m where senders are unlike (fitted to the simulator).

With fewer processors than ranks a host's whole work, divided among its processors, is a third bound. Where hosts are
unlike (``NetworkModel.rates``), each port, link and uplink of a rack takes its own time; leaves have windows (see
`chunks`), so that no sender falls behind where several meet. A message of few elements goes whole along one pair, and
the worst pair counts. Exchanges in steps are priced step by step (see `moves`).

Beside the simulator, for strategies with one pair, stars and chains: within 5 %; for others within 20 %, mostly 10.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from enum import Enum, auto
from typing import TYPE_CHECKING, Final, NamedTuple, Self

from kfcomm.core.graph import Graph, GraphPair
from kfcomm.core.signature import WHOLE_BELOW
from kfcomm.errors import ConfigError
from kfcomm.strategies.base import Direct, Strategy
from kfcomm.strategies.chunks import ChunkSizes
from kfcomm.strategies.moves import StepCosts, goes_in_steps
from kfcomm.strategies.network import NetworkModel
from kfcomm.strategies.profile import Load, Profile, crossing, shares_of
from kfcomm.types import Layout, Rates

if TYPE_CHECKING:
    from kfcomm.strategies.paths import Edges, Path

_ALL_BELOW: Final = 1024
"""Pairs times ranks up to which each pair is walked for its path. Above, a sample is."""
_MOST_PATHS: Final = 6
_FILL_STEPS: Final = 4
_STALL: Final = 0.2
_OPEN: Final = 0.4
"""Part of a path in which ports are not busy with other pairs, if each rank is the root of as many; likewise."""
_UNLIKE_STALL: Final = 0.4
"""The same of the first chunks of unlike senders, which windows do not keep at one pace."""
_UNLIKE: Final = 1.25
"""Between the fastest and the slowest port out: below it senders count as alike."""
_RACK_STALL: Final = 0.1
"""The same of trees that share uplinks, however many chunks there are; likewise."""
_ELEMENT_NBYTES: Final = 4
"""Assumed where only bytes are known."""


class Market:
    """Prices of strategies on one layout and network; pairs that several strategies have are walked once.

    Raises:
        ConfigError: the network has rates of another number of hosts than the layout has.
    """

    def __init__(self, layout: Layout, network: NetworkModel) -> None:
        rates = network.rates
        if rates is not None and len(rates.send) != layout.num_hosts:
            raise ConfigError(f"the network has {len(rates.send)} hosts, the layout {layout.num_hosts}")
        self.layout = layout
        self.network = network
        self.chunks = ChunkSizes(layout, network)
        self._edges: Edges | None = None
        # By identity, since a hash costs O(ranks). The pair is kept, so that its number stays its own.
        self._loads: dict[int, tuple[GraphPair, Load]] = {}
        self._paths: dict[int, tuple[GraphPair, Path]] = {}

    def load(self, pair: GraphPair) -> Load:
        """Counts of a pair."""
        if id(pair) not in self._loads:
            self._loads[id(pair)] = pair, Load.of(pair, self.layout)
        return self._loads[id(pair)][1]

    def path(self, pairs: Sequence[GraphPair]) -> Path:
        """The longest path of pairs, as far as they differ."""
        from kfcomm.strategies.paths import Edges, Path  # not needed on one host

        some, edges = self.some(pairs), self._edges
        if edges is None:
            edges = self._edges = Edges.of(self.layout, self.network)
        for pair in some:
            if id(pair) not in self._paths:
                self._paths[id(pair)] = pair, Path.of(pair, edges)
        return Path.longest([self._paths[id(pair)][1] for pair in some])

    def some(self, pairs: Sequence[GraphPair]) -> Sequence[GraphPair]:
        """A sample of the pairs; all, if they are few."""
        return pairs if len(pairs) * self.layout.size <= _ALL_BELOW else pairs[:: -(-len(pairs) // _MOST_PATHS)]

    def price(self, strategy: Strategy) -> Price:
        """The price of a strategy whose messages are shared out; of a direct one, as it is."""
        return Price.of(strategy, self)

    def seconds(self, strategy: Strategy, nbytes: int) -> float:
        """How long an all_reduce takes."""
        return Priced(strategy, self).seconds(nbytes)


class _Shape(Enum):
    """Kind of a strategy's pairs, as far as they hold each other up."""

    FLAT = auto()  # stars: all work comes before or after all sending
    CHAINS = auto()  # several: each port always has a chunk of some pair
    SPREAD = auto()  # several, a root on each rank of hosts with several: others have chunks where some wait
    TREES = auto()  # several, of more than one step: some wait for others
    ONE_TREE = auto()

    @classmethod
    def of(cls, pairs: Sequence[GraphPair], steps: int, layout: Layout) -> _Shape:
        """Look at the first pairs, whose longest way has this many steps."""
        if steps <= 2:
            return cls.FLAT
        if len(pairs) == 1:
            return cls.ONE_TREE
        graphs = [graph for pair in pairs[:_MOST_PATHS] for graph in (pair.reduce, pair.broadcast)]
        if max(len(below) for graph in graphs for below in graph.children) == 1:
            return cls.CHAINS
        several = layout.size > layout.num_hosts and len({pair.root for pair in pairs}) == layout.size
        return cls.SPREAD if several and all(_is_flat_between(graph, layout) for graph in graphs) else cls.TREES


def _is_flat_between(graph: Graph, layout: Layout) -> bool:
    """Whether the hosts form a star or a chain."""
    hosts = layout.hosts
    above = [hosts[parent] for parent, _ in crossing(layout, graph)]
    return len(set(above)) == len(above) or set(above) == {hosts[graph.root]}


class Price(NamedTuple):
    """Input of the time model, of one strategy on one layout and network."""

    profile: Profile
    network: NetworkModel
    path: Path | None  # None where `Profile` has the time: on one host, and of what is direct
    fill_s: float
    cross_s: float  # seconds for each byte of a part, of the busiest port between hosts or link
    feed: int  # parts that the busiest rank has from its host beside the first, if several pairs wait for them
    shape: _Shape

    @classmethod
    def of(cls, strategy: Strategy, market: Market) -> Self:
        """Walk all pairs: O(pairs · ranks)."""
        layout, network, pairs = market.layout, market.network, strategy.pairs
        loads = () if strategy.goes_whole else [market.load(pair) for pair in pairs]
        profile = Profile.of_loads(strategy, layout, loads)
        cross_s = _cross_s(strategy, profile, market)
        alphas = [(n * network.local_alpha_s + f * network.cross_alpha_s, n + f) for n, f in profile.ways]
        latency_s, steps = max(alphas)
        fill_s = latency_s * min(1.0, _FILL_STEPS / max(steps, 1))
        if layout.num_hosts == 1 or strategy.direct:
            return cls(profile, network, None, latency_s, cross_s, 0, _Shape.FLAT)
        shape = _Shape.of(pairs, steps, layout)
        feed = _feed(strategy, layout)
        return cls(profile, network, market.path(pairs), fill_s, cross_s, feed, shape)

    def seconds(self, nbytes: int, chunk_nbytes: int) -> float:
        """The time model of the module's docstring."""
        profile, network = self.profile, replace(self.network, chunk_nbytes=chunk_nbytes)
        part = nbytes / profile.num_parts
        local_s = network.local_beta_s_per_byte
        work_s, crowd_s = profile.work_s(nbytes, network), profile.crowd_s(nbytes, network)
        ports_s = part * max(profile.local_parts * local_s, self.cross_s)
        if self.path is None:
            if not self.cross_s:
                return profile.seconds(nbytes, network)
            return self.fill_s + max(work_s + ports_s, crowd_s)
        chunk = min(part * profile.largest, chunk_nbytes)
        num_chunks = part * profile.largest / chunk if chunk else 1.0
        if self.shape is _Shape.TREES:
            rates, stall = network.rates, _STALL / num_chunks**0.75
            if rates is not None:
                stall += _RACK_STALL if rates.uplinks else 0.0
                stall += _UNLIKE_STALL / num_chunks if max(rates.send) > _UNLIKE * min(rates.send) else 0.0
            ports_s *= 1 + stall
        busy_s, rest_s = max(work_s, ports_s), min(work_s, ports_s)
        path_s = self.path.seconds(chunk)
        if self.shape is _Shape.CHAINS:
            return max(path_s, busy_s, self.fill_s + crowd_s)
        if self.shape is _Shape.SPREAD:
            short, long = sorted((path_s, busy_s))
            apart = (1 + 1 / num_chunks) / 4  # of work and ports that do not overlap
            return max(long + _OPEN * short + apart * rest_s, self.fill_s + crowd_s)
        piped_s = path_s + busy_s * (1 - 1 / num_chunks)
        whole_s = self.fill_s + busy_s + rest_s / max(num_chunks, 1 if self.shape is _Shape.FLAT else 2)
        return max(max(piped_s, whole_s) + self.feed * part * local_s, self.fill_s + crowd_s)

    def limit(self, nbytes: int, chunk_nbytes: int) -> str:
        """Name of what takes most of the time: ``latency``, ``work`` or ``ports``."""
        profile, network = self.profile, replace(self.network, chunk_nbytes=chunk_nbytes)
        part = nbytes / profile.num_parts
        chunk = min(part * profile.largest, chunk_nbytes)
        seconds = {
            "ports": part * max(profile.local_parts * network.local_beta_s_per_byte, self.cross_s),
            "work": max(profile.work_s(nbytes, network), profile.crowd_s(nbytes, network)),
            "latency": self.fill_s if self.path is None else self.path.seconds(chunk),
        }
        return max(seconds, key=seconds.__getitem__)


class Priced:
    """A strategy with its price, of messages that are shared out and of those that go whole along one pair."""

    def __init__(self, strategy: Strategy, market: Market) -> None:
        self.strategy = strategy
        self._market = market
        self._shared: Price | None = None
        self._relayed: Price | None = None  # of a direct strategy's long messages, which go along its pairs
        self._whole: list[Price] = []
        self._steps: StepCosts | None = None

    def seconds(self, nbytes: int) -> float:
        """How long an all_reduce of ``nbytes`` bytes takes."""
        if (steps := self._in_steps(nbytes)) is not None:
            return steps.seconds(nbytes)
        chunk_nbytes = self._market.chunks.of(self.strategy, nbytes)
        return max(price.seconds(nbytes, chunk_nbytes) for price in self._prices(nbytes))

    def limit(self, nbytes: int) -> str:
        """Name of what takes most of that time: ``latency``, ``work`` or ``ports``; in steps, the first or the last."""
        if (steps := self._in_steps(nbytes)) is not None:
            return "latency" if 2 * steps.seconds(1) > steps.seconds(nbytes) else "ports"
        chunk_nbytes = self._market.chunks.of(self.strategy, nbytes)
        slowest = max(self._prices(nbytes), key=lambda price: price.seconds(nbytes, chunk_nbytes))
        return slowest.limit(nbytes, chunk_nbytes)

    def _in_steps(self, nbytes: int) -> StepCosts | None:
        """Costs of steps, if a message of this size goes in steps."""
        if not goes_in_steps(self.strategy, nbytes) or self._market.layout.num_hosts == 1:
            return None
        if self._steps is None:
            self._steps = StepCosts(self.strategy, self._market.layout, self._market.network)
        return self._steps

    def _prices(self, nbytes: int) -> Sequence[Price]:
        """Of each pair alone, for messages that go whole; else of all pairs together."""
        strategy, market = self.strategy, self._market
        if strategy.direct and market.layout.num_hosts > 1 and not strategy.sends_at_once(nbytes):
            if self._relayed is None:
                relayed = replace(strategy, pairs=strategy.pairs_of_direct, direct=Direct.NOT, for_long=None)
                self._relayed = market.price(relayed)
            return (self._relayed,)
        is_short = nbytes < WHOLE_BELOW * _ELEMENT_NBYTES and market.layout.num_hosts > 1 and not strategy.direct
        if strategy.is_whole or (is_short and len(strategy.pairs) > 1):
            if not self._whole:
                some = market.some(strategy.pairs)
                ones = [replace(strategy, pairs=(pair,), shares=(), is_whole=False) for pair in some]
                self._whole = [market.price(one) for one in ones]
            return self._whole
        if self._shared is None:
            self._shared = market.price(strategy)
        return (self._shared,)


def _cross_s(strategy: Strategy, profile: Profile, market: Market) -> float:
    """Seconds for each byte of a part, of the busiest port or link between hosts."""
    network, layout = market.network, market.layout
    if network.rates is None or layout.num_hosts == 1:
        return profile.cross_parts * network.cross_beta_s_per_byte if layout.num_hosts > 1 else 0.0
    return max(port_seconds(_moved(strategy, layout), network.rates), default=0.0)


def _moved(strategy: Strategy, layout: Layout) -> dict[tuple[int, int], int]:
    """Parts that go from host to host."""
    hosts = layout.hosts
    moved: dict[tuple[int, int], int] = {}
    for a, b, parts in sends(strategy.pairs, shares_of(strategy), goes_whole=strategy.goes_whole):
        if hosts[a] != hosts[b]:
            moved[hosts[a], hosts[b]] = moved.get((hosts[a], hosts[b]), 0) + parts
    return moved


def port_seconds(moved: Mapping[tuple[int, int], float], rates: Rates) -> Iterable[float]:
    """Seconds that each link, port and uplink needs for what moves from host to host, in bytes."""
    for (a, b), nbytes in moved.items():
        yield nbytes / rates.links[a][b]
    for uplink in rates.uplinks:
        inside = frozenset(uplink.hosts)
        yield sum(nbytes for (a, b), nbytes in moved.items() if a in inside and b not in inside) / uplink.send
        yield sum(nbytes for (a, b), nbytes in moved.items() if b in inside and a not in inside) / uplink.receive
    for host in range(len(rates.send)):
        yield sum(nbytes for (a, _), nbytes in moved.items() if a == host) / rates.send[host]
        yield sum(nbytes for (_, b), nbytes in moved.items() if b == host) / rates.receive[host]


def _feed(strategy: Strategy, layout: Layout) -> int:
    """Parts that the busiest rank has from its host beside those of the first rank, where there are several pairs."""
    hosts, fed = layout.hosts, [0] * layout.size
    if len(strategy.pairs) == 1 or layout.num_hosts == layout.size:
        return 0
    for pair, share in zip(strategy.pairs, shares_of(strategy), strict=True):
        for rank, below in enumerate(pair.reduce.children):
            local = sum(hosts[child] == hosts[rank] for child in below)
            fed[rank] += max(0, local - 1) * share
    return max(fed)


def sends(
    pairs: Sequence[GraphPair], shares: Sequence[int], *, goes_whole: bool = False
) -> Iterable[tuple[int, int, int]]:  # fmt: skip
    """``(from, to, parts)`` of everything that moves in an all_reduce."""
    for pair, parts in zip(pairs, shares, strict=True):
        yield from ((child, parent, parts) for parent, child in pair.reduce.edges)
        if not goes_whole:
            yield from ((parent, child, parts) for parent, child in pair.broadcast.edges)
