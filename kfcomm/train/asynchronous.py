"""Agreement without meetings of all ranks: each exchanges with one peer at a time, at its own pace.

Models travel as blobs that a rank has saved for others to request. Asynchronous parameter servers: Chilimbi et al.,
"Project Adam", OSDI 2014; Abadi et al., "TensorFlow", OSDI 2016, section 4.4.
"""

from __future__ import annotations

import asyncio
import hashlib
import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeAlias

import numpy as np

from kfcomm.arrays import adapt
from kfcomm.common.arguments import checked_name
from kfcomm.errors import CollectiveMismatch, ConfigError
from kfcomm.train.agreement import Agreement, check_alike, introduce, refuse
from kfcomm.train.procedure import Comm, Procedure, ProcedureCall, call, carried, report, together
from kfcomm.train.rules import count_problem, towards
from kfcomm.train.trees import Tree, leaves, mapped, rebuilt
from kfcomm.types import override

Blob: TypeAlias = "np.ndarray[Any, np.dtype[np.uint8]]"

DIGEST_NBYTES = 16


class Packing:
    """Encoding of models of the form of ``like`` as blobs: a head of float64, and the bytes of all arrays."""

    def __init__(self, like: Tree, num_head: int = 0) -> None:
        self._like = {name: adapt(x) for name, x in sorted(leaves(like).items())}
        # In front of each blob: bytes of another model would be averaged without an error if their number fits.
        told = [(name, one.shape, str(one.flat.dtype)) for name, one in self._like.items()]
        self._digest = np.frombuffer(hashlib.blake2b(repr(told).encode(), digest_size=DIGEST_NBYTES).digest(), np.uint8)
        self._num_head = num_head
        self.nbytes = DIGEST_NBYTES + 8 * num_head + sum(one.flat.nbytes for one in self._like.values())

    def pack(self, tree: Tree, head: Sequence[float] = ()) -> Blob:
        """Encode a tree. Cost: a copy."""
        arrays = leaves(tree)
        parts = [self._digest, np.array(head, np.float64).view(np.uint8)]
        parts += [adapt(arrays[name]).flat.view(np.uint8) for name in self._like]
        return np.concatenate(parts)

    def unpack(self, blob: Blob, tree: Tree) -> tuple[Tree, list[float]]:
        """Decode a blob as a tree like ``tree``, and its head."""
        if blob.nbytes != self.nbytes or bytes(blob[:DIGEST_NBYTES]) != bytes(self._digest):
            raise CollectiveMismatch(
                f"a peer's model has other names, shapes or dtypes: {blob.nbytes} bytes, here {self.nbytes} of "
                f"{', '.join(self._like)}"[:400]
            )
        at = DIGEST_NBYTES + 8 * self._num_head
        head = np.frombuffer(blob[DIGEST_NBYTES:at].tobytes(), np.float64).tolist()
        found: dict[str, Any] = {}
        for name, one in self._like.items():
            flat = np.empty_like(one.flat)
            flat.view(np.uint8)[:] = blob[at : at + flat.nbytes]
            at += flat.nbytes
            found[name] = one.kind.restore(flat.reshape(one.shape))
        return rebuilt(tree, found), head


class Peers:
    """Random draws of other ranks, with equal probabilities or by weights.

    Args:
        rank: of who draws.
        size: ranks, at least 2.
        seed: the same one gives the same draws on the same rank.
        weights: for each rank a number, at least 0, to whose size its probability is proportional: bandwidths, say, so
            that peers behind slow links are asked less often. This rank's own does not count. None: all are equal.
        drawn: draws to leave out, which were made before.

    Raises:
        ConfigError: there are no other ranks, or the weights are not valid.
    """

    def __init__(
        self, rank: int, size: int, *, seed: int = 0, weights: Sequence[float] | None = None, drawn: int = 0
    ) -> None:
        if not 0 <= rank < size or size < 2:
            raise ConfigError(f"rank {rank} of {size} has no peers to draw")
        # One of the n − 1 others: to draw one of all, and move one's own to the next, makes that neighbour twice as
        # likely.
        self._others = [peer for peer in range(size) if peer != rank]
        # Each draw takes one number of the generator, which can leave out any of them at once.
        self._draws = np.random.Generator(np.random.PCG64((seed, rank)).advance(drawn))
        self._bounds: list[float] | None = None
        if weights is not None:
            problem = weights_problem(rank, size, weights)
            if problem is not None:
                raise ConfigError(problem)
            own = np.array([weights[peer] for peer in self._others], np.float64)
            self._bounds = (np.cumsum(own) / own.sum()).tolist()

    def draw(self) -> int:
        """Draw the next peer."""
        number = self._draws.random()
        place = int(number * len(self._others)) if self._bounds is None else bisect_right(self._bounds, number)
        return self._others[place]


