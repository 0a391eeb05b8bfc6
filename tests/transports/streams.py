"""Pairs of sockets for tests of stream links, and an engine that only takes notes."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import socket
import tempfile
import uuid
from pathlib import Path
from typing import NamedTuple

from kfcomm.core.frame import make_encoder
from kfcomm.core.handshake import Keys
from kfcomm.transports.outbox import MAX_HEAD_NBYTES, StreamOptions
from kfcomm.transports.sealed import Seals
from kfcomm.transports.stream import StreamLink
from kfcomm.transports.tls import load, make, secured

KINDS = ("pair", "tcp", "unix")
LINKS = (*KINDS, "sealed", "tls")
"""Ways of two links to each other."""
KEYS = Keys(bytes(32), bytes(31) + b"k")
THEIR_KEYS = Keys(KEYS.incoming, KEYS.outgoing)
BUSY = StreamOptions(
    staging_nbytes=MAX_HEAD_NBYTES, lookahead_nbytes=100, burst_nbytes=1 << 12, gather_nbytes=1 << 12, gather_frames=3
)
"""Small sizes, so that little data meets every boundary."""


def sockets(kind="pair", buffer_nbytes=None):
    """Two connected sockets; ``buffer_nbytes`` is as small as the kernel allows when it is 1.

    Over TCP it holds two segments of the loopback interface at least: with less, the kernel moves 2 KB a second.
    """
    if kind in ("tcp", "tls") and buffer_nbytes is not None:
        buffer_nbytes = max(buffer_nbytes, 1 << 17)
    if kind in ("pair", "sealed"):
        one, other = socket.socketpair()
        for sock in (one, other):
            _shrink(sock, buffer_nbytes)
        return one, other
    family = socket.AF_UNIX if kind == "unix" else socket.AF_INET
    with socket.socket(family) as listener:
        _shrink(listener, buffer_nbytes)
        listener.bind(f"\0kfcomm-test-{uuid.uuid4()}" if kind == "unix" else ("127.0.0.1", 0))
        listener.listen()
        one = socket.socket(family)
        _shrink(one, buffer_nbytes)
        one.connect(listener.getsockname())
        other, _ = listener.accept()
    return one, other


def _shrink(sock, nbytes):
    if nbytes is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, nbytes)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, nbytes)


class Placement:
    def __init__(self, header, nbytes, owner):
        self.header = header
        self.owner = owner
        self.memory = bytearray(nbytes)
        self.view = memoryview(self.memory)


class Owner:
    """Counts how often it was told that a payload has left; ``on_sent`` runs each time."""

    def __init__(self, on_sent=None):
        self.times = 0
        self.on_sent = on_sent

    def sent(self):
        self.times += 1
        if self.on_sent is not None:
            self.on_sent()


class Notes:
    """An ``Inbound`` that notes all it hears, and lets a test wait until it has heard something."""

    def __init__(self):
        self.frames = []
        self.placements = []
        self.bursts = 0
        self.ends = []
        self.on_frame = lambda link, header: None
        self._heard = asyncio.Event()

    def opened(self, link):
        raise AssertionError("a link does not open itself")

    def place(self, link, header, nbytes):
        self.placements.append(Placement(header, nbytes, owner=self))
        self._heard.set()
        return self.placements[-1]

    def arrived(self, link, placement):
        self._note(link, placement.header, bytes(placement.memory))

    def receive(self, link, header, payload):
        self._note(link, header, bytes(payload))

    def burst_end(self, link):
        self.bursts += 1
        self._heard.set()

    def lost(self, link, error):
        self.ends.append(error)
        self._heard.set()

    def _note(self, link, header, payload):
        assert not self.ends, "nothing follows the end"
        self.frames.append((list(header), payload))
        self._heard.set()
        self.on_frame(link, header)

    async def until(self, condition):
        while not condition(self):
            self._heard.clear()
            await self._heard.wait()


@functools.cache
def certificates():
    """TLS of a job."""
    with tempfile.TemporaryDirectory() as folder:
        make(Path(folder), days=1)
        return load(folder)


async def both_ends(kind, buffer_nbytes=None):
    """Two connected sockets, inside TLS if that is the kind."""
    socks = sockets(kind, buffer_nbytes)
    if kind != "tls":
        return socks
    for sock in socks:
        sock.setblocking(False)
    client, server = certificates()
    return await asyncio.gather(secured(socks[0], client, is_server=False), secured(socks[1], server, is_server=True))


class Ends(NamedTuple):
    """Two links to each other, and what each hears."""

    link: StreamLink
    notes: Notes
    other: StreamLink
    heard: Notes

    async def ended(self):
        """Wait until both ends have been reported."""
        await self.link.wait_closed()
        await self.other.wait_closed()


@contextlib.asynccontextmanager
async def linked(kind="pair", *, options=None, buffer_nbytes=None):
    """Two links to each other, and the notes of each; at the end nothing is open any more."""
    loop = asyncio.get_running_loop()
    notes, other_notes = Notes(), Notes()
    socks = await both_ends(kind, buffer_nbytes)
    seals, theirs = (None, None) if kind != "sealed" else (both(KEYS), both(THEIR_KEYS))
    link = StreamLink(socks[0], loop, notes, 1, options=options, seals=seals)
    other = StreamLink(socks[1], loop, other_notes, 0, options=options, seals=theirs)
    try:
        yield Ends(link, notes, other, other_notes)
    finally:
        for end in (link, other):
            end.abort()
            await end.wait_closed()


@contextlib.asynccontextmanager
async def against_raw(kind="pair", *, options=None, buffer_nbytes=None):
    """A link, its notes, and the bare socket at the other end."""
    loop = asyncio.get_running_loop()
    notes = Notes()
    sock, raw = sockets(kind, buffer_nbytes)
    raw.setblocking(False)
    link = StreamLink(sock, loop, notes, 1, options=options)
    try:
        yield link, notes, raw
    finally:
        link.abort()
        await link.wait_closed()
        raw.close()


def chunk(index=0):
    """The header of a CHUNK."""
    return [1, index, 0, 0, 0, 0, 0, 0]


def noise(nbytes):
    """Bytes that differ from place to place."""
    return bytearray(os.urandom(nbytes))


def both(keys):
    """The seals of an end with these keys."""
    return Seals(keys, has_payloads=True)


def sealed(keys, *headers, payload=None):
    """The frames of a connection from its beginning, sealed; the last one has the payload."""
    outbox = both(keys).outbox(StreamOptions())
    for number, header in enumerate(headers, 1):
        outbox.put(
            header, make_encoder()(header, len(payload or b"")), payload if number == len(headers) else None, None
        )
    return b"".join(outbox.gather()[1])


def opened(keys, data):
    """The headers of the sealed frames that a connection brought, from its beginning."""
    reader = both(keys).reader
    headers, start = [], 0
    while start < len(data):
        header, nbytes, body = reader.decode_head(memoryview(data), start, len(data))
        headers.append(header)
        start = body + nbytes
    return headers
