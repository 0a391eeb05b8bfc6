"""How calls are cut: all of it once, alike on all ranks, and no tiny tails."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kfcomm.collectives.on_device.segments import MAX_SEGMENTS, SegmentPlace, cut, segments_of
from kfcomm.errors import InternalError
from kfcomm.types import Verb


@given(counts=st.lists(st.integers(0, 100), min_size=1, max_size=12), per_segment=st.integers(1, 60))
def test_every_element_is_in_one_segment_and_blocks_have_no_gaps(counts, per_segment):
    segments = cut(counts, per_segment)
    pieces = [piece for pieces in segments for piece in pieces]
    elements = [(piece.part, index) for piece in pieces for index in range(piece.start, piece.stop)]
    assert elements == [(part, index) for part, count in enumerate(counts) for index in range(count)]
    for each in segments:
        offset = 0
        for piece in each:
            assert piece.place == slice(offset, offset + piece.stop - piece.start)
            offset = piece.place.stop


@given(total=st.integers(0, 10_000), per_segment=st.integers(1, 500))
def test_all_have_the_same_size_but_the_last(total, per_segment):
    sizes = [sum(piece.stop - piece.start for piece in pieces) for pieces in cut([total], per_segment)]
    assert all(size == per_segment for size in sizes[:-1])
    assert len(sizes) == 1 or per_segment // 2 <= sizes[-1]
    assert sizes[-1] <= per_segment + per_segment // 2 + 1


@pytest.mark.parametrize(("total", "sizes"), [(0, [0]), (10, [10]), (14, [14]), (15, [10, 5]), (24, [10, 14])])
def test_a_tiny_tail_goes_with_what_is_before_it(total, sizes):
    assert [sum(piece.stop - piece.start for piece in pieces) for pieces in cut([total], 10)] == sizes


def test_huge_calls_have_larger_segments():
    assert len(cut([3 * MAX_SEGMENTS], 1)) <= MAX_SEGMENTS


def test_verbs_that_go_whole_have_one_segment():
    place = SegmentPlace(1, 3, 2)
    gather = segments_of(Verb.GATHER, place, (4,), [4], 1)
    assert [(one.room, one.put, one.result) for one in gather] == [(4, (), None)]
    everything = segments_of(Verb.ALL_GATHER, place, (4,), [4], 1)
    assert [(one.room, one.source, one.result) for one in everything] == [(12, slice(4, 8), slice(0, 12))]
    scatter = segments_of(Verb.REDUCE_SCATTER, place, (7, 2), [14], 1)
    assert [(one.room, one.source, one.result) for one in scatter] == [(14, slice(0, 14), slice(6, 10))]
    exchange = segments_of(Verb.ALL_TO_ALL, place, (6,), [6], 1)
    assert [(one.room, one.source, one.result) for one in exchange] == [(12, slice(0, 6), slice(6, 12))]


def test_other_verbs_do_not_go_through_the_host():
    with pytest.raises(InternalError, match="barrier"):
        segments_of(Verb.BARRIER, SegmentPlace(0, 2, -1), (), [0], 1)
