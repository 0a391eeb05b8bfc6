"""Numbers about gradients, taken where an exchange passes over them, and the rows in which all ranks learn them.

A bucket is squared when this rank's contribution to it is complete, while it is still in the processor's cache. What
follows from the numbers is left to the parts of a watch: the guard of steps, and the monitor.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from kfcomm.arrays.norms import squared_norm

if TYPE_CHECKING:
    from kfcomm.torch.buckets import Bucket
    from kfcomm.train import GradientMonitor

Array = np.ndarray[Any, np.dtype[Any]]


class Part(Protocol):
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


class Watch:
    """Parts that look at the passes of one exchange.

    Attributes:
        num_numbers: width of a row.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        self.num_numbers = sum(part.num_numbers for part in parts)
        self._parts = parts
        self._has_told = True
        self._arrived: set[Bucket] = set()

    def left(self, bucket: Bucket, contribution: Array) -> None:
        """Look at a bucket that is about to leave."""
        looking = [part for part in self._parts if part.is_looking]
        if looking:
            begun_s = time.perf_counter()
            sq_norm = squared_norm([contribution])
            taken_s = time.perf_counter() - begun_s
            for part in looking:
                part.left(bucket, sq_norm, taken_s / len(looking))

    def row(self) -> list[float]:
        """This rank's row, when all buckets have left."""
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


class Measuring:
    """Squared norms for a monitor: of this rank's gradients, and of its share of their mean.

    Measured is a step with one exchanged pass: with more of them a rank's contribution has gradients of the others.
    """

    def __init__(self, monitor: GradientMonitor) -> None:
        self.monitor = monitor
        self.num_numbers = len(monitor.tell(None))
        self._cost_s = 0.0
        self._share = 0.0
        self._has_looked = False
        """Whether the latest pass is measured."""
        self._owed: float | None = None
        """Square of the scale of the share that the monitor waits for."""
        self._begin_step()

    def _begin_step(self) -> None:
        self._num_passes = 0
        self._sq_norm = 0.0
        self._rows: Array | None = None

    @property
    def is_looking(self) -> bool:
        """Whether the pass under way is measured."""
        return self._num_passes == 0 and self.monitor.is_due

    def left(self, bucket: Bucket, sq_norm: float, cost_s: float) -> None:
        """Add a bucket that is averaged exactly: of others the norm of the mean is not known."""
        if bucket.is_exact:
            self._sq_norm += sq_norm
        self._cost_s += cost_s

    def row(self) -> Sequence[float]:
        """Numbers of the monitor."""
        self._has_looked = self.is_looking
        self._num_passes += 1
        self._share, self._owed = 0.0, None
        cost_s, self._cost_s = self._cost_s, 0.0
        return self.monitor.tell(self._sq_norm if self._has_looked else None, cost_s)

    def told(self, ranks: Sequence[int], numbers: Array) -> None:
        """Keep the numbers until the optimizer's step."""
        self._rows = numbers

    def arrived(self, bucket: Bucket) -> None:
        """Square this rank's share of an average."""
        if not self._has_looked or not bucket.is_exact:
            return
        begun_s = time.perf_counter()
        flat, rank, size = bucket.content, self.monitor.comm.rank, self.monitor.comm.size
        self._share += squared_norm([flat[rank * flat.size // size : (rank + 1) * flat.size // size]])
        self._cost_s += time.perf_counter() - begun_s
        self._keep_share()

    def stepped(self, scale: float = 1.0) -> None:
        """Learn from a step that is made; its gradients were of a loss times ``scale``."""
        if self._rows is not None:
            square = scale * scale
            rows = [[row[0] / square if row[0] > 0 else row[0], *row[1:]] for row in self._rows.tolist()]
            self._owed = square if self.monitor.learn(rows) else None
            self._keep_share()
        self._begin_step()

    def _keep_share(self) -> None:
        # Deferred averages arrive after the step, one by one.
        if self._owed is not None:
            self.monitor.keep_share(self._share / self._owed)

    def dropped(self) -> None:
        """Learn nothing from a step that is void."""
        self._begin_step()


def unfit(bucket: Bucket) -> list[str]:
    """Names of the parameters whose gradients hold a number that is NaN, infinite, or too large to be squared."""
    return [place.name for place in bucket.places if not math.isfinite(squared_norm([place.view]))]
