"""Striped transfer of arrays from the ranks that have them to those that do not.

The bytes of all arrays, one after the other, are cut into as many stripes as there are givers. Each stripe is broadcast
in a group of its own, its giver and all takers, so that a byte crosses each link once, is written to its place, and is
not sent to a rank that has it. This module knows nothing of states, and does not retry.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from kfcomm.core.collective import OWN_NAMES
from kfcomm.world.communicator import Communicator

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

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
