"""Links of chosen rates between the ranks of one machine, made by the kernel: no right and no second machine is needed.

Linux paces a TCP connection by ``SO_MAX_PACING_RATE`` (socket(7)). Each rank sets it on its own connections, and kfcomm
knows nothing of it. A link that becomes slow stands for a cable that others use, too.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Iterator
from typing import Any, TypeAlias

SO_MAX_PACING_RATE = 47  # asm-generic/socket.h; the socket module has no name for it

End: TypeAlias = tuple[str, int]


class PacedLinks:
    """The TCP connections of this process, each held to a rate in the direction away from it.

    Args:
        bytes_per_s: of each.
    """

    def __init__(self, bytes_per_s: int) -> None:
        self._bytes_per_s = bytes_per_s
        self._slow: dict[tuple[End, End], int] = {}

    def hold(self) -> None:
        """Hold all connections that there are now to their rates; some 0.1 ms."""
        for one in _connections():
            with one:
                rate = self._slow.get(_ends(one), self._bytes_per_s)
                one.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, struct.pack("I", rate))

    def slow_down(self, comm: Any, ranks: tuple[int, int], bytes_per_s: int) -> None:
        """Set the rate of the connections between two ranks; called on every rank of ``comm``."""
        with contextlib.ExitStack() as stack:
            mine = [_ends(stack.enter_context(one)) for one in _connections()]
        everybodys = comm.all_gather_object([list(own) for own, _ in mine], "ends of connections")
        if comm.rank in ranks:
            (other,) = (rank for rank in ranks if rank != comm.rank)
            theirs = {tuple(end) for end in everybodys[other]}
            self._slow |= {ends: bytes_per_s for ends in mine if ends[1] in theirs}
            self.hold()

    def recover(self) -> None:
        """All links are as they were at first."""
        self._slow.clear()
        self.hold()


def _ends(connection: socket.socket) -> tuple[End, End]:
    """This process's and the other's."""
    own, other = connection.getsockname(), connection.getpeername()
    return (own[0], own[1]), (other[0], other[1])


def _connections() -> Iterator[socket.socket]:
    """A duplicate of each TCP connection of this process."""
    for name in os.listdir("/proc/self/fd"):
        try:
            duplicate = os.dup(int(name))
        except OSError:  # that of the folder itself is closed by now
            continue
        try:
            found = socket.socket(fileno=duplicate)
        except OSError:  # no socket
            os.close(duplicate)
            continue
        try:
            if found.family not in (socket.AF_INET, socket.AF_INET6):
                raise OSError
            found.getpeername()
        except OSError:  # none of TCP, or not connected
            found.close()
        else:
            yield found
