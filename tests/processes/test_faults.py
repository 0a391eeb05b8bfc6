"""Ranks that die, stop or leave while others wait for them: real processes, real signals."""

from __future__ import annotations

import signal
from collections.abc import Sequence

import pytest

from kfcomm.errors import CollectiveAborted, CollectiveError, CollectiveTimeout, PeerLost
from tests.processes import roles
from tests.processes.stage import Actor, Call, World, do, joined, launched, start

SMALL, BIG = 8, 1 << 20
VICTIM = 2

KILLED = [
    ("ring", BIG, "tcp", "SIGKILL"),
    ("star", SMALL, "unix", "sys.exit"),
    ("clique", BIG, "auto", "an unhandled error"),
    ("binary_tree_star", SMALL, "tcp", "os._exit"),
    ("binomial", BIG, "unix", "SIGKILL"),
]
UNWINDING = ("sys.exit", "an unhandled error")


def end(actor: Actor, way: str) -> None:
    if way == "SIGKILL":
        actor.signal(signal.SIGKILL)
    else:
        actor.do(roles.leave_by, way=way)
    actor.wait()


def lost(calls: Sequence[Call], rank: int) -> None:
    """Every one of these failed by the loss of this rank, and says so."""
    for call in calls:
        failure = call.failure(PeerLost)
        assert failure.fields["rank"] == rank
        assert f"rank {rank} " in failure.message


def others(world: World, rank: int = VICTIM) -> list[Actor]:
    return [actor for at, actor in enumerate(world) if at != rank]


@pytest.mark.parametrize(("strategy", "elements", "transport", "way"), KILLED)
def test_killed_rank_raises_peer_lost(strategy: str, elements: int, transport: str, way: str) -> None:
    with joined(4, strategy=strategy, transport=transport) as world:
        assert len(set(world.do(roles.all_reduce, name="before", elements=elements))) == 1
        # it has begun everywhere but on rank 0, and cannot end before the victim does
        world.do(roles.make_group, name="without", ranks=[0, 1, 3])
        waiting = start(world[1:], roles.all_reduce, name="x", elements=elements)
        assert all(do(world[1:], roles.has_posted, name="x"))
        end(world[VICTIM], way)
        # who posts it later hears the same, at once; so does everything else that needs the victim. (What the victim
        # has sent is there: a rank that posts before it hears of the death may find all that it needs.)
        world[0].log(f"rank {VICTIM} is lost")
        waiting.append(world[0].do(roles.all_reduce, name="x", elements=elements))
        for call in waiting:
            if call.actor is not world[VICTIM]:
                # Python cancels what a program that ends by an exception was waiting for: that may be heard first
                failure = call.failure(CollectiveError if way in UNWINDING else PeerLost)
                assert f"rank {VICTIM}" in failure.message
        lost(start(others(world), roles.all_reduce, name="y", elements=elements), VICTIM)
        # and what does not need it goes on
        sums = do(others(world), roles.group_all_reduce, group="without", elements=elements)
        assert len(set(sums)) == 1
        do(others(world), roles.leave)


def test_a_rank_dies_before_anybody_has_used_a_link_to_it() -> None:
    with joined(4) as world:
        end(world[VICTIM], "SIGKILL")
        lost(start(others(world), roles.all_reduce, name="x", elements=BIG), VICTIM)


@pytest.mark.parametrize(("strategy", "elements"), [("ring", SMALL), ("clique", BIG)])
def test_a_stopped_rank_ends_by_timeout_and_may_come_back(strategy: str, elements: int) -> None:
    with joined(4, strategy=strategy) as world:
        world.do(roles.all_reduce, name="before", elements=elements)
        world[VICTIM].signal(signal.SIGSTOP)
        calls = start(others(world), roles.all_reduce, name="x", elements=elements, timeout=2)
        for call in calls:
            failure = call.failure(CollectiveTimeout)
            assert failure.fields["missing"] == [VICTIM]
            assert f"rank {VICTIM} does not answer (stopped or unreachable)" in failure.message
        # it is not taken for dead: when it goes on, it learns what it has missed, and works
        world[VICTIM].signal(signal.SIGCONT)
        failure = world[VICTIM].do(roles.all_reduce, name="x", elements=elements).failure(CollectiveTimeout)
        assert failure.fields["missing"] == [VICTIM]
        assert len(set(world.do(roles.all_reduce, name="x", elements=elements))) == 1
        world.finish()


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_a_rank_that_is_silent_for_too_long_is_lost_and_told_so(transport: str) -> None:
    with joined(3, transport=transport, lost_after="5") as world:
        world.do(roles.all_reduce, name="before")
        calls = start(others(world)[:2], roles.all_reduce, name="x")
        world[VICTIM].signal(signal.SIGSTOP)
        for call in calls:
            failure = call.failure(PeerLost)
            assert failure.fields["rank"] == VICTIM
            assert "silent for 5." in failure.message
        world[VICTIM].signal(signal.SIGCONT)
        failure = world[VICTIM].do(roles.all_reduce, name="x").failure(PeerLost)
        assert "given this rank up" in failure.message


