"""The control thread: a small daemon thread with a loop of its own that answers while the engine computes.

It owns the listener, every handshake of incoming connections, and the control links. Incoming data connections are
handed to the engine once their peer is authenticated. A defect in the thread is reported to the engine as the loss of
its own rank, since the engine cannot work without a control plane.

Invariants: after `ControlThread.stop` no thread, descriptor or task is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import selectors
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any

from kfcomm.core.auth import MAX_UNAUTHENTICATED, Unauthenticated
from kfcomm.core.gossip import CollectiveId
from kfcomm.core.handshake import Hello, Purpose
from kfcomm.core.membership import Message
from kfcomm.engine.control import (
    GOODBYE_S,
    Answer,
    ClockReader,
    ControlEvents,
    ControlPlane,
    StatusSource,
    ToldAnswer,
    ToldClock,
    Upcalls,
    World,
    answer_clock,
    measure_clock,
)
from kfcomm.engine.control.node import ControlNode
from kfcomm.errors import KfcommError, LocalProtocolError
from kfcomm.transports.handshake import UNAUTHENTICATED_S, serve
from kfcomm.transports.handshake import answer as greet
from kfcomm.transports.reactor import Reactor
from kfcomm.transports.sockets import Connection, Listener
from kfcomm.types import override

if TYPE_CHECKING:
    from kfcomm.engine.control.observing import Observing

HANDSHAKES_PER_RANK = 8
"""All ranks may come at once, each for several links."""
SIGNS_OF_LIFE = 4
"""So many are shown in the time after which a silent peer is lost."""
COMPARED_WITHIN_S = 0.25
"""How long a thread that stops waits for clocks that are being compared: a millisecond, if all is well."""

_LOG = logging.getLogger("kfcomm.control")


class ControlThread(ControlPlane):
    """The control plane of a process; implements `kfcomm.engine.control.ControlPlane`.

    Args:
        world: the members.
        listener: already bound, so that peers who know of it can connect; owned, closed by `stop`.
        reactor: the engine's.
        events: the engine.
        status: of this rank; asked on the control thread.
    """

    def __init__(
        self, world: World, listener: Listener, reactor: Reactor, events: ControlEvents, status: StatusSource
    ) -> None:
        self._world = world
        self._listener = listener
        self._upcalls = Upcalls(reactor, events)
        self._status = status
        self._selector = selectors.DefaultSelector()
        self._loop = asyncio.SelectorEventLoop(self._selector)
        self._clocks = Clocks(world, self._loop, self._upcalls)
        self._thread = threading.Thread(target=self._run, name="kfcomm-control", daemon=True)
        self._ready = threading.Event()
        self._stop = asyncio.Event()
        self._stopped = False
        self._goodbye_s = GOODBYE_S
        self._node: ControlNode | None = None
        self._observing: Observing | None = None

    def start(self) -> None:
        """Start the thread and return once it takes calls; links to the neighbours come up by and by."""
        if self._thread.ident is not None or self._stopped:
            raise LocalProtocolError("a control thread is started once")
        self._thread.start()
        self._ready.wait()

    @override
    def needed_by(self) -> list[int]:
        return [] if self._node is None else self._node.needed_by()

    def stop(self, goodbye_s: float = GOODBYE_S) -> None:
        """End the thread and close everything. Waits for the thread: ``goodbye_s`` at the most, usually a millisecond.

        Calling it again does nothing. What a rank that has not left leaves behind makes it lost to the others.
        """
        if not self._stopped:
            self._stopped = True
            self._goodbye_s = goodbye_s
            if self._thread.ident is None:
                self._listener.close()
                self._loop.close()
            else:
                self._post(self._stop.set)
                self._thread.join()
        self._upcalls.close()

    def descriptors(self) -> list[int]:
        """Every descriptor that the thread holds, for a forked child, in which the thread does not exist.

        The child must let go of them without the loop, whose poll descriptor it shares with its parent; else the
        peers would not see this process end. ``os.dup2`` of ``/dev/null`` over each is better than ``os.close``:
        the socket objects of the child close their numbers again later, when these may mean something else.
        """
        found = {sock.fileno() for sock in self._listener.sockets}
        if self._node is not None:
            found.update(self._node.links.descriptors())
        if self._observing is not None:
            found.update(self._observing.descriptors())
        if not self._loop.is_closed():
            found.update(key.fd for key in self._selector.get_map().values())
            found.add(self._selector.fileno())
        return sorted(found - {-1})

    # ControlPlane.

    @override
    def abort(self, group: bytes, key: str, seq: int, cause: Sequence[Any]) -> None:
        self._call(lambda node: node.abort(group, key, seq, cause))

    @override
    def suspect(self, rank: int, reason: str) -> None:
        self._call(lambda node: node.suspect(rank, reason))

    @override
    def declare_lost(self, rank: int, reason: str, *, has_ended: bool = False) -> None:
        self._call(lambda node: node.declare_lost(rank, reason, has_ended=has_ended))

    @override
    def agree(self, number: int, message: Message) -> None:
        self._call(lambda node: node.agree(number, message))

    @override
    def query(self, ops: Sequence[CollectiveId], target: int, answer: Answer) -> None:
        asked = list(ops)
        self._call(lambda node: node.query(asked, target, answer))

    @override
    def compare_clocks(self, rank: int, told: ToldClock) -> None:
        self._call(lambda _: self._clocks.ask(rank, told))

    @override
    def observe(self, rank: int, question: bytes, told: ToldAnswer) -> None:
        self._call(lambda node: told(None) if node.is_gone(rank) else self._observers().ask(rank, question, told))

    @override
    def linger(self) -> None:
        self._call(lambda node: node.linger())

    @override
    async def leave(self, timeout_s: float) -> None:
        loop = asyncio.get_running_loop()
        done = asyncio.Event()

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # that loop is closed: nobody waits on it
                loop.call_soon_threadsafe(done.set)

        if self._thread.is_alive():
            self._call(lambda node: node.leave(wake))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await done.wait()

    def _call(self, method: Callable[[ControlNode], object]) -> None:
        node = self._node
        if node is not None:
            self._post(method, node)

    def _post(self, callback: Callable[..., object], *arguments: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the plane has ended, which the engine knows
            self._loop.call_soon_threadsafe(callback, *arguments)

    # The thread.

    def _run(self) -> None:
        rank = self._world.rank

        def report(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
            message = f"in the control thread of rank {rank}: {context['message']}"
            self._upcalls.report(message, context.get("exception"))

        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                self._loop.set_exception_handler(report)
                runner.run(self._main())
        except BaseException as error:  # noqa: BLE001 - nobody else would hear of it
            self._upcalls.report(f"the control thread of rank {rank} failed", error)
            self._upcalls.post(self._upcalls.events.on_peer_lost, rank, f"its control thread failed: {error!r}")
        finally:
            self._ready.set()

    async def _main(self) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                self._node = node = ControlNode(self._world, tasks, self._upcalls, self._status)
                serving = tasks.create_task(self._serve(node))
                self._show_life()
                node.maintain()
                node.beat()
                self._ready.set()
                await self._stop.wait()
                serving.cancel()
                await self._clocks.settle()
                await node.close(self._goodbye_s)
        finally:
            if self._node is not None:
                self._node.links.abort()
            if self._observing is not None:
                self._observing.abort()
            self._listener.close()

    def _observers(self) -> Observing:
        if self._observing is None:
            from kfcomm.engine.control.observing import Observing  # a job that is not observed does without it

            self._observing = Observing(self._world, self._status)
        return self._observing

    def _show_life(self) -> None:
        if self._world.show_life is not None:
            self._world.show_life()
            self._loop.call_later(self._world.lost_after_s / SIGNS_OF_LIFE, self._show_life)

    async def _serve(self, node: ControlNode) -> None:
        world = self._world
        shake = functools.partial(
            greet,
            accept=lambda hello: world.objection(hello) or node.objection(hello),
            options=world.handshake(min(world.handshake_timeout_s, UNAUTHENTICATED_S)),
        )

        def welcome(connection: Connection, hello: Hello) -> None:
            if hello.purpose == Purpose.CONTROL:
                node.links.add(hello.rank, connection)
            elif hello.purpose == Purpose.CLOCK:
                self._clocks.answer(connection)
            elif hello.purpose == Purpose.OBSERVER:
                self._observers().answer(connection)
            else:
                self._upcalls.adopt(connection, hello.rank, hello.purpose)

        refused = functools.partial(_LOG.debug, "an incoming connection was dropped: %s")
        limit = max(MAX_UNAUTHENTICATED, HANDSHAKES_PER_RANK * len(world.peers))
        unauthenticated: Unauthenticated[asyncio.Task[None]] = Unauthenticated(limit, limit // 2)
        await serve(self._listener, shake, welcome=welcome, refused=refused, unauthenticated=unauthenticated)


class Clocks:
    """Comparisons of this process's clock with those of peers, on the loop of the control thread."""

    def __init__(self, world: World, loop: asyncio.AbstractEventLoop, upcalls: Upcalls) -> None:
        self._world = world
        self._loop = loop
        self._upcalls = upcalls
        self.clock: ClockReader = time.monotonic_ns
        self._under_way: set[asyncio.Task[None]] = set()

    def ask(self, rank: int, told: ToldClock) -> None:
        """Compare with the clock of ``rank``, and tell the engine."""
        self._begin(self._ask(rank, told))

    def answer(self, connection: Connection) -> None:
        """Answer a peer that compares."""
        sock, timeout_s = connection.sock, self._world.handshake_timeout_s
        answering = self._begin(answer_clock(sock, clock=self.clock, timeout_s=timeout_s))
        answering.add_done_callback(lambda _: sock.close())  # also if it was cancelled before its first step

    async def settle(self) -> None:
        """Wait, bounded, for the comparisons under way."""
        if self._under_way:
            await asyncio.wait(self._under_way, timeout=COMPARED_WITHIN_S)

    def _begin(self, comparison: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(comparison, name="kfcomm clock")
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)
        return task

    async def _ask(self, rank: int, told: ToldClock) -> None:
        sample = None
        try:
            with contextlib.closing((await self._world.reach(rank, Purpose.CLOCK)).sock) as sock:
                async with asyncio.timeout(self._world.handshake_timeout_s):
                    sample = await measure_clock(sock, clock=self.clock)
        except (KfcommError, TimeoutError) as error:
            _LOG.debug("rank %d could not compare clocks with rank %d: %s", self._world.rank, rank, error)
        self._upcalls.post(told, sample)
