"""Agreement without meetings of all ranks: each exchanges with one peer at a time, at its own pace.

Models travel as blobs that a rank has saved for others to request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from kfcomm.errors import EpochChanged, PeerLost
from kfcomm.train.agreement import Agreement
from kfcomm.train.packing import Blob, Packing
from kfcomm.train.peers import Peers, RoundRobin, weights_problem
from kfcomm.train.procedure import Comm, Procedure, call, report
from kfcomm.train.rules import towards
from kfcomm.train.trees import Tree, mapped
from kfcomm.types import override

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
        try:
            yield call("save", self._blob, self._packing.pack(tree, [self.age]))
            blob = yield from self._fetched(self._peers)
        except (PeerLost, EpochChanged):
            if not getattr(self.comm, "outlives", False):
                raise
            return tree  # of an elastic job: without a peer in the rest of a step in which a rank was lost
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
