"""World of one epoch as one rank sees it: its engine, its network, and the epoch's end.

A session lives on one event loop. It passes the news of the control plane to the engine, answers for this rank, and
closes everything that it opened. Its *network* knows how peers are reached; communicators are views of it for one
group each.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from kfcomm.arrays.devices import Device
from kfcomm.arrays.devices.host import PinnedPool
from kfcomm.arrays.devices.routes import Choice
from kfcomm.core.cause import Cause, CauseKind
from kfcomm.core.collective import GroupTable, GroupView
from kfcomm.core.membership import Message
from kfcomm.engine.agreements import Agreements
from kfcomm.engine.closing import CLOSE_WITHIN_S, Closing, Drain, in_a_thread, let_go, sessions
from kfcomm.engine.control import GOODBYE_S, ControlEvents, StatusSource
from kfcomm.engine.engine import Engine, SessionOptions
from kfcomm.engine.interfaces import EpochEntry, Network, Service
from kfcomm.engine.meter import LoopLag
from kfcomm.errors import EpochChanged, PeerLost, SessionClosed
from kfcomm.transports.base import DeviceSetup
from kfcomm.transports.sockets import Connection
from kfcomm.types import Layout, Rates, override

logger = logging.getLogger("kfcomm")


class Session(ControlEvents, StatusSource):
    """One epoch's world, as this rank sees it."""

    def __init__(
        self, rank: int, network: Network, devices: DeviceSetup, options: SessionOptions, epoch: int = 0
    ) -> None:
        self.rank = rank
        self.layout = layout = network.layout
        ranks_here, num_cpus = layout.hosts.count(layout.hosts[rank]), layout.num_cpus
        options.reactor.is_crowded = 0 < num_cpus < ranks_here
        options.reactor.is_full = 0 < num_cpus < 2 * ranks_here
        self.timeout_s = options.timeout_s
        self._options = options
        self.epoch = epoch
        self.world = GroupView(b"world", tuple(range(layout.size)), rank)
        self.engine = Engine(rank, layout.size, network.connect, options)
        self.network = network
        self._closed: str | None = None
        self._over: Cause | None = None
        self._follower: Session | None = None
        self._former: list[Session] = []
        self._prepared: Session | None = None  # of the next epoch, while this one is in use
        self.is_in_use = True  # not prepared only
        self._retiring: set[asyncio.Task[None]] = set()
        self.agreements = Agreements(rank, layout.size, self._say)
        self.entry: EpochEntry | None = None  # listens for the next epoch while that is being agreed
        self._closing = Closing(rank)
        self._closed_by: asyncio.Future[None] | None = None
        self._is_broken = False
        self.groups = GroupTable(self.world)  # those that this rank is in
        self.services: list[Service] = []  # to be stopped when the session is closed
        self.rates: Rates | None = None  # between hosts, measured in this epoch
        self.drains: list[Callable[[], list[Drain]]] = []  # asked at the end for bounded waits, before anything fails
        self.devices = devices  # of the world; this rank's is closed with the session
        self._pools: dict[Device, PinnedPool] = {}
        self._unshared_said = False
        self.lag = LoopLag()  # of the event loop; none in a world of one
        self.where: Callable[[], str] = str
        self.observed: Callable[[bytes], bytes] = lambda _: b"null"  # answer to an observer elsewhere; JSON
        self.engine.control = network.start(self.engine.receiver, options.reactor, self, self)
        self.engine.slots.is_possible = network.heaps() is not None
        if self.engine.control is not None:
            self.lag.start(self.engine)
        sessions.add(self)

    def say_unshared(self) -> None:
        """Log, once, that ordinary memory was given where symmetric memory was asked for; not in a world of one."""
        if not self._unshared_said and self.layout.size > 1:
            self._unshared_said = True
            logger.warning("rank %d: symmetric memory is ordinary memory here: the ranks do not share any", self.rank)

    def leave_groups(self, group_id: bytes, ids: Collection[bytes], reason: str) -> None:
        """Close a group: fail its collectives in flight, under any of its ids, and forget it."""
        self.engine.leave(ids, reason)
        self.groups.leave(group_id)

    def layout_of(self, view: GroupView) -> Layout:
        """Hosts of the members of a group."""
        return self.layout.part(view.members)

    def rates_of(self, view: GroupView) -> Rates | None:
        """Rates between the hosts of a group's members, as far as they were measured in this epoch."""
        if self.rates is None:
            return None
        return self.rates.part(list(dict.fromkeys(self.layout.hosts[rank] for rank in view.members)))

    def know(self, rates: Rates) -> None:
        """Keep the measured rates between all hosts, also for later epochs."""
        self.rates = rates
        self.network.know(rates)

    def pool_of(self, device: Device) -> PinnedPool:
        """Memory of the host for copies from and to a device; one for all groups."""
        pool = self._pools.get(device)
        if pool is None:
            pool = self._pools[device] = PinnedPool(device)
        return pool

    def route_of(self, members: Sequence[int]) -> Choice | None:
        """Route of device memory among these ranks; None in a world without devices."""
        return self.devices.route(members, self.layout.part(members))

    # ---------------------------------------------------------------- ControlEvents

    @override
    def adopt(self, connection: Connection, rank: int, purpose: int) -> None:
        # a peer may need this rank until its links are closed
        if self.engine.links.closing:
            connection.close()
        else:
            self.network.adopt(connection, rank, purpose)

    @override
    def on_abort(self, group: bytes, key: str, seq: int, cause: list[Any]) -> None:
        self.engine.failures.aborted_elsewhere(group, key, seq, Cause.from_wire(cause))

    @override
    def on_ended(self, rank: int) -> None:
        self.agreements.lost(rank, has_ended=True)

    @override
    def on_agreement(self, rank: int, number: int, message: Message) -> None:
        self.agreements.on_message(rank, number, message)

    @override
    def on_peer_lost(self, rank: int, reason: str) -> None:
        if self._over is not None:
            self.agreements.lost(rank, has_ended=False)  # whoever has not heard what was decided hears it from here
            return
        if rank == self.rank:
            reason = f"the others have given this rank up: {reason}"
            self.agreements.fail(PeerLost(reason, rank=rank))
        self.agreements.lost(rank, has_ended=False)
        if self.is_in_use:
            logger.warning("rank %d: rank %d is lost: %s", self.rank, rank, reason)
        for observer in self.engine.all_observers():
            observer.lost(rank, reason)
        self.engine.on_peer_lost(rank, reason)
        self.network.forget(rank)
        self.hurry()

    @override
    def on_leaving(self, rank: int) -> None:
        control = self.engine.control
        self.agreements.lost(rank, has_ended=True)
        if control is None or self._over is not None:
            return
        for observer in self.engine.all_observers():
            observer.left(rank)
        self.engine.enter_all()
        pending = [one for one in self.engine.router.live if rank in one.group.index]
        ops = [(one.key.group_id, one.name, one.seq) for one in pending]
        cause = Cause(CauseKind.LOST, rank, f"rank {rank} has left (it closed its communicator)")
        self.engine.on_peer_left(rank, cause)

        def answered(_: int, posted: list[bool], __: str) -> None:
            for collective, is_posted in zip(pending, posted, strict=False):
                if not is_posted:
                    self.engine.abort(collective, cause)
            self.engine.recovery.peer_settled(rank)

        control.query(ops, rank, answered)

    # ---------------------------------------------------------------- StatusSource

    @override
    def is_posted(self, group: bytes, key: str, seq: int) -> bool:
        return self.engine.router.is_posted(group, key, seq)

    @override
    def activity(self) -> str:
        behind_s = self.lag.blocked_s()
        blocked = f" (its event loop has been blocked for {behind_s:.1f} s)" if behind_s > 1.0 else ""
        line = self.where()
        return self.engine.recorder.last() + blocked + (f", at {line}" if line else "")

    @override
    def answer_observer(self, question: bytes) -> bytes:
        return self.observed(question)

    # ---------------------------------------------------------------- the end

    @property
    def is_closed(self) -> bool:
        """Whether nothing can be posted any more."""
        return self._closed is not None

    @property
    def over(self) -> Cause | None:
        """The end of the epoch."""
        return self._over

    @property
    def why_closed(self) -> str | None:
        """Reason for refusing posts; None while the session is open."""
        return self._closed

    def check_open(self) -> None:
        """Refuse to work when closed, or inherited through a fork.

        Raises:
            SessionClosed: with the reason.
        """
        if self._closed is not None:
            if self._over is not None:
                raise EpochChanged(self._closed, epoch=self._over.rank, members=self._over.arrived)
            raise SessionClosed(self._closed)

    def give_up(self, reason: str) -> None:
        """Refuse further posts; what was opened stays open until ``close``."""
        self._closed = reason
        self.engine.end(reason)

    def _say(self, number: int, message: Message) -> None:
        if self.engine.control is not None:
            self.engine.control.agree(number, message)

    # ---------------------------------------------------------------- the next epoch

    @property
    def latest(self) -> Session:
        """This session, or the latest that has followed it."""
        return self if self._follower is None else self._follower.latest

    def at(self, epoch: int) -> Session:
        """This session, or the one of a later epoch that has followed it."""
        return self if self._follower is None or self.epoch >= epoch else self._follower.at(epoch)

    def end_epoch(self, cause: Cause) -> None:
        """End the epoch once the survivors are agreed on: refuse further posts, and fail what is in flight."""
        self._over = replace(cause, message=f"{cause.message}; use the communicator of that one")
        self._closed = self._over.message
        self.engine.end(self._over.message, self._over)

    def prepare(self, network: Network) -> Session:
        """Make the session of the next epoch, while this one stays in use: for `follow`, or `drop_prepared`."""
        self._prepared = made = self._next(network)
        made.is_in_use = False
        return made

    def drop_prepared(self) -> None:
        """Close a session that was prepared, in the background."""
        made, self._prepared = self._prepared, None
        if made is not None:
            why = "this epoch was prepared, and another one has begun"
            self.latest._in_background(made.abandon(why), "kfcomm drops a prepared epoch")

    async def abandon(self, why: str) -> None:
        """Close a session that was prepared, with what belongs to it alone."""
        self.lag.stop()
        self.give_up(why)
        await self._retire(lingers=False)

    def _next(self, network: Network) -> Session:
        rank = network.births.index(self.network.births[self.rank])
        return Session(rank, network, DeviceSetup.none(network.layout.size), self._options, self.epoch + 1)

    def follow(self, network: Network) -> Session:
        """Make the session of the next epoch, on the same loop and reactor; it closes what is left of this one."""
        self.drop_prepared()
        return self.hand_on(self._next(network))

    def hand_on(self, follower: Session) -> Session:
        """Hand on to a session that was prepared."""
        self._prepared = None
        observers = self.engine.observers
        self.engine.observe(None)
        given, self.devices = self.devices, DeviceSetup.none(self.layout.size)
        follower.devices, follower.is_in_use = given._replace(reports=follower.network.reports), True
        self.network.hand_on(follower.network)
        if self.engine.meter is not None and follower.engine.meter is not None:
            from kfcomm.engine.meter import with_epoch  # for jobs whose ranks change

            follower.engine.meter.earlier = with_epoch(self.engine.meter, self.engine.links.traffic)
        follower.services, self.services = self.services, []
        follower._former = [*self._former, self]
        follower._retiring |= self._retiring
        follower.engine.observe(tuple(one for one in observers or () if one.outlives_epoch))
        follower.where, follower.observed = self.where, self.observed
        follower.engine.recorder.news = self.engine.recorder.news
        for observer in follower.engine.all_observers():
            observer.joined(follower.epoch, follower.rank, follower.layout.size)
        self._follower = follower
        self.lag.stop()
        return follower

    def retire_former(self, *, lingers: bool = True) -> None:
        """Close the sessions of former epochs in the background, since all ranks are in this one.

        If ``lingers``, the control plane of one that may have given up live ranks stays until the next change or end.
        """
        former, self._former = self._former, []
        for session in former:
            # Ranks that were given up, and live, hear of it from the control plane that they know.
            stays = lingers and any(map(session.network.membership.may_live, session.agreements.strays))
            if stays:
                self._former.append(session)
            self._in_background(session._retire(lingers=stays), f"kfcomm ends epoch {session.epoch}")

    def _in_background(self, ending: Coroutine[Any, Any, None], name: str) -> None:
        task = self.engine.loop.create_task(ending, name=name)
        self._retiring.add(task)
        task.add_done_callback(self._retiring.discard)

    async def _bury_former(self) -> None:
        """Close the remains of former epochs, and the listener for a next one."""
        if self.entry is not None:
            await self.entry.close()
        self.drop_prepared()
        self.retire_former(lingers=False)
        await asyncio.gather(*self._retiring)

    async def _retire(self, *, lingers: bool) -> None:
        await self.engine.close(0.0)
        control = self.engine.control
        if control is not None and lingers:
            control.linger()
        elif control is not None:
            await in_a_thread(partial(control.stop, 0.0))
        for pool in self._pools.values():
            pool.close()
        await self.network.close()
        if not lingers:
            sessions.discard(self)

    def hurry(self) -> None:
        """Shorten the waits of closing, now or later, to a moment, since a rank is broken, here or elsewhere."""
        if self._follower is not None:
            self.latest.hurry()
            return
        self._is_broken = True
        if self._closed_by is not None:
            self._closing.hurry()

    def hang_up(self) -> None:
        """Stop waiting in ``close`` at once. On the session's loop."""
        self.latest._closing.hurry(0.0)

    async def close(self) -> None:
        """Fail what is in flight, say goodbye, and close everything. Bounded; calling it again waits for the first.

        Results that devices are about to make, and callers take for done, are waited for, as are messages that were
        sent. A session that another has followed closes that one.
        """
        if self._follower is not None:
            await self.latest.close()
            return
        if self._closed_by is None:
            self._closed = f"the communicator of rank {self.rank} is closed"
            drains = [drain for found in self.drains for drain in found()]
            if not drains:
                self.engine.end(self._closed)
            self._closed_by = asyncio.ensure_future(self._close(drains))
        await asyncio.shield(self._closed_by)

    async def _close(self, drains: Sequence[Drain]) -> None:
        closing = self._closing
        self.agreements.fail(SessionClosed(self._closed or ""))
        if self._is_broken:
            closing.hurry()
        for drain in drains:
            await closing.wait(asyncio.wait([drain.done]), drain.within_s, drain.why)
        if drains:
            self.engine.end(self._closed or "")
        observers = self.engine.observers
        self.engine.observe(None)
        for observer in observers or ():
            await observer.close()
        for service in self.services:
            await in_a_thread(service.stop)
        control = self.engine.control
        if control is not None:
            self.agreements.leave()
            await closing.leave(control)
            self.network.stop_watching()
        self.lag.stop()
        await self._bury_former()
        await self.engine.close(closing.left_s(CLOSE_WITHIN_S))
        if control is not None:
            await in_a_thread(partial(control.stop, closing.left_s(GOODBYE_S)))
        try:
            for pool in self._pools.values():
                pool.close()
            if self.devices.device is not None:
                await in_a_thread(self.devices.device.close)
        finally:
            await closing.wait(self.network.leave(), math.inf)
            await self.network.close()
            sessions.discard(self)
            self._options.closed()
        if closing.was_cancelled:
            raise asyncio.CancelledError

    def forked(self) -> None:
        """In a forked child: let go of every descriptor, without touching the loop that the parent still uses."""
        self._closed = (
            "this communicator belongs to the parent process: after fork, a child has to call kfcomm.init() itself"
        )
        for observer in self.engine.observers or ():
            observer.forked()
        self.engine.unusual.add("forked")
        let_go(self)
        self.devices = DeviceSetup.none(self.layout.size)
