"""Questions of observers travel between ranks: beside all else, sealed, bounded, and with nothing left behind."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest

from kfcomm.core.handshake import Keys, Purpose
from kfcomm.engine.control import observing
from kfcomm.engine.control.memory import MemoryHub
from kfcomm.engine.control.observing import Channel
from kfcomm.errors import RemoteProtocolError
from kfcomm.transports.sockets import Connection
from tests.engine.control.fakes import Engine, Notes, planes


class Told:
    """Answers by the number of their question."""

    def __init__(self, notes: Notes) -> None:
        self.answers: dict[int, bytes | None] = {}
        self._notes, self._loop = notes, asyncio.get_running_loop()

    def by(self, number: int):
        return lambda answer: self._loop.call_soon_threadsafe(self._take, number, answer)

    def _take(self, number: int, answer: bytes | None) -> None:
        self.answers[number] = answer
        self._notes.changed()


@pytest.mark.asyncio
@pytest.mark.parametrize("unix", [False, True], ids=["tcp", "unix"])
async def test_rank_answers_questions_of_an_observer_elsewhere(unix: bool) -> None:
    async with planes(3, unix=unix) as world:
        told = Told(world.notes)
        world.engines[2].say = lambda question: question * (1 << 22)  # 4 MiB
        for number in range(4):  # at once, so on several connections
            world.threads[0].observe(1 + number % 2, b"x", told.by(number))
        await world.until(lambda: len(told.answers) == 4)
        assert told.answers[0] == told.answers[2] == b"1 says x"
        assert told.answers[1] == told.answers[3] == b"2 says " + b"x" * (1 << 22)


@pytest.mark.asyncio
async def test_connections_are_used_again_and_replaced_once_closed() -> None:
    async with planes(2) as world:
        told = Told(world.notes)
        world.threads[0].observe(1, b"a", told.by(0))
        await world.until(lambda: told.answers)
        (first,) = world.threads[0]._observing.descriptors()
        world.threads[0].observe(1, b"b", told.by(1))
        await world.until(lambda: len(told.answers) == 2)
        assert world.threads[0]._observing.descriptors() == [first]
        assert first in world.threads[0].descriptors()
        (theirs,) = world.threads[1]._observing._busy
        theirs._sock.shutdown(socket.SHUT_RDWR)
        world.threads[0].observe(1, b"c", told.by(2))
        await world.until(lambda: len(told.answers) == 3)
        assert told.answers[2] == b"1 says c"


@pytest.mark.asyncio
async def test_idle_connections_are_closed_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observing, "KEPT_S", 0.0)
    async with planes(2) as world:
        told = Told(world.notes)
        for number in range(3):
            world.threads[0].observe(1, b"a", told.by(number))
        await world.until(lambda: len(told.answers) == 3)
        assert set(told.answers.values()) == {b"1 says a"}
        assert world.threads[0]._observing.descriptors() == []


@pytest.mark.asyncio
async def test_rank_that_is_lost_or_has_left_is_gone() -> None:
    async with planes(3) as world:
        told = Told(world.notes)
        world.threads[1].stop()
        await world.until(lambda: world.engines[0].lost[1])
        world.threads[0].observe(1, b"x", told.by(0))
        world.threads[0].observe(2, b"x", told.by(1))
        await world.until(lambda: len(told.answers) == 2)
        assert told.answers == {0: None, 1: b"2 says x"}


@pytest.mark.asyncio
async def test_rank_that_does_not_answer_in_time_has_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observing, "ANSWER_WITHIN_S", 0.2)
    async with planes(2) as world:
        told, let_go = Told(world.notes), threading.Event()
        world.engines[1].say = lambda question: bytes(let_go.wait())
        world.threads[0].observe(1, b"x", told.by(0))
        await world.until(lambda: 0 in told.answers)
        let_go.set()
        assert told.answers[0] == b""


@pytest.mark.asyncio
async def test_thread_that_stops_ends_questions_under_way() -> None:
    async with planes(2) as world:
        told, asked, let_go = Told(world.notes), threading.Event(), threading.Event()

        def hang(question: bytes) -> bytes:
            asked.set()
            let_go.wait()
            return question

        world.engines[1].say = hang
        world.threads[0].observe(1, b"x", told.by(0))
        await asyncio.to_thread(asked.wait)
        world.threads[0].stop()
        let_go.set()
        world.threads[1].stop()
        world.threads[1].observe(0, b"x", told.by(1))  # no more
        assert 1 not in told.answers


@pytest.mark.asyncio
async def test_unsealed_question_ends_the_connection() -> None:
    async with planes(2) as world:
        connection = await world.dial(1, 0, Purpose.OBSERVER)
        connection.sock.setblocking(True)
        connection.sock.sendall(bytes(24))
        assert connection.sock.recv(1) == b""
        connection.close()


@pytest.mark.asyncio
async def test_world_in_memory_answers_too() -> None:
    notes, hub = Notes(), MemoryHub(3)
    engines = [Engine(rank, notes) for rank in range(3)]
    for engine in engines[:2]:
        engine.plane = hub.join(engine.rank, asyncio.get_running_loop(), engine, engine)
    told: list[bytes | None] = []
    for rank in (1, 2):
        engines[0].plane.observe(rank, b"x", told.append)
    hub.kill(1)
    engines[0].plane.observe(1, b"x", told.append)
    assert told == [b"1 says x", b"", None]


@contextlib.contextmanager
def channels() -> Iterator[tuple[Channel, Channel]]:
    """Two ends of a connection."""
    one, other = socket.socketpair()
    for sock in (one, other):
        sock.setblocking(False)
    keys = Keys(b"o" * 32, b"i" * 32), Keys(b"i" * 32, b"o" * 32)
    ends = Channel(Connection(one, keys[0])), Channel(Connection(other, keys[1]))
    try:
        yield ends
    finally:
        for end in ends:
            end.close()


@pytest.mark.asyncio
@pytest.mark.parametrize("at", [0, 3, 4, 8, 24, 27])
async def test_message_changed_on_its_way_is_refused(at: int) -> None:
    with channels() as (sender, receiver):
        await sender.send(b"says")
        data = bytearray(receiver._sock.recv(100))
        data[at] ^= 1
        with channels() as (relay, end):
            relay._sock.send(data)
            with pytest.raises(RemoteProtocolError):
                await end.receive(1 << 30)


@pytest.mark.asyncio
async def test_message_that_is_repeated_or_too_long_is_refused() -> None:
    with channels() as (sender, receiver):
        await sender.send(b"says")
        assert await receiver.receive(4) == b"says"
        await sender.send(b"longer")
        with pytest.raises(RemoteProtocolError, match="over 4 B"):
            await receiver.receive(4)
    with channels() as (sender, receiver):
        await sender.send(b"says")
        data = receiver._sock.recv(100)
        sender._sock.send(data + data)
        assert await receiver.receive(4) == b"says"
        with pytest.raises(RemoteProtocolError):
            await receiver.receive(4)
