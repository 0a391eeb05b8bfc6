"""Training by many ranks in one process: the formulas in plain code, with ranks that come, go and die.

Each rank has one array. A gradient depends on the step and on the place of the rank among those of the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from kfcomm.elastic import PerRank, State
from kfcomm.train import Algorithm

LENGTH = 5
RATE = 0.3
Vector = np.ndarray[Any, np.dtype[np.float64]]


class Members(NamedTuple):
    """Ranks of a step by uid, and those of them that have lived to its end."""

    births: tuple[int, ...]
    living: tuple[int, ...]


def first_model() -> Vector:
    return np.linspace(-1.0, 1.0, LENGTH)


def gradient(model: Vector, step: int, rank: int) -> Vector:
    return model - np.random.default_rng((step, rank)).standard_normal(LENGTH)


class Reference:
    """Run of an algorithm, step by step.

    Attributes:
        models: of each rank by uid.
    """

    keeps_replicas = True

    def __init__(self, births: Sequence[int], model: Vector | None = None) -> None:
        self.first = first_model() if model is None else model
        self.models = dict.fromkeys(births, self.first)
        self.num_steps = 0
        self.births = tuple(births)

    def step(self, members: Members, number: int, former: Reference | None = None) -> None:
        """Make a step; the first one after another algorithm takes its models over."""
        if members.births != self.births:
            self.change(members.births)
        if former is not None:
            self.models = former.models
        self.models = {birth: x for birth, x in self.models.items() if birth in members.living}
        given = {b: gradient(x, number, members.births.index(b)) for b, x in self.models.items()}
        if former is not None:
            self.begin(self.mean(self.models), members.births)
        self.num_steps += 1
        moved = self.moved()
        along = self.along(given)
        self.models = {birth: moved[birth] - RATE * along[birth] for birth in moved}

    def begin(self, model: Vector, births: tuple[int, ...]) -> None:
        """Begin anew with an agreed model."""
        living = self.models
        self.__init__(births, model)  # type: ignore[misc]
        self.models = dict.fromkeys(living, model)

    def change(self, births: tuple[int, ...]) -> None:
        """The ranks that have lived so far give their mean to the ranks of the next step."""
        mean = self.mean(self.models)
        self.models = {birth: mean.copy() for birth in births}
        self.births = births

    def mean(self, values: dict[int, Vector]) -> Vector:
        found: Vector = sum(values.values()) / len(values)  # type: ignore[assignment]
        return found

    def moved(self) -> dict[int, Vector]:
        return self.models

    def along(self, given: dict[int, Vector]) -> dict[int, Vector]:
        return given


class SSGD(Reference):
    keeps_replicas = False

    def along(self, given: dict[int, Vector]) -> dict[int, Vector]:
        mean = self.mean(given)
        return dict.fromkeys(given, mean)


class SMA(Reference):
    alpha = 0.2

    def moved(self) -> dict[int, Vector]:
        mean = self.mean(self.models)
        return {birth: x - self.alpha * (x - mean) for birth, x in self.models.items()}


class EASGD(Reference):
    alpha, every = 0.3, 2

    def __init__(self, births: Sequence[int], model: Vector | None = None) -> None:
        super().__init__(births, model)
        self.center = self.first

    def moved(self) -> dict[int, Vector]:
        if self.num_steps % self.every:
            return self.models
        alpha, center = min(self.alpha, 1 / len(self.births)), self.center
        self.center = center + alpha * sum(x - center for x in self.models.values())
        return {birth: x - alpha * (x - center) for birth, x in self.models.items()}


class LocalSGD(Reference):
    every = 3

    def moved(self) -> dict[int, Vector]:
        if self.num_steps % self.every:
            return self.models
        return dict.fromkeys(self.models, self.mean(self.models))


class DiLoCo(Reference):
    every, lr, momentum = 3, 0.7, 0.9

    def __init__(self, births: Sequence[int], model: Vector | None = None) -> None:
        super().__init__(births, model)
        self.outer, self.velocity = self.first, np.zeros(LENGTH)

    def moved(self) -> dict[int, Vector]:
        if self.num_steps % self.every:
            return self.models
        change = self.outer - self.mean(self.models)
        self.velocity = self.momentum * self.velocity + change
        self.outer = self.outer - self.lr * (change + self.momentum * self.velocity)
        return dict.fromkeys(self.models, self.outer)


class LocalAdaAlter(Reference):
    every, epsilon = 3, 0.5

    def __init__(self, births: Sequence[int], model: Vector | None = None) -> None:
        super().__init__(births, model)
        self.own = {birth: np.ones(LENGTH) for birth in births}
        self.shared, self.since = np.ones(LENGTH), 0

    def change(self, births: tuple[int, ...]) -> None:
        mean = self.mean({birth: self.own[birth] for birth in self.models})
        super().change(births)
        self.own = {birth: mean.copy() for birth in births}

    def moved(self) -> dict[int, Vector]:
        self.has_met = self.num_steps % self.every == 0
        if not self.has_met:
            return self.models
        self.next_shared = self.mean({birth: self.own[birth] for birth in self.models})
        return dict.fromkeys(self.models, self.mean(self.models))

    def along(self, given: dict[int, Vector]) -> dict[int, Vector]:
        # A meeting begins before the gradient is there: that counts for the next one, and goes along the old B².
        self.since += 1
        found = {birth: g / np.sqrt(self.shared + self.since * self.epsilon**2) for birth, g in given.items()}
        before = dict.fromkeys(given, self.next_shared) if self.has_met else self.own
        self.own = {birth: before[birth] + g * g for birth, g in given.items()}
        if self.has_met:
            self.shared, self.since = self.next_shared, 1
        return found


class AdaSGD(Reference):
    alpha, after = 0.2, 6

    def moved(self) -> dict[int, Vector]:
        if self.num_steps > self.after + 1:
            return self.models
        mean, alpha = self.mean(self.models), self.alpha if self.num_steps <= self.after else 1.0
        return {birth: x - alpha * (x - mean) for birth, x in self.models.items()}

    def along(self, given: dict[int, Vector]) -> dict[int, Vector]:
        return given if self.num_steps <= self.after else dict.fromkeys(given, self.mean(given))


KINDS: dict[str, tuple[Algorithm, type[Reference]]] = {
    "ssgd": (Algorithm("ssgd"), SSGD),
    "sma": (Algorithm("sma", alpha=0.2), SMA),
    "ea-sgd": (Algorithm("ea-sgd", alpha=0.3, every=2), EASGD),
    "local-sgd": (Algorithm("local-sgd", every=3), LocalSGD),
    "diloco": (Algorithm("diloco", every=3), DiLoCo),
    "local-adaalter": (Algorithm("local-adaalter", every=3, epsilon=0.5), LocalAdaAlter),
    "adasgd": (Algorithm("adasgd", alpha=0.2, after=6), AdaSGD),
}


def new_state(comm: Any, algorithm: Algorithm) -> State:
    way, model = algorithm.made(comm, first_model()), first_model()
    return State(way=way, model=PerRank(model, "mean") if algorithm.keeps_replicas else model, log=[])
