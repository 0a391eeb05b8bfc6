"""State of a monitor: ranks that join or leave, a monitor that is kept without it, and numbers instead of gradients."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kfcomm.arrays.norms import squared_norm
from kfcomm.errors import ConfigError
from kfcomm.train import GradientMonitor, NoiseScale


def comm_of(rank: int, size: int) -> Any:
    engine = SimpleNamespace(meter=None, observers=None)
    return SimpleNamespace(rank=rank, size=size, _session=SimpleNamespace(engine=engine))


class Ranks:
    """Monitors of ranks that average their gradients in this process."""

    def __init__(self, size: int, batch: int = 8, *, seed: int = 0, **options: Any) -> None:
        self.options = options
        self.batch = batch
        self.monitors = [GradientMonitor(comm_of(rank, size), batch, **options) for rank in range(size)]
        self.random = np.random.default_rng(seed)
        self.truth = NoiseScale()

    def step(self) -> None:
        """Draw gradients with |G|² = 10 and the identity as covariance in 1,000 dimensions, and average them."""
        size = len(self.monitors)
        noise = self.random.standard_normal((size, 1000)) / self.batch**0.5
        self.exchange([{"x": one + 0.1} for one in noise])

    def exchange(self, gradients: list[dict[str, Any]]) -> None:
        told = np.mean([one.sums(gradient) for one, gradient in zip(self.monitors, gradients, strict=True)], axis=0)
        mean = {name: np.mean([one[name] for one in gradients], axis=0) for name in gradients[0]}
        size = len(gradients)
        self.last = sum(squared_norm(one.values()) for one in gradients) / size, squared_norm(mean.values()), self.batch
        for monitor in self.monitors:
            monitor.update(told, mean)

    def become(self, staying: list[int], size: int, *, state: bool = True) -> None:
        """Let other ranks leave, and others join, as ``State`` hands over what it is given."""
        kept = [self.monitors[rank] for rank in staying]
        joined = [GradientMonitor(comm_of(0, size), self.batch, **self.options) for _ in range(size - len(kept))]
        givers, self.monitors = self.monitors, [*kept, *joined]
        for rank, monitor in enumerate(self.monitors):
            monitor.comm.rank, monitor.comm.size = rank, size
            monitor.batch = self.batch
        if state:
            states = [one.state_dict() for one in givers]
            merged = {**states[0], "share": sum(one["share"] for one in states) / size}
            for monitor in self.monitors:
                monitor.load_state_dict(merged)

    def shared(self) -> list[dict[str, Any]]:
        return [
            {**one.noise_scale.state_dict(), "value": one.noise_scale.value, "due": one.is_due, "period": one.period}
            for one in self.monitors
        ]


def test_state_of_a_monitor_over_ranks_that_join_and_leave_loses_no_measurement() -> None:
    ranks, truth = Ranks(2), NoiseScale()
    for staying, size in (([0, 1], 2), ([0, 1], 4), ([1, 2, 3], 3), ([0], 1), ([0], 5)):
        ranks.become(staying, size)
        for _ in range(20):
            ranks.step()
            if size > 1:
                truth.update(ranks.last[0], ranks.last[1], 8, 8 * size)
        assert all(one == ranks.shared()[0] for one in ranks.shared()), "the same bits on all ranks"
    found = ranks.monitors[0].noise_scale
    assert found.num_updates == 79, "all but the last, whose |ḡ|² is not known yet"
    ranks.step()
    assert found.value == pytest.approx(truth.value, rel=1e-12)
    assert found.interval() == pytest.approx(truth.interval(), rel=1e-9)


def test_a_lost_share_leaves_one_measurement_out() -> None:
    ranks = Ranks(3)
    for _ in range(5):
        ranks.step()
    del ranks.monitors[1]  # it is killed: its share is nowhere
    ranks.become([0, 1], 3)
    ranks.step()
    assert {one.noise_scale.num_updates for one in ranks.monitors} == {4}
    ranks.step()
    assert {one.noise_scale.num_updates for one in ranks.monitors} == {5}
    assert all(one == ranks.shared()[0] for one in ranks.shared())


def test_a_copied_state_of_one_rank_counts_no_share_twice() -> None:
    """A rank dies, and another takes over the state of the first one, as algorithms hand it over without ``State``."""
    ranks = Ranks(2)
    for _ in range(5):
        ranks.step()
    joined = GradientMonitor(comm_of(1, 2), 8)
    joined.load_state_dict(ranks.monitors[0].state_dict())
    ranks.monitors[1] = joined
    for number in (4, 5, 6):
        ranks.step()
        assert {one.noise_scale.num_updates for one in ranks.monitors} == {number}
        assert all(one == ranks.shared()[0] for one in ranks.shared())
    with pytest.raises(ConfigError, match="the state of a GradientMonitor; the given one lacks cadence"):
        joined.load_state_dict({"share": 1})


def test_a_rank_without_samples_leaves_its_step_out() -> None:
    ranks = Ranks(3)
    for number in range(6):
        ranks.monitors[1].batch = 0 if number == 3 else 8
        ranks.step()
        assert all(one == ranks.shared()[0] for one in ranks.shared())
    assert ranks.monitors[0].noise_scale.num_updates == 4, "not that step, and not the last, which is not known yet"


def test_a_step_that_comes_to_nothing_leaves_the_averages_as_they_were() -> None:
    """A void or failed step tells its numbers, from which no rank learns."""
    ranks = Ranks(2)
    for number in range(8):
        if number in (3, 4):
            for monitor in ranks.monitors:
                monitor.sums({"x": np.full(1000, np.nan)})
        ranks.step()
        assert all(one == ranks.shared()[0] for one in ranks.shared())
    scale = ranks.monitors[0].noise_scale
    assert (scale.num_updates, scale.num_left_out) == (7, 0)


@pytest.mark.parametrize("every", [1, 3, 10, "auto"])
def test_a_monitor_that_is_kept_without_state_begins_anew_on_all_ranks(
    every: Any, caplog: pytest.LogCaptureFixture
) -> None:
    ranks = Ranks(2, every=every)
    for _ in range(17):
        ranks.step()
    ranks.become([0, 1], 3, state=False)
    for number in range(31):
        ranks.step()
        if number:  # the first one shows that the averages differ
            assert all(one == ranks.shared()[0] for one in ranks.shared()), "the same bits on all ranks"
    assert "begin anew" in caplog.text
    assert 0 < ranks.monitors[0].noise_scale.num_updates <= 30


def test_numbers_of_squares_taken_elsewhere_give_what_gradients_give() -> None:
    ranks, size = Ranks(3, every=2), 3
    monitors = [GradientMonitor(comm_of(rank, size), 8, every=2) for rank in range(size)]
    for _ in range(9):
        noise = ranks.random.standard_normal((size, 1000))
        mean = noise.mean(axis=0)
        parts = np.array_split(mean, size)
        ranks.exchange([{"x": one} for one in noise])
        rows = [
            monitor.tell(squared_norm([one]) if monitor.is_due else None)
            for monitor, one in zip(monitors, noise, strict=True)
        ]
        for monitor, part in zip(monitors, parts, strict=True):
            if monitor.learn(rows):
                monitor.keep_share(squared_norm([part]))
    for monitor, other in zip(monitors, ranks.monitors, strict=True):
        assert monitor.noise_scale.num_updates == other.noise_scale.num_updates == 4
        assert monitor.noise_scale.value == pytest.approx(other.noise_scale.value, rel=1e-9)
        assert monitor.observed() == pytest.approx(other.observed(), rel=1e-9)
