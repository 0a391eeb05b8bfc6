"""The handshake over sockets: `dial` a peer, `answer` one, or `serve` all who come.

Messages are read to their last byte and no further, so that a finished socket can be handed to a link or to
another thread's loop with nothing lost. The rules of the handshake are in ``core.handshake``; here are its bytes,
its time limit and its randomness.

Invariants: a handshake that fails closes its socket, whatever the failure; a stranger holds a few KiB for
a bounded time.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable, Iterable
from typing import assert_never

from kfcomm.core.frame import PREFIX_NBYTES, Header, decode_header, decode_prefix, make_encoder
from kfcomm.core.handshake import (
    MAX_HEADER_NBYTES,
    NONCE_NBYTES,
    Answerer,
    Dialler,
    Hello,
    Identity,
    Outcome,
    Purpose,
    Step,
)
from kfcomm.errors import InternalError, KfcommError, ProtocolError, RemoteProtocolError, TransportError
from kfcomm.transports.sockets import (
    Address,
    DialRefused,
    Listener,
    closed_on_failure,
    connect,
    describe,
    nobody_listens,
    readable,
    receive_exactly,
    told_as_lost,
    tune,
    why,
)

HANDSHAKE_TIMEOUT_S = 10.0
MAX_PENDING = 256
_ACCEPT_PAUSE_S = 0.05


async def dial(
    addresses: Iterable[Address], me: Identity, peer: Identity, *,
    purpose: Purpose, token: bytes, epoch: int, timeout_s: float = HANDSHAKE_TIMEOUT_S,
) -> socket.socket:  # fmt: skip
    """Connect to ``peer`` and prove each other's identity. Unix addresses are tried before TCP ones.

    Raises:
        DialRefused: no address led to it; the message has each address's reason, the peer's own words included.
    """
    failures: list[str] = []
    unreached: list[OSError] = []
    address: Address = ""
    try:
        async with asyncio.timeout(timeout_s):
            for address in sorted(addresses, key=lambda address: isinstance(address, tuple)):
                dialler = Dialler(me, peer, purpose=purpose, epoch=epoch, token=token, nonce=os.urandom(NONCE_NBYTES))
                try:
                    sock = await connect(address)
                    await _greet(sock, dialler)
                    return sock
                except (TransportError, ProtocolError) as error:
                    failures.append(f"{describe(address)}: {error}")
                except OSError as error:
                    failures.append(f"{describe(address)}: {why(error)}")
                    unreached.append(error)
    except TimeoutError:
        failures.append(f"{describe(address)}: no answer within {timeout_s:g} s")
    gone = len(unreached) == len(failures) and nobody_listens(unreached)
    raise DialRefused(f"cannot reach rank {peer.rank}: {'; '.join(failures) or 'no address'}", nobody_listens=gone)


async def _greet(sock: socket.socket, dialler: Dialler) -> None:
    with closed_on_failure(sock):
        await _say(sock, dialler.hello)
        await _converse(sock, dialler)


async def answer(
    sock: socket.socket, me: Identity, *,
    accept: Callable[[Hello], str | None], token: bytes, epoch: int, credit: tuple[int, int],
    timeout_s: float = HANDSHAKE_TIMEOUT_S,
) -> Hello:  # fmt: skip
    """Shake hands on an accepted connection, and say who dialled.

    ``accept`` says why a peer is not wanted, or None; it is asked before any proof and must change nothing.

    Raises:
        RemoteProtocolError: what came is no handshake.
        TransportError: the peer was refused (it was told why), went away, or took too long.
    """
    nonce = os.urandom(NONCE_NBYTES)
    answerer = Answerer(me, accept=accept, epoch=epoch, token=token, nonce=nonce, credit=credit)
    with closed_on_failure(sock):
        sock.setblocking(False)
        tune(sock)
        try:
            async with asyncio.timeout(timeout_s):
                await _converse(sock, answerer)
        except TimeoutError:
            raise TransportError(f"a handshake did not finish within {timeout_s:g} s") from None
        if answerer.hello is None:
            raise InternalError("a handshake ended without its HELLO")
    return answerer.hello


async def serve(
    listener: Listener, greet: Callable[[socket.socket], Awaitable[Hello]], *,
    welcome: Callable[[socket.socket, Hello], None], refused: Callable[[KfcommError], object],
    max_pending: int = MAX_PENDING,
) -> None:  # fmt: skip
    """Accept connections and shake hands with each, until cancelled (before the listener is closed).

    Args:
        listener: where peers come in.
        greet: `answer` with everything but the socket.
        welcome: gets each connection after a good handshake, and owns it from then on.
        refused: told why each other one came to nothing.
        max_pending: handshakes under way at once; one more, and the oldest is dropped.
    """
    pending: dict[asyncio.Task[None], None] = {}
    async with asyncio.TaskGroup() as group:

        async def shake(sock: socket.socket) -> None:
            try:
                hello = await greet(sock)
            except KfcommError as error:
                refused(error)
            else:
                welcome(sock, hello)

        def begin(sock: socket.socket) -> None:
            if len(pending) >= max_pending:
                oldest = next(iter(pending))
                del pending[oldest]
                oldest.cancel()
                refused(TransportError(f"more than {max_pending} handshakes at once: the oldest was dropped"))
            task = group.create_task(shake(sock))
            pending[task] = None
            task.add_done_callback(lambda done: forget(done, sock))

        def forget(task: asyncio.Task[None], sock: socket.socket) -> None:
            pending.pop(task, None)
            if task.cancelled():  # perhaps before its first step: then nobody else has closed the socket
                sock.close()

        for listening in listener.sockets:
            group.create_task(_accept_all(listening, begin, refused))


async def _accept_all(
    listening: socket.socket, begin: Callable[[socket.socket], None], refused: Callable[[KfcommError], object]
) -> None:
    while True:
        try:
            sock = await _accept(listening)
        except ConnectionError:
            continue  # it was gone before it was accepted
        except OSError as error:
            # Out of descriptors or memory: the connection stays in the backlog, and asking again at once would spin.
            refused(TransportError(f"cannot accept a connection: {why(error)}"))
            await asyncio.sleep(_ACCEPT_PAUSE_S)
            continue
        begin(sock)
        await asyncio.sleep(0)  # accepting need not yield: without this a flood would starve the handshakes


async def _accept(listening: socket.socket) -> socket.socket:
    """The next connection. Unlike the loops' sock_accept, it loses none when it is cancelled as one arrives."""
    while True:
        try:
            return listening.accept()[0]
        except (BlockingIOError, InterruptedError):
            await readable(listening)


