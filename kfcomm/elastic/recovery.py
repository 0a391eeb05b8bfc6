"""Recovery: the change to the next epoch after a loss, or by a plan, and what becomes of the calls in flight.

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

from kfcomm.elastic.call_log import CallLog
from kfcomm.elastic.calls import Standing, decide
from kfcomm.elastic.requests import EpochReports
from kfcomm.elastic.runner import CallRunner
from kfcomm.engine.agreements import Call as AgreementKind
from kfcomm.errors import CollectiveMismatch, EpochChanged, PeerLost
from kfcomm.world.communicator import Communicator
from kfcomm.world.epochs import NO_PLAN, Plan, Released


class Recovery:
    """Changes of the epoch of one rank while an ``Elastic`` is open. Runs in the engine's thread.

    Args:
        log: calls of this rank.
        moved: called with the communicator of each new epoch.
        reports: reports each new epoch to the store.
        finishes: repeat on the remaining ranks what no rank has finished when one is lost; else it fails on all.

    Attributes:
        runner: posts the calls.
        plan: plan that was agreed on and not carried out yet; else an empty one.
        is_released: a plan has released this rank.
        num_changes: number of changes of the epoch so far.
        paused_s: total time that calls have waited for them.
        error: error that has ended all calls; else None.
    """

    def __init__(
        self, log: CallLog, moved: Callable[[Communicator], None], reports: EpochReports, *, finishes: bool
    ) -> None:
        self.runner = CallRunner(log, self._start, finishes=finishes)
        self.plan = NO_PLAN
        self.is_released = False
        self.num_changes = 0
        self.paused_s = 0.0
        self.error: BaseException | None = None
        self._log = log
        self._moved = moved
        self._reports = reports
        self._task: asyncio.Task[None] | None = None
        self._is_closed = False
        self._watch()
        if self.runner.has_lost():
            self._start()

    @property
    def is_changing(self) -> bool:
        """Whether a change is under way."""
        return self._task is not None

    async def settled(self) -> None:
        """Wait until no change is under way."""
        while self._task is not None:
            await asyncio.wait([self._task])

    async def change(self, plan: Plan) -> None:
        """Carry out a plan that all ranks know, or will know.

        Raises:
            EpochChanged: the plan releases this rank.
        """
        self.plan = plan
        # A loss on the way begins a change without the plan; the plan is then carried out by the next one.
        while self._has_plan():
            if self.error is not None:
                raise self.error
            self._start()
            await self.settled()

    async def leave(self) -> bool:
        """Agree that all ranks end their calls now; False if the epoch has to change first."""
        session = self._log.comm._session
        try:
            await self.settled()
            if self.error is not None:
                raise self.error
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
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._reports.close()

    def _watch(self) -> None:
        self._log.comm._session.engine.loss_listeners.append(self._start)

    def _unwatch(self) -> None:
        with contextlib.suppress(ValueError):
            self._log.comm._session.engine.loss_listeners.remove(self._start)

    def _start(self) -> None:
        session = self._log.comm._session
        if self._task is None and self.error is None and not self._is_closed and not session.is_closed:
            self._task = session.engine.loop.create_task(self._run(), name="kfcomm changes the epoch")
            self.runner.is_changing = True

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        try:
            while await self._change_once():
                pass
        except BaseException as error:  # noqa: BLE001  it ends every call
            self._fail(error)
        finally:
            self._task = None
            self.runner.is_changing = False
            self.paused_s += loop.time() - began_s
        for entry in list(self._log.entries.values()):
            is_open = entry.standing in (Standing.POSTED, Standing.HELD) and entry.inner is None
            if is_open and self._task is None:  # posting can meet the next loss, which starts another change
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
        plan = self.plan
        try:
            comm, digests, is_planned = await log.comm._succeed(log.digest(), plan=plan)
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
            self.plan = NO_PLAN
            self.runner.release(log.restart())
            return self.runner.has_lost()
        try:
            # Mostly no rank has finished more than another, and one digest saves the exchange of all rows.
            if len(set(digests.values())) > 1:
                await self._compare()
        except (PeerLost, EpochChanged):
            return True
        return self.runner.has_lost()

    async def _compare(self) -> None:
        """Exchange the standings of calls; from these all ranks compute the same outcomes."""
        log = self._log
        said = await log.comm.all_gather_object([log.step, log.standings()], "kfcomm/standings")
        log.outcomes = dict(decide(said, log.comm.births))
        # The sender of a result may have nothing else to do in this call: its part is posted here.
        for entry in [one for one in log.all_entries() if one.standing in (Standing.DONE, Standing.FAILED)]:
            outcome = log.outcome_of(entry)
            if outcome is not None and outcome.giver >= 0 and entry.is_sent:
                self.runner.take_part(entry, outcome)

    def _fail(self, error: BaseException) -> None:
        if isinstance(error, asyncio.CancelledError):
            error = EpochChanged("the communicator was closed while the ranks agreed on the survivors")
        elif isinstance(error, Released):
            error = EpochChanged(f"{error}: this rank is released", epoch=self._log.comm.epoch + 1)
        self.error = error
        for entry in list(self._log.entries.values()):
            if entry.standing is not Standing.DONE:
                entry.refuse(error)

    def _has_plan(self) -> bool:
        return self.plan != NO_PLAN
