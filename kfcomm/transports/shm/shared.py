"""Layout of the segment that the two ends of one link share, and its control words.

::

    words      counters of both rings, of returned pieces, and parked flags; each in a cache line of its own
    returned   offsets of pieces that the receiver has read, as a ring of words
    forth      ring of records from the sender of chunks
    back       ring of records from the receiver: credit, and what it has posted

The sender, which opened the link, makes the segment. Both write it, so nothing in it is trusted.
"""

from __future__ import annotations

import mmap
from enum import IntEnum
from threading import Lock

from kfcomm.transports.shm.ring import SLACK_NBYTES, RingReader, RingWriter

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

    def __init__(self, mapping: mmap.mmap) -> None:
        memory = memoryview(mapping)
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
