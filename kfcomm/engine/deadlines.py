"""Deadlines of the operations in flight: one timer checks all of them, and asks other ranks before a timeout."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, cast

from kfcomm.core.cause import Cause, CauseKind
from kfcomm.core.collective import Collective
from kfcomm.core.deadlines import NEVER, Due, first_due_s, look
from kfcomm.core.links import announce
from kfcomm.engine.operation import Operation
from kfcomm.transports.reactor import Timer

if TYPE_CHECKING:
    from collections.abc import Collection

    from kfcomm.engine.engine import Engine

logger = logging.getLogger("kfcomm")

TICK_S = 0.02
"""Shortest time between two checks of the operations in flight."""
TICK_LOOKS = 50
"""The same, in times of what the last look took: of very many in flight, looking takes 2 % of the time at most."""
REPORTS_AT_ONCE = 16
"""Of those that have waited too long, as many are asked about and reported one by one; of the rest, their number."""
MAX_TIMEOUTS = 64
"""Different timeouts for which the first due time is cached."""


class Deadlines:
    """Deadlines of all operations of an engine.

    A collective that has been quiet for a moment is announced to those it waits for; one whose deadline has passed is
    aborted. ``inquiries`` are about operations that wait long; each is removed at the end of its operation.
    """

    def __init__(self, engine: Engine, stall_after_s: float) -> None:
        self.stall_after_s = stall_after_s
        self.next_s = NEVER  # of the next tick; an operation due earlier has to ``hurry``
        self._engine = engine
        self._reactor = engine.reactor
        self.inquiries: dict[Operation, Inquiry] = {}
        self._timer: Timer | None = None
        self._first_s: dict[float, float] = {}

    def begin(self, operation: Operation, timeout_s: float) -> None:
        """Watch an operation, which begins to wait."""
        operation.timeout_s = timeout_s
        first_s = self._first_s.get(timeout_s)
        if first_s is None:
            if len(self._first_s) >= MAX_TIMEOUTS:
                self._first_s.clear()
            first_s = self._first_s[timeout_s] = first_due_s(timeout_s, self.stall_after_s)
        operation.due_s = due_s = operation.posted_s + first_s
        if due_s < self.next_s:
            self.hurry(due_s)

    def hurry(self, due_s: float) -> None:
        """Move the next tick forward to this time."""
        self.close()
        self.next_s = due_s
        self._timer = self._reactor.call_at(due_s, self._tick)

    def close(self) -> None:
        """Stop checking."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.next_s = NEVER

    def _tick(self) -> None:
        begun_s = self._reactor.time()
        self._engine.enter_slots()  # what is launched on devices enters when it is late
        in_flight = cast("Collection[Operation]", list(self._engine.router.live.values()))
        due, next_s = look(in_flight, begun_s, self.stall_after_s)
        self._timer, self.next_s = None, NEVER
        if next_s != NEVER:
            now_s = self._reactor.time()
            self.hurry(max(next_s, now_s + max(TICK_S, TICK_LOOKS * (now_s - begun_s))))
        num_stalled = 0
        for operation, why in due:
            if operation.failed:
                continue
            if why is Due.STALLED:
                num_stalled += 1
                if num_stalled > REPORTS_AT_ONCE:
                    continue
            if why is Due.QUIET:
                self._announce(operation.collective)
            elif why is Due.EXPIRED:
                inquiry = self._inquiry(operation)
                inquiry.conclude(partial(self._expired, operation, inquiry))
            else:
                self._inquiry(operation).ask(report=why is Due.STALLED)
        if num_stalled > REPORTS_AT_ONCE:
            more = num_stalled - REPORTS_AT_ONCE
            rank = self._engine.rank
            logger.warning("rank %d has waited as long for %d more than those that are reported", rank, more)

    def _announce(self, collective: Collective) -> None:
        """Announce a waiting collective to those it waits for: ranks that disagree may have no chunk that shows it."""
        links, lost = self._engine.links, self._engine.router.lost
        for to in collective.unheard():
            peer = collective.group.members[to]
            if peer not in lost:
                sender = links.to(peer)
                for header in announce(sender.state, collective):
                    sender.send(header)
        links.flush_soon()

    def _expired(self, operation: Operation, inquiry: Inquiry) -> None:
        if not operation.is_over:
            self._engine.abort(operation.collective, inquiry.timed_out())

    def _inquiry(self, operation: Operation) -> Inquiry:
        inquiry = self.inquiries.get(operation)
        if inquiry is None:
            inquiry = self.inquiries[operation] = Inquiry(operation)
        return inquiry


