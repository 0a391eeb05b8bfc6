"""Wiring of simulated ranks: which of them there are, and the flows between them.

Where ranks are alike, one of each class is simulated. What it sends to a rank of another class arrives at the
simulated one of that class, as from the rank that sends there. In each port on its way it counts as often as there are
flows like it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeAlias

from kfcomm.core.machine import DOWN, UP
from kfcomm.core.program import ABSENT
from kfcomm.simulate.alike import Numbers
from kfcomm.simulate.ports import Flow, Pass
from kfcomm.simulate.ranks import Chunk, Rank, Way
from kfcomm.simulate.routes import Routes
from kfcomm.simulate.turned import Symmetry
from kfcomm.types import override

_Leg: TypeAlias = tuple[tuple[Pass, ...], float, Callable[[Any], None]]
"""Ports on the way of a flow, its latency in seconds, and what is called with chunks that have arrived."""


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


class _PairWiring(Wiring):
    """Wiring with a flow for each pair of ranks. Subclasses say which ranks there are, and what arrives where."""

    def __init__(self, routes: Routes, numbers: Sequence[int]) -> None:
        self._routes = routes
        self._numbers = numbers
        self._ranks: Mapping[int, Rank] = {}
        self._flows: dict[tuple[int, int], Way] = {}

    @property
    @override
    def numbers(self) -> Sequence[int]:
        return self._numbers

    @override
    def times(self, number: int) -> int:
        return self._routes.layout.size // len(self._numbers)

    @override
    def join(self, ranks: Sequence[Rank]) -> None:
        self._ranks = dict(zip(self._numbers, ranks, strict=True))

    @override
    def ways(self, rank: Rank, to: tuple[int, ...]) -> tuple[Way, ...]:
        return tuple([self._way(rank, target) for target in to])

    def _way(self, rank: Rank, target: int) -> Way:
        way = self._flows.get((rank.number, target))
        if way is None:
            passes, latency_s, arrived = self._leg(rank.number, target)
            flow = Flow(self._routes.agenda, passes, latency_s, arrived, rank.was_read)
            way = self._flows[rank.number, target] = Way(flow, target)
        return way

    @abstractmethod
    def _leg(self, number: int, target: int) -> _Leg:
        """The way of a flow, and what takes its chunks."""


class EachRank(_PairWiring):
    """Wiring in which every rank is simulated."""

    def __init__(self, routes: Routes) -> None:
        super().__init__(routes, range(routes.layout.size))

    @override
    def of_all(self, values: Sequence[float]) -> tuple[float, ...]:
        return tuple(values)

    @override
    def _leg(self, number: int, target: int) -> _Leg:
        out, into, latency_s = self._routes.between(number, target)
        return (*out, *into), latency_s, self._ranks[target].arrived


class TurnedRanks(_PairWiring):
    """Wiring of ranks that turn into each other, with the graphs.

    Args:
        routes: of all ranks.
        groups: turns that bring hosts to hosts, as they bring the lanes of each call to others.
        by_host: how many ranks of a host send alike through its port.
    """

    def __init__(self, routes: Routes, groups: Sequence[Symmetry], by_host: int) -> None:
        super().__init__(routes, groups[0].numbers)
        self._groups = groups
        self._by_host = by_host

    @override
    def of_all(self, values: Sequence[float]) -> tuple[float, ...]:
        found, origin = dict(zip(self._numbers, values, strict=True)), self._groups[0].origin
        return tuple([found[origin(rank)[0]] for rank in range(self._routes.layout.size)])

    @override
    def _leg(self, number: int, target: int) -> _Leg:
        routes = self._routes
        group = self._groups[0]
        receiver, by = group.origin(target)
        out, _, latency_s = routes.between(number, target)
        sender = group.back(by, number)
        _, into, _ = routes.between(sender, receiver)
        arrived = partial(self._arrived, self._ranks[receiver], sender, by)
        return routes.counted((*out, *into), self._by_host, 1), latency_s, arrived

    def _arrived(self, receiver: Rank, sender: int, by: int, chunk: Chunk) -> None:
        receiver.arrived(chunk._replace(lane=self._groups[chunk.call].lane_back(by, chunk.lane), sender=sender))


_Step: TypeAlias = tuple[int, int, int]
"""A call, a lane and a phase."""


class _Use(NamedTuple):
    """Kind of flow between two classes."""

    other: int  # class of the rank at the other end
    is_local: bool
    steps: frozenset[_Step]


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
            sent, received = _steps_of(rank)
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

    def _use(self, rank: int, other: int, steps: set[_Step]) -> _Use:
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
            was_read = partial(rank.was_read, times=len(targets))
            flow = Flow(routes.agenda, passes, latency_s, arrived, was_read)
            way = self._flows[key] = Way(flow, targets[0], len(targets))
        return way


def _arrived_from(receiver: Rank, senders: Sequence[int], chunk: Chunk) -> None:
    for sender in senders:
        receiver.arrived(chunk._replace(sender=sender))


def _steps_of(rank: Rank) -> tuple[dict[int, set[_Step]], dict[int, set[_Step]]]:
    """Steps in which a rank sends to each other rank, and those in which it receives from each."""
    sent: dict[int, set[_Step]] = {}
    received: dict[int, set[_Step]] = {}
    for call in rank.calls:
        for number, lane in call.program.lanes.items():
            if lane.parent != ABSENT:
                sent.setdefault(lane.parent, set()).add((call.number, number, UP))
            for target in lane.targets:
                sent.setdefault(target, set()).add((call.number, number, DOWN))
        for number, phase, sender in call.program.routes:
            received.setdefault(sender, set()).add((call.number, number, phase))
    return sent, received


def _grouped(uses: Mapping[int, _Use]) -> dict[_Use, list[int]]:
    groups: dict[_Use, list[int]] = {}
    for rank, use in uses.items():
        groups.setdefault(use, []).append(rank)
    return groups
