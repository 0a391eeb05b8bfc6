"""Traffic shaping of one direction of a link, with fair shares: lines for tc(8), and its output.

htb, the hierarchical token bucket (tc-htb(8)): one class has the rate, and below it stands one for each other host,
told by address (tc-u32(8)). They take turns, a bucket each, so that hosts which use a link at once have equal parts of
it. A plain queue gave what the hosts' windows happened to be: of seven that received from one host, three got 57 Mbit/s
and four got 5, and a star took 4.1 s for 8 MiB that takes 2.7 s.

Acknowledgements go first. Behind the data that goes their way they would hold up the data that they answer: while seven
hosts sent to one at its full rate, that one sent a seventh of what it could.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from bench.netlab.rates import Bucket, parse_rate

QUEUE_NBYTES = 64 << 20
TAIL_QUEUE_S = 0.05
"""What waits at most in a drop-tail queue, in seconds at its rate."""
_LEAST_QUEUE_NBYTES = 32_000
_ROOT, _WHOLE, _REST, _FIRST = "1:", "1:1", 2, 16
_ACKNOWLEDGEMENT = "u32 match ip protocol 6 0xff match u16 0 0xffc0 at 2"
"""TCP with less than 64 bytes of IP: next to no data beside the headers and timestamps."""


@dataclass(frozen=True, slots=True)
class Shaper:
    """One direction of one host's link.

    Attributes:
        interface: where it waits: the host's own for what leaves it, the bridge's end for what goes there.
        field: of the IP header, that tells the other host: ``dst`` or ``src``.
        peers: addresses of all hosts; the host's own does no harm.
    """

    interface: str
    field: str
    peers: tuple[str, ...]

    def added(self, bucket: Bucket) -> list[str]:
        """The lines that begin to limit it."""
        lines = [f"qdisc add dev {self.interface} root handle {_ROOT} htb default {_REST:x}"]
        lines += self._classes("add", bucket)
        filters = f"filter add dev {self.interface} parent {_ROOT} protocol ip"
        lines.append(f"{filters} prio 1 {_ACKNOWLEDGEMENT} flowid 1:{_REST:x}")
        for number, address in enumerate(self.peers, start=_FIRST):
            lines.append(f"qdisc add dev {self.interface} parent 1:{number:x} bfifo limit {QUEUE_NBYTES}")
            lines.append(f"{filters} prio 2 u32 match ip {self.field} {address}/32 flowid 1:{number:x}")
        return lines

    def changed(self, bucket: Bucket) -> list[str]:
        """The lines that give it another rate; what waits there stays."""
        return self._classes("change", bucket)

    def removed(self) -> list[str]:
        """The lines that limit it no longer."""
        return [f"qdisc delete dev {self.interface} root"]

    def _classes(self, verb: str, bucket: Bucket) -> list[str]:
        burst = f"burst {bucket.burst_nbytes}b cburst {bucket.burst_nbytes}b quantum {bucket.burst_nbytes}"
        whole, part = f"{round(bucket.rate)}bit", f"{max(8, int(bucket.rate / 4 / (len(self.peers) + 1)))}bit"
        classes = [(_ROOT, _WHOLE, whole, 0), (_WHOLE, f"1:{_REST:x}", part, 0)]
        classes += [(_WHOLE, f"1:{number:x}", part, 1) for number, _ in enumerate(self.peers, start=_FIRST)]
        return [
            f"class {verb} dev {self.interface} parent {parent} classid {name} "
            f"htb rate {rate} ceil {whole} prio {order} {burst}"
            for parent, name, rate, order in classes
        ]


@dataclass(frozen=True, slots=True)
class TailShaper:
    """One direction of one link, as a switch has it: one queue, first in, first out, that drops what does not fit.

    Attributes:
        interface: where it waits.
        limits: rates in bits per second of what goes to single addresses, below that of the whole.
    """

    interface: str
    limits: Mapping[str, float] = field(default_factory=dict)

    def added(self, bucket: Bucket) -> list[str]:
        """The lines that begin to limit it."""
        lines = [f"qdisc add dev {self.interface} root handle {_ROOT} htb default {_REST:x}"]
        lines += self._classes("add", bucket)
        rates = (bucket.rate, *self.limits.values())
        for number, rate in zip((_REST, *self._numbers), rates, strict=True):
            limit = max(_LEAST_QUEUE_NBYTES, round(rate / 8 * TAIL_QUEUE_S))
            lines.append(f"qdisc add dev {self.interface} parent 1:{number:x} bfifo limit {limit}")
        filters = f"filter add dev {self.interface} parent {_ROOT} protocol ip prio 1 u32 match ip dst"
        lines += [
            f"{filters} {address}/32 flowid 1:{number:x}"
            for address, number in zip(self.limits, self._numbers, strict=True)
        ]
        return lines

    def changed(self, bucket: Bucket) -> list[str]:
        """The lines that give it another rate."""
        return self._classes("change", bucket)

    def removed(self) -> list[str]:
        """The lines that limit it no longer."""
        return [f"qdisc delete dev {self.interface} root"]

    @property
    def _numbers(self) -> range:
        return range(_FIRST, _FIRST + len(self.limits))

    def _classes(self, verb: str, bucket: Bucket) -> list[str]:
        burst = f"burst {bucket.burst_nbytes}b cburst {bucket.burst_nbytes}b quantum {bucket.burst_nbytes}"
        classes = [(_ROOT, _WHOLE, bucket.rate), (_WHOLE, f"1:{_REST:x}", bucket.rate)]
        classes += [
            (_WHOLE, f"1:{number:x}", rate) for number, rate in zip(self._numbers, self.limits.values(), strict=True)
        ]
        return [
            f"class {verb} dev {self.interface} parent {parent} classid {name} "
            f"htb rate {round(rate)}bit ceil {round(rate)}bit {burst}"
            for parent, name, rate in classes
        ]


def shown_rate(text: str) -> float | None:
    """Bits per second in the output of ``tc class show``; None without a limit."""
    match = re.search(rf"class htb {_WHOLE} root .*?rate (\S+)", text)
    return None if match is None else parse_rate(match[1])
