"""Receives and their messages: a message is consumed only by a receive that returns it.

States of a message with one sender and tag, on the receiving rank::

    state       event                                     next
    ----------  ----------------------------------------  ------------------------------------------
    announced   a receive matches it                      held: its data is in transit, for that receive
    held        its receive ends without it               held by the receive after that one, or free
    free        a receive that matches is posted          held
    held        it has arrived, and all before it         returned
    returned    its caller is cancelled before it has     held by the receive that waits longest, or free
                the message

The first messages of a stream are held, by receives in the order of their posts. The others are free, and precede all
announced messages. When a receive ends, each receive after it takes the message before its own. Results are delivered
in the order of the messages, so that none overtakes a message that is handed back.

A free message lies in memory of the library: the caller of a receive that has ended may use its ``out`` again. That
costs one message for each receive that has ended. The sender is not affected.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np

from kfcomm.arrays.dtypes import dtype_name, fits
from kfcomm.arrays.kinds import NUMPY, ArrayKind
from kfcomm.collectives.handle import Handle
from kfcomm.collectives.on_device.through_host import Out
from kfcomm.collectives.plans import chunk_elements
from kfcomm.core.cause import Cause, CauseKind, error_of
from kfcomm.core.collective import GroupView
from kfcomm.core.signature import Signature, disagreement
from kfcomm.engine.engine import Engine
from kfcomm.engine.operation import Operation
from kfcomm.errors import CollectiveError, EpochChanged, PeerLost
from kfcomm.transports.reactor import Timer
from kfcomm.types import Verb, override

T = TypeVar("T")
Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
Shape: TypeAlias = tuple[int, ...]
Outcome: TypeAlias = Callable[[Any, int], Any]
"""What the caller of a receive gets, of the array and the group rank that sent it."""
Message: TypeAlias = tuple[Any, int]
"""An array, and the rank that sent it."""


def both(array: Any, source: int) -> Message:
    """Default result of a receive."""
    return array, source


class MessageForm(NamedTuple):
    """Form in which the caller of a receive gets its message."""

    out: Out | None = None  # the caller's memory; else the result is an array of this ``kind``
    kind: ArrayKind = NUMPY
    outcome: Outcome = both  # makes the caller's result


class Received(Handle[T]):
    """Handle of a receive. A message returned to a task that was cancelled at that moment is handed back."""

    message: Transfer | None = None
    """The message that it returned, until that has reached who awaits it."""
    _is_handed_back = False

    def __await__(self) -> Generator[Any, None, T]:
        try:
            result = yield from super().__await__()
        except BaseException:
            self.hand_back()
            raise
        self.message = None
        return result

    def hand_back(self) -> None:
        """Leave the message that it holds, if any, to the next receive."""
        message, self.message = self.message, None
        if message is not None:
            self._is_handed_back = True
            message.streams.put_back(message)

    @override
    def give_up(self) -> None:
        if not self.cancel():
            self.hand_back()

    @override
    def cancelled(self) -> bool:
        # Also of one whose message was handed back.
        return self._is_handed_back or super().cancelled()

    @override
    def result(self) -> T:
        self._check_holds()
        return super().result()

    @override
    def exception(self) -> BaseException | None:
        self._check_holds()
        return super().exception()

    def _check_holds(self) -> None:
        if self._is_handed_back:
            raise asyncio.CancelledError


@dataclass(slots=True, eq=False)
class Receive:
    """A receive that waits for its message, and then for the data. Its handle refers to it to cancel it."""

    source: int | None  # group rank; None for any
    tag: str
    form: MessageForm
    handle: Received[Any]
    timeout_s: float  # from its post to its end; ``NEVER`` for a receive that ends with its message
    priority: int
    ended: Callable[[Receive], None]  # called when it waits no longer, and has no message
    transfer: Transfer | None = None  # the message that it holds
    timers: list[Timer] = field(default_factory=list)  # end or report the wait
    since_s: float = field(default_factory=time.monotonic)

    def cancel(self) -> None:
        """Handle the caller's cancellation."""
        self.ended(self)

    def look_at_once(self) -> None:
        """Do nothing, see ``Operation``: the arrival of a message is always reported."""

    def fail(self, error: BaseException) -> None:
        """End with this error."""
        self.stop()
        if not self.handle.done():
            self.handle.set_exception(error)

    def stop(self) -> None:
        """End the wait."""
        self.handle.operation = None
        while self.timers:
            self.timers.pop().cancel()

    def take(self, transfer: Transfer) -> None:
        """Handle the arrival, or the failure, of its message."""
        if transfer.error is not None:
            self.fail(transfer.error)
            return
        self.stop()
        try:
            outcome = self.form.outcome(self._array(transfer), transfer.source)
        except Exception as error:  # noqa: BLE001  of the caller's array library, or of the peer's data
            if isinstance(error, CollectiveError) and not error.key:
                error.key = self.tag
            self.fail(error)
        else:
            self.handle.message = transfer
            self.handle.set_result(outcome)

    def _array(self, transfer: Transfer) -> Any:
        out = self.form.out
        if out is None:
            return self.form.kind.restore(transfer.flat.reshape(transfer.shape))
        if not transfer.is_lent:
            out.flat[:] = transfer.flat
        return out.finish()


