"""Slots for longer messages: each rank folds its part of the result, and the others read that.

See ``slots`` for the protocol, and ``heap`` for arrays that are read in place.
"""

from __future__ import annotations

import os
import weakref

from kfcomm.transports.shm.heap import MAX_LOANS, NOWHERE
from kfcomm.transports.shm.slot import Slot
from kfcomm.transports.shm.slots import (
    GENERATION,
    GIVEN,
    LOAN,
    MAPPED,
    NEVER,
    POSTED,
    READ,
    READY,
    RELEASED,
    RESULT,
    SHARED,
    SHOWN,
    WITHDRAWN,
    WRITABLE,
    Array,
    SlotMemory,
    SlotSpec,
    lines,
)
from kfcomm.types import override

WINDOWS_AT_A_TIME = 16
"""Windows before others have their turn."""
WINDOWS_IN_PLACE = 4
"""Windows that are made at once if nothing is copied to buffers: four pieces still fit in a cache."""
MAX_KNOWN = 64
"""Views of arrays in place that a slot caches."""


class PartedSlot(Slot):
    """Slot for long messages: each rank folds its part of a window, and the others copy that.

    A contribution in symmetric memory is not copied, and is posted as a whole at once. Nor is a part of the result in
    symmetric memory, which stays until all have read it.
    """

    __slots__ = (
        "_at_once", "_copied", "_counts", "_dtype", "_first", "_folded", "_given", "_into", "_is_in_place",
        "_is_mapped", "_is_over_given", "_is_result_in_place", "_known", "_made", "_num_full",
        "_order", "_others", "_out_at", "_parts", "_piece", "_rows", "_shares", "_shown", "_shows", "_size", "_starts",
        "_their", "_whole",
    )  # fmt: skip

    is_whole = False
    outlives_epoch = True
    kinds: tuple[int, ...] = (SHARED, READ, GIVEN, SHOWN, READY)
    shows_result = True
    """Whether other ranks read parts of the result where they were made."""

    def __init__(self, memory: SlotMemory, spec: SlotSpec) -> None:
        super().__init__(memory, spec)
        places, rank, dtype, cut = self.places, spec.rank, spec.dtype, spec.cut
        self._size = len(places)
        self._dtype, self._counts = dtype, [cut.count] * self._size
        self._parts, self._piece = cut.parts, cut.piece
        self._out_at = 0  # element of the contributions that comes first in the result
        after = (rank + 1) % self._size
        self._order = [*range(after, self._size), *range(after)]
        self._first = self._folded = self._copied = 0
        self._at_once = 1  # windows
        self._given: Array | None = None
        self._into: Array | None = None
        self._is_mapped = self._is_in_place = self._is_result_in_place = self._is_over_given = False
        self._whole: list[Array | None] = []
        self._shown: list[Array | None] = []
        self._known: dict[tuple[int, int], Array] = {}
        self._their = {kind: memory.words(kind, self.number, places) for kind in self.kinds}
        at = self._buffers_end
        ats = at, at + lines(self._piece * dtype.itemsize)
        self._made = tuple(memory.own_array(one, dtype, self._piece) for one in ats)
        self._shares = tuple(list(memory.arrays(one, dtype, self._piece, places)) for one in ats)
        mine = slice(rank * self._piece, (rank + 1) * self._piece)
        self._rows = tuple([row[mine] for row in view] for view in self.views)
        # Most windows have a whole piece of each part: they need no bounds, which take four times as long.
        self._others = tuple([row[at] for at in self._order if at != rank] for row in self._rows)
        self._starts = [start for start, _ in cut.parts]
        self._num_full = min(length for _, length in cut.parts) // self._piece
        nbytes = self._piece * dtype.itemsize
        self._shows = tuple(
            [
                (self._starts[at], memory.own_array(buffer + at * nbytes, dtype, self._piece))
                for at in self._order
                if at != rank
            ]
            for buffer in (spec.at, spec.at + lines(self._size * nbytes))
        )

    @override
    def post(self, x: Array, word: int) -> bool:
        # The first two windows, or everything if it lies in symmetric memory.
        self._first, self._folded, self._copied = word, 0, 0
        self._given = x
        place = self._place_of(x)
        self._is_in_place = place != NOWHERE
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

    @override
    def look(self, word: int, out: Array) -> bool:
        # As far as possible, but not for long: others need their turn.
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

    @override
    def has_come(self, words: list[int], word: int) -> bool:
        # No rank begins the next use before all have shared all their parts of this one.
        return min(words) >= word and max(words) - word < GENERATION

    @override
    def awaits(self, word: int) -> tuple[int, int]:
        folded, copied = self._folded, self._copied
        to_fold, to_copy = folded < self.num_words, copied < folded
        if to_fold and not (self._is_result_in_place or folded < copied + 2):
            to_fold = False
        if self._whole or not (to_fold or to_copy):  # also for what was read
            return WITHDRAWN, NEVER
        return word + folded if to_fold else NEVER, word + copied if to_copy else NEVER

    @override
    def behind(self, word: int) -> list[int]:
        if self._copied == self.num_words:
            words, awaited = self._their[READ](), word + self.num_words - 1
        elif self._copied < self._folded:
            words, awaited = self._their[SHARED](), word + self._copied
        else:
            words, awaited = self.posted(), word + self._folded
        return [rank for rank, other in enumerate(words) if not self.has_come([other], awaited)]

    @override
    def forget(self) -> None:
        # Arrays in place may change from now on, or be freed, so ranks that read them must notice before that.
        if self._is_in_place or self._is_result_in_place:
            self._tell(POSTED, WITHDRAWN)
            # Else a slower rank may still need this word for the use before, whose parts lie in the buffers.
            if self._is_result_in_place and self.shows_result:
                self._tell(SHARED, WITHDRAWN)
            self._stored()
        self._let_go()

    def _let_go(self) -> None:
        self._given = self._into = None
        self._whole, self._shown = [], []

    def _fold_next(self, out: Array) -> bool:
        """Fold the next window; returns whether there was one."""
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
            is_in_place = self._is_result_in_place and not self._is_over_given and bool(self._whole)
            are_all = is_in_place and all(whole is not None for whole in self._whole)
            self._at_once = WINDOWS_IN_PLACE if are_all else 1
        count = min(self._at_once, self.num_words - window)
        word += count - 1  # all windows in place were posted at once
        # A rank that posts a window has copied the one before the last, unless it has posted everything at once.
        if window > 1 and self._whole and not self._is_result_in_place and min(self._their[READ]()) < word - 2:
            return False
        self._make(window, out, count)
        if self._whole and not self.has_come(self.posted(), word):
            return False  # a contribution in place was withdrawn meanwhile
        self._folded = window + count
        self._tell(SHARED, word)
        self._stored()
        return True

    def _make(self, window: int, out: Array, count: int) -> None:
        """Fold this rank's part of so many windows."""
        word, own = self._first + window, self._given
        if window < self._num_full and own is not None and not (self._whole or self._is_result_in_place):
            begin = self._starts[self._rank] + window * self._piece
            self.combine([*self._others[word & 1], own[begin : begin + self._piece]], self._made[word & 1])
            return
        begin, end = self._bounds(window, self._rank, count)
        given = [row[: end - begin] for row in self._rows[word & 1]]
        if own is not None:
            given[self._rank] = own[begin:end]
        for rank, whole in enumerate(self._whole):
            if whole is not None:
                given[rank] = whole[begin:end]
        made = self._made[word & 1][: end - begin]
        there = made
        if self._is_result_in_place:
            there = (out if self._into is None else self._into)[begin - self._out_at : end - self._out_at]
            # The fold cannot write over a contribution: it would be destroyed before its turn.
            if not self._is_over_given:
                made = there
        self.combine([given[rank] for rank in self._order], made)
        if made is not there:
            there[:] = made

    def _copy_next(self, out: Array) -> bool:
        """Copy the next window of the result; returns whether there was one."""
        window = self._copied
        if window == self._folded:
            return False
        word = self._first + window
        if not self.has_come(self._their[SHARED](), word):
            return False
        if not window:
            self._shown = self._arrays(SHOWN, out)
        piece, shares = self._piece, self._shares[word & 1]
        if window < self._num_full and not self._shown:
            offset = window * piece
            for start, share in zip(self._starts, shares, strict=True):
                begin = start + offset
                out[begin : begin + piece] = share
        else:
            for rank, share in enumerate(shares):
                begin, end = self._bounds(window, rank)
                whole = self._shown[rank] if self._shown else None
                if whole is None:
                    out[begin:end] = share[: end - begin]
                elif whole is not out:
                    out[begin:end] = whole[begin:end]
        if not self._is_still_there(word):
            return False
        self._copied = window + 1
        self._tell(READ, word)
        if not self._is_in_place and window + 2 < self.num_words:
            self._show(window + 2)
        self._stored()  # even without news: a rank without a link to the last one is woken by one that has it
        return True

    def _pass_next(self) -> bool:
        """Go to the next windows without a copy; returns whether all ranks have made their parts of one."""
        window = self._copied
        words = self._their[SHARED]()
        if window == self._folded or not self.has_come(words, self._first + window):
            return False
        if self._is_in_place:
            self._copied = min(self._folded, min(words) - self._first + 1)
            return True
        self._copied = window + 1
        if window + 2 < self.num_words:
            self._show(window + 2)
        self._stored()
        return True

    def _is_still_there(self, word: int) -> bool:
        """Return whether what was copied was the result of this window until the end."""
        # An array in place may have been withdrawn. If this rank was given up, the next epoch writes to the buffers.
        return self.has_come(self._their[SHARED](), word)

    def _is_read(self) -> bool:
        """Return whether all ranks have read the result in place."""
        return not self._is_result_in_place or min(self._their[READ]()) >= self._first + self.num_words - 1

    def _begin(self, out: Array) -> None:
        """Find arrays in place: all ranks have posted, so none is in an earlier use any more."""
        place = self._place_of(out)
        self._is_result_in_place = place != NOWHERE
        self._is_over_given = self._given is not None and place == self.memory.heaps.place_of(self._given)
        self._tell(SHOWN, place + 1)
        self._whole = self._arrays(GIVEN, self._given)

    def _arrays(self, kind: int, own: Array | None) -> list[Array | None]:
        """Return by rank the arrays in place that they give or show; empty without any."""
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
                    heaps, member = self.memory.heaps, self.members[rank]
                    array = heaps.array(member, place - 1, self._dtype, self._counts[rank])
                    self._known[rank, place] = array
                found[rank] = array
        return found

    def _place_of(self, x: Array) -> int:
        """Return the offset of an array in this process's heap, if all ranks can read it there."""
        place = self.memory.heaps.place_of(x)
        return place if place != NOWHERE and self._is_ready() else NOWHERE

    def _is_ready(self) -> bool:
        """Return whether all ranks can read the heaps of all."""
        if not self._is_mapped and self.memory.heaps.map(self.members):
            self._is_mapped = True
            self._tell(READY, MAPPED)
        return min(self._their[READY]()) > 0

    def _show(self, window: int) -> None:
        """Copy the pieces of the other ranks to the buffer; the own one is folded in place."""
        word, given = self._first + window, self._given
        if given is not None and window < self._num_full:
            offset, piece = window * self._piece, self._piece
            for start, place in self._shows[word & 1]:
                begin = start + offset
                place[:] = given[begin : begin + piece]
        elif given is not None:
            buffer = self._buffers[word & 1]
            for rank in self._order:
                if rank != self._rank:
                    begin, end = self._bounds(window, rank)
                    at = rank * self._piece
                    buffer[at : at + end - begin] = given[begin:end]
        self._tell(POSTED, word)

    def _bounds(self, window: int, rank: int, count: int = 1) -> tuple[int, int]:
        """Return begin and end of the pieces of a rank in the message, of so many windows; they may be empty."""
        start, length = self._parts[rank]
        stop = start + length
        begin = start + window * self._piece
        return min(begin, stop), min(begin + count * self._piece, stop)

    def _tell(self, kind: int, word: int) -> None:
        self._words[kind + self.number] = word

    def _stored(self) -> None:
        with self._fence:
            pass
        if 1 in self.parked():
            self.has_news = True


