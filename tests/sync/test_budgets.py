"""What hot paths cost, in bytecodes and calls of Python functions: figures that no noise can move.

Each is the least of several calls, since a caller may have to look once more than another time. A budget that is passed
by more than a tenth is a regression; one that a change makes too large is to be lowered. See "Performance" in the docs.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import numpy as np
import pytest

from kfcomm import testing
from kfcomm.sync import Communicator, driver
from tests.support import run
from tests.sync.worlds import driver_of, joined

CALLS = 40
SLACK = 1.1

BUDGETS = {
    ("all_reduce", "shm", "leaf"): (2510, 86),
    ("all_reduce", "shm", "root"): (2500, 85),
    ("all_reduce", "tcp", "leaf"): (3190, 121),
    ("all_reduce", "tcp", "root"): (3270, 122),
    ("reduce", "shm", "leaf"): (2530, 88),
    ("reduce", "shm", "root"): (2440, 83),
    ("broadcast", "shm", "leaf"): (2530, 88),
    ("broadcast", "shm", "root"): (2480, 85),
}
"""Of one blocking collective of 1 KiB under a name that was used before, with two ranks and strategy star."""

AWAITED = {"all_reduce": (4550, 143)}
"""Of both ranks together, on one uvloop: an awaited all_reduce of 1 KiB through shared memory, from call to result."""


class Cost:
    """Bytecodes and calls of one thread."""

    bytecodes = calls = 0

    def entered(self, frame: FrameType, _: str, __: object) -> Any:
        self.calls += 1
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self.inside

    def inside(self, _: FrameType, event: str, __: object) -> Any:
        self.bytecodes += event == "opcode"
        return self.inside


@contextlib.contextmanager
def counting() -> Iterator[Cost]:
    """What this thread costs meanwhile, in functions that are entered meanwhile."""
    cost, before = Cost(), sys.gettrace()
    sys.settrace(cost.entered)
    try:
        yield cost
    finally:
        sys.settrace(before)


def counted(call: Callable[[], Any], others: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """Bytecodes and calls of this thread while it runs ``call``; ``others`` have their turn when it lets them."""
    with counting() as cost:

        def let_others() -> None:
            sys.settrace(None)
            others()
            sys.settrace(cost.entered)

        monkeypatch.setattr(driver, "sched_yield", let_others)
        call()
    return cost.bytecodes, cost.calls


def progress(comm: Communicator) -> None:
    """The other rank does what it can now."""
    driving = driver_of(comm)
    driving.io.lock.take()
    try:
        driving.reactor.glance()
    finally:
        driving.io.lock.lay_down()


def assert_within(cost: tuple[int, int], budget: tuple[int, int]) -> None:
    for one, allowed in zip(cost, budget, strict=True):
        assert one <= allowed * SLACK, f"{cost} bytecodes and calls, where {budget} were enough"


@pytest.mark.parametrize(("verb", "transport", "place"), sorted(BUDGETS))
def test_a_small_collective_costs_no_more_than_it_did(
    verb: str, transport: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = np.ones(256, np.float32)
    with joined(transport) as comms:
        begun = [comm.set_strategy_async("star") for comm in comms]
        for one in begun:
            one.wait()
        root = comms[0].strategy.select(x.nbytes).pairs[0].root
        mine = comms[root if place == "root" else 1 - root]
        other = comms[1 - mine.rank]
        # the blocking call and what it meets
        call, meet = getattr(mine, verb), getattr(other, f"{verb}_async")
        costs = []
        for _ in range(CALLS):
            begun = [meet(x, name="x")]
            costs.append(counted(lambda: call(x, name="x"), lambda: progress(other), monkeypatch))
            begun[0].wait()
    assert_within(min(costs), BUDGETS[verb, transport, place])


@pytest.mark.parametrize("form", sorted(AWAITED))
def test_an_awaited_collective_costs_no_more_than_it_did(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.ones(256, np.float32)

    async def main() -> list[tuple[int, int]]:
        costs = []
        async with testing.world(2, transport="shm", strategy="star") as comms:
            for _ in range(CALLS):
                with counting() as cost:
                    handles = [comm.all_reduce(x, "x") for comm in comms]
                    for handle in handles:
                        await handle
                costs.append((cost.bytecodes, cost.calls))
        return costs

    assert_within(min(run(main())), AWAITED[form])
