"""Call log: the calls of the current step on one rank, and how each stands there.

A call is known by its name and by which use of the name in its step it is. Results of a step are kept until all ranks
have ended it, because a rank that died may leave others without a result that this rank has.
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Collection
from typing import Any, NamedTuple

import msgpack

from kfcomm.collectives.handle import Handle
from kfcomm.common.sizes import seconds_of
from kfcomm.core.collective import OWN_NAMES
from kfcomm.elastic.calls import BOUNDARY, CallOutcome, ElasticCall, Entry, Key, Row, Standing, Uids
from kfcomm.errors import ConfigError
from kfcomm.world.communicator import Communicator

DIGEST_NBYTES = 16


class SampleReport(NamedTuple):
    """Outcome of the calls by which samples count as used, since the last boundary, on one rank.

    Attributes:
        is_tried: such a call was made.
        is_done: one has succeeded.
        has_failed: one has not.
        lacking: uids of ranks of the step whose contributions are missing in a successful call.
    """

    is_tried: bool
    is_done: bool
    has_failed: bool
    lacking: frozenset[int]


class CallLog:
    """Calls of one rank while an ``Elastic`` is open. Runs in the engine's thread, except ``add``.

    Args:
        comm: communicator of the epoch.

    Attributes:
        comm: communicator of the epoch.
        shown: uids of the ranks of the step, which its calls number from 0.
        step: number of the step since ranks last joined or left by a plan: the same on the ranks that joined then.
        entries: calls of this step, by key.
        kept: the boundary before this step: another rank may still need its result.
        outcomes: what was agreed after a loss about calls that are over on some ranks only.
    """

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self.shown: Uids = comm.births
        self.step = 0
        self.entries: dict[Key, Entry] = {}
        self.kept: list[Entry] = []
        self.outcomes: dict[Key, CallOutcome] = {}
        self._uses: dict[str, int] = {}

    @property
    def shown_rank(self) -> int:
        """Number of this rank in the step."""
        return self.shown.index(self.comm.births[self.comm.rank])

    @property
    def numbering(self) -> str:
        """Note for errors of this epoch in a step that began with other ranks."""
        if self.comm.births == self.shown:
            return ""
        members = [self.shown.index(uid) for uid in self.comm.births if uid in self.shown]
        return f" (by the numbers of epoch {self.comm.epoch}: these are ranks {members} of the step)"

    def add(self, call: ElasticCall, outer: Handle[Any] | None, now_s: float) -> Entry:
        """Record a call at its place in the step."""
        name = call.title()
        number = self._uses.get(name, 0)
        self._uses[name] = number + 1
        entry = Entry((name, number), call, outer, self.step + (name == BOUNDARY))
        # kfcomm's own calls between steps have no deadline: repeated losses must not end a job that goes on
        entry.deadline_s = math.inf if entry.is_own else now_s + self._limit_s(call)
        entry.inner = threading.get_ident() if outer is None else None
        self.entries[entry.key] = entry  # must be last: a change of the epoch waits for calls that are in flight
        return entry

    def all_entries(self) -> list[Entry]:
        """All recorded calls, those of the boundary before this step first."""
        return [*self.kept, *self.entries.values()]

    def outcome_of(self, entry: Entry) -> CallOutcome | None:
        """Outcome that the ranks agreed on after a loss; None without one."""
        outcome = self.outcomes.get(entry.key)
        return outcome if outcome is not None and outcome.step == entry.step else None

    # ---------------------------------------------------------------- comparison after a loss

    def standings(self) -> list[Row]:
        """Rows of all calls that are over on this rank, or that have a result of its own there."""
        over = (one for one in self.all_entries() if one.standing is not Standing.POSTED)
        return sorted((*one.key, int(one.standing), one.contributors, one.step, one.why) for one in over)

    def digest(self) -> bytes:
        """Digest of the calls that are over: ranks with equal digests need not compare their calls."""
        rows = [row[:-1] for row in self.standings() if row[2] != Standing.HELD]
        return hashlib.blake2b(msgpack.packb(rows), digest_size=DIGEST_NBYTES).digest()

    # ---------------------------------------------------------------- the step

    def samples(self, names: Collection[str] | None, uids: Uids) -> SampleReport:
        """Report on the calls since the last boundary (of these names, if given) for a step's samples.

        ``uids``: the ranks of that step. Some may have been lost at a boundary within it, before these calls.
        """
        counted = [one for one in self.entries.values() if one.step == self.step and one.is_counted(names)]
        over = [one for one in counted if one.standing is Standing.DONE]
        lacking = {uid for uid in uids if any(uid not in one.contributors for one in over)}
        return SampleReport(bool(counted), bool(over), len(over) < len(counted), frozenset(lacking))

    def made(self) -> list[str]:
        """Names of the program's calls in this step."""
        return sorted({one.name for one in self.entries.values() if one.step == self.step and not one.is_own})

    def has_failed(self) -> bool:
        """Whether a call of the step has failed on this rank."""
        return any(one.standing is Standing.FAILED for one in self.entries.values() if one.step == self.step)

    def is_void(self, names: Collection[str] | None) -> bool:
        """Whether a call of the step (of these names, if given) has failed on this rank because ranks were lost."""
        over = (one for one in self.entries.values() if one.is_void and one.step == self.step)
        return any(one.is_counted(names) for one in over)

    def next_step(self) -> list[Entry]:
        """Begin the next step with the ranks that took part in the boundary; returns the calls that are released."""
        last = self.entries.pop(next(key for key in self.entries if key[0] == BOUNDARY))
        released = self.all_entries()
        self.kept, self.entries = [last], {}
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

    def _limit_s(self, call: ElasticCall) -> float:
        try:
            timeout_s = seconds_of(call.get("timeout"))
        except ConfigError:  # the verb refuses it, with a better text
            timeout_s = None
        return self.comm._group.timeout_s if timeout_s is None else timeout_s
