"""Blocking communicator: the verbs of ``kfcomm.Communicator`` for programs without an event loop.

Every method may be called from any thread, by many at once. A call that blocks does the work of the engine itself; an
I/O thread does it while none does; sub-groups share it. Calls of one thread are posted in the order of the calls.
"""

from __future__ import annotations

import atexit
import contextlib
import sys
from collections.abc import Callable, Iterable
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, Unpack

from kfcomm.collectives.blobs import as_array
from kfcomm.common.tracebacks import bare, terse
from kfcomm.errors import KfcommError, SessionClosed
from kfcomm.joining import Init, is_full, prepare
from kfcomm.monitor.dumps import program_line
from kfcomm.rendezvous import exit_report
from kfcomm.rendezvous.settings import Arguments
from kfcomm.strategies import StrategySpec
from kfcomm.sync.adapter import plain
from kfcomm.sync.driver import Driver, outermost
from kfcomm.sync.handle import Handle
from kfcomm.sync.signals import Signals
from kfcomm.sync.thread import IoThread
from kfcomm.sync.verbs import BlockingVerbs, Queue
from kfcomm.types import Seconds
from kfcomm.world.communicator import Communicator as Async

if TYPE_CHECKING:
    from kfcomm.engine.entrance import Exchange
    from kfcomm.rendezvous.settings import Settings


class Communicator(BlockingVerbs):
    """The collectives of one group of ranks, blocking. Made by ``kfcomm.sync.init``, ``group`` and ``split``.

    Each verb has the parameters, the result and the errors of the async one. Its ``*_async`` form returns a
    ``kfcomm.sync.Handle`` instead of waiting. On the I/O thread itself (in a handle's callback) the blocking forms
    raise ``WouldDeadlock``; on a thread that runs an event loop of its own they block that loop.

    Cost: the caller does the work itself, over every link, without a hand-over to another thread. Only what has steps
    of its own (``group``, ``split``, ``probe``, a ``request`` by messages, queues) goes by way of the I/O thread: 25 to
    50 µs.
    """

    def __init__(self, driver: Driver, inner: Async, *, owns_io: bool = False) -> None:
        super().__init__(driver, inner, inner)
        self._owns_io = owns_io
        if owns_io:
            atexit.register(self._close_at_exit)

    def __repr__(self) -> str:
        return repr(self._inner)

    # ---------------------------------------------------------------- what one rank keeps for others

    @outermost
    def save(self, name: str, x: Any, *, version: int | None = None) -> int:
        """Keep a copy of ``x`` for others to ``request``; returns its version. See ``kfcomm.Communicator.save``."""
        self._check_open()
        kept = plain(as_array(x))
        return self._driver.run(lambda: self._inner.save(name, kept, version=version), self._session)

    @outermost
    def request(
        self, name: str, source: int, *, version: int | None = None, like: Any = None, timeout: Seconds | None = None
    ) -> Any:
        """A copy of what rank ``source`` saved as ``name``. See ``kfcomm.Communicator.request``."""
        self._check_open()
        found = self._inner._request_now(name, source, version, like, timeout)
        if found is not None:
            return found
        ask = partial(self._inner.request, name, source, version=version, like=like, timeout=timeout)
        return self._io.wait_for(ask)

    @outermost
    def request_async(
        self, name: str, source: int, *, version: int | None = None, like: Any = None, timeout: Seconds | None = None
    ) -> Handle[Any]:
        """Begin a ``request``; what needs no message is done at once. Errors of the arguments come from the handle."""
        self._check_open()
        handle: Handle[Any] = Handle(self._driver, self._session)
        handle.verb = "request"
        try:
            found = self._inner._request_now(name, source, version, like, timeout)
        except KfcommError as error:
            handle.set_exception(error)
            return handle
        if found is not None:
            handle.set_result(found)
        else:
            ask = partial(self._inner.request, name, source, version=version, like=like, timeout=timeout)
            handle.start(ask)
        return handle

    @outermost
    def queue(self, name: str, source: int, target: int, *, capacity: int = 16) -> Queue:
        """An ordered queue of arrays from rank ``source`` to ``target``. See ``kfcomm.Communicator.queue``."""
        return Queue(self._driver, self._inner.queue(name, source, target, capacity=capacity), self._inner)

    # ---------------------------------------------------------------- groups

    @outermost
    def shrink(self, *, timeout: Seconds | None = None) -> Communicator:
        """Return the communicator of the next epoch: of the ranks that survive. See ``kfcomm.Communicator.shrink``."""
        self._check_open()
        inner = self._io.wait_for(lambda: self._inner.shrink(timeout=timeout))
        return Communicator(self._driver, inner, owns_io=self._owns_io)

    @outermost
    def group(
        self, ranks: Iterable[int], name: str = "group", *, strategy: StrategySpec | None = None,
        timeout: Seconds | None = None,
    ) -> Communicator:  # fmt: skip
        """A communicator of some of this group's ranks, on the same I/O thread. See ``kfcomm.Communicator.group``."""
        self._check_open()
        members = tuple(ranks)
        inner = self._io.wait_for(lambda: self._inner.group(members, name, strategy=strategy, timeout=timeout))
        return Communicator(self._driver, inner)

    @outermost
    def split(
        self, color: int | str | None, key: int = 0, name: str = "split", *, timeout: Seconds | None = None
    ) -> Communicator | None:
        """A communicator of the ranks that give the same ``color``. See ``kfcomm.Communicator.split``."""
        self._check_open()
        inner = self._io.wait_for(lambda: self._inner.split(color, key, name, timeout=timeout))
        return None if inner is None else Communicator(self._driver, inner)

    @outermost
    def refuse(self, name: str | None, error: BaseException, *, steps: int = 1) -> None:
        """Fail the next call of this name on every rank. See ``kfcomm.Communicator.refuse``."""
        self._check_open()
        self._driver.run(lambda: self._inner.refuse(name, error, steps=steps), self._session)

    @outermost
    def mismatched(self, name: str, seq: int, message: str) -> None:
        """Fail one use of a name on every rank. See ``kfcomm.Communicator.mismatched``."""
        self._driver.run(lambda: self._inner.mismatched(name, seq, message), self._session)

    @property
    def name(self) -> str:
        """Name of the group."""
        return self._inner.name

    @property
    def outlives(self) -> bool:
        """Whether collectives outlive a rank that is lost: while an ``Elastic`` is open."""
        return self._inner.outlives

    # ---------------------------------------------------------------- the end

    def close(self) -> None:
        """End it: of the world, everything is closed; of a sub-group, only this view of it. Never hangs.

        What the library has put off (updates of ``kfcomm.torch.attach``) is finished first, unless an exception leaves
        ``with``. What else is in flight fails, here and, where it was not complete, on the other ranks. Calling it
        again, or in a forked child, does nothing. A world that is still open when the interpreter ends is closed then.
        For how long it waits for other ranks: see ``kfcomm.Communicator.close``. Ctrl-C meanwhile ends the wait, and so
        does what a signal handler raises.

        Raises:
            WouldDeadlock: called on the I/O thread.
            CollectiveError: what was put off has failed; it is closed all the same.
        """
        if self._io.is_inherited or self._io.is_stopped:
            return
        try:
            self._driver.put_off.finish(None if self._owns_io else self._inner)
        finally:
            self._close()

    def _close(self) -> None:
        if self._io.signals.hold():
            return self._io.signals.holding(self._close)
        if self._owns_io:
            exit_report.report_leaving()
        # An interrupted call of this thread may have left the lock taken: the close would wait for it for ever.
        self._driver.heal(self._session)
        try:
            self._finish()
        except BaseException:  # Ctrl-C, or what a signal handler has raised
            with contextlib.suppress(SessionClosed):
                self._io.post(self._session.hang_up)
            # Again, since the I/O thread has still to be ended; what was hung up does not wait for other ranks.
            self._finish()
            raise

    def _finish(self) -> None:
        with contextlib.suppress(SessionClosed):
            # another thread closes it too, and was faster
            self._io.wait_for(self._inner.close)
        if self._owns_io:
            self._driver.stop()
            atexit.unregister(self._close_at_exit)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._hurry()
        self.close()

    def _hurry(self) -> None:
        self._driver.put_off.forget()
        with contextlib.suppress(SessionClosed):
            self._io.post(self._session.hurry)

    def _close_at_exit(self) -> None:
        """Leave properly when the program ends without ``close``, so that the others do not report a lost peer."""
        if hasattr(sys, "last_type"):  # by an error, or by Ctrl-C
            self._hurry()
        with contextlib.suppress(KfcommError, OSError):
            self.close()


