"""Calls aborted, and peers lost, before the local call was posted.

It decides nothing and drops nothing: the router asks it. Memory is bounded: the oldest aborted calls are forgotten,
since most are of groups that this rank is not in.
"""

from __future__ import annotations

from kfcomm.core.cause import Cause
from kfcomm.core.collective import GroupView, Key

MAX_ABORTED = 1 << 16
"""Aborted calls remembered until they are posted."""


class Aborted:
    """Calls that will never run on this rank.

    Attributes:
        causes: why a collective that is not posted yet is over, by group id, name and sequence number.
        lost: why a peer is gone, by world rank.
        groups: groups of this rank, by id, as far as it has used them.
    """

    __slots__ = ("causes", "groups", "lost")

    def __init__(self) -> None:
        self.causes: dict[tuple[bytes, str, int], Cause] = {}
        self.lost: dict[int, Cause] = {}
        self.groups: dict[bytes, GroupView] = {}

    def put(self, group_id: bytes, name: str, seq: int, cause: Cause) -> bool:
        """Record that a collective that is not posted is aborted; False if it was recorded before."""
        if (group_id, name, seq) in self.causes:
            return False
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
