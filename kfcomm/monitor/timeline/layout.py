"""The layout of a trace file, in both directions: what stands in a line, and which line is which.

A file is one JSON array in the Trace Event Format, one event to a line, the comma before it: whatever of it has been
written is a whole trace but for the closing bracket, which viewers do without. So a killed process leaves a file that
opens. Times are microseconds of the rank's own monotonic clock, with three decimals.

A rank is a process of the trace, its number one more than the rank (0 means something else to viewers); the numbers
of its tracks are unlike those of all other ranks, since viewers do not keep tracks of different processes apart.

Besides the events there are three metadata events of our own, which viewers pass over: ``kfcomm`` on the first line
(whose trace this is), ``kfcomm clock`` (how the rank's clock relates to that of rank 0) and ``kfcomm end`` on the last.

The format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

FORMAT = 1
SUFFIX = ".trace.json"
ABOUT, CLOCK, END = "kfcomm", "kfcomm clock", "kfcomm end"
FIRST, NEXT, LAST = "[", "\n,", "\n]\n"
MAX_TEXT_CHARS = 500


@dataclass(frozen=True, slots=True)
class About:
    """Whose trace a file is.

    Attributes:
        job: the same on all ranks of one world, different in any other.
        rank: in the world.
        size: of the world.
        host: number of the rank's host in the world.
        hostname: for people.
        pid: process id.
        started_ns: when it began, by the rank's monotonic clock.
        time_s: the same moment by the wall clock.
    """

    job: str
    rank: int
    size: int
    host: int
    hostname: str
    pid: int
    started_ns: int
    time_s: float

    @property
    def file_name(self) -> str:
        """Of this trace in its folder."""
        return f"kfcomm-{self.job}-rank{self.rank}{SUFFIX}"

    @property
    def title(self) -> str:
        """The rank, for people."""
        return f"rank {self.rank} on host {self.hostname}"

    def as_lines(self) -> list[str]:
        """The first lines of the file."""
        return [
            metadata(ABOUT, self.rank, {"format": FORMAT, **asdict(self)}),
            metadata("process_name", self.rank, {"name": self.title}),
            metadata("process_labels", self.rank, {"labels": f"pid {self.pid}, job {self.job}"}),
            metadata("process_sort_index", self.rank, {"sort_index": self.rank}),
        ]


def process_of(rank: int) -> int:
    """The number of a rank's process in the trace."""
    return rank + 1


def track_of(rank: int, number: int) -> int:
    """The number of a rank's track in the trace: of no other rank, and of no process. ``number`` is below ``2**15``."""
    return (1 << 17) + (rank << 15) + number


def microseconds(ns: int) -> str:
    """Nanoseconds as the format has them."""
    return f"{ns // 1000}.{ns % 1000:03d}"


def metadata(name: str, rank: int, args: dict[str, Any], *, track: int | None = None) -> str:
    """A metadata event."""
    where = {} if track is None else {"tid": track}
    return json.dumps({"ph": "M", "name": name, "pid": process_of(rank), **where, "args": args}, ensure_ascii=False)


def quoted(text: str) -> str:
    """A JSON string of bounded length, without control characters: one viewer refuses files with their escapes."""
    clipped = text if len(text) <= MAX_TEXT_CHARS else text[:MAX_TEXT_CHARS] + "…"
    return json.dumps(clipped if clipped.isprintable() else "".join(map(_shown, clipped)), ensure_ascii=False)


def plain(value: Any) -> Any:
    """A detail as JSON can carry it: texts bounded, what JSON does not know in words."""
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, float):
        return value if value - value == 0 else str(value)  # neither infinite nor not a number
    if isinstance(value, dict):
        return {str(name): plain(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    return json.loads(quoted(str(value)))


def _shown(letter: str) -> str:
    return letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}"
