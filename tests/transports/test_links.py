"""Behaviour that all links have in common, over sockets and in shared memory: whole frames, goodbyes, and ends."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kfcomm.errors import RemoteProtocolError, TransportError
from kfcomm.transports.shm.segment import SLAB_NBYTES
from kfcomm.transports.shm.sender import INLINE_NBYTES
from tests.support import on_every_loop
from tests.transports import streams
from tests.transports.shm import pairs
from tests.transports.streams import BUSY, LINKS, Owner, chunk, noise

CREDIT = 6
ALL = (*LINKS, "shm")


@contextlib.asynccontextmanager
async def linked(kind, **options):
    """Two ends of a link: ``link`` with its ``notes``, and ``other``, which has ``heard`` what that one has sent."""
    async with pairs.linked(slabs=2) if kind == "shm" else streams.linked(kind, **options) as ends:
        yield ends


def fill(kind, ends):
    """As many chunks as a peer in shared memory may not have read yet; what is sent after them waits."""
    return pairs.fill(ends.link) if kind == "shm" else 0


lengths = st.one_of(
    st.integers(0, 40), st.integers(0, 9000),
    st.sampled_from([INLINE_NBYTES, INLINE_NBYTES + 1, 65_000, 65_536, 200_000, SLAB_NBYTES]),
)  # fmt: skip


@on_every_loop
@settings(max_examples=40)
@given(st.lists(st.tuples(st.sampled_from(["send", "flush", "answer", "turn"]), lengths), max_size=30), st.data())
async def test_frames_arrive_whole_and_in_order(script, data):
    kind = data.draw(st.sampled_from(ALL))
    options = data.draw(st.sampled_from([None, BUSY]))
    sent, answered, owner, read = [], [], Owner(), 0
    async with linked(kind, options=options, buffer_nbytes=1 if options else None) as ends:
        link, other = ends.link, ends.other
        for index, (verb, nbytes) in enumerate(script):
            if verb == "send":
                sent.append((chunk(index), bytes(noise(nbytes))))
                read += link.send(sent[-1][0], memoryview(sent[-1][1]), owner)
            elif verb == "answer":
                answered.append(([CREDIT, index, nbytes], b""))
                other.send(answered[-1][0])
            elif verb == "turn":
                await asyncio.sleep(0)
            else:
                link.flush()
                other.flush()
        link.flush()
        other.flush()
        await ends.notes.until(lambda notes: len(notes.frames) == len(answered))
        await ends.heard.until(lambda heard: len(heard.frames) == len(sent))
        link.close()
        await ends.ended()
    assert ends.heard.frames == sent
    assert ends.notes.frames == answered
    assert read + owner.times == len(sent)
    assert ends.heard.ends == ends.notes.ends == [None]
    assert link.counts().sent_nbytes == other.counts().received_nbytes
    assert link.counts().sent_messages == other.counts().received_messages == len(sent) + 1


@on_every_loop
@pytest.mark.parametrize("kind", ALL)
async def test_closing_sends_what_is_queued_and_reads_the_answers(kind):
    async with linked(kind, buffer_nbytes=1) as ends:
        payload = noise(1 << 20)

        def answer(link, header):
            link.send([CREDIT, header[1], 0])
            link.flush()

        ends.heard.on_frame = answer
        for index in range(5):
            ends.link.send(chunk(index), memoryview(payload)[:])
        ends.link.close()
        ends.link.close()
        assert ends.link.is_closing
        assert not ends.heard.frames
        await ends.ended()
        assert ends.heard.frames == [(chunk(index), bytes(payload)) for index in range(5)]
        assert ends.notes.frames == [([CREDIT, index, 0], b"") for index in range(len(ends.notes.frames))]
        assert len(ends.notes.frames) >= 4
        assert ends.notes.ends == ends.heard.ends == [None]


@on_every_loop
@pytest.mark.parametrize("kind", ["pair", "shm"])
async def test_both_sides_may_close_at_once(kind):
    async with linked(kind) as ends:
        ends.link.send(chunk(1))
        ends.other.send([CREDIT, 2, 0])
        ends.link.close()
        ends.other.close()
        await ends.ended()
        assert (ends.notes.frames, ends.heard.frames) == ([([CREDIT, 2, 0], b"")], [(chunk(1), b"")])
        assert ends.notes.ends == ends.heard.ends == [None]


@on_every_loop
@pytest.mark.parametrize("side", ["sender", "receiver"])
@pytest.mark.parametrize("kind", ["pair", "shm"])
async def test_a_link_may_be_aborted_while_it_hands_over_frames(kind, side):
    async with linked(kind) as ends:
        sending, notes = (ends.link, ends.heard) if side == "receiver" else (ends.other, ends.notes)
        notes.on_frame = lambda link, header: link.abort()
        for index in range(3):
            sending.send(chunk(index) if side == "receiver" else [CREDIT, index, 0])
        sending.flush()
        await ends.ended()
        assert len(notes.frames) == 1
        assert notes.ends == [None]


@on_every_loop
@pytest.mark.parametrize("kind", ["pair", "shm"])
async def test_the_user_of_a_link_may_judge_a_frame(kind):
    async with linked(kind) as ends:

        def judge(link, header):
            raise RemoteProtocolError("no such key")

        ends.heard.on_frame = judge
        ends.link.send(chunk(1))
        ends.link.send(chunk(2))
        ends.link.flush()
        await ends.ended()
        assert str(ends.heard.ends[0]) == "no such key"
        assert len(ends.heard.frames) == len(ends.heard.ends) == len(ends.notes.ends) == 1


@on_every_loop
@pytest.mark.parametrize("kind", ["pair", "shm"])
async def test_an_owner_may_send_flush_and_withdraw_when_it_is_told(kind):
    async with linked(kind) as ends:
        link, late, num_sent = ends.link, Owner(), 2
        payload = pairs.HALF if kind == "shm" else b"little"  # here the late one leaves with the first

        def again():
            nonlocal num_sent
            link.withdraw(late)
            if first.times < 100:
                is_read = True
                while is_read:
                    num_sent += 1
                    is_read = link.send(chunk(1), memoryview(payload)[:], first)
                link.flush()

        first = Owner(again)
        num_sent += fill(kind, ends)
        link.send(chunk(0), memoryview(payload), first)
        link.send(chunk(7777), memoryview(payload), late)
        link.flush()
        await ends.heard.until(lambda heard: first.times == 100 and len(heard.frames) >= num_sent - 1)
        assert (first.times, late.times) == (100, 0)


@on_every_loop
@pytest.mark.parametrize("kind", ["pair", "shm"])
async def test_frames_after_goodbye_are_dropped(kind):
    async with linked(kind) as ends:
        link, other, owner = ends.link, ends.other, Owner()
        link.close()
        num_read = link.send(chunk(1), memoryview(b"abc"), owner)
        link.send(chunk(2))
        other.close()
        other.send([CREDIT, 1, 1])
        assert owner.times == 0
        await ends.ended()
        num_read += link.send(chunk(1), memoryview(pairs.HALF), owner)
        other.send([CREDIT, 1, 1])
        link.flush()
        other.flush()
        await asyncio.sleep(0)
        assert owner.times + num_read == 2
        assert not ends.heard.frames
        assert not ends.notes.frames


@on_every_loop
@pytest.mark.parametrize("kind", ["pair", "shm"])
async def test_aborting_frees_everything_at_once_and_tells_each_owner_once(kind):
    async with linked(kind, buffer_nbytes=1) as ends:
        link, memory, owner, withdrawn = ends.link, noise(1 << 20), Owner(), Owner()
        count = fill(kind, ends)
        for index in range(3):
            assert not link.send(chunk(100 + index), memoryview(memory), owner)
        link.send(chunk(99), memoryview(memory), withdrawn)
        link.flush()
        link.close()
        link.abort()
        memory.clear()  # raises BufferError while the link holds a view
        assert owner.times == 0
        assert not ends.notes.ends
        link.withdraw(withdrawn)
        link.abort()
        await ends.ended()
        assert (owner.times, withdrawn.times) == (3, 0)
        assert ends.notes.ends == [None]
        # what was in a ring is read, then the loss is told
        assert len(ends.heard.frames) == count
        assert isinstance(ends.heard.ends[0], TransportError)
        assert "without a goodbye" in str(ends.heard.ends[0])
