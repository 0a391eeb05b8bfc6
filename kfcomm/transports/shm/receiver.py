"""Receiving end of a shared-memory link, which a peer opened: it reads chunks in the peer's memory.

``Inbound.receive`` reads a payload in the peer's arena, and its piece goes back when the call returns, unless it was
lent for longer. Loans are bounded, so that other pieces always go back at once. Otherwise a sender could wait for a
receiver that itself waits for another sender.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any

from kfcomm.core.frame import Header, Kind
from kfcomm.errors import RemoteProtocolError
from kfcomm.transports.base import Owner
from kfcomm.transports.shm.link import BURST_NBYTES, BYE, LinkParts, ShmLink
from kfcomm.transports.shm.ring import MAX_LENT_NBYTES, MAX_PIECES, Word
from kfcomm.types import override

_CHUNK = int(Kind.CHUNK)
_FORTH_TAIL, _SENDER_PARKED = int(Word.FORTH_TAIL), int(Word.SENDER_PARKED)


class ShmReceiver(ShmLink):
    """Receiving end; ``arena`` is the peer's, ``max_lent`` bounds its pieces on loan."""

    _near, _far, _tail = Word.RECEIVER_PARKED, Word.SENDER_PARKED, Word.FORTH_TAIL
    _near_end, _far_end = Word.RECEIVER_ENDED, Word.SENDER_ENDED

    def __init__(self, wire: LinkParts, arena: memoryview, max_lent: int) -> None:
        self._arena = arena
        self._max_lent = max_lent
        self._lent: dict[int, int] = {}
        self._lent_nbytes = 0
        self._shown: tuple[int, int] | None = None
        self._num_returned = 0
        self.queue: deque[bytes] = deque()
        super().__init__(wire, wire.shared.receiver_rings())
        self._into.take_chunk = partial(wire.inbound.receive, self)

    @override
    def send(
        self, header: Header, payload: memoryview | None = None, owner: Owner | None = None, priority: int = 0
    ) -> bool:
        # Answers have no payload.
        if self.is_closing:
            return True
        data = self._packed(header)
        try:
            if self.queue or not self._out.put_encoded(data):
                self.queue.append(data)
                self._keeper.wake()
            self.owes_bell = True
            self._restless.add(self)
        except RemoteProtocolError as error:
            self._end_with(error)
        return True

    @override
    def withdraw(self, owner: Owner) -> Sequence[Header]:
        # Answers have no owner.
        return ()

    @override
    def lend(self) -> int | None:
        if self._shown is None:
            return None
        piece, nbytes = self._shown
        if self._lent_nbytes + nbytes > MAX_LENT_NBYTES or len(self._lent) >= self._max_lent:
            return None
        self._shown = None
        self._lent[piece] = nbytes
        self._lent_nbytes += nbytes
        self._words[Word.LENT] = self._lent_nbytes
        return piece

    @override
    def give_back(self, piece: int) -> None:
        self._lent_nbytes -= self._lent.pop(piece)
        self._words[Word.LENT] = self._lent_nbytes
        if self.is_open:
            self._return(piece)
            self.ring_bell()
        else:
            self._say_closed()

    @override
    def poll(self) -> bool:
        if not self.is_open:
            return False
        try:
            if self.queue:
                self._advance()
            if self.is_closing and not self._said_bye:
                self._say_bye()
            if self._words[_FORTH_TAIL] != self._into.head:
                try:
                    self._into.read(BURST_NBYTES, self._take)
                finally:
                    self._inbound.burst_end(self)
                    with self._fence:
                        pass
                    if self._words[_SENDER_PARKED] and self.is_open:
                        self.ring_bell()
                    else:
                        self.owes_bell = False
                return True
        except RemoteProtocolError as error:
            self._end_with(error)
            return True
        except BaseException as error:
            self._end_with(error)
            raise
        if self.owes_bell and self.is_open:
            self._settle_bell()
        if not (self.queue or self.owes_bell or self.is_closing):
            self._restless.discard(self)
        return False

    def _take(self, record: tuple[Any, ...], payload: memoryview | None) -> None:
        if record[3] == _CHUNK:
            if self._heard_bye:
                raise self._too_late()
            self._show(record[1] - 1, record[2], record[3:])
        elif record[3] or payload is None:
            raise RemoteProtocolError(f"rank {self.peer} sent a record of kind {record[3]}")
        else:
            self._frame(self._unpacked(payload))

    def _too_late(self) -> RemoteProtocolError:
        return RemoteProtocolError(f"rank {self.peer} sent a CHUNK after its BYE")

    def _refuse_chunk(self, *_: object) -> None:
        raise self._too_late()

    def _show(self, piece: int, nbytes: int, header: Header) -> None:
        """Take a chunk in the peer's arena."""
        if piece + nbytes > len(self._arena) or piece in self._lent:
            raise RemoteProtocolError(f"rank {self.peer} sent a chunk of {nbytes} bytes at {piece}")
        self._shown = piece, nbytes
        self._shown_nbytes += nbytes
        try:
            self._inbound.receive(self, header, self._arena[piece : piece + nbytes])
        finally:
            # ``lend`` clears it: then the piece goes back with ``give_back``, not now.
            is_lent, self._shown = self._shown is None, None
            if not self.is_open:
                self._say_closed()
        if not is_lent and self.is_open:
            self._return(piece)

    def _frame(self, header: Header) -> None:
        if header[0] == BYE:
            self._heard_bye = True
            self._into.take_chunk = self._refuse_chunk
        else:
            self._inbound.receive(self, header, self._arena[:0])

    def _return(self, piece: int) -> None:
        number = self._num_returned
        self._returned[number & (MAX_PIECES - 1)] = piece
        self._num_returned = number + 1
        self._words[Word.RETURNED] = number + 1

    def _advance(self) -> None:
        while self.queue and self._out.put_encoded(self.queue[0]):
            self.queue.popleft()
            self.owes_bell = True

    def _let_go(self) -> None:
        self.queue.clear()
        self._say_closed()
        if self.slots is not None:
            self.slots.close()

    def _say_closed(self) -> None:
        """After the end, tell the peer when its arena is not read any more, so that it can reuse it."""
        if not self._lent and self._shown is None:
            self._words[Word.CLOSED] = 1
