"""The hosts of a bed: what is asked for, and what stands there."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass

from bench.netlab.namespaces import Namespace
from bench.netlab.rates import check_rate
from kfcomm.errors import ConfigError

MAX_HOSTS = 128
"""Each link has a class for every other host."""
PORT = "port"
"""The interface of each host."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True, slots=True)
class HostSpec:
    """A host that is asked for.

    Attributes:
        name: unique in the bed.
        rate: bits per second of its link, in each direction, headers included; None for no limit.
        ranks: how many ranks of a program run there.

    Raises:
        ConfigError: a value cannot work.
    """

    name: str
    rate: float | None = None
    ranks: int = 1

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ConfigError(f"host {self.name!r}: a name is 1 to 64 letters, digits and ._- and begins with no sign")
        if self.rate is not None:
            check_rate(self.rate)
        if self.ranks < 1:
            raise ConfigError(f"host {self.name!r}: ranks={self.ranks} must be at least 1")


@dataclass(frozen=True, slots=True)
class Host:
    """A host that stands there.

    Attributes:
        spec: as asked for.
        address: of its interface ``port``.
        namespace: of its network.
    """

    spec: HostSpec
    address: str
    namespace: Namespace

    @property
    def name(self) -> str:
        """Its name in the bed."""
        return self.spec.name

    def inside(self, *line: str) -> list[str]:
        """The command that runs ``line`` on this host."""
        return self.namespace.inside(*line)

    def ip(self, *arguments: str) -> str:
        """Run iproute2's ``ip`` on this host; what it wrote."""
        return self.namespace.ip(*arguments)


def even(count: int, rate: float | None = None, ranks: int = 1) -> tuple[HostSpec, ...]:
    """``h0``, ``h1``, ...: hosts that are all alike.

    Raises:
        ConfigError: so many cannot be.
    """
    if not 1 <= count <= MAX_HOSTS:
        raise ConfigError(f"{count} hosts: must be 1 to {MAX_HOSTS}, each link has a class for every other host")
    return tuple(HostSpec(f"h{number}", rate, ranks) for number in range(count))


def with_rate(hosts: Sequence[HostSpec], name: str, rate: float | None) -> tuple[HostSpec, ...]:
    """The same hosts, one of them with another rate.

    Raises:
        ConfigError: the host is unknown.
    """
    at = index_of(name, [host.name for host in hosts])
    return (*hosts[:at], dataclasses.replace(hosts[at], rate=rate), *hosts[at + 1 :])


def index_of(name: str, names: Sequence[str]) -> int:
    """Index of ``name`` among ``names``.

    Raises:
        ConfigError: nowhere.
    """
    if name in names:
        return names.index(name)
    near = difflib.get_close_matches(name, names, 1, 0)
    known = ", ".join(names) if len(names) <= 8 else f"{', '.join(names[:3])}, ..., {names[-1]}"
    raise ConfigError(f"no host {name!r}; there are {known}" + (f"; did you mean {near[0]!r}?" if near else ""))
