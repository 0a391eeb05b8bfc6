"""All_reduces that are made of other collectives: averages by weight, and Adasum. No fold of elements does either.

**By weight**: the sum of ``w[r]·x[r]`` over the sum of ``w[r]``. What travels is ``w·x`` and, in the same collective,
``w``: one more element of an array, or one more array of a mapping. So a sum of weights always belongs to the sum
that it divides, also where a call is done again by fewer ranks. Products and sums are in the dtype in which sums of
the array's are made (float32 for float16 and bfloat16).

**Adasum**: Maleki et al., "Scaling Distributed Training with Adaptive Summation", MLSys 2021,
https://arxiv.org/abs/2006.02924, as Horovod's ``adasum.h`` has it. Two gradients a and b become

    (1 − a·b / 2|a|²) a + (1 − a·b / 2|b|²) b,

their sum where they are orthogonal and their mean where they are parallel. Of n ranks (0, 1), (2, 3), ... are
combined first, then pairs of pairs; a rank that is left over passes to the next round unchanged.

Recursive halving, as Horovod has it, would halve the tensors log2(n) times, with an all_reduce of inner products
after each. But each combination is a sum of gradients with coefficients that depend on their inner products alone, so
the products of all pairs of ranks determine the whole tree, and all halvings are one exchange:

1. all_to_all: rank r gets the r-th part of every tensor of every rank;
2. all_reduce of the inner products of these parts, of each pair of ranks and each tensor;
3. each rank combines its parts, and all_gather tells them to all.

The bytes are those of recursive halving, 2(n−1)/n·S sent by each rank, in three collectives whatever n is, and n need
be no power of two. Products are taken for each tensor by itself, however many travel together.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from kfcomm.arrays import HostArray, OutArray, adapt, adapt_out, holds_arrays, is_list
from kfcomm.arrays.dtypes import dtype_name
from kfcomm.arrays.kinds import NUMPY
from kfcomm.arrays.reduce import kernel
from kfcomm.collectives.batches import (
    Item,
    item_of,
    like,
    many_key,
    names_of,
    outs_by_name,
    outs_in_order,
    reduce_mapping,
)
from kfcomm.collectives.group import UNNAMED
from kfcomm.collectives.handle import Handle
from kfcomm.collectives.plans import Plan, PlanKey, Plans
from kfcomm.collectives.specs import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, SPECS, CallOptions, Shape
from kfcomm.collectives.steps import LaterSteps, Steps
from kfcomm.collectives.verbs import Checks, Posting, checked_op
from kfcomm.common.arguments import checked_name
from kfcomm.errors import CollectiveError, CollectiveMismatch, ConfigError
from kfcomm.types import Op, Verb

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
            raise ConfigError("a weight is for one array, or for the mapping of all_reduce_many; not for a list")
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
        options = options.checked()
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
        raise ConfigError(f"a weight is a finite number from 0 on, not {weight!r}")
    return float(weight)


def _check_op(op: Any, dtype: np.dtype[Any]) -> None:
    if checked_op(op, dtype) is not Op.AVG:
        raise ConfigError(f"a weight is for op avg, not for {op}")


def _check_options(verbs: Verbs, arrays: Iterable[Any], options: CallOptions) -> None:
    option = options.first_given("shared", "wire_dtype", "stream")
    if option is not None:
        raise ConfigError(f"{option} does not go with a weight")
    if any(verbs._devices.takes(x, None) for x in arrays):
        raise ConfigError("a weight is for arrays in host memory")


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


Matrix: TypeAlias = "np.ndarray[Any, np.dtype[np.float64]]"

LEAST_SQ_NORM = float(np.sqrt(np.finfo(np.float64).tiny))
"""A shorter gradient counts as zero: its coefficient is 1, as in Horovod."""
ROUNDING = 8 * float(np.finfo(np.float64).eps)
"""A combination whose terms cancel down to this fraction of them is zero up to rounding."""


def adasum_weights(products: Matrix) -> Matrix:
    """w, so that the Adasum of all ranks' gradients is Σ w_i g_i.

    Args:
        products: g_i·g_j for each pair of ranks, a symmetric matrix.

    Returns:
        A number for each rank.
    """
    combined = list(np.eye(len(products)))
    while len(combined) > 1:
        pairs = [_pair(one, other, products) for one, other in zip(combined[::2], combined[1::2], strict=False)]
        combined = pairs + combined[len(pairs) * 2 :]
    return combined[0]


def _pair(a: Matrix, b: Matrix, products: Matrix) -> Matrix:
    """The coefficients of two combinations' Adasum."""
    together = float(a @ products @ b)
    return _coefficient(together, a, products) * a + _coefficient(together, b, products) * b


