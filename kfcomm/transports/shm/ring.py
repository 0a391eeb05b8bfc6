"""A ring of records from one process to another: one writes, one reads, and neither waits.

::

    control:  tail (bytes ever written) | head (bytes ever read), each in a cache line of its own
    memory:   records, one after the other, each in one piece; the last before the end may leave room unused

    record:   its size | place | payload nbytes | kind | seven integers | payload, if it travels here
              (unsigned 64-bit words; 96 bytes with the padding; sizes are multiples of 64; 0: go to the start)

``place`` is 0 for a payload in the ring, else one more than its offset in the sender's arena. A record of kind 0 holds
an encoded header of ``core.frame``; a chunk's header goes in plain words, which saves 1 µs of msgpack.

A record is complete before the tail that covers it is stored, and it is done with before the head is: on x86 other
processors see stores in their order, and one item of a cast memoryview is one store.

Invariants: nothing that the other side wrote is believed. Sizes, places and counters out of bounds raise
``RemoteProtocolError``; each word is read once.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, TypeAlias

from kfcomm.core.frame import Header, Kind
from kfcomm.errors import RemoteProtocolError

RECORD = struct.Struct("@11Q")
HEAD_NBYTES = 96
ALIGN_NBYTES = 64
PLACE_NBYTES = 128
"""Of a record whose payload is elsewhere, or empty."""
SLACK_NBYTES = 64
"""Beyond the last record, so that a head can be read anywhere."""

_CHUNK = int(Kind.CHUNK)
_NO_FIELDS = (0,) * 8
Take: TypeAlias = "Callable[[tuple[Any, ...], memoryview | None], object]"
"""Given the integers of a record, and its payload if that travels in the ring."""
TakeChunk: TypeAlias = "Callable[[Header, memoryview], object]"
"""Given the header of a chunk and its payload."""
_ROUND_UP = HEAD_NBYTES + ALIGN_NBYTES - 1
_PACK_INTO, _UNPACK_FROM = RECORD.pack_into, RECORD.unpack_from


class RingWriter:
    """The writing side.

    Args:
        memory: ``nbytes`` (a power of two) and the slack.
        control: 64-bit words shared with the reader.
        tail: index of the word that this side writes.
        head: index of the word that the reader writes.

    Attributes:
        num_records: ever written.
        payload_nbytes: of their payloads, wherever those are.
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
        """Up to here there is room in one piece, as far as is known."""
        self.num_records = self.payload_nbytes = 0

    def put(self, header: Header, place: int, nbytes: int, payload: memoryview | bytes | None) -> bool:
        """Write a record whose header is eight integers; False if there is no room for it now.

        Raises:
            RemoteProtocolError: the reader's counter makes no sense.
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
        """Write a record that holds an encoded header; False if there is no room for it now."""
        return self.put(_NO_FIELDS, 0, len(data), data)

    @property
    def has_room_for_place(self) -> bool:
        """Whether there is room for a record whose payload is elsewhere."""
        unused = -self._tail & (self._nbytes - 1)
        size = PLACE_NBYTES if unused >= PLACE_NBYTES or not unused else PLACE_NBYTES + unused
        return self._tail + size - self._head <= self._nbytes or self._has_room(size)

    @property
    def is_empty(self) -> bool:
        """Whether the reader has read all."""
        return bool(self._control[self._head_word] == self._tail)

    def _make_room(self, at: int, size: int) -> int:
        """Where a record ends that does not fit behind the last one; 0 if there is no room for it now."""
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
    """The reading side; see `RingWriter`.

    Attributes:
        head: bytes ever read.
        is_open: reading goes on.
        take_chunk: given what ``read`` finds of chunks whose payload is in the ring.
        num_records: ever read.
        payload_nbytes: of those payloads that were in the ring.
    """

    __slots__ = (
        "_control", "_head_word", "_memory", "_nbytes", "_no_size", "_tail_word",
        "head", "is_open", "num_records", "payload_nbytes", "take_chunk",
    )  # fmt: skip

    def __init__(self, memory: memoryview, control: memoryview, *, tail: int, head: int) -> None:
        self._memory = memory
        self._control = control
        self._nbytes = len(memory) - SLACK_NBYTES
        self._no_size = ~(2 * self._nbytes - ALIGN_NBYTES)
        """Bits that no number of bytes to be read has."""
        self._tail_word, self._head_word = int(tail), int(head)
        self.head = 0
        self.is_open = True
        self.take_chunk: TakeChunk = _nobody_takes
        self.num_records = self.payload_nbytes = 0

    def read(self, limit: int, take: Take) -> None:
        """Show records that are there, at least one and not many more bytes of them than ``limit``.

        Chunks whose payload is in the ring go to ``take_chunk``, with that; all else to ``take``. A record is done with
        when that returns; so it is when it raises, which ends the reading, as does ``is_open`` when it is cleared.

        Raises:
            RemoteProtocolError: the writer does not keep to the form.
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
        """Read no more: what is being read is the last."""
        self.is_open = False
        self.take_chunk = _nobody_takes


def _nobody_takes(header: Header, payload: memoryview) -> None:
    """The link has ended, or has yet to begin."""
