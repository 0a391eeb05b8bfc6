"""Network of a simulation or a test bed: hosts with ports, links between them, costs of a rank.

A file describes it, in TOML::

    [defaults]                  # of every host
    bandwidth = "200 Mbit/s"    # of its port, in each direction
    latency = "100 us"          # one way, to another host
    ranks = 1
    efficiency = 0.956          # of the bandwidth, what is left for payloads under Ethernet, IP and TCP headers
    queue = "tail"              # of ports where hosts meet: first in, first out; or "fair", as with tc's fq

    [local]                     # inside a host
    bandwidth = "5 GB/s"        # of each rank, to the others of its host and from them
    latency = "15 us"
    memory = "40 GB/s"          # between all ranks of a host together; left out: no limit
    overhead = "10 us"          # processor time of each message that a rank sends or receives
    fold = "10 GB/s"            # at which a rank folds what it received into its own
    copy = "2 GB/s"             # at which it hands to other hosts, and takes from them; left out: at once
    cpus = 2                    # processors that the ranks of a host share; 0: each has its own

    [testbed]                   # hosts that are namespaces on one machine
    cpus = 2                    # processors that all ranks share
    burst = 16000               # bytes that pass at once after a pause: rates are held by token buckets there

    [[host]]                    # any number; they are called h0, h1, ... unless they have names
    bandwidth = "50 Mbit/s"     # also: name, latency, ranks, cpus
    count = 3                   # as many hosts like this

    [[link]]                    # what is particular between two hosts
    between = ["h0", "h3"]
    bandwidth = "10 Mbit/s"
    latency = "5 ms"

    [[switch]]                  # hosts behind one leaf switch; those that none names are at the core
    hosts = ["h0", "h1"]
    uplink = "10 Gbit/s"        # between it and the core, in each direction

    [switch]                    # or, instead, as many hosts behind each
    hosts = 32
    uplink = "100 Gbit/s"

Everything may be left out. Defaults are those of ``strategies.cost.NetworkModel``: 10 Gbit/s Ethernet and shared
memory.
This module reads the file; ``ports`` gives the values their meaning over time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Self

from kfcomm.errors import ConfigError
from kfcomm.simulate.fields import Document, FieldTable
from kfcomm.strategies import cost
from kfcomm.types import Layout

_COSTS = cost.NetworkModel()

TCP_EFFICIENCY = 1448 / 1514
"""Payload in an Ethernet frame of 1514 bytes that carries TCP over IPv4 with timestamps."""


class Queue(StrEnum):
    """Queue of a port where flows of several hosts meet."""

    TAIL = "tail"
    """First in, first out, and what does not fit is dropped, as in nearly all switches; see ``strategies.incast``."""
    FAIR = "fair"
    """Turns for each flow, as with tc's fq, or htb with a class for each."""


@dataclass(frozen=True, slots=True)
class Host:
    """A host and its port to the others.

    Attributes:
        name: unique.
        bandwidth: bytes per second through its port, in each direction at once.
        latency_s: one way, to another host like it; between two hosts it is the mean of theirs.
        ranks: how many there are on it.
        cpus: processors that they share; 0 if each has its own.
    """

    name: str
    bandwidth: float = 1 / _COSTS.cross_beta_s_per_byte
    latency_s: float = _COSTS.cross_alpha_s
    ranks: int = 1
    cpus: int = 0


@dataclass(frozen=True, slots=True)
class Link:
    """Link between two hosts that differs from the default, in each direction; None where it does not."""

    between: tuple[str, str]
    bandwidth: float | None = None
    latency_s: float | None = None


@dataclass(frozen=True, slots=True)
class Switch:
    """A leaf switch: its hosts reach all others through ``uplink`` bytes per second, in each direction."""

    hosts: tuple[str, ...]
    uplink: float


@dataclass(frozen=True, slots=True)
class Local:
    """Links inside a host, and costs of a rank.

    Attributes:
        bandwidth: bytes per second that a rank sends to the others of its host, and as many that it receives from them.
        latency_s: one way.
        overhead_s: processor time for each message that a rank sends or receives.
        fold: bytes per second that a rank folds.
        memory: bytes per second between all ranks of a host together; None for no limit.
        copy: bytes per second that a rank's processor sends to other hosts or receives from them; None for no end.
    """

    bandwidth: float = 1 / _COSTS.local_beta_s_per_byte
    latency_s: float = _COSTS.local_alpha_s
    overhead_s: float = _COSTS.overhead_s
    fold: float = 1 / _COSTS.gamma_s_per_byte
    memory: float | None = None
    copy: float | None = None


