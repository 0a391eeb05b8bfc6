"""Slots: collectives of one host without messages, in memory that every rank of the host reads.

::

    region of each rank, written by that rank alone, mapped by all:

    parked      1 while the rank sleeps with a use of a slot under way
    posted      by slot, latest word for which its contribution is there
    shared      by slot, latest word for which its part of the result is there
    read        by slot, latest word for which it has read the parts of all
    given       by slot, offset of its contribution in its heap, if it is there; likewise of its result
    buffers     by slot, for even and for odd words: its contribution, and its part of the result

A slot belongs to one name with one signature. In a *use* a rank copies its contribution to its buffer and then stores
the word of the use. When the words of all ranks are there, every rank reads what it needs of all buffers. For longer
reductions each rank folds its part of the message, which the others copy. Uses need neither an order of names, nor
credit, nor acknowledgements. Still longer messages go through the same two buffers in *windows*, a piece of each rank's
part at a time, each window with its own word: so they stay in the cache, and a slot has a bounded size. While one
window is waited for, the next is there already.

Two buffers suffice. A rank that posts word w + 2 has completed w, for which all ranks had shared their parts: so no
rank reads a contribution for w any more. A rank that shares its part for w + 2 has seen that all ranks posted w + 2,
and so had completed w and read the parts. Messages without parts need only this: a rank that posts use s + 2 has
completed use s + 1, which all ranks had posted, and so had completed use s. Therefore a rank whose use fails, or takes
another path once, may never use the slot again. No rank completes a use whose first word one rank has not stored: so
all ranks can still take the ordinary path instead.

The rank that hands out the slots makes the memory, and passes it to peers with each link. Nothing in it is trusted: a
wrong word or buffer of a peer spoils results as a wrong message would, and nothing else.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from kfcomm.core.signature import SHOWN_WHOLE_NBYTES, split
from kfcomm.errors import KfcommError
from kfcomm.transports.shm.heap import Heaps
from kfcomm.transports.shm.segment import attach, check, create, mapped

if TYPE_CHECKING:
    from kfcomm.transports.shm.slot import Slot

logger = logging.getLogger("kfcomm")

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
Arrays: TypeAlias = "Array | list[Array]"
"""One of each rank, as the rows of an array if possible."""
Combine: TypeAlias = Callable[[Arrays, Array], object]
"""Function that folds some elements of all contributions into the result, which is separate memory."""
Words: TypeAlias = Callable[[], list[int]]
"""Function that reads the words of all ranks of a group."""
Gives: TypeAlias = "int | Callable[[int, int], int]"
"""Elements that one rank reads of another in a use: the same of all pairs, or by the rank that gives and the reader."""

MAX_SLOTS = 1 << 15
"""Most slots of one memory: half for those that are handed out, and half for those that epochs inherit."""
WINDOW_NBYTES = 1 << 19
"""Contribution of a rank at a time: those of four ranks and the result fit in a cache."""
MIN_PIECE_NBYTES, MAX_WINDOW_NBYTES = 1 << 16, 1 << 20
"""Bounds with many ranks: a piece must be worth a call of NumPy, and a window fit in a cache."""
BUFFERS_NBYTES, MIN_BUFFERS_NBYTES = 1 << 29, 1 << 24
"""Buffers of all ranks together, and the least of each. Pages are taken as they are used."""
MAX_SHARE = 4
"""A slot takes at most one part in so many of the buffers."""
GENERATION = 1 << 40
"""A word is the number of a use, from 1, plus this times the generation of its strategy."""
_MAX_GENERATIONS = 1 << 22
ALL = -1


@dataclass(slots=True, eq=False)
class Cut:
    """Division of a message for a slot."""

    count: int  # elements of each contribution, at most
    itemsize: int
    num_ranks: int  # of the group
    _: KW_ONLY
    # It is long: the r-th of as many parts as there are ranks is folded from rank r + 1 on, and its own contribution
    # last, as along a chain to it. Else all is folded from rank 0 on.
    is_turned: bool = False
    is_shared: bool = False  # the result is one array, which all ranks see
    is_whole: bool = False  # it is not cut, however long it is; by default only short messages are not cut
    shows: int = ALL  # elements that this rank gives: ``count`` or none
    reads: tuple[int, int] = (0, ALL)  # begin and end of what this rank reads of each contribution; only if not cut
    has_hub: bool = False  # the rank that handed the slot out reads all, and shows the result: see ``HubSlot``
    gives: Gives = ALL  # by default each reads all contributions, or its part of each and all folded parts
    max_nbytes: int = 0  # bytes of a slot in each region, at most, for messages in windows; 0: no limit
    is_by_row: bool = False  # contributions are given to ``Combine`` as a list: set where that is faster
    # No rank needs the result of another; with ``bounds``. Gathered: each gives its part of the result, not all parts.
    is_scattered: bool = False
    is_gathered: bool = False
    bounds: Sequence[tuple[int, int]] = ()  # the parts, if they are not even
    parts: list[tuple[int, int]] = field(init=False, default_factory=list)  # begin and length of the part of each rank
    piece: int = field(init=False)  # elements of a part at a time; a *window* is a piece of each part
    num_windows: int = field(init=False, default=1)  # each with its own word
    nbytes: int = field(init=False)  # bytes of a slot in each region

    def __post_init__(self) -> None:
        count, itemsize, num_ranks = self.count, self.itemsize, self.num_ranks
        self.is_whole = self.is_whole or (count * itemsize <= SHOWN_WHOLE_NBYTES and not self.is_turned)
        self.shows = count if self.shows == ALL else self.shows
        self.reads = (0, count) if self.reads[1] == ALL else self.reads
        if self.is_whole:
            self.gives = count if self.gives == ALL else self.gives
            self.piece = count
            self.nbytes = 2 * lines(count * itemsize)
            return
        self.parts = list(self.bounds) or split(count, num_ranks)
        self.gives = self._gives_part if self.gives == ALL else self.gives
        longest = max(1, *(length for _, length in self.parts))
        self.piece = longest
        if self.is_turned:
            least = min(MIN_PIECE_NBYTES, MAX_WINDOW_NBYTES // num_ranks)
            piece_nbytes = max(WINDOW_NBYTES // num_ranks, least)
            if self.max_nbytes:
                piece_nbytes = min(piece_nbytes, (self.max_nbytes - 4 * _LINE) // (2 * num_ranks + 2))
            self.piece = min(longest, max(1, piece_nbytes // itemsize))
        self.num_windows = -(-longest // self.piece)
        self.nbytes = 2 * lines(num_ranks * self.piece * itemsize) + 2 * lines(self.piece * itemsize)

    @property
    def is_in_windows(self) -> bool:
        """Whether each rank takes the result piece by piece from the buffers of all."""
        return self.is_turned and not (self.is_shared or self.is_scattered or self.is_gathered)

    def _gives_part(self, giver: int, reader: int) -> int:
        """Return the elements of the reader's part, and of the giver's part of the result unless that is one array."""
        return self.parts[reader][1] + (0 if self.is_shared else self.parts[giver][1])


class SlotSpec(NamedTuple):
    """One slot of a group, as this rank is to use it."""

    number: int  # see ``SlotMemory.hand_out``, also for ``at``
    at: int
    members: Sequence[int]  # world ranks of the group; ``rank`` and ``hub`` are places among them
    rank: int
    hub: int  # the process that has handed the slot out
    dtype: np.dtype[Any]  # of the contributions
    cut: Cut
    combine: Combine


NEVER, WITHDRAWN = (1 << 63) - 1, -1
"""A word larger than all, and one smaller than all."""
POSTED, SHARED, READ, GIVEN, SHOWN, READY, RESULT, LOAN, RELEASED = (
    mmap.PAGESIZE // 8 + kind * MAX_SLOTS for kind in range(9)
)
"""Index of the words of a rank, by kind; add the slot, or for `RELEASED` the loan."""
_KINDS = (POSTED, SHARED, READ, GIVEN, SHOWN, READY, RESULT, LOAN)
MAPPED, WRITABLE = 1, 2
"""Values of `READY`: the heaps of the others are mapped; that of the first rank also for writing."""
_LINE = 64
# Where in a page longer buffers begin. Allocators begin large arrays 0 to 64 bytes into a page, and copies to a place 4
# to 16 bytes further in its page take 2 to 15 times as long as others (`rep movsb` on AMD's Zen). Four ranks on two
# processors sum 16 MiB that begin 16 bytes into a page in 0.9 of the time that buffers at the start of pages take.
_BEGIN_IN_PAGE = 25 * _LINE
_BUFFERS_AT = 8 * (RELEASED + MAX_SLOTS)


def word_of(number: int, generation: int) -> int:
    """Return the word of window ``number``, from 0, counted over all uses of a name."""
    return (generation % _MAX_GENERATIONS) * GENERATION + number + 1


def generation_of(word: int, latest: int) -> int:
    """Return the generation in which a word was stored, where ``latest`` is the present one."""
    return latest - (latest - word // GENERATION) % _MAX_GENERATIONS


def nbytes_of_regions(num_ranks: int) -> int:
    """Return the bytes of the region of each rank."""
    nbytes = max(MIN_BUFFERS_NBYTES, BUFFERS_NBYTES // num_ranks)
    return _BUFFERS_AT + nbytes // mmap.PAGESIZE * mmap.PAGESIZE


class SlotMemory:
    """Slots that one process hands out, as seen by one that may use them. It is mapped when the first slot is used.

    Args:
        descriptor: of the segment; owned: closed with this object, or when the memory of a peer is mapped.
        ranks: world ranks that have a region, all of this host, in their order.
        heaps: of this process and its peers.
        is_own: this process hands out the slots, and passes the memory to peers.

    Raises:
        RemoteProtocolError: the segment has another size.
    """

    def __init__(self, descriptor: int, ranks: Sequence[int], heaps: Heaps, *, is_own: bool = False) -> None:
        self.descriptor = descriptor  # -1 when it is closed
        self.heaps = heaps
        self._is_own = is_own
        self.places = {world: place for place, world in enumerate(ranks)}  # of the regions, by world rank
        self._own_place = self.places[heaps.rank]
        self._everywhere = tuple(range(len(ranks)))
        self._stride = nbytes_of_regions(len(ranks))
        self._reserved: tuple[memoryview, memoryview] | None = None  # mapped, and not used yet
        self._mapping: tuple[memoryview, memoryview] | None = None
        self.own_words = memoryview(b"").cast("q")  # stored by this process, by ``POSTED`` or another kind, plus slot
        self.parked: Words = list
        self.num_slots = 0  # ever handed out here
        self._next_at = _BUFFERS_AT
        self._vacant: dict[int, deque[tuple[int, int]]] = {}
        self._num_inherited = 0  # numbers of slots that epochs have inherited
        self.is_inherited = False  # from the epoch before; nothing is handed out there any more
        check(descriptor, self._stride * len(ranks))
        self.identity = os.fstat(descriptor).st_ino  # the same for all that map it

    @classmethod
    def make(cls, ranks: Sequence[int], heaps: Heaps) -> SlotMemory:
        """Make the memory of this process. Raises `LinkRefused`: the system refuses the memory."""
        descriptor, _ = create("kfcomm-slots", nbytes_of_regions(len(ranks)) * len(ranks))
        return cls(descriptor, ranks, heaps, is_own=True)

    def for_next(self, ranks: Mapping[int, int], heaps: Heaps) -> SlotMemory:
        """Return the same memory, which is mapped, for the next epoch; ``ranks``: those there by those of this one."""
        made = copy(self)
        made.heaps, made.is_inherited, made._is_own, made.descriptor = heaps, True, False, -1
        made.places = {ranks[world]: place for world, place in self.places.items() if world in ranks}
        made._everywhere = tuple(made.places.values())
        made.park(is_parked=False)
        made.parked = made._words_at(0, made._everywhere)
        return made

    def number_for_next(self) -> int | None:
        """Return a number that no slot has had, for one of the next epoch; None if there are no more."""
        # Handed-out slots are numbered from below; numbers are the same on all ranks with the same history.
        if self._num_inherited >= MAX_SLOTS // 2:
            return None
        self._num_inherited += 1
        return MAX_SLOTS - self._num_inherited

    def reserve(self) -> None:
        """Map the memory of a peer without using it, if that can be, and so do without its descriptor."""
        # Address space only: pages are taken as they are used.
        with contextlib.suppress(KfcommError, OSError):
            self._reserved = self._map()
            self._close_descriptor()

    def close(self) -> None:
        """Let go of memory without a used slot; no further peer can map that of this process."""
        self._reserved = None
        self._close_descriptor()

    def _close_descriptor(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def _map(self) -> tuple[memoryview, memoryview]:
        stride, descriptor = self._stride, self.descriptor
        everything = attach(descriptor, stride * len(self.places), writable=False)
        return everything, mapped(descriptor, stride, writable=True, offset=stride * self._own_place)

    def _mapped(self) -> tuple[memoryview, memoryview]:
        """Map all regions for reading, and that of this process for writing.

        Raises:
            KfcommError, OSError: it cannot be mapped.
        """
        if self._mapping is None:
            self._mapping = _, own = self._reserved or self._map()
            if not self._is_own:
                self.close()
            self.own_words = own[:_BUFFERS_AT].cast("q")
            self.parked = self._words_at(0, self._everywhere)
        return self._mapping

    def park(self, *, is_parked: bool) -> None:
        """Set whether peers must wake this process when they post; see ``Slot.post``."""
        self.own_words[0] = is_parked

    def sleeping(self) -> list[int]:
        """Return the world ranks that must be woken."""
        return [world for world, is_parked in zip(self.places, self.parked(), strict=True) if is_parked]

    def hand_out(self, cut: Cut) -> tuple[int, int] | None:
        """Return number and offset of a new slot for messages of this cut; None if the memory is full."""
        nbytes, at = cut.nbytes, self._next_at
        if not cut.is_whole:
            at += (_BEGIN_IN_PAGE - at) % mmap.PAGESIZE
        vacant = self._vacant.get(nbytes)
        if vacant:
            if self._is_clear(vacant[0][0]):
                return vacant.popleft()
            vacant.rotate(-1)  # a rank that must clear it may be gone
        most_nbytes = min(self._stride - at, (self._stride - _BUFFERS_AT) // MAX_SHARE)
        if self.num_slots >= MAX_SLOTS // 2 or nbytes > most_nbytes:
            return None
        self.num_slots += 1
        self._next_at = at + nbytes
        return self.num_slots - 1, at

    def take_in(self, slot: Slot) -> None:
        """Take back a slot of this process: it is handed out again when all ranks have cleared their words."""
        self.clear(slot.number)
        self._vacant.setdefault(slot.nbytes, deque()).append((slot.number, slot.at))

    def clear(self, number: int) -> None:
        """Clear the words of this process for a slot."""
        if self._mapping is not None:
            for kind in _KINDS:
                self.own_words[kind + number] = 0

    def _is_clear(self, number: int) -> bool:
        return not any(any(self.words(kind, number, self._everywhere)()) for kind in _KINDS)

    def slot(self, spec: SlotSpec) -> Slot | None:
        """Return a slot that was handed out; None if this process cannot use it."""
        last_at = self._stride - spec.cut.nbytes
        if spec.number >= MAX_SLOTS or not _BUFFERS_AT <= spec.at <= last_at or spec.at % _LINE:
            return None
        if not all(world in self.places for world in spec.members):
            return None
        if self.descriptor < 0 and self._mapping is None and self._reserved is None:
            return None  # the link that brought the memory has ended
        try:
            self._mapped()
        except (KfcommError, OSError) as error:
            logger.warning("no slots for small collectives: %s", error)
            return None
        # Imported here: a rank without slots needs none of it.
        from kfcomm.transports.shm.slot import kind_of

        return kind_of(spec.cut)(self, spec)

    def everywhere(self, kind: int) -> Array:
        """Return the latest words of all slots, by rank and slot."""
        strides = (self._stride, 8)
        return np.ndarray((len(self._everywhere), MAX_SLOTS), np.int64, self._mapped()[0], 8 * kind, strides)

    def is_everywhere(self, slot: Slot) -> bool:
        """Return whether all ranks of this memory use a slot, in their order; False in inherited memory."""
        return slot.places == self._everywhere and not self.is_inherited

    # Parts of slots.

    def words(self, kind: int, number: int, places: tuple[int, ...]) -> Words:
        """Return the function that reads the words of one slot."""
        return self._words_at(8 * (kind + number), places)

    def own_array(self, at: int, dtype: np.dtype[Any], count: int) -> Array:
        """Return an array in the region of this process."""
        return np.frombuffer(self._mapped()[1], dtype, count, at)

    def arrays(self, at: int, dtype: np.dtype[Any], count: int, places: tuple[int, ...]) -> Arrays:
        """Return the arrays of all ranks, for reading: one two-dimensional array if their regions are evenly spaced."""
        step, everything = _step(places), self._mapped()[0]
        if step:
            strides = (step * self._stride, dtype.itemsize)
            return np.ndarray((len(places), count), dtype, everything, at + places[0] * self._stride, strides)
        return [np.frombuffer(everything, dtype, count, at + place * self._stride) for place in places]

    def _words_at(self, at: int, places: tuple[int, ...]) -> Words:
        words = self._mapped()[0].cast("q")
        step, stride = _step(places), self._stride // 8
        first = at // 8 + places[0] * stride
        if step:
            return words[first : first + (len(places) - 1) * step * stride + 1 : step * stride].tolist
        each = [words[at // 8 + place * stride :] for place in places]
        return lambda: [one[0] for one in each]


def _step(places: tuple[int, ...]) -> int:
    """Return the distance between neighbouring places; 0 if uneven."""
    step = places[1] - places[0] if len(places) > 1 else 1
    return step if step > 0 and places == tuple(range(places[0], places[-1] + 1, step)) else 0


def lines(nbytes: int) -> int:
    """Round up to whole cache lines."""
    return -(-nbytes // _LINE) * _LINE
