"""Sockets of this process: listening, connecting, options, and what the handshake needs before a link takes over.

An *address* is ``(host, port)`` for TCP or ``"@name"`` for a Unix socket in Linux's abstract namespace, which
leaves nothing on disk and is seen by the processes of one network namespace only (unix(7)).

All sockets are non-blocking and closed on exec. ``handshake`` defines what is sent on them first.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import math
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from kfcomm.common.sockets import readable, why_failed, writable
from kfcomm.core.handshake import Keys
from kfcomm.errors import ConfigError, InternalError, TransportError

Address = tuple[str, int] | str

BACKLOG = 4096
"""Connections that wait to be accepted; Linux lowers this to net.core.somaxconn."""

UNIX_SNDBUF_NBYTES = 1 << 20
LOW_LATENCY_UNIX_SNDBUF_NBYTES = 1 << 19
LOW_LATENCY_RCVBUF_NBYTES = 1 << 18
LOW_LATENCY_UNSENT_NBYTES = 1 << 17
_FULL_BACKLOG_WAIT_S = 0.01
_NOT_MINE_TO_TAKE = {errno.EADDRINUSE, errno.EADDRNOTAVAIL, errno.EACCES, errno.EPERM, errno.EINVAL}


class DialRefused(TransportError):
    """No connection came about.

    ``has_no_listener``: every address refused the connection at once, so that process is gone. False after a timeout,
    and when a process was there but refused the handshake.
    """

    def __init__(self, message: str, *, has_no_listener: bool = False) -> None:
        super().__init__(message)
        self.has_no_listener = has_no_listener


class ConnectionEnded(TransportError):
    """The other side has closed the connection, or it broke."""


def describe(address: Address) -> str:
    """Return an address in words."""
    if isinstance(address, str):
        return f"unix:{address}"
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class Listener:
    """Port of a process, with an abstract Unix socket beside it for peers of the same host.

    Args:
        address: IPv4 or IPv6 address of the chosen interface; only that one is bound.
        port: TCP port, 0 for any that is free.
        ports: first and last port of those to take a free one of, in place of ``port``.
        unix: ``"@name"``, or None for TCP alone.

    Attributes:
        sockets: the listening sockets, TCP first.
        port: the port that was bound.

    Raises:
        ConfigError: the address is not of this host, or the port or name is taken or not allowed.
        TransportError: the system has no socket to give.
    """

    def __init__(
        self, address: str, port: int = 0, *, unix: str | None = None, ports: tuple[int, int] | None = None
    ) -> None:
        try:
            ipaddress.ip_address(address)
        except ValueError:
            raise ConfigError(f"a listener needs an IPv4 or IPv6 address, not {address!r}") from None
        tcp = _listen((address, port)) if ports is None else _listen_within(address, *ports)
        with closed_on_failure(tcp):
            self.port: int = tcp.getsockname()[1]
            self.sockets: tuple[socket.socket, ...] = (tcp,) if unix is None else (tcp, _listen(unix))

    def close(self) -> None:
        """Stop listening. Accepted connections stay. Calling it again does nothing."""
        for sock in self.sockets:
            sock.close()
        self.sockets = ()


def _listen_within(address: str, first: int, last: int) -> socket.socket:
    for port in range(first, last + 1):
        try:
            return _listen((address, port))
        except ConfigError as error:
            if not isinstance(error.__cause__, OSError) or error.__cause__.errno != errno.EADDRINUSE:
                raise
    raise ConfigError(
        f"no port from {first} to {last} of {address} is free: each rank of a host needs one, and another "
        "while the ranks change"
    )


def _listen(address: Address) -> socket.socket:
    where = _for_kernel(address)
    try:
        sock = _make(address)
        with closed_on_failure(sock):
            if sock.family != socket.AF_UNIX:
                # Without it a restart on the same port fails while old connections are in TIME_WAIT.
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(where)
            sock.listen(BACKLOG)
    except OSError as error:
        message = f"cannot listen on {describe(address)}: {why_failed(error)}"
        raise (ConfigError if error.errno in _NOT_MINE_TO_TAKE else TransportError)(message) from error
    return sock


def _make(address: Address) -> socket.socket:
    if isinstance(address, str):
        family = socket.AF_UNIX
    else:
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setblocking(False)
    return sock


def _for_kernel(address: Address) -> Any:
    if isinstance(address, tuple):
        return address
    if not address.startswith("@"):
        raise ConfigError(f"a Unix address is an abstract name like '@name', not {address!r}")
    return "\0" + address[1:]


def tune(sock: socket.socket) -> None:
    """Set the options of every connection: small frames leave at once, and a system call moves much."""
    if sock.family == socket.AF_UNIX:
        # The kernel does not tune these: with 1 MiB, 64 MiB went over in 18 ms instead of 23.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, UNIX_SNDBUF_NBYTES)
    else:
        # TCP's buffers are left to the kernel, whose own tuning did as well as the best fixed size.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def hold_little(sock: StreamSocket) -> None:
    """Shrink the kernel's buffers, where no frame can be overtaken any more, on either side.

    An urgent all_reduce between two ranks, while a large one was under way, took as long as 2.7 of its chunks over TCP
    (5.2 with twice as much in each place), and 3.5 over a Unix socket. Throughput suffers: 64 MiB over TCP took 10 to
    20 % more CPU.
    """
    if sock.family == socket.AF_UNIX:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LOW_LATENCY_UNIX_SNDBUF_NBYTES)
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, LOW_LATENCY_RCVBUF_NBYTES)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, LOW_LATENCY_UNSENT_NBYTES)


def watch(sock: StreamSocket, dead_after_s: float) -> None:
    """Have the kernel break a TCP connection whose peer's host has been silent for so long (tcp(7))."""
    # A Unix socket needs no such timer: the kernel knows when its peer ends.
    if sock.family == socket.AF_UNIX or math.isinf(dead_after_s):
        return
    interval_s = max(1, round(dead_after_s / 4))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, interval_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, interval_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(dead_after_s * 1000))


