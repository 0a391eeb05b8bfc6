"""A probe of a whole group: its ranks measure in turns, and share what they found.

The graphs are the probe's own: strategies are swapped meanwhile as one likes.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from kfcomm.collectives.group import Group
from kfcomm.collectives.handle import Handle
from kfcomm.collectives.plans import Plan, Planner
from kfcomm.common.sizes import seconds_of
from kfcomm.core.collective import GroupView
from kfcomm.engine.engine import Engine
from kfcomm.engine.memory import Array
from kfcomm.errors import CollectiveError, CollectiveTimeout, ConfigError, PeerLost
from kfcomm.probe import pairs
from kfcomm.probe.pairs import (
    PROBE_KEY,
    REPEATS,
    Enough,
    OneWay,
    fold_s_per_byte,
    follow,
    lead,
    pair_id,
    press,
    take,
)
from kfcomm.probe.record import Probe
from kfcomm.probe.together import (
    MOST_LOOKS,
    Observed,
    Slot,
    Tests,
    alone,
    nbytes_of,
    seen_in,
    side_by_side,
    tests_of,
    uplinks_of,
)
from kfcomm.strategies.matrices import rates_of
from kfcomm.types import Layout, Rates, Seconds, Uplink


def slots_of(layout: Layout) -> list[Slot]:
    """Slots in which every two ranks meet once, such that no two pairs of a slot share a port.

    Between hosts, rounds are those of a tournament (the circle method): in each, every host meets one other, and each
    of its ranks meets each of the other's, one pair after the other; hosts with low numbers send first, so that racks
    of neighbours load their uplinks (see `together`). Inside of hosts there is one pair at a time, on
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
        yield [(min(a, b), max(a, b)) for a, b in meetings if a < size and b < size]
        # The circle method: the first seat stays, the others move on by one.
        seats[1:] = [seats[-1], *seats[1:-1]]


def _side_by_side(rows: Sequence[Sequence[tuple[int, int]]]) -> Iterator[Slot]:
    """The first of each row, then the second of each, and so on."""
    for slot in itertools.zip_longest(*rows):
        found = tuple(pair for pair in slot if pair is not None)
        if found:
            yield found


_GRACE = 1.5
"""Ranks wait for a pair this many times as long as the pair itself may take: it has more to tell when it fails."""


class Prober:
    """The probes of one group, one after the other. Everything runs on the engine's loop."""

    def __init__(
        self, engine: Engine, view: GroupView, layout: Layout, timeout_s: float, host_names: tuple[str, ...] = ()
    ) -> None:
        self._host_names = host_names
        self._group = Group(engine, view, layout, "binary_tree", timeout_s)
        self._slots = slots_of(layout)
        self._calls = 0
        self._turn = asyncio.Lock()

    def group_ids(self) -> set[bytes]:
        """Groups of two that probes make."""
        view = self._group.view
        others = [rank for rank in range(view.size) if rank != view.rank]
        return {pair_id(view, *ends) for rank in others for ends in ((rank, view.rank), (view.rank, rank))}

    async def run(
        self, nbytes: int, rounds: int, timeout: Seconds | None, until: Enough | None = None
    ) -> Probe:  # fmt: skip
        """Measure all links, as documented at ``Communicator.probe``."""
        number = self._calls
        self._calls += 1
        async with self._turn:
            once = _Once(self._group, self._slots, number, until)
            try:
                return replace(await once.run(nbytes, rounds, timeout), host_names=self._host_names)
            except BaseException as error:
                once.fail(error)
                raise


