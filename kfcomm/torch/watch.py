"""Numbers about gradients, taken where an exchange passes over them, and the rows in which all ranks learn them.

A bucket is squared when this rank's contribution to it is complete, while it is still in the processor's cache. What
follows from the numbers is left to the parts of a watch. Squared norms on a device stay there as tensors; where steps
are guarded the host reads them at the end of the pass, since the step waits for the judgement.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from kfcomm.arrays import adapt
from kfcomm.arrays.norms import BLOCK, squared_norm
from kfcomm.torch.memory import is_on_device, squared_norm_on_device

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

    def catch_up(self) -> None:
        """Learn from the pass before, if its numbers are on a device."""

    def left(self, bucket: Bucket, sq_norm: float | torch.Tensor, cost_s: float) -> None:
        """Take the squared norm of this rank's contribution to a bucket, and the seconds that it has cost.

        A tensor is on a device, and only where steps are not guarded.
        """

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
        self._has_begun = False
        self._arrived: set[Bucket] = set()
        self._on_device: list[tuple[Bucket, torch.Tensor, Sequence[WatchPart]]] = []

    def catch_up(self) -> None:
        """Learn from the pass before, before the first bucket of another leaves, and before the state is read."""
        for part in self._parts:
            part.catch_up()

    def left(self, bucket: Bucket, contribution: Array | torch.Tensor) -> None:
        """Look at a bucket that is about to leave."""
        if not self._has_begun:
            self._has_begun = True
            self.catch_up()
        looking = [part for part in self._parts if part.is_looking]
        if not looking:
            return
        begun_s = time.perf_counter()
        is_far = isinstance(contribution, torch.Tensor)
        sq_norm: Any = squared_norm_on_device(contribution) if is_far else exact_squared_norm(contribution)
        taken_s = time.perf_counter() - begun_s
        if is_far and self.guards:
            self._on_device.append((bucket, sq_norm, looking))
            return
        for part in looking:
            part.left(bucket, sq_norm, taken_s / len(looking))

    def _read(self) -> None:
        """Read the squared norms of the pass from the device, all at once."""
        found, self._on_device = self._on_device, []
        numbers = torch.stack([sq_norm for _, sq_norm, _ in found]).tolist() if found else []
        for (bucket, _, looking), number in zip(found, numbers, strict=True):
            for part in looking:
                part.left(bucket, number, 0.0)

    def row(self) -> list[float]:
        """This rank's row, when all buckets have left."""
        if not self._parts:
            return []
        self._has_told = self._has_begun = False
        self._arrived.clear()
        self._read()
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
    return [place.name for place in bucket.places if not math.isfinite(exact_squared_norm_of(place.view))]


def exact_squared_norm_of(tensor: torch.Tensor) -> float:
    """Σ x² of a tensor in any memory; the host waits for that of a device."""
    return float(squared_norm_on_device(tensor)) if is_on_device(tensor) else exact_squared_norm(adapt(tensor).flat)


def exact_squared_norm(flat: Array) -> float:
    """Σ x², infinite only where an element is: finite float32 numbers above 1.8e19 have squares that are not."""
    found = squared_norm([flat])
    if found != math.inf or flat.dtype == np.float64:
        return found
    return sum(squared_norm([flat[at : at + BLOCK].astype(np.float64)]) for at in range(0, flat.size, BLOCK))
