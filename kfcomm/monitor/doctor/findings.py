"""Likely causes in a diagnosis, each in a sentence, the likeliest first."""

from __future__ import annotations

import difflib
import re
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import combinations

from kfcomm.common.sizes import ranks_in_words
from kfcomm.core.collective import shown
from kfcomm.monitor.doctor.diagnosis import Diagnosis, Wait

ALIKE = 0.75
"""From this ratio on, two names that are waited for on different ranks may be one, misspelt."""
MAX_COMPARED = 200
"""Of so many waits, the longest, the names are compared with each other."""
BLOCKED_S = 1.0


class Kind(StrEnum):
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

    kind: Kind
    ranks: tuple[int, ...]
    text: str


def findings(diagnosis: Diagnosis) -> list[Finding]:
    """All of them, without repetitions."""
    explained = [*_lost(diagnosis), *_blocked(diagnosis), *_other_names(diagnosis), *_other_tags(diagnosis)]
    apart = [set(one.ranks) for one in explained if one.kind in (Kind.SPELLING, Kind.GROUP, Kind.TAG)]
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
        yield Finding(Kind.LOST, (rank,), f"rank {rank} is gone: {why}")


def _blocked(diagnosis: Diagnosis) -> Iterator[Finding]:
    for rank, last in diagnosis.last.items():
        if last.loop_blocked_s > BLOCKED_S:
            text = (
                f"the event loop of rank {rank} has had no turn for {last.loop_blocked_s:.1f} s"
                f"{place(diagnosis, rank)}: its collectives stand still; heavy work belongs in asyncio.to_thread"
            )
            yield Finding(Kind.BLOCKED, (rank,), text)


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
            yield Finding(Kind.GROUP, ranks, f"{_in_group(diagnosis, one)}, {_in_group(diagnosis, other)}")
        elif apart and one.key.group == other.key.group and _is_misspelt(one.key.name, other.key.name):
            where = f"{_waits(one)} in {shown(one.key.name)}, {_waits(other)} in {shown(other.key.name)}"
            yield Finding(Kind.SPELLING, ranks, f"{where}: one name, spelt in two ways?")


def _other_tags(diagnosis: Diagnosis) -> Iterator[Finding]:
    """A receive and a send between the same two ranks wait under different tags."""
    for wait in diagnosis.waits:
        if wait.verb != "recv" or not wait.missing:
            continue
        (receiver,), (sender,) = wait.waiting, wait.missing
        for other in diagnosis.records[sender].waiting:
            if other.verb == "send" and other.members == (sender, receiver) and other.key.name != wait.key.name:
                text = (
                    f"rank {receiver} waits for a message of rank {sender} with {wait.key.name}, "
                    f"and rank {sender} sends it one with {other.key.name}"
                )
                yield Finding(Kind.TAG, (receiver, sender), text)


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
            yield Finding(Kind.CYCLE, tuple(cycle), f"{ranks_in_words(cycle)} wait for each other: {words}")


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
            earlier = [
                other.key.seq
                for other in diagnosis.records[rank].waiting
                if (other.key.group, other.key.name) == (wait.key.group, wait.key.name) and other.key.seq < wait.key.seq
            ]
            if earlier:
                behind = wait.key.seq - max(earlier)
                text = (
                    f"rank {rank} is {behind} use{'s' if behind > 1 else ''} behind: it still waits in #{max(earlier)} "
                    f"of {shown(wait.key.name)}, {ranks_in_words(list(wait.waiting))} in #{wait.key.seq}"
                )
                yield Finding(Kind.BEHIND, (rank,), text)


def _late(diagnosis: Diagnosis) -> Iterator[Finding]:
    """Ranks that are waited for and do not wait themselves: the end of every chain."""
    stuck = {rank for wait in diagnosis.waits if wait.missing or wait.unknown for rank in wait.waiting}
    awaited: dict[int, set[int]] = {}
    for wait in diagnosis.waits:
        for rank in wait.missing:
            awaited.setdefault(rank, set()).update(wait.waiting)
    for rank, by in sorted(awaited.items()):
        if rank not in stuck:
            whom = ranks_in_words(list(by))
            text = f"{whom} wait{'' if len(by) > 1 else 's'} for rank {rank}, which waits for nobody"
            yield Finding(Kind.LATE, (rank,), text + place(diagnosis, rank))


def _failed(diagnosis: Diagnosis) -> Iterator[Finding]:
    for wait in diagnosis.waits:
        for rank, how in wait.finished.items():
            if how.startswith("failed"):
                yield Finding(Kind.FAILED, (rank,), f"{wait.title} is over on rank {rank}: it {how}")


def _under_way(diagnosis: Diagnosis) -> Iterator[Finding]:
    for wait in diagnosis.waits:
        if wait.verb != "recv" and not wait.missing and not wait.unknown:
            text = f"every rank has posted {wait.title}: its data is under way, or a link or a loop stands still"
            yield Finding(Kind.UNDER_WAY, tuple(wait.waiting), text)


def _absent(diagnosis: Diagnosis) -> Iterator[Finding]:
    """Ranks without a dump that others may wait for."""
    ranks = sorted({rank for wait in diagnosis.waits for rank in (*wait.unknown, *wait.heard)} - set(diagnosis.lost))
    if ranks:
        text = f"there is no dump of {ranks_in_words(ranks)}: not asked for one, stopped, or gone"
        yield Finding(Kind.NO_DUMP, tuple(ranks), text)


def _is_misspelt(one: str, other: str) -> bool:
    """Alike, but not like ``grad/1`` and ``grad/2``, which are meant to differ."""
    if re.sub(r"\d+", "0", one) == re.sub(r"\d+", "0", other):
        return False
    return difflib.SequenceMatcher(None, one, other).ratio() >= ALIKE


def _in_group(diagnosis: Diagnosis, wait: Wait) -> str:
    groups = (record.groups.get(wait.key.group) for record in diagnosis.records.values())
    name = next((group for group in groups if group is not None), "another")
    return f"{_waits(wait)} for {shown(wait.key.name)} in group {name!r}"


def _waits(wait: Wait) -> str:
    return f"{ranks_in_words(list(wait.waiting))} wait{'' if len(wait.waiting) > 1 else 's'}"
