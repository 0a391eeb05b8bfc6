"""Adasum: an all_reduce that adds gradients as far as they differ in direction. No fold of elements makes it.

Maleki et al., "Scaling Distributed Training with Adaptive Summation", MLSys 2021, https://arxiv.org/abs/2006.02924, as
Horovod's ``adasum.h`` has it. Two gradients a and b become

    (1 − a·b / 2|a|²) a + (1 − a·b / 2|b|²) b,

their sum where they are orthogonal and their mean where they are parallel. First the ranks (0, 1), (2, 3), ... are
combined, then pairs of pairs; a rank without a partner passes to the next round unchanged. Each tensor has its own
products, even if several tensors travel together.

Recursive halving, as Horovod has it, would halve the tensors log2(n) times, with an all_reduce of inner products
after each. But each combination is a sum of gradients with coefficients that depend on their inner products alone, so
the products of all pairs of ranks determine the whole tree, and all halvings are one exchange. The tensors lie end to
end in one buffer, which is cut into n parts of about the same size:

1. all_to_all: rank r gets the r-th part of every rank's buffer;
2. all_reduce of the inner products of tensors that are cut, at most n − 1; those of others are one rank's alone, and
   where none is cut this step is left out;
3. each rank combines its part, and all_gather sends the parts to all.

The bytes are those of recursive halving, 2(n−1)/n·S sent by each rank, in three collectives whatever n is, and n need
be no power of two. Where all ranks share memory, buffers and results are read in place, and two or three collectives
of a few bytes keep the ranks together: S bytes are copied, S read twice, S/n written, S copied. The buffers outlive the
call (`kept`), for which a call that may overlap others of its name, or is of a sub-group, has one collective more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from kfcomm.arrays import adapt, holds_arrays, is_list
from kfcomm.arrays.dtypes import dtype_name
from kfcomm.collectives.adasum_arithmetic import FusedLayout, Matrix, TensorPart
from kfcomm.collectives.batches import item_of, like, names_of, outs_by_name, outs_in_order, reduce_mapping
from kfcomm.collectives.calling import Checks, Posting
from kfcomm.collectives.group import UNNAMED, may_overlap
from kfcomm.collectives.handle import Handle
from kfcomm.collectives.kept import STAMP, stamped
from kfcomm.collectives.plans import Plan, PlanKey, Plans
from kfcomm.collectives.specs import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, SPECS, CallOptions
from kfcomm.collectives.steps import LaterSteps, Steps
from kfcomm.collectives.units import Item, listing_of, many_key
from kfcomm.common.arguments import checked_name
from kfcomm.core.cause import error_of
from kfcomm.errors import ConfigError, EpochChanged, RemoteProtocolError
from kfcomm.transports.shm.heap import NOWHERE
from kfcomm.transports.shm.ring import fence
from kfcomm.types import Op, Verb

if TYPE_CHECKING:
    from kfcomm.collectives.kept import KeptBuffers
    from kfcomm.collectives.verbs import Verbs
    from kfcomm.transports.shm.heap import Heaps

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

SINGLE = ""
"""Name of an array that is not one of several."""
DTYPES = ("float16", "bfloat16", "float32", "float64")


class Adasum:
    """One call, on this rank.

    Where the ranks of the group share memory they first tell each other where their buffers are; a rank that cannot
    read all of them says so, and the call goes by messages. A buffer is in use until all ranks have read the result in
    it: it is kept, unless some rank says that it keeps too much already; then all ranks meet once more.
    """

    def __init__(
        self, verbs: Verbs, items: Sequence[Item], key: str | None, options: CallOptions,
        gathered: Callable[[dict[str, Any]], Any],
    ) -> None:  # fmt: skip
        self._verbs = verbs
        self._group = group = verbs._group
        self._key = key
        self._options = options
        self._layout = FusedLayout(items, group.view.size)
        self._gathered = gathered
        self._heaps = group.heaps if group.view.size > 1 else None
        # First, since it may fail: turns that were taken must be used.
        self._block = self._new_block()
        self._layout.fill(self._block)
        self._told: list[BufferRecord] = []
        self._results: list[Array] = []
        self._stamps: list[Array] = []
        self._part: TensorPart
        num_later = 1 + bool(self._layout.cut) + (self._heaps is not None)
        later = [f"{key or UNNAMED}\0adasum {number}" for number in range(num_later)]
        self._steps = LaterSteps(verbs, key, options, later)
        self._keeps: KeptBuffers | None = None  # the buffer, when the call is over

    def begin(self) -> Steps:
        """Begin the first step; return the handle of the whole call."""
        name = self._key or UNNAMED
        then: Callable[[Any, str], None] = self._meet
        if self._heaps is None:
            posting, then = self._posting(ALL_TO_ALL, self._block, name), self._multiply
        else:
            posting = self._posting(ALL_GATHER, np.array(self._tell(self._heaps)), name)
        posting = posting._replace(plan=(self._compared, *posting.plan[1:]))
        self._steps.follow(self._verbs._begin(self._key, posting, self._options), then)
        return self._steps.whole

    def _compared(self, plans: Plans, kind: PlanKey, key: str) -> Plan:
        """Plan of the first step, in which the ranks compare the calls of the program, not what travels."""
        plan, arrays = plans.of(kind, key), [item.array for item in self._layout.items]
        names, first = [item.name for item in self._layout.items], arrays[0]
        fields = {"shape": first.shape} if names == [SINGLE] else {"shape": (), **listing_of(names, arrays)}
        said = plan.signature._replace(verb=str(ALL_REDUCE), dtype=dtype_name(first.dtype), op="adasum", **fields)
        return replace(plan, signature=said)

    def _new_block(self) -> Array:
        shape = (self._layout.size, self._layout.row_nbytes)
        nbytes = shape[0] * shape[1]
        whole: Array | None = None if self._heaps is None else self._heaps.empty(nbytes + STAMP.itemsize)
        self._buffer = np.empty(nbytes + STAMP.itemsize, np.uint8) if whole is None else whole
        return self._buffer[:nbytes].reshape(shape)

    def _tell(self, heaps: Heaps) -> BufferRecord:
        """Record of the buffer for the other ranks."""
        key, kept = self._key, self._group.kept
        is_over = may_keep = False
        if kept is not None and key is not None and not may_overlap(key):
            is_over, may_keep = kept.begin(key, self._steps.whole), kept.has_room(key)
        place = heaps.place_of(self._buffer) if heaps.map(self._group.view.members) else NOWHERE
        return BufferRecord(place, self._layout.row_nbytes, stamped(self._buffer), is_over, may_keep)

    def _meet(self, rows: Array, key: str) -> None:
        """Go on with what the ranks have told, in memory if all can."""
        told, kept = [BufferRecord(*map(int, row)) for row in rows], self._group.kept
        if kept is not None and self._key is not None and all(one.is_over for one in told):
            kept.free(self._key, self._steps.seq)
        if self._heaps is None or any(one.place == NOWHERE for one in told):
            posting = self._posting(ALL_TO_ALL, self._block, key)
            self._steps.follow(self._steps.post(posting, key), self._multiply)
            return
        self._told = told
        if all(one.may_keep for one in told):
            self._keeps = kept
            self._steps.skip()
        buffers = [self._seen(self._heaps, rank) for rank in range(self._layout.size)]
        # Views of what will be read later: they hold the memory of a rank that closes the world as soon as it may.
        self._results = [one[rank * told[rank].nbytes :][: told[rank].nbytes] for rank, one in enumerate(buffers)]
        self._stamps = [one[-STAMP.itemsize :] for one in buffers]
        mine = self._group.view.rank
        self._multiply([one[mine * told.nbytes :][: told.nbytes] for one, told in zip(buffers, told, strict=True)], key)

    def _seen(self, heaps: Heaps, rank: int) -> Array:
        """Buffer of a rank, in its memory; the call reads two rows."""
        if rank == self._group.view.rank:
            return self._buffer
        peer, told = self._group.view.members[rank], self._told[rank]
        self._group.engine.links.traffic.read(peer, 2 * told.nbytes)
        try:
            nbytes = self._layout.size * told.nbytes + STAMP.itemsize
            return heaps.array(peer, told.place, np.dtype(np.uint8), nbytes)
        except RemoteProtocolError:
            lost = self._group.engine.router.lost.get(peer)
            if lost is None:
                raise
            raise error_of(lost, self._key or UNNAMED, self._group.view.titled(self._key or UNNAMED)) from None

    def _multiply(self, rows: Sequence[Array], key: str) -> None:
        self._part = TensorPart(self._layout, self._group.view.rank, rows)
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
        if self._told:
            self._rendezvous(key)
            return
        posting = self._posting(ALL_GATHER, mine, key)
        self._steps.whole.end_as(self._steps.post(posting, key), self._group.engine.reactor, self._finish)

    def _rendezvous(self, key: str) -> None:
        """Meet the other ranks, which have written their parts then, and read them."""
        whole, reactor = self._steps.whole, self._group.engine.reactor
        if self._keeps is None or self._key is None:
            self._steps.follow(self._steps.post(_barrier(key), key), self._read)
            return
        # Before the rendezvous, whatever becomes of it here: from then on others may read.
        self._keeps.keep(self._key, self._steps.seq, self._buffer)
        whole.end_as(self._steps.post(_barrier(key), key), reactor, lambda _: self._copied())

    def _read(self, _: None, key: str) -> None:
        """Copy the results, and end the call when all ranks have."""
        found = self._copied()
        self._steps.whole.end_as(self._steps.post(_barrier(key), key), self._group.engine.reactor, lambda _: found)

    def _copied(self) -> Any:
        """The result, from the memory of all ranks."""
        found = self._layout.results(self._results)
        with fence():
            pass
        for rank, (told, stamp) in enumerate(zip(self._told, self._stamps, strict=True)):
            if stamp.view(STAMP)[0] != told.stamp:
                raise EpochChanged(f"{self._group.view.called(rank)} has left before its part of the result was read")
        return self._gathered(found)

    def _finish(self, parts: Array) -> Any:
        return self._gathered(self._layout.results(parts))

    def _posting(self, verb: Verb, rows: Array, key: str) -> Posting:
        spec, view = SPECS[verb], self._group.view
        kind = PlanKey(verb, rows.dtype, rows.shape, Op.SUM if spec.folds else None)
        return Posting((Plans.of, kind, key), adapt(rows), spec.result_shape(rows.shape, view.rank, view.size))


class BufferRecord(NamedTuple):
    """Record of a rank's buffer, for the others; numbers alone."""

    place: int  # `NOWHERE` if it is not in shared memory, or this rank cannot read those of others
    nbytes: int  # of a row
    stamp: int
    is_over: int  # former uses of the name are, on this rank
    may_keep: int


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
            raise ConfigError(f"adasum expects {', '.join(DTYPES)}, got {item.array.dtype}")
    if options.wire_dtype is not None:
        raise ConfigError("adasum sends parts of the arrays as they are: leave out wire_dtype")
    return Adasum(verbs, items, key, options, gathered).begin()


def adasum_of(verbs: Verbs, x: Any, name: str | None, options: CallOptions) -> Handle[Any]:
    """``all_reduce(op="adasum")`` of an array, or of each array of a list."""
    with verbs._checks(name, options) as (name, options):
        out, is_listed = options.out, is_list(x) and holds_arrays(x)
        xs = x if is_listed else [x]
        verbs._devices.refuse("adasum", xs, options.stream)
        outs = outs_in_order(out, xs) if is_listed else [out]
        names = [f"x[{place}]" for place in range(len(xs))] if is_listed else [SINGLE]
        items = [item_of(one, x, into) for one, x, into in zip(names, xs, outs, strict=True)]

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
        options = verbs._group.checked(options)
        verbs._devices.refuse("adasum", arrays.values(), options.stream)
        outs = outs_by_name(out, arrays)
        items = [item_of(one, arrays[one], outs.get(one)) for one in names]

        def gathered(found: dict[str, Any]) -> Any:
            return {one: found[one] for one in arrays} if out is None else out

        return combine(verbs, items, key, options, gathered)