@dataclass(frozen=True, slots=True)
class SimulatedNetwork:
    """Hosts and what joins them.

    Attributes:
        hosts: those with something of their own; see ``of_hosts`` for more.
        default: what the others are like.
        local: inside of each.
        links: what is particular between two.
        switches: leaf switches.
        hosts_per_switch: in place of ``switches``: as many hosts, in order, behind each one; 0 for none.
        uplink: of those.
        efficiency: of a bandwidth between hosts, the share that carries payload.
        cpus: processors that the ranks of all hosts share, on a test bed; 0 if hosts are machines.
        burst_nbytes: what passes a host's port at once after a pause, on a test bed.
        queue: of ports where flows of several hosts meet.
    """

    hosts: tuple[Host, ...] = ()
    default: Host = Host("")
    local: Local = Local()
    links: tuple[Link, ...] = ()
    switches: tuple[Switch, ...] = ()
    hosts_per_switch: int = 0
    uplink: float = 0.0
    efficiency: float = 1.0
    cpus: int = 0
    burst_nbytes: int = 0
    queue: Queue = Queue.TAIL

    @classmethod
    def load(cls, path: Path | str) -> Self:
        """The network that a file describes.

        Raises:
            ConfigError: it cannot be read, or is malformed: the message names file, line and field.
        """
        try:
            text = Path(path).read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"network file {str(path)!r} cannot be read: {error}") from error
        return cls.parse(text, str(path))

    @classmethod
    def parse(cls, text: str, name: str = "network") -> Self:
        """The network that ``text`` describes; ``name`` is the file's, for errors.

        Raises:
            ConfigError: it is malformed: the message names file, line and field.
        """
        document = Document(text, name)
        default, efficiency, queue, local = _defaults(document)
        hosts = tuple(_hosts(document, default))
        names = {host.name for host in hosts}
        links = tuple(_link(table, names) for table in document.tables("link"))
        switches: tuple[Switch, ...] = ()
        hosts_per_switch, uplink = 0, 0.0
        if document.is_single("switch"):
            hosts_per_switch, uplink = _even_switches(document.table("switch"))
        else:
            switches = tuple(_switches(document, names))
        testbed = document.table("testbed")
        cpus, burst_nbytes = testbed.count("cpus", 0, least=0), testbed.count("burst", 0, least=0)
        testbed.end()
        document.end()
        return cls(
            hosts, default, local, links, switches, hosts_per_switch, uplink, efficiency, cpus, burst_nbytes, queue
        )  # fmt: skip

    def of_hosts(self, num_hosts: int | None = None, ranks: int | None = None) -> Self:
        """The network with ``num_hosts`` hosts: those that it lists come first, further ones are like the default.

        ``ranks``, if given, is the number of ranks on each.

        Raises:
            ConfigError: it lists more hosts than that, or ``num_hosts`` is left out and it lists none.
        """
        if num_hosts is None:
            num_hosts = len(self.hosts)
        if not num_hosts:
            raise ConfigError("the network lists no [[host]]: say how many there are, for example --hosts 8x1")
        if num_hosts < len(self.hosts):
            raise ConfigError(f"{num_hosts} hosts are too few: the network lists {len(self.hosts)} of them")
        taken = {host.name for host in self.hosts}
        # Listed hosts may have names of this form, too.
        names = (name for name in map("h{}".format, range(num_hosts + len(taken))) if name not in taken)
        further = (replace(self.default, name=next(names)) for _ in range(num_hosts - len(self.hosts)))
        hosts = (*self.hosts, *further)
        if ranks is not None:
            hosts = tuple(replace(host, ranks=ranks) for host in hosts)
        return replace(self, hosts=hosts)

    @property
    def layout(self) -> Layout:
        """Layout of the ranks: in blocks, in the order of the hosts."""
        if not self.hosts:
            raise ConfigError("a network without hosts has no ranks: see of_hosts")
        cpus = min(host.cpus for host in self.hosts)
        return Layout.of((host.name for host in self.hosts for _ in range(host.ranks)), cpus)

    @property
    def is_even(self) -> bool:
        """Whether all hosts have ports of one rate, and all links are alike."""
        return len({host.bandwidth for host in self.hosts}) <= 1 and all(link.bandwidth is None for link in self.links)

    def switch_of(self, number: int) -> int | None:
        """The leaf switch of host ``number``; None at the core."""
        if self.hosts_per_switch:
            return number // self.hosts_per_switch
        name = self.hosts[number].name
        return next((at for at, switch in enumerate(self.switches) if name in switch.hosts), None)

    def uplink_of(self, switch: int) -> float:
        """Bytes per second between a leaf switch and the core."""
        return self.uplink if self.hosts_per_switch else self.switches[switch].uplink


