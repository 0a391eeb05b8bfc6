import asyncio
import contextlib
import socket
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kfcomm.core.frame import MAX_HEADER_NBYTES, MAX_PAYLOAD_NBYTES, PREFIX, make_encoder
from kfcomm.errors import LocalProtocolError, RemoteProtocolError, TransportError
from kfcomm.transports.outbox import StreamOptions
from kfcomm.transports.stream import StreamLink
from tests.support import half_close, on_every_loop
from tests.transports.streams import BUSY, KINDS, LINKS, Notes, Owner, against_raw, chunk, linked, noise, sockets

BYE = [7]


async def kernel_is_full(link):
    """Turns of the loop until the kernel has taken nothing more for some of them: the other end does not read."""
    taken, turns = -1, 0
    while turns < 20:
        turns = 0 if link.bytes_out != taken else turns + 1
        taken = link.bytes_out
        await asyncio.sleep(0)


@on_every_loop
@pytest.mark.parametrize("kind", KINDS)
async def test_a_peer_may_write_byte_by_byte(kind):
    loop = asyncio.get_running_loop()
    encode = make_encoder()
    payload = noise(300)
    frames = [
        (chunk(1), b""),
        (chunk(2), bytes(payload)),
        ([6, 1, 1], b""),
        (chunk(3), b"x"),
        ([3, 1, b"", "k", 0], b""),
    ]
    async with against_raw(kind) as (_, notes, raw):
        for header, body in [*frames, (BYE, b"")]:
            for byte in encode(header, len(body)) + body:
                await loop.sock_sendall(raw, bytes([byte]))
        half_close(raw)
        await notes.until(lambda notes: notes.ends)
        assert notes.frames == frames
        assert notes.ends == [None]


@on_every_loop
@pytest.mark.parametrize("kind", LINKS)
async def test_a_huge_payload_fits_through_tiny_buffers(kind):
    payload = noise(8 << 20)
    async with linked(kind, buffer_nbytes=1) as (link, _, other, heard):
        link.send(chunk(), memoryview(payload), owner := Owner())
        link.send(chunk(1))
        link.flush()
        assert owner.times == 0
        await heard.until(lambda heard: len(heard.frames) == 2)
        assert heard.frames == [(chunk(), bytes(payload)), (chunk(1), b"")]
        assert owner.times == 1
        assert other.frames_in == 2
        assert heard.bursts > 1


@on_every_loop
@pytest.mark.parametrize("kind", KINDS)
async def test_urgent_frame_overtakes_unsent_ones(kind):
    async with against_raw(kind, buffer_nbytes=1 << 14) as (link, _, raw):
        payload = noise(1 << 16)
        for index in range(20):
            link.send(chunk(index), memoryview(payload))
        link.flush()
        await kernel_is_full(link)
        taken = link.frames_out
        is_cut = link.bytes_out > taken * (len(payload) + len(make_encoder()(chunk(), len(payload))))
        first = taken + is_cut
        assert first < 20
        link.send(chunk(100), memoryview(b"a little urgent"), priority=1)
        link.send(chunk(101), memoryview(b"very urgent"), priority=32767)
        link.send([3, 1, b"", "a name", 0])
        link.send(chunk(102), memoryview(b"can wait"), priority=-32768)
        link.close()

        loop, notes = asyncio.get_running_loop(), Notes()
        reader = StreamLink(raw.dup(), loop, notes, 0)
        await notes.until(lambda notes: notes.ends)
        await reader.wait_closed()
        arrived = [header[3] if header[0] == 3 else header[1] for header, _ in notes.frames]
        assert arrived == [*range(first), "a name", 101, 100, *range(first, 20), 102]
        assert notes.ends == [None]


@on_every_loop
@pytest.mark.parametrize("kind", LINKS)
async def test_a_link_may_become_low_latency_while_it_is_busy(kind):
    async with linked(kind) as (link, _, other, heard):
        payloads = [noise(3 << 20) for _ in range(3)]
        for index, payload in enumerate(payloads):
            link.send(chunk(index), memoryview(payload))
        link.flush()
        for end in (link, other):
            end.set_low_latency()
        await heard.until(lambda heard: len(heard.frames) == 3)
        assert heard.frames == [(chunk(index), bytes(payload)) for index, payload in enumerate(payloads)]
    link.set_low_latency()


