"""Several arrays in few collectives, by a plan that every rank derives alone: ``all_reduce_many``, and lists of arrays.

Small arrays of one dtype are laid one after the other and travel as one; large ones travel by themselves, uncopied.
Each of these *units* has a key of its own, and a signature that lists its arrays. That of the first lists all of the
call, so that ranks which differ in any get ``CollectiveMismatch``, which names it. The first unit takes the next
sequence number of its key, and the others take the same, so that a call which fails on one rank leaves all ranks in
step.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np

from kfcomm.arrays import HostArray, OutArray
from kfcomm.arrays.dtypes import dtype_name
from kfcomm.arrays.on_device import DeviceArray
from kfcomm.collectives.group import Group
from kfcomm.collectives.handle import Handle, join
from kfcomm.collectives.options import CallOptions
from kfcomm.collectives.plans import Plan, PlanKey, Plans
from kfcomm.collectives.specs import VerbSpec
from kfcomm.collectives.verbs import room
from kfcomm.types import Op

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

PACK_NBYTES = 1 << 16
"""Arrays up to this size are packed: copied twice, which costs less than a collective of their own."""

LISTED_NBYTES = 1 << 15
"""What a signature lists of the arrays; of more it holds a digest."""


@dataclass(frozen=True, slots=True, eq=False)
class Item:
    """One array of a call.

    Attributes:
        name: by which ranks know it.
        array: what this rank gives.
        out: where the result goes, if the caller says so.
    """

    name: str
    array: HostArray
    out: OutArray | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Unit:
    """Arrays that travel as one: one large array, or any number of small ones of one dtype."""

    items: tuple[Item, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the array that travels."""
        if len(self.items) == 1:
            return self.items[0].array.shape
        return (sum(one.array.size for one in self.items),)

    def source(self) -> Array:
        """All elements in a row; the caller's memory if there is one array."""
        if len(self.items) == 1:
            return self.items[0].array.flat
        return np.concatenate([one.array.flat for one in self.items])


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Arrays on which one verb works, all alike.

    Attributes:
        spec: of the verb; its results have the shape of what is given, or, of gathers, one axis more.
        items: in an order that all ranks have.
        key: of the n-th unit.
        ops: for each dtype; None for verbs without.
        wires: in what numbers travel, by dtype, where that is not what they are.
        root: -1 for verbs without.
        gets: whether this rank gets results.
        size: of the group.
        overlapping: further uses of the keys may begin before these are over.
    """

    spec: VerbSpec
    items: tuple[Item, ...]
    key: Callable[[int], str]
    ops: dict[np.dtype[Any], Op | None]
    wires: dict[np.dtype[Any], np.dtype[Any]]
    root: int
    gets: bool
    size: int
    overlapping: bool = False

    def plan(self, plans: Plans, unit: Unit, key: str) -> Plan:
        """How one unit goes."""
        dtype = unit.items[0].array.dtype
        kind = PlanKey(self.spec.verb, dtype, unit.shape, self.ops[dtype], self.root, self.wires.get(dtype))
        return plans.of(kind, key)

    def shape_of(self, item: Item) -> tuple[int, ...]:
        """The shape of a result."""
        return (self.size, *item.array.shape) if self.spec.is_stacked else item.array.shape

    def room(self, plan: Plan, unit: Unit) -> tuple[Array | None, Any, Callable[[Any], Any] | None]:
        """Memory for the result of a unit; see ``Operation`` for what else."""
        if not self.gets:
            return None, None, None
        if len(unit.items) > 1:
            result = np.empty(plan.result_count, plan.dtype)
            return result, result, None
        (item,) = unit.items
        return room(plan, item.array, self.shape_of(item), item.out, self.spec.in_place)

    def results(self, unit: Unit, found: Any) -> list[Any]:
        """The results of a unit, of the callers' kinds; those of one unit share memory, but for ``out`` and gathers."""
        if len(unit.items) == 1:
            return [found]
        is_gather = self.spec.is_stacked
        table = found.reshape(self.size, -1) if is_gather else found
        made, at = [], 0
        for item in unit.items:
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


