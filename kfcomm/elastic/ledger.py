"""The calls of a step, and how they stand when a rank dies: finished for all who live, done again by them, or failed.

A call is a verb with its arguments, known by its name and which use of the name in its step it is. The ledger posts it
in the communicator of the epoch. When a rank is lost, everything in flight ends at once, here as on all others; then
the ranks agree on who goes on (`epochs`), with a digest of what each has finished as its part. Where all have finished
the same, nothing more is said: the rest is done again in the new epoch. Else they tell each other how they stand, and
`verdicts` says of each call what becomes of it: the same on all, since it is made of the same.

Invariants:

- For each call all ranks that live get the same result with the same contributors, or all get an error.
- What one rank has finished, all finish: the lowest that has it gives it to the others. Results are kept until the
  step is over, and not to be written to before. Whoever comes to such a call later takes what is given.
- Inputs are intact until the call is over: what the caller wants in place is made beside, and copied.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import threading
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, NamedTuple

import msgpack

from kfcomm.collectives.handle import Handle
from kfcomm.common.sizes import seconds_of
from kfcomm.core.collective import OWN_NAMES
from kfcomm.elastic.calls import Call, frozen
from kfcomm.elastic.entry import BOUNDARY, Births, Entry, Outer
from kfcomm.elastic.posting import Posting
from kfcomm.elastic.telling import Telling
from kfcomm.elastic.verdicts import Row, Standing, decide
from kfcomm.engine.agreements import Call as AgreementKind
from kfcomm.errors import CollectiveMismatch, ConfigError, EpochChanged, PeerLost
from kfcomm.world.communicator import Communicator
from kfcomm.world.epochs import NO_PLAN, Plan, Released

DIGEST_NBYTES = 16


class Outcome(NamedTuple):
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


class Ledger(Posting):
    """The calls of one rank while an ``Elastic`` is open. Everything here runs where the engine does.

    Args:
        comm: of the epoch.
        moved: told of the communicator of each new epoch.
        telling: tells the store of each.
        finishes: what no rank has finished when one is lost is done again by the others; else it fails on all.

    Attributes:
        step: its number since ranks have last come or gone by a plan: the same on those that have come then.
        plan: agreed on, and not carried out yet; an empty one, if there is none.
        is_released: by a plan this rank does not go on.
        num_changes: of the epoch, so far.
        paused_s: for how long calls have waited for these.
    """

    def __init__(
        self, comm: Communicator, moved: Callable[[Communicator], None], telling: Telling, *, finishes: bool = True
    ) -> None:
        super().__init__(comm, finishes=finishes)
        self.plan = NO_PLAN
        self.is_released = False
        self.num_changes = 0
        self.paused_s = 0.0
        self.step = 0
        self._moved = moved
        self._kept: list[Entry] = []
        self._uses: dict[str, int] = {}
        self._error: BaseException | None = None
        self._is_closed = False
        self._telling = telling
        self._watch()
        if self._has_lost():
            self._start_change()

    # ---------------------------------------------------------------- calls

    def begin(self, verb: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Handle[Any]:
        """Begin a call of this step.

        Raises:
            ConfigError: see the verb.
        """
        call = Call(verb, args, kwargs)
        outer = Outer(loop=self.comm._session.engine.loop)
        entry = self._entered(call, outer)
        outer.withdraw = partial(self._withdraw, entry)
        if self._error is not None:
            entry.refuse(self._error)
        elif self._change is not None:
            self._wait_for_change(entry)
        else:
            try:
                self._post(entry, is_first=True)
            except BaseException as error:
                self._tell_holders(entry, error)
                entry.why = f"rank {self._shown_rank} refused its call of {entry.title}: {error}"
                outer.cancel()
                raise
        return outer

    def refuse(self, name: str | None, error: BaseException, steps: int) -> None:
        """A call of this step is not made on this rank: it takes its place all the same, and fails on the others.

        Raises:
            ConfigError: it cannot be a name.
        """
        outer = Outer(loop=self.comm._session.engine.loop)
        entry = self._entered(Call("barrier", (name,), {}), outer)
        entry.refusal = error, steps
        entry.refuse(error)
        entry.heard()
        entry.why = f"rank {self._shown_rank} refused its call of {entry.title}: {entry.why}"
        if self._change is None and self._error is None:
            self._post(entry)
        else:
            entry.standing = Standing.POSTED  # until the ranks have gone on

    def _entered(self, call: Call, outer: Handle[Any] | None) -> Entry:
        name = call.title()
        number = self._uses.get(name, 0)
        self._uses[name] = number + 1
        entry = Entry((name, number), call, outer, self.step + (name == BOUNDARY))
        if not entry.is_own:  # what kfcomm does between steps is not to fail because ranks are lost again and again
            entry.deadline_s = self._reactor.time() + self._limit_s(call)
        entry.inner = threading.get_ident() if outer is None else None
        self._entries[entry.key] = entry
        return entry

    def _limit_s(self, call: Call) -> float:
        """Its timeout; if that is none, the verb says so."""
        try:
            timeout_s = seconds_of(call.get("timeout"))
        except ConfigError:
            timeout_s = None
        return self.comm._group.timeout_s if timeout_s is None else timeout_s

    def enter(self, verb: str, args: tuple[Any, ...], kwargs: dict[str, Any], comm: Communicator) -> Entry | None:
        """Begin a call that the caller will do itself, on any thread, in ``comm``; None if anything is unusual.

        What becomes of it the caller says with ``done``, ``gone_on`` or ``given_up``. If a change begins meanwhile, it
        waits for that; if one was faster, ``comm`` refuses the call.
        """
        if comm is not self.comm or self._change is not None or self._gifts or self._error is not None:
            return None
        return self._entered(Call(verb, args, kwargs), None) if comm.births == self.shown else None

    def done(self, entry: Entry, result: Any, births: Births) -> bool:
        """The caller has a result; whether somebody waits for that, who has to be told by ``tell`` in the engine."""
        entry.result, entry.contributors = result, births
        entry.unfreeze = frozen(result)
        entry.standing = Standing.DONE
        entry.inner = None  # the last: from now on a change goes on
        return self._change is not None or entry.outer is not None

    def tell(self, entry: Entry) -> None:
        """It is over, and the caller knows."""
        if entry.outer is not None and not entry.outer.done():
            entry.outer.set_result(entry.result)
        self._look_if_quiet()

    def gone_on(self, entry: Entry, error: BaseException) -> Handle[Any]:
        """The caller has failed with an error. If ranks were lost, the call is finished all the same."""
        if entry.outer is None:
            entry.outer = self._new_outer(entry)
        entry.inner = None
        if self._error is not None:
            entry.refuse(self._error)
        elif self._change is None and isinstance(error, EpochChanged) and not self._has_lost():
            self._post(entry)  # a change was over before it had begun
        else:
            self._failed(entry, error)
        self._look_if_quiet()
        return entry.outer

    def _new_outer(self, entry: Entry) -> Outer:
        outer = Outer(loop=self.comm._session.engine.loop)
        outer.withdraw = partial(self._withdraw, entry)
        return outer

    def given_up(self, thread: int) -> None:
        """The caller was interrupted, at any line."""
        for entry in [one for one in list(self._entries.values()) if one.inner == thread]:
            entry.inner = None
            if entry.standing is not Standing.DONE:
                entry.standing = Standing.FAILED
                entry.why = f"{entry.title} was cancelled on rank {self._shown_rank}"
                if entry.outer is not None:
                    entry.outer.cancel()
        self._look_if_quiet()

    # ---------------------------------------------------------------- a change of the epoch

    def _watch(self) -> None:
        self.comm._session.engine.loss_listeners.append(self._start_change)

    def _unwatch(self) -> None:
        with contextlib.suppress(ValueError):
            self.comm._session.engine.loss_listeners.remove(self._start_change)

    def _start_change(self) -> None:
        if self._change is None and self._error is None and not self._is_closed and not self.comm._session.is_closed:
            loop = self.comm._session.engine.loop
            self._change = loop.create_task(self._run_change(), name="kfcomm changes the epoch")

    async def _run_change(self) -> None:
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        try:
            while await self._change_once():
                pass
        except BaseException as error:  # noqa: BLE001  every call hears it
            self._fail(error)
        finally:
            self._change = None
            self.paused_s += loop.time() - began_s
        for entry in list(self._entries.values()):
            if entry.standing in (Standing.POSTED, Standing.HELD) and entry.inner is None and self._change is None:
                try:
                    self._post(entry)
                except Exception as error:  # noqa: BLE001  it was checked when it was first posted, or is now
                    entry.refuse(error)

    async def _change_once(self) -> bool:
        """Go to the next epoch; whether another rank was lost on the way, so that it has to be done again."""
        await self._wait_until_quiet()
        self._unwatch()
        # what was said of calls that have not begun here, or not ended: whoever was to give it may be gone
        self._gifts.clear()
        plan = self.plan
        try:
            comm, said, is_planned = await self.comm._succeed(self._digest(), plan=plan)
        except CollectiveMismatch:  # others take this step for the last one, and have not heard of the loss
            return True
        except Released:
            self.is_released = True
            raise
        self.num_changes += 1
        former, self.comm = self.comm.births, comm
        self._watch()
        self._moved(comm)
        self._telling.begin(comm, former, plan if is_planned else NO_PLAN)
        if is_planned:
            self.plan = NO_PLAN
            self._begin_anew()
            return self._has_lost()
        try:
            if len(set(said.values())) > 1:
                await self._compare()
        except (PeerLost, EpochChanged):
            return True
        return self._has_lost()

    def _begin_anew(self) -> None:
        """All that was begun is over on all ranks: calls and steps are counted from 0, as new ranks count theirs."""
        for entry in [*self._kept, *self._entries.values()]:
            self._release(entry)
        self._kept, self._entries, self._gifts, self._uses = [], {}, {}, {}
        self.step = 0
        self.shown = self.comm.births

    async def change(self, plan: Plan) -> None:
        """Carry out a plan that all ranks know of by now, or will.

        Raises:
            EpochChanged: by the plan this rank does not go on.
        """
        self.plan = plan
        while self._has_plan():
            if self._error is not None:
                raise self._error
            self._start_change()
            await self.settled()

    def _has_plan(self) -> bool:
        return self.plan != NO_PLAN

    def _standings(self) -> list[Row]:
        """Of all calls that are over on this rank, or that it holds a result of its own of."""
        over = (one for one in [*self._kept, *self._entries.values()] if one.standing is not Standing.POSTED)
        return sorted((*one.key, int(one.standing), one.contributors, one.step, one.why) for one in over)

    def _digest(self) -> bytes:
        rows = [row[:-1] for row in self._standings() if row[2] != Standing.HELD]
        return hashlib.blake2b(msgpack.packb(rows), digest_size=DIGEST_NBYTES).digest()

    async def _compare(self) -> None:
        """Tell each other how the calls stand; from that follows what becomes of each, the same on all."""
        said = await self.comm.all_gather_object([self.step, self._standings()], "kfcomm/standings")
        self._gifts = dict(decide(said, self.comm.births))
        over = (Standing.DONE, Standing.FAILED)
        for entry in [one for one in [*self._kept, *self._entries.values()] if one.standing in over]:
            gift = self._gift_for(entry)
            if gift is not None and gift.giver >= 0 and entry.is_sent:
                self._take_part(entry, gift)

    def _fail(self, error: BaseException) -> None:
        if isinstance(error, asyncio.CancelledError):
            error = EpochChanged("the communicator was closed while the ranks agreed on the survivors")
        elif isinstance(error, Released):
            error = EpochChanged(f"{error}: this rank is released", epoch=self.comm.epoch + 1)
        self._error = error
        for entry in list(self._entries.values()):
            if entry.standing is not Standing.DONE:
                entry.refuse(error)

    # ---------------------------------------------------------------- steps

    @property
    def is_changing(self) -> bool:
        """Whether a change is under way."""
        return self._change is not None

    async def settled(self) -> None:
        """No change is under way."""
        while self._change is not None:
            await asyncio.wait([self._change])

    def outcome(self, names: Collection[str] | None, births: Births) -> Outcome:
        """Outcome of the calls since the last boundary (of these names, if given) for a step's samples.

        ``births``: of the ranks of that step. Some may have been lost at a boundary within it, before these calls.
        """
        counted = [one for one in self._entries.values() if one.step == self.step and one.is_counted(names)]
        over = [one for one in counted if one.standing is Standing.DONE]
        lacking = {birth for birth in births if any(birth not in one.contributors for one in over)}
        return Outcome(bool(counted), bool(over), len(over) < len(counted), frozenset(lacking))

    def made(self) -> list[str]:
        """The names of the calls that the program has made in this step."""
        return sorted({one.name for one in self._entries.values() if one.step == self.step and not one.is_own})

    def has_failed(self) -> bool:
        """Whether a call of the step has failed on this rank."""
        return any(one.standing is Standing.FAILED for one in self._entries.values() if one.step == self.step)

    def is_void(self, names: Collection[str] | None) -> bool:
        """Whether a call of the step (of these names, if given) has failed on this rank because ranks were lost."""
        over = (one for one in self._entries.values() if one.is_void and one.step == self.step)
        return any(one.is_counted(names) for one in over)

    def unfinished(self) -> list[Handle[Any]]:
        """What the caller has begun in this step and what is not over."""
        handles = []
        for entry in list(self._entries.values()):
            if type(entry.inner) is int and entry.outer is None:  # by another thread
                entry.outer = self._new_outer(entry)
            if entry.outer is not None and not entry.outer.done() and entry.standing is not Standing.DONE:
                handles.append(entry.outer)
        return handles

    def end_step(self) -> Births:
        """All calls of the step are over, and the boundary after it: that alone may still be asked for.

        Returns:
            Who took part in the boundary, and so in the next step.
        """
        for entry in self._kept:
            self._release(entry)
        last = self._entries.pop(next(key for key in self._entries if key[0] == BOUNDARY))
        if any(one.is_void for one in self._entries.values()):
            for entry in self._entries.values():
                entry.heard()  # whoever has heard from one call that the step is void has left the others
        for entry in self._entries.values():
            self._release(entry)
        self._kept = [last]
        self._entries = {}
        self._uses = {name: uses for name, uses in self._uses.items() if name.startswith(OWN_NAMES)}
        self.shown = last.contributors
        self.step += 1
        self._gifts = {key: gift for key, gift in self._gifts.items() if gift.step >= self.step}
        for handle, step in list(self._parts.items()):
            if step < self.step:  # whoever has not come to it does not come any more
                handle.cancel()
        return self.shown

    async def part(self) -> bool:
        """Whether all ranks take part no more, from now on; False if the epoch has to change first."""
        try:
            await self.settled()
            if self._error is not None:
                raise self._error
            await self.comm._session.agreements.decide(AgreementKind.AGREE, b"end", self.comm._session.timeout_s)
        except CollectiveMismatch:
            self._start_change()
            return False
        self._is_closed = True
        return True

    async def close(self) -> None:
        """Nothing is finished for anybody any more."""
        self._is_closed = True
        self._unwatch()
        if self._change is not None:
            self._change.cancel()
            await asyncio.gather(self._change, return_exceptions=True)
        await self._telling.close()
        for entry in [*self._kept, *self._entries.values()]:
            self._release(entry)
            if type(entry.inner) is int or (entry.outer is not None and not entry.outer.done()):
                text = f"{entry.call.verb} {entry.title} was still under way when its Elastic ended"
                entry.refuse(EpochChanged(text, key=entry.name))
                entry.heard()
