"""Slots: small collectives of one host without messages. Each rank shows what it gives in memory that all of them read.

::

    of each rank, a region that only it writes, and all have mapped:

    parked      1 while it sleeps with a use of a slot under way
    posted      by slot, the word of its latest use: what it gives is there
    shared      by slot, the word of its latest use whose part of the result is there
    buffers     by slot: for even and for odd uses, and its part of the result

A slot belongs to one name with one signature. *A use* is to copy what this rank gives to its buffer and then to store
the word of the use. When the words of all ranks have come, everybody folds all buffers; of longer ones each its part,
which the others copy. There is no order of names, no credit and no acknowledgement.

Two buffers suffice: who posts use s + 2 has completed use s + 1, which all had posted, who had thus completed use s. So
a rank whose use fails may never use the slot again, and neither may one that goes another way once. That nobody
completes a use whose word one rank has not stored is what lets all ranks go the ordinary way instead.

The memory is made by who hands out its slots, and passed to peers with each link. Nothing in it is believed: a wrong
word or buffer of a peer spoils results as a wrong message would, and nothing else.
"""

from __future__ import annotations

import logging
import mmap
import os
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from kfcomm.core.chunk import SHOWN_WHOLE_NBYTES, split
from kfcomm.errors import KfcommError
from kfcomm.transports.shm.segment import attach, check, create
from kfcomm.transports.shm.shared import fence

logger = logging.getLogger("kfcomm")

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
Arrays: TypeAlias = "Array | list[Array]"
"""One of each rank, as the rows of an array if possible."""
Combine: TypeAlias = Callable[[Arrays, Array], object]
"""Folds what all ranks gave, some elements of it, into the result, which is none of it."""
Words: TypeAlias = Callable[[], list[int]]
"""The words of all ranks of a group, read now."""

MAX_SLOTS = 1 << 14
"""Of one memory."""
BUFFERS_NBYTES, MIN_BUFFERS_NBYTES = 1 << 27, 1 << 20
"""Of all ranks together, and of each at the least. It is taken as it is used."""
MAX_SHARE = 8
"""No slot takes more than this part of the buffers."""
GENERATION = 1 << 40
"""A word is the number of a use, from 1, and so many times the generation of its strategy."""
_MAX_GENERATIONS = 1 << 22

_LINE = 64
_POSTED_AT = mmap.PAGESIZE
_SHARED_AT = _POSTED_AT + 8 * MAX_SLOTS
_BUFFERS_AT = _SHARED_AT + 8 * MAX_SLOTS
NEVER = (1 << 63) - 1
"""A word that does not come."""


def word_of(seq: int, generation: int) -> int:
    """The word of use ``seq``, from 0, of a name."""
    return (generation % _MAX_GENERATIONS) * GENERATION + seq + 1


def have_come(words: list[int], word: int) -> bool:
    """Whether all ranks have posted a use, given their latest words: this one, or a later use's.

    One with the same number and of another generation is none: those ranks do not agree.
    """
    if min(words) == word and max(words) - word < GENERATION:
        return True
    number = word % GENERATION
    return all(other == word or other % GENERATION > number for other in words)


