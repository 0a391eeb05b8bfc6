"""Deadlines of collectives: which ones wait too long at a given time.

Each collective is due up to four times: ``QUIET`` when it has waited a little (so that ranks that disagree find out,
see ``links.announce``), ``STALLED`` once after the stall time, ``ASK`` shortly before its deadline (so that the error
can name the missing ranks), and ``EXPIRED`` at the deadline.

A deadline is three numbers stored with the collective. No queue is updated when a collective begins or ends; instead a
coarse tick looks at all collectives in flight, mostly none.

Of many that have waited a little, few are ``QUIET`` at a time, the longest waits first: on a rank that is only busy,
messages about each of them would double its work.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from typing import Protocol, TypeVar

QUIET_AFTER_S = 0.5
QUIET_AT_ONCE = 64
QUIET_AGAIN_S = 0.25
"""Seconds until more than ``QUIET_AT_ONCE`` are ``QUIET``."""
ASK_BEFORE_S = 1.0
"""Seconds before a deadline at which the others are asked; for short timeouts, a quarter of them."""
NEVER = float("inf")


Stages = tuple[tuple[float, "Due"], ...]
"""Seconds from the beginning, and the stage then: ``QUIET`` first, ``EXPIRED`` last."""


class Due(IntEnum):
    """Stages of a wait."""

    QUIET = 1
    STALLED = 2
    ASK = 4
    EXPIRED = 8


class Waiting(Protocol):
    """Item with a deadline."""

    posted_s: float
    timeout_s: float  # from ``posted_s``; ``NEVER`` for a part of something that has a deadline
    due_s: float  # next; at first ``posted_s + first_due_s(...)``
    told: int  # stages that were reported, a sum of ``Due``; 0 at first


W = TypeVar("W", bound=Waiting)


def first_due_s(timeout_s: float, stall_after_s: float) -> float:
    """Return the seconds from the beginning to the first stage."""
    return min(time_s for time_s, _ in _stages(timeout_s, stall_after_s))


def look(waiting: Iterable[W], now_s: float, stall_after_s: float) -> tuple[list[tuple[W, Due]], float]:
    """Return the stages that are due, each once and in order of time, and when to look again at the latest."""
    # With nothing due an item costs 0.1 µs; the stages are computed once for each timeout.
    due: list[tuple[float, int, W, Due]] = []
    next_s, again_s = NEVER, now_s + QUIET_AGAIN_S
    num_quiet = 0
    stages: dict[float, Stages] = {}
    for one in waiting:
        if one.due_s <= now_s:
            times_s = stages.get(one.timeout_s)
            if times_s is None:
                times_s = stages[one.timeout_s] = _stages(one.timeout_s, stall_after_s)
            # Put off for a while, unless another stage is due by then: that must not come late.
            others_s = one.posted_s + min(times_s[1][0], times_s[-2][0])
            may_be_quiet = num_quiet < QUIET_AT_ONCE or again_s >= others_s
            if not (one.told or may_be_quiet):  # the common case among very many
                one.due_s = again_s
                next_s = min(next_s, again_s)
                continue
            one.due_s = NEVER
            for after_s, stage in times_s:
                time_s = one.posted_s + after_s
                if one.told & stage:
                    continue
                if time_s > now_s:
                    one.due_s = min(one.due_s, time_s)
                else:
                    num_quiet += stage is Due.QUIET
                    one.told |= stage
                    due.append((time_s, len(due), one, stage))
        next_s = min(next_s, one.due_s)
    return [(one, stage) for _, _, one, stage in sorted(due, key=lambda entry: entry[:2])], next_s


def _stages(timeout_s: float, stall_after_s: float) -> Stages:
    if timeout_s == NEVER:
        return ((QUIET_AFTER_S, Due.QUIET), (NEVER, Due.ASK), (NEVER, Due.EXPIRED))
    ask_s = timeout_s - min(ASK_BEFORE_S, timeout_s / 4)
    stalled_s = stall_after_s if stall_after_s < timeout_s else NEVER
    return (
        (min(QUIET_AFTER_S, ask_s), Due.QUIET),
        (stalled_s, Due.STALLED),
        (ask_s, Due.ASK),
        (timeout_s, Due.EXPIRED),
    )
