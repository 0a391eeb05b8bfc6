"""Exchanges in steps: in each a rank sends a block of the data to one rank, and takes a block from one.

An `Exchange` is recursive halving: each step sends half of what is left to a partner, which folds it; backwards it is
recursive doubling. Its programs have 2⌈log₂n⌉ steps of a message each, where a tree for every part would have 2(n−1).
Groups of an even size are halved, so that a block is one piece of the buffer. Of an odd size m, each place sends to the
one ⌈m/2⌉ further on, then ⌈⌈m/2⌉/2⌉ and so on, which moves m−1 blocks as well; blocks that pass the end of the buffer
travel as two messages, which makes one more on each way in the mean, and half as many more at most.

Dissemination gathers the contributions of all in ⌈log₂n⌉ steps: each rank sends what it has to the one 1, 2, 4, ...
places before it.

Sources: R. Thakur, R. Rabenseifner and W. Gropp, "Optimization of collective communication operations in MPICH" (2005);
J. L. Träff, "Optimal, non-pipelined reduce-scatter and allreduce algorithms" (2024); J. Bruck et al., "Efficient
algorithms for all-to-all communications in multiport message-passing systems" (1997).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from kfcomm.core.graph import Graph, GraphPair
from kfcomm.core.machine import DOWN, INPUT, PARTIAL, RESULT, UP
from kfcomm.core.program import ExchangeStep, Lane, LaneRoute, Program, StepSend
from kfcomm.core.signature import num_chunks

Blocks = tuple[tuple[int, int], ...]
"""Begin and end of each run of blocks."""


class Round(NamedTuple):
    """One step of halving at one place: both ends of its messages, and the blocks in them."""

    to: int  # a place
    sent: Blocks
    source: int  # a place
    received: Blocks
    fresh: Blocks = ()  # to which the first step adds nothing, and which stay


@dataclass(frozen=True)
class Exchange:
    """Recursive halving and doubling among all ranks.

    Attributes:
        order: the rank at each place; the block of a place is reduced there.
        radices: sizes of the groups within which ranks exchange, the first with the largest blocks; their product is
            the number of ranks. Members of a group of the first lie ``size / radices[0]`` places apart, those of the
            last are neighbours.

    Raises:
        ValueError: the order is not one of all ranks, or the radices do not multiply to their number.
    """

    order: tuple[int, ...]
    radices: tuple[int, ...]

    def __post_init__(self) -> None:
        if sorted(self.order) != list(range(self.size)) or math.prod(self.radices) != self.size:
            raise ValueError(f"order {self.order} and radices {self.radices} do not fit each other")

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.order)

    @cached_property
    def places(self) -> tuple[int, ...]:
        """The place of each rank."""
        places = [0] * self.size
        for place, rank in enumerate(self.order):
            places[rank] = place
        return tuple(places)

    @property
    def num_rounds(self) -> int:
        """Steps of halving; doubling takes as many."""
        return sum((radix - 1).bit_length() for radix in self.radices)

    def rounds(self, place: int) -> Iterator[Round]:
        """The steps of halving at one place."""
        first, size = 0, self.size  # the blocks that are left
        is_first = True
        for radix in self.radices:
            unit = size // radix
            while radix % 2 == 0:
                radix, size = radix // 2, size // 2
                is_low = place < first + size
                kept = first if is_low else first + size
                partner = place + size if is_low else place - size
                yield Round(
                    partner, ((2 * first + size - kept, 2 * (first + size) - kept),), partner, ((kept, kept + size),)
                )
                first, is_first = kept, False
            own, left = (place - first) // unit, radix
            while left > 1:
                half = (left + 1) // 2
                to, source = (place + ((own + turn) % radix - own) * unit for turn in (half, -half))
                sent, received = (
                    _turned(first, unit, radix, own + half, left - half),
                    _turned(first, unit, radix, own, left - half),
                )
                fresh = _turned(first, unit, radix, own + left - half, 2 * half - left) if is_first else ()
                yield Round(to, sent, source, received, fresh)
                left, is_first = half, False
            first, size = first + own * unit, unit

    def graphs(self) -> tuple[GraphPair, ...]:
        """The way of each block as a pair of graphs, by place: what is folded, in the same order. O(ranks²)."""
        below: list[list[tuple[int, int]]] = [[] for _ in range(self.size)]
        for place in range(self.size):
            for step, one in enumerate(self.rounds(place)):
                for begin, end in one.received:
                    for block in range(begin, end):
                        below[block].append((step, place))
        sources = [[one.source for one in self.rounds(place)] for place in range(self.size)]
        pairs = []
        for steps in below:
            edges = [(self.order[at], self.order[sources[at][step]]) for step, at in sorted(steps)]
            pairs.append(GraphPair(*(Graph.from_edges(self.size, way) for way in (edges, edges[::-1]))))
        return tuple(pairs)

    @cached_property
    def digest(self) -> bytes:
        """16 bytes that differ if the order or the radices differ."""
        return hashlib.blake2b(repr((self.order, self.radices)).encode(), digest_size=16).digest()


def num_blocks(blocks: Blocks) -> int:
    """Return the number of blocks in several runs."""
    return sum(end - begin for begin, end in blocks)


def _turned(first: int, unit: int, radix: int, begin: int, count: int) -> Blocks:
    """``count`` of the ``radix`` units from ``first`` on, from one on; the first comes after the last."""
    begin %= radix
    end = begin + count
    pieces = [(begin, min(end, radix)), (0, end - radix)]
    return tuple((first + low * unit, first + high * unit) for low, high in pieces if high > low)


class _StepBuilder:
    """Builder of the steps of one rank. A message has the same number at both ends: its step, piece and sender."""

    def __init__(self, rank: int, size: int, count: int, chunk_elements: int) -> None:
        self._rank, self._size = rank, size
        self._base, self._longer = divmod(count, size)
        self._chunk_elements = chunk_elements
        self._lanes: dict[int, Lane] = {}
        self._num_awaited = self._num_sent = 0
        self._neighbours: set[int] = set()
        self._steps: list[ExchangeStep] = []

    def lane(self, blocks: tuple[int, int], number: int, sender: int, **what: object) -> Lane:
        """Lane of some blocks; only those of other senders are awaited."""
        begin, end = (self._base * block + min(block, self._longer) for block in blocks)
        return self.lane_at(begin, end - begin, number, sender, **what)

    def lane_at(self, offset: int, count: int, number: int, sender: int, **what: object) -> Lane:
        """As `lane`, of ``count`` elements from ``offset`` on."""
        chunks = num_chunks(count, self._chunk_elements)
        if sender == self._rank:
            self._num_sent += chunks
            base = -self._num_sent  # below those that are awaited
        else:
            base = self._num_awaited
            self._num_awaited += chunks
            self._neighbours.add(sender)
        where = {"input_offset": offset, "result_offset": offset, "base": base, "num_chunks": chunks}
        lane = Lane(number * self._size + sender, count, **{**where, **what})  # type: ignore[arg-type]
        self._lanes[lane.number] = lane
        return lane

    def add(
        self,
        sends: Sequence[tuple[int, Lane]],
        way: tuple[int, int],
        arrivals: Sequence[LaneRoute],
        fresh: Sequence[Lane] = (),
    ) -> None:
        """Add a step: messages to send by ``way`` (phase and source), and those that are awaited."""
        self._neighbours.update(to for to, _ in sends)
        begin = arrivals[0].lane.base
        self._steps.append(
            ExchangeStep(
                tuple(StepSend(to, lane, *way) for to, lane in sends),
                tuple(arrivals),
                begin,
                self._num_awaited,
                tuple(fresh),
            )
        )

    @property
    def next_step(self) -> int:
        """Number of the step that is added next, from 1 on."""
        return len(self._steps) + 1

    def build(self) -> Program:
        """Return the program of the steps added so far."""
        return Program(
            self._lanes, self._chunk_elements, self._num_awaited, 1, frozenset(self._neighbours), tuple(self._steps)
        )


def halving_doubling(rank: int, exchange: Exchange, count: int, chunk_elements: int) -> Program:
    """Reduce and broadcast ``count`` elements, a block of them at each place, among two ranks or more."""
    builder = _StepBuilder(rank, exchange.size, count, chunk_elements)
    rounds = list(exchange.rounds(exchange.places[rank]))
    order = exchange.order
    folded: tuple[int, ...] = ()
    for number, (to, sent, source, received, fresh) in enumerate(rounds):
        sender, is_last = order[source], number + 1 == len(rounds)
        sends = [
            (order[to], builder.lane(blocks, 2 * number + piece, rank, up=True, children=folded))
            for piece, blocks in enumerate(sent)
        ]
        lanes = [
            builder.lane(blocks, 2 * number + piece, sender, up=True, down=is_last, children=(sender,))
            for piece, blocks in enumerate(received)
        ]
        arrivals = [LaneRoute(lane, UP, 1 + bool(number), bool(number), is_last, builder.next_step) for lane in lanes]
        stay = [
            builder.lane(blocks, 2 * (len(rounds) * 2 + piece), rank, up=True) for piece, blocks in enumerate(fresh)
        ]
        builder.add(sends, (UP, PARTIAL if number else INPUT), arrivals, stay)
        folded = (*folded, sender)
    for number, (to, sent, source, received, _) in enumerate(reversed(rounds), len(rounds)):
        sends = [
            (order[source], builder.lane(blocks, 2 * number + piece, rank, down=True))
            for piece, blocks in enumerate(received)
        ]
        lanes = [
            builder.lane(blocks, 2 * number + piece, order[to], down=True, source=order[to], keeps=True, forwards=True)
            for piece, blocks in enumerate(sent)
        ]
        arrivals = [LaneRoute(lane, DOWN, 1, step=builder.next_step) for lane in lanes]
        builder.add(sends, (DOWN, RESULT), arrivals)
    return builder.build()


def dissemination(rank: int, size: int, count: int, chunk_elements: int) -> Program:
    """Gather ``count`` elements of every rank at each: those of rank r at place (r − rank) modulo ``size``."""
    builder = _StepBuilder(rank, size, count, chunk_elements)
    number, have = 0, 1
    while have < size:
        more = min(have, size - have)
        to, source = (rank - have) % size, (rank + have) % size
        sent = builder.lane_at(0, more * count, number, rank, down=True)
        lane = builder.lane_at(have * count, more * count, number, source, down=True, source=source, keeps=count > 0)
        fresh = [] if number else [builder.lane_at(0, count, 1 << 8, rank, down=True)]
        builder.add([(to, sent)], (DOWN, RESULT), [LaneRoute(lane, DOWN, 1, step=builder.next_step)], fresh)
        number, have = number + 1, have + more
    return builder.build()
