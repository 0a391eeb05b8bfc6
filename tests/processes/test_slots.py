"""Processes that map each other's device memory: random programs, stopped and killed ranks; the device is a fake."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.gpu import slot_roles
from tests.processes import roles, slot_devices
from tests.processes.stage import World, do, start, unjoined

SIZE, VICTIM = 3, 1
LONG = 1 << 15
"""Elements: 128 KiB of float32."""


@contextmanager
def sharing(**settings: str) -> Iterator[World]:
    """The ranks of one job, which share a device."""
    with unjoined(SIZE, **settings) as world:
        assert world.do(slot_devices.join) == ["device slots"] * SIZE
        world.do(slot_roles.all_sizes)
        yield world


@pytest.mark.parametrize("settings", [{}, {"transport": "ipc"}], ids=["auto", "ipc"])
def test_random_programs_are_right(settings: dict[str, str]) -> None:
    with sharing(**settings) as world:
        assert world.do(slot_roles.random_program, seed=1, rounds=20) == [[]] * SIZE
        assert world.do(slot_devices.violations) == [[]] * SIZE
        world.finish()


def test_stopped_rank_delays_a_call_and_ends_none() -> None:
    with sharing() as world:
        world.do(slot_roles.repeated, name="x", elements=LONG, calls=3)
        world[VICTIM].signal(signal.SIGSTOP)
        calls = start(world, slot_roles.repeated, name="x", elements=LONG, calls=50)
        world[VICTIM].signal(signal.SIGCONT)
        for call in calls:
            found = call.result()
            assert (found["right"], found["wrong"], found["error"]) == (50, 0, "")
        world.finish()


def test_killed_rank_raises_peer_lost_and_survivors_share_again() -> None:
    with sharing() as world:
        world.do(slot_roles.repeated, name="x", elements=LONG, calls=3)
        survivors = [actor for rank, actor in enumerate(world) if rank != VICTIM]
        calls = start(survivors, slot_roles.repeated, name="x", elements=LONG, calls=1000)
        world[VICTIM].do(slot_roles.repeated, name="x", elements=LONG, calls=100)
        killed_s = time.monotonic()
        world[VICTIM].signal(signal.SIGKILL)
        for call in calls:
            found = call.result()
            assert (found["wrong"], found["error"]) == (0, "PeerLost"), found
            assert found["at_s"] - killed_s < 30
        assert do(survivors, slot_roles.shrunk) == [["device slots", True]] * (SIZE - 1)
        do(survivors, roles.leave)
