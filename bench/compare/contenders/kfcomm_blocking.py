"""kfcomm's blocking interface, as a program without an event loop uses it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import kfcomm
from bench.compare.contenders.base import Library, Stopwatch, WrongResultError
from bench.compare.data import Array, Data
from bench.compare.works import Mode


class Blocking(Library):
    """The world that ``kfcomm run`` has made; links and strategy are its settings."""

    def __init__(self) -> None:
        self._comm = kfcomm.sync.init()
        self.rank = self._comm.rank
        self.size = self._comm.size

    def barrier(self) -> None:
        """See the base class."""
        self._comm.barrier("bench/meet")

    def wrap(self, number: int, array: Array) -> Any:
        """A name and the array."""
        return f"bench/{number}", array

    def all_reduce(self, item: Any) -> object:
        """See the base class."""
        name, array = item
        return self._comm.all_reduce(array, name, out=array)

    def all_reduce_all(self, items: Sequence[Any]) -> None:
        """See the base class."""
        begin = self._comm.all_reduce_async
        for pending in [begin(array, name, out=array) for name, array in items]:
            pending.wait()

    def versions(self) -> dict[str, str]:
        """See the base class."""
        return {"kfcomm": kfcomm.__version__}

    def close(self) -> None:
        """See the base class."""
        self._comm.close()


class Symmetric(Blocking):
    """The same with tensors in symmetric memory."""

    def room(self, count: int) -> Array:
        """See the base class."""
        room: Array = self._comm.empty(count)
        room[:] = 0
        return room

    def turn(self, mode: Mode, data: Data, calls: int) -> Stopwatch:
        """See the base class."""
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
