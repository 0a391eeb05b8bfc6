"""Asynchronous parameter server whose parts are spread over the ranks.

Chilimbi et al., "Project Adam", OSDI 2014; Abadi et al., "TensorFlow", OSDI 2016, section 4.4.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np

from kfcomm.arrays import adapt
from kfcomm.common.arguments import checked_name
from kfcomm.train.agreement import check_alike, introduce, refuse
from kfcomm.train.packing import Blob, Packing
from kfcomm.train.procedure import Comm, Procedure, ProcedureCall, call, carried, epoch_of, report, together
from kfcomm.train.rules import count_problem
from kfcomm.train.trees import Tree, converted, leaves, rebuilt

Arrays: TypeAlias = dict[str, Any]
Apply: TypeAlias = Callable[[Arrays, Arrays], Arrays]


def shards(nbytes: Mapping[str, int], size: int) -> dict[str, int]:
    """Assign each array to its owner: the largest first, to the rank with the fewest bytes; of equals the first.

    So no rank has more than the mean and the largest array.
    """
    loads = [0] * size
    found = {}
    for name in sorted(nbytes, key=lambda one: (-nbytes[one], one)):
        rank = loads.index(min(loads))
        loads[rank] += nbytes[name]
        found[name] = rank
    return found


class ParameterServer:
    """Parameter server spread over the ranks: each rank is a worker and the owner of a part of the model.

    ::

        server = kfcomm.train.ParameterServer(comm, model, apply)
        serving = server.serve()                     # a thread of its own waits for it, where the program blocks
        for batch in batches:
            model = await server.pull()
            await server.push(gradient(model, batch))
        await server.finish()
        await serving

    *Ranks that change.* The server has state, so that it can be given to ``kfcomm.elastic.State``: then its parts are
    spread anew over the ranks of each step. Each rank finishes before the ranks change, and serves again after it; of
    a rank that is lost the others have the part that they have pulled last.

    *Staleness.* Of the gradients that a rank has pushed at most ``staleness`` have not been taken by each owner: then
    ``push`` waits. What ``pull`` gives may lack as many of a rank's own, and any number of the others' latest.

    Args:
        comm: whose ranks take part, all of them.
        model: at the beginning, the same on all ranks: a tree of arrays in host memory.
        apply: ``apply(arrays, gradients)`` gives the arrays after an optimizer's step, by name; called by the owner
            for its own, by one thread at a time.
        staleness: pushes, at least 1.
        name: its messages and blobs begin with it.

    Attributes:
        owners: the rank that owns each array, by name.
        num_applied: pushes that this rank has applied, its own included.
        staleness: pushes of this rank that were not in what it has pulled last, at the owner that lacked most. It is
            one of the gauges of ``statistics()``.

    Raises:
        ConfigError: ``staleness`` is not a whole number, at least 1; on the other ranks ``serve`` raises it.

    Cost: for each push and pull S bytes, spread over the owners; each owner sends and receives S/n for every rank.
    """

    def __init__(self, comm: Comm, model: Tree, apply: Apply, *, staleness: int = 4, name: str = "server") -> None:
        self.comm = comm
        self.name = checked_name(name)
        self._introduction, self._tag, self._blob = (f"{name}/{what}" for what in ("introduction", "push", "part"))
        self._said = f"ParameterServer(staleness={staleness!r})"
        problem = count_problem("staleness", staleness)
        if problem is not None:
            refuse(comm, self._said, problem, self._introduction)
        self.num_applied = 0
        self._like = model
        self._apply = apply
        self._most = staleness
        # In a blocking program pushes of this rank and of others are applied on different threads.
        self._applying = threading.Lock()
        self._place(leaves(model))
        self._epoch = epoch_of(comm)
        self._met = introduce(comm, self._said, self._introduction)

    def _place(self, arrays: Arrays) -> None:
        """Begin with this model among the present ranks: each owner has its part, and no push is under way."""
        size, rank = self.comm.size, self.comm.rank
        self.staleness = 0
        self._num_pushed = 0
        self._unheard: deque[list[Any]] = deque()
        """Sends of each push that its owners have not all taken, the oldest first."""
        self._applied_of = [0] * size
        self.owners = shards({one: adapt(x).flat.nbytes for one, x in arrays.items()}, size)
        parts: list[Arrays] = [{} for _ in range(size)]
        for one, x in arrays.items():
            parts[self.owners[one]][one] = x
        self._parts = {owner: part for owner, part in enumerate(parts) if part}
        self._blobs = {owner: Packing(part, num_head=size) for owner, part in self._parts.items()}
        self._pushes = {owner: Packing(part) for owner, part in self._parts.items()}
        self._pulled: dict[int, Blob] = {}
        """Last pulled part of each other owner."""
        self._own = self._parts.get(rank)
        self._save()

    def state_dict(self) -> dict[str, Any]:
        """Return the model as this rank knows it, others' parts as pulled last; and what it owns, else zeros."""
        found: Arrays = {}
        for owner, part in self._parts.items():
            blob = self._pulled.get(owner)
            found |= part if blob is None else self._blobs[owner].unpack(blob, part)[0]
        own = self._own or {}
        return {
            "num_applied": self.num_applied,
            "known": found | own,
            "owned": {one: own.get(one, 0 * x) for one, x in found.items()},
            "owners": {one: float(one in own) for one in found},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with a model, whose parts are spread over the present ranks; no push may be under way.

        Raises:
            ConfigError: it is another model; nothing is loaded.
        """
        like = {one: x for part in self._parts.values() for one, x in part.items()}
        known, owned = (converted(like, state[one], f"{one} of {self._said}") for one in ("known", "owned"))
        # A mean over ranks: of an array and of zeros, beside the share of its owner, which is 0 where that is lost.
        shares = state["owners"]
        self.num_applied = int(state["num_applied"])
        self._place({one: owned[one] / shares[one] if shares[one] else x for one, x in known.items()})

    def merging(self) -> dict[str, str]:
        """Return what differs between ranks: all; each array is that of its owner, or the mean where that is lost."""
        return dict.fromkeys(("num_applied", "known", "owned", "owners"), "mean")

    @carried
    def push(self, gradients: Tree) -> Procedure[None]:
        """Send this rank's gradients to the owners; done when they may be modified again.

        Raises:
            CollectiveError: from waiting: an owner has not taken what was pushed.
        """
        found = leaves(gradients)
        parts = {rank: {one: found[one] for one in part} for rank, part in self._parts.items()}
        self._num_pushed += 1
        if self._own is not None:
            self._take(parts[self.comm.rank], self.comm.rank)
        sent = []
        for rank, part in parts.items():
            if rank != self.comm.rank:
                handle = yield self._message(self._pushes[rank].pack(part), rank)
                sent.append(handle)
        self._unheard.append(sent)
        while len(self._unheard) > self._most:
            yield from self._unheard.popleft()

    @carried
    def pull(self) -> Procedure[Tree]:
        """Fetch the present model from its owners; a `Pending` tree like the one at the beginning.

        Raises:
            CollectiveError: from waiting: an owner is gone.
            CollectiveMismatch, ConfigError: see ``serve``.
        """
        yield from self._meet()
        ranks = [rank for rank in self._parts if rank != self.comm.rank]
        blobs = yield from together(call("request", self._blob, rank) for rank in ranks)
        found: Arrays = {} if self._own is None else dict(self._own)
        lacking = [0]
        for rank, blob in zip(ranks, blobs, strict=True):
            part, applied = self._blobs[rank].unpack(blob, self._parts[rank])
            self._pulled[rank] = blob
            found |= part
            lacking.append(self._num_pushed - int(applied[self.comm.rank]))
        self.staleness = max(lacking)
        report(self.comm, {"staleness": self.staleness}, {"staleness": "pushes"})
        return rebuilt(self._like, found)

    @carried
    def serve(self) -> Procedure[None]:
        """Serve pushes until all ranks have finished. Every rank calls it once, at the beginning.

        Raises:
            CollectiveMismatch: the ranks have servers that differ, or another model was pushed.
            ConfigError: another rank was given numbers that cannot be.
            CollectiveTimeout: nothing was pushed for longer than the communicator's timeout.
        """
        yield from self._meet()
        num_working = self.comm.size - 1
        while num_working:
            blob, source = yield call("recv_any", tag=self._tag)
            if not blob.nbytes:
                num_working -= 1
            elif self._own is not None:
                gradients, _ = self._pushes[self.comm.rank].unpack(blob, self._own)
                self._take(gradients, source)

    @carried
    def finish(self) -> Procedure[None]:
        """End the pushes of this rank; done when the owners have applied them.

        Raises:
            CollectiveError: from waiting: they have not.
        """
        while self._unheard:
            yield from self._unheard.popleft()
        # An empty push tells an owner that this rank has finished.
        nothing = np.empty(0, np.uint8)
        others = [rank for rank in range(self.comm.size) if rank != self.comm.rank]
        yield from together(self._message(nothing, rank) for rank in others)

    def _meet(self) -> Procedure[None]:
        # A part can be pulled only after its owner has saved it. All calls wait for the one meeting of these ranks: a
        # task that is cancelled in its first pull must not end it for all ranks.
        if self._epoch != (epoch := epoch_of(self.comm)):
            self._epoch, self._met = epoch, introduce(self.comm, self._said, self._introduction)
        met = asyncio.shield(self._met) if asyncio.isfuture(self._met) else self._met
        check_alike(self.comm.rank, self._said, (yield met), self._introduction)

    def _message(self, x: Any, rank: int) -> ProcedureCall:
        # Synchronous: the handle is done when the owner has taken it, by which the staleness is bounded.
        return call("send", x, rank, self._tag, synchronous=True)._replace(is_begun=True)

    def _take(self, gradients: Arrays, source: int) -> None:
        with self._applying:
            self._own = self._apply(self._own or {}, gradients)
            self.num_applied += 1
            self._applied_of[source] += 1
            self._save()

    def _save(self) -> None:
        if self._own is not None:
            self.comm.save(self._blob, self._blobs[self.comm.rank].pack(self._own, self._applied_of))
