import asyncio
import contextlib
import errno
import functools
import socket
import time
import uuid

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kfcomm.common import sockets as accepting
from kfcomm.common.sockets import readable
from kfcomm.common.version import PROTOCOL_VERSION
from kfcomm.core.auth import Unauthenticated
from kfcomm.core.frame import make_encoder
from kfcomm.core.handshake import MAGIC, PREFIX_NBYTES, Hello, Identity, Proof, Purpose, Welcome, encode
from kfcomm.errors import ConfigError, InternalError, RemoteProtocolError, TransportError
from kfcomm.transports import handshake
from kfcomm.transports.handshake import HandshakeOptions, answer, dial, serve
from kfcomm.transports.sockets import DialRefused, Listener
from kfcomm.transports.stream import StreamLink
from tests.support import half_close, on_every_loop
from tests.transports.streams import Notes, chunk, sockets

ME, PEER = Identity(0, "uid-0"), Identity(1, "uid-1")
TOKEN = b"t" * 32


def tcp(listener):
    return "127.0.0.1", listener.port


class Reception:
    """A served listener, and what came of each connection."""

    def __init__(self, unix):
        self.listener = Listener("127.0.0.1", unix=unix)
        self.addresses = (unix, tcp(self.listener))
        self.welcomed = []
        self.refused = []
        self._news = asyncio.Event()

    def welcome(self, connection, hello):
        self.welcomed.append((connection, hello))
        self._news.set()

    def refuse(self, error):
        self.refused.append(error)
        self._news.set()

    async def until(self, condition):
        while not condition(self):
            self._news.clear()
            await self._news.wait()


def wanted(hello):
    if (hello.rank, hello.uid) != (ME.rank, ME.uid):
        return f"rank {hello.rank} with uid {hello.uid} is not of this epoch"
    return None if hello.purpose == Purpose.DATA else "no control links here"


@contextlib.asynccontextmanager
async def serving(*, timeout_s=3600.0, unauthenticated=None):
    reception = Reception(f"@kfcomm-test-{uuid.uuid4()}")
    greet = functools.partial(answer, accept=wanted, options=HandshakeOptions(PEER, 4, TOKEN, timeout_s))
    serving_all = serve(
        reception.listener, greet, welcome=reception.welcome, refused=reception.refuse, unauthenticated=unauthenticated
    )
    task = asyncio.create_task(serving_all)
    try:
        yield reception
    finally:
        task.cancel()
        await asyncio.wait([task])
        reception.listener.close()
        for connection, _ in reception.welcomed:
            connection.close()


def call(addresses, **differs):
    peer, purpose = differs.pop("peer", PEER), differs.pop("purpose", Purpose.DATA)
    usual = {"me": ME, "token": TOKEN, "epoch": 4, "timeout_s": 3600.0}
    return dial(addresses, peer, purpose, HandshakeOptions(**(usual | differs)))


@on_every_loop
@pytest.mark.parametrize("kind", ["unix", "tcp"])
async def test_two_come_together_and_nothing_that_follows_is_lost(kind):
    loop = asyncio.get_running_loop()
    async with serving() as reception:
        ways = reception.addresses if kind == "unix" else reception.addresses[1:]
        connection = await call(ways)
        assert connection.is_local == (kind == "unix")
        notes, heard = Notes(), Notes()
        link = StreamLink(connection.sock, loop, notes, 1)
        link.send(chunk(), memoryview(b"at once"))
        link.close()
        await reception.until(lambda reception: reception.welcomed)
        accepted, hello = reception.welcomed.pop()
        assert (hello.epoch, hello.rank, hello.uid, hello.purpose) == (4, 0, "uid-0", Purpose.DATA)
        mine, theirs = connection.keys, accepted.keys
        assert (mine.outgoing, mine.incoming) == (theirs.incoming, theirs.outgoing)
        other = StreamLink(accepted.sock, loop, heard, 0)
        await other.wait_closed()
        await link.wait_closed()
        assert heard.frames == [(chunk(), b"at once")]


