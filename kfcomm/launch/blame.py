"""Which rank failed first, from the ends of processes and what the ranks said before.

Ends alone mislead: those who fail because of another often end before it. Who says that another is to blame is a
*victim*, and passed over while there is somebody else, who is waited for: a moment if nobody is known (a process that
was killed says nothing, and its end is seen as soon), longer if a rank has said that it leaves with an error of its
own. If nobody comes, the first victim stands.

Pure: the time is an argument.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kfcomm.rendezvous.exit_report import ExitReport
from kfcomm.rendezvous.keyvalue import Exit, Why

CAUSE_WITHIN_S = 2.0
"""How long the cause is waited for when only victims have ended."""
LEAVING_WITHIN_S = 6.0
"""The same when a rank has said that it leaves: closing may take a rank 5 s."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A rank that failed.

    Attributes:
        rank: in the world.
        code: its return code (negative: minus a signal); if it has not ended, the one that its error leads to.
        at_s: when it began to leave, or ended.
        why: it ended.
        summary: its error in a line, if it told one.
    """

    rank: int
    code: int
    at_s: float
    why: Why = Why.ITSELF
    summary: str = ""


@dataclass(slots=True)
class Blame:
    """What is known of a job's ranks. ``size`` is their number."""

    size: int
    _said: dict[int, ExitReport] = field(default_factory=dict)
    _ended: set[int] = field(default_factory=set)
    _failed: list[Failure] = field(default_factory=list)
    _since_s: float = 0.0

    def heard(self, farewell: ExitReport) -> None:
        """A rank said something: the last counts."""
        self._said[farewell.rank] = farewell

    def said(self, rank: int) -> ExitReport | None:
        """What a rank said last."""
        return self._said.get(rank)

    def ended(self, end: Exit, now_s: float) -> None:
        """A rank has ended; what one of another host has said is in ``end``."""
        self._ended.add(end.rank)
        if end.code == 0:
            return
        if not self._failed:
            self._since_s = now_s
        said = self._said.get(end.rank)
        if said is None or said.at_s is None:
            self._failed.append(Failure(end.rank, end.code, now_s, Why(end.why)))
        else:
            self._failed.append(Failure(end.rank, end.code, min(said.at_s, now_s), Why(end.why), said.summary))

    def verdict(self, now_s: float) -> Failure | float | None:
        """Who failed first; or the time when to ask again, unless something happens before; None if nobody has."""
        if not self._failed:
            return None
        first = min((one for one in self._failed if one.why is not Why.ELSEWHERE), key=_at_s, default=None)
        leaving = [one for one in self._leaving() if first is None or one.at_s < first.at_s]
        leavers = bool(leaving) or (first is None and self._has_leavers())
        if first is not None and not leaving:
            return first
        due_s = self._since_s + (LEAVING_WITHIN_S if leavers else CAUSE_WITHIN_S)
        if len(self._ended) < self.size and now_s < due_s:
            return due_s
        return min(leaving or ([first] if first is not None else self._failed), key=_at_s)

    def _leaving(self) -> list[Failure]:
        """Ranks that have not ended, and said that they leave with an error of their own."""
        return [
            Failure(said.rank, said.code, said.at_s, summary=said.summary)
            for said in self._said.values()
            if said.at_s is not None and said.code != 0 and not said.is_elsewhere and said.rank not in self._ended
        ]

    def _has_leavers(self) -> bool:
        return any(
            said.at_s is not None and not said.is_elsewhere and said.rank not in self._ended
            for said in self._said.values()
        )


def _at_s(failure: Failure) -> float:
    return failure.at_s
