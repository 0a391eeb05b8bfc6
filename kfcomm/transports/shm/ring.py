"""Segment that the two ends of one link share: rings of records, which one side writes and the other reads.

::

    words      counters of both rings, of returned pieces, and parked flags; each in a cache line of its own
    returned   offsets of pieces that the receiver has read, as a ring of words
    forth      ring of records from the sender of chunks
    back       ring of records from the receiver: credit, and what it has posted

    ring:      tail (bytes ever written) and head (bytes ever read) among the words; records, one after the other, each
               in one piece; bytes before the end may stay unused
    record:    its size | place | payload nbytes | kind | seven integers | payload, if it travels here
               (unsigned 64-bit words; 96 bytes with the padding; sizes are multiples of 64; 0: go to the start)

``place`` is 0 for a payload in the ring, else one more than its offset in the sender's arena. A record of kind 0 holds
an encoded header of ``core.frame``; a chunk's header goes in plain words, which saves 1 µs of msgpack.

A record is complete before the tail that covers it is stored, and fully read before the head is: on x86 other
processors see stores in their order, and one item of a cast memoryview is one store.

Invariants: the sender, which opened the link, makes the segment; both write it, so nothing in it is trusted. Sizes,
places and counters out of bounds raise ``RemoteProtocolError``; each word is read once, so that it cannot change
between check and use.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable
from enum import IntEnum
from threading import Lock
from typing import Any, TypeAlias

from kfcomm.core.frame import Header, Kind
from kfcomm.errors import RemoteProtocolError

RECORD = struct.Struct("@11Q")
HEAD_NBYTES = 96
ALIGN_NBYTES = 64
PLACE_NBYTES = 128
"""Bytes of a record whose payload is elsewhere, or empty."""
SLACK_NBYTES = 64
"""Bytes beyond the last record, so that a head can be read anywhere."""

_CHUNK = int(Kind.CHUNK)
_NO_FIELDS = (0,) * 8
Take: TypeAlias = "Callable[[tuple[Any, ...], memoryview | None], object]"
"""Callback with the integers of a record, and its payload if that is in the ring."""
TakeChunk: TypeAlias = "Callable[[Header, memoryview], object]"
"""Callback with the header of a chunk and its payload."""
_ROUND_UP = HEAD_NBYTES + ALIGN_NBYTES - 1
_PACK_INTO, _UNPACK_FROM = RECORD.pack_into, RECORD.unpack_from


class RingWriter:
    """Writing side.

    Args:
        memory: ``nbytes`` (a power of two) and the slack.
        control: 64-bit words shared with the reader.
        tail: index of the word that this side writes.
        head: index of the word that the reader writes.

    Attributes:
        num_records: number of records ever written.
        payload_nbytes: bytes of their payloads, in the ring or elsewhere.
    """

    __slots__ = (
        "_control", "_end", "_head", "_head_word", "_mask", "_memory", "_nbytes", "_tail", "_tail_word", "_words",
        "num_records", "payload_nbytes",
    )  # fmt: skip

    def __init__(self, memory: memoryview, control: memoryview, *, tail: int, head: int) -> None:
        self._memory = memory
        self._words = memory.cast("Q")
        self._control = control
        self._nbytes = len(memory) - SLACK_NBYTES
        self._mask = self._nbytes - 1
        self._tail_word, self._head_word = int(tail), int(head)
        self._tail = self._head = 0
        self._end = self._nbytes
        """End of the contiguous free space that is known."""
        self.num_records = self.payload_nbytes = 0

    def put(self, header: Header, place: int, nbytes: int, payload: memoryview | bytes | None) -> bool:
        """Write a record whose header is eight integers; False if it does not fit now.

        Raises:
            RemoteProtocolError: the reader's counter is out of bounds.
        """
        size = PLACE_NBYTES if payload is None else (nbytes + _ROUND_UP) & -ALIGN_NBYTES
        at = self._tail & self._mask
        end = self._tail + size
        if end > self._end:
            end = self._make_room(at, size)
            if not end:
                return False
            at = end - size & self._mask
        _PACK_INTO(self._memory, at, size, place, nbytes, *header)
        if payload is not None:
            at += HEAD_NBYTES
            self._memory[at : at + nbytes] = payload
        self._tail = self._control[self._tail_word] = end
        self.num_records += 1
        self.payload_nbytes += nbytes
        return True

    def put_encoded(self, data: bytes) -> bool:
        """Write a record that holds an encoded header; False if it does not fit now."""
        return self.put(_NO_FIELDS, 0, len(data), data)

    @property
    def has_room_for_place(self) -> bool:
        """Whether a record whose payload is elsewhere fits."""
        unused = -self._tail & (self._nbytes - 1)
        size = PLACE_NBYTES if unused >= PLACE_NBYTES or not unused else PLACE_NBYTES + unused
        return self._tail + size - self._head <= self._nbytes or self._has_room(size)

    @property
    def is_empty(self) -> bool:
        """Whether the reader has read every record."""
        return bool(self._control[self._head_word] == self._tail)

    def _make_room(self, at: int, size: int) -> int:
        """Return the end of a record for which the head must be read again, or that wraps; 0 if it does not fit now."""
        unused = self._nbytes - at if at + size > self._nbytes else 0
        if not self._has_room(unused + size):
            return 0
        if unused:
            self._words[at >> 3] = 0
        start = self._tail + unused
        self._end = min(self._head + self._nbytes, (start | self._mask) + 1)
        return start + size

    def _has_room(self, nbytes: int) -> bool:
        head = self._control[self._head_word]
        if not self._head <= head <= self._tail:
            raise RemoteProtocolError(f"a ring whose reader is at {head}, where {self._tail} bytes were written")
        self._head = head
        return self._tail + nbytes - head <= self._nbytes


class RingReader:
    """Reading side; see `RingWriter`."""

    __slots__ = (
        "_control", "_head_word", "_memory", "_nbytes", "_no_size", "_tail_word",
        "head", "is_open", "num_records", "payload_nbytes", "take_chunk",
    )  # fmt: skip

    def __init__(self, memory: memoryview, control: memoryview, *, tail: int, head: int) -> None:
        self._memory = memory
        self._control = control
        self._nbytes = len(memory) - SLACK_NBYTES
        self._no_size = ~(2 * self._nbytes - ALIGN_NBYTES)
        """Bits that are clear in every valid number of bytes to be read."""
        self._tail_word, self._head_word = int(tail), int(head)
        self.head = 0  # bytes ever read
        self.is_open = True
        self.take_chunk: TakeChunk = _nobody_takes  # gets the chunks that ``read`` finds with a payload in the ring
        self.num_records = self.payload_nbytes = 0  # ever read; payloads that were in the ring

    def read(self, limit: int, take: Take) -> None:
        """Read records, at least one and not many more bytes than ``limit``.

        Chunks with their payload in the ring go to ``take_chunk``, others to ``take``. A record is freed when the
        callback returns, or raises; that ends the reading, as does clearing ``is_open``.

        Raises:
            RemoteProtocolError: the writer broke the format.
        """
        control, memory, capacity, no_size = self._control, self._memory, self._nbytes, self._no_size
        head = self.head
        left = control[self._tail_word] - head
        if left & no_size or left > capacity:
            raise RemoteProtocolError(f"a ring with {left} of {capacity} bytes to read")
        rest = left - limit if left > limit else 0
        try:
            while left > rest:
                at = head & (capacity - 1)
                record = _UNPACK_FROM(memory, at)
                size = record[0]
                if not size:
                    head += capacity - at
                    left -= capacity - at
                    at = 0
                    if left <= 0:
                        raise RemoteProtocolError("a ring that goes to its start beyond its end")
                    record = _UNPACK_FROM(memory, 0)
                    size = record[0]
                if size > left or size < PLACE_NBYTES or size & no_size or at + size > capacity:
                    raise RemoteProtocolError(f"a record of {size} bytes, with {left} to read")
                head += size
                left -= size
                self.num_records += 1
                if record[1]:
                    take(record, None)
                else:
                    nbytes = record[2]
                    at += HEAD_NBYTES
                    if nbytes > size - HEAD_NBYTES:
                        raise RemoteProtocolError(f"a payload of {nbytes} bytes in a record of {size}")
                    self.payload_nbytes += nbytes
                    if record[3] == _CHUNK:
                        self.take_chunk(record[3:], memory[at : at + nbytes])
                    else:
                        take(record, memory[at : at + nbytes])
                self.head = control[self._head_word] = head
                if not self.is_open:
                    return
        except BaseException:
            self.head = control[self._head_word] = head
            raise

    def close(self) -> None:
        """Stop reading after the present record."""
        self.is_open = False
        self.take_chunk = _nobody_takes


def _nobody_takes(header: Header, payload: memoryview) -> None:
    """Drop a chunk: the link has ended, or has yet to begin."""


_LINE = 8  # words

MAX_PIECES = 1024
"""Pieces under way on one link; a power of two."""
MAX_LENT_NBYTES = 1 << 20
"""Bytes of one peer's pieces on loan. They do not count in its window, so that always moves."""
FORTH_NBYTES = 1 << 19
BACK_NBYTES = 1 << 16