@on_every_loop
async def test_a_payload_in_the_staging_buffer_is_shown_and_a_longer_one_placed():
    async with linked() as (link, _, _, heard):
        for index, nbytes in enumerate([100, 1 << 20, 100]):
            link.send(chunk(index), memoryview(noise(nbytes)))
        link.flush()
        await heard.until(lambda heard: len(heard.frames) == 3)
        assert [len(placement.view) for placement in heard.placements] == [1 << 20]


@on_every_loop
async def test_small_payload_that_comes_in_parts_is_shown_whole():
    options, encode, loop = StreamOptions(), make_encoder(), asyncio.get_running_loop()
    payloads = [bytes(noise(nbytes)) for nbytes in (options.read_nbytes - 1, 10, options.read_nbytes)]
    data = b"".join(encode(chunk(index), len(payload)) + payload for index, payload in enumerate(payloads))
    async with against_raw("tcp") as (link, notes, raw):
        for part in (data[start : start + 5000] for start in range(0, len(data), 5000)):
            sent = link.bytes_in + len(part)
            await loop.sock_sendall(raw, part)
            await notes.until(lambda _, sent=sent: link.bytes_in == sent)
        await notes.until(lambda notes: len(notes.frames) == 3)
        assert notes.frames == [(chunk(index), payload) for index, payload in enumerate(payloads)]
        assert [len(placement.view) for placement in notes.placements] == [options.read_nbytes]


@on_every_loop
async def test_both_directions_at_once():
    one, two = noise(3 << 20), noise(3 << 20)
    async with linked("tcp", options=BUSY) as (link, notes, other, heard):
        for index in range(3):
            link.send(chunk(index), memoryview(one))
            other.send(chunk(index), memoryview(two))
        link.flush()
        other.flush()
        await notes.until(lambda notes: len(notes.frames) == 3)
        await heard.until(lambda heard: len(heard.frames) == 3)
        assert notes.frames == [(chunk(index), bytes(two)) for index in range(3)]
        assert heard.frames == [(chunk(index), bytes(one)) for index in range(3)]


@on_every_loop
async def test_a_readable_link_gives_others_their_turn():
    async with linked(options=BUSY) as (link, _, _, heard):
        for index in range(100):
            link.send(chunk(index), memoryview(noise(1000)))
        link.flush()
        await heard.until(lambda heard: len(heard.frames) == 100)
        assert heard.bursts >= 100_000 // BUSY.staging_nbytes + 1
    async with linked(options=BUSY) as (link, _, _, heard):
        link.send(chunk(), memoryview(noise(1 << 20)))
        link.flush()
        await heard.until(lambda heard: heard.frames)
        assert heard.bursts >= 2


# Owners


@on_every_loop
async def test_owners_are_told_neither_in_send_nor_twice():
    async with linked() as (link, _, _, heard):
        owner = Owner()
        for index in range(3):
            link.send(chunk(index), memoryview(b"abc"), owner)
        assert owner.times == 0
        link.flush()
        assert owner.times == 3
        await heard.until(lambda heard: len(heard.frames) == 3)
        assert owner.times == 3


@on_every_loop
@pytest.mark.parametrize("kind", LINKS)
async def test_withdrawing_in_mid_send_leaves_whole_frames_and_the_old_bytes(kind):
    async with linked(kind, buffer_nbytes=1) as (link, _, _, heard):
        mine, theirs = noise(4 << 20), noise(1000)
        old = bytes(mine)
        gone, stays = Owner(), Owner()
        link.send(chunk(0), memoryview(mine), gone)
        link.send(chunk(1), memoryview(theirs), stays)
        link.send(chunk(2), memoryview(mine), gone)
        link.flush()
        assert 0 < link.bytes_out < len(mine)
        assert link.withdraw(gone) == [chunk(2)]
        mine[:] = bytes(len(mine))
        mine.clear()  # raises BufferError while the link holds a view
        await heard.until(lambda heard: len(heard.frames) == 2)
        assert heard.frames == [(chunk(0), old), (chunk(1), bytes(theirs))]
        assert (gone.times, stays.times) == (0, 1)


