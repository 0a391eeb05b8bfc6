"""Connections between processes: one listening port, a control thread, and stream links opened when they are used.

The hosts of its two ends and the setting ``transport`` determine the transport of an edge: see
`kfcomm.transports.registry`.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgpack

from kfcomm.arrays.devices.routes import agree
from kfcomm.common.sockets import RESERVE, raise_limit
from kfcomm.engine.control import World, addresses_of
from kfcomm.engine.control.thread import ControlThread
from kfcomm.engine.interfaces import EpochEntry, Network
from kfcomm.engine.membership import (
    Meeting,
    StoreMembership,
    is_certain,
    kept_rates,
    layout_of,
    peer_of,
    unix_name,
)
from kfcomm.errors import RendezvousError
from kfcomm.rendezvous import exit_report
from kfcomm.rendezvous.identity import PeerInfo
from kfcomm.rendezvous.saved_costs import digest_of, links_of_hosts, row_of
from kfcomm.transports.base import LinkRefused, Surroundings
from kfcomm.transports.registry import TCP, Transport, selected
from kfcomm.transports.shm.heap import Heaps
from kfcomm.transports.sockets import Address, Connection, Listener
from kfcomm.types import Candidate, Rates, override

if TYPE_CHECKING:
    from kfcomm.engine.control import ControlEvents, ControlPlane, StatusSource
    from kfcomm.transports.base import Endpoint, Link, Waiter
    from kfcomm.transports.reactor import Reactor

DESCRIPTORS_PER_PEER = 6
"""Of each other rank: sockets of links both ways, which stay over TCP, and memory passed while a link is opened."""

logger = logging.getLogger("kfcomm")

LAUNCHER_WORD_S = 0.1
"""How long a launcher on this host is given to say how a process ended; it takes some milliseconds."""
DIAL_TIMEOUT_S = 30.0
ATTEMPT_BITS = 32
"""The epoch in handshakes has the number of the preparation above so many bits: preparations must not be mixed up."""


class SocketNetwork(Network):
    """Network of one process among others, joined through the store or made by surviving ranks.

    ``uids`` are those of the peers (their ranks in the first epoch), by rank. ``attempt`` is the number of the
    preparation of this epoch, while the former one was in use; 0 without one.
    """

    def __init__(
        self, meeting: Meeting, peers: Sequence[PeerInfo], listener: Listener, uids: Sequence[int], epoch: int = 0,
        attempt: int = 0,
    ) -> None:  # fmt: skip
        settings = meeting.settings
        self.births = tuple(uids)
        self.peers = tuple(peers)
        self.layout = layout_of(peers)
        self.host_names = tuple(peer.host_name for peer in peers)
        self.reports = tuple(peer.device for peer in peers)
        self.device_transport = agree([peer.transport for peer in peers])
        # see ``interfaces.Network``: a digest of what the ranks have told each other
        self.job = hashlib.blake2b(b"".join(peer.to_wire() for peer in peers), digest_size=8).hexdigest()
        self._me = self.peers[self.births.index(settings.rank)]
        if self._me is self.peers[0] and (reason := kept_rates(peers)[1]):
            logger.warning(
                "rank 0: the links that kfcomm probe --keep measured are left out: %s; 'auto' takes all hosts as alike",
                reason,
            )
        self._meeting = meeting
        self._settings = settings
        self._listener = listener
        self._owns_store = True
        self._admission: asyncio.Task[list[Any]] | None = None  # of a process that was invited
        self._rates: Rates | None = None  # measured in this epoch
        self._spare: Listener | None = None  # for another epoch than the one that it was invited to
        self.is_invited = False
        self.epoch = epoch
        self._attempt = attempt
        self.num_old = 0  # of a joining rank: number of ranks before it joined, which come first; else 0
        self.strategy = settings.strategy  # of the beginning of the epoch
        self.membership = StoreMembership(meeting, self.peers, self.births, epoch, attempt, self.job)
        number = epoch + (attempt << ATTEMPT_BITS)
        self._world = World(
            self._me.rank, self.peers, settings.token or b"", number, lost_after_s=settings.lost_after_s,
            launcher_word_s=0.0 if settings.job is None else LAUNCHER_WORD_S, tls=meeting.tls,
            show_life=exit_report.report_alive if settings.elastic else None,
        )  # fmt: skip
        self._loop = asyncio.get_running_loop()
        raise_limit(RESERVE + DESCRIPTORS_PER_PEER * len(self.peers))
        self._inbound: Waiter
        self._reactor: Reactor
        self._transports = selected(settings.links)
        self._endpoints: dict[int, Endpoint] = {}
        """By the purpose of their connections, the preferred one first."""
        self._former: dict[int, Endpoint] = {}
        self._fallback_said = False
        self._refused: set[tuple[int, int]] = set()
        """Peer and purpose of links that one of the two cannot make."""
        self._control: ControlThread | None = None
        self._watcher: asyncio.Task[None] | None = None

    @classmethod
    def of(cls, meeting: Meeting, told: Sequence[Any], listener: Listener) -> SocketNetwork:
        """Network of an epoch to which this process is admitted, or invited."""
        epoch, uids, wires, num_old, strategy, attempt = told
        made = cls(meeting, [PeerInfo.from_wire(one) for one in wires], listener, uids, epoch, attempt)
        made.num_old, made.strategy = num_old, strategy
        return made

    def expect_admission(self, told: asyncio.Task[list[Any]], spare: Listener) -> None:
        """Note that this process is invited only; ``spare`` listens for the epoch to which it is admitted at last."""
        self._admission, self._spare, self.is_invited = told, spare, True

    @override
    async def admission(self) -> SocketNetwork | None:
        if self._admission is None or self._spare is None:
            return None
        told = await self._admission
        self._admission, spare, self._spare, self.is_invited = None, self._spare, None, False
        if [told[0], told[-1]] == [self.epoch, self._attempt]:
            spare.close()
            return None
        made = self.of(self._meeting, told, spare)
        self.hand_on(made)
        return made

    @override
    async def begin(self) -> None:
        told, spare = self._admission, self._spare
        self._admission, self._spare, self.is_invited = None, None, False
        if told is not None and spare is not None:
            told.cancel()
            spare.close()
            await asyncio.gather(told, return_exceptions=True)

    @override
    def start(
        self, inbound: Waiter, reactor: Reactor, events: ControlEvents, status: StatusSource
    ) -> ControlPlane | None:
        self._inbound, self._reactor = inbound, reactor
        surroundings = Surroundings(
            loop=self._loop, reactor=reactor, inbound=inbound, rank=self._me.rank,
            local=self.layout.ranks_of(self.layout.hosts[self._me.rank]), num_ranks=len(self.peers),
            checksum=self._settings.checksum,
        )  # fmt: skip
        for transport in (*self._transports, TCP):
            if transport.purpose not in self._endpoints:
                former = self._former.pop(transport.purpose, None)
                endpoint = transport.open_endpoint(replace(surroundings, former=former))
                if endpoint is not None:
                    self._endpoints[transport.purpose] = endpoint
        self._control = ControlThread(self._world, self._listener, reactor, events, status)
        self._control.start()
        self._watcher = self._loop.create_task(self._watch_exits(self._control), name="kfcomm exits")
        return self._control

    @override
    async def connect(self, peer: int) -> Link:
        refusals: list[tuple[Transport, str]] = []
        *preferred, last = self._ways(peer).values()
        for way in preferred:
            try:
                return await self._open(way, peer)
            except LinkRefused as error:
                refusals.append((way[0], str(error)))
        link = await self._open(last, peer)
        for transport, reason in refusals:  # not before the peer was reached: one that dies refuses, too
            self._refused.add((peer, transport.purpose))
            if not self._fallback_said:
                self._fallback_said = True
                used, refused = last[0].title, transport.title
                logger.warning("rank %d and rank %d use %s, not %s: %s", self._me.rank, peer, used, refused, reason)
        return link

    @override
    def adopt(self, connection: Connection, peer: int, purpose: int) -> None:
        endpoint = self._endpoints.get(purpose)
        if endpoint is None:
            connection.close()
        else:
            endpoint.adopt(connection, peer)

    @override
    def forget(self, peer: int) -> None:
        for endpoint in self._endpoints.values():
            endpoint.forget(peer)

    @override
    def sever(self) -> None:
        for endpoint in self._endpoints.values():
            endpoint.sever()

    @override
    def heaps(self) -> Heaps | None:
        found = (endpoint.heaps for endpoint in self._endpoints.values())
        return next((heaps for heaps in found if heaps is not None), None)

    @override
    def describe(self, peer: int) -> str:
        transport = next(iter(self._ways(peer).values()))[0]
        if transport.purpose != TCP.purpose:  # its connections carry no data: where they lead is of no interest
            return transport.title
        address = self._address(peer, transport)
        return f"unix {address}" if isinstance(address, str) else f"tcp {address[0]}:{address[1]}"

    @override
    def know(self, rates: Rates) -> None:
        self._rates = rates

    @override
    def descriptors(self) -> list[int]:
        own = [descriptor for endpoint in self._endpoints.values() for descriptor in endpoint.descriptors()]
        return [*own, *(self._control.descriptors() if self._control is not None else ())]

    @override
    async def open_entry(self, epoch: int, attempt: int = 0) -> SocketEntry:
        unix = None if self._me.unix is None else unix_name(self._meeting, epoch, attempt)
        listener = Listener(self._me.address, unix=unix, ports=self._settings.ports)
        return SocketEntry(self, listener, unix, self._rates, (epoch, attempt))

    def next(
        self, listener: Listener, parts: Mapping[int, tuple[int, str | None, bytes]], number: tuple[int, int],
        joiners: Sequence[Candidate],
    ) -> SocketNetwork:  # fmt: skip
        """Network of the surviving ranks, given port and Unix socket of each, and a digest of what it has measured.

        It takes over memory, unless it is prepared while this one is in use; ``number``: epoch and attempt.
        """
        peers = [
            replace(self.peers[old], rank=rank, port=port, unix=unix)
            for rank, (old, (port, unix, _)) in enumerate(parts.items())
        ]
        if self._rates is not None and {digest for *_, digest in parts.values()} == {digest_of(self._rates)}:
            peers = [replace(peer, links=row) for peer, row in zip(peers, self._rows(peers), strict=True)]
        is_prepared = number[1] > 0
        peers += [peer_of(one, len(parts) + at, is_prepared=is_prepared) for at, one in enumerate(joiners)]
        uids = [*(self.births[old] for old in parts), *(one.birth for one in joiners)]
        made = SocketNetwork(self._meeting, peers, listener, uids, *number)
        made._owns_store = False
        if not made._attempt:
            made._former = dict(self._endpoints)
        return made

    def _rows(self, peers: Sequence[PeerInfo]) -> Iterator[bytes]:
        """Links from the host of each peer, as all ranks have measured them."""
        if self._rates is not None:
            links, racks = links_of_hosts(self.layout.hosts, self.host_names, self._rates)
            yield from (row_of(links, peer.host_name, racks) for peer in peers)

    @override
    def hand_on(self, network: Network) -> None:
        if isinstance(network, SocketNetwork):
            self._owns_store, network._owns_store = False, True

    @override
    def stop_watching(self) -> None:
        # Where all ranks leave, each end would be told to all others: size² answers of the store.
        if self._watcher is not None:
            self._watcher.cancel()

    @override
    async def leave(self) -> None:
        meeting = self._meeting
        store = meeting.store
        if store is None:
            return
        is_gone = store.server is None and self._watcher is not None and bool(store.client.trouble)
        await store.leave(meeting.settings, meeting.me, ranks=self.births, timeout_s=0.0 if is_gone else None)

    @override
    async def close(self) -> None:
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)
        if self._admission is not None:
            self._admission.cancel()
            await asyncio.gather(self._admission, return_exceptions=True)
        if self._spare is not None:
            self._spare.close()
        endpoints, self._endpoints = self._endpoints, {}
        for endpoint in endpoints.values():
            await endpoint.close()
        if self._owns_store and self._meeting.store is not None:
            await self._meeting.store.close()

    async def _open(self, way: Sequence[Transport], peer: int) -> Link:
        addresses = [self._address(peer, transport) for transport in way]
        purpose = way[0].purpose
        connection = await self._world.dial(peer, addresses, purpose, DIAL_TIMEOUT_S)
        return await self._endpoints[purpose].connect(connection, peer)

    def _ways(self, peer: int) -> dict[int, list[Transport]]:
        """The transports that reach a peer, by the purpose of their connections, the preferred one first."""
        ways: dict[int, list[Transport]] = {}
        has_unix = len(addresses_of(self.peers[peer], seen_from=self._me)) > 1
        for transport in self._transports:
            is_open = transport.purpose in self._endpoints and (peer, transport.purpose) not in self._refused
            if is_open and (has_unix or not transport.is_local):
                ways.setdefault(transport.purpose, []).append(transport)
        return ways or {TCP.purpose: [TCP]}  # a peer whose setting is tcp has no Unix socket

    def _address(self, peer: int, transport: Transport) -> Address:
        return addresses_of(self.peers[peer], seen_from=self._me)[0 if transport.is_local else -1]

    async def _watch_exits(self, control: ControlThread) -> None:
        """Watch exit reports: a launcher sees a process end even if a child of it holds its sockets open."""
        try:
            async for end in self._meeting.client.watch_exits(lasting=True):
                self._meeting.ends[end.rank] = end
                if end.rank in self.births and end.rank != self._settings.rank:
                    control.declare_lost(self.births.index(end.rank), end.describe(), has_ended=is_certain(end))
        except RendezvousError as error:
            logger.debug("rank %d hears no more of exits: %s", self._me.rank, error)


class SocketEntry(EpochEntry):
    """A port, and an abstract Unix socket, for the next epoch; and a digest of the rates that were measured."""

    def __init__(
        self, network: SocketNetwork, listener: Listener, unix: str | None, rates: Rates | None,
        number: tuple[int, int],
    ) -> None:  # fmt: skip
        self.part: bytes = msgpack.packb([listener.port, unix, b"" if rates is None else digest_of(rates)])
        self._network = network
        self._listener = listener
        self._number = number

    @override
    def enter(self, parts: Mapping[int, bytes], joiners: Sequence[Candidate] = ()) -> SocketNetwork:
        found = {rank: tuple(msgpack.unpackb(part)) for rank, part in parts.items()}
        return self._network.next(self._listener, found, self._number, joiners)

    @override
    async def close(self) -> None:
        self._listener.close()
