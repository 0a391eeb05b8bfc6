"""Dispatcher: entry point of the calls of one rank while an ``Elastic`` is open.

A call is recorded in the `CallLog`, executed by the `CallRunner` in the communicator of the epoch, and executed again
by `Recovery` after a change of the epoch. A blocking caller may execute a call itself, on its own thread: then `enter`
begins it, and one of `done`, `take_over` and `abandon` ends it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kfcomm.collectives.handle import Handle
from kfcomm.elastic.call_log import CallLog
from kfcomm.elastic.calls import ElasticCall, Entry, Standing, Uids, frozen
from kfcomm.elastic.recovery import Recovery
from kfcomm.elastic.requests import EpochReports
from kfcomm.errors import EpochChanged
from kfcomm.world.communicator import Communicator


class Dispatcher:
    """Calls of one rank while an ``Elastic`` is open. Runs in the engine's thread, except ``enter`` and ``done``.

    Args:
        comm: communicator of the epoch.
        moved: called with the communicator of each new epoch.
        reports: reports each new epoch to the store.
        finishes: repeat on the remaining ranks what no rank has finished when one is lost; else it fails on all.

    Attributes:
        log: calls of the step.
        recovery: changes of the epoch.
    """

    def __init__(
        self, comm: Communicator, moved: Callable[[Communicator], None], reports: EpochReports, *, finishes: bool = True
    ) -> None:
        self.log = CallLog(comm)
        self.recovery = Recovery(self.log, moved, reports, finishes=finishes)
        self._runner = self.recovery.runner

    def begin(self, verb: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Handle[Any]:
        """Begin a call of this step.

        Raises:
            ConfigError: as the verb does.
        """
        handle = self._runner.new_handle()
        entry = self.log.add(ElasticCall(verb, args, kwargs), handle, self._now_s())
        self._runner.attach(entry, handle)
        if self.recovery.error is not None:
            entry.refuse(self.recovery.error)
        elif self.recovery.is_changing:
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

    def refuse(self, name: str | None, error: BaseException, steps: int) -> None:
        """Refuse this rank's next call of a name: it takes its place in the step, and fails on the other ranks.

        Raises:
            ConfigError: it cannot be a name.
        """
        entry = self.log.add(ElasticCall("barrier", (name,), {}), self._runner.new_handle(), self._now_s())
        entry.refusal = error, steps
        entry.refuse(error)
        entry.heard()
        entry.why = f"rank {self.log.shown_rank} refused its call of {entry.title}: {entry.why}"
        if not self.recovery.is_changing and self.recovery.error is None:
            self._runner.post(entry)

    # ---------------------------------------------------------------- calls that the caller executes itself

    def enter(self, verb: str, args: tuple[Any, ...], kwargs: dict[str, Any], comm: Communicator) -> Entry | None:
        """Record a call that the caller executes in ``comm``, on any thread; None where only ``begin`` can.

        A change of the epoch that begins meanwhile waits for its end; if the change was first, ``comm`` refuses it.
        """
        log, recovery = self.log, self.recovery
        if comm is not log.comm or recovery.is_changing or log.outcomes or recovery.error is not None:
            return None
        return log.add(ElasticCall(verb, args, kwargs), None, self._now_s()) if comm.births == log.shown else None

    def done(self, entry: Entry, result: Any, uids: Uids) -> bool:
        """Record the caller's result; True if ``notify`` is to be called in the engine's thread."""
        entry.result, entry.contributors = result, uids
        entry.unfreeze = frozen(result)
        entry.standing = Standing.DONE
        entry.inner = None  # must be last: a change of the epoch continues as soon as this is None
        return self.recovery.is_changing or entry.outer is not None

    def notify(self, entry: Entry) -> None:
        """Notify those that wait for a call that its caller has finished."""
        if entry.outer is not None and not entry.outer.done():
            entry.outer.set_result(entry.result)
        self._runner.look_if_quiet()

    def take_over(self, entry: Entry, error: BaseException) -> Handle[Any]:
        """Continue a call that has failed for its caller: after a loss it is finished all the same."""
        handle = self._handle_of(entry)
        entry.inner = None
        if self.recovery.error is not None:
            entry.refuse(self.recovery.error)
        elif not self.recovery.is_changing and isinstance(error, EpochChanged) and not self._runner.has_lost():
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

    # ---------------------------------------------------------------- the step

    def unfinished(self) -> list[Handle[Any]]:
        """Handles of the step's calls that are not over."""
        handles = []
        for entry in list(self.log.entries.values()):
            if entry.outer is None and type(entry.inner) is int:
                self._handle_of(entry)
            # only now: the caller's thread may have ended the call before it could see the new handle
            if entry.outer is not None and not entry.outer.done() and entry.standing is not Standing.DONE:
                handles.append(entry.outer)
        return handles

    def end_step(self) -> Uids:
        """Release the step's calls, which are all over; other ranks may still need the boundary after it.

        Returns:
            The ranks that took part in the boundary, and so take part in the next step.
        """
        if any(one.is_void for one in self.log.entries.values()):
            for entry in self.log.entries.values():
                entry.heard()  # the caller has heard of the void step from one call, and left the others
        self._runner.release(self.log.next_step())
        self._runner.cancel_parts_before(self.log.step)
        return self.log.shown

    async def close(self) -> None:
        """End all calls: nothing is finished any more."""
        await self.recovery.close()
        entries = self.log.all_entries()
        self._runner.release(entries)
        for entry in entries:
            if type(entry.inner) is int or (entry.outer is not None and not entry.outer.done()):
                text = f"{entry.call.verb} {entry.title} was still under way when its Elastic ended"
                entry.refuse(EpochChanged(text, key=entry.name))
                entry.heard()

    def _handle_of(self, entry: Entry) -> Handle[Any]:
        return self._runner.attach(entry, self._runner.new_handle()) if entry.outer is None else entry.outer

    def _now_s(self) -> float:
        now_s: float = self.log.comm._session.engine.reactor.time()
        return now_s
