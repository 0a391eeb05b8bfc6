"""Change of strategy without a fixed place in the order of calls.

Ranks may make calls of different names in different orders, so no place in the order would be right for all: one rank
may be past the next use of a name while another is before it. But the uses of one name are counted. Each rank reports
the next use of each of its names, and begins no further use until it hears the outcome. The greatest reported number is
the first use of a name that no rank has begun. This use and later ones take the new graphs; earlier ones take the
former graphs, even if a rank begins them later. So no use has two graphs, and calls wait for one exchange of messages.

Names travel as digests, since they may be long and many. Two names with one digest would both change at the greater
of their numbers, on all ranks: later than necessary, but correctly.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from kfcomm.collectives.plans import Plans
    from kfcomm.core.collective import GroupView
    from kfcomm.core.router import Router

Uses: TypeAlias = dict[bytes, int]
"""Number of a use by the digest of its name."""


def uses_of(router: Router, view: GroupView) -> Uses:
    """The next use of each name of a group on this rank. O(names), 1 µs each."""
    return {_digest(key.name): key.next_seq for key in router.names.of_group(view.id) if key.next_seq}


def first_uses(told: Iterable[Uses]) -> Uses:
    """Of each name whose next use differs between ranks, the greatest."""
    first: Uses = {}
    every = list(told)
    for name in set().union(*every):
        numbers = {uses.get(name, 0) for uses in every}
        if len(numbers) > 1:
            first[name] = max(numbers)
    return first


class Transition:
    """Uses of names, on this rank, that have yet to begin along the former graphs.

    Args:
        former: plans of the former strategy.
        first: of each name the first use along the new graphs.
        uses: the next use of each name on this rank.
        before: the transition to the former strategy, if there was one.
    """

    __slots__ = ("_before", "_first", "_former")

    def __init__(self, former: Plans, first: Uses, uses: Uses, before: Transition | None = None) -> None:
        self._former = former
        self._before = before
        self._first = {name: number for name, number in first.items() if uses.get(name, 0) < number}

    @property
    def is_over(self) -> bool:
        """Whether no name has such a use."""
        return not self._first and (self._before is None or self._before.is_over)

    def plans(self, key: str, seq: int) -> Plans | None:
        """The plans of a use, where these are the former ones; uses are asked about in their order."""
        found = None if self._before is None else self._before.plans(key, seq)
        if found is not None:
            return found
        name = _digest(key)
        first = self._first.get(name)
        if first is None or seq < first:
            return None if first is None else self._former
        del self._first[name]
        return None


def _digest(name: str) -> bytes:
    return hashlib.blake2b(name.encode(), digest_size=8).digest()
