"""Endpoints of a process: a thread that answers connections, and what a session lets others read there."""

from __future__ import annotations

import contextlib
import math
import select
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kfcomm.common.sockets import FLOOD_PAUSE_S
from kfcomm.core.auth import Unauthenticated
from kfcomm.rendezvous.host import choose_address, host_and_port
from kfcomm.rendezvous.settings import Settings

if TYPE_CHECKING:
    from kfcomm.engine.meter import Meter
    from kfcomm.engine.session import Session


MAX_AT_ONCE = 8
"""Connections; for one more, one of these is hung up on."""
RELAY = b">"
"""First byte of questions to ranks of other hosts (``monitor.relaying``)."""
PATIENCE_S = 5.0
"""For a connection, from its coming to its last byte."""
BREATHER_S = 0.1
"""After a connection that could not be accepted."""


@dataclass(slots=True)
class _Guest:
    """A connection that is open."""

    until_s: float  # when it is hung up on, by the monotonic clock; infinite once it was
    thread: threading.Thread | None = None  # which serves it; None until it says something


class Attendant:
    """Calls ``serve`` with every connection on which something was said, and closes it then.

    Owns the listening socket. An ``OSError`` of ``serve`` ends its connection alone. A ``Service`` of a session, which
    does not import it: the launcher uses it too, without the engine.
    """

    def __init__(self, listener: socket.socket, serve: Callable[[socket.socket], None], name: str) -> None:
        listener.setblocking(False)
        self._listener = listener
        self._serve = serve
        self._name = name
        self._lock = threading.Lock()
        self._guests: dict[socket.socket, _Guest] = {}
        self._unauthenticated: Unauthenticated[socket.socket] = Unauthenticated(MAX_AT_ONCE, MAX_AT_ONCE)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._attend, name=name, daemon=True)
        self._thread.start()

    def descriptors(self) -> list[int]:
        """Descriptors that a forked child must let go of."""
        # takes no lock: a forked child has no thread that could ever release it
        found = [self._listener.fileno(), *(sock.fileno() for sock in list(self._guests))]
        return [descriptor for descriptor in found if descriptor >= 0]

    def stop(self) -> None:
        """Stop answering, and cut off open connections."""
        self._stopped.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes who waits for it
        self._thread.join()
        self._listener.close()
        with self._lock:
            guests = list(self._guests.items())
        for sock, _ in guests:
            self._cut(sock)
        for _, guest in guests:
            if guest.thread is not None:
                guest.thread.join()

    # The thread sleeps in poll(2), so it costs nothing until it is asked, and a program that keeps its event loop busy,
    # or blocks it, is answered for all the same. A silent connection costs no more than a descriptor. Each one that
    # asks has a thread for as long as it takes, seconds at most, a few of them at a time: for one more the oldest is
    # cut, of the address that has most of them, so that one client cannot keep others out.

    def _attend(self) -> None:
        while not self._stopped.is_set():
            with self._lock:
                silent = {sock.fileno(): sock for sock, guest in self._guests.items() if guest.thread is None}
                next_s = min((guest.until_s for guest in self._guests.values()), default=math.inf)
            poll = select.poll()
            for descriptor in (self._listener.fileno(), *silent):
                poll.register(descriptor, select.POLLIN)
            now_s = time.monotonic()
            for descriptor, _ in poll.poll(None if next_s == math.inf else 1e3 * max(next_s - now_s, 0.0)):
                if descriptor in silent:
                    self._begin(silent[descriptor])
                else:
                    self._accept()
            self._cut_late(time.monotonic())

    def _begin(self, sock: socket.socket) -> None:
        """It has said something, or hung up; or it was cut a moment ago."""
        try:
            has_asked = bool(sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        except OSError:
            has_asked = False
        if not has_asked:
            self._cut(sock)
            return
        thread = threading.Thread(target=self._serve_one, args=(sock,), name=self._name, daemon=True)
        with self._lock:
            self._guests[sock].thread = thread
        thread.start()

    def _accept(self) -> None:
        if self._stopped.is_set():
            return
        try:
            sock, address = self._listener.accept()
        except OSError:  # it is gone already; or there are too many open files
            self._stopped.wait(BREATHER_S)
            return
        sock.settimeout(PATIENCE_S)
        with self._lock:
            too_many = self._unauthenticated.add(sock, address[0] if isinstance(address, tuple) else "")
            self._guests[sock] = _Guest(time.monotonic() + PATIENCE_S)
        if too_many is not None:
            self._cut(too_many)
            # Leaves time to the program, whose interpreter this thread shares, in a flood of connections.
            self._stopped.wait(FLOOD_PAUSE_S)

    def _serve_one(self, sock: socket.socket) -> None:
        try:
            with contextlib.suppress(OSError):
                self._serve(sock)
        finally:
            self._close(sock)

    def _cut_late(self, now_s: float) -> None:
        with self._lock:
            late = [sock for sock, guest in self._guests.items() if guest.until_s <= now_s]
        for sock in late:
            self._cut(sock)

    def _cut(self, sock: socket.socket) -> None:
        """Hang up; the thread that serves it, if any, finds the connection closed."""
        with self._lock:
            guest = self._guests.get(sock)
            if guest is None:
                return  # it has just ended
            # Not cut again while its thread comes to an end.
            guest.until_s = math.inf
        if guest.thread is None:
            self._close(sock)
        else:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _close(self, sock: socket.socket) -> None:
        with self._lock:
            self._unauthenticated.remove(sock)
            del self._guests[sock]
            sock.close()


def check(settings: Settings) -> None:
    """Refuse settings that cannot work, before anything is open; raises as ``metrics.check`` does."""
    if settings.metrics_port is not None:
        from kfcomm.monitor import metrics

        metrics.check(settings.metrics_port, settings.monitor)


def load() -> None:
    """Import what `attend` imports at its first use."""
    from kfcomm.monitor import live  # noqa: F401


def attend(session: Session, settings: Settings, comm: Any) -> None:
    """Let others read the statistics of a world, until its session is closed; ``comm`` is its communicator.

    Raises:
        ConfigError: the metrics port cannot be used.
    """
    first = session.engine.meter
    if first is None:
        return

    def meter(epoch: int) -> Meter:
        return session.at(epoch).engine.meter or first

    if settings.metrics_port is not None:
        from kfcomm.monitor import metrics

        towards = None if settings.store is None else host_and_port(settings.store)
        address = choose_address(settings.interface, towards)
        # A rank that joins later has the port of its uid, which no other rank has or had.
        local_rank = session.layout.local_rank(session.rank) if settings.join is None else settings.join
        session.services.append(metrics.attend(address, settings.metrics_port, local_rank, meter, comm.statistics))
    from kfcomm.monitor import live  # here, since it imports this module

    def answer(question: bytes) -> Any:
        from kfcomm.monitor.answers import answer_to  # when the first one asks

        return answer_to(question, comm)

    def pass_on(sock: socket.socket) -> None:
        from kfcomm.monitor.relaying import pass_on  # when the first one asks for ranks elsewhere

        pass_on(sock, comm._latest._session)

    def answer_elsewhere(question: bytes) -> bytes:
        from kfcomm.monitor.answers import encoded_answer_to  # likewise

        return encoded_answer_to(question, comm)

    session.observed = answer_elsewhere
    found = live.attend(live.job_name(settings.job, settings.store), session.rank, answer, pass_on)
    if found is not None:
        session.services.append(found)
