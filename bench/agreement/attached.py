"""The ways to learn in torch: a plain loop and one call of ``kfcomm.torch.attach``. Ranks are threads."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

import kfcomm.torch
from bench.agreement.learning import Data, Model, accuracy, beginning, digits
from bench.agreement.ways import Case, Course, Way
from kfcomm.testing import run_threads, sync_world


def learn(case: Case, way: Way, seed: int) -> list[float]:
    """Return the accuracy after each tenth of the epochs."""
    torch.set_num_threads(1)
    data = digits(seed, is_hard=case.is_hard)
    course = Course(case, way, len(data.y), seed)
    with sync_world(way.ranks) as comms:
        found = run_threads(comms, lambda comm: _train(comm, course, data, seed))
    return found[0]


def _train(comm: Any, course: Course, data: Data, seed: int) -> list[float]:
    """Learn on one rank."""
    model, tried = _network(beginning(seed)), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    attached = kfcomm.torch.attach(model, optimizer, comm, algorithm=course.algorithm)
    x, y = torch.from_numpy(data.x), torch.from_numpy(data.y)
    for step in course.steps(comm.rank):
        optimizer.param_groups[0]["lr"] = step.rate
        optimizer.zero_grad()
        functional.cross_entropy(model(x[step.chosen]), y[step.chosen]).backward()
        optimizer.step()
        if step.is_tried:
            attached.wait()
            tried.append(
                accuracy(_as_numpy(comm.all_reduce_many(dict(model.named_parameters()), "mean", op="avg")), data)
            )
    attached.detach()
    return tried


def _network(first: Model) -> torch.nn.Sequential:
    """The perceptron, with the parameters of ``learning``."""
    width, hidden = first["w1"].shape
    model = torch.nn.Sequential(
        torch.nn.Linear(width, hidden), torch.nn.ReLU(), torch.nn.Linear(hidden, len(first["b2"]))
    )
    with torch.no_grad():
        for parameter, name in zip(model.parameters(), ("w1", "b1", "w2", "b2"), strict=True):
            parameter.copy_(torch.from_numpy(first[name].T))
    return model


def _as_numpy(found: dict[str, torch.Tensor]) -> Model:
    return {name: one.numpy().T for name, one in zip(("w1", "b1", "w2", "b2"), found.values(), strict=True)}
