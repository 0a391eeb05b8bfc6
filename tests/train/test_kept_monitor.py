"""A monitor that is kept while ranks join and die in a running job: the same averages on all ranks, and none lost."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import numpy as np
import pytest

from kfcomm.elastic import Elastic, ElasticSampler, State
from kfcomm.testing import world
from kfcomm.train import GradientMonitor, NoiseScale, SynchronousSGD
from tests.elastic.support import Died, die
from tests.train.reference import RATE, first_model, gradient
from tests.train.test_kept_algorithms import Run, Way


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("handed", ["monitor", "way", ""])
@pytest.mark.parametrize("dies_at", [None, 9])
@pytest.mark.asyncio
async def test_averages_are_equal_after_ranks_joined_and_died(
    handed: str, every: int, dies_at: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    monitors: dict[int, GradientMonitor] = {}

    def make(comm: Any) -> tuple[dict[str, Any], Way]:
        monitor = GradientMonitor(comm, 8, every=every)
        way = SynchronousSGD(comm, monitor=monitor)
        monitors[comm.births[comm.rank]] = monitor
        given = {"monitor": monitor, "way": way}
        return {handed: given[handed]} if handed else {}, lambda _: way

    async with world(3, elastic=True, timeout=20) as comms:
        run = Run(comms, make, on_loss="restart_step")
        run.dies_at = dies_at
        await run.all()
        assert run.states.keys() == ({0, 1, 2, 9} if dies_at is None else {0, 2, 9})
    left = [monitors[uid] for uid in run.states]
    first = left[0].noise_scale.state_dict()
    assert [one.noise_scale.state_dict() for one in left] == [first] * len(left)
    assert [(one.is_due, one.values.get("noise_scale")) for one in left[1:]] == [
        (left[0].is_due, left[0].values.get("noise_scale"))
    ] * (len(left) - 1)
    if handed:
        measured = -(-run.states[0].number // every)
        assert measured - 3 <= first["num_updates"] <= measured, "one is not known yet, one died with a rank"


class Grown:
    """A training with a monitor in its ``State``, without its algorithm: of two ranks, of four, and of three.

    Attributes:
        ranks: uids of the ranks of each step that has counted.
        scales: at the end, by uid.
    """

    def __init__(self, comms: Any, *, gradients_first: bool) -> None:
        self.comms, self.gradients_first = comms, gradients_first
        self.ranks: list[tuple[int, ...]] = []
        self.scales: dict[int, NoiseScale] = {}
        self.joined: list[asyncio.Task[None]] = []

    async def all(self) -> None:
        await asyncio.gather(*(self.one(comm) for comm in self.comms))
        await asyncio.gather(*self.joined)

    async def join(self, uid: int) -> None:
        await self.one(await self.comms.join(uid))

    async def one(self, comm: Any) -> None:
        uid, monitor = comm.births[comm.rank], GradientMonitor(comm, 8)
        way = SynchronousSGD(comm, monitor=monitor)
        state = State(model=first_model(), ranks=[], monitor=monitor)
        try:
            async with Elastic(comm, state, on_loss="restart_step") as elastic:
                async for step in elastic.steps(ElasticSampler(1 << 12, 1)):
                    with step:
                        await self.step(comm, way, state)
                        state.ranks = [*state.ranks, list(comm.births)]
                    if comm.size == 3 and state.ranks[-6:] == [list(comm.births)] * 6 and 1 not in comm.births:
                        break
            self.scales[uid] = monitor.noise_scale
            self.ranks = [tuple(one) for one in state.ranks]
        except Died:
            pass

    async def step(self, comm: Any, way: SynchronousSGD, state: State) -> None:
        number, uid = len(state.ranks), comm.births[comm.rank]
        if number == 4 and uid == 0:
            self.joined = [asyncio.create_task(self.join(uid)) for uid in (8, 9)]
        if uid == 1 and state.ranks[-4:] == [list(comm.births)] * 4 and comm.size == 4:
            die(self.comms, comm)
        own = gradient(state.model, number, comm.rank)
        pending = None if self.gradients_first else way.parameters(state.model)
        try:
            mean = await way.gradients(own)
        finally:
            model = await (pending or way.parameters(state.model))
        state.model = model - RATE * mean


@pytest.mark.parametrize("gradients_first", [True, False])
@pytest.mark.asyncio
async def test_monitor_without_its_algorithm_in_the_state_measures_as_one_process(
    *, gradients_first: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "kfcomm.train")
    async with world(2, elastic=True, timeout=30) as comms:
        run = Grown(comms, gradients_first=gradients_first)
        await run.all()
    sizes = list(dict.fromkeys(map(len, run.ranks)))
    assert (sizes[0], sizes[-1]) == (2, 3)
    assert 4 in sizes
    truth, model = NoiseScale(), first_model()
    for number, (ranks, then) in enumerate(zip(run.ranks, run.ranks[1:], strict=False)):
        given = [gradient(model, number, rank) for rank in range(len(ranks))]
        mean = np.mean(given, axis=0)
        if set(ranks) <= set(then):  # else its share of |mean|² died with the rank
            local = float(np.mean([one @ one for one in given]))
            truth.update(local, float(mean @ mean), 8, 8 * len(ranks))
        model = model - RATE * mean
    assert run.scales.keys() == {0, 8, 9}
    for scale in run.scales.values():
        assert scale.num_updates == truth.num_updates
        assert scale.value == pytest.approx(truth.value, rel=1e-12)
    assert "begin anew" not in caplog.text
