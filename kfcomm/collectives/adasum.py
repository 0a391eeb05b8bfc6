"""Adasum: an all_reduce that adds gradients as far as they differ in direction. No fold of elements makes it.

Maleki et al., "Scaling Distributed Training with Adaptive Summation", MLSys 2021, https://arxiv.org/abs/2006.02924, as
Horovod's ``adasum.h`` has it. Two gradients a and b become

    (1 − a·b / 2|a|²) a + (1 − a·b / 2|b|²) b,

their sum where they are orthogonal and their mean where they are parallel. Of n ranks (0, 1), (2, 3), ... are
combined first, then pairs of pairs; a rank that is left over passes to the next round unchanged. Products are taken for
each tensor by itself, however many travel together.

Recursive halving, as Horovod has it, would halve the tensors log2(n) times, with an all_reduce of inner products
after each. But each combination is a sum of gradients with coefficients that depend on their inner products alone, so
the products of all pairs of ranks determine the whole tree, and all halvings are one exchange. The tensors lie end to
end in one buffer, which is cut into n parts of about the same size:

1. all_to_all: rank r gets the r-th part of every rank's buffer;
2. all_reduce of the inner products of tensors that are cut, at most n − 1; those of others are one rank's alone, and
   where none is cut this step is left out;
3. each rank combines its part, and all_gather tells the parts to all.

The bytes are those of recursive halving, 2(n−1)/n·S sent by each rank, in three collectives whatever n is, and n need
be no power of two. Where all ranks share memory, buffers and results are read in place, and three or four collectives
of a few bytes keep the ranks together: S bytes are copied, S read twice, S/n written, S copied.
"""

from __future__ import annotations

import hashlib
from bisect import bisect
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from kfcomm.arrays import adapt, holds_arrays, is_list
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
from kfcomm.collectives.plans import PlanKey, Plans
from kfcomm.collectives.specs import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, SPECS, CallOptions
from kfcomm.collectives.steps import LaterSteps, Steps
from kfcomm.collectives.verbs import Checks, Posting
from kfcomm.common.arguments import checked_name
from kfcomm.core.cause import error_of
from kfcomm.errors import CollectiveMismatch, ConfigError, RemoteProtocolError
from kfcomm.transports.shm.heap import NOWHERE
from kfcomm.types import Op, Verb

if TYPE_CHECKING:
    from kfcomm.collectives.verbs import Verbs
    from kfcomm.transports.shm.heap import Heaps

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
Matrix: TypeAlias = "np.ndarray[Any, np.dtype[np.float64]]"

LEAST_SQ_NORM = float(np.sqrt(np.finfo(np.float64).tiny))
"""A shorter gradient counts as zero: its coefficient is 1, as in Horovod."""
ROUNDING = 8 * float(np.finfo(np.float64).eps)
"""A combination whose terms cancel down to this fraction of them is zero up to rounding."""


@np.errstate(all="ignore")
def adasum_weights(products: Matrix) -> Matrix:
    """w, so that the Adasum of all ranks' gradients is Σ w_i g_i.

    Args:
        products: g_i·g_j for each pair of ranks, a symmetric matrix; or several of them, of one tensor each.

    Returns:
        A number for each rank, and each matrix.
    """
    shape = products.shape[:-1]
    combined = [np.broadcast_to(one, shape) for one in np.eye(shape[-1])]
    while len(combined) > 1:
        pairs = [_pair(one, other, products) for one, other in zip(combined[::2], combined[1::2], strict=False)]
        combined = pairs + combined[len(pairs) * 2 :]
    return combined[0]


def _pair(a: Matrix, b: Matrix, products: Matrix) -> Matrix:
    """The coefficients of two combinations' Adasum."""
    together = _form(a, products, b)
    return _coefficient(together, a, products) * a + _coefficient(together, b, products) * b


def _coefficient(together: Matrix, a: Matrix, products: Matrix) -> Matrix:
    sq_norm = _form(a, products, a)
    terms = _form(abs(a), abs(products), abs(a))
    is_zero = (sq_norm < LEAST_SQ_NORM) | (sq_norm <= ROUNDING * terms)
    return np.where(is_zero, 1.0, 1 - together / (2 * sq_norm))[..., None]


def _form(a: Matrix, products: Matrix, b: Matrix) -> Matrix:
    """Inner product of two combinations."""
    found: Matrix = (a[..., None, :] @ products @ b[..., :, None])[..., 0, 0]
    return found


DTYPES = ("float16", "bfloat16", "float32", "float64")
HEAD_NBYTES, DIGEST_NBYTES = 256, 16
ALIGNMENT = 8
"""Of tensors and parts, in bytes: no element is cut."""
MAX_LONGER = 1 / 8
"""By what part of a part its bounds are moved so that no tensor is cut there."""
BLOCK = 1 << 13
"""Elements of each rank that are converted to float64 at a time: those of four ranks fit in a cache of 256 KiB. A
product of more than 10,000 OpenBLAS gives to threads, for which ranks that share processors wait 100 times as long."""
SHORT = 1 << 9
"""Elements up to which one product of matrices is quicker than one of a matrix and a vector for each rank."""


