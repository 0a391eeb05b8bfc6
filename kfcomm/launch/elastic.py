"""Elastic job: its number of ranks, and where replacements and additional ranks are started.

Each process that was ever started is in one stage, and every decision is counted from these::

    stage      state of the process                               lives  counts   code 0 leads to  another code to
    ---------  -------------------------------------------------  -----  -------  ---------------  ----------------
    RUNS       it takes part, or was started to                   yes    yes      FINISHED         ENDED, replaced
    GIVEN_UP   the others continue without it; killed soon        yes    yes      FINISHED         ENDED, replaced
    LEAVING    it has to leave; its replacement is started        yes    no       FINISHED         ENDED
    RELEASED   released by the ranks, or never admitted           yes    no       ENDED            ENDED
    FINISHED   it has completed the program                       no
    ENDED      it has ended, and is not missed                    no

If fewer processes *count* than are wanted, the difference is *owed*: it is to be started. A process holds its slot for
as long as it lives, in any stage. Pure: the launcher starts and stops processes accordingly.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from kfcomm.errors import ConfigError
from kfcomm.rendezvous.keyvalue import Exit

FLEDGED_S = 5.0
"""Lifetime after which a failure is not attributed to the host."""
LONGEST_REST_S = 60.0


@dataclass(slots=True)
class RankPlace:
    """A host of the job during the life of one launcher; the host's next launcher has another place."""

    address: str  # of the host
    num_ranks: int = 1  # initial number of ranks there
    is_gone: bool = False  # no rank is started there, since the launcher has gone, or has not arrived


@dataclass(slots=True)
class Health:
    """Health of a host, across its launchers."""

    failures: int = 0  # number of successive early failures of ranks that were started there later
    rests_until_s: float = 0.0  # no rank is started there before this time


class Stage(Enum):
    """Stage of a process; see the table above."""

    RUNS = auto()
    GIVEN_UP = auto()
    LEAVING = auto()
    RELEASED = auto()
    FINISHED = auto()
    ENDED = auto()


LIVING = frozenset({Stage.RUNS, Stage.GIVEN_UP, Stage.LEAVING, Stage.RELEASED})
COUNTED = frozenset({Stage.RUNS, Stage.GIVEN_UP})


