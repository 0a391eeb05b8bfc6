"""Four processes that share one GPU and fold each other's memory: bits, verbs, programs, stopped and killed ranks."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.gpu import roles, slot_roles
from tests.processes import roles as plain
from tests.processes.stage import World, do, start, unjoined

pytestmark = pytest.mark.gpu

IN_PROCESSES = True
SIZE, VICTIM = 4, 2
PROGRAMS_OF = 350
"""Rounds of up to 8 collectives, some 1,600 in all."""


@contextmanager
def sharing(**settings: str) -> Iterator[World]:
    """The ranks of one job, which all have the first device."""
    with unjoined(SIZE, device="cuda:0", **settings) as world:
        for route, because in world.do(roles.join):
            assert route == "device slots"
            assert "share" in because or settings
        world.do(slot_roles.all_sizes)
        yield world


def test_bits_are_those_of_the_host() -> None:
    with sharing() as world:
        for count, shift in ((1000, 0), (1003, 1), (300_001, 0)):
            assert world.do(slot_roles.bits, count=count, shift=shift) == [[]] * SIZE
        world.finish()


def test_verbs_and_large_arrays_are_right() -> None:
    with sharing() as world:
        for elements in (3, 1000, 100_001):
            assert world.do(roles.verbs, elements=elements) == [[]] * SIZE
        for in_place in (False, True, False):
            assert len(set(world.do(roles.all_reduce, name="x", elements=16 << 20, in_place=in_place))) == 1
        assert world.do(roles.behind_a_gate, elements=1 << 20) == [True] * SIZE
        world.finish()


@pytest.mark.parametrize("settings", [{}, {"transport": "ipc"}], ids=["auto", "ipc"])
def test_random_programs_are_right(settings: dict[str, str]) -> None:
    with sharing(**settings) as world:
        assert world.do(slot_roles.random_program, seed=1, rounds=PROGRAMS_OF) == [[]] * SIZE
        world.finish()


def test_stopped_rank_delays_a_call_and_ends_none() -> None:
    with sharing() as world:
        world.do(slot_roles.repeated, name="x", elements=1 << 15, calls=5)
        calls = start(world, slot_roles.repeated, name="x", elements=1 << 15, calls=600)
        for _ in range(3):
            time.sleep(0.1)
            world[VICTIM].signal(signal.SIGSTOP)
            time.sleep(0.3)
            world[VICTIM].signal(signal.SIGCONT)
        for call in calls:
            found = call.result()
            assert (found["right"], found["wrong"], found["error"]) == (600, 0, "")
        world.finish()


@pytest.mark.parametrize("elements", [1 << 15, 4 << 20])
def test_killed_rank_raises_peer_lost_and_survivors_share_again(elements: int) -> None:
    with sharing() as world:
        # The first call compiles kernels.
        assert [one["right"] for one in world.do(slot_roles.repeated, name="x", elements=elements, calls=5)] == [
            5
        ] * SIZE
        survivors = [actor for rank, actor in enumerate(world) if rank != VICTIM]
        calls = start(world, slot_roles.repeated, name="x", elements=elements, calls=100_000)
        time.sleep(0.5)
        killed_s = time.monotonic()
        world[VICTIM].signal(signal.SIGKILL)
        for rank, call in enumerate(calls):
            if rank != VICTIM:
                found = call.result()
                assert found["right"] > 0, found
                assert (found["wrong"], found["error"]) == (0, "PeerLost"), found
                assert found["at_s"] - killed_s < 1, (found, killed_s)
        assert do(survivors, slot_roles.shrunk) == [["device slots", True]] * (SIZE - 1)
        do(survivors, plain.leave)
