"""Commands of an actor about its shared memory; see `roles`."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kfcomm.core.handshake import Purpose
from kfcomm.engine.network import SocketNetwork
from kfcomm.transports.shm.endpoint import ShmEndpoint

if TYPE_CHECKING:
    from tests.processes.actor import Actor

LOOK_EVERY_S = 1e-3


def _shared_memory(me: Actor) -> ShmEndpoint:
    network = me.comm._session.network
    assert isinstance(network, SocketNetwork)
    endpoint = network._endpoints[Purpose.SHARED_MEMORY]
    assert isinstance(endpoint, ShmEndpoint)
    return endpoint


def _pieces(me: Actor) -> int:
    arena = _shared_memory(me)._arena
    return 0 if arena is None else arena.pieces_in_use


async def unable(me: Actor) -> None:
    """From now on this process cannot share memory."""
    del os.memfd_create


async def ways(me: Actor) -> list[str]:
    """How this rank reaches each of the others, in words."""
    network = me.comm._session.network
    return [network.describe(peer).split()[0] for peer in range(me.comm.size) if peer != me.comm.rank]


async def gathers(me: Actor, *, elements: int, calls: int, in_place: bool) -> None:
    """Long gathers and scattered sums, one after the other, into and from what was given before."""
    comm = me.comm
    rank, size = comm.rank, comm.size
    made = comm.empty if in_place else np.empty
    rows, given = made((size, elements), np.float32), made((size, elements), np.float32)
    for use in range(calls):
        rows[:], given[:] = -1, use + rank
        rows[rank] = use + rank
        await comm.all_gather(rows[rank], "rows", out=rows)
        np.testing.assert_array_equal(rows[:, ::64], np.repeat([[use + one] for one in range(size)], elements // 64, 1))
        part = await comm.reduce_scatter(given, "part")
        np.testing.assert_array_equal(part[:, ::64], size * use + sum(range(size)))


async def some_pieces(me: Actor) -> int:
    """Returns when a peer may read something of this rank's; how many pieces."""
    while not _pieces(me):  # noqa: ASYNC110  nobody is told
        await asyncio.sleep(LOOK_EVERY_S)
    return _pieces(me)


async def no_pieces(me: Actor) -> bool:
    """Returns when no rank reads this rank's memory any more; whether nothing is kept for peers that are gone."""
    hub = _shared_memory(me).hub
    while _pieces(me):
        hub.wake()
        await asyncio.sleep(LOOK_EVERY_S)
    return not hub._ended


async def rest(me: Actor) -> list[bool]:
    """Returns when the hub rests; whether each link then says that it has to be woken."""
    hub = _shared_memory(me).hub
    while hub.is_awake:  # noqa: ASYNC110  nobody is told
        await asyncio.sleep(LOOK_EVERY_S)
    return [bool(link._words[link._near]) for link in hub._links]


async def memfds(me: Actor) -> int:
    """Descriptors of shared memory that are open."""
    listed = Path("/proc/self/fd")
    return sum("/memfd:" in os.readlink(listed / name) for name in os.listdir(listed) if (listed / name).exists())


async def below_dev_shm(me: Actor) -> list[str]:
    """Return the mapped files below /dev/shm."""
    with open("/proc/self/maps") as maps:  # noqa: ASYNC230
        return [line for line in maps if "/dev/shm" in line]


async def segments(me: Actor) -> int:
    """The number of segments of links that this process has mapped."""
    with open("/proc/self/maps") as maps:  # noqa: ASYNC230
        return sum("kfcomm-link" in line for line in maps)


async def fork_a_meddler(me: Actor) -> None:
    """A forked child that uses every link of its parent, and ends."""
    child = os.fork()
    if child == 0:
        try:
            hub = _shared_memory(me).hub
            for link in me.comm._session.engine.links._links():
                link.send((6, 1, 1))
                link.flush()
                link.close()
            hub.wake()
            hub.progress()
            hub.close()
        finally:
            os._exit(0)
    assert await asyncio.to_thread(os.waitpid, child, 0) == (child, 0)
