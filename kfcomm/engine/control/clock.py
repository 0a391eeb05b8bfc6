"""How far apart two processes' clocks are, as NTP measures it: questions and answers with four times.

The one who asks notes when it asked and when the answer was there; the one who answers says when it heard the question
and when it answered. Of several rounds that with the shortest way counts: the less of it there is, the less of it can
be uneven, and half of it bounds the error whatever it was made of (RFC 5905, section 8).

A question is one byte, an answer two signed 64-bit numbers of nanoseconds, little-endian. They travel on a connection
of their own, after the handshake of every connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
import time
from collections.abc import Callable
from typing import NamedTuple

from kfcomm.errors import RemoteProtocolError
from kfcomm.transports.sockets import Stream, receive_exactly, send_all, told_as_lost

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


async def measure_clock(sock: Stream, *, clock: ClockReader = time.monotonic_ns, rounds: int = ROUNDS) -> ClockSample:
    """The best of several rounds on a non-blocking connection to `answer_clock`. Costs ``rounds`` ways there and back.

    Raises:
        TransportError: the connection broke.
        RemoteProtocolError: the answers make no sense.
    """
    samples = [await _ask(sock, clock) for _ in range(rounds)]
    return min(samples, key=lambda sample: sample.round_trip_ns)


async def _ask(sock: Stream, clock: ClockReader) -> ClockSample:
    with told_as_lost("while clocks were compared"):
        asked_ns = clock()
        await send_all(sock, QUESTION)
        answer = await receive_exactly(sock, _ANSWER.size)
        got_ns = clock()
    heard_ns, answered_ns = _ANSWER.unpack(answer)
    return sample_of(asked_ns, heard_ns, answered_ns, got_ns)


async def answer_clock(sock: Stream, *, clock: ClockReader = time.monotonic_ns, timeout_s: float | None = None) -> None:
    """Answer until the asker hangs up or the time is over, then close. Never raises for what the asker does."""
    with contextlib.closing(sock), contextlib.suppress(OSError, EOFError):  # TimeoutError is an OSError
        async with asyncio.timeout(timeout_s):
            for _ in range(MAX_ROUNDS):
                question = await receive_exactly(sock, 1)
                heard_ns = clock()
                if question != QUESTION:
                    return
                await send_all(sock, _ANSWER.pack(heard_ns, clock()))
