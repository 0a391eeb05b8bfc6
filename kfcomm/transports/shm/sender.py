"""Sending end of a shared-memory link, which this process opened.

A chunk leaves as soon as it fits. Its payload is copied to the ring or to a piece of the arena, unless it was written
there (``reserve``) or is there for another peer. Then the caller's memory is free again. Other chunks wait, in the
order that ``transports.outbox`` describes; within one priority, results go before contributions.

Two *windows* bound the data under way to one peer: a small one for contributions, which every rank has at once, and a
larger one for partial results and results, which are at most as many as the contributions taken. If these had to wait,
each would have to be copied once more for each peer.
"""

from __future__ import annotations

import contextlib
import heapq
from collections import deque
from collections.abc import Sequence
from itertools import count
from typing import Any

from kfcomm.core.frame import Header, Kind
from kfcomm.core.machine import DOWN
from kfcomm.errors import LocalProtocolError, RemoteProtocolError
from kfcomm.transports.base import Owner
from kfcomm.transports.outbox import FRONT
from kfcomm.transports.shm.link import BURST_NBYTES, BYE, LinkParts, ShmLink
from kfcomm.transports.shm.ring import MAX_LENT_NBYTES, MAX_PIECES, Word
from kfcomm.transports.shm.segment import SLAB_NBYTES, Arena
from kfcomm.types import override

INLINE_NBYTES = 1 << 12
"""A payload up to this size travels in the ring: one copy, no piece to be returned."""
WINDOW_NBYTES = 1 << 20
"""Bytes in pieces under way to one peer, beyond which contributions wait. Pieces on loan do not count."""
LOW_LATENCY_WINDOW_NBYTES = 1 << 19
"""The only window of a low-latency link: one large piece, so that an urgent chunk waits for 2 others on its
way there and back. With more ranks than cores it costs throughput."""

_CHUNK, _SIGNATURE, _LEFT = int(Kind.CHUNK), int(Kind.SIGNATURE), int(Kind.LEFT)
_BACK_TAIL, _RECEIVER_PARKED = int(Word.BACK_TAIL), int(Word.RECEIVER_PARKED)
_FRONT = -2 * FRONT
_Waiting = tuple[int, int, Any, "memoryview | None", "Owner | None"]
"""Minus its level (twice its priority, and one more for a result), a number, header (encoded unless it is a chunk's),
payload, owner."""