class _Once:
    """One probe."""

    def __init__(self, group: Group, slots: list[Slot], number: int, until: Enough | None) -> None:
        self._group = group
        self._until = until or Enough(pairs.LONG_ENOUGH_S, pairs.MOST_NBYTES)
        self._slots = slots
        self._number = number
        # of its own, so that a probe that failed at different places on different ranks does no harm to the next
        self._first = self._seq = number * (len(slots) + 3 + pairs.MOST_TOGETHER)
        # Slots by what is begun before each, for ranks that fail between two.
        self._schedule = list(slots)
        self._ways: tuple[OneWay, ...] = ()
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
        rows = await self._shared(limit_s, self._row)
        layout, bandwidth = self._group.layout, rows[:, 1].tolist()
        rates = rates_of(layout, bandwidth)
        uplinks = await self._uplinks(plan, side_by_side(layout, bandwidth, self._slots, rates), rates, nbytes)
        if uplinks:
            bandwidth = alone(bandwidth, layout, self._slots, rates._replace(uplinks=uplinks))
        return Probe(layout, rows[:, 0], bandwidth, rows[:, 2], rows[:, 3, 0], uplinks=uplinks)

    async def _uplinks(
        self, plan: Plan, observed: list[Observed], rates: Rates, nbytes: int
    ) -> tuple[Uplink, ...]:  # fmt: skip
        """Measure several pairs together, where links looked slow; all ranks find the same."""
        layout, before, sent = self._group.layout, Tests(), dict[Slot, list[dict[int, tuple[int, float]]]]()
        for look in range(MOST_LOOKS + 1):
            tests = tests_of(layout, observed)
            if tests == before:
                return uplinks_of(tests, layout, rates, sent)
            if not tests.slots or look == MOST_LOOKS:
                break
            sent = await self._together(plan, tests, rates, nbytes)
            observed += seen_in(sent, layout, rates)
            before = tests
        return ()

    async def _together(
        self, plan: Plan, tests: Tests, rates: Rates, nbytes: int
    ) -> dict[Slot, list[dict[int, tuple[int, float]]]]:
        """For each slot and repetition, the bytes and seconds of each rank that sent."""
        layout, until = self._group.layout, self._until
        slots = [slot for _ in range(REPEATS) for slot in tests.slots]
        sizes = {
            pair: min(max(nbytes, nbytes_of(pair, layout, rates, 2 * until.seconds)), until.nbytes)
            for slot in tests.slots for pair in slot
        }  # fmt: skip
        took_s = np.zeros(len(slots))
        self._schedule += [(), *slots]  # nothing is measured in the gather before
        for number, slot in enumerate(slots):
            self._ways = self._ways_in(slot, self._limit_s)
            await self._press(sizes, took_s, number)
            self._ways = ()
            await self._meet(plan, self._limit_s * _GRACE)
        seconds = (await self._shared(self._limit_s, took_s)).T.tolist()
        return {
            slot: [
                {a: (sizes[a, b], seconds[number][a]) for a, b in slot}
                for number in range(place, len(slots), len(tests.slots))
            ]
            for place, slot in enumerate(tests.slots)
        }

    async def _press(self, sizes: Mapping[tuple[int, int], int], took_s: Array, number: int) -> None:
        """Send or receive one message, together with the other pairs of a slot."""
        if not self._ways:
            return
        way, back = self._ways
        rank, size = self._group.view.rank, sizes[way.source, way.target]
        try:
            if way.source == rank:
                took_s[number] = await press(way, back, size)
            else:
                await take(way, back, size)
        except CollectiveError as error:
            raise self._named(error, way.source + way.target - rank) from error

    def fail(self, error: BaseException) -> None:
        """Make the other ranks stop waiting for this one."""
        # Its next pair hears of it as well: that rank may have passed the barrier at which this one has failed.
        done = self._seq - self._first - 1
        schedule = self._schedule
        ways = self._ways or (self._ways_in(schedule[done], 0.0) if 0 <= done < len(schedule) else ())
        for way in ways:
            way.give_up(error)
        self._group.refuse_now(PROBE_KEY, error, seq=self._seq)

    def _ways_in(self, slot: Slot, limit_s: float) -> tuple[OneWay, ...]:
        """Both ways of this rank's pair, that which is measured first before the other; none if it rests."""
        group = self._group
        deadline_s = group.engine.reactor.time() + limit_s
        pair = next((pair for pair in slot if group.view.rank in pair), None)
        if pair is None:
            return ()
        ends = (pair, pair[::-1])
        first = self._number * pairs.MOST_USES
        if (together := self._seq - self._first - len(self._slots) - 1) > 0:
            first += pairs.TOGETHER_FROM + 2 * together
        return tuple(OneWay.of(group.engine, group.view, end, first, deadline_s) for end in ends)

    async def _measure(self, nbytes: int, rounds: int) -> None:
        """This rank's pair in a slot, if it has one."""
        rank = self._group.view.rank
        for way, back in zip(self._ways, self._ways[::-1], strict=True):
            peer = way.source + way.target - rank
            try:
                if way.source == rank:
                    found = await lead(way, back, nbytes, rounds, self._until)
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
        await self._begin(plan, limit_s)

    async def _shared(self, limit_s: float, row: Array) -> Array:
        """Rows of all ranks: float64[n, ...]."""
        plan = self._group.plans.plan(Planner.all_gather, row.dtype, row.shape, (), None)
        rows = np.empty((self._group.view.size, *row.shape))
        await self._begin(plan, limit_s, row.reshape(-1), rows.reshape(-1))
        return rows

    def _begin(
        self, plan: Plan, limit_s: float, source: Array | None = None, result: Array | None = None
    ) -> Handle[None]:
        group, handle = self._group, Handle[None](loop=self._group.engine.loop)
        post = plan.post(group.view, PROBE_KEY, group.plans.generation, seq=self._seq)
        self._seq += 1
        group.post(post, plan.operation(handle, source, result, plan.work), handle, limit_s)
        return handle


def _check(nbytes: int, rounds: int) -> None:
    if type(nbytes) is not int or not 1 <= nbytes <= pairs.MOST_NBYTES:
        raise ConfigError(f"a probe begins with messages of 1 to {pairs.MOST_NBYTES} bytes, not of {nbytes!r}")
    if type(rounds) is not int or not 1 <= rounds <= pairs.MOST_ROUNDS:
        raise ConfigError(f"a probe has 1 to {pairs.MOST_ROUNDS} rounds, not {rounds!r}")
