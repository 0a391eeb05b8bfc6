"""PairAveraging: ranks that average with one peer at a time, whoever that is, and never all meet."""

from __future__ import annotations

from collections.abc import Sequence

from kfcomm.train.agreement import Agreement
from kfcomm.train.averaging import towards
from kfcomm.train.packed import Packing
from kfcomm.train.peers import Peers, weights_problem
from kfcomm.train.procedure import Comm, Procedure, call
from kfcomm.train.reporting import report
from kfcomm.train.tree import Tree, mapped


class PairAveraging(Agreement):
    """Each step a rank fetches the model of a peer while it computes, and goes on with the mean of the two.

    v ← (v + v_peer) / 2, then the gradient is applied, then it is published: AD-PSGD (Lian et al., ICML 2018,
    https://arxiv.org/abs/1710.06952), pulled as KungFu's ``PairAveragingOptimizer`` does it. There is no barrier: a
    slow rank holds up nobody, since a peer's latest model is there to be fetched, whatever the peer is at.

    *Staleness.* The age of a model is the number of gradients in it: one more for each that is applied, and for a mean
    of two models the mean of their ages. A peer's model that is more than ``max_staleness`` younger than this rank's is
    fetched, and left out. A rank that is slow fetches older models than its own, and so is not left behind.

    Args:
        comm: whose ranks agree.
        model: at the beginning; others may fetch it at once.
        weights: for each rank how likely it is to be asked, see `Peers`; None: all equally.
        max_staleness: in gradients, above 0.
        seed: of the draws.
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

    def __init__(
        self, comm: Comm, model: Tree, *, weights: Sequence[float] | None = None, max_staleness: float = 100.0,
        seed: int = 0, name: str | None = None,
    ) -> None:  # fmt: skip
        self.age = 0.0
        self.staleness = 0.0
        self.num_left_out = 0
        self._max_staleness = max_staleness
        problem = pairs_problem(comm, weights, max_staleness)
        super().__init__(comm, name, {"max_staleness": max_staleness}, problem)
        self._peers = Peers(comm.rank, comm.size, seed=seed, weights=weights) if comm.size > 1 else None
        self._packing = Packing(model, num_head=1)
        comm.save(self._blob, self._packing.pack(model, [0.0]))

    @property
    def _blob(self) -> str:
        return f"{self.name}/model"

    def _parameters(self, tree: Tree) -> Procedure[Tree]:
        if self._peers is None:
            return tree
        if self.num_steps > 1:
            self.age += 1
        yield call("save", self._blob, self._packing.pack(tree, [self.age]))
        blob = yield call("request", self._blob, self._peers.draw())
        theirs, (age,) = self._packing.unpack(blob, tree)
        self.staleness = self.age - age
        report(self.comm, {"staleness": self.staleness}, {"staleness": "gradients"})
        if self.staleness > self._max_staleness:
            self.num_left_out += 1
            return tree
        self.age = (self.age + age) / 2
        return mapped(lambda x, other: towards(x, other, 0.5), tree, theirs)


def pairs_problem(comm: Comm, weights: Sequence[float] | None, max_staleness: float) -> str | None:
    """What is wrong with the numbers of PairAveraging; None if nothing is."""
    if not max_staleness > 0:
        return f"max_staleness is above 0, not {max_staleness!r}"
    if weights is None or comm.size == 1:
        return None
    return weights_problem(comm.rank, comm.size, weights)
