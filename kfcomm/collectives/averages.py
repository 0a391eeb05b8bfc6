"""Averages by weight: all_reduces that are made of sums.

Each rank sends ``w·x`` and, in the same collective, ``w``: one more element of an array, or one more array of a
mapping. So a sum of weights always belongs to the sum that it divides, even if fewer ranks repeat the call. Products
and sums have the accumulation dtype of the array (float32 for float16 and bfloat16).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from kfcomm.arrays import HostArray, OutArray, adapt, adapt_out, holds_arrays, is_list
from kfcomm.arrays.dtypes import dtype_name
from kfcomm.arrays.kinds import NUMPY
from kfcomm.arrays.reduce import kernel
from kfcomm.collectives.batches import names_of, outs_by_name, reduce_mapping
from kfcomm.collectives.calling import Checks, Posting, checked_op
from kfcomm.collectives.group import UNNAMED
from kfcomm.collectives.handle import Handle
from kfcomm.collectives.plans import Plan, PlanKey, Plans
from kfcomm.collectives.specs import ALL_REDUCE, CallOptions, Shape
from kfcomm.collectives.steps import Steps
from kfcomm.collectives.units import many_key
from kfcomm.common.arguments import checked_name
from kfcomm.errors import CollectiveError, ConfigError
from kfcomm.types import Op

if TYPE_CHECKING:
    from kfcomm.collectives.verbs import Verbs


Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
OP = "avg by weight"
"""In signatures, so that ranks which give weights never meet ranks which give none."""
WEIGHT = "kfcomm/weight"
"""The name of the weight among the arrays of a mapping."""


def average(verbs: Verbs, x: Any, name: str | None, options: CallOptions) -> Handle[Any]:
    """``all_reduce`` with a weight; see ``Verbs.all_reduce``."""
    with verbs._checks(name, options) as (name, options):
        if is_list(x) and holds_arrays(x):
            raise ConfigError("weight expects one array, or the mapping of all_reduce_many, got a list")
        _check_options(verbs, [x], options)
        array = adapt(x)
        _check_op(options.op, array.dtype)
        target = None if options.out is None else adapt_out(options.out, array.shape, array.dtype)
        packed = np.empty(array.size + 1, _sum_dtype(array))
        # The weight is one more element, so that the sum of weights always belongs to the sum that it divides.
        packed[-1] = counted = _checked(options.weight)
        _scale(array.flat, counted, packed[:-1])

    def averaged(sums: Array) -> Any:
        return _divided(sums[:-1], float(sums[-1].real), array, target)

    given = HostArray(packed, packed.shape, NUMPY, False)
    plan = (_plan, array.dtype, array.shape, packed.dtype, name or UNNAMED)
    return _then(verbs, verbs._begin(name, Posting(plan, given, packed.shape), options), averaged)


def average_many(verbs: Verbs, arrays: Any, name: str | None, options: CallOptions) -> Handle[dict[str, Any]]:
    """``all_reduce_many`` with a weight; see ``Verbs.all_reduce_many``."""
    verbs._check_open()
    name = checked_name(name)
    names = names_of(arrays)
    if not names:
        return reduce_mapping(verbs, arrays, name, options)
    title = names[0] if name is None else name
    out = options.out
    with Checks(verbs._group, many_key((title,))):
        options = verbs._group.checked(options)
        _check_options(verbs, arrays.values(), options)
        counted, given = _checked(options.weight), {one: adapt(arrays[one]) for one in names}
        outs = outs_by_name(out, arrays)
        targets = {one: adapt_out(outs[one], given[one].shape, given[one].dtype) for one in outs}
        scaled: dict[str, Array] = {WEIGHT: np.array(counted)}
        for one, array in given.items():
            _check_op(options.op, array.dtype)
            product = scaled[_called(one, array)] = np.empty(array.shape, _sum_dtype(array))
            _scale(array.flat, counted, product.reshape(-1))

    def averaged(sums: dict[str, Array]) -> Any:
        whole = float(sums[WEIGHT])
        found = {}
        for one in arrays:
            total = sums[_called(one, given[one])].reshape(-1)
            found[one] = _divided(total, whole, given[one], targets.get(one))
        return found if out is None else out

    return _then(verbs, reduce_mapping(verbs, scaled, title, options.but(op=Op.SUM, out=None)), averaged)


def _plan(plans: Plans, dtype: np.dtype[Any], shape: Shape, sum_dtype: np.dtype[Any], key: str) -> Plan:
    """Plan of a sum with one element more, whose signature matches weighted averages of such arrays alone."""
    found = plans.of(PlanKey(ALL_REDUCE, sum_dtype, (math.prod(shape) + 1,), Op.SUM), key)
    return replace(found, signature=found.signature._replace(dtype=dtype_name(dtype), shape=shape, op=OP))


def _sum_dtype(array: HostArray) -> np.dtype[Any]:
    return kernel(Op.AVG, array.dtype).accumulate_dtype


def _called(name: str, array: HostArray) -> str:
    """Name of a product on the wire: it includes the array's dtype where the product has another."""
    return name if _sum_dtype(array) == array.dtype else f"{name} of {dtype_name(array.dtype)}"


def _checked(weight: Any) -> float:
    is_number = isinstance(weight, (int, float, np.integer, np.floating)) and not isinstance(weight, bool)
    if not is_number or not math.isfinite(weight) or weight < 0:
        raise ConfigError(f"expected a finite weight of at least 0, got {weight!r}")
    return float(weight)


def _check_op(op: Any, dtype: np.dtype[Any]) -> None:
    if checked_op(op, dtype) is not Op.AVG:
        raise ConfigError(f"weight expects op avg, got {op}")


def _check_options(verbs: Verbs, arrays: Iterable[Any], options: CallOptions) -> None:
    option = options.first_given("shared", "wire_dtype", "stream")
    if option is not None:
        raise ConfigError(f"{option} cannot be combined with weight: leave one out")
    verbs._devices.refuse("a weight", arrays, None)


def _scale(flat: Array, weight: float, into: Array) -> None:
    """Multiply by the weight; at weight 0 the array is ignored, since the mean of no samples may be NaN."""
    if weight == 0:
        into[:] = 0
    else:
        with np.errstate(all="ignore"):
            np.multiply(flat, weight, out=into, dtype=into.dtype)


def _divided(sums: Array, weight: float, array: HostArray, target: OutArray | None) -> Any:
    if weight == 0:
        raise CollectiveError("expected a weight above 0 on some rank: the weights of all ranks are 0")
    with np.errstate(all="ignore"):
        np.true_divide(sums, weight, out=sums)
        if target is not None:
            np.copyto(target.flat, sums, casting="unsafe")
            return target.finish()
        return array.restore(sums.astype(array.dtype, copy=False))


def _then(verbs: Verbs, inner: Handle[Any], outcome: Callable[[Any], Any]) -> Handle[Any]:
    engine = verbs._group.engine
    return Steps(loop=engine.loop).end_as(inner, engine.reactor, outcome)
