"""Reasons for what `auto` takes, in words: shared uplinks, and what graphs by hosts or racks save on them."""

from __future__ import annotations

from collections.abc import Iterator

from kfcomm.strategies.base import Strategy
from kfcomm.strategies.cost import measure
from kfcomm.types import Layout, Rates


def uplinks_in_words(rates: Rates) -> Iterator[str]:
    """A line for each uplink."""
    for uplink in rates.uplinks:
        hosts = ", ".join(map(str, uplink.hosts))
        ports = sum(rates.send[host] for host in uplink.hosts)
        yield (
            f"  hosts {hosts} share an uplink of {uplink.send / 1e6:.1f} MB/s out and {uplink.receive / 1e6:.1f} in, "
            f"{uplink.send / ports:.0%} of what their ports can send"
        )


def reason(strategy: Strategy, runner_up: Strategy, layout: Layout, rates: Rates | None) -> Iterator[str]:
    """A line that says what a combination or graphs by racks send, beside the next best; none for other strategies."""
    by_rack = "racks" in strategy.name
    if not by_rack and not strategy.name.startswith("inside: "):
        return
    groups, what = layout, "the busiest host sends to others, or receives"
    if by_rack and rates is not None:
        racks = rates.rack_of
        groups = Layout.of(("rack", racks[host]) if racks[host] is not None else host for host in layout.hosts)
        what = "the busiest uplink carries"
    ours, theirs = measure(strategy, groups), measure(runner_up, groups)
    yield (
        f"    of each byte of a message {what} {float(ours.cross_host_bytes):.2f}, in {ours.steps} steps; "
        f"the next best {float(theirs.cross_host_bytes):.2f}, in {theirs.steps}"
    )
