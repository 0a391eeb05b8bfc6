"""Engine of one rank: carries out what the router and the machines decide.

The engine owns the operations in flight, their deadlines, and the table of the links. Events come in from the
caller (``post``, ``cancel``), from links (``receiver``), from the control plane and from the clock. Each is given to
the core, whose effects are carried out at once, in order. Frames are queued meanwhile and sent at the end of the
burst, so that frames of one burst leave in one write.

It owns no task, timer or thread: it runs in the turns of its reactor. It does not know verbs or kinds of arrays, and
cannot open links: it is given memory and programs, and asks ``connect`` for links.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, cast

from kfcomm.common import do_nothing
from kfcomm.core.calls import ANSWER, BROKEN, DROPPED, EARLY, FAILED, FLOOD, RESUME, VIOLATION
from kfcomm.core.cause import Cause, CauseKind
from kfcomm.core.collective import Collective, GroupView, Post, Series
from kfcomm.core.deadlines import NEVER
from kfcomm.core.frame import Kind
from kfcomm.core.links import credit_of
from kfcomm.core.machine import Effect, Effects
from kfcomm.core.router import Router
from kfcomm.engine.deadlines import Deadlines
from kfcomm.engine.link_table import LinkTable
from kfcomm.engine.meter import Meter
from kfcomm.engine.observer import Recorder
from kfcomm.engine.operation import Operation
from kfcomm.engine.receiver import BlockPool, Receiver
from kfcomm.engine.recovery import CallFailures, LinkRecovery
from kfcomm.engine.slots import SlotTable
from kfcomm.errors import SessionClosed
from kfcomm.transports.base import Link
from kfcomm.transports.reactor import Reactor

if TYPE_CHECKING:
    from kfcomm.engine.control import ControlPlane
    from kfcomm.engine.executors import InSlot
    from kfcomm.engine.observer import Observer

logger = logging.getLogger("kfcomm")

LEFT = int(Kind.LEFT)

MANY_NAMES = (
    "rank %d has used %d different names, the last one %r: each uses memory as long as its group, "
    "so use the same names at every step, not new ones"
)
WARN_AT_NAMES = 100_000


EarlyListener = Callable[[bytes, str, int, Any], None]
MismatchListener = Callable[[str, int], None]
"""Of one group: told the name and the number of what its ranks do not agree about."""


class LaunchedUses(Protocol):
    """Collectives on a device that have begun by themselves, and whose end the device is to tell."""

    def operations(self) -> list[Operation]:
        """Read-only views of them; for any thread."""

    def enter(self) -> None:
        """Make the router know them."""


@dataclass(frozen=True, slots=True)
class SessionOptions:
    """Surroundings and settings of a session and its engine, which those of later epochs take over."""

    # the maker's, as is the reactor: ``closed`` is called when they are not needed any more
    loop: asyncio.AbstractEventLoop
    reactor: Reactor
    timeout_s: float  # of calls without one
    stall_after_s: float  # a wait of this length is reported
    monitor: bool = True  # keep statistics
    closed: Callable[[], None] = do_nothing


class Engine:
    """All collectives of one rank.

    Args:
        rank: world rank.
        connect: opens a link to a peer (by world rank); raises ``TransportError``.
        size: of the world.
        options: its loop opens the links and resolves awaited futures; its reactor drives the engine, whose code runs
            only in ``progress`` or in a caller's own call.

    Attributes:
        control: the control plane; None in a world of one, and until it is there.
        observers: of every event, or None: an event without observers costs one test; set by ``observe``.
        launches: collectives on the device that the router does not know.
        on_wait: called when this rank begins to wait for something.
        unusual: reasons why every post takes the full path: it may be refused, or its chunks are observed.
    """

    def __init__(
        self, rank: int, size: int, connect: Callable[[int], Awaitable[Link]], options: SessionOptions
    ) -> None:
        loop, reactor = options.loop, options.reactor
        meter = Meter(size) if options.monitor else None
        self.rank = rank
        self.router = Router(rank, credit_of(size))  # the credit of every link is the same on every rank
        self.recorder = Recorder(self.in_flight, meter)
        self.unusual: set[str] = set()
        self.meter = meter
        self.observers: tuple[Observer, ...] | None = None
        self._own: tuple[Observer, ...] = (self.recorder,) if meter is None else (meter, self.recorder)
        self.loop = loop
        self.reactor = reactor
        self.control: ControlPlane | None = None
        self.early_listeners: dict[bytes, EarlyListener] = {}
        self.mismatch_listeners: dict[bytes, MismatchListener] = {}
        self.loss_listeners: list[Callable[[], None]] = []
        self.end_listeners: list[Callable[[], None]] = []
        self.receivers: list[Callable[[], list[dict[str, Any]]]] = []
        self.launches: list[LaunchedUses] = []
        self.links = LinkTable(connect, loop, reactor, self.router)
        self.slots = SlotTable(self.links, meter)
        self.recovery = LinkRecovery(self)
        self.links.on_failed = self.recovery.outgoing_broke
        self.deadlines = Deadlines(self, options.stall_after_s)
        self.on_wait: Callable[[], None] = do_nothing
        self.pool = BlockPool()
        self.receiver = Receiver(self)
        self.failures = CallFailures(self)
        self._ended = ""
        self._warn_at = WARN_AT_NAMES

    # ---------------------------------------------------------------- what the caller does

    def post(self, post: Post, operation: Operation, timeout_s: float | None) -> None:
        """Begin a collective; its operation's future ends with it. Costs O(chunks that can leave at once).

        ``timeout_s`` None: it is part of a call that has a timeout, and that is reported when it waits long.
        """
        if self._ended:
            operation.reject(SessionClosed(self._ended))
            return
        operation.engine = self
        operation.posted_s = self.reactor.time()
        effects: Effects = []
        try:
            outcome = self.router.post(post, operation, effects)
        except Exception as error:
            if operation not in self.router.live.values():  # it has no number: the error concerns this caller alone
                raise
            self.failures.broke(operation.collective, error)
        else:
            if type(outcome) is Cause:
                self.failures.rejected(operation, post, outcome)
                self.perform(effects)
                return
        if effects:
            self.perform(effects)
        links = self.links
        if operation.is_over:  # its caller may go on without a turn of the reactor
            links.flush()
            return
        if links.dirty:
            links.flush_soon()
        self.deadlines.begin(operation, NEVER if timeout_s is None else timeout_s)
        self.on_wait()

    def post_again(self, series: Series, stamp: int, operation: Operation) -> bool:
        """Begin the next use of a series, if nothing is unusual; return False if anything is.

        The operation has its deadline. If it has no future, its caller flushes what it has queued.
        """
        if self.unusual:
            return False
        effects: Effects = []
        try:
            if not self.router.post_again(series, stamp, operation, effects):
                return False
        except Exception as error:
            if operation not in self.router.live.values():
                raise
            self.failures.broke(operation.collective, error)
        if effects:
            self.perform(effects)
        if operation.is_over:
            self.links.flush()
            return True
        if self.links.dirty and operation.future is not None:
            self.links.flush_soon()
        if operation.due_s < self.deadlines.next_s:
            self.deadlines.hurry(operation.due_s)
        self.on_wait()
        return True

    def enter(self, operation: Operation) -> None:
        """Add an operation that has begun by itself: its caller waits for it as for others."""
        self.router.enter(operation.collective)
        if operation.due_s < self.deadlines.next_s:
            self.deadlines.hurry(operation.due_s)
        self.on_wait()

    def begins(self, operation: Operation) -> None:
        """Start an operation that has its place and number."""
        if self.observers is not None:
            for observer in self.observers:
                observer.posted(operation)
        if operation.priority and not self.links.is_low_latency:
            self.links.set_low_latency()
        if not operation.seq and self.router.num_keys >= self._warn_at:
            self._warn_at *= 10
            logger.warning(MANY_NAMES, self.rank, self.router.num_keys, operation.collective.name)

    def refuse(self, group: GroupView, name: str, message: str, *, seq: int | None = None) -> None:
        """Fail the other ranks' calls under this name, since one failed its local checks here."""
        if self._ended:
            return
        for observer in self.all_observers():
            observer.refused(group, name, message, is_local=True)
        effects: Effects = []
        self.router.refuse(group, name, message, effects, seq=seq)
        self.perform(effects)

    def leave_out(self, group: GroupView, name: str, below: int) -> None:
        """No use of this name with a number below this one will be posted that was not: see ``Router.leave_out``."""
        effects: Effects = []
        self.router.leave_out(group, name, below, effects)
        self.perform(effects)

    def abort(self, collective: Collective, cause: Cause) -> None:
        """Fail a collective here and on every other rank."""
        effects: Effects = []
        self.router.abort(collective, cause, effects)
        self.perform(effects)
        self.links.flush_soon()

    def end(self, reason: str, cause: Cause | None = None) -> None:
        """Fail every operation in flight, here and on the other ranks; from now on posts raise ``SessionClosed``.

        ``cause``: of all these failures, where the other ranks may learn it by themselves.
        """
        self.unusual.add("ended")
        for listener in list(self.end_listeners):
            listener()
        self.enter_all()
        for collective in list(self.router.live):
            self.abort(collective, cause or _cut_short(self.rank, collective, reason))
        self._ended = reason

    def leave(self, group_ids: Collection[bytes], reason: str) -> None:
        """Abort what is in flight in groups that this rank uses no more, and forget them. O(names on all links)."""
        self.enter_all()
        for collective in list(self.router.live):
            if collective.group.id in group_ids:
                self.abort(collective, _cut_short(self.rank, collective, reason))
        effects: Effects = []
        if self.meter is not None:
            self.meter.forget(group_ids)
        for group_id in group_ids:
            self.slots.leave(group_id, self.router.names.of_group(group_id))
            self.router.leave(group_id, effects)
            for sender in self.links.by_peer.values():
                if sender.state.forget(group_id):
                    sender.send((LEFT, group_id))
                    self.links.dirty[sender] = None
        self.perform(effects)
        self.links.flush_soon()

    def in_flight(self) -> list[Operation]:
        """Operations that are posted and not over, to be read; on any thread."""
        operations = [use.as_operation() for use in self.slots.uses()]
        for launched in self.launches:
            operations += launched.operations()
        return [*cast("Collection[Operation]", list(self.router.live.values())), *operations]

    def enter_all(self) -> None:
        """Make the router know all operations in flight."""
        self.enter_slots()
        for launched in self.launches:
            launched.enter()

    def enter_slots(self) -> None:
        """Make the router know those in slots."""
        for use in self.slots.uses():
            use.enter()

    async def close(self, timeout_s: float) -> None:
        """Say goodbye on every link and wait, bounded, until the peers have; then close what is left."""
        self.deadlines.close()
        self.recovery.close()
        await self.links.close(timeout_s)

    def observe(self, observers: tuple[Observer, ...] | None) -> None:
        """Replace the observers."""
        self.observers = self.receiver.observers = observers or None
        if any(one.sees_chunks for one in observers or ()):
            self.unusual.add("observed")
            self.enter_all()
        else:
            self.unusual.discard("observed")

    def all_observers(self) -> tuple[Observer, ...]:
        """All observers, with the statistics and the recorder, which get completions in batches."""
        return (*self._own, *(self.observers or ()))

    def tell_done(self, operation: Operation | InSlot) -> None:
        """Tell the observers of a completion."""
        is_last = not (self.router.live or self.slots.pending)
        for observer in self.observers or ():
            observer.done(operation, is_last=is_last)

    # ---------------------------------------------------------------- what the control plane tells

    def on_peer_lost(self, peer: int, reason: str) -> None:
        """Fail everything that a lost peer takes part in, now and later."""
        effects: Effects = []
        self.enter_all()  # the router must fail those in slots, too, which it does not know
        self.unusual.add("lost")
        self.router.on_peer_lost(peer, Cause(CauseKind.LOST, peer, f"rank {peer} is lost: {reason}"), effects)
        self.links.drop(peer)
        self.perform(effects)
        for listener in list(self.loss_listeners):
            listener()

    def on_peer_left(self, peer: int, cause: Cause) -> None:
        """Fail later posts that need a leaving peer; what it has posted may still complete."""
        self.unusual.add("lost")
        self.router.on_peer_left(peer, cause)
        self.links.goodbye(peer)
        for listener in list(self.loss_listeners):
            listener()

    # ---------------------------------------------------------------- effects

    def perform(self, effects: Effects) -> None:
        """Carry out the router's effects in order; the list may grow meanwhile."""
        for effect in effects:
            if effect[0] != RESUME:
                self._tell(effect)
            elif effect[1] in self.router.live:
                try:
                    effect[1].resume(effect[2])
                except Exception as error:  # noqa: BLE001  it ends this collective alone
                    self.failures.broke(effect[1], error)

    def _tell(self, effect: Effect) -> None:
        tag = effect[0]
        if tag == ANSWER:
            link = self.links.back(effect[1])
            if link is not None:
                link.send(effect[2])
                self.links.flush_soon()
        elif tag == FAILED:
            self.failures.failed(effect[1], effect[2])
        elif tag == FLOOD:
            if self.control is not None:
                _, group_id, name, seq, cause = effect
                self.control.abort(group_id, name, seq, cause.to_wire())
        elif tag == VIOLATION:
            self.failures.violated(effect[1], effect[2])
        elif tag == EARLY:
            listener = self.early_listeners.get(effect[1])
            if listener is not None:
                self.reactor.call_soon(listener, *effect[1:])
        elif tag == DROPPED:
            effect[1].release(self.pool)
        elif tag == BROKEN:
            self.recovery.peer_says(effect[1], effect[2], effect[3])


def _cut_short(rank: int, collective: Collective, reason: str) -> Cause:
    return Cause(CauseKind.CANCELLED, rank, f"{collective.title} failed: {reason}")
