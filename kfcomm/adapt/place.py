"""Where the ranks meet: in a group of their own or, in a program with an open ``Elastic``, in its world.

A group ends with the first rank that is lost. The world of an ``Elastic`` goes on: whatever any rank has finished
there, all that live finish, with the same contributors. So each of them knows of a meeting who was at it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from kfcomm.collectives.handle import Handle
from kfcomm.errors import PeerLost
from kfcomm.world.communicator import Communicator

MEETING = "meeting"
OWN_NAMES = "kfcomm/adaptation/"
"""In the world of an ``Elastic``: calls of such names are always finished by those that live."""


class Place(Protocol):
    """Where the ranks of one ``Adaptation`` meet."""

    @property
    def rank(self) -> int:
        """This one."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    def meet(self, mine: Any) -> Handle[Any]:
        """The sum of what all ranks give."""

    def all_were_there(self, meeting: Handle[Any]) -> bool:
        """Whether no rank is missing in it."""

    async def tell(self, value: Any, what: str) -> list[Any]:
        """What each rank says, in the order of ranks; without those that are lost."""

    async def take(self, value: Any, givers: Sequence[int]) -> Any:
        """What the first of ``givers`` that lives has given."""

    def refuse(self, error: BaseException) -> None:
        """This rank does not come to the next meeting."""

    async def close(self) -> None:
        """Meet no more."""


class GroupPlace:
    """A group of its own, along a binary tree: neither the program's names nor its strategy matter to it."""

    def __init__(self, group: Communicator) -> None:
        self.rank = group.rank
        self.size = group.size
        self._group = group

    @classmethod
    async def of(cls, comm: Communicator) -> GroupPlace:
        """That of all ranks."""
        return cls(await comm.group(range(comm.size), "adaptation", strategy="binary_tree"))

    def meet(self, mine: Any) -> Handle[Any]:
        """See `Place`."""
        return self._group.all_reduce(mine, MEETING)

    def all_were_there(self, meeting: Handle[Any]) -> bool:
        """See `Place`: a group without all of them has none."""
        return True

    async def tell(self, value: Any, what: str) -> list[Any]:
        """See `Place`."""
        said: list[Any] = await self._group.all_gather_object(value, what)
        return said

    async def take(self, value: Any, givers: Sequence[int]) -> Any:
        """See `Place`."""
        return await self._group.broadcast_object(value, givers[0], "state")

    def refuse(self, error: BaseException) -> None:
        """See `Place`."""
        self._group._group.refuse(MEETING, error)

    async def close(self) -> None:
        """See `Place`."""
        await self._group.close()


class WorldPlace:
    """The world of an open ``Elastic``, with its strategy."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm

    @property
    def rank(self) -> int:
        """See `Place`."""
        return self._comm.rank

    @property
    def size(self) -> int:
        """See `Place`."""
        return self._comm.size

    def meet(self, mine: Any) -> Handle[Any]:
        """See `Place`."""
        return self._comm.all_reduce(mine, f"{OWN_NAMES}{MEETING}")

    def all_were_there(self, meeting: Handle[Any]) -> bool:
        """See `Place`."""
        return set(meeting.contributors or ()) == set(self._comm.births)

    async def tell(self, value: Any, what: str) -> list[Any]:
        """See `Place`."""
        said: list[Any] = await self._comm.all_gather_object(value, f"{OWN_NAMES}{what}")
        return said

    async def take(self, value: Any, givers: Sequence[int]) -> Any:
        """See `Place`."""
        for giver in givers:
            try:
                return await self._comm.broadcast_object(value, giver, f"{OWN_NAMES}state/{giver}")
            except PeerLost:
                continue
        raise PeerLost(f"ranks {list(givers)}, which knew what holds, are lost", key=OWN_NAMES, rank=givers[-1])

    def refuse(self, error: BaseException) -> None:
        """See `Place`."""
        self._comm.refuse(f"{OWN_NAMES}{MEETING}", error)

    async def close(self) -> None:
        """See `Place`: the world is the program's."""
