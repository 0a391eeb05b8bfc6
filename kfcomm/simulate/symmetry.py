"""Choice of the ranks to simulate: one of each class of ranks that are alike, or all.

Two kinds of symmetry are looked for:

- Strategies with a pair for each root, on hosts that are all alike: a turn of the ranks brings each pair to the next
  one (`turned`). Equal parts make it exact. With unequal ones, all parts count as the largest, which is longer by less
  than an element: so it is done only where nothing else ends in time (`MANY_MESSAGES`).
- Few graphs, on any hosts: ranks whose neighbours are alike (`alike`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

from kfcomm.arrays.dtypes import dtype_of
from kfcomm.collectives.plans import CHUNK_NBYTES, Plan, PlanKey, Planner, Plans
from kfcomm.core.graph import Graph, GraphPair
from kfcomm.core.signature import SHOWN_WHOLE_NBYTES, WHOLE_BELOW, pair_of
from kfcomm.errors import ConfigError
from kfcomm.simulate.alike import Numbers, classes_of
from kfcomm.simulate.network import SimulatedNetwork
from kfcomm.simulate.routes import Routes
from kfcomm.simulate.turned import (
    STARS,
    BlockSymmetry,
    CutExchange,
    FullSymmetry,
    Swaps,
    Symmetry,
    TurnedStrategy,
    odd_part,
    solid,
    turned,
)
from kfcomm.simulate.wiring import AlikeRanks, EachRank, TurnedRanks, Wiring
from kfcomm.strategies import AnyStrategy, Direct, Strategy
from kfcomm.strategies.chunks import LEAST_CHUNK_NBYTES, ChunkSizes
from kfcomm.strategies.moves import goes_in_steps, moves_of
from kfcomm.strategies.plugins import build
from kfcomm.types import Layout, Op, Verb

MANY_MESSAGES: Final = 200_000
"""More take long, one by one."""
_FEW_PAIRS: Final = 4
_FEW_RANKS: Final = 1024
"""So many pairs of graphs are built where hosts are unlike: pairs then cost, and fold, unlike each other."""
SIMULATED_VERBS: Final = tuple(
    Verb(name) for name in ("all_reduce", "reduce", "broadcast", "reduce_scatter", "all_gather", "gather", "all_to_all")
)
_Given: TypeAlias = str | AnyStrategy | Graph | GraphPair
ONE_WAY: Final = (Verb.REDUCE, Verb.BROADCAST, Verb.GATHER)
"""Verbs with a root: data goes to it or from it."""
_FOLDING: Final = (Verb.ALL_REDUCE, Verb.REDUCE, Verb.REDUCE_SCATTER)


@dataclass(frozen=True, slots=True)
class Message:
    """One collective."""

    count: int  # elements
    dtype: str
    key: str
    verb: Verb = Verb.ALL_REDUCE
    root: int = 0  # of verbs that have one

    @classmethod
    def of(cls, nbytes: int, dtype: str, key: str, verb: str = Verb.ALL_REDUCE, root: int = 0) -> Message:
        """Check what is asked for.

        Raises:
            ConfigError: an unknown dtype or verb, or less than an element.
        """
        element = dtype_of(dtype)
        if nbytes < element.itemsize:
            raise ConfigError(f"a message of {nbytes} bytes has less than one {element}")
        if verb not in SIMULATED_VERBS:
            raise ConfigError(f"verb {verb!r} is not simulated; these are: {', '.join(SIMULATED_VERBS)}")
        return cls(nbytes // element.itemsize, dtype, key, Verb(verb), root)

    @property
    def nbytes(self) -> int:
        """Of the whole elements."""
        return self.count * dtype_of(self.dtype).itemsize


@dataclass(frozen=True, slots=True)
class Simulated:
    """A strategy for one message, with what is known of its symmetry.

    Attributes:
        strategy: the graphs; where there are too many to be built, views of them.
        layout: where the ranks are.
        network: as many hosts.
        message: what is reduced; perhaps longer by some elements than what was asked for, see ``is_exact``.
        name: of the strategy.
        is_exact: whether all ranks, simulated one by one, would do the same at the same time.
        turns: of the ranks, if they are turned.
        classes: of the ranks, if some are alike.
        is_ordered: whether other calls beside it leave the order of what arrives alike on all ranks.
    """

    strategy: AnyStrategy
    layout: Layout
    network: SimulatedNetwork
    message: Message
    name: str
    is_exact: bool = True
    turns: Symmetry | None = None
    classes: Numbers | None = None
    is_ordered: bool = True

    @property
    def graphs(self) -> Strategy:
        """Graphs for the message."""
        return self.strategy.select(self.message.nbytes)

    @property
    def num_messages(self) -> int:
        """Number of messages of all ranks."""
        (plan,) = self.plans([0])
        if plan.program.steps:
            ranks = range(self.layout.size) if self.turns is None else self.turns.numbers
            found = sum(one.program.num_step_sends for one in self.plans(ranks))
            return found * (self.layout.size // len(ranks))
        lanes = plan.program.lanes.values()
        return (self.layout.size - 1) * sum(lane.num_chunks * (lane.up + lane.down) for lane in lanes)

    def plans(self, ranks: Sequence[int], made: dict[tuple[int, int], Plans] | None = None) -> list[Plan]:
        """Plans of some ranks, made as by real ranks; ``made`` keeps those of a strategy for further calls."""
        message, size = self.message, self.layout.size
        verb = message.verb
        # The input of an all_to_all has a part for each rank.
        shape = (size, -(-message.count // size)) if verb is Verb.ALL_TO_ALL else (message.count,)
        op, root = Op.SUM if verb in _FOLDING else None, message.root if verb in ONE_WAY else -1
        kind = PlanKey(verb, dtype_of(message.dtype), shape, op, root)
        chunks, made, strategy = ChunkSizes(self.layout), {} if made is None else made, self.strategy
        found = []
        for rank in ranks:
            plans = made.get((id(strategy), rank))
            if plans is None:
                plans = made[id(strategy), rank] = Plans(Planner(rank, size, strategy, chunks))
            found.append(plans.of(kind, message.key))
        return found

    def relays(self, plans: Sequence[Plan]) -> frozenset[int]:
        """Hosts to which ranks of other hosts send what is folded there; where all hosts are alike, none counts."""
        if self.network.is_even:
            return frozenset()
        hosts = self.layout.hosts
        if self.message.verb is Verb.ALL_REDUCE and goes_in_steps(self.graphs, self.message.nbytes):
            ends = [(move.source, move.target) for move in moves_of(self.graphs) if move.is_folded]
            return frozenset(hosts[target] for source, target in ends if hosts[source] != hosts[target])
        if self.classes is not None:
            edges = (edge for pair in pairs_of(self.graphs, self.message) for edge in pair.reduce.edges)
        else:
            edges = (
                (rank, child)
                for rank, plan in enumerate(plans)
                for lane in plan.program.lanes.values()
                for child in lane.children
            )
        return frozenset(hosts[above] for above, below in edges if hosts[above] != hosts[below])


def wiring_of(calls: Sequence[Simulated], routes: Routes) -> Wiring:
    """The ranks to simulate, and how they reach each other; ``calls`` are those of `simulated_together`."""
    groups = [call.turns for call in calls if call.turns is not None]
    if groups:
        hosts = routes.layout.hosts
        on_first = sum(hosts[number] == 0 for number in groups[0].numbers)
        return TurnedRanks(routes, groups, len(hosts) // routes.layout.num_hosts // on_first)
    if calls[0].classes is not None:
        return AlikeRanks(routes, calls[0].classes)
    return EachRank(routes)


def simulated_together(
    calls: Sequence[tuple[_Given, Message]], layout: Layout, network: SimulatedNetwork, *, one_by_one: bool = False
) -> list[Simulated]:
    """Choose the ranks to simulate for several calls at once: those that are alike in all of them.

    Raises:
        ConfigError: as of `simulated`.
    """
    known: dict[str, AnyStrategy] = {}

    def make(strategy: _Given) -> AnyStrategy:
        if not isinstance(strategy, str):
            return build(strategy, layout)
        if strategy not in known:
            known[strategy] = build(strategy, layout)
        return known[strategy]

    found = [
        simulated(strategy, layout, network, message, one_by_one=one_by_one, make=make) for strategy, message in calls
    ]
    if len(found) == 1:
        return found
    groups = {_kind(call.turns) for call in found}
    if len(groups) == 1 and None not in groups:
        if all(call.is_ordered for call in found):
            return found
        if _are_many(found):
            return [replace(call, is_exact=False) for call in found]
    if groups == {None} and all(call.classes is not None for call in found):
        pairs = {pair.digest: pair for call in found for pair in pairs_of(call.graphs, call.message)}
        # Chunks of unlike graphs that arrive at one moment are taken in unlike orders by ranks of a class.
        is_same = len(pairs) == len(pairs_of(found[0].graphs, found[0].message))
        classes = classes_of(list(pairs.values()), layout, network) if is_same or _are_many(found) else None
        if classes is not None:
            return [replace(call, classes=classes, is_exact=call.is_exact and is_same) for call in found]
    if all(call.turns is None and call.classes is None for call in found):
        return found
    return simulated_together(calls, layout, network, one_by_one=True)


def _are_many(calls: Sequence[Simulated]) -> bool:
    return sum(call.num_messages for call in calls) > MANY_MESSAGES


def _kind(group: Symmetry | None) -> Symmetry | None:
    """The group without what differs by call."""
    return replace(group, step=0) if isinstance(group, BlockSymmetry) else group


def simulated(
    strategy: _Given,
    layout: Layout,
    network: SimulatedNetwork,
    message: Message,
    *,
    one_by_one: bool = False,
    make: Callable[[_Given], AnyStrategy] | None = None,
) -> Simulated:
    """Choose the ranks to simulate; ``make`` builds a strategy, once for several calls.

    Raises:
        ConfigError: an unknown strategy, or one of another size.
    """
    # A burst passes a token bucket for the first flow that comes, and so tells flows apart.
    one_by_one = one_by_one or bool(network.burst_nbytes) or message.verb is not Verb.ALL_REDUCE
    if not one_by_one and isinstance(strategy, str):
        found = _turned(turned(strategy, layout, message.nbytes), layout, network, message)
        if found is not None:
            return found
    built = build(strategy, layout) if make is None else make(strategy)
    plain = Simulated(built, layout, network, message, built.name)
    if one_by_one:
        return plain
    graphs = plain.graphs
    if len(graphs.pairs) > _FEW_PAIRS or goes_in_steps(graphs, message.nbytes):
        known = turned(graphs.name, layout, message.nbytes)
        if known is not None and _are_same(graphs, known.strategy):
            strategy = replace(known.strategy, name=graphs.name, chunk_nbytes=graphs.chunk_nbytes)
            found = _turned(replace(known, strategy=strategy), layout, network, message)
            return plain if found is None else replace(found, name=built.name)
    return plain if goes_in_steps(graphs, message.nbytes) else _alike(plain)


def _turned(
    found: TurnedStrategy | None, layout: Layout, network: SimulatedNetwork, message: Message
) -> Simulated | None:
    """With turned graphs; None if ranks are not alike under turns, or not exactly, and few enough to do one by one."""
    if found is None:
        return None
    if goes_in_steps(found.strategy, message.nbytes):
        return _in_steps(found.strategy, layout, network, message)
    graphs = replace(found.strategy, chunk_nbytes=chunk_nbytes_of_message(found.strategy, message, layout))
    found = replace(found, strategy=graphs)
    pairs = pairs_of(graphs, message)
    plain = Simulated(graphs, layout, network, message, graphs.name)
    if len(pairs) == 1:
        # Whole along one pair: of the others nothing is needed.
        # Stars name their children in rank order, so that ranks of the own host come sooner or later.
        is_exact = is_turnable(network) and (layout.size == layout.num_hosts or graphs.name not in STARS)
        if not is_exact and layout.size <= _FEW_RANKS:
            return None
        alone = replace(graphs, pairs=(solid(pairs[0]),), is_whole=not graphs.direct)
        return _alike(replace(plain, strategy=alone, is_exact=is_exact))
    if not is_turnable(network) or layout.size % _block(found, layout, network):
        return None
    parts = 1 if graphs.direct is Direct.ONE_STEP else len(graphs.pairs)
    count = math.ceil(message.count / parts) * parts
    group = BlockSymmetry(found.turns, _block(found, layout, network), found.step)
    exact = replace(plain, turns=group, message=replace(message, count=count), is_ordered=found.has_one_sender)
    if found.is_exact and count == message.count:
        return exact
    return replace(exact, is_exact=False) if exact.num_messages > MANY_MESSAGES else None


def _in_steps(graphs: Strategy, layout: Layout, network: SimulatedNetwork, message: Message) -> Simulated | None:
    """An exchange; None as of `_turned`."""
    if not is_turnable(network) or network.hosts_per_switch:
        return None
    plain = Simulated(graphs, layout, network, message, graphs.name)
    size, local = layout.size, layout.size // layout.num_hosts
    if graphs.exchange is None:
        return replace(plain, turns=BlockSymmetry(FullSymmetry(size), local, 0))
    low_ranks = local if 0 < network.hosts[0].cpus < local else odd_part(local)
    group = Swaps(size, local, odd_part(layout.num_hosts), low_ranks)
    count = math.ceil(message.count / size) * size
    turns = replace(plain, turns=group, message=replace(message, count=count))
    steps = 2 * graphs.exchange.num_rounds
    if count != message.count and size * steps <= MANY_MESSAGES:
        return None
    if len(group.numbers) * steps <= MANY_MESSAGES:
        return replace(turns, is_exact=count == message.count)
    cut = replace(graphs, exchange=CutExchange(graphs.exchange.order, graphs.exchange.radices))
    added = replace(group, low_ranks=odd_part(local), is_added=True)
    return replace(turns, strategy=cut, turns=added, is_exact=False)


def chunk_nbytes_of_message(graphs: Strategy, message: Message, layout: Layout) -> int:
    """Bytes of a chunk, as the planner would choose them from all pairs."""
    if graphs.chunk_nbytes:
        return graphs.chunk_nbytes
    if graphs.goes_whole:
        graphs = Strategy(graphs.name, (solid(graphs.pairs[0]),), is_whole=True)  # the others cost the same
    elif message.nbytes <= len(graphs.pairs) * LEAST_CHUNK_NBYTES:
        return CHUNK_NBYTES  # parts are one chunk, whatever its size
    return min(CHUNK_NBYTES, ChunkSizes(layout).of(graphs, message.nbytes))


def _alike(plain: Simulated) -> Simulated:
    graphs, message = plain.graphs, plain.message
    pairs = pairs_of(graphs, message)
    if len(pairs) > _FEW_PAIRS:
        return plain
    return replace(plain, classes=classes_of(pairs, plain.layout, plain.network))


def pairs_of(graphs: Strategy, message: Message) -> tuple[GraphPair, ...]:
    """The pairs that a message takes, as ``collectives.plans`` has it."""
    if graphs.direct:
        is_one_step = graphs.direct is Direct.ONE_STEP and message.nbytes <= SHOWN_WHOLE_NBYTES
        return graphs.pairs if is_one_step else graphs.pairs_of_direct
    if graphs.is_whole or message.count < WHOLE_BELOW:
        return (graphs.pairs[pair_of(message.key, len(graphs.pairs), graphs.shares)],)
    return graphs.pairs


def is_turnable(network: SimulatedNetwork) -> bool:
    """Whether all hosts are alike, and so are their links."""
    alike = {replace(host, name="") for host in network.hosts}
    return len(alike) == 1 and not (network.links or network.switches or network.cpus)


def _block(found: TurnedStrategy, layout: Layout, network: SimulatedNetwork) -> int:
    """How many of the first ranks are simulated: those whose turns, which keep hosts together, make all."""
    local, turns = layout.size // layout.num_hosts, found.turns
    host = network.hosts[0]
    is_crowded = 0 < host.cpus < local
    keeps_hosts = local == 1 or (turns.low % local == 0 and (turns.is_xor or turns.low == local))
    keeps_hosts = keeps_hosts and (not turns.is_xor or local & (local - 1) == 0)
    if keeps_hosts and not is_crowded and not network.hosts_per_switch and found.step == 1:
        return 1
    return math.lcm(local * max(network.hosts_per_switch, 1), turns.low, found.step)


def _are_same(graphs: Strategy, known: Strategy) -> bool:
    """Whether these are the built-in graphs that they are called by: the first, the second and the last are."""
    if graphs.exchange != known.exchange:
        return False
    if len(graphs.pairs) != len(known.pairs) or graphs.shares or graphs.direct is not known.direct:
        return False
    for at in {0, len(graphs.pairs) // 2, len(graphs.pairs) - 1}:
        built, view = graphs.pairs[at], known.pairs[at]
        if built.reduce.parents != tuple(view.reduce.parents):
            return False
        if built.broadcast.parents != tuple(view.broadcast.parents):
            return False
    return True
