"""Place of this process in its world, as the environment of a launcher describes it.

A finder (see `finders`) returns one of three: the world; `Absent`, if its launcher did not start this process; or
`Incomplete`, if it seems to have and the variables do not tell the place. Variables that contradict each other raise.

If the launcher serves no store, rank 0 does, at ``KFCOMM_PORT``, else at a port derived from the job: all its ranks
derive the same one.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from kfcomm.common.arguments import hint, plain_text
from kfcomm.common.sizes import seconds_of
from kfcomm.errors import ConfigError
from kfcomm.rendezvous.host import LOOPBACK

DEFAULT_PORT = 29600
MAX_RANKS = 1 << 16
ARGUMENTS, KFCOMM, ALONE = "arguments", "kfcomm", "alone"
"""Sources of rank and size besides the other finders, whose names are sources as well."""

_MAX_SHOWN = 80

Environ = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class FoundWorld:
    """Rank and size from one source."""

    source: str
    rank: int
    size: int
    local: tuple[int, int] | None  # rank and number of processes on this host; None if unknown
    store: tuple[str, int] | None  # host and port at which rank 0 serves the store; None if unknown
    because: str  # variables and their values, for messages

    def __post_init__(self) -> None:
        _check_rank(self.source, "rank", self.rank, self.size)
        if self.local is not None:
            _check_rank(self.source, "local rank", *self.local)

    def check_local(self) -> None:
        """Check the local size of an initial process. Raises `ConfigError`: it exceeds the size."""
        if self.local is not None and self.local[1] > self.size:
            raise ConfigError(f"{self.source}: local size {self.local[1]} exceeds size {self.size} ({self.because})")

    @property
    def is_one_host(self) -> bool:
        """Whether all ranks are known to be on this host."""
        return self.local is not None and self.local[1] == self.size


def _check_rank(source: str, name: str, rank: int, size: int) -> None:
    if not 1 <= size <= MAX_RANKS:
        raise ConfigError(f"{source}: size {size} must be from 1 to {MAX_RANKS}")
    if not 0 <= rank < size:
        raise ConfigError(f"{source}: {name} {rank} must be from 0 to {size - 1}, below the size {size}")


@dataclass(frozen=True, slots=True)
class Absent:
    """The launcher did not start this process as one of several."""

    why: str


@dataclass(frozen=True, slots=True)
class Incomplete:
    """Variables of a launcher that do not tell the place of this process; ``remedy`` says what to do."""

    why: str
    remedy: str


Outcome = FoundWorld | Absent | Incomplete


def integer(environ: Environ, name: str, low: int, high: int) -> int:
    """The variable ``name`` as an integer from ``low`` to ``high``.

    Raises:
        ConfigError: invalid; names the variable, its value and the allowed range.
    """
    text = environ[name].strip()
    # long numbers are refused unparsed: int() is quadratic in the number of digits
    if re.fullmatch(r"-?[0-9]{1,12}", text) and low <= int(text) <= high:
        return int(text)
    raise ConfigError(f"{name}={environ[name]!r} must be an integer from {low} to {high}")


def both(environ: Environ, rank: str, size: str) -> tuple[int, int]:
    """A rank and the size that bounds it. Raises `ConfigError`: one is missing or invalid."""
    for name, other in ((rank, size), (size, rank)):
        if name not in environ:
            raise ConfigError(f"{other}={environ[other]!r} is set but {name} is not; set both or neither")
    num_ranks = integer(environ, size, 1, MAX_RANKS)
    return integer(environ, rank, 0, num_ranks - 1), num_ranks


def pair(environ: Environ, rank: str, size: str) -> tuple[int, int] | None:
    """A rank and its size if both are set, else None."""
    return both(environ, rank, size) if rank in environ and size in environ else None


def within(environ: Environ, rank: str) -> tuple[int, int] | None:
    """A launcher's rank, and the size that the user gives as ``KFCOMM_SIZE``; None without that."""
    return pair(environ, rank, "KFCOMM_SIZE")


def store_port(environ: Environ, otherwise: int) -> int:
    """``KFCOMM_PORT``, or another port without it."""
    return integer(environ, "KFCOMM_PORT", 1, 65535) if "KFCOMM_PORT" in environ else otherwise


def port_beside(environ: Environ, name: str) -> int:
    """The port after that of torch's store, which is the variable ``name``."""
    return beside(integer(environ, name, 1, 65535))


