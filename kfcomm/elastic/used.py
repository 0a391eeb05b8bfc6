"""Samples of a step that count as used: those in the calls of the step, or in the calls of some names.

Each rank reports its outcome of these calls, and all ranks decide from all reports alike: a call may be done on one
rank and have failed on another that cancelled it or timed out, so a rank must not decide from its own outcome.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from kfcomm.common.spelling import hint
from kfcomm.elastic.entry import Births
from kfcomm.elastic.ledger import Ledger
from kfcomm.errors import ConfigError


class Told(NamedTuple):
    """Report of a rank about its step, as msgpack can carry it.

    Attributes:
        is_tried: it has made a call that counts.
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
    """Of the steps of one walk, on one rank.

    Args:
        names: of the calls by which samples count as used; None for all.
    """

    def __init__(self, names: Collection[str] | None) -> None:
        self._names = names
        self._met: set[str] = set()
        self.begin()

    def begin(self) -> None:
        """A step begins."""
        self._is_tried = self._is_done = self._has_failed = self._is_unknown = False
        self._lacking: set[int] = set()
        self._made: set[str] = set()

    def note(self, ledger: Ledger, births: Births) -> None:
        """Add the outcome of the calls since the last boundary; ``births``: uids of the ranks of the step."""
        outcome = ledger.outcome(self._names, births)
        self._is_tried |= outcome.is_tried
        self._is_done |= outcome.is_done
        self._has_failed |= outcome.has_failed
        self._lacking |= outcome.lacking
        self._made.update(ledger.made())
        self._is_unknown |= ledger.has_failed()

    def told(self, *, is_void: bool) -> Told:
        """Report of this rank, when the step is over."""
        self._met |= self._made
        is_known = bool(self._made) and not is_void and not self._is_unknown
        missing = sorted(set(self._names) - self._met) if self._names and is_known else []
        is_whole = self._is_done and (self._names is None or not self._has_failed)
        return Told(self._is_tried, is_whole, sorted(self._lacking), missing, sorted(self._made))

    def counted(self, births: Births, births_now: Births, told: Sequence[Told]) -> Collection[int]:
        """Uids of the ranks whose samples are used.

        Args:
            births: uids of the ranks of the step.
            births_now: uids of the remaining ranks.
            told: report of each of these.
        """
        if any(one.is_whole for one in told):
            lacking = {birth for one in told for birth in one.lacking}
            return [birth for birth in births if birth not in lacking]
        is_tried = any(one.is_tried for one in told)
        return () if is_tried and self._names is not None else births_now


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
