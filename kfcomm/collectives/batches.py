"""Calls on several arrays at once, in few collectives: mappings, and lists of arrays.

A list works as in the coalesced verbs of torch and mpi4py: the verb is applied to each array, and a list of results of
the same kind is returned. For ``reduce_scatter`` and ``all_to_all`` it has one array for each rank.

Every rank derives the same division without messages. Small arrays of one dtype are laid one after the other and travel
as one; large ones travel by themselves, uncopied. Each of these *units* has a key of its own, and a signature that
lists its arrays. The signature of the first unit lists all arrays of the call: ranks that differ in any array get a
``CollectiveMismatch`` that names it. The first unit takes the next sequence number of its key, and the others take the
same, so that a call which fails on one rank leaves all ranks in step.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from kfcomm.arrays import HostArray, adapt, adapt_out
from kfcomm.arrays.dtypes import dtype_name
from kfcomm.arrays.on_device import DeviceArray
from kfcomm.arrays.reduce import wire_dtype_of
from kfcomm.collectives.calling import Checks, MakePlan, Posting, checked_op, result_memory
from kfcomm.collectives.group import UNNAMED, Group, may_overlap
from kfcomm.collectives.handle import Handle, join
from kfcomm.collectives.on_device.calls import DeviceOrder
from kfcomm.collectives.on_device.verbs import DeviceVerbs, Given
from kfcomm.collectives.plans import Plan, PlanKey, Planner, Plans
from kfcomm.collectives.specs import ALL_REDUCE, SPECS, Arguments, CallOptions, VerbSpec
from kfcomm.common.arguments import checked_name
from kfcomm.errors import ConfigError
from kfcomm.types import Op, Verb

if TYPE_CHECKING:
    from kfcomm.collectives.calling import VerbCalls


Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

PACK_NBYTES = 1 << 16
"""Arrays up to this size are packed: copied twice, which costs less than a collective of their own."""

MANY = "all_reduce_many"
"""In place of a verb, in what calls of one name have in common."""

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
    """Arrays that travel as one: one large array, or any number of small ones of one dtype."""

    items: tuple[Item, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array that travels."""
        if len(self.items) == 1:
            return tuple(self.items[0].array.shape)
        return (sum(one.array.flat.size for one in self.items),)

    def source(self) -> Array:
        """All elements in a row; the caller's memory if there is one array."""
        flats: list[Array] = [one.array.flat for one in self.items]
        return flats[0] if len(flats) == 1 else np.concatenate(flats)


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

    def plan(self, plans: Plans, unit: Unit, key: str) -> Plan:
        """Plan of one unit."""
        dtype = unit.items[0].array.dtype
        kind = PlanKey(self.spec.verb, dtype, unit.shape, self.ops[dtype], self.root, self.wires.get(dtype))
        return plans.of(kind, key)

    def shape_of(self, item: Item) -> tuple[int, ...]:
        """The shape of a result."""
        return self.spec.stacked(item.array.shape, self.size)

    def result_memory(self, plan: Plan, unit: Unit) -> tuple[Array | None, Any, Callable[[Any], Any] | None]:
        """Memory for the result of a unit; see ``Operation`` for what else."""
        if not self.gets:
            return None, None, None
        if len(unit.items) > 1:
            result = np.empty(plan.result_count, plan.dtype)
            return result, result, None
        (item,) = unit.items
        return result_memory(plan, item.array, self.shape_of(item), item.out, 0 if self.spec.in_place else None)

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
    """Return the units, the same on every rank: small ones by dtype, then large ones, in the order of the items."""
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
    """Number of arrays, and a digest of their names, dtypes and shapes."""
    digest = hashlib.blake2b("\0".join(names).encode(), digest_size=8)
    digest.update(repr([(dtype_name(array.dtype), array.shape) for array in arrays]).encode())
    return len(names), digest.digest()


