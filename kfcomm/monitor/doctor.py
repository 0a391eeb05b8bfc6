"""Diagnosis of a hang from the dumps of several ranks: files in, and for each wait who waits, is done, or is missing.

Nothing here talks to a process: a dump of yesterday is as good as one of now. ``kfcomm.monitor.findings`` judges the
diagnosis, and puts it into words.
"""

from __future__ import annotations

import glob
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, cast, get_args, get_origin, get_type_hints, is_typeddict

from kfcomm.common.version import difference
from kfcomm.core.collective import OWN_NAMES, shown
from kfcomm.errors import ConfigError
from kfcomm.monitor.dumps import FORMAT, PendingCall, Record
from kfcomm.types import Verb

WORLD = b"world".hex()


def read(patterns: Iterable[str]) -> list[Record]:
    """The newest record of each rank in these files (names or patterns), by rank.

    Raises:
        ConfigError: a file cannot be read or holds something else than a dump, two are of different jobs, or
            they hold no record at all; names the file and what is wrong.
    """
    newest: dict[int, Record] = {}
    first: tuple[str, int] | None = None
    for path in [path for pattern in patterns for path in _files(pattern)]:
        for record in _read(path):
            first = first or (path, record["size"])
            if first[1] != record["size"]:
                raise ConfigError(
                    f"{path}: a dump of a world of {record['size']}, but {first[0]} is of a world of {first[1]}: "
                    "give the dumps of one job"
                )
            rank = record["rank"]
            if rank not in newest or newest[rank]["time_s"] < record["time_s"]:
                newest[rank] = record
    if not newest:
        raise ConfigError("the files hold no record: no communicator was open when they were written")
    return [newest[rank] for rank in sorted(newest)]


def _files(pattern: str) -> list[str]:
    # A file may have the signs of a pattern in its name.
    if Path(pattern).exists():
        return [pattern]
    found = sorted(glob.glob(pattern))
    if not found:
        raise ConfigError(f"{pattern}: file not found")
    return found


def _read(path: str) -> list[Record]:
    try:
        content = json.loads(Path(path).read_bytes())
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path}: expected JSON: {error}") from error
    found = content if isinstance(content, list) else [content]
    try:
        return [checked_record(one) for one in found]
    except (KeyError, ValueError) as error:
        what = f"lacks {error}" if isinstance(error, KeyError) else str(error)
        told = next((one["versions"] for one in found if isinstance(one, dict) and "versions" in one), None)
        why = f"; {difference(told, 'it is of')}" if told else ""
        raise ConfigError(f"{path}: expected a dump of kfcomm: {what}{why}") from error


def checked_record(one: Any) -> Record:
    """A dump's record, decoded from JSON, if it is one.

    Raises:
        KeyError, ValueError: it is something else, or of another version.
    """
    if not isinstance(one, dict) or "format" not in one:
        raise ValueError("it has no format")
    if one["format"] != FORMAT:
        raise ValueError(f"its format is {one['format']!r}, this version of kfcomm reads {FORMAT}")
    checked(one, Record)
    record = cast("Record", one)
    if not 0 <= record["rank"] < record["size"]:
        raise ValueError(f"rank {record['rank']} is outside a world of {record['size']}")
    for lost in record["lost"]:
        int(lost)
    return record


def checked(value: Any, kind: Any) -> None:
    """Check that JSON values are of a type of ``dumps``: the schema of a dump is declared there alone.

    Raises:
        KeyError: a field is missing.
        ValueError: a value is of another type.
    """
    origin = get_origin(kind)
    if origin is UnionType:
        if value is not None:
            checked(value, get_args(kind)[0])
    elif is_typeddict(kind):
        _is(dict, value)
        for name, inner in _fields(kind).items():
            if name in value or name in kind.__required_keys__:
                checked(value[name], inner)
    elif origin in (list, dict):
        _is(origin, value)
        for one in value if origin is list else value.values():
            checked(one, get_args(kind)[-1])
    elif kind is not Any and not (kind is float and type(value) is int):
        _is(kind, value)


def _is(kind: type, value: Any) -> None:
    if type(value) is not kind:
        raise ValueError(f"{value!r:.60} is not of type {kind.__name__}")


_fields = cache(get_type_hints)


@dataclass(frozen=True, slots=True)
class CollectiveKey:
    """One use of one name in one group."""

    group: str
    name: str
    seq: int


@dataclass(frozen=True, slots=True)
class Wait:
    """A collective, or a message, that at least one rank waits for. Ranks are those of the world."""

    key: CollectiveKey  # use of a name; the name of a receive is its tag, its number -1
    title: str  # what it is, in words
    verb: str  # ``recv`` for a receive whose message has not shown up
    waiting: dict[int, float]  # for how long each rank that has posted it has waited, in seconds
    finished: dict[int, str]  # ranks on which it is over: how it ended there
    missing: tuple[int, ...]  # ranks whose dump shows that they have not posted it
    heard: tuple[int, ...]  # ranks without a dump, known from others' to have posted it
    unknown: tuple[int, ...]  # ranks without a dump and without any sign of theirs


