"""The arrays of a work in one worker: a known pattern before each turn, the exact sums after it.

The sum over n ranks replaces the input, so a second call on the same array gives n times the first sum. With n a power
of two, and few calls on each array, every value is exact in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain, repeat

import numpy as np
from numpy.typing import NDArray

from bench.compare.works import FLOAT32_NBYTES, Work

Array = NDArray[np.float32]

MOST_CALLS_PER_SET = 50
MOST_BITS = 100
"""What calls on one set may add to the largest sum, which is below 2^15, so that it stays below float32's largest."""
PERIOD = 1021
"""Elements after which the pattern repeats: a prime, so that chunks of any size that change places are noticed."""
BLOCK = 256 * PERIOD
PATTERN = np.tile(np.arange(PERIOD, dtype=np.float32), 257)
"""A block from any phase of the pattern on is a slice of this."""
ALIGNMENT = 16
"""Elements: tensors begin at multiples of 64 bytes, as allocators place them."""
BUCKET_NUM_ELEMENTS = (25 << 20) // FLOAT32_NBYTES


def zeros(count: int) -> Array:
    """So many, in ordinary memory."""
    return np.zeros(count, np.float32)


Room = Callable[[int], Array]


@dataclass(frozen=True, slots=True)
class Bucket:
    """Tensors that are neighbours in memory: ``flat`` covers them, and the gaps between them."""

    flat: Array
    tensors: tuple[Array, ...]


class Tensors:
    """One set of arrays, all of them views of one flat array, which ``room`` makes of so many zeros."""

    def __init__(self, sizes: tuple[int, ...], room: Room) -> None:
        self._sizes, self._room = sizes, room
        self._copies: Tensors | None = None
        starts = [0]
        for size in sizes:
            starts.append(starts[-1] + -(-size // ALIGNMENT) * ALIGNMENT)
        spare = room(starts[-1] + ALIGNMENT)
        first = -(spare.ctypes.data // FLOAT32_NBYTES) % ALIGNMENT
        self.flat: Array = spare[first : first + starts[-1]]
        self.arrays: list[Array] = [self.flat[start : start + size] for start, size in zip(starts, sizes, strict=False)]

    def fill(self, rank: int) -> None:
        """The pattern, which differs between ranks by a constant."""
        for start in range(0, self.flat.size, BLOCK):
            part = self.flat[start : start + BLOCK]
            np.add(PATTERN[: part.size], np.float32(rank), out=part)

    def holds(self, scale: float, offset: float, arrays: list[Array] | None = None) -> bool:
        """Whether ``arrays`` (these, by default) are the pattern times ``scale`` plus ``offset``."""
        return all(
            _follows(array, self._place(own), scale, offset)
            for own, array in zip(self.arrays, arrays or self.arrays, strict=True)
        )

    def buckets(self) -> list[Bucket]:
        """The arrays in order, as many in each bucket as fit; a larger array has a bucket of its own."""
        groups: list[list[Array]] = []
        room = 0
        for array in self.arrays:
            if array.size > room:
                groups.append([])
                room = BUCKET_NUM_ELEMENTS
            groups[-1].append(array)
            room -= array.size
        return [Bucket(self._span(group), tuple(group)) for group in groups]

    def copies(self) -> list[Bucket]:
        """Buckets with memory of their own, as large as the arrays; made once, since programs make them once."""
        if self._copies is None:
            self._copies = Tensors(self._sizes, self._room)
            self._copies.fill(0)
        return self._copies.buckets()

    def _span(self, group: list[Array]) -> Array:
        return self.flat[self._place(group[0]) : self._place(group[-1]) + group[-1].size]

    def _place(self, array: Array) -> int:
        return (array.ctypes.data - self.flat.ctypes.data) // FLOAT32_NBYTES


def _follows(array: Array, place: int, scale: float, offset: float) -> bool:
    for start in range(0, array.size, BLOCK):
        part = array[start : start + BLOCK]
        phase = (place + start) % PERIOD
        if not np.array_equal(part, PATTERN[phase : phase + part.size] * np.float32(scale) + np.float32(offset)):
            return False
    return True


class Data:
    """Enough sets of arrays for a turn of one rank."""

    def __init__(self, work: Work, rank: int, size: int, room: Room = zeros) -> None:
        if size & (size - 1):
            raise ValueError(f"results are exact for powers of two only, not for {size} ranks")
        self.work = work
        self._calls_per_set = min(MOST_CALLS_PER_SET, MOST_BITS // max(1, size.bit_length() - 1))
        self._room = room
        self._rank = rank
        self._size = size
        self._sets: list[Tensors] = []
        """Made when a turn first needs them."""

    def prepare(self, calls: int) -> list[Tensors]:
        """Fills what ``calls`` calls need, and returns the set of each call."""
        while len(self._sets) * self._calls_per_set < calls:
            self._sets.append(Tensors(self.work.sizes, self._room))
        used = self._sets[: -(-calls // self._calls_per_set)]
        for tensors in used:
            tensors.fill(self._rank)
        return list(chain.from_iterable(repeat(tensors, self._calls_per_set) for tensors in used))[:calls]

    def summed(self, calls: int) -> bool:
        """Whether each array holds the sum after its number of calls."""
        for tensors in self._sets[: -(-calls // self._calls_per_set)]:
            seen = min(calls, self._calls_per_set)
            calls -= seen
            again = float(self._size ** (seen - 1))
            scale, offset = self.sum_of_pattern()
            if not tensors.holds(again * scale, again * offset):
                return False
        return True

    def sum_of_pattern(self) -> tuple[float, float]:
        """The sum of all ranks' patterns, as scale and offset of the pattern."""
        return float(self._size), self._size * (self._size - 1) / 2
