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
from kfcomm.elastic.calls import Births
from kfcomm.elastic.checks import unreadable
from kfcomm.elastic.communicator import ElasticCommunicator
from kfcomm.elastic.dispatcher import Dispatcher
from kfcomm.elastic.state import State, arrays_of, described, fault_of, load, plan_of, rebuilt, small_of
from kfcomm.elastic.stripes import Array, checksum
from kfcomm.errors import ConfigError, KfcommError


class Copy(NamedTuple):
    """Of a state.

    Attributes:
        plan: of its arrays.
        tree: the rest of it, and where in it they are; see ``described``.
        data: bytes of the arrays, one after the other.
    """

    plan: list[list[Any]]
    tree: Any
    data: Array

    def arrays(self) -> list[Array]:
        """Its arrays, each in memory of its own."""
        found, begin = [], 0
        for _, shape, dtype in self.plan:
            kind = dtype_of(dtype)
            end = begin + int(np.prod(shape, dtype=np.int64)) * kind.itemsize
            found.append(self.data[begin:end].copy().view(kind).reshape(shape))
            begin = end
        return found


class Commit(NamedTuple):
    """One that is complete.

    Attributes:
        small: of this rank's own state, what is no array.
        copies: of this rank's own state, and of those that it keeps, by birth.
        holders: of each rank that took part, by birth, births of those that have its copy, in the order of the ring.
    """

    small: Any
    copies: dict[int, Copy]
    holders: dict[int, Births]


class Replicas:
    """The commits of one rank while an ``Elastic`` is open.

    Args:
        comm: of all ranks.
        calls: of its calls.
        own: what is this rank's own.
        num_copies: so many other ranks keep a copy, or all if they are fewer.
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
        """All ranks call it; whether it is complete.

        Raises:
            ConfigError: what a rank has cannot be sent, or read; on all ranks.

        Cost: a copy of the state, ``num_copies`` messages of it, and two small gathers.
        """
        wrong, mine, small = self._copied()
        said = [self._number, mine.plan, mine.tree, checksum([mine.data]), wrong]
        offers, births = await self._gathered(said, "commit")
        for rank, (*_, fault) in enumerate(offers):
            if fault is not None:
                raise ConfigError(f"rank {rank}: {fault}")
        self._number = 1 + max(number for number, *_ in offers)
        here = self._comm.current
        copies = {here.births[here.rank]: mine}
        if here.births == births:
            copies |= await self._exchanged(mine, [offer[1:4] for offer in offers])
        held, present = await self._gathered(sorted(copies), "committed")
        having: dict[int, list[int]] = dict(zip(present, held, strict=True))
        holders = {birth: tuple(one for one in self._ring(births, birth) if one in having) for birth in births}
        is_complete = all(living and all(birth in having[one] for one in living) for birth, living in holders.items())
        if is_complete:
            former, self._last = self._last, Commit(small, copies, holders)
            copies = former.copies if former else {}
        self._spare = [copy.data for copy in copies.values()]
        return is_complete

    def restore(self) -> None:
        """This rank's own state is again as it was at the last complete commit.

        Raises:
            ConfigError: there was none; or the arrays have other shapes by now.
        """
        if self._last is None:
            raise ConfigError("there is no complete commit to go back to")
        here = self._comm.current
        copy = self._last.copies[here.births[here.rank]]
        if copy.plan != plan_of(self._own):
            raise ConfigError("the arrays of this rank's own state have other shapes than at the last commit")
        load(self._own, copy.arrays(), self._last.small)

    def heirs(self) -> dict[int, int | None]:
        """Of the ranks that took part in the last complete commit and are gone, the heir, by births; None without.

        The same on all ranks that took part in it.
        """
        if self._last is None:
            return {}
        living = self._comm.births
        return {
            birth: next((one for one in holders if one in living), None)
            for birth, holders in self._last.holders.items()
            if birth not in living
        }

    def inherited(self) -> dict[int, dict[str, Any]]:
        """What the ranks had to which this rank is heir, by birth: values by name, arrays as NumPy's."""
        if self._last is None:
            return {}
        me, copies = self._comm.births[self._comm.rank], self._last.copies
        return {
            birth: rebuilt(copies[birth].tree, copies[birth].arrays())
            for birth, heir in self.heirs().items()
            if heir == me
        }

    def _ring(self, births: Births, birth: int) -> Births:
        """Who is to hold the copy of one rank: itself, and those after it."""
        place = births.index(birth)
        return (births[place:] + births[:place])[: 1 + self._num_copies]

    def _copied(self) -> tuple[str | None, Copy, Any]:
        """Fault of this rank's local state, or else a copy of its arrays and its other values."""
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
        """Memory of the commit before the last one, where it fits."""
        for place, one in enumerate(self._spare):
            if one.size == nbytes:
                return self._spare.pop(place)
        return np.empty(nbytes, np.uint8)

    async def _exchanged(self, mine: Copy, offers: Sequence[Sequence[Any]]) -> dict[int, Copy]:
        """Send the copy to those after this rank, and take the copies of those before it; those that came whole."""
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
        for outcome in outcomes:
            if isinstance(outcome, BaseException) and not isinstance(outcome, KfcommError):
                raise outcome
        return {
            comm.births[rank]: copy for rank, copy in zip(sources, outcomes, strict=False) if isinstance(copy, Copy)
        }

    async def _gathered(self, value: Any, about: str) -> tuple[list[Any], Births]:
        """What each rank that lives says, and their births."""
        handle = self._calls.begin("all_gather_object", (value, f"kfcomm/{about}"), {})
        rows = await handle
        return rows, handle.contributors or ()


def _nbytes(plan: Sequence[Sequence[Any]]) -> int:
    return sum(int(np.prod(shape, dtype=np.int64)) * dtype_of(dtype).itemsize for _, shape, dtype in plan)
