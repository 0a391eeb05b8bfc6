"""The memory from which one process shows payloads to its peers: pieces, handed out and counted.

The arena is cut into slabs, and a slab into pieces of one size when pieces of that size are first needed; a slab none
of whose pieces is in use can be cut anew. The piece used last is handed out first, since it is still in the cache.

Invariants: a piece is in use from ``publish`` until every reader has been released; its bytes do not change
meanwhile. This module knows neither links nor what a payload means.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import weakref
from bisect import bisect_left

from kfcomm.transports.shm.segment import create

SLAB_NBYTES = 1 << 20
SKEW_NBYTES = 2 << 10
"""Where the first piece begins. Large arrays begin near the start of a page; pieces that did so too would be read and
written at the same places within their pages, which processors mistake for the same memory: 15 to 60 % more time."""
PIECE_NBYTES = (8 << 10, 32 << 10, 128 << 10, 256 << 10, 512 << 10, SLAB_NBYTES)


def pieces_in(mapping: mmap.mmap) -> memoryview:
    """The part of an arena's segment that holds pieces; where a piece is counts from its start."""
    return memoryview(mapping)[SKEW_NBYTES:-SKEW_NBYTES]


class Arena:
    """Pieces of ``num_slabs`` MiB.

    Args:
        num_slabs: how many.
        segment: descriptor and mapping of a segment for so many, if it is not to be made.

    Attributes:
        num_slabs: see above.
        descriptor: of the segment, to be passed to peers; -1 when it is closed or handed on.
        nbytes: the size of the segment.
        num_freed: pieces that ever came free.
        is_doubtful: a piece was taken back from a reader that has not given it back: it may read there yet.
    """

    def __init__(self, num_slabs: int, segment: tuple[int, mmap.mmap] | None = None) -> None:
        self.num_slabs = num_slabs
        self.nbytes = num_slabs * SLAB_NBYTES + 2 * SKEW_NBYTES
        self.descriptor, self._mapping = segment or create("kfcomm-arena", self.nbytes)
        self._view = pieces_in(self._mapping)
        self._idle_slabs = list(range(num_slabs - 1, -1, -1))
        self._free: tuple[list[int], ...] = tuple([] for _ in PIECE_NBYTES)
        self._size_of_slab = [0] * num_slabs
        self._used_of_slab = [0] * num_slabs
        self._readers: dict[int, int] = {}
        self.num_freed = 0
        self.is_doubtful = False
        self._last: weakref.ref[memoryview] | None = None
        self._last_piece = 0
        self._shown: dict[int, tuple[int, weakref.ref[memoryview]]] = {}
        """Payloads by their identity, which may be another's by now: the piece, and what is there."""
        self._payload_of: dict[int, int] = {}

    @property
    def pieces_in_use(self) -> int:
        """Pieces that somebody may still read."""
        return sum(map(bool, self._readers.values()))

    def publish(self, payload: memoryview) -> int | None:
        """Copy a payload to a piece with one reader: its offset, or None if there is no room now.

        The same view shown again while the piece is in use is not copied again: it gets one more reader. So until
        then it must show the same bytes. It is not kept.
        """
        piece = self._piece_of(payload)
        if piece is not None:
            self._readers[piece] += 1
            return piece
        piece = self._take(len(payload))
        if piece is None:
            return None
        self._view[piece : piece + len(payload)] = payload
        self._readers[piece] = 1
        self._last, self._last_piece = weakref.ref(payload), piece
        self._shown[id(payload)] = piece, self._last
        self._payload_of[piece] = id(payload)
        return piece

    def reserve(self, nbytes: int) -> memoryview | None:
        """A piece for a payload that is made there and published next; None if there is no room now.

        If something else is published or reserved before it, it is free again.
        """
        piece = self._take(nbytes)
        if piece is None:
            return None
        view = self._view[piece : piece + nbytes]
        self._readers[piece] = 0
        self._last, self._last_piece = weakref.ref(view), piece
        return view

    def is_there(self, payload: memoryview) -> bool:
        """Whether this view would not be copied if it was published now."""
        return self._piece_of(payload) is not None

    def is_reserved(self, payload: memoryview) -> bool:
        """Whether this view is a piece that was not published yet."""
        piece = self._piece_of(payload)
        return piece is not None and not self._readers[piece]

    def release(self, piece: int) -> None:
        """One reader less."""
        readers = self._readers
        left = readers[piece] - 1
        if left:
            readers[piece] = left
        else:
            self._put_back(piece)

    def _piece_of(self, payload: memoryview) -> int | None:
        """Where it is. Links with little room show a payload long after others have, between which others came."""
        if self._last is not None and self._last() is payload:
            return self._last_piece
        shown = self._shown.get(id(payload))
        return shown[0] if shown is not None and shown[1]() is payload else None

    def _take(self, nbytes: int) -> int | None:
        """A piece of at least so many bytes, in use from now on."""
        if self._readers.get(self._last_piece) == 0:
            self._put_back(self._last_piece)
        size = bisect_left(PIECE_NBYTES, nbytes)
        free = self._free[size]
        if not free and not self._cut(size):
            return None
        piece = free.pop()
        self._used_of_slab[piece // SLAB_NBYTES] += 1
        return piece

    def _put_back(self, piece: int) -> None:
        del self._readers[piece]
        self.num_freed += 1
        if piece == self._last_piece:
            self._last = None
        payload = self._payload_of.pop(piece, None)
        if payload is not None and self._shown.get(payload, (-1,))[0] == piece:
            del self._shown[payload]
        slab = piece // SLAB_NBYTES
        self._used_of_slab[slab] -= 1
        self._free[self._size_of_slab[slab]].append(piece)

    def handed_on(self) -> Arena | None:
        """The same memory for other links, of which all is free; for these here there is none any more.

        So its pages, which the system takes longer to give than a copy takes, are used again. None, and nothing has
        changed, where anybody may still read in it, or makes something there.
        """
        if self._readers or self.is_doubtful or self.descriptor < 0:
            return None
        made = Arena(self.num_slabs, (self.descriptor, self._mapping))
        self.descriptor = -1
        self._idle_slabs, self._size_of_slab, self._used_of_slab = [], [], []
        self._free = tuple([] for _ in PIECE_NBYTES)
        with contextlib.suppress(BufferError):
            self._view.release()
        return made

    def close(self) -> None:
        """Nothing more is published; peers keep what they have mapped, and so does who holds a view of a piece."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
            self._view.release()
            with contextlib.suppress(BufferError):
                self._mapping.close()

    def _cut(self, size: int) -> bool:
        """Make pieces of one more slab; False if all are in use."""
        if not self._idle_slabs:
            self._gather_idle_slabs()
            if not self._idle_slabs:
                return False
        slab = self._idle_slabs.pop()
        self._size_of_slab[slab] = size
        start = slab * SLAB_NBYTES
        pieces = range(start, start + SLAB_NBYTES, PIECE_NBYTES[size])
        self._free[size].extend(reversed(pieces))
        return True

    def _gather_idle_slabs(self) -> None:
        """Take back slabs whose pieces are all free. Costs O(pieces), and comes when sizes change."""
        idle = {slab for slab, used in enumerate(self._used_of_slab) if not used}
        for free in self._free:
            free[:] = [piece for piece in free if piece // SLAB_NBYTES not in idle]
        self._idle_slabs = sorted(idle, reverse=True)
