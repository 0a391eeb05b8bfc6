"""All_reduce of torch's Gloo across a bed, in the place of a strategy of the worker."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import numpy as np

import kfcomm

GLOO = "gloo"
_PORT = 29400


class Gloo:
    """Gloo's ranks are those of the job."""

    def __init__(self, comm: kfcomm.Communicator) -> None:
        self._comm = comm

    async def prepare(self) -> None:
        """Let all ranks meet at rank 0's host."""
        import torch.distributed as dist

        own = np.frombuffer(_address().ljust(64).encode(), np.uint8).copy()
        first = bytes(np.asarray(await self._comm.broadcast(own, root=0))).decode().strip()
        os.environ["GLOO_SOCKET_IFNAME"] = "port"
        address = f"tcp://{first}:{_PORT}"
        await asyncio.to_thread(
            dist.init_process_group, "gloo", init_method=address, rank=self._comm.rank, world_size=self._comm.size
        )

    async def all_reduce(self, given: Any, result: Any) -> None:
        """Sum ``given`` of all ranks into ``result``."""
        import torch
        import torch.distributed as dist

        np.copyto(result, given)
        await asyncio.to_thread(dist.all_reduce, torch.from_numpy(result))


def _address() -> str:
    """This host's, in a bed."""
    import fcntl
    import socket
    import struct

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        packed = fcntl.ioctl(probe.fileno(), 0x8915, struct.pack("256s", b"port"))
    return socket.inet_ntoa(packed[20:24])
