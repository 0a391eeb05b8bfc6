"""Division of a call's memory into segments, and the layout of each segment in host memory.

Invariants: it follows from the verb, the group and the numbers of elements alone, so all ranks cut alike.
Nothing here touches memory; numbers are elements, unless their name says bytes.

A segment of every verb has one block of host memory, in which its collective works in place::

    verb            the block holds       input of the collective    its result
    --------------  --------------------  -------------------------  --------------------------------------
    all_reduce      n                     all                        all
    reduce          n                     all                        all on the root, else nothing
    broadcast       n                     all on the root            all
    all_gather      n · size              the part of this rank      all
    gather          n · size on the       the part of this rank      all on the root, else nothing
                    root, else n
    reduce_scatter  n · size              all                        the part of this rank
    all_to_all      2 · n · size          the first half             the second: a row that came might else
                                                                     overwrite one that has not been sent
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kfcomm.collectives.specs import SPECS
from kfcomm.core.signature import split
from kfcomm.errors import InternalError
from kfcomm.types import Verb

SEGMENT_NBYTES = 4 << 20
"""Of a segment: large enough that what it costs beside its bytes (two copies to launch, two to hear of, a collective to
post) is little beside the time that these take, 0.2 ms each way on a bus of 25 GB/s; small enough that the first is in
the network soon, and that a few in flight are no burden."""
MAX_SEGMENTS = 1 << 16
"""Of one call; what would have more has larger ones."""


class Piece(NamedTuple):
    """Elements ``start`` to ``stop`` of one part, and their place in the block."""

    part: int
    start: int
    stop: int
    offset: int

    @property
    def place(self) -> slice:
        """Its slice of the block."""
        return slice(self.offset, self.offset + self.stop - self.start)


@dataclass(frozen=True, slots=True)
class Segment:
    """Part of a call that goes through the host at a time."""

    index: int  # in its call
    room: int  # elements of its block
    count: int  # elements of the collective, see ``Planner``
    fetched: tuple[Piece, ...] = ()  # pieces of the sources, copied to the host
    put: tuple[Piece, ...] = ()  # pieces of the targets, copied from the host
    source: slice | None = None  # input of its collective, in the block; None where this rank gives nothing
    result: slice | None = None  # the same of its result


class SegmentPlace(NamedTuple):
    """Of a rank in a call; ``root`` is -1 in verbs without."""

    rank: int
    size: int
    root: int

    @property
    def is_root(self) -> bool:
        """Whether it is the root."""
        return self.rank == self.root


def segments_of(
    verb: Verb, place: SegmentPlace, shape: tuple[int, ...], counts: Sequence[int], per_segment: int
) -> list[Segment]:
    """The segments of a call on one rank.

    Args:
        verb: one of the table above.
        place: whose segments.
        shape: of the caller's array.
        counts: elements of the source of each part; of a broadcast, of its target.
        per_segment: elements of a segment, where a call has several.
    """
    if SPECS[verb].is_elementwise:  # of other verbs each call is one segment
        return [_piecewise(verb, place, index, pieces) for index, pieces in enumerate(cut(counts, per_segment))]
    return [_whole(verb, place, shape, counts[0])]


def cut(counts: Sequence[int], per_segment: int) -> list[tuple[Piece, ...]]:
    """Return the pieces of each segment. Parts count as one vector, end to end, so that small ones travel together.

    All segments have ``per_segment`` elements but the last, which has from half as many to half as many again.
    """
    total = sum(counts)
    per_segment = max(1, per_segment, -(-total // MAX_SEGMENTS))
    number = max(1, (total + per_segment // 2) // per_segment)
    segments: list[list[Piece]] = [[] for _ in range(number)]
    base = 0
    for part, count in enumerate(counts):
        start = 0
        while start < count:
            index = min((base + start) // per_segment, number - 1)
            first = index * per_segment
            stop = count if index == number - 1 else min(count, first + per_segment - base)
            segments[index].append(Piece(part, start, stop, base + start - first))
            start = stop
        base += count
    return [tuple(pieces) for pieces in segments]


def _piecewise(verb: Verb, place: SegmentPlace, index: int, pieces: tuple[Piece, ...]) -> Segment:
    """A segment of a verb that may be cut anywhere."""
    count = sum(piece.stop - piece.start for piece in pieces)
    everything = slice(0, count)
    gives = verb is not Verb.BROADCAST or place.is_root
    keeps = verb is not Verb.REDUCE or place.is_root
    is_new = keeps and not (verb is Verb.BROADCAST and place.is_root)
    return Segment(
        index, count, count, fetched=pieces if gives else (), put=pieces if is_new else (),
        source=everything if gives else None, result=everything if keeps else None,
    )  # fmt: skip


def _whole(verb: Verb, place: SegmentPlace, shape: tuple[int, ...], count: int) -> Segment:
    """The one segment of a verb whose graphs depend on the rank that an element comes from or goes to."""
    rank, size, _ = place
    if verb is Verb.GATHER and not place.is_root:
        return Segment(0, count, count, fetched=_pieces(count), source=slice(0, count))
    if verb in (Verb.ALL_GATHER, Verb.GATHER):
        room, start = count * size, count * rank
        return Segment(
            0, room, count, fetched=_pieces(count, start), put=_pieces(room),
            source=slice(start, start + count), result=slice(0, room),
        )  # fmt: skip
    if verb is Verb.REDUCE_SCATTER:
        row = count // shape[0] if shape[0] else 0
        first, rows = split(shape[0], size)[rank]
        start, kept = first * row, rows * row
        return Segment(
            0, count, count, fetched=_pieces(count), put=_pieces(kept, start),
            source=slice(0, count), result=slice(start, start + kept),
        )  # fmt: skip
    if verb is Verb.ALL_TO_ALL:
        return Segment(
            0, 2 * count, count, fetched=_pieces(count), put=_pieces(count, count),
            source=slice(0, count), result=slice(count, 2 * count),
        )  # fmt: skip
    raise InternalError(f"{verb} does not go through the host")


def _pieces(count: int, offset: int = 0) -> tuple[Piece, ...]:
    """All ``count`` elements of the only part."""
    return (Piece(0, 0, count, offset),) if count else ()
