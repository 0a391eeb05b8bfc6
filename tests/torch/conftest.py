"""Ranks for the tests of the torch backend."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest

from tests.torch.fleet import Fleet

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # of torch.jit, in torch 2.13 itself
    import torch.distributed.optim  # noqa: F401


@pytest.fixture(scope="session", autouse=True)
def torch_met(fleet: Fleet) -> None:
    """The first computation of torch opens descriptors that stay, and the fleet has processes: no test is to blame."""
    import torch

    assert float(torch.ones(2).sum()) == 2.0
    fleet.start()


@pytest.fixture(scope="session")
def fleet(temporary_files: object) -> Iterator[Fleet]:
    """Three ranks."""
    ranks = Fleet(3)
    yield ranks
    ranks.stop()
