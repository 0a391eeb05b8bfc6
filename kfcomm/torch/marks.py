"""Marks of a pass: the parameters for which any rank has a gradient, and a row of numbers of each rank.

The marks travel in one ``all_reduce`` of bytes by ``max``. A mark is 0 or 1. Each rank writes only its own row, so all
other ranks give 0 for its bytes, and the maximum has exactly that rank's bytes. So rows cost no collective of their
own, and all ranks read the same rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kfcomm.torch.reductions import aside, contributors, reduction

if TYPE_CHECKING:
    from kfcomm.sync import Communicator
    from kfcomm.torch.buckets import BucketPlace

MARKS_URGENCY = 1 << 13
"""Above the priority of any gradient, since all of them wait for the marks."""


class GradientMarks:
    """Exchange of marks and rows, once a pass.

    Args:
        comm: of the ranks.
        places: parameters that are marked; none for an algorithm that exchanges its gradients itself.
        name: of the collective.
        num_numbers: float64 numbers in the row of each rank, beside a word.
        is_local: the ranks are on one host, where nothing is gained by priorities.

    Attributes:
        ranks: whose rows have arrived, by group rank: all, unless one was lost meanwhile in an elastic world.
        words: of these ranks, in their order.
        numbers: of these ranks, of shape (ranks, ``num_numbers``).
    """

    def __init__(
        self, comm: Communicator, places: Iterable[BucketPlace], name: str, *, num_numbers: int = 0,
        is_local: bool = False,
    ) -> None:  # fmt: skip
        self.name = name
        self.ranks: list[int] = []
        self.words: list[int] = []
        self.numbers: np.ndarray[Any, np.dtype[np.float64]] = np.zeros((comm.size, num_numbers))
        self._places = list(places)
        self._num_marks = len(self._places)
        self._comm, self._rank = comm, comm.rank
        row = np.dtype([("word", "<u4"), ("numbers", "<f8", (num_numbers,))])
        self._flat = np.zeros(self._num_marks + comm.size * row.itemsize, np.uint8)
        self._rows = np.ndarray(comm.size, row, self._flat, self._num_marks)
        priority = 0 if is_local else MARKS_URGENCY
        options = {"op": "max", "out": self._flat, "priority": priority}
        self._exchange = reduction(comm, self._flat, aside(comm, name), options)
        self._is_read = True

    def begin(self, word: int, numbers: Sequence[float] = ()) -> None:
        """Send the marks and the row of this rank, which are final for this pass."""
        self._flat[:] = 0
        self._flat[: self._num_marks] = [place.has_come for place in self._places]
        self._rows[self._rank] = word, numbers
        self._exchange.start()
        self._is_read = False

    def done(self) -> bool:
        """Whether they have arrived, or have failed."""
        return self._exchange.done()

    def cancel(self) -> None:
        """End what is under way, on every rank."""
        self._exchange.cancel()

    def wait(self) -> None:
        """Wait for them."""
        if self._is_read:
            return
        self._exchange.wait()
        self._is_read = True
        for place, mark in zip(self._places, self._flat.tolist(), strict=False):
            place.is_used = bool(mark)
        self.ranks = contributors(self._comm, self._exchange)
        rows = self._rows[self.ranks]
        self.words, self.numbers = rows["word"].tolist(), rows["numbers"].copy()
