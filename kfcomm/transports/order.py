"""Order in which the frames of one link leave: by urgency, then first in, first out.

Invariants:

- Other frames than chunks (definitions, questions, answers) leave before all chunks, so no chunk overtakes the
  definition that it needs. They are few and small.
- A definition that gives a number another meaning is a *fence*: frames queued before it leave before it, whatever
  their priority, and the rest after it. So are LEFT and BYE. (Only numbers of signatures get another meaning while
  chunks that use them may be queued, see ``core.names``.)
- Chunks leave by priority, the larger first.

This module knows the kinds of frames and the owners of their memory; it moves no bytes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterator
from itertools import chain
from typing import Any

from kfcomm.core.frame import Header, Kind
from kfcomm.transports.base import Owner

CHUNK, SIGNATURE = int(Kind.CHUNK), int(Kind.SIGNATURE)
FENCES = frozenset((int(Kind.LEFT), int(Kind.BYE)))

FRONT = 1 << 16
"""Level of frames that go before all chunks; the level of a chunk is its priority."""

Frame = tuple[Any, Any, int, Any, Any, int]
"""Head bytes, payload view or None, bytes of both, owner or None, header (None in a cut frame), level."""


class Order:
    """Queue of frames by level. With one priority in use, the common case, it is two deques.

    Subclasses take frames from ``_front`` and then from ``_chunks`` themselves, where a call for each would cost.
    """

    __slots__ = ("_chunks", "_defined", "_front", "_less_urgent", "_level")

    def __init__(self) -> None:
        self._front: deque[Frame] = deque()
        self._chunks: deque[Frame] = deque()
        self._level = 0
        # Those below _level that are not empty, the least urgent first.
        self._less_urgent: list[tuple[int, deque[Frame]]] = []
        self._defined: set[int] = set()

    def __len__(self) -> int:
        return len(self._front) + len(self._chunks) + sum(len(queue) for _, queue in self._less_urgent)

    def __iter__(self) -> Iterator[Frame]:
        """Yield the frames in the order in which they leave."""
        return chain(self._front, self._chunks, *(queue for _, queue in reversed(self._less_urgent)))

    def make_way(self, header: Header, priority: int) -> int:
        """Fence the queue if this frame must not overtake it; returns the level at which to queue the frame now."""
        kind = header[0]
        if kind == CHUNK:
            return priority
        if kind in FENCES or (kind == SIGNATURE and header[1] in self._defined):
            self._fence()
        elif kind == SIGNATURE:
            self._defined.add(header[1])
        return FRONT

    def add(self, frame: Frame) -> None:
        """Queue a frame, the last of its level."""
        self._queue(frame[5]).append(frame)

    def put_back(self, frame: Frame) -> None:
        """Queue a frame, the first of its level."""
        self._queue(frame[5]).appendleft(frame)

    def take(self) -> Frame | None:
        """Remove and return the next frame, or None."""
        if self._front:
            return self._front.popleft()
        if self._chunks or self._descend():
            return self._chunks.popleft()
        return None

    def drop(self, owner: Owner) -> list[Frame]:
        """Remove all frames of one owner; returns them in order. O(queue)."""
        dropped = [frame for frame in self if frame[3] is owner]
        if dropped:
            kept = [frame for frame in self if frame[3] is not owner]
            self.empty()
            for frame in kept:
                self.add(frame)
        return dropped

    def empty(self) -> None:
        """Forget every frame."""
        self._front.clear()
        self._chunks.clear()
        self._less_urgent.clear()

    def _fence(self) -> None:
        """Let no later frame overtake those that wait now."""
        waiting = [(*frame[:5], FRONT) for frame in self]
        self.empty()
        self._front.extend(waiting)

    def _queue(self, level: int) -> deque[Frame]:
        if level == self._level:
            return self._chunks
        if level == FRONT:
            return self._front
        if not (self._chunks or self._descend()):
            self._level = level
            return self._chunks
        less_urgent = self._less_urgent
        if level > self._level:
            less_urgent.append((self._level, self._chunks))
            self._level, self._chunks = level, deque()
            return self._chunks
        if level == self._level:
            return self._chunks
        place = bisect_left(less_urgent, (level,))
        if place == len(less_urgent) or less_urgent[place][0] != level:
            less_urgent.insert(place, (level, deque()))
        return less_urgent[place][1]

    def _descend(self) -> bool:
        """Continue with the next level, after the last chunk of the present one; False if there are no more chunks."""
        if not self._less_urgent:
            return False
        self._level, self._chunks = self._less_urgent.pop()
        return True
