"""torch and JAX are here, and have started what they keep for the life of a process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def frameworks_met(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The first computation of a framework opens descriptors that stay: no test is to be blamed for them.

    torch's optimizers make a folder for compiled code, even if they compile nothing.
    """
    import jax.numpy
    import torch

    assert float(torch.ones(2).sum()) == 2.0
    assert float(jax.numpy.ones(2).sum()) == 2.0
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        yield


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Ranks are threads here, and torch's own threads are of a process."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
