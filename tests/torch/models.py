"""Models that ranks train together in tests, and the same training by one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS = 20
BATCH = 6


class Net(nn.Module):
    """Two branches; one may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.last = nn.Linear(16, 4)
        self.other = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor, way: int = 0) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        if way == 2:
            return self.last(hidden) + self.other(hidden)
        return (self.other if way else self.last)(hidden)


def data(step: int) -> torch.Tensor:
    """The batch of all ranks."""
    torch.manual_seed(step)
    return torch.randn(BATCH * dist.get_world_size(), 8)


def mine(whole: torch.Tensor) -> torch.Tensor:
    return whole[BATCH * dist.get_rank() :][:BATCH]


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def trained(model: nn.Module, optimizer: Any, part: Callable[[torch.Tensor], torch.Tensor], **ways: int) -> list[Any]:
    """The parameters after some steps."""
    for step in range(STEPS):
        optimizer.zero_grad()
        model(part(data(step)), **ways).square().mean().backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def alone(**ways: int) -> list[torch.Tensor]:
    model = net()
    return trained(model, sgd(model), lambda whole: whole, **ways)


def assert_close(found: list[Any], expected: list[Any]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def parallel(model: nn.Module, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(model, bucket_cap_mb=0.0005, **options)


class Wide(nn.Module):
    """Its buckets are long enough for a result that all ranks see."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(8, 600), nn.Tanh(), nn.Linear(600, 600), nn.Tanh(), nn.Linear(600, 500))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layers(x)
        return found


def wide(**options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(Wide(), bucket_cap_mb=1.2, **options)
