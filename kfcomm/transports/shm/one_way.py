"""Slots for long messages whose result no other rank reads: reduce_scatter and all_gather.

As in ``parted``, without its second half: a rank shares a window when it has folded, or copied, what it needs of all
contributions. When all have shared the last window the use is over, and contributions may change.

A contribution elsewhere is copied to symmetric memory as a whole. In windows, which serve until all heaps are mapped,
ranks would wait for each other at each: FSDP2 takes 1.5 times the processor time.
"""

from __future__ import annotations

import numpy as np

from kfcomm.arrays import same_memory
from kfcomm.transports.shm.heap import NOWHERE
from kfcomm.transports.shm.parted import PartedSlot
from kfcomm.transports.shm.slots import GIVEN, POSTED, Array, SlotMemory, SlotSpec
from kfcomm.types import override


class ScatterSlot(PartedSlot):
    """Slot of a reduce_scatter: each rank folds its part straight into its result."""

    __slots__ = ("_own",)

    outlives_epoch = False
    shows_result = False

    def __init__(self, memory: SlotMemory, spec: SlotSpec) -> None:
        super().__init__(memory, spec)
        self._out_at = self._parts[spec.rank][0]
        self._own: Array | None = None

    @override
    def post(self, x: Array, word: int) -> bool:
        self._own = x
        heaps = self.memory.heaps
        if heaps.place_of(x) == NOWHERE and self._is_ready() and (block := heaps.empty(x.nbytes)) is not None:
            block[:] = x.view(np.uint8)
            x = block.view(self._dtype)
        return super().post(x, word)

    @override
    def _begin(self, out: Array) -> None:
        # No other rank reads the result, so it needs no buffer, unless it lies over this rank's part of the
        # contribution, which is folded last.
        self._is_result_in_place = True
        self._is_over_given = self._given is not None and np.may_share_memory(out, self._given)
        self._whole = self._arrays(GIVEN, self._given)

    @override
    def _copy_next(self, out: Array) -> bool:
        return self._pass_next()

    @override
    def _is_read(self) -> bool:
        return True

    @override
    def _let_go(self) -> None:
        super()._let_go()
        self._own = None


class GatherSlot(ScatterSlot):
    """Slot of an all_gather: each rank copies the contributions of all, whose places in the result are the parts."""

    __slots__ = ()

    def __init__(self, memory: SlotMemory, spec: SlotSpec) -> None:
        super().__init__(memory, spec)
        self._counts = [length for _, length in self._parts]
        self._rows = tuple(list(view) for view in self.views)

    @override
    def _make(self, window: int, out: Array, count: int) -> None:
        rows = self._rows[(self._first + window) & 1]
        for rank in self._order:
            begin, end = self._bounds(window, rank, count)
            whole = self._own if rank == self._rank else self._whole[rank] if self._whole else None
            at = self._parts[rank][0]
            source = rows[rank][: end - begin] if whole is None else whole[begin - at : end - at]
            if rank != self._rank or not same_memory(source, out[begin:end]):
                out[begin:end] = source

    @override
    def _show(self, window: int) -> None:
        word, at = self._first + window, self._parts[self._rank][0]
        begin, end = self._bounds(window, self._rank)
        if self._given is not None:
            self._buffers[word & 1][: end - begin] = self._given[begin - at : end - at]
        self._tell(POSTED, word)
