"""Connection of the ranks of a world in one process: links, and a network for each epoch."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

from kfcomm.arrays.devices import DeviceReport
from kfcomm.core.handshake import Keys
from kfcomm.engine.control import ControlEvents, ControlPlane, StatusSource
from kfcomm.engine.interfaces import EpochEntry, Membership, Network
from kfcomm.errors import TransportError
from kfcomm.rendezvous.saved_costs import digest_of
from kfcomm.testing.store import MemoryWelcome
from kfcomm.transports.base import Link, Surroundings, Waiter
from kfcomm.transports.memory import MemoryNetwork
from kfcomm.transports.reactor import Reactor
from kfcomm.transports.shm.endpoint import ShmEndpoint
from kfcomm.transports.shm.heap import Heaps
from kfcomm.transports.sockets import Connection
from kfcomm.types import Candidate, Layout, Rates, Wanted, override

if TYPE_CHECKING:
    from kfcomm.testing.worlds import MemoryWorld

NO_DEVICE = DeviceReport(lack="the test gave it no device")


class InMemory:
    """Links of one epoch in memory: payloads are shown to the receiver in place, so nothing is kept or closed."""

    def __init__(self, reactor: Reactor) -> None:
        self._network = MemoryNetwork(reactor)

    def add(self, rank: int, waiter: Waiter) -> None:
        """Let ``waiter`` receive what the others send to ``rank``."""
        self._network.add(rank, waiter)

    async def connect(self, rank: int, peer: int) -> Link:
        """Open a link from ``rank`` to ``peer``.

        Raises:
            TransportError: the peer is not there, or was cut off.
        """
        return self._network.connect(rank, peer)

    def cut(self, rank: int, *, reason: str) -> None:
        """Break every link of ``rank``, as when its process dies; it can connect no more."""
        self._network.cut(rank, reason=reason)

    def unplug(self, rank: int) -> None:
        """Break every link of ``rank`` that is open now; new ones can be opened."""
        self._network.unplug(rank)

    def endpoint(self, rank: int) -> ShmEndpoint | None:
        """The memory that ``rank`` shares with other processes of its host, if it does."""
        return None

    def keep_apart(self) -> None:
        """Do nothing: no memory is shared."""


class InSharedMemory:
    """Links as between processes of one host: arenas, rings, and socket pairs in place of dialled connections."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, reactor: Reactor, uids: Sequence[int], latest: dict[int, ShmEndpoint]
    ) -> None:
        self._loop = loop
        self._reactor = reactor
        self._uids = uids
        self._latest = latest  # what each process shared last, by uid: taken over into this epoch, and replaced
        self._ranks: dict[int, ShmEndpoint] = {}
        self._cut: set[int] = set()

    def add(self, rank: int, waiter: Waiter) -> None:
        """Let ``waiter`` receive what the others send to ``rank``."""
        uid, ranks = self._uids[rank], tuple(range(len(self._uids)))
        surroundings = Surroundings(
            self._loop, self._reactor, waiter, rank, ranks, len(ranks), former=self._latest.get(uid)
        )
        self._ranks[rank] = self._latest[uid] = ShmEndpoint(surroundings)

    async def connect(self, rank: int, peer: int) -> Link:
        """Open a link from ``rank`` to ``peer``, as `InMemory.connect`."""
        if peer in self._cut or rank in self._cut:
            raise TransportError(f"rank {peer} is not in this world")
        near, far = socket.socketpair()
        near.setblocking(False)
        far.setblocking(False)
        keys = Keys(b"", b"")  # shared memory is not sealed
        self._ranks[peer].adopt(Connection(far, keys), rank)
        return await self._ranks[rank].connect(Connection(near, keys), peer)

    def cut(self, rank: int, *, reason: str) -> None:
        """Break every link of ``rank``; it can connect no more."""
        self._cut.add(rank)
        self.unplug(rank)

    def unplug(self, rank: int) -> None:
        """Break every link of ``rank`` that is open now."""
        with contextlib.suppress(RuntimeError):  # its reactor is closed, and its links with it
            self._ranks[rank].hub.break_links()

    def endpoint(self, rank: int) -> ShmEndpoint:
        """The memory that ``rank`` shares with other processes of its host, if it does."""
        return self._ranks[rank]

    def keep_apart(self) -> None:
        """Take over nothing from the epoch before, which is in use."""
        self._latest = {}


