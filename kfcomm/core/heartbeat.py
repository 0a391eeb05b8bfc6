"""Heartbeat-based failure detector: asks quiet peers for a sign of life, and declares silent ones lost.

A watched peer that has been quiet for a while is sent a heartbeat, which it answers. A peer from which nothing has come
for ``lost_after_s`` is lost: stopped, stuck, or on an unreachable host, which look alike from here.

Only time in which this process itself was awake counts. After a SIGSTOP, or a suspend of the machine, all peers look
silent until what they have sent meanwhile is read. So a late look subtracts its delay from the silence of every peer.

Time is an argument, in seconds of any clock that does not go back.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

BEATS = 6
"""Heartbeats to a silent peer before it is lost."""
LONGEST_INTERVAL_S = 5.0


class Look(NamedTuple):
    """Findings of one look at all peers.

    Attributes:
        gone: lost peers, each with the seconds of its silence.
        quiet: peers to be sent a heartbeat.
        next_s: when to look again.
    """

    gone: list[tuple[int, float]]
    quiet: list[int]
    next_s: float


class FailureDetector:
    """Silence of the peers that one rank watches.

    Args:
        lost_after_s: silence after which a peer is lost; infinite for never.
    """

    def __init__(self, lost_after_s: float) -> None:
        self._lost_after_s = lost_after_s
        self._interval_s = min(lost_after_s / BEATS, LONGEST_INTERVAL_S)
        self._heard_s: dict[int, float] = {}
        self._due_s = math.inf

    def watch(self, peers: Iterable[int], now_s: float) -> None:
        """Watch these peers and no others; a new one counts as heard now."""
        self._heard_s = {peer: self._heard_s.get(peer, now_s) for peer in peers}

    def heard(self, peer: int, now_s: float) -> None:
        """Record that something has come from a peer."""
        if peer in self._heard_s:
            self._heard_s[peer] = now_s

    def look(self, now_s: float) -> Look:
        """Look at all watched peers."""
        late_s = now_s - self._due_s
        if late_s > self._interval_s:
            self._heard_s = {peer: min(now_s, heard_s + late_s) for peer, heard_s in self._heard_s.items()}
        silent = {peer: now_s - heard_s for peer, heard_s in self._heard_s.items()}
        gone = [(peer, silent_s) for peer, silent_s in silent.items() if silent_s >= self._lost_after_s]
        quiet = [peer for peer, silent_s in silent.items() if self._interval_s / 2 <= silent_s < self._lost_after_s]
        left_s = [self._lost_after_s - silent_s for silent_s in silent.values() if silent_s < self._lost_after_s]
        self._due_s = now_s + min(self._interval_s, *left_s, math.inf)
        return Look(gone, quiet, self._due_s)
