"""Contribution and reads of one rank in a collective in device slots.

Invariants: it follows from the verb, the group and the numbers of elements alone, so all ranks lay their contributions
out alike. Nothing here touches memory; numbers are bytes, but for counts.

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


class SlotPiece(NamedTuple):
    """Piece of one part of a contribution."""

    part: int
    at: int  # in the contribution
    start: int  # in the source


class Fold(NamedTuple):
    """A piece of all contributions, folded into the target from its beginning."""

    piece: SlotPiece
    num_elements: int


class Copied(NamedTuple):
    """A piece of the contribution of a rank, and where it goes in the target."""

    rank: int
    piece: SlotPiece
    nbytes: int
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
    verb, is_root, item = kind.verb, kind.root == rank, kind.dtype.itemsize
    offsets, nbytes = [], 0
    for count in counts:
        offsets.append(nbytes)
        nbytes += -(-count * item // ALIGNMENT_NBYTES) * ALIGNMENT_NBYTES
    where = tuple(offsets), nbytes

    def piece(part: int, start: int = 0) -> SlotPiece:
        return SlotPiece(part, offsets[part] + start, start)

    parts = [(part, count) for part, count in enumerate(counts) if count]
    match verb:
        case Verb.ALL_REDUCE:
            return SlotWork(True, *where, folds=tuple(Fold(piece(part), n) for part, n in parts))
        case Verb.REDUCE:
            folds = tuple(Fold(piece(part), n) for part, n in parts) if is_root else ()
            return SlotWork(not is_root, *where, folds=folds)
        case Verb.BROADCAST:
            copies = tuple(Copied(kind.root, piece(part), n * item, 0) for part, n in parts)
            return SlotWork(is_root, *where, copies=copies)
        case Verb.ALL_GATHER | Verb.GATHER:
            gets = verb is Verb.ALL_GATHER or is_root
            rows = ((part, n * item, one) for part, n in parts for one in range(size if gets else 0))
            copies = tuple(Copied(one, piece(part), row, one * row) for part, row, one in rows)
            return SlotWork(verb is Verb.ALL_GATHER or not is_root, *where, copies=copies)
        case Verb.REDUCE_SCATTER:
            row = counts[0] // kind.shape[0] if kind.shape[0] else 0
            first, kept = split(kind.shape[0], size)[rank]
            mine = Fold(piece(0, first * row * item), kept * row)
            return SlotWork(True, *where, folds=(mine,) if mine.num_elements else ())
        case Verb.ALL_TO_ALL:
            blocks = ((part, n // size * item, one) for part, n in parts for one in range(size))
            copies = tuple(Copied(one, piece(part, rank * block), block, one * block) for part, block, one in blocks)
            return SlotWork(True, *where, copies=copies)
        case _:
            raise InternalError(f"{verb} is not carried out in device slots")
