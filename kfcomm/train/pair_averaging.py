"""PairAveraging: asynchronous averaging with one random peer at a time, without any meeting of all ranks."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from kfcomm.arrays import HostArray, adapt
from kfcomm.errors import CollectiveMismatch, ConfigError
from kfcomm.train.agreement import Agreement
from kfcomm.train.procedure import Comm, Procedure, call, report
from kfcomm.train.synchronous import towards
from kfcomm.train.tree import Tree, leaves, mapped, rebuilt

Blob: TypeAlias = "np.ndarray[Any, np.dtype[np.uint8]]"

DIGEST_NBYTES = 16


class Packing:
    """Encoding of models of one form as blobs: a head, and the bytes of all arrays end to end.

    Args:
        like: a tree of arrays in host memory; what is packed has the same names, shapes and dtypes.
        num_head: numbers of float64 in the head of each blob.
    """

    def __init__(self, like: Tree, num_head: int = 0) -> None:
        self._like = {name: adapt(x) for name, x in sorted(leaves(like).items())}
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
        """Decode a blob as a tree like ``tree``, and its head.

        Raises:
            CollectiveMismatch: it is of another form.
        """
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
            found[name] = _restored(one, flat)
        return rebuilt(tree, found), head


def _restored(like: HostArray, flat: Any) -> Any:
    return like.kind.restore(flat.reshape(like.shape))


class Peers:
    """Random draws of other ranks, with equal probabilities or by weights.

    A draw is one number out of the n − 1 others. (To draw one of all and move one's own to the next would make that
    neighbour twice as likely.)

    Args:
        rank: of who draws.
        size: ranks, at least 2.
        seed: the same one gives the same draws on the same rank.
        weights: for each rank a number, at least 0, to whose size its probability is proportional: bandwidths, say, so
            that peers behind slow links are asked less often. This rank's own does not count. None: all are equal.

    Raises:
        ConfigError: there are no other ranks, or the weights are not valid.
    """

    def __init__(self, rank: int, size: int, *, seed: int = 0, weights: Sequence[float] | None = None) -> None:
        if not 0 <= rank < size or size < 2:
            raise ConfigError(f"rank {rank} of {size} has no peers to draw")
        self._others = [peer for peer in range(size) if peer != rank]
        self._draws = np.random.default_rng((seed, rank))
        self._bounds: list[float] | None = None
        if weights is not None:
            problem = weights_problem(rank, size, weights)
            if problem is not None:
                raise ConfigError(problem)
            own = np.array([weights[peer] for peer in self._others], np.float64)
            self._bounds = (np.cumsum(own) / own.sum()).tolist()

    def draw(self) -> int:
        """Draw the next peer."""
        if self._bounds is None:
            return self._others[int(self._draws.integers(len(self._others)))]
        return self._others[bisect_right(self._bounds, self._draws.random())]


def weights_problem(rank: int, size: int, weights: Sequence[float]) -> str | None:
    """Fault of the weights of a rank's peers; None without one."""
    if len(weights) != size:
        return f"{size} ranks have {size} weights, not {len(weights)}"
    own = np.array([*weights[:rank], *weights[rank + 1 :]], np.float64)
    if not (np.isfinite(own).all() and (own >= 0).all() and own.sum() > 0):
        return f"weights are at least 0, and not all 0, not {list(weights)!r}"
    return None


class PairAveraging(Agreement):
    """PairAveraging: each rank fetches the model of a random peer while it computes, and continues with their mean.

    v ← (v + v_peer) / 2, then the gradient is applied, then it is published: AD-PSGD (Lian et al., ICML 2018,
    https://arxiv.org/abs/1710.06952), pulled as KungFu's ``PairAveragingOptimizer`` does it. There is no barrier: a
    slow rank holds up nobody, since a peer's latest model is there to be fetched, whatever the peer is at.

    *Staleness.* The age of a model is the number of gradients in it: one more for each that is applied, and for a mean
    of two models the mean of their ages. A peer's model that is more than ``max_staleness`` younger than this rank's is
    fetched, and left out. A rank that is slow fetches older models than its own, and so is not left behind.

    Args:
        comm: communicator of the ranks that agree.
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
    """Fault of the numbers of PairAveraging; None without one."""
    if not max_staleness > 0:
        return f"max_staleness is above 0, not {max_staleness!r}"
    if weights is None or comm.size == 1:
        return None
    return weights_problem(comm.rank, comm.size, weights)
