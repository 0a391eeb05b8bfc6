"""Division of messages for slots, and the memory of these."""

from __future__ import annotations

import mmap
import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kfcomm.core.signature import SHOWN_WHOLE_NBYTES
from kfcomm.transports.shm.heap import Heaps
from kfcomm.transports.shm.slots import MAX_WINDOW_NBYTES, Cut, SlotMemory, SlotSpec


def summed(parts, out):
    np.add.reduce(parts, out=out)


@given(st.integers(1, 1 << 26), st.sampled_from([1, 2, 4, 8, 16]), st.integers(2, 130), st.booleans())
def test_all_parts_go_in_pieces(count: int, itemsize: int, num_ranks: int, is_turned: bool) -> None:
    cut = Cut(count, itemsize, num_ranks, is_turned=is_turned)
    if cut.is_whole:
        assert count * itemsize <= SHOWN_WHOLE_NBYTES
        assert (cut.num_windows, cut.piece) == (1, count)
        return
    assert sum(length for _, length in cut.parts) == count
    longest = max(length for _, length in cut.parts)
    assert (cut.num_windows - 1) * cut.piece < longest <= cut.num_windows * cut.piece
    assert cut.num_windows == 1 or is_turned
    assert num_ranks * cut.piece * itemsize <= MAX_WINDOW_NBYTES or not is_turned
    assert cut.nbytes >= 2 * (num_ranks + 1) * cut.piece * itemsize


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 16, 32, 64, 128])
@pytest.mark.parametrize("nbytes", [8, SHOWN_WHOLE_NBYTES, SHOWN_WHOLE_NBYTES + 8, 1 << 20, 1 << 30])
def test_there_is_room_for_messages_of_any_length(num_ranks: int, nbytes: int) -> None:
    memory = SlotMemory.make(range(num_ranks), Heaps(0))
    cut = Cut(nbytes // 8, 8, num_ranks, is_turned=nbytes > 1 << 20)
    places = [memory.hand_out(cut) for _ in range(3)]
    assert None not in places
    starts = [place[1] for place in places if place is not None]
    assert all(0 <= b - a - cut.nbytes < mmap.PAGESIZE for a, b in zip(starts, starts[1:], strict=False))
    memory.close()


@pytest.mark.parametrize("nbytes", [SHOWN_WHOLE_NBYTES + 8, 1 << 20, 1 << 22])
def test_long_slots_begin_far_from_where_allocators_begin_arrays_in_a_page(nbytes: int) -> None:
    memory = SlotMemory.make(range(4), Heaps(0))
    cut = Cut(nbytes // 8, 8, 4, is_turned=nbytes > 1 << 20)
    for before in (0, 1, 9, 100):
        memory.hand_out(Cut(before, 8, 4))
        _, at = memory.hand_out(cut) or (0, 0)
        assert 1024 <= at % mmap.PAGESIZE <= 3072
    memory.close()


def test_no_slot_is_handed_out_twice_or_beyond_the_end() -> None:
    memory = SlotMemory.make(range(2), Heaps(0))
    cut = Cut(1 << 27, 8, 2, is_turned=True)
    while memory.hand_out(cut) is not None:
        pass
    assert memory.num_slots * cut.nbytes <= 1 << 28
    assert memory.num_slots > 100
    memory.close()


def test_each_of_ten_thousand_names_gets_a_slot() -> None:
    memory = SlotMemory.make(range(4), Heaps(0))
    cut = Cut(8, 4, 4)
    assert None not in [memory.hand_out(cut) for _ in range(10_000)]
    memory.close()


def test_a_slot_is_handed_out_again_when_all_have_cleared_their_words() -> None:
    memory = SlotMemory.make(range(2), Heaps(0))
    other = SlotMemory(os.dup(memory.descriptor), range(2), Heaps(1))
    cut = Cut(10, 8, 2)
    number, at = memory.hand_out(cut) or (-1, -1)
    mine, theirs = (
        one.slot(SlotSpec(number, at, (0, 1), rank, 0, np.dtype(np.int64), cut, summed))
        for rank, one in enumerate((memory, other))
    )
    assert mine is not None
    assert theirs is not None
    for slot in (mine, theirs):
        slot.post(np.arange(10), 7)
    memory.take_in(mine)
    assert memory.hand_out(cut) == (number + 1, at + cut.nbytes)
    other.clear(number)
    assert memory.hand_out(Cut(100, 8, 2)) == (number + 2, at + 2 * cut.nbytes)  # it would not fit
    assert memory.hand_out(cut) == (number, at)
    assert not any(mine.posted())
    assert memory.hand_out(cut) == (number + 3, memory._next_at - cut.nbytes)
    for one in (memory, other):
        one.close()
