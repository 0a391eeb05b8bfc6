"""Top-k (Aji and Heafield, 2017; Lin et al., ICLR 2018): of each gradient the largest numbers travel, and their places.

Each rank gives the k numbers of largest absolute value of its gradient, with the error of the step before added; what
is left is the next error. All ranks add what all give, in the order of the ranks, so all get the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from kfcomm.common.arguments import checked_name
from kfcomm.compression.feedback import Array, Averaging, Errors
from kfcomm.errors import ConfigError


def largest(x: Array, count: int) -> Array:
    """Places of the ``count`` numbers of largest absolute value in a flat array, in ascending order."""
    if count >= x.size:
        return np.arange(x.size)
    found: Array = np.argpartition(np.abs(x), x.size - count)[x.size - count :]
    found.sort()
    return found


class TopK:
    """Averages gradients by their largest numbers; it has the state of a training, and every rank one.

    An infinity or NaN in a gradient is in the average of that step: they are the largest, and none is kept for later.

    Args:
        share: of the numbers of each gradient that travel, at least one; more than 0, at most 1.

    Raises:
        ConfigError: such a share cannot be.

    Cost:
        (n − 1)·k·(4 + the bytes of a number) are received by each rank, so it pays where k is less than a (1 + 4 /
        bytes of a number)·n / 2-th of all; the error of each gradient is kept.
    """

    def __init__(self, share: float = 0.01) -> None:
        if not 0 < share <= 1:
            raise ConfigError(f"the share of numbers that travel is more than 0 and at most 1, not {share}")
        self._share = share
        self.errors = Errors()

    def average(self, comm: Averaging, gradients: Mapping[str, Any], *, name: str = "top") -> dict[str, Array]:
        """Return the approximate mean of all ranks' gradients, by name; the same on all ranks.

        Args:
            comm: blocking communicator.
            gradients: float arrays by name; the same names, shapes and dtypes on every rank, in every step.
            name: prefix of the collectives' names.

        Raises:
            ConfigError: a gradient is not an array of floating-point numbers, or its shape has changed.
            CollectiveError: an exchange has failed; the errors are unchanged.
        """
        name = checked_name(name)
        found = {one: self.errors.corrected(one, gradients[one]) for one in sorted(gradients)}
        places = {one: largest(whole.reshape(-1), self._count(whole)) for one, whole in found.items()}
        averages: dict[str, Array] = {}
        for dtype in dict.fromkeys(whole.dtype for whole in found.values()):
            names = [one for one, whole in found.items() if whole.dtype == dtype]
            self._exchange(comm, f"{name}/{dtype}", names, found, places, averages)
        for one, whole in found.items():
            whole.reshape(-1)[places[one]] = 0
            self.errors.keep(one, np.where(np.isfinite(whole), whole, whole.dtype.type(0)))
        return {one: averages[one] for one in gradients}

    def _count(self, whole: Array) -> int:
        return math.ceil(self._share * whole.size)

    def _exchange(
        self, comm: Averaging, name: str, names: list[str], found: Mapping[str, Array], places: Mapping[str, Array],
        averages: dict[str, Array],
    ) -> None:  # fmt: skip
        """Of the gradients of one dtype, all at once."""
        values = np.concatenate([found[one].reshape(-1)[places[one]] for one in names])
        everywhere = np.concatenate([places[one] for one in names]).astype(_index_type(found, names))
        all_values = comm.all_gather(values, f"{name}/values")
        all_places = comm.all_gather(everywhere, f"{name}/places")
        begin = 0
        for one in names:
            end = begin + len(places[one])
            total = np.zeros(found[one].size, values.dtype)
            for rank in range(comm.size):
                total[all_places[rank, begin:end]] += all_values[rank, begin:end]
            averages[one] = (total / comm.size).astype(values.dtype, copy=False).reshape(found[one].shape)
            begin = end


def _index_type(found: Mapping[str, Array], names: list[str]) -> type[np.signedinteger[Any]]:
    return np.int32 if max(found[one].size for one in names) < 1 << 31 else np.int64