@dataclass(frozen=True, slots=True)
class Last:
    """Latest known activity of a rank."""

    did: str  # its latest event, in words
    time_s: float | None  # when, in seconds of the wall clock; None if it has done nothing
    before_dump_s: float  # how long before its dump
    places: tuple[str, ...]  # the user's own lines at which its program is
    loop_blocked_s: float  # for how long its event loop has had no turn


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Everything that a set of dumps says."""

    size: int  # number of ranks of the job
    records: dict[int, Record] = field(repr=False)  # the record of each rank that has one
    absent: tuple[int, ...]  # ranks without a dump
    waits: tuple[Wait, ...]  # what is waited for, the longest wait first
    last: dict[int, Last]  # what each rank with a dump did last
    lost: dict[int, str]  # ranks that are gone, and why


def diagnose(records: list[Record]) -> Diagnosis:
    """Put the records of one job together; one for each rank, at least one."""
    by_rank = {record["rank"]: record for record in records}
    size = records[0]["size"]
    posted = {key_of(wait): wait for record in records for wait in record["waiting"]}
    waits = [_collective(by_rank, *one) for one in posted.items()] + _receives(records)
    return Diagnosis(
        size=size,
        records=by_rank,
        absent=tuple(rank for rank in range(size) if rank not in by_rank),
        waits=tuple(sorted(waits, key=lambda wait: -max(wait.waiting.values()))),
        last={rank: _last(record) for rank, record in by_rank.items()},
        lost={rank: why for record in records for rank, why in sorted((int(r), w) for r, w in record["lost"].items())},
    )


def key_of(wait: PendingCall) -> CollectiveKey:
    """Return the use of a name that a rank waits for."""
    return CollectiveKey(wait["group"], wait["name"], wait["seq"])


def num_uses(record: Record, key: CollectiveKey) -> int:
    """How often a rank has used a name in a group."""
    return record["uses"].get(key.group, {}).get(key.name, 0)


def name_of_group(records: Iterable[Record], group: str) -> str | None:
    """The name of a group, from any record that knows it."""
    return next((one["groups"][group]["name"] for one in records if group in one["groups"]), None)


def title_of(verb: str, name: str) -> str:
    """A collective in words, as the program has it: the later steps of a verb are inside it."""
    if verb == Verb.SET_STRATEGY:
        return verb
    plain, _, step = name.partition("\0")
    whose = "kfcomm's own " if plain.startswith(OWN_NAMES) else ""
    return whose + (f"{verb} {plain!r}" if plain else f"unnamed {verb}") + (step and f" ({step})")


def _collective(records: dict[int, Record], key: CollectiveKey, one: PendingCall) -> Wait:
    same = {rank: wait for rank, record in records.items() for wait in record["waiting"] if key_of(wait) == key}
    arrived = {rank for wait in same.values() for rank in wait["arrived"]}
    others = [rank for rank in one["members"] if rank not in same]
    known = [rank for rank in others if rank in records]
    # Ranks that have used the name more often than this use's number are done with it.
    finished = {rank: _ended(records[rank], key) for rank in known if num_uses(records[rank], key) > key.seq}
    name = name_of_group(records.values(), key.group)
    group = "" if key.group == WORLD or name is None else f" in group {name!r}"
    if one["verb"] == "send":
        title = f"send with {key.name} from rank {one['members'][0]} to rank {one['members'][1]}"
    else:
        title = f"{title_of(one['verb'], key.name)} #{key.seq}{group}"
    return Wait(
        key=key,
        title=title,
        verb=one["verb"],
        waiting={rank: wait["waited_s"] for rank, wait in sorted(same.items())},
        finished=finished,
        missing=tuple(rank for rank in known if rank not in finished),
        heard=tuple(rank for rank in others if rank not in records and rank in arrived),
        unknown=tuple(rank for rank in others if rank not in records and rank not in arrived),
    )


def _receives(records: list[Record]) -> list[Wait]:
    present = {record["rank"] for record in records}
    waits = []
    for record in records:
        for one in record["receiving"]:
            source, rank = one["source"], record["rank"]
            of = () if source is None else (source,)
            waits.append(
                Wait(
                    key=CollectiveKey(one["group"], one["tag"], -1),
                    title=f"recv with {one['tag']} on rank {rank} from "
                    f"{'any rank' if source is None else f'rank {source}'}",
                    verb="recv",
                    waiting={rank: one["waited_s"]},
                    finished={},
                    missing=tuple(rank for rank in of if rank in present),
                    heard=(),
                    unknown=tuple(rank for rank in of if rank not in present),
                )
            )
    return waits


def _ended(record: Record, key: CollectiveKey) -> str:
    """How a use of a name that is over ended."""
    # Events do not tell groups apart: of several ends the last is taken.
    for event in reversed(record["events"]):
        if (event["name"], event["seq"]) == (key.name, key.seq) and event["event"] in ("completed", "failed"):
            return f"{event['event']}{event['detail'] and ': '}{event['detail']}"
    return "over"


def _last(record: Record) -> Last:
    places = _places(record)
    if not record["events"]:
        return Last("has not posted anything", None, 0.0, places, record["loop_blocked_s"])
    event = record["events"][-1]
    number = f" #{event['seq']}" if event["seq"] >= 0 else ""
    if event["event"] == "posted":
        did = f"posted {title_of(event['detail'], event['name'])}{number}"
    else:
        name = event["name"] if event["event"] == "lost" else shown(event["name"])
        did = f"{event['event']} {name}{number}{event['detail'] and ': '}{event['detail']}"
    return Last(did, event["time_s"], record["time_s"] - event["time_s"], places, record["loop_blocked_s"])


def _places(record: Record) -> tuple[str, ...]:
    """Positions of its tasks; of its threads only without tasks, since they show no more than a running loop."""
    for places in (record["tasks"], record["threads"]):
        found = tuple(dict.fromkeys(place["at"] for place in places if place["at"]))
        if found:
            return found
    return ()