@on_every_loop
@pytest.mark.parametrize(
    ("differs", "why", "told"),
    [
        ({"token": b"another"}, "another token", "another token"),
        ({"epoch": 5}, "epoch 5 is not the epoch here, 4", "epoch 5"),
        ({"me": Identity(2, "uid-0")}, "rank 2 with uid uid-0 is not of this epoch", "rank 2"),
        ({"me": Identity(0, "uid-9")}, "rank 0 with uid uid-9 is not of this epoch", "uid-9"),
        ({"purpose": Purpose.CONTROL}, "no control links here", "no control links"),
        ({"peer": Identity(3, "uid-3")}, "not rank 3", "not rank 3"),
    ],
    ids=["token", "epoch", "rank", "uid", "purpose", "peer"],
)
async def test_refusal_reaches_both_sides_with_reason(differs, why, told):
    async with serving() as reception:
        with pytest.raises(DialRefused, match=why) as caught:
            await call(reception.addresses, **differs)
        assert not caught.value.has_no_listener
        assert f"rank {differs.get('peer', PEER).rank}" in str(caught.value)
        await reception.until(lambda reception: len(reception.refused) == 2)  # Unix, then TCP
        assert all(told in str(error) for error in reception.refused)
        assert not reception.welcomed


@on_every_loop
async def test_next_address_is_tried():
    async with serving() as reception:
        connection = await call([tcp(reception.listener), f"@kfcomm-test-{uuid.uuid4()}"])
        assert connection.sock.family == socket.AF_INET
        connection.close()


@on_every_loop
async def test_a_process_that_is_gone_is_told_from_one_that_refuses():
    async with serving() as reception:
        name = f"@kfcomm-test-{uuid.uuid4()}"
        gone = Listener("127.0.0.1", unix=name)
        dead = [name, tcp(gone)]
        gone.close()
        with pytest.raises(DialRefused, match=r"Connection refused; .*Connection refused") as caught:
            await call(dead)
        assert caught.value.has_no_listener
        with pytest.raises(DialRefused) as caught:
            await call([*dead, reception.addresses[0]], epoch=9)
        assert not caught.value.has_no_listener
        with pytest.raises(DialRefused, match="no address") as caught:
            await call([])
        assert not caught.value.has_no_listener


@on_every_loop
async def test_one_who_never_answers_is_not_waited_for():
    silent = Listener("127.0.0.1")
    try:
        with pytest.raises(DialRefused, match=r"no answer within 0\.01 s") as caught:
            await call([tcp(silent)], timeout_s=0.01)
        assert not caught.value.has_no_listener
    finally:
        silent.close()


@on_every_loop
async def test_dial_that_a_busy_process_made_too_slowly_is_made_again(monkeypatch):
    """The peer has closed the first connection, since nothing came for so long."""
    monkeypatch.setattr(handshake, "UNAUTHENTICATED_S", 0.05)
    loop, listener = asyncio.get_running_loop(), Listener("127.0.0.1")
    try:
        dialling = asyncio.create_task(call([tcp(listener)]))
        closed, _ = await loop.sock_accept(listener.sockets[0])
        time.sleep(0.1)  # noqa: ASYNC251  the loop does not run meanwhile
        closed.close()
        accepted, _ = await loop.sock_accept(listener.sockets[0])
        connection, _ = await answer(accepted, wanted, HandshakeOptions(PEER, 4, TOKEN, 3600.0))
        (await dialling).close()
        connection.close()
    finally:
        listener.close()


@on_every_loop
async def test_time_limit_that_a_busy_process_notices_late_begins_anew(monkeypatch):
    monkeypatch.setattr(handshake, "LATE_S", 0.05)
    loop, listener = asyncio.get_running_loop(), Listener("127.0.0.1")
    try:
        dialling = asyncio.create_task(call([tcp(listener)], timeout_s=0.5))
        silent, _ = await loop.sock_accept(listener.sockets[0])
        time.sleep(0.6)  # noqa: ASYNC251  the loop does not run meanwhile
        accepted, _ = await loop.sock_accept(listener.sockets[0])
        connection, _ = await answer(accepted, wanted, HandshakeOptions(PEER, 4, TOKEN, 3600.0))
        (await dialling).close()
        connection.close()
        silent.close()
    finally:
        listener.close()


