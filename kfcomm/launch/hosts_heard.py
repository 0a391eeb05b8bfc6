"""Whether the launchers of the other hosts are there: they ask the first host's store for news again and again.

A launcher that does not come, or is not heard of any more, is given up: the ranks of its host are reported as ended, so
that all launchers and ranks learn of it the same way as of any other end.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Protocol, TypeAlias

from kfcomm.errors import RendezvousError
from kfcomm.launch.hosts import Plan
from kfcomm.rendezvous.board import LAUNCHED, LAUNCHERS, LEAVING, Board, Exit, Why
from kfcomm.rendezvous.folders import StoreClosed

if TYPE_CHECKING:
    from kfcomm.rendezvous.client import StoreClient

RanksOf: TypeAlias = Callable[[int], Iterable[int]]

LOOK_EVERY_S = 0.5
_LATE_S = 5.0


class Claims(Protocol):
    """A store, or a client of one."""

    async def claim(self, key: str, value: bytes) -> bytes:
        """See ``Folders``."""
        ...


class Reported(Claims, Protocol):
    """The store where ends are reported."""

    async def report_exit(self, end: Exit) -> None:
        """Report the end of a rank."""


def who_launches() -> bytes:
    """This launcher, which no other is."""
    return f"process {os.getpid()} on {socket.gethostname()} ({secrets.token_hex(8)})".encode()


async def arrive(client: StoreClient, store: Claims, host: int, me: bytes, within_s: float) -> None:
    """Tell the first host's store that the launcher of a host, by its position, has come: one for each host.

    Args:
        client: of that store.
        store: where that is kept; the same one, or a part of it here.
        host: position of this host.
        me: who has come; see `who_launches`.
        within_s: for which one that came before is waited for: it may be of a job that is over.

    Raises:
        RendezvousError: another came before; or the store cannot be reached.
    """
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + within_s
    while True:
        try:
            held = await store.claim(f"{LAUNCHED}/{host}", me)
            if held == me:
                return await client.arrive(host)
        except StoreClosed:
            client.identity = b""  # another job has begun in its place: this launcher may be of that
            held = b"one of a job that is over"
        if loop.time() >= deadline_s:
            raise RendezvousError(
                f"another launcher has come for this host before: {held.decode(errors='replace')}; a job has one on "
                "each host, and one that has ended cannot come back to it"
            )
        await asyncio.sleep(LOOK_EVERY_S)


async def watch_hosts(
    plan: Plan, board: Board, store: Reported, ranks_of: RanksOf, *, come_within_s: float, lost_after_s: float
) -> None:
    """Report the ranks of hosts whose launchers are not there; returns when none is left to watch.

    Args:
        plan: who runs where.
        board: of the store on the first host, which is this one.
        store: that one.
        ranks_of: those that a host has, or had.
        come_within_s: how long a launcher may take to come.
        lost_after_s: how long one that has come may be silent.
    """
    loop = asyncio.get_running_loop()
    since_s = dict.fromkeys(range(1, len(plan.hosts)), loop.time())
    looked_s = loop.time()
    while since_s:
        await asyncio.sleep(min(LOOK_EVERY_S, lost_after_s / 4))
        now_s = loop.time()
        if now_s - looked_s > _LATE_S:
            # this launcher itself was stopped: the others had no chance
            since_s = dict.fromkeys(since_s, now_s)
        looked_s = now_s
        left = await board.collect(LAUNCHERS, 0, None, 0)
        for host in list(since_s):
            heard_s = board.heard_s.get(host)
            since_s[host] = max(since_s[host], heard_s or 0.0)
            if str(host) in left:
                del since_s[host]
            elif now_s - since_s[host] > (come_within_s if heard_s is None else lost_after_s):
                del since_s[host]
                why = Why.ABSENT if heard_s is None else Why.SILENT
                with contextlib.suppress(RendezvousError):
                    await store.claim(f"{LEAVING}/{host}", b"")
                    for rank in ranks_of(host):
                        await store.report_exit(Exit(rank, 1, why))


def company(plan: Plan, board: Board, ranks_of: RanksOf) -> list[int]:
    """The other hosts, by position, that have not been given up."""
    given_up = {end.rank for end in board.exits.values() if end.why in (Why.SILENT, Why.ABSENT)}
    return [host for host in range(1, len(plan.hosts)) if given_up.isdisjoint(ranks_of(host))]
