"""Arrays in stripes from several ranks to several: which bytes go where, what their sums tell, and that they come."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kfcomm.elastic.replicas import MIN_STRIPE_NBYTES, PAGE_NBYTES, StripePart, checksum, cut, spread
from kfcomm.errors import PeerLost
from kfcomm.testing import run_ranks, world

MIB = 1 << 20


@given(st.lists(st.integers(0, 6 * MIN_STRIPE_NBYTES), max_size=6), st.integers(1, 9))
def test_each_byte_is_in_one_stripe(sizes: list[int], num_givers: int) -> None:
    stripes = cut(sizes, num_givers)
    pieces = sorted(piece for stripe in stripes for piece in stripe)
    for number, size in enumerate(sizes):
        mine = [piece for piece in pieces if piece.array == number]
        assert [piece.start for piece in mine] == [0, *(piece.stop for piece in mine[:-1])][: len(mine)]
        assert (mine[-1].stop if mine else 0) == size
    lengths = [sum(piece.stop - piece.start for piece in stripe) for stripe in stripes]
    assert len(stripes) == max(1, min(num_givers, sum(sizes) // MIN_STRIPE_NBYTES))
    assert max(lengths) - min(lengths) <= 2 * PAGE_NBYTES


def test_small_arrays_have_one_giver() -> None:
    assert cut([3, 0, MIN_STRIPE_NBYTES], 5) == [[StripePart(0, 0, 3), StripePart(2, 0, MIN_STRIPE_NBYTES)]]
    assert cut([], 5) == [[]]


def test_a_sum_tells_pages_that_are_missing_or_elsewhere() -> None:
    data = np.random.default_rng(0).integers(0, 256, 8 * PAGE_NBYTES + 5, np.uint8)
    right = checksum([data])
    assert right == checksum([data.copy()])
    missing, last, moved = data.copy(), data.copy(), data.copy()
    missing[:PAGE_NBYTES] = 0
    last[-1] ^= 1
    moved[: 4 * PAGE_NBYTES] = np.roll(data[: 4 * PAGE_NBYTES], PAGE_NBYTES)
    assert len({right, *(checksum([one]) for one in (missing, last, moved))}) == 4
    assert checksum([data[:9], data[9:]]) != checksum([data[9:], data[:9]])


@pytest.mark.parametrize("transport", ["memory", "shm", "tcp"])
@pytest.mark.asyncio
async def test_takers_get_all_of_it_and_givers_keep_theirs(transport: Any) -> None:
    async with world(5, transport=transport) as comms:
        like = [np.arange(9 * MIB // 8, dtype=np.float64), np.ones(3, np.bool_), np.arange(MIB, dtype=np.int32)]

        async def main(comm: Any) -> Any:
            arrays = [one.copy() if comm.rank < 3 else np.zeros_like(one) for one in like]
            if comm.rank == 1:
                arrays[0].flags.writeable = False
            if comm.rank == 0:  # not among them
                return None
            sums = await spread(comm, arrays, [2, 1], [4, 3])
            assert all((one == other).all() for one, other in zip(arrays, like, strict=True))
            return sums

        found = await run_ranks(comms, main)
        assert found[3] == found[4] == {**found[1], **found[2]}
        assert [sorted(one) for one in found[1:]] == [[1], [0], [0, 1], [0, 1]]


@pytest.mark.asyncio
async def test_a_giver_that_is_lost_is_told_to_takers() -> None:
    async with world(3) as comms:

        async def main(comm: Any) -> None:
            if comm.rank == 1:
                comms.kill(1)
            elif comm.rank == 2:
                with pytest.raises(PeerLost):
                    await spread(comm, [np.zeros(9 * MIB)], [0, 1], [2])
            else:
                await asyncio.gather(spread(comm, [np.zeros(9 * MIB)], [0, 1], [2]), return_exceptions=True)

        await run_ranks(comms, main)
