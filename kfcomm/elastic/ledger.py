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
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import msgpack
import numpy as np

from kfcomm.collectives.handle import Handle, looked_at
from kfcomm.communicator import Communicator
from kfcomm.elastic.calls import GIVEN_AS_ARRAYS, Call, frozen, plain, restored, written
from kfcomm.elastic.verdicts import Key, Row, Standing, Verdict, decide
from kfcomm.epochs import NO_PLAN, NUM_TELLERS, Plan, Released, tell_store
from kfcomm.errors import (
    CollectiveAborted,
    CollectiveError,
    CollectiveMismatch,
    EpochChanged,
    PeerLost,
)
from kfcomm.runtime.agreements import Call as AgreementKind

logger = logging.getLogger("kfcomm")

OWN_NAMES = "kfcomm/"
BOUNDARY = f"{OWN_NAMES}boundary"
"""The name of the call between two steps."""
ABORTED_S = 0.5
"""A rank that fails ends what it has in flight, and then it leaves: so long that is waited for."""
MAX_SCRATCH = 8
"""Pieces of one shape and dtype that are kept for calls in place."""
TELL_WITHIN_S = 2.0
"""Whoever leaves waits so long for a store that does not answer."""
DIGEST_NBYTES = 16

Births: TypeAlias = tuple[int, ...]
Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"


class Entry:
    """A call of this rank.

    Attributes:
        key: its name (empty without one), and which use of that in the step.
        call: the verb and its arguments.
        outer: what the caller holds; None while the caller does the call itself: see ``Ledger.enter``.
        inner: the collective under way; None if there is none, the caller's thread while that does it itself.
        standing: how it stands on this rank.
        step: to which it belongs; a boundary belongs to the one that it begins.
        result: once it is there.
        contributors: births of the ranks whose contributions are in it.
        scratch: where it was made, if the caller wants it elsewhere.
        unfreeze: arrays of the result that can be written to again when the step is over.
        is_void: it has failed because ranks were lost.
    """

    __slots__ = (
        "call", "contributors", "inner", "is_void", "key", "outer", "result", "scratch", "standing", "step", "unfreeze",
    )  # fmt: skip

    def __init__(self, key: Key, call: Call, outer: Handle[Any] | None, step: int) -> None:
        self.key = key
        self.step = step
        self.call = call
        self.outer = outer
        self.inner: Handle[Any] | int | None = None
        self.standing = Standing.POSTED
        self.result: Any = None
        self.contributors: Births = ()
        self.scratch: Array | None = None
        self.unfreeze: list[Array] = []
        self.is_void = False


