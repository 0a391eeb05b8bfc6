"""Measurement on every rank: the cases one after the other, timed together, every result compared.

An iteration begins with a barrier and is timed on each rank, by the clock of the memory where the arrays are; its time
is that of the slowest. Results are checked after every iteration, outside of the time. If one is wrong on any rank, all
ranks raise.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import numpy as np

from kfcomm.bench import machine
from kfcomm.bench.caller import Caller, opened
from kfcomm.bench.devices import described, memory_of
from kfcomm.bench.events import Begun, Emit, Failed, Measured, Starting
from kfcomm.bench.figures import Result
from kfcomm.bench.harness import loop_factory
from kfcomm.bench.load import Load
from kfcomm.bench.memory import HostMemory, Memory
from kfcomm.bench.suite import Case, Suite
from kfcomm.errors import ConfigError, KfcommError
from kfcomm.types import Layout


class WrongResult(KfcommError):
    """A collective gave a wrong result, or changed its input, on some rank. Raised on every rank."""


def run_rank(suite: Suite, emit: Emit) -> int:
    """Run this process's part of the benchmark.

    Returns:
        Its exit code: 2 for wrong settings, 1 for another failure, 130 if it was interrupted.
    """
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
            if number == 0:
                hosts = await _hosts(caller)
                _tell(caller, emit, Begun(caller.size, len(cases), hosts, _devices(caller, suite)))
            mine = [case for case in cases if case.transport == transport]
            await measure(caller, mine, emit, memory_of(suite.device, caller.session.devices.device, caller.empty))


async def measure(caller: Caller, cases: list[Case], emit: Emit, memory: Memory | None = None) -> None:
    """Measure the cases in the world of ``caller``, on arrays in ``memory``, of the host by default.

    Raises:
        WrongResult: as from `run`.
    """
    memory, strategy = memory or HostMemory(), None
    for case in cases:
        _tell(caller, emit, Starting(case))
        # Cases of one strategy follow each other; a change is a collective of all ranks.
        if case.strategy != strategy:
            strategy = case.strategy
            await caller.do("set_strategy", strategy)
        _tell(caller, emit, Measured(await _measured(caller, case, memory, emit)))


async def _measured(caller: Caller, case: Case, memory: Memory, emit: Emit) -> Result:
    load, stopwatch = Load.of(case, caller.rank, caller.size, memory), memory.stopwatch()
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
    return Result(case, caller.size, tuple(slowest.tolist()))


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
    described = await caller.do("all_gather_object", machine.describe())
    return tuple({"ranks": layout.ranks_of(host), **described[master]} for host, master in enumerate(layout.masters))


def _devices(caller: Caller, suite: Suite) -> dict[str, Any] | None:
    """The devices in the report; None where arrays are on the hosts."""
    if not suite.is_on_device:
        return None
    return described(caller.session.devices.reports, caller.layout, suite.transports)


def _tell(caller: Caller, emit: Emit, event: Any) -> None:
    if caller.rank == 0:
        emit(event)