def post_units(
    group: Group, batch: Batch, whole: Handle[Any], gathered: Callable[[dict[str, Any]], Any], options: CallOptions
) -> None:
    """Begin all units; ``whole`` gets ``gathered`` of the results by name; None if this rank gets none.

    If one fails, the others are cancelled, and its error is raised once all have ended.
    """
    if whole.cancelled():
        whole.seq = group.refuse_now(batch.key(0), asyncio.CancelledError())
        return
    units = units_of(batch.items)
    handles: list[Handle[Any]] = []
    seq = None  # of the first unit, and then of all: a call that fails on one rank leaves all ranks in step
    plans = group.plans_along(options.strategy, batch.key(0))
    try:
        for number, unit in enumerate(units):
            handle: Handle[Any] = Handle(loop=group.engine.loop)
            key = batch.key(number)
            # The first signature lists the arrays of all units, so that ranks that differ in any find out at once.
            told = unit.items if number else batch.items
            fields = listing_of([one.name for one in told], [one.array for one in told])
            plan = batch.plan(plans, unit, key)
            plan = replace(plan, signature=plan.signature._replace(**fields))
            result, value, outcome = batch.result_memory(plan, unit)
            operation = plan.operation(
                handle, unit.source(), result, plan.work, value=value, finish=outcome, priority=options.priority
            )
            post = plan.post(group.view, key, plans.generation, batch.overlapping, seq)
            group.post(post, operation, handle, options.timeout_s)
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


def _begin_on_device(
    devices: DeviceVerbs, batch: Batch, units: Sequence[Unit], whole: Handle[Any],
    gathered: Callable[[dict[str, Any]], Any], options: CallOptions, alike: Arguments | None = None,
) -> Handle[Any]:  # fmt: skip
    """Begin a batch on devices, where a call may have any number of arrays; see ``post_units``.

    ``alike``: of a batch whose plan may be cached under its key, if it is one launch.
    """
    found: dict[str, Any] = {}
    handles: list[Handle[Any]] = []
    for number, unit in enumerate(units):
        dtype, names = unit.items[0].array.dtype, [item.name for item in unit.items]
        told = unit.items if number else batch.items
        counts = digest_of([one.name for one in told], [one.array for one in told])
        kind = PlanKey(batch.spec.verb, dtype, unit.shape, batch.ops[dtype], batch.root)
        first = handles[0] if handles else None
        order = DeviceOrder(
            kind, batch.key(number), counts, batch.overlapping, first, alike if len(units) == 1 else None,
            options.strategy,
        )  # fmt: skip
        given = [Given(one.array, batch.shape_of(one) if batch.gets else None, one.out) for one in unit.items]
        handles.append(devices.begin(order, given, partial(_note, found, names), options))
    join(devices.reactor, handles, whole, lambda: gathered(found) if batch.gets else None)
    return whole


def _note(found: dict[str, Any], names: Sequence[str], results: Sequence[Any]) -> None:
    found.update(zip(names, results, strict=True))


def reduce_mapping(verbs: VerbCalls, arrays: Any, name: str | None, options: CallOptions) -> Handle[dict[str, Any]]:
    """``all_reduce`` of every array of a mapping; see ``Verbs.all_reduce_many``."""
    verbs._check_open()
    group, devices = verbs._group, verbs._devices
    name = checked_name(name)
    if name is not None and options.is_plain and options.strategy is None:
        again = group.compiled.get(many_key((name,)))
        if again is not None:
            handle: Handle[dict[str, Any]] = Handle(loop=group.engine.loop)
            begun = again.start(arrays, (MANY, options.op), options.out, handle)
            if begun is not None:
                handle.seq = begun.seq
                return handle
    names = names_of(arrays)  # sorted: mappings may list their arrays in unlike orders
    whole: Handle[dict[str, Any]] = Handle(loop=group.engine.loop)
    if not names:
        whole.set_result({})
        return whole
    named = names if name is None else (name,)
    key, op, out = many_key(named), options.op, options.out
    alike: Arguments | None = (MANY, op) if options.is_plain and isinstance(op, Hashable) else None

    def gathered(found: dict[str, Any]) -> Any:
        return {one: found[one] for one in arrays} if out is None else out

    with Checks(group, key):
        on_device = any(devices.takes(arrays[one], options.stream) for one in names)
    with Checks(group, key, devices=devices if on_device else None):
        options = group.checked(options)
        outs, take = outs_by_name(out, arrays), _taking(devices, options, on_device=on_device)
        items = tuple(take(one, arrays[one], outs.get(one)) for one in names)
        if len({type(item.array) is HostArray for item in items}) > 1:
            raise ConfigError("all_reduce_many expects arrays of the host or of a device, got both: make two calls")
        ops = _ops(ALL_REDUCE, op, items)
        batch = Batch(
            SPECS[ALL_REDUCE], items, lambda number: many_key(named, number), ops, _wires(options.wire_dtype, ops), -1,
            gets=True, size=group.view.size,
        )  # fmt: skip
        if on_device:  # those of one dtype travel as one, uncopied
            dtypes = sorted(ops, key=lambda dtype: dtype.name)
            units = [Unit(tuple(item for item in items if item.array.dtype == dtype)) for dtype in dtypes]
            return _begin_on_device(devices, batch, units, whole, gathered, options, alike)

    group.in_order(lambda: post_units(group, batch, whole, gathered, options))
    return whole


