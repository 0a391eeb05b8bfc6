"""Report of a benchmark: progress while it runs; then the results as a table, as JSON and as a page.

The table has the same cells for the terminal and for a page. Settings that are equal in all lines stand once, above
them.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Generic, Protocol, TextIO, TypeVar

from kfcomm.bench.memory import in_words
from kfcomm.bench.suite import Begun, BenchPlace, BenchResult, Event, Failed, MeasuredCase, Starting, Suite
from kfcomm.common.imports import is_installed, lacking
from kfcomm.common.sizes import show_rate, show_seconds, show_size
from kfcomm.errors import ConfigError

Row = TypeVar("Row")


@dataclass(frozen=True, slots=True)
class ReportColumn(Generic[Row]):
    """One column."""

    title: str
    unit: str  # of its numbers; empty for words
    cell: Callable[[Row], str]  # the text for a row
    is_setting: bool = True  # it shows an option, not a result
    is_word: bool = False  # it shows words, which are set to the left
    always: bool = False  # it is shown even if all rows say the same
    shown: Callable[[Row], str] | None = None  # the text of a number with a unit for its magnitude, as on pages


def show_number(value: float) -> str:
    """Four digits: enough for what can be measured, and easy to compare down a column; of small numbers, two."""
    if value >= 1000:
        return f"{value:.0f}"
    if value < 0.01:
        return f"{value:.2g}"
    return f"{value:.{3 if value < 10 else 2 if value < 100 else 1}f}"


COLUMNS: Final[tuple[ReportColumn[BenchResult], ...]] = (
    ReportColumn("collective", "", lambda result: result.case.workload or result.case.collective.value, is_word=True),
    ReportColumn("mode", "", lambda result: result.case.mode or "", is_word=True),
    ReportColumn("op", "", lambda result: result.case.op or "", is_word=True),
    ReportColumn("dtype", "", lambda result: result.case.dtype, is_word=True),
    ReportColumn("strategy", "", lambda result: result.case.strategy, is_word=True),
    ReportColumn("transport", "", lambda result: result.case.transport, is_word=True),
    ReportColumn("size", "", lambda result: show_size(result.case.nbytes), always=True),
    ReportColumn("iterations", "", lambda result: str(result.case.iterations)),
    ReportColumn("p50", "µs", lambda result: show_number(result.p50_s * 1e6), is_setting=False,
                 shown=lambda result: show_seconds(result.p50_s)),
    ReportColumn("p99", "µs", lambda result: show_number(result.p99_s * 1e6), is_setting=False,
                 shown=lambda result: show_seconds(result.p99_s)),
    ReportColumn("algbw", "GB/s", lambda result: show_number(result.algbw), is_setting=False,
                 shown=lambda result: show_rate(1e9 * result.algbw)),
    ReportColumn("busbw", "GB/s", lambda result: show_number(result.busbw), is_setting=False,
                 shown=lambda result: show_rate(1e9 * result.busbw)),
)  # fmt: skip


def with_units(columns: Iterable[ReportColumn[Row]]) -> list[ReportColumn[Row]]:
    """Columns for a page: each number has a unit for its magnitude."""
    return [replace(one, unit="", cell=one.shown) if one.shown is not None else one for one in columns]


@dataclass(frozen=True, slots=True)
class ReportTable:
    """The cells."""

    common: tuple[tuple[str, str], ...]  # title and value of each setting that is the same in all lines
    columns: tuple[ReportColumn[Any], ...]  # the columns that are left
    rows: tuple[tuple[str, ...], ...]  # their texts, by line

    @classmethod
    def of(cls, results: Sequence[Row], among: Sequence[ReportColumn[Row]]) -> ReportTable:
        """The table of at least one result, with those of the columns in which there is something to see."""
        common: list[tuple[str, str]] = []
        columns: list[ReportColumn[Row]] = []
        for column in among:
            cells = {column.cell(result) for result in results}
            if len(cells) > 1 or not column.is_setting or column.always:
                columns.append(column)
            elif cells != {""}:
                common.append((column.title, column.cell(results[0])))
        rows = tuple(tuple(column.cell(result) for column in columns) for result in results)
        return cls(tuple(common), tuple(columns), rows)

    def as_text(self) -> str:
        """Lines with words to the left, numbers to the right."""
        heads = [tuple(column.title for column in self.columns), tuple(column.unit for column in self.columns)]
        widths = [max(map(len, cells)) for cells in zip(*heads, *self.rows, strict=True)]
        lines = [
            "  ".join(
                cell.ljust(width) if column.is_word else cell.rjust(width)
                for cell, width, column in zip(cells, widths, self.columns, strict=True)
            ).rstrip()
            for cells in (*heads, *self.rows)
        ]
        above = self.settings()
        return "\n".join([above, *lines] if above else lines)

    def settings(self) -> str:
        """Settings that are equal in all lines."""
        return ", ".join(f"{title} {value}" for title, value in self.common)


_FORMAT = 1


@dataclass(slots=True)
class Report:
    """Report of the events so far."""

    suite: Suite  # the cases asked for
    begun: Begun | None = None  # the world, once it is complete
    results: list[BenchResult] = field(default_factory=list)  # so far
    failure: str | None = None  # the wrong result, if there is one

    def note(self, event: Event) -> None:
        """Take in an event."""
        match event:
            case Begun():
                self.begun = event
            case MeasuredCase(result):
                self.results.append(result)
            case Failed(message):
                self.failure = message
            case _:
                pass

    def world(self) -> str:
        """One line on the ranks, hosts and interface."""
        if self.begun is None:
            return ""
        hosts = self.begun.hosts
        where = "1 host" if len(hosts) == 1 else f"{len(hosts)} hosts"
        kinds = ", ".join(dict.fromkeys(f"{host['processor']}, {host['usable_cores']} cores" for host in hosts))
        interface = "kfcomm.sync" if self.suite.blocking else "kfcomm, asynchronous"
        devices = f"; {in_words(self.begun.devices)}" if self.begun.devices else ""
        symmetric = "; arrays in symmetric memory" if self.suite.device is BenchPlace.SYMMETRIC else ""
        return f"{self.begun.size} ranks on {where} ({kinds}){devices}; {interface}{symmetric}"

    def as_text(self) -> str:
        """World and table; empty without results."""
        return f"{self.world()}\n{ReportTable.of(self.results, COLUMNS).as_text()}\n" if self.results else ""

    def as_json(self) -> dict[str, Any]:
        """Everything: machine, versions, settings, and for each case its times and what follows from them."""
        return {
            "format": _FORMAT,
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "ranks": self.begun.size if self.begun else None,
            "hosts": self.begun.hosts if self.begun else (),
            **((self.begun.devices if self.begun else None) or {}),
            "suite": asdict(self.suite),
            "results": [_as_json(result) for result in self.results],
        }

    def as_html(self) -> str:
        """The page."""
        from kfcomm.bench import pages  # imports matplotlib

        return pages.measured(self)


class Shown(Protocol):
    """Report that `Files` can write."""

    def as_json(self) -> dict[str, Any]:
        """Its data."""

    def as_html(self) -> str:
        """Its page; needs matplotlib."""


@dataclass(frozen=True, slots=True)
class Files:
    """Files of a report; None for those that are not wanted."""

    json: Path | None = None
    html: Path | None = None

    def check(self, *, draws: bool = True) -> None:
        """Check that the files can be written, before anything is measured.

        Args:
            draws: the page has charts.

        Raises:
            ConfigError: a file cannot be written, or matplotlib, which draws charts, is not installed.
        """
        for path in (self.json, self.html):
            if path is not None:
                _try(path)
        if draws and self.html is not None and not is_installed("matplotlib"):
            raise ConfigError(lacking("--html", "matplotlib"))

    def write(self, report: Shown) -> None:
        """Write a report.

        Raises:
            ConfigError: a file cannot be written.
        """
        if self.json is not None:
            _write(self.json, json.dumps(report.as_json(), indent=1) + "\n")
        if self.html is not None:
            _write(self.html, report.as_html())


def _try(path: Path) -> None:
    is_new = not path.exists()
    try:
        # For appending: a report that is there stays until the new one is written.
        with path.open("ab"):
            pass
        if is_new:
            path.unlink()
    except OSError as error:
        raise _unwritable(path, error) from error


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, "utf-8")
    except OSError as error:
        raise _unwritable(path, error) from error


def _unwritable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"{str(path)!r} cannot be written: {error.strerror}")


def _as_json(result: BenchResult) -> dict[str, Any]:
    return {
        **asdict(result.case),
        "p50_s": result.p50_s,
        "p99_s": result.p99_s,
        "algbw_gb_per_s": result.algbw,
        "busbw_gb_per_s": result.busbw,
        "correct": True,  # a wrong result ends the benchmark
        "times_s": result.times_s,
    }


_WIPE = "\r\x1b[K"
_WIDTH = 20


class Watch:
    """Progress goes to standard error, the table to standard output, the rest to files."""

    def __init__(self, report: Report, files: Files) -> None:
        self._report = report
        self._files = files
        self._progress = Progress(sys.stderr)

    @property
    def has_failed(self) -> bool:
        """Whether a result was wrong."""
        return self._report.failure is not None

    def note(self, event: Event) -> None:
        """Take in an event."""
        self._report.note(event)
        self._progress.show(event)
        if self.has_failed:
            # At once: a launcher ends this process, too, after another rank has ended with the failure.
            self._tell()

    def say(self, text: str) -> None:
        """Write a line of a rank or the launcher."""
        self._progress.say(text)

    def finish(self, exit_code: int) -> int:
        """Show the results, and write files if the benchmark is complete. Returns the exit code.

        Raises:
            ConfigError: a file cannot be written.
        """
        if self.has_failed:
            return exit_code or 1
        self._tell()
        if exit_code == 0:
            self._files.write(self._report)
        return exit_code

    def _tell(self) -> None:
        # Before the report, which would begin on the live line.
        self._progress.close()
        sys.stdout.write(self._report.as_text())
        sys.stdout.flush()
        if self.has_failed:
            self.say(f"kfcomm: error: {self._report.failure}")


class Progress:
    """Progress of a benchmark: one line that changes on a terminal, else a line for each case."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._live = stream.isatty()
        self._done = self._total = 0
        self._shown = ""

    def show(self, event: Event) -> None:
        """Show an event."""
        match event:
            case Begun(total=total):
                self._total = total
            case MeasuredCase():
                self._done += 1
                if not self._live:
                    self.say(_line(event))
            case Starting(case=case) if self._live:
                filled = _WIDTH * self._done // max(self._total, 1)
                bar = "█" * filled + "░" * (_WIDTH - filled)
                self._draw(f"{bar} {self._done + 1}/{self._total}  {case.describe()}")
            case _:
                pass

    def say(self, text: str) -> None:
        """Write a line of its own above the live one."""
        self._stream.write((_WIPE if self._shown else "") + text + "\n" + self._shown)
        self._stream.flush()

    def close(self) -> None:
        """Remove the live line."""
        if self._shown:
            self._draw("")

    def _draw(self, text: str) -> None:
        # A line that wraps could not be wiped.
        self._shown = text[: shutil.get_terminal_size().columns - 1]
        self._stream.write(_WIPE + self._shown)
        self._stream.flush()


def _line(event: MeasuredCase) -> str:
    result = event.result
    figures = (f"{column.title} {column.cell(result)} {column.unit}" for column in COLUMNS if not column.is_setting)
    return f"{result.case.describe()}: {', '.join(figures)}"
