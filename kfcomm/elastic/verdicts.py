"""What becomes of the calls of a step when a rank has died in its midst: a pure function of how they stand on each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import NamedTuple, TypeAlias

Key: TypeAlias = tuple[str, int]
"""Name of a call, and which use of the name in its step it is."""
Row: TypeAlias = "tuple[str, int, Standing | int, tuple[int, ...], int, str]"
"""Key, standing, contributors, step, and why it has failed."""


class Standing(IntEnum):
    """How a call stands on one rank; one that has not begun there stands nowhere."""

    POSTED = 0
    """It is not over."""
    HELD = 1
    """This rank has its own result, and does not know whether all others have theirs."""
    DONE = 2
    """It is over, with a result."""
    FAILED = 3
    """It is over, with an error of its own."""


class Verdict(NamedTuple):
    """What becomes of a call that is over on some rank.

    Attributes:
        step: of the call.
        giver: birth of the rank that gives the result to the others; -1 if it has failed for all.
        contributors: births of the ranks whose contributions are in the result.
        why: it has failed.
    """

    step: int
    giver: int
    contributors: tuple[int, ...] = ()
    why: str = ""


def decide(said: Sequence[tuple[int, Sequence[Row]]], births: Sequence[int]) -> Mapping[Key, Verdict]:
    """The verdict on each call that is over on some rank and not, in the same way, on all.

    A call that is done on one rank is done on all: the lowest of those gives it. One that has failed on one rank, and
    is done on none, has failed on all. Any other is done again. A rank may be a step further than others: then all has
    been over on all ranks before that step began.

    Args:
        said: by rank, in which step it is, and how its calls stand.
        births: of the ranks.
    """
    latest = max(step for step, _ in said)
    done: dict[Key, list[tuple[int, int, tuple[int, ...]]]] = {}
    failed: dict[tuple[Key, int], list[str]] = {}
    for birth, (_, rows) in zip(births, said, strict=True):
        for name, number, standing, contributors, step, why in rows:
            if step < latest:
                continue
            if standing == Standing.DONE:
                done.setdefault((name, number), []).append((step, birth, tuple(contributors)))
            elif standing == Standing.FAILED:
                failed.setdefault(((name, number), step), []).append(why)
    verdicts = {key: Verdict(*having[0]) for key, having in done.items() if len(having) < len(births)}
    for (key, step), reasons in failed.items():
        if key not in done and len(reasons) < len(births):
            verdicts[key] = Verdict(step, -1, (), reasons[0])
    return verdicts
