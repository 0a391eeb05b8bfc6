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

from kfcomm.common.version import HOW_TO_AGREE, __version__
from kfcomm.errors import ConfigError, RendezvousError
from kfcomm.launch.elastic import Elasticity
from kfcomm.launch.hosts import HostPlan
from kfcomm.launch.job import TORCH_KEY, LaunchJob, tls_of
from kfcomm.launch.other_hosts import admit, all_know, arrive, expect_those_admitted, watch_hosts
from kfcomm.rendezvous.backends import LocalStore, Opening, backend_of
from kfcomm.rendezvous.client import StoreClient
from kfcomm.rendezvous.host import store_url
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
    NotSet,
    read_wanted,
)  # fmt: skip
from kfcomm.rendezvous.settings import Settings

if TYPE_CHECKING:
    from kfcomm.rendezvous.store import StoreServer

_CONFIRM_WITHIN_S = 5.0
_LEAST_LOST_AFTER_S = 3.0
"""Launchers ask the store once a second."""
_REACH_WITHIN_S = 15.0
"""Time to reach a backend before the job begins."""
_AGAIN_WITHIN_S = 20.0
"""Time for a first launcher to restart, beyond the time for which it waits for the others."""


class Store(NamedTuple):
    """Store of a job, for the ranks of this host."""

    url: str  # address for the ranks
    # makes it available, after ranks have been started; gets an event that a signal sets
    entered: Callable[[asyncio.Event], AbstractAsyncContextManager[KeyValue]]
    first: StoreClient | None = None  # client of the first launcher's store; None on its host
    let_go: Callable[[], None] = lambda: None  # ends all waits in it
    ended: Mapping[int, int] | None = None  # return codes of ended ranks, if the job runs already; else None
    position: int = 0  # of this host among those of the job


@contextlib.asynccontextmanager
async def served(
    job: LaunchJob, listener: socket, settings: Settings, interrupted: asyncio.Event
) -> AsyncIterator[KeyValue]:
    """Store in memory, on the first host."""
    from kfcomm.rendezvous.store import StoreServer  # imports aiohttp, by now after the ranks have been started

    server = await StoreServer.serve(listener, token=job.token, tls=tls_of(settings))
    if job.elastic is not None:
        await _set_bounds(server.store, job.elastic)
    if job.torch_port is not None:
        await server.store.set(TORCH_KEY, b"%d" % job.torch_port)
    async with _watched(job, server, settings, interrupted):
        yield server.store


@contextlib.asynccontextmanager
async def kept_store(
    job: LaunchJob, elastic: Elasticity, address: str, listener: socket, settings: Settings
) -> AsyncIterator[Store]:
    """Store in a backend, on the first host; ranks are started after it has been read.

    Raises:
        ConfigError: the backend cannot be used, or holds another job.
        RendezvousError: the backend cannot be reached, or another launcher uses it.
    """
    from kfcomm.rendezvous.store import StoreServer

    store = await _opened(job, address, settings, is_first=True)
    server, has_begun = None, False
    try:
        if (there := JobRecord.found(store)) is not None:
            # Before it serves: clients of the job recognise its store by the identity.
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


async def _opened(job: LaunchJob, address: str, settings: Settings, *, is_first: bool) -> LocalStore:
    within_s = min(settings.timeout_s, _REACH_WITHIN_S)
    return await backend_of(address).open(address, Opening(job.environ, is_first, within_s))


@contextlib.asynccontextmanager
async def _watched(
    job: LaunchJob, server: StoreServer, settings: Settings, interrupted: asyncio.Event, *, goes_on: bool = False
) -> AsyncIterator[KeyValue]:
    """Store of the first host, which also watches the launchers of the others; closed at the end."""
    lost_after_s = _lost_after_s(settings)
    watching = asyncio.create_task(
        watch_hosts(
            job, server.store, come_within_s=lost_after_s if goes_on else settings.timeout_s, lost_after_s=lost_after_s
        )
    )  # fmt: skip
    admitting = asyncio.create_task(_admitting(job, server))
    try:
        yield server.store
        # the launchers of the other hosts still have to learn the outcome
        learnt = asyncio.ensure_future(all_know(job.plan, server.store, job.options.grace_s + _CONFIRM_WITHIN_S))
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


