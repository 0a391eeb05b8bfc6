"""Messages between two ranks: send and recv, matched by source, tag and order.

A message is a collective of a group of two, made of the sender and the receiver; its key is the tag. The
receiver learns dtype and shape from the first sign of the message, and posts its half then; the sender is done
when the receiver has it all, or at once where a small message was copied (see `eager`). Messages of one sender with
one tag arrive in the order in which they were sent.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import struct
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from kfcomm.arrays import HostArray
from kfcomm.arrays.dtypes import dtype_name, dtype_of
from kfcomm.arrays.kinds import NUMPY, ArrayKind
from kfcomm.collectives.eager import Eager
from kfcomm.collectives.handle import Handle, looked_at
from kfcomm.collectives.on_device.through_host import Out
from kfcomm.collectives.plans import chunk_elements
from kfcomm.core import program as programs
from kfcomm.core.cause import Cause
from kfcomm.core.collective import GroupView, ItemSizes
from kfcomm.core.signature import Signature, describe
from kfcomm.errors import CollectiveAborted, CollectiveError, CollectiveTimeout, ConfigError, KfcommError, SessionClosed
from kfcomm.runtime.engine import Engine
from kfcomm.runtime.failures import error_of
from kfcomm.runtime.operation import Operation, Work
from kfcomm.transports.reactor import Reactor, Timer
from kfcomm.types import Verb

logger = logging.getLogger("kfcomm")

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
Shape: TypeAlias = tuple[int, ...]
Message: TypeAlias = tuple[Any, int]
"""What a receive gives: the array, and the rank that sent it."""

Service = Callable[[int, Handle[Message]], Awaitable[None]]
MAX_ELEMENTS = 1 << 44
MAX_DIMENSIONS = 64


@dataclass(slots=True, eq=False)
class Wanted:
    """A receive that waits for its message; ``timers`` end or report the wait."""

    source: int | None
    tag: str
    out: Out | None
    handle: Handle[Message]
    timeout_s: float
    priority: int
    kind: ArrayKind = NUMPY
    timers: list[Timer] = field(default_factory=list)
    since_s: float = field(default_factory=time.monotonic)

    @property
    def whom(self) -> str:
        """The sender, in words."""
        return "any rank" if self.source is None else f"rank {self.source}"


class Mailbox:
    """The messages of one group. Ranks are those of the group; everything runs on the engine's loop."""

    def __init__(self, engine: Engine, view: GroupView, timeout_s: float) -> None:
        self._engine = engine
        self._view = view
        self.timeout_s = timeout_s
        self._pairs: dict[tuple[int, int], GroupView] = {}
        self._wanted: list[Wanted] = []
        self._services: dict[str, Service] = {}
        self._serving: set[asyncio.Task[None]] = set()
        self.eager = Eager(engine)
        self._is_closed = False
        engine.loss_listeners.append(self._on_peer_lost)
        engine.receivers.append(self.waiting)
        for source in range(view.size):
            if source != view.rank:
                engine.early_listeners[self._pair(source, view.rank).id] = partial(self._on_early, source)

    @property
    def reactor(self) -> Reactor:
        """Who drives the engine."""
        return self._engine.reactor

    def send(
        self, array: HostArray, to: int, tag: str, timeout_s: float | None, priority: int = 0, *, may_copy: bool = False
    ) -> Handle[None]:
        """Begin to send; done when the receiver has it, or when it is copied where that is allowed."""
        handle: Handle[None] = Handle(loop=self._engine.loop)
        pair = self._pair(self._view.rank, to)
        nbytes = array.flat.nbytes
        if not may_copy or not self.eager.has_room(to, nbytes):
            self._post(pair, tag, array.dtype, array.shape, handle, timeout_s, priority, source=array.flat)
            return handle
        self._post(pair, tag, array.dtype, array.shape, handle, timeout_s, priority, source=array.flat.copy())
        return self.eager.sent(handle, to, tag, nbytes)

    def refuse(self, source: int, to: int, tag: str, reason: str) -> None:
        """A message that was to come or go does not: its other end, now or later, raises ``CollectiveAborted``."""
        self._engine.refuse(self._pair(source, to), tag, reason)

    def recv(
        self, source: int | None, tag: str, out: Out | None, timeout_s: float | None, priority: int = 0,
        kind: ArrayKind = NUMPY,
    ) -> Handle[Message]:  # fmt: skip
        """The next message of ``source`` (None: of any rank) with this tag; an array of this kind, if not ``out``."""
        handle: Handle[Message] = Handle(loop=self._engine.loop)
        wanted = Wanted(source, tag, out, handle, self.timeout_s if timeout_s is None else timeout_s, priority, kind)
        lost = self._lost_source(source)
        if lost is not None:
            handle.set_exception(error_of(lost, tag))
            return handle
        self._match_waiting(source, tag)  # those before it come first, also where their message is not yet told
        if not self._match(wanted):
            self._wanted.append(wanted)
            later = self._engine.reactor.call_later
            wanted.timers.append(later(wanted.timeout_s, self._expire, wanted))
            if self._engine.deadlines.stall_after_s < wanted.timeout_s:
                wanted.timers.append(later(self._engine.deadlines.stall_after_s, self._report, wanted))
            handle.when_done(self._engine.reactor, lambda _: self._forget(wanted))
        return handle

    def serve(self, tag: str, service: Service) -> None:
        """Call ``service(source, message)`` for every message with this tag."""
        self._services[tag] = service

    def waiting(self) -> list[dict[str, Any]]:
        """The receives whose message has not shown up, for diagnosis: ranks are those of the world, None is any."""
        members = self._view.members
        return [
            {
                "group": self._view.id.hex(),
                "members": list(members),
                "tag": wanted.tag,
                "source": None if wanted.source is None else members[wanted.source],
                "waited_s": round(time.monotonic() - wanted.since_s, 3),
            }
            for wanted in list(self._wanted)
        ]

    def group_ids(self) -> set[bytes]:
        """Groups of two that were made for messages."""
        return {pair.id for pair in self._pairs.values()}

    def close(self, reason: str) -> None:
        """Stop serving, and fail every receive that waits."""
        self._is_closed = True
        for task in self._serving:
            task.cancel()
        for wanted in list(self._wanted):
            if not wanted.handle.done():
                wanted.handle.set_exception(SessionClosed(reason))
        for source in range(self._view.size):
            self._engine.early_listeners.pop(self._pair(source, self._view.rank).id, None)
        self._engine.loss_listeners.remove(self._on_peer_lost)
        self._engine.receivers.remove(self.waiting)

    def _pair(self, source: int, to: int) -> GroupView:
        pair = self._pairs.get((source, to))
        if pair is None:
            digest = hashlib.blake2b(self._view.id + struct.pack("<II", source, to), digest_size=16, person=b"pair")
            members = (self._view.members[source], self._view.members[to])
            pair = self._pairs[source, to] = GroupView(digest.digest(), members, int(to == self._view.rank))
        return pair

    def _on_early(self, source: int, _: bytes, tag: str, *__: Any) -> None:
        """Something came that was not posted: a message for a service, or for a receive that waits."""
        if self._is_closed:  # what came before the end is told after it, and nothing can be posted any more
            return
        service = self._services.get(tag)
        if service is not None:
            while self._engine.router.expected(self._pair(source, self._view.rank).id, tag) is not None:
                message = self.recv(source, tag, None, None)
                message.when_done(self._engine.reactor, looked_at)  # perhaps nobody else will
                self._engine.loop.call_soon(self._start_to_serve, service, source, message)
            return
        self._match_waiting(source, tag)

    def _match_waiting(self, source: int | None, tag: str) -> None:
        """Post the receives for which a message has shown up, of this source (None: of any), in their order."""
        for wanted in list(self._wanted):
            if wanted.tag == tag and (source is None or wanted.source in (None, source)) and self._match(wanted):
                self._forget(wanted)

    def _start_to_serve(self, service: Service, source: int, message: Handle[Message]) -> None:
        if not self._is_closed:
            task = self._engine.loop.create_task(_served(service, source, message))
            self._serving.add(task)
            task.add_done_callback(self._serving.discard)

    def _match(self, wanted: Wanted) -> bool:
        """Post the receive if a message for it has shown up."""
        ranks = range(self._view.size) if wanted.source is None else (wanted.source,)
        for source in ranks:
            if source == self._view.rank:
                continue
            pair = self._pair(source, self._view.rank)
            found = self._engine.router.expected(pair.id, wanted.tag)
            if found is not None:
                self._receive(wanted, source, pair, found)
                return True
        return False

    def _receive(self, wanted: Wanted, source: int, pair: GroupView, found: Any) -> None:
        shape: Shape
        if isinstance(found, Cause):
            dtype, shape = np.dtype(np.uint8), ()  # of no account: posting it fails with the cause
        elif wanted.out is not None:
            dtype, shape = wanted.out.flat.dtype, _shape_of(wanted.out)
        else:
            announced = _announced(found)
            if announced is None:
                rank = self._view.rank
                message = f"rank {source} announced a message that rank {rank} cannot take: {describe(found)}"
                self._engine.refuse(pair, wanted.tag, message)
                wanted.handle.set_exception(CollectiveError(message, key=wanted.tag))
                return
            dtype, shape = announced
        flat = np.empty(math.prod(shape), dtype) if wanted.out is None else wanted.out.flat

        def outcome(flat: Array) -> Message:
            return (wanted.kind.restore(flat.reshape(shape)) if wanted.out is None else wanted.out.finish()), source

        self._post(
            pair, wanted.tag, dtype, shape, wanted.handle, wanted.timeout_s, wanted.priority, result=flat,
            outcome=outcome,
        )  # fmt: skip

    def _post(
        self, pair: GroupView, tag: str, dtype: np.dtype[Any], shape: Shape, handle: Handle[Any],
        timeout_s: float | None, priority: int, *, source: Array | None = None, result: Array | None = None,
        outcome: Callable[[Array], Message] | None = None,
    ) -> None:  # fmt: skip
        """Post this rank's half: the ``source``, or where the ``result`` goes, and what the caller gets of that."""
        work = Work(None, dtype, 2, in_result=False)
        operation = Operation(handle, source, result, work, value=result, finish=outcome, priority=priority)
        self._engine.post(
            pair, tag, _signature(dtype, shape), programs.send(pair.rank, math.prod(shape), chunk_elements(dtype)),
            ItemSizes(dtype.itemsize, dtype.itemsize), operation,
            timeout_s=self.timeout_s if timeout_s is None else timeout_s, overlapping=True,
        )  # fmt: skip
        handle.seq = self._engine.router.num_uses(pair.id, tag) - 1
        if not operation.is_over:
            handle.operation = operation

    def _expire(self, wanted: Wanted) -> None:
        message = f"no message with {wanted.tag} came from {self._senders(wanted)} within {wanted.timeout_s:.1f} s"
        missing = () if wanted.source is None else (wanted.source,)
        error = CollectiveTimeout(message, key=wanted.tag, arrived=(self._view.rank,), missing=missing)
        if not wanted.handle.done():
            wanted.handle.set_exception(error)

    def _report(self, wanted: Wanted) -> None:
        logger.warning(
            "rank %d has waited %.1f s for a message with %s from %s",
            self._view.rank, self._engine.deadlines.stall_after_s, wanted.tag, self._senders(wanted),
        )  # fmt: skip

    def _senders(self, wanted: Wanted) -> str:
        """From whom it may come; of those who can send nothing more it is said why."""
        lost = self._engine.router.lost
        gone = [lost[member].message for member in self._view.members if member in lost]
        return f"{wanted.whom} ({'; '.join(gone)})" if gone and wanted.source is None else wanted.whom

    def _forget(self, wanted: Wanted) -> None:
        """It waits no longer: its message is here, or it was given up."""
        while wanted.timers:
            wanted.timers.pop().cancel()
        if wanted in self._wanted:
            self._wanted.remove(wanted)

    def _lost_source(self, source: int | None) -> Cause | None:
        lost = self._engine.router.lost
        if not lost:
            return None
        if source is not None:
            return lost.get(self._view.members[source])
        others = [member for rank, member in enumerate(self._view.members) if rank != self._view.rank]
        return lost[others[0]] if others and all(member in lost for member in others) else None

    def _on_peer_lost(self) -> None:
        for wanted in list(self._wanted):
            cause = self._lost_source(wanted.source)
            if cause is not None and not wanted.handle.done():
                wanted.handle.set_exception(error_of(cause, wanted.tag))


