"""A probe of a whole group: its ranks measure in turns, and share what they found.

The graphs are the probe's own: strategies are swapped meanwhile as one likes.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from kfcomm.collectives.group import Group
from kfcomm.collectives.handle import Handle
from kfcomm.collectives.plans import Plan, Planner
from kfcomm.common.sizes import seconds_of
from kfcomm.core.collective import GroupView
from kfcomm.engine.engine import Engine
from kfcomm.engine.operation import Array
from kfcomm.errors import CollectiveError, CollectiveTimeout, ConfigError, PeerLost
from kfcomm.probe.record import Probe
from kfcomm.probe.wire import MOST_NBYTES, MOST_ROUNDS, PROBE_KEY, Way, fold_s_per_byte, follow, lead, pair_id
from kfcomm.strategies import build
from kfcomm.types import Layout, Seconds

Slot = tuple[tuple[int, int], ...]
"""Pairs of ranks that measure at the same time."""


def slots_of(layout: Layout) -> list[Slot]:
    """Slots in which every two ranks meet once, such that no two pairs of a slot share a port.

    Between hosts, rounds are those of a tournament (the circle method): in each, every host meets one other, and each
    of its ranks meets each of the other's, one pair after the other. Inside of hosts there is one pair at a time, on
    all hosts at once. With h hosts of p ranks that makes (h-1)·p² + p(p-1)/2 slots, where h is even, else
    h·p² + p(p-1)/2.
    """
    groups = [layout.ranks_of(host) for host in range(layout.num_hosts)]
    slots: list[Slot] = []
    for meetings in _tournament(layout.num_hosts):
        slots += _side_by_side([list(itertools.product(groups[a], groups[b])) for a, b in meetings])
    slots += _side_by_side([list(itertools.combinations(ranks, 2)) for ranks in groups])
    return slots


def _tournament(size: int) -> Iterator[list[tuple[int, int]]]:
    """Rounds in which every two of ``size`` meet once, one pair each per round; one rests if the number is odd."""
    even = size + size % 2
    seats = list(range(even))
    for _ in range(even - 1):
        meetings = [(seats[k], seats[-1 - k]) for k in range(even // 2)]
        yield [(a, b) for a, b in meetings if a < size and b < size]
        seats[1:] = [seats[-1], *seats[1:-1]]


def _side_by_side(rows: Sequence[Sequence[tuple[int, int]]]) -> Iterator[Slot]:
    """The first of each row, then the second of each, and so on."""
    for slot in itertools.zip_longest(*rows):
        pairs = tuple(pair for pair in slot if pair is not None)
        if pairs:
            yield pairs


_GRACE = 1.5
"""Ranks wait for a pair this many times as long as the pair itself may take: it has more to tell when it fails."""


class Prober:
    """The probes of one group, one after the other. Everything runs on the engine's loop."""

    def __init__(self, engine: Engine, view: GroupView, layout: Layout, timeout_s: float) -> None:
        self._group = Group(engine, view, layout, build("binary_tree", layout), timeout_s)
        self._slots = slots_of(layout)
        self._calls = 0
        self._turn = asyncio.Lock()

    def group_ids(self) -> set[bytes]:
        """Groups of two that probes make."""
        view = self._group.view
        others = [rank for rank in range(view.size) if rank != view.rank]
        return {pair_id(view, *ends) for rank in others for ends in ((rank, view.rank), (view.rank, rank))}

    async def run(self, nbytes: int, rounds: int, timeout: Seconds | None) -> Probe:
        """Measure all links, as documented at ``Communicator.probe``."""
        number = self._calls
        self._calls += 1
        async with self._turn:
            once = _Once(self._group, self._slots, number)
            try:
                return await once.run(nbytes, rounds, timeout)
            except BaseException as error:
                once.fail(error)
                raise


