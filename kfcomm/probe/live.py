"""A probe of a whole group: its ranks measure in turns, and share what they found.

The graphs are the probe's own: strategies are swapped meanwhile as one likes.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from kfcomm.arrays.dtypes import dtype_name
from kfcomm.arrays.reduce import kernel
from kfcomm.collectives.group import Group
from kfcomm.collectives.handle import Handle
from kfcomm.collectives.plans import Plan, Planner, chunk_elements
from kfcomm.common.sizes import seconds_of
from kfcomm.core import program as programs
from kfcomm.core.cause import Cause, CauseKind
from kfcomm.core.collective import GroupView, ItemSizes
from kfcomm.core.signature import Signature
from kfcomm.engine.engine import Engine
from kfcomm.engine.memory import Array, Work
from kfcomm.errors import CollectiveError, CollectiveTimeout, ConfigError, PeerLost
from kfcomm.probe.record import Probe
from kfcomm.types import Layout, Op, Seconds, Verb

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
        # The circle method: the first seat stays, the others move on by one.
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

    async def run(self, nbytes: int, rounds: int, timeout: Seconds | None) -> Probe:
        """Measure all links, as documented at ``Communicator.probe``."""
        number = self._calls
        self._calls += 1
        async with self._turn:
            once = _Once(self._group, self._slots, number)
            try:
                return replace(await once.run(nbytes, rounds, timeout), host_names=self._host_names)
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
        rows = await self._shared(limit_s)
        return Probe(self._group.layout, rows[:, 0], rows[:, 1], rows[:, 2], rows[:, 3, 0])

    def fail(self, error: BaseException) -> None:
        """Make the other ranks stop waiting for this one."""
        # Its next pair hears of it as well: that rank may have passed the barrier at which this one has failed.
        done = self._seq - self._first - 1
        ways = self._ways or (self._ways_in(self._slots[done], 0.0) if 0 <= done < len(self._slots) else ())
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
        return tuple(OneWay.of(group.engine, group.view, end, self._number, deadline_s) for end in ends)

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
        await self._begin(plan, limit_s)

    async def _shared(self, limit_s: float) -> Array:
        """Rows of all ranks: float64[n, 4, n]."""
        plan = self._group.plans.plan(Planner.all_gather, self._row.dtype, self._row.shape, (), None)
        rows = np.empty((self._group.view.size, *self._row.shape))
        await self._begin(plan, limit_s, self._row.reshape(-1), rows.reshape(-1))
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
    if type(nbytes) is not int or not 1 <= nbytes <= MOST_NBYTES:
        raise ConfigError(f"a probe begins with messages of 1 to {MOST_NBYTES} bytes, not of {nbytes!r}")
    if type(rounds) is not int or not 1 <= rounds <= MOST_ROUNDS:
        raise ConfigError(f"a probe has 1 to {MOST_ROUNDS} rounds, not {rounds!r}")


PROBE_KEY: Final = "\0probe"
LONG_ENOUGH_S: Final = 0.02
MOST_NBYTES: Final = 32 << 20
MOST_ROUNDS: Final = 32
PINGS_PER_ROUND: Final = 8
TRAIN: Final = 64
"""Chunks of a message that is cut as small as can be: what each takes is the work of a chunk, not of its bytes."""
_GROWTH: Final = 4
_TICK_S: Final = 1e-9
"""Of the clock: nothing takes less."""
MOST_USES: Final = 512
"""Messages one way in one probe, acknowledgements of the other way included, are fewer."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Measurement of one way: seconds from end to end, bytes per second, and seconds of work for each chunk."""

    latency_s: float
    bandwidth: float
    overhead_s: float


# A message is a collective of two ranks, along the very link that all others take; it is over for the sender when the
# receiver has told that all is there. So a message of one byte takes a round trip, and one of S bytes the same and what
# S bytes take. The receiver posts before the sender sends, so that nothing waits for a turn of its program.


