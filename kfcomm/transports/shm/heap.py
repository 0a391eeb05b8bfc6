"""Symmetric memory: arrays of one process that the others of its host can read where they are.

Each process has one *heap*, a segment as large as the machine's memory of which nothing is taken before it is written,
and maps those of its peers when it first has to. An array is known by where it is in its owner's heap. It belongs to
whoever holds it, or a view of it, as any array does; when the last view is gone, its memory is used again, or given
back to the system.

Invariants: a heap never changes its size. What is free in it its owner alone decides, never a forked child. Peers map
it to be read, and shared results to be written. What they find there is what the owner's program has put there: nothing
else is kept in it, and nothing in it is believed.
"""

from __future__ import annotations

import logging
import mmap
import os
import weakref
from bisect import bisect
from collections import deque
from collections.abc import Callable, Sequence
from threading import Lock
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from kfcomm.errors import KfcommError, RemoteProtocolError
from kfcomm.transports.shm.segment import attach, make, size_of

logger = logging.getLogger("kfcomm")

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

KEPT_NBYTES = 1 << 28
"""Of arrays that are no more, kept to be used again; more, where as much is in use. The system takes half as long as a
copy for each new page."""
NOWHERE = -1
MAX_LOANS = 1 << 10
"""Arrays that are lent to peers at a time."""


class Loan(NamedTuple):
    """An array of this process that peers hold, too.

    Attributes:
        number: of the loan, from 1; no two that are open are alike modulo `MAX_LOANS`.
        place: see ``Heap.place_of``.
        block: its bytes.
        is_over: whether no peer holds it any more, given its number.
    """

    number: int
    place: int
    block: Array
    is_over: Callable[[int], bool]