ANSWER_WITHIN_S = 1.0
"""How long a stall report waits for answers; a rank that has not answered by then is reported as silent."""
GRACE_S = 0.5
"""How long a deadline waits for answers to a question that could not be asked in good time."""
MAX_NAMED = 16


class Inquiry:
    """State of one waiting collective, by its chunks and by the answers of the other ranks."""

    def __init__(self, operation: Operation) -> None:
        self._operation = operation
        self._collective = operation.collective
        self._engine = operation.engine
        self._answers: dict[int, tuple[bool, str]] = {}
        self._unanswered: set[int] = set()
        self._asked_s: float | None = None
        self._conclude: Callable[[], None] | None = None

    def ask(self, *, report: bool) -> None:
        """Ask every rank whether it has posted the collective; ``report`` logs the answers when they are in."""
        key, control, reactor = self._collective.key, self._engine.control, self._engine.reactor
        self._asked_s = reactor.time()
        self._unanswered = set(range(self._collective.group.size)) - {self._collective.group.rank}
        if control is not None:
            control.query([(key.group_id, key.name, self._collective.seq)], -1, self._answered)
        if report:
            reactor.call_later(ANSWER_WITHIN_S, self._report)

    def conclude(self, then: Callable[[], None]) -> None:
        """Call ``then``, once: at once if the question had its time, else when it is answered or has had it."""
        reactor = self._engine.reactor
        if self._asked_s is None:
            self.ask(report=False)
        had_s = reactor.time() - (self._asked_s or 0.0)
        self._conclude = then
        if had_s >= GRACE_S or not self._unanswered:
            self._concluded()
        else:  # after a busy loop, or with a short timeout, answers that have come were not heard yet
            reactor.call_later(GRACE_S - had_s, self._concluded)

    def _concluded(self) -> None:
        then, self._conclude = self._conclude, None
        if then is not None:
            then()

    def timed_out(self) -> Cause:
        """The cause of a timeout, with the ranks that arrived and those that are missing."""
        arrived, missing = self._arrived_and_missing()
        waited_s = self._engine.reactor.time() - self._operation.posted_s
        group = self._collective.group
        where = f"did not finish on {group.called(group.rank)} within {waited_s:.1f} s"
        message = f"{self._collective.title} {where}: {self._words(arrived, missing)}"
        known = (tuple(map(group.known, ranks)) for ranks in (arrived, missing))
        return Cause(CauseKind.TIMEOUT, self._engine.rank, message, *known)

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
        waited_s, words = self._engine.reactor.time() - operation.posted_s, self._words(arrived, missing)
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
            executor = self._operation.executor
            behind = [] if executor is None else [rank for rank in executor.behind() if rank != group.rank]
            awaited = f", it waits for {group.all_called(behind)}" if behind else ""
            return f"all ranks have posted it, the data is still under way{awaited}{tail}"
        last = "; ".join(f"{group.called(rank)} {self._activity(rank)}" for rank in missing[:MAX_NAMED])
        return f"arrived {group.all_called(arrived)}, missing {group.all_called(missing)}; {last}"

    def _activity(self, rank: int) -> str:
        answer = self._answers.get(rank)
        if not answer:
            return "does not answer (stopped or unreachable)"
        return answer[1] if answer[1].startswith("has ") else f"last {answer[1]}"
