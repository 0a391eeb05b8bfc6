"""Measurement on every rank: the cases one after the other, timed together, every result compared.

An iteration begins with a barrier and is timed on each rank, by the clock of the memory where the arrays are; its time
is that of the slowest. Results are checked after every iteration, outside of the time. If one is wrong on any rank, all
ranks raise.
"""

from __future__ import annotations

import asyncio
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import numpy as np

import kfcomm.sync
from kfcomm.bench.harness import describe_host, loop_factory
from kfcomm.bench.load import BenchLoad, LoadedCall
from kfcomm.bench.memory import BenchMemory, HostBenchMemory, described, memory_of
from kfcomm.bench.suite import (
    Begun,
    BenchPlace,
    BenchResult,
    CallMode,
    Case,
    Emit,
    Failed,
    MeasuredCase,
    Starting,
    Suite,
)
from kfcomm.engine.session import Session
from kfcomm.errors import ConfigError, KfcommError
from kfcomm.joining import init
from kfcomm.rendezvous.host import host_and_port, store_url
from kfcomm.rendezvous.settings import detect
from kfcomm.types import Layout, override


class WrongResult(KfcommError):
    """A collective gave a wrong result, or changed its input, on some rank. Raised on every rank."""


def run_rank(suite: Suite, emit: Emit) -> int:
    """Run this process's part; return its exit code: 2 for wrong settings, 1 for a failure, 130 if interrupted."""
    try:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(run(suite, emit))
    except WrongResult:
        return 1  # rank 0 has reported it
    except KeyboardInterrupt:
        return 130
    except KfcommError as error:
        sys.stderr.write(f"kfcomm: error: {error}\n")
        return 2 if isinstance(error, ConfigError) else 1
    return 0


async def run(suite: Suite, emit: Emit) -> None:
    """Measure all cases among the ranks of this world; rank 0 reports them by ``emit``.

    Raises:
        ConfigError: the suite cannot work among so many ranks, or the settings of the process do not.
        WrongResult: a result was wrong; ``emit`` has reported it.
        KfcommError: the ranks could not join, or a collective failed.
    """
    for number, transport in enumerate(suite.transports):
        async with opened(suite, transport, number) as caller:
            suite.check(caller.size)
            cases = suite.cases(caller.size)
            # The hosts are the same in each world: reported once.
            if number == 0:
                hosts = await _hosts(caller)
                _tell(caller, emit, Begun(caller.size, len(cases), hosts, _devices(caller, suite)))
            mine = [case for case in cases if case.transport == transport]
            await measure(caller, mine, emit, memory_of(suite.device, caller.session.devices.device, caller.empty))


async def measure(caller: Caller, cases: list[Case], emit: Emit, memory: BenchMemory | None = None) -> None:
    """Measure the cases in the world of ``caller``, on arrays in ``memory``, of the host by default.

    Raises:
        WrongResult: as from `run`.
    """
    memory, strategy = memory or HostBenchMemory(), None
    for case in cases:
        _tell(caller, emit, Starting(case))
        # Cases of one strategy follow each other; a change is a collective of all ranks.
        if case.strategy != strategy:
            strategy = case.strategy
            await caller.do("set_strategy", strategy)
        _tell(caller, emit, MeasuredCase(await _measured(caller, case, memory, emit)))


async def _measured(caller: Caller, case: Case, memory: BenchMemory, emit: Emit) -> BenchResult:
    load, stopwatch = BenchLoad.of(case, caller.rank, caller.size, memory), memory.stopwatch()
    run_once = caller.prepared(load.calls, case.mode)
    times_s = np.empty(case.warmup + case.iterations)
    fault = None
    for number in range(len(times_s)):
        load.spoil()
        # All ranks begin together, so that no rank's time contains another rank's check of its results.
        await caller.do("barrier")
        stopwatch.start()
        results = await run_once()
        times_s[number] = await stopwatch.elapsed_s()
        # Kept, not raised: a rank that left the loop here would leave the others waiting in the next barrier.
        fault = fault or load.fault(results)
    await _agree(caller, case, fault or load.input_fault(), emit)
    slowest = await caller.do("all_reduce", times_s[case.warmup :], op="max")
    return BenchResult(case, caller.size, tuple(slowest.tolist()))


async def _agree(caller: Caller, case: Case, fault: str | None, emit: Emit) -> None:
    """Raise on every rank if there is a fault on any, after rank 0 has reported it."""
    faults = await caller.do("all_gather_object", fault)
    found = [f"rank {rank}: {each}" for rank, each in enumerate(faults) if each is not None]
    if not found:
        return
    message = f"wrong result of {case.describe()}: {'; '.join(found)}"
    _tell(caller, emit, Failed(message))
    # The launcher ends all ranks when the first has failed: rank 0 writes its report before that.
    await caller.do("barrier")
    raise WrongResult(message)


async def _hosts(caller: Caller) -> tuple[dict[str, Any], ...]:
    """Description of each host, with the ranks on it."""
    layout: Layout = caller.layout
    described = await caller.do("all_gather_object", describe_host())
    return tuple({"ranks": layout.ranks_of(host), **described[master]} for host, master in enumerate(layout.masters))


def _devices(caller: Caller, suite: Suite) -> dict[str, Any] | None:
    """The devices in the report; None where arrays are on the hosts."""
    if not suite.is_on_device:
        return None
    return described(caller.session.devices.reports, caller.layout, suite.transports)


