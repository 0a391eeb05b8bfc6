"""Cached plans of ``all_reduce_many``, for mappings of NumPy arrays that travel as one."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from kfcomm.arrays import overwritten, span_of
from kfcomm.arrays.chained import in_a_row, settle
from kfcomm.arrays.dtypes import Array
from kfcomm.arrays.kinds import NUMPY
from kfcomm.collectives.compiled import Compiled
from kfcomm.collectives.handle import Handle, join, named
from kfcomm.engine.memory import COPIED_NBYTES
from kfcomm.types import override

if TYPE_CHECKING:
    from kfcomm.collectives.compiled import Begun, CompiledUse
    from kfcomm.collectives.group import Group
    from kfcomm.collectives.plans import Plan
    from kfcomm.collectives.specs import Arguments
    from kfcomm.collectives.units import Unit


class CompiledMapping(Compiled):
    """Cached plan of the calls with the arrays of one unit; ``key`` is that of the unit."""

    __slots__ = ("_dtype", "_names", "_num_packed", "_shapes", "_sizes")

    def __init__(self, group: Group, key: str, arguments: Arguments, plan: Plan, unit: Unit) -> None:
        super().__init__(group, key, arguments, plan)
        self._names = [item.name for item in unit.items]
        self._shapes = [item.array.shape for item in unit.items]
        self._sizes = [math.prod(shape) for shape in self._shapes]
        self._num_packed = unit.num_packed
        self._dtype = unit.items[0].array.dtype
        self.nbytes = sum(self._sizes) * self._dtype.itemsize
        is_chain = len(unit.items) > max(1, unit.num_packed)
        self.is_whole = self.is_whole and not is_chain
        self.is_small = plan.program.num_slots == 1 and 0 < self.nbytes <= COPIED_NBYTES and not is_chain

    @staticmethod
    def fits(unit: Unit) -> bool:
        """Whether calls like that of this unit can be recognised by their arrays alone."""
        return all(item.array.is_view and item.array.kind is NUMPY for item in unit.items)

    @override
    def start(self, x: Any, arguments: Arguments, out: Any, handle: Handle[Any] | None) -> Begun | None:
        if handle is None or not self.is_like(x, arguments, out):
            return None
        names, num_packed, order = self._names, self._num_packed, [*x]
        flats = [x[name].reshape(-1) for name in names]
        outs: list[Array] | None = None if out is None else [out[name] for name in names]
        packed: Array | None = None
        try:
            if num_packed:
                flats[:num_packed] = [np.concatenate(flats[:num_packed])]
                packed = np.empty_like(flats[0])
            large = (
                [np.empty(one, self._dtype) for one in self._shapes[num_packed:]] if outs is None else outs[num_packed:]
            )
        except MemoryError:  # the other ranks have to be told
            return None
        results = [one.reshape(-1) for one in large]
        may_overwrite = outs is not None and len(large) > 1
        if may_overwrite and overwritten(map(span_of, flats[-len(large) :]), map(span_of, results)):
            return None
        whole = in_a_row(results if packed is None else [packed, *results])
        inner: Handle[Any] = Handle(loop=self.engine.loop)
        begun = self.begin(inner, in_a_row(flats), whole, None)
        if begun is None:
            return None

        def gathered() -> Any:
            settle(whole)
            small = [] if packed is None else self._unpacked(packed)
            if outs is not None:
                for one, part in zip(outs, small, strict=False):
                    one[...] = part
                return out
            found = dict(zip(names, [*small, *large], strict=True))
            return {name: found[name] for name in order}

        named(inner, begun)
        join(self.engine.reactor, [inner], handle, gathered)
        return begun

    def _unpacked(self, packed: Array) -> list[Array]:
        """Return the results of the packed arrays."""
        parts, at = [], 0
        for shape, size in zip(self._shapes[: self._num_packed], self._sizes, strict=False):
            parts.append(packed[at : at + size].reshape(shape))
            at += size
        return parts

    @override
    def is_like(self, x: Any, arguments: Arguments, out: Any) -> bool:
        names, dtype = self._names, self._dtype
        if arguments != self._arguments or type(x) is not dict or len(x) != len(names):
            return False
        if out is not None and (type(out) is not dict or len(out) != len(names)):
            return False
        for name, shape in zip(names, self._shapes, strict=True):
            given = x.get(name)
            if type(given) is not np.ndarray or given.dtype is not dtype or given.shape != shape:
                return False
            if not given.flags.c_contiguous:
                return False
            if out is not None:
                result = out.get(name)
                if result is not given and (
                    type(result) is not np.ndarray
                    or result.dtype is not dtype
                    or result.shape != shape
                    or not result.flags.c_contiguous
                    or np.may_share_memory(given, result)
                ):
                    return False
                if not result.flags.writeable:
                    return False
        return True

    @override
    def use(self, x: Any, arguments: Arguments, out: Any) -> CompiledUse | None:
        return None  # a start of a persistent collective calls the verb, which finds this plan