def _defaults(document: Document) -> tuple[Host, float, Queue, Local]:
    table, inside = document.table("defaults"), document.table("local")
    plain, within = Host(""), Local()
    default = Host(
        "",
        bandwidth=table.rate("bandwidth", plain.bandwidth),
        latency_s=table.time_s("latency", plain.latency_s),
        ranks=table.count("ranks", plain.ranks),
        cpus=inside.count("cpus", plain.cpus, least=0),
    )
    efficiency = table.share("efficiency", TCP_EFFICIENCY)
    queue = table.word("queue", Queue.TAIL)
    if queue not in list(Queue):
        raise table.wrong("queue", f"expected {' or '.join(Queue)}, got {queue!r}")
    local = Local(
        bandwidth=inside.rate("bandwidth", within.bandwidth),
        latency_s=inside.time_s("latency", within.latency_s),
        overhead_s=inside.time_s("overhead", within.overhead_s),
        fold=inside.rate("fold", within.fold),
        memory=inside.maybe_rate("memory"),
        copy=inside.maybe_rate("copy"),
    )
    table.end()
    inside.end()
    return default, efficiency, Queue(queue), local


def _hosts(document: Document, default: Host) -> Iterator[Host]:
    seen: set[str] = set()
    number = 0
    for table in document.tables("host"):
        count = table.count("count", 1)
        named = table.word("name", f"h{number}")
        has_name = "name" in table.values
        host = Host(
            named,
            bandwidth=table.rate("bandwidth", default.bandwidth),
            latency_s=table.time_s("latency", default.latency_s),
            ranks=table.count("ranks", default.ranks),
            cpus=table.count("cpus", default.cpus, least=0),
        )
        table.end()
        for each in range(count):
            name = (f"{named}-{each}" if count > 1 else named) if has_name else f"h{number}"
            if name in seen:
                raise table.wrong("name", f"{name!r} is the name of another host already")
            seen.add(name)
            number += 1
            yield replace(host, name=name)


def _link(table: FieldTable, names: set[str]) -> Link:
    ends = table.words("between")
    if len(set(ends)) != 2 or len(ends) != 2:
        raise table.wrong("between", f"{list(ends)!r} is not two hosts")
    _check_known(table, "between", ends, names)
    link = Link((ends[0], ends[1]), table.maybe_rate("bandwidth"), table.maybe_time_s("latency"))
    table.end()
    if link.bandwidth is None and link.latency_s is None:
        raise table.wrong("bandwidth", "is missing, and so is latency: nothing is particular about this link")
    return link


def _switches(document: Document, names: set[str]) -> Iterator[Switch]:
    placed: set[str] = set()
    for table in document.tables("switch"):
        hosts = table.words("hosts")
        _check_known(table, "hosts", hosts, names)
        twice = sorted(placed.intersection(hosts)) or [name for name in hosts if hosts.count(name) > 1]
        if twice:
            raise table.wrong("hosts", f"{twice[0]!r} is behind a switch already")
        placed.update(hosts)
        uplink = _uplink(table)
        table.end()
        yield Switch(hosts, uplink)


def _even_switches(table: FieldTable) -> tuple[int, float]:
    hosts, uplink = table.count("hosts", None), _uplink(table)
    table.end()
    return hosts, uplink


def _uplink(table: FieldTable) -> float:
    uplink = table.maybe_rate("uplink")
    if uplink is None:
        raise table.wrong("uplink", "is missing: the rate between this switch and the others")
    return uplink


def _check_known(table: FieldTable, key: str, names: tuple[str, ...], known: set[str]) -> None:
    for name in names:
        if name not in known:
            listed = ", ".join(sorted(known)) or "none: list them as [[host]]"
            raise table.wrong(key, f"expected a host of this file, got {name!r} (hosts are {listed})")
