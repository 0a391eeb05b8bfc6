"""torch and JAX are here, and have started what they keep for the life of a process."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session", autouse=True)
def frameworks_met() -> None:
    """The first computation of a framework opens descriptors that stay: no test is to be blamed for them."""
    import jax.numpy
    import torch

    assert float(torch.ones(2).sum()) == 2.0
    assert float(jax.numpy.ones(2).sum()) == 2.0
