"""A module, its optimizer and its scheduler in a state, while ranks join, leave and die: as in one process."""

from __future__ import annotations

import contextlib
import logging
from random import Random
from typing import Any

import numpy as np
import pytest

from kfcomm.elastic import Elastic, ElasticCommunicator, ElasticSampler, State
from kfcomm.testing import Join, Kill, Resize, run_in_virtual_time
from tests.frameworks.ranks import filled

torch = pytest.importorskip("torch", reason="torch is not installed")

LENGTH, BATCH, PASSES = 120, 12, 2
INPUTS = np.random.RandomState(1).standard_normal((LENGTH, 4))
TARGETS = np.tanh(INPUTS @ np.random.RandomState(2).standard_normal((4, 2)))


@pytest.fixture(scope="module", autouse=True)
def optimizers_met() -> None:
    """The first optimizer makes a temporary folder that stays: no test is to be blamed for it."""
    made(0, "Adam")


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)


def made(seed: int, kind: str) -> tuple[Any, Any, Any]:
    """A module, its optimizer, and a scheduler of its learning rate; other numbers for each seed."""
    module = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2)).double()
    filled(module, seed)
    options = {"SGD": {"momentum": 0.9}, "Adam": {"amsgrad": True}}.get(kind, {})
    optimizer = getattr(torch.optim, kind)(module.parameters(), lr=0.05, **options)
    return module, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.7)


def gradients(module: Any, indices: Any) -> list[Any]:
    """Sums of the gradients over these samples."""
    error = module(torch.from_numpy(INPUTS[indices])) - torch.from_numpy(TARGETS[indices])
    return list(torch.autograd.grad((error**2).sum(), list(module.parameters())))


def update(module: Any, optimizer: Any, scheduler: Any, sums: list[Any], count: int) -> None:
    for one, gradient in zip(module.parameters(), sums, strict=True):
        one.grad = torch.as_tensor(np.asarray(gradient) / count)
    optimizer.step()
    scheduler.step()


async def train(comm: Any, kind: str, on_loss: str) -> Any:
    elastic_comm = ElasticCommunicator(comm)
    module, optimizer, scheduler = made(elastic_comm.births[elastic_comm.rank], kind)
    state = State(module=module, optimizer=optimizer, scheduler=scheduler, batches=[])
    async with Elastic(elastic_comm, state, on_loss=on_loss) as elastic:
        sampler = ElasticSampler(LENGTH, BATCH, seed=4)
        async for step in elastic.steps(sampler, passes=PASSES, used_in="g"):
            with step if on_loss == "restart_step" else contextlib.nullcontext():
                mine = gradients(module, step.indices)
                used = np.zeros(LENGTH)
                used[step.indices] = 1
                flat = np.concatenate([one.numpy().reshape(-1) for one in mine] + [used])
                total = await elastic_comm.all_reduce(flat, "g")
                bounds = np.cumsum([one.numel() for one in mine])
                *sums, used = np.split(total, bounds)
                shaped = [one.reshape(like.shape) for one, like in zip(sums, mine, strict=True)]
                update(module, optimizer, scheduler, shaped, max(1, int(used.sum())))
                state.batches = [*state.batches, np.flatnonzero(used).tolist()]
    return elastic_comm.births, [one.detach().numpy() for one in module.parameters()], state.batches


def check(seed: int, kind: str, on_loss: str) -> int:
    """Compare with one process that makes the same updates; returns whether the ranks have changed."""
    random = Random(seed)
    events: list[Any] = [Resize(4, random.uniform(0, 0.02)), Join(2, 0.0), Join(3, random.uniform(0, 0.02))]
    events += [Kill(random.randrange(2), random.uniform(0.01, 0.08)), Resize(3, random.uniform(0.05, 0.1))]

    async def main(comm: Any) -> Any:
        return await train(comm, kind, on_loss)

    run = run_in_virtual_time(main, 2, seed=seed, events=events, timeout=30.0, strategy="star")
    assert not run.failed, run.failed
    births = next(iter(run.results.values()))[0]
    found = [run.results[uid] for uid in births]
    module, optimizer, scheduler = made(0, kind)
    for batch in found[0][2]:
        update(module, optimizer, scheduler, gradients(module, batch), max(1, len(batch)))
    for _, weights, batches in found:
        assert batches == found[0][2]
        for one, first, right in zip(weights, found[0][1], module.parameters(), strict=True):
            assert one.tobytes() == first.tobytes()
            np.testing.assert_allclose(one, right.detach().numpy(), rtol=1e-11, atol=1e-12)
    assert sorted(index for batch in found[0][2] for index in batch) == sorted([*range(LENGTH)] * PASSES)
    return births != (0, 1)


@pytest.mark.parametrize("on_loss", ["finish", "restart_step"])
@pytest.mark.parametrize("kind", ["Adam", "SGD", "RMSprop"])
def test_training_over_changes_comes_to_what_one_process_does(kind: str, on_loss: str) -> None:
    assert sum(check(seed, kind, on_loss) for seed in range(4)) > 2
