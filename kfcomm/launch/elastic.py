"""A job whose ranks may change: how many it may have, and where others are started when some end, or more are wanted.

Each process that was ever started is in one stage, and all that is decided is counted from these::

    stage      what is known of it                                lives  counts   code 0 leads to  another code to
    ---------  -------------------------------------------------  -----  -------  ---------------  ----------------
    RUNS       it takes part, or was started to                   yes    yes      FINISHED         ENDED, replaced
    GIVEN_UP   the others go on without it; it is killed soon     yes    yes      FINISHED         ENDED, replaced
    LEAVING    it is to go; another was started in its place      yes    no       FINISHED         ENDED
    RELEASED   the ranks have let it go, or never let it in       yes    no       ENDED            ENDED
    FINISHED   it has come to the end of the program              no
    ENDED      it is over, and nobody misses it                   no

Those that *count* are as many as are wanted, or others are owed. A process holds its slot for as long as it lives, in
whatever stage. Nothing here starts or stops a process: the supervisor does, by what is said here.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from kfcomm.errors import ConfigError
from kfcomm.rendezvous.keyvalue import Exit

FLEDGED_S = 5.0
"""A process that has lived so long did not fail because of where it was started."""
LONGEST_REST_S = 60.0


@dataclass(slots=True)
class Place:
    """A host of the job, as long as one launcher lives there; the next one of that host has a place of its own.

    Attributes:
        address: of the host.
        num_ranks: with which the job began there.
        is_gone: nobody is started there, since the launcher is not there any more, or not yet.
    """

    address: str
    num_ranks: int = 1
    is_gone: bool = False


@dataclass(slots=True)
class Health:
    """Of a host, whichever launcher it has.

    Attributes:
        failures: how many that were started there later ended early, one after the other.
        rests_until_s: until then nobody is started there.
    """

    failures: int = 0
    rests_until_s: float = 0.0


class Stage(Enum):
    """State of a process; see the module."""

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
    """How many ranks a job has, and may have. Times are those of one monotonic clock.

    Attributes:
        least: with fewer that run, or have come to the end, the job has failed.
        most: more are never started, but for spares.
        asked: so many were asked for last.
        size: so many are wanted now: as many as were asked for, as far as there are slots for them.
        restarts: so many that died may be replaced yet.
        spares: so many more run, and wait to be let in.
        places: the hosts, by position.
        slots: how many processes may run on each host, by address; None if nobody says.
        unreplaced: so many that died have nobody in their place, since no restart was left.
        where: the host of each process that was ever started, by birth.
        stages: the stage of each of them.
    """

    least: int
    most: int
    asked: int
    size: int
    restarts: int
    spares: int = 0
    places: list[Place] = field(default_factory=list)
    slots: Mapping[str, int] | None = None
    unreplaced: int = 0
    where: dict[int, int] = field(default_factory=dict)
    stages: dict[int, Stage] = field(default_factory=dict)
    _later: dict[int, float] = field(default_factory=dict)
    _health: dict[str, Health] = field(default_factory=dict)

    def in_stage(self, *stages: Stage) -> set[int]:
        """Uids of the processes in one of these stages."""
        return {birth for birth, stage in self.stages.items() if stage in stages}

    @property
    def running(self) -> set[int]:
        """Uids of the processes that take part, or were started to."""
        return self.in_stage(Stage.RUNS, Stage.LEAVING)

    @property
    def going(self) -> set[int]:
        """Uids of the live processes that are to go or were released."""
        return self.in_stage(Stage.LEAVING, Stage.RELEASED)

    @property
    def has_failed(self) -> bool:
        """Whether too few are left."""
        return len(self.in_stage(Stage.RUNS, Stage.LEAVING, Stage.FINISHED)) < self.least

    @property
    def is_ending(self) -> bool:
        """Whether ranks have come to the end of the program: then nobody is replaced."""
        return Stage.FINISHED in self.stages.values()

    @property
    def owed(self) -> int:
        """So many are to be started, as soon as there is a place."""
        if self.is_ending or self.has_failed:
            return 0
        return max(0, self.size + self.spares - len(self.in_stage(*COUNTED)) - self.unreplaced)

    @property
    def next_birth(self) -> int:
        """The number of the next process."""
        return max(self.where, default=-1) + 1

    @property
    def capacity(self) -> int:
        """How many processes may run on the hosts whose launchers are there."""
        if self.slots is None:
            return self.most + self.spares
        return sum(self.slots.get(address, 0) for address in {one.address for one in self.places if not one.is_gone})

    def births_at(self, host: int) -> list[int]:
        """All that were ever started on a host."""
        return [birth for birth, place in self.where.items() if place == host]

    def by_host(self) -> list[tuple[str, list[int]]]:
        """The address of each host whose launcher is or was there, and who runs on it."""
        addresses = dict.fromkeys(one.address for one in self.places if one.address)
        return [(address, sorted(self._at(address, self.running))) for address in addresses]

    def expect(self, position: int, address: str) -> None:
        """A launcher of this host is to come, for this position; nobody is started there before."""
        while len(self.places) <= position:
            self.places.append(Place("", is_gone=True))  # which others have asked for
        num_ranks = next((one.num_ranks for one in self.places if one.address == address), 1)
        self.places[position] = Place(address, num_ranks, is_gone=True)

    def begun(self, birth: int, host: int = 0) -> None:
        """A process runs."""
        self.stages[birth] = Stage.RUNS
        self.where[birth] = host

    def goes_on(self, starts: Mapping[int, int], exits: Mapping[int, Exit], size: int) -> None:
        """All begins again at what is known of a running job.

        Args:
            starts: the host of each process that was ever started, by birth.
            exits: of those that have ended. Who has ended well is taken to have been released.
            size: that was asked for last.
        """
        self.where = dict(starts)
        self.stages = {birth: Stage.ENDED if birth in exits else Stage.RUNS for birth in starts}
        self.resize(size)

    def given_up(self, birth: int) -> None:
        """The others do without this one, whose process may not have ended yet."""
        match self.stages.get(birth):
            case Stage.RUNS:
                self.stages[birth] = Stage.GIVEN_UP
            case Stage.LEAVING:  # another is there in its place
                self.stages[birth] = Stage.RELEASED

    def released(self, birth: int) -> bool:
        """The ranks have let this one go, or it is not to be let in; whether that is news.

        It ends by itself, and is neither missed nor replaced: what is wanted besides is owed from now on.
        """
        stage = self.stages.get(birth)
        if stage in (None, Stage.RELEASED, Stage.ENDED):
            return False
        self.stages[birth] = Stage.ENDED if stage is Stage.FINISHED else Stage.RELEASED
        return True

    def not_started(self, birth: int) -> None:
        """A process that was to be started was not; its number is used up."""
        if self.stages.get(birth) in LIVING:
            self.stages[birth] = Stage.ENDED
            self._later.pop(birth, None)

    def ended(self, birth: int, code: int, now_s: float = 0.0) -> Stage:
        """A process has ended; returns the stage in which it was.

        A host on which they keep failing is left alone for 1 s, then for 2, and so on; not for those that were to go.
        """
        before = self.stages.get(birth, Stage.ENDED)
        if before not in LIVING:
            return before
        is_missed = before in COUNTED
        self._change(birth, Stage.FINISHED if code == 0 and before is not Stage.RELEASED else Stage.ENDED)
        begun_s = self._later.pop(birth, None)
        if begun_s is not None and is_missed:
            health = self._health_of(self.places[self.where[birth]])
            health.failures = health.failures + 1 if code and now_s - begun_s < FLEDGED_S else 0
            if health.failures > 1:
                health.rests_until_s = now_s + min(2.0 ** (health.failures - 2), LONGEST_REST_S)
        return before

    def replace(self, birth: int) -> bool:
        """Another is to come in the place of this one, which is to go; whether it runs, so that this can be."""
        if self.stages.get(birth) is not Stage.RUNS:
            return False
        self._change(birth, Stage.LEAVING)
        return True

    def _change(self, birth: int, stage: Stage) -> None:
        """Put a process in a stage; who is owed on account of it is one of those that may be replaced, if any."""
        owed = self.owed
        self.stages[birth] = stage
        if self.owed > owed:
            if self.restarts:
                self.restarts -= 1
            else:
                self.unreplaced += 1

    def resize(self, size: int, waiting: Collection[int] = ()) -> list[int]:
        """So many are asked for, within the bounds.

        Args:
            size: that number.
            waiting: uids of the processes that run and have not joined yet.

        Returns:
            Which of those that wait are not wanted any more. What else is too much the ranks release themselves.
        """
        self.asked = max(self.least, min(size, self.most))
        return self.fit(waiting)

    def fit(self, waiting: Collection[int] = ()) -> list[int]:
        """There is room for more, or for fewer, of those that were asked for; see `resize`."""
        self.size = max(self.least, min(self.asked, self.capacity - self.spares))
        self.unreplaced = 0
        staying = self.in_stage(Stage.RUNS)
        idle = sorted(staying.intersection(waiting))
        unwanted = idle[::-1][: max(0, len(staying) - self.size - self.spares)]
        self.stages |= dict.fromkeys(unwanted, Stage.RELEASED)
        return unwanted

    def vacate(self, waiting: Collection[int] = ()) -> list[int]:
        """Release the ranks whose hosts have no slots left, as long as enough stay.

        Those of hosts without any slot go first, and of these the last.

        Args:
            waiting: uids of the processes that run and have not joined yet.

        Returns:
            Which of them wait.
        """
        found: list[int] = []
        if self.slots is None:
            return found
        staying = self.in_stage(Stage.RUNS)
        slots, spare = self.slots, len(staying.difference(waiting)) - self.least
        addresses = dict.fromkeys(one.address for one in self.places[::-1])
        for address in sorted(addresses, key=lambda one: slots.get(one, 0) > 0):
            here = sorted(self._at(address, staying), key=lambda birth: (birth in waiting, birth))
            for birth in here[slots.get(address, 0) :][::-1]:
                if birth in waiting:
                    found.append(birth)
                    self.stages[birth] = Stage.RELEASED
                elif spare > 0:
                    spare -= 1
                    self.stages[birth] = Stage.LEAVING
        return found

    def start(self, now_s: float = 0.0) -> tuple[int, int] | None:
        """The next process that is to be started: its birth and its host; None if none is owed, or there is no place.

        Where the fewest are, for the slots of the host or what it began with, of those that do not rest.
        """
        free = [host for host in self._open() if self._health_of(self.places[host]).rests_until_s <= now_s]
        if not self.owed or not free:
            return None
        host = min(free, key=lambda one: (self._fullness(self.places[one]), one))
        birth = self.next_birth
        self.begun(birth, host)
        self._later[birth] = now_s
        return birth, host

    def next_place_s(self) -> float | None:
        """When a host has rested; None if there is no other."""
        return min((self._health_of(self.places[host]).rests_until_s for host in self._open()), default=None)

    def _open(self) -> list[int]:
        """The hosts on which others may be started, once they have rested."""
        found = [host for host, one in enumerate(self.places) if not one.is_gone]
        if self.slots is None:
            return found
        return [host for host in found if self._fullness(self.places[host]) < 1]

    def _fullness(self, place: Place) -> float:
        weight = place.num_ranks if self.slots is None else self.slots.get(place.address, 0)
        return len(self._at(place.address, self.in_stage(*LIVING))) / weight if weight else 1.0

    def _at(self, address: str, births: Collection[int]) -> list[int]:
        return [birth for birth in births if self.places[self.where[birth]].address == address]

    def _health_of(self, place: Place) -> Health:
        return self._health.setdefault(place.address, Health())


def parse(text: str, ranks: Sequence[int], restarts: int, spares: int = 0, addresses: Sequence[str] = ()) -> Elasticity:
    """``MIN`` or ``MIN:MAX``; ``MIN`` alone starts nobody in the place of others.

    Args:
        text: that.
        ranks: with how many the job begins, by host.
        restarts: how many may be replaced.
        spares: how many wait beside them.
        addresses: of the hosts; their positions, if left out.

    Raises:
        ConfigError: it is neither, or a job of this size does not fit.
    """
    least, colon, most = text.partition(":")
    numbers = [least, most] if colon else [least]
    if not all(one.isascii() and one.isdigit() and len(one) <= 5 for one in numbers):
        raise ConfigError(f"--elastic {text!r} must be MIN or MIN:MAX, as 2 or 2:8")
    size = sum(ranks)
    low, high = int(least), int(most) if colon else size
    if not 1 <= low <= size <= high:
        raise ConfigError(f"--elastic {text!r} does not fit {size} ranks: it takes 1 <= MIN <= {size} <= MAX")
    if size < 2:
        raise ConfigError("an elastic job begins with two ranks or more")
    found = Elasticity(low, high, size, size, restarts if colon else 0, spares)
    for host, count in enumerate(ranks):
        found.places.append(Place(addresses[host] if addresses else str(host), count))
        for _ in range(count):
            found.begun(found.next_birth, host)
    return found
