"""What a job did between two looks at it: rates of what only ever grows, and who was waited for meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from statistics import median

from kfcomm.monitor import live
from kfcomm.monitor.live import Job
from kfcomm.monitor.records import KeyStatistics, Statistics

MAX_AT_ONCE = 32
"""Ranks that are asked at a time."""


@dataclass(frozen=True, slots=True)
class RankChange:
    """One rank.

    Attributes:
        now: what it says; None if it does not answer.
        calls_per_s: collectives that it has completed.
        sent_rate, received_rate: bytes per second, over all links.
        waited_s: seconds for which it has waited for each peer, since the last look.
    """

    now: Statistics | None
    calls_per_s: float = 0.0
    sent_rate: float = 0.0
    received_rate: float = 0.0
    waited_s: Mapping[int, float] | None = None

    @property
    def waits_for(self) -> int | None:
        """The peer for which it has waited longest."""
        return _most(self.waited_s or {})


@dataclass(frozen=True, slots=True)
class KeyChange:
    """One name, over all ranks that answer.

    Attributes:
        name: of the calls.
        calls_per_s: of the rank with most.
        nbytes_per_s: of the same, of results.
        p50_s: of the middle rank, since the beginning.
        p99_s, max_s: of the slowest rank, since the beginning.
        failures: of all ranks.
        busy_s: seconds that all ranks have spent in it since the last look.
    """

    name: str
    calls_per_s: float
    nbytes_per_s: float
    p50_s: float
    p99_s: float
    max_s: float
    failures: int
    busy_s: float


@dataclass(frozen=True, slots=True)
class LinkRate:
    """One direction between two ranks, at least one of them here: bytes per second."""

    source: int
    target: int
    kind: str
    rate: float


@dataclass(frozen=True, slots=True)
class Change:
    """A job, and what it did since the last look.

    Attributes:
        job: its name.
        size: of its world; 0 while no rank has answered.
        ranks: those of this host, by rank.
        gone: ranks that were here and are not any more.
        passed_s: since the last look; 0 for the first.
        keys: the busiest first.
        links: the fastest first.
    """

    job: str
    size: int
    ranks: Mapping[int, RankChange]
    gone: Sequence[int]
    passed_s: float
    keys: Sequence[KeyChange]
    links: Sequence[LinkRate]

    @property
    def answers(self) -> list[Statistics]:
        """What those say that answer."""
        return [change.now for change in self.ranks.values() if change.now is not None]

    @property
    def has_ended(self) -> bool:
        """Whether no rank of it is left on this host."""
        return not self.ranks

    @property
    def waited_for(self) -> Mapping[int, float]:
        """Seconds for which all ranks here have waited for each rank, since the last look."""
        sums: dict[int, float] = {}
        for change in self.ranks.values():
            for peer, seconds in (change.waited_s or {}).items():
                sums[peer] = sums.get(peer, 0.0) + seconds
        return sums

    @property
    def slowest(self) -> int | None:
        """The rank that was waited for longest, if any was."""
        return _most(self.waited_for)


class Watcher:
    """Looks at one job, again and again.

    Args:
        job: its name.
        find: the jobs there are.
        read: what the ranks of one say.
    """

    def __init__(
        self,
        job: str,
        *,
        find: Callable[[], Sequence[Job]] = live.jobs,
        read: Callable[[Job], Sequence[Statistics]] = live.read,
    ) -> None:
        self.job = job
        self._find = find
        self._read = read
        self._before: dict[int, Statistics] = {}
        self._size = 0
        self._met: set[int] = set()

    def look(self) -> Change:
        """What the job has done since the last look. Takes as long as its slowest rank to answer, some 5 s at most."""
        found = next((job for job in self._find() if job.name == self.job), Job(self.job, ()))
        said = {answer.rank: answer for answer in self._ask(found)}
        here = set(found.ranks)
        self._met |= here
        self._size = max([self._size, *(answer.size for answer in said.values())])
        ranks = {rank: self._changed(said.get(rank)) for rank in sorted(here)}
        passed_s = max((self._passed_s(answer) for answer in said.values()), default=0.0)
        change = Change(
            job=self.job, size=self._size, ranks=ranks, gone=sorted(self._met - here), passed_s=passed_s,
            keys=self._keys(list(said.values())), links=_links(list(said.values())),
        )  # fmt: skip
        self._before = {rank: said.get(rank) or before for rank, before in {**self._before, **said}.items()}
        return change

    def _ask(self, job: Job) -> list[Statistics]:
        """All ranks at once: one that is stopped holds up no other."""
        one_by_one = [Job(job.name, (socket,)) for socket in job.sockets]
        with ThreadPoolExecutor(MAX_AT_ONCE, thread_name_prefix="kfcomm-top") as pool:
            return [answer for answers in pool.map(self._read, one_by_one) for answer in answers]

    def _passed_s(self, now: Statistics) -> float:
        before = self._before.get(now.rank)
        return 0.0 if before is None else max(0.0, now.time_s - before.time_s)

    def _changed(self, now: Statistics | None) -> RankChange:
        if now is None:
            return RankChange(None)
        before, passed_s = self._before.get(now.rank), self._passed_s(now)
        calls = _calls(now) - (0 if before is None else _calls(before))
        return RankChange(
            now=now,
            calls_per_s=calls / passed_s if passed_s else 0.0,
            sent_rate=sum(peer.send_rate for peer in now.peers),
            received_rate=sum(peer.receive_rate for peer in now.peers),
            waited_s=_less(_waited(now), {} if before is None else _waited(before)),
        )

    def _keys(self, said: Sequence[Statistics]) -> list[KeyChange]:
        by_name: dict[str, list[tuple[KeyStatistics, KeyStatistics | None, float]]] = {}
        for now in said:
            before = self._before.get(now.rank)
            earlier = {} if before is None else {key.name: key for key in before.keys}
            for key in now.keys:
                by_name.setdefault(key.name, []).append((key, earlier.get(key.name), self._passed_s(now)))
        return sorted((_key(name, found) for name, found in by_name.items()), key=lambda key: -key.busy_s)


def _key(name: str, found: Sequence[tuple[KeyStatistics, KeyStatistics | None, float]]) -> KeyChange:
    calls, nbytes, busy_s = [], [], 0.0
    for now, before, passed_s in found:
        grown_s = passed_s or float("inf")
        calls.append((now.count - (before.count if before else 0)) / grown_s)
        nbytes.append((now.nbytes - (before.nbytes if before else 0)) / grown_s)
        busy_s += now.total_s - (before.total_s if before else 0.0)
    records = [now for now, _, _ in found]
    return KeyChange(
        name=name,
        calls_per_s=max(calls),
        nbytes_per_s=max(nbytes),
        p50_s=median(one.p50_s for one in records),
        p99_s=max(one.p99_s for one in records),
        max_s=max(one.max_s for one in records),
        failures=sum(one.failures for one in records),
        busy_s=busy_s,
    )


def _links(said: Sequence[Statistics]) -> list[LinkRate]:
    """Every direction once: as its sender says, or, if that is on another host, its receiver."""
    here = {now.rank for now in said}
    found = [
        LinkRate(source, target, peer.link, rate)
        for now in said
        for peer in now.peers
        for source, target, rate in (
            (now.rank, peer.rank, peer.send_rate),
            *(() if peer.rank in here else ((peer.rank, now.rank, peer.receive_rate),)),
        )
    ]
    return sorted(found, key=lambda link: (-link.rate, link.source, link.target))


def _calls(now: Statistics) -> int:
    return sum(key.count for key in now.keys) + (now.others.count if now.others else 0)


def _waited(now: Statistics) -> dict[int, float]:
    sums: dict[int, float] = {}
    for peer in now.peers:
        sums[peer.rank] = sums.get(peer.rank, 0.0) + peer.waited_s
    return sums


def _less(now: Mapping[int, float], before: Mapping[int, float]) -> dict[int, float]:
    return {rank: max(0.0, seconds - before.get(rank, 0.0)) for rank, seconds in now.items()}


def _most(seconds: Mapping[int, float]) -> int | None:
    rank = max(seconds, key=seconds.__getitem__, default=None)
    return rank if rank is not None and seconds[rank] > 0 else None
