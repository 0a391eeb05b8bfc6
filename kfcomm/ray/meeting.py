"""Rendezvous of the actors of a group through the key-value store of Ray's cluster, with no ports besides their own.

Rank 0 writes its address, a number for this rendezvous, and a token, which every process that can reach the cluster
can read. Then all ranks write their addresses. At the end the store is empty again, so that another group of the same
name can be made.
"""

from __future__ import annotations

import json
import secrets

import ray
from ray.experimental import internal_kv

from kfcomm.joining import prepare
from kfcomm.rendezvous.host import store_url
from kfcomm.rendezvous.meeting import ForeignRendezvous
from kfcomm.sync.communicator import Communicator, join

TIMEOUT_S = 60.0
"""Wait for the other ranks."""


class _RayStore:
    def set(self, key: str, value: str) -> None:
        internal_kv._internal_kv_put(key, value)

    def find(self, key: str) -> bytes | None:
        value: bytes | None = internal_kv._internal_kv_get(key)
        return value


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
    head = f"kfcomm/{name}"
    meeting = ForeignRendezvous(_RayStore(), "Ray", f"group {name!r}", head, rank, size, TIMEOUT_S)
    said = meeting.share(
        head, lambda: json.dumps([secrets.token_hex(8), ray.util.get_node_ip_address(), secrets.token_hex(32)])
    )
    number, address, token = json.loads(said)
    meeting.folder = f"{head}/{number}"
    settings = prepare(rank=rank, size=size, store=store_url(address, 1), serve=False, token=token, elastic=False)
    comm = join(settings, meeting.exchange)
    comm.barrier("kfcomm.ray: all have read", timeout=TIMEOUT_S)
    internal_kv._internal_kv_del(f"{meeting.folder}/{rank}")
    if rank == 0:
        internal_kv._internal_kv_del(head)
    return comm
