"""A step with wrong numbers on any rank leaves the models of all ranks as they were."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

import kfcomm.sync
import kfcomm.torch
from kfcomm.adapt import GuardSteps
from tests.frameworks.ranks import each

torch = pytest.importorskip("torch")

nn = torch.nn

WIDTH, STEPS, BAD = 4, 6, 3
DEFER = pytest.mark.parametrize("defer", [False, True], ids=["at once", "deferred"])
ALGORITHMS = pytest.mark.parametrize("algorithm", ["ssgd", "sma"])


def made(seed: int = 0) -> Any:
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)).double()
    with torch.no_grad():
        for one in model.parameters():
            one.copy_(torch.randn(one.shape, generator=generator, dtype=one.dtype))
    return model


def data(rank: int, step: int) -> Any:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(6, WIDTH, generator=generator, dtype=torch.float64)


def numbers(model: Any) -> dict[str, Any]:
    return {name: one.detach().clone() for name, one in model.state_dict().items()}


def train(comm: Any, steps: Any, damage: Callable[[Any, Any, int], Any], **options: Any) -> Any:
    """Train, with data that ``damage(x, rank, step)`` has changed; what is found at the end."""
    model = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    attached = kfcomm.torch.attach(
        model, optimizer, comm, policies=[GuardSteps(warmup=2)], bucket_nbytes=200, **options
    )
    for step in steps:
        optimizer.zero_grad()
        x = damage(data(comm.rank, step), comm.rank, step)
        loss = (model(x) - x).square().mean()
        attached.observe(loss=loss)
        loss.backward()
        optimizer.step()
    attached.wait()
    state = {f"{number}/{key}": one for number, each in optimizer.state_dict()["state"].items()
             for key, one in each.items() if isinstance(one, torch.Tensor)}  # fmt: skip
    return numbers(model) | {name: one.clone() for name, one in state.items()}, attached.decisions


def with_nan(x: Any, rank: int, step: int) -> Any:
    if (rank, step) == (1, BAD):
        x[0, 0] = math.nan
    return x


@ALGORITHMS
def test_nan_in_inputs_of_one_rank_leaves_no_trace(algorithm: str) -> None:
    found = each(lambda comm: train(comm, range(STEPS), with_nan, algorithm=algorithm))
    wanted = each(
        lambda comm: train(comm, [one for one in range(STEPS) if one != BAD], lambda x, *_: x, algorithm=algorithm)
    )
    for (model, decisions), (like, none) in zip(found, wanted, strict=True):
        assert model.keys() == like.keys()
        for name, one in model.items():
            assert torch.equal(one, like[name]), name
        assert [one.step for one in decisions] == [BAD]
        assert "rank 1" in decisions[0].what
        assert "in rank 1: 0.weight, 0.bias, 1.weight, 3 more" in decisions[0].what
        assert not none


def test_nan_with_deferred_updates_leaves_no_trace() -> None:
    found = each(lambda comm: train(comm, range(STEPS), with_nan, defer=True))
    wanted = each(lambda comm: train(comm, [one for one in range(STEPS) if one != BAD], lambda x, *_: x))
    for (model, _), (like, _) in zip(found, wanted, strict=True):
        for name, one in model.items():
            assert torch.equal(one, like[name]), name
