"""Division of several arrays of one call into few collectives.

Every rank derives the same division without messages. Small arrays of one dtype are copied to one array and travel as
one. Large ones travel uncopied: by themselves, or in an all_reduce of more than 1 MiB as one *chain*, after the small
ones, if messages take one way only. Each of these *units* has a key of its own, and a signature that lists its arrays.
The signature of the first unit lists all arrays of the call: ranks that differ in any get a ``CollectiveMismatch`` that
names it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np

from kfcomm.arrays import HostArray, overwritten
from kfcomm.arrays.chained import in_a_row, settle
from kfcomm.arrays.dtypes import dtype_name
from kfcomm.arrays.on_device import DeviceArray
from kfcomm.collectives.calling import result_memory
from kfcomm.collectives.compiled import CompiledKey
from kfcomm.collectives.plans import Plan, PlanKey, Plans
from kfcomm.collectives.specs import Arguments, VerbSpec
from kfcomm.strategies.base import DIRECT_NBYTES
from kfcomm.types import Op, Verb

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

PACK_NBYTES = 1 << 16
"""Arrays up to this size are packed: copied twice, which costs less than a collective of their own."""

LISTED_NBYTES = 1 << 15
"""What a signature lists of the arrays; of more it holds a digest."""


@dataclass(frozen=True, slots=True, eq=False)
class Item:
    """One array of a call."""

    name: str  # common to all ranks
    array: Any  # `HostArray` or `DeviceArray`
    out: Any = None  # `OutArray` or `DeviceOut`


@dataclass(frozen=True, slots=True, eq=False)
class Unit:
    """Arrays of one dtype that travel as one: one large array, or small ones, or small ones and large ones after them.

    ``num_packed``: of the first ones, which are copied to one array.
    """

    items: tuple[Item, ...]
    num_packed: int = 0

    @property
    def packed(self) -> tuple[Item, ...]:
        """The small arrays."""
        return self.items[: self.num_packed]

    @property
    def large(self) -> tuple[Item, ...]:
        """The arrays that are not copied."""
        return self.items[self.num_packed :]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array that travels."""
        if len(self.items) == 1:
            return tuple(self.items[0].array.shape)
        return (_count(self.items),)

    def source(self) -> Array:
        """All elements in a row; the caller's memory, but for packed arrays."""
        flats = [one.array.flat for one in self.packed]
        return in_a_row([*([np.concatenate(flats)] if flats else ()), *(one.array.flat for one in self.large)])


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Arrays on which one verb works, all alike."""

    spec: VerbSpec  # its results have the shape of the input, or for gathers one axis more
    items: tuple[Item, ...]  # in the same order on all ranks
    key: Callable[[int], str]  # of the n-th unit
    ops: dict[np.dtype[Any], Op | None]  # None for verbs without
    wires: dict[np.dtype[Any], np.dtype[Any]]  # dtype on the wire by dtype, where they differ
    root: int  # -1 for verbs without
    gets: bool  # this rank gets results
    size: int  # of the group
    overlapping: bool = False  # further uses of the keys may begin before these are over
    cached: tuple[CompiledKey, Arguments] | None = None  # of the plan of calls like this one; None if it has none

    def plan(self, plans: Plans, unit: Unit, key: str) -> Plan:
        """Plan of one unit."""
        dtype = unit.items[0].array.dtype
        kind = PlanKey(self.spec.verb, dtype, unit.shape, self.ops[dtype], self.root, self.wires.get(dtype))
        return plans.of(kind, key)

    def chains(self, plans: Plans, dtype: np.dtype[Any], count: int) -> bool:
        """Whether so many elements of large and small arrays are exchanged as one message: see ``units_of``."""
        # Shorter ones are shown whole in slots; with several ways, each array has its own.
        is_long = self.spec.verb is Verb.ALL_REDUCE and count * dtype.itemsize > DIRECT_NBYTES
        return is_long and plans.planner.ways(dtype, (count,), self.wires.get(dtype))[0] == 1

    def shape_of(self, item: Item) -> tuple[int, ...]:
        """The shape of a result."""
        return self.spec.stacked(item.array.shape, self.size)

    def result_memory(self, unit: Unit) -> tuple[Array | None, Any, Callable[[Any], Any] | None]:
        """Memory for the result of a unit, and ``results`` as what makes the caller's result; see ``Operation``."""
        if not self.gets:
            return None, None, None
        rows = self.size if self.spec.is_stacked else 1
        packed = np.empty(_count(unit.packed) * rows, unit.items[0].array.dtype) if unit.num_packed else None
        input_at = 0 if self.spec.in_place else None
        memory = [
            result_memory(item.array.flat.size * rows, item.array, self.shape_of(item), item.out, input_at)
            for item in unit.large
        ]
        flats = [flat for flat, _, _ in memory if flat is not None]
        whole = in_a_row(flats if packed is None else [packed, *flats])

        def results(_: Any) -> list[Any]:
            settle(whole)
            made = [value if finish is None else finish(value) for _, value, finish in memory]
            return made if packed is None else [*self._unpacked(unit.packed, packed), *made]

        return whole, None, results

    def _unpacked(self, items: Sequence[Item], found: Array) -> list[Any]:
        """The results of packed arrays, of the callers' kinds, which share memory but for ``out`` and gathers."""
        is_gather = self.spec.is_stacked
        table = found.reshape(self.size, -1) if is_gather else found
        made, at = [], 0
        for item in items:
            array, out = item.array, item.out
            end = at + array.flat.size
            part = table[:, at:end].reshape(-1) if is_gather else found[at:end]
            if out is None:
                made.append(array.restore(part, self.shape_of(item) if is_gather else array.shape))
            else:
                out.flat[:] = part
                made.append(out.finish())
            at = end
        return made


