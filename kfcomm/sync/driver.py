"""Driver of the engine by blocking callers: each takes the engine lock, posts, and polls until its result is there.

Invariants:

- A call is posted when it is made, by the thread that makes it, whether it blocks or not: so the calls of one thread
  are in the order of the program, over every link.
- What a signal handler raises ends the call alone: handlers run where a call waits (see ``signals``). So does Ctrl-C
  while a caller looks or rests. Inside the engine's own work an exception, of a handler or forced by
  another thread, would leave unknown state behind: then the communicator is closed, with that as its reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import math
import threading
import time
from collections.abc import Callable
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar
from weakref import WeakMethod

from kfcomm.collectives.compiled import NOT_ALIKE
from kfcomm.collectives.slot_use import Over, SlotUse
from kfcomm.common import do_nothing
from kfcomm.common.tracebacks import terse
from kfcomm.errors import KfcommError, SessionClosed
from kfcomm.sync.signals import NUMBERS, getsignal
from kfcomm.sync.thread import IoThread
from kfcomm.sync.turns import Awaited, Turns

if TYPE_CHECKING:
    from kfcomm.engine.session import Session

P = ParamSpec("P")
S = TypeVar("S")
T = TypeVar("T")
Finish = Callable[[], object]


class Driver:
    """The callers of one engine, or of several that share a reactor."""

    def __init__(self, io: IoThread, *, is_terse: bool = True) -> None:
        self.io = io  # drives the engine while no caller does, and has its lock
        self.signals = io.signals
        self.is_terse = is_terse
        self.turns = Turns(io)  # which caller drives while several wait
        self.reactor = self.turns.reactor
        self.put_off = PutOff()  # finished before it is closed
        self._lock = io.lock

    def shown(self, error: KfcommError) -> KfcommError:
        """An error as the caller of a blocking verb sees it."""
        return terse(error) if self.is_terse and error is not self.signals.raised else error

    def run(self, function: Callable[[], T], session: Session) -> T:
        """Call something of the engine that does not wait, at once, on the caller's thread, which holds ``signals``."""
        if self._lock.is_mine() or session.engine.unusual:  # as in ``call``
            if self.io.is_current:
                return _run(function, session)
            self.io.may_block()
        try:
            self._enter(session)
            return _run(function, session)
        except BaseException as error:
            self._ended(error, None, session, is_over=True)
            raise
        finally:
            self.reactor.is_driven = False
            self.turns.leave()

    def call(self, begin: Callable[..., Awaited[T] | None], session: Session, *arguments: Any) -> T:
        """Begin a collective and wait for its result; ``NOT_ALIKE`` if ``begin`` gives None, and has begun nothing."""
        # The verb that calls this holds ``signals``. The lines of ``_enter`` and ``_run`` are written out: each frame
        # would cost 0.2 µs of the few that a call through a slot takes.
        lock, reactor = self._lock, self.reactor
        is_mine = lock.is_mine()
        if is_mine or session.engine.unusual:  # in a callback on the I/O thread, perhaps, or in a forked child
            self.io.may_block()
        handle: Awaited[T] | None = None
        is_over = False
        try:
            if is_mine:
                self._found_taken(session)
            elif lock.is_wanted() or not lock.acquire(False):  # a thread that waits in the queue goes first
                lock.take()
            reactor.is_driven = lock.is_working = True
            handle = begin(*arguments)
            if type(handle) is Over or (
                type(handle) is SlotUse and type(handle := self.turns.look_at_slot(handle)) is Over  # type: ignore[arg-type]
            ):
                lock.is_working = reactor.is_driven = False  # as it was found: nothing of the engine's has moved
                lock.release()
                return handle[0]  # type: ignore[no-any-return]
            outcome: T = NOT_ALIKE  # type: ignore[assignment]
            if handle is not None:
                self.turns.see_through(handle, session)
                is_over = True
                outcome = handle.result()
                if self.signals.is_here():
                    self.signals.undo = partial(self._undo, handle, session)
        except BaseException as error:
            try:
                self._ended(error, handle, session, is_over=is_over or handle is None)
            finally:
                reactor.is_driven = False
                self.turns.leave()
            raise
        reactor.is_driven = False
        self.turns.leave()
        return outcome

    def wait(self, handle: Awaited[T], timeout_s: float | None, session: Session) -> bool:
        """Wait until a collective is over; False if it is not after so many seconds. The caller holds ``signals``."""
        self.io.may_block()
        deadline_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
        try:
            self._enter(session)
            if not handle.done() and time.monotonic() < deadline_s:
                self.turns.wait(handle, deadline_s)
            return handle.done()
        except BaseException as error:
            self._interrupted(error, handle, session)
            raise
        finally:
            self.reactor.is_driven = False
            self.turns.leave()

    def heal(self, session: Session) -> None:
        """Clear up what an interrupt of an earlier call of this thread may have left."""
        if not self.io.is_current:
            try:
                self._enter(session)
            finally:
                self.reactor.is_driven = False
                self.turns.leave()

    def stop(self) -> None:
        """Drive no more, and end the I/O thread. May be called again."""
        with contextlib.suppress(SessionClosed):  # another thread stops it too, and was faster
            self.io.wait_for(self._close)
        self.io.stop()

    async def _close(self) -> None:
        while self.turns.leader:  # what it waits for has ended with the sessions, but it has yet to wake up
            self.reactor.ring()
            await asyncio.sleep(0)
        for _, bell in list(self.turns.followers.values()):
            bell.ring()
        self.turns.io_driver.close()

    def _enter(self, session: Session) -> None:
        if not self._lock.take():
            self._found_taken(session)
        self.reactor.is_driven = self._lock.is_working = True

    def _found_taken(self, session: Session) -> None:
        """Recover the lock of an interrupted call of this thread, or enter from a signal handler during a call."""
        if self.turns.leader == threading.get_ident():
            self.turns.leader = 0
        if self.reactor.is_driven:
            self._give_up(session, KeyboardInterrupt())

    def _undo(self, handle: Awaited[T], session: Session) -> None:
        """Take back the result of a call, which does not reach its caller: see ``Signals.undo``."""
        try:
            self._enter(session)
            self._lock.is_working = False
            self._interrupted(KeyboardInterrupt(), handle, session)
        finally:
            self.turns.leave()

    def _ended(self, error: BaseException, handle: Awaited[T] | None, session: Session, *, is_over: bool) -> None:
        """A call has raised: its own error, if there was one to raise, or what has interrupted it."""
        if not (is_over and isinstance(error, (Exception, asyncio.CancelledError))):
            self._interrupted(error, handle, session)

    def _interrupted(self, error: BaseException, handle: Awaited[T] | None, session: Session) -> None:
        """End the call only, on an interrupt between two polls; within the engine's work its state is unknown."""
        if not self._lock.is_mine():  # it came while this thread waited for the lock: nothing is left undone
            if handle is None:
                return
            self._lock.take()
        if not self._lock.is_working and handle is not None:
            self.reactor.is_driven = self._lock.is_working = True
            try:
                handle.give_up()
            except BaseException:  # a second one
                self._give_up(session, error)
                raise
        elif self._lock.is_working:
            self._give_up(session, error)
            if handle is not None and handle.done():
                with contextlib.suppress(Exception, asyncio.CancelledError):
                    handle.result()  # the caller has the interrupt instead

    def _give_up(self, session: Session, error: BaseException) -> None:
        with contextlib.suppress(Exception):  # what was left undone may stand in the way; then peers hear of the close
            session.give_up(f"the communicator was interrupted at its work by {type(error).__name__}")


