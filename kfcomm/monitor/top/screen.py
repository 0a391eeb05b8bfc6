"""The terminal: a screen of its own, drawn over and over, that leaves what was there before when it is left.

Control sequences are those of every terminal since the VT100 and xterm (ECMA-48; alternate screen: DECSET 1049).
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
from collections.abc import Iterator, Sequence
from typing import TextIO

from kfcomm.monitor.top.view import Line, Style

ENTER, LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
HOME, CLEAR_LINE, CLEAR_BELOW, PLAIN = "\x1b[H", "\x1b[K", "\x1b[J", "\x1b[0m"
COLORS = {Style.TITLE: "\x1b[1m", Style.HEAD: "\x1b[7m", Style.ALARM: "\x1b[31m", Style.PLAIN: ""}
QUIT = (b"q", b"Q", b"\x03", b"")
"""The last of them: the terminal is gone."""


class Screen:
    """Draws on ``stream``, and hears the keyboard at ``keys``, a descriptor (None: there is none)."""

    def __init__(self, stream: TextIO, keys: int | None, *, colored: bool) -> None:
        self._stream = stream
        self._keys = keys
        self._colors = COLORS if colored else dict.fromkeys(COLORS, "")

    def size(self) -> tuple[int, int]:
        """Columns and rows; asked anew each time, since windows are resized."""
        try:
            found = os.get_terminal_size(self._stream.fileno())
        except OSError:
            return 80, 24
        return found.columns, found.lines

    def draw(self, lines: Sequence[Line]) -> None:
        """Show these lines and nothing else."""
        styled = [f"{self._colors[line.style]}{line.text}{PLAIN}{CLEAR_LINE}" for line in lines]
        self._stream.write(HOME + "\r\n".join(styled) + CLEAR_BELOW)
        self._stream.flush()

    def wait(self, seconds: float) -> bool:
        """Wait so long; whether the user wants to leave."""
        if self._keys is None:
            select.select([], [], [], seconds)
            return False
        ready, _, _ = select.select([self._keys], [], [], seconds)
        return bool(ready) and os.read(self._keys, 1) in QUIT


@contextlib.contextmanager
def screen() -> Iterator[Screen]:
    """The terminal of this process, for as long as the block lasts."""
    colored = "NO_COLOR" not in os.environ
    with _keyboard() as keys:
        sys.stdout.write(ENTER)
        try:
            yield Screen(sys.stdout, keys, colored=colored)
        finally:
            sys.stdout.write(PLAIN + LEAVE)
            sys.stdout.flush()


@contextlib.contextmanager
def _keyboard() -> Iterator[int | None]:
    """Keys as they are pressed, not shown."""
    if not sys.stdin.isatty():
        yield None
        return
    import termios
    import tty

    keys = sys.stdin.fileno()
    before = termios.tcgetattr(keys)
    tty.setcbreak(keys)
    try:
        yield keys
    finally:
        termios.tcsetattr(keys, termios.TCSADRAIN, before)