async def _served(service: Service, source: int, message: Handle[Message]) -> None:
    """Only its peer suffers from a service that fails, and the peer is told by its own timeout or abort."""
    try:
        await service(source, message)
    except CollectiveAborted as error:
        logger.debug("a request of rank %d was given up: %s", source, error)
    except (KfcommError, ValueError, TypeError) as error:
        logger.warning("a request of rank %d could not be served: %s", source, error)


def _signature(dtype: np.dtype[Any], shape: Shape) -> Signature:
    return Signature(str(Verb.SEND), dtype_name(dtype), shape, chunk_elements=chunk_elements(dtype))


def _shape_of(out: Out) -> Shape:
    return tuple(out.original.shape) if hasattr(out.original, "shape") else tuple(np.shape(out.original))


def _announced(signature: Any) -> tuple[np.dtype[Any], Shape] | None:
    """Dtype and shape of a message that a peer announces; None if it is none."""
    try:
        announced = Signature(*signature)
        dtype, shape = dtype_of(announced.dtype), announced.shape
        if not all(type(length) is int and 0 <= length <= MAX_ELEMENTS for length in shape):
            return None
        is_message = announced == _signature(dtype, shape)
    except (TypeError, ConfigError):
        return None
    fits = len(shape) <= MAX_DIMENSIONS and math.prod(shape) <= MAX_ELEMENTS
    return (dtype, shape) if is_message and fits else None