async def connect(address: Address) -> socket.socket:
    """Connect to one address, with all options. Waits as long as the system does; the caller bounds it.

    Raises:
        OSError: the system's reason.
    """
    where = address if isinstance(address, str) else (await _numeric(*address), address[1])
    sock = _make(where)
    with closed_on_failure(sock):
        if isinstance(where, str):
            await _connect_unix(sock, _for_kernel(where))
        else:
            await _connect_tcp(sock, where)
        tune(sock)
    return sock


async def _numeric(host: str, port: int) -> str:
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        try:
            found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except UnicodeError as error:
            raise OSError(f"{host!r} is not the name of a host") from error
        return str(found[0][4][0])


async def _connect_tcp(sock: socket.socket, where: tuple[str, int]) -> None:
    await asyncio.get_running_loop().sock_connect(sock, where)
    if sock.getsockname() == sock.getpeername():
        # TCP may connect a socket to itself when the port is free and of the ephemeral range.
        raise ConnectionRefusedError(errno.ECONNREFUSED, "nobody listens there")


async def _connect_unix(sock: socket.socket, where: str) -> None:
    while True:
        try:
            return sock.connect(where)
        except BlockingIOError:
            # A Unix socket never connects later: this says that the listener's backlog is full, and nothing
            # tells when it no longer is. The loops' own sock_connect takes it for a connection under way.
            await asyncio.sleep(_FULL_BACKLOG_WAIT_S)


