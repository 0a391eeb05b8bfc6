from __future__ import annotations

import asyncio

import pytest

from kfcomm.engine.control import GONE
from kfcomm.engine.control.memory import MemoryHub
from kfcomm.errors import LocalProtocolError
from tests.engine.control.fakes import ABORT, LEAVE_S, Engine, Notes

OPS = [(b"group", f"grad/{index}", 0) for index in range(150)]


class Ranks:
    def __init__(self, size, joined=None):
        self.notes = Notes()
        self.hub = MemoryHub(size)
        self.engines = [Engine(rank, self.notes) for rank in range(size)]
        for rank in range(size if joined is None else joined):
            self.join(rank)

    def join(self, rank):
        engine = self.engines[rank]
        engine.plane = self.hub.join(rank, asyncio.get_running_loop(), engine, engine)

    @property
    def planes(self):
        return [engine.plane for engine in self.engines]


@pytest.mark.asyncio
async def test_an_abort_reaches_everybody_else_once():
    world = Ranks(4)
    world.planes[2].abort(*ABORT)
    assert not world.engines[0].aborts  # never from inside a call
    await turn()
    assert [engine.aborts for engine in world.engines] == [[ABORT], [ABORT], [], [ABORT]]


async def turn():
    """Run all callbacks posted to the loop."""
    done = asyncio.Event()
    asyncio.get_running_loop().call_soon(done.set)
    await done.wait()


@pytest.mark.asyncio
async def test_news_waits_for_who_has_not_joined_yet():
    world = Ranks(3, joined=2)
    world.planes[0].abort(*ABORT)
    world.hub.kill(1)
    world.join(2)
    await turn()
    assert world.engines[2].aborts == [ABORT]
    assert world.engines[2].lost == {1: 1}
    for rank in (2, 3):
        with pytest.raises(LocalProtocolError):
            world.hub.join(rank, asyncio.get_running_loop(), world.engines[2], world.engines[2])


@pytest.mark.asyncio
async def test_a_killed_rank_is_lost_and_mute():
    world = Ranks(3)
    world.planes[0].abort(*ABORT)
    world.hub.kill(1)
    world.hub.kill(1)
    world.planes[1].abort(*ABORT)
    world.planes[1].declare_lost(0, "revenge")
    world.planes[1].query(OPS, 0, world.engines[1].answered)
    world.planes[0].query(OPS, 1, world.engines[0].answered)
    await world.planes[1].leave(LEAVE_S)
    world.planes[1].stop()
    await turn()
    assert [engine.lost for engine in world.engines] == [{1: 1}, {}, {1: 1}]
    assert [len(engine.aborts) for engine in world.engines] == [0, 0, 1]
    assert not any(engine.answers for engine in world.engines)


@pytest.mark.asyncio
async def test_losses_are_declared_once():
    world = Ranks(3)
    world.planes[0].declare_lost(1, "its process ended with code 7")
    world.planes[2].declare_lost(1, "again")
    world.planes[0].declare_lost(0, "never oneself")
    world.planes[0].suspect(2, "alive")
    await turn()
    assert [engine.lost for engine in world.engines] == [{1: 1}, {1: 1}, {1: 1}]
    assert world.engines[0].reasons == ["its process ended with code 7"]


@pytest.mark.asyncio
async def test_questions():
    world = Ranks(3)
    world.engines[1].posted = set(OPS[::2])
    world.planes[0].query(OPS, 1, world.engines[0].answered)
    world.planes[0].query(OPS[:1], -1, world.engines[0].answered)
    await turn()
    assert world.engines[0].answers == [
        (1, [True, False] * 75, "rank 1 is thinking"),
        (1, [True], "rank 1 is thinking"),
        (2, [False], "rank 2 is thinking"),
    ]


@pytest.mark.asyncio
async def test_a_rank_that_has_left_and_does_not_answer_has_posted_nothing():
    world = Ranks(2)
    world.engines[0].posted = set(OPS)
    leaving = asyncio.ensure_future(world.planes[0].leave(LEAVE_S))
    await asyncio.sleep(0)
    world.hub.kill(0)
    await leaving
    world.planes[1].query(OPS[:2], 0, world.engines[1].answered)
    await turn()
    assert world.engines[1].answers[-1] == (0, [False, False], GONE)
    assert not world.engines[1].lost


@pytest.mark.asyncio
async def test_leaving_waits_for_the_questions_of_all():
    world = Ranks(3)
    world.engines[0].posted = {OPS[0]}
    world.engines[1].pending = OPS[:2]
    world.planes[1].query([], 0, world.engines[1].answered)  # before it leaves: does not count
    await world.planes[0].leave(LEAVE_S)
    await world.planes[0].leave(LEAVE_S)
    world.planes[0].stop()
    await turn()
    assert world.engines[1].answers[1:] == [(0, [True, False], "rank 0 is thinking")]
    assert [engine.left for engine in world.engines] == [[], [0], [0]]
    await asyncio.gather(*(plane.leave(LEAVE_S) for plane in world.planes[1:]))
    for plane in world.planes:
        plane.stop()
        plane.stop()
    await turn()
    assert not any(engine.lost for engine in world.engines)


@pytest.mark.asyncio
async def test_leaving_ends_with_time_and_with_losses():
    world = Ranks(2, joined=1)
    await world.planes[0].leave(0.01)
    world = Ranks(2, joined=1)
    leaving = asyncio.ensure_future(world.planes[0].leave(LEAVE_S))
    await turn()
    world.hub.kill(1)
    await leaving


@pytest.mark.asyncio
async def test_a_rank_that_stops_without_leaving_is_lost():
    world = Ranks(2)
    world.planes[1].stop()
    await turn()
    assert world.engines[0].lost == {1: 1}
    assert not world.engines[1].lost


@pytest.mark.asyncio
async def test_ranks_may_have_loops_of_their_own():
    other = asyncio.new_event_loop()
    notes = Notes()
    hub = MemoryHub(2)
    engines = [Engine(rank, notes) for rank in range(2)]
    for engine, loop in zip(engines, (asyncio.get_running_loop(), other), strict=True):
        engine.plane = hub.join(engine.rank, loop, engine, engine)
    engines[0].plane.abort(*ABORT)
    other.call_soon(other.stop)
    await asyncio.to_thread(other.run_forever)
    assert engines[1].aborts == [ABORT]
    other.close()
    engines[0].plane.abort(*ABORT)  # nobody is left to hear it
    engines[0].plane.query(OPS[:1], 1, engines[0].answered)
    await turn()
    assert engines[0].answers == [(1, [False], "rank 1 is thinking")]
