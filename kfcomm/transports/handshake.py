"""Handshake over sockets: `dial` a peer, `answer` one, or `serve` every connection.

Messages are read to their last byte and no further, so that a finished socket can be handed to a link or to another
thread's loop with nothing lost. ``core.handshake`` has the rules; this module adds bytes, time limit and randomness.

Invariants: a handshake that fails closes its socket, whatever the failure; an unauthenticated peer costs a few KiB for
a bounded time.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, assert_never

from kfcomm.common.sockets import accept_all, host_of, why_failed
from kfcomm.core.auth import Unauthenticated
from kfcomm.core.handshake import (
    NONCE_NBYTES,
    PREFIX_NBYTES,
    Answerer,
    Dialler,
    HandshakeStep,
    Hello,
    Identity,
    Message,
    Outcome,
    Refused,
    decode,
    decode_prefix,
    encode,
)
from kfcomm.errors import InternalError, KfcommError, ProtocolError, RemoteProtocolError, TransportError
from kfcomm.transports.sockets import (
    Address,
    Connection,
    ConnectionEnded,
    DialRefused,
    Listener,
    StreamSocket,
    closed_on_failure,
    connect,
    describe,
    has_no_listener,
    receive_exactly,
    send_all,
    told_as_lost,
    tune,
)

if TYPE_CHECKING:
    from ssl import SSLContext

    from kfcomm.transports.tls import Tls

HANDSHAKE_TIMEOUT_S = 10.0
"""For a peer of the job, whose host may be busy."""
UNAUTHENTICATED_S = 5.0
"""For an incoming connection, before it has authenticated."""
LATE_S = 1.0
"""A timer that fires so late tells that this process did not run: it imports a large library, say."""
MAX_TRIES = 3
"""Of a dial that fails since this process was too slow."""


@dataclass(frozen=True, slots=True)
class HandshakeOptions:
    """This process in its handshakes, and their time limit; without ``tls`` they are in plain text."""

    me: Identity
    epoch: int
    token: bytes = field(repr=False)
    timeout_s: float = HANDSHAKE_TIMEOUT_S
    tls: Tls | None = None


async def dial(addresses: Iterable[Address], peer: Identity, purpose: int, options: HandshakeOptions) -> Connection:
    """Connect to ``peer`` and prove each other's identity. Unix addresses are tried before TCP ones.

    A dial that fails because this process did not run is made again, `MAX_TRIES` times in all: the peer has closed
    the connection after `UNAUTHENTICATED_S`, or this process has noticed the time limit `LATE_S` too late.

    Raises:
        DialRefused: no address led to it; the message has each address's reason, the peer's own words included.
    """
    known = sorted(addresses, key=lambda address: isinstance(address, tuple))
    for _ in range(MAX_TRIES - 1):
        try:
            return await _dial_once(known, peer, purpose, options)
        except _Late:
            continue
    return await _dial_once(known, peer, purpose, options)


class _Late(DialRefused):
    """No connection came about in time, since this process was too slow."""


async def _dial_once(addresses: list[Address], peer: Identity, purpose: int, options: HandshakeOptions) -> Connection:
    failures: list[str] = []
    unreached: list[OSError] = []
    address: Address = ""
    now_s = asyncio.get_running_loop().time
    begun_s, is_late = now_s(), False
    try:
        async with asyncio.timeout(options.timeout_s):
            for address in addresses:
                since_s = now_s()
                # A fresh nonce for each try: no challenge is used twice.
                dialler = Dialler(
                    options.me, peer, purpose=purpose, epoch=options.epoch, token=options.token,
                    nonce=os.urandom(NONCE_NBYTES),
                )  # fmt: skip
                try:
                    return await _greet(await connect(address), dialler, options.tls)
                except (TransportError, ProtocolError) as error:
                    failures.append(f"{describe(address)}: {error}")
                    is_late |= isinstance(error, ConnectionEnded) and now_s() - since_s >= UNAUTHENTICATED_S
                except OSError as error:
                    failures.append(f"{describe(address)}: {why_failed(error)}")
                    unreached.append(error)
    except TimeoutError:
        failures.append(f"{describe(address)}: no answer within {options.timeout_s:g} s")
        is_late = now_s() - begun_s >= options.timeout_s + LATE_S
    # Only if every address failed to connect: a peer that refused the handshake, or is slow, lives.
    gone = len(unreached) == len(failures) and has_no_listener(unreached)
    refused = _Late if is_late else DialRefused
    raise refused(f"cannot reach rank {peer.rank}: {'; '.join(failures) or 'no address'}", has_no_listener=gone)


async def _greet(sock: socket.socket, dialler: Dialler, tls: Tls | None) -> Connection:
    inside = await _inside(sock, None if tls is None else tls.client, is_server=False)
    with closed_on_failure(inside):
        await _say(inside, dialler.hello)
        return await _converse(inside, dialler)


async def _inside(sock: socket.socket, context: SSLContext | None, *, is_server: bool) -> StreamSocket:
    """Wrap a TCP connection in TLS if there is a context; a Unix socket cannot be overheard."""
    if context is None or sock.family == socket.AF_UNIX:
        return sock
    from kfcomm.transports.tls import secured

    try:
        return await secured(sock, context, is_server=is_server)
    except OSError as error:
        raise TransportError(f"no TLS with the other side: {why_failed(error)}") from error


async def answer(
    sock: socket.socket, accept: Callable[[Hello], str | None], options: HandshakeOptions
) -> tuple[Connection, Hello]:
    """Shake hands on an accepted connection; returns it with the peer's hello.

    ``accept`` returns why a peer is rejected, or None; it is asked before any proof and must change nothing.

    Raises:
        RemoteProtocolError: the peer did not send a handshake.
        TransportError: the peer was refused (and told the reason), went away, or took too long.
    """
    answerer = Answerer(
        options.me, accept=accept, epoch=options.epoch, token=options.token, nonce=os.urandom(NONCE_NBYTES)
    )
    context = None if options.tls is None else options.tls.server
    with closed_on_failure(sock):
        sock.setblocking(False)
        tune(sock)
    try:
        async with asyncio.timeout(options.timeout_s):
            inside = await _inside(sock, context, is_server=True)
            with closed_on_failure(inside):
                connection = await _converse(inside, answerer)
                if answerer.hello is None:
                    raise InternalError("a handshake ended without its HELLO")
    except TimeoutError:
        raise TransportError(f"a handshake did not finish within {options.timeout_s:g} s") from None
    return connection, answerer.hello


async def serve(
    listener: Listener, greet: Callable[[socket.socket], Awaitable[tuple[Connection, Hello]]], *,
    welcome: Callable[[Connection, Hello], None], refused: Callable[[KfcommError], object],
    unauthenticated: Unauthenticated[asyncio.Task[None]] | None = None,
) -> None:  # fmt: skip
    """Accept connections and shake hands with each, until cancelled (before the listener is closed).

    Args:
        listener: accepts the connections.
        greet: `answer` with accept and options bound.
        welcome: gets each connection after a good handshake, and owns it from then on.
        refused: gets the reason of each other one.
        unauthenticated: bounds the handshakes under way at once.
    """
    unauthenticated = Unauthenticated() if unauthenticated is None else unauthenticated
    async with asyncio.TaskGroup() as group:

        async def shake(sock: socket.socket) -> None:
            try:
                connection, hello = await greet(sock)
            except KfcommError as error:
                refused(error)
            else:
                welcome(connection, hello)

        def begin(sock: socket.socket) -> bool:
            task = group.create_task(shake(sock))
            cut = unauthenticated.add(task, host_of(sock))
            task.add_done_callback(lambda done: forget(done, sock))
            if cut is not None:
                cut.cancel()
                refused(TransportError("there were too many handshakes at once: the oldest was dropped"))
            return unauthenticated.is_flood

        def forget(task: asyncio.Task[None], sock: socket.socket) -> None:
            unauthenticated.remove(task)
            if task.cancelled():  # perhaps before its first step, when nothing else has closed the socket
                sock.close()

        def failed(error: OSError) -> None:
            refused(TransportError(f"cannot accept a connection: {why_failed(error)}"))

        for listening in listener.sockets:
            group.create_task(accept_all(listening, begin, turn_away=_turn_away, failed=failed))


def _turn_away(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.send(encode(Refused("no descriptor is left there (ulimit -n)")))


async def _converse(sock: StreamSocket, machine: Dialler | Answerer) -> Connection:
    while True:
        step: HandshakeStep = machine.receive(await _hear(sock))
        if step.reply is not None:
            await _say(sock, step.reply)
        match step.outcome:
            case Outcome.GOES_ON:
                continue
            case Outcome.DONE:
                if machine.keys is None:
                    raise InternalError("a handshake ended without keys")
                return Connection(sock, machine.keys)
            case Outcome.REFUSED:
                raise TransportError(step.reason)
            case Outcome.BROKEN:
                raise RemoteProtocolError(step.reason)
            case _:
                assert_never(step.outcome)


async def _say(sock: StreamSocket, message: Message) -> None:
    with told_as_lost("during the handshake"):
        await send_all(sock, encode(message))


async def _hear(sock: StreamSocket) -> Message:
    """Read the next message, and not one byte more.

    Raises:
        RemoteProtocolError: not a message of a handshake.
        TransportError: the other side is gone.
    """
    with told_as_lost("during the handshake"):
        kind, nbytes = decode_prefix(await receive_exactly(sock, PREFIX_NBYTES))
        return decode(kind, await receive_exactly(sock, nbytes))