async def _admitting(job: LaunchJob, server: StoreServer) -> None:
    if job.elastic is not None:
        with contextlib.suppress(RendezvousError):
            await admit(job, job.elastic, server.store)


def _lost_after_s(settings: Settings) -> float:
    return max(settings.lost_after_s, _LEAST_LOST_AFTER_S)


@contextlib.asynccontextmanager
async def joined(job: LaunchJob, settings: Settings) -> AsyncIterator[tuple[LaunchJob, Store]]:
    """Store on another host, once the first host's store answers: a client of it, or a mirror of a shared backend.

    Also the job as seen from here: without initial ranks, if this launcher arrives later.

    Raises:
        NotNeeded: the job ended before it used this host.
        RendezvousError: another launcher runs on this host; or the store cannot be reached.
    """
    # By its name: a first host that is moved, as a pod is, comes back with another address.
    url = store_url(job.plan.hosts[0].identity, job.options.store_port())
    client = StoreClient(url, job.token, timeout_s=settings.timeout_s, tls=tls_of(settings))
    kept = job.options.store
    # after a common restart, wait until the first launcher knows this one
    within_s = 0.0 if kept is None else _lost_after_s(settings) + _AGAIN_WITHIN_S
    try:
        if kept is None or not backend_of(kept).is_shared:
            position = await arrive(job, client, client, within_s)
            store = Store(client.url, lambda _: contextlib.nullcontext(client), client, position=position)
            if job.elastic is None:
                job = replace(job, torch_port=await _torch_port(client))
            yield job.at(position), store
            await _confirm_end(position, client)
        else:
            async with _mirrored(job, kept, client, settings, within_s) as (store, server):
                yield job.at(store.position), store
                await _confirm_end(store.position, server.store)
    finally:
        await client.close()


async def _torch_port(client: StoreClient) -> int:
    """Port that the first launcher sets as soon as its store answers.

    Raises:
        RendezvousError: it does not, since it is of another version.
    """
    try:
        return int(await client.get(TORCH_KEY, _REACH_WITHIN_S))
    except NotSet as error:
        why = f"the launcher on the first host runs another version of kfcomm, this is {__version__}"
        raise RendezvousError(f"{why}: it has not set {TORCH_KEY!r}. {HOW_TO_AGREE}") from error


@contextlib.asynccontextmanager
async def _mirrored(
    job: LaunchJob, kept: str, client: StoreClient, settings: Settings, within_s: float
) -> AsyncIterator[tuple[Store, StoreServer]]:
    """Store of this host, in the same backend as the first host's; for the ranks of this host."""
    from kfcomm.rendezvous.store import StoreServer

    local = await _opened(job, kept, settings, is_first=False)
    server = await StoreServer.start(job.plan.address, token=job.token, tls=tls_of(settings), store=local)
    try:
        while True:
            position = await arrive(job, client, local, within_s)
            there = JobRecord.found(local)
            # Else the mirror still shows the previous job of the backend.
            if there is not None and there.identity == client.identity:
                break
            await asyncio.sleep(AGAIN_S)
        entered, let_go = lambda _: contextlib.nullcontext(local), local.contents.close
        yield Store(server.url, entered, client, let_go, position=position), server
    finally:
        await server.close()
        await local.close(is_over=False)


async def _confirm_end(position: int, store: KeyValue) -> None:
    with contextlib.suppress(RendezvousError, TimeoutError):
        async with asyncio.timeout(_CONFIRM_WITHIN_S):
            await store.claim(f"{LAUNCHERS}/{position}", b"")


_LOOK_EVERY_S = 0.05
_KILLED = -9

logger = logging.getLogger("kfcomm")


