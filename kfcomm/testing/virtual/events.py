"""Events of a world in virtual time: faults, and requests for other ranks. A plan is a sequence of these.

Ranks are those of the beginning, in every epoch; processes that join later have the next numbers. Times count from
the beginning of the run, in virtual seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Kill:
    """The process of ``rank`` is killed. The others hear of it; its last messages may be lost."""

    rank: int
    at_s: float


@dataclass(frozen=True, slots=True)
class Stop:
    """``rank`` neither sends nor receives for ``for_s``; if that is longer than ``lost_after_s``, it is lost."""

    rank: int
    at_s: float
    for_s: float


@dataclass(frozen=True, slots=True)
class Partition:
    """Messages between the sides are lost for ``for_s``; if that exceeds ``lost_after_s``, each loses the others.

    Ranks that are in none of ``sides`` form one more side.
    """

    sides: tuple[tuple[int, ...], ...]
    at_s: float
    for_s: float


@dataclass(frozen=True, slots=True)
class Delay:
    """Messages from ``rank`` take ``by_s`` longer, for ``for_s``."""

    rank: int
    at_s: float
    for_s: float
    by_s: float


@dataclass(frozen=True, slots=True)
class SlowLink:
    """Messages between ``one`` and ``other`` take ``by_s`` longer, for ``for_s``."""

    one: int
    other: int
    at_s: float
    for_s: float
    by_s: float


@dataclass(frozen=True, slots=True)
class LostStore:
    """The store does not answer, for ``for_s``: no rank joins, no size is requested, and no partition is decided."""

    at_s: float
    for_s: float


@dataclass(frozen=True, slots=True)
class Join:
    """Another process, with this number, asks an ``Elastic`` to admit it."""

    rank: int
    at_s: float


@dataclass(frozen=True, slots=True)
class Resize:
    """A request for this number of ranks, which an ``Elastic`` heeds."""

    size: int
    at_s: float


@dataclass(frozen=True, slots=True)
class Release:
    """A request that ``rank`` leave, at any size; an ``Elastic`` heeds it, and admits waiting processes."""

    rank: int
    at_s: float


Event: TypeAlias = Kill | Stop | Partition | Delay | SlowLink | LostStore | Join | Resize | Release


def random_events(random: Random, size: int, *, horizon_s: float = 0.2, elastic: bool = False) -> list[Event]:
    """Random events for a world of ``size`` ranks; at least one rank is neither killed nor stopped.

    Args:
        random: source of chance.
        size: number of ranks in the beginning.
        horizon_s: all begin within this time.
        elastic: with joining processes, requests for sizes and for ranks to leave, and loss of the store, too.
    """

    def when() -> float:
        return random.uniform(0, horizon_s)

    def how_long() -> float:
        # Shorter and longer than ranks wait before they lose each other, 1 s by default.
        return random.choice([0.01, 0.3, 3.0])

    events: list[Event] = [
        Kill(rank, when()) if random.random() < 0.6 else Stop(rank, when(), how_long())
        # fewer than all, so that one rank is left
        for rank in random.sample(range(size), random.randrange(size))
    ]
    if size > 1 and random.random() < 0.2:
        events.append(Partition(_sides(random, size), when(), how_long()))
    if random.random() < 0.3:
        events.append(Delay(random.randrange(size), when(), how_long(), random.choice([1e-3, 0.05])))
    if size > 1 and random.random() < 0.3:
        one, other = random.sample(range(size), 2)
        events.append(SlowLink(one, other, when(), how_long(), random.choice([1e-3, 0.05])))
    if elastic:
        joiners = range(size, size + random.randrange(3))
        events += [Join(rank, when()) for rank in joiners]
        events += [Kill(rank, when()) for rank in joiners if random.random() < 0.2]
        events += [Resize(random.randrange(1, size + 3), when()) for _ in range(random.randrange(3))]
        if random.random() < 0.2:
            events.append(LostStore(when(), how_long()))
        if random.random() < 0.3:
            events.append(Release(random.randrange(size + 1), when()))
    return events


def _sides(random: Random, size: int) -> tuple[tuple[int, ...], ...]:
    """One or two sides, and the rest."""
    ranks = random.sample(range(size), size)
    first = random.randrange(1, size)
    second = random.randrange(first, size) if random.random() < 0.3 else first
    return tuple(tuple(sorted(side)) for side in (ranks[:first], ranks[first:second]) if side)
