"""Random programs in real processes, over each kind of link and on both interfaces; many in one world."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.processes import roles as common
from tests.processes.stage import World, joined, unjoined
from tests.programs import roles
from tests.programs.running import Outcome, Setting, run_world
from tests.programs.walker import Plan, Report, worst

pytestmark = pytest.mark.slow

TRANSPORTS = ("shm", "unix", "tcp")
SIZES = {"shm": 4, "unix": 3, "tcp": 2}
PROGRAMS, CALLS = 6, 100


def assert_right(said: list[dict[str, Any] | None]) -> None:
    reports = worst(Report(**one) for one in said if one is not None)
    assert not reports, "\n".join(map(str, reports))


def end(world: World) -> None:
    """No process has failed, or said anything."""
    for actor in world:
        actor.end()
    assert [process.wait() for process in world.processes] == [0] * len(world)
    assert world.said() == ""


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_the_asynchronous_interface(transport: str) -> None:
    with joined(SIZES[transport], transport=transport) as world:
        assert_right(world.do(roles.awaited, first=random.randrange(1 << 31), count=PROGRAMS, calls=CALLS))
        world.do(common.leave)
        end(world)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_the_blocking_interface(transport: str) -> None:
    with unjoined(SIZES[transport], transport=transport) as world:
        world.do(common.join_blocking)
        assert_right(world.do(roles.blocked, first=random.randrange(1 << 31), count=PROGRAMS, calls=CALLS))
        world.do(common.leave_blocking)
        end(world)


def assert_all_right(outcome: Outcome) -> None:
    assert not outcome.reports, "\n".join(map(str, outcome.reports))
    # a machine that is merely slow is no failure: its loops are late, and calls wait long enough to be reported
    lines = [
        line for line in outcome.lines if not (("Executing <" in line and " took " in line) or " has waited " in line)
    ]
    assert (outcome.code, lines) == (0, [])


@pytest.mark.parametrize("interface", ["async", "blocking"])
def test_asyncios_debug_mode(interface: str) -> None:
    setting = Setting(2, "shm", interface, debug=True)
    assert_all_right(run_world(setting, Plan(random.randrange(1 << 31), 2, CALLS)))


@pytest.mark.parametrize("interface", ["async", "blocking"])
def test_long_messages(interface: str) -> None:
    setting = Setting(3, "shm", interface, long=True)
    assert_all_right(run_world(setting, Plan(random.randrange(1 << 31), PROGRAMS, CALLS)))
