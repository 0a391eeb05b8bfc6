"""Calls on several arrays at once, in few collectives: mappings, and lists of arrays.

A list works as in the coalesced verbs of torch and mpi4py: the verb is applied to each array, and a list of results of
the same kind is returned. For ``reduce_scatter`` and ``all_to_all`` it has one array for each rank.

The arrays are divided into units (see `kfcomm.collectives.units`). The first unit takes the next sequence number of its
key, and the others take the same, so that a call which fails on one rank leaves all ranks in step.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from kfcomm.arrays import HostArray, adapt, adapt_out
from kfcomm.arrays.reduce import wire_dtype_of
from kfcomm.collectives.calling import Checks, MakePlan, Posting, cached_plan, checked_op
from kfcomm.collectives.compiled_mapping import CompiledMapping
from kfcomm.collectives.group import UNNAMED, Group, may_overlap
from kfcomm.collectives.handle import Handle, join
from kfcomm.collectives.on_device.calls import DeviceOrder
from kfcomm.collectives.on_device.verbs import DeviceVerbs, Given
from kfcomm.collectives.plans import PlanKey, Planner, Plans
from kfcomm.collectives.specs import ALL_REDUCE, SPECS, Arguments, CallOptions, VerbSpec
from kfcomm.collectives.units import (
    Batch,
    Item,
    Unit,
    apart,
    digest_of,
    items_overwritten,
    list_key,
    listing_of,
    many_key,
    units_of,
)
from kfcomm.common.arguments import checked_name
from kfcomm.errors import ConfigError, KfcommError
from kfcomm.types import Op, Verb

if TYPE_CHECKING:
    from kfcomm.collectives.calling import VerbCalls
    from kfcomm.collectives.compiled import CompiledKey


MANY = "all_reduce_many"
"""In place of a verb, in what calls of one name have in common."""


def post_units(
    group: Group, batch: Batch, whole: Handle[Any], gathered: Callable[[dict[str, Any]], Any], options: CallOptions
) -> None:
    """Begin all units; ``whole`` gets ``gathered`` of the results by name; None if this rank gets none.

    If one fails, the others are cancelled, and its error is raised once all have ended.
    """
    if whole.cancelled():
        whole.seq = group.refuse_now(batch.key(0), asyncio.CancelledError())
        return
    handles: list[Handle[Any]] = []
    seq = None  # of the first unit, and then of all: a call that fails on one rank leaves all ranks in step
    plans = group.plans_along(options.strategy, batch.key(0))
    units = units_of(batch.items, partial(batch.chains, plans))
    try:
        units = apart(units)
        for number, unit in enumerate(units):
            handle: Handle[Any] = Handle(loop=group.engine.loop)
            key = batch.key(number)
            # The first signature lists the arrays of all units, so that ranks that differ in any find out at once.
            told = unit.items if number else batch.items
            fields = listing_of([one.name for one in told], [one.array for one in told])
            plan = batch.plan(plans, unit, key)
            plan = replace(plan, signature=plan.signature._replace(**fields))
            result, value, outcome = batch.result_memory(unit)
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
            found.update(zip(names, handle.result(), strict=True))
        return gathered(found)

    join(group.engine.reactor, handles, whole, results)
    if batch.cached is not None and len(units) == 1 and CompiledMapping.fits(units[0]) and group.may_compile(plans):
        name, alike = batch.cached
        group.compiled[name] = CompiledMapping(group, batch.key(0), alike, plan, units[0])


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
    alike = (MANY, options.op)
    cached: CompiledKey = None  # key of the plan of calls like this one; None if it has none
    if options.is_repeatable and options.strategy is None and isinstance(options.op, Hashable):
        cached = many_key((name,)) if name is not None else (*arrays,) if type(arrays) is dict else None
    again = None if cached is None else _again(group, cached, arrays, alike, options)
    if again is not None:
        return again
    names = names_of(arrays)  # sorted: mappings may list their arrays in unlike orders
    whole: Handle[dict[str, Any]] = Handle(loop=group.engine.loop)
    if not names:
        whole.set_result({})
        return whole
    named = names if name is None else (name,)
    key, op, out = many_key(named), options.op, options.out
    order = [*arrays]

    def gathered(found: dict[str, Any]) -> Any:
        return {one: found[one] for one in order} if out is None else out

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
            gets=True, size=group.view.size, cached=None if cached is None else (cached, alike),
        )  # fmt: skip
        if on_device:  # those of one dtype travel as one, uncopied
            _check_apart(items)
            dtypes = sorted(ops, key=lambda dtype: dtype.name)
            units = [Unit(tuple(item for item in items if item.array.dtype == dtype)) for dtype in dtypes]
            alike_there = alike if options.is_plain and isinstance(op, Hashable) else None
            return _begin_on_device(devices, batch, units, whole, gathered, options, alike_there)

    group.in_order(lambda: post_units(group, batch, whole, gathered, options))
    return whole


def _again(
    group: Group, key: CompiledKey, arrays: Any, alike: Arguments, options: CallOptions
) -> Handle[dict[str, Any]] | None:
    """Repeat the latest call under this key; None, with nothing begun, if this one is unlike that."""
    try:
        compiled = cached_plan(group, key, options)
    except KfcommError:  # all checks find the same again, and tell the other ranks
        return None
    if compiled is None:
        return None
    handle: Handle[dict[str, Any]] = Handle(loop=group.engine.loop)
    begun = compiled.start(arrays, alike, options.out, handle)
    if begun is None:
        return None
    handle.seq = begun.seq
    return handle


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
            _check_apart(items)
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


def _check_apart(items: Sequence[Item]) -> None:
    """Raise `ConfigError` for arrays on devices that have some of the memory of another one's ``out``."""
    for item in items_overwritten(items, {*items}):
        raise ConfigError(f"{item.name} has some of the memory of out for another array: give separate memory")


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