class Word(IntEnum):
    """Indices of the control words."""

    FORTH_TAIL = 0 * _LINE
    FORTH_HEAD = 1 * _LINE
    BACK_TAIL = 2 * _LINE
    BACK_HEAD = 3 * _LINE
    RETURNED = 4 * _LINE
    """Pieces ever returned."""
    SENDER_PARKED = 5 * _LINE
    """A value of `Parked`."""
    RECEIVER_PARKED = 6 * _LINE
    CLOSED = 7 * _LINE
    """1 once the receiver reads the sender's arena no more."""
    LENT = 8 * _LINE
    """Bytes in pieces on loan to the receiver."""
    SENDER_ENDED = 9 * _LINE
    """1 once the sender writes nothing more, and reads what is there; the same of the receiver."""
    RECEIVER_ENDED = 10 * _LINE


class Parked(IntEnum):
    """Events that wake a side."""

    AWAKE = 0
    FOR_RECORDS = 1
    FOR_ROOM = 2
    """Also returned pieces, and free space in the ring."""


_RETURNED_AT = len(Word) * _LINE * 8
_FORTH_AT = _RETURNED_AT + MAX_PIECES * 8
_BACK_AT = _FORTH_AT + FORTH_NBYTES + SLACK_NBYTES
SHARED_NBYTES = -(-(_BACK_AT + BACK_NBYTES + SLACK_NBYTES) // mmap.PAGESIZE) * mmap.PAGESIZE


class Shared:
    """A mapped segment of a link, in parts."""

    __slots__ = ("_back", "_forth", "returned", "words")

    def __init__(self, memory: memoryview) -> None:
        self.words = memory[:_RETURNED_AT].cast("Q")
        self.returned = memory[_RETURNED_AT:_FORTH_AT].cast("Q")
        self._forth = memory[_FORTH_AT : _FORTH_AT + FORTH_NBYTES + SLACK_NBYTES]
        self._back = memory[_BACK_AT : _BACK_AT + BACK_NBYTES + SLACK_NBYTES]

    def sender_rings(self) -> tuple[RingWriter, RingReader]:
        """Return the rings of the side that sends chunks."""
        return (
            RingWriter(self._forth, self.words, tail=Word.FORTH_TAIL, head=Word.FORTH_HEAD),
            RingReader(self._back, self.words, tail=Word.BACK_TAIL, head=Word.BACK_HEAD),
        )

    def receiver_rings(self) -> tuple[RingWriter, RingReader]:
        """Return the rings of the other side."""
        return (
            RingWriter(self._back, self.words, tail=Word.BACK_TAIL, head=Word.BACK_HEAD),
            RingReader(self._forth, self.words, tail=Word.FORTH_TAIL, head=Word.FORTH_HEAD),
        )


def fence() -> Lock:
    """Return a memory fence: entering and leaving it orders earlier stores before later loads. 0.1 µs.

    Acquiring and releasing an uncontended lock is a full barrier on x86.
    """
    return Lock()
