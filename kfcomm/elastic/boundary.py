"""Report of a rank at the boundary between two steps, in numbers that one all_reduce adds up, and what the sums say."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgpack
import numpy as np

from kfcomm.elastic.course import StepReport
from kfcomm.elastic.positions import shown_walk
from kfcomm.elastic.state import Array

NUM_FLAGS = 4


class BoundaryReport(NamedTuple):
    """Report of one rank."""

    place: int  # hash of its position, 32 bits
    where: list[Any]  # number of the boundary; name, position, passes and names of a walk, if any; wishes
    number: int  # of the step that it begins
    fault: str | None  # of its state
    told: list[list[Any]]  # reports on the steps that are over, see `StepReport`
    flags: Sequence[bool]

    def text(self) -> str:
        """Its position in words."""
        _, *walk, wishes = self.where
        what = f"begins step {self.number} with {shown_walk(*walk)}" if walk else "leaves the Elastic"
        return what + "".join(f", after {one}()" for one in wishes)

    def numbers(self) -> Array:
        """Return it as integers, whose sums over all ranks make `Sums`."""
        # Mostly positions and reports are equal, and need not be gathered. The hash travels in halves: squares of 32
        # bits, summed over ranks, would not fit in 64.
        at = [self.place >> 16, self.place & 0xFFFF]
        told = hash_of(self.told) & 0xFFFFFF
        flags = [*self.flags, *[False] * (NUM_FLAGS - len(self.flags))]
        row = [1, *at, *(one * one for one in at), told, told * told, self.fault is not None, *flags]
        return np.array(row, np.int64)


class Sums(NamedTuple):
    """Sums of the reports of all ranks."""

    is_wrong: bool  # the ranks are at different positions, or one has a fault
    are_told_alike: bool
    flags: list[bool]  # set on any rank

    @classmethod
    def of(cls, numbers: Array) -> Sums:
        """Read the sums."""
        count, high, low, high_squared, low_squared, told, told_squared, num_faults, *flags = numbers.tolist()
        # by Cauchy's inequality they are equal only if all are the same, and so on all ranks or on none
        are_alike = count * high_squared == high * high and count * low_squared == low * low
        return cls(num_faults > 0 or not are_alike, count * told_squared == told * told, [one > 0 for one in flags])


def reports_of(rows: Sequence[Sequence[Sequence[Any]]]) -> list[list[StepReport]]:
    """Return what the ranks have told, as `StepReport`."""
    return [[StepReport(*one) for one in each] for each in rows]


def hash_of(value: Any) -> int:
    """32-bit hash of a value."""
    return int.from_bytes(hashlib.blake2b(msgpack.packb(value), digest_size=4).digest(), "little")
