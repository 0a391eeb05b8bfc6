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
    device = "52 GB/s"          # between a rank's device and its host; left out: arrays are in the host's memory
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

Everything may be left out. Defaults are those of ``strategies.network.NetworkModel``: 10 Gbit/s Ethernet and shared
memory.
This module reads the file; ``ports`` gives the values their meaning over time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Self

from kfcomm.errors import ConfigError
from kfcomm.simulate.files import described
from kfcomm.simulate.hosts import TCP_EFFICIENCY, Host, Link, Local, PortQueue, Switch
from kfcomm.strategies.matrices import rates_of
from kfcomm.strategies.network import NetworkModel
from kfcomm.types import Costs, Layout, Rates, Uplink

if TYPE_CHECKING:
    from kfcomm.probe.record import Probe

__all__ = ["TCP_EFFICIENCY", "Host", "Link", "Local", "PortQueue", "SimulatedNetwork", "Switch"]

_DEFAULT_HOST, _DEFAULT_LOCAL = Host(""), Local()
_AS_FAST = 0.9
"""Of what the ports could do: a link with less is slower than they are. Measurements differ by a few per cent."""
_AS_NEAR = 1.5
"""Latencies that differ by less are alike."""
_MOST_HOSTS = 256
"""More hosts are not probed pair by pair, so that costs have no rates between them."""


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
        efficiency: of a bandwidth between hosts, the share that carries payload. Below 1, where bandwidths are those
            of frames, acknowledgements take their part too, if a verb sends in both directions at once.
        cpus: processors that the ranks of all hosts share, on a test bed; 0 if hosts are machines.
        burst_nbytes: what passes a host's port at once after a pause, on a test bed.
        queue: of ports where flows of several hosts meet.
    """

    hosts: tuple[Host, ...] = ()
    default: Host = _DEFAULT_HOST
    local: Local = _DEFAULT_LOCAL
    links: tuple[Link, ...] = ()
    switches: tuple[Switch, ...] = ()
    hosts_per_switch: int = 0
    uplink: float = 0.0
    efficiency: float = 1.0
    cpus: int = 0
    burst_nbytes: int = 0
    queue: PortQueue = PortQueue.TAIL

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
        found = described(text, name)
        return cls(**{field.name: getattr(found, field.name) for field in fields(found)})

    @classmethod
    def of_probe(cls, probe: Probe) -> Self:
        """The network that a probe measured: ports, links, and the costs of messages.

        Its rates are those of payloads. A port or uplink sends as fast as it receives here: the slower of both counts.
        Ranks lie in blocks, in the order of the hosts.
        """
        costs, layout = probe.costs(), probe.layout
        rates = rates_of(layout, probe.bandwidth.tolist(), probe.latency_s.tolist())
        plain, within = Host(""), Local()
        latency_s = plain.latency_s if costs.cross_alpha_s is None else costs.cross_alpha_s
        names = list(dict.fromkeys(probe.host_names)) or [f"h{number}" for number in range(layout.num_hosts)]
        ports = map(min, zip(rates.send, rates.receive, strict=True))
        hosts = tuple(
            Host(
                name,
                port if port < math.inf else plain.bandwidth,
                latency_s,
                len(layout.ranks_of(number)),
                layout.num_cpus,
            )
            for number, (name, port) in enumerate(zip(names, ports, strict=True))
        )
        local = Local(
            bandwidth=within.bandwidth if not costs.local_beta_s_per_byte else 1 / costs.local_beta_s_per_byte,
            latency_s=within.latency_s if costs.local_alpha_s is None else costs.local_alpha_s,
            overhead_s=within.overhead_s if costs.overhead_s is None else costs.overhead_s,
            fold=within.fold if not costs.gamma_s_per_byte else 1 / costs.gamma_s_per_byte,
        )
        switches = tuple(
            Switch(tuple(hosts[number].name for number in one.hosts), min(one.send, one.receive))
            for one in probe.uplinks
        )
        narrowed = rates._replace(uplinks=probe.uplinks)
        return cls(hosts=hosts, local=local, links=tuple(_particular(hosts, narrowed)), switches=switches)

    def costs(self) -> Costs:
        """Costs as a probe of this network finds them, without noise; rates between hosts only if these are unlike."""
        local, hosts = self.local, self.hosts or (self.default,)
        latencies, ports = sorted(host.latency_s for host in hosts), sorted(host.bandwidth for host in hosts)
        return Costs(
            local_alpha_s=local.latency_s,
            local_beta_s_per_byte=1 / local.bandwidth,
            cross_alpha_s=latencies[len(hosts) // 2],
            cross_beta_s_per_byte=1 / (ports[(len(hosts) - 1) // 2] * self.efficiency),
            overhead_s=local.overhead_s,
            gamma_s_per_byte=1 / local.fold,
            rates=self._rates() if self._is_unlike and len(hosts) <= _MOST_HOSTS else None,
        )

    def model(self, layout: Layout) -> NetworkModel:
        """The same for the time model of `strategies.auto`, for ranks on the hosts of this network.

        Raises:
            ConfigError: the layout has another number of hosts.
        """
        if layout.num_hosts != len(self.hosts):
            raise ConfigError(f"the network has {len(self.hosts)} hosts, and the ranks are on {layout.num_hosts}")
        return NetworkModel.of(self.costs())

    @property
    def _is_unlike(self) -> bool:
        return not self.is_even or bool(self.links or self.switches or self.hosts_per_switch)

    def _rates(self) -> Rates:
        """Rates and latencies between hosts, each pair alone. O(hosts²)."""
        ports = tuple(host.bandwidth * self.efficiency for host in self.hosts)
        links = {ends: link for link in self.links for ends in (link.between, link.between[::-1])}
        switches = [self.switch_of(number) for number in range(len(self.hosts))]
        uplinks = [math.inf if switch is None else self.uplink_of(switch) for switch in switches]

        def ways(a: int, b: int) -> tuple[float, float]:
            here, there = self.hosts[a], self.hosts[b]
            link = links.get((here.name, there.name), Link((here.name, there.name)))
            shared = math.inf if switches[a] == switches[b] else min(uplinks[a], uplinks[b])
            narrowest = min(shared, math.inf if link.bandwidth is None else link.bandwidth)
            rate = min(ports[a], ports[b], narrowest * self.efficiency)
            return rate, (here.latency_s + there.latency_s) / 2 if link.latency_s is None else link.latency_s

        numbers = range(len(self.hosts))
        rows = [[ways(a, b) if a != b else (0.0, 0.0) for b in numbers] for a in numbers]
        rates, latencies = (tuple(tuple(each[at] for each in row) for row in rows) for at in (0, 1))
        racks: dict[int, list[int]] = {}
        for number, switch in enumerate(switches):
            if switch is not None:
                racks.setdefault(switch, []).append(number)
        shared = [(tuple(rack), self.uplink_of(switch) * self.efficiency) for switch, rack in sorted(racks.items())]
        # As a probe has it: what holds up no two hosts is no place of its own.
        found = tuple(
            Uplink(rack, rate, rate)
            for rack, rate in shared
            if 1 < len(rack) < len(ports) and rate < sum(ports[number] for number in rack)
        )
        return Rates(ports, ports, rates, latencies, found)

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
        """Layout of the ranks: in blocks, in the order of the hosts; with the costs that a probe finds."""
        if not self.hosts:
            raise ConfigError("a network without hosts has no ranks: see of_hosts")
        cpus = min(host.cpus for host in self.hosts)
        return Layout.of((host.name for host in self.hosts for _ in range(host.ranks)), cpus, self.costs())

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


def _particular(hosts: Sequence[Host], rates: Rates) -> Iterator[Link]:
    """Links of a probe that are slower than the ports at their ends, or nearer or farther than most."""
    racks = rates.rack_of
    for a, here in enumerate(hosts):
        for b in range(a + 1, len(hosts)):
            there = hosts[b]
            rate = min(rates.links[a][b], rates.links[b][a])
            latency_s = (rates.latency_s[a][b] + rates.latency_s[b][a]) / 2
            narrowest = min([here.bandwidth, there.bandwidth, *_between(rates, racks[a], racks[b])])
            is_slow = rate < _AS_FAST * narrowest
            is_far = not here.latency_s / _AS_NEAR < latency_s < here.latency_s * _AS_NEAR
            if is_slow or is_far:
                yield Link((here.name, there.name), rate if is_slow else None, latency_s if is_far else None)


def _between(rates: Rates, here: int | None, there: int | None) -> list[float]:
    """Bytes/s of the uplinks between two racks, the slower direction of each."""
    racks = [rack for rack in (here, there) if rack is not None] if here != there else []
    return [min(rates.uplinks[rack].send, rates.uplinks[rack].receive) for rack in racks]
