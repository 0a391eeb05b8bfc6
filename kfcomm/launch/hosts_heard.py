"""Whether the launchers of the other hosts are there: they ask the first host's store for news again and again.

A launcher that does not come, or is not heard of any more, is given up: the ranks of its host are reported as ended, so
that all launchers and ranks learn of it the same way as of any other end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import TypeAlias

from kfcomm.launch.hosts import Plan
from kfcomm.rendezvous.board import LAUNCHERS, LEAVING, Board, Exit, Why

RanksOf: TypeAlias = Callable[[int], Iterable[int]]

LOOK_EVERY_S = 0.5
_LATE_S = 5.0


async def watch_hosts(
    plan: Plan, board: Board, ranks_of: RanksOf, *, come_within_s: float, lost_after_s: float
) -> None:
    """Report the ranks of hosts whose launchers are not there; returns when none is left to watch.

    Args:
        plan: who runs where.
        board: of the store on the first host, which is this one.
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
                board.claim(f"{LEAVING}/{host}", b"")
                for rank in ranks_of(host):
                    board.report_exit(Exit(rank, 1, why))


def company(plan: Plan, board: Board, ranks_of: RanksOf) -> list[int]:
    """The other hosts, by position, that have not been given up."""
    given_up = {end.rank for end in board.exits.values() if end.why in (Why.SILENT, Why.ABSENT)}
    return [host for host in range(1, len(plan.hosts)) if given_up.isdisjoint(ranks_of(host))]
