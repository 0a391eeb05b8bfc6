"""Buffers of completed calls of this rank, which other ranks may still read in place.

A call that reads its peers' buffers could end with a rendezvous, after which each rank frees its own. Instead the
buffer is *kept*. The first step of a later call under the same name frees it: the ranks meet there anyway, and each
reports whether its former uses of the name are over.

Invariant: a buffer is freed in two cases: every rank has reported so, in a call after that of the buffer; or no rank
can complete with its contents, since this rank has not joined the rendezvous before the reads. Otherwise it is
*withdrawn* first: its stamp becomes 0. A rank compares the stamp after it has read, and raises an error if it differs
from the announced one. So no rank returns data that was written to the memory after it was freed.
"""

from __future__ import annotations

import secrets
import weakref
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from kfcomm.transports.shm.heap import KEPT_NBYTES
from kfcomm.transports.shm.ring import fence

if TYPE_CHECKING:
    from kfcomm.collectives.handle import Handle

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

STAMP = np.dtype(np.int64)
"""Of the last bytes of a buffer."""
MAX_STAMP_BITS = 62
MAX_USES = 1 << 10
"""Names whose uses are looked through only now and then."""


def stamped(buffer: Array) -> int:
    """Write a new stamp to the end of a buffer of bytes, and return it."""
    stamp = secrets.randbits(MAX_STAMP_BITS) | 1
    buffer[-STAMP.itemsize :].view(STAMP)[0] = stamp
    return stamp


class KeptBuffers:
    """Kept buffers of one group, by name. Everything here runs on the engine's loop."""

    def __init__(self) -> None:
        self._kept: dict[str, dict[int, Array]] = {}
        """By name and number of the use."""
        self._uses: dict[str, list[weakref.ref[Handle[Any]]]] = {}
        self._nbytes = 0  # that are kept
        self._fence = fence()

    def begin(self, name: str, handle: Handle[Any]) -> bool:
        """Begin a use of a name; return whether all former uses are over on this rank."""
        if len(self._uses) >= MAX_USES and name not in self._uses:
            self._uses = {one: uses for one, uses in self._uses.items() if not all(map(_is_over, uses))}
        under_way = [one for one in self._uses.get(name, []) if not _is_over(one)]
        self._uses[name] = [*under_way, weakref.ref(handle)]
        return not under_way

    def has_room(self, name: str) -> bool:
        """Whether a buffer of this name may be kept, whatever its size: those of other names are not too many."""
        return self._nbytes - _nbytes(self._kept.get(name, {})) <= KEPT_NBYTES

    def keep(self, name: str, number: int, buffer: Array) -> None:
        """Keep a buffer of this use of a name."""
        self._kept.setdefault(name, {})[number] = buffer
        self._nbytes += buffer.nbytes

    def free(self, name: str, below: int) -> None:
        """Free the buffers of earlier uses, which all ranks have ended."""
        former = self._kept.pop(name, {})
        kept = {number: one for number, one in former.items() if number >= below}
        self._nbytes -= _nbytes(former) - _nbytes(kept)
        if kept:
            self._kept[name] = kept

    def withdraw(self) -> None:
        """Free all buffers: ranks that have yet to read one will notice."""
        for uses in self._kept.values():
            for one in uses.values():
                one[-STAMP.itemsize :] = 0
        with self._fence:
            pass
        self._kept.clear()
        self._uses.clear()
        self._nbytes = 0


def _nbytes(buffers: dict[int, Array]) -> int:
    return sum(one.nbytes for one in buffers.values())


def _is_over(use: weakref.ref[Handle[Any]]) -> bool:
    handle = use()
    return handle is None or handle.done()
