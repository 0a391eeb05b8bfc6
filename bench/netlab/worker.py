"""A program that times all_reduce step by step.

::

    python -m bench.netlab run --hosts 8 --rate 200mbit -- python -m bench.netlab.worker ring:32MiB star:2MiB

Each step is a strategy and a size: all ranks meet, and then each times one all_reduce of float32, from its call to its
result, which is compared with the right one afterwards. A strategy is a name, or ``module:function`` for one that is
made from what can be measured: the coroutine function is called once on each rank, with the communicator, before the
first step, and returns a ``Strategy``; ``gloo`` is torch's all_reduce.

With ``--output`` each rank writes ``rank-R.json``: its times by the monotonic clock, which the ranks of one machine
share. With ``--conductor``, rank 0 says there which step is next and waits for a line: the listener may change the
network in between.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

import kfcomm
from bench.netlab.rivals import GLOO, Gloo
from bench.netlab.steps import Step
from kfcomm.bench.harness import run_on_loop
from kfcomm.strategies import Strategy

Array = np.ndarray[Any, np.dtype[np.float32]]
_PERIOD = 1000


@dataclass(frozen=True, slots=True)
class Time:
    """One step on one rank.

    Attributes:
        start_s: of the call, by the monotonic clock.
        end_s: of its result.
        cpu_s: processor time of the process meanwhile.
    """

    start_s: float
    end_s: float
    cpu_s: float


class Worker:
    """One rank, and the arrays that it keeps for all steps of one size."""

    def __init__(self, comm: kfcomm.Communicator) -> None:
        self._comm = comm
        self._arrays: dict[int, tuple[Array, Array]] = {}
        self._strategies: dict[str, str | Strategy] = {}
        self._is_set = comm.strategy.name  # set anew only for another one, so that `auto` can improve itself
        self._gloo = Gloo(comm)

    async def prepare(self, steps: Sequence[Step]) -> None:
        """Make the strategies that are not names, in the order in which they come up."""
        names = dict.fromkeys(step.strategy for step in steps)
        if GLOO in names:
            await self._gloo.prepare()
        for name in names:
            self._strategies[name] = await _function(name)(self._comm) if ":" in name else name

    async def do(self, step: Step, number: int) -> Time:
        """One step.

        Raises:
            RuntimeError: the result is wrong.
        """
        if step.strategy not in (GLOO, self._is_set):
            await self._comm.set_strategy(self._strategies[step.strategy])
            self._is_set = step.strategy
        given, result = self._of(step.nbytes)
        await self._comm.barrier("step")
        start_s, start_cpu_s = time.monotonic(), time.process_time()
        if step.strategy == GLOO:
            await self._gloo.all_reduce(given, result)
        else:
            await self._comm.all_reduce(given, "step", out=result)
        took = Time(start_s, time.monotonic(), time.process_time() - start_cpu_s)
        if not np.array_equal(result, numbers(step.nbytes, sum(range(1, self._comm.size + 1)))):
            raise RuntimeError(f"step {number}, {step}: rank {self._comm.rank} has a wrong result")
        return took

    def _of(self, nbytes: int) -> tuple[Array, Array]:
        if nbytes not in self._arrays:
            given = numbers(nbytes, self._comm.rank + 1)
            self._arrays[nbytes] = given, np.empty_like(given)
        return self._arrays[nbytes]


def numbers(nbytes: int, factor: int) -> Array:
    """Whole ones, small enough that their sums are exact in any order."""
    return np.arange(nbytes // 4, dtype=np.int32).__mod__(_PERIOD).astype(np.float32) * np.float32(factor)


def _function(name: str) -> Callable[[kfcomm.Communicator], Awaitable[Strategy]]:
    module, _, function = name.partition(":")
    found: Callable[[kfcomm.Communicator], Awaitable[Strategy]] = getattr(importlib.import_module(module), function)
    return found


@contextlib.asynccontextmanager
async def conducted(path: Path | None) -> AsyncIterator[Callable[[int], Awaitable[None]]]:
    """Yield a function to await before each step, with its number; with a path, the conductor there releases it."""
    if path is None:
        yield _at_once
        return
    reader, writer = await asyncio.open_unix_connection(path)

    async def ask(number: int) -> None:
        writer.write(f"{number}\n".encode())
        await reader.readline()

    try:
        yield ask
    finally:
        writer.close()
        await writer.wait_closed()


async def _at_once(number: int) -> None:
    """Begin without a conductor."""


async def main() -> None:
    """All steps of this rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("steps", nargs="+", type=Step.parse, metavar="STRATEGY:SIZE")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="where the times go; else rank 0 prints its own")
    parser.add_argument(
        "--conductor", type=Path, metavar="SOCKET", help="a Unix socket, asked by rank 0 before each step"
    )
    options = parser.parse_args()
    async with kfcomm.init() as comm:
        worker, times = Worker(comm), []
        await worker.prepare(options.steps)
        async with conducted(options.conductor if comm.rank == 0 else None) as ask:
            for number, step in enumerate(options.steps):
                await ask(number)
                times.append(await worker.do(step, number))
        if options.output is not None:
            record = {"rank": comm.rank, "size": comm.size, "times": [asdict(each) for each in times]}
            (options.output / f"rank-{comm.rank}.json").write_text(json.dumps(record))
        elif comm.rank == 0:
            for step, each in zip(options.steps, times, strict=True):
                print(f"{step!s:32} {(each.end_s - each.start_s) * 1e3:10.2f} ms")


if __name__ == "__main__":
    run_on_loop(main())
