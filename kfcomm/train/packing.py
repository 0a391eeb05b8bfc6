"""Models as blobs, which ranks save for others to request, or send to each other."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from kfcomm.arrays import adapt
from kfcomm.errors import CollectiveMismatch, EpochChanged, PeerLost
from kfcomm.train.procedure import Comm, Procedure, call, together
from kfcomm.train.trees import Tree, leaves, rebuilt

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


def swapped(comm: Comm, tree: Tree, peer: int, name: str) -> Procedure[Tree | None]:
    """Exchange trees with one other rank, which does the same with this one: a part of a procedure.

    Args:
        comm: communicator of both ranks.
        tree: arrays in host memory; of the same names, shapes and dtypes on both ranks.
        peer: the other rank.
        name: of the messages.

    Returns:
        Its tree, like this one. None in an elastic job where a rank was lost in this step: messages do not survive
        that.

    Raises:
        CollectiveMismatch: its tree has other arrays.
        CollectiveError: the exchange failed.

    Cost: S bytes to the peer and as many from it, and two copies.
    """
    packing = Packing(tree)
    try:
        _, blob = yield from together([call("send", packing.pack(tree), peer, name), call("recv", peer, name)])
    except (PeerLost, EpochChanged):
        if not getattr(comm, "outlives", False):
            raise
        return None
    found, _ = packing.unpack(blob, tree)
    return found
