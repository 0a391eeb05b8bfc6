"""Single-process network: no sockets, threads or store."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from kfcomm.arrays.devices.routes import choose
from kfcomm.engine.interfaces import Door, Membership, Network
from kfcomm.errors import ConfigError
from kfcomm.rendezvous.settings import Settings
from kfcomm.transports.sockets import Connection
from kfcomm.types import Candidate, Layout, Wanted, override

if TYPE_CHECKING:
    from kfcomm.arrays.devices import DeviceReport
    from kfcomm.engine.control import ControlEvents, ControlPlane, StatusSource
    from kfcomm.transports.base import Link, Waiter
    from kfcomm.transports.reactor import Reactor


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
    async def open_door(self, epoch: int) -> AloneAgain:
        return AloneAgain(self)

    async def leave(self) -> None:
        """Do nothing: it is alone."""

    async def close(self) -> None:
        """Nothing to close."""


class AloneAgain(Door):
    """The next epoch of a world of one."""

    part = b""

    def __init__(self, network: Alone) -> None:
        self._network = network

    @override
    def enter(self, doors: Mapping[int, bytes], joiners: Sequence[Candidate] = ()) -> Alone:
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

    async def welcome(self, num_old: int, births: Collection[int], strategy: str) -> None:
        """Do nothing: there are no joining ranks."""

    async def give_up(self, births: Collection[int]) -> None:
        """Do nothing: this world has no launcher."""

    async def let_go(self, births: Collection[int]) -> None:
        """Do nothing: this world has no launcher."""

    async def wanted(self, known: Wanted) -> Wanted:
        """Wait for ever: without a store, nothing can be asked for."""
        return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]

    async def want_size(self, size: int) -> None:
        """Refuse: no process can join."""
        raise ConfigError("a world of one has no store, by which others could come")

    async def want_replaced(self, birth: int) -> None:
        """Refuse: no process can take its place."""
        raise ConfigError("a world of one has no store, by which others could come")

    async def has_word(self, living: Sequence[int], rivals: Sequence[int]) -> bool:
        """Never called: one is more than half of one."""
        return True
