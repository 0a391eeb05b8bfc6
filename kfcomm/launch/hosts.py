"""The hosts of a job, and which of its ranks are on this one.

``10.0.0.1:4,10.0.0.2:4`` are two hosts with four ranks each; the order of the hosts gives the ranks. The same
list is given to the launcher on every host; each finds its own entry by its addresses.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from dataclasses import dataclass

from kfcomm.errors import ConfigError
from kfcomm.rendezvous.interfaces import LOOPBACK, interfaces
from kfcomm.rendezvous.worlds import MAX_RANKS

_MAX_SHOWN = 80


@dataclass(frozen=True, slots=True)
class Host:
    """One entry of the list: the IP address of a host and its number of ranks."""

    address: str
    num_ranks: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Who runs where.

    Attributes:
        hosts: all hosts, in the order of their ranks.
        here: position of this host among them.
    """

    hosts: tuple[Host, ...]
    here: int = 0

    def with_late(self, address: str) -> Plan:
        """The plan of a host that comes later: as seen there, it is one more, with no rank at the beginning."""
        return Plan((*self.hosts[: self.num_first], Host(address, 0)), self.num_first)

    @property
    def is_late(self) -> bool:
        """Whether the job begins without this host."""
        return self.hosts[self.here].num_ranks == 0

    @property
    def num_first(self) -> int:
        """With how many hosts it begins."""
        return len(self.hosts) - self.is_late

    @classmethod
    def single(cls, num_ranks: int) -> Plan:
        """All ranks on this host, over loopback."""
        return cls((Host(LOOPBACK, num_ranks),))

    @property
    def size(self) -> int:
        """Number of ranks in the world."""
        return sum(host.num_ranks for host in self.hosts)

    @property
    def ranks(self) -> range:
        """The ranks on this host."""
        return self.ranks_of(self.here)

    def ranks_of(self, host: int) -> range:
        """The ranks on the host at this position."""
        first = sum(each.num_ranks for each in self.hosts[:host])
        return range(first, first + self.hosts[host].num_ranks)

    def address_of(self, rank: int) -> str:
        """The address of a rank's host."""
        return next(each.address for at, each in enumerate(self.hosts) if rank in self.ranks_of(at))

    @property
    def address(self) -> str:
        """The address of this host."""
        return self.hosts[self.here].address


def parse_hosts(text: str) -> tuple[Host, ...]:
    """The hosts in ``address[:ranks],...``; names are resolved, IPv6 addresses stand in brackets.

    Raises:
        ConfigError: an entry is malformed, cannot be resolved, or stands there twice.
    """
    try:
        hosts = tuple(parse_host(entry.strip()) for entry in text.split(","))
    except ConfigError as error:
        raise ConfigError(f"-H: {error}") from error
    seen: set[str] = set()
    for host in hosts:
        if host.address in seen:
            raise ConfigError(
                f"-H {text!r}: {host.address} stands there twice; give each host once, with all its ranks"
            )
        seen.add(host.address)
    return hosts


def plan_for(hosts: tuple[Host, ...], own: str | None = None) -> Plan:
    """The plan of this host, which is the entry ``own``, or else the one with an address of this host.

    Raises:
        ConfigError: no entry, or more than one, is this host's.
    """
    listed = ", ".join(host.address for host in hosts)
    mine = {resolved(own)} if own is not None else {each.address for each in interfaces()}
    found = [at for at, host in enumerate(hosts) if host.address in mine]
    match found:
        case [here]:
            return Plan(hosts, here)
        case []:
            raise ConfigError(f"none of the hosts {listed} is this one, which has {', '.join(sorted(mine))}")
        case _:
            raise ConfigError(f"more than one of the hosts {listed} is this one; say which with --self")


def parse_host(entry: str, least: int = 1) -> Host:
    """One host, ``address`` or ``address:ranks``, where that is ``least`` or more.

    Raises:
        ConfigError: it is malformed, or cannot be resolved.
    """
    match = re.fullmatch(r"(?:\[([0-9A-Fa-f:.]+)\]|([^\[\]:\s]+))(?::([0-9]{1,6}))?", entry)
    num_ranks = int(match[3] or 1) if match else -1
    if match is None or not least <= num_ranks <= MAX_RANKS:
        need = ", with at least one rank" if least else ""
        raise ConfigError(f"{entry[:_MAX_SHOWN]!r} must look like 10.0.0.1:4 or [fd00::1]:4{need}")
    return Host(resolved(match[1] or match[2]), num_ranks)


def resolved(name: str) -> str:
    """The IP address of a host.

    Raises:
        ConfigError: it has none.
    """
    try:
        return str(ipaddress.ip_address(name))
    except ValueError:
        pass
    try:
        return str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise ConfigError(f"host {name!r} cannot be resolved: {error.strerror}") from error
