"""Among real processes: exact bytes over every transport, and jobs that their user can watch."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import pytest

from kfcomm.monitor import Statistics, live
from tests.processes import roles
from tests.processes.stage import World, launched

SIZE = 3
LINKS = {"auto": "shm", "shm": "shm", "unix": "unix", "tcp": "tcp"}


@pytest.fixture(params=LINKS)
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def world(transport: str) -> Iterator[World]:
    with launched("-n", str(SIZE), "--transport", transport, size=SIZE) as made:
        made.do(roles.join)
        yield made


def watched(world: World) -> live.Job | None:
    """The job of these ranks."""
    mine = {actor.pid for actor in world}
    return next((job for job in live.jobs() if mine & set(job.pids)), None)


def read(world: World) -> list[Statistics]:
    """Return the statistics of all ranks."""
    job = watched(world)
    assert job is not None
    return live.read(job)


def sent_and_received(said: list[Statistics]) -> tuple[dict[Any, Any], dict[Any, Any]]:
    sent = {(a.rank, b.rank, b.link): (b.sent_nbytes, b.sent_messages) for a in said for b in a.peers}
    received = {(b.rank, a.rank, b.link): (b.received_nbytes, b.received_messages) for a in said for b in a.peers}
    return sent, received


def test_sent_bytes_equal_received_bytes(world: World, transport: str) -> None:
    for strategy in ("ring", "clique"):
        world.do(roles.strategy, name=strategy)
        for elements in (8, 5000, 1 << 20):  # in the ring, in a piece; from the staging buffer, and past it
            world.do(roles.all_reduce, name=f"x/{elements}", elements=elements)
    while True:  # what was given back or acknowledged last may still be under way
        sent, received = sent_and_received(read(world))
        if sent == received:
            break
    assert {link for _, _, link in sent} == {LINKS[transport]}
    assert len(sent) == SIZE * (SIZE - 1)
    # two strategies, and in each at least what a rank owes the others of a sum: 2(n-1)/n of it
    most = 2 * 2 * 4 * (1 << 20) * (SIZE - 1) // SIZE
    for rank in range(SIZE):
        nbytes = sum(counts[0] for way, counts in sent.items() if way[0] == rank)
        assert most <= nbytes < 1.1 * most
    world.finish()
    assert watched(world) is None


def test_a_job_is_watched_while_its_loop_is_blocked_and_after_a_rank_is_gone() -> None:
    with launched("-n", str(SIZE), "--keep-going", size=SIZE) as world:
        world.do(roles.join)
        world.do(roles.all_reduce, name="x")
        world[1].do(roles.block, label="blocked")
        blocked = world.stage.meet("blocked")
        said = read(world)
        assert [one.rank for one in said] == [0, 1, 2]
        assert all("x" in [key.name for key in one.keys] for one in said)
        blocked.send("on")
        world[2].signal(signal.SIGKILL)
        world[2].wait()
        job = watched(world)
        assert job is not None
        assert job.ranks == (0, 1)
        assert [one.rank for one in live.read(job)] == [0, 1]


def test_a_forked_child_does_not_answer_for_its_parent() -> None:
    with launched("-n", "2", "--keep-going", size=2) as world:
        world.do(roles.join)
        world[1].do(roles.fork, label="child", way="os.fork", lives_on=True)
        child = world.stage.meet("child")
        job = watched(world)
        assert job is not None
        assert job.ranks == (0, 1)
        world[1].signal(signal.SIGKILL)
        world[1].wait()
        job = watched(world)
        assert child.lives
        assert job is not None
        assert job.ranks == (0,)
