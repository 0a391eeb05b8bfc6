"""A world of one on its own GPU: kfcomm beside NCCL called directly and torch.distributed over NCCL, in turns.

kfcomm and NCCL write into arrays that are there already, so that NCCL has something to do: it copies. torch works in
place.
"""

from __future__ import annotations

import asyncio
import gc
import math
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import cupy
import numpy as np

import kfcomm
from bench.gpu.device import Direct, Torch, filled, timed
from bench.gpu.figures import KFCOMM, RAW, TORCH, Row, Wanted
from kfcomm.bench.harness import loop_factory, rotated
from kfcomm.bench.workloads import WORKLOADS

WARMUP = 10
LITTLE_MORE = Wanted(extra_s=12e-6)
ONE_BY_ONE = Wanted(ratio=2.5)
AS_A_GRAPH = Wanted(ratio=0.5)

Work: TypeAlias = Callable[[], float]
"""Done once, it returns how many seconds it took."""


class WrongResultError(Exception):
    """A result is not what it must be: its time is worth nothing."""


class Arrays:
    """Arrays of one workload, and their all_reduces without kfcomm."""

    def __init__(self, shapes: Sequence[Sequence[int]], direct: Direct, torch: Torch | None) -> None:
        counts = [math.prod(shape) for shape in shapes]
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self.xs = [filled(count, number + 1) for number, count in enumerate(counts)]
        self.outs = [filled(count, 0) for count in counts]
        self.names = [f"{len(counts)}/{count}/{number}" for number, count in enumerate(counts)]
        self.triples = list(zip(self.xs, self.names, self.outs, strict=True))
        self._direct = direct
        self._torch = torch
        self._tensors = [] if torch is None else torch.tensors(counts)

    def others(self) -> dict[str, Work]:
        """The works of NCCL and of torch."""
        torch, tensors = self._torch, self._tensors
        works: dict[str, Work] = {
            RAW: partial(timed, partial(self._direct.all_reduce, self.xs, self.outs, self.stream), self.stream)
        }
        return works if torch is None else {**works, TORCH: partial(torch.all_reduce, tensors)}

    def spoil(self) -> None:
        """Overwrite the results."""
        for out in self.outs:
            out.data.memset_async(0xFF, out.nbytes, self.stream)
        self.stream.synchronize()

    def check(self) -> None:
        """Raise `WrongResultError` unless the results are right."""
        for number, (x, out) in enumerate(zip(self.xs, self.outs, strict=True)):
            if not np.array_equal(out.get(), x.get()):
                raise WrongResultError(f"result {number} of {len(self.xs)} is wrong")


def in_turns(arrays: Arrays, mine: Work, rounds: int) -> dict[str, list[float]]:
    """Seconds of each, by round; who comes first changes from round to round."""
    works = {KFCOMM: mine, **arrays.others()}
    times_s: dict[str, list[float]] = {name: [] for name in works}
    gc.collect()
    for number in range(WARMUP + rounds):
        for name in rotated(list(works), number):
            times_s[name].append(works[name]())
    arrays.spoil()
    mine()
    arrays.check()
    return {name: times[WARMUP:] for name, times in times_s.items()}


def rows(scale: float) -> list[Row]:
    """All rows of a world of one; ``scale``: of the number of rounds.

    Raises:
        WrongResultError: a result is wrong, or did not go through NCCL.
    """
    direct = Direct()
    with tempfile.TemporaryDirectory(prefix="kfcomm-bench-") as folder:
        torch = Torch("nccl", str(Path(folder) / "meeting")) if Torch.is_here() else None
        workloads = [Arrays(shapes, direct, torch) for shapes in ([(256,)], [(1 << 24,)], WORKLOADS["resnet50"]())]
        try:
            return [*_awaited(workloads, scale), *_blocking(workloads, scale)]
        finally:
            direct.close()
            if torch is not None:
                torch.close()


def _by_name(workloads: Sequence[Arrays], how: str, work_of: Callable[[Arrays], Work], scale: float) -> list[Row]:
    """The rows of named calls of each workload."""
    titles = (
        ("1 KiB by name", 500, LITTLE_MORE),
        ("64 MiB by name", 200, LITTLE_MORE),
        ("214 gradients by name", 40, ONE_BY_ONE),
    )
    return [
        Row(f"{title}, {how}", in_turns(arrays, work_of(arrays), _scaled(rounds, scale)), RAW, wanted)
        for arrays, (title, rounds, wanted) in zip(workloads, titles, strict=True)
    ]


def _scaled(rounds: int, scale: float) -> int:
    return max(2, round(rounds * scale))


def _awaited(workloads: Sequence[Arrays], scale: float) -> list[Row]:
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        comm = runner.run(_joined())
        try:

            def calls(arrays: Arrays) -> Work:
                return lambda: runner.run(_calls(comm, arrays))

            gradients = workloads[-1]
            found = _by_name(workloads, "awaited", calls, scale)
            given = dict(zip(gradients.names, gradients.xs, strict=True))
            out = dict(zip(gradients.names, gradients.outs, strict=True))
            with gradients.stream:
                batch = comm.all_reduce_many_init(given, "batch", out=out)
            for title, begin, wanted in (
                ("214 gradients by all_reduce_many", partial(comm.all_reduce_many, given, "many", out=out), Wanted()),
                ("214 gradients, a persistent batch", batch.start, AS_A_GRAPH),
            ):
                work = _awaiting(runner, begin, gradients)
                found.append(Row(title, in_turns(gradients, work, _scaled(40, scale)), RAW, wanted))
            return found
        finally:
            runner.run(comm.close())


async def _joined() -> kfcomm.Communicator:
    comm = await kfcomm.init(device="cuda:0")
    _check_route(comm)
    return comm


async def _calls(comm: kfcomm.Communicator, arrays: Arrays) -> float:
    arrays.stream.synchronize()
    begun_s = time.perf_counter()
    with arrays.stream:
        handles = [comm.all_reduce(x, name, out=out) for x, name, out in arrays.triples]
    for handle in handles:
        await handle
    arrays.stream.synchronize()
    return time.perf_counter() - begun_s


def _awaiting(runner: asyncio.Runner, begin: Callable[[], Awaitable[Any]], arrays: Arrays) -> Work:
    return lambda: runner.run(_call(begin, arrays))


async def _call(begin: Callable[[], Awaitable[Any]], arrays: Arrays) -> float:
    arrays.stream.synchronize()
    begun_s = time.perf_counter()
    with arrays.stream:
        handle = begin()
    await handle
    arrays.stream.synchronize()
    return time.perf_counter() - begun_s


def _blocking(workloads: Sequence[Arrays], scale: float) -> list[Row]:
    with kfcomm.sync.init(device="cuda:0") as comm:
        _check_route(comm)

        def calls(arrays: Arrays) -> None:
            with arrays.stream:
                for x, name, out in arrays.triples:
                    comm.all_reduce(x, name, out=out)

        return _by_name(
            workloads, "blocking", lambda arrays: partial(timed, partial(calls, arrays), arrays.stream), scale
        )


def _check_route(comm: Any) -> None:
    choice = comm.route
    if comm.size != 1 or choice is None or choice.route != "backend":
        raise WrongResultError(f"this is not a world of one through NCCL: {comm.size} ranks, {choice}")
