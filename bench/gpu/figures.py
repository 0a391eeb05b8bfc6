"""Rows of the table: times beside their floors, wanted ratios, as text and record.

Pure: nothing is measured here.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

Pairs: TypeAlias = tuple[tuple[float, float], ...]
"""Seconds of what was done and of its floor, measured one after the other."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """Wanted ratio of a row.

    Attributes:
        ratio: at most so many times as long as the floor, in the median of the pairs.
        extra_s: or at most so many seconds longer, in the median of the pairs; 0 if that does not count.
    """

    ratio: float
    extra_s: float = 0.0

    def __str__(self) -> str:
        extra = f", or {self.extra_s * 1e6:.0f} µs more" if self.extra_s else ""
        return f"at most {self.ratio:.2f}{extra}"


@dataclass(frozen=True, slots=True)
class Row:
    """One row.

    Attributes:
        title: what was done.
        floor: what it is compared with.
        wanted: of it.
        pairs: of it and its floor.
        parts: medians in seconds of what the floor was made of, if of several.
        about: how it was done.
    """

    title: str
    floor: str
    wanted: Wanted
    pairs: Pairs
    parts: Mapping[str, float] = field(default_factory=dict)
    about: Mapping[str, Any] = field(default_factory=dict)

    @property
    def median_s(self) -> float:
        """Of what was done."""
        return statistics.median(taken_s for taken_s, _ in self.pairs)

    @property
    def floor_s(self) -> float:
        """The median of the floor."""
        return statistics.median(floor_s for _, floor_s in self.pairs)

    @property
    def ratio(self) -> float:
        """How many times as long as the floor: the median of the pairs."""
        return statistics.median(taken_s / floor_s for taken_s, floor_s in self.pairs)

    @property
    def extra_s(self) -> float:
        """How much longer than the floor: the median of the pairs."""
        return statistics.median(taken_s - floor_s for taken_s, floor_s in self.pairs)

    @property
    def is_reached(self) -> bool:
        """Whether it is as wanted."""
        return self.ratio <= self.wanted.ratio or (self.wanted.extra_s > 0 and self.extra_s <= self.wanted.extra_s)

    def as_json(self) -> dict[str, Any]:
        """Everything."""
        return {
            "title": self.title,
            "floor": self.floor,
            "median_s": self.median_s,
            "floor_median_s": self.floor_s,
            "ratio": round(self.ratio, 4),
            "share_of_floor": round(1 / self.ratio, 4),
            "extra_s": self.extra_s,
            "wanted": {"ratio": round(self.wanted.ratio, 4), "extra_s": self.wanted.extra_s},
            "reached": self.is_reached,
            **({"floor_parts_s": dict(self.parts)} if self.parts else {}),
            **self.about,
            "pairs_s": self.pairs,
        }


def table(rows: Sequence[Row]) -> str:
    """A line for each row, with its floor below it."""
    width = max((len(text) for row in rows for text in (row.title, f"  {row.floor}")), default=0)
    lines = []
    for row in rows:
        verdict = "reached" if row.is_reached else "NOT reached"
        lines.append(f"{row.title:{width}}  {_ms(row.median_s)}  {row.ratio:6.3f}  {row.wanted}: {verdict}")
        lines.append(f"{'  ' + row.floor:{width}}  {_ms(row.floor_s)}")
        lines += [f"{'    ' + name:{width}}  {_ms(taken_s)}" for name, taken_s in row.parts.items()]
    return "\n".join(lines)


def slower_of(times_s: Mapping[str, Sequence[float]], taken: str, alone: Sequence[str]) -> Pairs:
    """Pairs of what was done and of the slower of what it is made of, round by round.

    Args:
        times_s: by name, of as many rounds each.
        taken: the name of what was done.
        alone: the names of what it is made of, each done alone.
    """
    floors = [max(round_s) for round_s in zip(*(times_s[name] for name in alone), strict=True)]
    return tuple(zip(times_s[taken], floors, strict=True))


def _ms(taken_s: float) -> str:
    return f"{taken_s * 1e3:9.3f} ms"
