"""Results of simulations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_GIGA = 1e9


@dataclass(frozen=True, slots=True)
class Use:
    """Traffic through one port.

    Attributes:
        port: its name.
        nbytes: through it, in this direction.
        seconds: how long that takes at least, at the port's rate.
    """

    port: str
    nbytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Result:
    """One all_reduce on a simulated network.

    Attributes:
        strategy: its name.
        graphs: the name of the graphs that it took for this size: another one where it is a rule by size.
        size: number of ranks.
        num_hosts: on how many hosts.
        nbytes: of the message.
        seconds: until it was complete on all ranks, which posted it at 0.
        rank_seconds: until it was complete on each.
        busiest: the port that needs longest for what goes through it.
        messages: how many were sent.
        nbytes_sent: in them, all together.
        events: how many steps the simulation took.
    """

    strategy: str
    graphs: str
    size: int
    num_hosts: int
    nbytes: int
    seconds: float
    rank_seconds: tuple[float, ...]
    busiest: Use
    messages: int
    nbytes_sent: int
    events: int

    @property
    def bound_s(self) -> float:
        """Lower bound with these graphs: the time that the busiest port needs."""
        return self.busiest.seconds

    @property
    def algbw(self) -> float:
        """Algorithm bandwidth, in 10⁹ bytes per second."""
        return self.nbytes / self.seconds / _GIGA

    @property
    def busbw(self) -> float:
        """Bus bandwidth, in 10⁹ bytes per second: algbw · 2(n−1)/n."""
        return self.algbw * 2 * (self.size - 1) / self.size

    def as_json(self) -> dict[str, Any]:
        """Everything but the times of single ranks."""
        return {
            "strategy": self.strategy,
            "graphs": self.graphs,
            "ranks": self.size,
            "hosts": self.num_hosts,
            "nbytes": self.nbytes,
            "seconds": self.seconds,
            "algbw_gb_per_s": self.algbw,
            "busbw_gb_per_s": self.busbw,
            "bound_s": self.bound_s,
            "busiest_port": self.busiest.port,
            "busiest_port_nbytes": self.busiest.nbytes,
            "messages": self.messages,
            "nbytes_sent": self.nbytes_sent,
            "events": self.events,
        }
