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
    """A host of the job.

    Attributes:
        num_ranks: with which the job began there.
        failures: how many that were started there later ended early, one after the other.
        rests_until_s: until then nobody is started there.
        is_gone: nor at all.
    """

    num_ranks: int = 1
    failures: int = 0
    rests_until_s: float = 0.0
    is_gone: bool = False


@dataclass(slots=True)
class Elasticity:
    """How many ranks a job has, and may have. Times are those of one monotonic clock.

    Attributes:
        least: with fewer that run, or have ended well, the job has failed.
        most: more are never started, but for spares.
        size: so many are wanted now.
        restarts: so many that died may be replaced yet.
        spares: so many more run, and wait to be let in.
        places: the hosts, by position.
        owed: so many are to be started, as soon as there is a place.
        next_birth: the number of the next process.
        where: the host of each process that was ever started, by birth.
        running: births of those that run.
        well: how many have ended with 0.
        released: how many of these were taken away by a change of size.
    """

    least: int
    most: int
    size: int
    restarts: int
    spares: int = 0
    places: list[Place] = field(default_factory=lambda: [Place()])
    owed: int = 0
    next_birth: int = 0
    where: dict[int, int] = field(default_factory=dict)
    running: set[int] = field(default_factory=set)
    well: int = 0
    released: int = 0
    _later: dict[int, float] = field(default_factory=dict)

    @property
    def has_failed(self) -> bool:
        """Whether too few are left."""
        return len(self.running) + self.well - min(self.well, self.released) < self.least

    @property
    def is_ending(self) -> bool:
        """Whether ranks have come to the end of the program: then nobody is replaced."""
        return self.well > self.released

    def births_at(self, host: int) -> list[int]:
        """All that were ever started on a host."""
        return [birth for birth, place in self.where.items() if place == host]

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

    def ended(self, birth: int, code: int, now_s: float = 0.0) -> None:
        """A process has ended. A host on which they keep failing is left alone for 1 s, then for 2, and so on."""
        self.running.discard(birth)
        self.well += code == 0
        begun_s = self._later.pop(birth, None)
        if begun_s is None:
            return
        place = self.places[self.where[birth]]
        place.failures = place.failures + 1 if code and now_s - begun_s < FLEDGED_S else 0
        if place.failures > 1:
            place.rests_until_s = now_s + min(2.0 ** (place.failures - 2), LONGEST_REST_S)

    def resize(self, size: int, waiting: Collection[int] = ()) -> list[int]:
        """So many are asked for, within the bounds.

        Args:
            size: that number.
            waiting: births of those that run and have not been let in yet.

        Returns:
            Which of those that wait are not wanted any more. What else is too much the ranks release themselves.
        """
        self.size = max(self.least, min(size, self.most))
        wanted = self.size + self.spares
        excess = max(0, len(self.running) - wanted)
        unwanted = sorted(waiting)[::-1][:excess]
        self.released = self.well + max(0, len(self.running) - len(waiting) - self.size)
        self.owed = max(0, wanted - len(self.running))
        return unwanted

    def replace(self) -> None:
        """Somebody has died: from now on others are owed, unless the job comes to its end, or there were too many."""
        if self.is_ending or self.has_failed:
            self.owed = 0
            return
        missing = self.size + self.spares - len(self.running) - self.owed
        count = max(0, min(missing, self.restarts))
        self.restarts -= count
        self.owed += count

    def start(self, now_s: float = 0.0) -> tuple[int, int] | None:
        """The next process that is to be started: its birth and its host; None if none is owed, or there is no place.

        Where the fewest are, for what the host began with, of those that do not rest.
        """
        free = [host for host, one in enumerate(self.places) if not one.is_gone and one.rests_until_s <= now_s]
        if not self.owed or not free:
            return None
        counts = [sum(self.where[birth] == host for birth in self.running) for host in range(len(self.places))]
        host = min(free, key=lambda one: (counts[one] / self.places[one].num_ranks, one))
        birth = self.next_birth
        self.begun(birth, host)
        self._later[birth] = now_s
        self.owed -= 1
        return birth, host

    def next_place_s(self) -> float | None:
        """When a host has rested; None if there is no other."""
        return min((one.rests_until_s for one in self.places if not one.is_gone), default=None)


def parse(text: str, ranks: Sequence[int], restarts: int, spares: int = 0) -> Elasticity:
    """``MIN`` or ``MIN:MAX``; ``MIN`` alone starts nobody in the place of others.

    Args:
        text: that.
        ranks: with how many the job begins, by host.
        restarts: how many may be replaced.
        spares: how many wait beside them.

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
    found = Elasticity(low, high, size, restarts if colon else 0, spares, [], owed=spares)
    for host, count in enumerate(ranks):
        found.places.append(Place(count))
        for _ in range(count):
            found.begun(found.next_birth, host)
    return found
