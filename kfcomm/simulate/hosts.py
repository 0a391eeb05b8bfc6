"""Hosts of a simulated network, and what joins them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from kfcomm.strategies.network import NetworkModel

_COSTS: Final = NetworkModel()

TCP_EFFICIENCY = 1448 / 1514
"""Payload in an Ethernet frame of 1514 bytes that carries TCP over IPv4 with timestamps."""

ACKNOWLEDGED: Final = 1 - 66 / (2 * 1514)
"""Share of a port, full in both directions, that acknowledgements leave: they are 66 bytes for two full frames."""


class PortQueue(StrEnum):
    """Service of a port where flows of several hosts meet."""

    TAIL = "tail"
    """First in, first out, and what does not fit is dropped, as in nearly all switches; see `incast`."""
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
        device: bytes per second between a rank's device and its host, in each direction, if arrays are in device
            memory: see `kfcomm.simulate.staging`. An H100 copied 5.2e10 to and from pinned memory.
    """

    bandwidth: float = 1 / _COSTS.local_beta_s_per_byte
    latency_s: float = _COSTS.local_alpha_s
    overhead_s: float = _COSTS.overhead_s
    fold: float = 1 / _COSTS.gamma_s_per_byte
    memory: float | None = None
    copy: float | None = None
    device: float | None = None
