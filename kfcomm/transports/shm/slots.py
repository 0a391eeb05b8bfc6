"""Slots: small collectives of one host without messages. Each rank shows what it gives in memory that all of them read.

::

    of each rank, a region that only it writes, and all have mapped:

    parked      1 while it sleeps with a use of a slot under way
    posted      by slot, the latest word: what it gives for that is there
    shared      by slot, the latest word for which its part of the result is there
    read        by slot, the latest word for which it has read what all have shared
    given       by slot, where in its heap lies what it gives, if it does; and so of what it shows
    buffers     by slot: for even and for odd words, of what it gives and of its part of the result

A slot belongs to one name with one signature. *A use* is to copy what this rank gives to its buffer and then to store
the word of the use. When the words of all ranks have come, everybody folds all buffers; of longer ones each its part,
which the others copy. There is no order of names, no credit and no acknowledgement. What is longer still goes through
the same two buffers in *windows*, each with a word of its own: so it stays in the cache, and what a slot takes is
bounded. While one window is waited for the next is there already.

Two buffers suffice: who posts word w + 2 has completed w, for which all had shared their parts, so nobody reads what
was posted for w any more. Who shares its part for w + 2 has seen that all have posted that, who had thus completed w
and read the parts. What is not in parts needs only this: who posts use s + 2 has completed use s + 1, which all had
posted, who had thus completed use s. So a rank whose use fails may never use the slot again, and neither may one that
goes another way once. That nobody completes a use whose first word one rank has not stored is what lets all ranks go
the ordinary way instead.

The memory is made by who hands out its slots, and passed to peers with each link. Nothing in it is believed: a wrong
word or buffer of a peer spoils results as a wrong message would, and nothing else.
"""

from __future__ import annotations

import logging
import mmap
import os
import weakref
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np

from kfcomm.core.chunk import SHOWN_WHOLE_NBYTES, split
from kfcomm.errors import KfcommError
from kfcomm.transports.shm.heap import MAX_LOANS, NOWHERE, Heaps
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
WINDOW_NBYTES = 1 << 19
"""The most that a rank gives at a time: those of four ranks and their result fit in a cache."""
BUFFERS_NBYTES, MIN_BUFFERS_NBYTES = 1 << 29, 1 << 23
"""Of all ranks together, and of each at the least. It is taken as it is used."""
MAX_SHARE = 8
"""No slot takes more than this part of the buffers."""
GENERATION = 1 << 40
"""A word is the number of a use, from 1, and so many times the generation of its strategy."""
_MAX_GENERATIONS = 1 << 22


