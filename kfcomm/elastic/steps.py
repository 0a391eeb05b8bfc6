"""Steps of training, and the samples that count as used.

Samples count as used by the calls of their step, or by the calls of some names. Each rank reports its outcome of these
calls, and all ranks decide from all reports alike: a call may be done on one rank and have failed on another that
cancelled it or timed out, so a rank must not decide from its own outcome.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Generator, Sequence
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeAlias, TypeVar

import numpy as np

from kfcomm.common.arguments import hint
from kfcomm.elastic.call_log import Uids
from kfcomm.elastic.dispatcher import Dispatcher
from kfcomm.elastic.sampler import ElasticSampler, Indices, Name, share
from kfcomm.errors import ConfigError, EpochChanged, PeerLost

T = TypeVar("T")


class Step:
    """One step of training.

    If the ``Elastic`` restarts steps, the body of the loop is below ``with step:``, which ends it silently when ranks
    are lost during the step.

    Attributes:
        number: number of the step, from 0 since training began; a repeated step keeps its number.
        indices: indices of the samples that this rank trains on.
        batch: indices of the samples of all ranks.
        is_void: it has ended because ranks were lost, and is repeated.
    """

    __slots__ = ("_restarts", "batch", "indices", "is_void", "number")

    def __init__(self, number: int, indices: Indices, batch: Indices, *, restarts: bool = False) -> None:
        self.number = number
        self.indices = indices
        self.batch = batch
        self.is_void = False
        self._restarts = restarts

    def __repr__(self) -> str:
        return f"<Step {self.number}: {len(self.indices)} of {len(self.batch)} samples>"

    def __enter__(self) -> Self:
        if not self._restarts:
            raise ConfigError('with step: is for Elastic(..., on_loss="restart_step")')
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self.is_void = isinstance(error, (EpochChanged, PeerLost))
        return self.is_void


Wanted: TypeAlias = Step | np.ndarray[Any, np.dtype[Any]] | Callable[[], Awaitable[None]]
Walk: TypeAlias = Generator[Wanted, Any, T]
"""Yields a `Step`; an array, whose sums over all ranks under the name ``BOUNDARY`` are sent back; or a function to call
and await. Runs where the engine does."""


def following(walk: Walk[None], met: Any) -> Wanted | None:
    """Return the next item, given the requested sums; None at the end."""
    try:
        return walk.send(met)
    except StopIteration:
        return None


class Told(NamedTuple):
    """Report of a rank about its step; msgpack can carry it.

    Attributes:
        is_tried: the rank has made a call that counts.
        is_whole: such calls have succeeded, and no named call has failed.
        lacking: uids whose contributions are missing in a successful call.
        missing: names without a call, as far as that is known.
        made: names of the calls that were made.
    """

    is_tried: bool
    is_whole: bool
    lacking: list[int]
    missing: list[str]
    made: list[str]


class Used:
    """Calls that count for the samples of one walk's steps, on one rank.

    Args:
        names: names of the calls by which samples count as used; None for all calls.
    """

    def __init__(self, names: Collection[str] | None) -> None:
        self._names = names
        self._met: set[str] = set()
        self.begin()

    def begin(self) -> None:
        """Begin a step."""
        self._is_tried = self._is_done = self._has_failed = self._is_unknown = False
        self._lacking: set[int] = set()
        self._made: set[str] = set()

    def note(self, calls: Dispatcher, uids: Uids) -> None:
        """Add the outcome of the calls since the last boundary; ``uids``: the ranks of the step."""
        outcome = calls.log.samples(self._names, uids)
        self._is_tried |= outcome.is_tried
        self._is_done |= outcome.is_done
        self._has_failed |= outcome.has_failed
        self._lacking |= outcome.lacking
        self._made.update(calls.log.made())
        self._is_unknown |= calls.log.has_failed()

    def told(self, *, is_void: bool) -> Told:
        """Report of this rank, when the step is over."""
        self._met |= self._made
        # A failed or void step may lack calls for that reason, and says nothing about a misspelt name.
        is_known = bool(self._made) and not is_void and not self._is_unknown
        missing = sorted(set(self._names) - self._met) if self._names and is_known else []
        is_whole = self._is_done and (self._names is None or not self._has_failed)
        return Told(self._is_tried, is_whole, sorted(self._lacking), missing, sorted(self._made))

    def counted(self, uids: Uids, uids_now: Uids, told: Sequence[Told]) -> Collection[int]:
        """Uids of the ranks whose samples are used.

        Args:
            uids: uids of the ranks of the step.
            uids_now: uids of the remaining ranks.
            told: report of each of these.
        """
        if any(one.is_whole for one in told):
            # One rank that has the result decides: a rank that cancelled the call does not know the contributors.
            lacking = {uid for one in told for uid in one.lacking}
            return [uid for uid in uids if uid not in lacking]
        is_tried = any(one.is_tried for one in told)
        return () if is_tried and self._names is not None else uids_now


def check_names(number: int, told: Sequence[Told]) -> None:
    """Refuse names by which no rank has made a call in a step of this number.

    Raises:
        ConfigError: on all ranks, the same.
    """
    missing = sorted(set.intersection(*(set(one.missing) for one in told)))
    if missing:
        made = told[0].made
        raise ConfigError(
            f"used_in names {', '.join(map(repr, missing))}, and no call of step {number} has that name; its calls are "
            f"{', '.join(map(repr, made))}: only collectives of all ranks that survive a loss count"
            f"{hint(missing[0], made)}"
        )


def told_of(rows: Sequence[Sequence[Any]]) -> list[Told]:
    """Parse the reports of one rank, one for each of its finished steps."""
    return [Told(*row) for row in rows]


class Course:
    """One walk through a sampler.

    Attributes:
        name: name of the sampler.
        sampler: the sampler.
        passes: see ``Elastic.steps``.
        names: names of the calls by which samples count as used; None for all calls.
        step: the current step; None between steps.
        uids: uids of the ranks of that step.
        used: uids whose samples of the step are used.
        is_void: a call of the step has failed on this rank because ranks were lost.
        is_left: the program has left its loop.
    """

    def __init__(self, name: Name, sampler: ElasticSampler, passes: int | None, names: list[str] | None) -> None:
        self.name = name
        self.sampler = sampler
        self.passes = passes
        self.names = names
        self.step: Step | None = None
        self.births: Uids = ()
        self.used = Used(names)
        self.is_void = False
        self.is_left = False

    def __repr__(self) -> str:
        return f"{self.sampler!r} (sampler {self.name!r}), passes={self.passes}, used_in={self.names}"

    def begin(self, step: Step, uids: Uids) -> Step:
        """Begin a step."""
        self.step, self.births, self.is_void = step, uids, False
        self.used.begin()
        return step

    def note(self, calls: Dispatcher, *, is_innermost: bool) -> None:
        """Add the calls since the last boundary, which are over."""
        self.used.note(calls, self.births)
        if is_innermost:
            self.is_void = self.is_void or calls.log.is_void(self.names)

    def is_found_void(self) -> bool:
        """Whether its step is void, as far as this rank knows."""
        return self.is_void or (self.step is not None and self.step.is_void)

    def end_step(self, uids: Uids, told: Sequence[Told], *, is_void: bool) -> None:
        """Repeat unused samples of the step; ``uids``: the remaining ranks, with their reports.

        Raises:
            ConfigError: see ``check_names``.
        """
        step, self.step, self.is_void = self.step, None, False
        if step is not None:
            if not is_void:
                check_names(step.number, told)
            # All ranks have equal reports and samplers, so all give back the same shares.
            counted = () if is_void else self.used.counted(self.births, uids, told)
            for rank, uid in enumerate(self.births):
                if uid not in counted:
                    self.sampler.give_back(share(step.batch, rank, len(self.births)))
