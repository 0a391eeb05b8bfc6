"""The monitor: figures from the gradients' own collective, where they are shown, and that they are true."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from kfcomm import Communicator, Statistics
from kfcomm.arrays.norms import squared_norm
from kfcomm.engine.meter import Meter
from kfcomm.errors import CollectiveMismatch, ConfigError
from kfcomm.monitor.metrics import METRICS, Scrape
from kfcomm.testing import FakeDevice, run_ranks, run_threads, sync_world, world
from kfcomm.train import GradientMonitor, NoiseScale, SynchronousSGD
from kfcomm.train.gradient_statistics import share


class Ticks:
    """A clock that goes on by half a second at each look."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 0.5
        return self.now_s


def gradient(rank: int) -> dict[str, Any]:
    """|g|² is 63, 72, 42, 72 and |ḡ|² is 6.1875 over the four ranks."""
    rows = np.array([[5, 5, 3, 2], [-6, 6, 0, 0], [4, -5, 1, 0], [-6, -6, 0, 0]], np.float32)
    return {"a": rows[rank, :1], "b": rows[rank, 1:]}


@pytest.mark.asyncio
async def test_one_step_by_hand() -> None:
    async def main(comm: Communicator) -> tuple[GradientMonitor, Statistics]:
        monitor = GradientMonitor(comm, batch=32, clock=Ticks())
        way = SynchronousSGD(comm, monitor=monitor)
        for _ in range(2):
            mean = await way.gradients(gradient(comm.rank))
        assert list(mean) == ["a", "b"]
        return monitor, comm.statistics()

    async with world(4) as comms:
        found = await run_ranks(comms, main)
    rows = np.array([np.concatenate([gradient(rank)["a"], gradient(rank)["b"]]) for rank in range(4)], np.float64)
    local, both = float((rows**2).sum() / 4), float((rows.mean(axis=0) ** 2).sum())
    for rank, (monitor, statistics) in enumerate(found):
        assert monitor.values["local_norm"] == pytest.approx(np.linalg.norm(rows[rank]), rel=1e-6)
        assert monitor.values["gradient_norm"] == pytest.approx(both**0.5, rel=1e-6)
        assert monitor.values["gradient_variance"] == pytest.approx(local - both, rel=1e-6)
        assert monitor.values["gradient_cosine"] == pytest.approx((4 * both - local) / (3 * local), rel=1e-5)
        assert monitor.noise_scale.signal == pytest.approx((128 * both - 32 * local) / 96, rel=1e-5)
        assert monitor.noise_scale.value is None, "the signal is not above 0"
        assert "noise_scale" not in monitor.values
        assert monitor.values["throughput"] == pytest.approx(128 / 0.5)
        assert statistics.gauges == monitor.values
        assert Statistics.from_json(json.loads(json.dumps(statistics.as_json()))) == statistics
    (training,) = (metric for metric in METRICS if metric.name == "training")
    shown = {labels[0]: value for labels, value in training.read(Scrape.of(found[0][1], Meter(4)))}
    assert shown == found[0][0].values


@pytest.mark.asyncio
@pytest.mark.parametrize("size", [1, 3])
async def test_shares_of_the_norm_give_what_the_whole_gives_one_step_later(size: int) -> None:
    """Each rank squares a part of the mean gradient; arrays come in another order on each rank."""
    shapes = {"a": (5,), "b": (), "c": (3, 7), "d": (0, 2), "e": (65537,)}
    steps = 6
    drawn = np.random.default_rng(3).standard_normal((steps, size, 5 + 1 + 21 + 65537)) + 0.1

    def tree(step: int, rank: int) -> dict[str, Any]:
        ends = np.cumsum([int(np.prod(shape)) for shape in shapes.values()])[:-1]
        parts = zip(shapes.items(), np.split(drawn[step, rank], ends), strict=True)
        found = {name: part.reshape(shape) for (name, shape), part in parts}
        return dict(sorted(found.items(), reverse=bool(rank % 2)))

    async def main(comm: Communicator) -> list[dict[str, float]]:
        monitor = GradientMonitor(comm, 4)
        way = SynchronousSGD(comm, monitor=monitor)
        seen = []
        for step in range(steps):
            await way.gradients(tree(step, comm.rank))
            times = "throughput", "goodput"
            seen.append({name: x for name, x in monitor.values.items() if name not in times})
        return seen

    async with world(size) as comms:
        found = await run_ranks(comms, main)
    scale = NoiseScale()
    assert found[0][0] == {}
    for step in range(steps - 1):
        local, both = float((drawn[step] ** 2).sum() / size), float((drawn[step].mean(axis=0) ** 2).sum())
        batches = {"small_batch": 4, "big_batch": 4 * size, "measurement": step + 1}
        expected = batches | {"gradient_norm": both**0.5, "gradient_variance": local - both}
        if size > 1:
            scale.update(local, both, 4, 4 * size)
            expected["gradient_cosine"] = (size * both - local) / ((size - 1) * local)
        if scale.value is not None:
            expected["noise_scale"] = scale.value
        for rank in range(size):
            own = {"local_norm": float(np.linalg.norm(drawn[step, rank]))}
            assert found[rank][step + 1] == pytest.approx(expected | own, rel=1e-9, abs=1e-9)
            assert found[rank][step + 1] | own == found[0][step + 1] | own, "the same bits on every rank"


