"""Which slots the collectives of a rank use, and those uses that are under way: looked at together.

The first rank of a group hands out the slot of a series, from memory of its own, when it is used for the second time:
it says where, on each link, before it sends anything of that use. So every rank knows of it when that use is complete,
and takes the slot for the uses after it. Nobody waits for an answer: a rank that cannot goes the ordinary way, and all
follow (see ``direct``), since what it sends reaches the first rank, which then takes the slot back.
"""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING, Any

import numpy as np

from kfcomm.core.frame import Kind
from kfcomm.core.links import definitions
from kfcomm.transports.shm.slots import MAX_SLOTS, NEVER, POSTED, SHARED, Slot, SlotMemory

if TYPE_CHECKING:
    from kfcomm.core.collective import GroupView, Series
    from kfcomm.runtime.direct import SlottedOperation
    from kfcomm.runtime.link_table import LinkTable
    from kfcomm.runtime.meter import Meter

FEW = 8
"""Uses under way that are looked at one by one; of more, the words are compared all at once."""
SLOT, NO_SLOT = int(Kind.SLOT), int(Kind.NO_SLOT)


class SlotTable:
    """The slots of one rank.

    Args:
        links: to those who use them, too.
        meter: is told who was waited for, if anything is.

    Attributes:
        pending: uses under way, each of which may be complete at any time.
        num_taken, taken_nbytes: slots that this rank ever took, and the bytes of each region that they take.
    """

    def __init__(self, links: LinkTable, meter: Meter | None) -> None:
        self.pending: dict[SlottedOperation, None] = {}
        self.num_taken = self.taken_nbytes = 0
        self._links = links
        self._meter = meter
        self._boards: dict[SlotMemory, _Board] = {}
        self._others: dict[SlottedOperation, None] = {}
        self._parked: list[SlotMemory] = []

    def of(self, operation: SlottedOperation) -> Slot | None:
        """The slot for a use that begins now; None if it goes the ordinary way."""
        series = operation.series
        slot: Slot | None = series.slot
        if slot is None:
            slot = self._found(operation)
            if slot is None:
                return None
        if slot.is_dead:
            return None
        key = series.key
        early = key.early.get(operation.seq)
        if len(key.live) > 1 or (early is not None and early.items):
            slot.is_dead = True
            return None
        return slot

    def wake(self, slot: Slot, group: GroupView) -> None:
        """Wake those who sleep over what was stored, if any of this group do, and there is a link to them.

        There is one between the first rank and each of the others, at least; and it wakes all when it finds a use
        complete: if it sleeps, it is woken first.
        """
        slot.has_news = False
        for world in slot.memory.sleeping():
            if world in group.index:
                sender = self._links.by_peer.get(world)
                if sender is not None and sender.link is not None:
                    sender.link.wake_peer()

    def waited(self, slot: Slot, word: int, posted_s: float, group: GroupView) -> None:
        """A use is complete that has waited: for those who came last, which is told of the time that it took."""
        words, slot.late = slot.late, []
        word = slot.awaited or word
        meter = self._meter
        if meter is not None:
            missing = [rank for rank, other in enumerate(words) if not slot.has_come([other], word)]
            for rank in missing:
                meter.waited_s[group.members[rank]] += (monotonic() - posted_s) / len(missing)

    def add(self, operation: SlottedOperation) -> None:
        """A use is under way."""
        self.pending[operation] = None
        slot = operation.slot
        if slot is None:
            return
        memory = slot.memory
        if not memory.is_everywhere(slot):
            self._others[operation] = None
            return
        board = self._boards.get(memory)
        if board is None:
            board = self._boards[memory] = _Board(memory)
        board.add(slot.number, operation)

    def drop(self, operation: SlottedOperation) -> None:
        """It is no more."""
        slot = operation.slot
        if self.pending.pop(operation, 0) is None and slot is not None:
            self._others.pop(operation, None)
            board = self._boards.get(slot.memory)
            if board is not None:
                board.drop(slot.number)

    def look(self) -> bool:
        """Look at all that is under way; whether anything has come of it."""
        moved = False
        if len(self.pending) <= FEW:
            for operation in tuple(self.pending):
                if _moves(operation):
                    moved = True
            return moved
        for board in self._boards.values():
            for operation in board.candidates():
                if _moves(operation):
                    moved = True
                board.look_for(operation)
        for operation in tuple(self._others):
            if _moves(operation):
                moved = True
        return moved

    def park(self) -> None:
        """Peers have to wake this process for what is under way."""
        for operation in self.pending:
            if operation.slot is not None and operation.slot.memory not in self._parked:
                operation.slot.memory.park(is_parked=True)
                self._parked.append(operation.slot.memory)

    def unpark(self) -> None:
        """It looks by itself."""
        for memory in self._parked:
            memory.park(is_parked=False)
        self._parked.clear()

    # ---------------------------------------------------------------- how they are agreed on

    def _found(self, operation: SlottedOperation) -> Slot | None:
        """A slot handed out before this use; if there is none, the group's first rank hands one out with it."""
        series, key = operation.series, operation.key
        taken: Slot | None = None if key.slots is None else key.slots.get(series.signature)
        if taken is not None:  # by this series, as it was known before
            series.slot = taken
            return taken
        offers = key.offers or {}
        if series.signature in offers:
            peer, seq, memory, number, at = offers[series.signature]
            if peer != series.group.members[0] or seq >= operation.seq:
                return None
            del offers[series.signature]
            return self._taken(operation, memory, number, at)
        if not series.group.rank and len(key.live) == 1:
            if series.is_known:
                self._hand_out(series, operation)
            series.is_known = True
        return None

    def take_back(self, operation: SlottedOperation) -> None:
        """This rank goes the ordinary way; if it has handed out a slot that it uses no more, all hear of it.

        Whoever else does sends something to that one, whose graph reaches all: so all follow.
        """
        series = operation.series
        slot: Slot | None = series.slot
        if slot is None or not slot.is_dead or series.group.rank or operation.seq >= slot.told_from:
            return
        slot.told_from = operation.seq  # of overlapping uses an earlier one may leave later
        for peer in series.group.members[1:]:
            sender = self._links.to(peer)
            for header in definitions(sender.state, operation):
                sender.send(header)
            sender.send((NO_SLOT, series.key_id, series.signature_id, operation.seq))

    def taken_back(self, slot: Slot | None, peer: int, seq: int) -> None:
        """Who has handed out a slot goes the ordinary way from use ``seq`` on."""
        if slot is None or peer != slot.root:
            return
        slot.is_dead = True
        for operation in [one for one in self.pending if one.slot is slot and one.seq >= seq]:
            operation.leave()

    def _taken(self, operation: SlottedOperation, memory: SlotMemory, number: int, at: int) -> Slot | None:
        """The slot there, for this series from now on; None if there can be none."""
        series, work = operation.series, operation.work
        group, key = series.group, series.key
        slot = memory.slot(number, at, group.members, group.rank, work.shown, work.cut, work.combine)
        if slot is not None:
            if key.slots is None:
                key.slots = {}
            series.slot = key.slots[series.signature] = slot
            self.num_taken += 1
            self.taken_nbytes += work.cut.room
        return slot

    def _hand_out(self, series: Series, operation: SlottedOperation) -> None:
        members, by_peer = series.group.members, self._links.by_peer
        senders = [by_peer.get(peer) for peer in members[1:]]
        links = [None if sender is None else sender.link for sender in senders]
        memories = {None if link is None else link.slots for link in links}
        memory = memories.pop() if len(memories) == 1 else None
        if memory is None:
            return
        where = memory.hand_out(operation.work.cut)
        if where is None:
            return
        if self._taken(operation, memory, *where) is None:
            return
        for sender in senders:
            if sender is not None:
                for header in definitions(sender.state, operation):
                    sender.send(header)
                sender.send((SLOT, series.key_id, series.signature_id, operation.seq, *where))