@on_every_loop
@pytest.mark.parametrize("rest", [1 << 20, 0], ids=["far from its end", "at its last bytes"])
async def test_a_disowned_placement_is_written_no_more(rest):
    loop = asyncio.get_running_loop()
    encode = make_encoder()
    nbytes = 1 << 20
    async with against_raw() as (link, notes, raw):
        payload = noise(nbytes + rest)
        first = encode(chunk(0), len(payload)) + payload[: nbytes - 1]
        await loop.sock_sendall(raw, first)
        await notes.until(lambda notes: link.bytes_in == len(first))
        link.disown(object())
        link.disown(notes)
        before = bytes(notes.placements[0].memory)
        await loop.sock_sendall(raw, payload[nbytes - 1 :] + encode(chunk(1), 5) + b"after")
        await notes.until(lambda notes: notes.frames)
        assert notes.frames == [(chunk(1), b"after")]
        assert bytes(notes.placements[0].memory) == before
        assert link.frames_in == 2
        link.disown(notes)


# What the peer must not do


def garbage():
    encode = make_encoder()
    yield "an http request", b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
    yield "a header too long", PREFIX.pack(MAX_HEADER_NBYTES + 1, 0)
    yield "no header", PREFIX.pack(0, 0)
    yield "a payload too long", PREFIX.pack(5, MAX_PAYLOAD_NBYTES + 1)
    yield "no msgpack", PREFIX.pack(3, 0) + b"\xc1\xc1\xc1"
    yield "fields of a wrong type", encode([6, "a", "b"])
    yield "a payload on another kind", encode([6, 1, 1], 3) + b"abc"
    yield "a frame after its goodbye", encode(BYE) + encode([6, 1, 1])


@on_every_loop
@pytest.mark.parametrize("data", [pytest.param(data, id=name) for name, data in garbage()])
async def test_a_frame_that_must_not_be_ends_the_link(data):
    async with against_raw() as (link, notes, raw):
        raw.send(make_encoder()(chunk(5)) + data)
        await notes.until(lambda notes: notes.ends)
        assert isinstance(notes.ends[0], RemoteProtocolError)
        assert len(notes.ends) == 1
        assert notes.frames == [(chunk(5), b"")]
        assert link.is_closing
        await link.wait_closed()


@on_every_loop
@settings(max_examples=30)
@given(st.binary(min_size=1, max_size=2000))
async def test_any_bytes_end_link_once_and_cleanly(data):
    async with against_raw() as (_, notes, raw):
        raw.send(data)
        raw.close()
        await notes.until(lambda notes: notes.ends)
        assert len(notes.ends) == 1


@on_every_loop
async def test_ten_thousand_garbage_frames_cost_one_connection_and_no_memory():
    async with linked() as (link, _, _, heard), against_raw("tcp") as (victim, notes, raw):
        flood = (PREFIX.pack(40, 0) + b"\xc1" * 40) * 10_000
        with contextlib.suppress(ConnectionError):  # it may be dropped before it has said all
            await asyncio.get_running_loop().sock_sendall(raw, flood)
        await notes.until(lambda notes: notes.ends)
        assert not notes.frames
        assert not notes.placements
        assert victim.bytes_in <= StreamOptions().staging_nbytes
        link.send(chunk(1))
        link.flush()
        await heard.until(lambda heard: heard.frames)


@on_every_loop
@pytest.mark.parametrize("what", ["frame", "placement"])
async def test_a_defect_of_the_user_ends_the_link_and_is_not_hidden(what):
    unheard = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unheard.append(context["exception"]))
    async with linked() as (link, _, _, heard):

        def fail(*_):
            raise ZeroDivisionError

        if what == "frame":
            heard.on_frame = fail
            link.send(chunk(1))
        else:
            heard.place = lambda link, header, nbytes: Notes.place(heard, link, header, nbytes + 1)
            link.send(chunk(1), memoryview(noise(1 << 20)))
        link.flush()
        await heard.until(lambda heard: heard.ends)
        assert heard.ends == unheard
        assert isinstance(unheard[0], ZeroDivisionError if what == "frame" else ValueError)


# The end


@on_every_loop
@pytest.mark.parametrize("cut", [0, 3, 30, 500_000])
@pytest.mark.parametrize("kind", KINDS)
async def test_an_end_without_a_goodbye_is_a_loss(kind, cut):
    async with against_raw(kind) as (link, notes, raw):
        data = make_encoder()(chunk(0), 1 << 20) + bytes(1 << 20)
        await asyncio.get_running_loop().sock_sendall(raw, data[:cut])
        raw.close()
        await notes.until(lambda notes: notes.ends)
        assert isinstance(notes.ends[0], TransportError)
        assert "without a goodbye" in str(notes.ends[0])
        assert len(notes.ends) == 1
        assert not notes.frames
        await link.wait_closed()