def many_key(names: Sequence[str], number: int = 0) -> str:
    """The key of a unit of a call of ``all_reduce_many`` that has this name, or these names, which are sorted."""
    return f"{names[0]}\0many {number}" if number else f"{names[0]}\0many"


def list_key(key: str, number: int = 0) -> str:
    """The key of a unit of a list: the first has the name of the call, and so meets calls of other kinds."""
    return f"{key}\0list {number}" if number else key


def units_of(items: Sequence[Item], chains: Callable[[np.dtype[Any], int], bool]) -> list[Unit]:
    """Return the units, the same on every rank: packed arrays and chains by dtype, then other large arrays in order.

    ``chains``: whether so many elements of a dtype may be one chain.
    """
    by_dtype: dict[np.dtype[Any], tuple[list[Item], list[Item]]] = {}
    for item in items:
        flat = item.array.flat
        by_dtype.setdefault(flat.dtype, ([], []))[flat.nbytes > PACK_NBYTES].append(item)
    units: list[Unit] = []
    alone: set[Item] = set()
    for dtype in sorted(by_dtype, key=lambda dtype: dtype.str + dtype.name):
        small, large = by_dtype[dtype]
        if not chains(dtype, _count((*small, *large))):
            alone.update(large)
            large = []
        if small or large:
            units.append(Unit((*small, *large), len(small) if len(small) > 1 else 0))
    return [*units, *(Unit((item,)) for item in items if item in alone)]


def apart(units: Sequence[Unit]) -> list[Unit]:
    """Return the units with a copy of each array that has some of the memory of another one's ``out``.

    Packed arrays are copied anyway before any result is written.
    """
    items = [item for unit in units for item in unit.items]
    late = {item for unit in units for item in unit.large}
    copies: dict[Item, Item] = {}
    if late and len(items) > 1:
        copies = {one: replace(one, array=one.array.copied()) for one in items_overwritten(items, late)}
    if not copies:
        return [*units]
    return [replace(unit, items=tuple(copies.get(one, one) for one in unit.items)) for unit in units]


def items_overwritten(items: Sequence[Item], late: set[Item]) -> list[Item]:
    """Return those of ``late`` whose array has some of the memory of another one's ``out``."""
    results = [None if item.out is None else item.out.span() for item in items]
    if not any(results):
        return []
    return [items[at] for at in overwritten((one.array.span() if one in late else None for one in items), results)]


def _count(items: Iterable[Item]) -> int:
    return sum(one.array.flat.size for one in items)


def listing_of(names: Sequence[str], arrays: Sequence[HostArray | DeviceArray]) -> dict[str, Any]:
    """Names, dtypes and shapes as fields of a signature, on which all ranks must agree; of many arrays a digest."""
    nbytes = len("\0".join(names).encode()) + sum(16 + 9 * len(one.shape) for one in arrays)
    if nbytes > LISTED_NBYTES:
        return {"counts": digest_of(names, arrays)}
    listed = ((name, dtype_name(one.dtype), one.shape) for name, one in zip(names, arrays, strict=True))
    return {"arrays": tuple(listed)}


def digest_of(names: Sequence[str], arrays: Sequence[HostArray | DeviceArray]) -> tuple[int, bytes]:
    """Number of arrays, and a digest of their names, dtypes and shapes."""
    digest = hashlib.blake2b("\0".join(names).encode(), digest_size=8)
    digest.update(repr([(dtype_name(array.dtype), array.shape) for array in arrays]).encode())
    return len(names), digest.digest()
