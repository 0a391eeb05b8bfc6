"""Arrays that are read and written as if they lay one after the other."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kfcomm.arrays.chained import ChainedArrays, in_a_row


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.data())
def test_slices_are_those_of_one_flat_array(sizes: list[int], data: st.DataObject) -> None:
    flat = np.arange(sum(sizes), dtype=np.int32)
    arrays = np.split(flat.copy(), np.cumsum(sizes)[:-1])
    chained = ChainedArrays(arrays)
    assert (chained.size, len(chained), chained.nbytes, chained.dtype) == (
        flat.size,
        len(flat),
        flat.nbytes,
        flat.dtype,
    )
    written: set[int] = set()  # each element is written by one means only: until `settle` a copy hides what lies below
    for number in range(data.draw(st.integers(1, 8))):
        begin = data.draw(st.integers(0, flat.size))
        end = data.draw(st.integers(begin, flat.size))
        if written.intersection(range(begin, end)):
            continue
        if data.draw(st.booleans()):
            chained[begin:end] = flat[begin:end] = -number - np.arange(end - begin, dtype=np.int32)
        else:
            part = chained[begin:end]
            assert part.tolist() == flat[begin:end].tolist()
            assert chained[begin:end] is part or not part.flags.owndata
            part[:] = flat[begin:end] = 100 * number + np.arange(end - begin, dtype=np.int32)
            assert chained[begin:end].tolist() == part.tolist()
        written.update(range(begin, end))
    chained.settle()
    assert np.concatenate(arrays).tolist() == flat.tolist()


def test_all_elements_can_be_written_at_once() -> None:
    arrays = [np.zeros(3), np.zeros(0), np.zeros(2)]
    ChainedArrays(arrays)[:] = np.arange(5.0)
    assert [array.tolist() for array in arrays] == [[0, 1, 2], [], [3, 4]]


def test_one_array_is_itself() -> None:
    (array,) = arrays = [np.zeros(3)]
    assert in_a_row(arrays) is array
