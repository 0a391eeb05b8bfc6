"""Shares of a drop-tail port where flows of unlike hosts meet (incast).

A queue that is served first in, first out, and drops what does not fit, gives each flow the part of the port that
it has of the queue. These parts differ:

- A flow brings what its own port and links let through, and a port's worth at most: so its share is in proportion to
  ``min(rate at which it arrives, rate of the port)``. A host that folds what others send brings no more than the
  slowest of these (see `relays`).
- TCP's rate under losses that hit all flows alike falls with the square of the round trip. While the
  acknowledgements of a sender wait in a second full queue, because others fill the port of that sender, the round trip
  is twice as long: its share is a quarter (`RELAY`). A relay that has all of its fast senders' data has its whole share
  again, and then takes it from slow senders.

`drain_s` is the closed form for one port, `pipelined_s` that of a root that passes on what all have sent. The simulator
gives its ports the same weights.

Fitted to one bed of five hosts in network namespaces (tbf, 50 ms of queue; 400/400/400/100/50 Mbit/s), and checked on
others: the same with the slow hosts first, and both at an eighth of the rates. Fair shares were 11 to 27 % too
optimistic where unlike senders meet, these −14 to +3 %. How long a relay has a quarter, and what it brings, was read
from the bytes that passed each port on the bed with the slow hosts first.

Source: T. Lakshman and U. Madhow, "The performance of TCP/IP for networks with high bandwidth-delay products and random
loss" (1997), for the square of the round trip at drop-tail queues.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

RELAY: Final = 0.25
"""Of its weight, what a sender keeps whose acknowledgements wait in a full queue: (1/2)², see above."""
_FULL: Final = 0.99
"""Of a port's rate, from which on a queue stands before it: the rest is rounding and noise of measured rates."""


class Sender(NamedTuple):
    """Traffic of one host to a port."""

    nbytes: float
    rate: float  # bytes per second at which it arrives there at most
    relays_s: float = 0.0  # for how long others fill this host's own port


def weight_of(rate: float, port: float) -> float:
    """The weight of a flow that arrives with ``rate`` bytes per second, in a port of ``port`` bytes per second."""
    return min(rate, port)


def drain_s(senders: Sequence[Sender], port: float) -> float:
    """Seconds until all has arrived that ``senders`` begin to send at once through a port of ``port`` bytes/s.

    At least ``sum(nbytes) / port`` and ``nbytes / rate`` of each; more where a slow sender loses its part to fast ones
    and is alone afterwards. O(k²) for k senders.
    """
    return max((phase.end_s for phase in _phases(senders, port)), default=0.0)


def full_s(senders: Sequence[Sender], port: float) -> float:
    """Seconds for which ``senders`` that begin at once fill a port of ``port`` bytes/s. O(k²)."""
    filled_s = 0.0
    for phase in _phases(senders, port):
        if sum(phase.speeds) < _FULL * port:
            break
        filled_s = phase.end_s
    return filled_s


def pipelined_s(senders: Sequence[Sender], port: float, out_s_per_byte: float) -> float:
    """Seconds until a root has sent on the whole result, each part of it as soon as all senders have sent theirs.

    All senders have equally much. The root sends a byte of the result to its children in ``out_s_per_byte`` seconds.
    """
    total = max((sender.nbytes for sender in senders), default=0.0)
    left = [(0.0, total), *((phase.end_s, max(phase.left)) for phase in _phases(senders, port))]
    # The out port is busy from some moment on with all that was not there before.
    return max(at_s + rest * out_s_per_byte for at_s, rest in left)


class _Phase(NamedTuple):
    """Time in which speeds do not change."""

    end_s: float
    speeds: Sequence[float]  # bytes per second of each sender
    left: Sequence[float]  # bytes of each sender at the end


def _phases(senders: Sequence[Sender], port: float) -> Iterator[_Phase]:
    """Phases until all senders are done; a phase ends when a sender is done, or has its whole weight again."""
    left: Sequence[float] = [sender.nbytes for sender in senders]
    changes_s = sorted({sender.relays_s for sender in senders}, reverse=True)
    now_s = 0.0
    while any(left):
        speeds = _speeds(senders, left, port, now_s)
        step_s = min(rest / speed for rest, speed in zip(left, speeds, strict=True) if rest)
        while changes_s and changes_s[-1] <= now_s:
            changes_s.pop()
        if changes_s:
            step_s = min(step_s, changes_s[-1] - now_s)
        now_s += step_s
        # What is left of rounding ends here, so that a phase that is not cut short ends at least one sender.
        left = [
            rest - speed * step_s if rest and rest / speed > step_s * (1 + 1e-12) else 0.0
            for rest, speed in zip(left, speeds, strict=True)
        ]
        yield _Phase(now_s, speeds, left)


def _speeds(senders: Sequence[Sender], left: Sequence[float], port: float, now_s: float) -> list[float]:
    """Bytes per second of those that have something left: by weight, and what one cannot use is the others'."""
    weights = [
        min(rate, port) * (RELAY if relays_s > now_s else 1.0) if rest else 0.0
        for (_, rate, relays_s), rest in zip(senders, left, strict=True)
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