class SharedResultSlot(PartedSlot):
    """Slot whose results are single arrays in the heap of the first rank, to which each rank writes its part.

    Such an array is lent to the others: it stays allocated until each of them has released its last view, and for ever
    if one fails before that.
    """

    __slots__ = ("_lent", "_loan", "_place", "_result")

    outlives_epoch = False
    kinds = (*PartedSlot.kinds, RESULT, LOAN)

    def __init__(self, memory: SlotMemory, spec: SlotSpec) -> None:
        super().__init__(memory, spec)
        self._result: Array | None = None
        self._lent: Array | None = None
        self._loan = 0
        self._place = NOWHERE

    @override
    def post(self, x: Array, word: int) -> bool:
        # With memory for the result, if all can write to it.
        heaps = self.memory.heaps
        self._result = self.outcome = self._lent = None
        if not self._is_mapped and heaps.map(self.members) and heaps.map_writable(self.root):
            self._is_mapped = True
            self._tell(READY, WRITABLE)
        if self.is_root:
            loan = None
            if min(self._their[READY]()) == WRITABLE:
                others = self.places[1:]
                loan = heaps.lend(self._counts[0] * self._dtype.itemsize, lambda number: self._released(number, others))
            self._tell(RESULT, 0 if loan is None else loan.place + 1)
            if loan is not None:
                self._tell(LOAN, loan.number)
                self._lent = loan.block
        return super().post(x, word)

    def _released(self, number: int, places: tuple[int, ...]) -> bool:
        return min(self.memory.words(RELEASED, number % MAX_LOANS, places)()) >= number

    def _begin(self, out: Array) -> None:
        super()._begin(out)
        self._place = self._their[RESULT]()[0] - 1  # read now: after this use, that of the next one may be there
        if self._place < 0:
            return
        if self._lent is not None:
            self._result = self._lent.view(self._dtype)
        else:
            self._result = self.memory.heaps.writable(self.root, self._place, self._dtype, self._counts[0])
            self._loan = self._their[LOAN]()[0]
        self._into = self._result
        self._is_result_in_place, self._is_over_given = True, False

    def _copy_next(self, out: Array) -> bool:
        return super()._copy_next(out) if self._result is None else self._pass_next()

    def _is_read(self) -> bool:
        if self._result is None:
            return super()._is_read()
        self.outcome, self._result = self._seen(), None
        return True

    def _let_go(self) -> None:
        super()._let_go()
        self._result = self._lent = None

    def _seen(self) -> Array:
        """Return the result as this rank's program gets it."""
        if self._lent is not None:
            seen, self._lent = self._lent.view(self._dtype), None
            seen.flags.writeable = False
            return seen
        whole = self.memory.heaps.array(self.root, self._place, self._dtype, self._counts[0])
        at = RELEASED + self._loan % MAX_LOANS
        weakref.finalize(whole, _release, self._words, at, self._loan, os.getpid()).atexit = False
        return whole[:]


def _release(words: memoryview, at: int, loan: int, holder: int) -> None:
    """Release a loan whose last view on this rank is gone; a forked child must not."""
    if os.getpid() == holder:
        words[at] = loan
