"""Table of the slots of a rank, and of their uses under way, which are polled together.

The hub of a series is its root, or else the first rank of the group. At the second use of the series it allocates a
slot in its own memory, and announces that on each link before it sends anything of that use. So every rank knows the
slot when that use is complete, and takes it for later uses. No rank waits for an answer: one that cannot use the slot
sends chunks. These reach the hub, which takes the slot back, and all ranks send chunks (see ``executors``).
"""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING, Any

import numpy as np

from kfcomm.core.frame import Kind
from kfcomm.core.links import definitions
from kfcomm.engine.inherited import InheritedSlots
from kfcomm.errors import RemoteProtocolError
from kfcomm.transports.shm.slots import MAX_SLOTS, NEVER, POSTED, SHARED, Cut, SlotMemory, SlotSpec

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kfcomm.core.collective import AnySignature, Key, Series
    from kfcomm.core.frame import Header
    from kfcomm.core.links import Incoming
    from kfcomm.engine.executors import InSlot, SlotExecutor
    from kfcomm.engine.link_table import LinkTable
    from kfcomm.engine.meter import Meter
    from kfcomm.transports.shm.slot import Slot

FEW = 8
"""Uses under way that are looked at one by one; of more, the words are compared all at once."""
MAX_OFFERS = 1 << 12
"""Slots that were handed out for one key, and are not taken."""
SLOT, NO_SLOT, VACANT = int(Kind.SLOT), int(Kind.NO_SLOT), int(Kind.VACANT)