@on_every_loop
@pytest.mark.parametrize("waited_s", [0.0, 0.1])
async def test_dial_is_not_made_again_for_ever(monkeypatch, waited_s):
    """Once where the peer closes the connection at once, and a few times where it was this process that was slow."""
    if waited_s:
        monkeypatch.setattr(handshake, "UNAUTHENTICATED_S", 0.05)
    loop, listener = asyncio.get_running_loop(), Listener("127.0.0.1")
    try:
        dialling = asyncio.create_task(call([tcp(listener)]))
        for _ in range(handshake.MAX_TRIES if waited_s else 1):
            closed, _ = await loop.sock_accept(listener.sockets[0])
            time.sleep(waited_s)  # noqa: ASYNC251  the loop does not run meanwhile
            closed.close()
        with pytest.raises(DialRefused, match="during the handshake"):
            await dialling
        with pytest.raises(BlockingIOError):
            listener.sockets[0].accept()
    finally:
        listener.close()


@on_every_loop
async def test_a_dial_may_be_cancelled():
    silent = Listener("127.0.0.1")
    try:
        dialling = asyncio.create_task(call([tcp(silent)]))
        accepted, _ = await asyncio.get_running_loop().sock_accept(silent.sockets[0])
        dialling.cancel()
        await asyncio.wait([dialling])
        assert dialling.cancelled()
        accepted.close()
    finally:
        silent.close()


@on_every_loop
@pytest.mark.parametrize(
    "reply",
    [b"", MAGIC, b"HTTP/1.1 400 Bad Request\r\n\r\n", encode(Welcome())],
    ids=["nothing", "half a message", "http", "welcome without a proof"],
)
async def test_an_unauthenticated_peer_that_answers_is_refused(reply):
    loop = asyncio.get_running_loop()
    stranger = Listener("127.0.0.1")
    try:
        dialling = asyncio.create_task(call([tcp(stranger)]))
        accepted, _ = await loop.sock_accept(stranger.sockets[0])
        await loop.sock_recv(accepted, 1000)
        await loop.sock_sendall(accepted, reply)
        accepted.close()
        with pytest.raises(DialRefused) as caught:
            await dialling
        assert not caught.value.has_no_listener
    finally:
        stranger.close()


# Who dials is not trusted


def garbage():
    hello = encode(Hello(PROTOCOL_VERSION, 4, 0, Purpose.DATA, bytes(32), "uid-0"))
    yield "an http request", b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", RemoteProtocolError
    yield "a hello too long", hello[: PREFIX_NBYTES - 2] + b"\xff\xff", RemoteProtocolError
    yield "no text", hello[:-1] + b"\xff", RemoteProtocolError
    yield "a chunk", make_encoder()(chunk()), RemoteProtocolError
    yield "a proof first", encode(Proof(bytes(32))), RemoteProtocolError
    yield "half a message", hello[:-1], TransportError
    yield "nothing", b"", TransportError


@on_every_loop
@pytest.mark.parametrize(("data", "error"), [pytest.param(data, error, id=name) for name, data, error in garbage()])
async def test_garbage_costs_its_own_connection_only(data, error):
    loop = asyncio.get_running_loop()
    async with serving() as reception:
        sock = socket.create_connection(reception.addresses[1])
        sock.setblocking(False)
        await loop.sock_sendall(sock, data)
        half_close(sock)
        await reception.until(lambda reception: reception.refused)
        assert isinstance(reception.refused[0], error)
        with contextlib.suppress(ConnectionResetError):
            assert await loop.sock_recv(sock, 1) == b""
        sock.close()
        (await call(reception.addresses)).close()


@on_every_loop
@settings(max_examples=30)
@given(st.binary(max_size=300))
async def test_any_bytes_end_in_one_of_two_errors(data):
    ours, theirs = sockets()
    theirs.sendall(data)
    theirs.close()
    with pytest.raises((RemoteProtocolError, TransportError)):
        await answer(ours, wanted, HandshakeOptions(PEER, 4, TOKEN, 3600.0))
    assert ours.fileno() == -1


