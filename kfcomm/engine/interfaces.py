"""Interfaces of a session to its network, to the job's membership, to the next epoch and to services.

Their simplest form is at the end: a world of one, without sockets, threads or a store.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from kfcomm.arrays.devices.routes import choose
from kfcomm.errors import ConfigError
from kfcomm.types import Layout, Rates, override

if TYPE_CHECKING:
    from kfcomm.arrays.devices import DeviceReport
    from kfcomm.engine.control import ControlEvents, ControlPlane, StatusSource
    from kfcomm.rendezvous.settings import Settings
    from kfcomm.transports.base import Link, Waiter
    from kfcomm.transports.reactor import Reactor
    from kfcomm.transports.shm.heap import Heaps
    from kfcomm.transports.sockets import Connection
    from kfcomm.types import Candidate, Wanted


class Membership(Protocol):
    """Changes of the ranks of a job that need the job's store or launchers."""

    @property
    def trouble(self) -> str:
        """Why the store has not answered the last attempt; empty if it has, and without a store."""
        return ""

    def may_live(self, peer: int) -> bool:
        """Whether a peer may live: no launcher has seen its process end."""

    async def candidates(self, known: Collection[int]) -> list[Candidate]:
        """Wait until unknown processes ask to join, and return them."""

    async def welcome(self, num_old: int, uids: Collection[int], strategy: str) -> None:
        """Tell the processes with these uids that they are in this epoch; the first ``num_old`` ranks know."""

    async def invite(self, num_old: int, uids: Collection[int], strategy: str) -> bool:
        """Tell waiting processes to set up this epoch, to which they may be admitted; False if one cannot be told."""

    async def give_up(self, uids: Collection[int]) -> None:
        """Tell the launcher that the processes with these uids were given up."""

    async def let_go(self, uids: Collection[int]) -> None:
        """Tell the launcher that the processes with these uids were released; one of these may be this process."""

    async def wanted(self, known: Wanted) -> Wanted:
        """Wait for a request other than ``known``, and return it."""

    async def want_size(self, size: int) -> None:
        """Request this number of ranks."""

    async def want_replaced(self, uid: int) -> None:
        """Request that another process replace this one."""

    async def has_word(self, living: Sequence[int], rivals: Sequence[int]) -> bool:
        """Return whether these ranks may survive and the others may not: the store permits the first to ask.

        Args:
            living: ranks that hear each other.
            rivals: ranks whose launchers are to end them first, since they may know what was agreed with ranks that
                have ended. Without launchers the rivals may survive, and ``living`` may not.
        """


class Network(Protocol):
    """The ways from one rank to all others."""

    def start(
        self, inbound: Waiter, reactor: Reactor, events: ControlEvents, status: StatusSource
    ) -> ControlPlane | None:
        """Begin; links are driven by the reactor. Returns the control plane, or None in a world of one."""

    async def connect(self, peer: int) -> Link:
        """Open a data link to a peer.

        Raises:
            TransportError: it cannot be reached.
        """

    def adopt(self, connection: Connection, peer: int, purpose: int) -> None:
        """Make a link of a connection that a peer opened; ``Inbound.opened`` follows."""

    def forget(self, peer: int) -> None:
        """Free what is kept for a peer that is gone for good."""

    def sever(self) -> None:
        """In a forked child: from now on touch no memory that the parent shares with its peers."""

    def describe(self, peer: int) -> str:
        """The way to a peer, in words."""

    def heaps(self) -> Heaps | None:
        """Memory that the other ranks of this host can read in place, and theirs; None without such ranks."""

    membership: Membership
    """Of the ranks in the job."""

    layout: Layout
    """Hosts of all ranks."""

    host_names: tuple[str, ...]
    """Name of each rank's host, as kept probes know it; empty in memory."""

    births: tuple[int, ...]
    """The ranks that they had in the first epoch."""

    num_old: int
    """Where this process has been let in: how many ranks were there before, the first ones; else 0."""

    is_invited: bool
    """This process has been invited to this epoch, and waits to be admitted to it or to another one."""

    reports: tuple[DeviceReport, ...]
    """Reports of all ranks on their devices."""

    job: str
    """The same text on all ranks of this world, and on those of no other."""

    def know(self, rates: Rates) -> None:
        """Hand rates between all hosts, which were measured in this epoch, on to the next ones."""
        return

    def descriptors(self) -> list[int]:
        """Descriptors that a forked child must let go of."""

    async def open_entry(self, epoch: int, attempt: int = 0) -> EpochEntry:
        """Listen where the peers of the next epoch, which has this number, will come; ``attempt``: to prepare it."""

    def hand_on(self, network: Network) -> None:
        """Let the network of the next epoch own what both use, such as the store."""

    async def admission(self) -> Network | None:
        """Wait until this process, which was invited, is admitted: the network of another epoch, or None for this.

        Raises:
            ConfigError, RendezvousError: as on joining.
        """

    async def begin(self) -> None:
        """Note that this epoch, to which this process was invited, has begun: ``admission`` is not waited for."""

    def stop_watching(self) -> None:
        """Note that this rank needs no other: how their processes end is of no interest any more."""

    async def leave(self) -> None:
        """Tell the others that this rank has ended, and wait for what they need of it. Bounded; may be cancelled."""

    async def close(self) -> None:
        """Close everything that is still open, without waiting for other ranks."""


