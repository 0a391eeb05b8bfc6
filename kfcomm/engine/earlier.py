"""Counts of one rank in earlier epochs, so that counters keep growing across a change of the ranks.

Peers are identified by their ranks, which other processes have in another epoch: these sums cover all of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from kfcomm.engine.meter import Tally
from kfcomm.engine.traffic import Totals, added

if TYPE_CHECKING:
    from kfcomm.engine.meter import Meter
    from kfcomm.engine.traffic import Traffic


class Earlier(NamedTuple):
    """Sums over epochs that are over.

    Attributes:
        tallies: of the calls, by name.
        others: of those beyond ``meter.MAX_KEYS``, or None.
        totals: what was moved; see ``Traffic.totals``.
        waited_s: by rank.
    """

    tallies: dict[str, Tally]
    others: Tally | None
    totals: Totals
    waited_s: dict[int, float]


def with_epoch(meter: Meter, traffic: Traffic) -> Earlier:
    """Add the counts of a finished epoch to those of all before it. O(keys)."""
    before = meter.earlier or Earlier({}, None, {}, {})
    tallies, others = meter.tallies()
    by_name = {name: [tally] for name, tally in before.tallies.items()}
    for (_, name), tally in tallies.items():
        by_name.setdefault(name, []).append(tally)
    rest = [*([] if before.others is None else [before.others]), *others.values()]
    return Earlier(
        {name: found[0] if len(found) == 1 else Tally.sum(found) for name, found in by_name.items()},
        Tally.sum(rest) if rest else None,
        added(before.totals, traffic.totals()),
        before.waited_s | {rank: one + before.waited_s.get(rank, 0.0) for rank, one in enumerate(meter.waited_s)},
    )