def _moves(operation: SlottedOperation) -> bool:
    """Look at it; whether it is over, or at least further."""
    slot = operation.slot
    if operation.look():
        return True
    if slot is None or not slot.has_moved:
        return False
    slot.has_moved = False
    return True


class _Board:
    """The uses under way in one memory: by two comparisons it is known of which something may come."""

    def __init__(self, memory: SlotMemory) -> None:
        self._words = memory.everywhere(POSTED), memory.everywhere(SHARED)
        self._awaited = tuple(np.full(MAX_SLOTS, NEVER, np.int64) for _ in self._words)
        self._by_number: dict[int, SlottedOperation] = {}
        self._end = 0

    def add(self, number: int, operation: SlottedOperation) -> None:
        self._by_number[number] = operation
        self.look_for(operation)
        if number >= self._end:
            self._end = number + 1

    def look_for(self, operation: SlottedOperation) -> None:
        """What is under way is further now."""
        slot = operation.slot
        if slot is not None:
            for awaited, word in zip(self._awaited, slot.awaits(operation.word), strict=True):
                awaited[slot.number] = word

    def drop(self, number: int) -> None:
        if self._by_number.pop(number, None) is not None:
            for awaited in self._awaited:
                awaited[number] = NEVER

    def candidates(self) -> list[Any]:
        """Those of which all words may have come, posted or shared."""
        if not self._by_number:
            return []
        end = self._end
        posted, shared = (
            (words[:, :end] >= awaited[:end]).all(axis=0)
            for words, awaited in zip(self._words, self._awaited, strict=True)
        )
        return [self._by_number[number] for number in np.flatnonzero(posted | shared).tolist()]
