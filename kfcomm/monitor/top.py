"""Change of a job between two looks: rates of counters, and ranks that were waited for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from statistics import median

from kfcomm.monitor import live
from kfcomm.monitor.live import Job, Question
from kfcomm.monitor.relaying import Relayed, relayed
from kfcomm.monitor.statistics import DATA, OWN, KeyStatistics, Statistics, is_own, statistics_in

MAX_AT_ONCE = 32
"""Ranks that are asked at a time."""
ELSEWHERE = "elsewhere/"
"""Name of a process of another host, with its number in the job."""


@dataclass(frozen=True, slots=True)
class RankChange:
    """One rank."""

    now: Statistics | None  # what it says; None if it does not answer
    calls_per_s: float = 0.0  # collectives that it has completed
    sent_rate: float = 0.0  # bytes per second, over all links
    received_rate: float = 0.0
    waited_s: Mapping[int, float] | None = None  # seconds for which it has waited for each peer, since the last look
    socket: str = ""  # name at which it answers, or at which one of this host passes questions on to it
    process: str = ""  # name of its process, which stays when the ranks change
    is_here: bool = True  # whether it is a rank of this host

    @property
    def waits_for(self) -> int | None:
        """The peer for which it has waited longest."""
        return _most(self.waited_s or {})


@dataclass(frozen=True, slots=True)
class KeyChange:
    """One name, over all ranks that answer."""

    name: str  # of the calls
    calls_per_s: float  # of the rank with most
    nbytes_per_s: float  # of the same, of results
    p50_s: float  # of the middle rank, since the beginning
    p99_s: float  # of the slowest rank, likewise
    max_s: float
    failures: int  # of all ranks
    busy_s: float  # seconds that all ranks have spent in it since the last look


@dataclass(frozen=True, slots=True)
class LinkRate:
    """One direction between two ranks; at least one of them answers: bytes per second."""

    source: int
    target: int
    kind: str
    rate: float


@dataclass(frozen=True, slots=True)
class JobChange:
    """A job, and what it did since the last look."""

    job: str
    size: int  # of its world; 0 while no rank has answered
    ranks: Mapping[int, RankChange]  # by rank, in the latest epoch that one knows of
    gone: Sequence[int]  # ranks of that epoch that were there and are not any more
    passed_s: float  # since the last look; 0 for the first
    keys: Sequence[KeyChange]  # the busiest first
    links: Sequence[LinkRate]  # the fastest first
    has_ended: bool = False  # whether no process of it is left on this host
    program: str = ""  # what it runs, if that is known
    note: str = ""  # line on its version of kfcomm, if that is another

    @property
    def answers(self) -> list[Statistics]:
        """Answers of the ranks that answer."""
        return [change.now for change in self.ranks.values() if change.now is not None]

    @property
    def waited_for(self) -> Mapping[int, float]:
        """Seconds for which all ranks have waited for each rank, since the last look."""
        sums: dict[int, float] = {}
        for change in self.ranks.values():
            for peer, seconds in (change.waited_s or {}).items():
                sums[peer] = sums.get(peer, 0.0) + seconds
        return sums

    @property
    def slowest(self) -> int | None:
        """The rank that was waited for longest, if any was."""
        return _most(self.waited_for)


class JobWatcher:
    """Looks at one job, again and again, with one question to its ranks.

    ``pool`` is for asking them; without one each look makes its own.
    """

    def __init__(
        self,
        job: str,
        question: Question = Question.STATISTICS,
        *,
        find: Callable[[], Sequence[Job]] = live.jobs,
        read: Callable[[Job], Sequence[Statistics]] | None = None,
        compare: Callable[[Sequence[str]], str | None] = live.difference,
        pool: Executor | None = None,
    ) -> None:
        self.job = job
        self._question = question
        self._find = find
        self._read = partial(live.read, question=question) if read is None else read
        self._compare = compare
        self._note: str | None = None
        self._pool = pool
        self._met: dict[str, _Process] = {}
        self._size = self._epoch = 0
        self._lost: set[int] = set()  # ranks of other hosts that are gone from this epoch

    def look(self) -> JobChange:
        """Change of the job since the last look.

        Takes as long as its slowest rank to answer: some 5 s at most, and as long again for other hosts.
        """
        found = next((job for job in self._find() if job.name == self.job), Job(self.job, ()))
        met = self._met
        own = ThreadPoolExecutor(MAX_AT_ONCE, thread_name_prefix="kfcomm-top")
        with own if self._pool is None else nullcontext(self._pool) as pool:
            told = self._ask(found, pool)
            here = {name: self._known(rank, name, name, said) for (rank, name), said in told}
            self._enter(here)
            here |= self._ask_elsewhere(here, pool)
        self._enter(here)
        in_epoch = [one for one in here.values() if one.epoch in (None, self._epoch)]
        taken = {one.rank for one in in_epoch}
        # A process that has not come to this epoch yet, or does not survive, has its rank of the epoch before.
        older = (one for one in here.values() if one.epoch not in (None, self._epoch))
        late = [one for one in older if one.rank < self._size and one.rank not in taken]
        shown = sorted([*in_epoch, *late], key=lambda one: one.rank)
        changes = {one.rank: one.change() for one in shown}
        said = [one for one in shown if one.now is not None]
        gone = {one.rank for name, one in met.items() if name not in here and one.epoch in (None, self._epoch)}
        answers = [one.now for one in said if one.now is not None]
        if self._note is None:
            # Of ranks that are silent one is asked: it may be of another version, and each that is stopped takes long.
            self._note = self._compare([one.socket for one in said] or [name for _, name in found.sockets[:1]])
        change = JobChange(
            job=self.job, size=self._size, ranks=changes, gone=sorted((gone | self._lost) - changes.keys()),
            passed_s=max((one.passed_s for one in said), default=0.0), keys=_keys(said), links=_links(answers),
            has_ended=not found.sockets, program=found.program, note=self._note or "",
        )  # fmt: skip
        # Processes of earlier epochs are not missed: they were released or lost, and are not ranks of this one.
        self._met = {name: one for name, one in met.items() if one.epoch in (None, self._epoch)} | here
        return change

    def _enter(self, here: Mapping[str, _Process]) -> None:
        """Note the latest epoch, and its size."""
        said = [one.now for one in here.values() if one.now is not None]
        before, self._epoch = self._epoch, max([self._epoch, *(now.epoch for now in said)])
        self._size = next((now.size for now in said if now.epoch == self._epoch), self._size)
        if self._epoch > before:
            self._lost.clear()

    def _ask(self, job: Job, pool: Executor) -> Iterable[tuple[tuple[int, str], Statistics | None]]:
        """All ranks of this host at once: one that is stopped holds up no other."""
        one_by_one = [Job(job.name, (socket,)) for socket in job.sockets]
        said = pool.map(self._read, one_by_one)
        return [(socket, next(iter(answers), None)) for socket, answers in zip(job.sockets, said, strict=True)]

    def _ask_elsewhere(self, here: Mapping[str, _Process], pool: Executor) -> dict[str, _Process]:
        """Processes of other hosts, by name; those of this host pass questions on."""
        in_epoch = [one for one in here.values() if one.epoch in (None, self._epoch)]
        through = [one.socket for one in in_epoch if one.now is not None]
        asked = sorted(set(range(self._size)) - {one.rank for one in in_epoch}) if through else []
        places = {rank: through[i % len(through)] for i, rank in enumerate(asked)}
        all_told = ask_elsewhere(places, self._question, pool)
        told = {rank: one for rank, one in all_told.items() if one.epoch == self._epoch}
        self._lost |= {rank for rank, one in told.items() if one.is_gone}
        # One that was there, and of which nothing is heard now, does not answer.
        known = {
            name: self._known(one.rank, name, one.socket, None)
            for name, one in self._met.items()
            if name.startswith(ELSEWHERE) and one.epoch == self._epoch and one.rank not in self._lost
        }
        for rank, one in told.items():
            if not one.is_gone:
                name = f"{ELSEWHERE}{one.process}"
                known[name] = self._known(rank, name, places[rank], statistics_in(one.answer))
        return known

    def _known(self, rank: int, name: str, socket: str, now: Statistics | None) -> _Process:
        """Current record of a process; ``rank`` is the one that it began with, or has now."""
        before = self._met.get(name)
        last = None if before is None else before.last
        if now is not None:
            # Counters begin anew with each epoch.
            earlier = last if last is not None and last.epoch == now.epoch else None
            return _Process(now.rank, now, earlier, socket, name)
        return _Process(rank if before is None else before.rank, None, last, socket, name)


def ask_elsewhere(places: Mapping[int, str], question: Question, pool: Executor) -> dict[int, Relayed]:
    """Answers of ranks of other hosts: of each by way of the rank at that socket of this host."""
    by_socket: dict[str, list[int]] = {}
    for rank, socket in places.items():
        by_socket.setdefault(socket, []).append(rank)
    found: dict[int, Relayed] = {}
    for some in pool.map(partial(relayed, question=question), by_socket, by_socket.values()):
        found |= some
    return found


@dataclass(frozen=True, slots=True)
class _Process:
    """One process of the job, known by its name: the ranks change from one epoch to the next."""

    rank: int  # as it says, or said last
    now: Statistics | None  # what it says; None if it does not answer
    before: Statistics | None  # what it said last, in the same epoch
    socket: str  # its own, or that of the rank that passes questions on to it
    name: str  # its socket, or its number in the job if it is elsewhere

    @property
    def last(self) -> Statistics | None:
        return self.before if self.now is None else self.now

    @property
    def epoch(self) -> int | None:
        return None if self.last is None else self.last.epoch

    @property
    def passed_s(self) -> float:
        return 0.0 if self.before is None or self.now is None else max(0.0, self.now.time_s - self.before.time_s)

    def change(self) -> RankChange:
        now, before, passed_s = self.now, self.before, self.passed_s
        place = partial(RankChange, socket=self.socket, process=self.name, is_here=self.name == self.socket)
        if now is None:
            return place(None)
        calls = _calls(now) - (0 if before is None else _calls(before))
        return place(
            now,
            calls_per_s=calls / passed_s if passed_s else 0.0,
            sent_rate=sum(peer.send_rate for peer in now.peers),
            received_rate=sum(peer.receive_rate for peer in now.peers),
            waited_s=_less(_waited(now), {} if before is None else _waited(before)),
        )


Counted = tuple[KeyStatistics, KeyStatistics | None, float]
"""A name on one rank: now, at the last look, and the seconds between."""


def _keys(said: Sequence[_Process]) -> list[KeyChange]:
    by_name: dict[str, list[Counted]] = {}
    for one in said:
        earlier = {} if one.before is None else _by_call(one.before)
        for key in _by_call(one.now).values() if one.now is not None else ():
            by_name.setdefault(key.name, []).append((key, earlier.get(key.name), one.passed_s))
    return sorted((_key(name, found) for name, found in by_name.items()), key=lambda key: -key.busy_s)


def _by_call(said: Statistics) -> dict[str, KeyStatistics]:
    """By name, as the program knows its calls: the steps of one are it, and what kfcomm does by itself is one."""
    found: dict[str, KeyStatistics] = {}
    for key in said.keys:
        name = OWN if is_own(key.name) else key.name
        if name.endswith(DATA) and (whole := name.removesuffix(DATA).rstrip()) in found:
            name = whole
        known = found.get(name)
        found[name] = replace(key, name=name) if known is None else _together(known, key, is_step=name != OWN)
    return found


def _together(one: KeyStatistics, other: KeyStatistics, *, is_step: bool) -> KeyStatistics:
    """Two as one: the second is a further step of the calls of the first, or they are called each for itself."""
    return replace(
        one,
        count=one.count if is_step else one.count + other.count,
        nbytes=one.nbytes + other.nbytes,
        p50_s=one.p50_s + other.p50_s if is_step else max(one.p50_s, other.p50_s),
        p99_s=one.p99_s + other.p99_s if is_step else max(one.p99_s, other.p99_s),
        max_s=one.max_s + other.max_s if is_step else max(one.max_s, other.max_s),
        failures=one.failures + other.failures,
        total_s=one.total_s + other.total_s,
    )


def _key(name: str, found: Sequence[Counted]) -> KeyChange:
    calls, nbytes, busy_s = [], [], 0.0
    for now, before, passed_s in found:
        # At the first look there is no time between two, and no rate.
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
    """Every direction once: as its sender says, or, if that does not answer, its receiver."""
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
    """Calls of the program."""
    own = (key.count for name, key in _by_call(now).items() if name != OWN)
    return sum(own) + (now.others.count if now.others else 0)


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
