"""A launcher of the first host that is started again, with the same store: what is left of the job, and how it goes on.

The ranks of a host end with its launcher. Those of other hosts train on, and their launchers look for the store until
it is back. So either some of these are heard again, and the job goes on with them: others are started in the place of
those that are gone, under numbers that nobody has had. Or nobody is left: then the job begins again, under another
identity, with the number of ranks that was asked for last; what it had reached is in its checkpoint.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import NamedTuple

import msgpack

from kfcomm.errors import ConfigError
from kfcomm.launch.coming import expect_those_admitted
from kfcomm.launch.elastic import Elasticity
from kfcomm.launch.hosts import Plan
from kfcomm.rendezvous.backends import LocalStore
from kfcomm.rendezvous.keyvalue import (
    DISMISSED,
    JOB_RECORD,
    LAUNCHED,
    LAUNCHERS,
    LEAVING,
    RELEASED,
    SIZES,
    START,
    Exit,
    read_wanted,
)  # fmt: skip
from kfcomm.rendezvous.store import StoreServer

LOOK_EVERY_S = 0.05
KILLED = -9

logger = logging.getLogger("kfcomm")


class Record(NamedTuple):
    """What a store says of its job.

    Attributes:
        identity: by which those who have heard of the job know its store again.
        hosts: addresses, and with how many ranks the job began on each.
        bounds: the least and the largest number of ranks.
    """

    identity: bytes
    hosts: tuple[tuple[str, int], ...]
    bounds: tuple[int, int]

    @classmethod
    def of(cls, identity: bytes, plan: Plan, elastic: Elasticity) -> Record:
        """That of a job which begins."""
        hosts = tuple((host.address, host.num_ranks) for host in plan.hosts)
        return cls(identity, hosts, (elastic.least, elastic.most))

    def to_wire(self) -> bytes:
        """As the store has it."""
        told: bytes = msgpack.packb(tuple(self))
        return told

    @classmethod
    def found(cls, store: LocalStore) -> Record | None:
        """That of a board; None if there is none."""
        told = store.contents.held(JOB_RECORD)
        return None if told is None else cls(*msgpack.unpackb(told, use_list=False))

    def check(self, other: Record, store: str) -> None:
        """Whether this launcher was started for the job that is there.

        Raises:
            ConfigError: it was not; shows both.
        """
        if self[1:] != other[1:]:
            raise ConfigError(
                f"--store {store!r} holds another job, which has not ended: {self.describe()}; this one is "
                f"{other.describe()}. Take another store, or start that job again"
            )

    def describe(self) -> str:
        """In words."""
        hosts = ",".join(f"{address}:{count}" for address, count in self.hosts)
        return f"hosts {hosts}, {self.bounds[0]} to {self.bounds[1]} ranks"


async def begin(server: StoreServer, address: str, plan: Plan, elastic: Elasticity, heard_within_s: float) -> bool:
    """Take up the job that a store holds, or begin one.

    Args:
        server: of that store; it serves already.
        address: of the store, as it was given.
        plan: who begins where.
        elastic: made for a job that begins; if one goes on, it is brought to what is known of that.
        heard_within_s: for which the launchers of other hosts are waited for, if they have ranks of the job.

    Returns:
        Whether a job goes on: then no rank is started with which it began.

    Raises:
        ConfigError: it holds another job.
        RendezvousError: the store has ended.
    """
    store = server.store
    expect_those_admitted(store, plan, elastic)
    mine = Record.of(store.identity, plan, elastic)
    there = Record.found(store)
    if there is not None:
        there.check(mine, address)
        survivors = _survivors(store, elastic)
        if survivors and await _is_any_heard(store, survivors, heard_within_s):
            await _go_on(server, elastic, survivors)
            return True
        asked = _asked_last(store)
        await server.begin_anew(*([] if asked is None else [SIZES]))
        if asked is not None:
            await store.ask_size(asked)  # what was held since was of the ranks that are gone
        del elastic.places[plan.num_first :]
        logger.warning("--store %s holds a job of which no rank is left: it begins again", address)
    await store.claim(JOB_RECORD, mine._replace(identity=store.identity).to_wire())
    return False


def _asked_last(store: LocalStore) -> int | None:
    """How many ranks somebody has asked for, other than the launcher by what there is room for."""
    told = [read_wanted(one) for _, one in sorted(store.contents.folder(SIZES).items(), key=lambda item: int(item[0]))]
    return next((wanted.size for wanted, is_held in told[::-1] if not is_held), None)


def _starts(store: LocalStore, elastic: Elasticity) -> Mapping[int, int]:
    """The host of each process that was ever started, by birth."""
    found = dict(elastic.where)
    for host in range(len(elastic.places)):
        found |= dict.fromkeys(map(int, store.contents.folder(f"{START}/{host}")), host)
    return found


def _survivors(store: LocalStore, elastic: Elasticity) -> Mapping[int, list[int]]:
    """Births of those on other hosts that may still run, by host."""
    arrived, ended, leaving = (store.contents.folder(one).keys() for one in (LAUNCHED, LAUNCHERS, LEAVING))
    come = arrived - ended - leaving
    found: dict[int, list[int]] = {}
    for birth, host in _starts(store, elastic).items():
        if host and str(host) in come and birth not in store.contents.exits:
            found.setdefault(host, []).append(birth)
    return found


async def _is_any_heard(store: LocalStore, hosts: Mapping[int, list[int]], within_s: float) -> bool:
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + within_s
    while hosts.keys().isdisjoint(store.contents.heard_s):
        if loop.time() >= deadline_s:
            return False
        await asyncio.sleep(LOOK_EVERY_S)
    return True


async def _go_on(server: StoreServer, elastic: Elasticity, survivors: Mapping[int, list[int]]) -> None:
    store = server.store
    starts = _starts(store, elastic)
    living = {birth for births in survivors.values() for birth in births}
    for birth in sorted(starts.keys() - living - store.contents.exits.keys()):
        await store.report_exit(Exit(birth, KILLED))
    for host in range(1, len(elastic.places)):
        elastic.places[host].is_gone = host not in survivors
    elastic.goes_on(starts, store.contents.exits, _asked_last(store) or elastic.asked)
    for birth in map(int, store.contents.folder(RELEASED).keys() | store.contents.folder(DISMISSED).keys()):
        elastic.released(birth)
