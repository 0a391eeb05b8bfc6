"""How far apart two processes' clocks are, as NTP measures it: questions and answers with four times.

The one who asks notes when it asked and when the answer was there; the one who answers says when it heard the question
and when it answered. Of several rounds that with the shortest way counts: the less of it there is, the less of it can
be uneven, and half of it bounds the error whatever it was made of (RFC 5905, section 8).

A question is one byte, an answer two signed 64-bit numbers of nanoseconds, little-endian. They travel on a connection
of their own, after the handshake of every connection.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import time
from collections.abc import Callable
from typing import NamedTuple

from kfcomm.errors import RemoteProtocolError, TransportError

ROUNDS = 16
MAX_ROUNDS = 256
"""An asker that goes on for longer is hung up on."""
QUESTION = b"?"
_ANSWER = struct.Struct("<qq")

ClockReader = Callable[[], int]
"""Returns nanoseconds of a clock that never goes back."""


class ClockSample(NamedTuple):
    """How a peer's clock relates to this process's at one moment.

    Attributes:
        at_ns: the moment, by this process's clock.
        offset_ns: the peer's clock less this one's.
        round_trip_ns: how long question and answer were under way.
    """

    at_ns: int
    offset_ns: int
    round_trip_ns: int

    @property
    def uncertainty_ns(self) -> int:
        """By how much the offset can be wrong, at most: half of the way."""
        return (self.round_trip_ns + 1) // 2


def sample_of(asked_ns: int, heard_ns: int, answered_ns: int, got_ns: int) -> ClockSample:
    """One round: asked and got by this clock, heard and answered by the peer's.

    Raises:
        RemoteProtocolError: the peer took more time for its answer than there was.
    """
    round_trip_ns = (got_ns - asked_ns) - (answered_ns - heard_ns)
    if round_trip_ns < 0 or answered_ns < heard_ns:
        raise RemoteProtocolError("a clock answered with times that cannot be")
    offset_ns = ((heard_ns - asked_ns) + (answered_ns - got_ns)) // 2
    return ClockSample((asked_ns + got_ns) // 2, offset_ns, round_trip_ns)


async def measure_clock(
    sock: socket.socket, *, clock: ClockReader = time.monotonic_ns, rounds: int = ROUNDS
) -> ClockSample:
    """The best of several rounds on a non-blocking connection to `answer_clock`. Costs ``rounds`` ways there and back.

    Raises:
        TransportError: the connection broke.
        RemoteProtocolError: the answers make no sense.
    """
    loop = asyncio.get_running_loop()
    best: ClockSample | None = None
    for _ in range(rounds):
        asked_ns = clock()
        try:
            await loop.sock_sendall(sock, QUESTION)
            heard_ns, answered_ns = _ANSWER.unpack(await _exactly(sock, _ANSWER.size))
        except OSError as error:
            raise TransportError(f"lost while clocks were compared: {error}") from error
        sample = sample_of(asked_ns, heard_ns, answered_ns, clock())
        if best is None or sample.round_trip_ns < best.round_trip_ns:
            best = sample
    if best is None:
        raise TransportError("clocks were compared in no round")
    return best


async def answer_clock(sock: socket.socket, *, clock: ClockReader = time.monotonic_ns) -> None:
    """Answer until the asker hangs up, which closes the connection here, too. Never raises for what the asker does."""
    loop = asyncio.get_running_loop()
    try:
        for _ in range(MAX_ROUNDS):
            question = await loop.sock_recv(sock, 1)
            heard_ns = clock()
            if question != QUESTION:
                return
            await loop.sock_sendall(sock, _ANSWER.pack(heard_ns, clock()))
    except OSError:
        return
    finally:
        sock.close()


async def _exactly(sock: socket.socket, nbytes: int) -> bytes:
    data = b""
    while len(data) < nbytes:
        got = await asyncio.get_running_loop().sock_recv(sock, nbytes - len(data))
        if not got:
            raise ConnectionResetError("the peer hung up")
        data += got
    return data
