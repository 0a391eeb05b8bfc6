"""Handover of a state from the ranks that have it to those that do not.

Each round begins with a report of each rank on its state, from which all ranks derive who sends and who receives, and
ends with the result of the transfer. If a rank was lost meanwhile, the others begin again. The reports are calls that
survive losses, so that all surviving ranks see the same.

A joining rank receives into the arrays of its state. Where every rank has a state, and that of the lowest rank is
taken, ranks receive into other memory: if the lowest rank is lost during the transfer, the state of the next must be
intact.

In the transfer the bytes of all arrays, one after the other, are cut into as many stripes as there are givers. Each
stripe is broadcast in a group of its own, its giver and all takers, so that a byte crosses each link once, is written
to its place, and is not sent to a rank that has it.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kfcomm.arrays import adapt
from kfcomm.core.collective import OWN_NAMES
from kfcomm.elastic.call_log import Uids
from kfcomm.elastic.checks import unreadable
from kfcomm.elastic.communicator import ElasticCommunicator
from kfcomm.elastic.dispatcher import Dispatcher
from kfcomm.elastic.state import (
    Array,
    State,
    arrays_of,
    difference,
    fault_of,
    load,
    outline_of,
    places_of,
    plan_of,
    small_of,
)
from kfcomm.errors import CollectiveError, ConfigError, KfcommError, PeerLost
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
    """Return a checksum of 64 bits that detects a page that is missing, stale or at another place.

    A Fletcher checksum over words of 64 bits: a sum for each page, and a weighted sum of these. A cryptographic digest
    would take longer than the transfer.

    Cost: one pass over memory.
    """
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
    """Transfer arrays from givers to takers, which all call this, with arrays of equal number and sizes.

    Args:
        comm: communicator of all ranks.
        arrays: flat; those of a taker are written to.
        givers: ranks that hold the same bytes.
        takers: ranks that receive them.

    Returns:
        The checksum of each stripe that this rank has sent or received, by its number.

    Raises:
        CollectiveError: a transfer has failed, such as by a lost rank; arrays of a taker are undefined then, those of a
            giver intact.

    Cost: with S bytes, g givers and t takers a giver sends t·S/g bytes at most and a taker receives S; all at once.
    """
    data = [one.view(np.uint8) for one in arrays]
    mine = {
        number: [data[piece.array][piece.start : piece.stop] for piece in stripe]
        for number, stripe in enumerate(cut([one.size for one in data], len(givers)))
        if stripe and comm.rank in (givers[number], *takers)
    }
    sharing = (_share(comm, [givers[number], *takers], pieces) for number, pieces in mine.items())
    for outcome in await asyncio.gather(*sharing, return_exceptions=True):
        if outcome is not None:
            raise outcome
    return {number: checksum(pieces) for number, pieces in mine.items()}


async def _share(comm: Communicator, members: Sequence[int], pieces: Sequence[Array]) -> None:
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


logger = logging.getLogger("kfcomm")


class StateOffer(NamedTuple):
    """Report of a rank on its state.

    Attributes:
        plan: path, shape and dtype of each array; see ``state.plan_of``.
        outline: see ``state.outline_of``.
        told: position of training, and values of the state other than arrays.
        wrong: fault for which it can neither send nor receive a state; else None.
        program: see ``program_digest``.
        options: options of its ``Elastic``, by name.
    """

    plan: list[list[Any]]
    outline: list[Any]
    told: list[Any]
    wrong: str | None
    program: str
    options: dict[str, Any]


class Handover:
    """Handover of one state, while an ``Elastic`` is open.

    Args:
        comm: communicator of all ranks.
        calls: calls of this rank.
        state: state of this rank.
        program: see ``program_digest``, from when training began.
        options: options of this rank's ``Elastic``, by name; the same on all ranks.
    """

    def __init__(
        self, comm: ElasticCommunicator, calls: Dispatcher, state: State, program: str,
        options: dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self._comm = comm
        self.calls = calls
        self._state = state
        self._program = program
        self._options = options or {}

    async def carry_out(
        self, place: Any, having: Uids | None = None, *, wrong: str | None = None, are_new: bool = False
    ) -> Any:
        """Bring all ranks, which all call it, to the same state.

        Args:
            place: position of training of this rank.
            having: uids of the ranks that have the state; None if each has one, and that of the lowest rank is taken.
            wrong: fault for which this rank cannot send its state.
            are_new: all ranks begin together: a fault of one is an error on all.

        Returns:
            The position of the ranks that have the state.

        Raises:
            ConfigError: the states, or options, differ in more than values; or cannot be sent, or read. On all ranks; a
                fault of a joining rank is an error on that rank alone, also if it runs another program.
            PeerLost: all ranks that have the state are lost.
            CollectiveError: the transfer has failed, though no rank is lost.
        """
        are_new = are_new or having is None
        while True:
            rows, uids = await self.gathered(list(self._offer(place, wrong)), "plans")
            offers = [StateOffer(*row) for row in rows]
            # Computed on each rank from the same reports: no rank has to tell another its role.
            owners = [rank for rank, uid in enumerate(uids) if having is None or uid in having]
            if not owners:
                raise PeerLost("all ranks that had the state are lost before this rank had it from them")
            me = uids.index(self._birth())
            if me not in owners and not are_new:
                self._check_program(offers, owners)
            _check(offers, range(len(offers)) if are_new else [*owners, *({me} - set(owners))], me)
            givers, first = (owners[:1] if having is None else owners), offers[owners[0]]
            takers = [rank for rank in _fitting(offers, owners, are_new=are_new) if rank not in givers]
            arrays = self._taken_into(having) if me in takers else self._views()
            # A rank was lost on the way: reports and roles may differ now, so the round begins again.
            if takers and not await self._spread(uids, givers, takers, arrays):
                continue
            if me in takers:
                load(self._state, arrays, first.told[1])
            return first.told[0]

    def _offer(self, place: Any, wrong: str | None) -> StateOffer:
        wrong = wrong or fault_of(self._state)
        try:
            if wrong is None:
                said = plan_of(self._state), outline_of(self._state), [place, small_of(self._state)]
                return StateOffer(*said, None, self._program, self._options)
        except Exception as error:  # noqa: BLE001  whatever the caller's arrays raise, the others are told
            wrong = unreadable("the state", error)
        return StateOffer([], [], [None, None], wrong, self._program, self._options)

    def _birth(self) -> int:
        current = self._comm.current
        return current.births[current.rank]

    def _views(self) -> list[Array]:
        return [adapt(array).flat for _, array in arrays_of(self._state)]

    def _taken_into(self, having: Uids | None) -> list[Array]:
        """Memory into which this rank receives."""
        # This rank may have to send its own state, if the lowest rank is lost.
        return [np.empty_like(one) for one in self._views()] if having is None else places_of(self._state)

    def _check_program(self, offers: Sequence[StateOffer], owners: Sequence[int]) -> None:
        if self._program not in {offers[rank].program for rank in owners}:
            raise ConfigError(
                "this process runs another program than the ranks that it was to join: the file is another one, or was"
                " changed after they had begun"
            )

    async def _spread(self, uids: Uids, givers: Sequence[int], takers: Sequence[int], arrays: Sequence[Array]) -> bool:
        """Transfer the arrays once; False if all ranks have to begin again."""
        sums: dict[int, int] = {}
        why = None
        try:
            if self._comm.current.births != uids:
                raise PeerLost("another rank was lost")
            sums = await spread(self._comm.current, arrays, givers, takers)
        except KfcommError as error:
            why = str(error)
        rows, present = await self.gathered([why, list(sums.items())], "state")
        seen = {(number, value) for _, found in rows for number, value in found}
        failures = [text for text, _ in rows if text is not None]
        if not failures and len(seen) > len({number for number, _ in seen}):
            failures = ["what came is not what was sent"]
        if failures and len(present) == len(uids):
            raise CollectiveError(f"the state did not come from rank to rank: {failures[0]}")
        if failures:
            logger.info("the state is given again: %s", failures[0])
        return not failures

    async def gathered(self, value: Any, about: str) -> tuple[list[Any], Uids]:
        """Gather a value of each living rank, with their uids; all of them call it."""
        handle = self.calls.begin("all_gather_object", (value, f"kfcomm/{about}"), {})
        rows = await handle
        return rows, handle.contributors or ()


def _check(offers: Sequence[StateOffer], ranks: Iterable[int], me: int) -> None:
    """Check that reports fit together; all ranks know all reports, and so come to the same result."""
    judged = [(rank, offers[rank]) for rank in ranks]
    for rank, offer in judged:
        if offer.wrong is not None:
            raise ConfigError(f"rank {rank}: {offer.wrong}")
    check_options({rank: offer.options for rank, offer in judged})
    forms = [(offer.plan, offer.outline) for _, offer in judged]
    if any(one != forms[0] for one in forms):
        unlike = (_unlike(offers[me], offer, f"rank {rank}") for rank, offer in judged)
        text = next((one for one in unlike if one is not None), "two other ranks differ")
        raise ConfigError(f"the states of the ranks differ: {text}")


def _unlike(mine: StateOffer, other: StateOffer, there: str) -> str | None:
    if mine.outline == other.outline:
        return difference(mine.plan, other.plan, there)
    if mine.outline[0] != other.outline[0]:
        return f"this rank's has {', '.join(mine.outline[0])}, that of {there} {', '.join(other.outline[0])}"
    lists = "lists and dictionaries are others"
    return difference(mine.plan, other.plan, there) or f"{lists} on this rank than on {there}"


def check_options(said: Mapping[int, Mapping[str, Any]]) -> None:
    """Check that the options of these ranks' ``Elastic`` are the same.

    Raises:
        ConfigError: they are not; with one option, and two ranks.
    """
    first, options = next(iter(said.items()))
    for rank, others in said.items():
        for name in options:
            if options[name] != others.get(name):
                raise ConfigError(
                    f"{name} of an Elastic is the same on all ranks: it is {options[name]!r} on rank {first} and"
                    f" {others.get(name)!r} on rank {rank}"
                )


def _fitting(offers: Sequence[StateOffer], owners: Sequence[int], *, are_new: bool) -> list[int]:
    """Ranks that have the state of the owners, or can receive it."""
    first, programs = offers[owners[0]], {offers[rank].program for rank in owners}
    return [
        rank
        for rank, one in enumerate(offers)
        if one.wrong is None
        and (one.plan, one.outline, one.options) == (first.plan, first.outline, first.options)
        and (are_new or one.program in programs)
    ]


def program_digest() -> str:
    """Return a digest of the file with which this process was started, read now; empty without a file.

    The modules that it imports may still differ.
    """
    path = getattr(sys.modules.get("__main__"), "__file__", None)
    try:
        return "" if path is None else hashlib.blake2b(Path(path).read_bytes(), digest_size=8).hexdigest()
    except OSError:
        return ""