class _Once:
    """One probe."""

    def __init__(self, group: Group, slots: list[Slot], number: int) -> None:
        self._group = group
        self._slots = slots
        self._number = number
        # of its own, so that a probe that failed at different places on different ranks does no harm to the next
        self._first = self._seq = number * (len(slots) + 3)
        self._ways: tuple[Way, ...] = ()
        self._limit_s = 0.0
        size = group.view.size
        self._row = np.zeros((4, size))
        self._row[1, group.view.rank] = np.inf

    async def run(self, nbytes: int, rounds: int, timeout: Seconds | None) -> Probe:
        _check(nbytes, rounds)
        timeout_s = seconds_of(timeout)
        limit_s = self._group.timeout_s if timeout_s is None else timeout_s
        plan = self._group.plans.barrier(PROBE_KEY)
        plan = replace(plan, signature=plan.signature._replace(counts=(nbytes, rounds)))  # all ranks ask for the same
        await self._meet(plan, limit_s)
        self._limit_s = limit_s
        for slot in self._slots:
            self._ways = self._ways_in(slot, limit_s)
            await self._measure(nbytes, rounds)
            self._ways = ()
            # so that no pair measures while another uses its hosts' ports; a rank that failed fails this barrier, and
            # all ranks learn of it
            await self._meet(plan, limit_s * _GRACE)
        self._row[3] = fold_s_per_byte(rounds)
        rows = await self._shared(limit_s)
        return Probe(self._group.layout, rows[:, 0], rows[:, 1], rows[:, 2], rows[:, 3, 0])

    def fail(self, error: BaseException) -> None:
        """The other ranks need not wait for this one.

        The next of its pairs is told as well: a rank may have passed a barrier before this one failed there.
        """
        done = self._seq - self._first - 1
        ways = self._ways or (self._ways_in(self._slots[done], 0.0) if 0 <= done < len(self._slots) else ())
        for way in ways:
            way.give_up(error)
        self._group.refuse_now(PROBE_KEY, error, seq=self._seq)

    def _ways_in(self, slot: Slot, limit_s: float) -> tuple[Way, ...]:
        """Both ways of this rank's pair, that which is measured first before the other; none if it rests."""
        group = self._group
        deadline_s = group.engine.reactor.time() + limit_s
        pair = next((pair for pair in slot if group.view.rank in pair), None)
        if pair is None:
            return ()
        ends = (pair, pair[::-1])
        return tuple(Way.of(group.engine, group.view, end, self._number, deadline_s) for end in ends)

    async def _measure(self, nbytes: int, rounds: int) -> None:
        """This rank's pair in a slot, if it has one."""
        rank = self._group.view.rank
        for way, back in zip(self._ways, self._ways[::-1], strict=True):
            peer = way.source + way.target - rank
            try:
                if way.source == rank:
                    found = await lead(way, back, nbytes, rounds)
                    self._row[:3, peer] = found.latency_s, found.bandwidth, found.overhead_s
                else:
                    await follow(way, back, rounds)
            except CollectiveError as error:
                raise self._named(error, peer) from error

    def _named(self, error: CollectiveError, peer: int) -> CollectiveError:
        """The error of a pair, in words that name both ranks."""
        view = self._group.view
        rank = view.rank
        pair = f"probe between {view.called(rank)} and {view.called(peer)}"
        match error:
            case CollectiveTimeout():
                missing = next((found for way in self._ways if (found := way.missing(error)) is not None), ())
                who = f"{view.called(missing[0])} did not answer" if missing else "it was not over"
                words = f"{pair}: {who} within {self._limit_s:.1f} s"
                return CollectiveTimeout(words, key="probe", arrived=(rank,) * (rank not in missing), missing=missing)
            case PeerLost():
                return PeerLost(f"{pair}: {error}", key="probe", rank=error.rank)
        return type(error)(f"{pair}: {error}", key="probe")

    async def _meet(self, plan: Plan, limit_s: float) -> None:
        """A barrier."""
        handle: Handle[None] = Handle(loop=self._group.engine.loop)
        seq, self._seq = self._seq, self._seq + 1
        self._group.post(plan, PROBE_KEY, source=None, result=None, timeout_s=limit_s, handle=handle, seq=seq)
        await handle

    async def _shared(self, limit_s: float) -> Array:
        """Everybody's rows: float64[n, 4, n]."""
        plan = self._group.plans.plan(Planner.all_gather, self._row.dtype, self._row.shape, (), None)
        rows = np.empty((self._group.view.size, *self._row.shape))
        handle: Handle[None] = Handle(loop=self._group.engine.loop)
        seq, self._seq = self._seq, self._seq + 1
        self._group.post(
            plan, PROBE_KEY, source=self._row.reshape(-1), result=rows.reshape(-1), timeout_s=limit_s, handle=handle,
            seq=seq,
        )  # fmt: skip
        await handle
        return rows


def _check(nbytes: int, rounds: int) -> None:
    if type(nbytes) is not int or not 1 <= nbytes <= MOST_NBYTES:
        raise ConfigError(f"a probe begins with messages of 1 to {MOST_NBYTES} bytes, not of {nbytes!r}")
    if type(rounds) is not int or not 1 <= rounds <= MOST_ROUNDS:
        raise ConfigError(f"a probe has 1 to {MOST_ROUNDS} rounds, not {rounds!r}")