@on_every_loop
async def test_one_who_dribbles_is_dropped_in_time():
    ours, theirs = sockets()
    theirs.sendall(MAGIC)
    with pytest.raises(TransportError, match=r"did not finish within 0\.01 s"):
        await answer(ours, wanted, HandshakeOptions(PEER, 4, TOKEN, 0.01))
    assert theirs.recv(1) == b""
    theirs.close()


@on_every_loop
async def test_the_oldest_of_too_many_is_dropped_and_one_who_belongs_gets_in():
    loop = asyncio.get_running_loop()
    async with serving(unauthenticated=Unauthenticated(3, 3)) as reception:
        dribblers = [socket.create_connection(reception.addresses[1]) for _ in range(6)]
        for sock in dribblers:
            sock.setblocking(False)
        await reception.until(lambda reception: len(reception.refused) == 3)
        assert all("oldest was dropped" in str(error) for error in reception.refused)
        for sock in dribblers[:3]:
            assert await loop.sock_recv(sock, 1) == b""
        (await call(reception.addresses)).close()
        for sock in dribblers:
            sock.close()


@pytest.mark.asyncio(loop_factories=["uvloop", "asyncio"])
async def test_ten_thousand_garbage_connections_and_one_who_belongs():
    loop = asyncio.get_running_loop()
    count, at_once = 10_000, 50
    async with serving() as reception:
        name = "\0" + reception.addresses[0][1:]
        for _ in range(count // at_once):
            unauthenticated = [socket.socket(socket.AF_UNIX) for _ in range(at_once)]
            for sock in unauthenticated:
                sock.setblocking(False)
                await loop.sock_connect(sock, name)
                sock.send(b"\xff" * 20)
            for sock in unauthenticated:
                with contextlib.suppress(ConnectionResetError):
                    assert await loop.sock_recv(sock, 1) == b""
                sock.close()
        assert len(reception.refused) == count
        (await call(reception.addresses)).close()


@pytest.mark.asyncio(loop_factories=["asyncio"])
async def test_peer_without_descriptor_is_told_and_admitted_later(monkeypatch):
    real = accepting._accept
    troubles = [OSError(errno.EMFILE, "Too many open files"), ConnectionAbortedError()]

    async def accept(sock):
        await readable(sock.fileno())
        if sock.family == socket.AF_UNIX and troubles:
            raise troubles.pop(0)
        return await real(sock)

    monkeypatch.setattr(accepting, "_accept", accept)
    monkeypatch.setattr(accepting, "PAUSE_S", 0)
    async with serving() as reception:
        with pytest.raises(DialRefused, match="no descriptor is left there"):
            await call(reception.addresses[:1])
        assert "Too many open files" in str(reception.refused[0])
        (await call(reception.addresses)).close()
        assert not troubles


@on_every_loop
@pytest.mark.parametrize("when", ["before", "while it is asked"])
async def test_a_peer_that_vanishes_is_an_error_of_the_transport(when):
    ours, theirs = sockets()
    ours.setblocking(False)
    theirs.send(MAGIC[:1])
    if when == "before":
        theirs.close()
    dialler = handshake.Dialler(ME, PEER, purpose=Purpose.DATA, epoch=4, token=TOKEN, nonce=b"n" * 32)
    greeted = asyncio.create_task(handshake._greet(ours, dialler, None))
    await asyncio.sleep(0)
    theirs.close()  # its HELLO unread: a Unix socket is then reset
    with pytest.raises(TransportError, match=r"lost during the handshake: (Broken pipe|Connection reset by peer)"):
        await greeted
    assert ours.fileno() == -1


@pytest.mark.asyncio
async def test_a_unix_address_must_be_abstract():
    with pytest.raises(ConfigError, match="abstract"):
        await call(["/tmp/a-path"])


@pytest.mark.asyncio
async def test_a_finished_handshake_without_a_hello_is_a_defect(monkeypatch):
    async def finished(*_):
        return None

    ours, theirs = sockets()
    monkeypatch.setattr(handshake, "_converse", finished)
    with pytest.raises(InternalError):
        await answer(ours, wanted, HandshakeOptions(PEER, 4, TOKEN))
    theirs.close()
