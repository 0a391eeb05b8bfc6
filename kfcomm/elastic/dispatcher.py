"""Calls that survive losses: entry point, changes of the epoch, and what becomes of the calls in flight.

A call is recorded in the `CallLog`, executed by the `CallRunner` in the communicator of the epoch, and executed again
by `Recovery` after a change of the epoch.

When a rank is lost, all calls in flight end at once, on all ranks. Then the ranks agree on the survivors (`epochs`),
each with a digest of the calls that it has finished. If all digests are equal, unfinished calls are posted again in the
new epoch. Otherwise the ranks exchange the standing of each call, from which `decide` computes the same outcome on all.

Invariants:

- For each call all surviving ranks get the same result with the same contributors, or all get an error.
- What one rank has finished, all finish: the lowest rank that has the result sends it to the others. Results are cached
  until the step is over, and read-only before. A rank that makes such a call later takes the result.
- Inputs are intact until the call is over: a result that the caller wants in place is made elsewhere, and copied.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

from kfcomm.collectives.handle import Handle
from kfcomm.elastic.call_log import BOUNDARY, CallLog, ElasticHandle, Entry, Standing, Uids
from kfcomm.elastic.calls import ElasticCall
from kfcomm.elastic.foresight import foresee
from kfcomm.elastic.outcomes import decide
from kfcomm.elastic.reports import EpochReports
from kfcomm.elastic.results import frozen
from kfcomm.elastic.runner import CallRunner, Judge
from kfcomm.engine.agreements import AgreementCall as AgreementKind
from kfcomm.errors import CollectiveMismatch, EpochChanged, KfcommError, PeerLost
from kfcomm.transports.reactor import Timer
from kfcomm.world.communicator import Communicator
from kfcomm.world.epochs import NO_PLAN, EpochPlan, Released
from kfcomm.world.prepared import PreparedEpoch


class Recovery:
    """Changes of the epoch of one rank while an ``Elastic`` is open. Runs in the engine's thread."""

    def __init__(
        self, log: CallLog, moved: Callable[[Communicator], None], reports: EpochReports, *, finishes: bool
    ) -> None:
        self.runner = CallRunner(log, self._start, finishes=finishes)
        self.is_released = False  # a plan has released this rank
        self.num_changes = 0
        self.paused_s = 0.0  # total time that calls have waited for them
        self._log = log
        self._moved = moved
        self._reports = reports
        self._plan = NO_PLAN  # agreed on, and not carried out yet
        self._prepared: PreparedEpoch | None = None  # by this plan
        self._task: asyncio.Task[None] | None = None
        self._is_closed = False
        self._watch()
        if log.has_lost:
            self._start()

    async def settled(self) -> None:
        """Wait until no change is under way."""
        while self._task is not None:
            await asyncio.wait([self._task])

    async def change(self, plan: EpochPlan, prepared: PreparedEpoch | None = None) -> None:
        """Carry out a plan that all ranks know, or will know; ``EpochChanged`` if it releases this rank."""
        self._plan, self._prepared = plan, prepared
        # A loss on the way begins a change without the plan; the plan is then carried out by the next one.
        while self._plan != NO_PLAN:
            if self._log.error is not None:
                raise self._log.error
            self._start()
            await self.settled()

    async def leave(self) -> bool:
        """Agree that all ranks end their calls now; False if the epoch has to change first."""
        session = self._log.comm._session
        try:
            await self.settled()
            if self._log.error is not None:
                raise self._log.error
            # A rank that left on its own could take results with it that another still needs.
            await session.agreements.decide(AgreementKind.AGREE, b"end", session.timeout_s)
        except CollectiveMismatch:
            self._start()
            return False
        self._is_closed = True
        return True

    async def close(self) -> None:
        """Stop a change that is under way, and start no other."""
        self._is_closed = True
        self._unwatch()
        for task in (self._task, self.runner.asking):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        await self._reports.close()

    def _watch(self) -> None:
        self._log.comm._session.engine.loss_listeners.append(self._start)
        foresee(self._log.comm)

    def _unwatch(self) -> None:
        with contextlib.suppress(ValueError):
            self._log.comm._session.engine.loss_listeners.remove(self._start)

    def _start(self) -> None:
        log, session = self._log, self._log.comm._session
        if not log.is_changing and log.error is None and not self._is_closed and not session.is_closed:
            log.is_changing = True
            self._task = session.engine.loop.create_task(self._run(), name="kfcomm changes the epoch")

    async def _run(self) -> None:
        log, loop = self._log, asyncio.get_running_loop()
        began_s = loop.time()
        try:
            while await self._change_once():
                pass
        except BaseException as error:  # noqa: BLE001  it ends every call
            self._fail(error)
        finally:
            self._task = None
            log.is_changing = False
            self.paused_s += loop.time() - began_s
        for entry in log.all_entries():
            is_open = entry.standing in (Standing.POSTED, Standing.HELD) and entry.inner is None
            if is_open and not log.is_changing:  # posting can meet the next loss, which starts another change
                try:
                    self.runner.post(entry)
                except Exception as error:  # noqa: BLE001  it was checked when it was first posted, or is now
                    entry.refuse(error)

    async def _change_once(self) -> bool:
        """Change to the next epoch; True if another rank was lost meanwhile, so that it has to change again."""
        log = self._log
        # Calls end by themselves: the loss aborts all of them, here and on the other ranks.
        await self.runner.wait_until_quiet()
        self._unwatch()
        # outcomes of calls that are not over here: the rank that was to give the result may be lost now
        log.outcomes.clear()
        plan, prepared, self._prepared = self._plan, self._prepared, None
        try:
            comm, digests, is_planned = await log.comm._succeed(log.digest(), plan=plan, prepared=prepared)
        except CollectiveMismatch:  # other ranks end their calls, and have not heard of the loss
            return True
        except Released:
            self.is_released = True
            raise
        self.num_changes += 1
        former, log.comm = log.comm.births, comm
        self._watch()
        self._moved(comm)
        self._reports.begin(comm, former, plan if is_planned else NO_PLAN)
        if is_planned:
            self._plan = NO_PLAN
            self.runner.release(log.restart())
            return log.has_lost
        log.latest = log.step  # of all ranks, unless digests differ
        try:
            # Mostly no rank has finished more than another, and one digest saves the exchange of all rows.
            if len(set(digests.values())) > 1:
                await self._compare()
        except (PeerLost, EpochChanged):
            return True
        return log.has_lost

    async def _compare(self) -> None:
        """Exchange the standings of calls; from these all ranks compute the same outcomes."""
        log = self._log
        said = await log.comm.all_gather_object([log.step, log.standings()], "kfcomm/standings")
        log.latest = max(step for step, _ in said)
        log.outcomes = dict(decide(said, log.comm.births))
        # The sender of a result may have nothing else to do in this call: its part is posted here.
        for entry in [one for one in log.all_entries() if one.standing in (Standing.DONE, Standing.FAILED)]:
            outcome = log.outcome_of(entry)
            if outcome is not None and outcome.giver >= 0 and entry.is_sent:
                self.runner.transfer.take_part(entry, outcome)

    def _fail(self, error: BaseException) -> None:
        if isinstance(error, asyncio.CancelledError):
            error = EpochChanged("the communicator was closed while the ranks agreed on the survivors")
        elif isinstance(error, Released):
            error = EpochChanged(f"{error}: this rank is released", epoch=self._log.comm.epoch + 1)
        self.runner.end_all(error)


