"""Statistics of a communicator: frozen records that JSON can carry, and how they are made from the engine's figures.

Each number is right at the moment when it is read; of numbers that belong together one may be a chunk ahead.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from kfcomm.core.collective import OWN_NAMES
from kfcomm.engine.meter import Meter, Tally, steady
from kfcomm.errors import ConfigError
from kfcomm.transports.tcp_path import TcpPath

if TYPE_CHECKING:
    from kfcomm.collectives.group import Group
    from kfcomm.engine.engine import Engine
    from kfcomm.engine.session import Session

logger = logging.getLogger("kfcomm")


@dataclass(frozen=True, slots=True)
class PeerStatistics:
    """Traffic with one peer over one kind of link.

    Attributes:
        rank: of the peer, in the world.
        link: ``shm``, ``unix``, ``tcp`` or ``memory``.
        sent_nbytes, received_nbytes: since the beginning of the epoch; on sockets as they go over the wire, heads
            included, through shared memory the payloads, and what is read in slots. What is read of a peer's memory
            without its help (``request``) counts where it is read.
        sent_messages, received_messages: frames, chunks and the small ones that speak of them, and uses of slots.
        send_rate, receive_rate: bytes per second over the last one to two seconds.
        waited_s: seconds that collectives of this process have waited for chunks of this peer (see
            ``engine.meter``). With several in flight each counts, so it may grow faster than the clock. With two kinds
            of link to a peer it is in the record of the later one.
        path: the kernel's measurements of the way to the peer, over TCP on Linux while it is open; else None.
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
    path: TcpPath | None = None

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Self:
        """Inverse of ``asdict``."""
        path = record.get("path")
        return cls(**_known(cls, record) | {"path": None if path is None else TcpPath(**_known(TcpPath, path))})


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
class RecentEvent:
    """A rare event of the whole job, as this rank saw it.

    Attributes:
        time_s: when, by the wall clock.
        kind: ``lost``, ``left``, ``epoch`` (the ranks have changed), ``strategy``, ``strategy refused``, ``decision``.
        what: the rank, the strategy, or what a policy has decided.
        why: the reason, where one is known.
    """

    time_s: float
    kind: str
    what: str
    why: str


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
        events: losses, changes of the ranks and of strategies, decisions of policies: the latest, oldest first.
        in_flight: calls of this process that have begun and are not complete.
        longest_wait_s: for how long the oldest of these, or a receive, has waited.
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
    events: tuple[RecentEvent, ...] = ()
    in_flight: int = 0
    longest_wait_s: float = 0.0

    def as_json(self) -> dict[str, Any]:
        """The same as a mapping that ``json.dumps`` takes."""
        return asdict(self)

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Self:
        """Inverse of ``as_json``, also after a way through JSON. Fields that a newer version tells are left out.

        Raises:
            TypeError, KeyError: it is something else.
        """
        fields = _known(cls, record)
        fields["peers"] = tuple(map(PeerStatistics.from_json, fields["peers"]))
        if fields["others"] is not None:
            fields["others"] = KeyStatistics(**_known(KeyStatistics, fields["others"]))
        fields["steps"] = [{**one, "waited_for": tuple(map(tuple, one["waited_for"]))} for one in fields["steps"]]
        kinds = (KeyStatistics, StrategyStatistics, StepStatistics, RecentEvent)
        for name, kind in zip(("keys", "strategies", "steps", "events"), kinds, strict=True):
            fields[name] = tuple(kind(**_known(kind, one)) for one in fields.get(name, ()))
        return cls(**fields)


def statistics_in(answer: Any) -> Statistics | None:
    """Statistics in a rank's decoded answer; None if it is something else."""
    try:
        return None if answer is None else Statistics.from_json(answer)
    except (ValueError, TypeError, KeyError) as error:
        logger.debug("an answer without statistics: %r", error)
        return None


