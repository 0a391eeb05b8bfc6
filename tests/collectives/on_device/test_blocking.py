"""Device memory in the blocking API: the stream is the calling thread's, and no thread waits for the device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kfcomm.errors import CollectiveTimeout
from kfcomm.testing import FakeDevice, FakeFabric, run_threads, sync_world
from tests.conformance import worlds


@pytest.fixture(params=["backend", "shared"])
def world(request: pytest.FixtureRequest) -> Iterator[tuple[Any, list[FakeDevice]]]:
    shared = "one" if request.param == "shared" else None
    devices = [FakeDevice(0, shared) for _ in range(3)]
    fabric = FakeFabric()
    with sync_world(3, devices=devices, maker=fabric, timeout=worlds.HANG_S) as comms:
        yield comms, devices
    assert fabric.violations == []
    assert all(device.violations == [] for device in devices)


def test_the_stream_is_that_of_the_calling_thread(world: tuple[Any, list[FakeDevice]]) -> None:
    comms, devices = world

    def main(comm: Any) -> Any:
        device = devices[comm.rank]
        stream = device.stream()
        ones, x = device.array(np.ones(4, np.float32)), device.empty(4, np.dtype(np.float32), stream)
        with device.working_on(stream):
            device.copy(ones, x, stream)
            y = comm.all_reduce(x, "k")
            comm.synchronize()
            return y.get().tolist()

    assert run_threads(comms, main) == [[3] * 4] * 3


def test_a_failure(world: tuple[Any, list[FakeDevice]]) -> None:
    comms, devices = world

    def main(comm: Any) -> Any:
        if comm.rank == 1:
            return None
        x = devices[comm.rank].array(np.ones(2))

        def call() -> None:
            comm.all_reduce(x, "k", timeout=0.2)
            comm.synchronize()

        with pytest.raises(CollectiveTimeout) as caught:
            call()
        return caught.value.missing

    assert (1,) in run_threads(comms, main)
