"""kfcomm's blocking interface, as a program without an event loop uses it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import kfcomm
from bench.compare.contenders.base import Library, Stopwatch, WrongResultError
from bench.compare.data import Array, Data
from bench.compare.works import Mode
from kfcomm.types import override


class Blocking(Library):
    """The world that ``kfcomm run`` has made; links and strategy are its settings."""

    def __init__(self) -> None:
        self._comm = kfcomm.sync.init()
        self.rank = self._comm.rank
        self.size = self._comm.size

    @override
    def barrier(self) -> None:
        self._comm.barrier("bench/meet")

    def wrap(self, number: int, array: Array) -> Any:
        """A name and the array."""
        return f"bench/{number}", array

    @override
    def all_reduce(self, item: Any) -> object:
        name, array = item
        return self._comm.all_reduce(array, name, out=array)

    @override
    def all_reduce_all(self, items: Sequence[Any]) -> None:
        begin = self._comm.all_reduce_async
        for pending in [begin(array, name, out=array) for name, array in items]:
            pending.wait()

    @override
    def versions(self) -> dict[str, str]:
        return {"kfcomm": kfcomm.__version__}

    @override
    def close(self) -> None:
        self._comm.close()


class Symmetric(Blocking):
    """The same with tensors in symmetric memory."""

    @override
    def room(self, count: int) -> Array:
        room: Array = self._comm.empty(count)
        room[:] = 0
        return room

    @override
    def turn(self, mode: Mode, data: Data, calls: int) -> Stopwatch:
        if mode is not Mode.SHARED:
            return super().turn(mode, data, calls)
        sets = data.prepare(calls)
        named = [self._wrapped(one.arrays) for one in sets]
        self.barrier()
        with Stopwatch() as watch:
            results = [[self._comm.all_reduce(array, name, shared=True) for name, array in items] for items in named]
        self.barrier()
        if not all(one.holds(*data.sum_of_pattern(), arrays) for one, arrays in zip(sets, results, strict=True)):
            raise WrongResultError(f"{data.work.name}, {mode}: wrong sums on rank {self.rank}")
        return watch
