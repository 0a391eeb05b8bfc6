"""A connection whose handshake is over: both ends have proven who they are, and share keys."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field

from kfcomm.core.handshake import Keys


@dataclass(frozen=True, slots=True, eq=False)
class Connection:
    """See the module; whoever has it closes it."""

    sock: socket.socket
    keys: Keys = field(repr=False)

    @property
    def is_local(self) -> bool:
        """Whether the bytes never leave this host's kernel."""
        return self.sock.family == socket.AF_UNIX

    def close(self) -> None:
        """Close it."""
        self.sock.close()
