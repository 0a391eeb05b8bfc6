"""When a sequence of names repeats itself: what a program does at every step, found by watching it.

A *cycle* is the names of one pass, in some order. The order within a pass is not looked at, since names may come in
another order each time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from typing import Generic, TypeVar

Name = TypeVar("Name", bound=Hashable)

MAX_CYCLE = 1 << 13
"""A pass of more names is not looked for: the sequence is taken for one that does not repeat itself."""

_MODULUS = (1 << 61) - 1


class Cycles(Generic[Name]):
    """Watches a sequence, and says how long its last pass was once that has come again.

    Args:
        is_first: the first name that comes again is believed to begin a second pass. Else two whole passes must have
            come, each with the same names as often.
        shortest: a cycle of two whole passes has at least so many names.

    Attributes:
        names: all that were kept.

    Cost: O(1) for each name with ``is_first``; else O(names so far), a few additions each, up to ``2 * MAX_CYCLE``.
    """

    def __init__(self, *, is_first: bool = True, shortest: int = 1) -> None:
        self.names: list[Name] = []
        self._is_first = is_first
        self._shortest = shortest
        self._seen: set[Name] = set()
        self._sums = [0]

    def add(self, name: Name) -> int:
        """The next name. Returns how many of the latest names, this one included or not, are one pass; else 0.

        With ``is_first`` this name is the first of the next pass, and is not kept; else it is the last of the second.
        """
        if len(self.names) >= 2 * MAX_CYCLE:
            return 0
        if self._is_first:
            if name in self._seen:
                return len(self.names)
            self._seen.add(name)
            self._is_first = len(self._seen) < MAX_CYCLE
        self.names.append(name)
        self._sums.append((self._sums[-1] + hash(name)) % _MODULUS)
        return 0 if self._is_first else self._repeated()

    def _repeated(self) -> int:
        sums, end = self._sums, len(self.names)
        for length in range(self._shortest, min(end // 2, MAX_CYCLE) + 1):
            middle, begin = end - length, end - 2 * length
            maybe = (sums[end] - 2 * sums[middle] + sums[begin]) % _MODULUS == 0
            if maybe and Counter(self.names[begin:middle]) == Counter(self.names[middle:]):
                return length
        return 0
