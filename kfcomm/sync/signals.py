"""Deferred signal handlers of the program during the engine's work in a blocking call.

Python runs a handler on the main thread between any two instructions, and a handler may raise: an alarm, a timeout of
a library. Within the engine's work that would leave a change of state half done, or look like an error of the engine
itself (a ``TimeoutError`` of a socket). So a call on the main thread *holds* the handlers: it replaces them by one that
only records the signal.

Invariants:

- Held handlers run while the call waits: it has the engine lock, and no result yet. An exception from a handler ends
  the call only, as ``cancel`` does.
- Signals recorded when the call is over are handled as it returns. The call raises the exception of such a handler,
  too, and ``undo`` hands a message back for the next receive. If the result cannot be undone, that of several steps,
  the signal is sent again as the call returns, so that its handler runs after it.
- Outside of calls, and while handlers run, the handlers of the program are in force.

``signal.default_int_handler`` alone is not held: the driver handles a ``KeyboardInterrupt`` anywhere, if necessary by
closing the communicator. Signals that are hardly ever handled are ignored here.

Cost: 0.2 µs per call; 0.4 µs for each handler that is held.
"""

from __future__ import annotations

import sys
from _thread import get_ident, interrupt_main
from collections.abc import Callable
from importlib import import_module
from itertools import repeat
from signal import default_int_handler
from threading import main_thread
from types import FrameType
from typing import Any, Final, TypeAlias, TypeVar, cast

from kfcomm.common import do_nothing

T = TypeVar("T")
Handler: TypeAlias = Callable[[int, FrameType | None], Any]

_c: Any = import_module("_signal")  # what `signal` itself uses, and wraps into what costs ten times as much
getsignal: Final[Callable[[int], Any]] = _c.getsignal
set_handler: Final[Callable[[int, Any], Any]] = _c.signal

NUMBERS: Final = (1, 2, 3, 10, 12, 14, 15, 24, 26, 27)
"""HUP, INT, QUIT, USR1, USR2, ALRM, TERM, XCPU, VTALRM and PROF, as Linux has them: the signals that are looked at."""

_NOTHING: Final = object()


class Signals:
    """The handlers that blocking calls of one engine hold, on the main thread."""

    def __init__(self) -> None:
        self.noted: list[int] = []  # signals whose handlers have not run yet
        self.raised: BaseException | None = None  # by a handler, until the call is over
        self.undo: Callable[[], object] = do_nothing  # if a handler raises after the call is over; set by the call
        self.is_kept = False  # the call has a result that nothing can undo
        self.harmless: list[Any] = []  # handlers of ``NUMBERS``, as they were when there was nothing to hold
        self._seen: list[Any] = []
        self._handlers: dict[int, Handler] = {}  # to be held, of those ``_seen``
        self._is_held = False
        self._wake: Callable[[], object] = do_nothing
        self._main = main_thread().ident

    def hold(self) -> bool:
        """Hold the handlers, until ``let_go``; False if there is nothing to hold, or they are held already."""
        # Callers that cannot afford this call compare ``[*map(getsignal, NUMBERS)]`` to ``harmless`` first.
        # First: what another thread finds in force may be the recording handlers of a call on the main thread.
        if self._is_held or get_ident() != self._main:
            return False
        found = [*map(getsignal, NUMBERS)]
        if found != self._seen:
            self._seen, self._handlers = found, _to_hold(found)
        if not self._handlers:
            self.harmless = found
            return False
        self._put()
        return True

    def holding(self, call: Callable[[], T]) -> T:
        """Make a call while the handlers are held, and let go; a nested ``hold`` returns False."""
        try:
            return call()
        finally:
            self.let_go()

    def let_go(self) -> None:
        """Put the handlers back, and see to what was noted."""
        ours = [number for number in self._handlers if getsignal(number) == self._note]
        putting_back = map(set_handler, ours, [self._handlers[number] for number in ours])
        sending_again = map(cast("Callable[[int], object]", interrupt_main), self.noted if self.is_kept else ())
        undo, self.undo, self.raised = self.undo, do_nothing, None
        try:
            # Operators, not calls: from here to the end Python does not look for signals, if nothing is to be done.
            _ = _NOTHING in putting_back
            _ = _NOTHING in sending_again
            self._is_held = False
            if self.is_kept:
                self.is_kept, self.noted = False, []
            elif self.noted:
                self._run()
        except BaseException:
            undo()
            raise

    def _run(self) -> None:
        while self.noted:
            number = self.noted.pop(0)
            handler: Any = getsignal(number)
            if callable(handler):
                handler(number, sys._getframe())

    def is_here(self) -> bool:
        """Whether this is the thread whose call holds handlers."""
        return self._is_held and get_ident() == self._main

    def sleep(self, fall_asleep: Callable[[], object], wake: Callable[[], object]) -> None:
        """Sleep by ``fall_asleep``, until it returns or a signal calls ``wake``; not at all if one was noted."""
        # A signal may come just before: so ``fall_asleep`` returns also if ``wake`` was called before it. And it may
        # interrupt the sleeper at any line: so ``wake`` takes no lock that the sleeper may have.
        if not self.is_here():
            fall_asleep()
            return
        self._wake = wake
        try:
            if not self.noted:
                fall_asleep()
        finally:
            self._wake = do_nothing

    def answer(self) -> None:
        """Run the handlers of what was noted, which may raise, and may make calls of their own."""
        raised: BaseException | None = None
        self.is_kept = False
        try:
            self.let_go()
        except BaseException as error:
            raised = error
            raise
        finally:
            self.hold()
            self._is_held, self.raised = True, raised

    def _put(self) -> None:
        self._is_held = True
        try:
            _ = _NOTHING in map(set_handler, self._handlers, repeat(self._note))
        except BaseException:  # of a handler, just before: nothing has begun
            self.let_go()
            raise

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._is_held:
            self.noted.append(number)
            self._wake()
        else:  # a call of this thread has ended without ``let_go``
            self._handlers[number](number, frame)


def _to_hold(found: list[Any]) -> dict[int, Handler]:
    """The handlers that are to be held; none if none can raise but that of Ctrl-C."""
    handlers = {
        number: handler
        for number, handler in zip(NUMBERS, found, strict=True)
        if callable(handler) and not getattr(handler, "never_raises", False)
    }
    return {} if list(handlers.values()) == [default_int_handler] else handlers
