"""Reductions over shared-memory contributions: the work of collectives in slots.

Each function of the second half describes one verb: how much each rank shows and reads, and how the result is folded,
with the bits that chunks along stars would give.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np

from kfcomm.common import do_nothing
from kfcomm.engine.executors import HubExecutor, OneStepExecutor, SlotExecutor
from kfcomm.engine.memory import Array, Work
from kfcomm.transports.shm.slots import Cut

if TYPE_CHECKING:
    from kfcomm.arrays.reduce import Kernel
    from kfcomm.transports.shm.slots import Arrays, Combine


class SharedWork(Work):
    """Work on the contributions of all ranks.

    Args:
        work: the same without a slot.
        cut: division of the contributions in the slot.
        combine: folds this rank's result.
        hub: group rank which hears from, and sends to, every other in each use without a slot.
        ranks: those of the group that share the slot; all if left out.
        executor: see ``Work``.

    Attributes:
        shown: dtype of the contributions in the slot.
    """

    __slots__ = ("combine", "cut", "hub", "ranks", "shown")

    def __init__(self, work: Work, cut: Cut, combine: Combine, hub: int = 0, ranks: Sequence[int] = ()) -> None:
        super().__init__(work.kernel, work.dtype, work.size, in_result=work.in_result)
        self.executor = SlotExecutor
        self.shown = np.dtype(np.uint8) if work.dtype is None else work.dtype
        self.cut = cut
        self.combine = combine
        self.hub = hub
        self.ranks = ranks or range(work.size)


def all_reduced(
    work: Work, count: int, *, is_one_step: bool, is_turned: bool = False, is_shared: bool = False
) -> SharedWork:
    """All folds ``count`` elements of each.

    ``is_one_step``: each gets all inputs without a slot, too; for ``is_turned`` and ``is_shared`` see ``Cut``.
    """
    kernel, size = work.kernel, work.size
    cut = Cut(count, work.item, size, is_turned=is_turned, is_shared=is_shared)
    combine: Combine
    if kernel is None or not count:
        combine = do_nothing
    elif kernel.fold_two is not None and cut.is_whole and size == 2:
        combine, cut.is_by_row = kernel.fold_two, True
    elif kernel.fold_all is not None and cut.is_whole and 2 * size <= count:
        combine = kernel.fold_all  # of what is folded in parts it would copy them first
    else:
        combine = partial(_fold, kernel, size, is_turned)
    made = SharedWork(work, cut, combine)
    if is_one_step:
        made.executor = OneStepExecutor
    return made


def hosted(work: Work, count: int, ranks: tuple[int, ...], hub: int, rank: int) -> SharedWork:
    """These ranks of one host show ``count`` elements, which the hub folds as its program says; see ``HubExecutor``."""
    place = ranks.index(hub)
    cut = Cut(
        count, work.item, len(ranks), is_whole=True, has_hub=True,
        gives=lambda giver, reader: count if place in (giver, reader) else 0,
    )  # fmt: skip
    made = SharedWork(work, cut, do_nothing, hub, ranks)
    if rank == hub:
        made.executor = HubExecutor
    return made


def reduced(work: Work, count: int, rank: int, root: int) -> SharedWork:
    """The root folds ``count`` elements of each."""
    cut = Cut(
        count, work.item, work.size, is_whole=True, reads=(0, count if rank == root else 0),
        gives=lambda _, reader: count if reader == root else 0,
    )  # fmt: skip
    return SharedWork(work, cut, _folded_from(work, root) if rank == root and count else do_nothing, root)


def reduce_scattered(work: Work, counts: Sequence[int], rank: int) -> SharedWork:
    """Each folds ``counts[rank]`` elements, its part of every rank's input."""
    begin, end = _bounds(counts)[rank]
    cut = Cut(
        sum(counts), work.item, work.size, is_whole=True, reads=(begin, end), gives=lambda _, reader: counts[reader]
    )
    return SharedWork(work, cut, _folded_from(work, rank) if end > begin else do_nothing)


def reduce_scattered_in_windows(work: Work, counts: Sequence[int], rank: int) -> SharedWork:
    """As ``reduce_scattered``, of long inputs, folded as along a chain."""
    cut = Cut(
        sum(counts), work.item, work.size, is_turned=True, is_scattered=True, bounds=_places(counts),
        gives=lambda _, reader: counts[reader],
    )  # fmt: skip
    kernel = work.kernel
    return SharedWork(work, cut, do_nothing if kernel is None else partial(_fold, kernel, work.size, True))


