"""Call log: the calls of a step on one rank, how each stands there, and the outcome that the ranks agree on.

A call is known by its name and by which use of the name in its step it is. Results of a step are kept until all ranks
have ended it, because a rank that died may leave others without a result that this rank has.

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
import inspect
import math
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, NamedTuple, TypeAlias

import msgpack

from kfcomm.collectives.batches import many_key, names_of
from kfcomm.collectives.handle import Handle, looked_at
from kfcomm.collectives.specs import SPECS, VerbSpec
from kfcomm.common.arguments import checked_name, whole_number
from kfcomm.common.sizes import seconds_of
from kfcomm.core.collective import OWN_NAMES, name_of, shown
from kfcomm.elastic.state import Array
from kfcomm.errors import ConfigError, PeerLost
from kfcomm.transports.reactor import Reactor, Timer
from kfcomm.types import Verb
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


def decide(said: Sequence[tuple[int, Sequence[Row]]], uids: Sequence[int]) -> Mapping[Key, CallOutcome]:
    """Decide, from each rank's step and rows, the outcome of calls that are over on some ranks and not alike on all."""
    # Done on one rank is done on all, failed on one and done on none is failed on all; any other call is repeated.
    # A rank enters a step only after all ranks have ended the calls of the step before, so rows of older steps are
    # over everywhere and need no outcome. A boundary that a rank has ended counts for the step that it begins.
    latest = max(step for step, _ in said)
    done: dict[Key, list[CallOutcome]] = {}
    failed: dict[tuple[Key, int], list[str]] = {}
    for uid, (_, rows) in zip(uids, said, strict=True):
        for name, number, standing, contributors, step, why in rows:
            if step < latest:
                continue
            if standing == Standing.DONE:
                done.setdefault((name, number), []).append(CallOutcome(step, uid, tuple(contributors)))
            elif standing == Standing.FAILED:
                failed.setdefault(((name, number), step), []).append(why)
    # The lowest rank that has the result sends it: the first, since ``uids`` is in the order of ranks.
    outcomes = {key: having[0] for key, having in done.items() if len(having) < len(uids)}
    # Done wins over failed: a caller somewhere has the result already, and cannot take it back.
    for (key, step), reasons in failed.items():
        if key not in done and len(reasons) < len(uids):
            outcomes[key] = CallOutcome(step, -1, (), reasons[0])
    return outcomes


class VerbTraits(NamedTuple):
    """Traits of a verb that decide how it survives a loss."""

    # Each rank has a result of its own (or none), which other ranks do not have. Such a call is over when all ranks
    # have their results.
    is_own: bool = False
    is_rooted: bool = False
    can_shrink: bool = True  # the surviving ranks can repeat it without the lost ones


def _traits(spec: VerbSpec) -> VerbTraits:
    return VerbTraits(spec.for_root or spec.differs, spec.is_rooted, can_shrink=not spec.differs)


_ALL_REDUCE, _ALL_GATHER, _BROADCAST, _GATHER = (
    _traits(SPECS[verb]) for verb in (Verb.ALL_REDUCE, Verb.ALL_GATHER, Verb.BROADCAST, Verb.GATHER)
)
KINDS: Mapping[str, VerbTraits] = {str(verb): _traits(spec) for verb, spec in SPECS.items()} | {
    "monitored_all_reduce": _ALL_REDUCE,
    "all_reduce_many": _ALL_REDUCE,
    "consensus": _ALL_GATHER,
    "all_gather_object": _ALL_GATHER,
    "broadcast_object": _BROADCAST,
    "gather_object": _GATHER,
    # The parts of the root differ, and so does what is left of them if a rank is lost.
    "scatter": _traits(SPECS[Verb.ALL_TO_ALL]),
    "scatter_object": _traits(SPECS[Verb.ALL_TO_ALL]),
}
"""Verbs that survive the loss of a rank."""

_PARAMETERS = {verb: tuple(inspect.signature(getattr(Communicator, verb)).parameters.values())[1:] for verb in KINDS}
_PLACES = {verb: {one.name: place for place, one in enumerate(found)} for verb, found in _PARAMETERS.items()}
_DEFAULTS = {verb: {one.name: one.default for one in found} for verb, found in _PARAMETERS.items()}


