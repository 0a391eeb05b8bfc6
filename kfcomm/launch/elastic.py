"""A job whose ranks may change: how many it may have, and where others are started when some end, or more are wanted.

Nothing here starts or stops a process: the supervisor does, by what is said here.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from kfcomm.errors import ConfigError
from kfcomm.rendezvous.board import Exit

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


@dataclass(slots=True)
class Elasticity:
    """How many ranks a job has, and may have. Times are those of one monotonic clock.

    Attributes:
        least: with fewer that run, or have ended well, the job has failed.
        most: more are never started, but for spares.
        asked: so many were asked for last.
        size: so many are wanted now: as many as were asked for, as far as there are slots for them.
        restarts: so many that died may be replaced yet.
        spares: so many more run, and wait to be let in.
        places: the hosts, by position.
        slots: how many processes may run on each host, by address; None if nobody says.
        owed: so many are to be started, as soon as there is a place.
        next_birth: the number of the next process.
        where: the host of each process that was ever started, by birth.
        running: births of those that run.
        well: how many have ended with 0.
        released: how many of these were taken away by a change of size.
        leaving: who is to go since it is not wanted where it is; it is replaced before it ends, and not missed.
    """

    least: int
    most: int
    asked: int
    size: int
    restarts: int
    spares: int = 0
    places: list[Place] = field(default_factory=list)
    slots: Mapping[str, int] | None = None
    owed: int = 0
    next_birth: int = 0
    where: dict[int, int] = field(default_factory=dict)
    running: set[int] = field(default_factory=set)
    well: int = 0
    released: int = 0
    leaving: set[int] = field(default_factory=set)
    _later: dict[int, float] = field(default_factory=dict)
    _health: dict[str, Health] = field(default_factory=dict)

    @property
    def has_failed(self) -> bool:
        """Whether too few are left."""
        return len(self.running) + self.well - min(self.well, self.released) < self.least

    @property
    def is_ending(self) -> bool:
        """Whether ranks have come to the end of the program: then nobody is replaced."""
        return self.well > self.released

    @property
    def staying(self) -> set[int]:
        """Births of those that run and are not to go."""
        return self.running - self.leaving

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
        """A process with which the job begins runs."""
        self.running.add(birth)
        self.where[birth] = host
        self.next_birth = max(self.next_birth, birth + 1)

    def goes_on(self, starts: Mapping[int, int], exits: Mapping[int, Exit], size: int) -> None:
        """All begins again at what is known of a running job.

        Args:
            starts: the host of each process that was ever started, by birth.
            exits: of those that have ended. Who has ended well is taken to have been released.
            size: that was asked for last.
        """
        self.where = dict(starts)
        self.running = starts.keys() - exits.keys()
        self.next_birth = max(starts) + 1
        self.well = self.released = sum(end.code == 0 for end in exits.values())
        self.resize(size)

    def given_up(self, birth: int) -> None:
        """The others do without this one, whose process may not have ended yet: they release one less."""
        self.running.discard(birth)
        self.released = min(self.released, self.well + max(0, len(self.running) - self.size))

    def ended(self, birth: int, code: int, now_s: float = 0.0) -> None:
        """A process has ended. A host on which they keep failing is left alone for 1 s, then for 2, and so on.

        Not for those that were to go.
        """
        self.running.discard(birth)
        self.well += code == 0 and birth not in self.leaving
        begun_s = self._later.pop(birth, None)
        if begun_s is None or birth in self.leaving:
            return
        health = self._health_of(self.places[self.where[birth]])
        health.failures = health.failures + 1 if code and now_s - begun_s < FLEDGED_S else 0
        if health.failures > 1:
            health.rests_until_s = now_s + min(2.0 ** (health.failures - 2), LONGEST_REST_S)

    def resize(self, size: int, waiting: Collection[int] = ()) -> list[int]:
        """So many are asked for, within the bounds.

        Args:
            size: that number.
            waiting: births of those that run and have not been let in yet.

        Returns:
            Which of those that wait are not wanted any more. What else is too much the ranks release themselves.
        """
        self.asked = max(self.least, min(size, self.most))
        return self.fit(waiting)

    def fit(self, waiting: Collection[int] = ()) -> list[int]:
        """There is room for more, or for fewer, of those that were asked for; see `resize`."""
        self.size = max(self.least, min(self.asked, self.capacity - self.spares))
        wanted, staying = self.size + self.spares, self.staying
        idle = staying.intersection(waiting)
        unwanted = sorted(idle)[::-1][: max(0, len(staying) - wanted)]
        self.released = self.well + max(0, len(staying) - len(idle) - self.size)
        self.owed = max(0, wanted - len(staying))
        self.leaving.update(unwanted)
        return unwanted

    def vacate(self, waiting: Collection[int] = ()) -> list[int]:
        """Have those go for whom their hosts have no slots any more, as long as enough stay: they are `leaving`.

        Those of hosts without any slot go first, and of these the last.

        Args:
            waiting: births of those that run and have not been let in yet.

        Returns:
            Which of them wait.
        """
        found: list[int] = []
        if self.slots is None:
            return found
        slots, spare = self.slots, len(self.staying.difference(waiting)) - self.least
        addresses = dict.fromkeys(one.address for one in self.places[::-1])
        for address in sorted(addresses, key=lambda one: slots.get(one, 0) > 0):
            here = sorted(self._at(address, self.staying), key=lambda birth: (birth in waiting, birth))
            for birth in here[slots.get(address, 0) :][::-1]:
                if birth in waiting:
                    found.append(birth)
                elif spare <= 0:
                    continue
                else:
                    spare -= 1
                self.leaving.add(birth)
        return found

    def replace(self) -> None:
        """Somebody has died: from now on others are owed, unless the job comes to its end, or there were too many."""
        if self.is_ending or self.has_failed:
            self.owed = 0
            return
        missing = self.size + self.spares - len(self.staying) - self.owed
        count = max(0, min(missing, self.restarts))
        self.restarts -= count
        self.owed += count

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
        self.owed -= 1
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
        return len(self._at(place.address, self.running)) / weight if weight else 1.0

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
    found = Elasticity(low, high, size, size, restarts if colon else 0, spares, owed=spares)
    for host, count in enumerate(ranks):
        found.places.append(Place(addresses[host] if addresses else str(host), count))
        for _ in range(count):
            found.begun(found.next_birth, host)
    return found