class StreamSocket(Protocol):
    """Part of a connected, non-blocking stream socket that links and handshakes use; it may be inside TLS."""

    @property
    def family(self) -> int:
        """Same as ``socket.family``."""

    def send(self, data: Any, /) -> int:
        """Same as ``socket.send``."""

    def sendmsg(self, buffers: Any, /) -> int:
        """Same as ``socket.sendmsg``."""

    def recv_into(self, buffer: Any, /) -> int:
        """Same as ``socket.recv_into``."""

    def recvmsg_into(self, buffers: Any, /) -> Any:
        """Same as ``socket.recvmsg_into``."""

    def shutdown(self, how: int, /) -> None:
        """Same as ``socket.shutdown``."""

    def fileno(self) -> int:
        """Same as ``socket.fileno``."""

    def getsockopt(self, level: int, option: int, nbytes: int, /) -> bytes:
        """Same as ``socket.getsockopt``."""

    def setblocking(self, flag: bool, /) -> None:
        """Same as ``socket.setblocking``."""

    def setsockopt(self, level: int, name: int, value: int, /) -> None:
        """Same as ``socket.setsockopt``."""

    def close(self) -> None:
        """Same as ``socket.close``."""


@dataclass(frozen=True, slots=True, eq=False)
class Connection:
    """Connection after its handshake: both ends have proven their identity, and share keys. Its holder closes it."""

    sock: StreamSocket
    keys: Keys = field(repr=False)

    @property
    def plain(self) -> socket.socket:
        """The socket itself, over which descriptors can be passed; never inside TLS.

        Raises:
            InternalError: it is inside TLS.
        """
        if not isinstance(self.sock, socket.socket):
            raise InternalError("descriptors cannot be passed inside TLS")
        return self.sock

    @property
    def is_local(self) -> bool:
        """Whether its bytes stay in the kernel of this host."""
        return self.sock.family == socket.AF_UNIX

    def close(self) -> None:
        """Close the socket."""
        self.sock.close()


async def send_all(sock: StreamSocket, data: bytes) -> None:
    """Send all of ``data``, waiting whenever the socket is full. Raises `OSError`: the system's reason."""
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[sock.send(rest) :]
        except (BlockingIOError, InterruptedError):
            await writable(sock.fileno())


async def receive_exactly(sock: StreamSocket, nbytes: int) -> bytearray:
    """Read the next ``nbytes``, and not one more.

    Raises:
        EOFError: the other side closed the connection before.
        OSError: the system's reason.
    """
    data = bytearray(nbytes)
    rest = memoryview(data)
    while rest:
        try:
            got = sock.recv_into(rest)
        except (BlockingIOError, InterruptedError):
            await readable(sock.fileno())
            continue
        if not got:
            raise EOFError
        rest = rest[got:]
    return data


@contextmanager
def closed_on_failure(sock: StreamSocket) -> Iterator[None]:
    """Close the socket on any exception within, ``CancelledError`` included."""
    try:
        yield
    except BaseException:
        sock.close()
        raise


@contextmanager
def told_as_lost(when: str) -> Iterator[None]:
    """Convert the end of a connection within to a ``TransportError``: lost, or closed, ``when``, with the reason."""
    try:
        yield
    except TransportError:  # an OSError itself, with all details
        raise
    except OSError as error:
        raise ConnectionEnded(f"lost {when}: {why_failed(error)}") from error
    except EOFError:
        raise ConnectionEnded(f"the other side closed the connection {when}") from None


def broken(peer: int, error: OSError) -> TransportError:
    """Return the error of a link whose connection to rank ``peer`` failed."""
    failure = TransportError(f"the connection to rank {peer} broke: {why_failed(error)}")
    failure.__cause__ = error
    return failure


def is_silent_host(error: BaseException) -> bool:
    """Return whether a connection broke (see `broken`) because the peer's host stopped answering (see `watch`)."""
    cause = error.__cause__
    return isinstance(cause, OSError) and cause.errno == errno.ETIMEDOUT


def has_no_listener(errors: Sequence[OSError]) -> bool:
    """Return whether these failures to connect, one per address, show that the process is gone."""
    gone = {errno.ECONNREFUSED, errno.ENOENT}
    return bool(errors) and all(error.errno in gone for error in errors)