class SlotTable:
    """The slots of one rank.

    Attributes:
        pending: uses under way; any may be complete at any time.
        num_taken, taken_nbytes: slots that this rank ever took, and the bytes of each region that they take.
        inherited: of the epoch before, not taken yet.
        bequest: slots of this epoch that the next one inherits; None until that is being agreed on.
        is_possible: there is memory that ranks share; else nothing is looked for.
    """

    def __init__(self, links: LinkTable, meter: Meter | None) -> None:
        self.pending: dict[InSlot, None] = {}
        self.num_taken = self.taken_nbytes = 0
        self.inherited = InheritedSlots({})
        self.bequest: InheritedSlots | None = None
        self.is_possible = True
        self._links = links
        self._meter = meter
        self._pollers: dict[SlotMemory, _Poller] = {}
        self._others: dict[InSlot, None] = {}
        self._parked: list[SlotMemory] = []
        self._left: dict[bytes, list[Slot]] = {}

    def of(self, use: SlotExecutor) -> Slot | None:
        """The slot for a use that begins now; None if it goes the ordinary way."""
        series = use.collective.series
        slot: Slot | None = series.slot
        if slot is None:
            slot = self._found(use)
            if slot is None:
                return None
        if slot.is_dead:
            return None
        key = series.key
        # Uses overlap, or a member has sent a chunk of this use, so does not use the slot: this rank leaves it, too.
        early = key.early.get(use.seq)
        if len(key.live) > 1 or (early is not None and any(item[0].peer in slot.members for item in early.items)):
            slot.is_dead = True
            return None
        return slot

    def wake(self, slot: Slot) -> None:
        """Wake the ranks that sleep on this slot and that a link leads to, after a store."""
        slot.has_news = False
        # Ranks without a link between them are woken by the hub, which has a link to each: it wakes all when it finds
        # a use complete, and if it sleeps, it is woken first.
        for world in slot.memory.sleeping():
            if world in slot.members:
                sender = self._links.by_peer.get(world)
                if sender is not None and sender.link is not None:
                    sender.link.wake_peer()

    def told(self, slot: Slot, use: InSlot, *, is_over: bool) -> None:
        """Wake ranks that may sleep after a new word, and record the ranks that a finished use has waited for."""
        if slot.has_news or (slot.is_root and 1 in slot.parked()):  # leaves of a star cannot wake each other
            self.wake(slot)
        if not is_over:
            return
        words, slot.late = slot.late, []
        meter = self._meter
        if meter is not None:
            word = slot.awaited or use.word
            missing = [member for member, other in zip(slot.members, words, strict=False) if other < word]
            for member in missing:
                meter.waited_s[member] += (monotonic() - use.posted_s) / len(missing)

    def add(self, use: InSlot) -> None:
        """Add a use that is under way."""
        self.pending[use] = None
        slot = use.slot
        if slot is None:
            return
        poller = slot.poller
        if poller is None:
            self._others[use] = None
        else:
            poller.add(slot.number, use)

    def drop(self, use: InSlot) -> None:
        """Remove a use that is over, or has left its slot."""
        if self.pending.pop(use, 0) is None:
            slot = use.slot
            if slot is None or slot.poller is None:
                self._others.pop(use, None)
            else:
                slot.poller.drop(slot.number)

    def uses(self) -> list[InSlot]:
        """The uses under way that are not operations yet; on any thread."""
        return [use for use in list(self.pending) if not use.is_operation]

    def look(self) -> bool:
        """Poll all uses under way; return whether any has moved."""
        moved = False
        if len(self.pending) <= FEW:
            for use in tuple(self.pending):
                if _moves(use):
                    moved = True
            return moved
        for poller in self._pollers.values():
            for use in poller.candidates():
                if _moves(use):
                    moved = True
                poller.look_for(use)
        for use in tuple(self._others):
            if _moves(use):
                moved = True
        return moved

    def park(self) -> bool:
        """Let peers wake this process for what is under way; False if not all may be able to yet."""
        is_first = False
        for use in self.pending:
            if (slot := use.slot) is None:
                continue
            # A link that is open here may not be so for the peer that is to wake this rank.
            is_first = is_first or (slot.memory.is_inherited and not slot.num_uses)
            if slot.memory not in self._parked:
                slot.memory.park(is_parked=True)
                self._parked.append(slot.memory)
        return not is_first and self.inherited.is_reached(one.peer for one in self._links.incoming)

    def unpark(self) -> None:
        """Resume polling: peers need not wake this process."""
        for memory in self._parked:
            memory.park(is_parked=False)
        self._parked.clear()

    # ---------------------------------------------------------------- how they are agreed on

    def _found(self, use: SlotExecutor) -> Slot | None:
        """A slot handed out before this use; without one, the hub hands one out with it."""
        series = use.collective.series
        key = series.key
        taken: Slot | None = None if key.slots is None else key.slots.get(series.signature)
        if taken is not None:  # by this series, as it was known before
            _set(series, taken)
            return taken
        inherited = self.inherited.take(series, use.seq, use.work.cut)
        if inherited is not None:
            (memory, number, at, _), cut = inherited
            for peer in self.inherited.expected:  # to wake it in later uses
                self._links.towards(peer)
            return self._taken(use, memory, (number, at), cut)
        offers = key.offers or {}
        if series.signature in offers:
            peer, seq, memory, number, at = offers[series.signature]
            # It must come from the hub, before this use, and not before a use that failed here: see ``Key.spoil``.
            if peer != series.group.members[use.work.hub] or not key.spoilt <= seq < use.seq:
                return None
            del offers[series.signature]
            return self._taken(use, memory, (number, at), use.work.cut)
        if series.group.rank == use.work.hub and len(key.live) == 1:
            if series.is_known:
                self._hand_out(series, use)
            series.is_known = True
        return None

    def take_back(self, use: SlotExecutor) -> None:
        """Send chunks for this use; if this rank has handed out the slot, notify every rank that it is withdrawn."""
        series = use.collective.series
        slots = series.key.slots
        slot: Slot | None = None if slots is None else slots.get(series.signature)
        # A rank that is not the root notifies none: its chunk reaches the root, whose graph reaches all, so all follow.
        if slot is None or not slot.is_dead or not slot.is_root or use.seq >= slot.told_from:
            return
        slot.told_from = use.seq  # of overlapping uses an earlier one may leave later
        for peer in slot.others:
            sender = self._links.to(peer)
            for header in definitions(sender.state, use.collective):
                sender.send(header)
            sender.send((NO_SLOT, series.key_id, series.signature_id, use.seq))

    def handed_out(self, incoming: Incoming, header: Header, memory: SlotMemory | None) -> None:
        """Take over a slot in the peer's memory for a key and a signature, for the uses after one.

        Raises:
            RemoteProtocolError: the key was never announced, or the peer does not share memory.
        """
        _, _, _, seq, number, at = header
        key, signature = _meant(incoming, header)
        if memory is None:
            raise RemoteProtocolError(f"rank {incoming.peer} sent a slot in memory that it does not share")
        if key.offers is None:
            key.offers = {}
        if len(key.offers) < MAX_OFFERS:
            key.offers[signature] = (incoming.peer, seq, memory, number, at)

    def taken_back(self, incoming: Incoming, header: Header) -> None:
        """Leave the slot of a key and a signature, which the peer has handed out, from some use on.

        Raises:
            RemoteProtocolError: the key was never announced.
        """
        seq = header[3]
        key, signature = _meant(incoming, header)
        if key.offers is not None:
            key.offers.pop(signature, None)
        slot: Slot | None = None if key.slots is None else key.slots.get(signature)
        if slot is None or incoming.peer != slot.root:
            return
        slot.is_dead = True
        for use in [one for one in self.pending if one.slot is slot and one.seq >= seq]:
            executor = use.enter().executor
            if executor is not None:
                executor.leave()

    # ---------------------------------------------------------------- how they are given back

    def leave(self, group_id: bytes, keys: Iterable[Key]) -> None:
        """Leave the group of these keys. Slots that this rank has handed out are kept until all others have left it."""
        self._links.traffic.end_slots(slot for key in keys for slot in (key.slots or {}).values())
        own = _own_slots(keys)
        if own:
            self._left[group_id] = own
            self._look_if_vacant(group_id, own)

    def peer_left(self, peer: int, group_id: bytes, keys: Iterable[Key]) -> None:
        """Note that a peer uses the slots of a group no more."""
        own = self._left.get(group_id)
        for slot in _own_slots(keys) if own is None else own:
            slot.users.discard(peer)
        if own is not None:
            self._look_if_vacant(group_id, own)

    def vacated(self, incoming: Incoming, header: Header, memory: SlotMemory | None) -> None:
        """Note that a slot in the memory of the peer is vacant.

        Raises:
            RemoteProtocolError: the peer does not share memory, or has no such slot.
        """
        if memory is None or header[1] >= MAX_SLOTS:
            raise RemoteProtocolError(f"rank {incoming.peer} gave back a slot in memory that it does not share")
        memory.clear(header[1])

    def _look_if_vacant(self, group_id: bytes, own: list[Slot]) -> None:
        if any(slot.users for slot in own):
            return
        del self._left[group_id]
        for slot in own:
            for peer in slot.others:
                sender = self._links.by_peer.get(peer)
                if sender is not None:
                    sender.send((VACANT, slot.number))
                    self._links.dirty[sender] = None
            slot.memory.take_in(slot)
        self._links.flush_soon()

    # ---------------------------------------------------------------- inside

    def _taken(self, use: SlotExecutor, memory: SlotMemory, where: tuple[int, int], cut: Cut) -> Slot | None:
        """The slot there, for this series from now on; None if there can be none."""
        series, work = use.collective.series, use.work
        group, key = series.group, series.key
        members = [group.members[rank] for rank in work.ranks]
        rank, hub = work.ranks.index(group.rank), work.ranks.index(work.hub)
        slot = memory.slot(SlotSpec(*where, members, rank, hub, work.shown, cut, work.combine))
        if slot is not None:
            if key.slots is None:
                key.slots = {}
            key.slots[series.signature] = slot
            _set(series, slot)
            if memory.is_everywhere(slot):
                poller = self._pollers.get(memory)
                if poller is None:
                    poller = self._pollers[memory] = _Poller(memory)
                slot.poller = poller
            self._links.traffic.add_slot(slot)
            self.num_taken += 1
            self.taken_nbytes += cut.nbytes
        return slot

    def _hand_out(self, series: Series, use: SlotExecutor) -> None:
        by_peer, group = self._links.by_peer, series.group
        others = [group.members[rank] for rank in use.work.ranks if rank != group.rank]
        senders = [by_peer.get(peer) for peer in others]
        links = [None if sender is None else sender.link for sender in senders]
        memories = {None if link is None else link.slots for link in links}
        memory = memories.pop() if len(memories) == 1 else None  # one rank without it, and all use links
        if memory is None:
            return
        where = memory.hand_out(use.work.cut)
        if where is None:
            return
        if self._taken(use, memory, where, use.work.cut) is None:
            return
        for sender in senders:
            if sender is not None:
                for header in definitions(sender.state, use.collective):
                    sender.send(header)
                sender.send((SLOT, series.key_id, series.signature_id, use.seq, *where))


