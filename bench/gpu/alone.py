"""A world of one on its own GPU: kfcomm beside direct calls of NCCL, on the same stream, in turns.

Both write into arrays that are there already, so that NCCL has something to do: it copies. Time is taken by events on
the caller's stream, and so has in it what the host does before the device can begin.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Sequence

import cupy
import numpy as np

import kfcomm
from bench.gpu.device import Clock, Direct, filled, timed
from bench.gpu.figures import Row, Wanted
from kfcomm.bench.workloads import WORKLOADS

LARGE_NBYTES = 64 << 20
WARMUP = 5
AT_MOST_FOR_ONE = Wanted(ratio=1.05, extra_s=20e-6)
AT_MOST_FOR_MANY = Wanted(ratio=1.15)


class WrongResultError(Exception):
    """A result is not what it must be: its time is worth nothing."""


async def rows(*, one_pairs: int, many_pairs: int) -> list[Row]:
    """Both rows, of so many pairs each.

    Raises:
        WrongResultError: a result is wrong, or did not go through NCCL.
    """
    async with kfcomm.init(device="cuda:0") as comm:
        choice = comm.route
        if comm.size != 1 or choice is None or choice.route != "backend":
            raise WrongResultError(f"this is not a world of one through NCCL: {comm.size} ranks, {choice}")
        direct = Direct()
        try:
            one = Pairs(comm, direct, [(LARGE_NBYTES // 4,)])
            many = Pairs(comm, direct, WORKLOADS["resnet50"]())
            return [
                Row(
                    "world of one, all_reduce of 64 MiB", "NCCL called directly", AT_MOST_FOR_ONE,
                    await one.measured(one_pairs), about={"nbytes": LARGE_NBYTES},
                ),
                Row(
                    "world of one, 214 gradients by name", "a loop of direct calls of NCCL", AT_MOST_FOR_MANY,
                    await many.measured(many_pairs), about={"tensors": len(many.xs), "nbytes": many.nbytes},
                ),
            ]  # fmt: skip
        finally:
            direct.close()


class Pairs:
    """The same arrays, reduced by kfcomm and by NCCL called directly."""

    def __init__(self, comm: kfcomm.Communicator, direct: Direct, shapes: Sequence[Sequence[int]]) -> None:
        self.xs = [filled(math.prod(shape), number + 1) for number, shape in enumerate(shapes)]
        self.nbytes = sum(x.nbytes for x in self.xs)
        self._outs = [filled(x.size, 0) for x in self.xs]
        self._names = [f"gradient/{number}" for number in range(len(self.xs))]
        self._comm = comm
        self._direct = direct
        self._stream = cupy.cuda.Stream(non_blocking=True)
        self._clock = Clock(self._stream)

    async def measured(self, num_pairs: int) -> tuple[tuple[float, float], ...]:
        """Seconds of kfcomm and of NCCL; who comes first changes from pair to pair."""
        pairs = []
        gc.collect()
        for number in range(WARMUP + num_pairs):
            if number % 2:
                floor_s = timed(self._clock, self._directly)
                taken_s = await self._by_kfcomm()
            else:
                taken_s = await self._by_kfcomm()
                floor_s = timed(self._clock, self._directly)
            pairs.append((taken_s, floor_s))
        for out in self._outs:
            out.data.memset_async(0xFF, out.nbytes, self._stream)
        await self._by_kfcomm()
        self._check()
        return tuple(pairs[WARMUP:])

    async def _by_kfcomm(self) -> float:
        begin = self._comm.all_reduce
        self._clock.start()
        with self._stream:
            handles = [begin(x, name, out=out) for x, name, out in zip(self.xs, self._names, self._outs, strict=True)]
        for handle in handles:
            await handle
        return self._clock.elapsed_s()

    def _directly(self) -> None:
        for x, out in zip(self.xs, self._outs, strict=True):
            self._direct.all_reduce(x, out, self._stream)

    def _check(self) -> None:
        for number, out in enumerate(self._outs):
            if not np.array_equal(out.get(), self.xs[number].get()):
                raise WrongResultError(f"tensor {number} of {len(self.xs)} is wrong")
