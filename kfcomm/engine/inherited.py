"""Slots for long messages that the surviving ranks of a loss use again in the next epoch.

Without them the first use of each name after a loss would go along links that have yet to be opened, which takes twice
the time of a call through its slot. In the agreement on the survivors each rank gives a digest of its slots. If all
digests are equal, the first use of such a name takes its slot, without a message.

Invariants:

- A rank clears its words for a slot before it enters the agreement, and leaves the slot for the rest of the epoch. The
  next epoch has the buffers with other words, which are 0 on all ranks when it begins.
- A rank writes only to its own region, and the regions of lost ranks are not read any more.
- A lost rank may be alive, in a use of the former epoch whose buffers are written to again. It checks the words again
  after it has copied, finds them cleared, and never completes that use (``transports.shm.parted``).
- A slot is taken at use 0 of its name, or by no rank: the names and uses are the same on all ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import msgpack

from kfcomm.core.signature import Signature

if TYPE_CHECKING:
    from kfcomm.core.collective import Key, Series
    from kfcomm.engine.executors import InSlot
    from kfcomm.transports.shm.heap import Heaps
    from kfcomm.transports.shm.slots import Cut, SlotMemory

Kind: TypeAlias = tuple[Any, ...]
"""What a call is, whatever the number of ranks."""
NOTHING = b""
"""Digest without slots."""


class Place(NamedTuple):
    """A slot of the next epoch in memory that is mapped here; ``number``, ``at``: see ``SlotMemory.hand_out``."""

    memory: SlotMemory
    number: int
    at: int
    nbytes: int


class InheritedSlots:
    """Slots of one epoch for the next one.

    Attributes:
        digest: the same on two ranks if they have the same slots; `NOTHING` without any.
        expected: peers that have yet to open a link by which they can wake this rank, and this rank them.
    """

    def __init__(self, places: Mapping[Kind, Place]) -> None:
        self._places = dict(places)
        self.expected: set[int] = set()
        rows = sorted([*kind, one.memory.identity, *one[1:]] for kind, one in places.items())
        self.digest = hashlib.blake2b(msgpack.packb(rows), digest_size=8).digest() if rows else NOTHING

    @classmethod
    def of(cls, keys: Iterable[Key], pending: Iterable[InSlot]) -> InheritedSlots:
        """Take the slots of these names out of use; none of them if one is still in use."""
        found = {
            _kind(key, signature): slot
            for key in keys
            for signature, slot in (key.slots or {}).items()
            if slot.outlives_epoch and isinstance(signature, Signature)
        }
        if any(use.slot in found.values() for use in pending):
            return cls({})
        for slot in found.values():
            slot.is_dead = True
            slot.memory.clear(slot.number)
        places = {}
        for kind, slot in sorted(found.items()):
            number = slot.memory.number_for_next()
            if number is not None:
                places[kind] = Place(slot.memory, number, slot.at, slot.nbytes)
        return cls(places)

    def for_next(self, ranks: Mapping[int, int], heaps: Heaps) -> InheritedSlots:
        """Return the same slots for the next epoch; ``ranks``: the ranks there, by those of this epoch."""
        memories = {one.memory: one.memory.for_next(ranks, heaps) for one in self._places.values()}
        return InheritedSlots({kind: one._replace(memory=memories[one.memory]) for kind, one in self._places.items()})

    def take(self, series: Series, seq: int, cut: Cut) -> tuple[Place, Cut] | None:
        """Return the place of the slot for this use, and the division of its message that fits there."""
        if not (self._places and cut.is_in_windows and isinstance(series.signature, Signature)):
            return None
        place = self._places.pop(_kind(series.key, series.signature), None)
        if place is None or seq:
            return None
        # Without a slot this use would need links between these.
        self.expected.update(series.group.members[rank] for rank in series.program.neighbours)
        return place, replace(cut, max_nbytes=place.nbytes)

    def is_reached(self, peers: Iterable[int]) -> bool:
        """Return whether all expected peers have a link to this rank, given those that have one."""
        if self.expected:
            self.expected.difference_update(peers)
        return not self.expected


def _kind(key: Key, signature: Signature) -> Kind:
    # Without the graphs, which are others for fewer ranks.
    return key.group_id, key.name, str(signature.verb), signature.dtype, signature.shape, signature.op
