"""The work of one rank in one case: calls on arrays whose results are known, element by element.

Inputs and results have memory of their own, of the host or of a device, used again in each iteration. After each one
every element of every result is compared; at the end the inputs are, which no collective may have changed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kfcomm.arrays.dtypes import dtype_of
from kfcomm.bench.memory import Array, BenchMemory
from kfcomm.bench.suite import Case
from kfcomm.bench.workloads import Shape
from kfcomm.types import Op, Verb

_ROOT = 0
_ROOTED = (Verb.REDUCE, Verb.BROADCAST, Verb.GATHER, Verb.SCATTER)
_STRIDE = 17
"""Tensors of a workload begin at different places of the pattern, so that confused tensors are noticed."""


@dataclass(frozen=True, slots=True)
class LoadedPart:
    """Expected stretch of a flat array: ``values`` repeated, from element ``start`` of the repetition on."""

    begin: int
    end: int
    values: Array
    start: int

    def fault(self, flat: Array) -> str | None:
        """Describe the first wrong element; None if all are right."""
        found = first_wrong(flat[self.begin : self.end], self.values, self.start)
        if found is None:
            return None
        index, value, due = found
        return f"element {self.begin + index} is {value}, must be {due}"


@dataclass(frozen=True, slots=True)
class LoadedCall:
    """One collective on one tensor."""

    verb: Verb  # the collective
    name: str
    x: Any  # this rank's input, an array of the memory; None where the verb takes no input here
    out: Any  # where the result goes, of the same memory; None without a result here
    options: dict[str, Any]  # further arguments of the verb
    due: tuple[LoadedPart, ...]  # the expected result
    given: tuple[LoadedPart, ...]  # the input

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of the verb."""
        return {"x": self.x, "name": self.name, "out": self.out, **self.options}


@dataclass(frozen=True, slots=True)
class BenchLoad:
    """All calls of one rank in one case."""

    calls: tuple[LoadedCall, ...]
    memory: BenchMemory

    @classmethod
    def of(cls, case: Case, rank: int, size: int, memory: BenchMemory) -> BenchLoad:
        """Make the arrays: at most twice the bytes of the case, and a little."""
        maker = _Maker(case, rank, size, memory)
        return cls(tuple(maker.call(shape, number) for number, shape in enumerate(case.shapes(size))), memory)

    def spoil(self) -> None:
        """Overwrite the results of the iteration before."""
        for call in self.calls:
            if call.out is not None:
                self.memory.spoil(call.out)
        self.memory.settle()

    def fault(self, results: Sequence[Any]) -> str | None:
        """Describe what is wrong with the results of an iteration; None if they are right."""
        return self._first(
            None if call.out is None else self._fault(result, call.due)
            for call, result in zip(self.calls, results, strict=True)
        )

    def input_fault(self) -> str | None:
        """Describe what has changed in the inputs; None if they are intact."""
        found = self._first(None if call.x is None else self._fault(call.x, call.given) for call in self.calls)
        return None if found is None else f"the input was changed: {found}"

    def _first(self, faults: Iterable[str | None]) -> str | None:
        for number, fault in enumerate(faults):
            if fault is not None:
                return fault if len(self.calls) == 1 else f"tensor {number}: {fault}"
        return None

    def _fault(self, array: Any, parts: tuple[LoadedPart, ...]) -> str | None:
        flat = self.memory.read(array).reshape(-1)
        if flat.size != parts[-1].end:
            return f"{flat.size} elements, must be {parts[-1].end}"
        return next((fault for fault in (part.fault(flat) for part in parts) if fault is not None), None)


