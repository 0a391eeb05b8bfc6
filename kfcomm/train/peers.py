"""Which peer a rank turns to. Pure, but for chance, which a seed decides."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np

from kfcomm.errors import ConfigError


class Peers:
    """Draws of other ranks, all of them equally likely, or by weights.

    A draw is one number out of the n − 1 others. (To draw one of all and move one's own to the next would make that
    neighbour twice as likely.)

    Args:
        rank: of who draws.
        size: ranks, at least 2.
        seed: the same one gives the same draws on the same rank.
        weights: for each rank a number, at least 0, to whose size its probability is proportional: bandwidths, say, so
            that peers behind slow links are asked less often. This rank's own does not count. None: all are equal.

    Raises:
        ConfigError: there is nobody to draw.
    """

    def __init__(self, rank: int, size: int, *, seed: int = 0, weights: Sequence[float] | None = None) -> None:
        if not 0 <= rank < size or size < 2:
            raise ConfigError(f"rank {rank} of {size} has no peers to draw")
        self._others = [peer for peer in range(size) if peer != rank]
        self._draws = np.random.default_rng((seed, rank))
        self._bounds: list[float] | None = None
        if weights is not None:
            problem = weights_problem(rank, size, weights)
            if problem is not None:
                raise ConfigError(problem)
            own = np.array([weights[peer] for peer in self._others], np.float64)
            self._bounds = (np.cumsum(own) / own.sum()).tolist()

    def draw(self) -> int:
        """The next peer."""
        if self._bounds is None:
            return self._others[int(self._draws.integers(len(self._others)))]
        return self._others[bisect_right(self._bounds, self._draws.random())]


def weights_problem(rank: int, size: int, weights: Sequence[float]) -> str | None:
    """What is wrong with the weights of a rank's peers; None if nothing is."""
    if len(weights) != size:
        return f"{size} ranks have {size} weights, not {len(weights)}"
    own = np.array([*weights[:rank], *weights[rank + 1 :]], np.float64)
    if not (np.isfinite(own).all() and (own >= 0).all() and own.sum() > 0):
        return f"weights are at least 0, and not all 0, not {list(weights)!r}"
    return None
