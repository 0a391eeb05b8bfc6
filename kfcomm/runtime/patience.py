"""How long operations wait: deadlines, and the questions that are asked before one passes."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from kfcomm.core.cause import Cause
from kfcomm.core.collective import Collective
from kfcomm.core.watch import Due, Watch
from kfcomm.runtime.inquiry import Inquiry
from kfcomm.runtime.operation import Operation

if TYPE_CHECKING:
    from kfcomm.control import ControlPlane


class Patience:
    """Watches operations in flight, by one timer.

    Args:
        rank: world rank, for messages.
        loop: whose clock counts.
        stall_after_s: after how long a wait is reported.
        announce: called for a collective that has been quiet for a moment.
        abort: called for one whose deadline has passed.
    """

    def __init__(
        self,
        rank: int,
        loop: asyncio.AbstractEventLoop,
        stall_after_s: float,
        *,
        announce: Callable[[Collective], None],
        abort: Callable[[Collective, Cause], None],
    ) -> None:
        self.control: ControlPlane | None = None
        self.stall_after_s = stall_after_s
        self._rank = rank
        self._loop = loop
        self._announce = announce
        self._abort = abort
        self._watch: Watch[Operation] = Watch()
        self._inquiries: dict[Operation, Inquiry] = {}
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, operation: Operation, timeout_s: float | None) -> None:
        """An operation begins to wait; without a timeout it is only announced."""
        stall_after_s = self.stall_after_s
        if timeout_s is None:
            timeout_s = stall_after_s = math.inf
        if self._watch.add(operation, self._loop.time(), timeout_s, stall_after_s):
            self._set_timer()

    def end(self, operation: Operation) -> None:
        """It waits no longer."""
        self._watch.drop(operation)
        if self._inquiries:
            self._inquiries.pop(operation, None)

    def close(self) -> None:
        """Watch nothing any more."""
        if self._timer is not None:
            self._timer.cancel()

    def _set_timer(self) -> None:
        self.close()
        self._timer = None
        if self._watch.next_s != float("inf"):
            self._timer = self._loop.call_at(self._watch.next_s, self._tick)

    def _tick(self) -> None:
        for operation, due in self._watch.look(self._loop.time()):
            if operation.failed:
                continue
            if due is Due.QUIET:
                self._announce(operation)
            elif due is Due.EXPIRED:
                inquiry = self._inquiry(operation)
                inquiry.conclude(self.control, self._loop, partial(self._expired, operation, inquiry))
            else:
                self._inquiry(operation).ask(self.control, self._loop, report=due is Due.STALLED)
        self._set_timer()

    def _expired(self, operation: Operation, inquiry: Inquiry) -> None:
        if not operation.failed and not operation.finished:
            self._abort(operation, inquiry.timed_out())

    def _inquiry(self, operation: Operation) -> Inquiry:
        inquiry = self._inquiries.get(operation)
        if inquiry is None:
            inquiry = self._inquiries[operation] = Inquiry(operation, self._rank)
        return inquiry