class ElasticCall:
    """Call of a verb, with the caller's arguments."""

    __slots__ = ("_args", "_kwargs", "kind", "verb")

    def __init__(self, verb: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.verb = verb
        self.kind = KINDS[verb]
        self._args = args
        self._kwargs = kwargs

    def get(self, name: str) -> Any:
        """Return an argument; None if the verb does not have it, or it was left out and has no default."""
        if name in self._kwargs:
            return self._kwargs[name]
        place = _PLACES[self.verb].get(name, len(self._args))
        if place < len(self._args):
            return self._args[place]
        default = _DEFAULTS[self.verb].get(name)
        return None if default is inspect.Parameter.empty else default

    def title(self) -> str:
        """Return the text by which the ranks match the call, as in a plain job; empty without a name."""
        name = checked_name(self.get("name"))
        # Without a name, the names of the arrays identify the call, as in a plain job.
        if self.verb != "all_reduce_many":
            return name or ""
        names = names_of(self.get("arrays")) if name is None else [name]
        return many_key(names) if names else ""

    def begin(self, comm: Communicator, root: Any, out: Any, timeout_s: float | None = None) -> Handle[Any]:
        """Call the verb with another root and ``out``, and with another timeout, if one is given."""
        args, kwargs = self._args, self._kwargs
        places = _PLACES[self.verb]
        changed = {}
        if self.kind.is_rooted:
            changed["root"] = root
        if "out" in places:
            changed["out"] = out
        if timeout_s is not None:
            changed["timeout"] = timeout_s
        # Arguments are replaced where the caller gave them, by position or by name, so that the verb
        # sees one value for each.
        for name in list(changed):
            place = places[name]
            if place < len(args):
                args = (*args[:place], changed.pop(name), *args[place + 1 :])
        begun: Handle[Any] = getattr(comm, self.verb)(*args, **(kwargs | changed))
        return begun


class ElasticHandle(Handle[Any]):
    """Handle of a call that survives the loss of ranks."""

    # Ends the call on all ranks where it is not over; False if it is over on this one.
    withdraw: Callable[[], bool] | None = None

    def cancel(self, msg: Any | None = None) -> bool:
        """End the call everywhere; False if it is complete already."""
        if self.done() or (self.withdraw is not None and not self.withdraw()):
            return False
        return super().cancel(msg)


@dataclass(slots=True, eq=False)
class Entry:
    """Record of a call on this rank."""

    key: Key
    call: ElasticCall
    outer: Handle[Any] | None  # the caller's; None while the caller executes the call itself, see `Dispatcher.enter`
    step: int  # a boundary belongs to the step that it begins
    inner: Handle[Any] | int | None = None  # collective under way, or the thread of a caller that executes it itself
    giving: CallOutcome | None = None  # outcome whose result the collective under way brings from another rank
    standing: Standing = Standing.POSTED
    result: Any = None
    contributors: Uids = ()  # whose contributions are in the result
    scratch: Array | None = None  # buffer of the result, if the caller wants it elsewhere
    unfreeze: list[Array] = field(default_factory=list)  # become writeable again when the step is over
    is_void: bool = False  # it has failed because ranks were lost
    why: str = ""  # of a failure or a cancellation, for the other ranks
    deadline_s: float = math.inf  # by the reactor's clock; inf for a call with a timeout for each of its parts
    timer: Timer | None = None  # ends the call at its deadline while it waits for a change of the epoch
    refusal: tuple[BaseException, int] | None = None  # why this rank does not make it, and the call's number of steps
    has_told: bool = False  # ranks with their own result in this epoch know that this rank has failed

    @property
    def name(self) -> str:
        """The caller's name; "unnamed" without one."""
        return name_of(self.key[0])

    @property
    def title(self) -> str:
        """The caller's name for error texts."""
        return shown(self.key[0].partition("\0")[0])

    @property
    def is_own(self) -> bool:
        """Whether kfcomm makes the call between steps, not the program."""
        return self.key[0].startswith(OWN_NAMES)

    @property
    def is_left(self) -> bool:
        """Whether the caller has cancelled it, or it timed out, while it is not over among the ranks."""
        return self.outer is not None and self.outer.done()

    @property
    def is_sent(self) -> bool:
        """Whether its result is sent to ranks without it: not if each rank has its own, nor for a barrier."""
        return not self.call.kind.is_own and self.call.verb != "barrier"

    def is_counted(self, names: Collection[str] | None) -> bool:
        """Whether it counts for the step's samples: it has one of these names or, without names, is the program's."""
        return self.name in names if names is not None else not self.is_own

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
        self.kept: list[Entry] = []  # the boundary before this step: another rank may still need its result
        # What was agreed after a loss about calls that are over on some ranks only
        self.outcomes: dict[Key, CallOutcome] = {}
        self.is_changing = False  # a change of the epoch is under way
        self.error: BaseException | None = None  # error that has ended all calls; else None
        self._uses: dict[str, int] = {}

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
        number = self._uses.get(name, 0)
        self._uses[name] = number + 1
        entry = Entry((name, number), call, outer, self.step + (name == BOUNDARY))
        # kfcomm's own calls between steps have no deadline: repeated losses must not end a job that survives them
        if not entry.is_own:
            entry.deadline_s = self.reactor.time() + self._limit_s(call)
        entry.inner = threading.get_ident() if outer is None else None
        self.entries[entry.key] = entry  # must be last: a change of the epoch waits for calls that are in flight
        return entry

    def _limit_s(self, call: ElasticCall) -> float:
        try:
            timeout_s = seconds_of(call.get("timeout"))
        except ConfigError:  # the verb refuses it, with a better text
            timeout_s = None
        return self.comm._group.timeout_s if timeout_s is None else timeout_s

    def all_entries(self) -> list[Entry]:
        """All recorded calls, those of the boundary before this step first."""
        return [*self.kept, *self.entries.values()]

    def since_boundary(self) -> list[Entry]:
        """Calls of the step since its last boundary."""
        return [one for one in self.entries.values() if one.step == self.step]

    def next_step(self) -> list[Entry]:
        """Begin the next step with the ranks that took part in the boundary; returns the calls that are released."""
        last = self.entries.pop(next(key for key in self.entries if key[0] == BOUNDARY))
        released = self.all_entries()
        self.kept, self.entries = [last], {}
        # The program's names count from 0 in each step. kfcomm's own count on: the kept boundary and the next one must
        # not have one key.
        self._uses = {name: uses for name, uses in self._uses.items() if name.startswith(OWN_NAMES)}
        self.shown = last.contributors
        self.step += 1
        self.outcomes = {key: outcome for key, outcome in self.outcomes.items() if outcome.step >= self.step}
        return released

    def restart(self) -> list[Entry]:
        """Count calls and steps from 0, as joining ranks count theirs; returns the calls that are released."""
        released = self.all_entries()
        self.kept, self.entries, self.outcomes, self._uses = [], {}, {}, {}
        self.step = 0
        self.shown = self.comm.births
        return released

    # ---------------------------------------------------------------- comparison after a loss

    def standings(self) -> list[Row]:
        """Rows of all calls that are over on this rank, or that have a result of its own there."""
        over = (one for one in self.all_entries() if one.standing is not Standing.POSTED)
        return sorted((*one.key, int(one.standing), one.contributors, one.step, one.why) for one in over)

    def digest(self) -> bytes:
        """Digest of the calls that are over: ranks with equal digests need not compare their calls."""
        # Without reasons, which name ranks; without HELD, which needs no outcome: the call is repeated.
        rows = [row[:-1] for row in self.standings() if row[2] != Standing.HELD]
        return hashlib.blake2b(msgpack.packb(rows), digest_size=DIGEST_NBYTES).digest()

    def outcome_of(self, entry: Entry) -> CallOutcome | None:
        """Outcome that the ranks agreed on after a loss; None without one."""
        outcome = self.outcomes.get(entry.key)
        return outcome if outcome is not None and outcome.step == entry.step else None
