"""A group of ``ray.util.collective`` over one communicator, and the rendezvous of its actors.

The actors meet through the key-value store of Ray's cluster, with no ports besides their own. Rank 0 writes its
address, a number for this rendezvous, and a token, which every process that can reach the cluster can read. Then all
ranks write their addresses. At the end the store is empty again, so that another group of the same name can be made.
"""

from __future__ import annotations

import contextlib
import json
import secrets
from typing import Any

import ray
from ray.experimental import internal_kv
from ray.util.collective import collective
from ray.util.collective.backend_registry import register_collective_backend
from ray.util.collective.collective_group.base_collective_group import BaseGroup
from ray.util.collective.types import (
    AllGatherOptions,
    AllReduceOptions,
    BarrierOptions,
    BroadcastOptions,
    RecvOptions,
    ReduceOp,
    ReduceOptions,
    ReduceScatterOptions,
    SendOptions,
)

from kfcomm.errors import ConfigError
from kfcomm.joining import prepare
from kfcomm.rendezvous.host import store_url
from kfcomm.rendezvous.meeting import ForeignRendezvous
from kfcomm.sync.communicator import Communicator, join
from kfcomm.types import Op

NAME = "KFCOMM"
OPS = {ReduceOp.SUM: Op.SUM, ReduceOp.PRODUCT: Op.PROD, ReduceOp.MIN: Op.MIN, ReduceOp.MAX: Op.MAX}
Base: Any = BaseGroup


def register() -> None:
    """Make the backend ``KFCOMM`` known to this process; on the driver and in every actor. May be called again."""
    with contextlib.suppress(ValueError):  # it is known
        register_collective_backend(NAME, RayGroup)


def communicator(group_name: str = "default") -> Communicator:
    """The communicator of a group that this actor is in: for its strategy, statistics and dumps.

    Raises:
        ConfigError: it is in no such group of this backend.
    """
    found = collective._group_mgr._name_group_map.get(group_name)
    if not isinstance(found, RayGroup):
        raise ConfigError(f"this actor is in no group {group_name!r} of backend kfcomm")
    return found.communicator


class RayGroup(Base):  # type: ignore[misc]
    """A group as Ray calls it, with lists of one array each (NumPy, torch, CuPy or JAX), changed in place."""

    def __init__(self, world_size: int, rank: int, group_name: str) -> None:
        super().__init__(world_size, rank, group_name)
        self.communicator = meet(group_name, rank, world_size)

    @classmethod
    def backend(cls) -> str:
        """Return its name."""
        return NAME

    @classmethod
    def check_backend_availability(cls) -> bool:
        """Return True."""
        return True

    def destroy_group(self) -> None:
        """Close the communicator."""
        self.communicator.close()

    def allreduce(self, tensor: list[Any], allreduce_options: Any = AllReduceOptions) -> None:
        """Implement ``ray.util.collective.allreduce``."""
        (x,) = tensor
        self.communicator.all_reduce(x, op=OPS[allreduce_options.reduceOp], out=x)

    def barrier(self, barrier_options: Any = BarrierOptions) -> None:
        """Implement ``ray.util.collective.barrier``."""
        self.communicator.barrier()

    def reduce(self, tensor: list[Any], reduce_options: Any = ReduceOptions) -> None:
        """Implement ``ray.util.collective.reduce``."""
        (x,), root = tensor, reduce_options.root_rank
        out = {"out": x} if root == self.rank else {}
        self.communicator.reduce(x, root, op=OPS[reduce_options.reduceOp], **out)

    def allgather(
        self, tensor_list: list[list[Any]], tensor: list[Any], allgather_options: Any = AllGatherOptions
    ) -> None:
        """Implement ``ray.util.collective.allgather``."""
        (into,), (x,) = tensor_list, tensor
        self.communicator.all_gather(x, out=into)

    def broadcast(self, tensor: list[Any], broadcast_options: Any = BroadcastOptions) -> None:
        """Implement ``ray.util.collective.broadcast``."""
        (x,) = tensor
        self.communicator.broadcast(x, broadcast_options.root_rank, out=x)

    def reducescatter(
        self, tensor: list[Any], tensor_list: list[list[Any]], reducescatter_options: Any = ReduceScatterOptions
    ) -> None:
        """Implement ``ray.util.collective.reducescatter``."""
        (out,), (given,) = tensor, tensor_list
        self.communicator.reduce_scatter(given, op=OPS[reducescatter_options.reduceOp], out=out)

    def send(self, tensor: list[Any], send_options: SendOptions) -> None:
        """Implement ``ray.util.collective.send``."""
        (x,) = tensor
        self.communicator.send(x, send_options.dst_rank)

    def recv(self, tensor: list[Any], recv_options: RecvOptions) -> None:
        """Implement ``ray.util.collective.recv``."""
        (x,) = tensor
        self.communicator.recv(recv_options.src_rank, out=x)


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