def of_list(verbs: VerbCalls, verb: Verb, xs: Sequence[Any], name: str | None, options: CallOptions) -> Handle[Any]:
    """Apply a verb to each array of a list; the result is a list, or a tuple, of the results."""
    if verb is Verb.REDUCE_SCATTER:
        return _reduce_scatter(verbs, xs, name, options)
    group, devices, spec = verbs._group, verbs._devices, SPECS[verb]
    rank, size, out = group.view.rank, group.view.size, options.out
    whole: Handle[Any] = Handle(loop=group.engine.loop)
    key = name or UNNAMED
    with verbs._checks(name, options) as (name, options):
        on_device = any(devices.takes(x, options.stream) for x in xs)
    with verbs._checks(name, on_device=on_device):
        root = verbs._checked_root(verb, options.root)
        gets, overlapping = spec.gets(rank, root), may_overlap(name)
        outs, take = outs_in_order(out if gets else None, xs), _taking(devices, options, on_device=on_device)
        items = tuple(take(f"x[{at}]", x, into, spec) for at, (x, into) in enumerate(zip(xs, outs, strict=True)))
        ops = _ops(verb, options.op, items)
        batch = Batch(
            spec, items, lambda number: list_key(key, number), ops, _wires(options.wire_dtype, ops), root, gets, size,
            overlapping,
        )  # fmt: skip

        def gathered(found: dict[str, Any]) -> Any:
            return like(xs, [found[item.name] for item in items]) if out is None else out

        if on_device:
            return _begin_on_device(devices, batch, [Unit((item,)) for item in items], whole, gathered, options)

    group.in_order(lambda: post_units(group, batch, whole, gathered, options))
    return whole


def _reduce_scatter(verbs: VerbCalls, xs: Sequence[Any], name: str | None, options: CallOptions) -> Handle[Any]:
    """Reduce_scatter of a list: each rank gets the fold of all ranks' arrays for it."""
    group, devices = verbs._group, verbs._devices
    size, rank = group.view.size, group.view.rank
    with verbs._checks(name, options) as (name, options):
        if len(xs) != size:
            raise ConfigError(f"expected a list of {size} arrays, one for each rank, got {len(xs)}")
        on_device = any(devices.takes(x, options.stream) for x in xs)
    with verbs._checks(name, on_device=on_device):
        read = [devices.arrays.read(x, options.stream) for x in xs]
        dtype, shape = read[0].dtype, read[rank].shape
        if any(one.dtype != dtype for one in read):
            raise ConfigError(f"expected arrays of one dtype in a list, got {dtype} and others")
        op = checked_op(options.op, dtype)
        is_even = all(one.shape == shape for one in read)
        whole_shape = (size, *shape)
        if on_device:
            devices.check(options.wire_dtype)
            if not is_even:
                raise ConfigError("expected arrays of one shape in a list of device arrays")
            kind = PlanKey(Verb.REDUCE_SCATTER, dtype, whole_shape, op)
            order = DeviceOrder(
                kind, name or UNNAMED, overlapping=may_overlap(name), strategy=options.strategy
            )  # fmt: skip
            return devices.one(order, devices.arrays.stacked(read), shape, options)
        arrays = [adapt(one) for one in read]
        wire = None if options.wire_dtype is None else wire_dtype_of(options.wire_dtype, dtype)
        flat = np.concatenate([one.flat for one in arrays])
        joined = HostArray(flat, whole_shape if is_even else flat.shape, arrays[rank].kind, False)
        target = None if options.out is None else adapt_out(options.out, shape, dtype)
        plan: MakePlan = (
            Plans.of, PlanKey(Verb.REDUCE_SCATTER, dtype, whole_shape, op, wire=wire), name or UNNAMED,
        )  # fmt: skip
        if not is_even:
            shapes = tuple(one.shape for one in arrays)
            plan = (Plans.plan, Planner.reduce_scatter_parts, dtype, shapes, op, wire)
    return verbs._begin(name, Posting(plan, joined, shape, target), options)


