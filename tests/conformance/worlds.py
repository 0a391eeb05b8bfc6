"""Worlds in memory for tests: all ranks at once, ends of all kinds, and the look for what was left behind.

A test waits for a condition (`until`), never for a time. The default timeout of these worlds only turns a hang into a
`CollectiveTimeout` that says who is missing.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np

from kfcomm import testing
from kfcomm.core.links import credit_of
from kfcomm.testing import MemoryWorld
from kfcomm.world.communicator import Communicator

HANG_S = 60.0
LINKS = "memory"
"""The links of all worlds made here; test packages that run over both kinds of links set it."""
SETTLING_TURNS = 20_000


@asynccontextmanager
async def world(
    size: int, *, timeout_s: float = HANG_S, quiet: bool = True, aborted: bool = False, **options: Any
) -> AsyncIterator[MemoryWorld]:
    """A world that is looked through at the end: nothing in flight, nothing early, all credit whole."""
    async with testing.world(size, timeout=timeout_s, transport=LINKS, **options) as comms:
        yield comms
        if quiet:
            await settled(comms, aborted=aborted)


async def everywhere(comms: Sequence[Communicator], call: Callable[[Communicator], Any]) -> list[Any]:
    """Results of ``call(comm)``, an awaitable or its result, on every rank; all at once."""
    return await asyncio.gather(*(_end(call, comm) for comm in comms))


async def ends(comms: Sequence[Communicator], call: Callable[[Communicator], Any]) -> list[Any]:
    """As `everywhere`, with errors in place of results."""
    return await asyncio.gather(*(_end(call, comm) for comm in comms), return_exceptions=True)


async def _end(call: Callable[[Communicator], Any], comm: Communicator) -> Any:
    result = call(comm)
    return await result if isinstance(result, Awaitable) else result


async def until(condition: Callable[[], Any]) -> None:
    """Turns of the loop until the condition holds."""
    while not condition():  # noqa: ASYNC110  whatever the condition looks at has no event to wait for
        await asyncio.sleep(0)


async def heard_of_the_end(comm: Communicator) -> None:
    """Until this rank knows that something is over which it has not posted: a call that comes before may succeed."""
    await until(lambda: comm._session.engine.router.dead)


async def turns(count: int = 20) -> None:
    """So many turns of the loop: enough for every message on memory links to arrive."""
    for _ in range(count):
        await asyncio.sleep(0)


async def settled(comms: Sequence[Communicator], *, aborted: bool = False) -> None:
    """Fails unless the world comes to rest with empty tables and whole windows."""
    left: list[str] = []
    for _ in range(SETTLING_TURNS):
        left = leftovers(comms, aborted=aborted)
        if not left:
            return
        await asyncio.sleep(0)
    raise AssertionError("the world does not come to rest:\n  " + "\n  ".join(left))


def leftovers(comms: Sequence[Communicator], *, aborted: bool = False) -> list[str]:
    """State still held by engines and routers, in words."""
    left = []
    gone = {rank for comm in comms for rank in comm._session.engine.router.lost}
    for comm in comms:
        engine = comm._session.engine
        router = engine.router
        if comm._session.is_closed or comm._session.rank in gone:
            continue
        sizes = {
            "live": len(router.live),
            "inquiries": len(engine.deadlines.inquiries),
            "dirty": len(engine.links.dirty),
            "dials": len(engine.links._dials),
            "early": sum(len(key.early) for key in router.names),
            "live under keys": sum(len(key.live) for key in router.names),
            "aborted": 0 if aborted else len(router.dead),
            "asks": sum(incoming.asks for incoming in engine.links.incoming),
            "serving": len(comm._mailbox._serving),
            "backlogs": sum(len(sender._backlog) for sender in engine.links.by_peer.values()),
            "queued": sum(_queued(sender.link) for sender in engine.links.by_peer.values() if sender.link),
        }
        left += [f"rank {comm.rank}: {what}: {number}" for what, number in sizes.items() if number]
        left += _credit_missing(comm, comms)
    return left


def _queued(link: Any) -> int:
    return len(link._queue) if LINKS == "memory" else len(link.queue) + len(link._pieces)


def _credit_missing(comm: Communicator, comms: Sequence[Communicator]) -> list[str]:
    """The ways from ``comm`` on which some credit is neither here nor about to be given back."""
    missing = []
    whole = credit_of(len(comms))
    by_rank = {one._session.rank: one for one in comms}
    for peer, sender in comm._session.engine.links.by_peer.items():
        link: Any = sender.link
        far = by_rank[peer]._session.engine
        # between two ranks there is at most one link each way
        other = next((one for one in far.links.incoming if one.peer == comm._session.rank), None)
        if link is None or other is None:
            continue
        window = other.window
        here = sender.state.window
        if (here.nbytes + window._owed_nbytes, here.headers + window.owed_headers) != (
            whole.nbytes,
            whole.headers,
        ):
            missing.append(
                f"rank {comm.rank}: {here.nbytes} bytes and {here.headers} headers of credit to rank {peer}, which "
                f"owes {window._owed_nbytes} and {window.owed_headers}"
            )
    return missing


def same_bits(a: Any, b: Any) -> bool:
    """Whether two arrays have the same shape, dtype and bytes."""
    x, y = np.asarray(a), np.asarray(b)
    return x.shape == y.shape and x.dtype == y.dtype and x.tobytes() == y.tobytes()


def assert_kinds(outcomes: Sequence[Any], *kinds: type[BaseException]) -> None:
    """The ends of all ranks are errors of these types: one for all, or one for each rank."""
    wanted = kinds * len(outcomes) if len(kinds) == 1 else kinds
    got = [type(one) for one in outcomes]
    assert got == list(wanted), f"expected {[one.__name__ for one in wanted]}, got {outcomes}"


def assert_usable(results: Sequence[Any], size: int) -> None:
    """All ranks got the sum of ones."""
    assert [np.asarray(one).tolist() for one in results] == [[size]] * len(results)


async def works(comms: Sequence[Communicator], name: str | None = None) -> None:
    """The communicators still do their work, under this name."""
    results = await everywhere(comms, lambda comm: comm.all_reduce(np.ones(1, np.int64), name))
    assert_usable(results, len(comms))
