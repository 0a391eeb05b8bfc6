"""Groups that one rank is in, by id."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Sequence

from kfcomm.core.collective import MAX_LEFT, GroupView


class GroupTable:
    """Names and members of the groups of one rank.

    Args:
        world: all ranks as a group.

    Attributes:
        known: name and members, by world rank, of every group that this rank is in, by id; of those that it has left,
            the latest.
    """

    def __init__(self, world: GroupView) -> None:
        self.known = {world.id: ("world", world.members)}
        self._rank = world.rank
        self._num_created: dict[bytes, int] = {}
        self._left: deque[bytes] = deque()

    def add(self, parent: GroupView, name: str, members: Sequence[int]) -> GroupView:
        """The view of a further group; ``members`` are ranks of the parent, this rank among them."""
        world_ranks = tuple(parent.members[rank] for rank in members)
        kind = hashlib.blake2b(repr((parent.id, name, world_ranks)).encode(), digest_size=16).digest()
        number = self._num_created.get(kind, 0)
        self._num_created[kind] = number + 1
        identity = hashlib.blake2b(kind + number.to_bytes(8, "little"), digest_size=16, person=b"group").digest()
        self.known[identity] = (name, world_ranks)
        return GroupView(identity, world_ranks, world_ranks.index(self._rank))

    def leave(self, group_id: bytes) -> None:
        """This rank has left a group. Late messages name it, so the latest ``MAX_LEFT`` stay known."""
        self._left.append(group_id)
        if len(self._left) > MAX_LEFT:
            self.known.pop(self._left.popleft(), None)
