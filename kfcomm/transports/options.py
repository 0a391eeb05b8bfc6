"""Sizes that a stream link works with, and which of them fit together."""

from __future__ import annotations

from dataclasses import dataclass

from kfcomm.core.frame import MAX_HEADER_NBYTES, PREFIX_NBYTES
from kfcomm.core.seal import MAX_SEAL_NBYTES

MAX_HEAD_NBYTES = PREFIX_NBYTES + MAX_HEADER_NBYTES + MAX_SEAL_NBYTES
"""Of a frame, without its payload."""


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """Sizes in bytes, and counts. On loopback twice or half as much of any of them made no difference to be seen.

    Attributes:
        staging_nbytes: buffer for heads and small frames; at least one whole head fits.
        read_nbytes: how much is read at once while no large payload is under way; the beginning of the next one is
            copied once more for it.
        lookahead_nbytes: how much beyond the end of a large payload is read along with it.
        burst_nbytes: bytes moved in one direction before the loop gets its turn.
        gather_nbytes: after so much, no further frame joins one system call.
        gather_frames: frames in one system call, each at most two buffers; at most 500, since the kernel takes 1024.
        small_nbytes: a payload up to this size is copied beside its head.
        low_latency_nbytes: at most so much is a burst, and is gathered, on a low-latency link.
    """

    staging_nbytes: int = 1 << 17
    read_nbytes: int = 1 << 14
    lookahead_nbytes: int = 1 << 12
    burst_nbytes: int = 1 << 22
    gather_nbytes: int = 1 << 21
    gather_frames: int = 256
    small_nbytes: int = 1 << 11
    low_latency_nbytes: int = 1 << 17

    def __post_init__(self) -> None:
        if self.staging_nbytes < MAX_HEAD_NBYTES:
            raise ValueError(f"staging_nbytes={self.staging_nbytes} does not hold a whole head")
        if not (0 < self.lookahead_nbytes <= self.staging_nbytes and 0 < self.read_nbytes <= self.staging_nbytes):
            reads = f"lookahead_nbytes={self.lookahead_nbytes} or read_nbytes={self.read_nbytes}"
            raise ValueError(f"{reads} is outside 1..staging_nbytes")
        if not 1 <= self.gather_frames <= 500:
            raise ValueError(f"gather_frames={self.gather_frames} is outside 1..500")
