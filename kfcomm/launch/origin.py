"""Origin of a job: identifies it to users, and to commands that may change it."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

from kfcomm.common.sizes import shortened

_MAX_COMMAND = 60


@dataclass(frozen=True, slots=True)
class Origin:
    """The launcher of a job.

    Attributes:
        pid: of its process.
        command: of every rank; empty where it is not known.
        directory: in which it was started.
        session: of processes that it belongs to, those of one terminal for example.
        began_s: when, by the wall clock.
    """

    pid: int
    command: tuple[str, ...]
    directory: str
    session: int
    began_s: float

    @classmethod
    def here(cls, command: Sequence[str] = ()) -> Self:
        """Origin of a job of this process that begins now."""
        return cls(os.getpid(), tuple(command), _directory(), os.getsid(0), time.time())

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Self | None:
        """Parse the result of ``as_json``, also after a JSON round trip; None for anything else."""
        try:
            return cls(
                int(record["pid"]), tuple(map(str, record["command"])), str(record["directory"]),
                int(record["session"]), float(record["began_s"]),
            )  # fmt: skip
        except (KeyError, TypeError, ValueError):
            return None

    def as_json(self) -> dict[str, Any]:
        """The same as a mapping that ``json.dumps`` takes."""
        return asdict(self)

    @property
    def nearness(self) -> int:
        """2 if it was started in this process's working directory, 1 if at its terminal (in its session), else 0."""
        if self.directory == _directory():
            return 2
        # 0 is that of all whose session began outside of their container
        return int(self.session == os.getsid(0) != 0)

    def __str__(self) -> str:
        age = _age(time.time() - self.began_s)
        return f"{command_line(self.command)}, in {self.directory}, started {age} ago, pid {self.pid}"


def command_line(command: Sequence[str]) -> str:
    """A command as it may have been typed, on one line, cut if it is long."""
    return shortened(shlex.join(command), _MAX_COMMAND)


def _directory() -> str:
    try:
        return os.path.realpath(os.getcwd())
    except OSError:  # it was removed
        return ""


def _age(seconds: float) -> str:
    for unit, length_s in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length_s:
            return f"{seconds // length_s:.0f} {unit}"
    return f"{max(seconds, 0.0):.0f} s"
