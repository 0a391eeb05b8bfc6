"""A thread that answers whoever connects: asleep until then, and gone without trace when it is stopped.

It sleeps in accept(2), so it costs nothing while nobody asks, and a program that keeps its event loop busy, or blocks
it, is answered for all the same. Each connection has a thread for as long as it takes, seconds at most, a few of them
at a time: for one more the oldest is cut, of the address that has most of them, so that nobody keeps others out.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable

from kfcomm.core.strangers import Strangers

MAX_AT_ONCE = 8
"""Connections; for one more, one of these is hung up on."""
PATIENCE_S = 5.0
"""For a connection, from its first byte to its last."""
BREATHER_S = 0.1
"""After a connection that could not be accepted."""


class Attendant:
    """Calls ``serve`` with every connection that ``listener`` gets, and closes it then. Implements ``session.Service``.

    Args:
        listener: a listening socket, which belongs to the attendant from now on.
        serve: may raise ``OSError``, which ends its connection alone.
        name: of the thread.
    """

    def __init__(self, listener: socket.socket, serve: Callable[[socket.socket], None], name: str) -> None:
        self._listener = listener
        self._serve = serve
        self._name = name
        self._lock = threading.Lock()
        self._open: dict[socket.socket, threading.Thread] = {}
        self._strangers: Strangers[socket.socket] = Strangers(MAX_AT_ONCE, MAX_AT_ONCE)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._accept, name=name, daemon=True)
        self._thread.start()

    def descriptors(self) -> list[int]:
        """See ``session.Service``. Takes no lock: a forked child has no thread that could ever give it back."""
        found = [self._listener.fileno(), *(sock.fileno() for sock in list(self._open))]
        return [descriptor for descriptor in found if descriptor >= 0]

    def stop(self) -> None:
        """See ``session.Service``. Connections that are open are cut off."""
        with self._lock:
            self._stopped.set()
            serving = list(self._open.items())
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes who waits in accept
        self._thread.join()
        self._listener.close()
        for sock, thread in serving:
            _cut(sock)
            thread.join()

    def _accept(self) -> None:
        while not self._stopped.is_set():
            try:
                sock, address = self._listener.accept()
            except OSError:  # it was stopped; or there are too many open files
                self._stopped.wait(BREATHER_S)
                continue
            sock.settimeout(PATIENCE_S)
            thread = threading.Thread(target=self._attend, args=(sock,), name=self._name, daemon=True)
            with self._lock:
                if self._stopped.is_set():
                    sock.close()
                    return
                too_many = self._strangers.came(sock, address[0] if isinstance(address, tuple) else "")
                if too_many is not None:
                    _cut(too_many)
                self._open[sock] = thread
                thread.start()

    def _attend(self, sock: socket.socket) -> None:
        late = threading.Timer(PATIENCE_S, _cut, (sock,))
        late.start()
        try:
            with contextlib.suppress(OSError):
                self._serve(sock)
        finally:
            late.cancel()
            late.join()
            with self._lock:
                self._strangers.gone(sock)
                del self._open[sock]
                sock.close()


def _cut(sock: socket.socket) -> None:
    """Have the thread that serves it find the connection closed."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