class Run(NamedTuple):
    """Tensors of one dtype, or pieces of them, end to end in a part."""

    dtype: np.dtype[Any]
    start: int  # in bytes, in a row
    length: int  # in elements
    pieces: list[tuple[int, int, int]]  # number of the tensor, first and last element of the run


class Layout:
    """Tensors end to end in a buffer, in parts of about the same size: row r has a head and the r-th part.

    Args:
        items: in the order of all ranks.
        size: number of ranks.

    Attributes:
        starts: where each tensor begins in the buffer, in bytes.
        bounds: where each part begins, and the last one ends: between tensors, where that makes parts not much longer.
        row_nbytes: of the longest part and its head.
    """

    def __init__(self, items: Sequence[Item], size: int) -> None:
        self.items = items
        self.size = size
        self.starts: list[int] = []
        at = 0
        for item in items:
            self.starts.append(at)
            at += -(-item.array.flat.nbytes // ALIGNMENT) * ALIGNMENT
        ideal = at / size
        self.bounds = [0, *(self._bound(ideal * rank, ideal * MAX_LONGER) for rank in range(1, size)), at]
        lengths = [stop - start for start, stop in pairwise(self.bounds)]
        self.row_nbytes = HEAD_NBYTES + max(ALIGNMENT, *lengths)

    def _bound(self, ideal: float, within: float) -> int:
        """The end of a tensor near a place in the buffer, or else the place."""
        after = bisect(self.starts, ideal)
        near = min(self.starts[max(0, after - 1) : after + 1], key=lambda start: abs(start - ideal), default=0)
        return near if abs(near - ideal) <= within else int(ideal) // ALIGNMENT * ALIGNMENT

    @cached_property
    def head(self) -> bytes:
        """Digest of the names, shapes and dtypes, on which all ranks must agree, and as much of their text as fits."""
        told = ", ".join(f"{item.name} {item.array.dtype}{item.array.shape}" for item in self.items).encode()
        digest = hashlib.blake2b(told, digest_size=DIGEST_NBYTES).digest()
        return (digest + told)[:HEAD_NBYTES].ljust(HEAD_NBYTES, b"\0")

    def check(self, rows: Sequence[Array], called: Callable[[int], str]) -> None:
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

    @cached_property
    def cut(self) -> list[int]:
        """Numbers of the tensors that are in several parts, fewer than there are ranks."""
        numbers = {bisect(self.starts, bound) - 1: bound for bound in self.bounds[1:-1]}
        return [
            number
            for number, bound in numbers.items()
            if self.starts[number] < bound < self.starts[number] + self.items[number].array.flat.nbytes
        ]

    def runs(self, rank: int) -> list[Run]:
        """Return the tensors, or pieces of them, in the part of a rank."""
        begin, end = self.bounds[rank : rank + 2]
        found: list[Run] = []
        for number, (at, item) in enumerate(zip(self.starts, self.items, strict=True)):
            dtype = item.array.dtype
            start, stop = max(at, begin), min(at + item.array.flat.nbytes, end)
            if start >= stop:
                continue
            if not found or found[-1].dtype != dtype:
                found.append(Run(dtype, HEAD_NBYTES + start - begin, 0, []))
            run = found[-1]
            first = (HEAD_NBYTES + start - begin - run.start) // dtype.itemsize
            length = first + (stop - start) // dtype.itemsize
            found[-1] = run._replace(length=length, pieces=[*run.pieces, (number, first, length)])
        return found

    def fill(self, rows: Array) -> None:
        """Write the tensors, and a head in front of each part."""
        rows[:, :HEAD_NBYTES] = np.frombuffer(self.head, np.uint8)
        for start, item in zip(self.starts, self.items, strict=True):
            flat = item.array.flat.view(np.uint8)
            for rank, place, here in self._places(start, flat.size):
                rows[rank, HEAD_NBYTES + place.start : HEAD_NBYTES + place.stop] = flat[here]

    def results(self, parts: Sequence[Array] | Array) -> dict[str, Any]:
        """Results by name, from the combined parts of all ranks."""
        found: dict[str, Any] = {}
        for start, item in zip(self.starts, self.items, strict=True):
            # Each has memory of its own, which is of sizes that the program has freed before: no pages to be made.
            flat = np.empty_like(item.array.flat) if item.out is None else item.out.flat
            into = flat.view(np.uint8)
            for rank, place, here in self._places(start, into.size):
                into[here] = parts[rank][place]
            found[item.name] = item.array.restore(flat) if item.out is None else item.out.finish()
        return found

    def _places(self, start: int, nbytes: int) -> Iterator[tuple[int, slice, slice]]:
        """Pieces of a tensor: the part, and the place there and in the tensor."""
        at, stop = start, start + nbytes
        rank = bisect(self.bounds, start) - 1
        while at < stop:
            begin, end = self.bounds[rank], min(stop, self.bounds[rank + 1])
            if at < end:
                yield rank, slice(at - begin, end - begin), slice(at - start, end - start)
            at, rank = end, rank + 1


class Part:
    """The part of one rank, in the rows of all ranks; each pass over it converts blocks to float64 in a cache."""

    def __init__(self, layout: Layout, rank: int, rows: Sequence[Array]) -> None:
        self._layout = layout
        self._rank = rank
        self._rows = rows
        self._runs = layout.runs(rank)
        self._numbers = [number for run in self._runs for number, _, _ in run.pieces]
        self._products = np.zeros((0, layout.size, layout.size))

    @np.errstate(all="ignore")
    def multiply(self) -> Matrix:
        """Make the inner products of each pair of ranks, by tensor; return those of tensors that are cut."""
        size, cut = self._layout.size, self._layout.cut
        products = self._products = np.zeros((len(self._numbers), size, size))
        found = np.zeros((size, size))
        upper = [found[one, one:] for one in range(size)]
        for place, _, block in self._blocks():
            if block.shape[1] <= SHORT:
                products[place] += block @ block.T
                continue
            for one, row in enumerate(upper):
                np.dot(block[one:], block[one], out=row)
            products[place] += found
        for one in range(size):  # both triangles
            products[:, one + 1 :, one] = products[:, one, one + 1 :]
        shared = np.zeros((len(cut), size, size))
        for place, number in enumerate(self._numbers):
            if number in cut:
                shared[cut.index(number)] = products[place]
        return shared

    @np.errstate(all="ignore")
    def combine(self, shared: Matrix, into: Array) -> None:
        """Write the result of the part to ``into``, a row; ``shared``: products of tensors that are cut."""
        cut = self._layout.cut
        for place, number in enumerate(self._numbers):
            if number in cut:
                self._products[place] = shared[cut.index(number)]
        weights = adasum_weights(self._products)
        for place, at, block in self._blocks():
            dtype = self._layout.items[self._numbers[place]].array.dtype
            into[at : at + block.shape[1] * dtype.itemsize].view(dtype)[:] = weights[place] @ block

    def _blocks(self) -> Iterator[tuple[int, int, Matrix]]:
        """Elements of one tensor on all ranks, in float64, by its place in this part; and where they are in a row."""
        buffer = np.empty((self._layout.size, BLOCK))
        first = 0
        for run in self._runs:
            item = run.dtype.itemsize
            typed = [row[run.start : run.start + run.length * item].view(run.dtype) for row in self._rows]
            place, pieces = first, run.pieces
            for at in range(0, run.length, BLOCK):
                block = buffer[:, : min(BLOCK, run.length - at)]
                for one, values in zip(block, typed, strict=True):
                    one[:] = values[at : at + BLOCK]
                while True:
                    _, start, stop = pieces[place - first]
                    begin, end = max(start, at), min(stop, at + BLOCK)
                    if begin < end:
                        yield place, run.start + begin * item, block[:, begin - at : end - at]
                    if stop > at + BLOCK or place - first + 1 == len(pieces):
                        break
                    place += 1
            first += len(pieces)


class Adasum:
    """One call, on this rank.

    Where the ranks of the group share memory they first tell each other where their buffers are; a rank that cannot
    read all of them says so, and the call goes by messages. A buffer is in use until all ranks have read the result in
    it.
    """

    def __init__(
        self, verbs: Verbs, items: Sequence[Item], key: str | None, options: CallOptions,
        gathered: Callable[[dict[str, Any]], Any],
    ) -> None:  # fmt: skip
        self._verbs = verbs
        self._group = group = verbs._group
        self._key = key
        self._options = options
        self._layout = Layout(items, group.view.size)
        self._gathered = gathered
        self._heaps = group.heaps if group.view.size > 1 else None
        # First, since it may fail: turns that were taken must be used.
        self._block = self._new_block()
        self._layout.fill(self._block)
        self._places: list[tuple[int, int]] = []
        self._part: Part
        num_later = 1 + bool(self._layout.cut) + (self._heaps is not None)
        later = [f"{key or UNNAMED}\0adasum {number}" for number in range(num_later)]
        self._steps = LaterSteps(verbs, key, options, later)

    def begin(self) -> Steps:
        """Begin the first step; return the handle of the whole call."""
        name = self._key or UNNAMED
        if self._heaps is None:
            posting = self._posting(ALL_TO_ALL, self._block, name)
            self._steps.follow(self._verbs._begin(self._key, posting, self._options), self._multiply)
        else:
            where = np.array([self._place(self._heaps), self._layout.row_nbytes])
            posting = self._posting(ALL_GATHER, where, name)
            self._steps.follow(self._verbs._begin(self._key, posting, self._options), self._meet)
        return self._steps.whole

    def _new_block(self) -> Array:
        shape = (self._layout.size, self._layout.row_nbytes)
        block: Array | None = None if self._heaps is None else self._heaps.empty(shape[0] * shape[1])
        return np.empty(shape, np.uint8) if block is None else block.reshape(shape)

    def _place(self, heaps: Heaps) -> int:
        """Place of the buffer for the others; `NOWHERE` if it is not in shared memory, or theirs cannot be read."""
        return heaps.place_of(self._block) if heaps.map(self._group.view.members) else NOWHERE

    def _meet(self, told: Array, key: str) -> None:
        """Go on with what the ranks have told, in memory if all can."""
        places = [(int(place), int(nbytes)) for place, nbytes in told]
        if self._heaps is None or any(place == NOWHERE for place, _ in places):
            posting = self._posting(ALL_TO_ALL, self._block, key)
            self._steps.follow(self._steps.post(posting, key), self._multiply)
        else:
            self._places = places
            rank = self._group.view.rank
            rows = [self._seen(self._heaps, other, rank) for other in range(self._layout.size)]
            self._multiply(rows, key)

    def _seen(self, heaps: Heaps, rank: int, number: int) -> Array:
        """A row of a rank, in its memory."""
        found: Array
        if rank == self._group.view.rank:
            found = self._block[number]
            return found
        peer, (place, nbytes) = self._group.view.members[rank], self._places[rank]
        self._group.engine.links.traffic.read(peer, nbytes)
        try:
            return heaps.array(peer, place + number * nbytes, np.dtype(np.uint8), nbytes)
        except RemoteProtocolError:
            lost = self._group.engine.router.lost.get(peer)
            if lost is None:
                raise
            raise error_of(lost, self._key or UNNAMED, self._group.view.titled(self._key or UNNAMED)) from None

    def _multiply(self, rows: Sequence[Array], key: str) -> None:
        view = self._group.view
        self._layout.check(rows, view.called)
        self._part = Part(self._layout, view.rank, rows)
        shared = self._part.multiply()
        if not self._layout.cut:
            self._combine(shared, key)
            return
        posting = self._posting(ALL_REDUCE, shared, key)
        self._steps.follow(self._steps.post(posting, key), self._combine)

    def _combine(self, products: Matrix, key: str) -> None:
        rank = self._group.view.rank
        mine = self._block[rank]  # of which no other rank reads the input
        self._part.combine(products, mine)
        if self._places:
            self._steps.follow(self._steps.post(_barrier(key), key), self._read)
            return
        posting = self._posting(ALL_GATHER, mine[HEAD_NBYTES:], key)
        self._steps.whole.end_as(self._steps.post(posting, key), self._group.engine.reactor, self._finish)

    def _read(self, _: None, key: str) -> None:
        """Copy the results from the memory of all ranks; done when all have."""
        heaps = self._heaps
        if heaps is None:
            return
        parts = [self._seen(heaps, rank, rank)[HEAD_NBYTES:] for rank in range(self._layout.size)]
        found = self._gathered(self._layout.results(parts))
        self._steps.whole.end_as(self._steps.post(_barrier(key), key), self._group.engine.reactor, lambda _: found)

    def _finish(self, parts: Array) -> Any:
        return self._gathered(self._layout.results(parts))

    def _posting(self, verb: Verb, rows: Array, key: str) -> Posting:
        spec, view = SPECS[verb], self._group.view
        kind = PlanKey(verb, rows.dtype, rows.shape, Op.SUM if spec.folds else None)
        return Posting((Plans.of, kind, key), adapt(rows), spec.result_shape(rows.shape, view.rank, view.size))


def _barrier(key: str) -> Posting:
    return Posting((Plans.barrier, key))


def combine(
    verbs: Verbs, items: Sequence[Item], key: str | None, options: CallOptions,
    gathered: Callable[[dict[str, Any]], Any],
) -> Steps:  # fmt: skip
    """Begin a call; ``gathered`` makes its result of the results by name.

    Raises:
        ConfigError: a tensor is of another dtype than `DTYPES`, or a wire dtype was asked for.
    """
    for item in items:
        if item.array.dtype.name not in DTYPES:
            raise ConfigError(f"adasum is for {', '.join(DTYPES)}, not for {item.array.dtype}")
    if options.wire_dtype is not None:
        raise ConfigError("adasum has no wire dtype: what travels are parts of the arrays themselves")
    return Adasum(verbs, items, key, options, gathered).begin()


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