def _run(function: Callable[[], T], session: Session) -> T:
    result = function()
    if session.engine.links.dirty:  # of an operation without a future, which is not scheduled to be moved
        session.engine.links.flush_soon()
    return result


def outermost(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """Return a method of an object with a driver as one that holds signals and raises `Driver.shown` errors."""

    # Hot paths have the same lines written out.
    @wraps(method)
    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        is_held = [*map(getsignal, NUMBERS)] != (signals := self._driver.signals).harmless and signals.hold()
        try:
            return method(self, *args, **kwargs)
        except KfcommError as error:
            raise self._driver.shown(error)
        finally:
            if is_held:
                signals.let_go()

    return call


def before_close(comm: Any, finish: Finish) -> None:
    """Call something once before a communicator or its world is closed, unless an error has ended the program."""
    # For collectives that the library makes later than the program asks for them, and to whose end all ranks come.
    # A method is called if its object lives; a function given twice is called once.
    comm._driver.put_off.add(comm._inner, finish)


class PutOff:
    """Callbacks that finish collectives for which the program does not wait itself."""

    def __init__(self) -> None:
        self._due: list[tuple[object, Callable[[], Finish | None]]] = []
        self._functions: dict[tuple[int, Finish], None] = {}

    def add(self, owner: object, finish: Finish) -> None:
        """Finish something of a communicator; see `before_close`."""
        self._due = [one for one in self._due if one[1]() is not None]
        if inspect.ismethod(finish):
            self._due.append((owner, WeakMethod(finish)))
        elif (id(owner), finish) not in self._functions:
            self._functions[id(owner), finish] = None
            self._due.append((owner, lambda: finish))

    def forget(self) -> None:
        """Finish nothing any more: an error has ended the program."""
        self._due.clear()

    def finish(self, owner: object | None) -> None:
        """Finish what belongs to a communicator, None for all of its world; then raise the first error."""
        due = [one for one in self._due if owner is None or one[0] is owner]
        self._due = [one for one in self._due if one not in due]
        failed: list[Exception] = []
        for _, living in due:
            try:
                (living() or do_nothing)()
            except Exception as error:  # noqa: BLE001  the others are to be finished, too
                failed.append(error)
        if failed:
            raise failed[0]