@dataclass(slots=True)
class OneWay:
    """Messages from one rank of a group to another; both ends have one. Each takes the next sequence number."""

    group: Group
    source: int  # rank of the group
    target: int  # likewise
    next_seq: int
    deadline_s: float  # until when all must be over, by ``loop.time``
    under_way: list[Handle[None]] = field(default_factory=list)

    @classmethod
    def of(cls, engine: Engine, view: GroupView, ends: tuple[int, int], number: int, deadline_s: float) -> OneWay:
        """The way between two members for the probe of this number; its keys are the same for all probes."""
        source, target = ends
        members = (view.members[source], view.members[target])
        pair = GroupView(pair_id(view, source, target), members, int(view.rank == target), view)
        layout = Layout((0, 0))
        group = Group(engine, pair, layout, "star", 0.0)
        return cls(group, source, target, number * MOST_USES, deadline_s)

    def send(self, data: Array, chunk: int | None = None) -> Handle[None]:
        """Done when the target has it. For ``chunk``, elements of each, see `chunk_elements`."""
        return self._post(data, data, None, chunk)

    def recv(self, into: Array, chunk: int | None = None) -> Handle[None]:
        """Done when it is in ``into``; what is there must have its shape and dtype, and ``chunk`` be the same."""
        return self._post(into, None, into, chunk)

    def give_up(self, error: BaseException) -> None:
        """End what is under way, and what the other end does next."""
        engine, view = self.group.engine, self.group.view
        message = f"{view.called(view.rank)} cancelled it: {str(error) or type(error).__name__}"
        for handle in self.under_way:
            if not handle.done() and (operation := getattr(handle, "operation", None)) is not None:
                engine.abort(operation.collective, Cause(CauseKind.CANCELLED, engine.rank, message))
        engine.refuse(view, PROBE_KEY, message, seq=self.next_seq)

    def missing(self, error: CollectiveTimeout) -> tuple[int, ...] | None:
        """Ranks of the group that were not there in time; None if the error is not of this way."""
        failed = [handle for handle in self.under_way if handle.done() and not handle.cancelled()]
        if not any(handle.exception() is error for handle in failed):
            return None
        return error.missing

    def _post(self, like: Array, source: Array | None, result: Array | None, chunk: int | None) -> Handle[None]:
        size = like.dtype.itemsize
        chunk = chunk or chunk_elements(like.dtype)
        signature = Signature(str(Verb.SEND), dtype_name(like.dtype), like.shape, chunk_elements=chunk)
        program = programs.send(self.group.view.rank, like.size, chunk)
        work = Work(None, like.dtype, 2, in_result=False)
        plan = Plan(signature, program, ItemSizes(size, size), work, -1 if result is None else like.size)
        engine = self.group.engine
        handle: Handle[None] = Handle(loop=engine.loop)
        handle.when_done(engine.reactor, _heard)
        self.under_way = [one for one in self.under_way if not one.done()]
        self.under_way.append(handle)
        post = plan.post(self.group.view, PROBE_KEY, self.group.plans.generation, True, self.next_seq)
        operation = plan.operation(handle, source, result, work)
        self.group.post(post, operation, handle, self.deadline_s - engine.reactor.time())
        self.next_seq += 1
        return handle


def pair_id(view: GroupView, source: int, target: int) -> bytes:
    """Id of the group of two that measures the way between two members."""
    ends = struct.pack("<II", source, target)
    return hashlib.blake2b(view.id + ends, digest_size=16, person=b"probe").digest()


def _heard(done: asyncio.Future[None]) -> None:
    # Operations are prepared before they are awaited: if one fails before, asyncio must not warn about it.
    if not done.cancelled():
        done.exception()


async def lead(way: OneWay, back: OneWay, nbytes: int, rounds: int) -> Measured:
    """Measure ``way`` from its source; the other end runs `follow`."""
    byte = np.ones(1, np.uint8)
    await back.recv(byte)  # the other end is ready; both links are open
    # Latency is half of the shortest of several round trips.
    trip_s = min([await _timed(lambda: way.send(byte)) for _ in range(rounds * PINGS_PER_ROUND)])
    train = np.ones(TRAIN, np.uint8)
    # The work of a chunk is what each of many, of a byte each, takes more.
    train_s = min([await _timed(lambda: way.send(train, 1)) for _ in range(rounds)])
    data = np.ones(nbytes, np.uint8)
    # Messages grow until one takes long enough; then the best of several of that size counts, less a round trip.
    while (took_s := await _message(way, back, data)) < LONG_ENOUGH_S and len(data) < MOST_NBYTES:
        data = np.ones(min(len(data) * _GROWTH, MOST_NBYTES), np.uint8)
    took_s = min([took_s, *[await _message(way, back, data) for _ in range(rounds - 1)]])
    await way.send(np.zeros(1, np.int64))
    # Each difference has a lower bound, since noise may make it 0 or less.
    overhead_s = max(train_s - trip_s, train_s / TRAIN) / (TRAIN - 1)
    return Measured(trip_s / 2, len(data) / max(took_s - trip_s, took_s / 2), overhead_s)


def fold_s_per_byte(rounds: int) -> float:
    """Seconds that this rank needs to fold a byte of float32 into its own, in chunks as collectives have them."""
    dtype = np.dtype(np.float32)
    folding = kernel(Op.SUM, dtype)
    own, other = (np.ones(chunk_elements(dtype), dtype) for _ in range(2))
    took_s = []
    for _ in range(rounds * PINGS_PER_ROUND):
        start_s = time.perf_counter()
        folding.fold(own, other, own)
        took_s.append(time.perf_counter() - start_s)
    return max(min(took_s), _TICK_S) / own.nbytes


async def follow(way: OneWay, back: OneWay, rounds: int) -> None:
    """Answer at the target of ``way`` what its source measures with `lead`."""
    # Posted before the source sends: so none of them waits for a turn of this program.
    pings = [way.recv(np.empty(1, np.uint8)) for _ in range(rounds * PINGS_PER_ROUND)]
    pings += [way.recv(np.empty(TRAIN, np.uint8), 1) for _ in range(rounds)]
    await back.send(np.ones(1, np.uint8))
    for ping in pings:
        await ping
    length = np.empty(1, np.int64)
    data = np.empty(0, np.uint8)
    while True:
        await way.recv(length)
        if not length[0]:
            return
        if len(data) != length[0]:
            data = np.ones(min(int(length[0]), MOST_NBYTES), np.uint8)
        here = way.recv(data)
        await back.send(np.ones(1, np.uint8))
        await here


async def _message(way: OneWay, back: OneWay, data: Array) -> float:
    """Seconds that a message takes, once the other end has memory for it."""
    ready = back.recv(np.empty(1, np.uint8))
    await way.send(np.array([len(data)], np.int64))
    await ready
    return await _timed(lambda: way.send(data))


async def _timed(begin: Callable[[], Handle[None]]) -> float:
    start_s = time.perf_counter()
    await begin()
    return time.perf_counter() - start_s
