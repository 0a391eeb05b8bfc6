"""Results as JSON, and back: what is kept in ``bench/results``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from bench.compare.rounds import Figures
from bench.compare.table import Results, lines
from bench.compare.works import Entry, Mode
from bench.records import FORMAT


def to_record(results: Results, about: Mapping[str, Any]) -> dict[str, Any]:
    """Figures of a record: ``about`` (versions, settings), all times, and the ratios of the table."""
    return {
        "format": FORMAT,
        **about,
        "figures": [
            {"ranks": ranks, "work": work, "contender": entry.contender, "mode": entry.mode, **asdict(figures)}
            for (ranks, work), measured in results.items()
            for entry, figures in measured.items()
        ],
        "ratios": [
            {
                "row": one.row.title,
                "ranks": one.row.ranks,
                "against": one.rival.title,
                "ratio": one.ratio and round(one.ratio, 4),
                "minimum": one.rival.minimum,
                "aim": one.rival.aim,
                "reached": one.verdict,
            }
            for one in lines(results)
        ],
    }


def from_record(record: Mapping[str, Any]) -> Results:
    """The figures of a record.

    Raises:
        ValueError: it is of another format.
    """
    if record.get("format") != FORMAT:
        raise ValueError(f"not a record of format {FORMAT}")
    results: dict[tuple[int, str], dict[Entry, Figures]] = {}
    for line in record["figures"]:
        values = {name: line[name] for name in Figures.__dataclass_fields__}
        case = results.setdefault((line["ranks"], line["work"]), {})
        case[Entry(line["contender"], Mode(line["mode"]))] = Figures(**values)
    return results