def broadcast(work: Work, counts: Sequence[int], rank: int, root: int) -> SharedWork:
    """Each takes ``counts[rank]`` elements of what the root gives, one after the other; or all, if all take as much."""
    begin, end = _bounds(counts)[rank] if len(counts) > 1 else (0, counts[0])
    count = sum(counts)
    cut = Cut(
        count, work.item, work.size, is_whole=True, shows=count if rank == root else 0, reads=(begin, end),
        gives=lambda giver, reader: 0 if giver != root else counts[reader] if len(counts) > 1 else count,
    )  # fmt: skip
    return SharedWork(work, cut, partial(_take, root) if end > begin else do_nothing, root)


def gathered(work: Work, counts: Sequence[int], rank: int, root: int | None = None) -> SharedWork:
    """The root, or each, takes what all give, ``counts[r]`` elements of rank r."""
    count = max(counts)
    is_mine = root is None or rank == root
    cut = Cut(
        count, work.item, work.size, is_whole=True, shows=counts[rank], reads=(0, count if is_mine else 0),
        gives=lambda giver, reader: counts[giver] if root in (None, reader) else 0,
    )  # fmt: skip
    return SharedWork(work, cut, _joined([(0, one) for one in counts]) if is_mine else do_nothing, root or 0)


def gathered_in_windows(work: Work, counts: Sequence[int], rank: int) -> SharedWork:
    """As ``gathered`` on all ranks, of long inputs."""
    cut = Cut(
        max(counts), work.item, work.size, is_turned=True, is_gathered=True, bounds=_places(counts),
        gives=lambda giver, _: counts[giver],
    )  # fmt: skip
    return SharedWork(work, cut, do_nothing)


def exchanged(work: Work, counts: Sequence[Sequence[int]], rank: int) -> SharedWork:
    """Each takes its part of what each gives, ``counts[r][rank]`` elements of rank r."""
    mine = [_bounds(row)[rank] for row in counts]
    reads = min(begin for begin, _ in mine), max(end for _, end in mine)
    count = max(map(sum, counts))
    cut = Cut(
        count, work.item, work.size, is_whole=True, shows=sum(counts[rank]), reads=reads,
        gives=lambda giver, reader: counts[giver][reader],
    )  # fmt: skip
    return SharedWork(work, cut, _joined([(begin - reads[0], end - reads[0]) for begin, end in mine]))


def _places(counts: Sequence[int]) -> list[tuple[int, int]]:
    return [(begin, end - begin) for begin, end in _bounds(counts)]


def _bounds(counts: Sequence[int]) -> list[tuple[int, int]]:
    ends = list(accumulate(counts))
    return [(end - count, end) for end, count in zip(ends, counts, strict=True)]


def _fold(kernel: Kernel, size: int, is_turned: bool, given: Arrays, out: Array) -> None:
    """Fold the contributions in the order of ranks.

    ``is_turned``: each is the first operand, as along a chain, not the second, as in a star. Some elements depend on
    that.
    """
    if size == 1:
        kernel.finish(given[0], out, 1)
        return
    folded = given[0]
    if size > 2:
        room = out if kernel.accumulate_dtype == kernel.dtype else np.empty(len(out), kernel.accumulate_dtype)
        for rank in range(1, size - 1):
            first, second = (given[rank], folded) if is_turned else (folded, given[rank])
            kernel.fold(first, second, room)
            folded = room
    first, second = (given[size - 1], folded) if is_turned else (folded, given[size - 1])
    kernel.last(first, second, out, size)


def _folded_from(work: Work, root: int) -> Combine:
    """Fold along a star around a rank, whose own contribution comes first."""
    kernel, size = work.kernel, work.size
    if kernel is None:
        return do_nothing
    order = [root, *range(root), *range(root + 1, size)]
    if not root:
        return partial(_fold, kernel, size, False)
    return lambda given, out: _fold(kernel, size, False, [given[rank] for rank in order], out)


def _take(root: int, given: Arrays, out: Array) -> None:
    out[:] = given[root]


def _joined(mine: Sequence[tuple[int, int]]) -> Combine:
    """Concatenation of a range of each rank's input."""
    count = mine[0][1] - mine[0][0]
    if len(set(mine)) == 1 and not mine[0][0]:
        return partial(_stack, count) if count else do_nothing
    places = list(zip(_bounds([end - begin for begin, end in mine]), mine, strict=True))

    def join(given: Arrays, out: Array) -> None:
        for rank, ((at, after), (begin, end)) in enumerate(places):
            out[at:after] = given[rank][begin:end]

    return join


def _stack(count: int, given: Arrays, out: Array) -> None:
    out.reshape(-1, count)[:] = given
