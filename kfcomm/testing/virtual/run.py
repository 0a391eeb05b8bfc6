"""A program on all ranks of a world in virtual time, and the search for seeds under which it fails."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from random import Random
from typing import Any, TypeAlias

from kfcomm.testing.virtual.events import (
    Delay,
    Event,
    Join,
    Kill,
    LostStore,
    Partition,
    Release,
    Resize,
    SlowLink,
    Stop,
    random_events,
)
from kfcomm.testing.virtual.network import Stuck, Timing, VirtualLoop, VirtualNetworkModel, VirtualReactor, side_of
from kfcomm.testing.virtual.world import VirtualWorld
from kfcomm.transports.loop_driver import LoopDriver
from kfcomm.world.communicator import Communicator

Main: TypeAlias = Callable[[Communicator], Awaitable[Any]]


@dataclass(frozen=True, slots=True)
class VirtualRun:
    """Result of a run.

    Attributes:
        results: result or error of the program of each rank that was admitted and not killed.
        killed: the others.
        events: of the world.
        unheard: errors of callbacks and tasks that were never awaited, in words.
        time_s: duration in virtual seconds.
        digest: of all messages and their times: the same for the same program, seed and events.
    """

    results: dict[int, Any]
    killed: frozenset[int]
    events: tuple[Event, ...]
    unheard: tuple[str, ...]
    time_s: float
    digest: str

    @property
    def failed(self) -> dict[int, BaseException]:
        """The errors among the results."""
        return {rank: one for rank, one in self.results.items() if isinstance(one, BaseException)}


@dataclass(frozen=True, slots=True)
class _Plan:
    """Arguments of `run_in_virtual_time`."""

    main: Main
    size: int
    seed: int
    events: tuple[Event, ...]
    timing: Timing
    within_s: float
    options: dict[str, Any]


def run_in_virtual_time(
    main: Main, size: int, *, seed: int = 0, events: Iterable[Event] = (), lost_after_s: float = 1.0,
    latency_s: tuple[float, float] = (2e-5, 2e-3), within_s: float = 3600.0, **options: Any,
) -> VirtualRun:  # fmt: skip
    """Run ``main(comm)`` for every rank of a world, and for each process that joins, in virtual time.

    It runs an event loop of its own: not to be called on another. The speed of the machine changes no result. With the
    same arguments, and a deterministic ``main``, a run repeats exactly.

    Args:
        main: the program. Its sleeps are virtual, its computations take no time; it may use ``asyncio.to_thread``,
            which blocks, but no threads of its own, and no sockets.
        size: number of ranks in the beginning.
        seed: of all chance.
        events: faults and requests.
        lost_after_s: ranks that hear nothing of each other for so long have lost each other.
        latency_s: of any message from one rank to another, at least and at most.
        within_s: of virtual time.
        options: of ``MemoryWorld``: ``strategy``, ``timeout``, ``hosts``, ``elastic`` and the like.

    Raises:
        Stuck: the ranks have not come to their end by then, or never can.
        RuntimeError: an event loop is running.
    """
    _check_no_loop()
    loop = VirtualLoop()
    plan = _Plan(main, size, seed, tuple(events), Timing(lost_after_s, latency_s), within_s, options)
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        return runner.run(_run(loop, plan))


def _check_no_loop() -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise RuntimeError("a world in virtual time has an event loop of its own, and one is running")


async def _run(loop: VirtualLoop, plan: _Plan) -> VirtualRun:
    reactor = VirtualReactor(loop)
    driver = LoopDriver(reactor, loop, looks=1)
    model = VirtualNetworkModel(reactor, Random(plan.seed), plan.events, plan.timing)
    unheard: list[str] = []
    loop.set_exception_handler(lambda _, context: unheard.append(_told(context)))
    began_s = loop.time()
    try:
        ranks = _Ranks(plan.main, VirtualWorld(model, plan.size, reactor=reactor, **plan.options))
        happening = [loop.create_task(_happen(ranks, one, plan.timing.lost_after_s)) for one in plan.events]
        try:
            await ranks.end(began_s + plan.within_s)
            time_s, results = loop.time() - began_s, ranks.results()
        finally:
            await ranks.close(happening)
    finally:
        driver.close()
    return VirtualRun(results, frozenset(ranks.world.dead), plan.events, tuple(unheard), time_s, model.digest)


class _Ranks:
    """The processes of a run: the initial ones, and those that joined."""

    def __init__(self, main: Main, world: VirtualWorld) -> None:
        self.world = world
        self._main = main
        self._outside: set[int] = set()  # processes that were not admitted, and may never be
        self._tasks = {rank: asyncio.ensure_future(self._live(rank, comm)) for rank, comm in enumerate(world)}

    @property
    def living(self) -> list[int]:
        """Ranks that were not killed."""
        return sorted(self._tasks.keys() - self.world.dead)

    def kill(self, rank: int) -> None:
        """Kill a rank, unless its program has ended."""
        if rank in self._tasks and not self._tasks[rank].done():
            self.world.kill(rank)
            self._tasks[rank].cancel()

    def join(self, rank: int) -> None:
        """Start a process that asks to join."""
        self._outside.add(rank)
        self._tasks[rank] = asyncio.ensure_future(self._come(rank))

    async def end(self, until_s: float) -> None:
        """Wait until all admitted processes have ended; raises `Stuck` if they have not by then."""
        loop = asyncio.get_running_loop()
        while inside := {rank: one for rank, one in self._tasks.items() if not (one.done() or rank in self._outside)}:
            if loop.time() >= until_s:
                raise Stuck(f"ranks {sorted(inside)} have not come to their end in time")
            left_s = until_s - loop.time()
            await asyncio.wait(inside.values(), timeout=left_s, return_when=asyncio.FIRST_COMPLETED)

    def results(self) -> dict[int, Any]:
        """Results of the ranks that joined and were not killed."""
        return {rank: _result(self._tasks[rank]) for rank in self.living if rank not in self._outside}

    async def close(self, others: list[asyncio.Task[None]]) -> None:
        """End everything, and these tasks."""
        tasks = [*others, *self._tasks.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.world.close()

    async def _live(self, rank: int, comm: Communicator) -> Any:
        try:
            async with comm:
                return await self._main(comm)
        finally:
            self.world.ended(rank)

    async def _come(self, rank: int) -> Any:
        comm = await self.world.join(rank)
        self._outside.discard(rank)
        return await self._live(rank, comm)


def _result(task: asyncio.Future[Any]) -> Any:
    if task.cancelled():
        return asyncio.CancelledError()
    error = task.exception()
    return task.result() if error is None else error


def _told(context: dict[str, Any]) -> str:
    error = context.get("exception")
    return context["message"] if error is None else f"{context['message']}: {error!r}"


async def _happen(ranks: _Ranks, event: Event, lost_after_s: float) -> None:
    """Carry out the part of an event beyond the network."""
    await asyncio.sleep(event.at_s)
    match event:
        case Kill(rank):
            ranks.kill(rank)
        case Stop() | Partition():
            if event.for_s > lost_after_s:
                await asyncio.sleep(lost_after_s)
                _lose(ranks, event)
        case Join(rank):
            ranks.join(rank)
        case Resize(size):
            ranks.world.store.set_size(size)
        case Release(rank):
            await ranks.world.store.want_replaced(rank)
        case LostStore():
            await ranks.world.store.lose(event.for_s)
        case Delay() | SlowLink():
            pass


def _lose(ranks: _Ranks, event: Stop | Partition) -> None:
    """Declare ranks lost to each other after so long without a message between them."""
    living = ranks.living
    for one in living:
        for other in living:
            if isinstance(event, Stop):
                if other == event.rank != one:
                    ranks.world.lose(one, other, stopped=other)
            elif one < other and side_of(event, one) != side_of(event, other):
                ranks.world.lose(one, other)


MAX_DIGITS = 3
"""Times are rounded to so many digits at most, if the run fails then, too."""

Check: TypeAlias = Callable[[VirtualRun], object]
Planner: TypeAlias = Callable[[Random, int], Sequence[Event]]


def search_in_virtual_time(
    main: Main, size: int, check: Check, *, seeds: Iterable[int], plan: Planner = random_events, **options: Any
) -> int:
    """Run a program under the events of each seed, and check each run.

    The events of a failing run are reduced, and times rounded, as long as it fails; the error shows the rest.

    Args:
        main: see `run_in_virtual_time`.
        size: number of ranks in the beginning.
        check: raises an error for a faulty run.
        seeds: each is one run.
        plan: makes the events of a run, from chance and the size.
        **options: of `run_in_virtual_time`.

    Returns:
        The number of runs.

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
            # Few events with short times are what a reader can follow.
            events, error = _shrunk(events, error, trial)
            again = f"run_in_virtual_time(main, {size}, seed={seed}, events={events!r})"
            raise AssertionError(f"{type(error).__name__}: {error}\n{again}") from error
    return count


@dataclass(frozen=True, slots=True)
class _Trial:
    """Runs with one seed, under any events."""

    main: Main
    size: int
    check: Check
    seed: int
    options: dict[str, Any]

    def failure(self, events: Sequence[Event]) -> Exception | None:
        """Error of the check of a run with these events; None if it passes."""
        try:
            self.check(run_in_virtual_time(self.main, self.size, seed=self.seed, events=events, **self.options))
        except Exception as error:  # noqa: BLE001  whatever it is
            return error
        return None


def _shrunk(events: list[Event], error: Exception, trial: _Trial) -> tuple[list[Event], Exception]:
    """Return the simplest failing events that single changes lead to, and the failure."""
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
    """Yield the events without one of them, then with one time rounded."""
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
