"""Copies of states between the memories of ranks: striped transfer, and replicas of rank-local state.

A transfer cuts the bytes of all arrays, one after the other, into as many stripes as there are givers. Each stripe is
broadcast in a group of its own, its giver and all takers, so that a byte crosses each link once, is written to its
place, and is not sent to a rank that has it.

A commit copies the local state of each rank and sends the copy to the next ranks in rank order, as in a ring. Then all
ranks report which copies they hold whole. The commit is complete, on all ranks, if each surviving rank holds all copies
that it should, and each rank that took part has a surviving copy. Otherwise it is dropped, and the previous commit
stands. The reports are calls that survive losses, so all surviving ranks agree on the last complete commit, whichever
ranks die at whatever moment. The heir of a lost rank is the next one after it of the ranks that hold its copy.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from kfcomm.core.collective import OWN_NAMES
from kfcomm.elastic.call_log import Uids
from kfcomm.elastic.checks import sendable, unreadable
from kfcomm.elastic.communicator import ElasticCommunicator
from kfcomm.elastic.dispatcher import Dispatcher
from kfcomm.elastic.snapshots import NOTHING, Form, Snapshot, load_form
from kfcomm.elastic.state import State, fault_of, plan_of
from kfcomm.elastic.trees import Array
from kfcomm.errors import ConfigError, KfcommError
from kfcomm.world.communicator import Communicator

MIN_STRIPE_NBYTES = 4 << 20
"""Smaller stripes are not worth another group."""
PAGE_NBYTES = 4096
"""Stripes begin at multiples of this; checksums have one sum for each such page."""
PRIME = (1 << 61) - 1


class StripePart(NamedTuple):
    """Bytes ``start`` to ``stop`` of the array of this number."""

    array: int
    start: int
    stop: int


def cut(sizes: Sequence[int], num_givers: int) -> list[list[StripePart]]:
    """Cut arrays of these sizes, in bytes, into stripes of about equal size: one for each giver, or fewer if small."""
    total = sum(sizes)
    num = max(1, min(num_givers, total // MIN_STRIPE_NBYTES))
    bounds = [*(total * k // num // PAGE_NBYTES * PAGE_NBYTES for k in range(num)), total]
    stripes: list[list[StripePart]] = [[] for _ in range(num)]
    begin = 0
    for number, size in enumerate(sizes):
        for stripe, (low, high) in zip(stripes, pairwise(bounds), strict=True):
            start, stop = max(low - begin, 0), min(high - begin, size)
            if start < stop:
                stripe.append(StripePart(number, start, stop))
        begin += size
    return stripes


def checksum(pieces: Sequence[Array]) -> int:
    """Return a checksum of 64 bits that detects a page that is missing, stale or at another place."""
    # Fletcher's, over words of 64 bits, in one pass over memory: a cryptographic digest takes longer than the transfer.
    found = 0
    for piece in pieces:
        whole = piece.size // PAGE_NBYTES * PAGE_NBYTES
        # The sum of a page alone would not show two pages that changed places, hence the odd weights.
        pages = piece[:whole].view(np.uint64).reshape(-1, PAGE_NBYTES // 8).sum(axis=1, dtype=np.uint64)
        weights = np.arange(1, 2 * pages.size, 2, dtype=np.uint64)
        rest = hashlib.blake2b(piece[whole:].data, digest_size=8).digest()
        found = found * PRIME + int((pages * weights).sum(dtype=np.uint64)) + int.from_bytes(rest, "little")
        found %= 1 << 64
    return found


async def spread(
    comm: Communicator, arrays: Sequence[Array], givers: Sequence[int], takers: Sequence[int]
) -> dict[int, int]:
    """Transfer flat arrays of equal number and sizes from givers, which hold the same bytes, to takers.

    Returns the checksum of each stripe that this rank has sent or received, by its number. If it fails, the arrays of
    a taker are undefined. With S bytes, g givers and t takers a giver sends t·S/g bytes at most, and a taker gets S.
    """
    data = [one.view(np.uint8) for one in arrays]
    mine = {
        number: [data[piece.array][piece.start : piece.stop] for piece in stripe]
        for number, stripe in enumerate(cut([one.size for one in data], len(givers)))
        if stripe and comm.rank in (givers[number], *takers)
    }
    sharing = (share_stripe(comm, [givers[number], *takers], pieces) for number, pieces in mine.items())
    for outcome in await asyncio.gather(*sharing, return_exceptions=True):
        if outcome is not None:
            raise outcome
    return {number: checksum(pieces) for number, pieces in mine.items()}


async def share_stripe(comm: Communicator, members: Sequence[int], pieces: Sequence[Array]) -> None:
    """Broadcast one stripe from the first of the members to the others."""
    # the strategy costs nothing to make, and on one host a star is one copy that all takers read
    group = await comm.group(members, "kfcomm/state", strategy="star")
    try:
        # a giver names its own memory as well: nothing is written to it, and nothing is made for a result
        outs = [piece if piece.flags.writeable else None for piece in pieces]
        handles = [
            group.broadcast(piece, 0, f"{OWN_NAMES}state/{n}", out=out)
            for n, (piece, out) in enumerate(zip(pieces, outs, strict=True))
        ]
        await asyncio.gather(*handles)
    finally:
        group._forget_group()


class Copy(NamedTuple):
    """Copy of a state."""

    form: Form
    data: Array  # bytes of the arrays, one after the other

    def arrays(self) -> list[Array]:
        """Copy out its arrays, flat."""
        found, begin = [], 0
        for nbytes, kind in self.form.sizes():
            found.append(self.data[begin : begin + nbytes].copy().view(kind))
            begin += nbytes
        return found


class Commit(NamedTuple):
    """Complete commit."""

    copies: dict[int, Copy]  # of this rank's state and of the states that it replicates, by uid
    holders: dict[int, Uids]  # the ranks that have the copy of a rank, in the order of the ring, by its uid


class Replicas:
    """Commits of one rank while an ``Elastic`` is open; ``num_copies`` other ranks hold a copy, or all if fewer."""

    def __init__(self, comm: ElasticCommunicator, calls: Dispatcher, own: State, num_copies: int) -> None:
        self._comm = comm
        self._calls = calls
        self._own = own
        self._num_copies = num_copies
        self._number = 0
        self._last: Commit | None = None
        self._spare: list[Array] = []

    async def commit(self) -> bool:
        """Commit the local states of all ranks, which all call it; returns whether the commit is complete."""
        wrong, mine = self._copied()
        said = [self._number, list(mine.form), checksum([mine.data]), wrong]
        offers, uids = await self._calls.gather(said, "commit")
        for rank, (*_, fault) in enumerate(offers):
            if fault is not None:
                raise ConfigError(f"rank {rank}: {fault}")
        self._number = 1 + max(number for number, *_ in offers)
        here = self._comm.current
        copies = {here.births[here.rank]: mine}
        # Else a rank was lost since the reports, and the ring is another one: this commit is dropped below.
        if here.births == uids:
            copies |= await self._exchanged(mine, [offer[1:3] for offer in offers])
        held, present = await self._calls.gather(sorted(copies), "committed")
        having: dict[int, list[int]] = dict(zip(present, held, strict=True))
        # Computed by each survivor from the same reports, so that all come to the same decision.
        # A copy belongs with its rank and the next ones, in the order of a ring.
        rings = {uid: (uids[at:] + uids[:at])[: 1 + self._num_copies] for at, uid in enumerate(uids)}
        holders = {uid: tuple(one for one in ring if one in having) for uid, ring in rings.items()}
        is_complete = all(living and all(uid in having[one] for one in living) for uid, living in holders.items())
        if is_complete:
            former, self._last = self._last, Commit(copies, holders)
            copies = former.copies if former else {}
        # The memory of the commit that was replaced, or of the dropped one, serves the next.
        self._spare = [copy.data for copy in copies.values()]
        return is_complete

    def restore(self) -> None:
        """Restore this rank's state from the last complete commit."""
        if self._last is None:
            raise ConfigError("cannot roll back: no commit is complete yet")
        here = self._comm.current
        copy = self._last.copies[here.births[here.rank]]
        if copy.form.plan != plan_of(self._own):
            raise ConfigError("the arrays of this rank's own state have other shapes than at the last commit")
        load_form(self._own, copy.form, copy.arrays())

    def heirs(self) -> dict[int, int | None]:
        """Uid of the heir of each lost rank of the last complete commit, by its uid; None if all copies are lost."""
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
        mine = {uid: copies[uid] for uid, heir in self.heirs().items() if heir == me}
        values = {uid: copy.form.values(copy.arrays()) for uid, copy in mine.items()}
        return {uid: plain | objects for uid, (plain, objects) in values.items()}

    def _copied(self) -> tuple[str | None, Copy]:
        """Fault of this rank's state, or else a copy of it."""
        wrong = fault_of(self._own)
        try:
            if wrong is None:
                form, flat = Snapshot.of(self._own).forms()
                views = [one.view(np.uint8) for one in flat]
                data = self._room(sum(one.size for one in views))
                np.concatenate([data[:0], *views], out=data)
                return None, Copy(form, data)
        except ConfigError as error:
            wrong = sendable(str(error))
        except Exception as error:  # noqa: BLE001  whatever the caller's arrays raise, the others learn of it
            wrong = unreadable("own", error)
        return wrong, Copy(NOTHING, np.empty(0, np.uint8))

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
            form, right = Form(*offers[rank][0]), offers[rank][1]
            copy = Copy(form, self._room(sum(nbytes for nbytes, _ in form.sizes())))
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
