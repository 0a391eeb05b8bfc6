"""What hot paths cost, in bytecodes and calls of Python functions: figures that no noise can move.

Each is the least of several calls, since a caller may have to look once more than another time. A budget that is passed
by more than a tenth is a regression; one that a change makes too large is to be lowered. See "Performance" in the docs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np
import pytest

from kfcomm.sync import Communicator, driver
from tests.sync.worlds import driver_of, joined

CALLS = 40
SLACK = 1.1

BUDGETS = {
    ("shm", "leaf"): (2510, 86),
    ("shm", "root"): (2500, 85),
    ("tcp", "leaf"): (2770, 106),
    ("tcp", "root"): (2860, 107),
}
"""Of one blocking all_reduce of 1 KiB under a name that was used before, with two ranks and strategy star."""


def counted(call: Callable[[], Any], others: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """Bytecodes and calls of this thread while it runs ``call``; ``others`` have their turn when it lets them."""
    bytecodes = calls = 0

    def inside(_: FrameType, event: str, __: object) -> Any:
        nonlocal bytecodes
        bytecodes += event == "opcode"
        return inside

    def entered(frame: FrameType, _: str, __: object) -> Any:
        nonlocal calls
        calls += 1
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return inside

    def let_others() -> None:
        sys.settrace(None)
        others()
        sys.settrace(entered)

    before = sys.gettrace()
    monkeypatch.setattr(driver, "sched_yield", let_others)
    sys.settrace(entered)
    try:
        call()
    finally:
        sys.settrace(before)
    return bytecodes, calls


def progress(comm: Communicator) -> None:
    """The other rank does what it can now."""
    driving = driver_of(comm)
    driving.io.lock.take()
    try:
        driving.reactor.glance()
    finally:
        driving.io.lock.lay_down()


@pytest.mark.parametrize(("transport", "place"), sorted(BUDGETS))
def test_a_small_collective_costs_no_more_than_it_did(
    transport: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = np.ones(256, np.float32)
    with joined(transport) as comms:
        begun = [comm.set_strategy_async("star") for comm in comms]
        for one in begun:
            one.wait()
        root = comms[0].strategy.select(x.nbytes).pairs[0].root
        mine = comms[root if place == "root" else 1 - root]
        other = comms[1 - mine.rank]
        costs = []
        for _ in range(CALLS):
            begun = [other.all_reduce_async(x, "x")]
            costs.append(counted(lambda: mine.all_reduce(x, "x"), lambda: progress(other), monkeypatch))
            begun[0].wait()
    least = min(costs)
    for cost, budget in zip(least, BUDGETS[transport, place], strict=True):
        assert cost <= budget * SLACK, f"{least} bytecodes and calls, where {BUDGETS[transport, place]} were enough"
