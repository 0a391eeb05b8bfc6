"""Output of many ranks: on one terminal, complete lines, each after its rank; and in log files.

Output is split into lines; a line is written when it is complete, so that lines of different ranks never mix. A
carriage return restarts a line, as on a terminal: of a progress bar, the last state before the newline is written, and
of a slow one a state every `BAR_EVERY_S`, as a line. On a terminal an incomplete line is shown instead, at the bottom,
cut to one row and overwritten by the next output, so that a progress bar moves there.

`LauncherScreen` is sans-IO: bytes and times in, bytes to write out. `Output` writes them in a thread, so that a blocked
terminal or pager does not keep the launcher from handling signals.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import re
import select
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from io import FileIO
from pathlib import Path

MAX_LINE_NBYTES = 1 << 24
"""Longer lines are cut."""
BAR_EVERY_S = 1.0

_COLORS = (36, 33, 32, 35, 34, 31, 96, 93, 92, 95, 94, 91)
_MAX_LETTER_NBYTES = 32
"""Bytes of one character with its escapes."""
_RESET = b"\x1b[0m"
_WIPE = b"\r\x1b[K"
_ESCAPE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|[\x00-\x1f\x7f]")


class Stream(Enum):
    """Standard stream of a rank, and of the launcher."""

    OUT = 1
    ERR = 2


@dataclass(frozen=True, slots=True)
class OutputStyle:
    """How lines are shown."""

    size: int  # number of ranks; gives the width of the prefix
    color: bool = False  # whether the prefix is coloured by rank
    terminals: frozenset[Stream] = frozenset()  # the streams that go to a terminal
    columns: int = 80  # width of the terminal


Writes = list[tuple[Stream, bytes]]
Source = tuple[int, Stream]


@dataclass(slots=True)
class _Line:
    """A line that is not complete."""

    # its bytes after the last return, except a final return, which may belong to a newline that is still to come
    text: bytearray = field(default_factory=bytearray)
    told_s: float | None = None  # time when a state was last written, or when it was first restarted; None before

    def begun_anew(self) -> bytes:
        """Drop the text before the last return; return the last complete state."""
        is_open = self.text.endswith(b"\r")
        before, _, last = bytes(self.text).rstrip(b"\r").rpartition(b"\r")
        self.text[:] = last + (b"\r" if is_open else b"")
        return last if is_open else _visible(before)


class LauncherScreen:
    """Merges the output of the ranks. Memory: at most `MAX_LINE_NBYTES` for each rank and stream."""

    def __init__(self, look: OutputStyle) -> None:
        self._look = look
        self._pending: dict[Source, _Line] = {}
        self._shown: Source | None = None

    def feed(self, rank: int, stream: Stream, data: bytes, now_s: float = 0.0) -> Writes:
        """Process output of ``rank``; return what to write."""
        pending = self._pending.setdefault((rank, stream), _Line())
        *lines, rest = data.split(b"\n")
        if lines:
            lines[0] = bytes(pending.text) + lines[0]
            pending.text.clear()
            pending.told_s = None
        pending.text += rest
        if b"\r" in rest:
            lines += self._bar(stream, pending, now_s)
        while len(pending.text) > MAX_LINE_NBYTES:
            lines.append(bytes(pending.text[:MAX_LINE_NBYTES]))
            del pending.text[:MAX_LINE_NBYTES]
        # Before `_lines`, which wipes it.
        before = self._shown
        return [*self._lines(rank, stream, lines), *self._show((rank, stream), before)]

    def end(self, rank: int, stream: Stream) -> Writes:
        """End a stream of ``rank``; return its incomplete line."""
        rest = _visible(bytes(self._pending.pop((rank, stream), _Line()).text))
        return list(self._lines(rank, stream, [rest] if rest else []))

    def answered(self) -> None:
        """Treat the shown incomplete line as complete: the user has answered this prompt."""
        if self._shown is not None:
            self._pending.pop(self._shown, None)
            self._shown = None

    def say(self, text: str) -> Writes:
        """Return a line of the launcher, for the error stream."""
        return [*self._wipe(), (Stream.ERR, f"kfcomm: {text}\n".encode())]

    def _bar(self, stream: Stream, pending: _Line, now_s: float) -> list[bytes]:
        """State of a line that is restarted again and again, if one is due."""
        state = pending.begun_anew()
        if not state.strip() or stream in self._look.terminals:
            return []
        if pending.told_s is not None and now_s < pending.told_s + BAR_EVERY_S:
            return []
        is_first, pending.told_s = pending.told_s is None, now_s
        return [] if is_first else [state]

    def _lines(self, rank: int, stream: Stream, lines: list[bytes]) -> Iterator[tuple[Stream, bytes]]:
        if not lines:
            return
        if stream in self._look.terminals:
            yield from self._wipe()
        prefix = self._prefix(rank)
        yield stream, b"".join(prefix + _closed(_visible(line)) + b"\n" for line in lines)

    def _show(self, latest: Source, before: Source | None) -> Iterator[tuple[Stream, bytes]]:
        """Show an incomplete line at the bottom of the terminal: the latest, else the one shown before."""
        if latest[1] not in self._look.terminals:
            return
        for source in (latest, before):
            text = self._incomplete(source) if source is not None else ""
            if source is not None and text:
                yield from self._wipe()
                yield source[1], self._prefix(source[0]) + text.encode()
                self._shown = source
                return
        yield from self._wipe()

    def _incomplete(self, source: Source) -> str:
        """The incomplete line of a source, without escapes, cut to one row."""
        room = max(self._look.columns - len(f"[{self._look.size - 1}] ") - 1, 0)
        # Cut before it is decoded: an incomplete line may have 16 MiB.
        begin = bytes(self._pending.get(source, _Line()).text[: _MAX_LETTER_NBYTES * room])
        text = _ESCAPE.sub("", _visible(begin).decode(errors="replace"))
        shown = text[:room]
        return shown if shown.strip() else ""

    def _wipe(self) -> Iterator[tuple[Stream, bytes]]:
        if self._shown is not None:
            yield self._shown[1], _WIPE
            self._shown = None

    def _prefix(self, rank: int) -> bytes:
        label = f"[{rank:{len(str(self._look.size - 1))}}]"
        if self._look.color:
            label = f"\x1b[{_COLORS[rank % len(_COLORS)]}m{label}\x1b[0m"
        return f"{label} ".encode()


def _visible(line: bytes) -> bytes:
    """Visible part of a line: its text after the last return, without trailing returns."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]


