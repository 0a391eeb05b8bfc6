"""Ordered messages between the ranks of a group, for what they have to agree on: small, in order, none lost or doubled.

They travel as messages of the group's mailbox, under a tag of their own; those to one rank in one turn of the loop
travel as one. A message that a broken link may have lost is sent again, under its number: a rank that has
had it ignores it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import msgpack
import numpy as np

from kfcomm.arrays import adapt
from kfcomm.collectives.handle import Handle
from kfcomm.collectives.mailbox import Mailbox, Message
from kfcomm.core.collective import GroupView
from kfcomm.errors import CollectiveAborted, CollectiveError, KfcommError, PeerLost
from kfcomm.transports.reactor import Reactor

logger = logging.getLogger("kfcomm")

TAG = "\0order"
LEAST_NBYTES = 64
"""Records are padded to powers of two from here on: each size is a signature, which both ends of a link remember."""
AGAIN_AFTER_S = 0.1

Listener = Callable[[int, Any], None]


class Channel:
    """This rank's end, to and from every other rank of the group.

    Args:
        mailbox: of the group.
        view: the group.
        reactor: the engine's.
        listener: called with the sender and what it said, in the order in which that sender said it.
        heard: called when something that was told has been heard by all whom it was told.

    Attributes:
        batch: number of the next message, and of all others in this turn of the loop.
        num_sent: messages so far.
    """

    def __init__(
        self, mailbox: Mailbox, view: GroupView, reactor: Reactor, listener: Listener, heard: Callable[[], None]
    ) -> None:
        self.batch = 0
        self.num_sent = 0
        self._heard = heard
        self._unheard: dict[int, int] = {}
        self._mailbox = mailbox
        self._view = view
        self._reactor = reactor
        self._listener = listener
        self._outbox: dict[int, list[Any]] = {}
        self._next_to: dict[int, int] = {}
        self._next_from: dict[int, int] = {}
        self._ahead: dict[int, dict[int, list[Any]]] = {}
        self._is_closed = False
        mailbox.serve(TAG, self._receive)

    def tell(self, rank: int, what: Any) -> None:
        """Send one rank something that msgpack can carry, soon."""
        if not self._outbox:
            self._reactor.call_soon(self._flush)
            self._unheard[self.batch] = 0
        self._outbox.setdefault(rank, []).append(what)

    def tell_all(self, what: Any) -> None:
        """Send it to every other rank."""
        for rank in range(self._view.size):
            if rank != self._view.rank:
                self.tell(rank, what)

    def is_heard(self, batch: int) -> bool:
        """Whether all have heard what they were told up to this batch, or are gone."""
        return not any(number <= batch for number in self._unheard)

    def close(self) -> None:
        """Nothing more is sent or heard."""
        self._is_closed = True
        self._outbox.clear()
        self._unheard.clear()

    def _flush(self) -> None:
        if self._is_closed:
            return
        outbox, self._outbox = self._outbox, {}
        batch = self.batch
        self.batch += 1
        self._unheard[batch] = len(outbox)
        for rank, said in outbox.items():
            number = self._next_to.get(rank, 0)
            self._next_to[rank] = number + 1
            self.num_sent += 1
            self._send(rank, batch, _record([number, said]))

    def _send(self, rank: int, batch: int, record: Any) -> None:
        if self._is_closed:
            return
        handle = self._mailbox.send(adapt(record), rank, TAG, None)
        handle.when_done(self._reactor, lambda done: self._sent(rank, batch, record, done))

    def _sent(self, rank: int, batch: int, record: Any, done: Handle[None]) -> None:
        error = None if done.cancelled() else done.exception()
        if self._is_closed:
            return
        if isinstance(error, CollectiveError) and not isinstance(error, (PeerLost, CollectiveAborted)):
            mine, other = self._view.called(self._view.rank), self._view.called(rank)
            logger.warning("what %s tells %s is sent again: %s", mine, other, error)
            self._reactor.call_later(AGAIN_AFTER_S, self._send, rank, batch, record)
            return
        self._unheard[batch] -= 1
        if not self._unheard[batch]:
            del self._unheard[batch]
            self._heard()

    async def _receive(self, source: int, message: Handle[Message]) -> None:
        record, _ = await message
        number, said = _content(record)
        expected = self._next_from.get(source, 0)
        ahead = self._ahead.setdefault(source, {})
        if number >= expected:
            ahead[number] = said
        while not self._is_closed and (ready := ahead.pop(self._next_from.get(source, 0), None)) is not None:
            self._next_from[source] = self._next_from.get(source, 0) + 1
            for one in ready:
                self._listener(source, one)


def _record(content: Any) -> Any:
    packed = msgpack.packb(content)
    nbytes = LEAST_NBYTES
    while nbytes < len(packed):
        nbytes *= 2
    record = np.zeros(nbytes, np.uint8)
    record[: len(packed)] = np.frombuffer(packed, np.uint8)
    return record


def _content(record: Any) -> tuple[int, list[Any]]:
    unpacker = msgpack.Unpacker(max_buffer_size=record.size, strict_map_key=False)
    unpacker.feed(record.tobytes())
    try:
        number, said = unpacker.unpack()
        if type(number) is not int or number < 0 or type(said) is not list:
            raise ValueError((number, said))
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise KfcommError(f"a message about the order that makes no sense: {error}") from error
    return number, said
