"""Symmetric memory: arrays of one process that the others of its host can read where they are.

Each process has one *heap*, a segment as large as the machine's memory whose pages are taken when they are first
written, and maps those of its peers when it needs them. An array is identified by its offset in its owner's heap. It
lives as long as the array or a view of it, like any array; then its memory is reused, or returned to the system.

Invariants: a heap never changes its size. Only its owner decides which parts are free, never a forked child. Peers map
it for reading, and shared results for writing. It holds only the program's arrays, and nothing in it is trusted.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import weakref
from bisect import bisect
from collections import deque
from collections.abc import Callable, Sequence
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from kfcomm.errors import KfcommError, RemoteProtocolError
from kfcomm.transports.shm.segment import attach, make, size_of

if TYPE_CHECKING:
    from kfcomm.arrays.chained import ChainedArrays

logger = logging.getLogger("kfcomm")

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

KEPT_NBYTES = 1 << 28
"""Freed arrays cached for reuse; more if more is in use. The system takes half as long as a copy for each new page."""
NOWHERE = -1
MAX_LOANS = 1 << 10
"""Most arrays lent to peers at a time."""


class Loan(NamedTuple):
    """Array of this process that peers hold, too."""

    number: int  # from 1; open loans differ modulo `MAX_LOANS`
    place: int  # see ``Heap.place_of``
    block: Array  # its bytes
    is_over: Callable[[int], bool]  # whether all peers have released the loan with this number


class Heap:
    """Heap of this process, for any thread.

    Attributes:
        descriptor: of the segment, to be passed to peers; -1 when it is closed.
        num_arrays: number of arrays with a view.
        used_nbytes: bytes of these.

    Raises:
        OSError: the system refuses such a segment.
    """

    def __init__(self) -> None:
        self._owner = os.getpid()
        self._nbytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        self.descriptor = make("kfcomm-heap", self._nbytes)
        self.num_arrays = self.used_nbytes = 0
        self._mapping: mmap.mmap | None = None
        self._begin = self._top = 0
        """Address of the mapping; end of the memory ever handed out."""
        self._free: list[tuple[int, int]] = []
        """Offset and bytes of free ranges without pages, in order; no two touch."""
        self._kept: deque[tuple[int, int]] = deque()
        self._kept_nbytes = 0
        self._ended: deque[tuple[int, int]] = deque()
        self._lock = Lock()

    def close(self) -> None:
        """Close the descriptor: no further peer can map it. Arrays stay."""
        self._mapping = None  # the last of them keeps it
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def empty(self, nbytes: int) -> Array | None:
        """Allocate uninitialized bytes from the beginning of a page, freed with the array's last view; None if full."""
        room = -(-max(1, nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE
        if os.getpid() != self._owner:  # a forked child: only the parent knows what is free
            return None
        with self._lock:
            mapping = self._mapping or self._map()
            if mapping is None:
                return None
            at = self._take(room)
            if at == NOWHERE:
                return None
            self.num_arrays += 1
            self.used_nbytes += room
        block = np.frombuffer(mapping, np.uint8, room, at)
        weakref.finalize(block, self._forget, at, room).atexit = False
        self._settle()
        return block[:nbytes]  # of which ``block`` stays the base

    def place_of(self, x: Array) -> int:
        """Return the offset of an array in this heap, or `NOWHERE`. ``x`` is contiguous. Costs 0.3 µs."""
        place: int = x.__array_interface__["data"][0] - self._begin
        return place if place >= 0 and place + x.nbytes <= self._top and self.num_arrays else NOWHERE

    def _map(self) -> mmap.mmap | None:
        if self.descriptor < 0:
            return None
        try:
            self._mapping = mmap.mmap(self.descriptor, self._nbytes)
        except OSError as error:
            logger.debug("no symmetric memory: %s", error)
            return None
        whole = np.frombuffer(self._mapping, np.uint8)
        self._begin = whole.__array_interface__["data"][0]
        return self._mapping

    def _take(self, room: int) -> int:
        for at, kept in self._kept:
            if kept == room:
                self._kept.remove((at, kept))
                self._kept_nbytes -= room
                return at
        for place, (at, free) in enumerate(self._free):
            if free >= room:
                self._free[place : place + 1] = [(at + room, free - room)] if free > room else []
                return at
        at = self._top
        if at + room > self._nbytes:
            return NOWHERE
        self._top = at + room
        return at

    def _forget(self, at: int, room: int) -> None:
        """Free an array whose last view is gone: on any thread, perhaps while the lock is held."""
        if os.getpid() != self._owner:  # a forked child: the parent may still have a view
            return
        self._ended.append((at, room))
        self._settle()

    def _settle(self) -> None:
        """Free ended arrays, unless another thread is about to."""
        while self._ended and self._lock.acquire(blocking=False):
            try:
                while self._ended:
                    self._take_back(*self._ended.popleft())
            finally:
                self._lock.release()

    def _take_back(self, at: int, room: int) -> None:
        self.num_arrays -= 1
        self.used_nbytes -= room
        self._kept.append((at, room))
        self._kept_nbytes += room
        while self._kept_nbytes > max(KEPT_NBYTES, self.used_nbytes):
            at, room = self._kept.popleft()
            self._kept_nbytes -= room
            if self._mapping is not None:
                self._mapping.madvise(mmap.MADV_REMOVE, at, room)
            self._add_free(at, room)

    def _add_free(self, at: int, room: int) -> None:
        """Add a free range, merged with its neighbours."""
        place = bisect(self._free, (at, room))
        after = self._free[place : place + 1]
        if after and at + room == after[0][0]:
            room += after[0][1]
            del self._free[place]
        before = self._free[place - 1 : place]
        if before and sum(before[0]) == at:
            at, room = before[0][0], before[0][1] + room
            place -= 1
            del self._free[place]
        self._free.insert(place, (at, room))


class PeerHeap:
    """Heap of a peer, mapped when it is first needed. It owns ``descriptor``, which is -1 when it is closed.

    Raises:
        RemoteProtocolError: not a sealed segment.
    """

    def __init__(self, descriptor: int) -> None:
        self._nbytes = size_of(descriptor)
        self.descriptor = descriptor
        self._reserved: memoryview | None = None
        self._mapping: memoryview | None = None
        self._writable: memoryview | None = None

    def close(self) -> None:
        """Close it: no further array is read."""
        self._mapping = self._writable = self._reserved = None
        self._close_descriptor()

    def _close_descriptor(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def reserve(self, most_nbytes: int) -> None:
        """Map it without using it, if it has no more bytes and that can be, and so do without its descriptor."""
        if self._nbytes <= most_nbytes:
            with contextlib.suppress(KfcommError):
                self._reserved = attach(self.descriptor, self._nbytes, writable=True)
                self._close_descriptor()

    def map(self) -> bool:
        """Map it for reading; returns whether that works."""
        if self._mapping is None:
            self._mapping = self._mapped(writable=False)
        return self._mapping is not None

    def map_writable(self) -> bool:
        """Map it for writing results; returns whether that works."""
        if self._writable is None:
            self._writable = self._mapped(writable=True)
        return self._writable is not None

    def array(self, at: int, dtype: np.dtype[Any], count: int, *, writable: bool = False) -> Array:
        """Return an array in it, for reading or writing. Raises `RemoteProtocolError`: it would go beyond the heap."""
        mapping = self._writable if writable else self._mapping
        if mapping is None or not 0 <= at <= self._nbytes - count * dtype.itemsize:
            raise RemoteProtocolError(f"an array of {count} elements at {at} of a heap of {self._nbytes} bytes")
        return np.frombuffer(mapping, dtype, count, at)

    def _mapped(self, *, writable: bool) -> memoryview | None:
        if self._reserved is not None:
            return self._reserved if writable else self._reserved.toreadonly()
        if self.descriptor < 0:
            return None
        try:
            return attach(self.descriptor, self._nbytes, writable=writable)
        except KfcommError as error:
            logger.warning("arrays of a peer cannot be used where they are: %s", error)
            self.close()
            return None


class Heaps:
    """Heap of this process, whose world rank is ``rank``, and known heaps of its peers."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._own: Heap | None = None
        self._first: dict[int, Heap] = {}
        """By rank: the first heap that this process has made."""
        self._peers: dict[int, PeerHeap] = {}
        self._loans: dict[int, Loan] = {}
        self._num_loans = 0

    def own(self) -> Heap | None:
        """Return the heap of this process, made at the first call, on any thread; None if the system refuses one."""
        if self._own is None:
            try:
                heap = Heap()
            except (OSError, AttributeError) as error:  # AttributeError: a system without memfd_create
                logger.debug("no symmetric memory: %s", error)
                return None
            # A program may make its first array while the engine opens links. Peers that were shown another heap than
            # that of the arrays would read zeros, so the first heap wins. Without a lock: a child forked meanwhile
            # would wait for it for ever.
            self._own = self._first.setdefault(self.rank, heap)
            if self._own is not heap:
                heap.close()
        return self._own

    def forget(self, peer: int) -> None:
        """Forget a peer that is gone for good. Arrays lent to it stay allocated: it may still write there."""
        heap = self._peers.pop(peer, None)
        if heap is not None:
            heap.close()

    @property
    def used_nbytes(self) -> int:
        """Bytes of the arrays of this process's heap that have a view."""
        self.settle()
        return 0 if self._own is None else self._own.used_nbytes

    def add(self, peer: int, heap: PeerHeap) -> None:
        """Add the heap of a peer, which is shown on each of its links."""
        if peer in self._peers:
            heap.close()
        else:
            self._peers[peer] = heap

    def empty(self, nbytes: int) -> Array | None:
        """Allocate in the heap of this process."""
        self.settle()
        heap = self.own()
        return None if heap is None else heap.empty(nbytes)

    def lend(self, nbytes: int, is_over: Callable[[int], bool]) -> Loan | None:
        """Lend bytes to peers, allocated until the loan ``is_over``; None if there are too many loans."""
        block = self.empty(nbytes)
        number = self._num_loans + 1
        if block is None or self._own is None or number % MAX_LOANS in self._loans:
            return None
        self._num_loans = number
        loan = Loan(number, self._own.place_of(block), block, is_over)
        self._loans[number % MAX_LOANS] = loan
        return loan

    def settle(self) -> None:
        """Release loans that are over. Callable on any thread."""
        for place, loan in list(self._loans.items()):
            if loan.is_over(loan.number):
                self._loans.pop(place, None)

    def place_of(self, x: Array | ChainedArrays) -> int:
        """Return the offset of an array in this process's heap, as ``Heap.place_of``."""
        return self._own.place_of(x) if self._own is not None and isinstance(x, np.ndarray) else NOWHERE

    def map(self, ranks: Sequence[int]) -> bool:
        """Map the heaps of these ranks for reading; returns whether all can be."""
        return all(rank == self.rank or (rank in self._peers and self._peers[rank].map()) for rank in ranks)

    def array(self, rank: int, at: int, dtype: np.dtype[Any], count: int) -> Array:
        """Return an array of a rank whose heap is mapped, for reading.

        Raises:
            RemoteProtocolError: the rank is gone, or the array would go beyond its heap.
        """
        return self._peer(rank).array(at, dtype, count)

    def map_writable(self, rank: int) -> bool:
        """Map the heap of a rank for writing results; returns whether that works."""
        return rank == self.rank or (rank in self._peers and self._peers[rank].map_writable())

    def writable(self, rank: int, at: int, dtype: np.dtype[Any], count: int) -> Array:
        """Return an array of another rank whose heap is mapped for writing.

        Raises:
            RemoteProtocolError: the rank is gone, or the array would go beyond its heap.
        """
        return self._peer(rank).array(at, dtype, count, writable=True)

    def _peer(self, rank: int) -> PeerHeap:
        heap = self._peers.get(rank)
        if heap is None:
            raise RemoteProtocolError(f"the memory of rank {rank} is not there any more")
        return heap

    def close(self) -> None:
        """Close all heaps. Mappings live as long as their last view."""
        for heap in (self._own, *self._peers.values()):
            if heap is not None:
                heap.close()

    def descriptors(self) -> list[int]:
        """Return the open descriptors."""
        heaps = (self._own, *self._peers.values())
        return [heap.descriptor for heap in heaps if heap is not None and heap.descriptor >= 0]
