"""Rounds of turns: everybody once in each, the order moved on by one from round to round; then medians."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from bench.compare.rows import Case
from bench.compare.works import Entry, Mode, Work
from bench.compare.world import Turn, WorldError
from kfcomm.bench.harness import rotated

TURNS_ALIKE = 2
"""A turn with so many times the calls tells nothing new of how long one takes."""


class TakesTurns(Protocol):
    """A world, or its fake in tests."""

    def turn(self, work: Work, mode: Mode, calls: int) -> Turn:
        """Does the work ``calls`` times; raises `WorldError`."""
        ...


@dataclass(frozen=True, slots=True)
class Plan:
    """How long to measure.

    Attributes:
        rounds: number of rounds that count.
        turn_s: calls are added to a turn until it takes about as long, up to the work's ``most_calls``.
    """

    rounds: int = 9
    turn_s: float = 0.2


@dataclass(frozen=True, slots=True)
class Figures:
    """One entry's result in one case; seconds per call.

    Attributes:
        median_s: of the span, from the first rank's start to the last rank's end.
        low_s: the fastest round.
        high_s: the slowest round.
        slowest_rank_s: median of the slowest rank's own time.
        cpu_s: median of the CPU time of all ranks together.
        calls: calls in each turn.
        rounds: number of rounds.
        parked: share of a core that a rank used while it waited for its turns, on average.
    """

    median_s: float
    low_s: float
    high_s: float
    slowest_rank_s: float
    cpu_s: float
    calls: int
    rounds: int
    parked: float

    @classmethod
    def of(cls, turns: Sequence[Turn], calls: int) -> Figures:
        """From the turns that count."""
        spans = [turn.span_s for turn in turns]
        return cls(
            median_s=statistics.median(spans),
            low_s=min(spans),
            high_s=max(spans),
            slowest_rank_s=statistics.median(turn.slowest_s for turn in turns),
            cpu_s=statistics.median(turn.cpu_s for turn in turns),
            calls=calls,
            rounds=len(turns),
            parked=sum(turn.parked_cpu_s for turn in turns) / (sum(turn.parked_s for turn in turns) or 1.0),
        )


def calls_for(turn_s: float, call_s: float, most_calls: int) -> int:
    """Calls that make a turn of about ``turn_s``."""
    return max(1, min(most_calls, round(turn_s / max(call_s, 1e-9))))


def measure(
    case: Case, worlds: dict[str, TakesTurns], plan: Plan, on_failure: Callable[[Entry, WorldError], None]
) -> dict[Entry, Figures]:
    """Warms up, then plays the rounds.

    A world that fails is taken out of ``worlds``, and its entries out of the case, with a call of ``on_failure``.
    """
    taking_part = [entry for entry in case.entries if entry.contender in worlds]
    calls: dict[Entry, int] = {}
    turns: dict[Entry, list[Turn]] = {entry: [] for entry in taking_part}

    def take_turn(entry: Entry, number: int) -> Turn | None:
        if entry.contender not in worlds:
            return None
        try:
            return worlds[entry.contender].turn(case.work, entry.mode, number)
        except WorldError as error:
            del worlds[entry.contender]
            on_failure(entry, error)
            return None

    for entry in taking_part:
        take_turn(entry, 1)  # pays for connections and pages
        number = 1
        while turn := take_turn(entry, number):
            # One call says little: it is made by processes that have just woken up.
            calls[entry] = calls_for(plan.turn_s, turn.span_s, case.work.most_calls)
            if calls[entry] <= TURNS_ALIKE * number:
                break
            number = calls[entry]
    for number in range(plan.rounds):
        for entry in rotated([entry for entry in taking_part if entry in calls], number):
            if turn := take_turn(entry, calls[entry]):
                turns[entry].append(turn)
    return {entry: Figures.of(turns[entry], calls[entry]) for entry in taking_part if len(turns[entry]) == plan.rounds}
