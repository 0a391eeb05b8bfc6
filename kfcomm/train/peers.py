"""Draws of the peer of each step, for algorithms in which each rank exchanges with one other at a time."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np

from kfcomm.errors import ConfigError


class Peers:
    """Random draws of other ranks, with equal probabilities or by weights.

    Args:
        rank: of who draws.
        size: ranks, at least 2.
        seed: the same one gives the same draws on the same rank.
        weights: for each rank a number, at least 0, to whose size its probability is proportional: bandwidths, say, so
            that peers behind slow links are asked less often. This rank's own does not count. None: all are equal.
        drawn: draws to leave out, which were made before.

    Raises:
        ConfigError: there are no other ranks, or the weights are not valid.
    """

    def __init__(
        self, rank: int, size: int, *, seed: int = 0, weights: Sequence[float] | None = None, drawn: int = 0
    ) -> None:
        if not 0 <= rank < size or size < 2:
            raise ConfigError(f"rank {rank} of {size} has no peers to draw")
        # One of the n − 1 others: to draw one of all, and move one's own to the next, makes that neighbour twice as
        # likely.
        self._others = [peer for peer in range(size) if peer != rank]
        # Each draw takes one number of the generator, which can leave out any of them at once.
        self._draws = np.random.Generator(np.random.PCG64((seed, rank)).advance(drawn))
        self._bounds: list[float] | None = None
        if weights is not None:
            problem = weights_problem(rank, size, weights)
            if problem is not None:
                raise ConfigError(problem)
            own = np.array([weights[peer] for peer in self._others], np.float64)
            self._bounds = (np.cumsum(own) / own.sum()).tolist()

    def draw(self) -> int:
        """Draw the next peer."""
        number = self._draws.random()
        place = int(number * len(self._others)) if self._bounds is None else bisect_right(self._bounds, number)
        return self._others[place]


class RoundRobin:
    """All other ranks in turns, the next one first: no rank is asked twice before each was asked once.

    Args:
        rank: of who asks.
        size: ranks, at least 2.
        drawn: turns that are over.

    Raises:
        ConfigError: there are no other ranks.
    """

    def __init__(self, rank: int, size: int, *, drawn: int = 0) -> None:
        if not 0 <= rank < size or size < 2:
            raise ConfigError(f"rank {rank} of {size} has no peers to ask in turns")
        self._rank, self._size, self._drawn = rank, size, drawn

    def draw(self) -> int:
        """Return the next peer."""
        place = self._drawn % (self._size - 1)
        self._drawn += 1
        return (self._rank + 1 + place) % self._size


def weights_problem(rank: int, size: int, weights: Sequence[float]) -> str | None:
    """Fault of the weights of a rank's peers; None without one."""
    if len(weights) != size:
        return f"{size} ranks have {size} weights, not {len(weights)}"
    own = np.array([*weights[:rank], *weights[rank + 1 :]], np.float64)
    if not (np.isfinite(own).all() and (own >= 0).all() and own.sum() > 0):
        return f"weights are at least 0, and not all 0, not {list(weights)!r}"
    return None