Links: TypeAlias = InMemory | InSharedMemory


class MemoryEpoch:
    """Links and control planes of the ranks of one epoch."""

    def __init__(self, world: MemoryWorld, uids: tuple[int, ...], layout: Layout, job: str, number: int = 0) -> None:
        self.world = world
        self.births = uids  # uids of the ranks
        self.layout = layout
        self.job = job
        self.number = number
        self.links = world.new_links(uids)
        self.hub = world.new_hub(uids)
        self.joined: set[int] = set()
        self._arrival = asyncio.Event()
        self._next: dict[tuple[int, ...], MemoryEpoch] = {}  # by uids, and the attempt

    async def is_there(self, rank: int) -> None:
        """Wait until a rank has joined, or is dead."""
        # A process listens before the others know of it: here the others wait for that.
        while rank not in self.joined and self.births[rank] not in self.world.dead:
            await self._arrival.wait()

    def arrived(self) -> None:
        """Note that a rank has joined, or died."""
        self._arrival.set()
        self._arrival = asyncio.Event()

    def kill(self, uid: int) -> None:
        """Kill the process that was this rank in the first epoch."""
        self.arrived()
        if uid in self.births:
            rank = self.births.index(uid)
            if rank in self.joined:
                self.links.cut(rank, reason=f"rank {rank} was killed")
            self.hub.kill(rank)
        for one in self._next.values():
            one.kill(uid)

    def network_of(self, rank: int, num_old: int = 0, strategy: str = "auto") -> _RankNetwork:
        """Network of a rank; ``num_old``: number of ranks that were there before it was admitted."""
        return _RankNetwork(rank, self, num_old, strategy)

    def next(
        self, members: tuple[int, ...], joiners: Sequence[Candidate], attempt: int, rates: Rates | None = None
    ) -> MemoryEpoch:
        """The epoch of the surviving ranks and of new ones; the same object for all of them."""
        uids = (*(self.births[rank] for rank in members), *(one.birth for one in joiners))
        # The first rank that enters makes the epoch; all others have to find the same one.
        key = (*uids, attempt)
        if key not in self._next:
            hosts = [self.layout.hosts[rank] for rank in members] + [self.layout.hosts[0]] * len(joiners)
            known = list(dict.fromkeys(hosts))
            rates = rates.part(known) if rates is not None and len(known) > 1 else None
            layout = Layout.of(hosts, self.layout.num_cpus, self.layout.costs._replace(rates=rates))
            self._next[key] = made = MemoryEpoch(self.world, uids, layout, self.job, self.number + 1)
            if attempt:
                made.links.keep_apart()
            # These died while the epoch did not exist, so that it could not be told.
            for uid in self.world.dead:
                made.kill(uid)
        return self._next[key]


class _Entry(EpochEntry):
    """Entry of one rank to the next epoch."""

    def __init__(self, rank: int, epoch: MemoryEpoch, attempt: int, rates: Rates | None) -> None:
        self.part = b"" if rates is None else digest_of(rates)
        self._rates = rates
        self._rank = rank
        self._epoch = epoch
        self._attempt = attempt

    @override
    def enter(self, parts: Mapping[int, bytes], joiners: Sequence[Candidate] = ()) -> Network:
        members = tuple(parts)
        rates = self._rates if len(set(parts.values())) == 1 else None  # all ranks have to see the same
        return self._epoch.next(members, joiners, self._attempt, rates).network_of(members.index(self._rank))

    async def close(self) -> None:
        """Do nothing: nothing was opened."""


