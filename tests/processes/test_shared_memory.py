"""Shared memory among real processes: ranks that die, that are many, that rest, and that cannot share."""

from __future__ import annotations

import signal

import pytest

from kfcomm.errors import PeerLost
from tests.processes import roles, sharing
from tests.processes.stage import do, joined, start, unjoined

BIG = 1 << 20
VICTIM = 2


def test_a_rank_killed_while_it_owns_and_reads_shared_memory_leaves_nothing() -> None:
    with joined(3, strategy="clique", transport="shm") as world:
        survivors = world[:VICTIM]
        world.do(roles.all_reduce, name="before", elements=BIG)
        do(survivors, sharing.no_pieces)
        world.do(roles.make_group, name="without", ranks=[0, 1])
        # stopped, it neither reads what it is shown nor gives back what it has borrowed, and its own stays shown
        posted = world[VICTIM].do(roles.post, name="x", elements=BIG)
        posted.result()
        world[VICTIM].signal(signal.SIGSTOP)
        waiting = start(survivors, roles.all_reduce, name="x", elements=BIG)
        assert all(do(survivors, sharing.some_pieces))
        world[VICTIM].signal(signal.SIGKILL)
        for call in waiting:
            assert call.failure(PeerLost).fields["rank"] == VICTIM
        assert do(survivors, sharing.no_pieces) == [True, True]
        # Its own arena, slots and heap; and two links to the other rank: those to the victim are mapped no more.
        assert len(set(do(survivors, roles.group_all_reduce, group="without", elements=BIG))) == 1
        assert do(survivors, sharing.memfds) == [3, 3]
        assert do(survivors, sharing.segments) == [2, 2]
        do(survivors, roles.leave)
        assert do(survivors, sharing.memfds) == [0, 0]


@pytest.mark.parametrize("in_place", [False, True])
def test_a_rank_killed_amid_gathers_raises_peer_lost(in_place: bool) -> None:
    with joined(3, transport="shm", strategy="direct") as world:
        world.do(sharing.gathers, elements=BIG, calls=4, in_place=in_place)
        waiting = start(world[:VICTIM], sharing.gathers, elements=BIG, calls=100_000, in_place=in_place)
        world[VICTIM].do(sharing.gathers, elements=BIG, calls=5, in_place=in_place).result()
        dying = world[VICTIM].do(sharing.gathers, elements=BIG, calls=100_000, in_place=in_place)
        world[VICTIM].signal(signal.SIGKILL)
        for call in waiting:
            assert call.failure(PeerLost).fields["rank"] == VICTIM
        del dying
        do(world[:VICTIM], roles.leave)


def test_more_ranks_than_cores_complete_a_burst_and_rest() -> None:
    with joined(8, transport="shm") as world:
        assert world.do(roles.show, seed=3, names=60, elements=20_000) == [0] * 8
        for parked in world.do(sharing.rest):
            assert parked
            assert all(parked)
        assert world.do(sharing.below_dev_shm) == [[]] * 8
        assert world.do(sharing.no_pieces) == [True] * 8
        assert world.do(roles.show, seed=4, names=3, elements=300_000) == [0] * 8
        world.finish()


def test_a_forked_child_writes_nothing_into_its_parents_links() -> None:
    with joined(2, transport="shm") as world:
        world.do(roles.all_reduce, name="x", elements=BIG)
        world[0].do(sharing.fork_a_meddler).result()
        assert len(set(world.do(roles.all_reduce, name="x", elements=BIG))) == 1
        assert not any(actor.logged() for actor in world)
        world.finish()


def test_unix_sockets_replace_shared_memory_with_one_warning() -> None:
    with unjoined(3) as world:
        world[0].do(sharing.unable).result()
        world.do(roles.join)
        for name in ("x", "y"):
            assert len(set(world.do(roles.all_reduce, name=name, elements=BIG))) == 1
        world.do(roles.strategy, name="ring")
        assert len(set(world.do(roles.all_reduce, name="z", elements=BIG))) == 1
        for actor in world:
            lines = [line for line in actor.logged() if "use Unix sockets, not shared memory" in line]
            assert len(lines) == 1
            assert lines[0].endswith("this system has no memfd_create")
        assert world[0].do(sharing.ways).result() == ["unix", "unix"]
        assert world[1].do(sharing.ways).result() == ["unix", "shared"]
        world.finish()
