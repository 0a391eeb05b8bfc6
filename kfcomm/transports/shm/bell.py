"""Bell: the one socket by which the peers of a host wake a process, whatever links it has.

A datagram means only that shared memory may have changed. Its content and sender are ignored, so one from an unknown
process costs one look at that memory. A bell with a full queue has datagrams that its owner has yet to read, so the
next one may be dropped.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable

from kfcomm.transports.reactor import Readiness

MAX_ADDRESS_NBYTES = 108
"""Of a Unix socket, unix(7)."""
_RING = b"!"
_MAX_AT_A_TIME = 64


class Bell:
    """Bell of this process; calls ``on_ring`` where the engine runs.

    Raises:
        OSError: the system has no socket to give.
    """

    def __init__(self, reactor: Readiness, on_ring: Callable[[], object]) -> None:
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        try:
            self._sock.bind("")  # the kernel chooses an abstract name that is free
        except BaseException:
            self._sock.close()
            raise
        self.address: bytes = self._sock.getsockname()
        self.descriptor = self._sock.fileno()
        self._reactor = reactor
        self._on_ring = on_ring
        reactor.add_reader(self.descriptor, self._rung)

    def ring(self, address: bytes) -> None:
        """Wake the process with the bell of that address, unless it is gone."""
        with contextlib.suppress(OSError):
            self._sock.sendto(_RING, address)

    def close(self) -> None:
        """Close it. Calling it again does nothing."""
        if self.descriptor >= 0:
            self._reactor.remove_reader(self.descriptor)
            self.descriptor = -1
            self._sock.close()

    def _rung(self) -> None:
        with contextlib.suppress(OSError):
            for _ in range(_MAX_AT_A_TIME):
                self._sock.recv(1)
        self._on_ring()


def is_address(address: bytes) -> bool:
    """Return whether this can be the address of a bell."""
    return 1 < len(address) <= MAX_ADDRESS_NBYTES and address[:1] == b"\0"
