"""Requests to a running elastic job from outside: its size and its status.

Its launcher listens at an abstract Unix socket, whose name holds the user and the job. A client sends a line, ``size
N`` or ``status``, and gets a line of JSON, which includes the origin of the job. Only processes of the same user are
answered (SO_PEERCRED, unix(7)).
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import socket
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

from kfcomm.common import sockets
from kfcomm.common.sizes import shortened
from kfcomm.common.version import difference, versions
from kfcomm.errors import ConfigError

_MAX_COMMAND = 60
STATUS_FIELDS = ("job", "size", "least", "most", "restarts", "running", "ended", "spares", "hosts", "slots")
"""Fields of an answer that `kfcomm status` needs; all versions have told them."""
SIZE_FIELDS = ("job", "size", "running", "is_kept")
"""Those that `kfcomm resize` needs."""


@dataclass(frozen=True, slots=True)
class Origin:
    """The launcher of a job."""

    pid: int  # of its process
    command: tuple[str, ...]  # of every rank; empty if unknown
    directory: str  # working directory at its start
    session: int  # its session of processes, such as those of one terminal
    began_s: float  # start time, by the wall clock

    @classmethod
    def here(cls, command: Sequence[str] = ()) -> Self:
        """Origin of a job of this process that begins now."""
        return cls(os.getpid(), tuple(command), _directory(), os.getsid(0), time.time())

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Self | None:
        """Parse the mapping of its fields, also after a JSON round trip; None for anything else."""
        try:
            return cls(
                int(record["pid"]), tuple(map(str, record["command"])), str(record["directory"]),
                int(record["session"]), float(record["began_s"]),
            )  # fmt: skip
        except (KeyError, TypeError, ValueError):
            return None

    @property
    def nearness(self) -> int:
        """2 if it was started in this process's working directory, 1 if at its terminal (in its session), else 0."""
        if self.directory == _directory():
            return 2
        # 0 is that of all whose session began outside of their container
        return int(self.session == os.getsid(0) != 0)

    @property
    def age_s(self) -> float:
        """Seconds since its start."""
        return time.time() - self.began_s

    def __str__(self) -> str:
        age = shown_age(self.age_s)
        return f"{command_line(self.command)}, in {self.directory}, started {age} ago, pid {self.pid}"


def command_line(command: Sequence[str]) -> str:
    """Command as typed, on one line, shortened."""
    return shortened(shlex.join(command), _MAX_COMMAND)


def _directory() -> str:
    try:
        return os.path.realpath(os.getcwd())
    except OSError:  # the directory was removed
        return ""


def shown_age(seconds: float) -> str:
    """Age of a job in its largest unit."""
    for unit, length_s in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length_s:
            return f"{seconds // length_s:.0f} {unit}"
    return f"{max(seconds, 0.0):.0f} s"


PREFIX = "kfcomm-run"
PATIENCE_S = 5.0
MAX_LINE_NBYTES = 1 << 16

Answer = Callable[[str], Awaitable[dict[str, Any]]]


class LauncherRequests:
    """Answers for one job. A ``ConfigError`` of ``answer``, which gets a line, is sent to the client."""

    def __init__(self, job: str, answer: Answer, command: Sequence[str] = ()) -> None:
        self._answer = answer
        self._origin = Origin.here(command)
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
            if not sockets.credentials_of(writer.get_extra_info("socket")).is_same_user:
                return
            async with asyncio.timeout(PATIENCE_S):
                line = (await reader.readline()).decode(errors="replace").strip()
                try:
                    told = {**await self._answer(line), "origin": asdict(self._origin)}
                except ConfigError as error:
                    told = {"error": str(error)}
                told["versions"] = versions()
                writer.write(json.dumps(told).encode() + b"\n")
                await writer.drain()
        except (OSError, TimeoutError, ValueError):
            pass  # the client is gone, or its line is too long
        finally:
            writer.close()


def jobs(listing: str | None = None) -> list[str]:
    """The elastic jobs of this user on this host, by name."""
    return sorted(set(sockets.own_names(PREFIX, listing)))


def find(asked: str | None) -> str:
    """Name of the job that ``asked`` names or begins; without it, of the only one or the one that was started nearest.

    Raises:
        ConfigError: no job or more than one matches; all jobs are listed.
    """
    there = jobs()
    found = there if asked is None else sockets.matching(there, asked)
    if asked is None and len(found) > 1:
        nearness = {name: _nearness(name) for name in found}
        nearest = [name for name in found if nearness[name] == max(nearness.values()) > 0]
        found = nearest if len(nearest) == 1 else found
    if len(found) == 1:
        return found[0]
    if not there:
        raise ConfigError("no elastic job of yours runs on this host (kfcomm run --elastic MIN:MAX starts one)")
    if not found:
        raise ConfigError(f"no elastic job {asked!r} of yours runs on this host; there are: {_listed(there)}")
    which = "" if asked is None else f" {asked!r}"
    raise ConfigError(f"{len(found)} elastic jobs{which} of yours run on this host, name one: {_listed(found)}")


def ask(job: str, line: str, needs: Collection[str] = STATUS_FIELDS) -> dict[str, Any]:
    """Send a request to a job; return its answer.

    Raises:
        ConfigError: the job does not answer, or refuses; or its answer lacks one of the fields that this needs.
    """
    try:
        answer = sockets.ask(f"{PREFIX}/{os.getuid()}/{job}", line.encode() + b"\n", PATIENCE_S)
        told: dict[str, Any] = json.loads(answer or b"{}")
    except (OSError, ValueError) as error:
        raise ConfigError(f"job {job} does not answer: {error}") from error
    if answer is None:
        raise ConfigError(f"job {job} is another user's")
    note = difference(told.get("versions"))
    if "error" in told or not told:
        why = f"; {note}" if note and "versions" in told else ""
        raise ConfigError(told.get("error", f"job {job} has ended") + why)
    if lacking := set(needs) - told.keys():
        raise ConfigError(f"job {job} does not tell {', '.join(sorted(lacking))}: {note}")
    return told


def titled(told: dict[str, Any]) -> str:
    """Title of the job that gave this answer: its name and origin."""
    origin = Origin.from_json(told.get("origin", {}))
    return f"job {told['job']}" + (f" ({origin})" if origin is not None else "")


def _nearness(name: str) -> int:
    try:
        origin = Origin.from_json(ask(name, "status").get("origin", {}))
    except ConfigError:  # the job has just ended
        return 0
    return 0 if origin is None else origin.nearness


def _listed(names: Sequence[str]) -> str:
    found = []
    for name in names:
        try:
            told = ask(name, "status")
            found.append(f"{titled(told)}, {len(told['running'])} ranks")
        except ConfigError:
            found.append(f"job {name} (no answer)")
    return "".join(f"\n  {one}" for one in found)
