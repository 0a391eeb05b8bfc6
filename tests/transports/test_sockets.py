import asyncio
import errno
import socket
import uuid

import pytest

from kfcomm.common.sockets import why_failed
from kfcomm.errors import ConfigError, TransportError
from kfcomm.transports import sockets
from kfcomm.transports.sockets import (
    DialRefused,
    Listener,
    connect,
    describe,
    has_no_listener,
    hold_little,
    tune,
    watch,
)
from tests.support import free_port, on_every_loop
from tests.transports import streams


@pytest.fixture
def name():
    return f"@kfcomm-test-{uuid.uuid4()}"


def listener(**arguments):
    return Listener("127.0.0.1", **arguments)


def test_a_listener_binds_the_chosen_address_alone(name):
    here = listener(unix=name)
    try:
        tcp, unix = here.sockets
        assert tcp.getsockname() == ("127.0.0.1", here.port)
        assert here.port > 0
        assert unix.getsockname() == b"\0" + name[1:].encode()
        assert not any(sock.getblocking() or sock.get_inheritable() for sock in here.sockets)
    finally:
        here.close()
        here.close()


def test_a_port_in_use_is_named():
    first = listener()
    try:
        with pytest.raises(ConfigError, match=rf"127\.0\.0\.1:{first.port}: Address already in use"):
            listener(port=first.port)
    finally:
        first.close()


def test_a_unix_name_in_use_is_named_and_the_port_given_back(name):
    first = listener(unix=name)
    try:
        with pytest.raises(ConfigError, match=f"unix:{name}: Address already in use"):
            listener(unix=name)
    finally:
        first.close()


def test_a_port_can_be_taken_again_at_once():
    first = listener()
    with socket.create_connection(("127.0.0.1", first.port)):
        accepted, _ = first.sockets[0].accept()
        accepted.close()  # the side that closes first keeps the port in TIME_WAIT
    port = first.port
    first.close()
    listener(port=port).close()


@pytest.mark.parametrize(
    ("address", "unix", "why"),
    [
        ("192.0.2.1", None, "192.0.2.1:0"),
        ("127.0.0.1", "/tmp/socket", "abstract name"),
        ("not an address", None, "not 'not an address'"),
    ],
)
def test_bind_error_names_address(address, unix, why):
    with pytest.raises(ConfigError, match=why):
        Listener(address, unix=unix)


def test_a_system_without_sockets_to_give_is_no_setting(monkeypatch):
    def exhausted(address):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(sockets, "_make", exhausted)
    with pytest.raises(TransportError, match="Too many open files"):
        listener()


@on_every_loop
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
async def test_connecting_over_tcp(host):
    address = "127.0.0.1" if host == "localhost" else host
    try:
        here = Listener(address)
    except ConfigError as error:
        pytest.skip(f"no IPv6 on this machine: {error}")
    try:
        with await connect((host, here.port)) as sock:
            assert sock.getpeername()[:2] == (address, here.port)
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            assert not sock.getblocking()
    finally:
        here.close()


@on_every_loop
async def test_a_full_unix_backlog_is_waited_out(name):
    loop = asyncio.get_running_loop()
    with socket.socket(socket.AF_UNIX) as busy:
        busy.setblocking(False)
        busy.bind("\0" + name[1:])
        busy.listen(0)
        first = await connect(name)
        second = asyncio.create_task(connect(name))
        await asyncio.sleep(0)
        assert not second.done()
        accepted, _ = await loop.sock_accept(busy)
        await second
        third = asyncio.create_task(connect(name))
        await asyncio.sleep(0)
        assert not third.done()
        third.cancel()
        await asyncio.wait([third])
        for sock in (first, accepted, second.result()):
            sock.close()


@on_every_loop
async def test_connect_without_listener(name):
    errors = []
    for address in (name, ("127.0.0.1", free_port())):
        with pytest.raises(ConnectionRefusedError) as caught:
            await connect(address)
        errors.append(caught.value)
        assert why_failed(caught.value) == "Connection refused"
    assert has_no_listener(errors)
    assert not has_no_listener([*errors, OSError(errno.ETIMEDOUT, "")])
    assert not has_no_listener([])


@on_every_loop
async def test_a_socket_connected_to_itself_is_refused(monkeypatch):
    sock = socket.socket()
    sock.setblocking(False)
    sock.bind(("127.0.0.1", 0))
    monkeypatch.setattr(sockets, "_make", lambda address: sock)
    with pytest.raises(ConnectionRefusedError) as caught:
        await connect(sock.getsockname())
    assert has_no_listener([caught.value])


@on_every_loop
async def test_a_name_that_cannot_be_resolved_has_the_systems_reason():
    async def main():
        for name in ("a..b.invalid", "kfcomm.invalid"):
            with pytest.raises(OSError) as caught:  # noqa: PT011 (its text is the system's)
                await connect((name, 1))
            assert why_failed(caught.value)
            assert not has_no_listener([caught.value])

    try:
        await main()
    finally:
        await asyncio.get_running_loop().shutdown_default_executor()


@pytest.mark.parametrize("kind", ["tcp", "unix"])
def test_only_tcp_is_watched_for_silence(kind):
    pair = streams.sockets(kind)
    try:
        for sock in pair:
            tune(sock)
            watch(sock, 12.0)
        assert bool(pair[0].getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)) == (kind == "tcp")
        if kind == "tcp" and hasattr(socket, "TCP_USER_TIMEOUT"):
            assert pair[0].getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 12_000
            assert pair[0].getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 3
    finally:
        for sock in pair:
            sock.close()


@pytest.mark.parametrize("kind", ["tcp", "unix"])
def test_the_kernel_can_be_told_to_hold_little(kind):
    pair = streams.sockets(kind)
    try:
        before, after = (limits(pair[0], kind, change) for change in (tune, hold_little))
        assert after < before
    finally:
        for sock in pair:
            sock.close()


def limits(sock, kind, change):
    """Return the most bytes that the kernel holds of a connection, after a change."""
    change(sock)
    if kind == "unix":
        return sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT) or 1 << 32  # 0: what all have


def test_addresses_as_people_write_them():
    assert describe("@name") == "unix:@name"
    assert describe(("10.0.0.1", 5)) == "10.0.0.1:5"
    assert describe(("::1", 5)) == "[::1]:5"


def test_dial_refused_is_a_transport_error():
    assert isinstance(DialRefused("x"), TransportError)
    assert not DialRefused("x").has_no_listener