def test_shares_are_all_elements_once() -> None:
    arrays = [np.arange(5.0), np.float64(5), np.arange(6, 6), np.arange(6.0, 13).reshape(7, 1)]
    for parts in (1, 2, 3, 13, 20):
        found = [share(arrays, part, parts) for part in range(parts)]
        assert np.concatenate([one for part in found for one in part]).tolist() == list(range(13))
        sizes = [sum(one.size for one in part) for part in found]
        assert max(sizes) - min(sizes) <= 1


@pytest.mark.asyncio
async def test_no_collective_more_than_without_it() -> None:
    async def counts(comm: Communicator, *, monitored: bool) -> list[tuple[str, int]]:
        way = SynchronousSGD(comm, monitor=GradientMonitor(comm, 8) if monitored else None)
        for _ in range(5):
            await way.gradients(gradient(comm.rank))
        return [(one.name, one.count) for one in comm.statistics().keys if "gradients" in one.name]

    async with world(2) as comms:
        without = await run_ranks(comms, lambda comm: counts(comm, monitored=False))
    async with world(2) as comms:
        assert await run_ranks(comms, lambda comm: counts(comm, monitored=True)) == without


@pytest.mark.parametrize("batches", [(8, 8, 8, 8), (4, 8, 8, 16)])
def test_the_noise_scale_of_gradients_whose_truth_is_known(batches: tuple[int, ...]) -> None:
    """|G|² is 10, the covariance of a sample's gradient the identity in 1,000 dimensions: 100."""

    def main(comm: Any) -> GradientMonitor:
        rng = np.random.default_rng(comm.rank)
        truth = np.full(1000, 0.1)
        monitor = GradientMonitor(comm, batches[comm.rank])
        way = SynchronousSGD(comm, monitor=monitor)
        for _ in range(300):
            noise = rng.standard_normal(1000) / np.sqrt(batches[comm.rank])
            way.gradients([truth + noise]).wait()
        return monitor

    with sync_world(len(batches)) as comms:
        found = run_threads(comms, main)
    for monitor in found:
        assert monitor.noise_scale.value == pytest.approx(100, rel=0.1)
        batch = len(batches) / np.mean([1 / one for one in batches])
        # beside the first step's batch, goodput is throughput
        assert monitor.values["goodput"] == pytest.approx(monitor.values["throughput"])
        assert monitor.values["gradient_variance"] == pytest.approx(3000 / batch, rel=0.3)


@pytest.mark.asyncio
async def test_goodput_beside_a_smaller_batch() -> None:
    async with world(2) as comms:

        async def main(comm: Communicator) -> GradientMonitor:
            monitor = GradientMonitor(comm, 50, initial_batch=10, clock=Ticks())
            way = SynchronousSGD(comm, monitor=monitor)
            for _ in range(2):
                await way.gradients({"x": np.array([3.0 + (-1) ** comm.rank, 0.0])})
            return monitor

        monitor, _ = await run_ranks(comms, main)
    # |g|² = 16 and 4, |ḡ|² = 9: G² = (900 − 500)/50 = 8, S = 1/(1/50 − 1/100) = 100
    assert monitor.noise_scale.value == pytest.approx(12.5, rel=1e-6)
    efficiency = (12.5 + 10) / (12.5 + 100)
    assert monitor.values["goodput"] == pytest.approx(100 / 0.5 * efficiency, rel=1e-6)


