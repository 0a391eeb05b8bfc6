"""Seeds under which a program fails; each failing one with as few events as can be, to be run again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from random import Random
from typing import Any, TypeAlias

from kfcomm.testing.virtual.events import Event, random_events
from kfcomm.testing.virtual.run import Main, VirtualRun, run_in_virtual_time

MAX_DIGITS = 3
"""Times are rounded to so many digits at most, if the run fails then, too."""

Check: TypeAlias = Callable[[VirtualRun], object]
Planner: TypeAlias = Callable[[Random, int], Sequence[Event]]


def search_in_virtual_time(
    main: Main, size: int, check: Check, *, seeds: Iterable[int], plan: Planner = random_events, **options: Any
) -> int:
    """Run a program under the events of each seed, and check what came of it.

    Of a run that fails, events are left out, and times rounded, as long as it fails; the error repeats the rest.

    Args:
        main: see `run_in_virtual_time`.
        size: number of ranks in the beginning.
        check: raises an error if a run is not as it should be.
        seeds: each is one run.
        plan: makes the events of a run, from chance and the size.
        **options: of `run_in_virtual_time`.

    Returns:
        How many runs there were.

    Raises:
        AssertionError: a run failed; its last line runs it again.
    """
    count = 0
    for seed in seeds:
        count += 1
        trial = _Trial(main, size, check, seed, options)
        events = list(plan(Random(seed), size))
        error = trial.failure(events)
        if error is not None:
            events, error = _shrunk(events, error, trial)
            again = f"run_in_virtual_time(main, {size}, seed={seed}, events={events!r})"
            raise AssertionError(f"{type(error).__name__}: {error}\n{again}") from error
    return count


@dataclass(frozen=True, slots=True)
class _Trial:
    """A seed, whatever happens."""

    main: Main
    size: int
    check: Check
    seed: int
    options: dict[str, Any]

    def failure(self, events: Sequence[Event]) -> Exception | None:
        """Why a run with these events is not as it should be; None if it is."""
        try:
            self.check(run_in_virtual_time(self.main, self.size, seed=self.seed, events=events, **self.options))
        except Exception as error:  # noqa: BLE001  whatever it is
            return error
        return None


def _shrunk(events: list[Event], error: Exception, trial: _Trial) -> tuple[list[Event], Exception]:
    """The plainest events with which it fails, as far as one change at a time leads, and how."""
    is_plainer = True
    while is_plainer:
        is_plainer = False
        for plainer in _plainer(events):
            found = trial.failure(plainer)
            if found is not None:
                events, error, is_plainer = plainer, found, True
                break
    return events, error


def _plainer(events: list[Event]) -> Iterator[list[Event]]:
    """With one of them less; then with one time that has fewer digits."""
    for place in range(len(events)):
        yield [*events[:place], *events[place + 1 :]]
    for place, event in enumerate(events):
        for field in fields(event):
            value = getattr(event, field.name)
            for digits in range(MAX_DIGITS + 1) if isinstance(value, float) else ():
                rounded = round(value, digits)
                if rounded == value:
                    break
                if rounded or field.name == "at_s":
                    yield [*events[:place], replace(event, **{field.name: rounded}), *events[place + 1 :]]
