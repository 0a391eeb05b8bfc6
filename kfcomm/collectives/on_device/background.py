"""Timers of a path, and work on threads of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from kfcomm.collectives.on_device import tell

if TYPE_CHECKING:
    from kfcomm.transports.reactor import Reactor

T = TypeVar("T")


class Timers:
    """At most one timer for each function."""

    def __init__(self, reactor: Reactor) -> None:
        self._reactor = reactor
        self._timers: dict[Callable[..., None], Any] = {}
        self._is_closed = False

    def __contains__(self, what: Callable[..., None]) -> bool:
        return what in self._timers

    def set(self, what: Callable[..., None], due_s: float | None, *arguments: Any) -> None:
        """Call this at that time, and not at another; None for never."""
        timer = self._timers.pop(what, None)
        if timer is not None:
            timer.cancel()
        if due_s is not None and not self._is_closed:
            self._timers[what] = self._reactor.call_at(due_s, what, *arguments)

    def close(self) -> None:
        """Call nothing any more."""
        self._is_closed = True
        for timer in self._timers.values():
            timer.cancel()


def in_thread(
    reactor: Reactor, blocking: Callable[[], T], then: Callable[[T | None, BaseException | None], None]
) -> None:
    """Run something that may block for ever, and ``then(result, error)`` on the reactor."""

    def run() -> None:
        result: T | None = None
        failure: BaseException | None = None
        try:
            result = blocking()
        except Exception as error:  # noqa: BLE001  handed on
            failure = error
        tell(reactor, then, result, failure)

    on_thread(run)


def on_thread(function: Callable[[], object]) -> None:
    """Run on a daemon thread of its own."""
    threading.Thread(target=function, name="kfcomm-backend", daemon=True).start()
