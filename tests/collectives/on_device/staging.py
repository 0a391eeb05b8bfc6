"""Helpers of tests of staging: calls without a communicator's verbs, counting pools, and a check for leftovers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np

from kfcomm.arrays.devices.host import HostDevice
from kfcomm.collectives.handle import Handle
from kfcomm.collectives.on_device.staged import StagedPath
from kfcomm.collectives.plans import PlanKey
from kfcomm.core import program as programs
from kfcomm.core.cause import Cause, CauseKind
from kfcomm.core.collective import ItemSizes, Post
from kfcomm.core.signature import Signature
from kfcomm.engine.memory import Work
from kfcomm.engine.operation import Operation
from kfcomm.errors import CollectiveMismatch, PeerLost
from kfcomm.testing.devices import FakeDevice
from kfcomm.transports.base import Part
from kfcomm.types import Op, Verb
from tests.conformance.worlds import until

SEGMENT_NBYTES = 1024


class Block:
    def __init__(self, pool, nbytes, pinned):
        self.view = np.full(nbytes, 0x5A, np.uint8)
        self._pool = pool
        self._pinned = pinned

    def is_pinned(self):
        return self._pinned

    def release(self):
        assert self.view is not None, "released twice"
        self.view[:] = 0xFF  # whoever still reads it sees it
        self.view = None
        self._pool.num_out -= 1


class Pool:
    """``num_pinned`` blocks are pinned at a time, those beyond are not."""

    def __init__(self, num_pinned=1 << 30):
        self.num_pinned = num_pinned
        self.num_out = self.most = 0
        self.fails = False

    def take(self, nbytes):
        if self.fails:
            raise MemoryError("nothing left")
        self.num_out += 1
        self.most = max(self.most, self.num_out)
        return Block(self, nbytes, self.num_out <= self.num_pinned)


class Call:
    """As ``calls.DeviceCall``: a head without chunks, which tells the path of its end."""

    def __init__(
        self, rank: Rank, verb: Verb, key: str, parts: Sequence[Part], shape: tuple[int, ...], *, op: Op | None,
        root: int, dtype: Any, priority: int = 0, memory: str = "device",
    ) -> None:  # fmt: skip
        self.group, self.device, self.stream, self._path = rank.group, rank.device, rank.stream, rank.path
        self.kind, self.key, self.parts = PlanKey(verb, np.dtype(dtype), shape, op, root), key, tuple(parts)
        self.priority, self.memory = priority, memory
        self.memo: dict[str, Any] = {}
        self.plans = self.group.plans
        self.ready = self.device.mark(self.stream)
        self.is_over = False
        self.error: BaseException | None = None
        self.num_done = self.num_enqueued = 0
        loop = self.group.engine.loop
        self.result: asyncio.Future[None] = loop.create_future()
        self.ended: asyncio.Future[None] = loop.create_future()
        self.head = Operation(Handle(loop=loop), None, None, Work(None, None, 2, in_result=False))
        self.head.future = Ending(self)

    @property
    def signature(self) -> Signature:
        return self.group.plans.planner.elsewhere(self.kind, "staged", (), self.memory).signature

    def post(self, timeout_s: float | None = None) -> Call:
        view = self.group.view
        program = programs.elsewhere(view.rank, view.size)
        post = Post(view, self.key, self.signature, program, ItemSizes(1, 1), overlapping=True)
        self.group.engine.post(post, self.head, self.group.timeout_s if timeout_s is None else timeout_s)
        if not self.is_over:
            self._path.begin(self)
        return self

    # as seen by the path

    def enqueued(self, mark: Any) -> None:
        if self.is_over:
            return
        self.num_enqueued += 1
        self.device.wait(self.stream, mark)
        if not self.result.done():
            self.result.set_result(None)

    def done(self) -> None:
        if not self.is_over:
            self.num_done += 1
            self.head.collective.done_elsewhere()

    def failed(self, error: BaseException) -> None:
        if not self.is_over:
            kind = CauseKind.INTERNAL
            if isinstance(error, CollectiveMismatch):
                kind = CauseKind.MISMATCH
            elif isinstance(error, PeerLost):
                kind = CauseKind.LOST
            rank = error.rank if isinstance(error, PeerLost) else self.group.view.rank
            self.group.engine.abort(self.head.collective, Cause(kind, rank, str(error)))

    def cancel(self) -> None:
        self.head.cancel()

    def over(self, error: BaseException | None) -> None:
        self.is_over = True
        self.error = error
        if error is None:
            self.ended.set_result(None)
            return
        self._path.give_up(self)
        if not self.result.done():
            self.result.set_exception(error)
            self.result.exception()
        self.ended.set_exception(error)
        self.ended.exception()


class Ending:
    """The future of a head."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self.operation = None

    def done(self) -> bool:
        return False

    def set_result(self, _: Any) -> None:
        self._call.over(None)

    def set_exception(self, error: BaseException) -> None:
        self._call.over(error)


class Rank:
    """A rank with a device, a pool and a path."""

    def __init__(self, comm: Any, *, device: Any = None, pool: Pool | None = None, **options: Any) -> None:
        self.group = comm._group
        self.rank = self.group.view.rank
        self.device = FakeDevice() if device is None else device
        self.stream = self.device.stream()
        self.pool = pool or Pool()
        self.path = StagedPath(self.group, lambda _: self.pool, segment_nbytes=SEGMENT_NBYTES, **options)

    def array(self, x: Any) -> Any:
        return np.array(x) if isinstance(self.device, HostDevice) else self.device.array(x)

    def call(
        self, verb: Verb, key: str, sources: Sequence[Any], targets: Sequence[Any],
        shape: tuple[int, ...] | None = None, *, op: Op | None = None, root: int = -1, **options: Any,
    ) -> Call:  # fmt: skip
        parts = [Part(source, target) for source, target in zip(sources, targets, strict=True)]
        shape = (sources[0].size,) if shape is None else shape
        return Call(self, verb, key, parts, shape, op=op, root=root, dtype=sources[0].dtype, **options)

    def all_reduce(self, x: Any, key: str, *, op: Op = Op.SUM, **options: Any) -> tuple[Call, Any]:
        """Posted, with its target."""
        source = self.array(x)
        target = self.array(np.zeros_like(x))
        return self.call(Verb.ALL_REDUCE, key, [source], [target], op=op, **options).post(), target

    def got(self, x: Any) -> Any:
        """Contents of the memory, in the order of the caller's stream."""
        if isinstance(x, np.ndarray):
            return x
        with self.device.working_on(self.stream):
            return x.get()

    @property
    def is_at_rest(self) -> bool:
        return not (len(self.path) or self.pool.num_out or len(self.path.turns))


def ranks_of(comms: Any, **options: Any) -> list[Rank]:
    return [Rank(comm, **options) for comm in comms]


async def at_rest(ranks: Sequence[Rank]) -> None:
    """All blocks are back, and no fake has seen a race."""
    await until(lambda: all(rank.is_at_rest for rank in ranks))
    for rank in ranks:
        if isinstance(rank.device, FakeDevice):
            assert rank.device.violations == []


async def ended(calls: Sequence[Call]) -> list[Any]:
    return await asyncio.gather(*(call.ended for call in calls), return_exceptions=True)
