"""Persistent collectives of device memory: each start is a call of the verb, with what the memory holds then."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kfcomm.errors import CollectiveAborted, ConfigError
from tests.collectives.on_device.worlds import device_world
from tests.conformance.worlds import assert_kinds, ends, everywhere

SIZE = 4
BASE = np.arange(12, dtype=np.float32).reshape(4, 3)


@pytest.mark.asyncio
@pytest.mark.parametrize("backend", ["fake", ""])
async def test_in_place_each_start_goes_on_from_the_last_result(backend: str) -> None:
    async with device_world(SIZE, backend=backend) as world:
        xs = [world.array(comm, BASE) for comm in world.comms]
        prepared = [comm.all_reduce_init(xs[comm.rank], "k", out=xs[comm.rank]) for comm in world.comms]
        for number in range(1, 4):
            results = await everywhere(world.comms, lambda comm: prepared[comm.rank].start())
            await everywhere(world.comms, lambda comm: comm.synchronize())
            for result, x in zip(results, xs, strict=True):
                assert result is x
                np.testing.assert_array_equal(x.get(), BASE * SIZE**number)


@pytest.mark.asyncio
async def test_messages() -> None:
    async with device_world(2) as world:
        first, second = world.comms
        sent, received = first.send_init(world.array(first, BASE), 1, "t"), second.recv_init(0, "t")
        for _ in range(3):
            sent.start()
            np.testing.assert_array_equal(await received.start(), BASE)
            await sent


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("verb", "options", "message"),
    [
        ("all_reduce", {"wire_dtype": "float16"}, "wire_dtype is for arrays in host memory"),
        ("all_reduce", {"op": "xor"}, "xor"),
        ("all_reduce", {"out": np.empty((4, 3), np.float32)}, "expected an array in the memory of a device"),
        ("reduce", {"root": 4}, "not a rank"),
        ("all_to_all", {"name": ""}, "expected a name"),
        ("all_reduce_many", {"op": "xor"}, "xor"),
    ],
)
async def test_arguments_are_checked_at_the_first_start(verb: str, options: dict[str, Any], message: str) -> None:
    """But for the name, which is checked when it is prepared. Calls of other ranks hear of it, as of a verb's."""
    async with device_world(SIZE, aborted=True) as world:

        def given(comm: Any) -> Any:
            x = world.array(comm, BASE)
            return {"k": x} if verb == "all_reduce_many" else x

        comm = world.comms[0]
        with pytest.raises(ConfigError, match=message):
            getattr(comm, f"{verb}_init")(given(comm), **options).start()
        if "name" not in options:
            others = await ends(world.comms[1:], lambda comm: getattr(comm, verb)(given(comm)))
            assert_kinds(others, *[CollectiveAborted] * (SIZE - 1))
        await world.works("k")
