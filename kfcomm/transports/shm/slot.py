"""Slots that carry a message at once, read by every rank as a whole or in parts.

See ``slots`` for the protocol, and ``parted`` for longer messages.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from kfcomm.transports.shm.ring import fence
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
    if cut.is_scattered or cut.is_gathered:
        from kfcomm.transports.shm.one_way import GatherSlot, ScatterSlot

        return GatherSlot if cut.is_gathered else ScatterSlot
    from kfcomm.transports.shm.parted import PartedSlot, SharedResultSlot

    return SharedResultSlot if cut.is_shared else PartedSlot


class Slot:
    """One slot, as one of its ranks uses it, for messages that every rank reads as a whole.

    Attributes:
        number: in ``memory``.
        places: of the regions of its ranks.
        members, others: their world ranks, all and without this one.
        posted: reads the latest words of all ranks.
        num_words: words of each use.
        combine, views, use: folds contributions; contributions of even and of odd uses; which of them this rank's
            latest use has. If it ``is_whole``, a use is complete when they are folded, else see ``look``.
        is_dead: this rank does not use it any more.
        outlives_epoch: the next epoch can inherit it: a rank notices after it has read if a buffer was written to.
        num_uses: uses completed by this rank.
        at: offset of its buffers in each region; ``nbytes``: their size.
        users: world ranks that may use it; maintained by the rank that handed it out.
        told_from: use from which on all ranks have to stop; maintained by the rank that handed it out.
        root: world rank that handed it out; ``is_root``: this one.
        parked: reads the parked flags of all ranks of the memory.
        late: words seen when some were missing, for a use that has waited; its reader clears it.
        outcome: result of the latest use, if it is not in the array that was given for it.
        awaited: word that all ranks should have had in ``late``; 0 for the use's first.
        has_moved: a use that is not complete has progressed; its reader clears it.
        has_news: this rank has stored something, and a peer sleeps that may have to be woken.
    """

    __slots__ = (
        "_buffers", "_buffers_end", "_fence", "_gives", "_itemsize", "_posted_at", "_rank", "_words", "at", "awaited",
        "combine", "has_moved", "has_news", "is_dead", "is_root", "late", "members", "memory", "nbytes", "num_uses",
        "num_words", "number", "others", "outcome", "parked", "places", "poller", "posted", "root", "told_from", "use",
        "users", "views",
    )  # fmt: skip

    is_whole = True
    outlives_epoch = False

    def __init__(self, memory: SlotMemory, spec: SlotSpec) -> None:
        number, at, members, rank, hub, dtype, cut, combine = spec
        places, root = tuple(memory.places[world] for world in members), members[hub]
        self.memory = memory
        self.number = number
        self.at, self.nbytes = at, cut.nbytes
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
        self.poller: Any = None  # reserved for a poller of many slots
        self.combine = combine
        self._fence = fence()
        self.parked = memory.parked
        self._posted_at = POSTED + number
        self._words = memory.own_words
        length = len(places) * cut.piece if cut.is_turned else cut.count
        shows, (begin, end) = (cut.shows, cut.reads) if cut.is_whole else (length, (0, length))
        self._buffers_end = at + 2 * lines(length * dtype.itemsize)
        ats = at, at + lines(length * dtype.itemsize)
        self._buffers = tuple(memory.own_array(one, dtype, shows) for one in ats)
        views = [memory.arrays(one + begin * dtype.itemsize, dtype, end - begin, places) for one in ats]
        self.views = (list(views[0]), list(views[1])) if cut.is_by_row else tuple(views)

    def post(self, x: Array, word: int) -> bool:
        """Show the contribution to the next use; returns whether a peer sleeps and may have to be woken.

        ``x`` must not change until the use is over.
        """
        self.use = use = 1 - self.use
        self._buffers[use][:] = x
        self._words[self._posted_at] = word
        with self._fence:
            pass
        return 1 in self.parked()

    def look(self, word: int, out: Array) -> bool:
        """Return whether this rank's latest use, with this word, is complete; if so, its result is in ``out``.

        ``out`` may be the contribution.
        """
        words = self.posted()
        # Checked here first, since that usually avoids the call.
        if min(words) < word or (max(words) - word >= GENERATION and not self.has_come(words, word)):
            self.late = words
            return False
        self.combine(self.views[self.use], out)
        return True

    def has_come(self, words: list[int], word: int) -> bool:
        """Return whether ranks have posted the use of this word, given their latest words: it, or one of a later use.

        The same number with another generation does not count: those ranks disagree.
        """
        if min(words) == word and max(words) - word < GENERATION:
            return True
        number = word % GENERATION
        return all(other == word or other % GENERATION > number for other in words)

    def awaits(self, word: int) -> tuple[int, int]:
        """Return the posted and the shared word of all ranks that let the use of this word progress; see ``look``."""
        return word, NEVER

    def behind(self, word: int) -> list[int]:
        """Return the group ranks that keep the use of this word waiting."""
        return [rank for rank, other in enumerate(self.posted()) if not self.has_come([other], word)]

    def take_outcome(self, value: Array) -> Array:
        """Return the result that replaces the array given for it, if there is one, else that array."""
        made, self.outcome = self.outcome, None
        return value if made is None else made.reshape(value.shape)

    @property
    def is_relayed(self) -> bool:
        """Whether contributions are forwarded from here, so that a use is not over when all have posted."""
        return False

    @property
    def nbytes_of_all(self) -> int | None:
        """Bytes that each rank reads of each other in a use; None if they differ."""
        return self._gives * self._itemsize if isinstance(self._gives, int) else None

    def moved(self, uses: int) -> Iterator[tuple[int, int, int]]:
        """Yield world rank, bytes read of this rank, and bytes read by this rank, of each other rank in so many uses.

        On any thread. Bytes read in place, in symmetric memory, count like copied ones.
        """
        gives, each, own = self._gives, uses * self._itemsize, self._rank
        given = (lambda *_: gives) if isinstance(gives, int) else gives
        for place, world in enumerate(self.members):
            if place != own:
                yield world, each * given(own, place), each * given(place, own)

    def forget(self) -> None:
        """Release the latest use, which is over or continues on another path."""


class SilentSlot(Slot):
    """Slot in which this rank contributes nothing, whatever array it has."""

    __slots__ = ()

    @override
    def post(self, x: Array, word: int) -> bool:
        return super().post(x[:0], word)


class HubSlot(Slot):
    """Slot for the ranks of one host among several: the hub, which handed it out, reads their contributions.

    The hub shows the result of all hosts. The other ranks share with the word by which they post: so all have shared a
    use when the hub has, and the hub begins it when all have posted. No buffer is written too early: a rank that posts
    has the result of the use before, for which the hub had read all contributions; and the hub makes the next result
    when all have posted, and so had read the last one.
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
        """Return the bytes of another rank's contribution to the latest use."""
        return self.views[self.use][place].view(np.uint8).data

    def show(self, begin: int, end: int, result: Array) -> None:
        """Show some elements of the result; only the hub does."""
        self._buffers[self.use][begin:end] = result[begin:end]

    def share(self, word: int) -> bool:
        """Mark the result as complete; returns whether a peer sleeps and may have to be woken."""
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
    """Slot for messages of medium length, in one window: each rank folds its part, and the others copy that.

    Faster than ``PartedSlot``, since it has neither arrays in place nor windows.
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
            if min(words) < word or (max(words) - word >= GENERATION and not self.has_come(words, word)):
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
        if min(words) < word or (max(words) - word >= GENERATION and not self.has_come(words, word)):
            self.late = words
            return False
        if self._rows:
            out.reshape(-1, self._rows)[:] = self._shares[self.use]
        else:
            for part, share in zip(self._places, self._shares[self.use], strict=True):
                out[part] = share
        if 1 in self.parked():  # a rank without a link to the last one is woken by one that has it
            self.has_news = True
        return True

    @override
    def awaits(self, word: int) -> tuple[int, int]:
        return (NEVER, word) if self._folded == word else (word, NEVER)

    @override
    def behind(self, word: int) -> list[int]:
        words = self._shared() if self._folded == word else self.posted()
        return [rank for rank, other in enumerate(words) if not self.has_come([other], word)]
