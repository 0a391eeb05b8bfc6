"""Rendezvous of the actors of a group through the key-value store of Ray's cluster, with no ports besides their own.

Rank 0 writes its address, a number for this rendezvous, and a token, which every process that can reach the cluster
can read. Then all ranks write their addresses. At the end the store is empty again, so that another group of the same
name can be made.
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
from kfcomm.rendezvous.host import store_url
from kfcomm.rendezvous.identity import PeerInfo
from kfcomm.sync.communicator import Communicator, join

TIMEOUT_S = 60.0
"""Wait for the other ranks."""
PAUSE_S = 20e-3


def meet(name: str, rank: int, size: int) -> Communicator:
    """Make the communicator of the actors of a group; all of them call it.

    Args:
        name: of the group.
        rank: of this actor.
        size: number of actors.

    Raises:
        RendezvousError: ranks are missing at the timeout; names them.
    """
    if size == 1:
        return join(prepare(rank=0, size=1, elastic=False))
    meeting = RayRendezvous(name, rank, size)
    meeting.open()
    comm = join(
        prepare(
            rank=rank, size=size, store=store_url(meeting.address, 1), serve=False, token=meeting.token, elastic=False
        ),
        meeting.exchange,
    )  # fmt: skip
    comm.barrier("kfcomm.ray: all have read", timeout=TIMEOUT_S)
    meeting.clear()
    return comm


class RayRendezvous:
    """Rendezvous of the ranks of one group.

    Args:
        name: of the group.
        rank: of this process.
        size: number of ranks.

    Attributes:
        address: of rank 0.
        token: of all ranks.
    """

    def __init__(self, name: str, rank: int, size: int) -> None:
        self._head = f"kfcomm/{name}"
        self._rank = rank
        self._size = size
        self._folder = ""
        self.address = self.token = ""

    def open(self) -> None:
        """Write address and token on rank 0; wait for them on others."""
        if self._rank == 0:
            said = [secrets.token_hex(8), ray.util.get_node_ip_address(), secrets.token_hex(32)]
            internal_kv._internal_kv_put(self._head, json.dumps(said))
        else:
            said = json.loads(self._read({self._head: 0})[self._head])
        meeting, self.address, self.token = said
        self._folder = f"{self._head}/{meeting}"

    async def exchange(self, me: PeerInfo) -> Sequence[PeerInfo]:
        """Give this process's address to the others, and wait for theirs; see ``network.Exchange``."""
        return await asyncio.to_thread(self._exchange, me)

    def clear(self) -> None:
        """Remove this rank's keys."""
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
        """Wait for these keys, each of a rank, and return their values.

        Raises:
            RendezvousError: some are missing at the timeout.
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
