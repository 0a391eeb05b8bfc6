"""A change of a job on a terminal: as lines of any width and height, and a screen that shows them.

Lines have what fits, the most important first: in a narrow terminal tables lose columns, in a low one they lose rows,
and say how many. The screen is one of its own, drawn over and over; what was there before is back when it is left.
Control sequences are those of every terminal since the VT100 and xterm (ECMA-48; alternate screen: DECSET 1049).
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import TextIO

from kfcomm.common.sizes import ranks_in_words
from kfcomm.monitor.top import JobChange, KeyChange, LinkRate, RankChange

MIN_ROWS = 3
"""Of every table, where there are so many."""


class Style(Enum):
    """Style of a line."""

    PLAIN = auto()
    TITLE = auto()
    HEAD = auto()
    ALARM = auto()


@dataclass(frozen=True, slots=True)
class Line:
    """One line."""

    text: str
    style: Style = Style.PLAIN


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table; on a narrow terminal, those go first whose ``goes`` is largest, and those with 0 never."""

    head: str
    goes: int = 0
    left: bool = False


Row = tuple[Sequence[str], Style]

RANKS = (
    Column("rank"), Column("strategy", 3, left=True), Column("calls/s"), Column("sent/s", 2), Column("received/s", 4),
    Column("waits for", left=True), Column("loop lag", 1), Column("peak mem", 5),
)  # fmt: skip
LINKS = (Column("link"), Column("over", 1, left=True), Column("bytes/s"), Column("", 2, left=True))
KEYS = (
    Column("name", left=True), Column("calls/s"), Column("bytes/s", 3), Column("p50"), Column("p99", 1),
    Column("max", 4), Column("failed", 2),
)  # fmt: skip
GAP = "  "
MAX_NAME = 40
BAR = 20


def view(change: JobChange, width: int, height: int | None = None) -> list[Line]:
    """Lines of at most ``width`` characters, at most ``height`` of them (None: as many as there are)."""
    program = [Line(change.program)] if change.program else []
    lines = [Line(title(change), Style.TITLE), *program, *map(Line, summary(change)), *alarms(change), Line("")]
    tables = (
        (RANKS, [_rank(change, rank, one) for rank, one in change.ranks.items()]),
        (LINKS, _links(change.links)),
        (KEYS, [_key(change, key) for key in change.keys]),
    )
    # of each table its head, a line that says what is left out, and an empty one
    room = None if height is None else height - len(lines) - 3 * len(tables)
    counts = shares([len(rows) for _, rows in tables], room)
    for (columns, rows), count in zip(tables, counts, strict=True):
        if rows:
            lines += [*table(columns, rows, count, width), Line("")]
    shown = [Line(clipped(line.text.rstrip(), width), line.style) for line in lines]
    while shown and not shown[-1].text:
        shown.pop()
    return shown if height is None else shown[:height]


def title(change: JobChange) -> str:
    """Job, ranks and strategy."""
    strategies = " / ".join(dict.fromkeys(answer.strategy for answer in change.answers)) or "?"
    elsewhere = change.size - len(change.ranks) - len(change.gone)
    there = f", {elsewhere} on other hosts" if elsewhere > 0 else ""
    here = " here" if all(one.is_here for one in change.ranks.values()) else ""
    ranks = f"{len(change.ranks)} of {change.size or '?'} ranks{here}{there}"
    epoch = max((answer.epoch for answer in change.answers), default=0)
    changed = f"  epoch {epoch}" if epoch else ""
    return f"kfcomm top  {change.job}  {ranks}{changed}  strategy {strategies}"


def summary(change: JobChange) -> list[str]:
    """The job as a whole."""
    calls = max((one.calls_per_s for one in change.ranks.values()), default=0.0)
    sent = sum(one.sent_rate for one in change.ranks.values())
    lag_s = max((answer.loop_lag_s for answer in change.answers), default=0.0)
    lines = [f"{_rate(change, calls)} collectives/s   {size(sent)}/s sent   loop lag at most {span(lag_s)}"]
    gauges = next((answer.gauges for answer in change.answers if answer.gauges), None)
    if gauges is not None:
        lines.append("training: " + "   ".join(f"{name} {value:.4g}" for name, value in gauges.items()))
    since = "" if change.passed_s else " since the beginning"
    slowest, waited = change.slowest, change.waited_for
    if slowest is None:
        return [*lines, "no rank was waited for"]
    share = waited[slowest] / sum(waited.values())
    return [*lines, f"slowest: rank {slowest}, with {share:.0%} of all waiting ({span(waited[slowest])}{since})"]


def alarms(change: JobChange) -> list[Line]:
    """Warnings, one line each."""
    silent = [rank for rank, one in change.ranks.items() if one.now is None]
    lines = [Line(change.note, Style.ALARM)] if change.note else []
    if change.has_ended:
        lines.append(Line("the job has ended: none of its ranks is left on this host", Style.ALARM))
    elif change.gone:
        lines.append(Line(f"gone: {ranks_in_words(change.gone)}", Style.ALARM))
    if silent:
        why = "stopped, or another version" if change.note else "stopped?"
        lines.append(Line(f"no answer ({why}): {ranks_in_words(silent)}", Style.ALARM))
    return lines


