"""Tables of a network file: see `network` for the format."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from kfcomm.simulate.fields import Document, FieldTable
from kfcomm.simulate.hosts import TCP_EFFICIENCY, Host, Link, Local, PortQueue, Switch


@dataclass(frozen=True, slots=True)
class Described:
    """The fields of a ``SimulatedNetwork``, as a file has them."""

    hosts: tuple[Host, ...]
    default: Host
    local: Local
    links: tuple[Link, ...]
    switches: tuple[Switch, ...]
    hosts_per_switch: int
    uplink: float
    efficiency: float
    cpus: int
    burst_nbytes: int
    queue: PortQueue


def described(text: str, name: str) -> Described:
    """Read a file; ``name`` is its name, for errors.

    Raises:
        ConfigError: it is malformed.
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
    return Described(
        hosts, default, local, links, switches, hosts_per_switch, uplink, efficiency, cpus, burst_nbytes, queue
    )  # fmt: skip


def _defaults(document: Document) -> tuple[Host, float, PortQueue, Local]:
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
    queue = table.word("queue", PortQueue.TAIL)
    if queue not in list(PortQueue):
        raise table.wrong("queue", f"expected {' or '.join(PortQueue)}, got {queue!r}")
    local = Local(
        bandwidth=inside.rate("bandwidth", within.bandwidth),
        latency_s=inside.time_s("latency", within.latency_s),
        overhead_s=inside.time_s("overhead", within.overhead_s),
        fold=inside.rate("fold", within.fold),
        memory=inside.maybe_rate("memory"),
        copy=inside.maybe_rate("copy"),
        device=inside.maybe_rate("device"),
    )
    table.end()
    inside.end()
    return default, efficiency, PortQueue(queue), local


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
