"""A strategy for one call of device memory: it goes through the host, whatever the group's route."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kfcomm import strategies
from kfcomm.errors import CollectiveAborted, CollectiveMismatch, ConfigError
from tests.collectives.on_device.worlds import device_world
from tests.conformance import oracle
from tests.conformance.worlds import assert_kinds, same_bits

ROUTES: dict[str, dict[str, Any]] = {"backend": {}, "staged": {"backend": ""}, "hierarchy": {"hosts": 2}}
"""Options of a world whose group takes this route."""


@pytest.mark.asyncio
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("length", [5, 5000])
async def test_call_follows_its_own_graphs(route: str, length: int) -> None:
    """The bits of sums of random numbers tell them; the calls between go where they went before."""
    xs = [oracle.data("float32", length, rank) for rank in range(4)]
    async with device_world(4, strategy="star", **ROUTES[route]) as world:
        layout = world.comms[0].layout

        def call(comm: Any, **options: Any) -> Any:
            return comm.all_reduce(world.array(comm, xs[comm.rank]), "x", **options)

        for spec in ("ring", "binary_tree", "clique") * 3:
            want = oracle.all_reduced("sum", xs, strategies.build(spec, layout), "x")
            before = len(world.fabric.launched)
            got = await world.everywhere(lambda c, spec=spec: call(c, strategy=spec))
            assert all(same_bits(one, want) for one in got), spec
            assert len(world.fabric.launched) == before
            for one in await world.everywhere(call):
                np.testing.assert_allclose(one, want, rtol=1e-4, atol=1e-5)
            assert (len(world.fabric.launched) > before) is (route != "staged")


CALLS: dict[str, Callable[..., Any]] = {
    "list": lambda comm, x, **options: comm.all_reduce([x, x], "x", **options),
    "many": lambda comm, x, **options: comm.all_reduce_many({"a": x, "b": x}, "x", **options),
    "reduce_scatter of a list": lambda comm, x, **options: comm.reduce_scatter([x] * comm.size, "x", **options),
    "concat": lambda comm, x, **options: comm.all_gather(x, "x", concat=True, **options),
    "all_reduce": lambda comm, x, **options: comm.all_reduce(x, "x", **options),
    "monitored": lambda comm, x, **options: comm.monitored_all_reduce(x, "x", **options),
}


@pytest.mark.asyncio
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("verb", CALLS)
async def test_ranks_that_disagree_hear_of_it(verb: str, route: str) -> None:
    """Of two strategies, and of one and none."""
    size = 4 if route == "hierarchy" else 3
    async with device_world(size, strategy="star", aborted=True, **ROUTES[route]) as world:
        for others in ("binary_tree", None):
            outcomes = await world.ends(
                lambda c, others=others: CALLS[verb](
                    c, world.array(c, [1.0]), strategy="ring" if c.rank == 1 else others
                )
            )
            assert_kinds(outcomes, CollectiveMismatch)
            assert all("ring" in str(one) for one in outcomes), outcomes
        await world.works()


@pytest.mark.asyncio
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("verb", CALLS)
async def test_strategy_that_cannot_be_fails_the_call_everywhere(verb: str, route: str) -> None:
    size = 4 if route == "hierarchy" else 3
    async with device_world(size, aborted=True, **ROUTES[route]) as world:
        outcomes = await world.ends(
            lambda c: CALLS[verb](c, world.array(c, [1.0]), strategy="no such" if c.rank == 0 else None)
        )
        assert_kinds(outcomes, *(ConfigError if rank == 0 else CollectiveAborted for rank in range(size)))
        await world.works()
