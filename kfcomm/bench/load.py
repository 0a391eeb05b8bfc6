"""The work of one rank in one case: calls on arrays whose results are known, element by element.

Inputs and results have memory of their own, of the host or of a device, used again in each iteration. After each one
every element of every result is compared; at the end the inputs are, which no collective may have changed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from kfcomm.arrays.dtypes import dtype_of
from kfcomm.bench.memory import Memory
from kfcomm.bench.pattern import Array, contributions, first_wrong, reduced, tiled
from kfcomm.bench.suite import Case
from kfcomm.bench.workloads import Shape
from kfcomm.types import Verb

_ROOT = 0
_ROOTED = (Verb.REDUCE, Verb.BROADCAST, Verb.GATHER, Verb.SCATTER)
_STRIDE = 17
"""Tensors of a workload begin at different places of the pattern, so that confused tensors are noticed."""


@dataclass(frozen=True, slots=True)
class Part:
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
class Call:
    """One collective on one tensor.

    Attributes:
        verb: the collective.
        name: its name.
        x: this rank's input, an array of the memory; None where the verb takes no input here.
        out: where the result goes, of the same memory; None without a result here.
        options: further arguments of the verb.
        due: the expected result.
        given: the input.
    """

    verb: Verb
    name: str
    x: Any
    out: Any
    options: dict[str, Any]
    due: tuple[Part, ...]
    given: tuple[Part, ...]

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of the verb."""
        return {"x": self.x, "name": self.name, "out": self.out, **self.options}


@dataclass(frozen=True, slots=True)
class Load:
    """All calls of one rank in one case."""

    calls: tuple[Call, ...]
    memory: Memory

    @classmethod
    def of(cls, case: Case, rank: int, size: int, memory: Memory) -> Load:
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

    def _fault(self, array: Any, parts: tuple[Part, ...]) -> str | None:
        flat = self.memory.read(array).reshape(-1)
        if flat.size != parts[-1].end:
            return f"{flat.size} elements, must be {parts[-1].end}"
        return next((fault for fault in (part.fault(flat) for part in parts) if fault is not None), None)


class _Maker:
    """Makes the calls of one rank."""

    def __init__(self, case: Case, rank: int, size: int, memory: Memory) -> None:
        self._memory = memory
        self._verb = case.collective
        self._rank = rank
        self._size = size
        self._values = contributions(dtype_of(case.dtype), case.op, size)
        self._reduced = self._values[_ROOT] if case.op is None else reduced(self._values, case.op)
        self._options: dict[str, Any] = {} if case.op is None else {"op": case.op}
        if self._verb in _ROOTED:
            self._options["root"] = _ROOT

    def call(self, shape: Shape, number: int) -> Call:
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
        return Call(
            self._verb, f"bench/{number}", x, out, self._options, due, () if given is None else (given,)
        )  # fmt: skip

    def _given(self, count: int, start: int) -> Part | None:
        """This rank's input, of ``count`` elements with all parts."""
        match self._verb:
            case Verb.GATHER | Verb.ALL_GATHER:
                return Part(0, count // self._size, self._values[self._rank], start)
            case Verb.SCATTER if self._rank != _ROOT:
                return None
            case _:
                return Part(0, count, self._values[self._rank], start)

    def _due(self, count: int, start: int) -> tuple[Part, ...]:
        """This rank's expected result; empty if it gets no result."""
        each = count // self._size
        mine = start + self._rank * each
        match self._verb:
            case Verb.REDUCE | Verb.GATHER if self._rank != _ROOT:
                return ()
            case Verb.GATHER | Verb.ALL_GATHER:
                return tuple(Part(r * each, r * each + each, row, start) for r, row in enumerate(self._values))
            case Verb.ALL_TO_ALL:
                return tuple(Part(r * each, r * each + each, row, mine) for r, row in enumerate(self._values))
            case Verb.REDUCE_SCATTER | Verb.SCATTER:
                return (Part(0, each, self._reduced, mine),)
            case _:
                return (Part(0, count, self._reduced, start),)
