"""Calls on several arrays at once: mappings, and lists of arrays.

A list is what torch and mpi4py have in their coalesced verbs: what is done with one array is done with each, and a list
of results of the same kind comes back. To ``reduce_scatter`` and ``all_to_all`` it is one array for each rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kfcomm.arrays import HostArray, OutArray, adapt, adapt_out, holds_arrays, is_list
from kfcomm.arrays.reduce import wire_dtype_of
from kfcomm.collectives.adasum import ADASUM, combine
from kfcomm.collectives.group import UNNAMED, may_overlap
from kfcomm.collectives.handle import Handle
from kfcomm.collectives.on_device.calls import Order
from kfcomm.collectives.on_device.verbs import Given
from kfcomm.collectives.options import CallOptions
from kfcomm.collectives.packing import Batch, Item, list_key, many_key, post_units
from kfcomm.collectives.plans import PlanKey, Planner, Plans
from kfcomm.collectives.specs import ALL_REDUCE, SPECS
from kfcomm.collectives.verbs import Checks, MakePlan, Posting, checked_op
from kfcomm.common.arguments import checked_name
from kfcomm.errors import ConfigError
from kfcomm.types import Op, Verb

if TYPE_CHECKING:
    from kfcomm.collectives.on_device.verbs import AnyArray
    from kfcomm.collectives.verbs import Verbs


def reduce_mapping(verbs: Verbs, arrays: Any, name: str | None, options: CallOptions) -> Handle[dict[str, Any]]:
    """``all_reduce`` of every array of a mapping; see ``Verbs.all_reduce_many``."""
    verbs._check_open()
    group, devices = verbs._group, verbs._devices
    name = checked_name(name)
    names = names_of(arrays)  # sorted: mappings may list their arrays in unlike orders
    whole: Handle[dict[str, Any]] = Handle(loop=group.engine.loop)
    if not names:
        whole.set_result({})
        return whole
    named = names if name is None else (name,)
    key, op, out = many_key(named), options.op, options.out

    def gathered(found: dict[str, Any]) -> Any:
        return {one: found[one] for one in arrays} if out is None else out

    if isinstance(op, str) and op == ADASUM:
        with Checks(group, key):
            _check_host(verbs, arrays.values(), options.stream)
            outs = outs_by_name(out, arrays)
            items = [_item(one, arrays[one], outs.get(one)) for one in names]
            return combine(verbs, items, key, options, gathered)
    with Checks(group, key):
        on_device = any(devices.takes(arrays[one], options.stream) for one in names)
    with Checks(group, key, devices=devices if on_device else None):
        options = options.checked()
        outs = outs_by_name(out, arrays)
        if on_device:
            devices.check(options.wire_dtype)
            read = {one: devices.read(arrays[one], options.stream) for one in names}
            ops = _ops(ALL_REDUCE, op, read.values())
            given = {
                one: Given(array, array.shape, devices.out(outs.get(one), array, array.shape))
                for one, array in read.items()
            }
            return devices.many(given, gathered, ops, named, options)
        items = [_item(one, arrays[one], outs.get(one)) for one in names]
        ops = _ops(ALL_REDUCE, op, (item.array for item in items))
        batch = Batch(
            SPECS[ALL_REDUCE], tuple(items), lambda number: many_key(named, number), ops,
            _wires(options.wire_dtype, ops), -1, gets=True, size=group.view.size,
        )  # fmt: skip

    group.in_order(lambda: post_units(group, batch, whole, gathered, options))
    return whole


def of_list(verbs: Verbs, verb: Verb, xs: Sequence[Any], name: str | None, options: CallOptions) -> Handle[Any]:
    """A verb on each array of a list; the result is a list, or a tuple, of the results."""
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
        outs = _outs_in_order(out if gets else None, xs)
        if on_device:
            devices.check(options.wire_dtype)
            read = [devices.read(x, options.stream) for x in xs]
            ops = _ops(verb, options.op, read)
            orders = [
                Order(verb, list_key(key, place), one.dtype, one.shape, ops[one.dtype], root, overlapping=overlapping)
                for place, one in enumerate(read)
            ]
            given = [
                devices.given(one, spec.result_shape(one.shape, rank, size) if gets else None, into)
                for one, into in zip(read, outs, strict=True)
            ]

            def listed(results: list[Any]) -> Any:
                return (_like(xs, results) if out is None else out) if gets else None

            return devices.each(orders, given, listed, options)
        arrays = [adapt(x) for x in xs]
        ops = _ops(verb, options.op, arrays)
        items = tuple(
            _item(f"x[{place}]", array, into, spec.result_shape(array.shape, rank, size))
            for place, (array, into) in enumerate(zip(arrays, outs, strict=True))
        )
        batch = Batch(
            spec, items, lambda number: list_key(key, number), ops, _wires(options.wire_dtype, ops), root, gets, size,
            overlapping,
        )  # fmt: skip

    def gathered(found: dict[str, Any]) -> Any:
        return _like(xs, [found[item.name] for item in items]) if out is None else out

    group.in_order(lambda: post_units(group, batch, whole, gathered, options))
    return whole


def adasum_of(verbs: Verbs, x: Any, name: str | None, options: CallOptions) -> Handle[Any]:
    """``all_reduce(op="adasum")`` of an array, or of each array of a list."""
    with verbs._checks(name, options) as (name, options):
        out, is_listed = options.out, is_list(x) and holds_arrays(x)
        xs = x if is_listed else [x]
        _check_host(verbs, xs, options.stream)
        outs = _outs_in_order(out, xs) if is_listed else [out]
        items = [_item(f"x[{place}]", one, into) for place, (one, into) in enumerate(zip(xs, outs, strict=True))]

        def gathered(found: dict[str, Any]) -> Any:
            results = [found[item.name] for item in items]
            return out if out is not None else _like(xs, results) if is_listed else results[0]

        return combine(verbs, items, name, options, gathered)


def _reduce_scatter(verbs: Verbs, xs: Sequence[Any], name: str | None, options: CallOptions) -> Handle[Any]:
    """One array for each rank, which gets the fold of all ranks' arrays for it."""
    group, devices = verbs._group, verbs._devices
    size, rank = group.view.size, group.view.rank
    with verbs._checks(name, options) as (name, options):
        if len(xs) != size:
            raise ConfigError(f"a list of {len(xs)} arrays does not serve {size} ranks")
        on_device = any(devices.takes(x, options.stream) for x in xs)
    with verbs._checks(name, on_device=on_device):
        read = [devices.read(x, options.stream) for x in xs]
        dtype, shape = read[0].dtype, read[rank].shape
        if any(one.dtype != dtype for one in read):
            raise ConfigError(f"the arrays of a list are of one dtype, got {dtype} and others")
        op = checked_op(options.op, dtype)
        is_even = all(one.shape == shape for one in read)
        whole_shape = (size, *shape)
        if on_device:
            devices.check(options.wire_dtype)
            if not is_even:
                raise ConfigError("the arrays of a list are of one shape, where they are on a device")
            order = Order(Verb.REDUCE_SCATTER, name or UNNAMED, dtype, whole_shape, op, overlapping=may_overlap(name))
            return devices.one(order, devices.stacked(read), shape, options)
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


