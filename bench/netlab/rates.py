"""Rates of links as people write them, and the token bucket that holds a link to one. Knows no tool, no namespace.

A rate is bits per second, headers included: what tc(8) means by it. Of a full frame of the usual 1,500 bytes, 1,448
are payload of TCP (timestamps on), and 14 of Ethernet come on top.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from kfcomm.errors import ConfigError

ETHERNET_NBYTES = 14
TCP_NBYTES = 52
"""IPv4's header, TCP's, and its timestamps: part of the MTU."""
MIN_MTU, MAX_MTU = 576, 9000

BURST_S = 0.00064
"""How long a link may lag behind and make up for it. With a quarter of it, rings of eight reached 90 % of the rate."""
WINDOW_S = 0.004
"""What one connection may have under way. Two buckets' worth is needed; more would only wait."""
_MIN_FRAMES = 3
_MIN_WINDOW_FRAMES = 16
_MAX_BURST_NBYTES = 64 << 10
_MIN_RATE, _MAX_RATE = 64e3, 100e9

_SCALES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}
_RATE = re.compile(r"\s*(\d{1,12}(?:\.\d{1,6})?)\s*([kmg]?)bit(?:/s)?\s*", re.IGNORECASE)
_UNLIMITED = "unlimited"


def parse_rate(text: str) -> float | None:
    """Bits per second of ``200mbit``, ``200 Mbit/s`` or ``1.5gbit``; None of ``unlimited``.

    Raises:
        ConfigError: it is not a rate, or cannot be held.
    """
    if text.strip().lower() == _UNLIMITED:
        return None
    match = _RATE.fullmatch(text)
    if match is None:
        raise ConfigError(
            f"rate {text!r}: a rate is like 200mbit, 200 Mbit/s or 1.5gbit (bits: 1 kbit is 1000), or {_UNLIMITED}"
        )
    return check_rate(float(match[1]) * _SCALES[match[2].lower()])


def check_rate(rate: float) -> float:
    """The same rate.

    Raises:
        ConfigError: it cannot be held.
    """
    if not _MIN_RATE <= rate <= _MAX_RATE:
        raise ConfigError(f"rate {rate:g} bit/s: must be between {show_rate(_MIN_RATE)} and {show_rate(_MAX_RATE)}")
    return rate


def show_rate(rate: float | None) -> str:
    """As `parse_rate` reads it."""
    if rate is None:
        return _UNLIMITED
    for unit, scale in (("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3)):
        if rate >= scale:
            return f"{rate / scale:g} {unit}"
    return f"{rate:g} bit/s"


def efficiency(mtu: int) -> float:
    """Share of a rate that is left to the payload of a long TCP transfer."""
    return (mtu - TCP_NBYTES) / (mtu + ETHERNET_NBYTES)


@dataclass(frozen=True, slots=True)
class Bucket:
    """The token bucket of a link.

    Attributes:
        rate: bits per second.
        burst_nbytes: what passes at once after a pause. Less lets a late timer cost throughput; more lets small
            messages through without any limit.
    """

    rate: float
    burst_nbytes: int

    @classmethod
    def holding(cls, rate: float, mtu: int) -> Bucket:
        """For a link of this rate, with frames of this MTU.

        Raises:
            ConfigError: the rate cannot be held.
        """
        burst = max(round(check_rate(rate) / 8 * BURST_S), _MIN_FRAMES * (mtu + ETHERNET_NBYTES))
        return cls(rate, min(burst, _MAX_BURST_NBYTES))

    def gso_nbytes(self, mtu: int) -> int:
        """How much TCP may hand over as one, so that its frames fit the bucket.

        By single frames, eight hosts on two processors took all of their time instead of a third.
        """
        return self.burst_nbytes // (mtu + ETHERNET_NBYTES) * (mtu - TCP_NBYTES)


def window_frames(rate: float, mtu: int) -> int:
    """How many frames of one connection may be under way on a link of this rate: those of `WINDOW_S`."""
    return max(_MIN_WINDOW_FRAMES, round(rate / 8 * WINDOW_S / mtu))
