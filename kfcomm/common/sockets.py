"""Sockets: waiting until a descriptor is ready, accepting connections, and the Unix sockets of this host.

Invariants: an accepted connection is never lost, also when the task is cancelled as it arrives. A flood of connections
is accepted slowly, so that it takes little processor time. One descriptor is kept in reserve: when all others are used,
a connection is still told why it is closed.
"""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import socket
import struct
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from kfcomm.errors import ConfigError

PAUSE_S = 0.05
"""After a connection that could not be accepted: it stays in the backlog, and asking again at once would spin."""
FLOOD_PAUSE_S = 0.001
"""After each connection of a flood. A connection costs some 0.15 ms; a full backlog is through within five seconds."""
USED_UP = {errno.EMFILE, errno.ENFILE}

RESERVE = 64
"""Descriptors for what a program opens besides."""


async def accept_all(
    listening: socket.socket, begin: Callable[[socket.socket], bool], *,
    turn_away: Callable[[socket.socket], object], failed: Callable[[OSError], object],
) -> None:  # fmt: skip
    """Accept until cancelled.

    Args:
        listening: a non-blocking socket that listens.
        begin: gets each connection, and owns it; says whether there are too many.
        turn_away: gets a connection that is closed for lack of descriptors, to tell the peer why.
        failed: told why a connection could not be accepted.
    """
    reserve: int | None = _reserved()
    try:
        while True:
            try:
                sock = await _accept(listening)
            except ConnectionError:
                continue  # it was gone before it was accepted
            except OSError as error:
                failed(error)
                if error.errno in USED_UP and reserve is not None:
                    os.close(reserve)
                    _turn_one_away(listening, turn_away)
                    reserve = _reserved()
                await asyncio.sleep(PAUSE_S)
                continue
            await asyncio.sleep(FLOOD_PAUSE_S if begin(sock) else 0)  # 0 yields as well: accepting need not
    finally:
        if reserve is not None:
            os.close(reserve)


def host_of(sock: socket.socket) -> str:
    """The address of the other side, without its port; empty for a Unix socket, or for one that has gone."""
    try:
        name = sock.getpeername()
    except OSError:
        return ""
    return name[0] if isinstance(name, tuple) else ""


async def _accept(listening: socket.socket) -> socket.socket:
    """The next connection. Unlike the loops' sock_accept, it loses none when it is cancelled as one arrives."""
    while True:
        try:
            return listening.accept()[0]
        except (BlockingIOError, InterruptedError):
            await readable(listening.fileno())


def _turn_one_away(listening: socket.socket, turn_away: Callable[[socket.socket], object]) -> None:
    try:
        sock = listening.accept()[0]
    except OSError:
        return
    with sock:
        sock.setblocking(False)
        turn_away(sock)


def _reserved() -> int | None:
    try:
        return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None


def raise_limit(count: int) -> int:
    """Have this process, and what it starts from now on, be allowed so many; returns how many it is allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= count:
        return count if soft == resource.RLIM_INFINITY else soft
    wanted = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if wanted > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return max(soft, wanted)


def raise_limit_by(count: int) -> int:
    """Raise the limit to this many more descriptors than are open now; see `raise_limit`."""
    return raise_limit(len(os.listdir("/proc/self/fd")) + count)


def make_room(count: int, what: str) -> None:
    """Have this process be allowed so many more descriptors than are open now, which ``what`` needs.

    Raises:
        ConfigError: the hard limit is too low.
    """
    allowed = raise_limit_by(count)
    used = len(os.listdir("/proc/self/fd"))
    if allowed < used + count:
        raise ConfigError(
            f"{what} needs {count} open files beside the {used} of this process: the hard limit is {allowed}; "
            f"{HOW_TO_RAISE}"
        )


HOW_TO_RAISE = "raise it (ulimit -Hn, or nofile in /etc/security/limits.conf), or start fewer ranks on a host"


def why_failed(error: OSError) -> str:
    """Return the system's reason alone, and a remedy if this process has used up its descriptors."""
    # asyncio puts an address in its place, and the numbers of failed look-ups are negative and no errno's
    known = error.errno is not None and error.errno > 0
    reason = os.strerror(error.errno or 0) if known else error.strerror or str(error) or type(error).__name__
    if error.errno != errno.EMFILE:
        return reason
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return f"{reason}: {soft} are allowed here, and the hard limit is {hard}; {HOW_TO_RAISE}"


async def readable(descriptor: int) -> None:
    """Wait until a descriptor can be read: or accepted from; of a process, until it has ended."""
    loop = asyncio.get_running_loop()
    waiter: asyncio.Future[None] = loop.create_future()
    loop.add_reader(descriptor, _wake, waiter)
    try:
        await waiter
    finally:
        loop.remove_reader(descriptor)


async def writable(descriptor: int) -> None:
    """Wait until a descriptor can be written, or never again."""
    loop = asyncio.get_running_loop()
    waiter: asyncio.Future[None] = loop.create_future()
    loop.add_writer(descriptor, _wake, waiter)
    try:
        await waiter
    finally:
        loop.remove_writer(descriptor)


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


SOCKETS = "/proc/net/unix"
_UCRED = struct.Struct("iII")
_LISTENS = 0x10000  # __SO_ACCEPTCON, of the flags in /proc/net/unix
MAX_ANSWER_NBYTES = 1 << 26
"""Of one answer; statistics of ten thousand keys take 2 MB."""


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


def own_names(prefix: str, listing: str | None = None) -> list[str]:
    """Return what follows ``PREFIX/UID/`` in the abstract names at which processes of this user listen.

    Args:
        prefix: of the names.
        listing: the text of /proc/net/unix; read if omitted. Other systems than Linux do not have it: no names.
    """
    if listing is None:
        try:
            listing = Path(SOCKETS).read_text(errors="replace")
        except OSError:
            return []
    rows = (line.split(maxsplit=7) for line in listing.splitlines()[1:])
    begin = f"@{prefix}/{os.getuid()}/"
    names = (row[7] for row in rows if len(row) == 8 and int(row[3], 16) & _LISTENS)
    return [name.removeprefix(begin) for name in names if name.startswith(begin)]


def matching(names: Iterable[str], asked: str) -> list[str]:
    """Return the names of jobs that are meant: the whole name, else those without their number, else how they begin."""
    there = list(names)
    whole = [name for name in there if name == asked]
    return (
        whole
        or [name for name in there if name.rpartition("-")[0] == asked]
        or [name for name in there if name.startswith(asked)]
    )


def ask(name: str, question: bytes, timeout_s: float) -> bytes | None:
    """Ask a process that listens at an abstract name; return its answer, up to the end of the connection.

    None if it belongs to another user: anyone may listen there, and only processes of this user are believed.

    Raises:
        OSError: no process listens there, or it takes longer than ``timeout_s`` for any part of its answer.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(timeout_s)
        sock.connect("\0" + name)
        if not credentials_of(sock).is_same_user:
            return None
        sock.sendall(question)
        answer = bytearray()
        while len(answer) <= MAX_ANSWER_NBYTES and (part := sock.recv(1 << 20)):
            answer += part
        return bytes(answer)