def _ops(verb: Verb, op: Any, items: Iterable[Item]) -> dict[np.dtype[Any], Op | None]:
    """The op for each dtype, checked; None in verbs without."""
    dtypes = dict.fromkeys(item.array.dtype for item in items)
    return {dtype: checked_op(op, dtype) if SPECS[verb].folds else None for dtype in dtypes}


def _taking(devices: DeviceVerbs, options: CallOptions, *, on_device: bool) -> Callable[..., Item]:
    """Factory of items from the caller's arrays: see ``item_of``."""
    if not on_device:
        return partial(item_of, size=devices.size)
    devices.check(options.wire_dtype)

    def take(name: str, x: Any, out: Any, spec: VerbSpec = SPECS[ALL_REDUCE]) -> Item:
        array = devices.arrays.read(x, options.stream)
        return Item(name, array, devices.arrays.out(out, array, spec.stacked(array.shape, devices.size)))

    return take


def names_of(arrays: Any) -> list[str]:
    """Return the names of a mapping, in the same order on all ranks.

    Raises:
        ConfigError: it is not a mapping, or has a name that no call may have.
    """
    if not isinstance(arrays, Mapping):
        raise ConfigError(
            f"all_reduce_many expects a mapping from names to arrays, got {type(arrays).__name__}; "
            "all_reduce takes a list of arrays"
        )
    if None in arrays:
        raise ConfigError("expected a name (a string), got None")
    return sorted(map(checked_name, arrays))


def outs_by_name(out: Any, arrays: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the caller's memory for the results, by name; empty if none was given.

    Raises:
        ConfigError: it does not name each of the arrays.
    """
    if out is None:
        return {}
    if not isinstance(out, Mapping) or out.keys() != arrays.keys():
        got = "other names" if isinstance(out, Mapping) else type(out).__name__
        raise ConfigError(f"expected a mapping with the names of the arrays as out, got {got}")
    return out


def outs_in_order(out: Any, xs: Sequence[Any]) -> list[Any]:
    """The caller's memory for the results of a list, in its order; None for those without."""
    if out is None:
        return [None] * len(xs)
    if not isinstance(out, (list, tuple)) or len(out) != len(xs):
        got = len(out) if isinstance(out, (list, tuple)) else type(out).__name__
        raise ConfigError(f"expected a list of {len(xs)} arrays as out, got {got}")
    return list(out)


def item_of(name: str, x: Any, out: Any, spec: VerbSpec = SPECS[ALL_REDUCE], *, size: int = 0) -> Item:
    """One array, and where its result goes, which has one axis more for gathers."""
    array = adapt(x)
    into = None if out is None else adapt_out(out, spec.stacked(array.shape, size), array.dtype)
    return Item(name, array, into)


def _wires(wire_dtype: Any, ops: Mapping[np.dtype[Any], Any]) -> dict[np.dtype[Any], np.dtype[Any]]:
    return {} if wire_dtype is None else {dtype: wire_dtype_of(wire_dtype, dtype) for dtype in ops}


def like(xs: Sequence[Any], results: list[Any]) -> Any:
    """Return results as a list for a list, as a tuple for a tuple."""
    return tuple(results) if isinstance(xs, tuple) else results
