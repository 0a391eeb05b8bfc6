"""Memory that is asked for before it is written to."""

from __future__ import annotations

import mmap
import resource

import numpy as np
import pytest

from kfcomm.arrays.pages import populate


def new_memory() -> np.ndarray:
    """Memory of 768 pages that were never written to."""
    return np.frombuffer(mmap.mmap(-1, 3 << 20), np.uint8)


def new_pages() -> int:
    """Page faults of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def written(x: np.ndarray) -> int:
    """So many pages are given as a byte of each is written to."""
    before = new_pages()
    x[::4096] = 1
    return new_pages() - before


def test_pages_that_were_asked_for_are_there() -> None:
    x = new_memory()
    if not populate(x):
        pytest.skip("this system has no MADV_POPULATE_WRITE")
    assert written(x) < 10
    assert written(new_memory()) > 700


@pytest.mark.parametrize("nbytes", [0, 1, 4095, 4096, 8191, 100_000])
def test_contents_stay(nbytes: int) -> None:
    whole = np.arange(nbytes + 7, dtype=np.uint8)
    populate(whole[7:])
    assert np.array_equal(whole, np.arange(nbytes + 7, dtype=np.uint8))