class _Members(Membership):
    """The membership of one rank's network."""

    def __init__(self, rank: int, epoch: MemoryEpoch) -> None:
        self._rank = rank
        self._epoch = epoch
        self._store = epoch.world.store

    @property
    @override
    def trouble(self) -> str:
        return self._store.trouble

    def may_live(self, peer: int) -> bool:
        """Return False: ranks in memory do not search for others, see ``MemoryControl.linger``."""
        return False

    async def candidates(self, known: Collection[int]) -> list[Candidate]:
        return await self._store.candidates({*known, *self._epoch.births})

    async def welcome(self, num_old: int, uids: Collection[int], strategy: str) -> None:
        await self._store.welcome(uids, MemoryWelcome(self._epoch, num_old, strategy))

    async def invite(self, num_old: int, uids: Collection[int], strategy: str) -> bool:
        return await self._store.invite(uids, MemoryWelcome(self._epoch, num_old, strategy))

    async def give_up(self, uids: Collection[int]) -> None:
        """Do nothing: this world has no launcher."""

    async def let_go(self, uids: Collection[int]) -> None:
        """Do nothing: this world has no launcher."""

    async def wanted(self, known: Wanted) -> Wanted:
        return await self._store.wanted(known)

    async def want_size(self, size: int) -> None:
        await self._store.want_size(size)

    async def want_replaced(self, uid: int) -> None:
        await self._store.want_replaced(uid)

    async def has_word(self, living: Sequence[int], rivals: Sequence[int]) -> bool:
        if rivals:  # there is no launcher, which could end them
            return False
        uids = [self._epoch.births[rank] for rank in living]
        return await self._store.has_word(self._epoch.births[self._rank], uids, self._epoch.number + 1)


class _RankNetwork:
    """Network of one rank in one epoch; implements ``engine.interfaces.Network``."""

    def __init__(self, rank: int, epoch: MemoryEpoch, num_old: int = 0, strategy: str = "auto") -> None:
        self.layout = epoch.layout
        self.host_names: tuple[str, ...] = ()
        self.births = epoch.births
        self.epoch = epoch.number
        self.num_old = num_old
        self.strategy = strategy  # of the epoch's beginning, for a joining rank
        self.admitting: asyncio.Future[MemoryWelcome] | None = None  # of a process that was invited
        self.is_invited = False
        self.reports = tuple(epoch.world.reports.get(uid, NO_DEVICE) for uid in epoch.births)
        self.job = epoch.job
        self._epoch = epoch
        self._rank = rank
        self._links = epoch.links
        self.membership: Membership = _Members(rank, epoch)
        self._rates = epoch.layout.costs.rates  # for the next epoch

    def start(
        self, inbound: Waiter, reactor: Reactor, events: ControlEvents, status: StatusSource
    ) -> ControlPlane | None:
        self._links.add(self._rank, inbound)
        self._epoch.joined.add(self._rank)
        self._epoch.arrived()
        plane = self._epoch.hub.join(self._rank, reactor, events, status)
        uid = self.births[self._rank]
        # Killed while it was joining: its links exist only now.
        if uid in self._epoch.world.dead:
            self._epoch.kill(uid)
        return plane

    async def open_entry(self, epoch: int, attempt: int = 0) -> _Entry:
        return _Entry(self._rank, self._epoch, attempt, self._rates)

    def hand_on(self, network: Network) -> None:
        """Nothing is owned."""

    async def admission(self) -> Network | None:
        if self.admitting is None:
            return None
        epoch, num_old, strategy = await self.admitting
        self.admitting, self.is_invited = None, False
        if epoch is self._epoch:
            return None
        return epoch.network_of(epoch.births.index(self.births[self._rank]), num_old, strategy)

    async def begin(self) -> None:
        self.admitting, self.is_invited = None, False

    async def connect(self, peer: int) -> Link:
        await self._epoch.is_there(peer)
        if peer not in self._epoch.joined:
            raise TransportError(f"rank {peer} is not in this world")
        return await self._links.connect(self._rank, peer)

    def adopt(self, connection: Connection, peer: int, purpose: int) -> None:
        raise TransportError("a world in memory has no sockets")

    def forget(self, peer: int) -> None:
        if (endpoint := self._links.endpoint(self._rank)) is not None:
            endpoint.forget(peer)

    def sever(self) -> None:
        if (endpoint := self._links.endpoint(self._rank)) is not None:
            endpoint.hub.sever()

    def heaps(self) -> Heaps | None:
        endpoint = self._links.endpoint(self._rank)
        return None if endpoint is None else endpoint.heaps

    def describe(self, peer: int) -> str:
        return "memory"

    def know(self, rates: Rates) -> None:
        self._rates = rates

    def descriptors(self) -> list[int]:
        return []

    def stop_watching(self) -> None:
        """Do nothing: no process is watched."""

    async def leave(self) -> None:
        """Do nothing: no other process keeps a record of this one."""

    async def close(self) -> None:
        if (endpoint := self._links.endpoint(self._rank)) is not None:
            await endpoint.close()
