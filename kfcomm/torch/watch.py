"""Numbers about gradients, taken where an exchange passes over them, and the rows in which all ranks learn them.

A bucket is squared when this rank's contribution to it is complete, while it is still in the processor's cache. What
follows from the numbers is left to the parts of a watch.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from kfcomm.arrays import adapt
from kfcomm.arrays.norms import BLOCK, squared_norm

if TYPE_CHECKING:
    from kfcomm.torch.buckets import Bucket

Array = np.ndarray[Any, np.dtype[Any]]


class WatchPart(Protocol):
    """User of the numbers, with columns of its own in the rows.

    Attributes:
        num_numbers: number of its columns.
    """

    num_numbers: int

    @property
    def is_looking(self) -> bool:
        """Whether it wants the squared norms of the pass under way."""

    def left(self, bucket: Bucket, sq_norm: float, cost_s: float) -> None:
        """Take the squared norm of this rank's contribution to a bucket, and the seconds that it has cost."""

    def arrived(self, bucket: Bucket) -> None:
        """Look at the average of a bucket, which has arrived."""

    def row(self) -> Sequence[float]:
        """This rank's numbers, when all buckets of the pass have left."""

    def told(self, ranks: Sequence[int], numbers: Array) -> None:
        """Take the numbers of all ranks, by rank; only those of ``ranks`` have come, the others are zeros."""


class GradientWatch:
    """Parts that look at the passes of one exchange.

    Args:
        parts: in the order of their columns.
        guards: steps may be undone.

    Attributes:
        num_numbers: width of a row.
        guards: as given.
    """

    def __init__(self, parts: Sequence[WatchPart], *, guards: bool = False) -> None:
        self.guards = guards
        self.num_numbers = sum(part.num_numbers for part in parts)
        self._parts = parts
        self._has_told = True
        self._arrived: set[Bucket] = set()

    def left(self, bucket: Bucket, contribution: Array) -> None:
        """Look at a bucket that is about to leave."""
        looking = [part for part in self._parts if part.is_looking]
        if looking:
            begun_s = time.perf_counter()
            sq_norm = exact_squared_norm(contribution)
            taken_s = time.perf_counter() - begun_s
            for part in looking:
                part.left(bucket, sq_norm, taken_s / len(looking))

    def row(self) -> list[float]:
        """This rank's row, when all buckets have left."""
        if not self._parts:
            return []
        self._has_told = False
        self._arrived.clear()
        return [number for part in self._parts for number in part.row()]

    def told(self, size: int, ranks: Sequence[int], rows: Array) -> None:
        """Take the rows of these ranks, of so many, once a pass."""
        if self._has_told:
            return
        self._has_told = True
        whole = np.zeros((size, self.num_numbers))
        whole[ranks] = rows
        begin = 0
        for part in self._parts:
            part.told(ranks, whole[:, begin : begin + part.num_numbers])
            begin += part.num_numbers

    def arrived(self, bucket: Bucket) -> None:
        """Look at an average, once a pass."""
        if self._parts and bucket not in self._arrived:
            self._arrived.add(bucket)
            for part in self._parts:
                part.arrived(bucket)


def unfit(bucket: Bucket) -> list[str]:
    """Names of the parameters of a bucket whose gradients have a number that is NaN or infinite."""
    return [place.name for place in bucket.places if not math.isfinite(exact_squared_norm(adapt(place.view).flat))]


def exact_squared_norm(flat: Array) -> float:
    """Σ x², infinite only where an element is: finite float32 numbers above 1.8e19 have squares that are not."""
    found = squared_norm([flat])
    if found != math.inf or flat.dtype == np.float64:
        return found
    return sum(squared_norm([flat[at : at + BLOCK].astype(np.float64)]) for at in range(0, flat.size, BLOCK))
