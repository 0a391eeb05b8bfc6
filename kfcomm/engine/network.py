"""The ways between processes: one listening port, a control thread, and stream links opened when they are used.

Which transport an edge gets follows from where its ends are, and from the setting ``transport``: see
`kfcomm.transports.registry`.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import msgpack

from kfcomm.arrays.devices.routes import agree, choose
from kfcomm.common.sockets import RESERVE, raise_limit
from kfcomm.engine.control import ControlThread, World, addresses_of
from kfcomm.errors import ConfigError, KfcommError, RemoteProtocolError, RendezvousError
from kfcomm.rendezvous import exit_report
from kfcomm.rendezvous.identity import PeerInfo, host_id, process_uid
from kfcomm.rendezvous.interfaces import choose_address
from kfcomm.rendezvous.join import check_versions, close_store, join, leave_store, open_store
from kfcomm.rendezvous.keyvalue import BOUNDS, ENTRY, GIVEN_UP, JOINING, RELEASED, REPLACED, Exit, Why
from kfcomm.rendezvous.settings import Settings, host_and_port
from kfcomm.transports.base import LinkRefused, Surroundings
from kfcomm.transports.registry import AUTO, TCP, Transport, named, selected
from kfcomm.transports.shm.heap import Array
from kfcomm.transports.sockets import Address, Connection, Listener
from kfcomm.types import Candidate, Costs, Layout, Wanted

if TYPE_CHECKING:
    from kfcomm.arrays.devices.base import DeviceReport
    from kfcomm.common.tls import Tls
    from kfcomm.engine.control.base import ControlEvents, ControlPlane, StatusSource
    from kfcomm.rendezvous.client import StoreClient
    from kfcomm.rendezvous.store import StoreServer
    from kfcomm.transports.base import Endpoint, Link, Waiter
    from kfcomm.transports.reactor import Reactor

DESCRIPTORS_PER_PEER = 10
"""Of each other rank: sockets, and on one host memory of either side; 7.4 were counted between 12 ranks of one host."""

logger = logging.getLogger("kfcomm")

LOOK_S = 15.0
WORD_WITHIN_S = 2.0
"""For which ranks that are half of all ask the store whether they may go on."""
LAUNCHER_WORD_S = 0.1
"""How long a launcher on this host is given to say how a process ended; it takes some milliseconds."""
DIAL_TIMEOUT_S = 30.0

Exchange: TypeAlias = "Callable[[PeerInfo], Awaitable[Sequence[PeerInfo]]]"
"""Tells the other ranks of this process, and gives those of all ranks, by rank; without a store of kfcomm's."""


class Meeting(NamedTuple):
    """Where the first epoch met, which stays open through all that follow.

    Attributes:
        settings: of this rank in the first epoch.
        me: what the others were told of this process then.
        mark: tells apart the worlds of one process, in the names of their sockets.
        rendezvous: of the job's store; None where the ranks found each other by other means.
        server: the store, where this rank serves it.
        tls: what connections are secured with.
        ends: what launchers have said of processes of whatever epoch, by birth.
    """

    settings: Settings
    me: PeerInfo
    mark: str
    rendezvous: StoreClient | None
    server: StoreServer | None
    tls: Tls | None
    ends: dict[int, Exit]

    @property
    def client(self) -> StoreClient:
        """Of the job's store.

        Raises:
            RendezvousError: it has none.
        """
        if self.rendezvous is None:
            raise RendezvousError("these ranks found each other without a store of kfcomm's")
        return self.rendezvous


