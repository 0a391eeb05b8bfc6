"""Exported memory of one rank in one group: places for its contributions.

A place belongs to one use of one name. It is free again when every rank, this one included, has acknowledged that use,
and so does not read it any more. A rank whose call has failed acknowledges, too.

Invariants: a place is never given out twice at a time. Memory grows, and is given back as a whole.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from kfcomm.arrays.devices import Sharing, Span
from kfcomm.arrays.devices.host import ALIGNMENT_NBYTES, Slab

FIRST_NBYTES: Final = 8 << 20
MAX_EARLY: Final = 1 << 10
"""Uses that others acknowledged before this rank began them."""


class NamedUse(NamedTuple):
    """One use of a name."""

    digest: int  # of the key, 63 bits
    seq: int


def digest_of(key: str) -> int:
    """The digest of a key."""
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest()) >> 1


@dataclass(slots=True, eq=False)
class SlotPlace:
    """Memory for one contribution."""

    handle: bytes  # of the exported memory in which it lies
    slab: Slab  # of that memory
    span: Span
    nbytes: int
    readers: set[int] = field(default_factory=set)  # ranks that may still read it


class Places:
    """The places of one rank in a group of ``size``."""

    def __init__(self, sharing: Sharing, size: int) -> None:
        self._sharing = sharing
        self._size = size
        self._slabs: list[tuple[bytes, Slab]] = []
        self._taken: dict[NamedUse, SlotPlace] = {}
        self._early: OrderedDict[NamedUse, set[int]] = OrderedDict()

    def __len__(self) -> int:
        """Number of places in use."""
        return len(self._taken)

    @property
    def nbytes(self) -> int:
        """Bytes of exported memory."""
        return sum(slab.memory.nbytes for _, slab in self._slabs)

    def first(self) -> tuple[bytes, int]:
        """Handle and length of the memory that was exported first.

        Raises:
            MemoryError: the device has too little.
        """
        if not self._slabs:
            self._grow(0)
        handle, slab = self._slabs[0]
        return handle, slab.memory.nbytes

    def take(self, nbytes: int, use: NamedUse) -> SlotPlace:
        """A place for the contribution of this rank to a use.

        Raises:
            MemoryError: the device has too little memory.
        """
        padded = _padded(nbytes)
        found = self._find(padded)
        if found is None:
            self._grow(padded)
            return self.take(nbytes, use)
        handle, slab, offset = found
        slab.cut(offset, padded)
        place = SlotPlace(handle, slab, Span(slab.memory, offset), nbytes)
        place.readers = set(range(self._size)) - self._early.pop(use, set())
        self._taken[use] = place
        return place

    def acknowledged(self, use: NamedUse, rank: int) -> None:
        """Note that a rank has acknowledged a use."""
        place = self._taken.get(use)
        if place is not None:
            place.readers.discard(rank)
            if not place.readers:
                self.drop(use)
            return
        self._early.setdefault(use, set()).add(rank)
        if len(self._early) > MAX_EARLY:
            self._early.popitem(last=False)

    def drop(self, use: NamedUse) -> None:
        """Free the place of a use, which no rank reads, or has heard of."""
        place = self._taken.pop(use, None)
        if place is not None:
            place.slab.mend(place.span.offset, _padded(place.nbytes))

    def close(self) -> None:
        """Give all memory back."""
        self._taken.clear()
        slabs, self._slabs = self._slabs, []
        for handle, _ in slabs:
            self._sharing.free(handle)

    def _grow(self, nbytes: int) -> None:
        """Export more memory, as much as there is already."""
        room = max(nbytes, self.nbytes, FIRST_NBYTES)
        try:
            handle, memory = self._sharing.allocate(room)
        except MemoryError:
            if room <= nbytes:
                raise
            room = nbytes
            handle, memory = self._sharing.allocate(room)
        self._slabs.append((handle, Slab(memory)))

    def _find(self, padded: int) -> tuple[bytes, Slab, int] | None:
        fits = [(hole, handle, slab) for handle, slab in self._slabs if (hole := slab.tightest(padded)) is not None]
        if not fits:
            return None
        (_, offset), handle, slab = min(fits, key=lambda fit: fit[0])
        return handle, slab, offset


def _padded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT_NBYTES) * ALIGNMENT_NBYTES