def init(**arguments: Unpack[Arguments]) -> Communicator:
    """Join the world that this process was started in; alone it is a world of one. Blocks until all have joined.

    Use as ``with kfcomm.sync.init() as comm`` or ``comm = kfcomm.sync.init()``. Arguments, environment and errors are
    those of ``kfcomm.init``.

    Returns:
        A ``Communicator``; with ``elastic=True`` a ``kfcomm.sync.ElasticCommunicator``.

    Raises:
        ConfigError: the settings cannot work.
        RendezvousError: the peers do not find or accept each other.
    """
    is_held = (signals := Signals()).hold()
    shown: Callable[[KfcommError], KfcommError] = terse  # code of a plugin may take part in what is checked
    try:
        settings = prepare(**arguments)
        shown = bare
        return join(settings, signals=signals)
    except KfcommError as error:
        raise error if is_full(arguments) or error is signals.raised else shown(error)
    finally:
        if is_held:
            signals.let_go()


def join(
    settings: Settings, exchange: Exchange | None = None, *, signals: Signals | None = None
) -> Communicator:  # fmt: skip
    """Join with given settings; by ``exchange``, not kfcomm's store, if given; ``signals`` may be held already."""
    signals = Signals() if signals is None else signals
    if signals.hold():
        return signals.holding(lambda: join(settings, exchange, signals=signals))
    kind: Any = Communicator
    if settings.elastic:
        from kfcomm.sync.elastic import ElasticCommunicator  # other programs do without it

        kind = ElasticCommunicator  # it has all that one has
    driver = Driver(IoThread(signals), is_terse=settings.traceback == "short")
    try:
        inner = driver.io.wait_for(lambda: Init(settings, driver.reactor, exchange))
        inner._session.where = program_line  # blocking calls are made at the lines at which their threads stay
        made: Communicator = kind(driver, inner, owns_io=True)
        return made
    except BaseException:
        driver.stop()
        raise
