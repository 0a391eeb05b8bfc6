"""What is known to be over before it has begun: collectives aborted before they were posted, and peers that are gone.

It decides nothing and drops nothing; the router asks it. Memory is bounded: the oldest tombstones are forgotten,
since most are of collectives that are not this rank's at all.
"""

from __future__ import annotations

from kfcomm.core.cause import Cause
from kfcomm.core.collective import GroupView, Key

MAX_TOMBSTONES = 1 << 16
"""Aborted collectives remembered until they are posted; the oldest are forgotten (most are not ours at all)."""


class Tombstones:
    """What will never run on this rank.

    Attributes:
        causes: why a collective that is not posted yet is over, by group id, name and sequence number.
        lost: why a peer is gone, by world rank.
        groups: those that this rank is a member of, by id, as far as it has used them.
    """

    __slots__ = ("causes", "groups", "lost")

    def __init__(self) -> None:
        self.causes: dict[tuple[bytes, str, int], Cause] = {}
        self.lost: dict[int, Cause] = {}
        self.groups: dict[bytes, GroupView] = {}

    def put(self, group_id: bytes, name: str, seq: int, cause: Cause) -> bool:
        """A collective that is not posted is aborted; False if that was known."""
        if (group_id, name, seq) in self.causes:
            return False
        if len(self.causes) >= MAX_TOMBSTONES:
            del self.causes[next(iter(self.causes))]
        self.causes[group_id, name, seq] = cause
        return True

    def take(self, key: Key, seq: int) -> Cause | None:
        """Why this use of a key is over, for the last time that anybody asks."""
        return self.causes.pop((key.group_id, key.name, seq), None)

    def forget(self, key: Key, seqs: range) -> None:
        """Nobody asks for these uses of a key. O(uses or tombstones, whichever are fewer)."""
        if len(seqs) <= len(self.causes):
            for seq in seqs:
                self.take(key, seq)
            return
        group_id, name = key.group_id, key.name
        for one in [one for one in self.causes if one[1] == name and one[0] == group_id and one[2] in seqs]:
            del self.causes[one]

    def gone_from(self, group: GroupView) -> Cause | None:
        """Why a group can do nothing any more: the first loss among its members that was heard of."""
        for peer, cause in self.lost.items():
            if peer in group.index:
                return cause
        return None

    def is_closed(self, group_id: bytes) -> bool:
        """Whether a member is gone, of a group that this rank knows."""
        group = self.groups.get(group_id)
        return group is not None and self.gone_from(group) is not None

    def is_over(self, key: Key, seq: int) -> bool:
        """Whether a collective that is not in flight here will never be: it was, or its end is known."""
        if key.has_ended or seq < key.next_seq or (self.causes and (key.group_id, key.name, seq) in self.causes):
            return True
        return bool(self.lost) and self.is_closed(key.group_id)
