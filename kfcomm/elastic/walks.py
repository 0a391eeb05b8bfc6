"""Walks of an ``Elastic`` through its samplers, in turns or one within a step of another, and the boundaries of steps.

At a boundary between two steps the ranks compare their positions, report faults, agree on the samples that were used,
and carry out requests. Ranks join and leave, and checkpoints are written, only between steps of the outermost walk:
only there does the state hold all of the program's progress.

Mostly a rank *announces* a boundary: it begins the step without waiting, and reads the sums of all reports when that
step ends, so that all of them hold one step later. Where something has to be known at once, the ranks *meet*: after a
loss, at the ends of walks and passes, within steps of another walk, where a checkpoint is due, and at the boundary
after one that told of a request. All ranks choose alike, by what all of them know.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np

from kfcomm.collectives.handle import Handle
from kfcomm.elastic.ahead import PlanStage, Preparation
from kfcomm.elastic.boundary import BoundaryReport, Sums, hash_of, reports_of
from kfcomm.elastic.call_log import BOUNDARY, Uids
from kfcomm.elastic.checkpoint import Checkpoint
from kfcomm.elastic.checks import names_of, passes_of, sendable, unreadable
from kfcomm.elastic.course import KEEP, ROLL_BACK, Course, EndedStep, Step, StepReport
from kfcomm.elastic.joining import Handover
from kfcomm.elastic.requests import SizeRequests
from kfcomm.elastic.sampler import ElasticSampler, Position, Samplers, share
from kfcomm.elastic.snapshots import Kept
from kfcomm.elastic.state import State, StateChecks, may_hold
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


class Announced(NamedTuple):
    """Boundary whose sums are read when its step ends, and the step before it."""

    handle: Handle[Any]
    report: BoundaryReport
    course: Course
    ended: EndedStep | None


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
        self._merging = handover.merging
        self._requests = requests
        self._preparation = Preparation(handover.calls)
        self._states = [one for one in states if one is not None]  # what all ranks share, and what is this rank's own
        self._checkpoint = checkpoint
        self._restarts = restarts  # steps are repeated after a loss
        self._samplers = Samplers()
        self._open: list[Course] = []
        self._earlier = 0
        self._walk: list[Any] | None = None
        self._is_joining = False
        self._has_left_out = False
        self._announced: Announced | None = None  # the latest boundary, while its sums are not read
        self._is_exact = True  # the samplers' positions are: the ranks have met at the latest boundary
        self._has_to_meet = False  # at the next boundary, since the latest one told of something to be done there
        self._is_due = False  # a checkpoint, at the next boundary
        self._checks = StateChecks(states[0])
        self._lineage: list[str] = []

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
        course = Course(self._samplers.name_of(sampler), sampler, passes_of(passes), names_of(used_in))
        is_first = not self.is_replaying
        if self.is_replaying and not self._is_here(course):
            return
        self.is_replaying = False
        kept = [Kept(one) for one in self._states if self._restarts]
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
            checkpoint = self._written(course)
            if checkpoint is not None and self._is_exact and self._merging.is_ready:
                place = list(self._place(course, self._number() + 1))
                checkpoint.look(self._number(), place, self._comm.current.epoch, self._merging.merged)
            for one in kept:
                one.keep(self._samplers.places())
        except Exception as error:  # noqa: BLE001  whatever the caller's arrays raise
            self._checks.fault = unreadable("the state", error)

    def _written(self, course: Course) -> Checkpoint | None:
        """Checkpoint that this rank writes between steps of this walk."""
        return None if self._comm.rank or self._is_within(course) else self._checkpoint

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
        self._note_calls()
        yield from self._settle()
        # The all_reduce may be done while the epoch changes: the next step needs the new ranks.
        if self._calls.log.is_changing:
            yield self._calls.recovery.settled
        self._requests.look(self._comm.current)
        self._has_to_meet = self._has_to_meet or bool(course.wishes)
        self._is_exact = not self._can_announce(course)
        was_due, self._has_to_meet, self._is_due, self._merging.merged = self._is_due, False, False, None
        if self._is_exact:
            return (yield from self._carry_out(course, kept, was_due=was_due))
        yield from self._announce(course)
        return self._comm.births

    def _note_calls(self) -> None:
        """Count the calls since the last boundary for the steps that are under way."""
        # They belong to the innermost step, and to the steps around it only once it was left.
        is_innermost = True
        for one in reversed([one for one in self._open if one.step is not None]):
            one.note(self._calls.log, is_innermost=is_innermost)
            is_innermost = is_innermost and one.is_left  # calls after its end belong to the walk around it

    def _can_announce(self, course: Course) -> bool:
        """Whether the next step can begin before the reports on the last one are known; the same on all ranks."""
        log = self._calls.log
        return (
            not (self._restarts or self._has_to_meet)  # what is repeated is the latest step of all ranks
            and log.may_announce
            and log.step > 1  # joining ranks have come, and names of calls are checked after the first step
            and self._open == [course]
            and course.step is not None
            and course.sampler.left > 0  # else samples that are given back decide whether there is another step
        )

    def _announce(self, course: Course) -> Walk[None]:
        """Begin the next step without waiting for the others."""
        calls = self._calls
        report = self._report(course, [list(course.told())], [self._is_wanted(course), course.is_void, False])
        judge = partial(self._judge, report)
        self._announced = Announced(calls.announce(report.numbers(), judge), report, course, course.ended())
        # A rank may still need a result of the last step, which the program is to change: that has to wait.
        if calls.log.is_unsettled or any(may_hold(one, calls.log.lent()) for one in self._states):
            yield calls.met
            calls.log.thaw()

    def _settle(self) -> Walk[None]:
        """Read the sums of an announced boundary: its step is over, and the samples of the step before are settled."""
        if self._announced is None:
            return
        handle, report, course, ended = self._announced
        if not handle.done():
            yield self._calls.met
        self._announced = None  # only now: an interrupt of the wait leaves it for the next walk
        sums = handle.result()
        self._calls.log.thaw()
        told = yield from self._told(report, sums)
        wanted, void, _, is_due = sums.flags
        course.settle(ended, handle.contributors or (), [one for each in told for one in each], is_void=void)
        self._has_to_meet, self._is_due = wanted or is_due, is_due

    def _carry_out(self, course: Course, kept: Sequence[Kept], *, was_due: bool) -> Walk[Uids]:
        """Meet the other ranks, settle the samples of the steps that are over, and carry out requests."""
        place = self._open.index(course)
        ending = [*self._open[place + 1 :], *(one for one in self._open[:place] if one.is_left), course]
        rows = [list(one.told()) for one in ending if one.step is not None]
        is_other_void = any(one.is_void for one in ending[:-1])
        others, mine = _wishes(ending[:-1]), _wishes([course])
        flags = [self._is_wanted(course), course.is_void, is_other_void]
        report = self._report(course, rows, flags, others | mine)
        uids, (wanted, void, other_void, is_due), told = yield from self._meet(report)
        for one in ending[:-1]:
            reports = [each.pop(0) for each in told if one.step is not None]
            one.settle(one.ended(), uids, reports, is_void=other_void)
            self._open.remove(one)
        # The whole step is repeated: its samples are not given back, its state and samplers are restored.
        if void and kept and course.step is not None:
            course.step = None
            for copy in kept:
                copy.restore()
            self._samplers.restore(kept[0].place)
        course.settle(course.ended(), uids, [each.pop(0) for each in told if each], is_void=void)
        self._has_to_meet = self._is_due = is_due
        if not self._is_within(course):
            granted = (frozenset() if void else mine) | (frozenset() if other_void else others)
            yield from self._convert(granted, uids, was_due=was_due)
        # A change at the end of a loop would make joining ranks enter one that is over.
        is_over = not (course.sampler.left or (course.passes or 0) > course.sampler.passes + 1)
        if not wanted or is_over:
            # Short loops would put it off for ever: their other boundaries are announced, and so a step late.
            self._has_to_meet = self._has_to_meet or wanted
            return uids
        yield partial(self._change, course)
        return self._comm.births

    def _convert(self, wishes: AbstractSet[str], uids: Uids, *, was_due: bool) -> Walk[None]:
        """Carry out wishes, convert for ranks that have changed, and collect for a checkpoint that is due."""
        self._grant(wishes)
        if self._merging.is_due(uids):
            yield partial(self._merging.convert, uids)
        if was_due:
            yield self._merging.collect_for_checkpoint

    def _grant(self, wishes: AbstractSet[str]) -> None:
        """Carry out what the program has wished for."""
        if ROLL_BACK in wishes:
            self._samplers.restore(self._merging.roll_back(), keeps_aside=True)
        if KEEP in wishes:
            try:
                self._merging.keep(self._samplers.places())
            except Exception as error:  # noqa: BLE001  whatever the caller's arrays raise
                self._checks.fault = unreadable("the state", error)

    def _is_wanted(self, course: Course) -> bool:
        comm = self._comm.current
        return not self._is_within(course) and self._requests.is_wanted(comm) and self._preparation.is_due(comm)

    def close(self) -> None:
        """Prepare nothing any more."""
        self._preparation.drop()

    def _report(
        self, course: Course, rows: list[list[Any]], flags: list[bool], wishes: AbstractSet[str] = frozenset()
    ) -> BoundaryReport:
        """Report of this rank at the boundary before the next step."""
        number = self._number() + 1
        walk = [course.name, course.sampler.state_dict(), course.passes, course.names]
        where = [self._calls.log.step, *walk, sorted(wishes)]
        checkpoint = self._written(course)
        is_due = checkpoint is not None and checkpoint.is_due_after(
            number, is_exact=self._is_exact and not self._merging.may_differ
        )
        return BoundaryReport(hash_of(where), where, number, self._checks.look(), rows, [*flags, is_due])

    def wish(self, what: str) -> None:
        """Let something be done at the boundary after the present step of the outermost walk."""
        course = next((one for one in self._open if one.step is not None and not one.is_left), None)
        if course is None:
            raise ConfigError(f"{what}() is called within a step: in the body of a loop over steps")
        if what == ROLL_BACK and not self._merging.copies:
            raise ConfigError("roll_back() needs a copy: call keep() in an earlier step")
        course.wishes |= {what}

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
        self._note_calls()
        yield from self._settle()
        left = [one for one in self._open if one.step is not None]
        wishes = _wishes(left)
        where = [self._calls.log.step, sorted(wishes)]
        flags = [any(one.is_void for one in left)]
        _, (is_void, *_), _ = yield from self._meet(
            BoundaryReport(hash_of(where), where, self._number(), None, [], flags)
        )
        if not is_void:
            self._grant(wishes)

    def _meet(self, report: BoundaryReport) -> Walk[tuple[Uids, list[bool], list[list[StepReport]]]]:
        """Carry out the all_reduce of a boundary; ranks at different positions, or a fault, are an error on all.

        Returns the uids of the ranks of the next step, the flags that are set on any rank, and the reports of each rank
        on the steps that are over; only those of this rank where all are the same.
        """
        sums = Sums.of((yield report.numbers()))
        # The all_reduce may be done while the epoch changes: the next step needs the new ranks.
        if self._calls.log.is_changing:
            yield self._calls.recovery.settled
        uids = self._calls.end_step()
        if sums.is_wrong:
            yield partial(self._tell, report)
        return uids, sums.flags, (yield from self._told(report, sums))

    def _judge(self, report: BoundaryReport, numbers: Any) -> tuple[Sums, Callable[[], Awaitable[None]] | None]:
        """Read the sums of an announced boundary, and return what is to be done before calls of its step can end."""
        sums = Sums.of(numbers)
        return sums, partial(self._tell, report) if sums.is_wrong else None

    def _told(self, report: BoundaryReport, sums: Sums) -> Walk[list[list[StepReport]]]:
        """Reports of each rank on the steps that are over; only those of this rank where all are the same."""
        told = [report.told]
        if not sums.are_told_alike:
            yield partial(self._tell_rows, report.told, told)
        return reports_of(told)

    async def _tell_rows(self, rows: list[Any], told: list[list[Any]]) -> None:
        """Gather the reports of all ranks, which differ, into ``told``."""
        found, _ = await self._calls.gather(rows, "used")
        told[:] = found

    async def _tell(self, report: BoundaryReport) -> None:
        """Exchange positions and faults after a rank has signalled one, and raise the error on all ranks."""
        # If that rank is lost meanwhile, nothing may be wrong any more.
        rows, _ = await self._calls.gather([report.place, sendable(report.text()), report.fault], "place")
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
        mine = NO_PLAN, PlanStage.UNPREPARED
        if comm.rank == 0:
            mine = self._preparation.plan(comm.current, self._requests.plan(comm.current))
        try:
            fields, number = await comm.broadcast_object(mine, 0, "kfcomm/plan")
        except PeerLost:
            return
        plan, stage = EpochPlan.of(fields), PlanStage(number)
        if plan == NO_PLAN:
            return
        if stage is PlanStage.PREPARE and await self._preparation.begin(comm.current, plan):
            return
        steps = calls.log.step
        merged = await self._merging.collect()  # ranks that leave take part
        try:
            await calls.recovery.change(plan, await self._preparation.taken(comm.current, stage))
        except EpochChanged:
            if not calls.recovery.is_released:
                raise
            return
        self._earlier += steps  # the log counts from 0 now, as on joining ranks
        self._requests.done(plan)
        self._merging.load(merged, calls.log.shown)
        if plan.joiners:
            having = tuple(uid for uid in comm.births if uid not in {one.birth for one in plan.joiners})
            await self._handover.carry_out(list(self._place(course, self._earlier)), having)


def _wishes(left: Sequence[Course]) -> AbstractSet[str]:
    """Wishes of the program in steps that have ended."""
    return frozenset[str]().union(*(one.wishes for one in left if one.step is not None))
