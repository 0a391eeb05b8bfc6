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


# ---------------------------------------------------------------- steps of other kinds


def stepped(comm: Any, bad: Any, steps: Any, make: Any, act: Any, **options: Any) -> Any:
    """Train by ``act(optimizer, loss_of, attached)``; inputs of rank 1 are infinite in step ``bad``."""
    model = made()
    optimizer = make(model)
    options = {"policies": [GuardSteps(warmup=2)], "bucket_nbytes": 200, **options}
    attached = kfcomm.torch.attach(model, optimizer, comm, **options)
    for step in steps:

        def loss_of(step: int = step) -> Any:
            x = data(comm.rank, step)
            if (comm.rank, step) == (1, bad):
                x[2, 1] = math.inf
            return (model(x) - x).square().mean()

        act(optimizer, loss_of, attached)
    attached.wait()
    return numbers(model), [one.step for one in attached.decisions]


def sgd(model: Any) -> Any:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def adamw(model: Any) -> Any:
    return torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)


class Decaying(torch.optim.SGD):
    """Changes parameters that have no gradient, too."""

    def step(self, closure: Any = None) -> Any:
        found = super().step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                for one in group["params"]:
                    one.mul_(0.99)
        return found


def lbfgs(model: Any) -> Any:
    return torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3, line_search_fn="strong_wolfe")


def plain(optimizer: Any, loss_of: Any, attached: Any) -> None:
    optimizer.zero_grad()
    loss = loss_of()
    loss.backward()
    attached.observe(loss=loss)  # late
    optimizer.step()


def not_observed(optimizer: Any, loss_of: Any, attached: Any) -> None:
    optimizer.zero_grad()
    loss_of().backward()
    optimizer.step()


def closed(optimizer: Any, loss_of: Any, attached: Any) -> None:
    def closure() -> Any:
        optimizer.zero_grad()
        loss = loss_of()
        loss.backward()
        return loss

    optimizer.step(closure)


def gathered(optimizer: Any, loss_of: Any, attached: Any) -> None:
    optimizer.zero_grad()
    with attached.no_sync():
        (loss_of() / 2).backward()
    (loss_of() / 2).backward()
    optimizer.step()


def twice(optimizer: Any, loss_of: Any, attached: Any) -> None:
    """Two exchanged passes, and two steps with their gradients."""
    optimizer.zero_grad()
    (loss_of() / 2).backward()
    (loss_of() / 2).backward()
    nn.utils.clip_grad_norm_([one for group in optimizer.param_groups for one in group["params"]], 1.0)
    optimizer.step()
    optimizer.step()


def over_the_step(optimizer: Any, loss_of: Any, attached: Any) -> None:
    """Gradients that no one zeroes add up; those of a void step do not."""
    loss_of().backward()
    optimizer.step()
    for group in optimizer.param_groups:
        for one in group["params"]:
            one.grad.mul_(0.5)


CASES = [
    (sgd, plain), (adamw, not_observed), (Decaying, not_observed), (sgd, gathered), (adamw, gathered), (sgd, twice),
    (sgd, closed), (lbfgs, closed), (adamw, closed), (Decaying, closed),
]  # fmt: skip


def of(make: Any) -> Any:
    return (lambda model: Decaying(model.parameters(), lr=0.05)) if make is Decaying else make


@pytest.mark.parametrize(("algorithm", "defer"), [("ssgd", False), ("ssgd", True), ("sma", False)])
@pytest.mark.parametrize(("make", "act"), CASES, ids=[f"{make.__name__} {act.__name__}" for make, act in CASES])
def test_infinity_on_one_rank_leaves_no_trace(make: Any, act: Any, algorithm: str, defer: bool) -> None:
    options: dict[str, Any] = {"algorithm": algorithm, "defer": defer}
    found = each(lambda comm: stepped(comm, BAD, range(STEPS), of(make), act, **options))
    good = [one for one in range(STEPS) if one != BAD]
    wanted = each(lambda comm: stepped(comm, None, good, of(make), act, **options))
    for (model, voids), (like, none) in zip(found, wanted, strict=True):
        assert set(voids) == {BAD if act is not twice else 2 * BAD}
        assert not none
        for name, one in model.items():
            assert torch.equal(one, like[name]), name


@pytest.mark.parametrize("kind", ["powersgd", "topk", "float16"])
def test_void_step_leaves_compressors_as_before(kind: str) -> None:
    compression = kfcomm.torch.Compression(kind, **({"rank": 1, "min_rate": 0.1} if kind == "powersgd" else {}))

    def run(bad: Any, steps: Any) -> Any:
        return each(lambda comm: stepped(comm, bad, steps, sgd, not_observed, compression={"*weight": compression,
                                                                                         "*": None}))  # fmt: skip

    found, wanted = run(BAD, range(STEPS)), run(None, [one for one in range(STEPS) if one != BAD])
    for (model, voids), (like, _) in zip(found, wanted, strict=True):
        assert voids == [BAD]
        for name, one in model.items():
            assert torch.equal(one, like[name]), name
