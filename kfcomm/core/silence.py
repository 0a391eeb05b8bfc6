"""How long peers have been silent: when one is asked for a sign of life, and when it is given up.

A peer that is watched and has been quiet for a while is sent a heartbeat, which it answers. Whoever has said nothing at
all for ``lost_after_s`` is given up: stopped, stuck, or on a host that cannot be reached, which look alike from here.

Only time in which this process itself was awake counts. One that was stopped, or whose machine was, finds all others
silent when it goes on, and first has to read what they have sent meanwhile. So a look that comes late takes the delay
off everybody's silence.

Time is an argument, in seconds of any clock that does not go back.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

BEATS = 6
"""How often a silent peer is asked before it is given up."""
LONGEST_INTERVAL_S = 5.0


class Look(NamedTuple):
    """What one look at all peers has found.

    Attributes:
        gone: peers to be given up, each with the seconds of its silence.
        quiet: peers to be asked for a sign of life.
        next_s: when to look again.
    """

    gone: list[tuple[int, float]]
    quiet: list[int]
    next_s: float


class Silence:
    """The silence of the peers that one rank watches.

    Args:
        lost_after_s: after how much silence a peer is given up; infinite for never.
    """

    def __init__(self, lost_after_s: float) -> None:
        self._lost_after_s = lost_after_s
        self._interval_s = min(lost_after_s / BEATS, LONGEST_INTERVAL_S)
        self._heard_s: dict[int, float] = {}
        self._due_s = math.inf

    def watch(self, peers: Iterable[int], now_s: float) -> None:
        """Watch these peers and no others; who is new counts as heard of just now."""
        self._heard_s = {peer: self._heard_s.get(peer, now_s) for peer in peers}

    def heard(self, peer: int, now_s: float) -> None:
        """Something has come from a peer."""
        if peer in self._heard_s:
            self._heard_s[peer] = now_s

    def look(self, now_s: float) -> Look:
        """Look at all peers that are watched."""
        late_s = now_s - self._due_s
        if late_s > self._interval_s:
            self._heard_s = {peer: min(now_s, heard_s + late_s) for peer, heard_s in self._heard_s.items()}
        silent = {peer: now_s - heard_s for peer, heard_s in self._heard_s.items()}
        gone = [(peer, silent_s) for peer, silent_s in silent.items() if silent_s >= self._lost_after_s]
        quiet = [peer for peer, silent_s in silent.items() if self._interval_s / 2 <= silent_s < self._lost_after_s]
        left_s = [self._lost_after_s - silent_s for silent_s in silent.values() if silent_s < self._lost_after_s]
        self._due_s = now_s + min(self._interval_s, *left_s, math.inf)
        return Look(gone, quiet, self._due_s)
