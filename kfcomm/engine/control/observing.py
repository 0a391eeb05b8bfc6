"""Questions of observers, asked of ranks on other hosts: each travels on a connection of its own between two ranks.

An observer asks the ranks of its own host at their sockets; one of these passes its questions on to ranks elsewhere
(``monitor.relaying``). Such a connection is authenticated as every other one is, and no control link or data link
carries an answer, which may have megabytes. Both ends keep it for further questions. A message is sealed as a frame is
(see ``core.auth``), and has no more to it than bytes::

    +--------+-------+-----+---------+
    | nbytes | check | tag | message |
    | 4      | 4     | 16  |         |
    +--------+-------+-----+---------+

Imported by the first question. Invariants: the control thread only moves bytes, since a thread of its own makes each
answer; a message has a bound on its length, and a question one on its time.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import struct
from collections.abc import Callable, Coroutine
from typing import Any

from kfcomm.common.sockets import MAX_ANSWER_NBYTES
from kfcomm.core.auth import CHECK_NBYTES, TAG_NBYTES, Seal, is_same
from kfcomm.core.handshake import Purpose
from kfcomm.engine.control import StatusSource, ToldAnswer, World
from kfcomm.errors import KfcommError, RemoteProtocolError
from kfcomm.transports.sockets import Connection, receive_exactly, send_all

ANSWER_WITHIN_S = 4.0
"""For a question, with a new connection if it needs one."""
KEPT_S, SILENT_S = 30.0, 60.0
"""How long a connection is used for further questions; and after which silence the answering rank closes it."""
MAX_QUESTION_NBYTES = 16
_PREFIX = struct.Struct("<I")
_LOG = logging.getLogger("kfcomm.control")


class Channel:
    """Sealed messages over a connection, which belongs to it."""

    def __init__(self, connection: Connection) -> None:
        self._sock = connection.sock
        self._outgoing, self._incoming = Seal(connection.keys.outgoing), Seal(connection.keys.incoming)
        self._num_sent = self._num_received = 0
        self.kept_until_s = 0.0

    async def send(self, message: bytes) -> None:
        """Send a message. Raises `OSError`: the connection is broken."""
        number, prefix = self._num_sent, _PREFIX.pack(len(message))
        self._num_sent += 1
        seal = self._outgoing.check(number, prefix) + self._outgoing.tag(number, prefix, message)
        await send_all(self._sock, prefix + seal + message)

    async def receive(self, max_nbytes: int) -> bytes:
        """Return the next message.

        Raises:
            EOFError, OSError: the connection has ended.
            RemoteProtocolError: the message was changed, or is longer than allowed.
        """
        number = self._num_received
        self._num_received += 1
        head = bytes(await receive_exactly(self._sock, _PREFIX.size + CHECK_NBYTES + TAG_NBYTES))
        prefix, check, tag = head[: _PREFIX.size], head[_PREFIX.size : -TAG_NBYTES], head[-TAG_NBYTES:]
        (nbytes,) = _PREFIX.unpack(prefix)
        if not is_same(check, self._incoming.check(number, prefix)) or nbytes > max_nbytes:
            raise RemoteProtocolError(f"a message of an observer was changed on its way, or has over {max_nbytes} B")
        message = bytes(await receive_exactly(self._sock, nbytes))
        if not is_same(tag, self._incoming.tag(number, prefix, message)):
            raise RemoteProtocolError("a message of an observer was changed on its way")
        return message

    async def ask(self, question: bytes) -> bytes:
        """Send a question, and return its answer; raises as `receive` does."""
        await self.send(question)
        return await self.receive(MAX_ANSWER_NBYTES)

    def fileno(self) -> int:
        """Return the descriptor."""
        return self._sock.fileno()

    def close(self) -> None:
        """Close the connection."""
        self._sock.close()


class Observing:
    """Questions to peers, and answers to theirs; on the loop of the control thread."""

    def __init__(self, world: World, status: StatusSource) -> None:
        self._world = world
        self._status = status
        self._loop = asyncio.get_running_loop()
        self._idle: dict[int, list[Channel]] = {}
        self._busy: dict[Channel, None] = {}
        self._under_way: set[asyncio.Task[None]] = set()

    def ask(self, rank: int, question: bytes, told: ToldAnswer) -> None:
        """Ask a rank; ``told`` gets its answer, or nothing if none comes in time."""
        self._begin(self._ask(rank, question, told))

    def answer(self, connection: Connection) -> None:
        """Answer the questions of a peer."""
        channel = Channel(connection)
        self._busy[channel] = None
        # also if it was cancelled before its first step
        self._begin(self._answer(channel)).add_done_callback(lambda _: self._close(channel))

    def descriptors(self) -> list[int]:
        """Return the descriptors of all connections."""
        return [one.fileno() for one in (*self._busy, *(one for kept in self._idle.values() for one in kept))]

    def abort(self) -> None:
        """End all questions, and close the connections, now or in the next turn of the loop."""
        for task in self._under_way:
            task.cancel()
        for kept in self._idle.values():
            while kept:
                kept.pop().close()

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(work, name="kfcomm observing")
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)
        return task

    async def _ask(self, rank: int, question: bytes, told: Callable[[bytes], None]) -> None:
        answer = b""
        try:
            async with asyncio.timeout(ANSWER_WITHIN_S):
                answer = await self._answer_of(rank, question)
        except (KfcommError, OSError, EOFError) as error:  # TimeoutError is an OSError
            _LOG.debug("rank %d has no answer of rank %d for an observer: %r", self._world.rank, rank, error)
        told(answer)

    async def _answer_of(self, rank: int, question: bytes) -> bytes:
        kept = self._idle.setdefault(rank, [])
        if kept:
            # The peer may have closed it meanwhile.
            with contextlib.suppress(OSError, EOFError):
                return await self._exchange(rank, kept.pop(), question)
        channel = Channel(await self._world.reach(rank, Purpose.OBSERVER))
        channel.kept_until_s = self._loop.time() + KEPT_S
        self._loop.call_at(channel.kept_until_s, self._drop, rank, channel)
        return await self._exchange(rank, channel, question)

    async def _exchange(self, rank: int, channel: Channel, question: bytes) -> bytes:
        self._busy[channel] = None
        try:
            answer = await channel.ask(question)
        except BaseException:
            self._close(channel)
            raise
        del self._busy[channel]
        if self._loop.time() < channel.kept_until_s:
            self._idle[rank].append(channel)
        else:
            channel.close()
        return answer

    async def _answer(self, channel: Channel) -> None:
        with contextlib.suppress(OSError, EOFError, RemoteProtocolError):
            while True:
                async with asyncio.timeout(SILENT_S):
                    question = await channel.receive(MAX_QUESTION_NBYTES)
                answer = await self._loop.run_in_executor(None, self._status.answer_observer, question)
                async with asyncio.timeout(ANSWER_WITHIN_S):
                    await channel.send(answer)

    def _drop(self, rank: int, channel: Channel) -> None:
        if channel in self._idle[rank]:  # else its question is under way, which closes it then
            self._idle[rank].remove(channel)
            channel.close()

    def _close(self, channel: Channel) -> None:
        self._busy.pop(channel, None)
        channel.close()
