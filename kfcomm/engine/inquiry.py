"""Inquiry about a collective that waits too long: all other ranks are asked whether they have posted it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from kfcomm.core.cause import Cause, CauseKind
from kfcomm.engine.operation import Operation

if TYPE_CHECKING:
    from kfcomm.engine.control import ControlPlane
    from kfcomm.transports.reactor import Reactor

logger = logging.getLogger("kfcomm")

ANSWER_WITHIN_S = 1.0
"""How long a stall report waits for answers; a rank that has not answered by then is reported as silent."""
GRACE_S = 0.5
"""How long a deadline waits for answers to a question that could not be asked in good time."""
MAX_NAMED = 16


class Inquiry:
    """State of one waiting collective, by its chunks and by the answers of the other ranks."""

    def __init__(self, operation: Operation, rank: int) -> None:
        self._operation = operation
        self._collective = operation.collective
        self._rank = rank
        self._answers: dict[int, tuple[bool, str]] = {}
        self._unanswered: set[int] = set()
        self._asked_s: float | None = None
        self._conclude: Callable[[], None] | None = None

    def ask(self, control: ControlPlane | None, reactor: Reactor, *, report: bool) -> None:
        """Ask every rank whether it has posted the collective; ``report`` logs the answers when they are in."""
        key = self._collective.key
        self._asked_s = reactor.time()
        self._unanswered = set(range(self._collective.group.size)) - {self._collective.group.rank}
        if control is not None:
            control.query([(key.group_id, key.name, self._collective.seq)], -1, self._answered)
        if report:
            reactor.call_later(ANSWER_WITHIN_S, self._report)

    def conclude(self, control: ControlPlane | None, reactor: Reactor, then: Callable[[], None]) -> None:
        """Call ``then``, once: at once if the question had its time, else when it is answered or has had it.

        After a busy loop or with a short timeout, the error would else call ranks silent that were never heard.
        """
        if self._asked_s is None:
            self.ask(control, reactor, report=False)
        had_s = reactor.time() - (self._asked_s or 0.0)
        self._conclude = then
        if had_s >= GRACE_S or not self._unanswered:
            self._concluded()
        else:
            reactor.call_later(GRACE_S - had_s, self._concluded)

    def _concluded(self) -> None:
        then, self._conclude = self._conclude, None
        if then is not None:
            then()

    def timed_out(self) -> Cause:
        """The cause of a timeout, with the ranks that arrived and those that are missing."""
        arrived, missing = self._arrived_and_missing()
        waited_s = self._operation.waited_s()
        group = self._collective.group
        where = f"did not finish on {group.called(group.rank)} within {waited_s:.1f} s"
        message = f"{self._collective.title} {where}: {self._words(arrived, missing)}"
        known = (tuple(map(group.known, ranks)) for ranks in (arrived, missing))
        return Cause(CauseKind.TIMEOUT, self._rank, message, *known)

    def _answered(self, rank: int, posted: list[bool], activity: str) -> None:
        if posted and rank in self._collective.group.index:
            member = self._collective.group.index[rank]
            self._answers[member] = (posted[0], activity)
            self._unanswered.discard(member)
            if not self._unanswered:
                self._concluded()

    def _report(self) -> None:
        operation, collective = self._operation, self._collective
        if operation.is_over:
            return
        arrived, missing = self._arrived_and_missing()
        group = collective.group
        which = f"#{collective.seq}" if group.within is not None else f"#{collective.seq}, group of {group.size}"
        waited_s, words = operation.waited_s(), self._words(arrived, missing)
        logger.warning(
            "%s has waited %.1f s for %s (%s): %s", group.called(group.rank), waited_s, collective.title, which, words
        )

    def _arrived_and_missing(self) -> tuple[list[int], list[int]]:
        here = set(self._collective.arrived_ranks())
        here |= {rank for rank, (posted, _) in self._answers.items() if posted}
        ranks = range(self._collective.group.size)
        return [rank for rank in ranks if rank in here], [rank for rank in ranks if rank not in here]

    def _words(self, arrived: list[int], missing: list[int]) -> str:
        group = self._collective.group
        if not missing:
            silent = [rank for rank in arrived if rank not in self._answers and rank != group.rank]
            tail = f"; no answer from {group.all_called(silent)} (stopped or unreachable)" if silent else ""
            behind = [rank for rank in self._operation.behind() if rank != group.rank]
            awaited = f", it waits for {group.all_called(behind)}" if behind else ""
            return f"all ranks have posted it, the data is still under way{awaited}{tail}"
        last = "; ".join(f"{group.called(rank)} {self._activity(rank)}" for rank in missing[:MAX_NAMED])
        return f"arrived {group.all_called(arrived)}, missing {group.all_called(missing)}; {last}"

    def _activity(self, rank: int) -> str:
        answer = self._answers.get(rank)
        if not answer:
            return "does not answer (stopped or unreachable)"
        return answer[1] if answer[1].startswith("has ") else f"last {answer[1]}"
