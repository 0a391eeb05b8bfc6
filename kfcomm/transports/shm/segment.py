"""Anonymous shared memory, and the arena: the memory from which one process shows payloads to its peers.

Invariants: a segment is made by one process, passed as a descriptor and mapped by both, and never changes its size. It
is sealed when it is made, and the seals of a peer's segment are checked before it is mapped: a segment that shrank
under a mapping would kill its reader with SIGBUS (memfd_create(2)). It has no name on disk or below /dev/shm, so a
crash leaves nothing behind.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import socket
import sys
import weakref
from bisect import bisect_left

import numpy as np

from kfcomm.common.sockets import why_failed
from kfcomm.errors import RemoteProtocolError, TransportError
from kfcomm.transports.base import LinkRefused

_ORDERED_STORES = frozenset({"x86_64", "AMD64"})

if sys.platform == "linux":
    import fcntl

    _SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def why_unsupported() -> str | None:
    """Return why this process cannot share memory, or None."""
    if not hasattr(os, "memfd_create"):
        return "this system has no memfd_create"
    if not hasattr(socket, "send_fds"):
        return "descriptors cannot be passed over sockets here"
    # Other processors than x86 may show a peer the counter of a record before the record itself, and plain Python has
    # no ordered store; 32-bit processors may show half a word.
    if platform.machine() not in _ORDERED_STORES:
        return f"stores are not ordered on {platform.machine()}"
    if sys.maxsize < 1 << 32:
        return "a 64-bit Python is needed"
    try:
        os.close(make("kfcomm-probe", mmap.PAGESIZE))
    except OSError as error:
        return f"memfd_create does not work here: {why_failed(error)}"
    return None


def create(name: str, nbytes: int) -> tuple[int, memoryview]:
    """Make a segment; returns its descriptor, which the caller closes, and its bytes.

    Raises:
        LinkRefused: the system refuses the memory.
    """
    try:
        descriptor = make(name, nbytes)
        try:
            return descriptor, mapped(descriptor, nbytes, writable=True)
        except BaseException:
            os.close(descriptor)
            raise
    except OSError as error:
        raise LinkRefused(f"cannot share {nbytes} bytes of memory: {why_failed(error)}") from error


def attach(descriptor: int, nbytes: int, *, writable: bool) -> memoryview:
    """Map a peer's segment of ``nbytes``; the descriptor stays the caller's.

    Raises:
        RemoteProtocolError: see ``check``.
        TransportError: it cannot be mapped.
    """
    check(descriptor, nbytes)
    try:
        return mapped(descriptor, nbytes, writable=writable)
    except OSError as error:
        raise TransportError(f"cannot map {nbytes} bytes of a peer's memory: {why_failed(error)}") from error


def mapped(descriptor: int, nbytes: int, *, writable: bool, offset: int = 0) -> memoryview:
    """Return memory of a segment, mapped as long as a view of it lives. Raises `OSError`: it cannot be mapped."""
    # An mmap.mmap keeps a descriptor of its own, of which a rank with many peers would have some for each. Python 3.13
    # can do without, by ``trackfd=False``.
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    address = _mmap(None, nbytes, protection, mmap.MAP_SHARED, descriptor, offset)
    if address in (None, _MAP_FAILED):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    memory = (ctypes.c_ubyte * nbytes).from_address(address)
    weakref.finalize(memory, _munmap, address, nbytes).atexit = False
    view: memoryview = np.asarray(memory).data
    return view if writable else view.toreadonly()


_libc = ctypes.CDLL(None, use_errno=True)
_mmap, _munmap = _libc.mmap, _libc.munmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_MAP_FAILED = ctypes.c_void_p(-1).value


def check(descriptor: int, nbytes: int) -> None:
    """Check that a descriptor is a sealed segment of ``nbytes``.

    Raises:
        RemoteProtocolError: it is not a segment of that size, or could still change its size.
    """
    size = size_of(descriptor)
    if size != nbytes:
        raise RemoteProtocolError(f"shared memory of {size} bytes where {nbytes} were announced")


def size_of(descriptor: int) -> int:
    """Return the bytes of a segment. Raises `RemoteProtocolError`: not a segment, or it could still change its size."""
    try:
        sealed = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
        size = os.fstat(descriptor).st_size
    except OSError as error:
        raise RemoteProtocolError(f"expected a shared-memory descriptor: {error.strerror}") from error
    if sealed & _SEALS != _SEALS or size < 1:
        raise RemoteProtocolError(f"shared memory of {size} bytes, seals {sealed:#x}, which could change its size")
    return size


def make(name: str, nbytes: int) -> int:
    """Make a segment; returns its descriptor. Raises `OSError`: the system refuses the memory."""
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, nbytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


SLAB_NBYTES = 1 << 20
SKEW_NBYTES = 2 << 10
"""Where the first piece begins. Large arrays begin near the start of a page; pieces that did so too would be read and
written at the same places within their pages, which processors mistake for the same memory: 15 to 60 % more time."""
PIECE_NBYTES = (8 << 10, 32 << 10, 128 << 10, 256 << 10, 512 << 10, SLAB_NBYTES)


def pieces_in(segment: memoryview) -> memoryview:
    """Return the part of an arena's segment that holds pieces; offsets of pieces count from its start."""
    return segment[SKEW_NBYTES:-SKEW_NBYTES]


class Arena:
    """Pieces of shared memory with reference counts, in ``num_slabs`` slabs of a MiB.

    A slab is cut into pieces of one size when that size is first needed; a slab without pieces in use can be cut anew.
    The piece freed last is handed out first, since it is still in the cache.

    Invariants: a piece is in use from ``publish`` until every reader has been released; its bytes do not change
    meanwhile. An arena knows neither links nor the meaning of a payload.

    Args:
        num_slabs: size in slabs.
        segment: descriptor and mapping of an existing segment of that size; a new one by default.
    """

    def __init__(self, num_slabs: int, segment: tuple[int, memoryview] | None = None) -> None:
        self.num_slabs = num_slabs
        self.nbytes = num_slabs * SLAB_NBYTES + 2 * SKEW_NBYTES
        # of the segment, to be passed to peers; -1 when it is closed or handed on
        self.descriptor, self._mapping = segment or create("kfcomm-arena", self.nbytes)
        self._view = pieces_in(self._mapping)
        self._idle_slabs = list(range(num_slabs - 1, -1, -1))
        self._free: tuple[list[int], ...] = tuple([] for _ in PIECE_NBYTES)
        self._size_of_slab = [0] * num_slabs
        self._used_of_slab = [0] * num_slabs
        self._readers: dict[int, int] = {}
        self.num_freed = 0  # pieces ever freed
        self.is_doubtful = False  # a piece was freed although its reader has not returned it: it may still read there
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
        """Return a new arena with the same memory, for other links; None if any piece may still be read or written.

        This one is empty from then on.
        """
        # So its pages are reused, which the system takes longer to provide than a copy takes.
        if self._readers or self.is_doubtful or self.descriptor < 0:
            return None
        made = Arena(self.num_slabs, (self.descriptor, self._mapping))
        self.descriptor = -1
        self._idle_slabs, self._size_of_slab, self._used_of_slab = [], [], []
        self._free = tuple([] for _ in PIECE_NBYTES)
        self._view = memoryview(b"")
        return made

    def close(self) -> None:
        """Stop publishing. Peers keep their mappings, and views of pieces stay valid."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
            self._view = self._mapping = memoryview(b"")

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
