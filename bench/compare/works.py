"""Measured work: tensors, the mode of their calls, and the contender.

Needs nothing but Python: workers of every library read it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from kfcomm.bench.workloads import resnet50

FLOAT32_NBYTES = 4


class Mode(StrEnum):
    """How the tensors of a work are handed to the library. Results replace the inputs, unless said otherwise."""

    ONE = "one by one"
    """A blocking collective for each tensor."""
    ALL = "all at once"
    """A collective for each tensor, all begun before the first is waited for."""
    BUCKETS = "buckets, copied"
    """Tensors are copied into buckets of 25 MB, buckets are reduced all at once, results are copied back."""
    VIEWS = "buckets, in place"
    """The same without the copies, as where tensors are views of buckets from the start."""
    MANY = "all_reduce_many"
    """One call for all; the results are new arrays."""
    SHARED = "shared result"
    """A blocking collective for each tensor, whose result is one array for all ranks."""
    FLOOR = "floor"
    """The work of a floor, see its contender."""


@dataclass(frozen=True, slots=True)
class Work:
    """Tensors of float32 to be summed over all ranks.

    Attributes:
        name: short, for the command line and the records.
        sizes: number of elements of each tensor.
        most_calls: at most so many calls, one after the other, in one turn.
    """

    name: str
    sizes: tuple[int, ...]
    most_calls: int = 1

    @property
    def nbytes(self) -> int:
        """Bytes of one rank's tensors."""
        return sum(self.sizes) * FLOAT32_NBYTES


@dataclass(frozen=True, slots=True)
class Entry:
    """One who takes part: a contender (a key of `launch.LAUNCHES`) in a mode."""

    contender: str
    mode: Mode = Mode.ONE

    def __str__(self) -> str:
        return self.contender if self.mode in (Mode.ONE, Mode.FLOOR) else f"{self.contender}, {self.mode}"


WORKS = {
    work.name: work
    for work in (
        Work("64MiB", ((64 << 20) // FLOAT32_NBYTES,)),
        Work("4MiB", ((4 << 20) // FLOAT32_NBYTES,), most_calls=25),
        Work("1MiB", ((1 << 20) // FLOAT32_NBYTES,), most_calls=100),
        Work("64KiB", ((64 << 10) // FLOAT32_NBYTES,), most_calls=1000),
        Work("16KiB", ((16 << 10) // FLOAT32_NBYTES,), most_calls=1000),
        Work("1KiB", ((1 << 10) // FLOAT32_NBYTES,), most_calls=2000),
        Work("resnet50", tuple(math.prod(shape) for shape in reversed(resnet50()))),
        Work("10000x8", (8,) * 10_000),
    )
}
