"""Host memory for devices: a pool of pinned memory, and host memory behind the interface of a device.

Invariants: `PinnedPool.take` never waits, and the pool never exceeds its limit. Beyond the limit, blocks are ordinary
memory: ranks that waited for pinned memory that other collectives hold could deadlock. Pinned memory stays pinned
until the pool is closed, since unpinning may wait for all work on the device.

Memory comes in slabs. A block is cut from the smallest hole that fits, and becomes a hole again when it is released;
neighbouring holes are joined. May be used on any thread.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from typing import Any, Final

import numpy as np

from kfcomm.arrays.devices import Array, Device, DeviceReport, Flat, Mark, Stream
from kfcomm.types import override


class HostDevice(Device):
    """Device of flat NumPy arrays, for arrays of the host in a group whose other ranks have theirs on devices.

    Streams and marks are None, since all work is done when its call returns; ``notify`` calls back at once, on the
    calling thread.
    """

    @property
    @override
    def report(self) -> DeviceReport:
        return DeviceReport()

    @property
    @override
    def ordinal(self) -> int:
        return 0

    @override
    def stream(self, *, urgent: bool = False) -> Stream:
        return None

    @override
    def mark(self, stream: Stream) -> Mark:
        return None

    @override
    def wait(self, stream: Stream, mark: Mark) -> None:
        pass

    @override
    def passed(self, mark: Mark) -> bool:
        return True

    @override
    def notify(self, stream: Stream, done: Callable[[BaseException | None], None]) -> None:
        done(None)

    @override
    def empty(self, count: int, dtype: np.dtype[Any], stream: Stream) -> Flat:
        return np.empty(count, dtype)

    @override
    def is_capturing(self, stream: Stream) -> bool:
        return False

    @override
    def pinned(self, nbytes: int) -> Array:
        return np.empty(nbytes, np.uint8)

    @override
    def fetch(self, source: Flat, target: Array, stream: Stream) -> None:
        self.copy(source, target, stream)

    @override
    def put(self, source: Array, target: Flat, stream: Stream) -> None:
        self.copy(source, target, stream)

    @override
    def copy(self, source: Flat, target: Flat, stream: Stream) -> None:
        target.view(np.uint8)[:] = source.view(np.uint8)

    @override
    def close(self) -> None:
        pass


HOST = HostDevice()
"""The only instance."""


LIMIT_NBYTES: Final = 64 << 20
FIRST_SLAB_NBYTES: Final = 4 << 20
ALIGNMENT_NBYTES: Final = 512
"""Blocks begin on its multiples: no two share a cache line, nor a burst of the bus."""


class PooledBlock:
    """Memory of the host, taken from a pool."""

    __slots__ = ("_offset", "_pool", "_slab", "view")

    def __init__(self, view: Array, pool: PinnedPool, slab: Slab | None, offset: int) -> None:
        self.view = view  # exactly the requested bytes; empty after ``release``
        self._pool = pool
        self._slab = slab
        self._offset = offset

    def is_pinned(self) -> bool:
        """Whether the device reads and writes it by itself; else a copy blocks the calling thread."""
        return self._slab is not None

    def release(self) -> None:
        """Return it to the pool, when it is no longer used. May be called again."""
        self._pool._release(self)


class PinnedPool:
    """Blocks of pinned memory of one device, reused, up to ``limit_nbytes``; beyond it, ordinary memory."""

    def __init__(self, device: Device, limit_nbytes: int = LIMIT_NBYTES) -> None:
        self._device = device
        self._left_nbytes = limit_nbytes
        self._slabs: list[Slab] = []
        self._lock = Lock()

    @property
    def pinned_nbytes(self) -> int:
        """Pinned bytes, in use or not."""
        with self._lock:
            return sum(slab.memory.nbytes for slab in self._slabs)

    def take(self, nbytes: int) -> PooledBlock:
        """A block of this many bytes, with any content.

        Raises:
            MemoryError: the host has too little memory, ordinary memory included.
        """
        padded = -(-nbytes // ALIGNMENT_NBYTES) * ALIGNMENT_NBYTES
        with self._lock:
            block = self._take(nbytes, padded) if padded else None
            if block is None and padded and self._grow(padded):
                block = self._take(nbytes, padded)
        return block or PooledBlock(np.empty(nbytes, np.uint8), self, None, 0)

    def close(self) -> None:
        """Free the pinned memory, that of blocks in use with their last view. New blocks are ordinary memory then."""
        with self._lock:
            # Blocks in use keep their slab's memory alive by their views.
            self._left_nbytes = 0
            self._slabs.clear()

    def _take(self, nbytes: int, padded: int) -> PooledBlock | None:
        fits = [(hole, slab) for slab in self._slabs if (hole := slab.tightest(padded)) is not None]
        if not fits:
            return None
        (_, offset), slab = min(fits, key=lambda fit: fit[0])
        slab.cut(offset, padded)
        return PooledBlock(slab.memory[offset : offset + nbytes], self, slab, offset)

    def _grow(self, padded: int) -> bool:
        """Pin another slab, as large as all before; return whether a block of this size fits now."""
        held = sum(slab.memory.nbytes for slab in self._slabs)
        nbytes = min(max(padded, held, FIRST_SLAB_NBYTES), self._left_nbytes)
        if nbytes < padded:
            return False
        try:
            memory = self._device.pinned(nbytes)
        except MemoryError:
            self._left_nbytes = 0  # asking again would be slow, and fail too
            return False
        # Counted when it is pinned: a released block stays pinned.
        self._left_nbytes -= nbytes
        self._slabs.append(Slab(memory))
        return True

    def _release(self, block: PooledBlock) -> None:
        with self._lock:
            slab, block._slab = block._slab, None
            nbytes, block.view = block.view.nbytes, block.view[:0]
            if slab is not None:
                slab.mend(block._offset, -(-nbytes // ALIGNMENT_NBYTES) * ALIGNMENT_NBYTES)


class Slab:
    """One piece of memory, and the holes in it: their lengths by their offsets."""

    __slots__ = ("holes", "memory")

    def __init__(self, memory: Any) -> None:
        self.memory = memory
        self.holes = {0: memory.nbytes}

    def tightest(self, nbytes: int) -> tuple[int, int] | None:
        """Length and offset of the shortest hole of at least this length, the first of several."""
        return min(((length, offset) for offset, length in self.holes.items() if length >= nbytes), default=None)

    def cut(self, offset: int, nbytes: int) -> None:
        """Take the beginning of a hole."""
        length = self.holes.pop(offset)
        if length > nbytes:
            self.holes[offset + nbytes] = length - nbytes

    def mend(self, offset: int, nbytes: int) -> None:
        """Make a block a hole, joined with its neighbours."""
        nbytes += self.holes.pop(offset + nbytes, 0)
        before = next((begin for begin, length in self.holes.items() if begin + length == offset), None)
        if before is not None:
            offset, nbytes = before, self.holes[before] + nbytes
        self.holes[offset] = nbytes