@dataclass(slots=True)
class Elasticity:
    """Numbers and stages of the ranks of a job. Times are on one monotonic clock."""

    least: int  # least number of ranks that run or have finished; with fewer the job has failed
    most: int  # largest number of ranks, without spares
    asked: int  # latest requested number of ranks
    size: int  # wanted number of ranks: the requested one, limited by slots
    restarts: int  # number of replacements left
    spares: int = 0  # number of additional processes, which wait to be admitted
    places: list[RankPlace] = field(default_factory=list)  # the hosts, by position
    slots: Mapping[str, int] | None = None  # largest number of processes on each host, by address; None for no limit
    unreplaced: int = 0  # number of dead ranks without a replacement, for lack of restarts
    where: dict[int, int] = field(default_factory=dict)  # host of each process that was ever started, by uid
    stages: dict[int, Stage] = field(default_factory=dict)  # the stage of each of them
    _later: dict[int, float] = field(default_factory=dict)  # start time of living ones that were started later
    _health: dict[str, Health] = field(default_factory=dict)

    def in_stage(self, *stages: Stage) -> set[int]:
        """Uids of the processes in one of these stages."""
        return {uid for uid, stage in self.stages.items() if stage in stages}

    @property
    def running(self) -> set[int]:
        """Uids of the processes that take part, or were started for that."""
        return self.in_stage(Stage.RUNS, Stage.LEAVING)

    @property
    def going(self) -> set[int]:
        """Uids of the live processes that have to leave or were released."""
        return self.in_stage(Stage.LEAVING, Stage.RELEASED)

    @property
    def has_failed(self) -> bool:
        """Whether too few ranks are left."""
        return len(self.in_stage(Stage.RUNS, Stage.LEAVING, Stage.FINISHED)) < self.least

    @property
    def is_ending(self) -> bool:
        """Whether a rank has completed the program: then there are no replacements."""
        return Stage.FINISHED in self.stages.values()

    @property
    def owed(self) -> int:
        """Number of processes to start, as soon as there is a place."""
        if self.is_ending or self.has_failed:
            return 0
        return max(0, self.size + self.spares - len(self.in_stage(*COUNTED)) - self.unreplaced)

    @property
    def next_uid(self) -> int:
        """Uid of the next process."""
        return max(self.where, default=-1) + 1

    @property
    def capacity(self) -> int:
        """Largest number of processes on the hosts that have launchers."""
        if self.slots is None:
            return self.most + self.spares
        return sum(self.slots.get(address, 0) for address in {one.address for one in self.places if not one.is_gone})

    def uids_at(self, host: int) -> list[int]:
        """Uids of all processes ever started on a host."""
        return [uid for uid, place in self.where.items() if place == host]

    def by_host(self) -> list[tuple[str, list[int]]]:
        """Address of each host that has or had a launcher, and its running ranks."""
        addresses = dict.fromkeys(one.address for one in self.places if one.address)
        return [(address, sorted(self._at(address, self.running))) for address in addresses]

    def expect(self, position: int, address: str) -> None:
        """Expect the launcher of a host, for a position; no rank is started there before it arrives."""
        while len(self.places) <= position:
            self.places.append(RankPlace("", is_gone=True))  # requested by other launchers
        num_ranks = next((one.num_ranks for one in self.places if one.address == address), 1)
        self.places[position] = RankPlace(address, num_ranks, is_gone=True)

    def begun(self, uid: int, host: int = 0) -> None:
        """Note that a process runs."""
        self.stages[uid] = Stage.RUNS
        self.where[uid] = host

    def goes_on(self, starts: Mapping[int, int], exits: Mapping[int, Exit], size: int) -> None:
        """Restore the state of a running job; ``starts`` are the hosts of all processes ever started, by uid."""
        self.where = dict(starts)
        # Processes that ended with code 0 count as released: FINISHED would end all replacements.
        self.stages = {uid: Stage.ENDED if uid in exits else Stage.RUNS for uid in starts}
        self.resize(size)

    def given_up(self, uid: int) -> None:
        """Note that the ranks have given up one of them, whose process may not have ended yet."""
        match self.stages.get(uid):
            case Stage.RUNS:
                self.stages[uid] = Stage.GIVEN_UP
            case Stage.LEAVING:  # its replacement has been started
                self.stages[uid] = Stage.RELEASED

    def released(self, uid: int) -> bool:
        """Note that the ranks have released one of them, or that it will not be admitted; return whether that is new.

        It ends by itself, and is not replaced; if more ranks are wanted, they are owed from now on.
        """
        stage = self.stages.get(uid)
        if stage in (None, Stage.RELEASED, Stage.ENDED):
            return False
        self.stages[uid] = Stage.ENDED if stage is Stage.FINISHED else Stage.RELEASED
        return True

    def not_started(self, uid: int) -> None:
        """Note that a process could not be started; its uid is not used again."""
        if self.stages.get(uid) in LIVING:
            self.stages[uid] = Stage.ENDED
            self._later.pop(uid, None)

    def ended(self, uid: int, code: int, now_s: float = 0.0) -> Stage:
        """Note the end of a process; return its previous stage."""
        before = self.stages.get(uid, Stage.ENDED)
        if before not in LIVING:
            return before
        is_missed = before in COUNTED
        self._change(uid, Stage.FINISHED if code == 0 and before is not Stage.RELEASED else Stage.ENDED)
        begun_s = self._later.pop(uid, None)
        # A host on which processes keep failing early rests for 1 s, then for 2, and so on. A process that had to leave
        # says nothing about its host.
        if begun_s is not None and is_missed:
            health = self._health_of(self.places[self.where[uid]])
            health.failures = health.failures + 1 if code and now_s - begun_s < FLEDGED_S else 0
            if health.failures > 1:
                health.rests_until_s = now_s + min(2.0 ** (health.failures - 2), LONGEST_REST_S)
        return before

    def replace(self, uid: int) -> bool:
        """Have a running process replaced; return whether it runs."""
        if self.stages.get(uid) is not Stage.RUNS:
            return False
        self._change(uid, Stage.LEAVING)
        return True

    def _change(self, uid: int, stage: Stage) -> None:
        """Put a process in a stage; a process that is owed because of this uses up a restart, if any is left."""
        # Counted before and after, so that only a change that makes a process owed uses up a restart.
        owed = self.owed
        self.stages[uid] = stage
        if self.owed > owed:
            if self.restarts:
                self.restarts -= 1
            else:
                self.unreplaced += 1

    def resize(self, size: int, waiting: Collection[int] = ()) -> list[int]:
        """Request a number of ranks, within the bounds; return those of the ``waiting`` that are not wanted now."""
        self.asked = max(self.least, min(size, self.most))
        return self.fit(waiting)

    def fit(self, waiting: Collection[int] = ()) -> list[int]:
        """Adjust the wanted number of ranks to changed slots; see `resize`."""
        self.size = max(self.least, min(self.asked, self.capacity - self.spares))
        # A new request, or new slots, count from the ranks that live now: earlier losses are no longer missing.
        self.unreplaced = 0
        staying = self.in_stage(Stage.RUNS)
        # Only waiting processes: the ranks release surplus ones that have joined themselves.
        idle = sorted(staying.intersection(waiting))
        unwanted = idle[::-1][: max(0, len(staying) - self.size - self.spares)]
        self.stages |= dict.fromkeys(unwanted, Stage.RELEASED)
        return unwanted

    def vacate(self, waiting: Collection[int] = ()) -> list[int]:
        """Release ranks of hosts that have no slots left, as long as enough stay; return the ``waiting`` among them."""
        found: list[int] = []
        if self.slots is None:
            return found
        staying = self.in_stage(Stage.RUNS)
        slots, spare = self.slots, len(staying.difference(waiting)) - self.least
        # Hosts without any slot come first, and of these the last one. On each host, waiting processes go first.
        addresses = dict.fromkeys(one.address for one in self.places[::-1])
        for address in sorted(addresses, key=lambda one: slots.get(one, 0) > 0):
            here = sorted(self._at(address, staying), key=lambda uid: (uid in waiting, uid))
            for uid in here[slots.get(address, 0) :][::-1]:
                if uid in waiting:
                    found.append(uid)
                    self.stages[uid] = Stage.RELEASED
                elif spare > 0:
                    spare -= 1
                    self.stages[uid] = Stage.LEAVING
        return found

    def start(self, now_s: float = 0.0) -> tuple[int, int] | None:
        """Uid and host of the next process to start; None if none is owed, or no host is free.

        The host is the least full one, relative to its slots or initial ranks, of those that do not rest.
        """
        free = [host for host in self._open() if self._health_of(self.places[host]).rests_until_s <= now_s]
        if not self.owed or not free:
            return None
        host = min(free, key=lambda one: (self._fullness(self.places[one]), one))
        uid = self.next_uid
        self.begun(uid, host)
        self._later[uid] = now_s
        return uid, host

    def next_place_s(self) -> float | None:
        """Time at which the next host has rested; None without an open host."""
        return min((self._health_of(self.places[host]).rests_until_s for host in self._open()), default=None)

    def _open(self) -> list[int]:
        """Hosts on which processes may be started, once they have rested."""
        found = [host for host, one in enumerate(self.places) if not one.is_gone]
        if self.slots is None:
            return found
        return [host for host in found if self._fullness(self.places[host]) < 1]

    def _fullness(self, place: RankPlace) -> float:
        # By address, not by place: the launchers that a host had one after the other share its slots.
        weight = place.num_ranks if self.slots is None else self.slots.get(place.address, 0)
        return len(self._at(place.address, self.in_stage(*LIVING))) / weight if weight else 1.0

    def _at(self, address: str, uids: Collection[int]) -> list[int]:
        return [uid for uid in uids if self.places[self.where[uid]].address == address]

    def _health_of(self, place: RankPlace) -> Health:
        return self._health.setdefault(place.address, Health())


def parse(text: str, ranks: Sequence[int], restarts: int, spares: int = 0, addresses: Sequence[str] = ()) -> Elasticity:
    """Parse ``MIN`` or ``MIN:MAX``; with ``MIN`` alone there are no replacements. ``ranks`` and ``addresses``: by host.

    Raises:
        ConfigError: the text is malformed, or does not fit the number of ranks.
    """
    least, colon, most = text.partition(":")
    numbers = [least, most] if colon else [least]
    if not all(one.isascii() and one.isdigit() and len(one) <= 5 for one in numbers):
        raise ConfigError(f"--elastic {text!r} must be MIN or MIN:MAX, as 2 or 2:8")
    size = sum(ranks)
    low, high = int(least), int(most) if colon else size
    if not 1 <= low <= size <= high:
        raise ConfigError(f"--elastic {text!r} does not fit {size} ranks: it takes 1 <= MIN <= {size} <= MAX")
    found = Elasticity(low, high, size, size, restarts if colon else 0, spares)
    for host, count in enumerate(ranks):
        found.places.append(RankPlace(addresses[host] if addresses else str(host), count))
        for _ in range(count):
            # Of a job that begins, the uids are the ranks.
            found.begun(found.next_uid, host)
    return found
