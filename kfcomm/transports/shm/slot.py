"""Slots that carry a message at once: what every rank reads as a whole, or in parts.

See ``slots`` for the protocol, and ``parted`` for longer messages.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from kfcomm.transports.shm.shared import fence
from kfcomm.transports.shm.slots import GENERATION, NEVER, POSTED, SHARED, Array, Cut, SlotMemory, SlotSpec, lines
from kfcomm.types import override


def kind_of(cut: Cut) -> type[Slot]:
    """Return the kind of slot that carries messages that are cut so."""
    if cut.has_hub:
        return HubSlot
    if cut.is_whole:
        return SilentSlot if cut.count and not cut.shows else Slot
    if not cut.is_turned:
        return OneWindowSlot
    from kfcomm.transports.shm.parted import PartedSlot, SharedResultSlot

    return SharedResultSlot if cut.is_shared else PartedSlot


class Slot:
    """One slot, as one of its ranks uses it: for messages that everybody reads as a whole.

    Attributes:
        memory: that it is in.
        number: in that.
        places: of the regions of its ranks.
        members, others: world ranks of those, all and without this one.
        posted: the latest words of all ranks.
        num_words: of each use.
        combine, views, use: what folds contributions, those of even and of odd uses, and which of them the latest use
            is, of this rank; a use is complete when they are folded, if it ``is_whole``, and else see ``look``.
        is_dead: this rank uses it no more.
        num_uses: that were completed in it by this rank.
        at, room: where in each region its buffers are, and their bytes.
        users: world ranks that may use it; kept by who has handed it out.
        told_from: all ranks have been told not to use it from this use on; kept by who has handed it out.
        root: world rank of who has handed it out; ``is_root``: this one.
        parked: who has to be woken, of all ranks of the memory, read now.
        late: words that had come when not all had, for a use that has waited; to be cleared by who reads them.
        outcome: the result of the latest use, if it is not in the array that it was to be made in.
        board: for who looks at many slots at a time.
        awaited: the word that they should have been; 0 for the use's first.
        has_moved: something has come of a use that is not complete; to be cleared by who reads it.
        has_news: this rank has stored something, and somebody sleeps, who may have to be woken.
    """

    __slots__ = (
        "_buffers", "_buffers_end", "_fence", "_gives", "_itemsize", "_posted_at", "_rank", "_words", "at", "awaited",
        "board", "combine", "has_moved", "has_news", "is_dead", "is_root", "late", "members", "memory", "num_uses",
        "num_words", "number", "others", "outcome", "parked", "places", "posted", "room", "root", "told_from", "use",
        "users", "views",
    )  # fmt: skip

    is_whole = True

    def __init__(self, memory: SlotMemory, spec: SlotSpec) -> None:
        number, at, members, rank, hub, dtype, cut, combine = spec
        places, root = memory.places_of(members), members[hub]
        self.memory = memory
        self.number = number
        self.at, self.room = at, cut.room
        self.places = places
        self.members = list(members)
        self.posted = memory.words(POSTED, number, places)
        self.num_words = cut.num_windows
        self.root, self.is_root = root, root == memory.heaps.rank
        self.others = tuple(world for world in self.members if world != memory.heaps.rank)
        self.users = set(self.others)
        self.told_from = NEVER
        self.is_dead = self.has_news = self.has_moved = False
        self.use = self.awaited = self.num_uses = 0
        self._gives, self._itemsize, self._rank = cut.gives, dtype.itemsize, rank
        self.late: list[int] = []
        self.outcome: Array | None = None
        self.board: Any = None
        self.combine = combine
        self._fence = fence()
        self.parked = memory.parked
        self._posted_at = POSTED + number
        self._words = memory.own_words()
        length = len(places) * cut.piece if cut.is_turned else cut.count
        shows, (begin, end) = (cut.shows, cut.reads) if cut.is_whole else (length, (0, length))
        self._buffers_end = at + 2 * lines(length * dtype.itemsize)
        ats = at, at + lines(length * dtype.itemsize)
        self._buffers = tuple(memory.own_array(one, dtype, shows) for one in ats)
        self.views = tuple(memory.arrays(one + begin * dtype.itemsize, dtype, end - begin, places) for one in ats)

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
        if min(words) < word or (max(words) - word >= GENERATION and not self.has_come(words, word)):  # mostly no call
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

    def behind(self, word: int) -> list[int]:
        """Ranks that keep the use of this word waiting."""
        return [rank for rank, other in enumerate(self.posted()) if not self.has_come([other], word)]

    def take_outcome(self, value: Array) -> Array:
        """What is there in place of a value that was to be made."""
        made, self.outcome = self.outcome, None
        return value if made is None else made.reshape(value.shape)

    @property
    def is_relayed(self) -> bool:
        """Whether what is given is sent on from here, so that a use is not over when all have given."""
        return False

    @property
    def nbytes_of_all(self) -> int | None:
        """The bytes that each reads of each other in a use; None if that is not the same of all."""
        return self._gives * self._itemsize if isinstance(self._gives, int) else None

    def moved(self, uses: int) -> Iterator[tuple[int, int, int]]:
        """By world rank of the others, the bytes that they read of this rank, and this rank of them, in so many uses.

        On any thread. What is read where it lies, in symmetric memory, counts as what is copied does.
        """
        gives, each, own = self._gives, uses * self._itemsize, self._rank
        given = (lambda *_: gives) if isinstance(gives, int) else gives
        for place, world in enumerate(self.members):
            if place != own:
                yield world, each * given(own, place), each * given(place, own)

    def forget(self) -> None:
        """The latest use is over, or goes on elsewhere."""


class SilentSlot(Slot):
    """One in which this rank gives nothing, whatever array it has."""

    __slots__ = ()

    @override
    def post(self, x: Array, word: int) -> bool:
        return super().post(x[:0], word)


class HubSlot(Slot):
    """One for the ranks of a host among several: what they give is read by the hub, who has handed it out.

    What comes of it with the other hosts the hub shows to all. A rank but the hub says that it shares with the word by
    which it posts: so all have shared a use when the hub has, and the hub begins it when all have posted. No buffer is
    written too early: who posts has got the result of the use before, for which the hub had read what all gave; and the
    hub makes the next result when all have posted, who had thus read the last one.
    """

    __slots__ = ("_hub", "_shared", "_shared_at")

    is_whole = False

    def __init__(self, memory: SlotMemory, spec: SlotSpec) -> None:
        super().__init__(memory, spec)
        self._hub = spec.hub
        self._shared, self._shared_at = memory.words(SHARED, self.number, self.places), SHARED + self.number

    @property
    @override
    def is_relayed(self) -> bool:
        return self.is_root

    @override
    def post(self, x: Array, word: int) -> bool:
        # The hub shows its result later.
        if not self.is_root:
            self._words[self._shared_at] = word
            return super().post(x, word)
        self.use = 1 - self.use
        self._words[self._posted_at] = word
        with self._fence:
            pass
        return 1 in self.parked()

    @override
    def look(self, word: int, out: Array) -> bool:
        # For the hub, complete means that the contributions of all others can be read.
        words = self.posted() if self.is_root else self._shared()
        if not self.has_come(words, word):
            self.late = words
            return False
        if not self.is_root:
            out[:] = self.views[self.use][self._hub]
        return True

    def given(self, place: int) -> memoryview:
        """The bytes that one of the others gives for the latest use."""
        return self.views[self.use][place].view(np.uint8).data

    def show(self, begin: int, end: int, result: Array) -> None:
        """Some elements of the result, by the hub."""
        self._buffers[self.use][begin:end] = result[begin:end]

    def share(self, word: int) -> bool:
        """All of the result is there; whether anybody sleeps, and may have to be woken."""
        self._words[self._shared_at] = word
        with self._fence:
            pass
        return 1 in self.parked()

    @override
    def awaits(self, word: int) -> tuple[int, int]:
        return (word, NEVER) if self.is_root else (NEVER, word)

    @override
    def behind(self, word: int) -> list[int]:
        words = self.posted() if self.is_root else self._shared()
        return [place for place, other in enumerate(words) if not self.has_come([other], word)]


class OneWindowSlot(Slot):
    """One for messages of middling length, which go at once: each rank folds its part, and the others copy that.

    What ``PartedSlot`` does, but in less time: nothing is in place, and there are no windows.
    """

    __slots__ = ("_folded", "_given", "_made", "_places", "_rows", "_shared", "_shared_at", "_shares")

    is_whole = False

    def __init__(self, memory: SlotMemory, spec: SlotSpec) -> None:
        super().__init__(memory, spec)
        places, rank, dtype, cut = self.places, spec.rank, spec.dtype, spec.cut
        self._shared, self._shared_at = memory.words(SHARED, self.number, places), SHARED + self.number
        self._folded = NEVER
        self._places = [slice(begin, begin + length) for begin, length in cut.parts]
        mine = self._places[rank]
        self._given = tuple([row[mine] for row in view] for view in self.views)
        at = self._buffers_end
        ats = at, at + lines(cut.piece * dtype.itemsize)
        longest, length = cut.piece, mine.stop - mine.start
        self._made = tuple(memory.own_array(one, dtype, length) for one in ats)
        shares = [memory.arrays(one, dtype, longest, places) for one in ats]
        is_even = cut.count == len(places) * longest
        self._rows = longest if is_even and isinstance(shares[0], np.ndarray) else 0
        self._shares = shares if self._rows else [
            [share[: part.stop - part.start] for share, part in zip(one, self._places, strict=True)] for one in shares
        ]  # fmt: skip

    @override
    def look(self, word: int, out: Array) -> bool:
        if self._folded != word:
            words = self.posted()
            if not self.has_come(words, word):
                self.late = words
                return False
            self.combine(self._given[self.use], self._made[self.use])
            self._folded = self._words[self._shared_at] = word
            with self._fence:
                pass
            self.has_moved = True
            if 1 in self.parked():
                self.has_news = True
        words = self._shared()
        if not self.has_come(words, word):
            self.late = words
            return False
        if self._rows:
            out.reshape(-1, self._rows)[:] = self._shares[self.use]
        else:
            for part, share in zip(self._places, self._shares[self.use], strict=True):
                out[part] = share
        if 1 in self.parked():  # who has no link to the last to come is woken by who has one
            self.has_news = True
        return True

    @override
    def awaits(self, word: int) -> tuple[int, int]:
        return (NEVER, word) if self._folded == word else (word, NEVER)

    @override
    def behind(self, word: int) -> list[int]:
        words = self._shared() if self._folded == word else self.posted()
        return [rank for rank, other in enumerate(words) if not self.has_come([other], word)]