class Heap:
    """The heap of this process. May be used by any thread.

    Attributes:
        descriptor: of the segment, to be passed to peers; -1 when it is closed.
        num_arrays: that were made, and have a view.
        used_nbytes: of these.

    Raises:
        OSError: the system does not give such a segment.
    """

    def __init__(self) -> None:
        self._owner = os.getpid()
        self._nbytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        self.descriptor = make("kfcomm-heap", self._nbytes)
        self.num_arrays = self.used_nbytes = 0
        self._mapping: mmap.mmap | None = None
        self._begin = self._top = 0
        """Where it is mapped; what was ever handed out ends there."""
        self._free: list[tuple[int, int]] = []
        """Where and how many bytes, by their places, without memory; no two touch."""
        self._kept: deque[tuple[int, int]] = deque()
        self._kept_nbytes = 0
        self._ended: deque[tuple[int, int]] = deque()
        self._lock = Lock()

    def close(self) -> None:
        """Peers that have not mapped it will not any more. Arrays stay."""
        self._mapping = None  # it goes with the last of them
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def empty(self, nbytes: int) -> Array | None:
        """Bytes of unknown content, from the beginning of a page; None if the system gives no more.

        None, too, in a forked child: what is free is for the parent to know. They are free again when the array, and
        all that was made of it, is gone.
        """
        room = -(-max(1, nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE
        if os.getpid() != self._owner:
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
        """Where an array begins in this heap; `NOWHERE` if it is elsewhere. ``x`` is contiguous. Costs 0.3 µs."""
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
        """The last view is gone: on any thread, perhaps while this one is at work here.

        In a forked child nothing is: the parent may have a view yet.
        """
        if os.getpid() != self._owner:
            return
        self._ended.append((at, room))
        self._settle()

    def _settle(self) -> None:
        """Take back what has ended, unless somebody is about to."""
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
        """One more, and one with those that it touches."""
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
    """The heap of a peer, mapped when it is first needed.

    Args:
        descriptor: of the segment; it is closed with this.

    Attributes:
        descriptor: see above; -1 when it is closed.

    Raises:
        RemoteProtocolError: it is none, or could change its size.
    """

    def __init__(self, descriptor: int) -> None:
        self._nbytes = size_of(descriptor)
        self.descriptor = descriptor
        self._mapping: mmap.mmap | None = None
        self._writable: mmap.mmap | None = None

    def close(self) -> None:
        """Nothing more is read in it."""
        self._mapping = self._writable = None
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def map(self) -> bool:
        """Whether arrays in it can be read."""
        if self._mapping is None:
            self._mapping = self._mapped(writable=False)
        return self._mapping is not None

    def map_writable(self) -> bool:
        """Whether results in it can be written."""
        if self._writable is None:
            self._writable = self._mapped(writable=True)
        return self._writable is not None

    def array(self, at: int, dtype: np.dtype[Any], count: int, *, writable: bool = False) -> Array:
        """An array in it, to be read or written.

        Raises:
            RemoteProtocolError: there is none.
        """
        mapping = self._writable if writable else self._mapping
        if mapping is None or not 0 <= at <= self._nbytes - count * dtype.itemsize:
            raise RemoteProtocolError(f"an array of {count} elements at {at} of a heap of {self._nbytes} bytes")
        return np.frombuffer(mapping, dtype, count, at)

    def _mapped(self, *, writable: bool) -> mmap.mmap | None:
        if self.descriptor < 0:
            return None
        try:
            return attach(self.descriptor, self._nbytes, writable=writable)
        except KfcommError as error:
            logger.warning("arrays of a peer cannot be used where they are: %s", error)
            self.close()
            return None


class Heaps:
    """The heap of this process and those of its peers, as far as they are known.

    Args:
        rank: world rank of this process.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._own: Heap | None = None
        self._first: dict[int, Heap] = {}
        """By rank: the own one that was made first."""
        self._peers: dict[int, PeerHeap] = {}
        self._loans: dict[int, Loan] = {}
        self._num_loans = 0

    def own(self) -> Heap | None:
        """That of this process, made when it is first asked for, by any thread; None if the system gives none.

        A program makes its first array while links are opened behind its back. Peers that were shown another heap than
        the one which arrays come from would read zeros, so there is one, whoever comes first. No lock: a child that is
        forked meanwhile would wait for ever.
        """
        if self._own is None:
            try:
                heap = Heap()
            except OSError as error:
                logger.debug("no symmetric memory: %s", error)
                return None
            self._own = self._first.setdefault(self.rank, heap)
            if self._own is not heap:
                heap.close()
        return self._own

    def forget(self, peer: int) -> None:
        """A peer is gone for good. What it was lent is kept: it may still write there."""
        heap = self._peers.pop(peer, None)
        if heap is not None:
            heap.close()

    @property
    def used_nbytes(self) -> int:
        """Of arrays in the heap of this process that have a view somewhere."""
        self.settle()
        return 0 if self._own is None else self._own.used_nbytes

    def add(self, peer: int, heap: PeerHeap) -> None:
        """A peer has shown its heap; again if it is reached over several links."""
        if peer in self._peers:
            heap.close()
        else:
            self._peers[peer] = heap

    def empty(self, nbytes: int) -> Array | None:
        """See ``Heap.empty``."""
        self.settle()
        heap = self.own()
        return None if heap is None else heap.empty(nbytes)

    def lend(self, nbytes: int, is_over: Callable[[int], bool]) -> Loan | None:
        """Bytes that this process and its peers hold: kept until that ``is_over``; None if there are too many such."""
        block = self.empty(nbytes)
        number = self._num_loans + 1
        if block is None or self._own is None or number % MAX_LOANS in self._loans:
            return None
        self._num_loans = number
        loan = Loan(number, self._own.place_of(block), block, is_over)
        self._loans[number % MAX_LOANS] = loan
        return loan

    def settle(self) -> None:
        """Let go of what peers hold no more. May be called by any thread."""
        for place, loan in list(self._loans.items()):
            if loan.is_over(loan.number):
                self._loans.pop(place, None)

    def place_of(self, x: Array) -> int:
        """See ``Heap.place_of``."""
        return NOWHERE if self._own is None else self._own.place_of(x)

    def map(self, ranks: Sequence[int]) -> bool:
        """Whether arrays of all these can be read where they are."""
        return all(rank == self.rank or (rank in self._peers and self._peers[rank].map()) for rank in ranks)

    def array(self, rank: int, at: int, dtype: np.dtype[Any], count: int) -> Array:
        """An array of a rank whose heap is mapped, to be read.

        Raises:
            RemoteProtocolError: there is none.
        """
        return self._peer(rank).array(at, dtype, count)

    def map_writable(self, rank: int) -> bool:
        """Whether results can be written to the heap of this rank."""
        return rank == self.rank or (rank in self._peers and self._peers[rank].map_writable())

    def writable(self, rank: int, at: int, dtype: np.dtype[Any], count: int) -> Array:
        """An array of another rank whose heap is mapped to be written.

        Raises:
            RemoteProtocolError: there is none.
        """
        return self._peer(rank).array(at, dtype, count, writable=True)

    def _peer(self, rank: int) -> PeerHeap:
        heap = self._peers.get(rank)
        if heap is None:
            raise RemoteProtocolError(f"the memory of rank {rank} is not there any more")
        return heap

    def close(self) -> None:
        """Nothing more is mapped or made. What is mapped goes with its last view."""
        for heap in (self._own, *self._peers.values()):
            if heap is not None:
                heap.close()

    def descriptors(self) -> list[int]:
        """That are open."""
        heaps = (self._own, *self._peers.values())
        return [heap.descriptor for heap in heaps if heap is not None and heap.descriptor >= 0]
