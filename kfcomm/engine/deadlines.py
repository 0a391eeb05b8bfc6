"""Deadlines of the operations in flight: one timer checks all of them, and asks other ranks before a timeout."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING

from kfcomm.core.cause import Cause
from kfcomm.core.collective import Collective
from kfcomm.core.deadlines import NEVER, Due, first_due_s, look
from kfcomm.engine.inquiry import Inquiry
from kfcomm.engine.operation import Operation
from kfcomm.transports.reactor import Reactor, Timer

if TYPE_CHECKING:
    from kfcomm.engine.control import ControlPlane
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
    """Deadlines of all operations in flight.

    Args:
        rank: world rank, for messages.
        reactor: whose clock counts.
        stall_after_s: after how long a wait is reported.
        in_flight: what is posted and not over.
        announce: called for a collective that has been quiet for a moment.
        abort: called for one whose deadline has passed.

    Attributes:
        inquiries: about what waits long; to ``end`` with it.
        next_s: when the tick comes; what is due earlier has to ``hurry``.
    """

    def __init__(
        self,
        rank: int,
        reactor: Reactor,
        stall_after_s: float,
        *,
        in_flight: Callable[[], Iterable[Operation]],
        announce: Callable[[Collective], None],
        abort: Callable[[Collective, Cause], None],
    ) -> None:
        self.control: ControlPlane | None = None
        self.stall_after_s = stall_after_s
        self.next_s = NEVER
        self._rank = rank
        self._reactor = reactor
        self._in_flight = in_flight
        self._announce = announce
        self._abort = abort
        self.inquiries: dict[Operation, Inquiry] = {}
        self._timer: Timer | None = None
        self._first_s: dict[float, float] = {}

    def begin(self, operation: Operation, timeout_s: float) -> None:
        """An operation begins to wait."""
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
        """Something is due before the next tick."""
        self.close()
        self.next_s = due_s
        self._timer = self._reactor.call_at(due_s, self._tick)

    def end(self, operation: Operation) -> None:
        """It waits no longer."""
        self.inquiries.pop(operation, None)

    def close(self) -> None:
        """Look at nothing any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.next_s = NEVER

    def _tick(self) -> None:
        begun_s = self._reactor.time()
        due, next_s = look(self._in_flight(), begun_s, self.stall_after_s)
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
                inquiry.conclude(self.control, self._reactor, partial(self._expired, operation, inquiry))
            else:
                self._inquiry(operation).ask(self.control, self._reactor, report=why is Due.STALLED)
        if num_stalled > REPORTS_AT_ONCE:
            more = num_stalled - REPORTS_AT_ONCE
            logger.warning("rank %d has waited as long for %d more than those that are reported", self._rank, more)

    def _expired(self, operation: Operation, inquiry: Inquiry) -> None:
        if not operation.is_over:
            self._abort(operation.collective, inquiry.timed_out())

    def _inquiry(self, operation: Operation) -> Inquiry:
        inquiry = self.inquiries.get(operation)
        if inquiry is None:
            inquiry = self.inquiries[operation] = Inquiry(operation, self._rank)
        return inquiry
