"""Walks of an ``Elastic`` through its samplers, in turns or one within a step of another, and the boundaries of steps.

At a boundary between two steps the ranks compare their positions, report faults, agree on the samples that were used,
and carry out requests. Ranks join and leave, and checkpoints are written, only between steps of the outermost walk:
only there does the state hold all of the program's progress.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Awaitable, Callable, Generator, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from operator import index
from typing import Any, TypeAlias, TypeVar

import msgpack
import numpy as np

from kfcomm.common.arguments import checked_name
from kfcomm.elastic.call_log import BOUNDARY, Uids
from kfcomm.elastic.checkpoint import Checkpoint
from kfcomm.elastic.checks import sendable, unreadable
from kfcomm.elastic.joining import Handover, SizeRequests
from kfcomm.elastic.sampler import Course, ElasticSampler, Position, Samplers, Step, Told, share
from kfcomm.elastic.state import Kept, State, fault_of
from kfcomm.errors import CollectiveMismatch, ConfigError, EpochChanged, PeerLost
from kfcomm.world.epochs import NO_PLAN, EpochPlan

T = TypeVar("T")
Wanted: TypeAlias = Step | np.ndarray[Any, np.dtype[Any]] | Callable[[], Awaitable[None]]
Walk: TypeAlias = Generator[Wanted, Any, T]
"""Yields a `Step`; an array, whose sums over all ranks under the name ``BOUNDARY`` are sent back; or a function to call
and await. Runs where the engine does."""


def following(walk: Walk[None], met: Any) -> Wanted | None:
    """Return the next item, given the requested sums; None at the end."""
    try:
        return walk.send(met)
    except StopIteration:
        return None


LOOKS_ALWAYS_S = 2e-3
"""A state whose check takes less is checked at each boundary."""
LOOKS_SHARE = 50
"""Another state is checked again after this many times the duration of its check."""


class Walks:
    """Walks of one rank while an ``Elastic`` is open."""

    def __init__(
        self, handover: Handover, requests: SizeRequests, states: tuple[State, State | None],
        checkpoint: Checkpoint | None, *, restarts: bool,
    ) -> None:  # fmt: skip
        self.is_replaying = False  # this rank has not reached the walk that it has to resume
        self._comm = handover.comm
        self._calls = handover.calls
        self._handover = handover
        self._requests = requests
        self._state, self._own = states  # what all ranks share, and what is this rank's own
        self._checkpoint = checkpoint
        self._restarts = restarts  # steps are repeated after a loss
        self._samplers = Samplers()
        self._open: list[Course] = []
        self._earlier = 0
        self._walk: list[Any] | None = None
        self._is_joining = False
        self._has_left_out = False
        self._looks_at_s = 0.0
        self._lineage: list[str] = []
        self._fault: str | None = None

    def begin_at(self, place: Position, *, is_joining: bool) -> None:
        """Resume from the position of the other ranks, or of a checkpoint."""
        self._earlier, self._walk, self._is_joining = place.steps, place.walk, is_joining
        self._samplers.waiting = dict(place.samplers)
        self._lineage = place.lineage
        self.is_replaying = place.walk is not None or bool(place.samplers)

    # ---------------------------------------------------------------- a walk

    def through(
        self, sampler: ElasticSampler, *, passes: int | None, used_in: str | Sequence[str] | None
    ) -> Walk[None]:
        """Yield the steps, and the work and waits between them, which the driver carries out."""
        calls = self._calls
        if calls.recovery.is_released:
            return
        course = Course(self._samplers.name_of(sampler), sampler, _passes(passes), _names(used_in))
        is_first = not self.is_replaying
        if self.is_replaying and not self._is_here(course):
            return
        self.is_replaying = False
        kept = [Kept(one) for one in (self._state, self._own) if self._restarts and one is not None]
        for one in self._open:
            one.is_left = one.is_left or one.sampler is sampler
        until = course.passes
        try:
            while True:
                if calls.unfinished():
                    yield calls.finish
                if course not in self._open:  # a walk through its sampler, within one of its steps, is over
                    self._open.append(course)
                    course.is_left = False
                uids = self._comm.births
                if is_first:
                    uids = yield from self._boundary(course, kept)
                    if self._calls.recovery.is_released:  # by that boundary
                        return
                is_first = True
                self._look(course, kept)
                # Only now: the boundary may have restored an earlier position of the sampler.
                until = sampler.passes + 1 if until is None else until
                batch = sampler.take_until(until)
                if not len(batch):
                    return
                mine = share(batch, uids.index(self._comm.current.births[self._comm.current.rank]), len(uids))
                yield course.begin(Step(self._number(), mine, batch, sampler, restarts=self._restarts), uids)
        finally:
            course.is_left = True

    def _is_here(self, course: Course) -> bool:
        """Whether this is the walk to resume; False for one that is over."""
        is_over = course.passes is not None and course.sampler.passes >= course.passes
        if self._walk is None:
            return True
        name, passes, names = self._walk
        is_named = course.name == name
        if is_named and (course.passes == passes or not (is_over or self._is_joining)):
            if self._is_joining and names != course.names:
                raise ConfigError(f"used_in of this rank's steps is {course.names}, that of the others {names}")
            return True
        if is_over or course.passes is None:
            self._has_left_out = (self._has_left_out or course.passes is None) and not is_named
            return False
        if self._is_joining:
            raise ConfigError(
                f"this rank begins steps through {course!r}, and the others go through sampler {name!r}, passes="
                f"{passes}: all ranks make the same calls; a loop's counter belongs in the State"
            )
        return True

    def _look(self, course: Course, kept: Sequence[Kept]) -> None:
        """Copy the state at this boundary; a fault is reported at the next one."""
        try:
            if self._checkpoint is not None and self._comm.rank == 0 and not self._is_within(course):
                place = list(self._place(course, self._number() + 1))
                self._checkpoint.look(self._number(), place, self._comm.current.epoch)
            for one in kept:
                one.keep(self._samplers.places())
        except Exception as error:  # noqa: BLE001  whatever the caller's arrays raise
            self._fault = unreadable("the state", error)

    def _place(self, course: Course, steps: int) -> Position:
        return Position(steps, self._samplers.places(), [course.name, course.passes, course.names], self._lineage)

    def _is_within(self, course: Course) -> bool:
        """Whether a walk is within a step of another."""
        below = self._open[: self._open.index(course)]
        return any(one.step is not None and not one.is_left for one in below)

    def _number(self) -> int:
        """Number of the step that begins: the first boundary begins step 0."""
        return self._earlier + self._calls.log.step - 1

    # ---------------------------------------------------------------- boundaries

    def _boundary(self, course: Course, kept: Sequence[Kept]) -> Walk[Uids]:
        """Carry out the boundary between two steps; returns the ranks that take part."""
        # Calls since the last boundary belong to the innermost step that is still under way, and to the
        # steps around it only once it was left.
        is_innermost = True
        for one in reversed([one for one in self._open if one.step is not None]):
            one.note(self._calls.log, is_innermost=is_innermost)
            is_innermost = is_innermost and one.is_left  # calls after its end belong to the walk around it
        is_void = course.is_void
        self._requests.look(self._comm.current)
        is_wanted = not self._is_within(course) and self._requests.is_wanted(self._comm.current)
        fault = self._fault or self._looked_for()
        where = [course.name, course.sampler.state_dict(), course.passes, course.names]
        place = self._open.index(course)
        ending = [*self._open[place + 1 :], *(one for one in self._open[:place] if one.is_left), course]
        is_other_void = any(one.is_void for one in ending[:-1])
        rows = [list(one.told()) for one in ending if one.step is not None]
        uids, (wanted, void, other_void), told = yield from self._meet(
            where,
            [is_wanted, is_void, is_other_void],
            lambda: f"begins step {self._number() + 1} with {course!r}",
            fault,
            rows,
        )
        for one in ending[:-1]:
            one.end_step(uids, [each.pop(0) for each in told if one.step is not None], is_void=other_void)
            self._open.remove(one)
        # The whole step is repeated: its samples are not given back, its state and samplers are restored.
        if void and kept and course.step is not None:
            course.step = None
            for copy in kept:
                copy.restore()
            self._samplers.restore(kept[0].place)
        course.end_step(uids, [each.pop(0) for each in told if each], is_void=void)
        # A change at the end of a pass would make joining ranks enter a loop that is over.
        if not (wanted and course.sampler.left):
            return uids
        yield partial(self._change, course)
        return self._comm.births

    def _looked_for(self) -> str | None:
        """Fault of the state, if a check is due: checks take a small share of the time."""
        now_s, began_s = time.monotonic(), time.thread_time()
        if now_s < self._looks_at_s:
            return None
        fault = fault_of(self._state)
        took_s = time.thread_time() - began_s  # of this thread alone, however busy the machine is
        self._looks_at_s = now_s + (LOOKS_SHARE * took_s if took_s > LOOKS_ALWAYS_S else 0)
        return fault

    def leave(self) -> Walk[None]:
        """Check that all ranks leave; otherwise raise an error."""
        if self.is_replaying and self._walk is not None and (self._has_left_out or self._is_joining):
            name, passes, _ = self._walk
            raise ConfigError(
                f"the program has ended before it reached the steps to resume: through sampler {name!r}, passes="
                f"{passes}; it differs from the program of the checkpoint, or of the other ranks"
            )
        if self._calls.unfinished():
            yield self._calls.finish
        yield from self._meet(["end"], [False] * 3, lambda: "leaves the Elastic", None, [])

    def _meet(
        self, where: list[Any], flags: list[bool], describe: Callable[[], str], fault: str | None, rows: list[Any]
    ) -> Walk[tuple[Uids, list[bool], list[list[Told]]]]:
        """Carry out the all_reduce of a boundary; ranks at different positions, or a fault, are an error on all.

        Returns the uids of the ranks of the next step, the flags that are set on any rank, and the reports of each rank
        on the steps that are over; only those of this rank where all are the same.
        """
        # One all_reduce of numbers for all of this: mostly positions and reports are equal, and need not be gathered.
        # The hash travels in halves: squares of 32 bits, summed over ranks, would not fit in 64.
        number = _number_of([self._calls.log.step, *where])
        at = [number >> 16, number & 0xFFFF]
        row = _number_of(rows) & 0xFFFFFF
        mine = np.array([1, *at, *(one * one for one in at), row, row * row, *flags, fault is not None], np.int64)
        count, high, low, high_squared, low_squared, all_rows, squared, *found, wrong = (yield mine).tolist()
        # The all_reduce may be done while the epoch changes: the next step needs the new ranks.
        if self._calls.log.is_changing:
            yield self._calls.recovery.settled
        text = describe()
        uids = self._calls.end_step()
        # by Cauchy's inequality they are equal only if all are the same, and so on all ranks or on none
        if wrong or count * high_squared != high * high or count * low_squared != low * low:
            yield partial(self._tell, number, text, fault)
        told = [rows]
        if count * squared != all_rows * all_rows:
            yield partial(self._tell_rows, rows, told)
        return uids, [one > 0 for one in found], [[Told(*row) for row in each] for each in told]

    async def _tell_rows(self, rows: list[Any], told: list[list[Any]]) -> None:
        """Gather the reports of all ranks, which differ, into ``told``."""
        found, _ = await self._calls.gather(rows, "used")
        told[:] = found

    async def _tell(self, number: int, text: str, fault: str | None) -> None:
        """Exchange positions and faults after a rank has signalled one, and raise the error on all ranks."""
        # If that rank is lost meanwhile, nothing may be wrong any more.
        rows, _ = await self._calls.gather([number, sendable(text), fault], "place")
        for rank, (_, _, wrong) in enumerate(rows):
            if wrong is not None:
                raise ConfigError(f"rank {rank}: {wrong}")
        places: dict[int, str] = {}
        for rank, (where, what, _) in enumerate(rows):
            places.setdefault(where, f"rank {rank} {what}")
        if len(places) > 1:
            raise CollectiveMismatch(
                f"the ranks are at different positions: {'; '.join(places.values()):.2000}; all ranks make the same "
                "calls with equal samplers and arguments", key=BOUNDARY,
            )  # fmt: skip

    async def _change(self, course: Course) -> None:
        """Carry out the plan of the first rank: all ranks receive it, or none does."""
        comm, calls = self._comm, self._calls
        # The first rank may have died since the boundary, and its successor may not know the request.
        mine = self._requests.plan(comm.current) if comm.rank == 0 else NO_PLAN
        try:
            plan = EpochPlan.of(await comm.broadcast_object(mine, 0, "kfcomm/plan"))
        except PeerLost:
            return
        if plan == NO_PLAN:
            return
        steps = calls.log.step
        try:
            await calls.recovery.change(plan)
        except EpochChanged:
            if not calls.recovery.is_released:
                raise
            return
        self._earlier += steps  # the log counts from 0 now, as on joining ranks
        self._requests.done(plan)
        if plan.joiners:
            having = tuple(uid for uid in comm.births if uid not in {one.birth for one in plan.joiners})
            await self._handover.carry_out(list(self._place(course, self._earlier)), having)


def _passes(passes: Any) -> int | None:
    try:
        return None if passes is None else index(passes)
    except TypeError:
        raise ConfigError(f"passes is a number of passes, or None, not {passes!r}") from None


def _names(used_in: Any) -> list[str] | None:
    if used_in is None:
        return None
    given = [used_in] if isinstance(used_in, str) else used_in
    if not isinstance(given, Sequence | AbstractSet) or not all(isinstance(one, str) for one in given):
        raise ConfigError(f"used_in is the name of a call, or names, not {used_in!r}")
    names: dict[str, None] = dict.fromkeys(checked_name(one) for one in given)
    return sorted(names) if isinstance(given, AbstractSet) else list(names)


def _number_of(value: Any) -> int:
    """32-bit hash of a value."""
    return int.from_bytes(hashlib.blake2b(msgpack.packb(value), digest_size=4).digest(), "little")
