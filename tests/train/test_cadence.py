"""How often a monitor measures: as often as its cost allows, on all ranks alike, by clocks that tests move."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kfcomm.errors import ConfigError
from kfcomm.testing import run_threads, sync_world
from kfcomm.train import GradientMonitor, SynchronousSGD
from tests.train.test_monitor_state import comm_of


class Clock:
    """A clock that each look moves by ``tick_s``: what is between the two looks of a pass takes that long."""

    def __init__(self, tick_s: float) -> None:
        self.now_s = 0.0
        self.tick_s = tick_s

    def __call__(self) -> float:
        self.now_s += self.tick_s
        return self.now_s


class Job:
    """Ranks whose passes over gradients take as long as their clocks tick, two for each measured step."""

    def __init__(self, *ticks_s: float, step_s: float, **options: Any) -> None:
        self.clocks = [Clock(tick_s) for tick_s in ticks_s]
        self.step_s = step_s
        size = len(ticks_s)
        self.monitors = [
            GradientMonitor(comm_of(rank, size), 8, clock=clock, **options) for rank, clock in enumerate(self.clocks)
        ]
        self.random = np.random.default_rng(1)
        self.measured: list[bool] = []

    def run(self, steps: int) -> None:
        for _ in range(steps):
            due = {one.is_due for one in self.monitors}
            assert len(due) == 1, "all ranks measure the same steps"
            self.measured.append(due.pop())
            gradients = [{"x": self.random.standard_normal(10)} for _ in self.monitors]
            told = np.mean([one.sums(mine) for one, mine in zip(self.monitors, gradients, strict=True)], axis=0)
            for clock in self.clocks:
                clock.now_s += self.step_s
            for monitor in self.monitors:
                monitor.update(told, gradients[0])


@pytest.mark.parametrize(
    ("tick_s", "max_cost", "period"),
    [(0.0001, 0.01, 1), (0.002, 0.01, 4), (0.002, 0.001, 40), (0.005, 0.01, 10), (0.0, 0.01, 1)],
)
def test_auto_measures_as_often_as_the_cost_allows(tick_s: float, max_cost: float, period: int) -> None:
    job = Job(tick_s, tick_s, step_s=0.1, every="auto", max_cost=max_cost)
    job.run(600)
    last = job.measured[200:]
    spent = 2 * tick_s * sum(last)
    assert spent <= 1.1 * max_cost * 0.1 * len(last) or period == 1
    assert sum(last) == pytest.approx(len(last) / period, rel=0.2), "no fewer than the cost allows"
    assert {one.period for one in job.monitors} == {job.monitors[0].period}


def test_auto_follows_the_slowest_rank_and_changing_costs() -> None:
    job = Job(0.0001, 0.004, 0.001, step_s=0.1, every="auto")
    job.run(300)
    assert job.monitors[0].period == pytest.approx(8, abs=1)
    for clock in job.clocks:
        clock.tick_s = 0.0001
    job.run(300)
    assert job.monitors[0].period == 1


def test_a_pause_hardly_counts_as_a_step() -> None:
    job = Job(0.002, 0.002, step_s=0.1, every="auto")
    job.run(100)
    for clock in job.clocks:
        clock.now_s += 60.0  # ranks join
    before = sum(job.measured)
    job.run(100)
    assert sum(job.measured) - before <= 40


def test_state_of_a_cadence_is_handed_over() -> None:
    job = Job(0.002, 0.002, step_s=0.1, every="auto")
    job.run(101)
    joined = GradientMonitor(comm_of(2, 3), 8, every="auto", clock=Clock(0.002))
    states = [one.state_dict() for one in job.monitors]
    merged = {**states[0], "share": sum(one["share"] for one in states) / 3}
    job.monitors.append(joined)
    job.clocks.append(joined._clock)  # type: ignore[arg-type]
    for monitor in job.monitors:
        monitor.comm.size = 3
        monitor.load_state_dict(merged)
    periods = {one.period for one in job.monitors}
    assert len(periods) == 1
    assert periods.pop() > 1
    job.run(50)


def test_a_given_number_of_steps_needs_no_clock_for_passes() -> None:
    job = Job(0.5, step_s=0.0, every=3)
    job.run(9)
    assert job.measured == [True, False, False] * 3
    assert job.clocks[0].now_s == pytest.approx(9 * 0.5), "one look a step"


def test_auto_in_a_world() -> None:
    def main(comm: Any) -> tuple[int, float]:
        monitor = GradientMonitor(comm, 8, every="auto", max_cost=0.5)
        way = SynchronousSGD(comm, monitor=monitor)
        for _ in range(30):
            way.gradients([np.ones(1000)]).wait()
        return monitor.period, monitor.noise_scale.num_updates

    with sync_world(3) as comms:
        found = run_threads(comms, main)
    assert len(set(found)) == 1
    assert found[0][1] >= 1


@pytest.mark.parametrize("bad", [{"every": "often"}, {"every": 0}, {"max_cost": 0.0}, {"max_cost": 1.0}])
def test_bad_cadences_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"every is a whole number|max_cost is a part"):
        GradientMonitor(SimpleNamespace(rank=0, size=1), 8, **bad)