POSTED_WITHIN_S = 5e-3
"""For an announced boundary, where no call of its step has posted it; grows up to `MOST_POSTED_S` while one does."""
MOST_POSTED_S = 0.16


class Dispatcher:
    """Calls of one rank while an ``Elastic`` is open. Runs in the engine's thread, except ``enter`` and ``done``.

    ``moved`` is called with the communicator of each new epoch. With ``finishes`` the remaining ranks repeat what no
    rank has finished when one is lost; else it fails on all.
    """

    def __init__(
        self, comm: Communicator, moved: Callable[[Communicator], None], reports: EpochReports, *, finishes: bool = True
    ) -> None:
        self.log = CallLog(comm)
        self.recovery = Recovery(self.log, moved, reports, finishes=finishes)
        self._runner = self.recovery.runner
        self._timer: Timer | None = None  # which will post an announced boundary
        self._posted_within_s = POSTED_WITHIN_S

    def begin(self, verb: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Handle[Any]:
        """Begin a call of this step."""
        self.post_boundary()
        handle = ElasticHandle(loop=self.log.comm._session.engine.loop)
        entry = self.log.add(ElasticCall(verb, args, kwargs), handle)
        handle.withdraw = partial(self._runner.withdraw, entry)
        if self.log.error is not None:
            entry.refuse(self.log.error)
        elif self.log.is_changing:
            self._runner.wait_for_change(entry)
        else:
            try:
                self._runner.post(entry, is_first=True)
            except BaseException as error:
                # The call has its place in the step already: the other ranks must not wait for this one.
                self._runner.tell_holders(entry, error)
                entry.why = f"rank {self.log.shown_rank} refused its call of {entry.title}: {error}"
                handle.cancel()
                raise
        return handle

    async def gather(self, value: Any, about: str) -> tuple[list[Any], Uids]:
        """Gather a value of each surviving rank, with their uids; all of them call it."""
        handle = self.begin("all_gather_object", (value, f"kfcomm/{about}"), {})
        rows = await handle
        return rows, handle.contributors or ()

    def refuse(self, name: str | None, error: BaseException, steps: int) -> None:
        """Refuse this rank's next call of a name: it takes its place in the step, and fails on the other ranks."""
        self.post_boundary()
        handle = ElasticHandle(loop=self.log.comm._session.engine.loop)
        entry = self.log.add(ElasticCall("barrier", (name,), {}), handle)
        entry.refusal = error, steps
        entry.refuse(error)
        entry.heard()
        entry.why = f"rank {self.log.shown_rank} refused its call of {entry.title}: {entry.why}"
        if not self.log.is_changing and self.log.error is None:
            self._runner.post(entry)

    # ---------------------------------------------------------------- calls that the caller executes itself

    # A blocking caller may execute a call on its own thread, without a hand-over to the engine's: ``enter`` begins it,
    # and one of ``done``, ``take_over`` and ``abandon`` ends it.

    def enter(self, verb: str, args: tuple[Any, ...], kwargs: dict[str, Any], comm: Communicator) -> Entry | None:
        """Record a call that the caller executes in ``comm``, on any thread; None where only ``begin`` can."""
        log = self.log
        # No lock: a change that begins after this look waits for the call's end; if it was first, ``comm`` refuses it.
        if comm is not log.comm or log.is_changing or log.outcomes or log.error is not None or log.pending is not None:
            return None
        return log.add(ElasticCall(verb, args, kwargs), None) if comm.births == log.shown else None

    def done(self, entry: Entry, result: Any, uids: Uids) -> bool:
        """Record the caller's result; True if ``notify`` is to be called in the engine's thread."""
        entry.result, entry.contributors = result, uids
        entry.unfreeze = frozen(result)
        entry.standing = Standing.DONE
        entry.inner = None  # must be last: a change of the epoch continues as soon as this is None
        return self.log.is_changing or entry.outer is not None

    def notify(self, entry: Entry) -> None:
        """Notify those that wait for a call that its caller has finished."""
        if entry.outer is not None and not entry.outer.done():
            entry.outer.set_result(entry.result)
        self._runner.look_if_quiet()

    def take_over(self, entry: Entry, error: BaseException) -> Handle[Any]:
        """Continue a call that has failed for its caller: after a loss it is finished all the same."""
        handle = self._handle_of(entry)
        entry.inner = None
        if self.log.error is not None:
            entry.refuse(self.log.error)
        elif not self.log.is_changing and isinstance(error, EpochChanged) and not self.log.has_lost:
            self._runner.post(entry)  # a change was over before the caller began
        else:
            self._runner.failed(entry, error)
        self._runner.look_if_quiet()
        return handle

    def abandon(self, thread: int) -> None:
        """End the calls of a thread that was interrupted, at any line."""
        # The interrupt may have come at any line, so the record is found by its thread, not by a reference.
        for entry in [one for one in list(self.log.entries.values()) if one.inner == thread]:
            entry.inner = None
            if entry.standing is not Standing.DONE:
                entry.standing = Standing.FAILED
                entry.why = f"{entry.title} was cancelled on rank {self.log.shown_rank}"
                if entry.outer is not None:
                    entry.outer.cancel()
        self._runner.look_if_quiet()

    def _handle_of(self, entry: Entry) -> Handle[Any]:
        if entry.outer is None:
            handle = ElasticHandle(loop=self.log.comm._session.engine.loop)
            handle.withdraw = partial(self._runner.withdraw, entry)
            entry.outer = handle
        return entry.outer

    # ---------------------------------------------------------------- the step

    def unfinished(self) -> list[Handle[Any]]:
        """Handles of the step's calls that are not over."""
        handles, done = [], Standing.DONE
        for entry in list(self.log.entries.values()):
            if entry.standing is done:
                continue
            if type(entry.inner) is int:
                self._handle_of(entry)
            # only now: the caller's thread may have ended the call before it could see the new handle
            if entry.outer is not None and not entry.outer.done() and entry.standing is not done:
                handles.append(entry.outer)
        return handles

    async def finish(self) -> None:
        """Wait for unfinished calls of the step; their errors are for the holders of their handles."""
        while unfinished := self.unfinished():
            await asyncio.wait(unfinished)

    def announce(self, numbers: Any, judge: Judge) -> Handle[Any]:
        """Begin the next step before all ranks have ended this one; returns the handle of the boundary's sums.

        Results of the step reach their callers when the sums are there, and ``judge`` finds nothing wrong with them.
        """
        self._hear_void()
        handle = ElasticHandle(loop=self.log.comm._session.engine.loop)
        self.log.announce(self.log.add(ElasticCall("all_reduce", (numbers, BOUNDARY), {}), handle))
        self._runner.judge = judge
        # For a step that begins with calls that do not come here, as those of a group: a rank that waits for the
        # boundary may be the one for which they wait. One timer at a time, for however many steps.
        if self._timer is None:
            self._timer = self.log.reactor.call_later(self._posted_within_s, self._post_late)
        return handle

    def _post_late(self) -> None:
        self._timer, boundary = None, self.log.pending
        # Each timer wakes the thread that drives the engine while no caller does, which costs callers their turn.
        is_late = self.log.is_unposted
        self._posted_within_s = POSTED_WITHIN_S if is_late else min(2 * self._posted_within_s, MOST_POSTED_S)
        try:
            self.post_boundary()
        except KfcommError as error:
            # As where the communicator was closed meanwhile: the end of the step raises it.
            if boundary is not None:
                boundary.refuse(error)
                boundary.heard()

    def post_boundary(self) -> None:
        """Post an announced boundary, with the first call of its step, or at the end of a step without calls."""
        # Not when it is announced: whoever waits for it waits for a call of this step, too, and the thread that drives
        # the engine while no caller does would be woken for it.
        log, boundary = self.log, self.log.pending
        if log.is_unposted and boundary is not None and not log.is_changing:
            if log.error is not None:
                log.is_unposted = False
                boundary.refuse(log.error)
            else:
                self._runner.post(boundary, is_first=True)

    async def met(self) -> None:
        """Wait until the announced boundary is done, and all ranks are known to be at the same position."""
        self.post_boundary()
        boundary = self.log.pending
        if boundary is not None and boundary.outer is not None:
            await asyncio.wait([boundary.outer])

    def _hear_void(self) -> None:
        if any(one.is_void for one in self.log.entries.values()):
            for entry in self.log.entries.values():
                entry.heard()  # the caller has heard of the void step from one call, and left the others

    def end_step(self) -> Uids:
        """Release the step's calls, which are all over; returns the ranks of the next step."""
        self._hear_void()
        self._runner.release(self.log.next_step())
        self._runner.transfer.cancel_before(self.log.step)
        return self.log.shown

    async def close(self) -> None:
        """End all calls: nothing is finished any more."""
        if self._timer is not None:
            self._timer.cancel()
        await self.recovery.close()
        entries = self.log.all_entries()
        self._runner.release(entries)
        self.log.thaw()
        for entry in entries:
            if type(entry.inner) is int or (entry.outer is not None and not entry.outer.done()):
                text = f"{entry.call.verb} {entry.title} was still under way when its Elastic ended"
                entry.refuse(EpochChanged(text, key=entry.name))
                entry.heard()
