"""A peer that writes what it must not ends its link, and no other; nothing else comes of it."""

import asyncio
import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kfcomm.core.frame import PREFIX_NBYTES, make_encoder
from kfcomm.errors import RemoteProtocolError
from kfcomm.transports.shm.ring import MAX_PIECES, Word
from tests.transports.shm.pairs import MIB, Pair, processes, turns
from tests.transports.streams import Owner, chunk, noise

CREDIT = [6, 1, 1]
BYE = (7,)
MAX = (1 << 64) - 1
HALF = memoryview(noise(MIB // 2))


def encoded(header):
    return make_encoder()(header)[PREFIX_NBYTES:]


@contextlib.asynccontextmanager
async def two_pairs():
    """A link that goes wrong, and one beside it that must not suffer."""
    async with processes() as (here, there):
        bad, good = Pair(here, there, peers=(1, 0)), Pair(here, there, peers=(2, 0))
        try:
            yield bad, good
        finally:
            await bad.close()
            assert len(bad.notes.ends) == len(bad.heard.ends) == 1
            good.link.send(chunk(5), HALF)
            good.link.flush()
            await good.heard.until(lambda heard: heard.frames)
            good.other.send(CREDIT)
            good.other.flush()
            await good.notes.until(lambda notes: notes.frames)
            assert not good.notes.ends
            assert not good.heard.ends
            here.hub.reclaim()
            while here.arena.pieces_in_use:
                here.hub.wake()
                await asyncio.sleep(0)
            await good.close()


# What a publisher may do wrong


def record(header, place=0, nbytes=0, payload=None):
    def write(pair):
        pair.link._out.put(header, place, nbytes, payload)

    return write


def frame(*headers):
    def write(pair):
        for header in headers:
            pair.link._out.put_encoded(header if isinstance(header, bytes) else encoded(header))

    return write


def chunk_after_bye(pair):
    frame(BYE)(pair)
    pair.link._out.put(chunk(0), 0, 0, None)


def shown_while_lent(pair):
    pair.heard.on_frame = lambda link, header: link.lend()
    for _ in range(2):
        pair.link._out.put(chunk(0), 1, 8000, None)


def word(index, value):
    def write(pair):
        pair.link.send(chunk(7), HALF)
        pair.link._words[index] = value

    return write


WRONG_FORTH = {
    "a record of an unknown kind": record((99, 0, 0, 0, 0, 0, 0, 0)),
    "a huge kind": record((MAX,) * 8),
    "a piece beyond the arena": record(chunk(0), 16 * MIB + 1, 1),
    "a piece that ends beyond the arena": record(chunk(0), 16 * MIB - 8191, 8193),
    "a huge piece": record(chunk(0), 1, MAX),
    "a piece far away": record(chunk(0), MAX, 100),
    "a frame in the arena": record((0,) * 8, 1, 100),
    "a piece that is lent": shown_while_lent,
    "no msgpack": frame(b"\xc1\xc1\xc1"),
    "no frame": frame(b""),
    "an unknown frame": frame((77, 1)),
    "fields of a wrong type": frame((6, "a", "b")),
    "a chunk as a frame": frame(chunk(0)),
    "a frame after its goodbye": frame(BYE, CREDIT),
    "two goodbyes": frame(BYE, BYE),
    "a chunk after its goodbye": chunk_after_bye,
    "a tail that is not aligned": word(Word.FORTH_TAIL, 100),
    "a tail beyond the ring": word(Word.FORTH_TAIL, 1 << 40),
    "a tail that goes back": word(Word.FORTH_TAIL, 0),
}


@pytest.mark.asyncio
@pytest.mark.parametrize("name", WRONG_FORTH)
async def test_protocol_violations_of_sender(name):
    async with two_pairs() as (bad, _):
        bad.link.send(chunk(3))
        bad.link.flush()
        await bad.heard.until(lambda heard: heard.frames)
        WRONG_FORTH[name](bad)
        bad.other._keeper.wake()
        await bad.heard.until(lambda heard: heard.ends)
        assert isinstance(bad.heard.ends[0], RemoteProtocolError)


# What a subscriber may do wrong


def returned(*pieces, count=None):
    def write(pair):
        for index, piece in enumerate(pieces):
            pair.other._returned[index] = piece
        pair.words[Word.RETURNED] = len(pieces) if count is None else count

    return write


def back(header, place=0):
    def write(pair):
        pair.other._out.put(header, place, 0, None)

    return write


def answer(*headers):
    def write(pair):
        for header in headers:
            pair.other._out.put_encoded(header if isinstance(header, bytes) else encoded(header))

    return write


def back_word(index, value):
    def write(pair):
        pair.words[index] = value

    return write


WRONG_BACK = {
    "a piece that it was not shown": returned(MIB // 2 + 8192),
    "the same piece twice": returned(0, 0),
    "a place out of range": returned(MAX),
    "too many pieces": returned(0, count=3),
    "a count that goes back": returned(0, count=MAX),
    "more pieces than there can be": returned(0, count=MAX_PIECES + 1),
    "a chunk": back(chunk(0)),
    "a chunk in an arena": back(chunk(0), 1),
    "a record in an arena": back((0,) * 8, 1),
    "no msgpack": answer(b"\xc1"),
    "a frame after its goodbye": answer(BYE, CREDIT),
    "a tail that is not aligned": back_word(Word.BACK_TAIL, 1),
    "a tail beyond the ring": back_word(Word.BACK_TAIL, 1 << 62),
}


@pytest.mark.asyncio
@pytest.mark.parametrize("name", WRONG_BACK)
async def test_protocol_violations_of_receiver(name):
    async with two_pairs() as (bad, _):
        bad.heard.on_frame = lambda link, header: link.lend()  # so that it returns nothing itself
        for index in range(2):
            bad.link.send(chunk(index), HALF[:])
        bad.link.flush()
        await bad.heard.until(lambda heard: len(heard.frames) == 2)
        WRONG_BACK[name](bad)
        bad.link._keeper.wake()
        await bad.notes.until(lambda notes: notes.ends)
        assert isinstance(bad.notes.ends[0], RemoteProtocolError)
        await bad.heard.until(lambda heard: heard.ends)
        for loan in list(bad.other._lent):
            bad.other.give_back(loan)


# Counters of the reader, which the writer meets in the midst of the program's calls


def sends(link):
    while not link.is_closing:
        link.send(chunk(0), HALF[:4000], Owner())


def defines(link):
    while not link.is_closing:
        link.send([4, 1, ["x" * 1000]])


def answers(link):
    while not link.is_closing:
        link.send(CREDIT)


def flushes(link):
    link.queue = [(0, number, chunk(0), HALF[:4000], None) for number in range(999)]
    link.flush()


@pytest.mark.asyncio
@pytest.mark.parametrize("work", [sends, defines, flushes])
@pytest.mark.parametrize("head", [1 << 40, MAX])
async def test_a_sender_that_meets_a_wrong_counter_ends_its_link_from_the_loop(work, head):
    async with two_pairs() as (bad, _):
        bad.words[Word.FORTH_HEAD] = head
        work(bad.link)
        assert bad.link.is_closing
        assert not bad.notes.ends
        await bad.ended()
        assert isinstance(bad.notes.ends[0], RemoteProtocolError)


@pytest.mark.asyncio
async def test_a_goodbye_that_meets_a_wrong_counter_ends_the_link():
    async with two_pairs() as (bad, _):
        while not bad.link.queue:
            bad.link.send(chunk(0), HALF[:4000], filler := Owner())
        bad.link.withdraw(filler)
        bad.words[Word.FORTH_HEAD] = MAX
        bad.link.close()
        await bad.ended()
        assert isinstance(bad.notes.ends[0], RemoteProtocolError)


@pytest.mark.asyncio
async def test_a_receiver_that_meets_a_wrong_counter_ends_its_link_from_the_loop():
    async with two_pairs() as (bad, _):
        bad.words[Word.BACK_HEAD] = MAX
        answers(bad.other)
        assert not bad.heard.ends
        await bad.ended()
        assert isinstance(bad.heard.ends[0], RemoteProtocolError)


# Noise anywhere

parts = st.sampled_from(["words", "returned", "_forth", "_back"])
values = st.one_of(st.integers(0, MAX), st.integers(0, 4096), st.sampled_from([0, 1, 64, 96, 128, MAX]))


@pytest.mark.asyncio
@settings(max_examples=60)
@given(st.lists(st.tuples(parts, st.integers(0, 600), values), min_size=1, max_size=12), st.integers(0, 5))
async def test_noise_anywhere_in_the_segment_ends_that_link_or_nothing(wrong, head_start):
    async with two_pairs() as (bad, _):
        for index in range(8):
            bad.link.send(chunk(index), HALF[: 1000 * index])
            bad.other.send(CREDIT)
        bad.link.flush()
        bad.other.flush()
        await turns(head_start)
        for part, place, value in wrong:
            memory = getattr(bad.shared, part)
            memory = memory if memory.format == "Q" else memory.cast("Q")
            memory[place % len(memory)] = value
        for index in range(8):
            bad.link.send(chunk(index), HALF[: 1000 * index])
            bad.other.send(CREDIT)
        bad.link.flush()
        bad.other.flush()
        bad.link.close()
        await turns()
        for end in bad.notes.ends + bad.heard.ends:
            assert end is None or isinstance(end, (RemoteProtocolError, ConnectionError))
        bad.link.abort()
        bad.other.abort()
        bad.link._keeper.reclaim(bad.link.peer)
