"""A job whose ranks may change: how many it may have, and what is to be done when some end, or others are asked for.

Nothing here starts or stops a process: the supervisor does, by what is said here.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from kfcomm.errors import ConfigError


@dataclass(slots=True)
class Elasticity:
    """How many ranks a job has, and may have.

    Attributes:
        least: with fewer that run, or have ended well, the job has failed.
        most: more are never started.
        size: so many are wanted now.
        restarts: so many that died may be replaced yet.
        next_birth: the number of the next process.
        running: births of those that run.
        well: how many have ended with 0.
        released: how many of these were taken away by a change of size.
    """

    least: int
    most: int
    size: int
    restarts: int
    next_birth: int = 0
    running: set[int] = field(default_factory=set)
    well: int = 0
    released: int = 0

    @property
    def has_failed(self) -> bool:
        """Whether too few are left."""
        return len(self.running) + self.well - min(self.well, self.released) < self.least

    @property
    def is_ending(self) -> bool:
        """Whether ranks have come to the end of the program: then nobody is replaced."""
        return self.well > self.released

    def begun(self, birth: int) -> None:
        """A process runs."""
        self.running.add(birth)
        self.next_birth = max(self.next_birth, birth + 1)

    def ended(self, birth: int, code: int) -> None:
        """A process has ended."""
        self.running.discard(birth)
        self.well += code == 0

    def resize(self, size: int, waiting: Collection[int] = ()) -> tuple[int, list[int]]:
        """So many are asked for, within the bounds.

        Args:
            size: that number.
            waiting: births of those that run and have not been let in yet.

        Returns:
            How many are to be started; which of those that wait are not wanted any more. What else is too much the
            ranks release themselves.
        """
        self.size = max(self.least, min(size, self.most))
        excess = max(0, len(self.running) - self.size)
        unwanted = sorted(waiting)[::-1][:excess]
        self.released += excess - len(unwanted)
        return max(0, self.size - len(self.running)), unwanted

    def replaced(self) -> int:
        """How many are to be started in the place of those that died."""
        if self.is_ending or self.has_failed:
            return 0
        count = min(self.size - len(self.running), self.restarts)
        self.restarts -= max(0, count)
        return max(0, count)


def parse(text: str, size: int, restarts: int) -> Elasticity:
    """``MIN`` or ``MIN:MAX``; ``MIN`` alone replaces nobody.

    Raises:
        ConfigError: it is neither, or a job of this size does not fit.
    """
    least, colon, most = text.partition(":")
    numbers = [least, most] if colon else [least]
    if not all(one.isascii() and one.isdigit() and len(one) <= 5 for one in numbers):
        raise ConfigError(f"--elastic {text!r} must be MIN or MIN:MAX, as 2 or 2:8")
    low, high = int(least), int(most) if colon else size
    if not 1 <= low <= size <= high:
        raise ConfigError(f"--elastic {text!r} does not fit -n {size}: it takes 1 <= MIN <= {size} <= MAX")
    if size < 2:
        raise ConfigError("an elastic job begins with two ranks or more")
    return Elasticity(low, high, size, restarts if colon else 0)
