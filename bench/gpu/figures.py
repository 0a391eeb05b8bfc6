"""Rows of the table: times of kfcomm beside others', what is wanted of them, as text and record.

Pure: nothing is measured here.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

KFCOMM, RAW, TORCH = "kfcomm", "NCCL directly", "torch"
"""Names of what is measured."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """Wanted time of a row: one of these is enough; 0 if that does not count.

    Attributes:
        ratio: at most so many times as long as what it is compared with, in the median of the rounds.
        extra_s: at most so many seconds longer, in the median of the rounds.
        at_most_s: at most so many seconds, in the median.
    """

    ratio: float = 0.0
    extra_s: float = 0.0
    at_most_s: float = 0.0

    def __str__(self) -> str:
        parts = [
            f"{self.ratio:.2f} of it" if self.ratio else "",
            f"{_us(self.extra_s)} more" if self.extra_s else "",
            _us(self.at_most_s) if self.at_most_s else "",
        ]
        return " or ".join(f"at most {part}" for part in parts if part)


@dataclass(frozen=True, slots=True)
class Row:
    """One row.

    Attributes:
        title: what was done.
        times_s: seconds of kfcomm and of others, by round; the rounds of all were measured in turns.
        against: which of the others it is compared with; empty if with none.
        wanted: of kfcomm.
        about: how it was done.
    """

    title: str
    times_s: Mapping[str, Sequence[float]]
    against: str = ""
    wanted: Wanted = Wanted()
    about: Mapping[str, Any] = field(default_factory=dict)

    def median_s(self, name: str = KFCOMM) -> float:
        """Of one of them."""
        return statistics.median(self.times_s[name])

    @property
    def ratio(self) -> float | None:
        """How many times as long as the other: the median of the rounds; None without another."""
        pairs = self._pairs()
        return statistics.median(mine / other for mine, other in pairs) if pairs else None

    @property
    def extra_s(self) -> float | None:
        """How much longer than the other: the median of the rounds; None without another."""
        pairs = self._pairs()
        return statistics.median(mine - other for mine, other in pairs) if pairs else None

    @property
    def is_reached(self) -> bool | None:
        """Whether it is as wanted; None if nothing is wanted, or what it is compared with was not there."""
        wanted, ratio, extra_s = self.wanted, self.ratio, self.extra_s
        judged = [self.median_s() <= wanted.at_most_s] if wanted.at_most_s else []
        if ratio is not None and wanted.ratio:
            judged.append(ratio <= wanted.ratio)
        if extra_s is not None and wanted.extra_s:
            judged.append(extra_s <= wanted.extra_s)
        return any(judged) if judged else None

    def as_json(self) -> dict[str, Any]:
        """Everything."""
        return {
            "title": self.title,
            "medians_s": {name: self.median_s(name) for name in self.times_s},
            "against": self.against,
            "ratio": self.ratio,
            "extra_s": self.extra_s,
            "wanted": str(self.wanted),
            "reached": self.is_reached,
            **self.about,
            "times_s": {name: [round(one, 8) for one in times] for name, times in self.times_s.items()},
        }

    def _pairs(self) -> list[tuple[float, float]]:
        return list(zip(self.times_s[KFCOMM], self.times_s.get(self.against, ()), strict=False))


def table(rows: Sequence[Row]) -> str:
    """A line for each row."""
    width = max((len(row.title) for row in rows), default=0)
    lines = []
    for row in rows:
        others = [f"{name} {_us(row.median_s(name))}" for name in row.times_s if name != KFCOMM]
        told = f"{_us(row.median_s()):>11}  {'; '.join(others)}".rstrip()
        verdict = {True: "reached", False: "NOT reached", None: "not judged"}[row.is_reached]
        wanted = f"{row.wanted} ({row.against}): " if row.against and str(row.wanted) else ""
        lines.append(f"{row.title:{width}}  {told}  {wanted}{verdict}")
    return "\n".join(lines)


def _us(taken_s: float) -> str:
    return f"{taken_s * 1e6:.1f} µs" if taken_s < 1e-3 else f"{taken_s * 1e3:.2f} ms"
