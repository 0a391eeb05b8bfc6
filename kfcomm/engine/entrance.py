"""Entrances of a process into a job: with all ranks at its start, by another library's exchange, or admitted later.

Each gives the `SocketNetwork` of the first epoch in which this process takes part.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

import msgpack

from kfcomm.arrays.devices.routes import agree, choose
from kfcomm.common.sockets import make_room
from kfcomm.engine.membership import Meeting, check_checksums, layout_of
from kfcomm.engine.network import SocketNetwork
from kfcomm.errors import ConfigError, RendezvousError
from kfcomm.rendezvous.identity import PeerInfo, host_id, process_uid
from kfcomm.rendezvous.join import JobStore, address_towards, check_job, check_versions
from kfcomm.rendezvous.join import join as meet_at_store
from kfcomm.rendezvous.keyvalue import ASIDE, ENTRY, INVITED, JOINING
from kfcomm.rendezvous.settings import Settings
from kfcomm.transports.registry import AUTO, named, selected
from kfcomm.transports.sockets import Listener

if TYPE_CHECKING:
    from kfcomm.arrays.devices import DeviceReport
    from kfcomm.transports.tls import Tls

Exchange: TypeAlias = "Callable[[PeerInfo], Awaitable[Sequence[PeerInfo]]]"
"""Tells the other ranks of this process, and gives those of all ranks, by rank; without a store of kfcomm's."""


DESCRIPTORS = 32
"""Of a rank with links to two others; each further one takes ten at most."""


async def join(settings: Settings, device: DeviceReport) -> SocketNetwork:
    """Listen, register, and wait for all others.

    Args:
        settings: of this rank.
        device: of this rank, for the others.

    Raises:
        ConfigError: no such interface, or a port that is taken; on all ranks, in the same words, where device
            memory cannot go as they ask.
        RendezvousError: see ``rendezvous.join``.
    """
    make_room(DESCRIPTORS, "a rank")
    tls = tls_of(settings)
    store = await JobStore.open(settings, tls)
    settings = settings._replace(token=store.client.token)
    listener: Listener | None = None
    try:
        mark = secrets.token_hex(4)
        listener, me = await listen(settings, device, mark)
        meeting = Meeting(settings, me, mark, store, tls, {})
        if settings.join:
            return await _enter(meeting, listener, device)
        peers = await meet_at_store(settings, me, store.client)
        check_reach(peers, settings.links)
        try:
            check_checksums(peers)
            check_devices(peers)
        except ConfigError:
            # all ranks find out the same, but some need the store for it yet: it stays until they have left, too
            await store.leave(settings, me)
            raise
        return SocketNetwork(meeting, peers, listener, range(settings.size))
    except BaseException:
        if listener is not None:
            listener.close()
        await store.close()
        raise


async def meet(settings: Settings, device: DeviceReport, exchange: Exchange) -> SocketNetwork:
    """Listen, and learn of all others by ``exchange``: for ranks that another library has brought together.

    Without a store, ``resize`` and joining ranks are not available, and no half of a split world may continue
    without the other.

    Args:
        settings: of this rank; ``store`` says towards which host the others are.
        device: of this rank, for the others.
        exchange: gathers the ``PeerInfo`` of all ranks.

    Raises:
        ConfigError: see ``join``.
        RendezvousError: they run another version; and what ``exchange`` raises.
    """
    make_room(DESCRIPTORS, "a rank")
    tls = tls_of(settings)
    mark = secrets.token_hex(4)
    listener, me = await listen(settings, device, mark)
    try:
        peers = await exchange(me)
        check_versions(me, peers)
        check_reach(peers, settings.links)
        check_checksums(peers)
        check_devices(peers)
        return SocketNetwork(Meeting(settings, me, mark, None, tls, {}), peers, listener, range(settings.size))
    except BaseException:
        listener.close()
        raise