class _Maker:
    """Makes the calls of one rank."""

    def __init__(self, case: Case, rank: int, size: int, memory: BenchMemory) -> None:
        self._memory = memory
        self._verb = case.collective
        self._rank = rank
        self._size = size
        self._values = contributions(dtype_of(case.dtype), case.op, size)
        self._reduced = self._values[_ROOT] if case.op is None else reduced(self._values, case.op)
        self._options: dict[str, Any] = {} if case.op is None else {"op": case.op}
        if self._verb in _ROOTED:
            self._options["root"] = _ROOT

    def call(self, shape: Shape, number: int) -> LoadedCall:
        """The call on tensor ``number``: of ``shape``, or of parts that have the last lengths of ``shape``."""
        count, start = math.prod(shape), number * _STRIDE
        given = self._given(count, start)
        due = self._due(count, start)
        x = None if given is None else self._memory.holding(tiled(given.values, start, given.end))
        out = None if not due else self._memory.empty(due[-1].end, self._values.dtype)
        if self._verb is Verb.ALL_REDUCE and x is not None and out is not None:
            x, out = x.reshape(shape), out.reshape(shape)
        elif self._verb in (Verb.GATHER, Verb.ALL_GATHER) and out is not None:
            out = out.reshape(shape)
        return LoadedCall(
            self._verb, f"bench/{number}", x, out, self._options, due, () if given is None else (given,)
        )  # fmt: skip

    def _given(self, count: int, start: int) -> LoadedPart | None:
        """This rank's input; ``count`` elements are those of all parts together."""
        match self._verb:
            case Verb.GATHER | Verb.ALL_GATHER:
                return LoadedPart(0, count // self._size, self._values[self._rank], start)
            case Verb.SCATTER if self._rank != _ROOT:
                return None
            case _:
                return LoadedPart(0, count, self._values[self._rank], start)

    def _due(self, count: int, start: int) -> tuple[LoadedPart, ...]:
        """This rank's expected result; empty if it gets no result."""
        each = count // self._size
        mine = start + self._rank * each
        match self._verb:
            case Verb.REDUCE | Verb.GATHER if self._rank != _ROOT:
                return ()
            case Verb.GATHER | Verb.ALL_GATHER:
                return tuple(LoadedPart(r * each, r * each + each, row, start) for r, row in enumerate(self._values))
            case Verb.ALL_TO_ALL:
                return tuple(LoadedPart(r * each, r * each + each, row, mine) for r, row in enumerate(self._values))
            case Verb.REDUCE_SCATTER | Verb.SCATTER:
                return (LoadedPart(0, each, self._reduced, mine),)
            case _:
                return (LoadedPart(0, count, self._reduced, start),)


# Every rank can derive the values of every other. They repeat with a period that is prime, so that no boundary of a
# chunk, row or tensor coincides with it, and data in a wrong place shows. They are small integers: all sums are exact
# in every dtype as long as they are within its range of exact integers, and wrap in integer dtypes as NumPy's do. For
# avg they are multiples of the number of ranks, for prod mostly ones.
PERIOD = 8191
_BLOCK = 32 * PERIOD
"""Elements compared at a time: the intermediate result stays in the cache."""

_EXACT = {"bool": 1, "int8": 127, "uint8": 255, "float16": 1 << 11, "bfloat16": 1 << 8}
_MOST = 7


def contributions(dtype: np.dtype[Any], op: Op | None, size: int) -> Array:
    """One period of the values of each rank: an array of shape (size, `PERIOD`)."""
    rank = np.arange(size, dtype=np.int64)[:, None]
    place = np.arange(PERIOD, dtype=np.int64)
    if op is Op.PROD:
        # one rank in turn has a factor of 2, 3 or 4
        return np.where((place + rank) % size == 0, 2 + place % 3, 1).astype(dtype)
    top = max(1, min(_MOST, _EXACT.get(dtype.name, 1 << 24) // size))
    values = (place * (2 * rank + 3) + place // 7 + 5 * rank) % (top + 1)
    if op is Op.AVG:
        values *= size
    if dtype.kind == "c":
        return (values + 1j * np.roll(values, 1, axis=1)).astype(dtype)
    return values.astype(dtype)


def reduced(values: Array, op: Op) -> Array:
    """One period of the reduction of the ranks' ``values``, computed exactly and rounded once."""
    # Integers and complex numbers are exact as they are, and integers have to wrap as those of the ranks do.
    exact = values.astype(np.float64) if values.dtype.kind not in "biuc" else values
    match op:
        case Op.SUM:
            found = np.add.reduce(exact)
        case Op.AVG:
            found = np.add.reduce(exact) / len(values)
        case Op.PROD:
            found = np.multiply.reduce(exact)
        case Op.MIN:
            found = np.minimum.reduce(exact)
        case Op.MAX:
            found = np.maximum.reduce(exact)
        case Op.AND:
            found = np.bitwise_and.reduce(exact)
        case Op.OR:
            found = np.bitwise_or.reduce(exact)
        case Op.XOR:
            found = np.bitwise_xor.reduce(exact)
    return np.asarray(found).astype(values.dtype)


def tiled(values: Array, start: int, count: int) -> Array:
    """``count`` elements of the endless repetition of ``values``, from element ``start`` on."""
    return np.ascontiguousarray(np.resize(np.roll(values, -start), count))


def first_wrong(found: Array, values: Array, start: int) -> tuple[int, Any, Any] | None:
    """Index, value and due value of the first element that is not ``tiled(values, start, len(found))``."""
    due = np.roll(values, -(start % PERIOD))
    # Whole periods are compared with one broadcast row: building all expected values would take as much memory again.
    for begin in range(0, len(found), _BLOCK):
        block = found[begin : begin + _BLOCK]
        whole = len(block) // PERIOD * PERIOD
        if bool((block[:whole].reshape(-1, PERIOD) == due).all()) and bool(
            (block[whole:] == due[: len(block) - whole]).all()
        ):
            continue
        where = int(np.flatnonzero(block != np.resize(due, len(block)))[0])
        return begin + where, block[where], due[where % PERIOD]
    return None
