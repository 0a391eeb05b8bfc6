"""The ways to learn in NumPy, over a communicator of asyncio."""

from __future__ import annotations

from typing import Any

import numpy as np

from bench.agreement.learning import Data, Model, accuracy, beginning, digits, gradient
from bench.agreement.ways import Case, Course, Way
from kfcomm.testing import run_ranks, world
from kfcomm.train import Agreement
from kfcomm.world.communicator import Communicator


async def learn(case: Case, way: Way, seed: int) -> list[float]:
    """Return the accuracy after each tenth of the epochs."""
    data = digits(seed, is_hard=case.is_hard)
    course = Course(case, way, len(data.y), seed)
    async with world(way.ranks) as comms:
        found = await run_ranks(comms, lambda comm: _train(comm, course, data, seed))
    return found[0]


async def _train(comm: Communicator, course: Course, data: Data, seed: int) -> list[float]:
    """Learn on one rank."""
    model, tried = beginning(seed), []
    agreement = course.algorithm.made(comm, model)
    for step in course.steps(comm.rank):
        model = await _one_step(agreement, model, step.rate, data.x[step.chosen], data.y[step.chosen])
        if step.is_tried:
            tried.append(accuracy(await comm.all_reduce_many(model, "mean", op="avg"), data))
    return tried


async def _one_step(agreement: Agreement, model: Model, rate: float, x: Any, y: Any) -> Model:
    """Return the model after a step."""
    pending = agreement.parameters(model)
    found = await agreement.gradients(gradient(model, x, y))
    model = await pending
    return {name: value - np.float32(rate) * found[name] for name, value in model.items()}