def nbytes_of_regions(num_ranks: int) -> int:
    """Of each."""
    room = max(MIN_BUFFERS_NBYTES, BUFFERS_NBYTES // num_ranks)
    return _BUFFERS_AT + room // mmap.PAGESIZE * mmap.PAGESIZE


class SlotMemory:
    """The slots that one process hands out, as seen by one that may use them. It is mapped when the first is.

    Args:
        descriptor: of the segment; it is closed with this, or when that of a peer is mapped.
        ranks: world ranks that have a region, all of this host, in their order.
        rank: that of this process.
        is_own: it is passed to peers.

    Attributes:
        descriptor: see above; -1 when it is closed.
        num_slots: that were handed out here.

    Raises:
        RemoteProtocolError: the segment is none of this size.
    """

    def __init__(self, descriptor: int, ranks: Sequence[int], rank: int, *, is_own: bool = False) -> None:
        self.descriptor = descriptor
        self._is_own = is_own
        self._places = {world: place for place, world in enumerate(ranks)}
        self._own_place = self._places[rank]
        self._everywhere = tuple(range(len(ranks)))
        self._stride = nbytes_of_regions(len(ranks))
        self._mapping: tuple[mmap.mmap, mmap.mmap] | None = None
        self._words = memoryview(b"").cast("q")
        self.parked: Words = list
        self.num_slots = 0
        self._next_at = _BUFFERS_AT
        check(descriptor, self._stride * len(ranks))

    @classmethod
    def make(cls, ranks: Sequence[int], rank: int) -> SlotMemory:
        """New memory.

        Raises:
            SharingRefused: the system does not give the memory.
        """
        descriptor, mapping = create("kfcomm-slots", nbytes_of_regions(len(ranks)) * len(ranks))
        mapping.close()
        return cls(descriptor, ranks, rank, is_own=True)

    def close(self) -> None:
        """No slot of it is used from now on, unless one was."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def _mapped(self) -> tuple[mmap.mmap, mmap.mmap]:
        """All regions, to be read, and that of this process, to be written.

        Raises:
            KfcommError, OSError: it cannot be mapped.
        """
        if self._mapping is None:
            stride, descriptor = self._stride, self.descriptor
            everything = attach(descriptor, stride * len(self._places), writable=False)
            own = mmap.mmap(descriptor, stride, offset=stride * self._own_place)
            self._mapping = everything, own
            if not self._is_own:
                self.close()
            self._words = memoryview(own)[:_BUFFERS_AT].cast("q")
            self.parked = self._words_at(0, self._everywhere)
        return self._mapping

    def park(self, *, is_parked: bool) -> None:
        """Whether peers have to wake this process when they post; see ``Slot.post``."""
        self._words[0] = is_parked

    def sleeping(self) -> list[int]:
        """World ranks that have to be woken."""
        parked = self.parked()
        return [world for world, place in self._places.items() if parked[place]]

    def hand_out(self, nbytes: int, num_ranks: int) -> tuple[int, int] | None:
        """Number and place of a slot for contributions of so many bytes from each rank; None if there is no room."""
        room = _room(nbytes, num_ranks)
        end = self._stride
        if self.num_slots >= MAX_SLOTS or room > (end - _BUFFERS_AT) // MAX_SHARE or self._next_at + room > end:
            return None
        handed_out = self.num_slots, self._next_at
        self.num_slots += 1
        self._next_at += room
        return handed_out

    def slot(
        self, number: int, at: int, members: Sequence[int], rank: int, dtype: np.dtype[Any], count: int,
        combine: Combine,
    ) -> Slot | None:  # fmt: skip
        """A slot that was handed out; None if there can be none.

        Args:
            number: see ``hand_out``.
            at: see ``hand_out``.
            members: world ranks of the group.
            rank: of the group.
            dtype: of what is given.
            count: elements that each gives.
            combine: see ``Combine``.
        """
        last_at = self._stride - _room(count * dtype.itemsize, len(members))
        if number >= MAX_SLOTS or not _BUFFERS_AT <= at <= last_at or at % _LINE:
            return None
        if not all(world in self._places for world in members):
            return None
        if self.descriptor < 0 and self._mapping is None:  # the link over which it came has ended
            return None
        try:
            self._mapped()
        except (KfcommError, OSError) as error:
            logger.warning("no slots for small collectives: %s", error)
            return None
        places = tuple(self._places[world] for world in members)
        slot = Slot(self, number, at, places, rank, dtype, count, combine)
        slot.root, slot.is_root = members[0], not rank
        return slot

    def posted_everywhere(self) -> Array:
        """The latest words of all slots, by rank and slot."""
        strides = (self._stride, 8)
        return np.ndarray((len(self._everywhere), MAX_SLOTS), np.int64, self._mapped()[0], _POSTED_AT, strides)

    def is_everywhere(self, slot: Slot) -> bool:
        """Whether all ranks of this memory use a slot, in their order."""
        return slot.places == self._everywhere

    # What slots are made of.

    def own_words(self) -> memoryview:
        """What this process stores its words in, by ``POSTED`` or ``SHARED`` and slot."""
        return self._words

    def posted(self, number: int, places: tuple[int, ...]) -> Words:
        """Of one slot."""
        return self._words_at(_POSTED_AT + 8 * number, places)

    def shared(self, number: int, places: tuple[int, ...]) -> Words:
        """Of one slot."""
        return self._words_at(_SHARED_AT + 8 * number, places)

    def own_array(self, at: int, dtype: np.dtype[Any], count: int) -> Array:
        """In the region of this process."""
        return np.frombuffer(self._mapped()[1], dtype, count, at)

    def arrays(self, at: int, dtype: np.dtype[Any], count: int, places: tuple[int, ...]) -> Arrays:
        """Of all ranks, to be read: one array of two dimensions if their regions are equally far apart."""
        step, everything = _step(places), self._mapped()[0]
        if step:
            strides = (step * self._stride, dtype.itemsize)
            return np.ndarray((len(places), count), dtype, everything, at + places[0] * self._stride, strides)
        return [np.frombuffer(everything, dtype, count, at + place * self._stride) for place in places]

    def _words_at(self, at: int, places: tuple[int, ...]) -> Words:
        words = memoryview(self._mapped()[0]).cast("q")
        step, stride = _step(places), self._stride // 8
        first = at // 8 + places[0] * stride
        if step:
            return words[first : first + (len(places) - 1) * step * stride + 1 : step * stride].tolist
        each = [words[at // 8 + place * stride :] for place in places]
        return lambda: [one[0] for one in each]


def _step(places: tuple[int, ...]) -> int:
    """How far apart they are; 0 if not equally."""
    step = places[1] - places[0] if len(places) > 1 else 1
    return step if step > 0 and places == tuple(range(places[0], places[-1] + 1, step)) else 0


def _room(nbytes: int, num_ranks: int) -> int:
    """Bytes of a slot in each region."""
    part = -(-nbytes // num_ranks) + _LINE if nbytes > SHOWN_WHOLE_NBYTES else 0
    return 2 * _lines(nbytes) + _lines(part)


def _lines(nbytes: int) -> int:
    return -(-nbytes // _LINE) * _LINE


POSTED, SHARED = _POSTED_AT // 8, _SHARED_AT // 8


class Slot:
    """One slot, as one of its ranks uses it.

    Attributes:
        memory: that it is in.
        number: in that.
        places: of the regions of its ranks.
        posted: the latest words of all ranks.
        combine, views, use: what folds contributions, those of even and of odd uses, and which of them the latest use
            is, of this rank; a use is complete when they are folded, if it ``is_whole``, and else see ``look``.
        is_dead: this rank uses it no more.
        told_from: all ranks have been told not to use it from this use on; kept by who has handed it out.
        root: world rank of who has handed it out; ``is_root``: this one.
        parked: who has to be woken, of all ranks of the memory, read now.
        late: words that had come when not all had, for a use that has waited; to be cleared by who reads them.
        has_news: this rank has shown its part of a result, and somebody sleeps, who may have to be woken.
    """

    __slots__ = (
        "_buffers", "_fence", "_is_shared", "_parts", "_posted_at", "_shared", "_shared_at",
        "_shares", "_shown", "_words", "combine", "has_news", "is_dead", "is_root", "is_whole", "late",
        "memory", "number", "parked", "places", "posted", "root", "told_from", "use", "views",
    )  # fmt: skip

    def __init__(
        self, memory: SlotMemory, number: int, at: int, places: tuple[int, ...], rank: int, dtype: np.dtype[Any],
        count: int, combine: Combine,
    ) -> None:  # fmt: skip
        self.memory = memory
        self.number = number
        self.places = places
        self.posted = memory.posted(number, places)
        self.root, self.is_root = -1, False
        self.told_from = NEVER
        self.is_dead = self.has_news = self._is_shared = False
        self.use = 0
        self.late: list[int] = []
        self.combine = combine
        self._fence = fence()
        self._shared = memory.shared(number, places)
        self.parked = memory.parked
        self._posted_at, self._shared_at = POSTED + number, SHARED + number
        self._words = memory.own_words()
        nbytes = count * dtype.itemsize
        ats = at, at + _lines(nbytes)
        self._buffers = tuple(memory.own_array(one, dtype, count) for one in ats)
        self.views = tuple(memory.arrays(one, dtype, count, places) for one in ats)
        self._parts: list[tuple[slice, Array]] = []
        self.is_whole = nbytes <= SHOWN_WHOLE_NBYTES
        if self.is_whole:
            return
        result_at = at + 2 * _lines(nbytes)
        parts = [slice(start, start + length) for start, length in split(count, len(places))]
        mine = parts[rank]
        self._shown = memory.own_array(result_at, dtype, mine.stop - mine.start)
        self._shares = tuple([one[mine] for one in view] for view in self.views)
        for place, part in zip(places, parts, strict=True):
            (array,) = memory.arrays(result_at, dtype, part.stop - part.start, (place,))
            self._parts.append((part, array))

    def post(self, x: Array, word: int) -> bool:
        """Show what this rank gives, for its next use; whether anybody sleeps, and may have to be woken."""
        self.use = use = 1 - self.use
        self._buffers[use][:] = x
        self._words[self._posted_at] = word
        with self._fence:
            pass
        return 1 in self.parked()

    def look(self, word: int, out: Array) -> bool:
        """Whether the use of this word, this rank's latest, is complete; if so, its result has been made in ``out``.

        ``out`` may be what this rank gave.
        """
        if not self._is_shared:
            words = self.posted()
            if min(words) < word or (max(words) - word >= GENERATION and not have_come(words, word)):
                self.late = words
                return False
            if self.is_whole:
                self.combine(self.views[self.use], out)
                return True
            self.combine(self._shares[self.use], self._shown)
            self._is_shared = True
            self._words[self._shared_at] = word
            with self._fence:
                pass
            self.has_news = 1 in self.parked()
        if not have_come(self._shared(), word):
            return False
        for part, array in self._parts:
            out[part] = array
        self._is_shared = False
        return True
