"""Call log: the calls of a step on one rank, how each stands there, and the outcome that the ranks agree on.

A call is known by its name and by which use of the name in its step it is. Results of a step are kept until all ranks
have ended it, because a rank that died may leave others without a result that this rank has.

A rank begins a step in one of two ways. It *meets* the others: it waits for the boundary, whose contributors are the
ranks of the step. Or it *announces* the boundary: the step has the ranks of the one before, and the boundary is read
when the step ends. So ranks are at most one step apart, and a rank keeps the calls of the step before until the
boundary is done, which tells that all ranks have ended them. After a loss all ranks meet, except at a boundary that a
surviving rank had announced before (``latest``).

Each event takes a call from one standing to the next. A call that has not begun on a rank has no record there; no event
takes a call out of DONE or FAILED within its step.

| event                                              | POSTED                   | HELD                     |
|----------------------------------------------------|--------------------------|--------------------------|
| its collective ends well                           | DONE; HELD if each rank  | DONE (it was the barrier |
|                                                    | has a result of its own  | after the results)       |
| it ends because a rank was lost                    | POSTED, until the change | HELD, until the change   |
| it ends by another error, or is cancelled          | FAILED                   | FAILED                   |
| after the change: agreed that it is done           | DONE, with the result of | DONE, with its own       |
|                                                    | the lowest rank with one | result                   |
| after the change: agreed that it has failed        | FAILED                   | FAILED                   |
| after the change: nothing agreed                   | POSTED again; FAILED if fewer ranks cannot repeat it|
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, NamedTuple, TypeAlias
from weakref import ref

import msgpack

from kfcomm.collectives.handle import Handle, looked_at
from kfcomm.common.arguments import whole_number
from kfcomm.common.sizes import seconds_of
from kfcomm.core.collective import OWN_NAMES, name_of, shown
from kfcomm.elastic.calls import ElasticCall
from kfcomm.elastic.state import Array
from kfcomm.errors import ConfigError, PeerLost
from kfcomm.transports.reactor import Reactor, Timer
from kfcomm.world.communicator import Communicator

BOUNDARY = f"{OWN_NAMES}boundary"
"""Name of the call between two steps."""
DIGEST_NBYTES = 16

Uids: TypeAlias = tuple[int, ...]
Key: TypeAlias = tuple[str, int]
"""Name of a call, and the number of its use in the step."""
Row: TypeAlias = "tuple[str, int, Standing | int, tuple[int, ...], int, str]"
"""Key, standing, contributors, step, and reason of a failure."""


class Standing(IntEnum):
    """State of a call on one rank."""

    POSTED = 0  # not over
    HELD = 1  # this rank has its own result; the other ranks may not have theirs yet
    DONE = 2  # over, with a result
    FAILED = 3  # over, with an error


class CallOutcome(NamedTuple):
    """Outcome, on all ranks, of a call that is over on some of them."""

    step: int  # of the call
    giver: int  # uid of the rank that sends the result to the others; -1 if the call has failed on all
    contributors: Uids = ()  # whose contributions are in the result
    why: str = ""  # of a failure


class ElasticHandle(Handle[Any]):
    """Handle of a call that survives the loss of ranks."""

    # Ends the call on all ranks where it is not over; False if it is over on this one.
    withdraw: Callable[[], bool] | None = None

    def cancel(self, msg: Any | None = None) -> bool:
        """End the call everywhere; False if it is complete already."""
        if self.done() or (self.withdraw is not None and not self.withdraw()):
            return False
        return super().cancel(msg)


@dataclass(eq=False)
class Entry:
    """Record of a call on this rank."""

    # Most of it stays at its default, in the class: to set it in each record would take half the time of making one.
    key: Key
    call: ElasticCall
    outer: Handle[Any] | None  # the caller's; None while the caller executes the call itself, see `Dispatcher.enter`
    step: int  # a boundary belongs to the step that it begins
    inner: Handle[Any] | int | None = field(
        default=None, init=False
    )  # collective under way, or the thread of a caller that executes it itself
    giving: CallOutcome | None = field(
        default=None, init=False
    )  # outcome whose result the collective under way brings from another rank
    standing: Standing = field(default=Standing.POSTED, init=False)
    result: Any = field(default=None, init=False)
    contributors: Uids = field(default=(), init=False)  # whose contributions are in the result
    scratch: Array | None = field(default=None, init=False)  # buffer of the result, if the caller wants it elsewhere
    unfreeze: Sequence[Array] = field(default=(), init=False)  # become writeable again when the step is over
    is_own: bool = field(default=False, init=False)  # kfcomm makes the call between steps, not the program
    is_void: bool = field(default=False, init=False)  # it has failed because ranks were lost
    why: str = field(default="", init=False)  # of a failure or a cancellation, for the other ranks
    deadline_s: float = field(
        default=math.inf, init=False
    )  # by the reactor's clock; inf for a call with a timeout for each of its parts
    timer: Timer | None = field(
        default=None, init=False
    )  # ends the call at its deadline while it waits for a change of the epoch
    refusal: tuple[BaseException, int] | None = field(
        default=None, init=False
    )  # why this rank does not make it, and the call's number of steps
    has_told: bool = field(
        default=False, init=False
    )  # ranks with their own result in this epoch know that this rank has failed
    is_bare: bool = field(
        default=False, init=False
    )  # the caller can change its result, which another rank may still need

    @property
    def name(self) -> str:
        """The caller's name; "unnamed" without one."""
        return name_of(self.key[0])

    @property
    def title(self) -> str:
        """The caller's name for error texts."""
        return shown(self.key[0].partition("\0")[0])

    @property
    def is_left(self) -> bool:
        """Whether the caller has cancelled it, or it timed out, while it is not over among the ranks."""
        return self.outer is not None and self.outer.done()

    @property
    def is_sent(self) -> bool:
        """Whether its result is sent to ranks without it: not if each rank has its own, nor for a barrier."""
        return not self.call.kind.is_own and self.call.verb != "barrier"

    def seconds_left(self, now_s: float) -> float | None:
        """Time to the deadline; None without one."""
        return None if self.deadline_s == math.inf else max(0.0, self.deadline_s - now_s)

    def stop_timer(self) -> None:
        """Let its time run out unnoticed."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    def refuse(self, error: BaseException) -> None:
        """Make it fail."""
        self.standing = Standing.FAILED
        self.why = self.why or str(error) or type(error).__name__
        if self.outer is not None and not self.outer.done():
            self.outer.set_exception(error)

    def heard(self) -> None:
        """Mark the result, or the error, as retrieved, so that asyncio does not warn."""
        if self.outer is not None:
            looked_at(self.outer)


class CallLog:
    """Calls of one rank while an ``Elastic`` is open. Runs in the engine's thread, except ``add``."""

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self.shown: Uids = comm.births  # uids of the ranks of the step, which its calls number from 0
        # Number of the step since ranks last joined or left by a plan: the same on the ranks that joined then
        self.step = 0
        self.entries: dict[Key, Entry] = {}
        self.kept: list[Entry] = []  # from before this step: another rank may still need their results
        self.pending: Entry | None = None  # the announced boundary, until all ranks are known to have begun the step
        self.is_unposted = False  # that is posted with the first call of the step
        self.latest = 0  # latest step that a rank of this epoch had begun when the epoch began
        # What was agreed after a loss about calls that are over on some ranks only, by key and step
        self.outcomes: dict[tuple[Key, int], CallOutcome] = {}
        self.is_changing = False  # a change of the epoch is under way
        self.error: BaseException | None = None  # error that has ended all calls; else None
        # By name: those of the program count from 0 in each step. kfcomm's own count on: the kept boundary and the next
        # one must not have one key.
        self._uses: dict[str, int] = {}
        self._own_uses: dict[str, int] = {}
        # The program is to wait for the announced boundary: of the calls before it one has failed, or has a result that
        # the program can change.
        self.is_unsettled = False
        self._lent: list[ref[Array]] = []  # results of the step before, which stay read-only in this one

    # ---------------------------------------------------------------- the epoch

    @property
    def reactor(self) -> Reactor:
        """Reactor of the epoch's engine."""
        return self.comm._session.engine.reactor

    @property
    def has_lost(self) -> bool:
        """Whether a rank of this epoch is lost."""
        return bool(self.comm._session.engine.router.lost)

    @property
    def shown_rank(self) -> int:
        """Number of this rank in the step."""
        return self.shown.index(self.comm.births[self.comm.rank])

    @property
    def members(self) -> Uids:
        """Ranks of the step that are in this epoch, by their numbers in the step."""
        return tuple(self.shown.index(uid) for uid in self.comm.births if uid in self.shown)

    def root_of(self, entry: Entry) -> Any:
        """Root among the ranks of the epoch; -1 for a verb without a root; None if it is lost, and the call fails."""
        if not entry.call.kind.is_rooted:
            return -1
        given = entry.call.get("root")
        root = whole_number(given)
        if root is None or not 0 <= root < len(self.shown):
            return given if self.comm.births == self.shown else len(self.comm.births)  # the verb refuses it
        uid = self.shown[root]
        if uid in self.comm.births:
            return self.comm.births.index(uid)
        text = f"{entry.call.verb} {entry.title} failed: its root, rank {root}, is lost"
        entry.refuse(PeerLost(text, key=entry.name, rank=root))
        return None

    # ---------------------------------------------------------------- the step

    def add(self, call: ElasticCall, outer: Handle[Any] | None) -> Entry:
        """Record a call at its place in the step."""
        name = call.title()
        is_own = name.startswith(OWN_NAMES)
        uses = self._own_uses if is_own else self._uses
        number = uses.get(name, 0)
        uses[name] = number + 1
        entry = Entry((name, number), call, outer, self.step + (name == BOUNDARY))
        # kfcomm's own calls between steps have no deadline: repeated losses must not end a job that survives them
        if is_own:
            entry.is_own = True
        else:
            timeout = call.kwargs.get("timeout")
            limit_s = self.comm._group.timeout_s if timeout is None else self._limit_s(timeout)
            entry.deadline_s = self.reactor.time() + limit_s
        entry.inner = threading.get_ident() if outer is None else None
        self.entries[entry.key] = entry  # must be last: a change of the epoch waits for calls that are in flight
        return entry

    def _limit_s(self, timeout: Any) -> float:
        with suppress(ConfigError):  # the verb refuses it, with a better text
            return float(seconds_of(timeout))
        return float(self.comm._group.timeout_s)

    @property
    def may_announce(self) -> bool:
        """Whether the next step can begin before all ranks have ended this one; the same on all ranks."""
        return self.comm.births == self.shown or self.step < self.latest

    def all_entries(self) -> list[Entry]:
        """All recorded calls, those from before this step first."""
        return [*self.kept, *self.entries.values()]

    def next_step(self) -> list[Entry]:
        """Begin the next step with the ranks that took part in the boundary; returns the calls that are released."""
        last = self.entries.pop(next(key for key in self.entries if key[0] == BOUNDARY))
        released = self.all_entries()
        self.kept = [last]
        self._begin_step()
        self.shown = last.contributors
        return released

    def announce(self, boundary: Entry) -> None:
        """Begin the next step with the same ranks, before all have ended this one."""
        del self.entries[boundary.key]
        over = list(self.entries.values())
        self.kept = [*self.kept, *over, boundary]
        self.pending, self.is_unposted = boundary, True
        # One that has failed here may be under way on other ranks, and its name be in use.
        is_unsettled, done = False, Standing.DONE
        for entry in over:
            if entry.is_bare or entry.standing is not done:
                is_unsettled = True
            if entry.unfreeze:
                self._lent += map(ref, entry.unfreeze)
                entry.unfreeze = ()
        self.is_unsettled = is_unsettled
        self._begin_step()

    def all_have_begun(self, boundary: Entry) -> list[Entry]:
        """Note that the announced boundary is done; returns the calls that are released."""
        released = [one for one in self.kept if one is not boundary]
        self.kept = [boundary]
        return released

    def _begin_step(self) -> None:
        self.entries = {}
        self._uses = {}
        self.step += 1
        self.outcomes = {place: outcome for place, outcome in self.outcomes.items() if outcome.step >= self.step}

    def lent(self) -> list[Array]:
        """Results of the step before this one that the program still has."""
        return [one for there in self._lent if (one := there()) is not None]

    def thaw(self) -> None:
        """Let the program write to the results of the step before this one."""
        for one in self.lent():
            one.setflags(write=True)
        self._lent = []

    def restart(self) -> list[Entry]:
        """Count calls and steps from 0, as joining ranks count theirs; returns the calls that are released."""
        released = self.all_entries()
        self.kept, self.entries, self.outcomes, self._uses, self._own_uses = [], {}, {}, {}, {}
        self.step = self.latest = 0
        self.shown = self.comm.births
        return released

    # ---------------------------------------------------------------- comparison after a loss

    def standings(self) -> list[Row]:
        """Rows of all calls that are over on this rank, or that have a result of its own there."""
        over = (one for one in self.all_entries() if one.standing is not Standing.POSTED)
        return sorted((*one.key, int(one.standing), one.contributors, one.step, one.why) for one in over)

    def digest(self) -> bytes:
        """Digest of the step and its calls that are over: ranks with equal ones need not compare their calls."""
        # Without reasons, which name ranks; without HELD, which needs no outcome: the call is repeated.
        rows = [row[:-1] for row in self.standings() if row[2] != Standing.HELD]
        return hashlib.blake2b(msgpack.packb([self.step, rows]), digest_size=DIGEST_NBYTES).digest()

    def outcome_of(self, entry: Entry) -> CallOutcome | None:
        """Outcome that the ranks agreed on after a loss; None without one."""
        return self.outcomes.get((entry.key, entry.step))
