"""Linear layers whose gradients travel as factors: the mean of all ranks, whatever a rank's gradient is made of."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

import kfcomm.torch
from kfcomm.errors import ConfigError
from kfcomm.torch import Compression, CompressionState
from tests.frameworks.ranks import each, filled

torch = pytest.importorskip("torch")
nn = torch.nn


class Model(nn.Module):
    """Two wide layers, one of them tied to a function that calls no module, and a narrow one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(30, 50), nn.Linear(50, 50)
        self.tied, self.narrow = nn.Linear(50, 50, bias=False), nn.Linear(50, 2)

    def forward(self, x: Any) -> Any:
        x = self.second(self.first(x).tanh()).tanh()
        x = self.second(x).tanh()  # twice
        x = nn.functional.linear(self.tied(x), self.tied.weight).tanh()
        return self.narrow(x)


def made(dtype: Any) -> Any:
    return filled(Model().to(dtype), 1, 0.2)


def batch(rank: int, step: int, dtype: Any, count: int) -> Any:
    generator = torch.Generator().manual_seed(100 * rank + step)
    return torch.randn(count, 30, generator=generator, dtype=torch.float64).to(dtype)


def names_of(comm: Any) -> set[str]:
    return {one.name for one in comm.statistics().keys}


def trained(comm: Any, compression: Any, counts: list[int], dtype: Any = torch.float64, **options: Any) -> Any:
    """Parameters after some steps, a micro-batch of each number of samples, averaged at the last or at each."""
    model = made(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    at_each = options.pop("at_each", False)
    attached = kfcomm.torch.attach(model, optimizer, comm, compression=compression, **options)
    for step in range(4):
        optimizer.zero_grad()
        for place, count in enumerate(counts):
            is_last = place == len(counts) - 1
            with contextlib.nullcontext() if is_last or at_each else attached.no_sync():
                model(batch(comm.rank, 10 * step + place, dtype, count + comm.rank)).square().mean().backward()
        optimizer.step()
    attached.wait()
    return nn.utils.parameters_to_vector(model.parameters()).detach(), names_of(comm)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("options", [{}, {"defer": True}, {"bucket_nbytes": 0}], ids=str)
@pytest.mark.parametrize("counts", [[3], [2, 1, 2]], ids=str)
@pytest.mark.parametrize("size", [1, 3])
def test_training_by_factors_is_that_by_gradients(size: int, counts: list[int], options: Any, dtype: Any) -> None:
    found = each(lambda comm: trained(comm, "factors", counts, dtype, **options), size)
    plain = each(lambda comm: trained(comm, None, counts, dtype, **options), size)[0][0]
    close = {"rtol": 1e-10, "atol": 1e-12} if dtype is torch.float64 else {"rtol": 1e-3, "atol": 1e-5}
    for parameters, names in found:
        torch.testing.assert_close(parameters, plain, **close)
        assert torch.equal(parameters, found[0][0])
        by_factors = {one.rpartition("/")[2].removesuffix(" (data)") for one in names if "/factors/" in one}
        assert by_factors == ({"first.weight", "second.weight"} if size > 1 else set())


def test_gradients_averaged_after_each_micro_batch_travel_as_they_are() -> None:
    """The second pass adds to an average, which no factors of this rank make."""
    for parameters, _ in each(lambda comm: trained(comm, "factors", [2, 3], at_each=True)):
        plain = each(lambda comm: trained(comm, None, [2, 3], at_each=True))[0][0]
        torch.testing.assert_close(parameters, plain, rtol=1e-10, atol=1e-12)


def test_rows_of_a_pass_that_raised_are_dropped() -> None:
    def rank(comm: Any, compression: Any) -> Any:
        model = made(torch.float64)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        kfcomm.torch.attach(model, optimizer, comm, compression=compression)
        for step in range(4):
            optimizer.zero_grad()
            out = model(batch(comm.rank, step, torch.float64, 3))
            loss = out.square().mean()
            if step == 1:
                hook = model.first.weight.register_hook(failing)
                with pytest.raises(RuntimeError, match="on purpose"):
                    loss.backward()
                hook.remove()
                continue
            loss.backward()
            optimizer.step()
        return nn.utils.parameters_to_vector(model.parameters()).detach()

    def failing(_: Any) -> None:
        raise RuntimeError("on purpose")

    found, plain = (each(lambda comm, kind=kind: rank(comm, kind))[0] for kind in ("factors", None))
    torch.testing.assert_close(found, plain, rtol=1e-10, atol=1e-12)


def test_many_samples_travel_as_gradients() -> None:
    _, names = each(lambda comm: trained(comm, {"*": "factors"}, [60]))[0]
    assert not any("/factors/" in one for one in names)


def test_hooks_end_with_the_attachment() -> None:
    def rank(comm: Any) -> None:
        model = made(torch.float64)
        attached = kfcomm.torch.attach(
            model, torch.optim.SGD(model.parameters(), lr=0.1), comm, compression={"first.weight": "factors", "*": None}
        )
        assert model.first._forward_hooks
        assert not model.second._forward_hooks
        attached.detach()
        assert not model.first._forward_hooks

    each(rank)


def test_factors_without_a_model_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"give them to kfcomm\.torch\.attach"):
        CompressionState("factors")
    with pytest.raises(ConfigError, match="unexpected keyword argument 'rank'"):
        Compression("factors", rank=2)