def units_of(items: Sequence[Item]) -> list[Unit]:
    """The units, the same on every rank: small ones by dtype, then large ones, in the order of the items."""
    small: dict[np.dtype[Any], list[Item]] = {}
    large = []
    for item in items:
        flat = item.array.flat
        if flat.nbytes > PACK_NBYTES:
            large.append(Unit((item,)))
        else:
            small.setdefault(flat.dtype, []).append(item)
    dtypes = sorted(small, key=lambda dtype: dtype.str + dtype.name)
    return [*(Unit(tuple(small[dtype])) for dtype in dtypes), *large]


def listing_of(names: Sequence[str], arrays: Sequence[HostArray | DeviceArray]) -> dict[str, Any]:
    """Names, dtypes and shapes as fields of a signature, on which all ranks must agree; of many arrays a digest."""
    nbytes = len("\0".join(names).encode()) + sum(16 + 9 * len(one.shape) for one in arrays)
    if nbytes > LISTED_NBYTES:
        return {"counts": digest_of(names, arrays)}
    listed = ((name, dtype_name(one.dtype), one.shape) for name, one in zip(names, arrays, strict=True))
    return {"arrays": tuple(listed)}


def digest_of(names: Sequence[str], arrays: Sequence[HostArray | DeviceArray]) -> tuple[int, bytes]:
    """How many arrays, and a digest of their names, dtypes and shapes."""
    digest = hashlib.blake2b("\0".join(names).encode(), digest_size=8)
    digest.update(repr([(dtype_name(array.dtype), array.shape) for array in arrays]).encode())
    return len(names), digest.digest()


def post_units(
    group: Group, batch: Batch, whole: Handle[Any], gathered: Callable[[dict[str, Any]], Any], options: CallOptions
) -> None:
    """Begin all units; ``whole`` gets what ``gathered`` makes of the results by name; None if this rank gets none.

    If one fails, the others are given up, and its error is raised once all have ended.
    """
    if whole.cancelled():
        whole.seq = group.refuse_now(batch.key(0), asyncio.CancelledError())
        return
    units = units_of(batch.items)
    handles: list[Handle[Any]] = []
    seq = None  # of the first unit, and then of all: a call that fails on one rank leaves all ranks in step
    try:
        for number, unit in enumerate(units):
            handle: Handle[Any] = Handle(loop=group.engine.loop)
            key = batch.key(number)
            # The first signature lists the arrays of all units, so that ranks that differ in any find out at once.
            told = unit.items if number else batch.items
            fields = listing_of([one.name for one in told], [one.array for one in told])
            plan = batch.plan(group.plans, unit, key)
            plan = replace(plan, signature=plan.signature._replace(**fields))
            result, value, outcome = batch.room(plan, unit)
            group.post(
                plan, key, source=unit.source(), result=result, value=value, outcome=outcome,
                timeout_s=options.timeout_s, priority=options.priority, handle=handle, seq=seq,
                overlapping=batch.overlapping,
            )  # fmt: skip
            seq = whole.seq = handle.seq
            handles.append(handle)
    except Exception as error:  # noqa: BLE001  no memory, perhaps: the other ranks are told by the first unit
        if not handles:
            whole.seq = group.refuse_now(batch.key(0), error)
        for handle in handles:
            handle.cancel()
        whole.set_exception(error)
        return

    def results() -> Any:
        if not batch.gets:
            return None
        found: dict[str, Any] = {}
        for unit, handle in zip(units, handles, strict=True):
            names = (item.name for item in unit.items)
            found.update(zip(names, batch.results(unit, handle.result()), strict=True))
        return gathered(found)

    join(group.engine.reactor, handles, whole, results)
