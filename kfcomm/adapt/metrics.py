"""Measurements of a step: a rank's totals, what the program observes, and the table that all ranks share."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np

from kfcomm.adapt.hyperparameters import Hyperparameters
from kfcomm.common.arguments import plain_text
from kfcomm.engine.observer import EngineLoad
from kfcomm.errors import ConfigError
from kfcomm.strategies import AnyStrategy
from kfcomm.types import override

if TYPE_CHECKING:
    from kfcomm.world.communicator import Communicator


Row: TypeAlias = "np.ndarray[Any, np.dtype[np.float64]]"

MAX_OBSERVED = 64
"""Number of names on one rank: each is a number in every meeting."""
MAX_NAME = 100
"""Characters of a name."""
LEAST_OWN_PART = 0.05
"""If ranks' own work takes less than this part of a step, their speeds are unknown."""

_NUM_FIELDS = 6  # step, seconds, busy_s, nbytes, count, whether it has observed something new
_BITS = 48
"""Columns of one mark, which is a whole number that float64 holds."""


@dataclass(frozen=True, slots=True)
class Reading:
    """Measurements of a rank, as totals that only grow, or as the difference of two of them.

    Attributes:
        time_s: time of a monotonic clock, in seconds.
        busy_s: seconds in which at least one of its collectives was under way.
        nbytes: bytes of the inputs of its collectives.
        count: number of its collectives.
        waited_s: seconds for which its collectives waited for data of a rank, by rank of the group.
    """

    time_s: float
    busy_s: float
    nbytes: int
    count: int
    waited_s: tuple[float, ...]

    def since(self, before: Reading) -> Reading:
        """Return the difference from an earlier reading."""
        return Reading(
            self.time_s - before.time_s,
            self.busy_s - before.busy_s,
            self.nbytes - before.nbytes,
            self.count - before.count,
            tuple(max(0.0, now - then) for now, then in zip(self.waited_s, before.waited_s, strict=True)),
        )

    def plus(self, other: Reading) -> Reading:
        """Return the sum of two differences."""
        return Reading(
            self.time_s + other.time_s,
            self.busy_s + other.busy_s,
            self.nbytes + other.nbytes,
            self.count + other.count,
            tuple(one + two for one, two in zip(self.waited_s, other.waited_s, strict=True)),
        )

    @classmethod
    def nothing(cls, size: int) -> Reading:
        """Return the difference of a reading and itself."""
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
        waited_s: seconds for which the collectives of all ranks together waited for data of this rank. A rank that
            waits is waited for, too: the rank with the largest number is only the first to look at.
        hyperparameters: hyperparameters of the step.
        observed: numbers of ``Adaptation.observe``, by name, by rank; None where a rank has not observed the name. A
            rank that has observed nan is there with it.
    """

    step: int
    strategy: AnyStrategy
    seconds: tuple[float, ...]
    busy_s: tuple[float, ...]
    nbytes: tuple[int, ...]
    counts: tuple[int, ...]
    waited_s: tuple[float, ...]
    hyperparameters: Hyperparameters = field(default_factory=Hyperparameters)
    observed: Mapping[str, tuple[float | None, ...]] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.seconds)

    def mean(self, name: str) -> float:
        """Return the mean over the ranks that have observed a number; nan if one of them is nan, or without any."""
        known = [one for one in self.observed.get(name, ()) if one is not None]
        return fmean(known) if known else math.nan

    @property
    def numbers(self) -> dict[str, float]:
        """Means of what was observed, and the hyperparameters that are numbers: the gauges of a step."""
        given = self.hyperparameters
        rest = {"batch_size": given.batch_size, "learning_rate": given.learning_rate}
        rest |= {name: one.value for name, one in given.free.items()}
        known = {name: float(value) for name, value in rest.items() if isinstance(value, (int, float))}
        return {name: self.mean(name) for name in self.observed} | known

    @cached_property
    def own_s(self) -> tuple[float, ...]:
        """Seconds in which the rank had no collective under way: its computing, its input, its sleep."""
        return tuple(max(0.0, all_s - busy_s) for all_s, busy_s in zip(self.seconds, self.busy_s, strict=True))

    @cached_property
    def network_s(self) -> tuple[float, ...]:
        """Seconds of the network: ``busy_s``, less the time in which the slowest rank was still at its own work."""
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
        """``1 / own_s``, for `Stragglers`. All nan where each rank's own work takes less than 5 % of the step.

        All ranks' steps take equally long, because they wait for each other in their collectives; the others wait for a
        rank's own work before these. Computing while collectives are under way does not count, on any rank.
        """
        if max(self.own_s) < LEAST_OWN_PART * max(self.seconds):
            return (math.nan,) * self.size
        return tuple(1 / own_s if own_s > 0 else math.inf for own_s in self.own_s)

    @property
    def slowest_peer(self) -> int | None:
        """Rank that was waited for longest; None without waits."""
        most_s = max(self.waited_s)
        return self.waited_s.index(most_s) if most_s > 0 else None


@dataclass(frozen=True, slots=True)
class MeetingTable:
    """Reports of all ranks at a meeting: measurements, observations, and a sign for each policy."""

    # It travels as one all_reduce in which every rank fills a row of its own: 2(n - 1) messages, where an all_gather
    # takes n(n - 1). Adding zeros does not change a number.

    # By rank: step, seconds, busy_s, nbytes, count, and 1 where the rank has observed a name without a column
    rows: Row
    signs: Row  # (size, number of policies): whole numbers below 2**53, which float64 holds
    marks: Row  # (size, number of columns / 48): a bit for each column that the rank has observed
    observed: Row  # (size, number of columns): 0 where a rank has not observed the name
    waited_s: Row  # (size,)

    @staticmethod
    def fill(
        rank: int, size: int, step: int, reading: Reading, signs: Sequence[int],
        observed: Sequence[float | None] = (), *, is_new: bool = False,
    ) -> Row:  # fmt: skip
        """Return a rank's array: ``size * (6 + number of policies + number of columns, their marks, + 1)`` float64.

        ``observed`` is None in a column that the rank has not observed.
        """
        own = (
            step, reading.time_s, reading.busy_s, reading.nbytes, reading.count, is_new, *signs, *_marks(observed),
            *(0.0 if one is None else one for one in observed),
        )  # fmt: skip
        # Signs have 48 bits, which float64 holds exactly.
        flat = np.zeros(size * (len(own) + 1))
        flat[rank * len(own) : (rank + 1) * len(own)] = own
        flat[size * len(own) :] = reading.waited_s
        return flat

    @classmethod
    def read(cls, flat: Row, size: int, num_policies: int) -> MeetingTable:
        """Parse the sum of the arrays."""
        width = len(flat) // size - 1
        rows = flat[: size * width].reshape(size, width)
        begin = _NUM_FIELDS + num_policies
        end = begin + -(-(width - begin) // (_BITS + 1))  # of the marks: one before each 48 columns
        return cls(
            rows[:, :_NUM_FIELDS], rows[:, _NUM_FIELDS:begin], rows[:, begin:end], rows[:, end:], flat[size * width :]
        )

    @property
    def steps(self) -> tuple[int, ...]:
        """Number of the step of each rank."""
        return tuple(int(step) for step in self.rows[:, 0])

    @property
    def has_news(self) -> bool:
        """Whether a rank has observed a name without a column."""
        return bool(self.rows[:, 5].any())

    def signs_of(self, policy: int) -> tuple[int, ...]:
        """Signs of a policy, by rank."""
        return tuple(int(sign) for sign in self.signs[:, policy])

    def observed_of(self, column: int) -> tuple[float | None, ...]:
        """Observations of a column, by rank; None for a rank without one."""
        marks = self.marks[:, column // _BITS].tolist()
        values = self.observed[:, column].tolist()
        seen = [int(mark) >> column % _BITS & 1 for mark in marks]
        return tuple(value if was_seen else None for value, was_seen in zip(values, seen, strict=True))

    def metrics(
        self, strategy: AnyStrategy, hyperparameters: Hyperparameters,
        observed: Mapping[str, tuple[float | None, ...]],
    ) -> StepMetrics:  # fmt: skip
        """Return the measurements of the step."""
        _, seconds, busy_s, nbytes, counts, _ = self.rows.T.tolist()
        return StepMetrics(
            step=self.steps[0],
            strategy=strategy,
            seconds=tuple(seconds),
            busy_s=tuple(busy_s),
            nbytes=tuple(map(int, nbytes)),
            counts=tuple(map(int, counts)),
            waited_s=tuple(self.waited_s.tolist()),
            hyperparameters=hyperparameters,
            observed=observed,
        )


def _marks(observed: Sequence[float | None]) -> list[int]:
    """Whole numbers with a bit for each column that is observed."""
    parts = (observed[at : at + _BITS] for at in range(0, len(observed), _BITS))
    return [sum(1 << bit for bit, one in enumerate(part) if one is not None) for part in parts]


class Observed:
    """Numbers that the program of one rank has observed since the last meeting."""

    def __init__(self) -> None:
        # Names that all ranks know, in the same order; a new one costs one more exchange, the first time.
        self.columns: tuple[str, ...] = ()
        self._values: dict[str, float] = {}
        self._names: set[str] = set()

    def observe(self, values: Mapping[str, float]) -> None:
        """Keep values; the last one of a name counts."""
        for name, value in values.items():
            number = _number(name, value)
            if len(name) > MAX_NAME or len(self._names | {name}) > MAX_OBSERVED:
                raise ConfigError(f"a rank observes up to {MAX_OBSERVED} names of {MAX_NAME} characters: {name!r:.120}")
            self._names.add(plain_text(name))
            self._values[plain_text(name)] = number

    def take(self) -> dict[str, float]:
        """Return the values, and forget them."""
        taken, self._values = self._values, {}
        return taken


def _number(name: str, value: Any) -> float:
    """Convert a number, or an array of one number."""
    try:
        return float(value.item() if hasattr(value, "item") else value + 0.0)
    except (TypeError, ValueError):
        raise ConfigError(f"what is observed is a number: {name} is {value!r:.60}") from None


class StepMeter(Protocol):
    """Source of an ``Adaptation``'s measurements."""

    def read(self) -> Reading:
        """Return the totals of this moment."""


class EngineMeter(StepMeter):
    """Totals of the engine below a communicator, of all groups; without monitoring ``waited_s`` is 0."""

    def __init__(self, comm: Communicator) -> None:
        comm = getattr(comm, "current", comm)  # of this epoch, where it lives through several
        engine = comm._session.engine
        self._comm = comm
        self._engine = engine
        observers = engine.observers or ()
        # One for all adaptations of an engine: each costs every collective a call.
        self._load = next((one for one in observers if isinstance(one, EngineLoad)), None) or EngineLoad(
            engine.in_flight
        )
        if self._load not in observers:
            engine.observe((*observers, self._load))

    @override
    def read(self) -> Reading:
        now_s = time.monotonic()
        meter = self._engine.meter
        members = self._comm._group.view.members
        waited_s = (0.0,) * len(members) if meter is None else tuple(meter.waited_s[member] for member in members)
        return Reading(now_s, self._load.busy_s(now_s), self._load.nbytes, self._load.count, waited_s)
