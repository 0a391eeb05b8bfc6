"""Measurements of a TCP connection by the kernel, without a message of ours: ``TCP_INFO`` of Linux."""

from __future__ import annotations

import socket
import struct
import sys
from dataclasses import dataclass
from typing import Any

# struct tcp_info of <linux/tcp.h>, which only grows at its end: retransmitted segments at 100, bytes that the peer has
# acknowledged at 120, the least round trip in µs at 148; bytes/s of the latest sample at 160, and the µs in which data
# was under way at 168 (Linux 4.10).
_INFO_NBYTES = 176
_LAYOUT = struct.Struct("=100x I 16x Q 20x I 8x Q Q")


@dataclass(frozen=True, slots=True)
class TcpPath:
    """Kernel's measurements of the way from this process to a peer, since its TCP connection was made.

    Attributes:
        round_trip_s: least round trip, in seconds.
        delivery_rate: bytes per second of the latest sample: what the way carried while there was data to send.
        acked_nbytes: bytes that the peer's kernel has acknowledged.
        busy_s: seconds in which data was under way.
        retransmits: segments that were sent again: more than a few in a thousand mean a full queue on the way.
    """

    round_trip_s: float
    delivery_rate: float
    acked_nbytes: int
    busy_s: float
    retransmits: int

    @property
    def mean_rate(self) -> float:
        """Bytes per second over the time in which data was under way; 0 before the first."""
        return self.acked_nbytes / self.busy_s if self.busy_s else 0.0


def tcp_path(sock: Any) -> TcpPath | None:
    """Read the measurements of a connected TCP socket. Costs one system call.

    Returns:
        None where the system has no such figures, or the socket is closed.
    """
    if sys.platform != "linux":
        return None
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_NBYTES)
    except OSError:
        return None
    if len(info) < _INFO_NBYTES:
        return None
    retransmits, acked_nbytes, round_trip_us, delivery_rate, busy_us = _LAYOUT.unpack(info)
    # The kernel says 0xFFFFFFFF before the first sample.
    round_trip_s = 0.0 if round_trip_us == 0xFFFFFFFF else round_trip_us / 1e6
    return TcpPath(round_trip_s, float(delivery_rate), acked_nbytes, busy_us / 1e6, retransmits)
