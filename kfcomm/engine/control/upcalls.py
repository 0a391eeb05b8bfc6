"""The way from the control thread up to the engine: every call is made where the engine runs, and none gets lost.

Invariants: a connection on its way to the engine has an owner at every moment; if the engine never takes it, it
is closed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from kfcomm.engine.control.base import ControlEvents
from kfcomm.transports.reactor import Reactor
from kfcomm.transports.sockets import Connection

_LOG = logging.getLogger("kfcomm.control")


class Upcalls:
    """Calls ``events`` where the engine runs; all methods may be called from any thread, and none raises."""

    def __init__(self, reactor: Reactor, events: ControlEvents) -> None:
        self.events = events
        self._reactor = reactor
        self._closed = False
        self._offered: dict[Connection, tuple[int, int]] = {}

    def adopt(self, connection: Connection, rank: int, purpose: int) -> None:
        """Hand a data connection over; it is closed if it is not taken."""
        self._offered[connection] = (rank, purpose)
        if not self.post(self._take, connection):
            self._close_offered()

    def report(self, message: str, error: BaseException | None) -> None:
        """A defect: it is logged, and the engine hears of it as of an error in a callback of its own."""
        _LOG.error("%s", message, exc_info=error)
        self.post(self._reactor.call_exception_handler, {"message": message, "exception": error})

    def post(self, callback: Callable[..., object], *arguments: object) -> bool:
        """Call back where the engine runs; False if it runs no more, or nothing is to be called any more."""
        if self._closed:
            return False
        try:
            self._reactor.call_soon_threadsafe(self._call, callback, arguments)
        except RuntimeError:  # it is closed: the engine is gone and has nothing more to hear
            return False
        return True

    def close(self) -> None:
        """Nothing is called from now on; connections that the engine has not taken yet are closed."""
        self._closed = True
        self._close_offered()

    def _call(self, callback: Callable[..., object], arguments: tuple[object, ...]) -> None:
        if not self._closed:
            callback(*arguments)

    def _take(self, connection: Connection) -> None:
        offered = self._offered.pop(connection, None)
        if offered is not None:
            self.events.adopt(connection, *offered)

    def _close_offered(self) -> None:
        for connection in list(self._offered):
            if self._offered.pop(connection, None) is not None:  # else the engine took it just now
                connection.close()