class SocketNetwork:
    """The network of one process among others, joined through the store or made by those that lived on.

    Args:
        meeting: of the first epoch.
        peers: all processes, by rank.
        listener: where this one listens.
        births: the ranks that they had in the first epoch.
        epoch: of this world.

    Attributes:
        peers: all processes, by rank.
        layout: their hosts.
        reports: what they tell of their devices.
        device_transport: what they have agreed on for device memory.
        job: see ``session.Network``: made of what they have told each other.
        births, epoch: see above.
        num_old: where this process has been let in: how many ranks were there before, the first ones; else 0.
        strategy: the name of the one with which the epoch begins.
    """

    def __init__(
        self, meeting: Meeting, peers: Sequence[PeerInfo], listener: Listener, births: Sequence[int], epoch: int = 0
    ) -> None:
        settings = meeting.settings
        self.births = tuple(births)
        self.peers = tuple(peers)
        self.layout = _layout_of(peers)
        self.reports = tuple(peer.device for peer in peers)
        self.device_transport = agree([peer.transport for peer in peers])
        self.job = hashlib.blake2b(b"".join(peer.to_wire() for peer in peers), digest_size=8).hexdigest()
        self._me = self.peers[self.births.index(settings.rank)]
        self._meeting = meeting
        self._settings = settings
        self._listener = listener
        self._is_over = False
        self.epoch = epoch
        self.num_old = 0
        self.strategy = settings.strategy
        self._world = World(
            self._me.rank, self.peers, settings.token or b"", epoch, lost_after_s=settings.lost_after_s,
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
    async def join(cls, settings: Settings, device: DeviceReport) -> SocketNetwork:
        """Listen, register, and wait for all others.

        Args:
            settings: of this rank.
            device: what the others are told of its device.

        Raises:
            ConfigError: no such interface, or a port that is taken; on all ranks, in the same words, where device
                memory cannot go as they ask.
            RendezvousError: see ``rendezvous.join``.
        """
        tls = _tls_of(settings)
        client, server = await open_store(settings, tls)
        listener: Listener | None = None
        try:
            mark = secrets.token_hex(4)
            listener, me = await _listen(settings, device, mark)
            meeting = Meeting(settings, me, mark, client, server, tls, {})
            if settings.join:
                return await cls._enter(meeting, listener)
            peers = await join(settings, me, client)
            _check_reach(peers, settings.links)
            try:
                _check_checksums(peers)
                _check_devices(peers)
            except ConfigError:
                # all ranks find out the same, but some need the store for it yet: it stays until they have left, too
                await leave_store(settings, me, client, server)
                raise
            return cls(meeting, peers, listener, range(settings.size))
        except BaseException:
            if listener is not None:
                listener.close()
            await close_store(client, server)
            raise

    @classmethod
    async def meet(cls, settings: Settings, device: DeviceReport, exchange: Exchange) -> SocketNetwork:
        """Listen, and learn of all others by ``exchange``: for ranks that another library has brought together.

        What asks the store later (``resize``, newcomers) is not to be had then, and of two halves of a world none has
        the right to go on without the other.

        Args:
            settings: of this rank; ``store`` says towards which host the others are.
            device: what the others are told of its device.
            exchange: gives what all ranks tell of themselves.

        Raises:
            ConfigError: see ``join``.
            RendezvousError: they run another version; and what ``exchange`` raises.
        """
        tls = _tls_of(settings)
        mark = secrets.token_hex(4)
        listener, me = await _listen(settings, device, mark)
        try:
            peers = await exchange(me)
            check_versions(me, peers)
            _check_reach(peers, settings.links)
            _check_checksums(peers)
            _check_devices(peers)
            return cls(Meeting(settings, me, mark, None, None, tls, {}), peers, listener, range(settings.size))
        except BaseException:
            listener.close()
            raise

    @classmethod
    async def _enter(cls, meeting: Meeting, listener: Listener) -> SocketNetwork:
        """Wait until the ranks of a running job let this process in.

        Who was started by a launcher is a spare perhaps, and waits as long as there is a store.

        Raises:
            ConfigError: its number is another's, or its settings are not theirs.
            RendezvousError: they do not within the timeout; or the store is gone.
        """
        from kfcomm.rendezvous.keyvalue import NotSet  # as the client does, which a world of one does without

        settings, me, client = meeting.settings, meeting.me, meeting.client
        if await client.claim(f"{JOINING}/{me.rank}", me.to_wire()) != me.to_wire():
            raise ConfigError(f"another process has joined this job as {me.rank}, or waits to: take another number")
        try:
            while True:
                try:
                    entry = await client.get(f"{ENTRY}/{me.rank}", settings.timeout_s)
                    break
                except NotSet:
                    if not settings.launcher:
                        raise
        except RendezvousError as error:
            raise RendezvousError(f"no rank of the job has let {me.describe()} in: {error}") from error
        told = msgpack.unpackb(entry, use_list=False)
        if isinstance(told, str):
            raise ConfigError(f"the ranks of the job do not let this process in: {told}")
        epoch, births, wires, num_old, strategy = told
        made = cls(meeting, [PeerInfo.from_wire(one) for one in wires], listener, births, epoch)
        made.num_old, made.strategy = num_old, strategy
        return made

    def start(
        self, inbound: Waiter, reactor: Reactor, events: ControlEvents, status: StatusSource
    ) -> ControlPlane | None:
        """See ``session.Network``."""
        self._inbound, self._reactor = inbound, reactor
        surroundings = Surroundings(
            loop=self._loop, reactor=reactor, inbound=inbound, rank=self._me.rank,
            local=tuple(peer for peer in range(len(self.peers)) if self._is_here(peer)), num_ranks=len(self.peers),
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

    async def connect(self, peer: int) -> Link:
        """See ``session.Network``."""
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
            self._say_fallback(peer, last[0], transport, reason)
        return link

    def adopt(self, connection: Connection, peer: int, purpose: int) -> None:
        """See ``session.Network``."""
        endpoint = self._endpoints.get(purpose)
        if endpoint is None:
            connection.close()
        else:
            endpoint.adopt(connection, peer)

    def forget(self, peer: int) -> None:
        """See ``session.Network``."""
        for endpoint in self._endpoints.values():
            endpoint.forget(peer)

    def sever(self) -> None:
        """See ``session.Network``."""
        for endpoint in self._endpoints.values():
            endpoint.sever()

    def room(self, nbytes: int) -> Array | None:
        """See ``session.Network``."""
        blocks = (endpoint.empty(nbytes) for endpoint in self._endpoints.values())
        return next((block for block in blocks if block is not None), None)

    def room_nbytes(self) -> int:
        """See ``session.Network``."""
        return sum(endpoint.used_nbytes for endpoint in self._endpoints.values())

    def describe(self, peer: int) -> str:
        """See ``session.Network``."""
        transport = next(iter(self._ways(peer).values()))[0]
        if transport.purpose != TCP.purpose:  # its connections carry no data: where they lead is of no interest
            return transport.title
        address = self._address(peer, transport)
        return f"unix {address}" if isinstance(address, str) else f"tcp {address[0]}:{address[1]}"

    def may_live(self, peer: int) -> bool:
        """See ``session.Network``."""
        end = self._meeting.ends.get(self.births[peer])
        return end is None or not _is_certain(end)

    def descriptors(self) -> list[int]:
        """See ``session.Network``."""
        own = [descriptor for endpoint in self._endpoints.values() for descriptor in endpoint.descriptors()]
        return [*own, *(self._control.descriptors() if self._control is not None else ())]

    async def open_door(self, epoch: int) -> SocketDoor:
        """See ``session.Network``."""
        unix = None if self._me.unix is None else _unix_name(self._meeting, epoch)
        return SocketDoor(self, Listener(self._me.address, 0, unix=unix), unix, epoch)

    def next(
        self, listener: Listener, doors: Mapping[int, tuple[int, str | None]], epoch: int, joiners: Sequence[Candidate]
    ) -> SocketNetwork:
        """The network of those that go on, given port and Unix socket of each. The store and memory go with it."""
        self._is_over = True
        peers = [
            replace(self.peers[old], rank=rank, port=port, unix=unix)
            for rank, (old, (port, unix)) in enumerate(doors.items())
        ]
        peers += [replace(PeerInfo.from_wire(one.about), rank=len(doors) + place) for place, one in enumerate(joiners)]
        births = [*(self.births[old] for old in doors), *(one.birth for one in joiners)]
        made = SocketNetwork(self._meeting, peers, listener, births, epoch)
        made._former = dict(self._endpoints)
        return made

    async def candidates(self, known: Collection[int]) -> list[Candidate]:
        """See ``session.Network``; whom these ranks cannot understand is told so, and left out."""
        count = 1
        while True:
            found = await self._meeting.client.collect(JOINING, count, unless=None, timeout_s=LOOK_S)
            count = len(found) + 1
            new = [Candidate(int(name), about) for name, about in found.items() if int(name) not in known]
            fit = [one for one in new if not await self._was_let_in(one) and await self._fits(one)]
            if fit:
                return sorted(fit)

    async def _was_let_in(self, candidate: Candidate) -> bool:
        """Whether it has been let in before, and is here, or was; or has been refused."""
        return await self._meeting.client.find(f"{ENTRY}/{candidate.birth}") is not None

    async def _fits(self, candidate: Candidate) -> bool:
        """Whether a process can be let in: it has not ended, and speaks as these do; else it is told."""
        if candidate.birth in self.births or candidate.birth in self._meeting.ends:
            return False
        try:
            peer = PeerInfo.from_wire(candidate.about)
        except RemoteProtocolError:
            return False
        try:
            check_versions(self._me, [peer])
            _check_checksums([self._me, peer])
        except KfcommError as error:
            await self._meeting.client.claim(f"{ENTRY}/{candidate.birth}", msgpack.packb(str(error)))
            return False
        return True

    async def welcome(self, num_old: int, births: Collection[int], strategy: str) -> None:
        """See ``session.Network``."""
        peers = [peer.to_wire() for peer in self.peers]
        entry = msgpack.packb([self.epoch, self.births, peers, num_old, strategy])
        for birth in births:
            await self._meeting.client.claim(f"{ENTRY}/{birth}", entry)

    async def give_up(self, births: Collection[int]) -> None:
        """See ``session.Network``."""
        for birth in births:
            await self._meeting.client.claim(f"{GIVEN_UP}/{birth}", b"")

    async def let_go(self, births: Collection[int]) -> None:
        """See ``session.Network``; this process tells its launcher itself, which hears it before it sees it end."""
        if self._settings.rank in births:
            exit_report.report_release()
            return
        for birth in births:
            await self._meeting.client.claim(f"{RELEASED}/{birth}", b"")

    async def wanted(self, known: Wanted) -> Wanted:
        """See ``session.Network``."""
        from kfcomm.rendezvous.keyvalue import StoreClosed

        async for wanted in self._meeting.client.watch_wanted():
            if wanted != known:
                return wanted
        raise StoreClosed("the store is gone")

    async def want_size(self, size: int) -> None:
        """See ``session.Network``."""
        client = self._meeting.client
        bounds = await client.find(BOUNDS)
        if bounds is not None:
            least, most = map(int, bounds.split(b":"))
            if not least <= size <= most:
                raise ConfigError(f"size {size} is outside the job's range {least}..{most}")
        await client.ask_size(size)

    async def want_replaced(self, birth: int) -> None:
        """See ``session.Network``; the launcher hears it first, so that the end of that process is none of the job."""
        client = self._meeting.client
        await client.claim(f"{REPLACED}/{birth}", b"")
        await client.ask_to_go(birth)

    async def has_word(self, living: Sequence[int], rivals: Sequence[int]) -> bool:
        """See ``session.Network``; a store that cannot be reached has no word to give."""
        client = self._meeting.client
        mine = bytes(msgpack.packb([self.peers[rank].uid for rank in living]))
        key = f"epochs/{self.job}/{self._world.epoch + 1}"
        try:
            if rivals and await client.find(f"{GIVEN_UP}/{self._settings.rank}", timeout_s=WORD_WITHIN_S) is not None:
                return False  # they have gone on, and need nobody's word
            held = await client.claim(key, mine, timeout_s=WORD_WITHIN_S)
            is_mine = self._me.uid in msgpack.unpackb(held)
            for rank in rivals if is_mine else ():
                await client.claim(f"{GIVEN_UP}/{self.births[rank]}", b"", timeout_s=WORD_WITHIN_S)
        except RendezvousError:
            return False
        return is_mine

    async def leave(self) -> None:
        """See ``session.Network``."""
        meeting = self._meeting
        if meeting.rendezvous is None:
            return
        is_gone = meeting.server is None and self._watcher is not None and bool(meeting.client.trouble)
        await leave_store(
            meeting.settings, meeting.me, meeting.client, meeting.server, ranks=self.births,
            timeout_s=0.0 if is_gone else None,
        )  # fmt: skip

    async def close(self) -> None:
        """See ``session.Network``."""
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)
        endpoints, self._endpoints = self._endpoints, {}
        for endpoint in endpoints.values():
            await endpoint.close()
        if not self._is_over and self._meeting.rendezvous is not None:
            await close_store(self._meeting.rendezvous, self._meeting.server)

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

    def _is_here(self, peer: int) -> bool:
        return self.layout.hosts[peer] == self.layout.hosts[self._me.rank]

    def _say_fallback(self, peer: int, used: Transport, refused: Transport, reason: str) -> None:
        if not self._fallback_said:
            self._fallback_said = True
            logger.warning(
                "rank %d and rank %d use %s, not %s: %s", self._me.rank, peer, used.title, refused.title, reason
            )

    async def _watch_exits(self, control: ControlThread) -> None:
        """The launcher sees processes end that leave their sockets open in a child of theirs."""
        try:
            async for end in self._meeting.client.watch_exits(lasting=True):
                self._meeting.ends[end.rank] = end
                if end.rank in self.births and end.rank != self._settings.rank:
                    control.declare_lost(self.births.index(end.rank), end.describe(), has_ended=_is_certain(end))
        except RendezvousError as error:
            logger.debug("rank %d hears no more of exits: %s", self._me.rank, error)


class SocketDoor:
    """A port, and an abstract Unix socket, for the next epoch; implements ``session.Door``."""

    def __init__(self, network: SocketNetwork, listener: Listener, unix: str | None, epoch: int) -> None:
        self.part: bytes = msgpack.packb([listener.port, unix])
        self._network = network
        self._listener = listener
        self._epoch = epoch

    def enter(self, doors: Mapping[int, bytes], joiners: Sequence[Candidate] = ()) -> SocketNetwork:
        """See ``session.Door``."""
        found = {rank: tuple(msgpack.unpackb(part)) for rank, part in doors.items()}
        return self._network.next(self._listener, found, self._epoch, joiners)

    async def close(self) -> None:
        """See ``session.Door``."""
        self._listener.close()


def _tls_of(settings: Settings) -> Tls | None:
    if settings.tls is None:
        return None
    from kfcomm.common.tls import load

    return load(settings.tls)


async def _listen(settings: Settings, device: DeviceReport, mark: str) -> tuple[Listener, PeerInfo]:
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


def _is_certain(end: Exit) -> bool:
    """Whether the process has ended. Of one on a host that is not heard of any more, or has not come, nobody knows."""
    return end.why not in (Why.SILENT, Why.ABSENT)


def _unix_name(meeting: Meeting, epoch: int) -> str:
    return f"@kfcomm-{meeting.me.uid}-{meeting.mark}-{epoch}"


def _check_reach(peers: Sequence[PeerInfo], transport: str) -> None:
    here = host_id()
    others = [peer.rank for peer in peers if peer.host != here]
    if others and all(one.is_local for one in selected(transport)):
        there = f"ranks {others[:16]}, which are on other hosts"
        raise ConfigError(f"transport {transport!r} cannot reach {there}; use 'auto'")


def _check_checksums(peers: Sequence[PeerInfo]) -> None:
    """Refuse what no two ranks could understand of each other."""
    with_it = [peer.rank for peer in peers if peer.checksum]
    if with_it and len(with_it) < len(peers):
        without = next(peer.rank for peer in peers if not peer.checksum)
        raise ConfigError(f"checksum is on for rank {with_it[0]} and off for rank {without}: it has to be the same")


def _check_devices(peers: Sequence[PeerInfo]) -> None:
    """Refuse transports that contradict each other, and NCCL where it cannot work."""
    choose([peer.device for peer in peers], _layout_of(peers), agree([peer.transport for peer in peers]))


def _layout_of(peers: Sequence[PeerInfo]) -> Layout:
    costs = Costs.worst(peer.costs for peer in peers)
    return Layout.of((peer.host for peer in peers), min(peer.num_cpus for peer in peers), costs)
