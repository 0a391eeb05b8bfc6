"""A connection whose handshake is over: both ends have proven who they are, and share keys."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field

from kfcomm.core.handshake import Keys
from kfcomm.errors import InternalError
from kfcomm.transports.sockets import Stream


@dataclass(frozen=True, slots=True, eq=False)
class Connection:
    """See the module; whoever has it closes it."""

    sock: Stream
    keys: Keys = field(repr=False)

    @property
    def plain(self) -> socket.socket:
        """The socket itself, which descriptors can be passed over; never inside TLS.

        Raises:
            InternalError: it is inside TLS.
        """
        if not isinstance(self.sock, socket.socket):
            raise InternalError("descriptors cannot be passed inside TLS")
        return self.sock

    @property
    def is_local(self) -> bool:
        """Whether the bytes never leave this host's kernel."""
        return self.sock.family == socket.AF_UNIX

    def close(self) -> None:
        """Close it."""
        self.sock.close()
