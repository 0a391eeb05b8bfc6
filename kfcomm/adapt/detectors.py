"""Detectors of slow networks and slow ranks.

Pure and deterministic, without a clock: ranks that feed the same numbers get the same results.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from kfcomm.errors import ConfigError

THRESHOLD = 0.8
"""Below this part of what it is compared with, a throughput counts as low (Mai et al.; Or et al.)."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of `Interference` for one step.

    Attributes:
        votes: ranks whose throughput was low, ascending.
        references: by rank, the reference of the throughput, in its unit; nan while it is unknown.
        is_majority: more than half of all ranks voted.
        is_interference: they did in each of the last ``patience`` steps.
    """

    votes: tuple[int, ...]
    references: tuple[float, ...]
    is_majority: bool
    is_interference: bool


class Interference:
    """Detector of a network that has become slower for most ranks: KungFu's majority vote, with a moving reference.

    A rank votes when its throughput is below ``threshold`` times its reference. There is interference when more than
    half of the ranks vote in ``patience`` consecutive steps; one rank alone, or one bad step, is not enough.

    The reference of a rank is the median of its first ``warmup`` throughputs. From then on it moves towards each new
    one by the part ``follow`` of the distance, and never by more than that part of itself in one step. So:

    - a burst of b low steps lowers it to no less than ``(1 - follow)**b`` of what it was: 10 steps, to 82 %;
    - one absurdly high step raises it by 2 %;
    - a throughput that lasts becomes the reference. After a lasting drop to the part q of what was, ranks stop voting
      after ln((q / threshold - q) / (1 - q)) / ln(1 - follow) steps: for a quarter, 123; for a half, 69.

    A throughput of nan (nothing was measured) neither votes nor moves the reference.

    Source: Mai et al., "KungFu: Making Training in Distributed Machine Learning Adaptive", OSDI 2020: low is
    below 0.8 of a reference, and the ranks decide by majority. That the reference follows is ours.

    Args:
        size: number of ranks.
        threshold: between 0 and 1.
        follow: between 0 and 1.
        warmup: steps, at least 1.
        patience: steps, at least 1.

    Raises:
        ConfigError: one of them is out of range.
    """

    def __init__(
        self, size: int, *, threshold: float = THRESHOLD, follow: float = 0.02, warmup: int = 5, patience: int = 2
    ) -> None:
        _check_part("threshold", threshold)
        _check_part("follow", follow)
        _check_count("size", size)
        _check_count("warmup", warmup)
        _check_count("patience", patience)
        self.size = size
        self.threshold = threshold
        self.follow = follow
        self.warmup = warmup
        self.patience = patience
        self.reset()

    def reset(self) -> None:
        """Forget the references: later measurements differ in kind, such as by another strategy."""
        self._first: list[list[float]] = [[] for _ in range(self.size)]
        self._references = [math.nan] * self.size
        self._running = 0

    @property
    def references(self) -> tuple[float, ...]:
        """By rank; nan during the first steps."""
        return tuple(self._references)

    def update(self, throughputs: Sequence[float]) -> Verdict:
        """Add a step; ``throughputs`` by rank, in any unit, larger is better.

        Raises:
            ConfigError: it is another number of ranks.
        """
        _check_size(self.size, throughputs)
        references = tuple(self._references)
        votes = tuple(
            rank
            for rank, (now, reference) in enumerate(zip(throughputs, references, strict=True))
            if now < self.threshold * reference
        )
        for rank, now in enumerate(throughputs):
            if math.isfinite(now):
                self._follow(rank, now)
        is_majority = 2 * len(votes) > self.size
        if is_majority:
            self._running += 1
        elif any(map(math.isfinite, throughputs)):
            self._running = 0
        return Verdict(votes, references, is_majority, is_majority and self._running >= self.patience)

    def _follow(self, rank: int, now: float) -> None:
        reference = self._references[rank]
        if math.isnan(reference):
            first = self._first[rank]
            first.append(now)
            if len(first) == self.warmup:
                self._references[rank] = median(first)
        else:
            # Capped at twice the reference: one absurd measurement moves it by ``follow`` at most.
            self._references[rank] = reference + self.follow * (min(now, 2 * reference) - reference)


class Stragglers:
    """Detector of ranks that are lastingly slower than the others.

    Each rank's throughput is smoothed (EWMA, the newest weighs ``weight``), and a rank is a straggler while that is
    below ``threshold`` times the median of all. In synchronous training every step takes all ranks equally long: feed
    what is a rank's own, 1 / (seconds of the step in which none of its collectives was under way); see
    ``StepMetrics.speeds``. A rank that falls to a quarter of the others is found in the third step. None is found
    before its throughput is known of ``warmup`` steps.

    Source: Or, Zhang & Freedman, "Resource Elasticity in Distributed Deep Learning", MLSys 2020: EWMA 0.1, below
    0.8 of the median.

    Args:
        size: number of ranks.
        threshold: between 0 and 1.
        weight: between 0 and 1.
        warmup: steps, at least 1.

    Raises:
        ConfigError: one of them is out of range.
    """

    def __init__(self, size: int, *, threshold: float = THRESHOLD, weight: float = 0.1, warmup: int = 3) -> None:
        _check_part("threshold", threshold)
        _check_part("weight", weight)
        _check_count("size", size)
        _check_count("warmup", warmup)
        self.size = size
        self.threshold = threshold
        self.weight = weight
        self.warmup = warmup
        self._smoothed = [math.nan] * size
        self._counts = [0] * size

    @property
    def smoothed(self) -> tuple[float, ...]:
        """The smoothed throughputs, by rank; nan where nothing was measured yet."""
        return tuple(self._smoothed)

    def update(self, throughputs: Sequence[float]) -> tuple[int, ...]:
        """One more step, ``throughputs`` by rank (nan: nothing was measured); the stragglers, ascending.

        Raises:
            ConfigError: it is another number of ranks.
        """
        _check_size(self.size, throughputs)
        for rank, now in enumerate(throughputs):
            if math.isfinite(now):
                self._counts[rank] += 1
                before = self._smoothed[rank]
                self._smoothed[rank] = now if math.isnan(before) else before + self.weight * (now - before)
        known = [one for one in self._smoothed if not math.isnan(one)]
        if not known:
            return ()
        low = self.threshold * median(known)
        return tuple(rank for rank, one in enumerate(self._smoothed) if one < low and self._counts[rank] >= self.warmup)


def _check_part(name: str, value: float) -> None:
    if not 0 < value < 1:
        raise ConfigError(f"{name} is between 0 and 1, not {value!r}")


def _check_count(name: str, value: int) -> None:
    if value < 1:
        raise ConfigError(f"{name} is at least 1, not {value!r}")


def _check_size(size: int, throughputs: Sequence[float]) -> None:
    if len(throughputs) != size:
        raise ConfigError(f"a detector for {size} ranks was given {len(throughputs)} throughputs")