def _coefficient(together: float, a: Matrix, products: Matrix) -> float:
    sq_norm = float(a @ products @ a)
    if sq_norm < LEAST_SQ_NORM or sq_norm <= ROUNDING * float(abs(a) @ abs(products) @ abs(a)):
        return 1.0
    return 1 - together / (2 * sq_norm)


DTYPES = ("float16", "bfloat16", "float32", "float64")
HEAD_NBYTES, DIGEST_NBYTES = 256, 16
ALIGNMENT = 8
BLOCK = 1 << 15
"""Elements of each rank that are converted to float64 at a time."""


@dataclass(frozen=True, slots=True)
class Parts:
    """Division of ``items`` (in the order of all ranks) among ``size`` ranks.

    Each rank gets a row of bytes, with a head and a part of every tensor.
    """

    items: Sequence[Item]
    size: int

    @property
    def head(self) -> bytes:
        """Digest of the names, shapes and dtypes, on which all ranks must agree, and as much of their text as fits."""
        told = ", ".join(f"{item.name} {item.array.dtype}{item.array.shape}" for item in self.items).encode()
        digest = hashlib.blake2b(told, digest_size=DIGEST_NBYTES).digest()
        return (digest + told)[:HEAD_NBYTES].ljust(HEAD_NBYTES, b"\0")

    def check(self, rows: Array, called: Callable[[int], str]) -> None:
        """Check that all ranks have the same tensors; ``called`` puts a rank in words.

        Raises:
            CollectiveMismatch: they differ; on every rank, since each has a row of every other.
        """
        heads = [row[:HEAD_NBYTES].tobytes() for row in rows]
        other = next((rank for rank, head in enumerate(heads) if head != heads[0]), None)
        if other is not None:
            first, second = (heads[rank][DIGEST_NBYTES:].rstrip(b"\0").decode(errors="replace") for rank in (0, other))
            sides = f"{called(0)} has {first}; {called(other)} has {second}"
            raise CollectiveMismatch(f"adasum differs between ranks: {sides}")

    def places(self, start: int) -> list[tuple[Item, int, slice]]:
        """Elements of a part of each tensor, and its place in a row whose parts begin at ``start``."""
        found: list[tuple[Item, int, slice]] = []
        for item in self.items:
            count = -(-item.array.flat.size // self.size)
            nbytes = count * item.array.dtype.itemsize
            found.append((item, count, slice(start, start + nbytes)))
            start += -(-nbytes // ALIGNMENT) * ALIGNMENT
        return found

    def row_nbytes(self, start: int) -> int:
        """Bytes of a row whose parts begin at ``start``."""
        places = self.places(start)
        return start if not places else -(-int(places[-1][2].stop) // ALIGNMENT) * ALIGNMENT

    def shared_out(self) -> Array:
        """A row for each rank."""
        rows = np.zeros((self.size, self.row_nbytes(HEAD_NBYTES)), np.uint8)
        rows[:, :HEAD_NBYTES] = np.frombuffer(self.head, np.uint8)
        for item, count, place in self.places(HEAD_NBYTES):
            padded = np.zeros(self.size * count, item.array.dtype)
            padded[: item.array.flat.size] = item.array.flat
            rows[:, place] = padded.view(np.uint8).reshape(self.size, -1)
        return rows

    @np.errstate(all="ignore")
    def products(self, rows: Array) -> Array:
        """The inner products of each pair of ranks in this rank's part, by tensor; in float64."""
        found = np.zeros((len(self.items), self.size, self.size))
        for number, (item, count, place) in enumerate(self.places(HEAD_NBYTES)):
            parts = _typed(rows, place, item)
            for at in range(0, count, BLOCK):
                block = parts[:, at : at + BLOCK].astype(np.float64)
                found[number] += block @ block.T
        return found

    @np.errstate(all="ignore")
    def combined(self, rows: Array, products: Array) -> Array:
        """This rank's part of every result, end to end in bytes."""
        mine = np.zeros(self.row_nbytes(0), np.uint8)
        places = zip(self.places(HEAD_NBYTES), self.places(0), products, strict=True)
        for (item, count, place), (_, _, target), of_tensor in places:
            weights, parts = adasum_weights(of_tensor), _typed(rows, place, item)
            result = mine[target].view(item.array.dtype)
            for at in range(0, count, BLOCK):
                result[at : at + BLOCK] = weights @ parts[:, at : at + BLOCK].astype(np.float64)
        return mine

    def results(self, rows: Array) -> dict[str, Any]:
        """Results by name, from the combined parts of all ranks."""
        found: dict[str, Any] = {}
        for item, _, place in self.places(0):
            flat = _typed(rows, place, item).reshape(-1)[: item.array.flat.size]
            if item.out is None:
                found[item.name] = item.array.kind.restore(flat.reshape(item.array.shape))
            else:
                np.copyto(item.out.flat, flat)
                found[item.name] = item.out.finish()
        return found


class Adasum:
    """One call, on this rank."""

    def __init__(
        self, verbs: Verbs, items: Sequence[Item], key: str | None, options: CallOptions,
        gathered: Callable[[dict[str, Any]], Any],
    ) -> None:  # fmt: skip
        self._verbs = verbs
        self._key = key
        self._options = options
        self._parts = Parts(items, verbs._group.view.size)
        self._gathered = gathered
        self._rows = self._parts.shared_out()  # first, since it may fail: turns that were taken must be used
        later = [f"{key or UNNAMED}\0adasum {what}" for what in ("products", "parts")]
        self._steps = LaterSteps(verbs, key, options, later)

    def begin(self) -> Steps:
        """Begin the first step; return the handle of the whole call."""
        posting = self._posting(ALL_TO_ALL, self._rows, self._key or UNNAMED)
        self._steps.follow(self._verbs._begin(self._key, posting, self._options), self._multiply)
        return self._steps.whole

    def _multiply(self, rows: Array, key: str) -> None:
        self._rows = rows
        self._parts.check(rows, self._verbs._group.view.called)
        posting = self._posting(ALL_REDUCE, self._parts.products(rows), key)
        self._steps.follow(self._steps.post(posting, key), self._combine)

    def _combine(self, products: Array, key: str) -> None:
        posting = self._posting(ALL_GATHER, self._parts.combined(self._rows, products), key)
        self._steps.whole.end_as(self._steps.post(posting, key), self._verbs._group.engine.reactor, self._finish)

    def _finish(self, rows: Array) -> Any:
        return self._gathered(self._parts.results(rows))

    def _posting(self, verb: Verb, rows: Array, key: str) -> Posting:
        spec, view = SPECS[verb], self._verbs._group.view
        kind = PlanKey(verb, rows.dtype, rows.shape, Op.SUM if spec.folds else None)
        return Posting((Plans.of, kind, key), adapt(rows), spec.result_shape(rows.shape, view.rank, view.size))


def combine(
    verbs: Verbs, items: Sequence[Item], key: str | None, options: CallOptions,
    gathered: Callable[[dict[str, Any]], Any],
) -> Steps:  # fmt: skip
    """Begin a call; ``gathered`` makes its result of the results by name.

    Raises:
        ConfigError: a tensor is of another dtype than `DTYPES`, or a wire dtype was asked for.
    """
    for item in items:
        if str(item.array.dtype) not in DTYPES:
            raise ConfigError(f"adasum is for {', '.join(DTYPES)}, not for {item.array.dtype}")
    if options.wire_dtype is not None:
        raise ConfigError("adasum has no wire dtype: what travels are parts of the arrays themselves")
    return Adasum(verbs, items, key, options, gathered).begin()


def _typed(rows: Array, place: slice, item: Item) -> Array:
    """Parts of a tensor in the rows of all ranks."""
    return np.ascontiguousarray(rows[:, place]).view(item.array.dtype)


def adasum_of(verbs: Verbs, x: Any, name: str | None, options: CallOptions) -> Handle[Any]:
    """``all_reduce(op="adasum")`` of an array, or of each array of a list."""
    with verbs._checks(name, options) as (name, options):
        out, is_listed = options.out, is_list(x) and holds_arrays(x)
        xs = x if is_listed else [x]
        _check_host(verbs, xs, options.stream)
        outs = outs_in_order(out, xs) if is_listed else [out]
        items = [item_of(f"x[{place}]", one, into) for place, (one, into) in enumerate(zip(xs, outs, strict=True))]

        def gathered(found: dict[str, Any]) -> Any:
            results = [found[item.name] for item in items]
            return out if out is not None else like(xs, results) if is_listed else results[0]

        return combine(verbs, items, name, options, gathered)


def adasum_many(verbs: Verbs, arrays: Any, name: str | None, options: CallOptions) -> Handle[dict[str, Any]]:
    """``all_reduce_many(op="adasum")``."""
    verbs._check_open()
    name, names, out = checked_name(name), names_of(arrays), options.out
    if not names:
        return reduce_mapping(verbs, arrays, name, options)
    key = many_key(names if name is None else (name,))
    with Checks(verbs._group, key):
        _check_host(verbs, arrays.values(), options.stream)
        outs = outs_by_name(out, arrays)
        items = [item_of(one, arrays[one], outs.get(one)) for one in names]

        def gathered(found: dict[str, Any]) -> Any:
            return {one: found[one] for one in arrays} if out is None else out

        return combine(verbs, items, key, options, gathered)


def _check_host(verbs: Verbs, xs: Iterable[Any], stream: Any) -> None:
    if any(verbs._devices.takes(x, stream) for x in xs):
        raise ConfigError("adasum is for arrays in host memory")
