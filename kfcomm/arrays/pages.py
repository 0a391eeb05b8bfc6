"""Early allocation of the pages of new memory, which the system else allocates at the first write to each."""

from __future__ import annotations

import ctypes
import mmap
import sys
from typing import Any

import numpy as np

_MADV_POPULATE_WRITE = 23
"""Linux, 5.14 and later (madvise(2)); Python has no name for it."""


def populate(x: np.ndarray[Any, np.dtype[Any]]) -> bool:
    """Allocate all pages of ``x``, which keeps its contents; return whether the system has done so.

    Later writes do not wait for pages: the first write to new memory takes several times as long as a copy. Other
    threads run meanwhile.

    Args:
        x: contiguous, and writable.

    Cost: for memory that was never written to, about that of writing zeros; else a look at the page tables.
    """
    begin = x.__array_interface__["data"][0]
    first = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE
    nbytes = (begin + x.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - first
    if nbytes <= 0:
        return True
    if sys.platform != "linux":
        return False
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    return bool(madvise(first, nbytes, _MADV_POPULATE_WRITE) == 0)
