"""Slow, blocked and forked processes are neither dead nor in the way, and a wait names the missing ranks."""

from __future__ import annotations

import signal

import pytest

from kfcomm.errors import CollectiveTimeout, PeerLost, SessionClosed
from tests.processes import roles
from tests.processes.stage import do, joined, start


def test_a_rank_that_works_without_its_loop_holds_nobody_up_and_is_not_taken_for_dead() -> None:
    with joined(4, stall_after="1.5") as world:
        for number, strategy in enumerate(("ring", "star", "clique", "binomial", "binary_tree")):
            world.do(roles.strategy, name=strategy)
            for rank in (0, 3):
                label = f"{strategy}/{rank}"
                blocked = world[rank].do(roles.barrier_then_block, label=label)
                others = [actor for actor in world if actor is not world[rank]]
                do(others, roles.barrier)
                work = world.stage.meet(label)
                if (number, rank) == (0, 3):
                    waiting = start(others, roles.all_reduce, name="x")
                    for actor in others:
                        line = actor.log("has waited", "'x'", "missing ranks [3]")
                        assert "its event loop has been blocked for" in line
                    work.send("go on")
                    waiting.append(world[rank].do(roles.all_reduce, name="x"))
                    assert len({call.result() for call in waiting}) == 1
                else:
                    work.send("go on")
                blocked.result()
        world.finish()


def test_one_line_tells_who_is_missing_and_what_it_did_last() -> None:
    with joined(4, stall_after="0.5") as world:
        world.do(roles.all_reduce, name="grad/6")
        waiting = start(world[:3], roles.all_reduce, name="grad/7", timeout=3)
        for call in waiting:
            failure = call.failure(CollectiveTimeout)
            assert failure.fields["arrived"] == [0, 1, 2]
            assert failure.fields["missing"] == [3]
        for rank in range(3):
            # on a busy machine the first call may have been slow enough to be told of, too
            (line,) = [line for line in world[rank].logged() if "has waited" in line and "'grad/7' (#" in line]
            assert line.startswith(f"rank {rank} has waited ")
            assert "arrived ranks [0, 1, 2], missing ranks [3]; rank 3 last completed 'grad/6'" in line
        # on a busy machine it may have waited long for the others to join; it has said nothing else
        assert not [line for line in world[3].logged() if " to join: missing " not in line]
        world[3].do(roles.all_reduce, name="grad/7").failure(CollectiveTimeout)
        assert len(set(world.do(roles.all_reduce, name="grad/7"))) == 1
        world.finish()


@pytest.mark.parametrize("way", ["os.fork", "multiprocessing"])
def test_a_forked_child_is_notified_and_disturbs_no_rank(way: str) -> None:
    with joined(3) as world:
        world.do(roles.all_reduce, name="x", elements=100_000)
        said = world[1].do(roles.fork, label="short", way=way, lives_on=False)
        child = world.stage.meet("short")
        errors = child.answer(1)["ok"]
        assert len(errors) == 2
        for error in errors:
            assert error.startswith(f"{SessionClosed.__name__}: ")
            assert "after fork" in error
        said.result()
        assert len(set(world.do(roles.all_reduce, name="x", elements=100_000))) == 1
        # one that is killed, and one that outlives its parent and holds nothing of it
        world[1].do(roles.fork, label="killed", way=way, lives_on=True)
        world.stage.meet("killed").signal(signal.SIGKILL)
        world[1].do(roles.fork, label="long", way=way, lives_on=True)
        long = world.stage.meet("long")
        assert len(set(world.do(roles.all_reduce, name="x", elements=100_000))) == 1
        waiting = start((world[0], world[2]), roles.all_reduce, name="y")
        world[1].signal(signal.SIGKILL)
        for call in waiting:
            assert call.failure(PeerLost).fields["rank"] == 1
        assert long.lives
        do((world[0], world[2]), roles.leave)


def test_a_child_can_join_a_world_of_its_own() -> None:
    with joined(2) as world:
        world[0].do(roles.fork_and_join, label="child")
        assert world.stage.meet("child").answer(1)["ok"] == [0, 1]
        assert len(set(world.do(roles.all_reduce, name="x"))) == 1
        world.finish()


@pytest.mark.slow
def test_many_collectives_in_a_row_leave_nothing_behind() -> None:
    with joined(2, strategy="ring") as world:
        world.do(roles.many, count=3000)
        before = world.do(roles.memory)
        tables = world.do(roles.many, count=500)
        after_more = world.do(roles.many, count=8000)
        assert after_more == tables
        for earlier, later in zip(before, world.do(roles.memory), strict=True):
            assert later["descriptors"] == earlier["descriptors"]
            assert later["now"] - earlier["now"] < 1 << 20
        world.finish()