def _closed(line: bytes) -> bytes:
    """Line with its colours reset, so that they do not affect the next rank's line."""
    return line + _RESET if b"\x1b[" in line else line


_AT_ONCE_NBYTES = 4096
"""A writable pipe takes this much without blocking (PIPE_BUF)."""
_LOOK_EVERY_MS = 100

_NAMES = {Stream.OUT: "standard output", Stream.ERR: "standard error"}
_OTHER = {Stream.OUT: Stream.ERR, Stream.ERR: Stream.OUT}


class Output:
    """Writes all output. ``on_broken`` is called once, when its reader is gone (``| head``).

    Other errors of writing (a full disk, a closed descriptor) do not affect the job: the output is dropped and counted,
    with a message on the other stream, at the first error and at the end.
    """

    def __init__(
        self, screen: LauncherScreen, on_broken: Callable[[], None], descriptors: Mapping[Stream, int]
    ) -> None:
        self._screen = screen
        self._descriptors = descriptors
        self._on_broken = on_broken
        self._broken = False
        self._abandoned = False
        self._dropped = {stream: Dropped(_NAMES[stream]) for stream in Stream}
        self._lock = asyncio.Lock()  # writes leave in the order in which the screen made them

    async def feed(self, rank: int, stream: Stream, data: bytes) -> None:
        """Write output of a rank; empty data at its end."""
        async with self._lock:
            now_s = time.monotonic()
            await self._write(self._screen.feed(rank, stream, data, now_s) if data else self._screen.end(rank, stream))

    async def say(self, text: str) -> None:
        """Write a line of the launcher."""
        async with self._lock:
            await self._write(self._screen.say(text))

    async def finish(self) -> None:
        """Write how much was dropped."""
        for stream, dropped in self._dropped.items():
            if dropped.nbytes:
                async with self._lock:
                    await self._write([(_OTHER[stream], f"kfcomm: {dropped.total()}\n".encode())])

    def abandon(self) -> None:
        """Stop waiting for a blocked terminal or pager."""
        self._abandoned = True

    async def _write(self, writes: Writes) -> None:
        if not writes or self._broken:
            return
        try:
            await asyncio.to_thread(self._write_now, writes)
        except BrokenPipeError:
            self._broken = True
            self._on_broken()

    def _write_now(self, writes: Writes) -> None:
        for stream, data in writes:
            try:
                self._write_all(self._descriptors[stream], data)
            except BrokenPipeError:
                raise
            except OSError as error:
                first = self._dropped[stream].add(len(data), error)
                if first is not None:
                    with contextlib.suppress(OSError):
                        self._write_all(self._descriptors[_OTHER[stream]], f"kfcomm: {first}\n".encode())

    def _write_all(self, descriptor: int, data: bytes) -> None:
        """Write to a descriptor; its blocking mode is left alone, since other processes may share it."""
        view = memoryview(data)
        poll = select.poll()
        poll.register(descriptor, select.POLLOUT)
        while view:
            # Polling in steps, so that an abandoned write returns soon.
            if poll.poll(0 if self._abandoned else _LOOK_EVERY_MS):
                with contextlib.suppress(BlockingIOError):
                    view = view[os.write(descriptor, view[:_AT_ONCE_NBYTES]) :]
            elif self._abandoned:
                raise TimeoutError(errno.ETIMEDOUT, "no process reads it")


class Dropped:
    """Counts bytes that could not be written to one place."""

    def __init__(self, name: str) -> None:
        self.nbytes = 0
        self._name = name
        self._reason = ""

    def add(self, nbytes: int, error: OSError) -> str | None:
        """Count; return a message the first time."""
        is_first = self.nbytes == 0
        self.nbytes += nbytes
        self._reason = error.strerror or str(error)
        return f"{self._name} cannot be written ({self._reason}): it is dropped, the job goes on" if is_first else None

    def total(self) -> str:
        """Message at the end."""
        return f"{self.nbytes} bytes of {self._name} could not be written ({self._reason})"


class Log:
    """Log file of one rank; truncated when it is opened, at the first write at the latest."""

    def __init__(self, path: Path) -> None:
        self.dropped = Dropped(str(path))
        self._path = path
        self._file: FileIO | None = None

    def open(self) -> FileIO:
        """Open the file.

        Raises:
            OSError: it cannot be written.
        """
        if self._file is None:
            self._file = self._path.open("wb", buffering=0)
        return self._file

    def write(self, data: bytes) -> str | None:
        """Write or drop data; return a message the first time it is dropped."""
        view = memoryview(data)
        try:
            while view:
                view = view[self.open().write(view) :]
        except OSError as error:
            return self.dropped.add(len(view), error)
        return None

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()


def open_standard_descriptors() -> None:
    """Open descriptors 0, 1 and 2 if they are closed, so that no socket or file gets their numbers."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            # The lowest free number is this one. Opened for reading only, so that writing fails as before.
            os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
