"""Thread that waits for one event after another, and calls back after each.

Invariants: every callback is called once, in the order of the requests. The thread starts with the first request. It is
a daemon, since it may wait for a device that never answers.
"""

from __future__ import annotations

from collections.abc import Callable
from queue import SimpleQueue
from threading import Lock, Thread, current_thread
from typing import TypeAlias

from kfcomm.errors import TransportError

Done: TypeAlias = Callable[[BaseException | None], None]
Wait: TypeAlias = Callable[[], None]


class Watcher:
    """Waits, in order, on a thread of its own.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._promised: SimpleQueue[tuple[Wait, Done] | None] = SimpleQueue()
        self._lock = Lock()
        self._thread: Thread | None = None
        self._is_closed = False

    def promise(self, wait: Wait, done: Done) -> None:
        """Call ``wait`` after those promised before, then ``done`` with the error that it raised, or None.

        Args:
            wait: returns when it is over; raises if it ended badly.
            done: returns soon, and does not raise.

        Raises:
            TransportError: the watcher is closed.
        """
        with self._lock:
            if self._is_closed:
                raise TransportError("the device is closed")
            self._promised.put((wait, done))
            if self._thread is None:
                self._thread = Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Wait for all callbacks, and end the thread. May be called again, and by a ``done``."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                # Behind all requests, so that each is answered before the thread ends.
                self._promised.put(None)
            thread = self._thread
        if thread is not None and thread is not current_thread():
            thread.join()

    def _run(self) -> None:
        while (promised := self._promised.get()) is not None:
            wait, done = promised
            try:
                wait()
            except Exception as error:  # noqa: BLE001  of whatever kind: else no promise would be kept from here on
                done(error)
            else:
                done(None)
            del promised, wait, done  # what they hold must not live until the next promise comes
