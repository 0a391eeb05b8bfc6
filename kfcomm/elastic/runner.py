"""Runner of a step's calls in the communicator of the epoch: first posts, repeats after a loss, results from peers.

What is posted here is posted again by `Recovery` after each change of the epoch. `call_log` has the table of what
becomes of a call by each event.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, TypeAlias

import numpy as np

from kfcomm.collectives.handle import Handle, looked_at
from kfcomm.core.collective import OWN_NAMES
from kfcomm.elastic.call_log import CallLog, CallOutcome, Entry, Standing, Uids
from kfcomm.elastic.results import GIVEN_AS_ARRAYS, ResultTransfer, frozen, is_bare, name_for, received, written
from kfcomm.elastic.state import Array
from kfcomm.errors import CollectiveAborted, CollectiveError, CollectiveTimeout, EpochChanged, KfcommError, PeerLost

ENDED_BY_OTHERS = (CollectiveError, CollectiveAborted)
ABORTED_S = 0.5
"""Wait for the loss of a rank after an aborted call: a rank that fails aborts its calls first, and leaves then."""
MAX_SCRATCH = 8
"""Buffers of one shape and dtype that are cached for results in place."""


Judge: TypeAlias = Callable[[Array], tuple[Any, Callable[[], Awaitable[None]] | None]]


class CallRunner:
    """Execution of one rank's calls in the communicator of the epoch. Runs in the engine's thread."""

    def __init__(self, log: CallLog, start_change: Callable[[], None], *, finishes: bool) -> None:
        self.log = log
        self.transfer = ResultTransfer(log, self.look_if_quiet)
        self._start_change = start_change  # starts a change of the epoch, after which calls are posted again
        # Repeat on the remaining ranks what no rank has finished when one is lost; else it fails on all
        self._finishes = finishes
        self._quiet: asyncio.Future[None] | None = None
        self._held: list[Entry] = []  # over, until the ranks are known to be at the same position
        self._scratch: dict[tuple[tuple[int, ...], str], list[Array]] = {}
        # Reads the sums of an announced boundary: its caller's result, and None or a function that tells what is wrong
        self.judge: Judge = lambda _: (None, None)
        self.asking: asyncio.Task[None] | None = None

    # ---------------------------------------------------------------- cancellations and timeouts

    def withdraw(self, entry: Entry) -> bool:
        """Cancel a call for its caller, on all ranks where it is not over; False if it is over here."""
        if entry in self._held:  # over among the ranks; its caller does not wait for the boundary
            return True
        inner = entry.inner
        if isinstance(inner, Handle) and inner.done() and not inner.cancelled() and inner.exception() is None:
            self._ended(entry, inner)  # its callback is due, and would come too late
            if entry.is_left:
                return False
        entry.why = entry.why or f"{entry.title} was cancelled on rank {self.log.shown_rank}"
        # During a change the ranks may have exchanged its standing already: then it keeps that until the change is
        # over, and this rank refuses its part afterwards (`_refuse_part`).
        if not self.log.is_changing or entry.inner is not None:
            self.tell_holders(entry, asyncio.CancelledError())
            entry.standing = Standing.FAILED
            if isinstance(entry.inner, Handle):
                entry.inner.cancel()
        return True

    def tell_holders(self, entry: Entry, error: BaseException) -> None:
        """Tell the ranks that have their result, and wait for the others in a barrier, that this rank has failed."""
        if entry.call.kind.is_own and entry.standing is Standing.POSTED and not entry.has_told:
            entry.has_told = True
            with contextlib.suppress(KfcommError):
                self.log.comm.refuse(name_for("all", entry), error)

    def _refuse_part(self, entry: Entry, root: Any) -> None:
        """Post a call that its caller cancelled during a change: it keeps its place, and fails everywhere."""
        self.tell_holders(entry, asyncio.CancelledError())
        entry.standing = Standing.FAILED
        if entry.refusal is not None:
            error, steps = entry.refusal
            self.log.comm.refuse(entry.call.get("name"), error, steps=steps)
            return
        log = self.log
        handle = entry.call.begin(log.comm, root, None, has_lost=log.comm.births != log.shown)
        handle.cancel()
        handle.when_done(self.log.reactor, looked_at)

    def wait_for_change(self, entry: Entry) -> None:
        """Let a call wait for a change of the epoch, with its own timeout."""
        if entry.timer is None and entry.deadline_s < math.inf:
            entry.timer = self.log.reactor.call_at(entry.deadline_s, self._late, entry)

    def _late(self, entry: Entry) -> None:
        entry.timer = None
        if entry.outer is not None and not entry.is_left and entry.inner is None:
            text = f"{entry.title} timed out while the ranks agreed on the survivors of a loss"
            entry.why = f"{text}, on rank {self.log.shown_rank}"
            entry.outer.set_exception(CollectiveTimeout(text, key=entry.name))

    # ---------------------------------------------------------------- calls

    def post(self, entry: Entry, *, is_first: bool = False) -> None:
        """Execute a call in this epoch, as far as what other ranks have of it allows."""
        log, outcome = self.log, self.log.outcome_of(entry)
        log.is_unposted = log.is_unposted and entry is not log.pending
        entry.stop_timer()
        entry.has_told = False
        # An outcome of all ranks comes before anything that this rank decides itself.
        if outcome is not None:
            self._follow_others(entry, outcome)
        elif log.comm.births != log.shown and not (entry.call.kind.can_shrink and (self._finishes or entry.is_own)):
            self._void(entry, "it cannot be done by fewer ranks" if self._finishes else "no rank had finished it")
        else:
            entry.standing = Standing.POSTED
            root = log.root_of(entry)
            if root is not None and entry.is_left:
                self._refuse_part(entry, root)
            elif root is not None:
                # The first post leaves the timeout to the verb, which checks it; repeats get what is left of it.
                left_s = None if is_first else entry.seconds_left(log.reactor.time())
                has_lost = log.comm.births != log.shown
                scratch = self._scratch_for(entry)
                self._follow(entry, entry.call.begin(log.comm, root, scratch, left_s, has_lost=has_lost))

    def _follow_others(self, entry: Entry, outcome: CallOutcome) -> None:
        """End a call as it has ended on other ranks."""
        if outcome.giver < 0:
            if self.log.root_of(entry) is None:
                return  # it has failed for that, on all ranks
            # With the call of an earlier step other ranks have begun the next one: that step cannot be void.
            if self._finishes or entry.step < self.log.latest:
                entry.refuse(CollectiveAborted(outcome.why, key=entry.name))
            else:
                self._void(entry, "it had failed on another rank")
        elif entry.refusal is not None:
            entry.standing = Standing.FAILED
            self.transfer.take_part(entry, outcome)
        elif entry.is_sent:
            left_s = None if entry.is_left else entry.seconds_left(self.log.reactor.time())
            self._follow(entry, self.transfer.begin(entry, outcome, left_s), outcome)
        else:
            self._finish(entry, entry.result, outcome.contributors)

    def _void(self, entry: Entry, why: str) -> None:
        """Make a call fail, as on all surviving ranks."""
        epoch, members = self.log.comm.epoch, self.log.members
        text = (
            f"{entry.call.verb} {entry.title} failed: epoch {epoch} has begun with ranks {list(members)} "
            f"during the step, and {why}"
        )
        entry.is_void = True
        entry.refuse(EpochChanged(text, key=entry.name, epoch=epoch, members=members))
        entry.heard()  # a caller that has seen one such error does not wait for its other calls

    def _scratch_for(self, entry: Entry) -> Array | None:
        """Buffer for a result that the caller wants in place: the input must stay intact for a repeat."""
        x, out = entry.call.get("x"), entry.call.get("out")
        if out is None or type(x) is not np.ndarray or entry.call.verb not in GIVEN_AS_ARRAYS:
            return None
        if entry.scratch is None:
            free = self._scratch.get((x.shape, x.dtype.str))
            entry.scratch = free.pop() if free else np.empty(x.shape, x.dtype)
        return entry.scratch

    # ---------------------------------------------------------------- ends

    def _follow(self, entry: Entry, handle: Handle[Any], giving: CallOutcome | None = None) -> None:
        """Follow the collective that executes a call, or brings its result, to its end."""
        entry.inner, entry.giving = handle, giving
        handle.when_done(self.log.reactor, lambda done: self._ended(entry, done))

    def _ended(self, entry: Entry, handle: Handle[Any]) -> None:
        # The call was posted again in the next epoch: this is the end of its old collective.
        if entry.inner is not handle:
            return
        log, entry.inner = self.log, None
        error = asyncio.CancelledError() if handle.cancelled() else handle.exception()
        if entry.standing is Standing.FAILED:
            pass  # its caller has heard so
        elif error is not None:
            self.failed(entry, error)
        elif entry.giving is not None:
            self._finish(entry, received(entry.call, handle.result()), entry.giving.contributors)
        # No other rank can replace a result of its own, so the call is over only when all ranks have
        # theirs, which this barrier finds out.
        elif entry.call.kind.is_own and entry.standing is Standing.POSTED:
            entry.result, entry.standing = handle.result(), Standing.HELD
            left_s = entry.seconds_left(log.reactor.time())
            self._follow(entry, log.comm.barrier(name_for("all", entry), timeout=left_s))
        else:
            result = entry.result if entry.standing is Standing.HELD else handle.result()
            self._finish(entry, result, log.comm.births)
        self.look_if_quiet()

    def failed(self, entry: Entry, error: BaseException) -> None:
        """End a call by an error, or wait for the change of the epoch if the error is due to a loss."""
        # A failing rank aborts its calls and closes its links, perhaps before its loss is reported here. If another
        # rank has aborted this call, the ranks find out when they compare their calls.
        is_by_others = type(error) in ENDED_BY_OTHERS
        if isinstance(error, (PeerLost, EpochChanged)) or (is_by_others and self.log.has_lost):
            self.wait_for_change(entry)
            self._start_change()
            return
        error = self._named(error, entry)
        self.tell_holders(entry, error)
        if isinstance(error, asyncio.CancelledError):
            entry.standing = Standing.FAILED
            if entry.outer is not None:
                entry.outer.cancel()
        # It may be the first sign of a dying rank, whose loss is reported a moment later.
        elif is_by_others:
            self.log.reactor.call_later(ABORTED_S, self._ended_by_others, entry, error)
        else:
            entry.refuse(error)

    def _named(self, error: BaseException, entry: Entry) -> BaseException:
        """Error with the caller's name of the call, in the place of the name of a hidden part."""
        log, note = self.log, ""
        if log.comm.births != log.shown:
            note = f" (by the numbers of epoch {log.comm.epoch}: these are ranks {list(log.members)} of the step)"
        is_hidden = isinstance(error, CollectiveError) and error.key.startswith(OWN_NAMES)
        if not isinstance(error, CollectiveError) or entry.is_own or not (is_hidden or note):
            return error
        text = str(error).replace(repr(error.key), entry.title) + note
        if isinstance(error, CollectiveTimeout):
            return CollectiveTimeout(text, key=entry.name, arrived=error.arrived, missing=error.missing)
        return type(error)(text, key=entry.name)

    def _ended_by_others(self, entry: Entry, error: BaseException) -> None:
        """Fail, unless the rank that aborted the call or closed a link is lost by now: then repeat without it."""
        if entry.standing in (Standing.POSTED, Standing.HELD) and entry.inner is None and not self.log.is_changing:
            if self.log.has_lost:
                self.wait_for_change(entry)
                self._start_change()
            else:
                entry.refuse(error)

    def _finish(self, entry: Entry, result: Any, contributors: Uids) -> None:
        entry.standing, entry.contributors = Standing.DONE, contributors
        entry.result = result
        if entry is self.log.pending:
            self._all_have_begun(entry)
        elif self.log.pending is not None and not entry.is_own:
            self._held.append(entry)
        else:
            self._deliver(entry)

    def _all_have_begun(self, boundary: Entry) -> None:
        """Compare the positions of all ranks: if they differ, all calls of the step end by an error."""
        self.release(self.log.all_have_begun(boundary))
        self.transfer.cancel_before(boundary.step)
        sums, ask = self.judge(boundary.result)
        if ask is None:
            self._confirm(boundary, sums)
        else:
            asking = self._ask(boundary, sums, ask)
            self.asking = self.log.comm._session.engine.loop.create_task(asking, name="kfcomm compares positions")

    async def _ask(self, boundary: Entry, sums: Any, ask: Callable[[], Awaitable[None]]) -> None:
        try:
            await ask()
        except KfcommError as error:
            self.end_all(error)
        else:
            self._confirm(boundary, sums)

    def _confirm(self, boundary: Entry, sums: Any) -> None:
        """Deliver the results that have waited for the boundary."""
        self.log.pending = None
        if boundary.outer is not None and not boundary.outer.done():
            boundary.outer.contributors = boundary.contributors
            boundary.outer.set_result(sums)
        held, self._held = self._held, []
        for entry in held:
            self._deliver(entry)

    def end_all(self, error: BaseException) -> None:
        """End all calls, and refuse later ones."""
        self.log.error = error
        for entry in self.log.all_entries():
            if entry.standing is not Standing.DONE or entry in self._held or entry is self.log.pending:
                entry.refuse(error)
            if entry is self.log.pending:
                entry.heard()  # the calls of the step have the same error
        self._held = []

    def _deliver(self, entry: Entry) -> None:
        """Give the result to the caller."""
        result = entry.result
        if entry.outer is None or entry.outer.done():
            return
        out = entry.call.get("out")
        try:
            # The call is DONE before this: other ranks may get its result whatever the caller's array raises.
            shown = result if out is None else written(result, out)
        except Exception as error:  # noqa: BLE001  whatever the caller's array raises, the result is there
            entry.outer.set_exception(error)
            return
        if out is None:
            entry.unfreeze = frozen(result)
            entry.is_bare = is_bare(result)
        entry.outer.contributors = entry.contributors
        entry.outer.set_result(shown)

    async def wait_until_quiet(self) -> None:
        """Wait until all calls in flight have ended, which the loss makes them do at once."""
        # A call that ended late could write to an input that the next epoch reads.
        while any(entry.inner is not None for entry in self.log.all_entries()) or self.transfer.parts:
            self._quiet = asyncio.get_running_loop().create_future()
            await self._quiet

    def look_if_quiet(self) -> None:
        """Let ``wait_until_quiet`` look again: a call in flight has ended."""
        if self._quiet is not None and not self._quiet.done():
            self._quiet.set_result(None)

    def release(self, entries: Iterable[Entry]) -> None:
        """Free what calls of past steps hold; their results can be written to again."""
        for entry in entries:
            if entry.timer is not None:
                entry.stop_timer()
            for one in entry.unfreeze:
                one.setflags(write=True)
            if entry.scratch is not None:
                free = self._scratch.setdefault((entry.scratch.shape, entry.scratch.dtype.str), [])
                if len(free) < MAX_SCRATCH:
                    free.append(entry.scratch)
