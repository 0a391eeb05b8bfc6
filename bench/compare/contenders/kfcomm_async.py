"""kfcomm's asynchronous interface, on uvloop where it exists.

The loop runs during the turns only; between them the worker sleeps in its blocking read like all the others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import kfcomm
from bench.compare.contenders.base import Contender, Stopwatch, WrongResultError
from bench.compare.data import Array, Data, Tensors
from bench.compare.works import Mode
from kfcomm.bench.harness import loop_factory
from kfcomm.types import override


class Async(Contender):
    """The world that ``kfcomm run`` has made; links and strategy are its settings."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner(loop_factory=loop_factory())
        self._comm = self._runner.run(_joined())
        self.rank = self._comm.rank
        self.size = self._comm.size

    @override
    def turn(self, mode: Mode, data: Data, calls: int) -> Stopwatch:
        sets = data.prepare(calls)
        watch = self._runner.run(self._in_place(mode, sets))
        if not data.summed(calls):
            raise WrongResultError(f"{data.work.name}, {mode}: wrong sums on rank {self.rank}")
        return watch

    async def _in_place(self, mode: Mode, sets: list[Tensors]) -> Stopwatch:
        named = [_named(one.arrays) for one in sets]
        await self._comm.barrier("bench/meet")
        with Stopwatch() as watch:
            for items in named:
                match mode:
                    case Mode.ONE:
                        for name, array in items.items():
                            await self._comm.all_reduce(array, name, out=array)
                    case Mode.ALL:
                        await self._all(items)
                    case Mode.MANY:
                        await self._comm.all_reduce_many(items, out=items)
                    case _:
                        raise ValueError(f"no mode {mode}")
        await self._comm.barrier("bench/meet")
        return watch

    async def _all(self, items: Mapping[str, Array]) -> None:
        begin = self._comm.all_reduce
        for pending in [begin(array, name, out=array) for name, array in items.items()]:
            await pending

    @override
    def versions(self) -> dict[str, str]:
        return {"kfcomm": kfcomm.__version__, "loop": type(self._runner.get_loop()).__module__}

    @override
    def close(self) -> None:
        self._runner.run(self._comm.close())
        self._runner.close()


async def _joined() -> kfcomm.Communicator:
    return await kfcomm.init()


def _named(arrays: Sequence[Array]) -> dict[str, Array]:
    return {f"bench/{number}": array for number, array in enumerate(arrays)}
