"""Unix sockets of this host: the process at the other end, and the abstract names that are bound."""

from __future__ import annotations

import os
import socket
import struct
from pathlib import Path
from typing import NamedTuple

SOCKETS = "/proc/net/unix"
_UCRED = struct.Struct("iII")
_LISTENS = 0x10000  # __SO_ACCEPTCON, of the flags in /proc/net/unix


class Credentials(NamedTuple):
    """The process at the other end of a Unix socket, as the kernel recorded it (SO_PEERCRED, unix(7))."""

    pid: int
    uid: int
    gid: int

    @property
    def is_same_user(self) -> bool:
        """Whether that process belongs to the user of this one."""
        return self.uid == os.getuid()


def credentials_of(sock: socket.socket) -> Credentials:
    """Return the credentials of the peer of a connected Unix socket."""
    return Credentials(*_UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)))


def listening_names(listing: str | None = None) -> list[str]:
    """Return the abstract names at which processes of this network namespace listen, without their ``@``.

    Args:
        listing: the text of /proc/net/unix; read if omitted. Other systems than Linux do not have it: no names.
    """
    if listing is None:
        try:
            listing = Path(SOCKETS).read_text(errors="replace")
        except OSError:
            return []
    rows = (line.split(maxsplit=7) for line in listing.splitlines()[1:])
    return [row[7].removeprefix("@") for row in rows if len(row) == 8 and int(row[3], 16) & _LISTENS]