class Transfer:
    """Message in transit or arrived, until a receive returns it; takes the place of the future of its operation.

    Attributes:
        source, tag, seq: its stream, and its number there.
        flat, shape: of its memory.
        is_lent: that memory is the ``out`` of the receive that holds it, and belongs to the caller.
        operation: in which the data moves; None when it is over.
        error: set if it does not arrive.
        is_over: it has arrived, or will not.
        receive: its holder; None while it is free, and when it was returned.
    """

    __slots__ = (
        "error", "flat", "is_lent", "is_over", "operation", "receive", "seq", "shape", "source", "streams", "tag",
    )  # fmt: skip

    def __init__(self, streams: Streams, source: int, receive: Receive, flat: Array, shape: Shape) -> None:
        self.streams = streams
        self.source = source
        self.tag = receive.tag
        self.seq = -1
        self.flat = flat
        self.shape = shape
        self.is_lent = receive.form.out is not None
        self.receive: Receive | None = receive
        self.operation: Operation | None = None
        self.error: BaseException | None = None
        self.is_over = False

    def done(self) -> bool:
        """Whether it has arrived, or will not."""
        return self.is_over

    def set_result(self, _: Any) -> None:
        """Note that it has arrived."""
        self.is_over = True
        self.streams.advance(self)

    def set_exception(self, error: BaseException) -> None:
        """Note that it will not arrive."""
        self.is_over, self.error = True, error
        self.streams.advance(self)

    def keep(self) -> None:
        """Move the message, and its rest, to memory of the library: the caller may use theirs again."""
        if self.is_lent and self.error is None:
            self.flat = self.flat.copy()
            if self.operation is not None:
                self.operation.redirect(self.flat)
        self.is_lent = False


