"""Windows of a shared-memory link, order of its chunks, and payloads written in place."""

import pytest

from kfcomm.core.machine import DOWN
from kfcomm.transports.shm.ring import Word
from kfcomm.transports.shm.segment import SLAB_NBYTES
from kfcomm.transports.shm.sender import INLINE_NBYTES, WINDOW_NBYTES
from tests.transports.shm.pairs import HALF, Pair, fill, linked, processes, settled
from tests.transports.streams import Owner, chunk

SIGNATURE = 4


def large(pair, **others):
    """The pair's link with a large window of three pieces."""
    pair.link._large_window = WINDOW_NBYTES + len(HALF)
    return pair.link


def result(index):
    """Header of a chunk on its way down."""
    return [*chunk(index)[:5], DOWN, *chunk(index)[6:]]


@pytest.mark.asyncio
async def test_a_payload_can_be_made_where_it_is_sent_from():
    async with linked() as pair:
        made = pair.link.reserve(len(HALF), 0)
        made[:] = HALF
        assert pair.link.send(chunk(0), made, Owner())
        assert [*pair.link._pieces] == [pair.link._arena._last_piece]
        pair.link.flush()
        await pair.heard.until(lambda heard: heard.frames)
        assert pair.heard.frames == [(chunk(0), HALF)]
        await settled(pair)
        assert pair.link._arena.pieces_in_use == 0


@pytest.mark.asyncio
async def test_reserve_requires_immediate_send():
    async with linked() as pair:
        assert pair.link.reserve(INLINE_NBYTES, 0) is None
        assert pair.link.reserve(SLAB_NBYTES + 1, 0) is None
        count = fill(large(pair))
        assert pair.link.send(chunk(count), pair.link.reserve(len(HALF), 0))  # beyond the small window
        assert pair.link.reserve(len(HALF), 0) is None
        await pair.heard.until(lambda heard: len(heard.frames) == count + 1)
        await settled(pair)
        count += 1 + fill(pair.link)
        assert not pair.link.send(chunk(100), memoryview(HALF), Owner(), 1)
        assert pair.link.reserve(len(HALF), 0) is None  # something more urgent waits
        assert pair.link.reserve(len(HALF), 1) is not None
        pair.link.flush()
        await pair.heard.until(lambda heard: len(heard.frames) == count + 1)
        pair.link.abort()
        assert pair.link.reserve(len(HALF), 0) is None
        await pair.ended()


@pytest.mark.asyncio
async def test_reserved_payload_survives_waiting():
    async with linked() as pair:
        signature = [SIGNATURE, 7, ["a"]]
        pair.link.send(signature)
        count = fill(large(pair))
        owner = Owner()
        assert not pair.link.send(chunk(100), memoryview(HALF), owner)
        made = pair.link.reserve(len(HALF), 0)
        made[:] = bytes(len(HALF))
        pair.link.send(signature)  # nothing may overtake what waits
        assert not pair.link.send(chunk(101), made, owner)
        other = pair.link.reserve(len(HALF), 0)
        assert other is None or other is not made
        await pair.heard.until(lambda heard: len(heard.frames) == count + 4)
        assert pair.heard.frames[-3:] == [(chunk(100), HALF), (signature, b""), (chunk(101), bytes(len(HALF)))]
        assert owner.times == 2


@pytest.mark.asyncio
async def test_results_go_beyond_the_window_of_contributions_and_before_them():
    async with linked() as pair:
        count = fill(large(pair))
        assert not pair.link.send(chunk(100), memoryview(HALF), Owner())
        assert pair.link.send(result(101), memoryview(HALF))
        assert not pair.link.send(result(102), memoryview(HALF), Owner())
        assert not pair.link.send(chunk(103), memoryview(HALF), Owner(), 1)
        await pair.heard.until(lambda heard: len(heard.frames) == count + 4)
        assert [header for header, _ in pair.heard.frames[count:]] == [
            result(101),
            chunk(103),
            result(102),
            chunk(100),
        ]


@pytest.mark.asyncio
async def test_a_result_shown_to_one_peer_does_not_wait_behind_another_ones():
    async with processes() as (here, there):
        free, busy = pairs = [Pair(here, there, peers=(peer, 0)) for peer in (1, 2)]
        count = fill(large(busy))
        busy.link.send(result(100), memoryview(HALF))
        assert not busy.link.send(result(101), memoryview(HALF), Owner())
        shown = memoryview(HALF)[:]
        assert free.link.send(result(102), shown)
        busy.link._large_window += len(HALF)
        pieces = here.arena.pieces_in_use
        assert busy.link.send(result(102), shown)
        assert here.arena.pieces_in_use == pieces
        await busy.heard.until(lambda heard: len(heard.frames) == count + 3)
        for pair in pairs:
            await pair.close()


@pytest.mark.asyncio
async def test_a_reader_that_says_nonsense_ends_a_link_that_reserves():
    async with linked() as pair:
        pair.link._out._head = -pair.link._out._nbytes  # as if the ring was full
        pair.words[Word.FORTH_HEAD] = 1 << 40
        assert pair.link.reserve(len(HALF), 0) is None
        assert pair.link.is_closing
        await pair.ended()
