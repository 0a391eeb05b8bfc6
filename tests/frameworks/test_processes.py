"""torch and JAX arrays among real processes, over every transport: the covering array of `tests.processes`."""

from __future__ import annotations

import pytest

from tests.processes import covering, roles
from tests.processes.stage import joined

CASES = covering.cases(("torch", "jax"))


@pytest.mark.parametrize("transport", covering.TRANSPORTS)
def test_pairwise_cases(transport: str) -> None:
    mine = [case for case in CASES if case[1] == transport]
    assert {case[2] for case in mine} == {"torch", "jax"}
    with joined(4, transport=transport) as world:
        world.do(roles.join_blocking)
        wrong = world.do(covering.cover, cases=mine)
        assert not any(wrong), wrong
        world.do(roles.leave_blocking)
        world.do(roles.leave)
        for actor in world:
            actor.end()
        assert [process.wait() for process in world.processes] == [0] * 4, world.said()
