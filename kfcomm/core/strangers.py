"""Whoever has connected and not yet proven to belong here: how many there may be, and who has to go for the next one.

A newcomer is always let in: whoever belongs here proves it within milliseconds. Who is cut instead is the oldest of the
address that has most of them open, so that one address cannot keep the others out.

While some are cut there is a flood, and whoever accepts connections does so slower: what a flood may take is little of
the processor, and every connection has the longer to prove itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)

MAX_STRANGERS = 64
MAX_OF_ONE_ADDRESS = 32


class Strangers(Generic[K]):
    """The strangers at one port.

    Args:
        limit: how many there may be.
        of_one: how many of one address.

    Attributes:
        is_flood: the last one who came had another one cut.
    """

    def __init__(self, limit: int = MAX_STRANGERS, of_one: int = MAX_OF_ONE_ADDRESS) -> None:
        self._limit = limit
        self._of_one = of_one
        self._here: dict[K, Hashable] = {}  # in the order in which they came
        self.is_flood = False

    def __len__(self) -> int:
        return len(self._here)

    def came(self, who: K, address: Hashable) -> K | None:
        """Somebody has connected; returns who is to be cut for that, if anybody is. O(limit) if so."""
        victim = None
        counts = Counter(self._here.values())
        if counts[address] >= self._of_one:
            victim = self._oldest_of(address)
        elif len(self._here) >= self._limit:
            victim = self._oldest_of(counts.most_common(1)[0][0])
        self.is_flood = victim is not None
        if victim is not None:
            del self._here[victim]
        self._here[who] = address
        return victim

    def gone(self, who: K) -> None:
        """Somebody is a stranger no more: it has proven who it is, or hung up. Calling it again does nothing."""
        self._here.pop(who, None)

    def _oldest_of(self, address: Hashable) -> K:
        return next(who for who, where in self._here.items() if where == address)
