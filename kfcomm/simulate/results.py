"""Results of simulations: of one collective, and of a step with several."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

_GIGA = 1e9


@dataclass(frozen=True, slots=True)
class Use:
    """Traffic through one port, in one direction."""

    port: str  # its name
    nbytes: int
    seconds: float  # least time for it, at the port's rate


@dataclass(frozen=True, slots=True)
class CallResult:
    """One call of a step.

    Attributes:
        name: as in the workload.
        verb: of it.
        strategy: its name.
        graphs: the name of the graphs that it took for this size: another one where it is a rule by size.
        nbytes: of the message.
        posted_s: when the first rank posted it; the step begins at 0.
        done_s: when it was complete on all ranks.
        rank_seconds: when it was complete on each.
        messages: how many were sent.
        nbytes_sent: in them, all together.
    """

    name: str
    verb: str
    strategy: str
    graphs: str
    nbytes: int
    posted_s: float
    done_s: float
    rank_seconds: tuple[float, ...]
    messages: int
    nbytes_sent: int

    @property
    def seconds(self) -> float:
        """How long it was under way."""
        return self.done_s - self.posted_s

    def as_json(self) -> dict[str, Any]:
        """Everything but the times of single ranks."""
        return {
            "name": self.name,
            "verb": self.verb,
            "strategy": self.strategy,
            "graphs": self.graphs,
            "nbytes": self.nbytes,
            "posted_s": self.posted_s,
            "done_s": self.done_s,
            "messages": self.messages,
            "nbytes_sent": self.nbytes_sent,
        }


@dataclass(frozen=True, slots=True)
class StepResult:
    """One step on a simulated network: several collectives, and compute beside them.

    Attributes:
        size: number of ranks.
        num_hosts: on how many hosts.
        calls: in the order of the workload.
        compute_s: of one rank.
        seconds: until all ranks were through their workload, and all calls complete.
        rank_seconds: until each rank was.
        busiest: the port that needs longest for what goes through it.
        events: how many steps the simulation took.
        simulated_ranks: as in `Result`.
        is_exact: as in `Result`.
        compute_spans_s: begin of each compute on the first rank, and end on the last.
    """

    size: int
    num_hosts: int
    calls: tuple[CallResult, ...]
    compute_s: float
    seconds: float
    rank_seconds: tuple[float, ...]
    busiest: Use
    events: int
    simulated_ranks: int
    is_exact: bool
    compute_spans_s: tuple[tuple[float, float], ...] = ()

    @property
    def exposed_s(self) -> float:
        """How much longer the step takes than its compute alone."""
        return self.seconds - self.compute_s

    @property
    def communication_s(self) -> float:
        """For how long at least one call was under way."""
        return _union_s((call.posted_s, call.done_s) for call in self.calls)

    @property
    def overlapped_s(self) -> float:
        """How much of that took no time of the step."""
        return max(0.0, self.communication_s - self.exposed_s)

    @property
    def bound_s(self) -> float:
        """Lower bound with these graphs: the compute, or the time that the busiest port needs."""
        return max(self.compute_s, self.busiest.seconds)

    def as_json(self) -> dict[str, Any]:
        """Everything but the times of single ranks."""
        return {
            "ranks": self.size,
            "hosts": self.num_hosts,
            "seconds": self.seconds,
            "compute_s": self.compute_s,
            "compute_spans_s": self.compute_spans_s,
            "communication_s": self.communication_s,
            "overlapped_s": self.overlapped_s,
            "exposed_s": self.exposed_s,
            "bound_s": self.bound_s,
            "busiest_port": self.busiest.port,
            "busiest_port_nbytes": self.busiest.nbytes,
            "events": self.events,
            "simulated_ranks": self.simulated_ranks,
            "is_exact": self.is_exact,
            "calls": [call.as_json() for call in self.calls],
        }


@dataclass(frozen=True, slots=True)
class Result:
    """One collective on a simulated network.

    Attributes:
        strategy: its name.
        graphs: the name of the graphs that it took for this size: another one where it is a rule by size.
        size: number of ranks.
        num_hosts: on how many hosts.
        nbytes: of the message.
        seconds: until it was complete on all ranks; the first one posted it at 0.
        rank_seconds: until it was complete on each.
        busiest: the port that needs longest for what goes through it.
        messages: how many were sent.
        nbytes_sent: in them, all together.
        events: how many steps the simulation took.
        simulated_ranks: how many ranks were simulated: one of each class of those that are alike.
        is_exact: False where too many ranks to be simulated one by one were taken to be alike: parts of the message
            count as the largest, and all ranks take chunks that arrive at one moment in the same order.
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
    simulated_ranks: int
    is_exact: bool

    @classmethod
    def of(cls, step: StepResult) -> Result:
        """The result of a step of one call, without compute."""
        (call,) = step.calls
        return cls(
            call.strategy, call.graphs, step.size, step.num_hosts, call.nbytes, step.seconds, call.rank_seconds,
            step.busiest, call.messages, call.nbytes_sent, step.events, step.simulated_ranks, step.is_exact,
        )  # fmt: skip

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
            "simulated_ranks": self.simulated_ranks,
            "is_exact": self.is_exact,
        }


def _union_s(spans: Iterable[tuple[float, float]]) -> float:
    """Length of the union of intervals."""
    total_s = end_s = 0.0
    for begin, end in sorted(spans):
        total_s += max(0.0, end - max(begin, end_s))
        end_s = max(end_s, end)
    return total_s
