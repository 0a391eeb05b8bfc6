"""What the ranks know of each other's last step, and the one small array by which they tell each other.

Every number here is the same on every rank, so that a policy which decides by these numbers alone decides the same
everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import Any, TypeAlias

import numpy as np

from kfcomm.strategies import AnyStrategy

Row: TypeAlias = "np.ndarray[Any, np.dtype[np.float64]]"

LEAST_OWN_PART = 0.05
"""Below this part of a step, ranks' own seconds say nothing of their speed."""

_NUM_FIELDS = 5  # step, seconds, busy_s, nbytes, count


@dataclass(frozen=True, slots=True)
class Reading:
    """What a rank has measured, as totals that only grow, or as the difference of two of them.

    Attributes:
        time_s: of a monotonic clock, in seconds.
        busy_s: seconds in which at least one of its collectives was under way.
        nbytes: bytes of the arrays that its collectives were given.
        count: number of its collectives.
        waited_s: seconds for which its collectives waited for what a rank had to send, by rank of the group.
    """

    time_s: float
    busy_s: float
    nbytes: int
    count: int
    waited_s: tuple[float, ...]

    def since(self, before: Reading) -> Reading:
        """What came in between."""
        return Reading(
            self.time_s - before.time_s,
            self.busy_s - before.busy_s,
            self.nbytes - before.nbytes,
            self.count - before.count,
            tuple(max(0.0, now - then) for now, then in zip(self.waited_s, before.waited_s, strict=True)),
        )

    def plus(self, other: Reading) -> Reading:
        """Two differences together."""
        return Reading(
            self.time_s + other.time_s,
            self.busy_s + other.busy_s,
            self.nbytes + other.nbytes,
            self.count + other.count,
            tuple(one + two for one, two in zip(self.waited_s, other.waited_s, strict=True)),
        )

    @classmethod
    def nothing(cls, size: int) -> Reading:
        """The difference of a reading and itself."""
        return cls(0.0, 0.0, 0, 0, (0.0,) * size)


@dataclass(frozen=True)
class StepMetrics:
    """The last step (with ``every`` above 1: the last steps together), by rank.

    Attributes:
        step: number of the step, from 0.
        strategy: in force at its end.
        seconds: how long it took; about the same on all ranks.
        busy_s: seconds of it in which at least one of the rank's collectives was under way.
        nbytes: bytes of the arrays that the rank's collectives were given.
        counts: number of the rank's collectives.
        waited_s: seconds for which the collectives of all ranks together waited for what this rank had to send them.
            A rank that itself waits is waited for, too: the largest is where to look first, no more.
    """

    step: int
    strategy: AnyStrategy
    seconds: tuple[float, ...]
    busy_s: tuple[float, ...]
    nbytes: tuple[int, ...]
    counts: tuple[int, ...]
    waited_s: tuple[float, ...]

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.seconds)

    @cached_property
    def own_s(self) -> tuple[float, ...]:
        """Seconds in which none of the rank's collectives was under way: its computing, its input, its sleep."""
        return tuple(max(0.0, all_s - busy_s) for all_s, busy_s in zip(self.seconds, self.busy_s, strict=True))

    @cached_property
    def network_s(self) -> tuple[float, ...]:
        """Seconds that the network took: ``busy_s``, less those in which the slowest rank was still at its own work."""
        last_s = max(self.own_s)
        return tuple(max(0.0, busy - (last_s - own)) for busy, own in zip(self.busy_s, self.own_s, strict=True))

    @cached_property
    def throughputs(self) -> tuple[float, ...]:
        """``nbytes / network_s``, bytes per second; nan for a rank that moved nothing, or took no time for it."""
        return tuple(
            nbytes / network_s if nbytes and network_s > 0 else math.nan
            for nbytes, network_s in zip(self.nbytes, self.network_s, strict=True)
        )

    @cached_property
    def throughput(self) -> float:
        """The median of ``throughputs``, bytes per second; nan if no rank moved anything."""
        known = [one for one in self.throughputs if not math.isnan(one)]
        return median(known) if known else math.nan

    @cached_property
    def speeds(self) -> tuple[float, ...]:
        """``1 / own_s``: what `Stragglers` compares. All nan where no rank's own work takes 5 % of the step.

        All ranks' steps take equally long, since they wait for each other in their collectives; what is a rank's own
        is how long the others wait for it to begin. A rank that computes while its collectives are under way has that
        time not counted, on all ranks alike.
        """
        if max(self.own_s) < LEAST_OWN_PART * max(self.seconds):
            return (math.nan,) * self.size
        return tuple(1 / own_s if own_s > 0 else math.inf for own_s in self.own_s)

    @property
    def slowest_peer(self) -> int | None:
        """The rank that was waited for longest; None if none was."""
        most_s = max(self.waited_s)
        return self.waited_s.index(most_s) if most_s > 0 else None


@dataclass(frozen=True, slots=True)
class Table:
    """One meeting of the ranks: what each measured, and a number for each policy of each.

    It travels as one all_reduce in which every rank fills a row of its own: 2(n - 1) messages, where an all_gather
    takes n(n - 1). Adding zeros changes no number.

    Attributes:
        steps: the step at which each rank is.
        rows: ``(size, 5)``: step, seconds, busy_s, nbytes, count.
        signs: ``(size, number of policies)``: whole numbers below 2**53.
        waited_s: ``(size,)``.
    """

    rows: Row
    signs: Row
    waited_s: Row

    @staticmethod
    def fill(rank: int, size: int, step: int, reading: Reading, signs: Sequence[int]) -> Row:
        """What a rank adds: ``size * (5 + number of policies + 1)`` float64."""
        width = _NUM_FIELDS + len(signs)
        flat = np.zeros(size * (width + 1))
        own = (step, reading.time_s, reading.busy_s, reading.nbytes, reading.count, *signs)
        flat[rank * width : (rank + 1) * width] = own
        flat[size * width :] = reading.waited_s
        return flat

    @classmethod
    def read(cls, flat: Row, size: int, num_policies: int) -> Table:
        """What came of it."""
        width = _NUM_FIELDS + num_policies
        rows = flat[: size * width].reshape(size, width)
        return cls(rows[:, :_NUM_FIELDS], rows[:, _NUM_FIELDS:], flat[size * width :])

    @property
    def steps(self) -> tuple[int, ...]:
        """The step at which each rank is."""
        return tuple(int(step) for step in self.rows[:, 0])

    def signs_of(self, policy: int) -> tuple[int, ...]:
        """The numbers for a policy, by rank."""
        return tuple(int(sign) for sign in self.signs[:, policy])

    def metrics(self, strategy: AnyStrategy) -> StepMetrics:
        """The measurements."""
        _, seconds, busy_s, nbytes, counts = self.rows.T.tolist()
        return StepMetrics(
            step=self.steps[0],
            strategy=strategy,
            seconds=tuple(seconds),
            busy_s=tuple(busy_s),
            nbytes=tuple(map(int, nbytes)),
            counts=tuple(map(int, counts)),
            waited_s=tuple(self.waited_s.tolist()),
        )