async def _enter(meeting: Meeting, listener: Listener, device: DeviceReport) -> SocketNetwork:
    """Wait until the ranks of a running job admit this process, or invite it to an epoch that they prepare.

    Raises:
        ConfigError: its number is another's, or its settings are not theirs.
        RendezvousError: they do not within the timeout; or the store is gone.
    """
    me, client, loop = meeting.me, meeting.client, asyncio.get_running_loop()
    aside: Listener | None = None
    waits: dict[str, asyncio.Task[list[Any]]] = {}
    try:
        await check_job(me, client)
        # Connections of an epoch that is prepared, perhaps in vain, come elsewhere. Without a port for that this
        # process is admitted as it is.
        with contextlib.suppress(ConfigError):
            aside, there = await listen(meeting.settings, device, f"{meeting.mark}-aside")
            await client.claim(f"{ASIDE}/{me.rank}", there.to_wire())
        if await client.claim(f"{JOINING}/{me.rank}", me.to_wire()) != me.to_wire():
            raise ConfigError(f"another process has joined this job as {me.rank}, or waits to: take another number")
        for about in (ENTRY, INVITED) if aside is not None else (ENTRY,):
            waits[about] = loop.create_task(told_of(meeting, about), name=f"kfcomm waits for {about}")
        await asyncio.wait(waits.values(), return_when=asyncio.FIRST_COMPLETED)
        if aside is None or waits[ENTRY].done() or waits[INVITED].exception() is not None:
            return SocketNetwork.of(meeting, await waits[ENTRY], listener)
        made = SocketNetwork.of(meeting, waits[INVITED].result(), aside)
        made.expect_admission(waits.pop(ENTRY), listener)
        aside = None
        return made
    finally:
        if aside is not None:
            aside.close()
        for task in waits.values():
            task.cancel()
        await asyncio.gather(*waits.values(), return_exceptions=True)


def tls_of(settings: Settings) -> Tls | None:
    """Load the TLS contexts of connections; None without TLS."""
    if settings.tls is None:
        return None
    from kfcomm.transports.tls import load

    return load(settings.tls)


async def listen(settings: Settings, device: DeviceReport, mark: str) -> tuple[Listener, PeerInfo]:
    """Open the port of this rank; return it with the `PeerInfo` for the others."""
    if settings.store is None:
        raise ConfigError("a world of one has no network")
    if settings.links != AUTO and (unsupported := named(settings.links).why_unsupported()) is not None:
        raise ConfigError(f"transport {settings.links!r} cannot work here: {unsupported}; use 'auto'")
    address = await address_towards(settings.interface, settings)
    is_local = any(transport.is_local for transport in selected(settings.links))
    unix = f"@kfcomm-{process_uid(settings.rank)}-{mark}" if is_local else None
    listener = Listener(address, unix=unix, ports=settings.ports)
    me = PeerInfo.here(rank=settings.rank, address=address, port=listener.port, unix=unix, device=device)
    return listener, replace(me, transport=settings.transport, checksum=settings.checksum)


async def told_of(meeting: Meeting, about: str) -> list[Any]:
    """Wait until the ranks of a running job invite, or admit, this process.

    Raises:
        ConfigError: its settings are not theirs.
        RendezvousError: they do not within the timeout; or the store is gone.
    """
    from kfcomm.rendezvous.keyvalue import NotSet  # as the client does, which a world of one does without

    settings, me, client = meeting.settings, meeting.me, meeting.client
    try:
        while True:
            try:
                said = await client.get(f"{about}/{me.rank}", settings.timeout_s)
                break
            except NotSet:
                if not settings.launcher:  # else it may be a spare, which waits as long as there is a store
                    raise
    except RendezvousError as error:
        raise RendezvousError(f"no rank of the job has admitted {me.describe()}: {error}") from error
    told = msgpack.unpackb(said, use_list=False)
    if isinstance(told, str):
        raise ConfigError(f"the ranks of the job refuse this process: {told}")
    return list(told)


def check_reach(peers: Sequence[PeerInfo], transport: str) -> None:
    """Refuse a transport that does not reach all ranks."""
    here = host_id()
    others = [peer.rank for peer in peers if peer.host != here]
    if others and all(one.is_local for one in selected(transport)):
        there = f"ranks {others[:16]}, which are on other hosts"
        raise ConfigError(f"transport {transport!r} cannot reach {there}; use 'auto'")


def check_devices(peers: Sequence[PeerInfo]) -> None:
    """Refuse transports that contradict each other, and NCCL where it cannot work."""
    choose([peer.device for peer in peers], layout_of(peers), agree([peer.transport for peer in peers]))
