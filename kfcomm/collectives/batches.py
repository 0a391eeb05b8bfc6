"""Calls that take several arrays and are one to the caller: mappings, and lists of arrays.

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
from kfcomm.collectives.compiled import ALL_REDUCE, GATHER, REDUCE
from kfcomm.collectives.group import UNNAMED, checked_priority, may_overlap
from kfcomm.collectives.handle import Handle
from kfcomm.collectives.on_device.calls import Order
from kfcomm.collectives.packing import Batch, Item, list_key, many_key, post_units
from kfcomm.collectives.plans import Planner, Plans
from kfcomm.collectives.verbs import FOLDING, ROOTED, Checks, checked_op
from kfcomm.common.arguments import checked_name
from kfcomm.common.sizes import seconds_of
from kfcomm.errors import ConfigError
from kfcomm.types import Op, Seconds, Verb

if TYPE_CHECKING:
    from kfcomm.collectives.verbs import Verbs


def reduce_mapping(
    verbs: Verbs, arrays: Any, name: str | None, op: Any, out: Any, timeout: Seconds | None, priority: int,
    wire_dtype: Any, stream: Any,
) -> Handle[dict[str, Any]]:  # fmt: skip
    """See ``Verbs.all_reduce_many``."""
    verbs._check_open()
    group, devices = verbs._group, verbs._devices
    name = checked_name(name)
    names = names_of(arrays)
    whole: Handle[dict[str, Any]] = Handle(loop=group.engine.loop)
    if not names:
        whole.set_result({})
        return whole
    named = names if name is None else (name,)

    def gathered(found: dict[str, Any]) -> Any:
        return {one: found[one] for one in arrays} if out is None else out

    if isinstance(op, str) and op == ADASUM:
        key = many_key(named)
        with Checks(group, key):
            _check_host(verbs, arrays.values(), stream)
            outs = outs_by_name(out, arrays)
            return combine(
                verbs,
                [_item(one, arrays[one], outs.get(one)) for one in names],
                key,
                timeout,
                priority,
                wire_dtype,
                gathered,
            )
    with Checks(group, many_key(named)):
        on_device = any(devices.takes(arrays[one], stream) for one in names)
    with Checks(group, many_key(named), devices=devices if on_device else None):
        timeout_s = seconds_of(timeout)
        priority = checked_priority(priority)
        outs = outs_by_name(out, arrays)
        if on_device:
            devices.check(wire_dtype)
            read = {one: devices.read(arrays[one], stream) for one in names}
            chosen = {one.dtype: checked_op(op, one.dtype) for one in read.values()}
            places = {one: devices.out(outs.get(one), array, array.shape) for one, array in read.items()}
            return devices.many(read, gathered, chosen, timeout_s, priority, named, places)
        items = tuple(_item(one, arrays[one], outs.get(one)) for one in names)
        ops: dict[np.dtype[Any], Op | None] = {
            dtype: checked_op(op, dtype) for dtype in dict.fromkeys(item.array.dtype for item in items)
        }
        batch = Batch(
            ALL_REDUCE, items, lambda number: many_key(named, number), ops, _wires(wire_dtype, ops), -1, gets=True,
            size=group.view.size,
        )  # fmt: skip

    group.in_order(lambda: post_units(group, batch, whole, gathered, timeout_s=timeout_s, priority=priority))
    return whole


def of_list(
    verbs: Verbs, verb: Verb, xs: Sequence[Any], name: str | None, out: Any, timeout: Seconds | None, priority: int,
    stream: Any, *, op: Any = None, root: Any = None, wire_dtype: Any = None,
) -> Handle[Any]:  # fmt: skip
    """A verb on each array of a list; the result is a list, or a tuple, of the results."""
    if verb is Verb.REDUCE_SCATTER:
        return _reduce_scatter(verbs, xs, name, out, timeout, priority, stream, op=op, wire_dtype=wire_dtype)
    group, devices = verbs._group, verbs._devices
    whole: Handle[Any] = Handle(loop=group.engine.loop)
    key = name or UNNAMED
    with verbs._checks(name, timeout, priority) as (name, priority):
        on_device = any(devices.takes(x, stream) for x in xs)
    with verbs._checks(name, devices=devices if on_device else None):
        to = verbs._check_rank("root", root) if verb in ROOTED else -1
        gets = verb not in (REDUCE, GATHER) or group.view.rank == to
        outs = _outs_in_order(out if gets else None, xs)
        if on_device:
            devices.check(wire_dtype)
            read = [devices.read(x, stream) for x in xs]
            orders = [
                Order(
                    verb, list_key(key, place), one.dtype, one.shape,
                    checked_op(op, one.dtype) if verb in FOLDING else None, to, overlapping=may_overlap(name),
                )
                for place, one in enumerate(read)
            ]  # fmt: skip
            shapes = [_result_shape(verb, one.shape, group.view.size) if gets else None for one in read]

            def listed(results: list[Any]) -> Any:
                return (_like(xs, results) if out is None else out) if gets else None

            return devices.each(orders, read, shapes, outs, listed, seconds_of(timeout), priority)
        arrays = [adapt(x) for x in xs]
        ops = {
            dtype: checked_op(op, dtype) if verb in FOLDING else None
            for dtype in dict.fromkeys(array.dtype for array in arrays)
        }
        items = tuple(
            _item(f"x[{place}]", array, into, _result_shape(verb, array.shape, group.view.size))
            for place, (array, into) in enumerate(zip(arrays, outs, strict=True))
        )
        wires = _wires(wire_dtype, ops)
        batch = Batch(verb, items, lambda number: list_key(key, number), ops, wires, to, gets, group.view.size)
        timeout_s = seconds_of(timeout)

    def gathered(found: dict[str, Any]) -> Any:
        return _like(xs, [found[item.name] for item in items]) if out is None else out

    group.in_order(
        lambda: post_units(
            group, batch, whole, gathered, timeout_s=timeout_s, priority=priority, overlapping=may_overlap(name)
        )
    )
    return whole


def adasum_of(
    verbs: Verbs,
    x: Any,
    name: str | None,
    out: Any,
    timeout: Seconds | None,
    priority: int,
    wire_dtype: Any,
    stream: Any,
) -> Handle[Any]:
    """``all_reduce(op="adasum")`` of an array, or of each array of a list."""
    with verbs._checks(name, timeout, priority) as (name, priority):
        is_listed = is_list(x) and holds_arrays(x)
        xs = x if is_listed else [x]
        _check_host(verbs, xs, stream)
        outs = _outs_in_order(out, xs) if is_listed else [out]
        items = [_item(f"x[{place}]", one, into) for place, (one, into) in enumerate(zip(xs, outs, strict=True))]

        def gathered(found: dict[str, Any]) -> Any:
            results = [found[item.name] for item in items]
            return out if out is not None else _like(xs, results) if is_listed else results[0]

        return combine(verbs, items, name, timeout, priority, wire_dtype, gathered)


def _reduce_scatter(
    verbs: Verbs, xs: Sequence[Any], name: str | None, out: Any, timeout: Seconds | None, priority: int, stream: Any,
    *, op: Any, wire_dtype: Any,
) -> Handle[Any]:  # fmt: skip
    """One array for each rank, which gets the fold of all ranks' arrays for it."""
    group, devices = verbs._group, verbs._devices
    size, rank = group.view.size, group.view.rank
    with verbs._checks(name, timeout, priority) as (name, priority):
        if len(xs) != size:
            raise ConfigError(f"a list of {len(xs)} arrays does not serve {size} ranks")
        on_device = any(devices.takes(x, stream) for x in xs)
    with verbs._checks(name, devices=devices if on_device else None):
        read = [devices.read(x, stream) for x in xs]
        dtype, shape = read[0].dtype, read[rank].shape
        if any(one.dtype != dtype for one in read):
            raise ConfigError(f"the arrays of a list are of one dtype, got {dtype} and others")
        chosen = checked_op(op, dtype)
        is_even = all(one.shape == shape for one in read)
        whole_shape = (size, *shape)
        if on_device:
            devices.check(wire_dtype)
            if not is_even:
                raise ConfigError("the arrays of a list are of one shape, where they are on a device")
            order = Order(
                Verb.REDUCE_SCATTER, name or UNNAMED, dtype, whole_shape, chosen, overlapping=may_overlap(name)
            )
            return devices.one(order, devices.stacked(read), shape, out, seconds_of(timeout), priority)
        arrays = [adapt(one) for one in read]
        wire = None if wire_dtype is None else wire_dtype_of(wire_dtype, dtype)
        flat = np.concatenate([one.flat for one in arrays])
        joined = HostArray(flat, whole_shape if is_even else flat.shape, arrays[rank].kind, False)
        target = None if out is None else adapt_out(out, shape, dtype)
        plan: tuple[Any, ...] = (Plans.of, Verb.REDUCE_SCATTER, dtype, whole_shape, chosen, -1, name or UNNAMED, wire)
        if not is_even:
            shapes = tuple(one.shape for one in arrays)
            plan = (Plans.plan, Planner.reduce_scatter_parts, dtype, shapes, chosen, wire)
    return verbs._begin(name, joined, shape, target, timeout, priority, plan)


def _check_host(verbs: Verbs, xs: Iterable[Any], stream: Any) -> None:
    if any(verbs._devices.takes(x, stream) for x in xs):
        raise ConfigError("adasum is for arrays in host memory")


def names_of(arrays: Any) -> list[str]:
    """The names of a mapping, in the order that all ranks have.

    Raises:
        ConfigError: it is no mapping, or a name cannot travel.
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
    """Where results go; nothing if the caller does not say.

    Raises:
        ConfigError: not for each of the arrays.
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


def _result_shape(verb: Verb, shape: tuple[int, ...], size: int) -> tuple[int, ...]:
    return (size, *shape) if verb in (Verb.GATHER, Verb.ALL_GATHER) else shape


def _like(xs: Sequence[Any], results: list[Any]) -> Any:
    """A list for a list, a tuple for a tuple."""
    return tuple(results) if isinstance(xs, tuple) else results
