"""Pollux's goodput: how much a second of training is worth, by batch size and number of ranks. Floats in, floats out.

Source: Qiao et al., "Pollux: Co-adaptive Cluster Scheduling for Goodput-Optimized Deep Learning", OSDI 2021,
https://www.usenix.org/conference/osdi21/presentation/qiao, sections 3.1 and 3.2; the model is that of adaptdl. Goodput
is samples per second (`Throughput`, fitted to measured steps) times what a sample is worth beside one of the initial
batch (`efficiency`, by the gradients' noise).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from typing import NamedTuple

from kfcomm.common.imports import lacking
from kfcomm.errors import ConfigError
from kfcomm.train.gradient_statistics import GradientStatistics, efficiency

LEAST_TIME_S = 1e-8
MOST_GAMMA = 10.0
GAMMA_WEIGHT = 1e-4
"""Weight of the preference for γ = 1, if the observations do not determine it."""
STARTS = (1.0, 1.5, 2.5, 5.0)
"""Values of γ from which a minimum is searched."""
LEAST, MOST = (0.0,) * 6 + (1.0,), (math.inf,) * 6 + (MOST_GAMMA,)
"""Bounds of the parameters."""
FTOL = 1e-8
"""The search ends when it gains less than this part."""
ACROSS_HOSTS = 1.1
"""A network between hosts without observations is taken to be slower than the one inside them by this factor."""


@dataclass(frozen=True, slots=True)
class Throughput:
    """How long a step takes: T_acc = α_c + β_c b on each rank, T_net = α + β max(r − 2, 0) among r of them.

    A step of a accumulations before the last one takes a T_acc + (T_acc^γ + T_net^γ)^(1/γ) seconds: γ = 1 where
    computing and communicating follow one another, large where they overlap.

    Attributes:
        alpha_c: seconds of a rank's gradient, whatever its batch.
        beta_c: seconds for each sample of it.
        alpha_n: seconds of the exchange between hosts.
        beta_n: seconds for each rank beyond the second, with several hosts.
        alpha_r: seconds of the exchange inside one host.
        beta_r: seconds for each rank beyond the second, on one host.
        gamma: 1 to 10.

    Raises:
        ConfigError: a number is out of its range.
    """

    alpha_c: float
    beta_c: float
    alpha_n: float
    beta_n: float
    alpha_r: float
    beta_r: float
    gamma: float

    def __post_init__(self) -> None:
        if not all(0 <= value < math.inf for value in astuple(self)) or not 1 <= self.gamma <= MOST_GAMMA:
            raise ConfigError(f"times are at least 0 and gamma is 1 to 10, not {astuple(self)}")

    def accumulation_s(self, batch: float) -> float:
        """Seconds of one gradient of ``batch`` samples on one rank."""
        return self.alpha_c + self.beta_c * batch

    def network_s(self, hosts: int, ranks: int) -> float:
        """Seconds of an exchange of gradients that nothing overlaps."""
        if ranks == 1:
            return 0.0
        alpha, beta = (self.alpha_n, self.beta_n) if hosts > 1 else (self.alpha_r, self.beta_r)
        return alpha + beta * max(ranks - 2, 0)

    def step_s(self, hosts: int, ranks: int, batch: float, accumulations: int = 0) -> float:
        """Seconds of a step.

        Args:
            hosts: over which the ranks are spread.
            ranks: at least as many as hosts.
            batch: samples of one rank's gradient.
            accumulations: gradients that each rank adds up before its last one.

        Raises:
            ConfigError: there can be no such step.
        """
        _check(hosts, ranks, batch, accumulations)
        accumulation_s = max(self.accumulation_s(batch), LEAST_TIME_S)
        return accumulations * accumulation_s + _overlapped(accumulation_s, self.network_s(hosts, ranks), self.gamma)

    def samples_per_s(self, hosts: int, ranks: int, batch: float, accumulations: int = 0) -> float:
        """Samples of all ranks for each second; see ``step_s``."""
        return ranks * batch * (accumulations + 1) / self.step_s(hosts, ranks, batch, accumulations)


@dataclass(frozen=True, slots=True)
class Shape:
    """Shape of a step: ``ranks`` on ``hosts`` hosts, each with ``accumulations`` + 1 gradients of ``batch`` samples.

    Attributes:
        hosts: over which the ranks are spread.
        ranks: at least as many as hosts.
        batch: samples of one rank's gradient.
        accumulations: gradients that each rank adds up before its last one.

    Raises:
        ConfigError: there can be no such step.
    """

    hosts: int
    ranks: int
    batch: float
    accumulations: int = 0

    def __post_init__(self) -> None:
        _check(self.hosts, self.ranks, self.batch, self.accumulations)

    @property
    def samples(self) -> float:
        """B, of all ranks."""
        return self.ranks * self.batch * (self.accumulations + 1)


def goodput(throughput: Throughput, gradients: GradientStatistics, initial_batch: float, shape: Shape) -> float:
    """Samples a second, in samples of the initial batch: throughput times efficiency.

    Raises:
        ConfigError: the initial batch is not above 0.
    """
    rate = throughput.samples_per_s(shape.hosts, shape.ranks, shape.batch, shape.accumulations)
    return rate * efficiency(gradients, initial_batch, shape.samples)


def best_shape(
    throughput: Throughput, gradients: GradientStatistics, initial_batch: float, shapes: Iterable[Shape]
) -> tuple[Shape, float]:
    """Return the shape with the highest goodput, and that goodput; of equals the first.

    Raises:
        ConfigError: no shape was given, or the initial batch is not above 0.
    """
    found = [(shape, goodput(throughput, gradients, initial_batch, shape)) for shape in shapes]
    if not found:
        raise ConfigError("expected at least one shape of a step to choose from, got none")
    return max(found, key=lambda one: one[1])


class Observation(NamedTuple):
    """Steps that were measured.

    Attributes:
        shape: of a step.
        step_s: seconds of one, best a mean of several.
        accumulation_s: seconds of one gradient without any exchange; None where that was not measured.
    """

    shape: Shape
    step_s: float
    accumulation_s: float | None = None


def fit(observations: Sequence[Observation]) -> Throughput:
    """Fit a throughput model to measured steps: least squares of the logarithms of their times.

    Costs without an observation are taken as 0, so that the shape will be tried: the network before two ranks were
    measured, further ranks before two numbers of them. The network between hosts is then taken as a tenth slower than
    inside one.

    Args:
        observations: at least one, of any shapes.

    Raises:
        ConfigError: no observation was given, or a time is not above 0.

    Cost: some milliseconds for tens of observations.
    """
    if not observations:
        raise ConfigError("a throughput model is fitted to at least one observation")
    for one in observations:
        times = (one.step_s,) if one.accumulation_s is None else (one.step_s, one.accumulation_s)
        if not all(0 < time_s < math.inf for time_s in times):
            raise ConfigError(f"times are above 0 s, not {times}")
    free = _free(observations)
    _, values = min(_minimum(observations, free, gamma) for gamma in STARTS)
    for across, inside in ((2, 4), (3, 5)):
        if not free[across]:
            values[across] = ACROSS_HOSTS * values[inside]
    return Throughput(*values)


def _minimum(observations: Sequence[Observation], free: Sequence[bool], gamma: float) -> tuple[float, list[float]]:
    """Find a local minimum over the free parameters; return its cost, and all parameters."""
    try:
        from scipy.optimize import least_squares
    except ImportError as error:
        raise ConfigError(lacking("fitting a throughput model", "scipy")) from error
    values = _start(observations, gamma)
    places = [place for place, is_free in enumerate(free) if is_free]

    def residuals(found: Sequence[float]) -> list[float]:
        for place, value in zip(places, found, strict=True):
            values[place] = float(value)
        return _residuals(values, observations)

    bounds = [LEAST[place] for place in places], [MOST[place] for place in places]
    found = least_squares(residuals, [values[place] for place in places], bounds=bounds, x_scale="jac", ftol=FTOL)
    residuals(found.x)
    return float(found.cost), values


def _check(hosts: int, ranks: int, batch: float, accumulations: int) -> None:
    if not (1 <= hosts <= ranks and batch > 0 and accumulations >= 0):
        raise ConfigError(
            f"a step has ranks on as many hosts at most, samples and whole accumulations, not "
            f"{ranks!r} on {hosts!r}, {batch!r} and {accumulations!r}"
        )


def _overlapped(one_s: float, other_s: float, gamma: float) -> float:
    """(a^γ + b^γ)^(1/γ), without powers of small numbers."""
    most_s = max(one_s, other_s)
    return most_s * math.pow(1 + math.pow(min(one_s, other_s) / most_s, gamma), 1 / gamma)


def _free(observations: Sequence[Observation]) -> list[bool]:
    """Whether the observations determine each parameter."""
    shapes = [one.shape for one in observations]
    across = {shape.ranks for shape in shapes if shape.hosts > 1}
    inside = {shape.ranks for shape in shapes if shape.hosts == 1 and shape.ranks > 1}
    return [
        len({shape.batch for shape in shapes}) > 1,
        True,
        bool(across),
        len(across) > 1,
        bool(inside),
        len(inside) > 1,
        bool(across or inside),
    ]


def _start(observations: Sequence[Observation], gamma: float) -> list[float]:
    """Start of the search; parameters that are not free keep these values."""
    # With one batch size half of a gradient's time is taken for what its samples do not cost, as adaptdl does.
    computed = [
        (one.accumulation_s or one.step_s / (one.shape.accumulations + 1), one.shape.batch) for one in observations
    ]
    least_s, batch = min(computed)
    alpha_n, alpha_r = (_least_network_s(observations, across=across) for across in (True, False))
    return [least_s / 2, least_s / 2 / batch, alpha_n, 0.0, alpha_r, 0.0, gamma]


def _least_network_s(observations: Sequence[Observation], *, across: bool) -> float:
    """First guess at the time of an exchange: half of the shortest step; 0 without data."""
    found = [one.step_s for one in observations if one.shape.ranks > 1 and (one.shape.hosts > 1) == across]
    return min(found) / 2 if found else 0.0


def _residuals(values: Sequence[float], observations: Sequence[Observation]) -> list[float]:
    """Residuals: logarithms of predicted over measured times; and a slight preference for γ = 1."""
    model = Throughput(*values)
    found = [GAMMA_WEIGHT * (model.gamma - 1)]
    for one in observations:
        shape = one.shape
        found.append(math.log(model.step_s(shape.hosts, shape.ranks, shape.batch, shape.accumulations) / one.step_s))
        if one.accumulation_s is not None:
            predicted_s = max(model.accumulation_s(shape.batch), LEAST_TIME_S)
            found.append(math.log(predicted_s / one.accumulation_s))
    return found
