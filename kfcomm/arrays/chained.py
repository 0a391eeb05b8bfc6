"""Several flat arrays in the place of one: `ChainedArrays`."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import cast

import numpy as np

from kfcomm.arrays.dtypes import Array


def in_a_row(arrays: Sequence[Array]) -> Array:
    """Return flat arrays as one, without a copy; several are a `ChainedArrays`, see there where it may be used."""
    return arrays[0] if len(arrays) == 1 else cast("Array", ChainedArrays(arrays))


def settle(whole: Array | ChainedArrays) -> None:
    """Complete what `in_a_row` has returned, after all of it has been written."""
    if isinstance(whole, ChainedArrays):
        whole.settle()


class ChainedArrays:
    """Flat arrays of one dtype, read and written as if they lay one after the other in one array, which is never made.

    It stands in for the input and the result of a long message, which are read and written slice by slice: in the
    windows of a slot, or as chunks for links. Slices ``chained[begin:end]`` are views. Where elements of several arrays
    are asked for, they are a copy that this object keeps: the same request gets the same memory, which may be written
    to, and `settle` copies it back.
    """

    __slots__ = ("_arrays", "_begins", "_copies", "dtype", "nbytes", "size")

    def __init__(self, arrays: Sequence[Array]) -> None:
        self._arrays = arrays
        *self._begins, self.size = accumulate((array.size for array in arrays), initial=0)
        self.dtype = arrays[0].dtype
        self.nbytes = self.size * self.dtype.itemsize
        self._copies: dict[tuple[int, int], Array] = {}

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, where: slice) -> Array:
        begin, end = where.start, where.stop
        at = bisect_right(self._begins, begin) - 1
        array, first = self._arrays[at], self._begins[at]
        if end - first <= array.size:
            return array[begin - first : end - first]
        copy = self._copies.get((begin, end))
        if copy is None:
            copy = self._copies[begin, end] = np.concatenate([part for part, _ in self._parts(begin, end)])
        return copy

    def __setitem__(self, where: slice, values: Array) -> None:
        begin = where.start or 0
        at = bisect_right(self._begins, begin) - 1
        array, first = self._arrays[at], self._begins[at]
        end = begin + values.size
        if end - first <= array.size:
            array[begin - first : end - first] = values
            return
        for part, offset in self._parts(begin, end):
            part[:] = values[offset : offset + part.size]

    def settle(self) -> None:
        """Write what was written to copies into the arrays."""
        for (begin, end), copy in self._copies.items():
            self[begin:end] = copy
        self._copies.clear()

    def _parts(self, begin: int, end: int) -> Iterator[tuple[Array, int]]:
        """Yield the part of each array that lies between these elements, and how many come before it."""
        at = bisect_right(self._begins, begin) - 1
        start = begin
        while start < end:
            array, first = self._arrays[at], self._begins[at]
            part = array[start - first : end - first]
            yield part, start - begin
            start += part.size
            at += 1
