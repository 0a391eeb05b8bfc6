"""Worlds that a test directs: it gives a function to every rank, and gets the outcomes by rank.

One interface over ranks that are tasks, threads or processes, so that a test chooses by its mark. ``run`` is for
functions that should succeed, ``outcomes`` for those that should fail somewhere. For asynchronous tests both are
awaited.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Any

from kfcomm.testing.faults import FaultKind, FaultPlan, Killed, watched
from kfcomm.testing.processes import ProcessWorld, process_world
from kfcomm.testing.worlds import MemoryWorld, SyncWorld, run_ranks, run_threads, sync_world, world


class _InOneProcess(Sequence[Any]):
    """The communicators of all ranks, by rank; the test may call them itself."""

    def __init__(self, comms: MemoryWorld | SyncWorld, faults: FaultPlan) -> None:
        faults.check(len(comms), ("kill", "unplug"))
        self._plan = faults
        self._plain = comms
        self._comms = [watched(comm, faults.of(comm.rank), partial(self._strike, comm.rank)) for comm in comms]

    def __getitem__(self, rank: Any) -> Any:
        return self._comms[rank]

    def __len__(self) -> int:
        return len(self._comms)

    def kill(self, rank: int) -> None:
        """Kill ``rank`` in the view of the other ranks: its links break, and they hear of it."""
        self._plain.kill(rank)

    def unplug(self, rank: int) -> None:
        """Break every open link of ``rank``, which lives; new links can be opened."""
        self._plain.unplug(rank)

    def _strike(self, rank: int, kind: FaultKind) -> None:
        if kind == "unplug":
            self.unplug(rank)
        else:
            self.kill(rank)
            raise Killed(f"rank {rank} was killed by the plan")


class TaskWorld(_InOneProcess):
    """Ranks on the loop of an asynchronous test."""

    async def run(self, function: Callable[..., Awaitable[Any]], *args: Any) -> list[Any]:
        """``function(comm, *args)`` on every rank at once; the results by rank, None for one that was killed.

        Raises:
            Exception: the first error of a rank that was not killed.
        """
        if self._plan.faults:
            # `run_ranks` would end all others with the first rank that is killed.
            return _results(await self.outcomes(function, *args))
        return await run_ranks(self, lambda comm: function(comm, *args))

    async def outcomes(self, function: Callable[..., Awaitable[Any]], *args: Any) -> list[Any]:
        """As `run`, with the errors of the ranks in place of results: `Killed` for one that was killed."""

        async def one(comm: Any) -> Any:
            return await function(comm, *args)

        return await asyncio.gather(*map(one, self), return_exceptions=True)


class ThreadWorld(_InOneProcess):
    """Ranks on threads, with the blocking interface."""

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Run ``function(comm, *args)`` on every rank, as `TaskWorld.run`."""
        if self._plan.faults:
            return _results(self.outcomes(function, *args))
        return run_threads(self, lambda comm: function(comm, *args))

    def outcomes(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Results or errors of ``function(comm, *args)``, by rank, as `TaskWorld.outcomes`."""
        with ThreadPoolExecutor(len(self), thread_name_prefix="kfcomm-rank") as pool:
            ranks = [pool.submit(function, comm, *args) for comm in self]
        return [rank.exception() or rank.result() for rank in ranks]


class _InProcesses:
    """Ranks that are processes of this host; functions are sent to them by name, arguments and results by pickle."""

    def __init__(self, processes: ProcessWorld) -> None:
        self._processes = processes
        self.pid = processes.pid
        self.kill = processes.kill
        self.stop = processes.stop

    def __len__(self) -> int:
        return len(self._processes)


class AwaitedProcesses(_InProcesses):
    """Processes with the asynchronous interface, for an asynchronous test."""

    async def run(self, function: Callable[..., Awaitable[Any]], *args: Any) -> list[Any]:
        """Run ``function(comm, *args)`` on every rank, as `TaskWorld.run`. After an error the world is over."""
        return _results(await self.outcomes(function, *args))

    async def outcomes(self, function: Callable[..., Awaitable[Any]], *args: Any) -> list[Any]:
        """Results or errors of ``function(comm, *args)``, by rank, as `TaskWorld.outcomes`."""
        self._processes.begin(function, args)
        return await self._said()

    async def _said(self) -> list[Any]:
        return await asyncio.gather(*map(self._processes.soon, range(len(self))))


class BlockingProcesses(_InProcesses):
    """Processes with the blocking interface, for a test without an event loop."""

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Run ``function(comm, *args)`` on every rank, as `TaskWorld.run`. After an error the world is over."""
        return _results(self.outcomes(function, *args))

    def outcomes(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Results or errors of ``function(comm, *args)``, by rank, as `TaskWorld.outcomes`."""
        self._processes.begin(function, args)
        return self._said()

    def _said(self) -> list[Any]:
        return [*map(self._processes.outcome, range(len(self)))]


def _joined(outcomes: list[Any]) -> None:
    for rank, outcome in enumerate(outcomes):
        if isinstance(outcome, Killed):
            raise RuntimeError(f"the process of rank {rank} ended before it had joined")
        if outcome is not None:
            raise outcome


def _results(outcomes: list[Any]) -> list[Any]:
    for outcome in outcomes:
        if isinstance(outcome, BaseException) and not isinstance(outcome, Killed):
            raise outcome
    return [None if isinstance(outcome, Killed) else outcome for outcome in outcomes]


@asynccontextmanager
async def awaited_world(
    ranks: int, *, processes: bool = False, faults: FaultPlan | None = None, **options: Any
) -> AsyncIterator[TaskWorld | AwaitedProcesses]:
    """A world for an asynchronous test: see `kfcomm.testing.pytest_plugin`."""
    faults = faults or FaultPlan()
    if processes:
        with process_world(ranks, faults, is_blocking=False, **options) as started:
            made = AwaitedProcesses(started)
            _joined(await made._said())
            yield made
    else:
        async with world(ranks, **options) as comms:
            yield TaskWorld(comms, faults)


@contextmanager
def blocking_world(
    ranks: int, *, processes: bool = False, faults: FaultPlan | None = None, **options: Any
) -> Iterator[ThreadWorld | BlockingProcesses]:
    """A world for a test without an event loop: see `kfcomm.testing.pytest_plugin`."""
    faults = faults or FaultPlan()
    if processes:
        with process_world(ranks, faults, is_blocking=True, **options) as started:
            made = BlockingProcesses(started)
            _joined(made._said())
            yield made
    else:
        with sync_world(ranks, **options) as comms:
            yield ThreadWorld(comms, faults)
