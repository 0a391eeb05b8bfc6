"""TCP socket inside TLS with the interface of a plain one, as far as links and handshakes use it.

Invariants:

- A call that can do nothing now raises ``BlockingIOError``, as that of a plain socket does.
- Bytes that ``send`` reports as sent are on their way, and no others. If the kernel takes only a part of a piece, its
  last byte is reported as unsent: so the caller sends the rest of that frame before any other, and calls again as soon
  as the socket is writable.
- ``recv_into`` fills the buffer with everything that has arrived. If it is full, more may be ``pending``, which the
  kernel does not signal.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator, Sequence
from typing import Any

from kfcomm.common.sockets import readable, writable
from kfcomm.transports.sockets import closed_on_failure

PIECE_NBYTES = 1 << 16
"""Bytes encrypted by one call, four records of TLS; copied once if the socket is full."""

_NOT_NOW = (ssl.SSLWantReadError, ssl.SSLWantWriteError)


class TlsSocket:
    """One TCP connection inside TLS.

    Args:
        sock: a connected non-blocking TCP socket, which belongs to this object from now on.
        context: of this side.
        is_server: which side this is.
    """

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, *, is_server: bool) -> None:
        self.family = sock.family
        self._sock = context.wrap_socket(sock, server_side=is_server, do_handshake_on_connect=False)
        self._unsent: bytes | None = None

    async def shake_hands(self) -> None:
        """The handshake of TLS.

        Raises:
            OSError: it failed.
        """
        while True:
            try:
                return self._sock.do_handshake()
            except ssl.SSLWantReadError:
                await readable(self.fileno())
            except ssl.SSLWantWriteError:
                await writable(self.fileno())

    def send(self, data: Any) -> int:
        """Send as much of ``data``, which is not empty, as the socket takes; returns bytes sent, see the module."""
        moved = 0
        if self._unsent is not None:
            try:
                self._sock.send(self._unsent)
            except _NOT_NOW:
                raise BlockingIOError from None
            self._unsent = None
            moved = 1
        view = memoryview(data)
        while moved < len(view):
            piece = view[moved : moved + PIECE_NBYTES]
            try:
                self._sock.send(piece)
            except _NOT_NOW:
                self._unsent = bytes(piece)  # to be offered again, byte for byte
                return moved + len(piece) - 1
            moved += len(piece)
        return moved

    def sendmsg(self, buffers: Sequence[Any]) -> int:
        """Send several buffers; small ones share a record."""
        moved = 0
        for data in _joined(buffers):
            moved += self.send(data)
            if self._unsent is not None:
                break
        return moved

    def recv_into(self, buffer: Any) -> int:
        """Receive as much as has arrived and fits; returns 0 at the end."""
        view = memoryview(buffer)
        moved = 0
        while moved < len(view):
            try:
                got = self._sock.recv_into(view[moved:])
            except _NOT_NOW:
                if not moved:
                    raise BlockingIOError from None
                break
            if not got:
                break
            moved += got
        return moved

    def recvmsg_into(self, buffers: Sequence[Any]) -> tuple[int]:
        """Receive into several buffers in turn; of the result of ``socket.recvmsg_into`` only the number is used."""
        moved = 0
        for buffer in buffers:
            try:
                got = self.recv_into(buffer)
            except BlockingIOError:
                if not moved:
                    raise
                break
            moved += got
            if got < len(buffer):
                break
        return (moved,)

    def pending(self) -> int:
        """Return the bytes that are decrypted and not received."""
        return self._sock.pending()

    def shutdown(self, how: int) -> None:
        """Shut down the connection below; the last frame marks the end for TLS users."""
        socket.socket.shutdown(self._sock, how)

    def fileno(self) -> int:
        """Return the descriptor, -1 once closed."""
        return self._sock.fileno()

    def setblocking(self, flag: bool) -> None:
        """Check that the socket stays non-blocking."""
        if flag:
            raise ValueError("a socket inside TLS does not block")

    def setsockopt(self, *arguments: Any) -> None:
        """Set an option of the connection below."""
        self._sock.setsockopt(*arguments)

    def close(self) -> None:
        """Close the connection."""
        self._sock.close()


async def secured(sock: socket.socket, context: ssl.SSLContext, *, is_server: bool) -> TlsSocket:
    """Return the same connection inside TLS; closed on failure.

    Raises:
        OSError: the other side does not use TLS, or its certificate is not of this job.
    """
    with closed_on_failure(sock):
        inside = TlsSocket(sock, context, is_server=is_server)
    try:
        await inside.shake_hands()
    except BaseException:
        inside.close()
        raise
    return inside


def _joined(buffers: Sequence[Any]) -> Iterator[Any]:
    """Yield the same bytes in fewer buffers: a head joins the beginning of its payload."""
    small: list[Any] = []
    for buffer in filter(len, buffers):
        if len(buffer) >= PIECE_NBYTES:
            if small:
                yield b"".join(small)
                small = []
            yield buffer
        else:
            small.append(buffer)
    if small:
        yield b"".join(small)
