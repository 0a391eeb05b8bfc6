"""How clocks are compared: the arithmetic, the exchange over sockets, and the planes that offer it."""

from __future__ import annotations

import asyncio
import itertools
import socket
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kfcomm.core.handshake import Purpose
from kfcomm.engine.control import MAX_ROUNDS, ClockSample, answer_clock, measure_clock, sample_of
from kfcomm.engine.control.memory import MemoryHub
from kfcomm.errors import RemoteProtocolError, TransportError
from tests.engine.control.fakes import Engine, Notes, planes
from tests.support import half_close

SECOND = 1_000_000_000
times = st.integers(0, 10 * SECOND)


@given(asked=times, out=times, thinking=times, back=times, offset=st.integers(-(10**15), 10**15))
def test_the_offset_is_right_to_within_half_of_the_way(asked, out, thinking, back, offset):
    heard = asked + out + offset
    answered = heard + thinking
    got = asked + out + thinking + back
    sample = sample_of(asked, heard, answered, got)
    assert sample.round_trip_ns == out + back
    assert abs(sample.offset_ns - offset) <= sample.uncertainty_ns
    assert asked <= sample.at_ns <= got


def test_an_answer_that_took_longer_than_there_was_is_refused():
    with pytest.raises(RemoteProtocolError, match="cannot be"):
        sample_of(0, 100, 300, 100)
    with pytest.raises(RemoteProtocolError, match="cannot be"):
        sample_of(0, 100, 50, 100)


class Clock:
    """A clock whose readings the test has written down; after these it stands still."""

    def __init__(self, *readings: int) -> None:
        self._readings = itertools.chain(readings, itertools.repeat(readings[-1]))

    def __call__(self) -> int:
        return next(self._readings)


@pytest.mark.asyncio(loop_factories=["asyncio"])
async def test_the_round_with_the_shortest_way_counts():
    ours, theirs = pair()
    answering = asyncio.create_task(answer_clock(theirs, clock=Clock(1000, 1000, 1010, 1010, 1100, 1100)))
    sample = await measure_clock(ours, clock=Clock(0, 40, 50, 52, 60, 100), rounds=3)
    assert sample == ClockSample(at_ns=51, offset_ns=959, round_trip_ns=2)
    ours.close()
    await answering
    assert theirs.fileno() == -1


def pair() -> tuple[socket.socket, socket.socket]:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.setblocking(False)
    return ours, theirs


@pytest.mark.asyncio(loop_factories=["asyncio"])
async def test_a_peer_that_hangs_up_is_an_error():
    ours, theirs = pair()
    theirs.sendall(b"half")
    half_close(theirs)
    with pytest.raises(TransportError, match="closed the connection while clocks"):
        await measure_clock(ours)
    ours.close()
    theirs.close()


@pytest.mark.asyncio(loop_factories=["asyncio"])
@pytest.mark.parametrize(("sent", "answers"), [(b"x", 0), (b"?x", 1), (b"?" * (MAX_ROUNDS + 9), MAX_ROUNDS)])
async def test_unknown_or_endless_requests_close_the_connection(sent, answers):
    ours, theirs = pair()
    ours.sendall(sent)
    await answer_clock(theirs)
    ours.setblocking(True)
    received = b""
    try:
        while got := ours.recv(1 << 16):
            received += got
    except ConnectionResetError:
        pass  # it had sent more than was read
    assert len(received) == answers * struct.calcsize("<qq")
    ours.close()


@pytest.mark.asyncio
@pytest.mark.parametrize("unix", [False, True], ids=["tcp", "unix"])
async def test_control_threads_compare_their_clocks(unix):
    async with planes(3, unix=unix) as world:
        world.threads[0]._clocks.clock = lambda: world.threads[1]._clocks.clock() + 5 * SECOND
        told = []

        def tell(sample):
            told.append(sample)
            world.notes.changed()

        world.threads[1].compare_clocks(0, tell)
        world.threads[2].compare_clocks(1, tell)
        await world.until(lambda: len(told) == 2)
        far, near = sorted(told, key=lambda sample: -sample.offset_ns)
        assert abs(far.offset_ns - 5 * SECOND) <= far.uncertainty_ns < SECOND
        assert abs(near.offset_ns) <= near.uncertainty_ns < SECOND


@pytest.mark.asyncio
async def test_clocks_that_cannot_be_compared_are_none():
    async with planes(3) as world:
        told = []

        def tell(sample):
            told.append(sample)
            world.notes.changed()

        world.threads[0].stop()
        world.threads[1].compare_clocks(0, tell)
        await world.until(lambda: told)
        assert told == [None]


@pytest.mark.asyncio
async def test_stopping_in_the_midst_of_it_leaves_nothing():
    async with planes(2) as world:
        dialled = await world.dial(1, 0, Purpose.CLOCK)
        world.threads[0].stop()
        dialled.sock.setblocking(True)
        assert dialled.sock.recv(1) == b""
        dialled.close()


@pytest.mark.asyncio
async def test_clocks_of_a_world_in_memory_are_those_they_were_given():
    notes, hub = Notes(), MemoryHub(3)
    engines = [Engine(rank, notes) for rank in range(3)]
    for engine in engines[:2]:
        engine.plane = hub.join(engine.rank, asyncio.get_running_loop(), engine, engine)
    engines[0].plane.clock = lambda: 7 * SECOND
    engines[1].plane.clock = lambda: 4 * SECOND
    told = []

    def tell(sample):
        told.append(sample)
        notes.changed()

    engines[1].plane.compare_clocks(0, tell)
    engines[1].plane.compare_clocks(2, tell)  # which has not joined
    await notes.until(lambda: len(told) == 2)
    assert told == [ClockSample(4 * SECOND, 3 * SECOND, 0), None]
