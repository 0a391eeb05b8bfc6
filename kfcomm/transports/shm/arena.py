"""Arena: memory from which one process shows payloads to its peers, in pieces with reference counts.

The arena is cut into slabs, and a slab into pieces of one size when that size is first needed; a slab without pieces in
use can be cut anew. The piece freed last is handed out first, since it is still in the cache.

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
    """Return the part of an arena's segment that holds pieces; offsets of pieces count from its start."""
    return memoryview(mapping)[SKEW_NBYTES:-SKEW_NBYTES]


class Arena:
    """Pieces of ``num_slabs`` MiB.

    Args:
        num_slabs: size in slabs.
        segment: descriptor and mapping of an existing segment of that size; a new one by default.

    Attributes:
        num_slabs: see above.
        descriptor: of the segment, to be passed to peers; -1 when it is closed or handed on.
        nbytes: the size of the segment.
        num_freed: number of pieces ever freed.
        is_doubtful: a piece was freed although its reader has not returned it: it may still read there.
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
        """Piece and payload, by the identity of the payload, which another object may have by now."""
        self._payload_of: dict[int, int] = {}

    @property
    def pieces_in_use(self) -> int:
        """Number of pieces that a peer may still read."""
        return sum(map(bool, self._readers.values()))

    def publish(self, payload: memoryview) -> int | None:
        """Copy a payload to a piece with one reader; returns its offset, or None if the arena is full.

        The same view published again while the piece is in use is not copied again: the piece gets one more reader. So
        the view must show the same bytes until then. No reference to it is held.
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
        """Return a piece for a payload that is written there and published next; None if the arena is full.

        It is freed if another payload is published or reserved before it.
        """
        piece = self._take(nbytes)
        if piece is None:
            return None
        view = self._view[piece : piece + nbytes]
        self._readers[piece] = 0
        self._last, self._last_piece = weakref.ref(view), piece
        return view

    def is_there(self, payload: memoryview) -> bool:
        """Return whether this view is in a piece, so that ``publish`` would not copy it."""
        return self._piece_of(payload) is not None

    def is_reserved(self, payload: memoryview) -> bool:
        """Return whether this view is a piece that is reserved and not published."""
        piece = self._piece_of(payload)
        return piece is not None and not self._readers[piece]

    def release(self, piece: int) -> None:
        """Remove one reader of a piece."""
        readers = self._readers
        left = readers[piece] - 1
        if left:
            readers[piece] = left
        else:
            self._put_back(piece)

    def _piece_of(self, payload: memoryview) -> int | None:
        """Return its piece. A slow link publishes a payload long after others, when later ones have been published."""
        if self._last is not None and self._last() is payload:
            return self._last_piece
        shown = self._shown.get(id(payload))
        return shown[0] if shown is not None and shown[1]() is payload else None

    def _take(self, nbytes: int) -> int | None:
        """Take a piece of at least so many bytes into use."""
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
        """Return a new arena with the same memory, for other links; this one is empty from then on.

        So its pages are reused, which the system takes longer to provide than a copy takes. None, without a change, if
        any piece may still be read or written.
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
        """Stop publishing. Peers keep their mappings, and views of pieces stay valid."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
            self._view.release()
            with contextlib.suppress(BufferError):
                self._mapping.close()

    def _cut(self, size: int) -> bool:
        """Cut one more slab into pieces; False if all are in use."""
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
        """Collect slabs whose pieces are all free. O(pieces), but rare: when sizes change."""
        idle = {slab for slab, used in enumerate(self._used_of_slab) if not used}
        for free in self._free:
            free[:] = [piece for piece in free if piece // SLAB_NBYTES not in idle]
        self._idle_slabs = sorted(idle, reverse=True)
