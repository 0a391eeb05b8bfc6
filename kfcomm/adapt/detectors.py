"""Detectors of slow networks and slow ranks, and trials by which the fastest of several candidates is found.

Pure and deterministic, without a clock: ranks that feed the same numbers get the same results.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from kfcomm.errors import ConfigError

THRESHOLD = 0.8
"""Below this part of what it is compared with, a throughput counts as low (Mai et al.; Or et al.)."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of `Interference` for one step."""

    votes: tuple[int, ...]  # ranks whose throughput was low, ascending
    references: tuple[float, ...]  # of the throughput, by rank, in its unit; nan while it is unknown
    is_majority: bool  # more than half of all ranks voted
    is_interference: bool  # they did in each of the last ``patience`` steps


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
        # Votes before the references move: a step must not be compared with itself.
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
        # A step in which nothing was measured neither confirms nor ends a majority.
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


@dataclass
class _Candidate:
    costs: list[float] = field(default_factory=list)
    seen: int = 0  # steps in this round
    before: float = math.nan  # median cost of the rounds before

    @property
    def cost(self) -> float:
        return median(self.costs) if self.costs else math.inf


class Trials:
    """Successive elimination among candidates 0, 1, ..., in rounds of trials: finds the cheapest at a bounded cost.

    Pure and deterministic: ranks that feed the same costs try the same candidates in the same order, and keep the same.

    In a round each remaining candidate runs for ``steps`` steps. The first of them is not counted, because links are
    opened in it. The last one is the step in which the ranks agree on the change. A candidate that costs more than
    ``give_up`` times the best so far after its first counted step is replaced at once. At the end of a round,
    candidates whose median cost is more than ``margin`` above the lowest are eliminated. When one remains, or after
    ``rounds`` rounds, the one with the lowest median is kept.

    Regret, the cost of trials beyond running the best from the beginning: candidate c, whose step takes w(c) times the
    best's, runs for at most ``rounds * steps`` steps (the first one, for one more), or for 3 if w(c) is above
    ``give_up`` and the best was tried before. So the regret is at most ``rounds * steps * sum(w(c) - 1)`` steps of the
    best, however long the job is. This holds for constant costs; with noise, the choice is as wrong as medians of
    ``steps - 1`` costs are. Costs that change for all candidates meanwhile show when one is tried again: see
    ``is_disturbed``.

    Args:
        num_candidates: at least 1.
        steps: at least 3.
        rounds: at least 1.
        margin: above 0.
        give_up: above 1.

    Raises:
        ConfigError: one of them is out of range.
    """

    def __init__(
        self, num_candidates: int, *, steps: int = 4, rounds: int = 2, margin: float = 0.1, give_up: float = 2.0
    ) -> None:
        for name, value, least in (("candidates", num_candidates, 1), ("steps", steps, 3), ("rounds", rounds, 1)):
            if value < least:
                raise ConfigError(f"trials need at least {least} {name}, not {value!r}")
        if not margin > 0:
            raise ConfigError(f"margin is above 0, not {margin!r}")
        if not give_up > 1:
            raise ConfigError(f"give_up is above 1, not {give_up!r}")
        self._candidates = [_Candidate() for _ in range(num_candidates)]
        self._steps = steps
        self._rounds = rounds
        self._margin = margin
        self._give_up = give_up
        self._remaining = list(range(num_candidates))
        self._queue = list(self._remaining)
        self.is_disturbed = False

    is_disturbed: bool
    """Whether a candidate cost more than ``give_up`` times what it did in a round before, or less than that part."""

    @property
    def wanted(self) -> int:
        """Candidate that should run; at the end, the one that is kept."""
        return self._queue[0] if self._queue else self.best

    @property
    def is_over(self) -> bool:
        """Whether the choice is made."""
        return not self._queue

    @property
    def best(self) -> int:
        """The remaining candidate with the lowest median cost; of equals, the first."""
        return min(self._remaining, key=lambda number: self._candidates[number].cost)

    @property
    def remaining(self) -> tuple[int, ...]:
        """Candidates that are not eliminated."""
        return tuple(self._remaining)

    @property
    def costs(self) -> tuple[float, ...]:
        """Median costs, by candidate; inf without a measurement."""
        return tuple(one.cost for one in self._candidates)

    @property
    def costs_as_of_the_best(self) -> list[float]:
        """All counted costs, each relative to its candidate's median, times that of the best: they tell the noise."""
        best = self._lowest()
        return [cost / one.cost * best for one in self._candidates for cost in one.costs]

    def add(self, number: int, cost: float) -> None:
        """Add the cost of a step of a candidate, which may already be about to be replaced."""
        candidate = self._candidates[number]
        candidate.seen += 1
        if candidate.seen > 1:
            candidate.costs.append(cost)
        if not self._queue or number != self._queue[0]:
            return
        # Of the steps of a trial the first opens links, and the last is that in which the ranks agree on the change.
        counted = candidate.seen - 1
        if counted >= 2:
            ratio = median(candidate.costs[-counted:]) / candidate.before
            self.is_disturbed |= not 1 / self._give_up <= ratio <= self._give_up and not math.isnan(ratio)
        is_hopeless = counted >= 1 and candidate.cost > self._give_up * self._lowest()
        if counted >= self._steps - 2 or is_hopeless:
            self._queue.pop(0)
            if not self._queue:
                self._end_of_round()

    def _lowest(self) -> float:
        return self._candidates[self.best].cost

    def _end_of_round(self) -> None:
        self._rounds -= 1
        bound = (1 + self._margin) * self._lowest()
        self._remaining = [number for number in self._remaining if self._candidates[number].cost <= bound]
        if self._rounds > 0 and len(self._remaining) > 1:
            self._queue = self._in_order()
            for number in self._queue:
                candidate = self._candidates[number]
                candidate.seen, candidate.before = 0, candidate.cost

    def _in_order(self) -> list[int]:
        """Remaining candidates, the best last: if it stays the best, no change is needed afterwards."""
        best = self.best
        return [number for number in self._remaining if number != best] + [best]


def _check_part(name: str, value: float) -> None:
    if not 0 < value < 1:
        raise ConfigError(f"{name} is between 0 and 1, not {value!r}")


def _check_count(name: str, value: int) -> None:
    if value < 1:
        raise ConfigError(f"{name} is at least 1, not {value!r}")


def _check_size(size: int, throughputs: Sequence[float]) -> None:
    if len(throughputs) != size:
        raise ConfigError(f"a detector for {size} ranks was given {len(throughputs)} throughputs")