class JobRecord(NamedTuple):
    """Record of the job that a store holds."""

    identity: bytes  # of the job, by which clients recognise its store
    hosts: tuple[tuple[str, int], ...]  # name or address, and initial number of ranks, of each
    bounds: tuple[int, int]  # least and largest number of ranks

    @classmethod
    def of(cls, identity: bytes, plan: HostPlan, elastic: Elasticity) -> JobRecord:
        """Record of a new job."""
        hosts = tuple((host.identity, host.num_ranks) for host in plan.hosts)
        return cls(identity, hosts, (elastic.least, elastic.most))

    def to_wire(self) -> bytes:
        """Value of `JOB_RECORD`."""
        told: bytes = msgpack.packb(tuple(self))
        return told

    @classmethod
    def found(cls, store: LocalStore) -> JobRecord | None:
        """Record in a store, or None."""
        told = store.contents.held(JOB_RECORD)
        return None if told is None else cls(*msgpack.unpackb(told, use_list=False))

    def check(self, other: JobRecord, store: str) -> None:
        """Check that this launcher was started for the job in the store.

        Raises:
            ConfigError: it was not; shows both jobs.
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


async def take_up(
    server: StoreServer, address: str, plan: HostPlan, elastic: Elasticity, heard_within_s: float
) -> bool:
    """Continue the job that a store holds, or begin a new one; return whether a job continues.

    ``elastic`` is made for a new job, and updated to the state of a continued one. Launchers of other hosts that have
    ranks of the job are waited for ``heard_within_s``.

    Raises:
        ConfigError: the store holds another job.
        RendezvousError: the store has ended.
    """
    store = server.store
    expect_those_admitted(store, plan, elastic)
    mine = JobRecord.of(store.identity, plan, elastic)
    there = JobRecord.found(store)
    if there is not None:
        there.check(mine, address)
        survivors = _survivors(store, elastic)
        # Launchers of other hosts ask once a second, so that silence means that they are gone too.
        if survivors and await _is_any_heard(store, survivors, heard_within_s):
            await _go_on(server, elastic, survivors)
            return True
        asked = _asked_last(store)
        await server.begin_anew(*([] if asked is None else [SIZES]))
        if asked is not None:
            await store.ask_size(asked)  # later limits concerned ranks that are gone
        # Hosts that arrived later ask again.
        del elastic.places[plan.num_first :]
        logger.warning("all ranks of the job at --store %s are gone: it begins again", address)
    await store.claim(JOB_RECORD, mine._replace(identity=store.identity).to_wire())
    return False


def _asked_last(store: LocalStore) -> int | None:
    """Number of ranks that was requested last, limits by the launcher aside."""
    told = [read_wanted(one) for _, one in sorted(store.contents.folder(SIZES).items(), key=lambda item: int(item[0]))]
    return next((wanted.size for wanted, is_held in told[::-1] if not is_held), None)


def _starts(store: LocalStore, elastic: Elasticity) -> Mapping[int, int]:
    """Host of each process that was ever started, by uid."""
    found = dict(elastic.where)
    for host in range(len(elastic.places)):
        found |= dict.fromkeys(map(int, store.contents.folder(f"{START}/{host}")), host)
    return found


def _survivors(store: LocalStore, elastic: Elasticity) -> Mapping[int, list[int]]:
    """Uids of ranks on other hosts that may still run, by host."""
    arrived, ended, leaving = (store.contents.folder(one).keys() for one in (LAUNCHED, LAUNCHERS, LEAVING))
    come = arrived - ended - leaving
    found: dict[int, list[int]] = {}
    for uid, host in _starts(store, elastic).items():
        # Ranks of the first host have ended with its launcher.
        if host and str(host) in come and uid not in store.contents.exits:
            found.setdefault(host, []).append(uid)
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
    living = {uid for uids in survivors.values() for uid in uids}
    # These ended with a launcher that could not report them.
    for uid in sorted(starts.keys() - living - store.contents.exits.keys()):
        await store.report_exit(Exit(uid, _KILLED))
    for host in range(1, len(elastic.places)):
        elastic.places[host].is_gone = host not in survivors
    elastic.goes_on(starts, store.contents.exits, _asked_last(store) or elastic.asked)
    for uid in map(int, store.contents.folder(RELEASED).keys() | store.contents.folder(DISMISSED).keys()):
        elastic.released(uid)