@pytest.mark.asyncio
async def test_a_step_that_overflowed_leaves_the_figures_as_they_were() -> None:
    async with world(2) as comms:

        async def main(comm: Communicator) -> None:
            monitor = GradientMonitor(comm, 50)
            way = SynchronousSGD(comm, monitor=monitor)
            for _ in range(2):
                await way.gradients([np.array([3.0 + (-1) ** comm.rank])])
            before = dict(monitor.values)
            with np.errstate(all="ignore"):
                await way.gradients([np.array([np.inf if comm.rank else 1.0])])
                await way.gradients([np.array([1.0])])
            assert (monitor.noise_scale.num_updates, monitor.noise_scale.num_left_out) == (2, 1)
            assert monitor.values["noise_scale"] == before["noise_scale"]
            assert monitor.values["gradient_norm"] == before["gradient_norm"]

        await run_ranks(comms, main)


@pytest.mark.asyncio
async def test_gradients_are_looked_at_in_every_third_step() -> None:
    async def main(comm: Communicator) -> list[tuple[int, float | None]]:
        monitor, seen = GradientMonitor(comm, 8, every=3, clock=Ticks()), []
        way = SynchronousSGD(comm, monitor=monitor)
        for step in range(7):
            await way.gradients({"x": np.array([float(step + comm.rank), 1.0])})
            seen.append((monitor.noise_scale.num_updates, monitor.values.get("throughput")))
        return seen

    async with world(2) as comms:
        for seen in await run_ranks(comms, main):
            assert [count for count, _ in seen] == [0, 1, 1, 1, 2, 2, 2], "one step after"
            assert [rate for _, rate in seen] == [None, *[pytest.approx(32.0)] * 6]


@pytest.mark.asyncio
async def test_bad_arguments() -> None:
    async with world(2) as comms:
        for bad in ({"batch": 0}, {"batch": 8, "initial_batch": -1.0}, {"batch": 8, "every": 0}):
            with pytest.raises(ConfigError, match=r"above 0|at least 1"):
                GradientMonitor(comms[0], **bad)

        async def main(comm: Communicator) -> None:
            monitor = GradientMonitor(comm, 8) if comm.rank else None
            with pytest.raises(CollectiveMismatch, match=r"monitored_every=None.*monitored_every=1"):
                await SynchronousSGD(comm, monitor=monitor).gradients(gradient(comm.rank))
            monitor = GradientMonitor(comm, 8, every=2 + comm.rank)
            with pytest.raises(CollectiveMismatch, match=r"monitored_every=2.*monitored_every=3"):
                await SynchronousSGD(comm, monitor=monitor, name="rarer").gradients(gradient(comm.rank))
            with pytest.raises(ConfigError, match="averaged"):
                SynchronousSGD(comm, op="adasum", monitor=GradientMonitor(comm, 8), name="other")

        await run_ranks(comms, main)


def test_norm_that_is_known_only_after_it_was_told() -> None:
    """As of gradients on a device: both orders give the same figures."""
    found = []
    with sync_world(1) as (comm,):
        for is_late in (False, True):
            monitor = GradientMonitor(comm, batch=4)
            for step in range(3):
                (row,) = [monitor.tell(0.0 if is_late else 1.0 + step)]
                if is_late:
                    row[0] = 1.0 + step
                    monitor.amend(row[0])
                assert monitor.learn([row])
                monitor.keep_share(0.5)
            found.append(monitor.values["local_norm"])
    assert found == [2.0**0.5] * 2


def test_gradients_on_a_device_are_refused() -> None:
    with sync_world(1) as (comm,):
        monitor = GradientMonitor(comm, batch=4)
        with pytest.raises(ConfigError, match="those of a model on a device are measured by"):
            monitor.sums({"a": FakeDevice().array(np.ones(3))})


@pytest.mark.parametrize("value", [np.inf, np.nan, np.finfo(np.float64).max])
def test_squared_norm_of_what_is_not_finite_gives_no_warning(value: float) -> None:
    assert not np.isfinite(squared_norm([np.array([value, -value])]))


def test_squared_norms() -> None:
    rng = np.random.default_rng(1)
    x = rng.standard_normal(200_000)
    for dtype, rel in ((np.float64, 1e-12), (np.float32, 1e-6), (np.float16, 1e-3)):
        given = x.astype(dtype)
        truth = float((given.astype(np.float64) ** 2).sum())
        found = squared_norm([given.reshape(400, 500), given[:1]])
        assert found == pytest.approx(truth + float(given[0]) ** 2, rel=rel)
    assert squared_norm([]) == 0.0