def _set(series: Series, slot: Slot) -> None:
    """Let uses begin in it by themselves, if they need no more than it."""
    if not slot.is_relayed:
        series.slot = slot


def _own_slots(keys: Iterable[Key]) -> list[Slot]:
    """The slots that this rank has handed out for some keys, in this epoch."""
    slots = (slot for key in keys for slot in (key.slots or {}).values())
    return [slot for slot in slots if slot.is_root and not slot.memory.is_inherited]


def _meant(incoming: Incoming, header: Header) -> tuple[Key, AnySignature]:
    """The key and the signature of a frame about a slot."""
    key = incoming.keys.get(header[1])
    signature = incoming.signatures.get(header[2])
    if key is None or signature is None:
        raise RemoteProtocolError(f"rank {incoming.peer} sent a slot under a number that was never defined")
    return key, signature


def _moves(use: InSlot) -> bool:
    """Poll; return whether it is over, or has progressed."""
    slot = use.slot
    if use.look():
        return True
    if slot is None or not slot.has_moved:
        return False
    slot.has_moved = False
    return True


class _Poller:
    """The uses under way in one memory: two comparisons of arrays find those that may have moved."""

    def __init__(self, memory: SlotMemory) -> None:
        self._words = memory.everywhere(POSTED), memory.everywhere(SHARED)
        self._awaited = tuple(np.full(MAX_SLOTS, NEVER, np.int64) for _ in self._words)
        self._posted, self._shared = (awaited.data for awaited in self._awaited)
        self._by_number: dict[int, InSlot] = {}
        self._end = 0

    def add(self, number: int, use: InSlot) -> None:
        self._by_number[number] = use
        slot = use.slot
        if slot is not None and slot.is_whole:
            self._posted[number] = use.word
        else:
            self.look_for(use)
        if number >= self._end:
            self._end = number + 1

    def look_for(self, use: InSlot) -> None:
        """Await the next words of a use that has progressed."""
        slot = use.slot
        if slot is not None:
            self._posted[slot.number], self._shared[slot.number] = slot.awaits(use.word)

    def drop(self, number: int) -> None:
        del self._by_number[number]
        self._posted[number] = self._shared[number] = NEVER

    def candidates(self) -> list[Any]:
        """The uses whose words may all have come, posted or shared."""
        if not self._by_number:
            return []
        end = self._end
        posted, shared = (
            (words[:, :end] >= awaited[:end]).all(axis=0)
            for words, awaited in zip(self._words, self._awaited, strict=True)
        )
        return [self._by_number[number] for number in np.flatnonzero(posted | shared).tolist()]
