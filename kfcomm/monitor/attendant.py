"""A thread that answers whoever connects: asleep until then, and gone without trace when it is stopped.

It sleeps in accept(2), so it costs nothing while nobody asks, and a program that keeps its event loop busy, or blocks
it, is answered for all the same. Each connection has a thread for as long as it takes, a few of them at a time, so
that one who connects and says nothing holds up nobody else.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable

MAX_AT_ONCE = 8
"""Connections; who comes when so many are open is hung up on."""
PATIENCE_S = 5.0
"""For each read and write of a connection."""
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
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            thread.join()

    def _accept(self) -> None:
        while not self._stopped.is_set():
            try:
                sock, _ = self._listener.accept()
            except OSError:  # it was stopped; or there are too many open files
                self._stopped.wait(BREATHER_S)
                continue
            sock.settimeout(PATIENCE_S)
            thread = threading.Thread(target=self._attend, args=(sock,), name=self._name, daemon=True)
            with self._lock:
                is_welcome = len(self._open) < MAX_AT_ONCE and not self._stopped.is_set()
                if is_welcome:
                    self._open[sock] = thread
                    thread.start()
            if not is_welcome:
                sock.close()

    def _attend(self, sock: socket.socket) -> None:
        try:
            with contextlib.suppress(OSError):
                self._serve(sock)
        finally:
            with self._lock:
                del self._open[sock]
                sock.close()
