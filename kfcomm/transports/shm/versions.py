"""Versions of one blob of a process, which the peers of its host read in place, without a message.

Each version is a block of its owner's heap. A *directory*, one page of that heap, lists the blocks. It is a seqlock
(Boehm, "Can seqlocks get along with programming language memory models?", MSPC 2012)::

    key        random, by which readers know the page again; 0 once the blob is given up
    sequence   odd while the directory is being written
    nbytes     of the list that follows, in msgpack
    list       stamp, version, place, dtype and shape of each version, the latest last

A reader copies the list, then a block, then looks whether the list still has that block, by its stamp: if not, the copy
may be torn, and it is made again. So a reader never delays the owner, and needs nothing of it, not even that it runs.

Invariants: a block does not change while a directory lists it. A reader looks and copies a bounded number of times;
then, and wherever the directory does not have what is asked for, the blob is requested by messages, whose errors say
why. Nothing that a peer has written is trusted: what is out of bounds is as if it were not there.
"""

from __future__ import annotations

import math
import mmap
import os
import secrets
from collections.abc import Generator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import msgpack
import numpy as np

from kfcomm.arrays.dtypes import dtype_name, dtype_of
from kfcomm.errors import ConfigError, RemoteProtocolError
from kfcomm.transports.shm.heap import NOWHERE
from kfcomm.transports.shm.ring import fence

if TYPE_CHECKING:
    from kfcomm.arrays import HostArray
    from kfcomm.transports.shm.heap import Array, Heaps

PAGE_NBYTES = mmap.PAGESIZE
PIECE_NBYTES = 1 << 22
"""Bytes copied at a time: an event loop has 1 ms of other work to do, if it has any, between two."""
MAX_LOOKS = 64
"""Looks at a directory that is being written, which takes microseconds unless its owner is descheduled, or dead."""
MAX_COPIES = 4
"""Copies of a block that its owner replaces meanwhile, twice each."""
MAX_KEY_BITS = 63
_KEY, _SEQUENCE, _NBYTES = range(3)
_HEAD_NBYTES = 24
_MAX_DIMENSIONS = 64


class Directory:
    """Directory of the versions of one blob of this process. Used by one thread at a time.

    Attributes:
        place: of its page in the heap.
        key: by which readers know the page.
    """

    def __init__(self, heaps: Heaps, page: Array) -> None:
        self.place = heaps.place_of(page)
        self.key = secrets.randbits(MAX_KEY_BITS) | 1
        self._heaps = heaps
        self._bytes = page.data
        self._words = self._bytes.cast("Q")
        self._fence = fence()
        self._listed: dict[int, tuple[Array, list[Any]]] = {}
        """Block and entry of each listed version: a listed block stays in use."""
        self._stamp = 0
        self._words[_KEY] = self._words[_SEQUENCE] = self._words[_NBYTES] = 0
        self.show({})
        self._words[_KEY] = self.key

    @classmethod
    def make(cls, heaps: Heaps) -> Directory | None:
        """Make one in the heap of this process; None if that is full."""
        page = heaps.empty(PAGE_NBYTES)
        return None if page is None else cls(heaps, page)

    def show(self, versions: Mapping[int, HostArray]) -> None:
        """List these versions, the latest last, and no others. One outside the heap is listed as not readable."""
        listed = {version: self._entry(version, one) for version, one in versions.items()}
        data = msgpack.packb([entry for _, entry in listed.values()])
        former, self._listed = self._listed, {**self._listed, **listed}  # in use if this is interrupted
        words = self._words
        words[_SEQUENCE] |= 1
        with self._fence:
            pass
        words[_NBYTES] = len(data)
        self._bytes[_HEAD_NBYTES : _HEAD_NBYTES + len(data)] = data
        with self._fence:
            pass
        words[_SEQUENCE] += 1
        self._listed = listed
        del former

    def close(self) -> None:
        """Give the blob up: who reads now or later finds nothing."""
        self._words[_SEQUENCE] |= 1
        self._words[_KEY] = 0
        with self._fence:
            pass
        self._listed = {}

    def _entry(self, version: int, one: HostArray) -> tuple[Array, list[Any]]:
        known = self._listed.get(version)
        if known is not None and known[0] is one.flat:
            return known
        self._stamp += 1
        place = self._heaps.place_of(one.flat) if one.flat.nbytes else 0
        return one.flat, [self._stamp, version, place, dtype_name(one.flat.dtype), one.shape]


