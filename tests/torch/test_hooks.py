"""Compression as a communication hook of DDP, beside torch's own hooks on the same gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import kfcomm
import kfcomm.torch
from kfcomm.compression import PowerSGD
from kfcomm.torch import CompressionState, compression_hook
from kfcomm.torch.bases import IS_GROUP
from tests.torch.fleet import Fleet

STEPS, BEGIN_AFTER = 6, 2


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 8)).double()


def gradients(state: Any, hook: Any) -> list[list[torch.Tensor]]:
    """Of some steps of a model with this hook, which is not updated: all hooks see the same."""
    model = DistributedDataParallel(net())
    if isinstance(state, CompressionState):  # which would name them in the order of DDP's buckets
        assert [state.name_of(one) for one in model.parameters()] == ["0", "1", "2", "3"]
    if hook is not None:
        model.register_comm_hook(state, hook)
    found = []
    for step in range(STEPS):
        x = torch.randn(
            5, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * step + dist.get_rank())
        )
        model.zero_grad()
        model(x).sin().square().sum().backward()
        found.append([one.grad.clone() for one in model.parameters()])
    return found


def first_qs(rank: int) -> dict[str, np.ndarray]:
    """Draw the first matrices of torch's hook, the last layer first."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(np.random.RandomState(0).randint(1_000_000_000))
        return {name: torch.randn(1, m, rank, dtype=torch.float64)[0].numpy() for name, m in (("2", 40), ("0", 24))}


def power(rank: int) -> None:
    theirs = gradients(
        PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=BEGIN_AFTER, min_compression_rate=1.5),
        powerSGD_hook,
    )
    compressor = PowerSGD(rank, min_rate=1.5, first=first_qs(rank))
    ours = gradients(CompressionState(compressor, begin_after=BEGIN_AFTER), compression_hook)
    plain = gradients(None, None)
    for step in range(STEPS):
        for mine, other, whole in zip(ours[step], theirs[step], plain[step], strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-12)
            is_whole = step < BEGIN_AFTER or mine.dim() < 2
            assert torch.allclose(mine, whole, rtol=1e-9, atol=1e-12) == is_whole


@pytest.mark.parametrize("rank", [1, 3])
def test_power_sgd_as_torch_has_it(rank: int, fleet: Fleet) -> None:
    fleet.run(power, rank)


def by_name() -> None:
    """Left to itself: the same on all ranks, and what is left out comes later."""
    found = gradients(CompressionState("powersgd", rank=2, name="by name"), compression_hook)
    plain = gradients(None, None)
    comm = kfcomm.torch.communicator()
    assert comm.consensus([one.numpy() for step in found for one in step])
    assert not torch.allclose(found[0][0], plain[0][0], rtol=1e-3)
    exact = gradients(CompressionState("topk", share=1.0), compression_hook)
    for step, wanted in zip(exact, plain, strict=True):
        torch.testing.assert_close(step, wanted)


def test_by_name(fleet: Fleet) -> None:
    fleet.run(by_name)


def narrow(dtype: str) -> None:
    """16 bits on the wire, and sums in more: not further from the mean than torch's hook."""
    theirs = {"float16": default_hooks.fp16_compress_hook, "bfloat16": default_hooks.bf16_compress_hook}[dtype]
    ours, other, plain = (
        gradients(*one) for one in ((CompressionState(dtype), compression_hook), (None, theirs), (None, None))
    )
    distances = [
        max(
            float((a - b).abs().max())
            for step, wanted in zip(found, plain, strict=True)
            for a, b in zip(step, wanted, strict=True)
        )
        for found in (ours, other)
    ]
    assert 0 < distances[0] <= 2 * distances[1]


# Before 2.14 torch has its bfloat16 hook for NCCL alone.
@pytest.mark.parametrize("dtype", ["float16"] if IS_GROUP else ["float16", "bfloat16"])
def test_on_the_wire(dtype: str, fleet: Fleet) -> None:
    fleet.run(narrow, dtype)


def refused() -> None:
    """An error in a hook raises in the backward pass."""
    model = DistributedDataParallel(net().bfloat16())
    model.register_comm_hook(CompressionState("topk"), compression_hook)
    with pytest.raises(RuntimeError, match="BFloat16"):
        model(torch.ones(2, 24, dtype=torch.bfloat16)).sum().backward()
    with pytest.raises(kfcomm.ConfigError, match="compression 'zip' is not known"):
        CompressionState("zip")


def test_failures(fleet: Fleet) -> None:
    fleet.run(refused)
