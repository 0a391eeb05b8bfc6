"""Rates of links from what the kernel has measured while collectives used them: no message of ours.

They tell links that are alike from links that are not, roughly. Flows that meet in a port share it, so what a link
carried is a lower bound of its rate, and no picture for a choice of graphs: see `kfcomm.probe.live` for that.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from kfcomm.core.collective import GroupView
    from kfcomm.engine.traffic import Traffic
    from kfcomm.types import Layout

LEAST_NBYTES: Final = 1 << 20
"""A link that has carried less says nothing yet."""
LEAST_MESSAGE_NBYTES: Final = 1 << 15
"""Shorter messages, on average, show the round trip rather than the rate."""
LEAST_BUSY_S: Final = 0.02
ALIKE: Final = 1.25
"""Rates of links that are alike differ by this factor at most: what differs more is measured."""


class SeenLink(NamedTuple):
    """Link of a rank to a rank on another host."""

    source: int  # host
    target: int  # host
    rate: float  # bytes/s while data was under way


def seen_links(traffic: Traffic, view: GroupView, layout: Layout) -> list[SeenLink]:
    """Links of this rank to ranks of its group on other hosts, as far as they have carried enough. A call per link."""
    here = layout.hosts[view.rank]
    sent = {peer: counts for (peer, _), counts in traffic.totals().items()}
    found = []
    for peer, path in traffic.tcp_paths().items():
        there = layout.hosts[view.index[peer]] if peer in view.index else here
        counts = sent.get(peer)
        if there == here or counts is None or path.acked_nbytes < LEAST_NBYTES or path.busy_s < LEAST_BUSY_S:
            continue
        if counts.sent_nbytes >= LEAST_MESSAGE_NBYTES * counts.sent_messages:
            found.append(SeenLink(here, there, path.mean_rate))
    return found


def are_alike(links: Iterable[Sequence[float]], num_hosts: int) -> bool:
    """Whether hosts are alike for certain: each is at both ends of links that were seen, with about one rate."""
    rates: dict[tuple[int, int], float] = {}
    for source, target, rate in links:
        way = int(source), int(target)
        rates[way] = max(rate, rates.get(way, 0.0))
    senders, receivers = ({way[end] for way in rates} for end in (0, 1))
    if len(senders) < num_hosts or len(receivers) < num_hosts:
        return False
    return max(rates.values()) <= ALIKE * min(rates.values())
