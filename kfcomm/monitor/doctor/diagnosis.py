"""Putting records together: for each collective that somebody waits for, who waits, who is done and who is missing."""

from __future__ import annotations

from dataclasses import dataclass, field

from kfcomm.core.collective import OWN_NAMES, shown
from kfcomm.monitor.doctor.records import WORLD, CollectiveKey, Event, Pending, Record
from kfcomm.types import Verb


@dataclass(frozen=True, slots=True)
class Wait:
    """A collective, or a message, that at least one rank waits for. Ranks are those of the world.

    Attributes:
        key: which use of which name; the name of a receive is its tag, its number -1.
        title: what it is, in words.
        verb: ``recv`` for a receive whose message has not shown up.
        waiting: for how long each rank that has posted it has waited, in seconds.
        finished: ranks on which it is over: how it ended there.
        missing: ranks whose dump shows that they have not posted it.
        heard: ranks without a dump, known from others' to have posted it.
        unknown: ranks without a dump and without any sign of theirs.
    """

    key: CollectiveKey
    title: str
    verb: str
    waiting: dict[int, float]
    finished: dict[int, str]
    missing: tuple[int, ...]
    heard: tuple[int, ...]
    unknown: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Last:
    """Latest known activity of a rank.

    Attributes:
        did: its latest event, in words.
        time_s: when, in seconds of the wall clock; None if it has done nothing.
        before_dump_s: how long before its dump.
        places: the user's own lines at which its program is.
        loop_blocked_s: for how long its event loop has had no turn.
    """

    did: str
    time_s: float | None
    before_dump_s: float
    places: tuple[str, ...]
    loop_blocked_s: float


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Everything that a set of dumps says.

    Attributes:
        size: number of ranks of the job.
        records: the record of each rank that has one.
        absent: ranks without a dump.
        waits: what is waited for, the longest wait first.
        last: what each rank with a dump did last.
        lost: ranks that are gone, and why.
    """

    size: int
    records: dict[int, Record] = field(repr=False)
    absent: tuple[int, ...]
    waits: tuple[Wait, ...]
    last: dict[int, Last]
    lost: dict[int, str]


def diagnose(records: list[Record]) -> Diagnosis:
    """Put the records of one job together; one for each rank, at least one."""
    by_rank = {record.rank: record for record in records}
    size = records[0].size
    posted: dict[CollectiveKey, Pending] = {wait.key: wait for record in records for wait in record.waiting}
    waits = [_collective(by_rank, one) for one in posted.values()] + _receives(records)
    return Diagnosis(
        size=size,
        records=by_rank,
        absent=tuple(rank for rank in range(size) if rank not in by_rank),
        waits=tuple(sorted(waits, key=lambda wait: -max(wait.waiting.values()))),
        last={record.rank: _last(record) for record in records},
        lost={rank: why for record in records for rank, why in sorted(record.lost.items())},
    )


def title_of(verb: str, name: str) -> str:
    """A collective in words, as the program has it: the later steps of a verb are inside it."""
    if verb == Verb.SET_STRATEGY:
        return verb
    plain, _, step = name.partition("\0")
    whose = "kfcomm's own " if plain.startswith(OWN_NAMES) else ""
    return whose + (f"{verb} {plain!r}" if plain else f"unnamed {verb}") + (step and f" ({step})")


def _collective(records: dict[int, Record], one: Pending) -> Wait:
    same = {rank: wait for rank, record in records.items() for wait in record.waiting if wait.key == one.key}
    arrived = {rank for wait in same.values() for rank in wait.arrived}
    others = [rank for rank in one.members if rank not in same]
    known = [rank for rank in others if rank in records]
    finished = {rank: _ended(records[rank], one.key) for rank in known if _has_used(records[rank], one.key)}
    names = {record.groups.get(one.key.group) for record in records.values()} - {None}
    group = "".join(f" in group {name!r}" for name in names if one.key.group != WORLD)
    if one.verb == "send":
        title = f"send with {one.key.name} from rank {one.members[0]} to rank {one.members[1]}"
    else:
        title = f"{title_of(one.verb, one.key.name)} #{one.key.seq}{group}"
    return Wait(
        key=one.key,
        title=title,
        verb=one.verb,
        waiting={rank: wait.waited_s for rank, wait in sorted(same.items())},
        finished=finished,
        missing=tuple(rank for rank in known if rank not in finished),
        heard=tuple(rank for rank in others if rank not in records and rank in arrived),
        unknown=tuple(rank for rank in others if rank not in records and rank not in arrived),
    )


def _receives(records: list[Record]) -> list[Wait]:
    present = {record.rank for record in records}
    waits = []
    for record in records:
        for one in record.receiving:
            whom = "any rank" if one.source is None else f"rank {one.source}"
            of = () if one.source is None else (one.source,)
            waits.append(
                Wait(
                    key=CollectiveKey(one.group, one.tag, -1),
                    title=f"recv with {one.tag} on rank {record.rank} from {whom}",
                    verb="recv",
                    waiting={record.rank: one.waited_s},
                    finished={},
                    missing=tuple(rank for rank in of if rank in present),
                    heard=(),
                    unknown=tuple(rank for rank in of if rank not in present),
                )
            )
    return waits


def _has_used(record: Record, key: CollectiveKey) -> bool:
    return record.uses.get((key.group, key.name), 0) > key.seq


def _ended(record: Record, key: CollectiveKey) -> str:
    """How a use of a name that is over ended. Events do not tell groups apart: of several ends the last is taken."""
    ends = [
        event
        for event in record.events
        if (event.name, event.seq) == (key.name, key.seq) and event.event in ("completed", "failed")
    ]
    return _words(ends[-1]) if ends else "over"


def _words(event: Event) -> str:
    return f"{event.event}{event.detail and ': '}{event.detail}"


def _last(record: Record) -> Last:
    if not record.events:
        return Last("has not posted anything", None, 0.0, record.places, record.loop_blocked_s)
    event = record.events[-1]
    number = f" #{event.seq}" if event.seq >= 0 else ""
    if event.event == "posted":
        did = f"posted {title_of(event.detail, event.name)}{number}"
    else:
        name = event.name if event.event == "lost" else shown(event.name)
        did = f"{event.event} {name}{number}{event.detail and ': '}{event.detail}"
    return Last(did, event.time_s, record.time_s - event.time_s, record.places, record.loop_blocked_s)
