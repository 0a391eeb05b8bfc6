"""How the actors of a group find each other: by the key-value store of Ray's cluster, and no port besides their own.

Rank 0 says where it is, a number for this meeting, and a token, which whoever can reach the cluster can read. Then all
tell of themselves. When all have met, nothing is left in the store, so that a group of the same name can be made again.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Sequence
from typing import Any

import ray
from ray.experimental import internal_kv

from kfcomm.errors import RemoteProtocolError, RendezvousError
from kfcomm.joining import prepare
from kfcomm.rendezvous.identity import PeerInfo
from kfcomm.rendezvous.settings import store_url
from kfcomm.sync.communicator import Communicator, join

TIMEOUT_S = 60.0
"""For the others to come."""
PAUSE_S = 20e-3


def meet(name: str, rank: int, size: int) -> Communicator:
    """The communicator of the actors of a group; all of them call it.

    Args:
        name: of the group.
        rank: of this actor.
        size: how many there are.

    Raises:
        RendezvousError: some are missing in the end, named.
    """
    if size == 1:
        return join(prepare(rank=0, size=1, elastic=False))
    board = Board(name, rank, size)
    board.open()
    comm = join(
        prepare(
            rank=rank, size=size, store=store_url(board.address, 1), serve=False, token=board.token, elastic=False
        ),
        board.exchange,
    )  # fmt: skip
    comm.barrier("kfcomm.ray: all have read", timeout=TIMEOUT_S)
    board.clear()
    return comm


class Board:
    """What the ranks of one group tell each other.

    Args:
        name: of the group.
        rank: of this process.
        size: how many ranks there are.

    Attributes:
        address: of rank 0.
        token: that all have.
    """

    def __init__(self, name: str, rank: int, size: int) -> None:
        self._head = f"kfcomm/{name}"
        self._rank = rank
        self._size = size
        self._folder = ""
        self.address = self.token = ""

    def open(self) -> None:
        """Rank 0 opens the meeting, the others wait for that."""
        if self._rank == 0:
            said = [secrets.token_hex(8), ray.util.get_node_ip_address(), secrets.token_hex(32)]
            internal_kv._internal_kv_put(self._head, json.dumps(said))
        else:
            said = json.loads(self._read({self._head: 0})[self._head])
        meeting, self.address, self.token = said
        self._folder = f"{self._head}/{meeting}"

    async def exchange(self, me: PeerInfo) -> Sequence[PeerInfo]:
        """See ``network.Exchange``."""
        return await asyncio.to_thread(self._exchange, me)

    def clear(self) -> None:
        """Remove what this rank has told."""
        internal_kv._internal_kv_del(f"{self._folder}/{self._rank}")
        if self._rank == 0:
            internal_kv._internal_kv_del(self._head)

    def _exchange(self, me: PeerInfo) -> Sequence[PeerInfo]:
        internal_kv._internal_kv_put(f"{self._folder}/{self._rank}", me.to_wire().hex())
        found = self._read({f"{self._folder}/{rank}": rank for rank in range(self._size)})
        try:
            return [PeerInfo.from_wire(bytes.fromhex(one.decode())) for one in found.values()]
        except (RemoteProtocolError, ValueError) as error:
            raise RendezvousError(f"Ray's store holds what no rank of this version wrote: {error}") from error

    def _read(self, keys: dict[str, int]) -> dict[str, Any]:
        """What is said under these keys, each of a rank; waits for it.

        Raises:
            RendezvousError: some have not said it in time.
        """
        until_s = time.monotonic() + TIMEOUT_S
        found: dict[str, Any] = dict.fromkeys(keys)
        while missing := [key for key in keys if found[key] is None]:
            if time.monotonic() > until_s:
                ranks = [keys[key] for key in missing]
                raise RendezvousError(f"after {TIMEOUT_S:g} s ranks {ranks} of {self._size} have not come")
            time.sleep(PAUSE_S)
            found |= {key: internal_kv._internal_kv_get(key) for key in missing}
        return found
