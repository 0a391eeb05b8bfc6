"""Horovod's calls give what Horovod's documentation says, on a world of one and before ``init``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from kfcomm.errors import ConfigError

torch = pytest.importorskip("torch")


@pytest.fixture
def hvd() -> Iterator[Any]:
    from kfcomm.horovod import torch as found

    yield found
    found.shutdown()


def test_calls_before_init_are_refused(hvd: Any) -> None:
    assert not hvd.is_initialized()
    with pytest.raises(ConfigError, match=r"call hvd.init\(\) first"):
        hvd.rank()


def test_calls_in_a_world_of_one(hvd: Any) -> None:
    hvd.init()
    hvd.init()
    assert (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size()) == (0, 1, 0, 1)
    x = torch.arange(3.0)
    for found in (
        hvd.allreduce(x, name="x"), hvd.allreduce(x, op=hvd.Sum, compression=hvd.Compression.fp16), hvd.allgather(x),
        hvd.broadcast(x, 0), hvd.synchronize(hvd.allreduce_async(x)),
    ):  # fmt: skip
        assert found is not x
        torch.testing.assert_close(found, x)
    for found in (hvd.allreduce_(x), hvd.broadcast_(x, 0)):
        assert found is x
    handle = hvd.allreduce_async(x, op=hvd.Max)
    assert hvd.synchronize(handle).tolist() == x.tolist()
    assert hvd.poll(handle)
    assert hvd.broadcast_object({"epoch": 3}) == {"epoch": 3}
    assert hvd.allgather_object(7) == [7]
    hvd.barrier()


@pytest.mark.parametrize("op", ["Average", "Adasum"])
def test_an_optimizer_steps_as_its_own_class(hvd: Any, op: str) -> None:
    hvd.init()
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    hvd.broadcast_parameters(model.state_dict())
    hvd.broadcast_optimizer_state(optimizer)
    wrapped = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), op=getattr(hvd, op))
    assert wrapped is optimizer
    before = model.weight.detach().clone()
    model(torch.ones(1, 2)).sum().backward()
    wrapped.step()
    torch.testing.assert_close(model.weight.detach(), before - 1.0)


def test_a_compressing_optimizer_names_attach(hvd: Any) -> None:
    hvd.init()
    optimizer = torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=1.0)
    with pytest.raises(ConfigError, match="call kfcomm"):
        hvd.DistributedOptimizer(optimizer, compression=hvd.Compression.fp16)
