"""Calls of several steps: each step is a collective, and begins when the one before it is over.

The first step has the name of the call. Each later step has a key of its own, whose n-th use always belongs to the n-th
call: a step that cannot be posted still takes its number, so that the steps of one call meet.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from kfcomm.collectives.calling import Later, as_config_error
from kfcomm.collectives.group import UNNAMED
from kfcomm.collectives.handle import Handle
from kfcomm.core.collective import name_of, shown
from kfcomm.errors import CollectiveError, EpochChanged, InternalError, PeerLost

if TYPE_CHECKING:
    from kfcomm.collectives.calling import Posting
    from kfcomm.collectives.group import Turn
    from kfcomm.collectives.plans import Plans
    from kfcomm.collectives.specs import CallOptions
    from kfcomm.collectives.verbs import Verbs
    from kfcomm.transports.reactor import Reactor


class Steps(Handle[Any]):
    """A call of several steps; cancelling it cancels the step under way."""

    step: Handle[Any] | None = None
    key = ""
    """Key of the call, for errors without a key."""

    def cancel(self, msg: Any | None = None) -> bool:
        """End the call everywhere; return False if it is complete already."""
        if not super().cancel(msg):
            return False
        if self.step is not None:
            self.step.cancel()
        return True

    def fail(self, error: BaseException) -> None:
        """End with this error, or as cancelled by it."""
        if isinstance(error, asyncio.CancelledError):
            self.cancel()
        elif not self.done():
            if isinstance(error, CollectiveError) and not error.key:
                error.key = name_of(self.key)
            self.set_exception(error)

    def end_as(self, step: Handle[Any], reactor: Reactor, outcome: Callable[[Any], Any] | None = None) -> Self:
        """End the call as its last step does, with ``outcome`` of its result if that is given."""

        def done(_: asyncio.Future[Any]) -> None:
            if step.cancelled():
                self.cancel()
            elif (error := step.exception()) is not None:
                self.fail(error)
            elif not self.done():
                try:
                    self.set_result(step.result() if outcome is None else outcome(step.result()))
                except Exception as wrong:  # noqa: BLE001  of the peer's data: it belongs to the caller
                    self.fail(wrong)

        self.step = step
        step.when_done(reactor, done)
        return self


class LaterSteps:
    """The steps of one call after its first, on this rank.

    Args:
        verbs: of the group.
        name: of the call.
        options: of the call; its timeout is for all steps together.
        keys: of the later steps, in their order.
    """

    def __init__(self, verbs: Verbs, name: str | None, options: CallOptions, keys: Sequence[str]) -> None:
        self._verbs = verbs
        self._group = group = verbs._group
        self._name = name
        self._options = options
        self._until_s = group.until_s(options.timeout)
        self._later: deque[tuple[str, Turn]] = deque((key, group.turns.next(key)) for key in keys)
        self._plans: list[Plans] = []
        group.in_order(lambda: self._plans.append(group.plans_along(options.strategy, name or UNNAMED)))
        self._first: Handle[Any] | None = None
        self.whole = Steps(loop=group.engine.loop)
        self.whole.key = name or UNNAMED

    def follow(self, step: Handle[Any], then: Callable[[Any, str], None], also: Handle[Any] | None = None) -> None:
        """Begin the next step in its turn, when ``step`` and ``also`` are over: ``then`` posts it under its key.

        It is posted in the order of the calls, on the graphs of the first step, which is ``step`` of the first
        ``follow``.
        """
        group, reactor = self._group, self._group.engine.reactor
        first = self._first = self._first or step
        self.whole.step = step
        key, turn = self._later.popleft()

        def proceed() -> None:
            error = asyncio.CancelledError() if step.cancelled() or self.whole.cancelled() else step.exception()
            if error is None and also is not None:
                error = also.exception()
            if error is None:
                try:
                    self._verbs._check_open()
                    then(step.result(), key)
                    return
                except Exception as wrong:  # noqa: BLE001  it belongs to the caller
                    error = as_config_error(wrong)
            self._abort(first.seq, key, error)

        def over(_: asyncio.Future[Any]) -> None:
            if also is not None and not also.done():
                also.when_done(reactor, over)
            elif first.seq >= 0:
                turn.ready(proceed)
            else:  # cancelled while it waited for a outcome: its number is not known before that
                group.in_order(lambda: turn.ready(proceed))

        step.when_done(reactor, over)

    @property
    def seq(self) -> int:
        """Number of the call among those of its name; known once its first step is over."""
        return -1 if self._first is None else self._first.seq

    def skip(self) -> None:
        """Leave the last step out, on all ranks."""
        key, turn = self._later.pop()
        turn.ready(partial(self._group.engine.leave_out, self._group.view, key, self.seq + 1))

    def post(self, posting: Posting, key: str) -> Handle[Any]:
        """Begin the next step now, with the time that is left."""
        if self._first is None:
            raise InternalError(f"a later step of {shown(self.whole.key)} was posted before its first")
        later = Later(key, self._first.seq, self._plans[0])
        left = self._options.but(timeout=self._group.left_s(self._until_s))
        return self._verbs._begin(self._name, posting, left, later=later)

    def _abort(self, seq: int, key: str, error: BaseException) -> None:
        """Fail the step whose turn it is, and those after it, also on the other ranks."""
        self._refuse(seq, key, error)
        for other, turn in self._later:
            turn.ready(partial(self._refuse, seq, other, error))
        self.whole.fail(error)

    def _refuse(self, seq: int, key: str, error: BaseException) -> None:
        group = self._group
        if isinstance(error, (PeerLost, EpochChanged)):  # which the other ranks hear of by themselves
            group.engine.leave_out(group.view, key, seq + 1)
        else:
            group.refuse_now(key, error, seq=seq)