def table(columns: Sequence[Column], rows: Sequence[Row], count: int, width: int) -> list[Line]:
    """The first ``count`` rows, with the columns that fit."""
    cells = [row for row, _ in rows[:count]]
    widths = [max([len(column.head), *(len(row[i]) for row in cells)]) for i, column in enumerate(columns)]
    kept = list(range(len(columns)))
    for number in sorted((i for i, column in enumerate(columns) if column.goes), key=lambda i: -columns[i].goes):
        if sum(widths[i] + len(GAP) for i in kept) - len(GAP) <= width:
            break
        kept.remove(number)

    def text(row: Sequence[str]) -> str:
        return GAP.join(row[i].ljust(widths[i]) if columns[i].left else row[i].rjust(widths[i]) for i in kept)

    lines = [Line(text([column.head for column in columns]), Style.HEAD)]
    lines += [Line(text(row), style) for row, style in rows[:count]]
    if count < len(rows):
        lines.append(Line(f"... and {len(rows) - count} more"))
    return lines


def shares(wanted: Sequence[int], room: int | None) -> list[int]:
    """Rows of each table: `MIN_ROWS` each, then one by turns, as long as they fit."""
    if room is None:
        return list(wanted)
    given = [min(MIN_ROWS, count) for count in wanted]
    left = room - sum(given)
    while left > 0 and given != list(wanted):
        for i, count in enumerate(wanted):
            if given[i] < count and left > 0:
                given[i] += 1
                left -= 1
    return given


def size(nbytes: float) -> str:
    """Bytes, for people."""
    for unit in ("B", "KB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.0f} {unit}" if unit == "B" or nbytes >= 99.95 else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.1f} TB"


def span(seconds: float) -> str:
    """A time, for people."""
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if seconds * factor >= 1:
            value = seconds * factor
            return f"{value:.0f} {unit}" if value >= 99.95 else f"{value:.1f} {unit}"
    return f"{seconds * 1e6:.0f} µs"


def clipped(text: str, width: int) -> str:
    """At most ``width`` characters, on one line."""
    text = "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text)
    return text if len(text) <= width else text[: max(0, width - 1)] + "…"[:width]


def _rate(change: JobChange, per_s: float, digits: int = 0) -> str:
    """Columns that need two looks."""
    return f"{per_s:,.{digits}f}" if change.passed_s else "-"


def _rank(change: JobChange, rank: int, one: RankChange) -> Row:
    now = one.now
    if now is None:
        return (str(rank), "no answer", "", "", "", "", "", ""), Style.ALARM
    waited = one.waited_s or {}
    peer = one.waits_for
    waits_for = "" if peer is None else f"rank {peer} ({waited[peer] / sum(waited.values()):.0%})"
    cells = (
        str(rank), now.strategy, _rate(change, one.calls_per_s), size(one.sent_rate), size(one.received_rate),
        waits_for, span(now.loop_lag_s), size(now.peak_memory_nbytes),
    )  # fmt: skip
    return cells, Style.PLAIN


def _links(links: Sequence[LinkRate]) -> list[Row]:
    most = max((link.rate for link in links), default=0.0) or 1.0
    return [
        (
            (f"{link.source} → {link.target}", link.kind, size(link.rate), "█" * round(BAR * link.rate / most)),
            Style.PLAIN,
        )
        for link in links
    ]


def _key(change: JobChange, key: KeyChange) -> Row:
    cells = (
        clipped(key.name or "(unnamed)", MAX_NAME), _rate(change, key.calls_per_s, 1),
        size(key.nbytes_per_s) if change.passed_s else "-",
        span(key.p50_s), span(key.p99_s), span(key.max_s), str(key.failures),
    )  # fmt: skip
    return cells, Style.ALARM if key.failures else Style.PLAIN


ENTER, LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
HOME, CLEAR_LINE, CLEAR_BELOW, PLAIN = "\x1b[H", "\x1b[K", "\x1b[J", "\x1b[0m"
COLORS = {Style.TITLE: "\x1b[1m", Style.HEAD: "\x1b[7m", Style.ALARM: "\x1b[31m", Style.PLAIN: ""}
QUIT = (b"q", b"Q", b"\x03", b"")
"""The last of them: the terminal is gone."""


class Screen:
    """Draws on ``stream``, and hears the keyboard at ``keys``, a descriptor or None."""

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
    # Not raw mode, so that Ctrl-C and Ctrl-Z keep their meaning.
    tty.setcbreak(keys)
    try:
        yield keys
    finally:
        termios.tcsetattr(keys, termios.TCSADRAIN, before)
