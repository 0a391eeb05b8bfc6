"""Order of the later steps of calls: that of the calls, whichever step is ready first.

Invariants: under one key steps begin in the order in which their turns were taken, each as soon as it and all
before it are ready. That makes the n-th use of a key for a later step belong to the n-th call, on every rank alike.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable


class Turn:
    """A place in the order of one key.

    Attributes:
        begin: what is to begin, once it is ready.
    """

    __slots__ = ("_key", "_turns", "begin")

    def __init__(self, turns: Turns, key: str) -> None:
        self._turns = turns
        self._key = key
        self.begin: Callable[[], object] | None = None

    def ready(self, begin: Callable[[], object]) -> None:
        """``begin`` may run, now or when all earlier ones have; it must not raise."""
        self.begin = begin
        self._turns.advance(self._key)


class Turns:
    """The turns of one group, by key."""

    __slots__ = ("_queues",)

    def __init__(self) -> None:
        self._queues: dict[str, deque[Turn]] = {}

    def __len__(self) -> int:
        return len(self._queues)

    def has(self, key: str) -> bool:
        """Whether something has yet to begin under this key."""
        return key in self._queues

    def next(self, key: str) -> Turn:
        """The next turn of this key."""
        turn = Turn(self, key)
        self._queues.setdefault(key, deque()).append(turn)
        return turn

    def advance(self, key: str) -> None:
        """Begin the ready turns at the front of a queue."""
        queue = self._queues.get(key)
        while queue and (begin := queue[0].begin) is not None:
            queue.popleft()
            begin()
        if not queue:
            self._queues.pop(key, None)
