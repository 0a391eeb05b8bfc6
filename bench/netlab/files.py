"""Beds from network files: the same file describes a simulated network and this one (``kfcomm.simulate.network``)."""

from __future__ import annotations

from bench.netlab.hosts import HostSpec
from kfcomm.errors import ConfigError
from kfcomm.simulate.network import SimulatedNetwork


def specs_of(network: SimulatedNetwork) -> tuple[HostSpec, ...]:
    """The hosts of a network, each with the rate of its port.

    Latencies and what is inside a host are this machine's: they cannot be chosen.

    Raises:
        ConfigError: the network lists no hosts, or has what a single switch has not.
    """
    if not network.hosts:
        raise ConfigError("the network file lists no [[host]]: say how many there are with --hosts")
    for there, what in ((network.links, "[[link]]"), (network.switches or network.hosts_per_switch, "[[switch]]")):
        if there:
            raise ConfigError(f"the network file has {what}; a bed has one switch and one link for each host, no more")
    return tuple(HostSpec(host.name, host.bandwidth * 8, host.ranks) for host in network.hosts)
