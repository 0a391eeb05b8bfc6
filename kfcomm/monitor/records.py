"""The records that ``Communicator.statistics`` gives: plain frozen values that JSON can carry.

Each number is right at the moment when it is read; of numbers that belong together one may be a chunk ahead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Self


@dataclass(frozen=True, slots=True)
class PeerStatistics:
    """Traffic with one peer over one kind of link.

    Attributes:
        rank: of the peer, in the world.
        link: ``shm``, ``unix``, ``tcp`` or ``memory``.
        sent_nbytes, received_nbytes: since the beginning of the epoch; on sockets as they go over the wire, heads
            included, through shared memory the payloads, and what is read in slots.
        sent_messages, received_messages: frames, chunks and the small ones that speak of them, and uses of slots.
        send_rate, receive_rate: bytes per second over the last one to two seconds.
        waited_s: seconds that collectives of this process have waited for chunks of this peer (see
            ``runtime.meter``). With several in flight each counts, so it may grow faster than the clock. With two kinds
            of link to a peer it is in the record of the later one.
    """

    rank: int
    link: str
    sent_nbytes: int
    received_nbytes: int
    sent_messages: int
    received_messages: int
    send_rate: float
    receive_rate: float
    waited_s: float


@dataclass(frozen=True, slots=True)
class KeyStatistics:
    """The calls under one name, on this rank.

    Attributes:
        name: of the calls; empty for those without a name. Messages are under ``tag ...``, the second steps of calls
            that have two under ``name (data)``.
        count: calls that are complete.
        nbytes: bytes of their results on this rank, or of the inputs where it gets none.
        p50_s, p99_s: half and 99 % of them took at most so long from post to completion, to 4.4 %.
        max_s: the longest.
        failures: calls that failed, those that were refused or cancelled included.
        total_s: all of them together.
    """

    name: str
    count: int
    nbytes: int
    p50_s: float
    p99_s: float
    max_s: float
    failures: int
    total_s: float


@dataclass(frozen=True, slots=True)
class StrategyStatistics:
    """The calls of ``monitored_all_reduce`` under one strategy.

    Attributes:
        name: of the strategy.
        count: calls that are complete.
        nbytes: of their arrays, together.
        seconds: from post to completion, together.
        throughput: bytes per second of the latest call.
        reference: bytes per second to expect: it follows the throughput slowly, by a tenth of the way with each call.
            A throughput under 0.8 of it is a sign of interference (KungFu, OSDI 2020). It means something where the
            monitored calls are of one size.
    """

    name: str
    count: int
    nbytes: int
    seconds: float
    throughput: float
    reference: float


@dataclass(frozen=True, slots=True)
class StepStatistics:
    """Training steps whose gradients are averaged while the program computes (``kfcomm.torch.attach``), on this rank.

    Attributes:
        name: of the attached model.
        count: steps that have ended.
        nbytes: of their gradients, together.
        in_flight_s: for how long any gradient was under way, as far as the program has looked: it looks when a gradient
            comes, and when a module is called.
        waited_s: for how long the program stood still until one had come.
        waited_for: the names that it has waited for, with seconds; the longest first.
    """

    name: str
    count: int
    nbytes: int
    in_flight_s: float
    waited_s: float
    waited_for: tuple[tuple[str, float], ...]

    @property
    def hidden_s(self) -> float:
        """For how long gradients travelled while the program computed."""
        return max(0.0, self.in_flight_s - self.waited_s)


@dataclass(frozen=True, slots=True)
class Statistics:
    """Counters and timings of one rank.

    Attributes:
        time_s: when it was read, by the wall clock.
        rank: in the group whose statistics these are.
        size: of that group.
        strategy: name of the strategy in force in it.
        peers: of this process, whatever the group; one record for each kind of link to each, those with which no link
            was ever open left out.
        keys: of the group, in the order of first use.
        others: what was called under the names beyond the first ``engine.meter.MAX_KEYS``; None if there are no more.
        strategies: of the group, where ``monitored_all_reduce`` was called.
        loop_lag_s: how late this process's event loop is.
        peak_memory_nbytes: the most memory that this process ever had resident; 0 if that is not known.
        slots: names that this process has come to exchange in slots of shared memory, with a signature each.
        slots_nbytes: what these may take of its memory.
        symmetric_nbytes: of its arrays in symmetric memory, and of results that are shared.
        epoch: number of the membership; how often the ranks have changed.
        gauges: what ``kfcomm.train`` says of the training, by name, the latest values: ``noise_scale``, ``staleness``.
        steps: of models that are attached in the group.
    """

    time_s: float
    rank: int
    size: int
    strategy: str
    peers: tuple[PeerStatistics, ...]
    keys: tuple[KeyStatistics, ...]
    others: KeyStatistics | None
    strategies: tuple[StrategyStatistics, ...]
    loop_lag_s: float
    peak_memory_nbytes: int
    slots: int = 0
    slots_nbytes: int = 0
    symmetric_nbytes: int = 0
    epoch: int = 0
    gauges: Mapping[str, float] = field(default_factory=dict)
    steps: tuple[StepStatistics, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """The same as a mapping that ``json.dumps`` takes."""
        return asdict(self)

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Self:
        """Inverse of ``as_json``, also after a way through JSON.

        Raises:
            TypeError, KeyError: it is something else.
        """
        fields = dict(record)
        fields["peers"] = tuple(PeerStatistics(**one) for one in fields["peers"])
        fields["keys"] = tuple(KeyStatistics(**one) for one in fields["keys"])
        fields["others"] = None if fields["others"] is None else KeyStatistics(**fields["others"])
        fields["strategies"] = tuple(StrategyStatistics(**one) for one in fields["strategies"])
        fields["steps"] = tuple(_step(**one) for one in fields["steps"])
        return cls(**fields)


def _step(waited_for: Sequence[Sequence[Any]], **fields: Any) -> StepStatistics:
    return StepStatistics(waited_for=tuple((name, seconds) for name, seconds in waited_for), **fields)
