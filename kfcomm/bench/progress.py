"""How far a benchmark is: one line that changes, on a terminal; elsewhere a line for each case."""

from __future__ import annotations

import shutil
from typing import TextIO

from kfcomm.bench.events import Begun, Event, Measured, Starting
from kfcomm.bench.table import COLUMNS

_WIPE = "\r\x1b[K"
_WIDTH = 20


class Progress:
    """Shows events on ``stream`` as they come. To be closed before the report is written."""

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
        """A line of its own, above what is live."""
        self._stream.write((_WIPE if self._shown else "") + text + "\n" + self._shown)
        self._stream.flush()

    def close(self) -> None:
        """Take away what is live."""
        if self._shown:
            self._draw("")

    def _draw(self, text: str) -> None:
        # a line that wraps could not be taken back
        self._shown = text[: shutil.get_terminal_size().columns - 1]
        self._stream.write(_WIPE + self._shown)
        self._stream.flush()


def _line(event: Measured) -> str:
    result = event.result
    figures = (f"{column.title} {column.cell(result)} {column.unit}" for column in COLUMNS if not column.is_setting)
    return f"{result.case.describe()}: {', '.join(figures)}"