def _ops(verb: Verb, op: Any, arrays: Iterable[AnyArray]) -> dict[np.dtype[Any], Op | None]:
    """The op for each dtype, checked; None in verbs without."""
    folds = SPECS[verb].folds
    return {dtype: checked_op(op, dtype) if folds else None for dtype in dict.fromkeys(one.dtype for one in arrays)}


def _check_host(verbs: Verbs, xs: Iterable[Any], stream: Any) -> None:
    if any(verbs._devices.takes(x, stream) for x in xs):
        raise ConfigError("adasum is for arrays in host memory")


def names_of(arrays: Any) -> list[str]:
    """The names of a mapping, in the order that all ranks have.

    Raises:
        ConfigError: it is not a mapping, or has a name that no call may have.
    """
    if not isinstance(arrays, Mapping):
        raise ConfigError(
            f"all_reduce_many takes a mapping from names to arrays, not a {type(arrays).__name__}; "
            "all_reduce takes a list of arrays"
        )
    if None in arrays:
        raise ConfigError("expected a name (a string), got None")
    return sorted(map(checked_name, arrays))


def outs_by_name(out: Any, arrays: Mapping[str, Any]) -> Mapping[str, Any]:
    """The caller's memory for the results, by name; empty if none was given.

    Raises:
        ConfigError: it does not name each of the arrays.
    """
    if out is None:
        return {}
    if not isinstance(out, Mapping) or out.keys() != arrays.keys():
        raise ConfigError("out is a mapping with the same names as the arrays")
    return out


def _outs_in_order(out: Any, xs: Sequence[Any]) -> list[Any]:
    if out is None:
        return [None] * len(xs)
    if not isinstance(out, (list, tuple)) or len(out) != len(xs):
        raise ConfigError(f"out is a list of {len(xs)} arrays, as what is given")
    return list(out)


def _item(name: str, x: Any, out: Any, shape: tuple[int, ...] | None = None) -> Item:
    """One array, whose result is of ``shape``: its own, if that is left out."""
    array = adapt(x)
    into: OutArray | None = None
    if out is not None:
        into = adapt_out(out, array.shape if shape is None else shape, array.dtype)
    return Item(name, array, into)


def _wires(wire_dtype: Any, ops: Mapping[np.dtype[Any], Any]) -> dict[np.dtype[Any], np.dtype[Any]]:
    return {} if wire_dtype is None else {dtype: wire_dtype_of(wire_dtype, dtype) for dtype in ops}


def _like(xs: Sequence[Any], results: list[Any]) -> Any:
    """A list for a list, a tuple for a tuple."""
    return tuple(results) if isinstance(xs, tuple) else results
