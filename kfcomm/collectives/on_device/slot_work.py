"""Contribution and reads of one rank in a collective in device slots.

Invariants: it follows from the verb, the group and the numbers of elements alone, so all ranks lay their contributions
out alike. Nothing here touches memory; numbers are elements, unless their name says bytes.

A contribution holds the sources of all parts, each from a multiple of `ALIGNMENT_NBYTES` on::

    verb            gives               reads of the contribution of each rank r     into the target
    --------------  ------------------  -------------------------------------------  -------------------
    all_reduce      all                 all, folded                                  all
    reduce          all but the root    on the root all, folded                      all
    broadcast       the root            of the root alone: all                       all
    all_gather      all                 all                                          row r
    gather          all but the root    on the root all                              row r
    reduce_scatter  all                 the part of this rank, folded                all
    all_to_all      all                 the block of this rank                       block r

The root of a reduce or gather reads its own source where it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kfcomm.arrays.devices.host import ALIGNMENT_NBYTES
from kfcomm.collectives.plans import PlanKey
from kfcomm.core.signature import split
from kfcomm.errors import InternalError
from kfcomm.types import Verb


class Fold(NamedTuple):
    """Elements of one part of all contributions, folded into the target from its beginning."""

    part: int
    start: int
    stop: int


class Copied(NamedTuple):
    """Elements of one part of the contribution of a rank, and where they go in the target."""

    rank: int
    part: int
    start: int
    stop: int
    to: int


@dataclass(frozen=True, slots=True)
class SlotWork:
    """Work of one rank in all calls of one kind."""

    gives: bool  # this rank's contribution is read by others
    offsets: tuple[int, ...]  # in bytes, of each part in a contribution
    nbytes: int  # of a contribution
    folds: tuple[Fold, ...] = ()
    copies: tuple[Copied, ...] = ()

    @property
    def gets(self) -> bool:
        """Whether this rank reads any contribution."""
        return bool(self.folds or self.copies)


def work_of(kind: PlanKey, rank: int, size: int, counts: Sequence[int]) -> SlotWork:
    """The work of a rank in a group; ``counts``: elements of each part, as it is given."""
    verb, is_root = kind.verb, kind.root == rank
    offsets, nbytes = [], 0
    for count in counts:
        offsets.append(nbytes)
        nbytes += -(-count * kind.dtype.itemsize // ALIGNMENT_NBYTES) * ALIGNMENT_NBYTES
    where = tuple(offsets), nbytes
    parts = [(part, count) for part, count in enumerate(counts) if count]
    whole = tuple(Fold(part, 0, count) for part, count in parts)
    rows = tuple(Copied(one, part, 0, n, one * n) for part, n in parts for one in range(size))
    match verb:
        case Verb.ALL_REDUCE:
            return SlotWork(True, *where, folds=whole)
        case Verb.REDUCE:
            return SlotWork(not is_root, *where, folds=whole if is_root else ())
        case Verb.BROADCAST:
            return SlotWork(is_root, *where, copies=tuple(Copied(kind.root, part, 0, n, 0) for part, n in parts))
        case Verb.ALL_GATHER:
            return SlotWork(True, *where, copies=rows)
        case Verb.GATHER:
            return SlotWork(not is_root, *where, copies=rows if is_root else ())
        case Verb.REDUCE_SCATTER:
            row = counts[0] // kind.shape[0] if kind.shape[0] else 0
            first, kept = split(kind.shape[0], size)[rank]
            mine = Fold(0, first * row, (first + kept) * row)
            return SlotWork(True, *where, folds=(mine,) if kept * row else ())
        case Verb.ALL_TO_ALL:
            blocks = [(part, n // size) for part, n in parts]
            return SlotWork(
                True, *where,
                copies=tuple(
                    Copied(one, part, rank * n, (rank + 1) * n, one * n) for part, n in blocks for one in range(size)
                ),
            )  # fmt: skip
        case _:
            raise InternalError(f"{verb} is not carried out in device slots")
