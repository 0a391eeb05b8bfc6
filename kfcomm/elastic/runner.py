"""Runner of a step's calls in the communicator of the epoch: first posts, repeats after a loss, results from peers.

What is posted here is posted again by `Recovery` after each change of the epoch.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np

from kfcomm.collectives.handle import Handle, looked_at
from kfcomm.common.arguments import whole_number
from kfcomm.core.collective import OWN_NAMES
from kfcomm.elastic.call_log import GIVEN_AS_ARRAYS, CallLog, CallOutcome, ElasticHandle, Entry, Standing, Uids
from kfcomm.elastic.results import frozen, name_for, plain, restored, written
from kfcomm.elastic.state import Array
from kfcomm.errors import CollectiveAborted, CollectiveError, CollectiveTimeout, EpochChanged, KfcommError, PeerLost

ENDED_BY_OTHERS = (CollectiveError, CollectiveAborted)
ABORTED_S = 0.5
"""Wait for the loss of a rank after an aborted call: a rank that fails aborts its calls first, and leaves then."""
MAX_SCRATCH = 8
"""Buffers of one shape and dtype that are cached for results in place."""


class CallRunner:
    """Execution of one rank's calls in the communicator of the epoch. Runs in the engine's thread.

    Args:
        log: calls of this rank.
        start_change: starts a change of the epoch, after which calls are posted again.
        finishes: repeat on the remaining ranks what no rank has finished when one is lost; else it fails on all.

    Attributes:
        is_changing: a change of the epoch is under way.
    """

    def __init__(self, log: CallLog, start_change: Callable[[], None], *, finishes: bool) -> None:
        self.is_changing = False
        self.log = log
        self._start_change = start_change
        self._finishes = finishes
        self._parts: dict[Handle[Any], int] = {}
        self._quiet: asyncio.Future[None] | None = None
        self._scratch: dict[tuple[tuple[int, ...], str], list[Array]] = {}

    @property
    def _reactor(self) -> Any:
        return self.log.comm._session.engine.reactor

    def attach(self, entry: Entry, handle: ElasticHandle) -> ElasticHandle:
        """Give a call the handle that its caller holds."""
        handle.withdraw = partial(self.withdraw, entry)
        entry.outer = handle
        return handle

    def new_handle(self) -> ElasticHandle:
        """Handle of the engine's event loop."""
        return ElasticHandle(loop=self.log.comm._session.engine.loop)

    # ---------------------------------------------------------------- cancellations and timeouts

    def withdraw(self, entry: Entry) -> bool:
        """Cancel a call for its caller; False if it is over.

        It fails on all ranks where it is not over. During a change the ranks may have exchanged its standing already:
        then it keeps that until the change is over, and this rank refuses its part afterwards.
        """
        inner = entry.inner
        if isinstance(inner, Handle) and inner.done() and not inner.cancelled() and inner.exception() is None:
            self._ended(entry, inner)  # its callback is due, and would come too late
            if entry.is_left:
                return False
        entry.why = entry.why or f"{entry.title} was cancelled on rank {self.log.shown_rank}"
        if not self.is_changing or entry.inner is not None:
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
                self.log.comm.refuse(name_for("all", entry.key), error)

    def _refuse_part(self, entry: Entry, root: Any) -> None:
        """Post a call that its caller cancelled during a change: it keeps its place, and fails everywhere."""
        entry.standing = Standing.POSTED
        self.tell_holders(entry, asyncio.CancelledError())
        entry.standing = Standing.FAILED
        if entry.refusal is not None:
            error, steps = entry.refusal
            self.log.comm.refuse(entry.call.get("name"), error, steps=steps)
            return
        handle = entry.call.begin(self.log.comm, root, None)
        handle.cancel()
        handle.when_done(self._reactor, looked_at)

    def wait_for_change(self, entry: Entry) -> None:
        """Let a call wait for a change of the epoch, with its own timeout."""
        if entry.timer is None and entry.deadline_s < math.inf:
            entry.timer = self._reactor.call_at(entry.deadline_s, self._late, entry)

    def _late(self, entry: Entry) -> None:
        entry.timer = None
        if entry.outer is not None and not entry.is_left and entry.inner is None:
            text = f"{entry.title} timed out while the ranks agreed on the survivors of a loss"
            entry.why = f"{text}, on rank {self.log.shown_rank}"
            entry.outer.set_exception(CollectiveTimeout(text, key=entry.name))

    def _seconds_left(self, entry: Entry) -> float | None:
        """Time to the deadline; None for a call that has a timeout for each of its parts."""
        return None if entry.deadline_s == math.inf else max(0.0, entry.deadline_s - self._reactor.time())

    def _stop_timer(self, entry: Entry) -> None:
        if entry.timer is not None:
            entry.timer.cancel()
            entry.timer = None

    # ---------------------------------------------------------------- calls

    def post(self, entry: Entry, *, is_first: bool = False) -> None:
        """Execute a call in this epoch, as far as what other ranks have of it allows."""
        self._stop_timer(entry)
        entry.has_told = False
        outcome = self.log.outcome_of(entry)
        # The order matters: an outcome of all ranks comes before anything that this rank decides itself.
        if outcome is not None and outcome.giver < 0:
            if self._root_of(entry) is not None:  # else it has failed for that, on all ranks
                self._fail_as(entry, outcome)
        elif outcome is not None:
            self._take(entry, outcome)
        elif self.log.comm.births != self.log.shown and not self._is_done_again(entry):
            why = "it cannot be done by fewer ranks" if self._finishes else "no rank had finished it"
            self._void(entry, why)
        else:
            entry.standing = Standing.POSTED
            root = self._root_of(entry)
            if root is None:
                return
            if entry.is_left:
                self._refuse_part(entry, root)
                return
            # The first post leaves the timeout to the verb, which checks it; repeats get what is left of it.
            left_s = None if is_first else self._seconds_left(entry)
            self._run(entry, entry.call.begin(self.log.comm, root, self._scratch_for(entry), left_s))

    def _fail_as(self, entry: Entry, outcome: CallOutcome) -> None:
        """Make a call fail that has failed on another rank, and is done on none."""
        if self._finishes:
            entry.refuse(CollectiveAborted(outcome.why, key=entry.name))
        else:
            self._void(entry, "it had failed on another rank")

    def _root_of(self, entry: Entry) -> Any:
        """Root among the ranks of the epoch; -1 for a verb without a root; None if it is lost, and the call fails."""
        if not entry.call.kind.is_rooted:
            return -1
        given = entry.call.get("root")
        root = whole_number(given)
        if root is None or not 0 <= root < len(self.log.shown):
            return given if self.log.comm.births == self.log.shown else len(self.log.comm.births)  # the verb refuses it
        uid = self.log.shown[root]
        if uid in self.log.comm.births:
            return self.log.comm.births.index(uid)
        text = f"{entry.call.verb} {entry.title} failed: its root, rank {root}, is lost"
        entry.refuse(PeerLost(text, key=entry.name, rank=root))
        return None

    def _scratch_for(self, entry: Entry) -> Array | None:
        """Buffer for a result that the caller wants in place: the input must stay intact for a repeat."""
        x, out = entry.call.get("x"), entry.call.get("out")
        if out is None or type(x) is not np.ndarray or entry.call.verb not in GIVEN_AS_ARRAYS:
            return None
        if entry.scratch is None:
            free = self._scratch.get((x.shape, x.dtype.str))
            entry.scratch = free.pop() if free else np.empty(x.shape, x.dtype)
        return entry.scratch

    def _run(self, entry: Entry, handle: Handle[Any]) -> None:
        """Follow the collective that executes a call to its end."""
        entry.inner = handle
        handle.when_done(self._reactor, lambda done: self._ended(entry, done))

    def _ended(self, entry: Entry, handle: Handle[Any]) -> None:
        # The call was posted again in the next epoch: this is the end of its old collective.
        if entry.inner is not handle:
            return
        entry.inner = None
        error = asyncio.CancelledError() if handle.cancelled() else handle.exception()
        if entry.standing is Standing.FAILED:
            pass  # its caller has heard so
        # No other rank can replace a result of its own, so the call is over only when all ranks have
        # theirs, which this barrier finds out.
        elif error is None and entry.call.kind.is_own and entry.standing is Standing.POSTED:
            entry.result, entry.standing = handle.result(), Standing.HELD
            self._run(entry, self.log.comm.barrier(name_for("all", entry.key), timeout=self._seconds_left(entry)))
        elif error is None:
            result = entry.result if entry.standing is Standing.HELD else handle.result()
            self._finish(entry, result, self.log.comm.births)
        else:
            self.failed(entry, error)
        self.look_if_quiet()

    def failed(self, entry: Entry, error: BaseException) -> None:
        """End a call by an error, or wait for the change of the epoch if the error is due to a loss."""
        if self._is_loss(error):
            self.wait_for_change(entry)
            self._start_change()
            return
        error = _of_call(error, entry, self.log.numbering)
        self.tell_holders(entry, error)
        if isinstance(error, asyncio.CancelledError):
            entry.standing = Standing.FAILED
            if entry.outer is not None:
                entry.outer.cancel()
        # It may be the first sign of a dying rank, whose loss is reported a moment later.
        elif type(error) in ENDED_BY_OTHERS:
            self._reactor.call_later(ABORTED_S, self._ended_by_others, entry, error)
        else:
            entry.refuse(error)

    def _ended_by_others(self, entry: Entry, error: BaseException) -> None:
        """Fail, unless the rank that aborted the call or closed a link is lost by now: then repeat without it."""
        if entry.standing in (Standing.POSTED, Standing.HELD) and entry.inner is None and not self.is_changing:
            if self.has_lost():
                self.wait_for_change(entry)
                self._start_change()
            else:
                entry.refuse(error)

    def _finish(self, entry: Entry, result: Any, contributors: Uids) -> None:
        entry.standing, entry.contributors = Standing.DONE, contributors
        entry.result = result
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
        entry.outer.contributors = contributors
        entry.outer.set_result(shown)

    def _is_loss(self, error: BaseException) -> bool:
        """Whether an error is due to the loss of a rank, perhaps before that was reported here.

        A failing rank aborts its calls and closes its links. If another rank has aborted this call, the ranks find out
        when they compare their calls.
        """
        if isinstance(error, (PeerLost, EpochChanged)):
            return True
        return type(error) in ENDED_BY_OTHERS and self.has_lost()

    def has_lost(self) -> bool:
        """Whether a rank of this epoch is lost."""
        return bool(self.log.comm._session.engine.router.lost)

    def _is_done_again(self, entry: Entry) -> bool:
        """Whether the surviving ranks repeat a call; calls of an ``Elastic`` between steps always are."""
        return entry.call.kind.can_shrink and (self._finishes or entry.is_own)

    def _void(self, entry: Entry, why: str) -> None:
        """Make a call fail, as on all surviving ranks."""
        members = tuple(self.log.shown.index(uid) for uid in self.log.comm.births if uid in self.log.shown)
        text = (
            f"{entry.call.verb} {entry.title} failed: epoch {self.log.comm.epoch} has begun with ranks {list(members)} "
            f"during the step, and {why}"
        )
        entry.is_void = True
        entry.refuse(EpochChanged(text, key=entry.name, epoch=self.log.comm.epoch, members=members))
        entry.heard()  # a caller that has seen one such error does not wait for its other calls

    # ---------------------------------------------------------------- results from other ranks

    def _take(self, entry: Entry, outcome: CallOutcome) -> None:
        """Finish a call as other ranks have finished it; ranks with and without the result take part."""
        if entry.refusal is not None:
            entry.standing = Standing.FAILED
            self.take_part(entry, outcome)
        elif entry.is_sent:
            self._given(entry, outcome)
        else:
            self._finish(entry, entry.result, outcome.contributors)

    def take_part(self, entry: Entry, outcome: CallOutcome) -> None:
        """Take part in sending the result of a call that is over on this rank."""
        try:
            if entry.refusal is not None:
                raise entry.refusal[0]
            self._given(entry, outcome)
        except Exception as error:
            if entry.standing is Standing.DONE:
                raise
            self.log.comm.refuse(
                name_for("given", entry.key), error
            )  # the input of this rank was the reason of the failure

    def _given(self, entry: Entry, outcome: CallOutcome) -> None:
        call, root, name = entry.call, self.log.comm.births.index(outcome.giver), name_for("given", entry.key)
        handle: Handle[Any]
        is_here = entry.standing is Standing.DONE
        is_over = is_here or entry.standing is Standing.FAILED  # after a cancellation, too: a broadcast needs all ranks
        left_s = None if is_over or entry.is_left else self._seconds_left(entry)
        # All ranks know shape and dtype, so the array travels as it is; other results need msgpack.
        if call.verb in GIVEN_AS_ARRAYS:
            handle = self.log.comm.broadcast(entry.result if is_here else call.get("x"), root, name, timeout=left_s)
        else:
            is_object = call.verb.endswith("_object") or call.verb == "consensus"
            value = None if not is_here else entry.result if is_object else plain(entry.result)
            handle = self.log.comm.broadcast_object(value, root, name, timeout=left_s)
        if is_over:
            self._parts[handle] = entry.step
            handle.when_done(self._reactor, self._part_done)
            return
        entry.inner = handle
        handle.when_done(self._reactor, lambda done: self._received(entry, outcome, done))

    def _part_done(self, handle: Handle[Any]) -> None:
        self._parts.pop(handle, None)
        looked_at(handle)
        self.look_if_quiet()

    def _received(self, entry: Entry, outcome: CallOutcome, handle: Handle[Any]) -> None:
        if entry.inner is handle and not handle.cancelled() and handle.exception() is None:
            verb, result = entry.call.verb, handle.result()
            entry.inner = None
            if verb not in GIVEN_AS_ARRAYS and not verb.endswith("_object") and verb != "consensus":
                result = restored(result, entry.call.get("arrays" if verb == "all_reduce_many" else "x"))
            self._finish(entry, result, outcome.contributors)
            self.look_if_quiet()
        else:
            self._ended(entry, handle)

    # ---------------------------------------------------------------- ends

    async def wait_until_quiet(self) -> None:
        """Wait until all calls in flight have ended, which the loss makes them do at once."""
        # A call that ended late could write to an input that the next epoch reads.
        while any(entry.inner is not None for entry in list(self.log.entries.values())) or self._parts:
            self._quiet = asyncio.get_running_loop().create_future()
            await self._quiet

    def look_if_quiet(self) -> None:
        """Let ``wait_until_quiet`` look again: a call in flight has ended."""
        if self._quiet is not None and not self._quiet.done():
            self._quiet.set_result(None)

    def release(self, entries: Iterable[Entry]) -> None:
        """Free what calls of past steps hold; their results can be written to again."""
        for entry in entries:
            self._stop_timer(entry)
            for one in entry.unfreeze:
                one.setflags(write=True)
            if entry.scratch is not None:
                free = self._scratch.setdefault((entry.scratch.shape, entry.scratch.dtype.str), [])
                if len(free) < MAX_SCRATCH:
                    free.append(entry.scratch)

    def cancel_parts_before(self, step: int) -> None:
        """Cancel this rank's part in calls of past steps: a rank that has not come to them will not."""
        for handle, number in list(self._parts.items()):
            if number < step:
                handle.cancel()


def _of_call(error: BaseException, entry: Entry, numbering: str) -> BaseException:
    """Error with the caller's name of the call, in the place of the name of a hidden part."""
    is_hidden = isinstance(error, CollectiveError) and error.key.startswith(OWN_NAMES)
    if not isinstance(error, CollectiveError) or entry.is_own or not (is_hidden or numbering):
        return error
    text = str(error).replace(repr(error.key), entry.title) + numbering
    if isinstance(error, CollectiveTimeout):
        return CollectiveTimeout(text, key=entry.name, arrived=error.arrived, missing=error.missing)
    return type(error)(text, key=entry.name)