class Streams:
    """The messages of each sender and tag that have begun to come and were not returned.

    ``freed`` is called with the first message of a stream, if that is free after the end of a receive.
    """

    def __init__(self, engine: Engine, view: GroupView, freed: Callable[[Transfer], None]) -> None:
        self._engine = engine
        self._view = view
        self._freed = freed
        self._streams: dict[tuple[int, str], deque[Transfer]] = {}
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._streams)

    def add(self, transfer: Transfer) -> None:
        """Hold the next message of its stream, which begins to come, for a receive."""
        self._streams.setdefault((transfer.source, transfer.tag), deque()).append(transfer)

    def free(self, source: int, tag: str) -> Transfer | None:
        """The first message of a stream that no receive holds."""
        stream = self._streams.get((source, tag))
        if stream is None or stream[-1].receive is not None:
            return None
        return next(transfer for transfer in stream if transfer.receive is None)

    def hold(self, transfer: Transfer, receive: Receive) -> None:
        """Give a free message to a receive."""
        self._hold([(transfer, receive)])
        self.advance(transfer)

    def end(self, receive: Receive) -> None:
        """Take its message from a receive."""
        transfer, receive.transfer = receive.transfer, None
        if transfer is not None and transfer.receive is receive:
            stream = self._streams[transfer.source, transfer.tag]
            self._share_out(stream, [one.receive for one in stream if one.receive not in (None, receive)])

    def put_back(self, transfer: Transfer) -> None:
        """Take back a message that has not reached the caller of the receive that had returned it."""
        transfer.keep()
        if self._is_closed:
            return
        stream = self._streams.setdefault((transfer.source, transfer.tag), deque())
        holding = [one.receive for one in stream if one.receive is not None]
        place = next((place for place, one in enumerate(stream) if one.seq > transfer.seq), len(stream))
        stream.insert(place, transfer)
        self._share_out(stream, holding)

    def drop(self, source: int, tag: str, reason: str) -> bool:
        """Refuse the messages of a stream; return whether there were any."""
        dropped = self._streams.pop((source, tag), None)
        for transfer in dropped or ():
            if transfer.operation is not None:
                self._engine.abort(transfer.operation.collective, Cause(CauseKind.CANCELLED, self._engine.rank, reason))
        return dropped is not None

    def close(self) -> None:
        """Stop delivering free messages."""
        self._is_closed = True

    def advance(self, transfer: Transfer) -> None:
        """Hand over complete messages, up to the first that is incomplete, or free."""
        key = transfer.source, transfer.tag
        stream = self._streams.get(key)
        if stream is None:  # it was dropped
            return
        if transfer.receive is None and isinstance(transfer.error, (PeerLost, EpochChanged)):
            stream.remove(transfer)  # every receive hears of that by itself
        # In their order: none may overtake a message that was handed back.
        while stream and stream[0].is_over and (receive := stream[0].receive) is not None:
            first = stream.popleft()
            first.receive = receive.transfer = None
            receive.take(first)
        if not stream:
            self._streams.pop(key, None)

    def _share_out(self, stream: deque[Transfer], receives: Sequence[Receive | None]) -> None:
        """Assign the first messages to these receives, in this order; the others are free."""
        moved = [pair for pair in zip_longest(list(stream), receives) if pair[0].receive is not pair[1]]
        for transfer, _ in moved:
            transfer.keep()  # it leaves the ``out`` of the receive that held it
        self._hold(moved)
        if stream:
            self.advance(stream[0])
        free = next((transfer for transfer in stream if transfer.receive is None), None)
        if free is not None:
            self._freed(free)

    def _hold(self, pairs: Sequence[tuple[Transfer, Receive | None]]) -> None:
        for transfer, receive in pairs:
            transfer.receive = receive
            if receive is not None:
                receive.transfer = transfer
                receive.handle.seq = transfer.seq
        for transfer, receive in pairs:
            out = None if receive is None or transfer.error is not None else receive.form.out
            if out is None or (out.flat.dtype == transfer.flat.dtype and fits(shape_of(out), transfer.shape)):
                continue
            self._disagree(transfer, out)

    def _disagree(self, transfer: Transfer, out: Out) -> None:
        """Fail a receive whose message does not fit the caller's memory."""
        source, mine = self._view.called(transfer.source), self._view.called(self._view.rank)
        sent = source, signature_of(transfer.flat.dtype, transfer.shape), 0
        unlike = disagreement(sent, (mine, signature_of(out.flat.dtype, shape_of(out)), 0))
        title = f"a message with {transfer.tag} from {source} to {mine}"
        message = f"{title} differs between ranks{unlike}"
        cause = Cause(CauseKind.MISMATCH, self._engine.rank, message)
        if transfer.operation is None:
            transfer.error = error_of(cause, transfer.tag, title)
        else:
            self._engine.abort(transfer.operation.collective, cause)


def shape_of(out: Out) -> Shape:
    """Shape of the memory for a message."""
    return tuple(out.original.shape) if hasattr(out.original, "shape") else tuple(np.shape(out.original))


def signature_of(dtype: np.dtype[Any], shape: Shape) -> Signature:
    """Signature on which sender and receiver of a message must agree."""
    return Signature(str(Verb.SEND), dtype_name(dtype), shape, chunk_elements=chunk_elements(dtype))
