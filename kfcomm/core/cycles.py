"""Cycle detection in a sequence of names: finds what a program repeats at every step.

A *cycle* is the names of one pass, in any order, since names may arrive in another order each time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from typing import Generic, TypeVar

Name = TypeVar("Name", bound=Hashable)

MAX_CYCLE = 1 << 13
"""Longest pass that is looked for."""

_MODULUS = (1 << 61) - 1


class Cycles(Generic[Name]):
    """Detector that reports the length of a pass once the sequence repeats it.

    Args:
        is_first: the first repeated name is taken for the start of a second pass. Else two whole passes are required,
            with the same names equally often.
        shortest: fewest names of a cycle that two whole passes have shown.

    Attributes:
        names: the sequence so far.

    Cost: O(1) for each name with ``is_first``; else O(names so far), a few additions each, up to ``2 * MAX_CYCLE``.
    """

    def __init__(self, *, is_first: bool = True, shortest: int = 1) -> None:
        self.names: list[Name] = []
        self._is_first = is_first
        self._shortest = shortest
        self._seen: set[Name] = set()
        self._sums = [0]

    def add(self, name: Name) -> int:
        """Add a name; returns how many of the latest names are one pass, else 0.

        With ``is_first`` this name is the first of the next pass, and is not stored; else it is the last of the second.
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
