"""Shares of a drop-tail port where flows of unlike hosts meet (incast).

A queue that is served first in, first out, and drops what does not fit, gives each flow the part of the port that
it has of the queue. These parts differ:

- A flow brings what its own port and links let through, and a port's worth at most: so its share is in proportion to
  ``min(rate at which it arrives, rate of the port)``.
- TCP's rate under losses that hit all flows alike falls with the square of the round trip. Where the
  acknowledgements of a sender wait in a second full queue, because others send to that sender meanwhile, the round trip
  is twice as long: its share is a quarter (`RELAY`).

An all_reduce hardly meets this, since its leaves have windows (`kfcomm.strategies.chunks`): a fast sender that has used
up its window leaves the port to slow ones. Other verbs do.

Source: T. Lakshman and U. Madhow, "The performance of TCP/IP for networks with high bandwidth-delay products and random
loss" (1997), for the square of the round trip at drop-tail queues.
"""

from __future__ import annotations

from typing import Final

RELAY: Final = 0.25
"""Of its weight, what a sender keeps whose acknowledgements wait in a full queue: (1/2)², see above."""


def weight_of(rate: float, port: float) -> float:
    """The weight of a flow that arrives with ``rate`` bytes per second, in a port of ``port`` bytes per second."""
    return min(rate, port)