def test_a_rank_stopped_in_the_middle_of_moving_data_corrupts_nothing() -> None:
    with joined(4, strategy="ring") as world:
        everyone_but_0 = start(world[1:], roles.all_reduce, name="x", elements=BIG, timeout=2)
        assert all(do(world[1:], roles.has_posted, name="x"))
        world[VICTIM].signal(signal.SIGSTOP)
        last = world[0].do(roles.all_reduce, name="x", elements=BIG, timeout=2)
        for call in (everyone_but_0[0], everyone_but_0[2], last):
            message = call.failure(CollectiveTimeout).message
            assert f"no answer from ranks [{VICTIM}]" in message or f"rank {VICTIM} does not answer" in message
        world[VICTIM].signal(signal.SIGCONT)
        everyone_but_0[1].failure(CollectiveTimeout)
        for number in range(3):
            assert len(set(world.do(roles.all_reduce, name=f"y{number}", elements=BIG))) == 1
        assert len(set(world.do(roles.all_reduce, name="x", elements=BIG))) == 1
        world.finish()


def test_clean_leave_keeps_finished_collectives() -> None:
    with joined(4, strategy="tree") as world:
        # the victim closes as soon as its own "x" is done; it never posts "later"
        late = start(others(world), roles.all_reduce, name="later")
        calls = world.start(roles.all_reduce, name="x", elements=BIG)
        calls[VICTIM].result()
        world[VICTIM].do(roles.leave).result()
        world[VICTIM].end()
        world[VICTIM].wait()
        assert len({call.result() for call in calls if call.actor is not world[VICTIM]}) == 1
        for call in late:
            failure = call.failure(PeerLost)
            assert failure.fields["rank"] == VICTIM
            assert f"rank {VICTIM} has left" in failure.message
        for actor in others(world):
            assert not [line for line in actor.logged() if "is lost" in line]
        do(others(world), roles.leave)


def test_closing_with_something_in_flight_aborts_it_everywhere() -> None:
    with joined(3) as world:
        calls = start(world[:2], roles.all_reduce, name="x")
        assert all(do(world[:2], roles.has_posted, name="x"))
        world[0].do(roles.leave).result()
        calls[0].failure(CollectiveAborted)
        assert "closed" in calls[1].failure(CollectiveAborted).message
        do(world[1:], roles.leave)


def test_the_launcher_tells_of_a_death_that_sockets_hide() -> None:
    """A child that keeps all descriptors open: kfcomm has a hook in `os.fork`, but not in a fork of the C library."""
    with launched("-n", "3", "--keep-going", size=3) as world:
        world.do(roles.join)
        world.do(roles.all_reduce, name="x")
        world[1].do(roles.clone, label="child")
        child = world.stage.meet("child")
        waiting = start((world[0], world[2]), roles.all_reduce, name="y")
        end(world[1], "SIGKILL")
        for call in waiting:
            message = call.failure(PeerLost).message
            assert "rank 1" in message
            assert "the process of rank 1 ended (SIGKILL)" in message
        assert child.pid != world[1].pid
        do((world[0], world[2]), roles.leave)
        for rank in (0, 2):
            world[rank].end()
        assert world.processes[0].wait() == 128 + signal.SIGKILL
        assert "rank 1" in world.said()


def test_the_launcher_returns_the_code_of_the_rank_that_failed_first() -> None:
    with launched("-n", "3", "--keep-going", size=3) as world:
        world.do(roles.join)
        waiting = start((world[0], world[2]), roles.all_reduce, name="y")
        end(world[1], "sys.exit")
        lost(waiting, 1)
        for rank in (0, 2):
            world[rank].do(roles.leave_by, way="os._exit")
        assert world.processes[0].wait() == 3
        assert "rank 1" in world.said()
