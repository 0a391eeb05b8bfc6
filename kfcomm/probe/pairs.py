"""Messages of one pair of ranks that measures: both ends run their side, one way after the other.

A message is a collective of two ranks, along the very link that all others take; it is over for the sender when the
receiver has told that all is there. So a message of one byte takes a round trip, and one of S bytes the same and what S
bytes take. The receiver posts before the sender sends, so that nothing waits for a turn of its program.
"""

from __future__ import annotations

import asyncio
import hashlib
import struct
import time
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np

from kfcomm.arrays.dtypes import dtype_name
from kfcomm.arrays.reduce import kernel
from kfcomm.collectives.group import Group
from kfcomm.collectives.handle import Handle
from kfcomm.collectives.plans import Plan, chunk_elements
from kfcomm.core import program as programs
from kfcomm.core.cause import Cause, CauseKind
from kfcomm.core.collective import GroupView, ItemSizes
from kfcomm.core.signature import Signature
from kfcomm.engine.engine import Engine
from kfcomm.engine.memory import Array, Work
from kfcomm.errors import CollectiveTimeout
from kfcomm.probe.together import MAX_TESTS, MOST_LOOKS
from kfcomm.types import Layout, Op, Verb

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
REPEATS: Final = 2
"""Times that pairs measure together: the better one counts."""
TOGETHER_FROM: Final = 512
"""Messages one way of a pair that measures beside others, acknowledgements of the other way included, are fewer."""
MOST_TOGETHER: Final = MOST_LOOKS * (REPEATS * MAX_TESTS + 1)
"""Slots of pairs that measure together, and gathers, in one probe."""
MOST_USES: Final = TOGETHER_FROM + 2 * MOST_TOGETHER
"""Messages one way in one probe are fewer."""


class Enough(NamedTuple):
    """Messages grow until one takes so long, or is so large."""

    seconds: float
    nbytes: int


@dataclass(frozen=True, slots=True)
class Measured:
    """Measurement of one way: seconds from end to end, bytes per second, and seconds of work for each chunk."""

    latency_s: float
    bandwidth: float
    overhead_s: float


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
    def of(cls, engine: Engine, view: GroupView, ends: tuple[int, int], first_seq: int, deadline_s: float) -> OneWay:
        """The way between two members, from this sequence number on; its keys are the same for all probes."""
        source, target = ends
        members = (view.members[source], view.members[target])
        pair = GroupView(pair_id(view, source, target), members, int(view.rank == target), view)
        layout = Layout((0, 0))
        group = Group(engine, pair, layout, "star", 0.0)
        return cls(group, source, target, first_seq, deadline_s)

    def send(self, data: Array, chunk: int | None = None) -> Handle[None]:
        """Done when the target has it. For ``chunk``, elements of each, see `chunk_elements`."""
        return self._post(data, data, None, chunk)

    async def timed(self, data: Array, chunk: int | None = None) -> float:
        """Seconds until the target has it."""
        clock = self.group.engine.reactor.time  # which may be virtual
        start_s = clock()
        await self.send(data, chunk)
        return clock() - start_s

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


async def lead(way: OneWay, back: OneWay, nbytes: int, rounds: int, until: Enough) -> Measured:
    """Measure ``way`` from its source; the other end runs `follow`."""
    byte = np.ones(1, np.uint8)
    await back.recv(byte)  # the other end is ready; both links are open
    # Latency is half of the shortest of several round trips.
    trip_s = min([await way.timed(byte) for _ in range(rounds * PINGS_PER_ROUND)])
    train = np.ones(TRAIN, np.uint8)
    # The work of a chunk is what each of many, of a byte each, takes more.
    train_s = min([await way.timed(train, 1) for _ in range(rounds)])
    data = np.ones(nbytes, np.uint8)
    # Messages grow until one takes long enough; then the best of several of that size counts, less a round trip.
    while (took_s := await _message(way, back, data)) < until.seconds and len(data) < until.nbytes:
        data = np.ones(min(len(data) * _GROWTH, until.nbytes), np.uint8)
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


async def press(way: OneWay, back: OneWay, nbytes: int) -> float:
    """Seconds of one message from the source of ``way``, once the other end is ready; it runs `take`."""
    data = np.ones(nbytes, np.uint8)
    await back.recv(np.empty(1, np.uint8))
    return await way.timed(data)


async def take(way: OneWay, back: OneWay, nbytes: int) -> None:
    """Receive at the target of ``way`` what its source sends with `press`."""
    here = way.recv(np.empty(nbytes, np.uint8))
    await back.send(np.ones(1, np.uint8))
    await here


async def _message(way: OneWay, back: OneWay, data: Array) -> float:
    """Seconds that a message takes, once the other end has memory for it."""
    ready = back.recv(np.empty(1, np.uint8))
    await way.send(np.array([len(data)], np.int64))
    await ready
    return await way.timed(data)
