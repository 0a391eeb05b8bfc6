"""Shares of a drop-tail port where flows of unlike hosts meet (incast).

A queue that is served first in, first out, and drops what does not fit, gives each flow the part of the port that
it has of the queue. These parts differ:

- A flow brings what its own port and links let through, and a port's worth at most: so its share is in proportion to
  ``min(rate at which it arrives, rate of the port)``.
- TCP's rate under losses that hit all flows alike falls with the square of the round trip. Where the
  acknowledgements of a sender wait in a second full queue, because others send to that sender meanwhile, the round trip
  is twice as long: its share is a quarter (`RELAY`).

`drain_s` is the closed form for one port, `pipelined_s` that of a root that passes on what all have sent. The simulator
gives its ports the same weights.

Fitted to one bed of five hosts in network namespaces (tbf, 50 ms of queue; 400/400/400/100/50 Mbit/s), and checked on
others: the same with the slow hosts first, and both at an eighth of the rates. Fair shares were 11 to 27 % too
optimistic where unlike senders meet, these −14 to +3 %.

Source: T. Lakshman and U. Madhow, "The performance of TCP/IP for networks with high bandwidth-delay products and random
loss" (1997), for the square of the round trip at drop-tail queues.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

RELAY: Final = 0.25
"""Of its weight, what a sender keeps whose acknowledgements wait in a full queue: (1/2)², see above."""


class Sender(NamedTuple):
    """Traffic of one host to a port."""

    nbytes: float
    rate: float  # bytes per second at which it arrives there at most
    is_relay: bool = False  # others send to this host at the same time


def weight_of(rate: float, port: float) -> float:
    """The weight of a flow that arrives with ``rate`` bytes per second, in a port of ``port`` bytes per second."""
    return min(rate, port)


def drain_s(senders: Sequence[Sender], port: float) -> float:
    """Seconds until all has arrived that ``senders`` begin to send at once through a port of ``port`` bytes/s.

    At least ``sum(nbytes) / port`` and ``nbytes / rate`` of each; more where a slow sender loses its part to fast ones
    and is alone afterwards. O(k²) for k senders.
    """
    return max((end_s for end_s, _ in _phases(senders, port)), default=0.0)


def pipelined_s(senders: Sequence[Sender], port: float, out_s_per_byte: float) -> float:
    """Seconds until a root has sent on the whole result, each part of it as soon as all senders have sent theirs.

    All senders have equally much. The root sends a byte of the result to its children in ``out_s_per_byte`` seconds.
    """
    total = max((sender.nbytes for sender in senders), default=0.0)
    left = [(0.0, total), *((end_s, max(rest)) for end_s, rest in _phases(senders, port))]
    # The out port is busy from some moment on with all that was not there before.
    return max(at_s + rest * out_s_per_byte for at_s, rest in left)


def _phases(senders: Sequence[Sender], port: float) -> Iterator[tuple[float, list[float]]]:
    """The moments at which a sender is done, with the bytes that each has left then."""
    left = [sender.nbytes for sender in senders]
    now_s = 0.0
    while any(left):
        speeds = _speeds(senders, left, port)
        step_s = min(rest / speed for rest, speed in zip(left, speeds, strict=True) if rest)
        now_s += step_s
        # What is left of rounding ends here, so that each phase ends at least one sender.
        left = [
            rest - speed * step_s if rest and rest / speed > step_s * (1 + 1e-12) else 0.0
            for rest, speed in zip(left, speeds, strict=True)
        ]
        yield now_s, left


def _speeds(senders: Sequence[Sender], left: Sequence[float], port: float) -> list[float]:
    """Bytes per second of those that have something left: by weight, and what one cannot use is the others'."""
    weights = [
        weight_of(sender.rate, port) * (RELAY if sender.is_relay else 1.0) if rest else 0.0
        for sender, rest in zip(senders, left, strict=True)
    ]
    speeds = [0.0 if not weight else math.inf for weight in weights]
    free, open_ = port, [at for at, weight in enumerate(weights) if weight]
    while open_:
        unit = free / sum(weights[at] for at in open_)
        held = [at for at in open_ if senders[at].rate <= unit * weights[at]]
        for at in held or open_:
            speeds[at] = senders[at].rate if held else unit * weights[at]
        if not held:
            break
        free -= sum(speeds[at] for at in held)
        open_ = [at for at in open_ if at not in held]
    return speeds