def _known(cls: Any, record: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a record, without those that a class lacks."""
    return {name: value for name, value in record.items() if name in cls.__dataclass_fields__}


OTHERS = "(others)"
OWN = "(kfcomm itself)"
"""What kfcomm does itself, all of it together."""
DATA = "(data)"
"""Ends the title of the second step of calls that tell their shapes first."""
_STEPS_ALONE = {"(strategy)", "(probe)", "(order)"}
"""Titles of keys without a name."""


def statistics_of(
    session: Session, group: Group, message_groups: Callable[[], Collection[bytes]], *, with_keys: bool = True
) -> Statistics:
    """The statistics of one group; ``message_groups`` gives the ids under which its messages travel.

    Without keys, which cost some 2 µs each, ``keys`` is empty and ``others`` None.

    Raises:
        ConfigError: monitoring is off.
    """
    meter = session.engine.meter
    if meter is None:
        raise ConfigError("monitoring is off: set monitor=True, or KFCOMM_MONITOR=1, for statistics")
    tallies, others = tallies_of(meter, {group.view.id, *steady(message_groups)}) if with_keys else ({}, None)
    waits = _waits(session.engine)
    heaps = session.network.heaps()
    return Statistics(
        time_s=time.time(),
        rank=group.view.rank,
        size=group.view.size,
        strategy=group.strategy.name,
        peers=peers_of(session.engine, meter),
        keys=tuple(_key(name, tally) for name, tally in tallies.items()),
        others=None if others is None else _key(OTHERS, others),
        strategies=_strategies(meter, group.view.id),
        loop_lag_s=session.lag.lag_s(),
        peak_memory_nbytes=peak_memory_nbytes(),
        slots=session.engine.slots.num_taken,
        slots_nbytes=session.engine.slots.taken_nbytes,
        symmetric_nbytes=0 if heaps is None else heaps.used_nbytes,
        epoch=session.epoch,
        gauges=steady(lambda: dict(meter.gauges)),
        steps=_steps(meter, group.view.id),
        events=tuple(RecentEvent(*one) for one in steady(lambda: list(session.engine.recorder.news))),
        in_flight=len(waits),
        longest_wait_s=max([0.0, *waits, *_receives(session.engine)]),
    )


def _waits(engine: Engine) -> list[float]:
    now_s = engine.reactor.time()
    return [now_s - operation.posted_s for operation in steady(engine.in_flight)]


def _receives(engine: Engine) -> list[float]:
    return [one["waited_s"] for waits in steady(lambda: list(engine.receivers)) for one in steady(waits)]


def peers_of(engine: Engine, meter: Meter) -> tuple[PeerStatistics, ...]:
    """Traffic with each peer, by rank."""
    totals = engine.links.traffic.totals()
    rates = engine.links.traffic.rates(totals, time.monotonic())
    kinds = dict(totals.keys())  # of the latest link to each peer
    paths = engine.links.traffic.tcp_paths()
    found = [
        PeerStatistics(
            rank=peer,
            link=kind,
            sent_nbytes=counts.sent_nbytes,
            received_nbytes=counts.received_nbytes,
            sent_messages=counts.sent_messages,
            received_messages=counts.received_messages,
            send_rate=rates[peer, kind][0],
            receive_rate=rates[peer, kind][1],
            waited_s=meter.waited_s[peer] if kinds[peer] == kind else 0.0,
            path=paths.get(peer) if kind == "tcp" else None,
        )
        for (peer, kind), counts in totals.items()
    ]
    return tuple(sorted(found, key=lambda one: one.rank))


def tallies_of(meter: Meter, ids: Collection[bytes] | None = None) -> tuple[dict[str, Tally], Tally | None]:
    """Tallies of the calls by name in some groups, and one of the names beyond ``MAX_KEYS``.

    Without ``ids``: of all groups, also those of earlier epochs. The messages of a tag share one tally.
    """
    tallies, others = meter.tallies()
    by_name: dict[str, list[Tally]] = {}
    for (group_id, name), tally in tallies.items():
        if ids is None or group_id in ids:
            by_name.setdefault(title(name), []).append(tally)
    rest = [tally for group_id, tally in others.items() if ids is None or group_id in ids]
    if ids is None and meter.earlier is not None:
        for name, tally in meter.earlier.tallies.items():
            by_name.setdefault(title(name), []).append(tally)
        rest += [] if meter.earlier.others is None else [meter.earlier.others]
    return {name: summed(found) for name, found in by_name.items()}, summed(rest) if rest else None


def summed(tallies: Sequence[Tally]) -> Tally:
    """Their sum at this moment."""
    return steady(lambda: Tally.sum(tallies))


def title(name: str) -> str:
    """A key as people know it: keys of further steps hold a NUL, that of unnamed calls is empty."""
    name, _, step = name.partition("\0")
    return f"{name} ({step})".lstrip() if step else name


def is_own(name: str) -> bool:
    """Whether a key of this title was made by kfcomm itself, and not by a call of the program."""
    plain = name.removeprefix("object ").removeprefix("tag ").lstrip("'")
    return plain.startswith(OWN_NAMES) or name in _STEPS_ALONE


def peak_memory_nbytes() -> int:
    """The most memory that this process ever had resident; 0 if the system does not say."""
    try:
        import resource
    except ImportError:
        return 0
    # Bytes on macOS, KiB on Linux (getrusage(2)).
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _key(name: str, tally: Tally) -> KeyStatistics:
    return KeyStatistics(
        name=name,
        count=tally.count,
        nbytes=tally.nbytes,
        p50_s=tally.quantile(0.5),
        p99_s=tally.quantile(0.99),
        max_s=tally.max_s,
        failures=tally.failures,
        total_s=tally.total_s,
    )


def _strategies(meter: Meter, group_id: bytes) -> tuple[StrategyStatistics, ...]:
    found = steady(lambda: list(meter.throughputs.get(group_id, {}).items()))
    return tuple(
        StrategyStatistics(name, one.count, one.nbytes, one.seconds, one.last, one.reference) for name, one in found
    )


def _steps(meter: Meter, group_id: bytes) -> tuple[StepStatistics, ...]:
    found = steady(lambda: [(name, one) for (group, name), one in meter.steps.items() if group == group_id])
    return tuple(
        StepStatistics(
            name=name,
            count=one.count,
            nbytes=one.nbytes,
            in_flight_s=one.in_flight_s,
            waited_s=one.waited_s,
            waited_for=tuple(sorted(steady(partial(list, one.waited_for.items())), key=lambda item: -item[1])),
        )
        for name, one in found
    )