class ShmSender(ShmLink):
    """Sending end; ``arena`` holds the payloads, ``large_nbytes`` is the larger window."""

    _near, _far, _tail = Word.SENDER_PARKED, Word.RECEIVER_PARKED, Word.BACK_TAIL
    _near_end, _far_end = Word.SENDER_ENDED, Word.RECEIVER_ENDED

    def __init__(self, wire: LinkParts, arena: Arena, large_nbytes: int = WINDOW_NBYTES) -> None:
        self._arena = arena
        self._pieces: dict[int, int] = {}
        self._window = WINDOW_NBYTES
        self._large_window = max(large_nbytes, WINDOW_NBYTES)
        self._nbytes = 0
        self._num_returned = 0
        self._defined: set[int] = set()
        self.queue: list[_Waiting] = []
        self._stuck: tuple[int, int, int, int] | None = None
        self._numbers = count()
        self._done: deque[Owner] = deque()
        super().__init__(wire, wire.shared.sender_rings())
        self._into.take_chunk = self._refuse_chunk

    def send(
        self, header: Header, payload: memoryview | None = None, owner: Owner | None = None, priority: int = 0
    ) -> bool:
        """Copy the payload into a slab or the record, and publish the record, or queue both.

        Raises:
            LocalProtocolError: the payload is larger than a slab.
        """
        if self.is_closing:
            return True
        if header[0] != _CHUNK:
            self._say(header)
            return True
        nbytes = 0 if payload is None else len(payload)
        try:
            if nbytes <= INLINE_NBYTES and not self.queue:
                is_put = self._out.put(header, 0, nbytes, payload)
            elif nbytes <= SLAB_NBYTES:
                is_put = not self._is_behind(header, payload, priority) and self._put(header, payload)
            else:
                raise LocalProtocolError(f"a payload of {nbytes} bytes ({SLAB_NBYTES} are allowed)")
        except RemoteProtocolError as error:
            self._end_with(error)
            return True
        if is_put:
            with self._fence:
                pass
            if self._words[_RECEIVER_PARKED]:
                self.owes_bell = True
                self._restless.add(self)
            elif self._pieces:
                self._restless.add(self)
            return True
        # A reserved piece is freed by the next publication, so a payload that must wait there needs a copy.
        if payload is not None and self._arena.is_reserved(payload):
            payload = memoryview(bytes(payload))
        heapq.heappush(self.queue, (-2 * priority - header[5], next(self._numbers), header, payload, owner))
        self._stuck = None
        self._restless.add(self)
        self._keeper.wake()
        return False

    @override
    def reserve(self, nbytes: int, priority: int) -> memoryview | None:
        if nbytes <= INLINE_NBYTES or nbytes > SLAB_NBYTES or self.is_closing:
            return None
        if self.queue and self.queue[0][0] < -2 * priority:
            return None
        try:
            return self._arena.reserve(nbytes) if self._has_room(nbytes, self._large_window) else None
        except RemoteProtocolError as error:
            self._end_with(error)
            return None

    @override
    def set_low_latency(self) -> None:
        self._window = self._large_window = LOW_LATENCY_WINDOW_NBYTES

    @override
    def withdraw(self, owner: Owner) -> Sequence[Header]:
        dropped = [entry for entry in self.queue if entry[4] is owner]
        if dropped:
            self.queue = [entry for entry in self.queue if entry[4] is not owner]
            heapq.heapify(self.queue)
            self._stuck = None
        if self._done:
            self._done = deque(other for other in self._done if other is not owner)
        return [entry[2] for entry in sorted(dropped)]

    @override
    def poll(self) -> bool:
        if not self.is_open:
            return False
        moved = False
        try:
            if self._words[Word.RETURNED] != self._num_returned:
                self._take_back()
                moved = True
            if self._words[_BACK_TAIL] != self._into.head:
                self._into.read(BURST_NBYTES, self._take)
                self._inbound.burst_end(self)
                self._tell_of_room()
                moved = True
            if self.queue and self._stuck != self._room():
                before = len(self.queue)
                self._advance()
                moved = moved or len(self.queue) != before
            if self.is_closing and not self._said_bye:
                self._say_bye()
        except RemoteProtocolError as error:
            self._end_with(error)
            return True
        except BaseException as error:
            self._end_with(error)
            raise
        if self.owes_bell and self.is_open:
            self._settle_bell()
        if not (self._pieces or self.queue or self.owes_bell or self.is_closing):
            self._restless.discard(self)
        return moved

    def _say(self, header: Header) -> None:
        """Send another frame than a chunk, ahead of all chunks that wait."""
        data = self._packed(header)
        if header[0] == _SIGNATURE:
            if header[1] in self._defined:
                self._hold_all_behind()
            self._defined.add(header[1])
        elif header[0] == _LEFT:
            self._hold_all_behind()
        try:
            if (self.queue and self.queue[0][0] == _FRONT) or not self._out.put_encoded(data):
                heapq.heappush(self.queue, (_FRONT, next(self._numbers), data, None, None))
                self._stuck = None
                self._keeper.wake()
        except RemoteProtocolError as error:
            self._end_with(error)
            return
        self.owes_bell = True
        self._restless.add(self)

    def _hold_all_behind(self) -> None:
        """Let no later chunk overtake those that wait now."""
        self.queue = [(_FRONT, next(self._numbers), *entry[2:]) for entry in sorted(self.queue)]

    def _put(self, header: Any, payload: memoryview | None) -> bool:
        if type(header) is bytes:
            return self._out.put_encoded(header)
        if payload is None:
            return self._out.put(header, 0, 0, None)
        nbytes = len(payload)
        if nbytes <= INLINE_NBYTES:
            return self._out.put(header, 0, nbytes, payload)
        is_onward = header[5] == DOWN or self._arena.is_there(payload)
        if not self._has_room(nbytes, self._large_window if is_onward else self._window):
            return False
        piece = self._arena.publish(payload)
        if piece is None:
            return False
        # One piece is under way to a peer once at a time, so that its return is unambiguous.
        if piece in self._pieces:
            self._arena.release(piece)
            return False
        self._out.put(header, piece + 1, nbytes, None)
        self._pieces[piece] = nbytes
        self._nbytes += nbytes
        return True

    def _is_behind(self, header: Header, payload: memoryview | None, priority: int) -> bool:
        """Return whether waiting chunks go before this one. A payload in the arena goes first of its level."""
        if not self.queue:
            return False
        first: int = self.queue[0][0]
        level: int = -2 * priority - header[5]
        if payload is not None and self._arena.is_there(payload):
            return first < level
        return first <= level

    def _has_room(self, nbytes: int, window: int) -> bool:
        """Return whether a piece of so many bytes can go now; a single unread piece may have any size."""
        if len(self._pieces) >= MAX_PIECES or not self._out.has_room_for_place:
            return False
        if self._nbytes + nbytes <= window:
            return True
        unread = self._nbytes - min(self._words[Word.LENT], MAX_LENT_NBYTES)
        return unread <= 0 or unread + nbytes <= window

    def _room(self) -> tuple[int, int, int, int]:
        """Return the counters that must change before a waiting chunk may fit: a retry would cost ten times as much."""
        words = self._words
        return words[Word.LENT], words[Word.FORTH_HEAD], self._num_returned, self._arena.num_freed

    def _advance(self) -> None:
        waiting = self.queue
        if waiting:
            self._stuck = self._room()
        while waiting and self._put(waiting[0][2], waiting[0][3]):
            owner = heapq.heappop(waiting)[4]
            self.owes_bell = True
            if owner is not None:
                self._done.append(owner)
        while self._done:
            self._done.popleft().sent()

    def _take_back(self) -> None:
        """Free the pieces that the peer has read."""
        upto = self._words[Word.RETURNED]
        if not 0 < upto - self._num_returned <= len(self._pieces):
            raise RemoteProtocolError(f"rank {self.peer} returned {upto - self._num_returned} pieces")
        for number in range(self._num_returned, upto):
            piece = self._returned[number & (MAX_PIECES - 1)]
            nbytes = self._pieces.pop(piece, 0)
            if not nbytes:
                raise RemoteProtocolError(f"rank {self.peer} returned a piece that it was not shown")
            self._nbytes -= nbytes
            self._arena.release(piece)
        self._num_returned = upto

    def _refuse_chunk(self, *_: object) -> None:
        raise RemoteProtocolError(f"rank {self.peer} sent a chunk to a sender of chunks")

    def _take(self, record: tuple[Any, ...], payload: memoryview | None) -> None:
        if record[3] or payload is None:
            self._refuse_chunk()
            return
        header = self._unpacked(payload)
        if header[0] == BYE:
            self._heard_bye = True
        else:
            self._inbound.receive(self, header, payload[:0])

    def _let_go(self) -> None:
        with contextlib.suppress(RemoteProtocolError):
            self._take_back()  # what was returned since the last poll: of a peer that is lost, nothing else tells
        self._done.extend(entry[4] for entry in self.queue if entry[4] is not None)
        self.queue.clear()

    def may_reuse(self) -> bool:
        """Return whether the peer of a link that has ended has released the arena."""
        return not self._pieces or bool(self._words[Word.CLOSED] == 1)

    def free_pieces(self) -> None:
        """Free all pieces: the peer has released them, or is believed gone."""
        if not self.may_reuse():
            self._arena.is_doubtful = True
        for piece in self._pieces:
            self._arena.release(piece)
        self._pieces.clear()

    def _report(self, error: BaseException | None) -> None:
        while self._done:
            self._done.popleft().sent()
        super()._report(error)