@on_every_loop
async def test_a_reset_is_a_loss_and_frees_what_is_queued():
    async with against_raw("tcp", buffer_nbytes=1) as (link, notes, raw):
        owner, withdrawn = Owner(), Owner()
        memory = noise(4 << 20)
        for index in range(3):
            link.send(chunk(index), memoryview(memory), owner)
        link.send(chunk(3), memoryview(memory), withdrawn)
        link.flush()
        link.withdraw(withdrawn)
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        raw.close()
        await notes.until(lambda notes: notes.ends)
        assert isinstance(notes.ends[0], TransportError)
        assert owner.times == 3
        assert withdrawn.times == 0
        memory.clear()


@on_every_loop
@pytest.mark.parametrize("closing", [False, True])
@pytest.mark.parametrize("kind", KINDS)
async def test_a_reset_is_noticed_while_only_reading(kind, closing):
    async with against_raw(kind) as (link, notes, raw):
        link.send(chunk(0))
        link.flush()
        if closing:
            link.close()
            for _ in range(5):  # turns of the loop in which its goodbye leaves
                await asyncio.sleep(0)
            assert link.frames_out == 2
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        raw.close()
        await notes.until(lambda notes: notes.ends)
        assert isinstance(notes.ends[0], TransportError)


@on_every_loop
@pytest.mark.parametrize("kind", ["pair", "unix"])
async def test_last_frames_of_closed_peer_are_read(kind):
    """A process that was stopped goes on: it writes first, to a connection that is closed, and has not read yet."""
    async with against_raw(kind) as (link, notes, raw):
        encode = make_encoder()
        await asyncio.get_running_loop().sock_sendall(raw, b"".join(encode(chunk(index)) for index in range(3)))
        raw.close()
        link.send(chunk(0), memoryview(b"abc"), owner := Owner())
        link.flush()
        assert link.is_closing
        assert not notes.frames
        link.send(chunk(1))
        await notes.until(lambda notes: notes.ends)
        assert len(notes.frames) == 3
        assert isinstance(notes.ends[0], TransportError)
        assert owner.times == len(notes.ends) == 1


@on_every_loop
async def test_a_failed_write_is_reported_from_the_loop_and_once():
    async with against_raw() as (link, notes, raw):
        raw.close()
        link.send(chunk(0), memoryview(b"abc"), owner := Owner())
        link.flush()
        assert not notes.ends
        await notes.until(lambda notes: notes.ends)
        assert isinstance(notes.ends[0], TransportError)
        assert "rank 1" in str(notes.ends[0])
        assert owner.times == 1
        link.flush()
        link.close()
        link.abort()
        await link.wait_closed()
        assert len(notes.ends) == 1


@on_every_loop
async def test_waiting_for_the_end_may_be_given_up():
    async with linked() as (link, _, _, _):
        waiting = asyncio.ensure_future(link.wait_closed())
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        link.abort()
        await link.wait_closed()


@pytest.mark.asyncio
async def test_a_frame_too_large_is_a_misuse():
    async with linked() as (link, _, _, _):
        with pytest.raises(LocalProtocolError):
            link.send([3, 1, b"", "x" * MAX_HEADER_NBYTES])
        assert link.queued_nbytes == 0
        assert repr(link) == "<StreamLink to rank 1, open, 0 bytes queued>"


@pytest.mark.parametrize("sizes", [{"staging_nbytes": 1000}, {"lookahead_nbytes": 0}, {"gather_frames": 501}])
def test_impossible_sizes_are_refused(sizes):
    with pytest.raises(ValueError, match="="):
        StreamOptions(**sizes)


@on_every_loop
async def test_a_link_can_be_made_while_its_peer_has_long_been_talking():
    sock, raw = sockets("tcp")
    raw.sendall(make_encoder()(chunk(0), 4) + b"abcd" + make_encoder()(BYE))
    raw.close()
    notes = Notes()
    link = StreamLink(sock, asyncio.get_running_loop(), notes, 1)
    await link.wait_closed()
    assert notes.frames == [(chunk(0), b"abcd")]
    assert notes.ends == [None]
