"""Tracebacks on the error streams of ranks: equal ones are merged, and secondary ones held back.

The failure of a rank because of another rank is *secondary*. A rank reports its traceback before it prints it (see
``rendezvous.exit_report``); its output is searched for exactly this text, so that other output is shown unchanged.

- `Repeats`: equal errors of several ranks; one is shown, and one line lists the other ranks. They are tracebacks, and
  what argparse and the interpreter print before they end. The first rank whose error begins is shown as it writes.
  While its error is recent, that of another rank is held back until it is complete. If it leads through the same lines
  of the program, it is not shown again; if its message differs, the message is shown. All else is shown after
  `HELD_FOR_S` at the latest, unless the rank is about to end. After Ctrl-C each error is held back, and that of the
  interrupt is dropped.
- `SecondaryFailures`: tracebacks of secondary failures, until it is known which rank failed first.

Sans-IO: bytes and times in, bytes out. Memory: for each rank at most `MAX_NBYTES`, and twice the report
of a secondary failure.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

import kfcomm
from kfcomm.common.sizes import ranges
from kfcomm.rendezvous.exit_report import ExitReport

MAX_NBYTES = 1 << 16
HELD_FOR_S = 2.0
ALIKE_WITHIN_S = 60.0
"""Seconds for which a shown traceback represents later equal ones."""
MAX_SHOWN = 16
"""Tracebacks that are remembered."""
_BEGIN = re.compile(
    rb"^(?:(?:  \+ Exception Group )?Traceback \(most recent call last\):$"
    rb'|  File ".+", line \d+$'  # of a SyntaxError
    rb"|usage: |\S*python[\d.]*: |kfcomm: error: )",  # of argparse, the interpreter, our own commands
    re.MULTILINE,
)
_INTERRUPT = b"KeyboardInterrupt"
_HEADING = b"Traceback (most recent call last):"
_CLASS = re.compile(rb"(?:\w+\.)*(\w+)(?::|$)")
_OF_GROUP = re.compile(rb"^  \| (\S.*)$", re.MULTILINE)
_OWN_FILES = b'  File "' + str(Path(kfcomm.__file__).parent).encode() + b"/"


@dataclass(frozen=True, slots=True)
class Error:
    """A traceback."""

    way: bytes  # all lines but the last ones, without those in kfcomm itself, which differ between ranks
    message: bytes  # last lines: class and message

    @classmethod
    def of(cls, text: bytes) -> Error:
        """Parse a traceback, or another error with its message in the last line."""
        lines = text.splitlines()
        if not text.startswith((b" ", _HEADING)):
            return cls(b"\n".join(lines[:-1]), b"\n".join(lines[-1:]))
        headings = [number for number, line in enumerate(lines) if line == _HEADING]
        end = headings[-1] + 1 if headings else 0
        while end < len(lines) and lines[end].startswith(b" "):
            end += 1
        return cls(b"\n".join(_without_own(lines[:end])), b"\n".join(lines[end:]))

    @property
    def summary(self) -> str:
        """Its message in one line; for a group of exceptions, the message of the group."""
        found = self.message.splitlines()[:1] or _OF_GROUP.findall(self.way)[:1]
        return found[0].decode(errors="replace") if found else "the same error"

    @property
    def kind(self) -> str:
        """Its class; of another error than a traceback, a few words."""
        found = _CLASS.match(self.message) if self.way.startswith((b" ", _HEADING)) else None
        return found[1].decode() if found else "the same error"


def _without_own(lines: list[bytes]) -> list[bytes]:
    kept, is_own = [], False
    for line in lines:
        if line.startswith(b"  File ") or not line.startswith(b" "):
            is_own = line.startswith(_OWN_FILES)
        if not is_own:
            kept.append(line)
    return kept


@dataclass(slots=True)
class _TracebackBlock:
    """The error stream of a rank from the beginning of a traceback on."""

    since_s: float  # time of its beginning
    is_shown: bool  # whether output is shown at once
    text: bytes = b""
    has_ended: bool = False  # whether the stream has ended
    is_whole: bool = False  # whether the traceback is complete

    def is_late(self, now_s: float) -> bool:
        return now_s >= self.since_s + HELD_FOR_S


@dataclass(slots=True)
class _Shown:
    """A shown traceback: its rank, message and time."""

    rank: int
    message: bytes
    at_s: float
    is_told: bool = False


@dataclass(slots=True)
class Repeats:
    """Held-back parts of the error stream of each rank, and the shown errors that represent them."""

    _blocks: dict[int, _TracebackBlock] = field(default_factory=dict)
    _told: dict[int, bytes] = field(default_factory=dict)
    _leaving: set[int] = field(default_factory=set)
    _shown: dict[bytes, _Shown] = field(default_factory=dict)
    _alike: dict[Error, list[int]] = field(default_factory=dict)
    is_interrupted: bool = False  # whether the job ends because of Ctrl-C
    common: set[str] = field(default_factory=set)  # messages that `tell` has named for several ranks

    @property
    def is_waiting(self) -> bool:
        """Whether output is held back, or a line is due."""
        return bool(self._blocks or self._alike)

    def told(self, rank: int, text: bytes) -> None:
        """Note that a rank is about to print this traceback."""
        self._told[rank] = text

    def leaves(self, rank: int) -> None:
        """Note that a rank leaves with an error: its output will be complete soon."""
        self._leaving.add(rank)

    def shown(self, rank: int, data: bytes, now_s: float) -> bytes:
        """Output to show now after a rank has written ``data``; empty data: the stream has ended."""
        block = self._blocks.get(rank)
        before = b""
        if block is not None and block.is_whole:
            block.has_ended = block.has_ended or not data
            return data  # after the error
        if block is None:
            begin = _BEGIN.search(data)
            if begin is None:
                return data
            is_first = not any(one.is_shown for one in self._blocks.values()) and not self._fresh(now_s)
            is_shown = is_first and not self.is_interrupted
            block = self._blocks[rank] = _TracebackBlock(now_s, is_shown=is_shown)
            before, data = data[: begin.start()], data[begin.start() :]
        after = self._take(rank, block, data)
        is_long = len(block.text) > MAX_NBYTES
        if is_long:
            del self._blocks[rank]
        if block.is_shown:
            return before + data
        return before + (block.text if is_long else b"") + after

    def _take(self, rank: int, block: _TracebackBlock, data: bytes) -> bytes:
        """Add to a block; return output after the error, if that is complete."""
        block.text += data
        block.has_ended = block.is_whole = not data
        told = self._told.get(rank)
        if told is None or told not in block.text:
            return b""
        del self._told[rank]
        block.is_whole = True
        end = block.text.index(told) + len(told)
        block.text, after = block.text[:end], block.text[end:]
        return after

    def settle(self, now_s: float, *, is_ending: bool = False, is_over: bool = False) -> list[tuple[int, bytes]]:
        """Output that is no longer held back, by rank; all of it if the job ``is_over``."""
        for rank, block in self._blocks.items():
            # A rank that leaves has printed its error by now.
            if block.is_late(now_s) and rank in self._leaving:
                block.is_whole = True
        # Ranks that were asked to end print soon: while the job is ending, each is waited for.
        due = {
            rank: block
            for rank, block in self._blocks.items()
            if block.is_whole or is_over or (block.is_late(now_s) and not is_ending)
        }
        for rank, block in due.items():
            if block.is_shown:
                del self._blocks[rank]
                if block.is_whole:
                    self._remember(rank, Error.of(block.text), now_s)
        # The first error is not complete, so that the others cannot be compared with it yet.
        if any(block.is_shown for block in self._blocks.values()):
            return []
        freed: list[tuple[int, bytes]] = []
        for rank, block in due.items():
            if block.is_shown:
                continue
            del self._blocks[rank]
            error = Error.of(block.text)
            if self.is_interrupted and error.message == _INTERRUPT:
                continue
            if block.is_whole and error.way in self._fresh(now_s):
                self._alike.setdefault(error, []).append(rank)
                continue
            is_cut = block.has_ended and not block.text.endswith(b"\n")
            freed.append((rank, block.text + b"\n" if is_cut else block.text))
            if block.is_whole:
                self._remember(rank, error, now_s)
        return freed

    def tell(self) -> list[str]:
        """Lines on errors that were not shown."""
        lines = []
        for error, alike in self._alike.items():
            first = self._shown[error.way]
            is_same = error.message == first.message
            ranks = sorted({*alike, *([first.rank] if is_same and not first.is_told else [])})
            first.is_told = first.is_told or is_same
            place = "as shown for" if is_same else "at the same place as"
            noun = "rank" if len(ranks) == 1 else "ranks"
            # Once is enough: the message of an error that is shown is left out.
            what = error.kind if is_same else error.summary
            self.common |= {error.summary} if is_same else set()
            lines.append(f"{noun} {ranges(ranks)}: {what} ({place} rank {first.rank})")
            lines += [] if is_same else error.message.decode(errors="replace").splitlines()[1:]
        self._alike.clear()
        return lines

    def _fresh(self, now_s: float) -> dict[bytes, _Shown]:
        """Shown errors that still represent later ones."""
        return {way: one for way, one in self._shown.items() if now_s <= one.at_s + ALIKE_WITHIN_S}

    def _remember(self, rank: int, error: Error, now_s: float) -> None:
        self._shown[error.way] = _Shown(rank, error.message, now_s)
        while len(self._shown) > MAX_SHOWN:
            # Not those that `tell` is going to name.
            unused = [one for one in self._shown if all(error.way != one for error in self._alike)]
            if not unused:
                break
            del self._shown[unused[0]]


@dataclass(slots=True)
class SecondaryFailures:
    """Held-back tracebacks of secondary failures."""

    _expected: dict[int, ExitReport] = field(default_factory=dict)
    _partly: dict[int, bytes] = field(default_factory=dict)
    _held: dict[int, ExitReport] = field(default_factory=dict)

    def expect(self, report: ExitReport) -> None:
        """Expect a rank to print this traceback next."""
        if report.rank not in self._held:
            self._expected[report.rank] = report

    def shown(self, rank: int, data: bytes) -> bytes:
        """Output to show now, of output of a rank; empty data at its end."""
        expected = self._expected.get(rank)
        if expected is None:
            return data
        seen = self._partly.pop(rank, b"") + data
        before, found, after = seen.partition(expected.text)
        if found:
            self._held[rank] = self._expected.pop(rank)
            return before + after
        kept = _overlap(seen, expected.text) if data else 0
        if kept:
            self._partly[rank] = seen[-kept:]
        return seen[: len(seen) - kept]

    def release(self, first: int | None) -> dict[int, bytes]:
        """Held-back tracebacks by rank: complete for the first failed rank, one line for the others."""
        held, self._held = self._held, {}
        return {
            rank: report.text if first in (rank, None) else f"{report.summary}\n".encode()
            for rank, report in sorted(held.items(), key=lambda item: item[0] != first)
        }


def _overlap(seen: bytes, text: bytes) -> int:
    """Length of the longest beginning of ``text`` at the end of ``seen``."""
    return next((size for size in range(min(len(seen), len(text) - 1), 0, -1) if seen.endswith(text[:size])), 0)
