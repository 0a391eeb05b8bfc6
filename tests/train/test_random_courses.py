"""Random programs: algorithms take turns while ranks join and die, beside one process that simulates the same."""

from __future__ import annotations

import asyncio
import contextlib
from random import Random
from typing import Any, NamedTuple

import numpy as np
import pytest

from kfcomm.elastic import Elastic, ElasticSampler, PerRank, State
from kfcomm.errors import EpochChanged
from kfcomm.testing import world
from tests.elastic.support import Died, die
from tests.train.reference import KINDS, RATE, Members, Reference, first_model, gradient


class Course(NamedTuple):
    """Random program.

    Attributes:
        size: ranks at the beginning.
        kinds: algorithm of each step.
        joins: steps in which a rank asks to be let in.
        deaths: steps in which a rank dies, by its uid.
        fresh: whether an algorithm is made anew when it begins; else each is kept, and handed over.
        restarts: whether a step in which a rank is lost is made again; else the others finish it.
    """

    size: int
    kinds: list[str]
    joins: list[int]
    deaths: dict[int, int]
    fresh: bool
    restarts: bool


def drawn(seed: int) -> Course:
    random = Random(seed)
    fresh = random.random() < 0.3
    # Without its state a rank that joins lacks A², and does not know that AdaSGD is synchronous: then all raise.
    known = [kind for kind in KINDS if not (fresh and kind in ("local-adaalter", "adasgd"))]
    kinds: list[str] = []
    while len(kinds) < 30:
        kinds += [random.choice(known)] * random.randint(1, 9)
    size = random.randint(2, 4)
    victims = random.sample(range(1, size), random.randint(0, size - 1))
    return Course(
        size,
        kinds[:30],
        sorted(random.sample(range(2, 20), random.randint(0, 3))),
        {uid: random.randint(3, 25) for uid in victims},
        fresh,
        not fresh and random.random() < 0.4,
    )


class Run:
    """The program on one loop."""

    def __init__(self, comms: Any, course: Course) -> None:
        self.comms, self.course = comms, course
        self.tasks: list[asyncio.Task[None]] = []
        self.ended: dict[int, State] = {}
        self.attempts: dict[int, list[tuple[int, ...]]] = {}
        """Ranks of each attempt to make a step."""

    async def all(self) -> None:
        self.tasks = [asyncio.ensure_future(self.train(comm)) for comm in self.comms]
        while self.tasks:
            with contextlib.suppress(Died):
                await self.tasks.pop()

    async def train(self, comm: Any) -> None:
        ways = {kind.replace("-", "_"): algorithm.made(comm, first_model()) for kind, (algorithm, _) in KINDS.items()}
        state = State(model=PerRank(first_model(), "mean"), log=[], **({} if self.course.fresh else ways))
        options = {"on_loss": "restart_step"} if self.course.restarts else {}
        async with Elastic(comm, state, **options) as elastic:
            async for step in elastic.steps(ElasticSampler(1 << 12, 1)):
                number = len(state.log)
                if number == len(self.course.kinds):
                    self.ended[comm.births[comm.rank]] = state
                    return
                kind = self.course.kinds[number]
                if self.course.fresh and kind != self.course.kinds[max(0, number - 1)]:
                    ways[kind.replace("-", "_")] = KINDS[kind][0].made(comm, state.model)
                with step if self.course.restarts else contextlib.nullcontext():
                    await self.step(comm, state, ways[kind.replace("-", "_")])

    async def step(self, comm: Any, state: State, way: Any) -> None:
        number = len(state.log)
        attempts = self.attempts.setdefault(number, [])
        if comm.births not in attempts:
            attempts.append(comm.births)
        if comm.rank == 0:
            for place, at in enumerate(self.course.joins):
                if at == number and len(attempts) == 1 and attempts[0] == comm.births:  # not when it is made again
                    self.tasks.append(asyncio.ensure_future(self.join(10 + place)))
        if self.course.deaths.get(comm.births[comm.rank]) == number:
            die(self.comms, comm)
        pending = way.parameters(state.model)
        try:
            along = await way.gradients(gradient(state.model, number, comm.rank))
        except EpochChanged:
            with contextlib.suppress(EpochChanged):
                await pending
            raise
        state.model = await pending - RATE * along
        state.log = [*state.log, list(comm.births)]

    async def join(self, uid: int) -> None:
        await self.train(await self.comms.join(uid))


def simulated(course: Course, log: list[tuple[int, ...]], attempts: dict[int, list[tuple[int, ...]]]) -> Reference:
    run = KINDS[course.kinds[0]][1](log[0])
    for number, births in enumerate(log):
        after = births
        if course.restarts:
            # Who died in an attempt was there to the end of the step before, and when others were let in after that.
            for ranks in attempts[number]:
                if ranks != run.births:
                    run.models = {uid: x for uid, x in run.models.items() if uid in ranks}
                    run.change(ranks)
        elif number + 1 < len(log):
            after = log[number + 1]
        living = tuple(b for b in births if b in after and (course.restarts or course.deaths.get(b) != number))
        members = Members(births, living)
        former = None
        if number and course.kinds[number] != course.kinds[number - 1]:
            if births != run.births:
                run.change(births)
            former, run = run, KINDS[course.kinds[number]][1](births)
        run.step(members, number, former)
    return run


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.asyncio
async def test_ranks_and_algorithms_change_as_simulated(seed: int) -> None:
    course = drawn(seed)
    async with world(course.size, elastic=True, timeout=60) as comms:
        run = Run(comms, course)
        await run.all()
    assert run.ended
    log = [tuple(births) for births in next(iter(run.ended.values())).log]
    expected = simulated(course, log, run.attempts)
    for uid, state in run.ended.items():
        np.testing.assert_allclose(state.model, expected.models[uid], rtol=1e-11, atol=1e-11, err_msg=str(course))
