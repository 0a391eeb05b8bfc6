"""Messages between two ranks: send and recv, matched by source, tag and order.

A message is a collective of a group of two, the sender and the receiver; its key is the tag. The receiver learns dtype
and shape from the first frame of the message, and then posts its half. The sender is done when the receiver has the
whole message, or at once if a small message was copied. Messages of one sender with one tag arrive in the order of the
sends. `receives` describes which receive gets which message, also after one has ended.

A copied message that was not received yet counts against the limits of its receiver (`Eager`); at the limit, senders
wait for that receiver. Failures of copies are logged, since no caller waits for them.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import struct
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from kfcomm.arrays import HostArray
from kfcomm.arrays.dtypes import dtype_of, fits
from kfcomm.collectives.eager import Eager
from kfcomm.collectives.handle import Handle, looked_at
from kfcomm.collectives.plans import chunk_elements
from kfcomm.collectives.receives import (
    Message,
    MessageForm,
    Receive,
    Received,
    Streams,
    Transfer,
    shape_of,
    signature_of,
)
from kfcomm.collectives.specs import PLAIN, CallOptions
from kfcomm.core import program as programs
from kfcomm.core.cause import Cause, error_of
from kfcomm.core.collective import GroupView, ItemSizes, Post
from kfcomm.core.deadlines import NEVER
from kfcomm.core.signature import Signature, describe
from kfcomm.engine.engine import Engine
from kfcomm.engine.memory import Work
from kfcomm.engine.operation import Operation
from kfcomm.errors import CollectiveAborted, CollectiveError, CollectiveTimeout, ConfigError, KfcommError, SessionClosed
from kfcomm.transports.reactor import Reactor

logger = logging.getLogger("kfcomm")

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
Shape: TypeAlias = tuple[int, ...]
Service = Callable[[int, Handle[Message]], Awaitable[None]]
MAX_ELEMENTS = 1 << 44
MAX_DIMENSIONS = 64
ARRAY_AND_SOURCE = MessageForm()
_SENDER = 0
"""Of the two ranks of a pair; the other is the receiver."""


class Mailbox:
    """The messages of one group. Ranks are those of the group; everything runs on the engine's loop."""

    def __init__(self, engine: Engine, view: GroupView, timeout_s: float) -> None:
        self._engine = engine
        self._view = view
        self.timeout_s = timeout_s
        self._pairs: dict[tuple[int, int], GroupView] = {}
        self._waiting: list[Receive] = []
        """Receives whose message has not shown up, in the order of their posts."""
        self._streams = Streams(engine, view, self._on_free)
        self._services: dict[str, Service] = {}
        self._serving: set[asyncio.Task[None]] = set()
        self.eager = Eager(engine, view)
        self._is_closed = False
        engine.loss_listeners.append(self._on_peer_lost)
        engine.receivers.append(self.waiting)
        for source in range(view.size):
            if source != view.rank:
                engine.early_listeners[self._pair(source, view.rank).id] = partial(self._on_early, source)

    @property
    def reactor(self) -> Reactor:
        """The reactor that drives the engine."""
        return self._engine.reactor

    def send(
        self, array: HostArray, to: int, tag: str, options: CallOptions = PLAIN, *, may_copy: bool = False
    ) -> Handle[None]:
        """Begin to send; the handle is done when the receiver has it, or when it is copied if that is allowed."""
        handle: Handle[None] = Handle(loop=self._engine.loop)
        pair = self._pair(self._view.rank, to)
        nbytes, timeout_s = array.flat.nbytes, options.timeout_s
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        is_copied = may_copy and self.eager.has_room(to, nbytes)
        if is_copied:
            array = HostArray(array.flat.copy(), array.shape, array.kind, False)
        self._post(pair, tag, array, handle, (timeout_s, options.priority))
        return self.eager.sent(handle, to, tag, nbytes) if is_copied else handle

    def refuse(self, source: int, to: int, tag: str, reason: str) -> None:
        """Abort a message that was to come or go: its other end, now or later, raises ``CollectiveAborted``."""
        self._engine.refuse(self._pair(source, to), tag, reason)

    def recv(
        self, source: int | None, tag: str, options: CallOptions = PLAIN, form: MessageForm = ARRAY_AND_SOURCE
    ) -> Received[Any]:
        """Receive the next message of ``source`` (None: any) with this tag.

        The receive ends ``timeout_s`` after this call, wherever its message is by then; the message then goes to the
        next receive (see `receives`).
        """
        handle: Received[Any] = Received(loop=self._engine.loop)
        timeout_s = self.timeout_s if options.timeout_s is None else options.timeout_s
        receive = Receive(source, tag, form, handle, timeout_s, options.priority, self._on_end)
        if self._waiting:
            self._match_waiting(source, tag)  # those before it come first, also where their message is not yet told
        if not self._match(receive):
            lost = self._lost_source(source)
            if lost is not None:
                handle.set_exception(error_of(lost, tag, self._title(receive)))
                return handle
            self._waiting.append(receive)
        if not handle.done():
            handle.operation = receive
            self._begin_to_wait(receive)
        return handle

    def drop(self, source: int, tag: str, reason: str) -> None:
        """Refuse messages of this rank with this tag, both one that is under way and the next."""
        if not self._streams.drop(source, tag, reason):
            self.refuse(source, self._view.rank, tag, reason)

    def is_lost(self, source: int) -> bool:
        """Whether a rank is lost, or has closed its world. Callable on any thread."""
        return self._view.members[source] in self._engine.router.lost

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
                "tag": receive.tag,
                "source": None if receive.source is None else members[receive.source],
                "waited_s": round(time.monotonic() - receive.since_s, 3),
            }
            for receive in list(self._waiting)
        ]

    def group_ids(self) -> set[bytes]:
        """Groups of two that were made for messages."""
        return {pair.id for pair in self._pairs.values()}

    def close(self, reason: str, over: Cause | None = None) -> None:
        """Stop serving, and fail every waiting receive; ``over``: the end of the epoch, if that is the cause."""
        self._is_closed = True
        for task in self._serving:
            task.cancel()
        self._streams.close()
        waiting, self._waiting = self._waiting, []
        for receive in waiting:
            title = self._title(receive)
            closed = SessionClosed(f"{title} failed: {reason}")
            receive.fail(closed if over is None else error_of(over, receive.tag, title))
        for source in range(self._view.size):
            self._engine.early_listeners.pop(self._pair(source, self._view.rank).id, None)
        self._engine.loss_listeners.remove(self._on_peer_lost)
        self._engine.receivers.remove(self.waiting)

    def _pair(self, source: int, to: int) -> GroupView:
        pair = self._pairs.get((source, to))
        if pair is None:
            digest = hashlib.blake2b(self._view.id + struct.pack("<II", source, to), digest_size=16, person=b"pair")
            members = (self._view.members[source], self._view.members[to])
            pair = self._pairs[source, to] = GroupView(digest.digest(), members, int(to == self._view.rank), self._view)
        return pair

    def _on_early(self, source: int, _: bytes, tag: str, *__: Any) -> None:
        """Handle an early arrival: a message for a service, or for a waiting receive."""
        if self._is_closed:  # what came before the end is told after it, and nothing can be posted any more
            return
        service = self._services.get(tag)
        if service is not None:
            while self._engine.router.expected(self._pair(source, self._view.rank).id, tag) is not None:
                message = self.recv(source, tag, CallOptions(timeout=NEVER))
                message.when_done(self._engine.reactor, looked_at)  # perhaps nobody else will
                self._engine.loop.call_soon(self._start_to_serve, service, source, message)
            return
        self._match_waiting(source, tag)

    def _on_free(self, transfer: Transfer) -> None:
        """Handle the end of a receive without this message."""
        self._match_waiting(transfer.source, transfer.tag)

    def _match_waiting(self, source: int | None, tag: str) -> None:
        """Post the receives for which a message has shown up, of this source (None: of any), in their order."""
        for receive in list(self._waiting):
            if receive.tag == tag and (source is None or receive.source in (None, source)) and self._match(receive):
                self._waiting.remove(receive)

    def _start_to_serve(self, service: Service, source: int, message: Handle[Message]) -> None:
        if not self._is_closed:
            task = self._engine.loop.create_task(_served(service, source, message, self._view.called(source)))
            self._serving.add(task)
            task.add_done_callback(self._serving.discard)

    def _match(self, receive: Receive) -> bool:
        """Hold the first message announced for it; from any rank: the first that has arrived, then the others."""
        coming: Transfer | None = None
        ranks = range(self._view.size) if receive.source is None else (receive.source,)
        announced: tuple[int, GroupView, Any] | None = None
        for source in ranks:
            if source == self._view.rank:
                continue
            free = self._streams.free(source, receive.tag) if self._streams else None
            if free is not None and (free.is_over or receive.source is not None):
                self._streams.hold(free, receive)
                return True
            if free is not None:
                coming = coming or free
            elif announced is None:
                pair = self._pair(source, self._view.rank)
                found = self._engine.router.expected(pair.id, receive.tag)
                if found is not None:
                    announced = source, pair, found
        if announced is not None:
            self._receive(receive, *announced)
        elif coming is not None:
            self._streams.hold(coming, receive)
        return announced is not None or coming is not None

    def _receive(self, receive: Receive, source: int, pair: GroupView, found: Any) -> None:
        """Post the receive of a message that a peer announces."""
        form, out = _announced(found), receive.form.out
        if isinstance(found, Cause):
            form = np.dtype(np.uint8), ()  # of no account: posting it fails with the cause
        elif out is not None:
            own = shape_of(out)
            form = out.flat.dtype, own if form is None or not fits(own, form[1]) else form[1]
        elif form is None:
            mine = self._view.called(self._view.rank)
            what = f"a message with {receive.tag} that {mine} cannot take"
            message = f"{self._view.called(source)} announced {what}: {describe(found)}"
            self._engine.refuse(pair, receive.tag, message)
            receive.fail(CollectiveError(message, key=receive.tag))
            return
        dtype, shape = form
        flat = np.empty(math.prod(shape), dtype) if out is None else out.flat
        transfer = receive.transfer = Transfer(self._streams, source, receive, flat, shape)
        receive.handle.seq = transfer.seq = self._engine.router.num_uses(pair.id, receive.tag)
        self._streams.add(transfer)
        self._post(
            pair, receive.tag, HostArray(flat, shape, receive.form.kind, True), transfer, (NEVER, receive.priority)
        )

    def _post(
        self, pair: GroupView, tag: str, array: HostArray, future: Handle[None] | Transfer, urgency: tuple[float, int]
    ) -> None:
        """Post this rank's half: the array to send, or where the message goes; ``urgency``: timeout_s and priority."""
        dtype, shape = array.dtype, array.shape
        source, result = (array.flat, None) if pair.rank == _SENDER else (None, array.flat)
        operation = Operation(future, source, result, Work(None, dtype, 2, in_result=False), priority=urgency[1])
        program = programs.send(pair.rank, math.prod(shape), chunk_elements(dtype))
        sizes = ItemSizes(dtype.itemsize, dtype.itemsize)
        post = Post(pair, tag, signature_of(dtype, shape), program, sizes, overlapping=True)
        self._engine.post(post, operation, urgency[0])
        future.seq = self._engine.router.num_uses(pair.id, tag) - 1
        if not operation.is_over:
            future.operation = operation

    def _begin_to_wait(self, receive: Receive) -> None:
        """Start the timers, which would be most of the cost of a message that is here at once."""
        if receive.timeout_s == NEVER:
            return
        later = self._engine.reactor.call_later
        receive.timers.append(later(receive.timeout_s, self._expire, receive))
        if self._engine.deadlines.stall_after_s < receive.timeout_s:
            receive.timers.append(later(self._engine.deadlines.stall_after_s, self._report, receive))

    def _on_end(self, receive: Receive) -> None:
        """Forget a receive without a message: from this moment on it takes none."""
        receive.stop()
        if receive.transfer is not None:
            self._streams.end(receive)
        elif receive in self._waiting:
            self._waiting.remove(receive)

    def _expire(self, receive: Receive) -> None:
        transfer, mine = receive.transfer, (self._view.rank,)
        self._on_end(receive)
        limit = f"within {receive.timeout_s:.1f} s"
        if transfer is None:
            missing = () if receive.source is None else (receive.source,)
            message = f"no message with {receive.tag} came from {self._senders(receive)} {limit}"
            error = CollectiveTimeout(message, key=receive.tag, arrived=mine, missing=missing)
        else:
            where = f"from {self._view.called(transfer.source)} did not arrive completely {limit}"
            message = f"a message with {receive.tag} {where}: the next receive gets it"
            error = CollectiveTimeout(message, key=receive.tag, arrived=tuple(sorted((*mine, transfer.source))))
        receive.fail(error)

    def _report(self, receive: Receive) -> None:
        mine, waited_s = self._view.called(self._view.rank), self._engine.deadlines.stall_after_s
        whom = self._senders(receive)
        logger.warning("%s has waited %.1f s for a message with %s from %s", mine, waited_s, receive.tag, whom)

    def _senders(self, receive: Receive) -> str:
        """Ranks that may send it, as text, with the reason for each that can send nothing more."""
        if receive.transfer is not None:
            return f"{self._view.called(receive.transfer.source)}, which is under way"
        if receive.source is not None:
            return self._view.called(receive.source)
        lost = self._engine.router.lost
        gone = [lost[member].message for member in self._view.members if member in lost]
        return f"any rank ({'; '.join(gone)})" if gone else "any rank"

    def _lost_source(self, source: int | None) -> Cause | None:
        lost = self._engine.router.lost
        if not lost:
            return None
        if source is not None:
            return lost.get(self._view.members[source])
        others = [member for rank, member in enumerate(self._view.members) if rank != self._view.rank]
        return lost[others[0]] if others and all(member in lost for member in others) else None

    def _on_peer_lost(self) -> None:
        for receive in list(self._waiting):
            cause = self._lost_source(receive.source)
            if cause is not None:
                self._waiting.remove(receive)
                receive.fail(error_of(cause, receive.tag, self._title(receive)))

    def _title(self, receive: Receive) -> str:
        if receive.source is None:
            return f"a message with {receive.tag}"
        return self._pair(receive.source, self._view.rank).titled(receive.tag)


async def _served(service: Service, source: int, message: Handle[Message], whose: str) -> None:
    """Serve one message. A failure affects its sender alone, which sees its own timeout or abort."""
    try:
        await service(source, message)
    except CollectiveAborted as error:
        logger.debug("a request of %s was given up: %s", whose, error)
    except (KfcommError, ValueError, TypeError) as error:
        logger.warning("a request of %s could not be served: %s", whose, error)


def _announced(signature: Any) -> tuple[np.dtype[Any], Shape] | None:
    """Dtype and shape of a message that a peer announces; None if it announces something else."""
    try:
        announced = Signature(*signature)
        dtype, shape = dtype_of(announced.dtype), announced.shape
        if not all(type(length) is int and 0 <= length <= MAX_ELEMENTS for length in shape):
            return None
        is_message = announced == signature_of(dtype, shape)
    except (TypeError, ConfigError):
        return None
    fits = len(shape) <= MAX_DIMENSIONS and math.prod(shape) <= MAX_ELEMENTS
    return (dtype, shape) if is_message and fits else None
