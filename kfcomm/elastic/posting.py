"""How a call of a step is done in the communicator of the epoch: at first, again after a loss, or by who has a result.

What is posted here is taken up again by the `Ledger`, after each change of the epoch.
"""

from __future__ import annotations

import abc
import asyncio
from typing import Any

import numpy as np

from kfcomm.collectives.handle import Handle, looked_at
from kfcomm.communicator import Communicator
from kfcomm.core.collective import OWN_NAMES
from kfcomm.elastic.calls import GIVEN_AS_ARRAYS, frozen, plain, restored, written
from kfcomm.elastic.entry import Births, Entry, name_for
from kfcomm.elastic.stripes import Array
from kfcomm.elastic.verdicts import Key, Standing, Verdict
from kfcomm.errors import CollectiveAborted, CollectiveError, EpochChanged, PeerLost

ENDED_BY_OTHERS = (CollectiveError, CollectiveAborted)
ABORTED_S = 0.5
"""A rank that fails ends what it has in flight, and then it leaves: so long that is waited for."""
MAX_SCRATCH = 8
"""Pieces of one shape and dtype that are kept for calls in place."""


class Posting(abc.ABC):
    """The calls of one rank in the communicator of the epoch. Everything here runs where the engine does.

    Args:
        comm: of the epoch.
        finishes: what no rank has finished when one is lost is done again by the others; else it fails on all.

    Attributes:
        comm: of the epoch.
        shown: births of the ranks of the step, which its calls number from 0.
    """

    def __init__(self, comm: Communicator, *, finishes: bool) -> None:
        self.comm = comm
        self.shown: Births = comm.births
        self._finishes = finishes
        self._entries: dict[Key, Entry] = {}
        self._gifts: dict[Key, Verdict] = {}
        self._parts: dict[Handle[Any], int] = {}
        self._change: asyncio.Task[None] | None = None
        self._quiet: asyncio.Future[None] | None = None
        self._scratch: dict[tuple[tuple[int, ...], str], list[Array]] = {}

    @abc.abstractmethod
    def _start_change(self) -> None:
        """Ranks are lost: calls are taken up again when those that live have agreed on who goes on."""

    @property
    def _reactor(self) -> Any:
        return self.comm._session.engine.reactor

    def _cancelled(self, entry: Entry) -> None:
        entry.standing = Standing.FAILED
        if isinstance(entry.inner, Handle):
            entry.inner.cancel()

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
        entry.refuse(PeerLost(f"{entry.call.verb} {key!r} failed: its root, rank {root}, is lost", key=key, rank=root))
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
            self._run(entry, self.comm.barrier(name_for("all", entry.key)))
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
        elif type(error) in ENDED_BY_OTHERS:
            self._reactor.call_later(ABORTED_S, self._ended_by_others, entry, error)
        else:
            entry.refuse(error)

    def _ended_by_others(self, entry: Entry, error: BaseException) -> None:
        """Whoever has ended it, or closed a link, may have left meanwhile: then it is done again, without that rank."""
        if entry.standing in (Standing.POSTED, Standing.HELD) and entry.inner is None and self._change is None:
            if self._has_lost():
                self._start_change()
            else:
                entry.refuse(error)

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
        return type(error) in ENDED_BY_OTHERS and self._has_lost()

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
        entry.refuse(EpochChanged(text, key=name, epoch=self.comm.epoch, members=members))
        entry.heard()  # whoever has heard it from one call of the step does not wait for the others

    # ---------------------------------------------------------------- what was finished by some

    def _take(self, entry: Entry, gift: Verdict) -> None:
        """Finish a call as others have finished it; all take part, who has the result as well as who has not."""
        if entry.is_sent:
            self._given(entry, gift)
        else:
            self._finish(entry, entry.result, gift.contributors)

    def _given(self, entry: Entry, gift: Verdict) -> None:
        call, root, name = entry.call, self._place(gift.giver), name_for("given", entry.key)
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

    # ---------------------------------------------------------------- what is over

    async def _wait_until_quiet(self) -> None:
        """Everything in flight has ended: it does so at once, by the loss."""
        while any(entry.inner is not None for entry in list(self._entries.values())) or self._parts:
            self._quiet = asyncio.get_running_loop().create_future()
            await self._quiet

    def _look_if_quiet(self) -> None:
        if self._quiet is not None and not self._quiet.done():
            self._quiet.set_result(None)

    def _release(self, entry: Entry) -> None:
        for one in entry.unfreeze:
            one.setflags(write=True)
        if entry.scratch is not None:
            free = self._scratch.setdefault((entry.scratch.shape, entry.scratch.dtype.str), [])
            if len(free) < MAX_SCRATCH:
                free.append(entry.scratch)