class Cut:
    """How a message is cut for a slot.

    Args:
        count: elements that each rank gives.
        itemsize: their bytes.
        num_ranks: of the group.
        is_turned: as many parts as there are ranks, of which the r-th is folded from rank r + 1 on, and at last by r:
            as along a chain to it. Else all is folded from rank 0 on.
        is_shared: the result is one array, which all ranks see.

    Attributes:
        windows: of which each has a word: where it begins and ends, and the rank from which on it is folded.
        longest: elements of the longest of them.
        is_turned, is_shared: see above.
        is_whole: everybody folds it all.
        room: bytes that a slot takes in each region.
    """

    __slots__ = ("is_shared", "is_turned", "is_whole", "longest", "room", "windows")

    def __init__(
        self, count: int, itemsize: int, num_ranks: int, *, is_turned: bool = False, is_shared: bool = False
    ) -> None:
        self.is_turned, self.is_shared = is_turned, is_shared
        window = max(1, WINDOW_NBYTES // itemsize)
        parts = split(count, num_ranks) if is_turned else [(0, count)]
        self.windows = tuple([
            (begin, min(begin + window, start + length), (part + 1) % num_ranks if is_turned else 0)
            for part, (start, length) in enumerate(parts)
            for begin in range(start, start + max(1, length), window)
        ])  # fmt: skip
        self.longest = min(window, parts[0][1])
        self.is_whole = count * itemsize <= SHOWN_WHOLE_NBYTES and not is_turned
        self.room = 2 * _lines(self.longest * itemsize)
        if not self.is_whole:
            self.room += 2 * _lines(-(-self.longest // num_ranks) * itemsize)


NEVER, WITHDRAWN = (1 << 63) - 1, -1
"""A word that does not come, and one that is less than all."""
POSTED, SHARED, READ, GIVEN, SHOWN, READY, RESULT, LOAN, RELEASED = (
    mmap.PAGESIZE // 8 + kind * MAX_SLOTS for kind in range(9)
)
"""The words of a rank, by kind and slot; `RELEASED` by loan."""
MAPPED, WRITABLE = 1, 2
"""What `READY` says of the heaps of the others, and of the first rank's."""
WINDOWS_AT_A_TIME = 16
"""Before others have their turn."""
MAX_KNOWN = 64
"""Arrays in place of which a slot keeps views."""
_LINE = 64
_BUFFERS_AT = 8 * (RELEASED + MAX_SLOTS)


def word_of(number: int, generation: int) -> int:
    """The word of window ``number``, from 0, of all uses of a name."""
    return (generation % _MAX_GENERATIONS) * GENERATION + number + 1


def nbytes_of_regions(num_ranks: int) -> int:
    """Of each."""
    room = max(MIN_BUFFERS_NBYTES, BUFFERS_NBYTES // num_ranks)
    return _BUFFERS_AT + room // mmap.PAGESIZE * mmap.PAGESIZE


class SlotMemory:
    """The slots that one process hands out, as seen by one that may use them. It is mapped when the first is.

    Args:
        descriptor: of the segment; it is closed with this, or when that of a peer is mapped.
        ranks: world ranks that have a region, all of this host, in their order.
        heaps: of this process and its peers.
        is_own: it is passed to peers.

    Attributes:
        descriptor: see above; -1 when it is closed.
        heaps: see above.
        num_slots: that were handed out here.

    Raises:
        RemoteProtocolError: the segment is none of this size.
    """

    def __init__(self, descriptor: int, ranks: Sequence[int], heaps: Heaps, *, is_own: bool = False) -> None:
        self.descriptor = descriptor
        self.heaps = heaps
        self._is_own = is_own
        self._places = {world: place for place, world in enumerate(ranks)}
        self._own_place = self._places[heaps.rank]
        self._everywhere = tuple(range(len(ranks)))
        self._stride = nbytes_of_regions(len(ranks))
        self._mapping: tuple[mmap.mmap, mmap.mmap] | None = None
        self._words = memoryview(b"").cast("q")
        self.parked: Words = list
        self.num_slots = 0
        self._next_at = _BUFFERS_AT
        check(descriptor, self._stride * len(ranks))

    @classmethod
    def make(cls, ranks: Sequence[int], heaps: Heaps) -> SlotMemory:
        """New memory.

        Raises:
            SharingRefused: the system does not give the memory.
        """
        descriptor, mapping = create("kfcomm-slots", nbytes_of_regions(len(ranks)) * len(ranks))
        mapping.close()
        return cls(descriptor, ranks, heaps, is_own=True)

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

    def hand_out(self, cut: Cut) -> tuple[int, int] | None:
        """Number and place of a slot for messages that are cut so; None if there is no room."""
        room, end = cut.room, self._stride
        if self.num_slots >= MAX_SLOTS or room > (end - _BUFFERS_AT) // MAX_SHARE or self._next_at + room > end:
            return None
        handed_out = self.num_slots, self._next_at
        self.num_slots += 1
        self._next_at += room
        return handed_out

    def slot(
        self, number: int, at: int, members: Sequence[int], rank: int, dtype: np.dtype[Any], cut: Cut,
        combine: Combine,
    ) -> Slot | None:  # fmt: skip
        """A slot that was handed out; None if there can be none.

        Args:
            number: see ``hand_out``.
            at: see ``hand_out``.
            members: world ranks of the group.
            rank: of the group.
            dtype: of what is given.
            cut: see ``hand_out``.
            combine: see ``Combine``.
        """
        last_at = self._stride - cut.room
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
        kind = Slot if cut.is_whole else SharedResultSlot if cut.is_shared else PartedSlot
        return kind(self, number, at, places, members[0], rank, dtype, cut, combine)

    def everywhere(self, kind: int) -> Array:
        """The latest words of all slots, by rank and slot."""
        strides = (self._stride, 8)
        return np.ndarray((len(self._everywhere), MAX_SLOTS), np.int64, self._mapped()[0], 8 * kind, strides)

    def is_everywhere(self, slot: Slot) -> bool:
        """Whether all ranks of this memory use a slot, in their order."""
        return slot.places == self._everywhere

    # What slots are made of.

    def own_words(self) -> memoryview:
        """What this process stores its words in, by ``POSTED`` or another kind and slot."""
        return self._words

    def ranks_at(self, places: tuple[int, ...]) -> list[int]:
        """The world ranks that have these regions."""
        ranks = list(self._places)
        return [ranks[place] for place in places]

    def words(self, kind: int, number: int, places: tuple[int, ...]) -> Words:
        """Of one slot."""
        return self._words_at(8 * (kind + number), places)

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


def _lines(nbytes: int) -> int:
    return -(-nbytes // _LINE) * _LINE


_parts = lru_cache(256)(split)  # of a window, of which most are alike; not to be changed


class Slot:
    """One slot, as one of its ranks uses it: for messages that everybody folds as a whole.

    Attributes:
        memory: that it is in.
        number: in that.
        places: of the regions of its ranks.
        posted: the latest words of all ranks.
        num_words: of each use.
        combine, views, use: what folds contributions, those of even and of odd uses, and which of them the latest use
            is, of this rank; a use is complete when they are folded, if it ``is_whole``, and else see ``look``.
        is_dead: this rank uses it no more.
        told_from: all ranks have been told not to use it from this use on; kept by who has handed it out.
        root: world rank of who has handed it out; ``is_root``: this one.
        parked: who has to be woken, of all ranks of the memory, read now.
        late: words that had come when not all had, for a use that has waited; to be cleared by who reads them.
        awaited: the word that they should have been; 0 for the use's first.
        has_moved: something has come of a use that is not complete; to be cleared by who reads it.
        has_news: this rank has stored something, and somebody sleeps, who may have to be woken.
    """

    __slots__ = (
        "_buffers", "_fence", "_posted_at", "_words", "awaited", "combine", "has_moved", "has_news", "is_dead",
        "is_root", "late", "memory", "num_words", "number", "parked", "places", "posted", "root", "told_from", "use",
        "views",
    )  # fmt: skip

    is_whole = True

    def __init__(
        self, memory: SlotMemory, number: int, at: int, places: tuple[int, ...], root: int, rank: int,
        dtype: np.dtype[Any], cut: Cut, combine: Combine,
    ) -> None:  # fmt: skip
        self.memory = memory
        self.number = number
        self.places = places
        self.posted = memory.words(POSTED, number, places)
        self.num_words = len(cut.windows)
        self.root, self.is_root = root, not rank
        self.told_from = NEVER
        self.is_dead = self.has_news = self.has_moved = False
        self.use = self.awaited = 0
        self.late: list[int] = []
        self.combine = combine
        self._fence = fence()
        self.parked = memory.parked
        self._posted_at = POSTED + number
        self._words = memory.own_words()
        ats = at, at + _lines(cut.longest * dtype.itemsize)
        self._buffers = tuple(memory.own_array(one, dtype, cut.longest) for one in ats)
        self.views = tuple(memory.arrays(one, dtype, cut.longest, places) for one in ats)

    def post(self, x: Array, word: int) -> bool:
        """Show what this rank gives, for its next use; whether anybody sleeps, and may have to be woken.

        ``x`` is not to be changed until the use is over.
        """
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
        words = self.posted()
        if not self.has_come(words, word):
            self.late = words
            return False
        self.combine(self.views[self.use], out)
        return True

    def has_come(self, words: list[int], word: int) -> bool:
        """Whether ranks have posted the use of this word, given their latest words: this one, or a later use's.

        One with the same number and of another generation is none: those ranks do not agree.
        """
        if min(words) == word and max(words) - word < GENERATION:
            return True
        number = word % GENERATION
        return all(other == word or other % GENERATION > number for other in words)

    def awaits(self, word: int) -> tuple[int, int]:
        """With which words of all, posted or shared, something may come of the use of this word; see ``look``."""
        return word, NEVER

    def take_result(self) -> Array | None:
        """That of the latest use, if it is not in the array that it was to be made in."""
        return None

    def forget(self) -> None:
        """The latest use is over, or goes on elsewhere."""


class PartedSlot(Slot):
    """One for longer messages: each rank folds its part of a window, and the others copy that.

    Of long ones, what a rank gives is not copied if it lies in symmetric memory, and is there as a whole at once; nor
    is its part of the result, if that does, which is there until all have read it.
    """

    __slots__ = (
        "_copied", "_count", "_cut", "_dtype", "_first", "_folded", "_given", "_into", "_is_in_place", "_is_mapped",
        "_is_over_given", "_is_result_in_place", "_known", "_may_be_in_place", "_members", "_parts", "_rank",
        "_rows", "_shares", "_shown", "_size", "_their", "_whole",
    )  # fmt: skip

    is_whole = False
    kinds: tuple[int, ...] = (SHARED, READ, GIVEN, SHOWN, READY)

    def __init__(
        self, memory: SlotMemory, number: int, at: int, places: tuple[int, ...], root: int, rank: int,
        dtype: np.dtype[Any], cut: Cut, combine: Combine,
    ) -> None:  # fmt: skip
        super().__init__(memory, number, at, places, root, rank, dtype, cut, combine)
        self._rank, self._size = rank, len(places)
        self._dtype, self._count = dtype, cut.windows[-1][1]
        self._cut = cut.windows
        self._first = self._folded = self._copied = 0
        self._given: Array | None = None
        self._into: Array | None = None
        self._members = memory.ranks_at(places)
        self._may_be_in_place = cut.is_turned
        self._is_mapped = self._is_in_place = self._is_result_in_place = self._is_over_given = False
        self._whole: list[Array | None] = []
        self._shown: list[Array | None] = []
        self._known: dict[tuple[int, int], Array] = {}
        self._their = {kind: memory.words(kind, number, places) for kind in self.kinds}
        longest = -(-cut.longest // self._size)
        at += 2 * _lines(cut.longest * dtype.itemsize)
        ats = at, at + _lines(longest * dtype.itemsize)
        self._parts = tuple(memory.own_array(one, dtype, longest) for one in ats)
        self._shares = tuple(list(memory.arrays(one, dtype, longest, places)) for one in ats)
        self._rows = tuple(list(view) for view in self.views)

    def post(self, x: Array, word: int) -> bool:
        """See ``Slot.post``: the first two windows, or all."""
        self._first, self._folded, self._copied = word, 0, 0
        self._given = x
        place = self._place_of(x) if self._may_be_in_place else NOWHERE
        self._is_in_place = place != NOWHERE
        if self._may_be_in_place:
            self._tell(GIVEN, place + 1)
        if self._is_in_place:
            self._tell(POSTED, word + self.num_words - 1)
        else:
            self._show(0)
            if self.num_words > 1:
                self._show(1)
        with self._fence:
            pass
        return 1 in self.parked()

    def look(self, word: int, out: Array) -> bool:
        """See ``Slot.look``; go on as far as can be, but not for long."""
        for _ in range(WINDOWS_AT_A_TIME):
            has_moved = self._fold_next(out)
            if self._copy_next(out):
                has_moved = True
            if self._copied == self.num_words and self._is_read():
                self._let_go()
                return True
            if not has_moved:
                return False
            self.has_moved = True
        return False

    def has_come(self, words: list[int], word: int) -> bool:
        """See ``Slot.has_come``: nobody begins the next use before all have shared all their parts of this one."""
        return min(words) >= word and max(words) - word < GENERATION

    def awaits(self, word: int) -> tuple[int, int]:
        """See ``Slot.awaits``."""
        folded, copied = self._folded, self._copied
        to_fold, to_copy = folded < self.num_words, copied < folded
        if to_fold and not (self._is_result_in_place or folded < copied + 2):
            to_fold = False
        if self._whole or not (to_fold or to_copy):  # also for what was read
            return WITHDRAWN, NEVER
        return word + folded if to_fold else NEVER, word + copied if to_copy else NEVER

    def forget(self) -> None:
        """See ``Slot.forget``: what is in place may be changed from now on, so who is at it has to start back."""
        self._let_go()
        if self._is_in_place or self._is_result_in_place:
            self._tell(POSTED, WITHDRAWN)
            self._tell(SHARED, WITHDRAWN)
            self._stored()

    def _let_go(self) -> None:
        self._given = self._into = None
        self._whole, self._shown = [], []

    def _fold_next(self, out: Array) -> bool:
        """Whether there was a window to be folded."""
        window = self._folded
        if window == self.num_words or not (self._is_result_in_place or window < self._copied + 2):
            return False
        self.awaited = word = self._first + window
        words = self.posted()
        if not self.has_come(words, word):
            self.late = words
            return False
        if not window:
            self._begin(out)
        # Who posts a window has copied what was shared for the last but one, unless it has posted all at once.
        if window > 1 and self._whole and not self._is_result_in_place and min(self._their[READ]()) < word - 2:
            return False
        start, stop, first = self._cut[window]
        begin, length = _parts(stop - start, self._size)[self._rank]
        end = begin + length
        given = [row[begin:end] for row in self._rows[word & 1]]
        for rank, whole in enumerate(self._whole):
            if whole is not None:
                given[rank] = whole[start + begin : start + end]
        into = out if self._into is None else self._into
        there = into[start + begin : start + end]
        # In the place of what is given nothing can be folded: it would be gone before it is its turn.
        is_made_there = self._is_result_in_place and not self._is_over_given
        part = there if is_made_there else self._parts[word & 1][:length]
        self.combine(given[first:] + given[:first], part)
        if self._is_result_in_place and self._is_over_given:
            there[:] = part
        if self._whole and not self.has_come(self.posted(), word):
            return False  # it was taken away meanwhile
        self._folded = window + 1
        self._tell(SHARED, word)
        self._stored()
        return True

    def _copy_next(self, out: Array) -> bool:
        """Whether there was a window of the result to be copied."""
        window = self._copied
        if window == self._folded:
            return False
        word = self._first + window
        if not self.has_come(self._their[SHARED](), word):
            return False
        if not window and self._may_be_in_place:
            self._shown = self._arrays(SHOWN, out)
        start, stop, _ = self._cut[window]
        shares = self._shares[word & 1]
        for rank, (begin, length) in enumerate(_parts(stop - start, self._size)):
            whole = self._shown[rank] if self._shown else None
            into = slice(start + begin, start + begin + length)
            if whole is None:
                out[into] = shares[rank][:length]
            elif whole is not out:
                out[into] = whole[into]
        if self._shown and not self.has_come(self._their[SHARED](), word):
            return False
        self._copied = window + 1
        if self._may_be_in_place:
            self._tell(READ, word)
        if not self._is_in_place and window + 2 < self.num_words:
            self._show(window + 2)
        self._stored()  # even if nothing was: who has no link to the last to come is woken by who has one
        return True

    def _is_read(self) -> bool:
        """Whether nobody reads the result any more where it is."""
        return not self._is_result_in_place or min(self._their[READ]()) >= self._first + self.num_words - 1

    def _begin(self, out: Array) -> None:
        """All have posted, and nobody is in an earlier use any more."""
        if not self._may_be_in_place:
            return
        place = self._place_of(out)
        self._is_result_in_place = place != NOWHERE
        self._is_over_given = self._given is not None and place == self.memory.heaps.place_of(self._given)
        self._tell(SHOWN, place + 1)
        self._whole = self._arrays(GIVEN, self._given)

    def _arrays(self, kind: int, own: Array | None) -> list[Array | None]:
        """By rank, what is in place of what they give or show; empty if nothing is."""
        places = self._their[kind]()
        if not any(places):
            return []
        found: list[Array | None] = [None] * self._size
        for rank, place in enumerate(places):
            if place and rank == self._rank:
                found[rank] = own
            elif place:
                array = self._known.get((rank, place))
                if array is None:
                    if len(self._known) >= MAX_KNOWN:
                        self._known.clear()
                    heaps, member = self.memory.heaps, self._members[rank]
                    array = heaps.array(member, place - 1, self._dtype, self._count)
                    self._known[rank, place] = array
                found[rank] = array
        return found

    def _place_of(self, x: Array) -> int:
        """Where it is in the heap of this process, if all can read it there."""
        place = self.memory.heaps.place_of(x)
        if place == NOWHERE:
            return NOWHERE
        if not self._is_mapped and self.memory.heaps.map(self._members):
            self._is_mapped = True
            self._tell(READY, MAPPED)
        return place if min(self._their[READY]()) else NOWHERE

    def _show(self, window: int) -> None:
        start, stop, _ = self._cut[window]
        word = self._first + window
        if self._given is not None:
            self._buffers[word & 1][: stop - start] = self._given[start:stop]
        self._tell(POSTED, word)

    def _tell(self, kind: int, word: int) -> None:
        self._words[kind + self.number] = word

    def _stored(self) -> None:
        with self._fence:
            pass
        if 1 in self.parked():
            self.has_news = True


class SharedResultSlot(PartedSlot):
    """One whose results are single arrays in the heap of the first rank, to which each rank writes its part.

    Such an array is lent to the others: the first rank keeps it until the last of them has told that nothing of it is
    left there, and for ever if one fails before that.
    """

    __slots__ = ("_lent", "_loan", "_made", "_place", "_result")

    kinds = (*PartedSlot.kinds, RESULT, LOAN)

    def __init__(
        self, memory: SlotMemory, number: int, at: int, places: tuple[int, ...], root: int, rank: int,
        dtype: np.dtype[Any], cut: Cut, combine: Combine,
    ) -> None:  # fmt: skip
        super().__init__(memory, number, at, places, root, rank, dtype, cut, combine)
        self._result: Array | None = None
        self._lent: Array | None = None
        self._made: Array | None = None
        self._loan = 0
        self._place = NOWHERE

    def post(self, x: Array, word: int) -> bool:
        """See ``Slot.post``; with memory for the result, if all can write there."""
        heaps = self.memory.heaps
        self._result = self._made = self._lent = None
        if not self._is_mapped and heaps.map(self._members) and heaps.map_writable(self.root):
            self._is_mapped = True
            self._tell(READY, WRITABLE)
        if self.is_root:
            loan = None
            if min(self._their[READY]()) == WRITABLE:
                others = self.places[1:]
                loan = heaps.lend(self._count * self._dtype.itemsize, lambda number: self._released(number, others))
            self._tell(RESULT, 0 if loan is None else loan.place + 1)
            if loan is not None:
                self._tell(LOAN, loan.number)
                self._lent = loan.block
        return super().post(x, word)

    def _released(self, number: int, places: tuple[int, ...]) -> bool:
        return min(self.memory.words(RELEASED, number % MAX_LOANS, places)()) >= number

    def _begin(self, out: Array) -> None:
        super()._begin(out)
        self._place = self._their[RESULT]()[0] - 1  # when this use is complete, the next one's may be there
        if self._place < 0:
            return
        if self._lent is not None:
            self._result = self._lent.view(self._dtype)
        else:
            self._result = self.memory.heaps.writable(self.root, self._place, self._dtype, self._count)
            self._loan = self._their[LOAN]()[0]
        self._into = self._result
        self._is_result_in_place, self._is_over_given = True, False

    def _copy_next(self, out: Array) -> bool:
        if self._result is None:
            return super()._copy_next(out)
        window = self._copied
        if window == self._folded or not self.has_come(self._their[SHARED](), self._first + window):
            return False
        self._copied = window + 1
        if not self._is_in_place and window + 2 < self.num_words:
            self._show(window + 2)
        self._stored()
        return True

    def _is_read(self) -> bool:
        if self._result is None:
            return super()._is_read()
        self._made, self._result = self._seen(), None
        return True

    def _let_go(self) -> None:
        super()._let_go()
        self._result = self._lent = None

    def take_result(self) -> Array | None:
        """See ``Slot.take_result``."""
        made, self._made = self._made, None
        return made

    def _seen(self) -> Array:
        """The result, as this rank's program gets it."""
        if self._lent is not None:
            seen, self._lent = self._lent.view(self._dtype), None
            seen.flags.writeable = False
            return seen
        whole = self.memory.heaps.array(self.root, self._place, self._dtype, self._count)
        weakref.finalize(whole, _release, self._words, RELEASED + self._loan % MAX_LOANS, self._loan).atexit = False
        return whole[:]


def _release(words: memoryview, at: int, loan: int) -> None:
    """Nothing of what was lent is left on this rank."""
    words[at] = loan
