"""Tensors that are views of symmetric memory: found there by their address, whatever the library."""

from __future__ import annotations

import numpy as np
import pytest

from tests.conformance import worlds
from tests.conformance.worlds import everywhere, world

torch = pytest.importorskip("torch", reason="torch is not installed")

USES = 7


@pytest.fixture(autouse=True)
def links(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shared memory."""
    monkeypatch.setattr(worlds, "LINKS", "shm")


@pytest.fixture(autouse=True)
def all_are_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several windows."""
    monkeypatch.setattr("kfcomm.strategies.base.DIRECT_NBYTES", 0)
    monkeypatch.setattr("kfcomm.transports.shm.slots.WINDOW_NBYTES", 1024)
    monkeypatch.setattr("kfcomm.transports.shm.slots.MIN_PIECE_NBYTES", 0)


@pytest.mark.asyncio
async def test_torch_tensors_are_read_where_they_are() -> None:
    async with world(2) as comms:
        given = [torch.from_numpy(comm.empty(2000)) for comm in comms]
        into = [torch.from_numpy(comm.empty((40, 50))) for comm in comms]
        for use in range(USES):
            for rank, x in enumerate(given):
                x.fill_(use + rank)
            results = await everywhere(
                comms, lambda comm: comm.all_reduce(given[comm.rank].view(40, 50), "x", out=into[comm.rank])
            )
            for result, out in zip(results, into, strict=True):
                assert result is out
                assert (out == 2 * use + 1).all()
        assert comms[0].statistics().slots == 1


@pytest.mark.asyncio
async def test_a_shared_result_of_tensors_is_numpys() -> None:
    async with world(2) as comms:
        x = torch.ones(2000)
        for _ in range(USES):
            for result in await everywhere(comms, lambda comm: comm.all_reduce(x, "x", shared=True)):
                assert type(result) is np.ndarray
                assert not result.flags.writeable
                assert (result == 2).all()


@pytest.mark.asyncio
async def test_jax_reads_it_without_a_copy() -> None:
    jax = pytest.importorskip("jax", reason="jax is not installed")
    async with world(2) as comms:
        x = comms[0].empty(1024)
        x[:] = 3
        seen = jax.dlpack.from_dlpack(x)
        assert float(seen.sum()) == 3072
        given = [seen, jax.numpy.ones(1024)]
        for _ in range(USES):
            for result in await everywhere(comms, lambda comm: comm.all_reduce(given[comm.rank], "x")):
                assert isinstance(result, jax.Array)
                assert float(result[5]) == 4
