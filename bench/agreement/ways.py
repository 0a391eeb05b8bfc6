"""Sets to learn, ways to learn them, and the steps of one rank: the same for NumPy and for torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from bench.agreement.learning import Array
from kfcomm.train import Algorithm, LinearScaling

RANKS, BATCH = 16, 4
WARM_UP_EPOCHS = 5
PARTS = 10
"""Of a run; the model is tried after each."""


@dataclass(frozen=True, slots=True)
class Case:
    """A set to learn.

    Attributes:
        name: of it.
        is_hard: see ``learning``.
        rate: the learning rate of the small batch.
        epochs: passes over the set.
    """

    name: str
    is_hard: bool
    rate: float
    epochs: int


CASES = (Case("digits", False, 0.4, 40), Case("harder digits", True, 0.2, 10))


@dataclass(frozen=True, slots=True)
class Way:
    """A way to learn.

    Attributes:
        ranks: how many.
        algorithm: by which they agree, for a run of so many steps and a seed.
        is_scaled: whether the learning rate is that of all ranks' batch.
        warm_up: epochs until it is.
    """

    ranks: int
    algorithm: Callable[[int, int], Algorithm]
    is_scaled: bool = False
    warm_up: int = 0


def _synchronous(steps: int, seed: int) -> Algorithm:
    return Algorithm("ssgd")


SMALL, SCALED = "small batch", "S-SGD, scaled"
WAYS = {
    SMALL: Way(1, _synchronous),
    SCALED: Way(RANKS, _synchronous, is_scaled=True),
    "S-SGD, scaled, warm-up": Way(RANKS, _synchronous, is_scaled=True, warm_up=WARM_UP_EPOCHS),
    "SMA": Way(RANKS, lambda steps, seed: Algorithm("sma", alpha=0.1)),
    "PairAveraging": Way(RANKS, lambda steps, seed: Algorithm("pair-averaging", seed=seed)),
    "local SGD": Way(RANKS, lambda steps, seed: Algorithm("local-sgd", every=4)),
    "AdaSGD": Way(RANKS, lambda steps, seed: Algorithm("adasgd", alpha=0.1, after=steps * 3 // 4)),
}
KEPT = [name for name, way in WAYS.items() if way.ranks > 1 and not way.is_scaled]
"""Ways that are to have the accuracy of the small batch."""


class Step(NamedTuple):
    """A step of one rank: learning rate, indices of its samples, and whether the model is tried after it."""

    rate: float
    chosen: Array
    is_tried: bool


class Course:
    """The steps of one run."""

    def __init__(self, case: Case, way: Way, num_samples: int, seed: int) -> None:
        self._case, self._way, self._seed = case, way, seed
        self._num_samples = num_samples
        self._per_epoch = num_samples // (way.ranks * BATCH)
        self.algorithm = way.algorithm(self._per_epoch * case.epochs, seed)

    def steps(self, rank: int) -> Iterator[Step]:
        """Yield the steps of a rank."""
        case, way = self._case, self._way
        scaling = LinearScaling(case.rate, BATCH, warm_up=way.warm_up * self._per_epoch)
        batch = BATCH * way.ranks if way.is_scaled else BATCH
        for epoch in range(case.epochs):
            order = np.random.default_rng((self._seed, epoch)).permutation(self._num_samples)
            is_tried = (epoch + 1) % max(1, case.epochs // PARTS) == 0
            for step in range(self._per_epoch):
                begin = (step * way.ranks + rank) * BATCH
                rate = scaling.rate(epoch * self._per_epoch + step, batch)
                yield Step(rate, order[begin : begin + BATCH], is_tried and step + 1 == self._per_epoch)
