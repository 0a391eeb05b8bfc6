"""Ports of a network, and the ways between its ranks.

Ports are made when they are first on a way: of 100,000 hosts those that carry something.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import IntEnum

from kfcomm.simulate.hosts import ACKNOWLEDGED
from kfcomm.simulate.incast import RELAY, weight_of
from kfcomm.simulate.network import Link, PortQueue, SimulatedNetwork
from kfcomm.simulate.ports import Agenda, Pass, Port
from kfcomm.types import Layout


class _Kind(IntEnum):
    OUT = 0
    INTO = 1
    UP = 2
    DOWN = 3
    LINK = 4
    MEMORY = 5
    LOCAL_OUT = 6
    LOCAL_IN = 7


Passes = tuple[Pass, ...]


class Routes:
    """The ports of a network, and the ways between its ranks; it has as many hosts as the layout.

    Attributes:
        agenda: virtual time.
        network: the hosts.
        layout: where the ranks are.
        relays: hosts to which others send what is passed on there: see `kfcomm.simulate.incast`.
    """

    def __init__(
        self,
        agenda: Agenda,
        network: SimulatedNetwork,
        layout: Layout,
        relays: frozenset[int] = frozenset(),
        *,
        goes_both_ways: bool = False,
    ) -> None:
        self.agenda = agenda
        self.network = network
        self.layout = layout
        self.relays = relays
        has_frames = goes_both_ways and network.efficiency < 1
        self._efficiency = network.efficiency * (ACKNOWLEDGED if has_frames else 1.0)
        # Equal hosts get equal shares, whatever the queue.
        self._is_fair = network.queue is PortQueue.FAIR or network.is_even
        self._ports: dict[tuple[_Kind, int], Port] = {}
        self._switches = [network.switch_of(number) for number in range(len(network.hosts))]
        self._links: dict[tuple[str, str], tuple[Link, int]] = {}
        for number, link in enumerate(network.links):
            for turn, ends in enumerate((link.between, link.between[::-1])):
                self._links[ends] = (link, 2 * number + turn)

    def between(self, source: int, target: int) -> tuple[Passes, Passes, float]:
        """The ports on the side of ``source``, those on the side of ``target``, and the seconds that a bit needs."""
        network, hosts = self.network, self.layout.hosts
        here, there = hosts[source], hosts[target]
        if here == there:
            return *self._inside(source, target), network.local.latency_s
        ends = network.hosts[here], network.hosts[there]
        latency_s = (ends[0].latency_s + ends[1].latency_s) / 2
        link, _ = self._links.get((ends[0].name, ends[1].name), (None, 0))
        if link is not None and link.latency_s is not None:
            latency_s = link.latency_s
        out, into = self._across(here, there)
        passes = tuple(self._weighted((*out, *into), here))
        return passes[: len(out)], passes[len(out) :], latency_s

    def counted(self, passes: Passes, by_host: int, by_rank: int) -> Passes:
        """The same, with so many flows in ports of a host, and in those of a rank."""
        return tuple([one._replace(times=by_rank if one.port.is_of_rank else by_host) for one in passes])

    def ports(self) -> Iterator[Port]:
        """Ports that are on a way, hosts' first."""
        return (self._ports[key] for key in sorted(self._ports))

    def _inside(self, source: int, target: int) -> tuple[Passes, Passes]:
        local, host = self.network.local, self.layout.hosts[source]
        out = [self._local(_Kind.LOCAL_OUT, source, "out")]
        if local.memory:
            name = f"memory of {self.network.hosts[host].name}"
            out.append(self._port((_Kind.MEMORY, host), name, local.memory))
        return tuple(map(Pass, out)), (Pass(self._local(_Kind.LOCAL_IN, target, "in")),)

    def _across(self, here: int, there: int) -> tuple[list[Port], list[Port]]:
        network = self.network
        ends, efficiency = (network.hosts[here], network.hosts[there]), self._efficiency
        rates = [end.bandwidth * efficiency for end in ends]
        out = [self._port((_Kind.OUT, here), f"{ends[0].name} out", rates[0], network.burst_nbytes)]
        into = []
        up, down = self._switches[here], self._switches[there]
        if up != down:  # else behind one switch, or both at the core
            if up is not None:
                out.append(self._port((_Kind.UP, up), f"switch {up} up", network.uplink_of(up) * efficiency))
            if down is not None:
                into.append(self._port((_Kind.DOWN, down), f"switch {down} down", network.uplink_of(down) * efficiency))
        link, number = self._links.get((ends[0].name, ends[1].name), (None, 0))
        if link is not None and link.bandwidth is not None:
            name = f"link {ends[0].name} to {ends[1].name}"
            into.append(self._port((_Kind.LINK, number), name, link.bandwidth * efficiency))
        into.append(self._port((_Kind.INTO, there), f"{ends[1].name} in", rates[1], network.burst_nbytes))
        return out, into

    def _weighted(self, ports: Sequence[Port], here: int) -> Iterator[Pass]:
        """The ports of a way from host ``here`` to another, each with the weight that its queue gives to the flow."""
        arrival = ports[0].rate  # bytes per second at which the flow comes to the next port
        yield Pass(ports[0])
        for port in ports[1:]:
            if self._is_fair:
                yield Pass(port)
            else:
                yield Pass(port, weight_of(arrival, port.rate) / port.rate * (RELAY if here in self.relays else 1.0))
            arrival = min(arrival, port.rate)

    def _local(self, kind: _Kind, rank: int, way: str) -> Port:
        return self._port((kind, rank), f"rank {rank} local {way}", self.network.local.bandwidth)

    def _port(self, key: tuple[_Kind, int], name: str, rate: float, burst_nbytes: int = 0) -> Port:
        port = self._ports.get(key)
        if port is None:
            is_of_rank = key[0] >= _Kind.LOCAL_OUT
            port = self._ports[key] = Port(self.agenda, name, rate, burst_nbytes, is_of_rank=is_of_rank)
        return port
