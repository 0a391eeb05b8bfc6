"""The numbers of a case: what follows from the times of its iterations.

Bandwidths are those of nccl-tests: algbw is the size of the message by the time, busbw is algbw times a factor of the
collective (`suite.COLLECTIVES`), which makes it comparable to what the links can carry, whatever the number of ranks.
Both are of the median time.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from kfcomm.bench.suite import COLLECTIVES, Case

_GIGA = 1e9


@dataclass(frozen=True, slots=True)
class Result:
    """A case and the times of its iterations.

    Attributes:
        case: what was measured.
        size: number of ranks.
        times_s: seconds that the slowest rank took, for each iteration.
    """

    case: Case
    size: int
    times_s: tuple[float, ...]

    @property
    def p50_s(self) -> float:
        """The median time."""
        return statistics.median(self.times_s)

    @property
    def p99_s(self) -> float:
        """The time that 99 of 100 iterations do not exceed; the longest, if there are fewer."""
        return _reached_by(0.99, self.times_s)

    @property
    def factor(self) -> float:
        """The factor of the collective: busbw / algbw."""
        return COLLECTIVES[self.case.collective].factor(self.size)

    @property
    def algbw(self) -> float:
        """Algorithm bandwidth, in 10⁹ bytes per second."""
        return self.bandwidth(self.p50_s)

    @property
    def busbw(self) -> float:
        """Bus bandwidth, in 10⁹ bytes per second."""
        return self.algbw * self.factor

    def bandwidth(self, time_s: float) -> float:
        """The algbw if it took ``time_s``, in 10⁹ bytes per second."""
        return self.case.nbytes / time_s / _GIGA


def _reached_by(share: float, times_s: Sequence[float]) -> float:
    """The shortest measured time that at least ``share`` of all do not exceed (nearest rank)."""
    return sorted(times_s)[max(0, math.ceil(share * len(times_s)) - 1)]
