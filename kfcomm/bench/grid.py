"""Times by strategy and size, the fastest at each size, and advice.

Pure: does not depend on how times are measured or shown.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from kfcomm.common.sizes import show_size
from kfcomm.strategies.plugins import build
from kfcomm.types import Layout

TOLERANCE = 1.05
"""A strategy that is slower by up to this factor counts as the fastest, if that saves a rule."""


@dataclass(frozen=True, slots=True)
class Grid:
    """Times of every strategy at every size.

    Attributes:
        strategies: their names, in order.
        sizes: bytes, ascending.
        seconds: by strategy and size.
    """

    strategies: tuple[str, ...]
    sizes: tuple[int, ...]
    seconds: Mapping[tuple[str, int], float]

    @classmethod
    def of(cls, cells: Iterable[tuple[str, int, float]]) -> Self:
        """The grid of ``(strategy, nbytes, seconds)``; sizes at which not all strategies were timed are left out."""
        seconds = {(strategy, nbytes): time_s for strategy, nbytes, time_s in cells}
        strategies = tuple(dict.fromkeys(strategy for strategy, _ in seconds))
        sizes = sorted({nbytes for _, nbytes in seconds})
        whole = (nbytes for nbytes in sizes if all((strategy, nbytes) in seconds for strategy in strategies))
        return cls(strategies, tuple(whole), seconds)

    def ranking(self, nbytes: int) -> list[str]:
        """The strategies, the fastest first."""
        return sorted(self.strategies, key=lambda strategy: self.seconds[strategy, nbytes])

    def winner(self, nbytes: int) -> str:
        """The fastest strategy."""
        return self.ranking(nbytes)[0]

    def slower(self, strategy: str, nbytes: int) -> float:
        """How many times as long as the fastest a strategy takes."""
        return self.seconds[strategy, nbytes] / self.seconds[self.winner(nbytes), nbytes]

    def lead(self, strategy: str, nbytes: int) -> float:
        """How many times as long as this strategy the fastest of the others takes; 1 without others."""
        others = [self.seconds[other, nbytes] for other in self.strategies if other != strategy]
        return min(others, default=self.seconds[strategy, nbytes]) / self.seconds[strategy, nbytes]


@dataclass(frozen=True, slots=True)
class Rule:
    """Strategy for a range of sizes.

    Attributes:
        sizes: those of the grid for which it holds, ascending.
        upto: largest size in bytes; None for no limit.
        strategy: its name.
        lead: how many times as long the fastest of the others takes, the geometric mean over ``sizes``.
    """

    sizes: tuple[int, ...]
    upto: int | None
    strategy: str
    lead: float

    def describe(self) -> str:
        """The strategy, and how much it is worth."""
        if len(self.sizes) == 0 or self.lead == 1:
            return self.strategy
        if self.lead < TOLERANCE:
            return f"{self.strategy} (about as fast as the next)"
        return f"{self.strategy} ({self.lead:.{1 if self.lead < 10 else 0}f}× the next)"


@dataclass(frozen=True, slots=True)
class Advice:
    """Strategies to set, by size.

    Attributes:
        rules: with ascending bounds; the last one is unbounded.
    """

    rules: tuple[Rule, ...]

    @classmethod
    def of(cls, grid: Grid) -> Self:
        """The fewest rules that stay within `TOLERANCE` of the fastest at all sizes."""
        rules: list[Rule] = []
        left = grid.sizes
        while left:
            reach = {strategy: _reach(grid, strategy, left) for strategy in grid.strategies}
            most = max(reach.values())
            longest = [strategy for strategy in grid.strategies if reach[strategy] == most]
            best = min(longest, key=lambda strategy: _mean(grid.slower(strategy, nbytes) for nbytes in left[:most]))
            taken, left = left[:most], left[most:]
            lead = _mean(grid.lead(best, nbytes) for nbytes in taken)
            rules.append(Rule(taken, taken[-1] if left else None, best, lead))
        return cls(tuple(rules))

    def in_words(self) -> str:
        """A sentence."""
        *bounded, last = self.rules
        parts = [f"up to {show_size(rule.upto)}: {rule.describe()}" for rule in bounded if rule.upto is not None]
        return "; ".join([*parts, f"{'above' if parts else 'at all sizes'}: {last.describe()}"])

    def as_setting(self) -> str:
        """The value of ``strategy``: a name, or rules such as ``<=64KiB: star, else: ring``."""
        *bounded, last = self.rules
        if not bounded:
            return last.strategy
        rules = [f"<={_exact(rule.upto)}: {rule.strategy}" for rule in bounded if rule.upto is not None]
        return ", ".join([*rules, f"else: {last.strategy}"])

    def as_json(self) -> dict[str, Any]:
        """The advice as JSON."""
        rules = [
            {"upto_nbytes": rule.upto, "strategy": rule.strategy, "lead": round(rule.lead, 4)} for rule in self.rules
        ]
        return {"words": self.in_words(), "setting": self.as_setting(), "rules": rules}


def distinct(names: Sequence[str], layout: Layout) -> dict[str, tuple[str, ...]]:
    """The strategies whose graphs differ for this layout, each with the names of others that have the same ones.

    Raises:
        ConfigError: a name is unknown.
    """
    found: dict[bytes, list[str]] = {}
    for name in names:
        found.setdefault(build(name, layout).digest, []).append(name)
    return {first: tuple(others) for first, *others in found.values()}


def _reach(grid: Grid, strategy: str, sizes: Sequence[int]) -> int:
    """For how many sizes, from the first, a strategy is as good as the fastest."""
    good = [grid.slower(strategy, nbytes) <= TOLERANCE for nbytes in sizes]
    return good.index(False) if False in good else len(good)


def _mean(values: Iterable[float]) -> float:
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs))


def _exact(nbytes: int) -> str:
    """A size without loss and without blanks."""
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes % scale == 0:
            return f"{nbytes // scale}{unit}"
    return f"{nbytes}B"
