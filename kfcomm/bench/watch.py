"""Whoever watches a benchmark: progress while it runs, then the report."""

from __future__ import annotations

import sys

from kfcomm.bench.events import Event
from kfcomm.bench.progress import Progress
from kfcomm.bench.report import Files, Report


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
        if self.has_failed:  # now: a launcher ends this process, too, once another rank has ended by it
            self._tell()

    def say(self, text: str) -> None:
        """A line of somebody else."""
        self._progress.say(text)

    def finish(self, exit_code: int) -> int:
        """Show what has been measured; write files only of a benchmark that was complete. Returns the exit code.

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
