import asyncio
import sys
from collections import deque

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kfcomm.core.frame import Kind, make_encoder
from kfcomm.core.handshake import Keys
from kfcomm.errors import ConfigError, RemoteProtocolError
from kfcomm.transports.outbox import StreamOptions
from kfcomm.transports.sealed import Seals, payload_digest
from kfcomm.transports.stream import StreamLink
from tests.support import on_every_loop
from tests.transports.streams import (
    BUSY,
    KEYS,
    THEIR_KEYS,
    Notes,
    against_raw,
    both,
    chunk,
    noise,
    opened,
    sealed,
    sockets,
)

PAYLOADS = [b"", b"x", b"some more", bytes(3000)]


async def heard_of(data, *, options=BUSY):
    """Return the frames and the end of a sealed link whose peer sends ``data`` and hangs up."""
    ours, theirs = sockets(buffer_nbytes=1 << 20)
    notes = Notes()
    link = StreamLink(ours, asyncio.get_running_loop(), notes, 1, options=options, seals=both(THEIR_KEYS))
    theirs.sendall(data)
    theirs.close()
    await link.wait_closed()
    return notes.frames, notes.ends[0]


def frames():
    """Frames as they travel, one by one, and what is to be heard of each."""
    outbox, encode = both(KEYS).outbox(StreamOptions()), make_encoder()
    found = []
    for index, payload in enumerate(PAYLOADS):
        outbox.put(chunk(index), encode(chunk(index), len(payload)), memoryview(payload), None)
        batch, buffers, nbytes = outbox.gather()
        found.append((b"".join(buffers), (chunk(index), payload)))
        outbox.advance(batch, nbytes, deque())
    return found


@on_every_loop
async def test_untouched_frames_arrive():
    whole = frames()
    heard, end = await heard_of(b"".join(data for data, _ in whole))
    assert heard == [frame for _, frame in whole]
    assert "without a goodbye" in str(end)


@pytest.mark.asyncio
@given(st.data(), st.sampled_from([BUSY, StreamOptions()]))
async def test_a_relay_that_changes_anything_is_found_and_nothing_wrong_is_heard(data, options):
    whole = frames()
    sent = b"".join(one for one, _ in whole)
    start = data.draw(st.integers(0, len(sent) - 1))
    end = data.draw(st.integers(start, min(len(sent), start + 60)))
    put = data.draw(
        st.binary(max_size=60) | st.just(sent[start : start + 1]) | st.sampled_from([one for one, _ in whole])
    )
    changed = sent[:start] + put + sent[end:]
    assume(not sent.startswith(changed))
    heard, error = await heard_of(changed, options=options)
    right = [frame for _, frame in whole]
    assert heard == right[: len(heard)]
    assert len(heard) < len(right) or changed.startswith(sent)
    assert isinstance(error, (RemoteProtocolError, ConnectionError, OSError))


@pytest.mark.asyncio
@given(st.integers(0, 10_000), st.integers(0, 7))
async def test_every_bit_counts(place, bit):
    sent = bytearray(b"".join(data for data, _ in frames()))
    sent[place % len(sent)] ^= 1 << bit
    _, error = await heard_of(bytes(sent))
    assert isinstance(error, RemoteProtocolError)
    assert "was changed on its way" in str(error)


@pytest.mark.asyncio
@given(st.permutations(range(len(PAYLOADS))))
async def test_frames_in_another_order_are_found(order):
    whole = frames()
    heard, error = await heard_of(b"".join(whole[index][0] for index in order))
    right = next((count for count, index in enumerate(order) if count != index), len(order))
    assert heard == [frame for _, frame in whole][:right]
    assert isinstance(error, RemoteProtocolError) == (right < len(order))


@pytest.mark.asyncio
async def test_the_other_direction_has_another_key():
    data = sealed(THEIR_KEYS, [Kind.PING])
    _, error = await heard_of(data + data)
    assert isinstance(error, RemoteProtocolError)


@pytest.mark.asyncio
async def test_unsent_frame_is_sealed_again_with_new_number():
    async with against_raw(options=BUSY, buffer_nbytes=1) as (link, _, raw):
        plain_outbox = link._outbox
        link._outbox = both(KEYS).outbox(BUSY)
        for index in range(20):
            link.send(chunk(index), memoryview(noise(700)), None, index % 3)
        link.flush()
        got = b""
        while link.queued_nbytes:
            got += await asyncio.get_running_loop().sock_recv(raw, 1 << 16)
        raw.setblocking(False)
        while True:
            try:
                got += raw.recv(1 << 16)
            except BlockingIOError:
                break
        heard = [header[1] for header in opened(THEIR_KEYS, got)]
        link._outbox = plain_outbox
    assert sorted(heard) == list(range(20))
    assert heard != list(range(20))


def test_a_payload_where_none_is_sent_is_refused():
    reader = Seals(THEIR_KEYS, has_payloads=False).reader
    with pytest.raises(RemoteProtocolError, match="none is sent"):
        reader.check(memoryview(b"x"))


def test_without_the_library_a_checksum_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "xxhash", None)
    with pytest.raises(ConfigError, match=r'pip install "kfcomm\[checksum\]"'):
        payload_digest(KEYS.outgoing)


def test_digests_differ_by_key():
    assert payload_digest(KEYS.outgoing)(b"payload") != payload_digest(KEYS.incoming)(b"payload")


def test_keys_are_not_shown():
    assert "k" * 3 not in repr(Keys(b"k" * 32, b"k" * 32))
