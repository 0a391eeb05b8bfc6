"""Peer-memory replicas of rank-local state.

A commit copies the local state of each rank and sends the copy to the next ranks in rank order, as in a ring. Then all
ranks report which copies they hold whole. The commit is complete, on all ranks, if each surviving rank holds all copies
that it should, and each rank that took part has a surviving copy. Otherwise it is dropped, and the previous commit
stands. The reports are calls that survive losses, so all surviving ranks agree on the last complete commit, whichever
ranks die at whatever moment.

The heir of a lost rank is the next one after it of the ranks that hold its copy.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from kfcomm.arrays import adapt, dtype_of
from kfcomm.elastic.call_log import Uids
from kfcomm.elastic.checks import unreadable
from kfcomm.elastic.communicator import ElasticCommunicator
from kfcomm.elastic.dispatcher import Dispatcher
from kfcomm.elastic.handover import checksum
from kfcomm.elastic.state import Array, State, arrays_of, described, fault_of, load, plan_of, rebuilt, small_of
from kfcomm.errors import ConfigError, KfcommError


class Copy(NamedTuple):
    """Copy of a state.

    Attributes:
        plan: path, shape and dtype of each array; see ``plan_of``.
        tree: the other values, and the places of the arrays among them; see ``described``.
        data: bytes of the arrays, one after the other.
    """

    plan: list[list[Any]]
    tree: Any
    data: Array

    def arrays(self) -> list[Array]:
        """Copy out its arrays."""
        found, begin = [], 0
        for _, shape, dtype in self.plan:
            kind = dtype_of(dtype)
            end = begin + int(np.prod(shape, dtype=np.int64)) * kind.itemsize
            found.append(self.data[begin:end].copy().view(kind).reshape(shape))
            begin = end
        return found


class Commit(NamedTuple):
    """Complete commit.

    Attributes:
        small: values of this rank's state other than arrays.
        copies: copies of this rank's state and of the states that it replicates, by uid.
        holders: uids of the ranks that have the copy of a rank, in the order of the ring, by its uid.
    """

    small: Any
    copies: dict[int, Copy]
    holders: dict[int, Uids]


class Replicas:
    """Commits of one rank while an ``Elastic`` is open.

    Args:
        comm: communicator of all ranks.
        calls: calls of this rank.
        own: local state of this rank.
        num_copies: number of other ranks that hold a copy, or all if they are fewer.
    """

    def __init__(self, comm: ElasticCommunicator, calls: Dispatcher, own: State, num_copies: int) -> None:
        self._comm = comm
        self._calls = calls
        self._own = own
        self._num_copies = num_copies
        self._number = 0
        self._last: Commit | None = None
        self._spare: list[Array] = []

    async def commit(self) -> bool:
        """Commit the local states of all ranks, which all call it; returns whether the commit is complete.

        Raises:
            ConfigError: the state of a rank cannot be sent, or read; on all ranks.

        Cost: a copy of the state, ``num_copies`` messages of it, and two small gathers.
        """
        wrong, mine, small = self._copied()
        said = [self._number, mine.plan, mine.tree, checksum([mine.data]), wrong]
        offers, uids = await self._gathered(said, "commit")
        for rank, (*_, fault) in enumerate(offers):
            if fault is not None:
                raise ConfigError(f"rank {rank}: {fault}")
        self._number = 1 + max(number for number, *_ in offers)
        here = self._comm.current
        copies = {here.births[here.rank]: mine}
        # Else a rank was lost since the reports, and the ring is another one: this commit is dropped below.
        if here.births == uids:
            copies |= await self._exchanged(mine, [offer[1:4] for offer in offers])
        held, present = await self._gathered(sorted(copies), "committed")
        having: dict[int, list[int]] = dict(zip(present, held, strict=True))
        # Computed by each survivor from the same reports, so that all come to the same decision.
        holders = {uid: tuple(one for one in self._ring(uids, uid) if one in having) for uid in uids}
        is_complete = all(living and all(uid in having[one] for one in living) for uid, living in holders.items())
        if is_complete:
            former, self._last = self._last, Commit(small, copies, holders)
            copies = former.copies if former else {}
        # The memory of the commit that was replaced, or of the dropped one, serves the next.
        self._spare = [copy.data for copy in copies.values()]
        return is_complete

    def restore(self) -> None:
        """Restore this rank's state from the last complete commit.

        Raises:
            ConfigError: no commit is complete; or the arrays have other shapes by now.
        """
        if self._last is None:
            raise ConfigError("there is no complete commit to go back to")
        here = self._comm.current
        copy = self._last.copies[here.births[here.rank]]
        if copy.plan != plan_of(self._own):
            raise ConfigError("the arrays of this rank's own state have other shapes than at the last commit")
        load(self._own, copy.arrays(), self._last.small)

    def heirs(self) -> dict[int, int | None]:
        """Uid of the heir of each lost rank of the last complete commit, by its uid; None if all copies are lost.

        The same on all ranks that took part in the commit.
        """
        if self._last is None:
            return {}
        living = self._comm.births
        return {
            uid: next((one for one in holders if one in living), None)
            for uid, holders in self._last.holders.items()
            if uid not in living
        }

    def inherited(self) -> dict[int, dict[str, Any]]:
        """Committed values of each rank to which this rank is heir, by uid and name; NumPy arrays."""
        if self._last is None:
            return {}
        me, copies = self._comm.births[self._comm.rank], self._last.copies
        return {
            uid: rebuilt(copies[uid].tree, copies[uid].arrays()) for uid, heir in self.heirs().items() if heir == me
        }

    def _ring(self, uids: Uids, uid: int) -> Uids:
        """Ranks that should hold the copy of one rank: itself, and the next ones."""
        place = uids.index(uid)
        return (uids[place:] + uids[:place])[: 1 + self._num_copies]

    def _copied(self) -> tuple[str | None, Copy, Any]:
        """Fault of this rank's state, or else a copy of it."""
        wrong = fault_of(self._own)
        try:
            if wrong is None:
                return None, self._copy(), small_of(self._own)
        except Exception as error:  # noqa: BLE001  whatever the caller's arrays raise, the others are told
            wrong = unreadable("own", error)
        return wrong, Copy([], [], np.empty(0, np.uint8)), None

    def _copy(self) -> Copy:
        views = [adapt(array).flat.view(np.uint8) for _, array in arrays_of(self._own)]
        data = self._room(sum(one.size for one in views))
        np.concatenate([data[:0], *views], out=data)
        return Copy(plan_of(self._own), described(self._own), data)

    def _room(self, nbytes: int) -> Array:
        """Buffer for a copy: memory of the commit before the last one, where it fits."""
        for place, one in enumerate(self._spare):
            if one.size == nbytes:
                return self._spare.pop(place)
        return np.empty(nbytes, np.uint8)

    async def _exchanged(self, mine: Copy, offers: Sequence[Sequence[Any]]) -> dict[int, Copy]:
        """Send the copy to the next ranks, and receive from those before; returns the copies that came whole."""
        comm, tag = self._comm.current, f"kfcomm/commit/{self._number}"
        distances = range(1, min(self._num_copies, comm.size - 1) + 1)

        async def take(rank: int) -> Copy | None:
            plan, tree, right = offers[rank]
            copy = Copy(plan, tree, self._room(_nbytes(plan)))
            await comm.recv(rank, tag, out=copy.data)
            return copy if checksum([copy.data]) == right else None

        async def give(rank: int) -> None:
            await comm.send(mine.data, rank, tag, synchronous=True)

        sources = [(comm.rank - distance) % comm.size for distance in distances]
        targets = [(comm.rank + distance) % comm.size for distance in distances]
        outcomes = await asyncio.gather(*map(take, sources), *map(give, targets), return_exceptions=True)
        # A lost peer makes the commit incomplete, which the reports tell all ranks; other errors are faults.
        for outcome in outcomes:
            if isinstance(outcome, BaseException) and not isinstance(outcome, KfcommError):
                raise outcome
        return {
            comm.births[rank]: copy for rank, copy in zip(sources, outcomes, strict=False) if isinstance(copy, Copy)
        }

    async def _gathered(self, value: Any, about: str) -> tuple[list[Any], Uids]:
        """Gather a value of each surviving rank, with their uids."""
        handle = self._calls.begin("all_gather_object", (value, f"kfcomm/{about}"), {})
        rows = await handle
        return rows, handle.contributors or ()


def _nbytes(plan: Sequence[Sequence[Any]]) -> int:
    return sum(int(np.prod(shape, dtype=np.int64)) * dtype_of(dtype).itemsize for _, shape, dtype in plan)
