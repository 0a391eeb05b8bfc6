"""Interface of a contender, and the timing of its turns.

A turn: the arrays are filled, all ranks meet, the clock starts, the work is done, the clock stops, all ranks meet
again (so that no check slows down a rank that still works), the results are checked. Clocks are
``CLOCK_MONOTONIC``, one for all processes of a host.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

from bench.compare.data import Array, Data, Tensors, zeros
from bench.compare.works import Mode
from kfcomm.types import override


@dataclass(slots=True)
class Stopwatch:
    """Times the block of a ``with``: wall clock (start, end) and CPU time of this process, all its threads."""

    start_s: float = 0.0
    end_s: float = 0.0
    cpu_s: float = 0.0

    def __enter__(self) -> Self:
        self.cpu_s = -time.process_time()
        self.start_s = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.end_s = time.perf_counter()
        self.cpu_s += time.process_time()


class Contender(ABC):
    """One rank of one library's world."""

    rank: int
    size: int

    def room(self, count: int) -> Array:
        """So many zeros, where the tensors of its turns are to be."""
        return zeros(count)

    @abstractmethod
    def turn(self, mode: Mode, data: Data, calls: int) -> Stopwatch:
        """Does the work ``calls`` times.

        Raises:
            WrongResultError: the results are not the sums.
        """

    @abstractmethod
    def versions(self) -> dict[str, str]:
        """Names and versions of what does the work."""

    @abstractmethod
    def close(self) -> None:
        """Takes leave of the other ranks. All of them call it."""


class UnavailableError(Exception):
    """The library cannot be used on this machine. The text is the reason for which it is skipped."""


class WrongResultError(Exception):
    """A result is not what it must be: no figure of this contender is worth anything."""


class Library(Contender):
    """A contender with blocking calls. The modes are written here, once, for all of them."""

    @abstractmethod
    def barrier(self) -> None:
        """Returns when all ranks have called it."""

    @abstractmethod
    def wrap(self, number: int, array: Array) -> Any:
        """Argument of the calls: a view of ``array``, the tensor ``number`` of its work. Not timed."""

    @abstractmethod
    def all_reduce(self, item: Any) -> object:
        """Sums in place what was wrapped; blocks."""

    @abstractmethod
    def all_reduce_all(self, items: Sequence[Any]) -> None:
        """Begins a collective for each, then waits for all."""

    @override
    def turn(self, mode: Mode, data: Data, calls: int) -> Stopwatch:
        work = self._prepared(mode, data.prepare(calls))
        self.barrier()
        with Stopwatch() as watch:
            work()
        self.barrier()
        if not data.summed(calls):
            raise WrongResultError(f"{data.work.name}, {mode}: wrong sums on rank {self.rank}")
        return watch

    def _prepared(self, mode: Mode, sets: list[Tensors]) -> Callable[[], None]:
        """The whole turn as one function; whatever a program would do only once is done here."""
        match mode:
            case Mode.ONE:
                return _each(self.all_reduce, [item for one in sets for item in self._wrapped(one.arrays)])
            case Mode.ALL:
                return _each(self.all_reduce_all, [self._wrapped(one.arrays) for one in sets])
            case Mode.VIEWS:
                buckets = [[bucket.flat for bucket in one.buckets()] for one in sets]
                return _each(self.all_reduce_all, [self._wrapped(arrays) for arrays in buckets])
            case Mode.BUCKETS:
                return _each(self._fused, [self._packing(one) for one in sets])
            case _:
                raise ValueError(f"{type(self).__name__} has no mode {mode}")

    def _wrapped(self, arrays: Sequence[Array]) -> list[Any]:
        return [self.wrap(number, array) for number, array in enumerate(arrays)]

    def _packing(self, tensors: Tensors) -> Packing:
        copies = tensors.copies()
        parts = [part for bucket in copies for part in bucket.tensors]
        places = list(zip(parts, tensors.arrays, strict=True))
        return Packing(places, self._wrapped([bucket.flat for bucket in copies]))

    def _fused(self, packing: Packing) -> None:
        for part, array in packing.places:
            part[:] = array
        self.all_reduce_all(packing.items)
        for part, array in packing.places:
            array[:] = part


@dataclass(frozen=True, slots=True)
class Packing:
    """Buckets apart from the tensors: where each tensor goes, and the buckets as the library takes them."""

    places: list[tuple[Array, Array]]
    items: list[Any]


def _each(call: Callable[[Any], object], items: list[Any]) -> Callable[[], None]:
    def run() -> None:
        for item in items:
            call(item)

    return run