def _tell(caller: Caller, emit: Emit, event: Any) -> None:
    if caller.rank == 0:
        emit(event)


Run = Callable[[], Awaitable[Sequence[Any]]]


class Caller(ABC):
    """The world of one rank, through one of the interfaces: coroutines, which never wait for the blocking one."""

    def __init__(self, comm: Any, session: Session) -> None:
        self.rank: int = comm.rank
        self.size: int = comm.size
        self.layout: Layout = comm.layout
        self.session = session  # its ``devices`` are those of the ranks
        self._comm = comm

    def empty(self, shape: Any, dtype: Any) -> Any:
        """Make an array in symmetric memory, as ``Communicator.empty`` does."""
        return self._comm.empty(shape, dtype)

    def prepared(self, calls: Sequence[LoadedCall], mode: CallMode | None) -> Run:
        """Return a function that makes the calls once, in order; ``mode``: whether each waits for the one before."""
        makers = {
            CallMode.FUSED: self._fused,
            CallMode.ALL_AT_ONCE: self._all_at_once,
            CallMode.ONE_BY_ONE: self._one_by_one,
        }
        return makers[mode or CallMode.ONE_BY_ONE](calls)

    def _bound(self, calls: Sequence[LoadedCall], suffix: str = "") -> list[Callable[[], Any]]:
        return [partial(getattr(self._comm, f"{call.verb}{suffix}"), **call.arguments) for call in calls]

    def _many(self, calls: Sequence[LoadedCall]) -> Callable[[], Any]:
        """All calls as one ``all_reduce_many``, whose results have memory of their own."""
        return partial(self._comm.all_reduce_many, {call.name: call.x for call in calls}, **calls[0].options)

    @abstractmethod
    async def do(self, verb: str, *arguments: Any, **options: Any) -> Any:
        """Make any call of the communicator, and return its result."""

    @abstractmethod
    def _one_by_one(self, calls: Sequence[LoadedCall]) -> Run: ...

    @abstractmethod
    def _all_at_once(self, calls: Sequence[LoadedCall]) -> Run: ...

    @abstractmethod
    def _fused(self, calls: Sequence[LoadedCall]) -> Run: ...


class AsyncCaller(Caller):
    """The verbs of ``kfcomm.Communicator``, which are begun and then awaited."""

    def __init__(self, comm: Any) -> None:
        super().__init__(comm, comm._session)

    @override
    async def do(self, verb: str, *arguments: Any, **options: Any) -> Any:
        return await getattr(self._comm, verb)(*arguments, **options)

    def _one_by_one(self, calls: Sequence[LoadedCall]) -> Run:
        begins = self._bound(calls)

        async def run() -> Sequence[Any]:
            return [await begin() for begin in begins]

        return run

    def _all_at_once(self, calls: Sequence[LoadedCall]) -> Run:
        begins = self._bound(calls)

        async def run() -> Sequence[Any]:
            handles = [begin() for begin in begins]
            return [await handle for handle in handles]

        return run

    def _fused(self, calls: Sequence[LoadedCall]) -> Run:
        many = self._many(calls)

        async def run() -> Sequence[Any]:
            return [*(await many()).values()]

        return run


class BlockingCaller(Caller):
    """The verbs of ``kfcomm.sync.Communicator``, which return when they are done."""

    def __init__(self, comm: Any) -> None:
        super().__init__(comm, comm._inner._session)

    @override
    async def do(self, verb: str, *arguments: Any, **options: Any) -> Any:
        return getattr(self._comm, verb)(*arguments, **options)

    def _one_by_one(self, calls: Sequence[LoadedCall]) -> Run:
        verbs = self._bound(calls)

        async def run() -> Sequence[Any]:
            return [verb() for verb in verbs]

        return run

    def _all_at_once(self, calls: Sequence[LoadedCall]) -> Run:
        begins = self._bound(calls, "_async")

        async def run() -> Sequence[Any]:
            handles = [begin() for begin in begins]
            return [handle.wait() for handle in handles]

        return run

    def _fused(self, calls: Sequence[LoadedCall]) -> Run:
        many = self._many(calls)

        async def run() -> Sequence[Any]:
            return [*many().values()]

        return run


@asynccontextmanager
async def opened(suite: Suite, transport: str, number: int) -> AsyncIterator[Caller]:
    """Join the world of this process over one kind of links, for the ``number``-th time.

    Raises:
        ConfigError, RendezvousError: as from ``kfcomm.init``.
    """
    device, (store, token) = _device(suite.device), _store(number)
    if suite.blocking:
        with kfcomm.sync.init(transport=transport, device=device, store=store, token=token) as comm:
            yield BlockingCaller(comm)
    else:
        async with init(transport=transport, device=device, store=store, token=token) as comm:
            yield AsyncCaller(comm)


def _device(place: BenchPlace) -> str:
    """The device to ask for: none unless arrays are on it, so that no library is loaded."""
    if place is not BenchPlace.GPU:
        return "none"
    asked = detect(os.environ).device
    return "cuda" if asked in ("auto", "none") else asked


def _store(number: int) -> tuple[str | None, bytes | None]:
    """Store and token of the world; None for those of the environment."""
    settings = detect(os.environ)
    if settings.store is None or not settings.serve:
        return None, None
    host, port = host_and_port(settings.store)
    # A store that rank 0 serves ends with its world. Each is served at a port of its own, so that an early rank of the
    # next world does not join the store of the last one.
    return store_url(host, port + number), settings.token
