"""Processes that share one GPU: what goes through memory of the host, in turns with what that is made of, alone.

    python -m bench.gpu.shared --nbytes N --rounds N        (a rank, under kfcomm run)

Each round does five things, in an order that moves on by one from round to round; all ranks begin each of them
together, and its time is that of the slowest:

- ``device``: an all_reduce of arrays on the device;
- ``host``: the same all_reduce of arrays on the host, along the same links;
- ``fetch``, ``put``: as many bytes as the array has are copied from the device, or to it, by pinned memory;
- ``copies``: both at once, on two streams.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

import cupy
import numpy as np

import kfcomm
from bench import ROOT
from bench.compare.world import inherited
from bench.gpu.device import filled
from kfcomm.bench.harness import rotated, run_on_loop

WARMUP = 3
PATIENCE_S = 150.0
"""For the whole run of one world."""


class SharedError(Exception):
    """The processes failed; the text has the end of what they said."""


class Works:
    """The five works of one rank."""

    def __init__(self, comm: kfcomm.Communicator, nbytes: int) -> None:
        count = nbytes // 4
        self._comm = comm
        self._nbytes = nbytes
        self._x, self._out = filled(count, comm.rank + 1), filled(count, 0)
        self._host_x, self._host_out = np.full(count, comm.rank + 1, np.float32), np.zeros(count, np.float32)
        self._pinned = [cupy.cuda.alloc_pinned_memory(nbytes) for _ in range(2)]
        self._streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
        self.all: dict[str, Callable[[], Awaitable[None]]] = {
            "device": self._device, "host": self._host, "fetch": self._fetch, "put": self._put, "copies": self._copies,
        }  # fmt: skip

    async def _device(self) -> None:
        stream = self._streams[0]
        with stream:
            handle = self._comm.all_reduce(self._x, "device", out=self._out)
        await handle
        await asyncio.to_thread(stream.synchronize)

    async def _host(self) -> None:
        await self._comm.all_reduce(self._host_x, "host", out=self._host_out)

    async def _fetch(self) -> None:
        self._begin_fetch()
        await asyncio.to_thread(self._streams[0].synchronize)

    async def _put(self) -> None:
        self._begin_put()
        await asyncio.to_thread(self._streams[1].synchronize)

    async def _copies(self) -> None:
        self._begin_fetch()
        self._begin_put()
        await asyncio.to_thread(self._streams[0].synchronize)
        await asyncio.to_thread(self._streams[1].synchronize)

    def _begin_fetch(self) -> None:
        runtime, (target, _) = cupy.cuda.runtime, self._pinned
        runtime.memcpyAsync(
            target.ptr, self._x.data.ptr, self._nbytes, runtime.memcpyDeviceToHost, self._streams[0].ptr
        )

    def _begin_put(self) -> None:
        runtime, (_, source) = cupy.cuda.runtime, self._pinned
        runtime.memcpyAsync(
            self._out.data.ptr, source.ptr, self._nbytes, runtime.memcpyHostToDevice, self._streams[1].ptr
        )

    async def fault(self) -> str:
        """Describe what is wrong with the results of both all_reduces; empty if they are right."""
        total = self._comm.size * (self._comm.size + 1) / 2
        self._host_out.fill(np.nan)
        await self._device()
        await self._host()
        wrong = [name for name, y in (("device", self._out.get()), ("host", self._host_out)) if not np.all(y == total)]
        return ", ".join(wrong)


async def member(options: argparse.Namespace) -> None:
    """One rank; rank 0 prints the times of all rounds."""
    async with kfcomm.init() as comm:
        works = Works(comm, options.nbytes)
        times_s: dict[str, list[float]] = {name: [] for name in works.all}
        for number in range(WARMUP + options.rounds):
            for name in rotated(list(works.all), number):
                await comm.barrier("begin")
                begun_s = time.perf_counter()
                await works.all[name]()
                times_s[name].append(time.perf_counter() - begun_s)
        slowest = await comm.all_reduce(np.array([*times_s.values()])[:, WARMUP:], op="max")
        faults = await comm.all_gather_object(await works.fault())
        if any(faults):
            raise SystemExit(f"wrong results, by rank: {faults}")
        if comm.rank == 0:
            found = dict(zip(times_s, slowest.tolist(), strict=True))
            print(json.dumps({"route": str(comm.route), "times_s": found}), flush=True)


def measure(num_ranks: int, transport: str, nbytes: int, rounds: int) -> dict[str, Any]:
    """Run the works in processes on the first GPU; returns the times of every round, by work, and the route.

    Raises:
        SharedError: they failed, or took too long.
    """
    run = [sys.executable, "-m", "kfcomm", "run", "-n", str(num_ranks), "--device", "cuda:0", "--transport", transport]
    program = [sys.executable, "-m", "bench.gpu.shared", "--nbytes", str(nbytes), "--rounds", str(rounds)]
    try:
        done = subprocess.run(
            [*run, *program], cwd=ROOT, env=inherited(), capture_output=True, text=True, timeout=PATIENCE_S
        )
    except subprocess.TimeoutExpired as error:
        raise SharedError(f"{num_ranks} processes over {transport} did not end within {PATIENCE_S:.0f} s") from error
    if done.returncode:
        tail = done.stderr.splitlines()[-15:]
        raise SharedError("\n  ".join([f"{num_ranks} processes over {transport} failed:", *tail]))
    found: dict[str, Any] = json.loads(done.stdout[done.stdout.index("{") :])
    if "staged" not in found["route"]:
        raise SharedError(f"{num_ranks} processes took another way than through the host: {found['route']}")
    return found


def main() -> None:
    """A rank."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nbytes", type=int, default=64 << 20)
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    run_on_loop(member(options))


if __name__ == "__main__":
    main()
