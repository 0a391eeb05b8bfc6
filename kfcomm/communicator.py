"""What users hold: the verbs on one group of ranks, and how to begin and end.

A communicator lives on the event loop on which it was made; ``kfcomm.sync`` has the same verbs for programs
without one. Sub-groups are communicators too, over the same session. What few programs ask for (probes, timelines,
statistics) is imported when it is asked for.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
from collections.abc import Callable, Generator, Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeVar, Unpack

import numpy as np

from kfcomm import accelerator
from kfcomm.arrays import form_of
from kfcomm.collectives.blobs import Blobs
from kfcomm.collectives.generations import MAX_STRATEGIES
from kfcomm.collectives.group import STRATEGY_KEY, Group, check_name
from kfcomm.collectives.handle import Handle
from kfcomm.collectives.mailbox import Mailbox
from kfcomm.collectives.on_device.paths import Paths
from kfcomm.collectives.on_device.verbs import DeviceVerbs
from kfcomm.collectives.persistent import Persistent
from kfcomm.core.collective import GroupView
from kfcomm.devices.routes import Choice
from kfcomm.dumps import install_signal, snapshot
from kfcomm.errors import ConfigError, SessionClosed
from kfcomm.monitor import serving
from kfcomm.network import Alone, SocketNetwork
from kfcomm.plugins import build, check
from kfcomm.rendezvous import farewell
from kfcomm.rendezvous.settings import Arguments, Settings, detect, misspelt
from kfcomm.rendezvous.token import conceal
from kfcomm.runtime.closing import Drain
from kfcomm.session import LEAVE_WITHIN_S, Session
from kfcomm.sizes import seconds_of
from kfcomm.strategies import AnyStrategy, StrategySpec
from kfcomm.transports.loop_driver import LoopDriver
from kfcomm.transports.reactor import Reactor
from kfcomm.transports.shm.heap import Array
from kfcomm.types import Layout, Seconds

if TYPE_CHECKING:
    from kfcomm.monitor import Statistics
    from kfcomm.probe import Probe, Prober


T = TypeVar("T")


class Communicator(Persistent):
    """The collectives of one group of ranks. Made by ``kfcomm.init``, ``group`` and ``split``.

    Use it on its own event loop only. Every verb returns a handle of a collective that is already under way.
    """

    def __init__(self, session: Session, view: GroupView, strategy: StrategySpec, name: str = "world") -> None:
        self.name = name
        self._session = session
        self._left = False
        self._final: Statistics | None = None
        layout = session.layout_of(view)
        self._named: dict[str, AnyStrategy] = {}
        self._group = Group(session.engine, view, layout, self._build(strategy, layout), session.timeout_s)
        self._mailbox = Mailbox(session.engine, view, session.timeout_s)
        self._blobs = Blobs(self._mailbox, view.rank)
        self._paths, self._devices = self._take_devices(view)
        self._prober: Prober | None = None
        session.engine.end_listeners.append(self._leave)
        session.drains.append(self._drains)

    def __repr__(self) -> str:
        state = "closed" if self._left or self._session.is_closed else "open"
        return f"<Communicator {self.name!r}, rank {self.rank} of {self.size}, {state}>"

    # ---------------------------------------------------------------- who and where

    @property
    def rank(self) -> int:
        """Rank of this process in the group."""
        return self._group.view.rank

    @property
    def size(self) -> int:
        """Number of ranks in the group."""
        return self._group.view.size

    @property
    def local_rank(self) -> int:
        """Rank of this process among those of the group on its host."""
        return self._group.layout.local_rank(self.rank)

    @property
    def local_size(self) -> int:
        """Number of ranks of the group on this host."""
        return len(self._group.layout.ranks_of(self._group.layout.hosts[self.rank]))

    @property
    def layout(self) -> Layout:
        """Hosts of the ranks of the group."""
        return self._group.layout

    @property
    def epoch(self) -> int:
        """Number of the membership."""
        return self._session.epoch

    @property
    def strategy(self) -> AnyStrategy:
        """The strategy in force in this group."""
        return self._group.strategy

    @property
    def route(self) -> Choice | None:
        """Which way device memory goes in this group, and why; None in a world where no rank has a device."""
        return self._session.route_of(self._group.view.members)

    def _take_devices(self, view: GroupView) -> tuple[Paths, DeviceVerbs]:
        """Ways for arrays in the memory of devices."""
        session, setup = self._session, self._session.devices
        choice = session.route_of(view.members)

        def new_group(name: str, members: Sequence[int]) -> tuple[GroupView, Layout]:
            made = session.new_group(view, name, members)
            return made, session.layout_of(made)

        paths = Paths(self._group, self._mailbox, setup.device, setup.maker, choice, new_group, session.pool_of)
        return paths, DeviceVerbs(paths, setup.reports[session.rank].lack)

    # ---------------------------------------------------------------- groups and graphs

    def set_strategy(self, strategy: StrategySpec, *, timeout: Seconds | None = None) -> Handle[None]:
        """Change the graphs of this group while it works; every rank calls it, at the same place in its program.

        What was posted before the call runs on the old graphs; what is posted after it waits for the verdict, one
        small collective.

        Args:
            strategy: a name, rules by size (``{"<=64KiB": "star", "else": "ring"}``), a ``Strategy``, a
                ``GraphPair`` or a ``Graph``; the same graphs on every rank.
            timeout: seconds; None for the communicator's.

        Returns:
            A handle of the verdict; the call has its place in the program whether or not it is awaited at once.

        Raises:
            ConfigError: there is no such strategy, or it is for another number of ranks.
            CollectiveMismatch: the ranks do not agree; the old strategy stays.
            CollectiveTimeout, CollectiveAborted, PeerLost: the old strategy stays on this rank. As with every
                collective, others may have been done by then; the ranks meet again at their next ``set_strategy``.
        """
        self._check_open()
        try:
            timeout_s = seconds_of(timeout)
            chosen = self._build(strategy, self._group.layout)
        except Exception as error:
            self._group.refuse(STRATEGY_KEY, error)
            raise
        return self._group.swap(chosen, timeout_s)

    def _build(self, spec: StrategySpec, layout: Layout) -> AnyStrategy:
        """The strategy that is meant. A name means the same one whenever it comes again."""
        if not isinstance(spec, str):
            return build(spec, layout)
        built = self._named.get(spec)
        if built is None:
            if len(self._named) >= MAX_STRATEGIES:
                self._named.clear()
            built = self._named[spec] = build(spec, layout)
        return built

    async def group(
        self, ranks: Iterable[int], name: str = "group", *, strategy: StrategySpec | None = None,
        timeout: Seconds | None = None,
    ) -> Communicator:  # fmt: skip
        """A communicator of some of this group's ranks, in the order given; only these call it.

        Args:
            ranks: ranks of this group, this one among them.
            name: part of the new group's identity.
            strategy: None for this group's (``auto``, if that is one of the caller's own graphs).
            timeout: seconds to wait for the others; None for the communicator's.

        Raises:
            ConfigError: a rank is out of range, repeated, or this one is missing.
            CollectiveTimeout: not all members called it alike.
        """
        self._check_open()
        check_name(name)
        seconds_of(timeout)
        members = tuple(self._check_rank("member", rank) for rank in ranks)
        if len(set(members)) < len(members):
            raise ConfigError(f"a group names each rank once, got {list(members)}")
        if self.rank not in members:
            raise ConfigError(f"rank {self.rank} is not a member of the group {list(members)}: only members call")
        view = self._session.new_group(self._group.view, name, members)
        chosen = await self._placed(self._strategy_below) if strategy is None else strategy
        made = Communicator(self._session, view, chosen, name)
        try:
            await made.barrier("group", timeout=timeout)
        except BaseException:
            made._leave()
            raise
        return made

    def _placed(self, ask: Callable[[], T]) -> Handle[T]:
        """What ``ask`` says at this place in the program: after the verdict on a strategy that is being agreed."""
        answer: Handle[T] = Handle(loop=self._group.engine.loop)
        self._group.in_order(lambda: None if answer.done() else answer.set_result(ask()))
        return answer

    def _strategy_below(self) -> str:
        """The name of the strategy in force, if another group can have it, too."""
        mine = self.strategy
        with contextlib.suppress(ConfigError):
            if build(mine.name, self.layout).digest == mine.digest:
                return mine.name
        return "auto"

    async def split(
        self, color: int | str | None, key: int = 0, name: str = "split", *, timeout: Seconds | None = None
    ) -> Communicator | None:
        """A communicator of the ranks that give the same ``color``, ordered by ``key``, then rank; all call it.

        ``None`` as color takes part in no group, and gets None.
        """
        said = await self.all_gather_object([color, key], timeout=timeout)
        if color is None:
            return None
        members = sorted((one[1], rank) for rank, one in enumerate(said) if one[0] == color)
        return await self.group([rank for _, rank in members], f"{name}/{color}", timeout=timeout)

    # ---------------------------------------------------------------- memory

    def empty(self, shape: int | Sequence[int], dtype: Any = np.float32) -> Array:
        """An array of unknown content that the other ranks of this host can read where it is (*symmetric memory*).

        It is an ordinary NumPy array, to be used for anything; torch, JAX and DLPack take it without a copy. An
        ``all_reduce`` of more than 1 MiB by strategy ``direct`` (which is ``auto`` on one host) whose ranks give such
        arrays copies nothing of what it is given, and less of its result if ``out`` is one; see "Arrays that need no
        copy". Its memory is free again when the last view of it is gone, also after the communicator's end. In a forked
        child it is the parent's memory.

        Args:
            shape: of the array.
            dtype: of its elements; any that kfcomm exchanges.

        Returns:
            A C-contiguous array. Where the ranks of this group share no memory (several hosts, other links, a world of
            one), or the system gives no more, it is in ordinary memory, which is logged once.

        Raises:
            ConfigError: there can be no such array.

        Cost: some 5 µs, and a page fault for each 4 KiB that is touched first, unless an array as large has ended.
        """
        self._check_open()
        form, element = form_of(shape, dtype)
        room = None
        if self.local_size == self.size:
            room = self._session.network.room(math.prod(form) * element.itemsize)
        if room is None:
            self._session.say_unshared()
            return np.empty(form, element)
        return room.view(element).reshape(form)

    # ---------------------------------------------------------------- diagnosis and the end

    async def synchronize(self) -> None:
        """Wait until every collective of device memory that this rank has begun in this group is complete there.

        The handle of such a collective is done when the result is ready on the caller's stream, before the device has
        made it; what fails after that is told here, or by the next call for device memory. Not waited for are messages,
        and what is told in two steps (``scatter``, lists, ``concat``): it is complete on the caller's stream.

        Raises:
            CollectiveError: one of them has failed since its handle was done; the first of them, once.
        """
        await self._devices.synchronize()

    async def probe(self, *, nbytes: int = 1 << 20, rounds: int = 3, timeout: Seconds | None = None) -> Probe:
        """Measure latency and bandwidth between every two ranks, in both directions; every rank calls it.

        Along the links that collectives use; opens those that are not open. Pairs take turns, so that none measures
        while another uses the ports of its hosts. What else goes on meanwhile disturbs the figures, and they it.

        Args:
            nbytes: of the first message whose bandwidth is measured, at most 32 MiB; larger ones follow, up to 32 MiB,
                until one takes 20 ms. The same on every rank.
            rounds: 1 to 32, how many messages of that size are sent each way, of which the best counts; of round trips
                eight times as many. The same on every rank.
            timeout: seconds for each pair of ranks; None for the communicator's.

        Returns:
            The same on every rank; see ``kfcomm.probe.Probe``.

        Raises:
            ConfigError: the arguments cannot work (also for the other ranks' calls: ``CollectiveAborted``).
            CollectiveMismatch: the ranks give unlike arguments.
            CollectiveTimeout, PeerLost: a rank did not answer, or is gone; the message names it. The other ranks, which
                do not measure with it, may get ``CollectiveAborted`` with that message.

        Cost: with h hosts of p ranks (h−1)·p² + p(p−1)/2 turns, each of about rounds + 2 messages of 20 ms or of
            ``nbytes`` bytes both ways; memory for one such message.
        """
        self._check_open()
        if self._prober is None:
            from kfcomm.probe import Prober

            self._prober = Prober(self._session.engine, self._group.view, self.layout, self._session.timeout_s)
        return await self._prober.run(nbytes, rounds, timeout)

    def dump(self, path: str | os.PathLike[str] | None = None) -> dict[str, Any]:
        """What this process did last and waits for, as a JSON-able record; written to ``path`` if given."""
        return snapshot(self._session, path)

    def statistics(self) -> Statistics:
        """What was counted and timed so far: bytes by peer and link, calls by key, who is waited for.

        Keys and strategies are those of this group, peers those of the process. It can be read at any time, on any
        thread, also after the end, of a sub-group then as it was; reading changes nothing that others read. Cost: some
        2 µs per key.

        Raises:
            ConfigError: monitoring is off.
        """
        if self._final is not None:
            return self._final
        from kfcomm.monitor.statistics import statistics_of

        return statistics_of(self._session, self._group, self._mailbox.group_ids)

    async def close(self) -> None:
        """End it: of the world, everything is closed; of a sub-group, only this view of it. Never hangs.

        A world that is closed waits until the other ranks need nothing more of this one, and says so when that lasts:
        at most 5 s, and a rank that serves the store 10 s more. It waits no longer than 1.5 s where a rank is lost, or
        an exception leaves ``async with`` (Ctrl-C, too). Once cancelled it waits no more.

        What the device is still making of collectives whose handles are done is waited for, up to 5 s, and messages
        that were sent, until they are received or their time is up (of a sub-group up to 5 s). What else is in flight
        fails, here and, where it was not complete, on the other ranks. What the others post later fails with
        ``PeerLost`` if it needs a rank that has closed its world; a rank that has only closed its view of a sub-group
        is missed there until the timeout. When all members have closed a sub-group, nothing is left of it.
        """
        if self._group.view is self._session.world:
            farewell.leave()
            await self._session.close()
        elif not self._left:
            for drain in self._drains():
                await asyncio.wait([drain.done], timeout=min(drain.within_s, LEAVE_WITHIN_S))
            self._final = self.statistics() if self._session.engine.meter is not None else None
            self._leave()
            ids = {self._group.view.id, *self._mailbox.group_ids(), *(self._prober.group_ids() if self._prober else ())}
            self._session.leave_groups(self._group.view.id, ids, f"rank {self.rank} closed group {self.name!r}")

    def _drains(self) -> list[Drain]:
        """What callers believe to be done, and is not."""
        device, eager = self._devices.drained(), self._mailbox.eager.drained()
        found = [] if device is None else [Drain(device, LEAVE_WITHIN_S, lambda: "for its device")]
        if eager is not None:
            found.append(Drain(eager, self._session.timeout_s, self._mailbox.eager.awaited))
        return found

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._session.hurry()
        await self.close()

    def _leave(self) -> None:
        if not self._left:
            self._left = True
            self._group.forget()
            self._session.engine.end_listeners.remove(self._leave)
            self._session.drains.remove(self._drains)
            self._paths.close()
            self._mailbox.close(f"group {self.name!r} is closed")

    def _check_open(self) -> None:
        self._session.check_open()
        if self._left:
            raise SessionClosed(f"group {self.name!r} is closed")


AWAIT = "write comm = await kfcomm.init(), or async with kfcomm.init() as comm; kfcomm.sync.init() needs neither"


class Init:
    """What ``kfcomm.init`` returns: await it, or use it in ``async with``.

    Args:
        settings: what was found.
        reactor: driven by whoever gives it; by the event loop, if none is given.

    Attributes:
        settings: what was found.
    """

    def __init__(self, settings: Settings, reactor: Reactor | None = None) -> None:
        self.settings = settings
        self._reactor = reactor
        self._made: Communicator | None = None

    def __await__(self) -> Generator[Any, None, Communicator]:
        return self._begin().__await__()

    def __getattr__(self, name: str) -> NoReturn:
        if hasattr(Communicator, name):
            raise AttributeError(f"no communicator has a {name!r} yet: {AWAIT}", name=name, obj=self)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)

    def __enter__(self) -> NoReturn:
        raise TypeError(f"kfcomm.init is asynchronous: {AWAIT}")

    def __exit__(self, *_: object) -> None:
        """Never called: see ``__enter__``."""

    async def __aenter__(self) -> Communicator:
        self._made = await self._begin()
        return self._made

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._made is not None:
            await self._made.__aexit__(kind, error, trace)

    async def _begin(self) -> Communicator:
        own = await accelerator.find(self.settings)
        try:
            return await self._join(own)
        except BaseException:
            await own.close()
            raise

    async def _join(self, own: accelerator.Accelerator) -> Communicator:
        settings = self.settings
        alone = settings.size == 1
        network = Alone(settings, own.report) if alone else await SocketNetwork.join(settings, own.report)
        loop = asyncio.get_running_loop()
        reactor, closed = self._reactor, _nothing
        if reactor is None:
            reactor = Reactor()
            closed = LoopDriver(reactor, loop).close
        try:
            session = Session(
                settings.rank, network.layout, network, loop, reactor, closed=closed, timeout_s=settings.timeout_s,
                stall_after_s=settings.stall_after_s, monitor=settings.monitor,
                devices=accelerator.set_up(settings, own, network.reports, network.layout, network.device_transport),
            )  # fmt: skip
        except BaseException:
            closed()
            raise
        try:
            comm = Communicator(session, session.world, settings.strategy)
            if settings.timeline is not None:
                from kfcomm.monitor.timeline import Timeline

                Timeline.of(session, settings.timeline)
            serving.attend(session, settings, comm.statistics)
        except BaseException:
            await session.close()
            raise
        if settings.store is not None and settings.token is not None:
            conceal(os.environ, settings.store, settings.token)
        return comm


def _nothing() -> None:
    """The reactor is somebody else's."""


def init(**arguments: Unpack[Arguments]) -> Init:
    """Join the world that this process was started in; alone it is a world of one.

    Use as ``async with kfcomm.init() as comm`` or ``comm = await kfcomm.init()``. What is not given is found in the
    environment: ``KFCOMM_*``, then that of torchrun, SLURM, Open MPI or PMI (``kfcomm env`` explains it).

    Raises:
        ConfigError: at once, if the settings cannot work.
        RendezvousError: when awaited, if the peers do not find or accept each other.
    """
    return Init(prepare(**arguments))


def prepare(**arguments: Unpack[Arguments]) -> Settings:
    """The settings for these arguments in this environment; all is checked that needs nobody else.

    Raises:
        ConfigError: the settings cannot work.
    """
    settings = detect(os.environ, **arguments)
    if settings.job is None and settings.rank == 0:  # else the launcher has said so, or rank 0 does
        for line in misspelt(os.environ):
            logging.getLogger("kfcomm").warning("%s", line)
    check(settings.strategy)  # an unknown name is refused before anything is open
    if settings.timeline is not None:
        from kfcomm.monitor.timeline import check_folder

        check_folder(settings.timeline)
    serving.check(settings)
    install_signal(settings.dump_dir)
    farewell.join(settings.launcher, settings.rank)
    return settings