def beside(port: int) -> int:
    """The port after another one."""
    return port + 1 if port < 65535 else port - 1


def port_of(job: str | None) -> int:
    """A port from 20000 to 29999 that follows from a job's name."""
    # below 32768, where Linux begins to hand out ports to clients
    return DEFAULT_PORT if job is None else 20000 + zlib.crc32(job.encode()) % 10000


def local_store(environ: Environ, job: str | None) -> tuple[str, int]:
    """Address of the store of a job on this host."""
    return LOOPBACK, store_port(environ, port_of(job))


def quote(environ: Environ, *names: str) -> str:
    """Variables and the beginnings of their values, for messages; unset ones are left out."""
    return ", ".join(f"{name}={_cut(environ[name])}" for name in names if name in environ)


def _cut(value: str) -> str:
    return value if len(value) <= _MAX_SHOWN else f"{value[:_MAX_SHOWN]}..."


def lacking(environ: Environ, needed: Sequence[str], *others: str) -> str:
    """Say that needed variables are missing, after those (``others`` too) that are set; empty if all are set."""
    missing = [name for name in needed if name not in environ]
    if not missing:
        return ""
    verb = "is" if len(missing) == 1 else "are"
    return f"{quote(environ, *needed, *others)} is set but {' and '.join(missing)} {verb} not"


class Reader(NamedTuple):
    """Looks up one setting: the argument, else the variable, else the default."""

    environ: Mapping[str, str]
    given: Mapping[str, Any]

    def name(self, setting: str) -> str:
        """Name by which a setting was given, for messages."""
        return setting if setting in self.given else f"KFCOMM_{setting.upper()}"

    def raw(self, setting: str) -> Any:
        """Return what was given, unchecked; None if nothing was."""
        if setting in self.given:
            return self.given[setting]
        return self.environ.get(f"KFCOMM_{setting.upper()}") or None

    def optional(self, setting: str) -> str | None:
        """Return a text; None if nothing was given."""
        value = self.raw(setting)
        if value is not None and (not isinstance(value, str) or not value.strip() or not value.isprintable()):
            raise ConfigError(f"{self.name(setting)}={value!r} must be a text")
        return None if value is None else plain_text(value)

    def text(self, setting: str, default: str) -> str:
        """Return a text."""
        value = self.optional(setting)
        return default if value is None else value

    def choice(self, setting: str, allowed: tuple[str, ...]) -> str:
        """Return one of these texts, by default the first."""
        value = self.text(setting, allowed[0])
        if value not in allowed:
            near = hint(value, allowed)
            raise ConfigError(f"{self.name(setting)}={value!r} must be one of {', '.join(allowed)}{near}")
        return value

    def flag(self, setting: str, *, default: bool) -> bool:
        """Return whether it is on."""
        value = self.raw(setting)
        if value is None:
            return default
        if value not in (True, False, "0", "1"):
            raise ConfigError(f"{self.name(setting)}={value!r} must be 0 or 1")
        return value in (True, "1")

    def port(self, setting: str) -> int | None:
        """Return a port; None if nothing was given."""
        value = self.raw(setting)
        try:
            port = None if value is None else int(value)
        except (TypeError, ValueError):
            port = 0
        if port is not None and (isinstance(value, (bool, float)) or not 0 < port < 1 << 16):
            raise ConfigError(f"{self.name(setting)}={value!r} must be a port, from 1 to 65535")
        return port

    def ports(self, setting: str) -> tuple[int, int] | None:
        """Return the first and the last port of a range; None if nothing was given."""
        value = self.optional(setting)
        if value is None:
            return None
        match = re.fullmatch(r"([0-9]{1,5})(?::([0-9]{1,5}))?", value)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
        if not 0 < first <= last < 1 << 16:
            raise ConfigError(f"{self.name(setting)}={value!r} must be FIRST:LAST, ports from 1 to 65535")
        return first, last

    def seconds(self, setting: str, default: float) -> float:
        """Return a number of seconds above 0."""
        value = self.raw(setting)
        try:
            given = float(value) if isinstance(value, str) else value
            seconds = default if given is None else seconds_of(given)
        except ValueError:
            seconds = math.nan
        if not 0 < seconds < math.inf:
            raise ConfigError(f"{self.name(setting)}={value!r} must be a number of seconds above 0")
        return seconds
