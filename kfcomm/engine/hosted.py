"""Collectives among several hosts that use a slot of shared memory inside each host.

Where the graphs make a star of a host's ranks, its centre is the *hub* of that host's slot. The others show there what
they give; when all have, the hub takes it as if it had come by links, does with other hosts what its program says, and
shows the result instead of sending it to each. So hosts need not agree: one may use its slot while another sends
chunks, and the bits are the same.

For the ranks of one host the rules of ``direct`` hold, with chunks to and from the hub.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kfcomm.core.machine import DOWN, UP
from kfcomm.engine.direct import SlotExecutor
from kfcomm.transports.shm.slot import HubSlot
from kfcomm.types import override

if TYPE_CHECKING:
    from kfcomm.core.graph import GraphPair
    from kfcomm.core.program import Lane

HOSTED_NBYTES = 1 << 18
"""Longer messages go by links: there a host's ranks fold while others still give."""


def hub_of(pairs: Sequence[GraphPair], ranks: Sequence[int]) -> int | None:
    """The centre of the star that all graphs make of these ranks of a group; None if they do not. O(pairs x ranks)."""
    graphs = [graph for pair in pairs for graph in (pair.reduce, pair.broadcast)]
    for hub in ranks:
        ends = [(graph.parents[rank], graph.children[rank]) for graph in graphs for rank in ranks if rank != hub]
        if ends and all(parent == hub and not children for parent, children in ends):
            return hub
    return None


class HubExecutor(SlotExecutor):
    """Of a host's hub. Nothing can be done before the others of this host have shown what they give."""

    _host_slot: HubSlot | None = None
    _num_shown = 0

    @override
    def look(self) -> bool:
        # it is not over, but in the slot nothing is waited for any more
        slot, engine = self.slot, self.engine
        if type(slot) is not HubSlot:
            return False
        try:
            if not slot.look(self.word, self.operation.out):
                return False
            if slot.late:
                engine.slots.told(slot, self, is_over=True)
            engine.slots.drop(self)
            self._host_slot, self.slot, self.collective.shortcut = slot, None, None
            self._take_shown(slot)
        except Exception as error:  # noqa: BLE001  it ends this collective alone
            engine.broke(self.collective, error)
        if engine.links.dirty:
            engine.links.flush()
        return True

    @override
    def give_up(self) -> None:
        # the others of this host, who wait for the result, are told by the abort
        if self._host_slot is not None:
            self._spoil(self._host_slot)
        super().give_up()

    @override
    def covers(self, rank: int) -> bool:
        return rank in self.work.ranks

    def _take_shown(self, slot: HubSlot) -> None:
        collective = self.collective
        program, own = collective.program, collective.group.rank
        size, item, routes = program.chunk_elements, self.work.item, program.routes
        for place, rank in enumerate(self.work.ranks):
            if rank == own:
                continue
            collective.posted |= 1 << rank
            given = slot.given(place)
            for lane in program.lanes.values():
                route = routes[lane.number, UP, rank]
                for index in range(lane.num_chunks):
                    begin = lane.input_offset + index * size
                    end = min(begin + size, lane.input_offset + lane.count)
                    collective.take(route, index, given[begin * item : end * item])

    @override
    def far(self, to: tuple[int, ...], phase: int) -> tuple[int, ...]:
        if self._host_slot is None or phase != DOWN:
            return to
        return tuple(rank for rank in to if rank not in self.work.ranks)

    @override
    def show(self, lane: Lane, index: int, phase: int) -> None:
        slot = self._host_slot
        if slot is None or phase != DOWN:
            return
        program = self.collective.program
        begin = lane.result_offset + index * program.chunk_elements
        end = min(begin + program.chunk_elements, lane.result_offset + lane.count)
        slot.show(begin, end, self.operation.out)
        self._num_shown += 1
        if self._num_shown == program.num_slots:
            self.operation.executor = None
            slot.num_uses += 1
            if slot.share(self.word):
                self.engine.slots.wake(slot)