class Ledger:
    """The calls of one rank while an ``Elastic`` is open. Everything here runs where the engine does.

    Args:
        comm: of the epoch.
        moved: told of the communicator of each new epoch.
        finishes: what no rank has finished when one is lost is done again by the others; else it fails on all.

    Attributes:
        comm: of the epoch.
        shown: births of the ranks of the step, which its calls number from 0.
        step: its number since ranks have last come or gone by a plan: the same on those that have come then.
        plan: agreed on, and not carried out yet; an empty one, if there is none.
        is_released: by a plan this rank does not go on.
        num_changes: of the epoch, so far.
        paused_s: for how long calls have waited for these.
    """

    def __init__(self, comm: Communicator, moved: Callable[[Communicator], None], *, finishes: bool = True) -> None:
        self.comm = comm
        self.shown: Births = comm.births
        self.plan = NO_PLAN
        self.is_released = False
        self.num_changes = 0
        self.paused_s = 0.0
        self.step = 0
        self._moved = moved
        self._finishes = finishes
        self._entries: dict[Key, Entry] = {}
        self._kept: list[Entry] = []
        self._uses: dict[str, int] = {}
        self._gifts: dict[Key, Verdict] = {}
        self._parts: dict[Handle[Any], int] = {}
        self._change: asyncio.Task[None] | None = None
        self._quiet: asyncio.Future[None] | None = None
        self._error: BaseException | None = None
        self._scratch: dict[tuple[tuple[int, ...], str], list[Array]] = {}
        self._is_closed = False
        self._telling: set[asyncio.Task[None]] = set()
        self._news: tuple[tuple[int, ...], Plan] | None = None
        """What the store is to be told of this epoch, unless this rank has."""
        self._watch()
        if self._has_lost():
            self._start_change()

    # ---------------------------------------------------------------- calls

    def begin(self, verb: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Handle[Any]:
        """Begin a call of this step.

        Raises:
            ConfigError: see the verb.
        """
        outer: Handle[Any] = Handle(loop=self.comm._session.engine.loop)
        entry = self._entered(Call(verb, args, kwargs), outer)
        outer.when_done(self._reactor, lambda done: self._cancelled(entry) if done.cancelled() else None)
        if self._error is not None:
            self._refuse(entry, self._error)
        elif self._change is None:
            try:
                self._post(entry)
            except BaseException:
                outer.cancel()
                raise
        return outer

    def _entered(self, call: Call, outer: Handle[Any] | None) -> Entry:
        name = call.get("name")
        if type(name) is not str:
            name = ""
        number = self._uses.get(name, 0)
        self._uses[name] = number + 1
        entry = Entry((name, number), call, outer, self.step + (name == BOUNDARY))
        entry.inner = threading.get_ident() if outer is None else None
        self._entries[entry.key] = entry
        return entry

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
            entry.outer = Handle(loop=self.comm._session.engine.loop)
        entry.inner = None
        if self._error is not None:
            self._refuse(entry, self._error)
        elif self._change is None and isinstance(error, EpochChanged) and not self._has_lost():
            self._post(entry)  # a change was over before it had begun
        else:
            self._failed(entry, error)
        self._look_if_quiet()
        return entry.outer

    def given_up(self, thread: int) -> None:
        """The caller was interrupted, at any line."""
        for entry in [one for one in list(self._entries.values()) if one.inner == thread]:
            if entry.standing is not Standing.DONE:
                entry.standing = Standing.FAILED
                if entry.outer is not None:
                    entry.outer.cancel()
            entry.inner = None
        self._look_if_quiet()

    @property
    def _reactor(self) -> Any:
        return self.comm._session.engine.reactor

    def _cancelled(self, entry: Entry) -> None:
        entry.standing = Standing.FAILED
        if isinstance(entry.inner, Handle):
            entry.inner.cancel()

    def _refuse(self, entry: Entry, error: BaseException) -> None:
        entry.standing = Standing.FAILED
        if entry.outer is not None and not entry.outer.done():
            entry.outer.set_exception(error)

    # ---------------------------------------------------------------- one collective

    def _post(self, entry: Entry) -> None:
        gift = self._gift_for(entry)
        if gift is not None and gift.giver < 0:
            if self._root_of(entry) is not None:  # else it has failed for that, on all ranks
                self._void(entry, "it had failed on another rank")
        elif gift is not None:
            self._take(entry, gift)
        elif self.comm.births != self.shown and not self._is_done_again(entry):
            why = "it cannot be done by fewer ranks" if self._finishes else "no rank had finished it"
            self._void(entry, why)
        else:
            entry.standing = Standing.POSTED
            root = self._root_of(entry)
            if root is not None:
                self._run(entry, entry.call.begin(self.comm, root, self._scratch_for(entry)))

    def _gift_for(self, entry: Entry) -> Verdict | None:
        gift = self._gifts.get(entry.key)
        return gift if gift is not None and gift.step == entry.step else None

    def _root_of(self, entry: Entry) -> Any:
        """Its root among the ranks of the epoch; -1 for a verb without; None if it is gone, which fails the call."""
        if not entry.call.kind.is_rooted:
            return -1
        root = entry.call.get("root")
        if type(root) is not int or not 0 <= root < len(self.shown):
            return root if self.comm.births == self.shown else len(self.comm.births)  # the verb says what is wrong
        birth = self.shown[root]
        if birth in self.comm.births:
            return self.comm.births.index(birth)
        key = entry.call.get("name") or ""
        self._refuse(
            entry, PeerLost(f"{entry.call.verb} {key!r} failed: its root, rank {root}, is lost", key=key, rank=root)
        )
        return None

    def _scratch_for(self, entry: Entry) -> Array | None:
        """Where a result is made that the caller wants in place, if it is as large as what the caller gives."""
        x, out = entry.call.get("x"), entry.call.get("out")
        if out is None or type(x) is not np.ndarray or entry.call.verb not in GIVEN_AS_ARRAYS:
            return None
        if entry.scratch is None:
            free = self._scratch.get((x.shape, x.dtype.str))
            entry.scratch = free.pop() if free else np.empty(x.shape, x.dtype)
        return entry.scratch

    def _run(self, entry: Entry, handle: Handle[Any]) -> None:
        entry.inner = handle
        handle.when_done(self._reactor, lambda done: self._ended(entry, done))

    def _ended(self, entry: Entry, handle: Handle[Any]) -> None:
        if entry.inner is not handle:
            return
        entry.inner = None
        error = asyncio.CancelledError() if handle.cancelled() else handle.exception()
        if entry.standing is Standing.FAILED:
            pass
        elif error is None and entry.call.kind.is_own and entry.standing is Standing.POSTED:
            entry.result, entry.standing = handle.result(), Standing.HELD
            self._run(entry, self.comm.barrier(_name("all", entry.key)))
        elif error is None:
            self._finish(entry, entry.result if entry.standing is Standing.HELD else handle.result(), self.comm.births)
        else:
            self._failed(entry, error)
        self._look_if_quiet()

    def _failed(self, entry: Entry, error: BaseException) -> None:
        if self._is_loss(error):
            self._start_change()
        elif isinstance(error, asyncio.CancelledError):
            entry.standing = Standing.FAILED
            if entry.outer is not None:
                entry.outer.cancel()
        elif isinstance(error, CollectiveAborted):
            self._reactor.call_later(ABORTED_S, self._aborted, entry, error)
        else:
            self._refuse(entry, error)

    def _aborted(self, entry: Entry, error: BaseException) -> None:
        """Whoever has ended it may have left meanwhile: then it is done again, without that rank."""
        if entry.standing in (Standing.POSTED, Standing.HELD) and entry.inner is None and self._change is None:
            if self._has_lost():
                self._start_change()
            else:
                self._refuse(entry, error)

    def _finish(self, entry: Entry, result: Any, contributors: Births) -> None:
        entry.standing, entry.contributors = Standing.DONE, contributors
        entry.result = result
        if entry.outer is None or entry.outer.done():
            return
        out = entry.call.get("out")
        try:
            shown = result if out is None else written(result, out)
        except Exception as error:  # noqa: BLE001  whatever the caller's array raises, the result is there
            entry.outer.set_exception(error)
            return
        if out is None:
            entry.unfreeze = frozen(result)
        entry.outer.contributors = contributors
        entry.outer.set_result(shown)

    def _is_loss(self, error: BaseException) -> bool:
        """Whether a rank is gone, which this may have failed by before it was told so.

        A rank that fails ends what it has in flight, and its links. If it was another that ended this call, the ranks
        find that out when they tell each other how their calls stand.
        """
        if isinstance(error, (PeerLost, EpochChanged)):
            return True
        return type(error) in (CollectiveError, CollectiveAborted) and self._has_lost()

    def _has_lost(self) -> bool:
        return bool(self.comm._session.engine.router.lost)

    def _is_done_again(self, entry: Entry) -> bool:
        """Whether those that live do it without the lost; what an ``Elastic`` itself needs between steps, always."""
        return entry.call.kind.can_shrink and (self._finishes or entry.key[0].startswith(OWN_NAMES))

    def _void(self, entry: Entry, why: str) -> None:
        """It fails, as it does on all ranks that live."""
        name = entry.call.get("name") or ""
        members = tuple(self.shown.index(birth) for birth in self.comm.births if birth in self.shown)
        text = (
            f"{entry.call.verb} {name!r} failed: epoch {self.comm.epoch} has begun with ranks {list(members)} in the "
            f"midst of the step, and {why}"
        )
        entry.is_void = True
        self._refuse(entry, EpochChanged(text, key=name, epoch=self.comm.epoch, members=members))
        _heard(entry)  # whoever has heard it from one call of the step does not wait for the others

    # ---------------------------------------------------------------- what was finished by some

    def _take(self, entry: Entry, gift: Verdict) -> None:
        """Finish a call as others have finished it; all take part, who has the result as well as who has not."""
        if _is_sent(entry.call):
            self._given(entry, gift)
        else:
            self._finish(entry, entry.result, gift.contributors)

    def _given(self, entry: Entry, gift: Verdict) -> None:
        call, root, name = entry.call, self._place(gift.giver), _name("given", entry.key)
        handle: Handle[Any]
        is_here = entry.standing is Standing.DONE
        if call.verb in GIVEN_AS_ARRAYS:
            handle = self.comm.broadcast(entry.result if is_here else call.get("x"), root, name)
        else:
            is_object = call.verb.endswith("_object") or call.verb == "consensus"
            value = None if not is_here else entry.result if is_object else plain(entry.result)
            handle = self.comm.broadcast_object(value, root, name)
        if is_here:
            self._parts[handle] = entry.step
            handle.when_done(self._reactor, self._part_done)
            return
        entry.inner = handle
        handle.when_done(self._reactor, lambda done: self._gift_came(entry, gift, done))

    def _place(self, birth: int) -> int:
        return self.comm.births.index(birth)

    def _part_done(self, handle: Handle[Any]) -> None:
        self._parts.pop(handle, None)
        looked_at(handle)
        self._look_if_quiet()

    def _gift_came(self, entry: Entry, gift: Verdict, handle: Handle[Any]) -> None:
        if entry.inner is handle and not handle.cancelled() and handle.exception() is None:
            verb, result = entry.call.verb, handle.result()
            entry.inner = None
            if verb not in GIVEN_AS_ARRAYS and not verb.endswith("_object") and verb != "consensus":
                result = restored(result, entry.call.get("arrays" if verb == "all_reduce_many" else "x"))
            self._finish(entry, result, gift.contributors)
            self._look_if_quiet()
        else:
            self._ended(entry, handle)

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
                    self._refuse(entry, error)

    async def _change_once(self) -> bool:
        """Go to the next epoch; whether another rank was lost on the way, so that it has to be done again."""
        await self._wait_until_quiet()
        self._unwatch()
        # what was said of calls that have not begun here, or not ended: whoever was to give it may be gone
        self._gifts.clear()
        self._tell_store()  # so may be those who were to do it: whom it lets in then takes part in what follows
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
        self._news = former, plan if is_planned else NO_PLAN
        self._tell_store()
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

    async def _wait_until_quiet(self) -> None:
        """Everything in flight has ended: it does so at once, by the loss."""
        while any(entry.inner is not None for entry in list(self._entries.values())) or self._parts:
            self._quiet = asyncio.get_running_loop().create_future()
            await self._quiet

    def _look_if_quiet(self) -> None:
        if self._quiet is not None and not self._quiet.done():
            self._quiet.set_result(None)

    def _standings(self) -> list[Row]:
        """Of all calls that are over on this rank, or that it holds a result of its own of."""
        over = (one for one in [*self._kept, *self._entries.values()] if one.standing is not Standing.POSTED)
        return sorted((*one.key, int(one.standing), one.contributors, one.step) for one in over)

    def _digest(self) -> bytes:
        rows = [row for row in self._standings() if row[2] != Standing.HELD]
        return hashlib.blake2b(msgpack.packb(rows), digest_size=DIGEST_NBYTES).digest()

    def _tell_store(self) -> None:
        """In the background, as far as it falls to this rank."""
        if self._news is None:
            return
        telling = tell_store(self.comm._session, *self._news, self.comm.strategy.name)
        if self.comm.rank < NUM_TELLERS:
            self._news = None
        task = self.comm._session.engine.loop.create_task(telling, name="kfcomm tells the store")
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)

    async def _compare(self) -> None:
        """Tell each other how the calls stand; from that follows what becomes of each, the same on all."""
        said = await self.comm.all_gather_object([self.step, self._standings()], "kfcomm/standings")
        self._gifts = dict(decide(said, self.comm.births))
        over = [one for one in [*self._kept, *self._entries.values()] if one.standing is Standing.DONE]
        for entry in over:
            gift = self._gift_for(entry)
            if gift is not None and gift.giver >= 0 and _is_sent(entry.call):
                self._given(entry, gift)

    def _fail(self, error: BaseException) -> None:
        if isinstance(error, asyncio.CancelledError):
            error = EpochChanged("the communicator was closed while the ranks agreed on who goes on")
        elif isinstance(error, Released):
            error = EpochChanged(f"{error}: this rank is released", epoch=self.comm.epoch + 1)
        self._error = error
        for entry in list(self._entries.values()):
            if entry.standing is not Standing.DONE:
                self._refuse(entry, error)

    # ---------------------------------------------------------------- steps

    async def settled(self) -> None:
        """No change is under way."""
        while self._change is not None:
            await asyncio.wait([self._change])

    def outcome(self, names: Sequence[str] | None) -> set[int] | None:
        """Births whose contributions are in all calls of the step (of these names, if given); None without a call."""
        over = [one for one in self._entries.values() if one.standing is Standing.DONE and one.step == self.step]
        counted = [one for one in over if _is_counted(one, names)]
        return set.intersection(*(set(one.contributors) for one in counted)) if counted else None

    def is_void(self, names: Sequence[str] | None) -> bool:
        """Whether a call of the step (of these names, if given) has failed on this rank because ranks were lost."""
        over = (one for one in self._entries.values() if one.is_void and one.step == self.step)
        return any(_is_counted(one, names) for one in over)

    def unfinished(self) -> list[Handle[Any]]:
        """What the caller has begun in this step and what is not over."""
        handles = []
        for entry in list(self._entries.values()):
            if type(entry.inner) is int and entry.outer is None:  # by another thread
                entry.outer = Handle(loop=self.comm._session.engine.loop)
            if entry.outer is not None and not entry.outer.done() and entry.standing is not Standing.DONE:
                handles.append(entry.outer)
        return handles

    def end_step(self, shown: Births) -> None:
        """All calls of the step are over, and the boundary after it: that alone may still be asked for."""
        for entry in self._kept:
            self._release(entry)
        last = self._entries.pop(next(key for key in self._entries if key[0] == BOUNDARY))
        for entry in self._entries.values():
            self._release(entry)
        self._kept = [last]
        self._entries = {}
        self._uses = {name: uses for name, uses in self._uses.items() if name.startswith(OWN_NAMES)}
        self.shown = shown
        self.step += 1
        self._gifts = {key: gift for key, gift in self._gifts.items() if gift.step >= self.step}
        for handle, step in list(self._parts.items()):
            if step < self.step:  # whoever has not come to it does not come any more
                handle.cancel()

    def _release(self, entry: Entry) -> None:
        for one in entry.unfreeze:
            one.flags.writeable = True
        if entry.scratch is not None:
            free = self._scratch.setdefault((entry.scratch.shape, entry.scratch.dtype.str), [])
            if len(free) < MAX_SCRATCH:
                free.append(entry.scratch)

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
        if self._telling:
            await asyncio.wait(self._telling, timeout=TELL_WITHIN_S)
        for telling in self._telling:
            telling.cancel()
        for entry in [*self._kept, *self._entries.values()]:
            self._release(entry)
            if type(entry.inner) is int or (entry.outer is not None and not entry.outer.done()):
                self._refuse(entry, EpochChanged(f"{entry.call.verb} was still under way when its Elastic ended"))
                _heard(entry)


def _is_counted(entry: Entry, names: Sequence[str] | None) -> bool:
    """Whether it tells of the step's samples: it is of these names or, without any, the program's and not kfcomm's."""
    return entry.key[0] in names if names is not None else not entry.key[0].startswith(OWN_NAMES)


def _heard(entry: Entry) -> None:
    if entry.outer is not None:
        looked_at(entry.outer)


def _is_sent(call: Call) -> bool:
    """Whether a result has to be given to those who have none: each holds its own, and there is none of a barrier."""
    return not call.kind.is_own and call.verb != "barrier"


def _name(what: str, key: Key) -> str:
    """A name that no caller uses, whatever the caller's is."""
    digest = hashlib.blake2b(key[0].encode(errors="surrogatepass"), digest_size=8).hexdigest()
    return f"kfcomm/{what}/{digest}/{key[1]}"
