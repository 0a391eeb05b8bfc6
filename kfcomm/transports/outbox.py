"""Send queues of links: the order in which frames leave, and the part of a frame that the kernel has taken.

Invariants:

- Other frames than chunks (definitions, questions, answers) leave before all chunks, so no chunk overtakes the
  definition that it needs. They are few and small. Chunks leave by priority, the larger first.
- A definition that gives a number another meaning is a *fence*: frames queued before it leave before it, whatever
  their priority, and the rest after it. So are LEFT and BYE. (Only numbers of signatures get another meaning while
  chunks that use them may be queued, see ``core.names``.)
- A frame is *cut* when the kernel has taken a part of it. Whole frames may be dropped or overtaken at any time; a cut
  one must be finished first, or the peer could not find the next frame. So withdrawing an owner drops its whole frames
  and copies the unsent bytes of a cut one: afterwards nothing here refers to that owner's memory.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from kfcomm.core.auth import MAX_SEAL_NBYTES
from kfcomm.core.frame import MAX_HEADER_NBYTES, PREFIX_NBYTES, Header, Kind
from kfcomm.transports.base import Owner

CHUNK, SIGNATURE = int(Kind.CHUNK), int(Kind.SIGNATURE)
FENCES = frozenset((int(Kind.LEFT), int(Kind.BYE)))

FRONT = 1 << 16
"""Level of frames that go before all chunks; the level of a chunk is its priority."""

Frame = tuple[Any, Any, int, Any, Any, int]
"""Head bytes, payload view or None, bytes of both, owner or None, header (None in a cut frame), level."""


class FrameOrder:
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


MAX_HEAD_NBYTES = PREFIX_NBYTES + MAX_HEADER_NBYTES + MAX_SEAL_NBYTES
"""Largest frame without its payload."""


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """Sizes in bytes, and counts. Twice or half of any of them made no measurable difference on loopback."""

    staging_nbytes: int = 1 << 17  # buffer for heads and small frames; at least one whole head fits
    # read at once while no large payload is under way; the beginning of the next one is copied once more, and a smaller
    # one waits for its rest
    read_nbytes: int = 1 << 14
    lookahead_nbytes: int = 1 << 12  # read along with the end of a large payload
    burst_nbytes: int = 1 << 22  # moved in one direction before the loop gets its turn
    gather_nbytes: int = 1 << 21  # after this, no further frame joins a system call
    gather_frames: int = 256  # per system call, each at most two buffers; at most 500: the kernel takes 1024
    small_nbytes: int = 1 << 11  # a payload up to this size is copied beside its head
    low_latency_nbytes: int = 1 << 17  # bound of burst_nbytes and gather_nbytes on a low-latency link

    def __post_init__(self) -> None:
        if self.staging_nbytes < MAX_HEAD_NBYTES:
            raise ValueError(f"staging_nbytes={self.staging_nbytes} does not hold a whole head")
        if not (0 < self.lookahead_nbytes <= self.staging_nbytes and 0 < self.read_nbytes <= self.staging_nbytes):
            reads = f"lookahead_nbytes={self.lookahead_nbytes} or read_nbytes={self.read_nbytes}"
            raise ValueError(f"{reads} is outside 1..staging_nbytes")
        if not 1 <= self.gather_frames <= 500:
            raise ValueError(f"gather_frames={self.gather_frames} is outside 1..500")


class Outbox(FrameOrder):
    """Send queue of one link; its ``options`` bound how much leaves at once."""

    __slots__ = ("_cut", "_gather_frames", "_small_nbytes", "gather_nbytes", "nbytes")

    def __init__(self, options: StreamOptions) -> None:
        super().__init__()
        self.nbytes = 0
        self._cut: Frame | None = None
        self.gather_nbytes = options.gather_nbytes
        self._gather_frames = options.gather_frames
        self._small_nbytes = options.small_nbytes

    def __len__(self) -> int:
        return super().__len__() + (self._cut is not None)

    def put(
        self, header: Header, head: bytes, payload: memoryview | None, owner: Owner | None, priority: int = 0
    ) -> None:
        """Queue a frame; ``payload`` is a contiguous view of bytes. Only chunks have owners."""
        nbytes = len(head) if payload is None else len(head) + len(payload)
        self.nbytes += nbytes
        if owner is not None and priority == self._level:  # the common case, without looking at the header
            self._chunks.append((head, payload, nbytes, owner, header, priority))
        else:
            self.add((head, payload, nbytes, owner, header, self.make_way(header, priority)))

    def take_only(self) -> Frame | None:
        """Remove and return the only frame, if it is a chunk, until ``advance``; ``nbytes`` still counts it."""
        chunks = self._chunks
        if len(chunks) != 1 or self._front or self._less_urgent or self._cut is not None:
            return None
        return chunks.popleft()

    def gather(self) -> tuple[list[Frame], list[Any], int]:
        """Remove and return the next frames, their buffers for one system call, and the bytes in them.

        ``advance`` then takes how far the kernel took them, and queues the rest again.
        """
        front, chunks, limit, small = self._front, self._chunks, self.gather_nbytes, self._small_nbytes
        if self._cut is not None:
            front.appendleft(self._cut)
            self._cut = None
        batch: list[Frame] = []
        buffers: list[Any] = []
        parts: list[Any] = []
        total = 0
        queue = front or chunks
        while total < limit and len(batch) < self._gather_frames:
            if not queue:
                if not (self._chunks or self._descend()):
                    break
                queue = self._chunks
            frame = queue.popleft()
            head, payload, nbytes, _, _, _ = frame
            batch.append(frame)
            total += nbytes
            parts.append(head)
            if payload is None:
                continue
            # Up to 2 KiB a copy costs less than one more buffer (16 frames of 1 KiB: 6.4 µs instead of 7.8).
            if nbytes - len(head) <= small:
                parts.append(payload)
                continue
            buffers.append(parts[0] if len(parts) == 1 else b"".join(parts))
            buffers.append(payload)
            parts = []
        if parts:
            buffers.append(parts[0] if len(parts) == 1 else b"".join(parts))
        return batch, buffers, total

    def advance(self, batch: Sequence[Frame], moved: int, done: deque[Owner]) -> int:
        """Account for ``moved`` bytes of ``batch`` that the kernel took; returns the number of finished frames.

        Their owners are appended to ``done``; the rest of ``batch`` goes back to the front of its level.
        """
        self.nbytes -= moved
        for index, frame in enumerate(batch):
            if moved < frame[2]:
                self._put_back_all(batch[index + 1 :])
                self._keep(frame, moved)
                return index
            moved -= frame[2]
            if frame[3] is not None:
                done.append(frame[3])
        return len(batch)

    def _put_back_all(self, frames: Sequence[Frame]) -> None:
        if frames and frames[0][5] == frames[-1][5] == self._level:  # then all of them are
            self._chunks.extendleft(reversed(frames))
            return
        for frame in reversed(frames):
            self.put_back(frame)

    def _keep(self, frame: Frame, moved: int) -> None:
        head, payload, nbytes, owner, header, level = frame
        if moved == 0 and header is not None:
            self.put_back(frame)
        elif moved < len(head) or moved == 0:
            self._cut = (head[moved:], payload, nbytes - moved, owner, None, level)
        else:
            self._cut = (b"", payload[moved - len(head) :], nbytes - moved, owner, None, level)

    def withdraw(self, owner: Owner) -> list[Header]:
        """Forget this owner's memory; returns the headers of its dropped frames, in order. O(queue)."""
        cut = self._cut
        if cut is not None and cut[3] is owner:
            self._cut = (cut[0], bytes(cut[1]), cut[2], None, None, cut[5])
        dropped = self.drop(owner)
        self.nbytes -= sum(frame[2] for frame in dropped)
        return [frame[4] for frame in dropped]

    def clear(self, done: deque[Owner]) -> None:
        """Drop everything; the owners are appended to ``done``."""
        if self._cut is not None:
            self._front.appendleft(self._cut)
            self._cut = None
        done.extend(frame[3] for frame in self if frame[3] is not None)
        self.empty()
        self.nbytes = 0
