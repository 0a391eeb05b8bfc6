"""Wiring of simulated ranks: which of them there are, and the flows between them.

Where ranks are alike, one of each class is simulated. What it sends to a rank of another class arrives at the
simulated one of that class, as from the rank that sends there. In each port on its way it counts as often as there are
flows like it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, Protocol

from kfcomm.core.machine import DOWN, UP
from kfcomm.core.program import ABSENT, Program
from kfcomm.simulate.alike import Numbers
from kfcomm.simulate.ports import Flow
from kfcomm.simulate.ranks import Chunk, Rank, Way
from kfcomm.simulate.routes import Routes
from kfcomm.simulate.turned import Turns
from kfcomm.types import override


class Wiring(Protocol):
    """Simulated ranks and their flows."""

    @property
    def numbers(self) -> Sequence[int]:
        """The ranks that are simulated."""

    def times(self, number: int) -> int:
        """How many ranks are like this one, itself included."""

    def of_all(self, values: Sequence[float]) -> tuple[float, ...]:
        """Values of all ranks, from those of the simulated ones."""

    def join(self, ranks: Sequence[Rank]) -> None:
        """Note the simulated ranks, before the first of them begins.

        Raises:
            NotAlike: they are not representative of all.
        """

    def ways(self, rank: Rank, to: tuple[int, ...]) -> tuple[Way, ...]:
        """The flows from a simulated rank to others; the same ones at each call."""


@dataclass(slots=True)
class EachRank(Wiring):
    """Wiring in which every rank is simulated."""

    routes: Routes
    _ranks: Sequence[Rank] = ()
    _flows: dict[tuple[int, int], Way] = field(default_factory=dict)

    @property
    @override
    def numbers(self) -> Sequence[int]:
        return range(self.routes.layout.size)

    @override
    def times(self, number: int) -> int:
        return 1

    @override
    def of_all(self, values: Sequence[float]) -> tuple[float, ...]:
        return tuple(values)

    @override
    def join(self, ranks: Sequence[Rank]) -> None:
        self._ranks = ranks

    @override
    def ways(self, rank: Rank, to: tuple[int, ...]) -> tuple[Way, ...]:
        return tuple([self._way(rank, target) for target in to])

    def _way(self, rank: Rank, target: int) -> Way:
        way = self._flows.get((rank.number, target))
        if way is None:
            out, into, latency_s = self.routes.between(rank.number, target)
            arrived = self._ranks[target].arrived
            flow = Flow(self.routes.agenda, (*out, *into), latency_s, arrived, rank.was_read)
            way = self._flows[rank.number, target] = Way(flow, target)
        return way


@dataclass(slots=True)
class TurnedRanks(Wiring):
    """Wiring of ranks that turn into each other, with as many pairs: the first ``block`` ranks are simulated.

    Attributes:
        routes: of all ranks.
        turns: those that turn hosts into hosts.
        step: see `turned.TurnedStrategy`.
        block: how many of the first ranks are simulated, which turns by multiples bring to all others; 1 where any
            rank turns into any.
        by_host: how many ranks of a host send alike through its port.
    """

    routes: Routes
    turns: Turns
    step: int
    block: int
    by_host: int
    _ranks: Sequence[Rank] = ()
    _flows: dict[tuple[int, int], Way] = field(default_factory=dict)

    @property
    @override
    def numbers(self) -> Sequence[int]:
        return range(self.block)

    @override
    def times(self, number: int) -> int:
        return self.turns.size // self.block

    @override
    def of_all(self, values: Sequence[float]) -> tuple[float, ...]:
        return tuple(values) * (self.turns.size // self.block)

    @override
    def join(self, ranks: Sequence[Rank]) -> None:
        self._ranks = ranks

    @override
    def ways(self, rank: Rank, to: tuple[int, ...]) -> tuple[Way, ...]:
        return tuple([self._way(rank, target) for target in to])

    def _way(self, rank: Rank, target: int) -> Way:
        way = self._flows.get((rank.number, target))
        if way is None:
            routes = self.routes
            receiver = target % self.block
            by = target - receiver
            sender = self.turns.back(by, rank.number)
            out, _, latency_s = routes.between(rank.number, target)
            _, into, _ = routes.between(sender, receiver)
            arrived = partial(self._arrived, self._ranks[receiver], sender, by)
            passes = (*routes.counted(out, self.by_host, 1), *routes.counted(into, self.by_host, 1))
            way = self._flows[rank.number, target] = Way(
                Flow(routes.agenda, passes, latency_s, arrived, rank.was_read), target
            )
        return way

    def _arrived(self, receiver: Rank, sender: int, by: int, chunk: Chunk) -> None:
        lane = self.turns.back(by, chunk.lane * self.step) // self.step
        receiver.arrived(chunk._replace(lane=lane, sender=sender))


class _Use(NamedTuple):
    """Kind of flow between two classes."""

    other: int  # class of the rank at the other end
    is_local: bool
    steps: frozenset[tuple[int, int]]  # lanes and phases


class NotAlike(Exception):
    """The classes are not those of ranks that are alike."""


class AlikeRanks(Wiring):
    """Wiring of one rank of each class: see `alike`.

    Args:
        routes: of all ranks.
        classes: of the ranks.
    """

    def __init__(self, routes: Routes, classes: Numbers) -> None:
        self._routes = routes
        hosts = routes.layout.hosts
        self._classes: list[int] = classes.tolist()
        self._sizes = Counter(self._classes)
        # Of the first host that has the class, so that hosts that are alike are represented by one for all classes.
        self._numbers = [-1] * len(self._sizes)
        for rank, found in enumerate(self._classes):
            first = self._numbers[found]
            if first < 0 or hosts[rank] < hosts[first]:
                self._numbers[found] = rank
        self._on_host = Counter(zip(hosts, self._classes, strict=True))
        self._ranks: Sequence[Rank] = ()
        self._targets: list[dict[_Use, list[int]]] = []
        self._senders: list[dict[_Use, list[int]]] = []
        self._uses: list[dict[int, _Use]] = []
        self._flows: dict[tuple[int, _Use], Way] = {}

    @property
    @override
    def numbers(self) -> Sequence[int]:
        return self._numbers

    @override
    def times(self, number: int) -> int:
        return self._sizes[self._classes[number]]

    @override
    def of_all(self, values: Sequence[float]) -> tuple[float, ...]:
        return tuple([values[found] for found in self._classes])

    @override
    def join(self, ranks: Sequence[Rank]) -> None:
        self._ranks = ranks
        for rank in ranks:
            sent, received = _steps_of(rank.program)
            self._uses.append({target: self._use(rank.number, target, steps) for target, steps in sent.items()})
            self._targets.append(_grouped(self._uses[-1]))
            self._senders.append(
                _grouped({sender: self._use(rank.number, sender, steps) for sender, steps in received.items()})
            )
        for found, number in enumerate(self._numbers):
            for use, targets in self._targets[found].items():
                senders = self._senders[use.other].get(use._replace(other=found), ())
                if self.times(number) * len(targets) != self._sizes[use.other] * len(senders):
                    raise NotAlike

    @override
    def ways(self, rank: Rank, to: tuple[int, ...]) -> tuple[Way, ...]:
        uses = self._uses[self._classes[rank.number]]
        return tuple([self._way(rank, use) for use in dict.fromkeys([uses[target] for target in to])])

    def _use(self, rank: int, other: int, steps: set[tuple[int, int]]) -> _Use:
        hosts = self._routes.layout.hosts
        return _Use(self._classes[other], hosts[rank] == hosts[other], frozenset(steps))

    def _way(self, rank: Rank, use: _Use) -> Way:
        key = (rank.number, use)
        way = self._flows.get(key)
        if way is None:
            routes, hosts, found = self._routes, self._routes.layout.hosts, self._classes[rank.number]
            receiver = self._ranks[use.other]
            targets, senders = self._targets[found][use], self._senders[use.other][use._replace(other=found)]
            out, _, latency_s = routes.between(rank.number, targets[0])
            _, into, _ = routes.between(senders[0], receiver.number)
            sending = self._on_host[hosts[rank.number], found]
            receiving = self._on_host[hosts[receiver.number], use.other]
            passes = (
                *routes.counted(out, len(targets) * sending, len(targets)),
                *routes.counted(into, len(senders) * receiving, len(senders)),
            )
            arrived = partial(_arrived_from, receiver, senders)
            was_read = partial(rank.was_read, len(targets))
            flow = Flow(routes.agenda, passes, latency_s, arrived, was_read)
            way = self._flows[key] = Way(flow, targets[0], len(targets))
        return way


def _arrived_from(receiver: Rank, senders: Sequence[int], chunk: Chunk) -> None:
    for sender in senders:
        receiver.arrived(chunk._replace(sender=sender))


def _steps_of(program: Program) -> tuple[dict[int, set[tuple[int, int]]], dict[int, set[tuple[int, int]]]]:
    """Lanes and phases in which a rank sends to each other rank, and those in which it receives from each."""
    sent: dict[int, set[tuple[int, int]]] = {}
    received: dict[int, set[tuple[int, int]]] = {}
    for number, lane in program.lanes.items():
        if lane.parent != ABSENT:
            sent.setdefault(lane.parent, set()).add((number, UP))
        for target in lane.targets:
            sent.setdefault(target, set()).add((number, DOWN))
    for number, phase, sender in program.routes:
        received.setdefault(sender, set()).add((number, phase))
    return sent, received


def _grouped(uses: Mapping[int, _Use]) -> dict[_Use, list[int]]:
    groups: dict[_Use, list[int]] = {}
    for rank, use in uses.items():
        groups.setdefault(use, []).append(rank)
    return groups