class RoundRobin:
    """All other ranks in turns, the next one first: no rank is asked twice before each was asked once.

    Args:
        rank: of who asks.
        size: ranks, at least 2.
        drawn: turns that are over.

    Raises:
        ConfigError: there are no other ranks.
    """

    def __init__(self, rank: int, size: int, *, drawn: int = 0) -> None:
        if not 0 <= rank < size or size < 2:
            raise ConfigError(f"rank {rank} of {size} has no peers to ask in turns")
        self._rank, self._size, self._drawn = rank, size, drawn

    def draw(self) -> int:
        """Return the next peer."""
        place = self._drawn % (self._size - 1)
        self._drawn += 1
        return (self._rank + 1 + place) % self._size


def weights_problem(rank: int, size: int, weights: Sequence[float]) -> str | None:
    """Fault of the weights of a rank's peers; None without one."""
    if len(weights) != size:
        return f"{size} ranks have {size} weights, not {len(weights)}"
    own = np.array([*weights[:rank], *weights[rank + 1 :]], np.float64)
    if not (np.isfinite(own).all() and (own >= 0).all() and own.sum() > 0):
        return f"weights are at least 0, and not all 0, not {list(weights)!r}"
    return None


PEERS = ("random", "round-robin")


class PairAveraging(Agreement):
    """PairAveraging: each rank fetches the model of a random peer while it computes, and continues with their mean.

    v ← (v + v_peer) / 2, then the gradient is applied, then it is published: AD-PSGD (Lian et al., ICML 2018,
    https://arxiv.org/abs/1710.06952), pulled as KungFu's ``PairAveragingOptimizer`` does it. Without barriers, a slow
    rank delays no other: a peer's latest model can be fetched whatever the peer does.

    *Staleness.* The age of a model is the number of gradients in it: one more for each that is applied, and for a mean
    of two models the mean of their ages. A peer's model that is more than ``max_staleness`` younger than this rank's is
    fetched, and left out. A rank that is slow fetches older models than its own, and so is not left behind.

    *Ahead.* A model on another host is asked for at the end of the step before, so that it comes while the program
    computes, and is by as much older: ``staleness`` counts that. On this host the latest one is read where it is, which
    takes no longer than a copy.

    Args:
        comm: communicator of the ranks that agree.
        model: at the beginning; others may fetch it at once.
        ahead: whether models are asked for a step ahead; None: those of peers on other hosts.
        peers: ``random``, or ``round-robin``: each of the others in turns.
        weights: probability with which each rank is asked, see `Peers`; None: all equal. When the ranks change, those
            that stay keep theirs, and new ones get the mean of them.
        max_staleness: in gradients, above 0.
        seed: of the draws, which follow from it, the rank, the size and the number of draws before.
        name: see `Agreement`.

    Attributes:
        age: of this rank's model, in gradients.
        staleness: by how much the model that was fetched last was younger; negative where it was older. It is one of
            the gauges of ``statistics()``.
        num_left_out: models that were too young.

    Raises:
        ConfigError: a number is out of its range.

    Cost:
        A ``request`` of S bytes and one of a peer each step on average; copies of two models are kept for others. The
        first step has one small collective, and none follows.
    """

    default_name = "pair-averaging"
    takes_model = True
    rank_state: ClassVar = {"num_steps": "mean", "age": "mean", "num_left_out": "mean", "_num_drawn": "mean"}
    counts_alike = False
    _next: int | None
    """Peer that is drawn and not counted."""
    _coming: Any
    """Handle of its model, if that was asked for."""

    def __init__(
        self, comm: Comm, model: Tree, *, peers: str = "random", weights: Sequence[float] | None = None,
        max_staleness: float = 100.0, ahead: bool | None = None, seed: int = 0, name: str | None = None,
    ) -> None:  # fmt: skip
        self.age = 0.0
        self.staleness = 0.0
        self.num_left_out = 0
        self._max_staleness = max_staleness
        self._kind, self._weights, self._seed, self._ahead = peers, weights, seed, ahead
        self._num_drawn = 0
        problem = pairs_problem(comm, weights, max_staleness, peers)
        super().__init__(comm, name, {"max_staleness": max_staleness, "peers": peers}, problem)
        self._known = self._ranks
        self._weight_of = None if weights is None else dict(zip(self._known, weights, strict=False))
        self._meet_peers()
        self._packing = Packing(model, num_head=1)
        self._blob = f"{self.name}/model"
        self._start_from(model)

    @override
    def restart(self, model: Tree) -> None:
        """Begin anew; draws continue. See ``Agreement.restart``."""
        self.age, self.staleness, self.num_left_out = 0.0, 0.0, 0
        self._coming = None
        super().restart(model)

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state; see ``Agreement.load_state_dict``."""
        super().load_state_dict(state)
        self._meet_peers()

    @override
    def _start_from(self, model: Tree) -> None:
        self.comm.save(self._blob, self._packing.pack(model, [self.age]))

    @override
    def _ranks_changed(self, tree: Tree) -> None:
        # Others may ask for the model as soon as all ranks have met.
        self._start_from(tree)
        self._coming = None  # it was asked for in another epoch
        if self._known != self._ranks:
            self._known = self._ranks
            self._meet_peers()

    @override
    def _switch(self, tree: Tree, are_replicas: bool) -> Procedure[Tree]:
        agreed = yield from super()._switch(tree, are_replicas)
        # Else a peer might be asked for a model that it has saved before the switch.
        yield call("barrier", f"{self.name}/begun")
        return agreed

    @property
    def _ranks(self) -> tuple[int, ...]:
        return tuple(getattr(self.comm, "births", range(self.comm.size)))

    def _meet_peers(self) -> None:
        self._peers = self._peers_now()
        self._next = self._coming = None

    def _peers_now(self) -> Peers | RoundRobin | None:
        """The draws among the present ranks; None without others."""
        rank, size = self.comm.rank, self.comm.size
        if size == 1:
            return None
        if self._kind == "round-robin":
            return RoundRobin(rank, size, drawn=self._num_drawn)
        weights = None
        if self._weight_of is not None:
            mean = sum(self._weight_of.values()) / len(self._weight_of)
            weights = [self._weight_of.get(uid, mean) for uid in self._ranks]
            if weights_problem(rank, size, weights) is not None:
                weights = None
        return Peers(rank, size, seed=self._seed, weights=weights, drawn=self._num_drawn)

    def _parameters(self, tree: Tree) -> Procedure[Tree]:
        if self._peers is None:
            return tree
        # The gradient of the step before is in the model by now; at the first step there was none.
        if self.num_steps > 1:
            self.age += 1
        yield call("save", self._blob, self._packing.pack(tree, [self.age]))
        blob = yield from self._fetched(self._peers)
        theirs, (age,) = self._packing.unpack(blob, tree)
        self.staleness = self.age - age
        report(self.comm, {"staleness": self.staleness}, {"staleness": "gradients"})
        if self.staleness > self._max_staleness:
            self.num_left_out += 1
            return tree
        self.age = (self.age + age) / 2
        return mapped(lambda x, other: towards(x, other, 0.5), tree, theirs)

    def _fetched(self, peers: Peers | RoundRobin) -> Procedure[Blob]:
        """The model of the next peer, after which the one after that may be asked for."""
        peer, coming = self._next, self._coming
        self._next = self._coming = None
        if coming is None:
            coming = call("request", self._blob, peers.draw() if peer is None else peer)
        self._num_drawn += 1
        blob: Blob = yield coming
        self._next = peer = peers.draw()
        if self._is_ahead(peer):
            coming = yield call("request", self._blob, peer)._replace(is_begun=True)
            coming.add_done_callback(_heard)  # the last one is for nobody
            self._coming = coming
        return blob

    def _is_ahead(self, peer: int) -> bool:
        hosts = self.comm.layout.hosts
        return hosts[peer] != hosts[self.comm.rank] if self._ahead is None else self._ahead


def _heard(handle: Any) -> None:
    """Mark the error of a handle as read: the next step raises it, if there is one."""
    if not handle.cancelled():
        handle.exception()


def pairs_problem(
    comm: Comm, weights: Sequence[float] | None, max_staleness: float, peers: str = "random"
) -> str | None:
    """Fault of the numbers of PairAveraging; None without one."""
    if peers not in PEERS:
        return f"peers is one of {', '.join(PEERS)}, not {peers!r}"
    if peers != "random" and weights is not None:
        return "weights are of random peers"
    if not max_staleness > 0:
        return f"max_staleness is above 0, not {max_staleness!r}"
    if weights is None or comm.size == 1:
        return None
    return weights_problem(comm.rank, comm.size, weights)


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
        self.staleness = 0
        self._like = model
        self._apply = apply
        self._most = staleness
        self._num_pushed = 0
        self._unheard: deque[list[Any]] = deque()
        """Sends of each push that its owners have not all taken, the oldest first."""
        # In a blocking program pushes of this rank and of others are applied on different threads.
        self._applying = threading.Lock()
        self._applied_of = [0] * comm.size
        arrays = leaves(model)
        self.owners = shards({one: adapt(x).flat.nbytes for one, x in arrays.items()}, comm.size)
        parts: list[Arrays] = [{} for _ in range(comm.size)]
        for one, x in arrays.items():
            parts[self.owners[one]][one] = x
        self._parts = {rank: part for rank, part in enumerate(parts) if part}
        self._blobs = {rank: Packing(part, num_head=comm.size) for rank, part in self._parts.items()}
        self._pushes = {rank: Packing(part) for rank, part in self._parts.items()}
        self._own = self._parts.get(comm.rank)
        self._save()
        self._met = introduce(comm, self._said, self._introduction)

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
        # A part can be pulled only after its owner has saved it. All calls wait for the one meeting: a task that is
        # cancelled in its first pull must not end it for all ranks.
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