async def _converse(sock: socket.socket, machine: Dialler | Answerer) -> None:
    while True:
        step: Step = machine.receive(await _hear(sock))
        if step.reply is not None:
            await _say(sock, step.reply)
        match step.outcome:
            case Outcome.GOES_ON:
                continue
            case Outcome.DONE:
                return
            case Outcome.REFUSED:
                raise TransportError(step.reason)
            case Outcome.BROKEN:
                raise RemoteProtocolError(step.reason)
            case _:
                assert_never(step.outcome)


async def _say(sock: socket.socket, header: Header) -> None:
    with told_as_lost("during the handshake"):
        await asyncio.get_running_loop().sock_sendall(sock, make_encoder()(header))


async def _hear(sock: socket.socket) -> Header:
    """The next message, and not one byte more.

    Raises:
        RemoteProtocolError: no message of a handshake.
        TransportError: the other side is gone.
    """
    with told_as_lost("during the handshake"):
        header_nbytes, payload_nbytes = decode_prefix(await receive_exactly(sock, PREFIX_NBYTES))
        if header_nbytes > MAX_HEADER_NBYTES or payload_nbytes:
            raise RemoteProtocolError(f"a frame of {header_nbytes} + {payload_nbytes} bytes is no part of a handshake")
        return decode_header(await receive_exactly(sock, header_nbytes))
