"""The table: each row's times, ratios, what must be reached, and whether it is. A Markdown table, readable as it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from bench.compare.launch import LAUNCHES
from bench.compare.rounds import Figures
from bench.compare.rows import BLOCKING, ROWS, Rival, Row
from bench.compare.works import Entry

Results = Mapping[tuple[int, str], Mapping[Entry, Figures]]
"""By number of ranks and name of the work."""

HEAD = ("work", "kfcomm", "against", "its time", "ratio", "minimum", "aim", "")

IDLE_MAXIMUM = 0.01


class Verdict(StrEnum):
    """How a ratio stands to what must be reached."""

    AIM = "aim"
    MINIMUM = "minimum"
    BELOW = "below"
    NONE = ""


@dataclass(frozen=True, slots=True)
class Line:
    """One comparison.

    Attributes:
        row: which row.
        rival: with whom.
        ours: median of ours, in seconds; None if it was not measured.
        theirs: median of the fastest entry of the rival.
        entry: which one that is.
    """

    row: Row
    rival: Rival
    ours: float | None
    theirs: float | None
    entry: Entry | None

    @property
    def ratio(self) -> float | None:
        """The rival's time over ours: above one, we are faster; with a floor, our share of its rate."""
        return None if self.ours is None or self.theirs is None else self.theirs / self.ours

    @property
    def verdict(self) -> Verdict:
        """Whether minimum and aim are reached."""
        if self.ratio is None or self.rival.minimum is None:
            return Verdict.NONE
        if self.rival.aim is not None and self.ratio >= self.rival.aim:
            return Verdict.AIM
        return Verdict.MINIMUM if self.ratio >= self.rival.minimum else Verdict.BELOW


def lines(results: Results, rows: tuple[Row, ...] = ROWS) -> list[Line]:
    """All comparisons whose case was measured."""
    return [
        line(row, rival, measured)
        for row in rows
        if (measured := results.get((row.ranks, row.work.name))) is not None
        for rival in row.rivals
    ]


def line(row: Row, rival: Rival, measured: Mapping[Entry, Figures]) -> Line:
    """One comparison: the fastest of the rival's entries counts."""
    ours = measured.get(row.ours)
    there = [entry for entry in rival.entries if entry in measured]
    best = min(there, key=lambda entry: measured[entry].median_s, default=None)
    return Line(
        row,
        rival,
        None if ours is None else ours.median_s,
        None if best is None else measured[best].median_s,
        best,
    )


def render(
    results: Results,
    rows: tuple[Row, ...] = ROWS,
    *,
    versions: Mapping[str, Mapping[str, str]] = MappingProxyType({}),
    skipped: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """The table as text.

    Args:
        results: what was measured.
        rows: which comparisons to show.
        versions: of the libraries of each contender.
        skipped: contenders without lines in the table, and why.
    """
    cells = [HEAD]
    shown: Row | None = None
    for one in lines(results, rows):
        if all(entry.contender in skipped for entry in one.rival.entries):
            continue
        first = one.row is not shown
        shown = one.row
        cells.append(
            (
                f"{one.row.title}, {one.row.ranks} ranks" if first else "",
                seconds(one.ours) if first else "",
                against(one),
                seconds(one.theirs),
                ratio(one.ratio, one.rival),
                ratio(one.rival.minimum, one.rival),
                ratio(one.rival.aim, one.rival),
                one.verdict,
            )
        )
    notes = [f"{row.title}: {row.note}." for row in rows if row.note and (row.ranks, row.work.name) in results]
    if (idle := idle_share(results)) is not None:
        notes.append(f"An idle communicator uses {idle:.2%} of a core; at most {IDLE_MAXIMUM:.0%} is allowed.")
    notes += [f"{LAUNCHES[name].title}: skipped: {reason}" for name, reason in skipped.items()]
    if versions:
        notes.append(f"Versions: {'; '.join(versioned(versions))}.")
    return "\n".join([*aligned(cells), *([""] if notes else []), *notes])


def versioned(versions: Mapping[str, Mapping[str, str]]) -> list[str]:
    """``Gloo: torch 2.15.0`` for each contender in the order of `LAUNCHES`; only the first of those that are alike."""
    texts: dict[str, str] = {}
    for name in (name for name in LAUNCHES if name in versions):
        text = ", ".join(f"{library} {version}" for library, version in versions[name].items())
        texts.setdefault(text, LAUNCHES[name].title)
    return [f"{title}: {text}" for text, title in texts.items()]


def idle_share(results: Results) -> float | None:
    """The largest share of a core that a rank used while its program slept between turns, in any case.

    That of the blocking interface, whose loop runs all the time.
    """
    shares = [one[BLOCKING].parked for one in results.values() if BLOCKING in one]
    return max(shares, default=None)


def against(one: Line) -> str:
    """The rival; where the fastest of several entries counts, which one it is."""
    if one.entry is None or len(one.rival.entries) == 1:
        return one.rival.title
    return f"{one.rival.title} ({one.entry.mode})"


def aligned(cells: Sequence[tuple[str, ...]]) -> list[str]:
    """A Markdown table with columns of even width."""
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    text = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in cells
    ]
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return [text[0], rule, *text[1:]]


def seconds(value: float | None) -> str:
    """Three digits with a fitting unit."""
    if value is None:
        return "no figure"
    if value < 1e-3:
        return f"{value * 1e6:.3g} µs"
    return f"{value * 1e3:.3g} ms" if value < 1 else f"{value:.3g} s"


def ratio(value: float | None, rival: Rival) -> str:
    """``2.5×``, or a share of a floor's rate in percent."""
    if value is None:
        return ""
    return f"{value:.0%}" if rival.is_floor else f"{value:.3g}×"
