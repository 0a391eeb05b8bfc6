"""Pinned memory: blocks never overlap, holes are reused, the limit holds, and calls never wait."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kfcomm.arrays.devices.host import ALIGNMENT_NBYTES, FIRST_SLAB_NBYTES, PinnedPool, PooledBlock

KIB = 1 << 10
MIB = 1 << 20


class Pinning:
    """A device with the method that a pool needs: memory that counts as pinned."""

    def __init__(self, has_nbytes: int = 1 << 30) -> None:
        self.left_nbytes = has_nbytes
        self.asked: list[int] = []

    def pinned(self, nbytes: int) -> np.ndarray:
        self.asked.append(nbytes)
        if nbytes > self.left_nbytes:
            raise MemoryError("no more")
        self.left_nbytes -= nbytes
        return np.empty(nbytes, np.uint8)


def pool(limit_nbytes: int = 64 * MIB, device: Any = None) -> PinnedPool:
    return PinnedPool(device or Pinning(), limit_nbytes)


def address(block: PooledBlock) -> int:
    return block.view.__array_interface__["data"][0]


@pytest.mark.parametrize("nbytes", [1, 511, 512, 513, 4 * MIB, 5 * MIB + 1])
def test_block_has_the_requested_size(nbytes: int) -> None:
    block = pool().take(nbytes)
    assert block.is_pinned()
    assert (block.view.dtype, block.view.shape) == (np.uint8, (nbytes,))
    assert block.view.flags.c_contiguous
    block.view[:] = 7


def test_zero_bytes_take_no_memory() -> None:
    device = Pinning()
    block = pool(device=device).take(0)
    assert block.view.shape == (0,)
    assert not device.asked
    block.release()


def test_first_take_pins_the_first_slab() -> None:
    device = Pinning()
    ours = pool(device=device)
    assert not device.asked
    ours.take(1)
    assert device.asked == [FIRST_SLAB_NBYTES]


def test_memory_is_used_again() -> None:
    device = Pinning()
    ours = pool(device=device)
    first = ours.take(100 * KIB)
    where = address(first)
    first.release()
    assert address(ours.take(90 * KIB)) == where
    assert len(device.asked) == 1


def test_blocks_of_one_slab_begin_on_boundaries_of_their_own() -> None:
    ours = pool()
    blocks = [ours.take(1) for _ in range(3)]
    places = sorted(map(address, blocks))
    assert [after - before for before, after in zip(places, places[1:], strict=False)] == [ALIGNMENT_NBYTES] * 2


def test_neighbouring_holes_become_one() -> None:
    device = Pinning()
    ours = pool(device=device)
    parts = [ours.take(MIB) for _ in range(4)]
    for part in (parts[0], parts[2], parts[1], parts[3]):
        part.release()
    assert ours.take(4 * MIB).is_pinned()
    assert len(device.asked) == 1


def test_slabs_grow_so_that_there_are_few() -> None:
    device = Pinning()
    ours = pool(device=device)
    blocks = [ours.take(MIB) for _ in range(64)]
    assert all(block.is_pinned() for block in blocks)
    assert device.asked == [4 * MIB, 4 * MIB, 8 * MIB, 16 * MIB, 32 * MIB]
    assert ours.pinned_nbytes == 64 * MIB


def test_beyond_the_limit_memory_is_ordinary() -> None:
    ours = pool(limit_nbytes=MIB)
    first = ours.take(MIB - 512)
    second = ours.take(KIB)
    assert (first.is_pinned(), second.is_pinned()) == (True, False)
    assert second.view.shape == (KIB,)
    assert ours.pinned_nbytes <= MIB
    first.release()
    assert ours.take(MIB).is_pinned()
    assert not ours.take(2 * MIB).is_pinned()


def test_tiny_limit_gives_ordinary_memory() -> None:
    device = Pinning()
    assert not pool(limit_nbytes=0, device=device).take(1).is_pinned()
    assert not device.asked


def test_pinning_failure_gives_ordinary_memory_without_retries() -> None:
    device = Pinning(has_nbytes=6 * MIB)
    ours = pool(device=device)
    held = [ours.take(4 * MIB), ours.take(4 * MIB), ours.take(4 * MIB)]
    assert [block.is_pinned() for block in held] == [True, False, False]
    assert len(device.asked) == 2
    held[0].release()
    assert ours.take(MIB).is_pinned()


def test_a_released_block_has_no_view() -> None:
    ours = pool()
    block = ours.take(KIB)
    block.release()
    assert block.view.size == 0
    other = ours.take(KIB)
    block.release()  # and gives nothing back a second time
    assert address(ours.take(KIB)) != address(other)


def test_a_closed_pool_lets_go_and_gives_ordinary_memory() -> None:
    ours = pool()
    block = ours.take(KIB)
    ours.close()
    ours.close()
    assert ours.pinned_nbytes == 0
    block.view[:] = 1
    block.release()
    assert not ours.take(KIB).is_pinned()


@given(
    st.integers(0, 40),
    st.lists(
        st.one_of(st.tuples(st.just("take"), st.integers(0, 9 * KIB)), st.tuples(st.just("give"), st.integers(0)))
    ),
)
def test_blocks_never_overlap_and_the_limit_holds(limit_kib: int, acts: list[tuple[str, int]]) -> None:
    ours = pool(limit_nbytes=limit_kib * KIB)
    held: list[tuple[PooledBlock, int]] = []
    for tag, (act, number) in enumerate(acts):
        if act == "take":
            block = ours.take(number)
            assert block.view.nbytes == number
            block.view[:] = tag % 251
            held.append((block, tag % 251))
        elif held:
            held.pop(number % len(held))[0].release()
        assert ours.pinned_nbytes <= limit_kib * KIB
    for block, value in held:  # nobody has written into what is another's
        assert (block.view == value).all()
        block.release()
    whole = ours.take(ours.pinned_nbytes // ALIGNMENT_NBYTES * ALIGNMENT_NBYTES)
    assert whole.is_pinned() == (whole.view.nbytes > 0)  # all holes are one again