class EpochEntry(Protocol):
    """Listening end of a rank for the next epoch, opened before its members are known."""

    part: bytes  # how the others find it, encoded

    def enter(self, parts: Mapping[int, bytes], joiners: Sequence[Candidate] = ()) -> Network:
        """The network of the surviving ranks (their parts, by their former ranks) and of new ones."""

    async def close(self) -> None:
        """Close it unused."""


class Service(Protocol):
    """Helper of a session, open as long as the session is, on threads of its own."""

    def descriptors(self) -> list[int]:
        """Descriptors that a forked child must let go of."""

    def stop(self) -> None:
        """Close everything; may wait a moment. Not called on the session's loop."""


class Alone(Network):
    """Network of a world of one.

    Raises:
        ConfigError: see ``devices.routes.choose``.
    """

    def __init__(self, settings: Settings, device: DeviceReport) -> None:
        self.layout = Layout((0,))
        self.host_names: tuple[str, ...] = ()
        self.births = (0,)
        self.membership: Membership = AloneMembership()
        self.epoch = self.num_old = 0
        self.is_invited = False
        self.strategy = settings.strategy
        self.reports = (device,)
        self.device_transport = settings.transport
        choose(self.reports, self.layout, self.device_transport)
        self.job = secrets.token_hex(8)

    @override
    def start(
        self, inbound: Waiter, reactor: Reactor, events: ControlEvents, status: StatusSource
    ) -> ControlPlane | None:
        return None

    async def connect(self, peer: int) -> Link:
        """Never called: a world of one sends nothing."""
        raise ConfigError("a world of one has no peers")

    def adopt(self, connection: Connection, peer: int, purpose: int) -> None:
        """Never called: it does not listen."""
        raise ConfigError("a world of one has no peers")

    def forget(self, peer: int) -> None:
        """Never called: it is alone."""

    def sever(self) -> None:
        """Nothing is shared."""

    def heaps(self) -> None:
        """Return None: no other rank could read it."""

    @override
    def describe(self, peer: int) -> str:
        return "itself"

    def descriptors(self) -> list[int]:
        """None."""
        return []

    @override
    async def open_entry(self, epoch: int, attempt: int = 0) -> AloneAgain:
        return AloneAgain(self)

    def hand_on(self, network: Network) -> None:
        """Nothing is shared."""

    async def admission(self) -> None:
        """Never called: it was not invited."""

    async def begin(self) -> None:
        """Never called either."""

    def stop_watching(self) -> None:
        """Do nothing: there are no other ranks."""

    async def leave(self) -> None:
        """Do nothing: it is alone."""

    async def close(self) -> None:
        """Nothing to close."""


class AloneAgain(EpochEntry):
    """The next epoch of a world of one."""

    part = b""

    def __init__(self, network: Alone) -> None:
        self._network = network

    @override
    def enter(self, parts: Mapping[int, bytes], joiners: Sequence[Candidate] = ()) -> Alone:
        return self._network

    async def close(self) -> None:
        """Nothing was opened."""


class AloneMembership(Membership):
    """Membership of a world of one, which stays alone."""

    def may_live(self, peer: int) -> bool:
        """Never called: it is alone."""
        return False

    async def candidates(self, known: Collection[int]) -> list[Candidate]:
        """Wait for ever: without a store, no process can join."""
        return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]

    async def welcome(self, num_old: int, uids: Collection[int], strategy: str) -> None:
        """Do nothing: there are no joining ranks."""

    async def invite(self, num_old: int, uids: Collection[int], strategy: str) -> bool:
        """Never called: there are no joining ranks."""
        return False

    async def give_up(self, uids: Collection[int]) -> None:
        """Do nothing: this world has no launcher."""

    async def let_go(self, uids: Collection[int]) -> None:
        """Do nothing: this world has no launcher."""

    async def wanted(self, known: Wanted) -> Wanted:
        """Wait for ever: without a store, nothing can be asked for."""
        return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]

    async def want_size(self, size: int) -> None:
        """Refuse: no process can join."""
        raise ConfigError("a world of one cannot grow, since it has no store: start the job with kfcomm run --elastic")

    async def want_replaced(self, uid: int) -> None:
        """Refuse: no process can take its place."""
        raise ConfigError("a world of one cannot grow, since it has no store: start the job with kfcomm run --elastic")

    async def has_word(self, living: Sequence[int], rivals: Sequence[int]) -> bool:
        """Never called: one is more than half of one."""
        return True
