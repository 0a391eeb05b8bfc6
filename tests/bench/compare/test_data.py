"""Shapes of models, the pattern of a turn and its sums."""

import numpy as np
import pytest

from bench.compare.data import BLOCK, BUCKET_NUM_ELEMENTS, MOST_CALLS_PER_SET, PERIOD, Data, Tensors, zeros
from bench.compare.works import WORKS, Work


def test_resnet50_is_as_published_from_the_last_layer_on() -> None:
    sizes = WORKS["resnet50"].sizes
    assert (len(sizes), sum(sizes)) == (214, 25_583_592)
    assert sizes[:2] == (1000, 2048 * 1000)
    assert sizes[-1] == 7 * 7 * 3 * 64


SIZES = (5, 1, BLOCK + 7, PERIOD, 16)


def test_arrays_are_apart_aligned_and_filled() -> None:
    tensors = Tensors(SIZES, zeros)
    assert [array.size for array in tensors.arrays] == list(SIZES)
    assert all(array.ctypes.data % 64 == 0 for array in tensors.arrays)
    tensors.fill(3)
    assert tensors.holds(1.0, 3.0)
    assert tensors.arrays[0].tolist() == [3, 4, 5, 6, 7]


@pytest.mark.parametrize("number", range(len(SIZES)))
def test_wrong_element_anywhere_is_found(number: int) -> None:
    tensors = Tensors(SIZES, zeros)
    tensors.fill(0)
    tensors.arrays[number][-1] += 1
    assert not tensors.holds(1.0, 0.0)


def test_chunks_that_change_places_are_found() -> None:
    tensors = Tensors((1 << 16,), zeros)
    tensors.fill(0)
    (array,) = tensors.arrays
    array[: 1 << 10], array[1 << 10 : 2 << 10] = array[1 << 10 : 2 << 10].copy(), array[: 1 << 10].copy()
    assert not tensors.holds(1.0, 0.0)


def test_buckets_hold_neighbours_up_to_their_size() -> None:
    small, large = 1000, BUCKET_NUM_ELEMENTS + 1
    tensors = Tensors((small, large, small, small), zeros)
    buckets = tensors.buckets()
    assert [[array.size for array in bucket.tensors] for bucket in buckets] == [[small], [large], [small, small]]
    for bucket in buckets:
        assert all(np.shares_memory(bucket.flat, array) for array in bucket.tensors)
        bucket.flat[:] = 1
    assert all((array == 1).all() for array in tensors.arrays)


def test_copies_of_buckets_are_apart_and_made_once() -> None:
    tensors = Tensors((5, 6), zeros)
    (copy,) = tensors.copies()
    assert [part.size for part in copy.tensors] == [5, 6]
    assert not np.shares_memory(copy.flat, tensors.flat)
    assert np.shares_memory(tensors.copies()[0].flat, copy.flat)


@pytest.mark.parametrize("size", [2, 4, 16])
@pytest.mark.parametrize("calls", [1, 2, MOST_CALLS_PER_SET, MOST_CALLS_PER_SET + 1])
def test_sums_are_known_after_any_number_of_calls(size: int, calls: int) -> None:
    ranks = [Data(Work("some", (40, 3)), rank, size) for rank in range(size)]
    for _ in range(2):
        for sets in zip(*(rank.prepare(calls) for rank in ranks), strict=True):
            for arrays in zip(*(one.arrays for one in sets), strict=True):
                total = np.sum(arrays, axis=0, dtype=np.float32)
                for array in arrays:
                    array[:] = total
        assert all(rank.summed(calls) for rank in ranks)
    ranks[1].prepare(calls)
    assert not ranks[1].summed(calls)


def test_sums_that_are_not_exact_are_refused() -> None:
    with pytest.raises(ValueError, match="powers of two"):
        Data(WORKS["1KiB"], 0, 3)
