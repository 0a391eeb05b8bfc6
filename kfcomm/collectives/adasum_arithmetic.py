"""Arithmetic of Adasum: weights from inner products, and the layout and the two passes of a part. Pure."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from kfcomm.collectives.units import Item

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


ALIGNMENT = 8
"""Of tensors and parts, in bytes: no element is cut."""
MAX_LONGER = 1 / 8
"""By what part of a part its bounds are moved so that no tensor is cut there."""
BLOCKS_NBYTES = 1 << 19
"""Elements of all ranks that are converted to float64 at a time: they fit in a cache."""
SHORTEST, LONGEST = 1 << 11, 1 << 15
"""Bounds of the elements of one rank among them."""
LONGEST_PRODUCT = 1 << 13
"""Elements of a product of two vectors: more than 10,000 OpenBLAS gives to threads, for which ranks that share
processors wait 100 times as long. It does not with products of a matrix, from two rows on."""
SHORT = 1 << 9
"""Elements up to which one product of matrices is quicker than one of a matrix and a vector for each rank."""


class Run(NamedTuple):
    """Tensors of one dtype, or pieces of them, end to end in a part."""

    dtype: np.dtype[Any]
    start: int  # in bytes, in a row
    length: int  # in elements
    pieces: list[tuple[int, int, int]]  # number of the tensor, first and last element of the run


class FusedLayout:
    """Tensors end to end in a buffer, in parts of about the same size, one in each row.

    Args:
        items: in the order of all ranks.
        size: number of ranks.

    Attributes:
        starts: where each tensor begins in the buffer, in bytes.
        bounds: where each part begins, and the last one ends: between tensors, where that makes parts not much longer.
        row_nbytes: of the longest part.
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
        self.row_nbytes = max(ALIGNMENT, *lengths)

    def _bound(self, ideal: float, within: float) -> int:
        """The end of a tensor near a place in the buffer, or else the place."""
        after = bisect(self.starts, ideal)
        near = min(self.starts[max(0, after - 1) : after + 1], key=lambda start: abs(start - ideal), default=0)
        return near if abs(near - ideal) <= within else int(ideal) // ALIGNMENT * ALIGNMENT

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
                found.append(Run(dtype, start - begin, 0, []))
            run = found[-1]
            first = (start - begin - run.start) // dtype.itemsize
            length = first + (stop - start) // dtype.itemsize
            found[-1] = run._replace(length=length, pieces=[*run.pieces, (number, first, length)])
        return found

    def fill(self, rows: Array) -> None:
        """Write the tensors."""
        for start, item in zip(self.starts, self.items, strict=True):
            flat = item.array.flat.view(np.uint8)
            for rank, place, here in self._places(start, flat.size):
                rows[rank, place] = flat[here]

    def results(self, parts: Sequence[Array] | Array) -> dict[str, Any]:
        """Results by name, from the combined parts of all ranks."""
        found: dict[str, Any] = {}
        # Views of one array, as in other fused calls: for many small ones the system would make pages in each call.
        is_new = any(item.out is None for item in self.items)
        whole = np.empty(self.bounds[-1] if is_new else 0, np.uint8)
        for start, item in zip(self.starts, self.items, strict=True):
            given = item.array.flat
            flat = whole[start : start + given.nbytes].view(given.dtype) if item.out is None else item.out.flat
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


class TensorPart:
    """The part of one rank, in the rows of all ranks; each pass over it converts blocks to float64 in a cache."""

    def __init__(self, layout: FusedLayout, rank: int, rows: Sequence[Array]) -> None:
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
        # From two rows on, also for the last rank: see `LONGEST_PRODUCT`.
        firsts = [max(0, min(one, size - 2)) for one in range(size)]
        upper = [found[one, first:] for one, first in enumerate(firsts)]
        for place, _, block in self._blocks():
            if block.shape[1] <= SHORT:
                products[place] += block @ block.T
                continue
            for one, row in enumerate(upper):
                np.dot(block[firsts[one] :], block[one], out=row)
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
        size = self._layout.size
        length = max(SHORTEST, min(LONGEST, BLOCKS_NBYTES // (8 * size))) if size > 1 else LONGEST_PRODUCT
        buffer = np.empty((size, length))
        first = 0
        for run in self._runs:
            item = run.dtype.itemsize
            typed = [row[run.start : run.start + run.length * item].view(run.dtype) for row in self._rows]
            place, pieces = first, run.pieces
            for at in range(0, run.length, length):
                block = buffer[:, : min(length, run.length - at)]
                for one, values in zip(block, typed, strict=True):
                    one[:] = values[at : at + length]
                while True:
                    _, start, stop = pieces[place - first]
                    begin, end = max(start, at), min(stop, at + length)
                    if begin < end:
                        yield place, run.start + begin * item, block[:, begin - at : end - at]
                    if stop > at + length or place - first + 1 == len(pieces):
                        break
                    place += 1
            first += len(pieces)
