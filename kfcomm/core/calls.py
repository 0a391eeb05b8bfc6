"""Calls of one rank in one epoch, by group, name and sequence number, with the state of each.

Rule: a sequence number of a name is used once. Whatever this rank does with it (post, refuse, leave out) takes it, and
what arrives for a number that was taken and is not live is dropped::

    state    kept in               event                                        next
    -------  --------------------  -------------------------------------------  -----------------------
    unknown  nowhere               a chunk or a question of a peer arrives      early
    unknown  nowhere               another rank aborts it                       aborted
    unknown  nowhere               this rank posts it                           live
    early    ``Key.early``         this rank posts it                           live: arrivals replayed
    early    ``Key.early``         aborted, left out, or a member is lost       aborted or over
    aborted  ``Aborted.causes``    this rank posts it                           over: fails with the cause
    live     ``Key.live``          complete                                     over
    live     ``Key.live``          aborted anywhere, a member lost, mismatch    over: FAILED
    over     below ``next_seq``    anything                                     over: dropped

`Calls` holds the table and what this rank does with it; `kfcomm.core.router` adds posting and what peers do.
"""

from __future__ import annotations

from enum import IntEnum

from kfcomm.core.cause import Cause, CauseKind
from kfcomm.core.collective import AnySignature, Collective, GroupView, ItemSizes, Key, Series
from kfcomm.core.links import EarlyItem
from kfcomm.core.machine import CollectiveDriver, Effects
from kfcomm.core.names import Names
from kfcomm.core.program import Program
from kfcomm.core.signature import Signature


class Tell(IntEnum):
    """Tags of the router's effects; the fields after the tag are in brackets. Those of ``Do`` are other numbers."""

    ANSWER = 16
    """[incoming, header]: send this frame back on the link of ``incoming``."""
    FLOOD = 17
    """[group id, name, seq, cause]: tell every rank that this collective is aborted."""
    FAILED = 18
    """[collective, cause]: it is over on this rank."""
    VIOLATION = 19
    """[incoming, reason]: the peer broke the protocol; close that link."""
    EARLY = 20
    """[group id, name, seq, signature or None]: first sign of a collective that is not posted here."""
    DROPPED = 21
    """[payload]: release it, unread."""
    BROKEN = 22
    """[peer, number, reason]: the peer reports this link to it as broken; it is, unless there is a newer one."""

    RESUME = 23
    """[collective, send]: ``collective.resume(send)``, unless the collective is over: its destination has posted."""


ANSWER, FLOOD, FAILED, VIOLATION, EARLY, DROPPED, BROKEN, RESUME = (int(tell) for tell in Tell)


