"""Display of a benchmark: progress while it runs, then the report."""

from __future__ import annotations

import shutil
import sys
from typing import TextIO

from kfcomm.bench.events import Begun, Event, Measured, Starting
from kfcomm.bench.report import Files, Report
from kfcomm.bench.table import COLUMNS

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
        if (
            self.has_failed
        ):  # At once: a launcher ends this process, too, after another rank has ended with the failure.
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
        self._progress.close()
        sys.stdout.write(self._report.as_text())
        sys.stdout.flush()
        if self.has_failed:
            self.say(f"kfcomm: error: {self._report.failure}")


class Progress:
    """Progress of a benchmark: one line that changes on a terminal, else a line for each case.

    To be closed before the report is written.
    """

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
            case Measured():
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


def _line(event: Measured) -> str:
    result = event.result
    figures = (f"{column.title} {column.cell(result)} {column.unit}" for column in COLUMNS if not column.is_setting)
    return f"{result.case.describe()}: {', '.join(figures)}"