class BlobEntry(NamedTuple):
    """Block of one version in the heap of a peer."""

    stamp: int  # differs between blocks
    version: int
    place: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]


class Listing(NamedTuple):
    """Content of a directory at one sequence number."""

    sequence: int
    entries: tuple[BlobEntry, ...]

    def find(self, version: int | None) -> BlobEntry | None:
        """The entry of a version, None for the latest; None if it is not listed, or not readable."""
        for entry in reversed(self.entries):
            if version is None or entry.version == version:
                return entry if entry.place != NOWHERE else None
        return None


class PeerDirectory:
    """Directory of a peer's blob, mapped when it is first read. For any thread.

    Args:
        heaps: of this process and its peers.
        peer: world rank of the owner.
        place, key: of the directory, as the peer has told them.
    """

    def __init__(self, heaps: Heaps, peer: int, place: int, key: int) -> None:
        self._heaps = heaps
        self._peer = peer
        self._place = place
        self._key = key
        self._fence = fence()
        self._known = Listing(-1, ())
        self._mapped: tuple[memoryview, memoryview] | None = None
        """The page by bytes, and by words."""

    def reading(self, version: int | None) -> Generator[None, None, Array | None]:
        """Copy a version, None for the latest, in pieces; the result is None where it cannot be read here."""
        for _ in range(MAX_COPIES):
            listing = self._listing()
            entry = None if listing is None else listing.find(version)
            if entry is None:
                return None
            try:
                copy = yield from self._copied(entry)
            except (RemoteProtocolError, ValueError):  # beyond the heap, or of more elements than an array can have
                return None
            with self._fence:
                pass
            latest = self._listing()
            if latest is not None and any(one.stamp == entry.stamp for one in latest.entries):
                return copy
        return None

    def _copied(self, entry: BlobEntry) -> Generator[None, None, Array]:
        count = math.prod(entry.shape)
        if not count:
            return np.empty(entry.shape, entry.dtype)
        source = self._heaps.array(self._peer, entry.place, entry.dtype, count)
        if source.nbytes <= PIECE_NBYTES:
            return source.reshape(entry.shape).copy()
        flat = np.empty(count, entry.dtype)
        step = PIECE_NBYTES // entry.dtype.itemsize
        for at in range(0, count, step):
            flat[at : at + step] = source[at : at + step]
            yield
        return flat.reshape(entry.shape)

    def _listing(self) -> Listing | None:
        """The present content; None if it is given up, or stays half written."""
        mapped = self._mapped or self._map()
        if mapped is None:
            return None
        data, words = mapped
        for _ in range(MAX_LOOKS):
            if words[_KEY] != self._key:
                return None
            sequence, known = words[_SEQUENCE], self._known
            if sequence == known.sequence:
                return known
            if sequence & 1:
                os.sched_yield()
                continue
            content = bytes(data[_HEAD_NBYTES : _HEAD_NBYTES + words[_NBYTES]])
            with self._fence:
                pass
            if words[_SEQUENCE] == sequence and words[_KEY] == self._key:
                self._known = known = Listing(sequence, _entries(content))
                return known
        return None

    def _map(self) -> tuple[memoryview, memoryview] | None:
        if not self._heaps.map((self._peer,)):
            return None
        try:
            page = self._heaps.array(self._peer, self._place, np.dtype(np.uint8), PAGE_NBYTES)
            self._mapped = page.data, page.data.cast("Q")
        except (RemoteProtocolError, TypeError):
            return None
        return self._mapped


def _entries(content: bytes) -> tuple[BlobEntry, ...]:
    """The entries of a list; none if it is not one."""
    try:
        return tuple(
            BlobEntry(_number(stamp), _number(version), _number(place), dtype_of(dtype), _shape(shape))
            for stamp, version, place, dtype, shape in msgpack.unpackb(content)
        )
    except (ValueError, TypeError, ConfigError, msgpack.UnpackException):
        return ()


def _number(x: Any) -> int:
    if type(x) is not int:
        raise TypeError
    return x


def _shape(x: Any) -> tuple[int, ...]:
    shape = tuple(map(_number, x))
    if len(shape) > _MAX_DIMENSIONS or min(shape, default=0) < 0:
        raise ValueError
    return shape
