"""Store of a job, as the launcher of each host has it.

On the first host it is served: from memory, or, with ``--store``, from a backend. Launchers of other hosts are its
clients; if the backend is shared (etcd), each serves a local store of its own, which mirrors that.

A first launcher that is restarted with the same backend finds the record of its job there. The ranks of a host end with
its launcher. Those of other hosts continue, and their launchers retry until the store is back. If some of these are
heard again, the job continues with them, and missing ranks are replaced under new uids. Otherwise no rank is left: the
job begins again, under another identity, with the number of ranks that was requested last; its progress is in its
checkpoint.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from socket import socket
from typing import TYPE_CHECKING, NamedTuple

import msgpack

from kfcomm.errors import ConfigError, RendezvousError
from kfcomm.launch import torch_environ
from kfcomm.launch.elastic import Elasticity
from kfcomm.launch.hosts import Plan
from kfcomm.launch.job import Job, tls_of
from kfcomm.launch.other_hosts import admit, all_know, arrive, expect_those_admitted, watch_hosts
from kfcomm.rendezvous.backends import LocalStore, Opening, backend_of
from kfcomm.rendezvous.client import StoreClient
from kfcomm.rendezvous.keyvalue import (
    AGAIN_S,
    BOUNDS,
    DISMISSED,
    JOB_RECORD,
    LAUNCHED,
    LAUNCHERS,
    LEAVING,
    RELEASED,
    SIZES,
    START,
    Exit,
    KeyValue,
    read_wanted,
)  # fmt: skip
from kfcomm.rendezvous.settings import Settings, store_url

if TYPE_CHECKING:
    from kfcomm.rendezvous.store import StoreServer

_FAREWELL_S = 5.0
_LEAST_LOST_AFTER_S = 3.0
"""Launchers ask the store once a second."""
_REACH_WITHIN_S = 15.0
"""For which an etcd is tried before the job begins."""
_AGAIN_WITHIN_S = 20.0
"""What a first launcher takes to be started again, beyond the time for which it waits for the others."""


class Store(NamedTuple):
    """A store, towards which ranks are started.

    Attributes:
        url: of it.
        entered: once they have been; told of signals.
        first: by which the first launcher is known to be there; None on its host.
        let_go: ends what waits in it.
        ended: if the job runs already, the return codes of those that have ended; else None.
        position: of this host among those of the job.
    """

    url: str
    entered: Callable[[asyncio.Event], AbstractAsyncContextManager[KeyValue]]
    first: StoreClient | None = None
    let_go: Callable[[], None] = lambda: None
    ended: Mapping[int, int] | None = None
    position: int = 0


@contextlib.asynccontextmanager
async def served(job: Job, listener: socket, settings: Settings, interrupted: asyncio.Event) -> AsyncIterator[KeyValue]:
    """The store, on the first host, in the memory of this process."""
    from kfcomm.rendezvous.store import StoreServer  # and the library of HTTP: the ranks have been started by now

    server = await StoreServer.serve(listener, token=job.token, tls=tls_of(settings))
    if job.elastic is not None:
        await _set_bounds(server.store, job.elastic)
    if job.torch_port is not None:
        await server.store.set(torch_environ.KEY, b"%d" % job.torch_port)
    async with _watched(job, server, settings, interrupted):
        yield server.store


@contextlib.asynccontextmanager
async def kept_store(
    job: Job, elastic: Elasticity, address: str, listener: socket, settings: Settings
) -> AsyncIterator[Store]:
    """The store, on the first host, kept where it outlives this process; ranks are started when it has been read.

    Raises:
        ConfigError: it cannot be, or is another job's.
        RendezvousError: it cannot be reached, or is another launcher's.
    """
    from kfcomm.rendezvous.store import StoreServer

    store = await _opened(job, address, settings, is_first=True)
    server, has_begun = None, False
    try:
        if (there := JobRecord.found(store)) is not None:
            store.identity = there.identity
        server = await StoreServer.serve(listener, token=job.token, tls=tls_of(settings), store=store)
        goes_on = await take_up(server, address, job.plan, elastic, _lost_after_s(settings))
        has_begun = True
        await _set_bounds(store, elastic)
        ended = {end.rank: end.code for end in store.contents.exits.values()} if goes_on else None
        yield Store(server.url, functools.partial(_watched, job, server, settings, goes_on=goes_on), ended=ended)
    finally:
        if server is not None:
            await server.close()
        await store.close(is_over=has_begun)


async def _set_bounds(store: KeyValue, elastic: Elasticity) -> None:
    await store.set(BOUNDS, b"%d:%d" % (elastic.least, elastic.most))


async def _opened(job: Job, address: str, settings: Settings, *, is_first: bool) -> LocalStore:
    within_s = min(settings.timeout_s, _REACH_WITHIN_S)
    return await backend_of(address).open(address, Opening(job.environ, is_first, within_s))


@contextlib.asynccontextmanager
async def _watched(
    job: Job, server: StoreServer, settings: Settings, interrupted: asyncio.Event, *, goes_on: bool = False
) -> AsyncIterator[KeyValue]:
    """The store of the first host, and by it the launchers of the others; closed in the end."""
    lost_after_s = _lost_after_s(settings)
    watching = asyncio.create_task(
        watch_hosts(
            job.plan, server.store, job.ranks_of, lost_after_s=lost_after_s,
            come_within_s=lost_after_s if goes_on else settings.timeout_s, is_elastic=job.elastic is not None,
        )
    )  # fmt: skip
    admitting = asyncio.create_task(_admitting(job, server))
    try:
        yield server.store
        # the launchers of the other hosts still have to learn how it ended
        learnt = asyncio.ensure_future(all_know(job.plan, server.store, job.options.grace_s + _FAREWELL_S))
        hurried = asyncio.ensure_future(interrupted.wait())
        await asyncio.wait((learnt, hurried), return_when=asyncio.FIRST_COMPLETED)
        for waiting in (learnt, hurried):
            waiting.cancel()
        await asyncio.gather(learnt, hurried, return_exceptions=True)
    finally:
        for task in (watching, admitting):
            task.cancel()
        await asyncio.gather(watching, admitting, return_exceptions=True)
        await server.close()


async def _admitting(job: Job, server: StoreServer) -> None:
    if job.elastic is not None:
        with contextlib.suppress(RendezvousError):
            await admit(server.store, job.plan, job.elastic, job.arrivals.put_nowait)


def _lost_after_s(settings: Settings) -> float:
    return max(settings.lost_after_s, _LEAST_LOST_AFTER_S)


@contextlib.asynccontextmanager
async def joined(job: Job, settings: Settings) -> AsyncIterator[tuple[Job, Store]]:
    """The store, on the other hosts, once that of the first answers: that one, or, in etcd, a part of it here.

    Also the job as it is here: without ranks at the beginning, if this launcher comes later.

    Raises:
        NotNeeded: the job has ended before this host had a part in it.
        RendezvousError: another launcher runs on this host; or the store cannot be reached.
    """
    url = store_url(job.plan.hosts[0].address, job.options.store_port())
    client = StoreClient(url, job.token, timeout_s=settings.timeout_s, tls=tls_of(settings))
    kept = job.options.store
    # who was ended with all others is started again with them, and waits until the first knows it
    within_s = 0.0 if kept is None else _lost_after_s(settings) + _AGAIN_WITHIN_S
    try:
        if kept is None or not backend_of(kept).is_shared:
            position = await _arrive(job, client, client, within_s)
            store = Store(client.url, lambda _: contextlib.nullcontext(client), client, position=position)
            if job.elastic is None:
                job = replace(job, torch_port=int(await client.get(torch_environ.KEY, settings.timeout_s)))
            yield job.at(position), store
            await _say_farewell(position, client)
        else:
            async with _mirrored(job, kept, client, settings, within_s) as (store, server):
                yield job.at(store.position), store
                await _say_farewell(store.position, server.store)
    finally:
        await client.close()


@contextlib.asynccontextmanager
async def _mirrored(
    job: Job, kept: str, client: StoreClient, settings: Settings, within_s: float
) -> AsyncIterator[tuple[Store, StoreServer]]:
    """The store of this host, kept in etcd as that of the first is; its ranks know no other."""
    from kfcomm.rendezvous.store import StoreServer

    local = await _opened(job, kept, settings, is_first=False)
    server = await StoreServer.start(job.plan.address, token=job.token, tls=tls_of(settings), store=local)
    try:
        while True:
            position = await _arrive(job, client, local, within_s)
            there = JobRecord.found(local)
            if there is not None and there.identity == client.identity:
                break
            await asyncio.sleep(AGAIN_S)
        entered, let_go = lambda _: contextlib.nullcontext(local), local.contents.close
        yield Store(server.url, entered, client, let_go, position=position), server
    finally:
        await server.close()
        await local.close(is_over=False)


async def _arrive(job: Job, client: StoreClient, store: KeyValue, within_s: float) -> int:
    return await arrive(client, store, job.plan, job.launcher, within_s, is_elastic=job.elastic is not None)


async def _say_farewell(position: int, store: KeyValue) -> None:
    with contextlib.suppress(RendezvousError, TimeoutError):
        async with asyncio.timeout(_FAREWELL_S):
            await store.claim(f"{LAUNCHERS}/{position}", b"")


_LOOK_EVERY_S = 0.05
_KILLED = -9

logger = logging.getLogger("kfcomm")


class JobRecord(NamedTuple):
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
    def of(cls, identity: bytes, plan: Plan, elastic: Elasticity) -> JobRecord:
        """That of a job which begins."""
        hosts = tuple((host.address, host.num_ranks) for host in plan.hosts)
        return cls(identity, hosts, (elastic.least, elastic.most))

    def to_wire(self) -> bytes:
        """As the store has it."""
        told: bytes = msgpack.packb(tuple(self))
        return told

    @classmethod
    def found(cls, store: LocalStore) -> JobRecord | None:
        """That of a board; None if there is none."""
        told = store.contents.held(JOB_RECORD)
        return None if told is None else cls(*msgpack.unpackb(told, use_list=False))

    def check(self, other: JobRecord, store: str) -> None:
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


async def take_up(server: StoreServer, address: str, plan: Plan, elastic: Elasticity, heard_within_s: float) -> bool:
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
    mine = JobRecord.of(store.identity, plan, elastic)
    there = JobRecord.found(store)
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
        await asyncio.sleep(_LOOK_EVERY_S)
    return True


async def _go_on(server: StoreServer, elastic: Elasticity, survivors: Mapping[int, list[int]]) -> None:
    store = server.store
    starts = _starts(store, elastic)
    living = {birth for births in survivors.values() for birth in births}
    for birth in sorted(starts.keys() - living - store.contents.exits.keys()):
        await store.report_exit(Exit(birth, _KILLED))
    for host in range(1, len(elastic.places)):
        elastic.places[host].is_gone = host not in survivors
    elastic.goes_on(starts, store.contents.exits, _asked_last(store) or elastic.asked)
    for birth in map(int, store.contents.folder(RELEASED).keys() | store.contents.folder(DISMISSED).keys()):
        elastic.released(birth)