class Calls:
    """Table of calls of one rank."""

    def __init__(self, rank: int) -> None:
        self.rank = rank  # in the world
        self.live: dict[Collective, CollectiveDriver] = {}  # posted and not complete
        self.names = Names()
        self._aborted = Aborted()
        # Aliases of the same tables: every post looks at them, and a call would cost more than the look.
        self.lost = self._aborted.lost  # causes by world rank
        # causes of collectives that are not posted and over, by group id, name and sequence number
        self.dead = self._aborted.causes
        self._groups = self._aborted.groups

    # ---------------------------------------------------------------- what this rank does

    def enter(self, collective: Collective) -> None:
        """Add a collective that was begun outside the router, under what was then the key's next number."""
        collective.key.live[collective.seq] = collective
        self.live[collective] = collective.driver

    def series(self, group: GroupView, name: str, signature: Signature, program: Program, sizes: ItemSizes) -> Series:
        """Return what all uses of a name with this signature share, for ``Router.post_again``."""
        return self.names.series(group, self.names.used(group.id, name), signature, program, sizes)

    def refuse(self, group: GroupView, name: str, message: str, effects: Effects, *, seq: int | None = None) -> Cause:
        """Abort a call that failed its local checks on every rank; it takes its sequence number as a post does."""
        key = self.names.key(group.id, name)
        if seq is not None:
            self._leave_out(key, seq, effects)
        cause = Cause(CauseKind.REFUSED, self.rank, message)
        # The number is taken now: an abort that another rank has sent for it would never be fetched.
        self._aborted.take(key, key.next_seq)
        self._bury(key, key.next_seq, effects)
        effects.append((FLOOD, key.group_id, key.name, key.next_seq, cause))
        key.spoil(key.next_seq)
        key.next_seq += 1
        return cause

    def leave_out(self, group: GroupView, name: str, below: int, effects: Effects) -> None:
        """Take all numbers of a key below this one that were not used, and drop what arrives for them."""
        # Other ranks are not notified: their calls fail by other means, or leave the numbers out, too.
        self._leave_out(self.names.key(group.id, name), below, effects)

    def leave(self, group_id: bytes, effects: Effects) -> None:
        """Leave a group in which nothing is in flight: this rank posts nothing more there. O(its names)."""
        # `Names` remembers its posts for a while, so that late peers can ask for them.
        for key in self.names.of_group(group_id):
            for seq in list(key.early):
                self._bury(key, seq, effects)
        self.names.leave(group_id)
        self._groups.pop(group_id, None)

    def abort(self, collective: Collective, cause: Cause, effects: Effects) -> None:
        """Fail a collective here and, unless every rank hears of the cause by itself (a lost peer), everywhere."""
        if self._forget(collective, effects):
            key = collective.key
            if cause.kind not in (CauseKind.LOST, CauseKind.EPOCH):
                effects.append((FLOOD, key.group_id, key.name, collective.seq, cause))
            effects.append((FAILED, collective, cause))

    def complete(self, collective: Collective) -> None:
        """Remove a collective that is complete. It lets go of its driver, which may hold it."""
        if self.live.pop(collective, None) is not None:
            del collective.series.key.live[collective.seq], collective.driver

    # ---------------------------------------------------------------- questions

    @property
    def num_keys(self) -> int:
        """Number of names met so far, in all groups."""
        return len(self.names)

    def uses(self) -> list[tuple[bytes, str, int]]:
        """Return group, name and number of uses on this rank of every name, oldest first. Safe on any thread."""
        return [(key.group_id, key.name, key.next_seq) for key in list(self.names)]

    def num_uses(self, group_id: bytes, name: str) -> int:
        """Return how many sequence numbers of a key were taken on this rank: the next one."""
        key = self.names.find(group_id, name)
        return 0 if key is None else key.next_seq

    def is_posted(self, group_id: bytes, name: str, seq: int) -> bool:
        """Return whether this rank has posted that collective, now or earlier. Safe on any thread."""
        key = self.names.find(group_id, name)
        return key is not None and seq < key.next_seq

    def expected(self, group_id: bytes, name: str) -> AnySignature | Cause | None:
        """Return the signature of the key's next use if something of it arrived early, its cause if it was aborted."""
        key = self.names.find(group_id, name)
        early = None if key is None else key.early.get(key.next_seq)
        if early is not None:
            return early.signature
        return self.dead.get((group_id, name, 0 if key is None else key.next_seq))

    # ---------------------------------------------------------------- inside

    def _obstacle(self, group: GroupView, key: Key, overlapping: bool, effects: Effects) -> Cause | None:
        """Return why the next use of a key cannot begin."""
        cause = self._aborted.take(key, key.next_seq) if self.dead else None
        if cause is not None:
            return cause
        cause = self._aborted.loss_in(group) if self.lost else None
        if cause is not None:
            self._bury(key, key.next_seq, effects)
            return cause
        if key.live and not overlapping:
            where = f"on {group.called(group.rank)} in flight"
            cause = Cause(CauseKind.REFUSED, self.rank, f"{group.titled(key.name)} was used again {where}")
            self._bury(key, key.next_seq, effects)
            effects.append((FLOOD, key.group_id, key.name, key.next_seq, cause))
            return cause
        return None

    def _leave_out(self, key: Key, seq: int, effects: Effects) -> None:
        """Make ``seq`` the next use of a key. There may be very many before it, so no loop runs over all of them."""
        if self.dead:
            self._aborted.forget(key, range(key.next_seq, seq))
        if key.early:
            for skipped in sorted(early for early in key.early if early < seq):
                self._bury(key, skipped, effects)
        if seq > key.next_seq:
            key.spoil(seq - 1)
            key.next_seq = seq

    def _forget(self, collective: Collective, effects: Effects) -> bool:
        if self.live.pop(collective, None) is None:
            return False
        del collective.key.live[collective.seq]
        collective.key.spoil(collective.seq)
        collective.deferred = None
        effects += [(DROPPED, payload) for payload in collective.take_held()]
        return True

    def _bury(self, key: Key, seq: int, effects: Effects) -> None:
        """Drop what arrived early for a collective that will never run."""
        early = key.early.pop(seq, None)
        if early is not None:
            early.dropped = True
            for item in early.items:
                discard(item, effects)
            for incoming, _, _ in early.asks or ():
                incoming.asks -= 1


