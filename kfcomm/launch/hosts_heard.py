"""Whether the launchers of the other hosts are there: they ask the first host's store for news again and again.

A launcher that does not come, or is not heard of any more, is given up: the ranks of its host are reported as ended, so
that all launchers and ranks learn of it the same way as of any other end.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from typing import TypeAlias

from kfcomm.errors import RendezvousError
from kfcomm.launch.hosts import Plan
from kfcomm.rendezvous.backends import LocalStore
from kfcomm.rendezvous.keyvalue import LAUNCHED, LAUNCHERS, LEAVING, Exit, Why

RanksOf: TypeAlias = Callable[[int], Iterable[int]]

LOOK_EVERY_S = 0.5
_LATE_S = 5.0


async def watch_hosts(
    plan: Plan, store: LocalStore, ranks_of: RanksOf, *, come_within_s: float, lost_after_s: float,
    is_elastic: bool = False,
) -> None:  # fmt: skip
    """Report the ranks of hosts whose launchers are not there; returns when none is left to watch.

    Args:
        plan: who begins where.
        store: of the first host, which is this one.
        ranks_of: those that a host has, or had, by position.
        come_within_s: how long a launcher may take to come.
        lost_after_s: how long one that has come may be silent.
        is_elastic: whether others may come later: then it goes on.
    """
    loop = asyncio.get_running_loop()
    since_s = dict.fromkeys(range(1, plan.num_first), loop.time())
    over: set[int] = set()
    looked_s = loop.time()
    while since_s or is_elastic:
        await asyncio.sleep(min(LOOK_EVERY_S, lost_after_s / 4))
        now_s = loop.time()
        if now_s - looked_s > _LATE_S:
            # this launcher itself was stopped: the others had no chance
            since_s = dict.fromkeys(since_s, now_s)
        looked_s = now_s
        for host in set(map(int, store.contents.folder(LAUNCHED))) - over - {0}:
            since_s.setdefault(host, now_s)
        left = store.contents.folder(LAUNCHERS)
        for host in list(since_s):
            heard_s = store.contents.heard_s.get(host)
            since_s[host] = max(since_s[host], heard_s or 0.0)
            if str(host) not in left:
                if now_s - since_s[host] <= (come_within_s if heard_s is None else lost_after_s):
                    continue
                why = Why.ABSENT if heard_s is None else Why.SILENT
                with contextlib.suppress(RendezvousError):
                    await store.claim(f"{LEAVING}/{host}", b"")
                    for rank in ranks_of(host):
                        await store.report_exit(Exit(rank, 1, why))
            over.add(host)
            del since_s[host]


def company(plan: Plan, store: LocalStore) -> set[str]:
    """The other hosts, by position, that have not left the job before it ended, and have not been given up."""
    late = {name for name in store.contents.folder(LAUNCHED) if int(name) >= plan.num_first}
    return {*map(str, range(1, plan.num_first)), *late} - store.contents.folder(LEAVING).keys()


async def all_know(plan: Plan, store: LocalStore, wait_s: float) -> None:
    """The launchers of the other hosts have learnt how the job has ended, and have ended; or time is up."""
    loop = asyncio.get_running_loop()
    deadline_s, left = loop.time() + wait_s, store.contents.folder(LAUNCHERS)
    while not company(plan, store) <= left.keys() and loop.time() < deadline_s:
        left = await store.contents.collect(LAUNCHERS, len(left) + 1, None, min(LOOK_EVERY_S, deadline_s - loop.time()))
