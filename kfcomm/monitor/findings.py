"""A diagnosis in words and for machines: likely causes, each in a sentence, the likeliest first."""

from __future__ import annotations

import difflib
import re
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from itertools import combinations
from typing import Any

from kfcomm.common.sizes import ranks_in_words
from kfcomm.core.collective import shown
from kfcomm.monitor.doctor import Diagnosis, Last, Wait, key_of, name_of_group, num_uses

ALIKE = 0.75
"""From this ratio on, two names that are waited for on different ranks may be one, misspelt."""
MAX_COMPARED = 200
"""Of so many waits, the longest, the names are compared with each other."""
BLOCKED_S = 1.0
MAX_WAITS = 50
MAX_RANKS = 16


class FindingKind(StrEnum):
    """Kinds of findings."""

    LOST = "lost"
    BLOCKED = "blocked"
    SPELLING = "spelling"
    GROUP = "group"
    TAG = "tag"
    CYCLE = "cycle"
    BEHIND = "behind"
    LATE = "late"
    FAILED = "failed"
    UNDER_WAY = "under way"
    NO_DUMP = "no dump"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that stands out: the ranks that it is about, and a sentence."""

    kind: FindingKind
    ranks: tuple[int, ...]
    text: str


def findings(diagnosis: Diagnosis) -> list[Finding]:
    """All of them, without repetitions."""
    explained = [*_lost(diagnosis), *_blocked(diagnosis), *_other_names(diagnosis), *_other_tags(diagnosis)]
    apart = [
        set(one.ranks) for one in explained if one.kind in (FindingKind.SPELLING, FindingKind.GROUP, FindingKind.TAG)
    ]
    # ranks that wait under different names for each other are a cycle, too: the name says more
    cycles = [one for one in _cycles(diagnosis) if not any(set(one.ranks) <= ranks for ranks in apart)]
    rest = [*_behind(diagnosis), *_late(diagnosis), *_failed(diagnosis), *_under_way(diagnosis), *_absent(diagnosis)]
    return list(dict.fromkeys([*explained, *cycles, *rest]))


def place(diagnosis: Diagnosis, rank: int) -> str:
    """`` (at train.py:7 in main)``, or nothing if that is not known."""
    places = diagnosis.last[rank].places if rank in diagnosis.last else ()
    return f" (at {'; '.join(places[:3])})" if places else ""


def _lost(diagnosis: Diagnosis) -> Iterator[Finding]:
    for rank, why in diagnosis.lost.items():
        yield Finding(FindingKind.LOST, (rank,), f"rank {rank} is gone: {why}")


def _blocked(diagnosis: Diagnosis) -> Iterator[Finding]:
    for rank, last in diagnosis.last.items():
        if last.loop_blocked_s > BLOCKED_S:
            text = (
                f"the event loop of rank {rank} has had no turn for {last.loop_blocked_s:.1f} s"
                f"{place(diagnosis, rank)}: its collectives stand still; heavy work belongs in asyncio.to_thread"
            )
            yield Finding(FindingKind.BLOCKED, (rank,), text)


def _other_names(diagnosis: Diagnosis) -> Iterator[Finding]:
    """Ranks that miss each other under two names that none of them uses both: misspelt, or in another group."""
    named = [wait for wait in diagnosis.waits if wait.verb not in ("recv", "send") and wait.key.name]
    for one, other in combinations(sorted(named[:MAX_COMPARED], key=lambda wait: min(wait.waiting)), 2):
        apart = set(one.waiting) <= set(other.missing) and set(other.waiting) <= set(one.missing)
        if not apart:
            # in two groups, not all ranks are members of both
            apart = one.key.name == other.key.name and not set(other.waiting).isdisjoint(one.missing)
        ranks = (*one.waiting, *other.waiting)
        if apart and one.key.group != other.key.group and one.key.name == other.key.name:
            yield Finding(FindingKind.GROUP, ranks, f"{_in_group(diagnosis, one)}, {_in_group(diagnosis, other)}")
        elif apart and one.key.group == other.key.group and _is_misspelt(one.key.name, other.key.name):
            where = f"{_waits(one)} in {shown(one.key.name)}, {_waits(other)} in {shown(other.key.name)}"
            yield Finding(FindingKind.SPELLING, ranks, f"{where}: one name, spelt in two ways?")


def _other_tags(diagnosis: Diagnosis) -> Iterator[Finding]:
    """A receive and a send between the same two ranks wait under different tags."""
    for wait in diagnosis.waits:
        if wait.verb != "recv" or not wait.missing:
            continue
        (receiver,), (sender,) = wait.waiting, wait.missing
        for other in diagnosis.records[sender]["waiting"]:
            is_between = other["verb"] == "send" and other["members"] == [sender, receiver]
            if is_between and other["name"] != wait.key.name:
                text = (
                    f"rank {receiver} waits for a message of rank {sender} with {wait.key.name}, "
                    f"and rank {sender} sends it one with {other['name']}"
                )
                yield Finding(FindingKind.TAG, (receiver, sender), text)


def _cycles(diagnosis: Diagnosis) -> Iterator[Finding]:
    """Ranks that wait for each other: the shortest cycle through each rank, once."""
    edges: dict[int, dict[int, Wait]] = {}
    for wait in diagnosis.waits:
        for rank in wait.waiting:
            for other in wait.missing:
                edges.setdefault(rank, {}).setdefault(other, wait)
    seen: set[frozenset[int]] = set()
    for rank in sorted(edges):
        cycle = _shortest_cycle(edges, rank)
        if cycle and frozenset(cycle) not in seen:
            seen.add(frozenset(cycle))
            steps = zip(cycle, [*cycle[1:], cycle[0]], strict=True)
            words = "; ".join(f"rank {one} waits in {edges[one][to].title} for rank {to}" for one, to in steps)
            yield Finding(FindingKind.CYCLE, tuple(cycle), f"{ranks_in_words(cycle)} wait for each other: {words}")


def _shortest_cycle(edges: dict[int, dict[int, Wait]], start: int) -> list[int]:
    paths = deque([[start]])
    met: set[int] = set()
    while paths:
        path = paths.popleft()
        for to in edges.get(path[-1], ()):
            if to == start:
                return path
            if to not in met:
                met.add(to)
                paths.append([*path, to])
    return []


def _behind(diagnosis: Diagnosis) -> Iterator[Finding]:
    """A missing rank is still in an earlier use of the same name."""
    for wait in diagnosis.waits:
        for rank in wait.missing:
            used = map(key_of, diagnosis.records[rank]["waiting"])
            earlier = [key.seq for key in used if replace(key, seq=wait.key.seq) == wait.key and key.seq < wait.key.seq]
            if earlier:
                behind = wait.key.seq - max(earlier)
                text = (
                    f"rank {rank} is {behind} use{'s' if behind > 1 else ''} behind: it still waits in #{max(earlier)} "
                    f"of {shown(wait.key.name)}, {ranks_in_words(list(wait.waiting))} in #{wait.key.seq}"
                )
                yield Finding(FindingKind.BEHIND, (rank,), text)


def _late(diagnosis: Diagnosis) -> Iterator[Finding]:
    """Ranks that are waited for and do not wait themselves: the end of every chain."""
    stuck = {rank for wait in diagnosis.waits if wait.missing or wait.unknown for rank in wait.waiting}
    awaited: dict[int, set[int]] = {}
    for wait in diagnosis.waits:
        for rank in wait.missing:
            awaited.setdefault(rank, set()).update(wait.waiting)
    for rank, by in sorted(awaited.items()):
        # A rank that waits itself is late because of another.
        if rank not in stuck:
            whom = ranks_in_words(list(by))
            text = f"{whom} wait{'' if len(by) > 1 else 's'} for rank {rank}, which is not waiting"
            yield Finding(FindingKind.LATE, (rank,), text + place(diagnosis, rank))


def _failed(diagnosis: Diagnosis) -> Iterator[Finding]:
    for wait in diagnosis.waits:
        for rank, how in wait.finished.items():
            if how.startswith("failed"):
                yield Finding(FindingKind.FAILED, (rank,), f"{wait.title} is over on rank {rank}: it {how}")


def _under_way(diagnosis: Diagnosis) -> Iterator[Finding]:
    for wait in diagnosis.waits:
        if wait.verb != "recv" and not wait.missing and not wait.unknown:
            text = f"every rank has posted {wait.title}: its data is under way, or a link or a loop stands still"
            yield Finding(FindingKind.UNDER_WAY, tuple(wait.waiting), text)


def _absent(diagnosis: Diagnosis) -> Iterator[Finding]:
    """Ranks without a dump that others may wait for."""
    ranks = sorted({rank for wait in diagnosis.waits for rank in (*wait.unknown, *wait.heard)} - set(diagnosis.lost))
    if ranks:
        text = f"missing dumps of {ranks_in_words(ranks)}: not asked for one, stopped, or gone"
        yield Finding(FindingKind.NO_DUMP, tuple(ranks), text)


def _is_misspelt(one: str, other: str) -> bool:
    """Alike, but not like ``grad/1`` and ``grad/2``, which are meant to differ."""
    if re.sub(r"\d+", "0", one) == re.sub(r"\d+", "0", other):
        return False
    return difflib.SequenceMatcher(None, one, other).ratio() >= ALIKE


def _in_group(diagnosis: Diagnosis, wait: Wait) -> str:
    name = name_of_group(diagnosis.records.values(), wait.key.group) or "another"
    return f"{_waits(wait)} for {shown(wait.key.name)} in group {name!r}"


def _waits(wait: Wait) -> str:
    return f"{ranks_in_words(list(wait.waiting))} wait{'' if len(wait.waiting) > 1 else 's'}"


def as_text(diagnosis: Diagnosis) -> str:
    """The whole diagnosis, for people."""
    lines = [_head(diagnosis)]
    if not diagnosis.waits:
        lines.append("Nothing waits.")
    for wait in diagnosis.waits[:MAX_WAITS]:
        lines += ["", *_wait(diagnosis, wait)]
    if len(diagnosis.waits) > MAX_WAITS:
        lines += ["", f"... and {len(diagnosis.waits) - MAX_WAITS} more, which have waited for less long"]
    found = findings(diagnosis)
    if found:
        lines += ["", "What stands out:", *(f"- {one.text}" for one in found)]
    return "\n".join(lines)


def as_json(diagnosis: Diagnosis) -> dict[str, Any]:
    """The whole diagnosis as JSON-able values: the fields of ``Diagnosis`` but for its records, and ``findings``."""
    return {
        "size": diagnosis.size,
        "dumps": sorted(diagnosis.records),
        "absent": list(diagnosis.absent),
        "waits": [asdict(wait) for wait in diagnosis.waits],
        "last": {rank: asdict(last) for rank, last in diagnosis.last.items()},
        "lost": diagnosis.lost,
        "findings": [asdict(one) for one in findings(diagnosis)],
    }


def _head(diagnosis: Diagnosis) -> str:
    dumps = f"dumps of {ranks_in_words(list(diagnosis.records))}"
    absent = f", none of {ranks_in_words(diagnosis.absent)}" if diagnosis.absent else ""
    return f"A world of {diagnosis.size}: {dumps}{absent}."


def _wait(diagnosis: Diagnosis, wait: Wait) -> list[str]:
    waited_s = max(wait.waiting.values())
    lines = [wait.title, f"  waiting: {ranks_in_words(list(wait.waiting))}, for {waited_s:.1f} s"]
    for how in sorted(set(wait.finished.values())):
        ranks = [rank for rank, end in wait.finished.items() if end == how]
        lines.append(f"  {how}: {ranks_in_words(ranks)}")
    if wait.heard:
        lines.append(f"  posted, by what the others have heard: {ranks_in_words(wait.heard)}")
    verb = {"recv": "not sent", "send": "not received"}.get(wait.verb, "not posted")
    lines.extend(
        f"  {verb}: rank {rank}, {_used(diagnosis, wait, rank)}{_last(diagnosis.last[rank])}"
        for rank in wait.missing[:MAX_RANKS]
    )
    if len(wait.missing) > MAX_RANKS:
        lines.append(f"  {verb}: {len(wait.missing) - MAX_RANKS} more, {ranks_in_words(wait.missing[MAX_RANKS:])}")
    if wait.unknown:
        lines.append(f"  no dump: {ranks_in_words(wait.unknown)}")
    return lines


def _used(diagnosis: Diagnosis, wait: Wait, rank: int) -> str:
    """How far a missing rank has come with the name."""
    if not wait.key.name or wait.verb in ("recv", "send"):
        return ""
    uses = num_uses(diagnosis.records[rank], wait.key)
    return f"whose last use of the name was #{uses - 1}; " if uses else "which has not used the name; "


def _last(last: Last) -> str:
    places = f"; at {'; '.join(last.places[:3])}" if last.places else ""
    if last.time_s is None:
        return f"it {last.did}{places}"
    clock = time.strftime("%H:%M:%S", time.localtime(last.time_s))
    return f"it last {last.did} at {clock}, {last.before_dump_s:.1f} s before its dump{places}"