def discard(item: EarlyItem, effects: Effects) -> None:
    """Drop a chunk that arrived early, and owe its credit to the sender."""
    incoming, _, _, nbytes, payload = item
    incoming.window.matched(nbytes)
    effects.append((DROPPED, payload))


MAX_ABORTED = 1 << 16
"""Aborted calls remembered until they are posted."""


class Aborted:
    """Calls aborted, and peers lost, before the local call was posted. It only records: the router asks and drops."""

    __slots__ = ("causes", "groups", "lost")

    def __init__(self) -> None:
        self.causes: dict[tuple[bytes, str, int], Cause] = {}  # by group id, name and sequence number
        self.lost: dict[int, Cause] = {}  # by world rank
        self.groups: dict[bytes, GroupView] = {}  # of this rank, by id, as far as it has used them

    def put(self, group_id: bytes, name: str, seq: int, cause: Cause) -> bool:
        """Record that a collective that is not posted is aborted; False if it was recorded before."""
        if (group_id, name, seq) in self.causes:
            return False
        # Most of them are of groups that this rank is not in, and so are never taken: the oldest go.
        if len(self.causes) >= MAX_ABORTED:
            del self.causes[next(iter(self.causes))]
        self.causes[group_id, name, seq] = cause
        return True

    def take(self, key: Key, seq: int) -> Cause | None:
        """Return why this use of a key is over, and forget it."""
        return self.causes.pop((key.group_id, key.name, seq), None)

    def forget(self, key: Key, seqs: range) -> None:
        """Forget these uses of a key. O(uses or aborted calls, whichever are fewer)."""
        if len(seqs) <= len(self.causes):
            for seq in seqs:
                self.take(key, seq)
            return
        group_id, name = key.group_id, key.name
        for one in [one for one in self.causes if one[1] == name and one[0] == group_id and one[2] in seqs]:
            del self.causes[one]

    def loss_in(self, group: GroupView) -> Cause | None:
        """Return the first known loss among the members of a group: it can complete nothing any more."""
        for peer, cause in self.lost.items():
            if peer in group.index:
                return cause
        return None

    def is_closed(self, group_id: bytes) -> bool:
        """Return whether a member is lost, of a group that this rank has used."""
        group = self.groups.get(group_id)
        return group is not None and self.loss_in(group) is not None

    def is_over(self, key: Key, seq: int) -> bool:
        """Return whether a collective that is not in flight here never will be: it was, or it was aborted."""
        if key.has_ended or seq < key.next_seq or (self.causes and (key.group_id, key.name, seq) in self.causes):
            return True
        return bool(self.lost) and self.is_closed(key.group_id)
