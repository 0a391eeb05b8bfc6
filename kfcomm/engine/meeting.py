"""Meeting of the ranks of a world: each rank's own description, and the checks that they can work together."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from kfcomm.arrays.devices.routes import agree, choose
from kfcomm.errors import ConfigError, RendezvousError
from kfcomm.rendezvous.host import choose_address, host_and_port
from kfcomm.rendezvous.identity import PeerInfo, host_id, process_uid
from kfcomm.rendezvous.settings import Settings
from kfcomm.transports.registry import AUTO, named, selected
from kfcomm.transports.sockets import Listener
from kfcomm.types import Costs, Layout

if TYPE_CHECKING:
    from kfcomm.arrays.devices import DeviceReport
    from kfcomm.rendezvous.client import StoreClient
    from kfcomm.rendezvous.join import JobStore
    from kfcomm.rendezvous.keyvalue import Exit
    from kfcomm.transports.tls import Tls

Exchange: TypeAlias = "Callable[[PeerInfo], Awaitable[Sequence[PeerInfo]]]"
"""Tells the other ranks of this process, and gives those of all ranks, by rank; without a store of kfcomm's."""


class Meeting(NamedTuple):
    """Meeting point of the first epoch, which stays open through all later epochs.

    Attributes:
        settings: of this rank in the first epoch.
        me: this process, as the others know it since then.
        mark: tells apart the worlds of one process, in the names of their sockets.
        store: of the job; None where the ranks found each other by other means.
        tls: what connections are secured with.
        ends: what launchers have said of processes of whatever epoch, by birth.
    """

    settings: Settings
    me: PeerInfo
    mark: str
    store: JobStore | None
    tls: Tls | None
    ends: dict[int, Exit]

    @property
    def client(self) -> StoreClient:
        """Of the job's store.

        Raises:
            RendezvousError: it has none.
        """
        if self.store is None:
            raise RendezvousError("these ranks found each other without a store of kfcomm's")
        return self.store.client


def tls_of(settings: Settings) -> Tls | None:
    """Load what connections are secured with; None if they are not."""
    if settings.tls is None:
        return None
    from kfcomm.transports.tls import load

    return load(settings.tls)


async def listen(settings: Settings, device: DeviceReport, mark: str) -> tuple[Listener, PeerInfo]:
    """Open the port of this rank, and say what the others need to know of it."""
    if settings.store is None:
        raise ConfigError("a world of one has no network")
    if settings.links != AUTO and (unsupported := named(settings.links).why_unsupported()) is not None:
        raise ConfigError(f"transport {settings.links!r} cannot work here: {unsupported}; use 'auto'")
    address = await asyncio.to_thread(choose_address, settings.interface, host_and_port(settings.store))
    is_local = any(transport.is_local for transport in selected(settings.links))
    unix = f"@kfcomm-{process_uid(settings.rank)}-{mark}" if is_local else None
    listener = Listener(address, 0, unix=unix)
    me = PeerInfo.here(
        rank=settings.rank, address=address, port=listener.port, unix=unix, transport=settings.transport,
        checksum=settings.checksum, device=device,
    )  # fmt: skip
    return listener, me


def unix_name(meeting: Meeting, epoch: int) -> str:
    """Name of this process's Unix socket in an epoch."""
    return f"@kfcomm-{meeting.me.uid}-{meeting.mark}-{epoch}"


def check_reach(peers: Sequence[PeerInfo], transport: str) -> None:
    """Refuse a transport that does not reach all ranks."""
    here = host_id()
    others = [peer.rank for peer in peers if peer.host != here]
    if others and all(one.is_local for one in selected(transport)):
        there = f"ranks {others[:16]}, which are on other hosts"
        raise ConfigError(f"transport {transport!r} cannot reach {there}; use 'auto'")


def check_checksums(peers: Sequence[PeerInfo]) -> None:
    """Refuse checksums that are on for some ranks and off for others: they could not read each other's frames."""
    with_it = [peer.rank for peer in peers if peer.checksum]
    if with_it and len(with_it) < len(peers):
        without = next(peer.rank for peer in peers if not peer.checksum)
        raise ConfigError(f"checksum is on for rank {with_it[0]} and off for rank {without}: it has to be the same")


def check_devices(peers: Sequence[PeerInfo]) -> None:
    """Refuse transports that contradict each other, and NCCL where it cannot work."""
    choose([peer.device for peer in peers], layout_of(peers), agree([peer.transport for peer in peers]))


def layout_of(peers: Sequence[PeerInfo]) -> Layout:
    """Hosts of all ranks, and what messages between them cost."""
    costs = Costs.worst(peer.costs for peer in peers)
    return Layout.of((peer.host for peer in peers), min(peer.num_cpus for peer in peers), costs)
