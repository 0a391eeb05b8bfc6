"""Tensors that are not in host memory, as far as that goes without a GPU; see tests/gpu for the rest."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import kfcomm
import kfcomm.torch
from kfcomm.torch.bases import IS_GROUP
from kfcomm.torch.collectives import _cut
from tests.torch.fleet import Fleet


def beside_another() -> tuple[float, str]:
    """The CPU's tensors are kfcomm's, those of GPUs another library's."""
    x = torch.ones(3)
    dist.all_reduce(x)
    comm = kfcomm.torch.communicator()
    group = dist.new_group([0, 1, 2])
    dist.all_reduce(x, group=group)
    assert kfcomm.torch.communicator(group).births == comm.births
    return float(x[0]), dist.group.WORLD._get_backend(torch.device("cuda")).name()


@pytest.mark.skipif(IS_GROUP, reason="torch before 2.14 has one Python backend for all devices")
def test_beside_the_library_of_a_device(fleet: Fleet) -> None:
    assert fleet.run(beside_another, backend="cpu:kfcomm,cuda:gloo") == [(9.0, "gloo")] * 3


@pytest.mark.skipif(not IS_GROUP, reason="torch 2.14 has a backend for each device")
def test_another_library_for_a_device_is_refused(fleet: Fleet) -> None:
    with pytest.raises(AssertionError, match="two backends in a group need"):
        fleet.run(beside_another, backend="cpu:kfcomm,cuda:gloo")


def test_rows_of_what_stays_a_tensor_are_cut() -> None:
    """A tensor on a device is given to kfcomm as it is: it has not NumPy's attributes."""
    whole = torch.arange(12.0).reshape(6, 2)
    assert [part.tolist() for part in _cut(whole.view(-1), whole, [1, 0, 5], 3)] == [
        [0.0, 1.0], [], list(map(float, range(2, 12))),
    ]  # fmt: skip
    assert [len(part) for part in _cut(whole.view(-1), whole, [], 3)] == [4, 4, 4]
    with pytest.raises(kfcomm.ConfigError, match="are not those of 2 ranks"):
        _cut(whole.view(-1), whole, [1, 1], 2)
