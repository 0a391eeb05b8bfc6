"""Statistics of a communicator, made from the figures of the engine."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from kfcomm.core.collective import OWN_NAMES
from kfcomm.engine.meter import Meter, Tally, steady
from kfcomm.errors import ConfigError
from kfcomm.monitor.records import (
    KeyStatistics,
    PeerStatistics,
    Statistics,
    StepStatistics,
    StrategyStatistics,
)

if TYPE_CHECKING:
    from kfcomm.collectives.group import Group
    from kfcomm.engine.engine import Engine
    from kfcomm.engine.session import Session

OTHERS = "(others)"
OWN = "(kfcomm itself)"
"""What kfcomm does itself, all of it together."""
DATA = "(data)"
"""Ends the title of the second step of calls that tell their shapes first."""
_STEPS_ALONE = {"(strategy)", "(probe)", "(order)"}
"""Titles of keys without a name."""


def statistics_of(session: Session, group: Group, message_groups: Callable[[], Collection[bytes]]) -> Statistics:
    """The statistics of one group; ``message_groups`` gives the ids under which its messages travel.

    Raises:
        ConfigError: monitoring is off.
    """
    meter = session.engine.meter
    if meter is None:
        raise ConfigError("monitoring is off: set monitor=True, or KFCOMM_MONITOR=1, for statistics")
    ids = {group.view.id, *steady(message_groups)}
    tallies, others = tallies_of(meter, ids)
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
        symmetric_nbytes=session.network.room_nbytes(),
        epoch=session.epoch,
        gauges=steady(lambda: dict(meter.gauges)),
        steps=_steps(meter, group.view.id),
    )


def peers_of(engine: Engine, meter: Meter) -> tuple[PeerStatistics, ...]:
    """Traffic with each peer, by rank."""
    totals = engine.links.traffic.totals()
    rates = engine.links.traffic.rates(totals, time.monotonic())
    kinds = dict(totals.keys())  # of the latest link to each peer
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
            waited_for=tuple(sorted(steady(partial(_items, one.waited_for)), key=lambda item: -item[1])),
        )
        for name, one in found
    )


def _items(seconds: Mapping[str, float]) -> list[tuple[str, float]]:
    return list(seconds.items())
