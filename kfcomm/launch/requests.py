"""What is asked of a running elastic job from outside: another size, and how it stands.

Its launcher listens at an abstract Unix socket, whose name holds the user and the job. Who connects sends a line and
gets one: ``size N``, or ``status``. Only processes of the same user are answered (SO_PEERCRED, unix(7)).
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Self

from kfcomm.errors import ConfigError
from kfcomm.rendezvous.farewell import uid_of_peer

PREFIX = "kfcomm-run"
PATIENCE_S = 5.0
MAX_LINE_NBYTES = 1 << 16

Answer = Callable[[str], Awaitable[dict[str, Any]]]


class Requests:
    """Answers for one job. ``answer`` gets a line and returns what is told; ``ConfigError`` is told as such."""

    def __init__(self, job: str, answer: Answer) -> None:
        self._answer = answer
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(f"\0{PREFIX}/{os.getuid()}/{job}")
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_unix_server(self._attend, sock=self._listener, limit=MAX_LINE_NBYTES)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    async def _attend(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if uid_of_peer(writer.get_extra_info("socket")) != os.getuid():
                return
            async with asyncio.timeout(PATIENCE_S):
                line = (await reader.readline()).decode(errors="replace").strip()
                try:
                    told = await self._answer(line)
                except ConfigError as error:
                    told = {"error": str(error)}
                writer.write(json.dumps(told).encode() + b"\n")
                await writer.drain()
        except (OSError, TimeoutError, ValueError):
            pass  # whoever asked is gone, or said too much
        finally:
            writer.close()


def jobs(listing: str | None = None) -> list[str]:
    """The elastic jobs of this user on this host, by name."""
    if listing is None:
        try:
            listing = Path("/proc/net/unix").read_text(errors="replace")
        except OSError:
            return []
    begin = f"@{PREFIX}/{os.getuid()}/"
    names = (line.split(maxsplit=7)[-1] for line in listing.splitlines()[1:])
    return sorted({name.removeprefix(begin) for name in names if name.startswith(begin)})


def ask(asked: str | None, line: str) -> dict[str, Any]:
    """Ask the job that is meant.

    Args:
        asked: its name, or how that begins; None if there is but one.
        line: what is asked.

    Raises:
        ConfigError: there is no such job, or more than one, or it refuses.
    """
    found = [name for name in jobs() if asked is None or name.startswith(asked)]
    if len(found) != 1:
        which = "" if asked is None else f" {asked!r}"
        there = f"; there are {', '.join(found)}" if found else ""
        raise ConfigError(f"{len(found) or 'no'} elastic jobs{which} of yours run on this host{there}")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(PATIENCE_S)
        try:
            sock.connect(f"\0{PREFIX}/{os.getuid()}/{found[0]}")
            if uid_of_peer(sock) != os.getuid():
                raise ConfigError(f"job {found[0]} is another user's")
            sock.sendall(line.encode() + b"\n")
            told: dict[str, Any] = json.loads(sock.makefile().readline() or "{}")
        except (OSError, ValueError) as error:
            raise ConfigError(f"job {found[0]} does not answer: {error}") from error
    if "error" in told or not told:
        raise ConfigError(told.get("error", f"job {found[0]} has ended"))
    return told
