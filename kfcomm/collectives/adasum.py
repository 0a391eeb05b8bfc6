"""``op="adasum"`` of ``all_reduce`` and ``all_reduce_many``: no fold of elements, so an algorithm of its own.

Recursive halving, as Horovod has it, would halve the tensors log2(n) times, with an all_reduce of inner products after
each. Since these follow from the products of all pairs of ranks (`reduce.adasum`), all halvings are one exchange:

1. all_to_all: rank r gets the r-th part of every tensor of every rank;
2. all_reduce of the inner products of these parts, of each pair of ranks and each tensor;
3. each rank combines its parts, and all_gather tells them to all.

The bytes are those of recursive halving, 2(n−1)/n·S sent by each rank, in three collectives whatever n is, and n need
be no power of two. Products are taken for each tensor by itself, however many travel together.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from kfcomm.arrays import adapt
from kfcomm.arrays.reduce.adasum import adasum_weights
from kfcomm.collectives.group import UNNAMED
from kfcomm.collectives.options import CallOptions
from kfcomm.collectives.packing import Item
from kfcomm.collectives.plans import PlanKey, Plans
from kfcomm.collectives.specs import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, SPECS
from kfcomm.collectives.steps import LaterSteps, Steps
from kfcomm.collectives.verbs import Posting
from kfcomm.errors import CollectiveMismatch, ConfigError
from kfcomm.types import Op, Verb

if TYPE_CHECKING:
    from kfcomm.collectives.verbs import Verbs

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

ADASUM = "adasum"
"""No `Op`: it combines arrays, not elements."""
DTYPES = ("float16", "bfloat16", "float32", "float64")
HEAD_NBYTES, DIGEST_NBYTES = 256, 16
ALIGNMENT = 8
BLOCK = 1 << 15
"""Elements of each rank that are converted to float64 at a time."""


@dataclass(frozen=True, slots=True)
class Parts:
    """Division of tensors among the ranks: each gets a row of bytes, with a head and a part of every tensor.

    Attributes:
        items: the tensors, in the order that all ranks have.
        size: number of ranks.
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
        """For each tensor the number of elements of a part, and its place in a row whose parts begin at ``start``."""
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
        """The results by name, of what all ranks have combined."""
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
        """Begin the first step; a handle of the whole."""
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
    """The parts of a tensor that all ranks gave, of their rows."""
    return np.ascontiguousarray(rows[:, place]).view(item.array.dtype)
