"""Results as JSON, and back: what is kept in ``bench/results``."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench.compare.rounds import Figures
from bench.compare.table import Results, lines
from bench.compare.works import Entry, Mode

FORMAT = 1


def to_record(results: Results, about: Mapping[str, Any]) -> dict[str, Any]:
    """What is written: ``about`` (machine, versions, settings), all figures, and the ratios of the table."""
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


def dated(figures: Mapping[str, Any], machine: Mapping[str, Any], began_s: float) -> dict[str, Any]:
    """The record of what was measured just now.

    Args:
        figures: what was measured, and of what.
        machine: what `machine.describe` said before.
        began_s: the monotonic time of the beginning.
    """
    took_s = round(time.monotonic() - began_s)
    date = datetime.now(UTC).isoformat(timespec="seconds")
    return {"format": FORMAT, "date": date, "took_s": took_s, "machine": machine, **figures}


def write(record: Mapping[str, Any], path: Path) -> None:
    """Writes a record."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
