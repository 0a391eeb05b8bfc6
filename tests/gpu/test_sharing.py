"""Four processes that share one GPU, in device slots and through the host: results, streams, and ranks that fail."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kfcomm.errors import CollectiveError, CollectiveMismatch, KfcommError, PeerLost
from tests.gpu import roles
from tests.processes import roles as plain
from tests.processes.stage import World, do, start, unjoined

pytestmark = pytest.mark.gpu

IN_PROCESSES = True
SIZE, VICTIM = 4, 2
HOST = {"transport": "shm"}
"""Through memory of the host, where slots on the device would be chosen."""
SMALL, BIG = 8, 16 << 20
"""Elements: 32 B and 64 MiB of float32."""


@contextmanager
def sharing(**settings: str) -> Iterator[World]:
    """The ranks of one job, which all have the first device."""
    with unjoined(SIZE, device="cuda:0", **settings) as world:
        route = "staged" if settings else "device slots"
        assert {found for found, _ in world.do(roles.join)} == {route}
        yield world


@pytest.mark.parametrize(
    "settings", [{}, HOST, {"transport": "tcp"}, {"transport": "unix", "strategy": "ring"}], ids=str
)
def test_every_verb_is_right(settings: dict[str, str]) -> None:
    with sharing(**settings) as world:
        assert world.do(roles.verbs, elements=3) == [[]] * SIZE
        assert world.do(roles.verbs, elements=100_001) == [[]] * SIZE
        world.finish()


def test_large_arrays_are_right_and_the_same_everywhere() -> None:
    with sharing(**HOST) as world:
        for in_place in (False, True):
            assert len(set(world.do(roles.all_reduce, name="x", elements=BIG, in_place=in_place))) == 1
        world.do(roles.synchronize)
        world.finish()


def test_work_on_the_callers_stream_comes_first() -> None:
    with sharing(**HOST) as world:
        assert world.do(roles.behind_a_gate, elements=BIG) == [True] * SIZE
        world.finish()


def test_ranks_with_and_without_a_device_work_together() -> None:
    with unjoined(SIZE) as world:
        joins = [actor.do(roles.join, device="none" if rank == 0 else "cuda:0") for rank, actor in enumerate(world)]
        assert {join.result()[0] for join in joins} == {"staged"}
        world[0].do(roles.on_the_host).result()
        assert world.do(roles.verbs, elements=1000) == [[]] * SIZE
        assert len(set(world.do(roles.all_reduce, name="x", elements=BIG))) == 1
        world.finish()


def test_killed_rank_raises_peer_lost_on_survivors() -> None:
    with sharing(**HOST) as world:
        world.do(roles.all_reduce, name="before", elements=BIG)
        world.do(plain.make_group, name="without", ranks=[0, 1, 3])
        # it has begun everywhere but on rank 0, and cannot end before the victim does
        do(world[1:], roles.post, name="x", elements=BIG)
        world[VICTIM].signal(signal.SIGKILL)
        world[VICTIM].wait()
        survivors = [actor for rank, actor in enumerate(world) if rank != VICTIM]
        world[0].log(f"rank {VICTIM} is lost")
        waiting = [actor.do(roles.outcome, name="x") for actor in (world[1], world[3])]
        waiting.append(world[0].do(roles.all_reduce, name="x", elements=BIG))
        for call in (*waiting, *start(survivors, roles.all_reduce, name="y", elements=SMALL)):
            assert call.failure(PeerLost).fields["rank"] == VICTIM
        # what does not need it goes on, and the survivors leave in peace
        assert len(set(do(survivors, plain.group_all_reduce, group="without"))) == 1
        do(survivors, plain.leave)


def test_a_device_without_memory_left_fails_one_collective_on_all_ranks() -> None:
    with sharing(**HOST) as world:
        world.do(roles.all_reduce, name="before", elements=SMALL)
        others = start(world[1:], roles.all_reduce, name="too large", elements=2 * BIG)
        # roles begin in order: their results have memory when rank 0 takes all that is left
        for actor in world[1:]:
            actor.do(plain.nothing).result()
        world[0].do(roles.without_memory, elements=2 * BIG, left_nbytes=32 << 20).failure(Exception)
        for call in others:
            call.failure(CollectiveError)
        assert len(set(world.do(roles.all_reduce, name="after", elements=BIG))) == 1
        world.finish()


def test_unlike_shapes_are_a_mismatch_on_all_ranks() -> None:
    with sharing(**HOST) as world:
        calls = [actor.do(roles.shaped, name="x", rows=3 + (rank == 1)) for rank, actor in enumerate(world)]
        for call in calls:
            assert "rank 1 has" in call.failure(CollectiveMismatch).message
        assert len(set(world.do(roles.all_reduce, name="x", elements=SMALL))) == 1
        world.finish()


def test_missing_rank_is_named() -> None:
    with sharing(**HOST) as world:
        for call in start(world[1:], roles.all_reduce, name="x", elements=SMALL, timeout=2):
            assert call.failure(KfcommError).fields["missing"] == [0]
        world[0].do(roles.all_reduce, name="x", elements=SMALL).failure(KfcommError)
        assert len(set(world.do(roles.all_reduce, name="x", elements=BIG))) == 1
        world.finish()
