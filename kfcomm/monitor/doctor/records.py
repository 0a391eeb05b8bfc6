"""Reading dumps: files in, checked records out, one for each rank."""

from __future__ import annotations

import glob
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from kfcomm.errors import ConfigError

T = TypeVar("T")

FORMAT = 1
WORLD = b"world".hex()


@dataclass(frozen=True, slots=True)
class CollectiveKey:
    """One use of one name in one group."""

    group: str
    name: str
    seq: int


@dataclass(frozen=True, slots=True)
class Pending:
    """A collective in flight, as one rank sees it. ``members`` and ``arrived`` are ranks of the world."""

    key: CollectiveKey
    verb: str
    members: tuple[int, ...]
    arrived: tuple[int, ...]
    waited_s: float


@dataclass(frozen=True, slots=True)
class Receive:
    """A receive whose message has not shown up; ``source`` is a rank of the world, None is any."""

    group: str
    tag: str
    source: int | None
    waited_s: float


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that a rank did; ``name`` is empty for unnamed collectives."""

    time_s: float
    event: str
    name: str
    seq: int
    detail: str


@dataclass(frozen=True, slots=True)
class Record:
    """State of one rank when its dump was made; see ``kfcomm.monitor.dump_record`` for the fields of the file.

    Attributes:
        uses: how often each name was used, by group and name.
        groups: name of each group, by id.
        places: the user's own lines at which the program is.
    """

    path: str
    rank: int
    size: int
    time_s: float
    loop_blocked_s: float
    lost: dict[int, str]
    groups: dict[str, str]
    waiting: tuple[Pending, ...]
    receiving: tuple[Receive, ...]
    uses: dict[tuple[str, str], int]
    events: tuple[Event, ...]
    places: tuple[str, ...]


def read(patterns: Iterable[str]) -> list[Record]:
    """The newest record of each rank in these files, by rank.

    Args:
        patterns: names of files; those that do not exist may have ``*``, ``?`` and ``[...]`` in them.

    Raises:
        ConfigError: a file cannot be read or holds something else than a dump, two are of different jobs, or there
            is no record at all; names the file and what is wrong.
    """
    newest: dict[int, Record] = {}
    for path in [path for pattern in patterns for path in _files(pattern)]:
        for record in _read(path):
            other = next(iter(newest.values()), record)
            if other.size != record.size:
                raise ConfigError(
                    f"{path}: a dump of a world of {record.size}, but {other.path} is of a world of {other.size}: "
                    "give the dumps of one job"
                )
            if record.rank not in newest or newest[record.rank].time_s < record.time_s:
                newest[record.rank] = record
    if not newest:
        raise ConfigError("the files hold no record: no communicator was open when they were written")
    return [newest[rank] for rank in sorted(newest)]


def _files(pattern: str) -> list[str]:
    if Path(pattern).exists():
        return [pattern]
    found = sorted(glob.glob(pattern))
    if not found:
        raise ConfigError(f"{pattern}: there is no such file")
    return found


def _read(path: str) -> list[Record]:
    try:
        content = json.loads(Path(path).read_bytes())
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path}: is no JSON: {error}") from error
    try:
        return [_record(path, one) for one in (content if isinstance(content, list) else [content])]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        what = f"lacks {error}" if isinstance(error, KeyError) else str(error)
        raise ConfigError(f"{path}: is no dump of kfcomm: {what}") from error


def _record(path: str, one: Any) -> Record:
    if not isinstance(one, dict) or "format" not in one:
        raise ValueError("it has no format")
    if one["format"] != FORMAT:
        raise ValueError(f"its format is {one['format']!r}, this version of kfcomm reads {FORMAT}")
    rank, size = _is(int, one["rank"]), _is(int, one["size"])
    if not 0 <= rank < size:
        raise ValueError(f"rank {rank} is outside a world of {size}")
    return Record(
        path=path,
        rank=rank,
        size=size,
        time_s=float(one["time_s"]),
        loop_blocked_s=float(one["loop_blocked_s"]),
        lost={int(lost): _is(str, why) for lost, why in one["lost"].items()},
        groups={group: _is(str, about["name"]) for group, about in one["groups"].items()},
        waiting=tuple(_pending(wait) for wait in one["waiting"]),
        receiving=tuple(_receive(wait) for wait in one["receiving"]),
        uses={(group, name): _is(int, count) for group, names in one["uses"].items() for name, count in names.items()},
        events=tuple(_event(event) for event in one["events"]),
        places=_places(one),
    )


def _pending(wait: Any) -> Pending:
    return Pending(
        CollectiveKey(_is(str, wait["group"]), _is(str, wait["name"]), _is(int, wait["seq"])),
        _is(str, wait["verb"]),
        tuple(_is(int, rank) for rank in wait["members"]),
        tuple(_is(int, rank) for rank in wait["arrived"]),
        float(wait["waited_s"]),
    )


def _receive(wait: Any) -> Receive:
    source = None if wait["source"] is None else _is(int, wait["source"])
    return Receive(_is(str, wait["group"]), _is(str, wait["tag"]), source, float(wait["waited_s"]))


def _event(event: Any) -> Event:
    words = [_is(str, event[field]) for field in ("event", "name", "detail")]
    return Event(float(event["time_s"]), words[0], words[1], _is(int, event["seq"]), words[2])


def _places(one: dict[str, Any]) -> tuple[str, ...]:
    """Positions of its tasks; of its threads only without tasks, since they show no more than a running loop."""
    for kind in ("tasks", "threads"):
        found = tuple(dict.fromkeys(_is(str, each["at"]) for each in one[kind] if each["at"]))
        if found:
            return found
    return ()


def _is(kind: type[T], value: Any) -> T:
    if type(value) is not kind:
        raise ValueError(f"{value!r:.60} is not of type {kind.__name__}")
    return value
