"""Unauthenticated connections at one port: a limit, and which one is closed for the next.

A new connection is always let in, since a peer of the job authenticates within milliseconds. The oldest connection of
the address with the most of them is closed for it, so that one address cannot keep the others out.

While connections are being closed there is a flood, and the port accepts more slowly: a flood takes little processor
time then, and every connection has longer to authenticate.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)

MAX_UNAUTHENTICATED = 64
MAX_OF_ONE_ADDRESS = 32


class Unauthenticated(Generic[K]):
    """Unauthenticated connections at one port.

    Args:
        limit: how many there may be.
        of_one: how many of one address.

    Attributes:
        is_flood: the latest connection had another one closed.
    """

    def __init__(self, limit: int = MAX_UNAUTHENTICATED, of_one: int = MAX_OF_ONE_ADDRESS) -> None:
        self._limit = limit
        self._of_one = of_one
        self._open: dict[K, Hashable] = {}  # in the order of their arrival
        self.is_flood = False

    def __len__(self) -> int:
        return len(self._open)

    def add(self, connection: K, address: Hashable) -> K | None:
        """Add a connection; returns the one to be closed for it, if any. O(limit) if so."""
        evicted = None
        counts = Counter(self._open.values())
        if counts[address] >= self._of_one:
            evicted = self._oldest_of(address)
        elif len(self._open) >= self._limit:
            evicted = self._oldest_of(counts.most_common(1)[0][0])
        self.is_flood = evicted is not None
        if evicted is not None:
            del self._open[evicted]
        self._open[connection] = address
        return evicted

    def remove(self, connection: K) -> None:
        """Remove a connection that has authenticated or closed. Calling it again does nothing."""
        self._open.pop(connection, None)

    def _oldest_of(self, address: Hashable) -> K:
        return next(connection for connection, where in self._open.items() if where == address)
