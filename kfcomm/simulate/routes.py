"""Routes between ranks: their ports and latencies.

Owns the ports of one simulation. Flows know their ports, not the network.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from kfcomm.simulate.agenda import Agenda
from kfcomm.simulate.network import Link, SimulatedNetwork
from kfcomm.simulate.ports import Port
from kfcomm.types import Layout


class Routes:
    """The ports of a network, and the ways between its ranks.

    Args:
        agenda: virtual time.
        network: with as many hosts as ``layout`` has.
        layout: where the ranks are.
    """

    def __init__(self, agenda: Agenda, network: SimulatedNetwork, layout: Layout) -> None:
        self._agenda = agenda
        self._network = network
        self._at = layout.hosts
        hosts = network.hosts
        local = network.local
        self._local_out = [Port(agenda, f"rank {rank} local out", local.bandwidth) for rank in range(layout.size)]
        self._local_in = [Port(agenda, f"rank {rank} local in", local.bandwidth) for rank in range(layout.size)]
        self._memories = [Port(agenda, f"memory of {host.name}", local.memory) for host in hosts if local.memory]
        burst = network.burst_nbytes
        self._out = [self._port(f"{host.name} out", host.bandwidth, burst) for host in hosts]
        self._into = [self._port(f"{host.name} in", host.bandwidth, burst) for host in hosts]
        self._switches = [network.switch_of(number) for number in range(len(hosts))]
        present = sorted({switch for switch in self._switches if switch is not None})
        self._up = {at: self._port(f"switch {at} up", network.uplink_of(at)) for at in present}
        self._down = {at: self._port(f"switch {at} down", network.uplink_of(at)) for at in present}
        self._links: dict[tuple[str, str], tuple[Link, Port | None]] = {}
        for link in network.links:
            for here, there in (link.between, link.between[::-1]):
                port = None if link.bandwidth is None else self._port(f"link {here} to {there}", link.bandwidth)
                self._links[here, there] = (link, port)

    def between(self, source: int, target: int) -> tuple[tuple[Port, ...], float]:
        """The ports from one rank to another, and the seconds that a bit needs."""
        here, there = self._at[source], self._at[target]
        network = self._network
        if here == there:
            memory = self._memories[here : here + 1]
            return (self._local_out[source], *memory, self._local_in[target]), network.local.latency_s
        ends = network.hosts[here], network.hosts[there]
        latency_s = (ends[0].latency_s + ends[1].latency_s) / 2
        link, port = self._links.get((ends[0].name, ends[1].name), (None, None))
        if link is not None and link.latency_s is not None:
            latency_s = link.latency_s
        ports = (self._out[here], *self._across(here, there), *((port,) if port else ()), self._into[there])
        return ports, latency_s

    def ports(self) -> Iterator[Port]:
        """All of them."""
        links = (port for _, port in self._links.values() if port is not None)
        between = chain(self._out, self._into, self._up.values(), self._down.values(), links)
        return chain(between, self._memories, self._local_out, self._local_in)

    def _across(self, here: int, there: int) -> Iterator[Port]:
        up, down = self._switches[here], self._switches[there]
        if up == down:
            return
        if up is not None:
            yield self._up[up]
        if down is not None:
            yield self._down[down]

    def _port(self, name: str, bandwidth: float, burst_nbytes: int = 0) -> Port:
        return Port(self._agenda, name, bandwidth * self._network.efficiency, burst_nbytes)
