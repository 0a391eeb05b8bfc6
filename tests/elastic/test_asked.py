"""Ranks that are asked to go by name, as when their host is to be given back."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from kfcomm.elastic import Elastic, ElasticSampler, State
from kfcomm.testing import world

LENGTH = 400


async def train(comm: Any) -> tuple[bool, set[float], tuple[int, ...]]:
    """Train one pass; whether this rank was released, how often samples were used, and who was there in the end."""
    state = State(used=np.zeros(LENGTH))
    async with Elastic(comm, state) as elastic:
        async for step in elastic.steps(ElasticSampler(LENGTH, 4), used_in="used"):
            mask = np.zeros(LENGTH)
            mask[step.indices] = 1
            state.used += await comm.all_reduce(mask, "used")
    return elastic.is_released, set(state.used.tolist()), comm.births


@pytest.mark.parametrize(
    ("size", "leavers", "joiners", "left"),
    [
        (4, (2, 3), (), (0, 1)),
        (4, (0, 2), (5, 6), (1, 3, 5, 6)),
        (1, (0, 1), (), (2,)),
        (4, (0, 1, 2, 3), (), (0,)),
        (4, (0, 1, 2, 3), (7,), (7,)),
    ],
    ids=["of one host", "from one host to another", "and fewer", "all but who has the state", "until others have it"],
)
@pytest.mark.asyncio
async def test_replaced_rank_leaves(
    size: int, leavers: tuple[int, ...], joiners: tuple[int, ...], left: tuple[int, ...]
) -> None:
    async with world(4, elastic=True) as comms:
        comms.store.set_size(size, leavers)

        async def new(birth: int) -> Any:
            return await train(await comms.join(birth))

        members = {birth: asyncio.ensure_future(train(comms[birth])) for birth in range(4)}
        members |= {birth: asyncio.ensure_future(new(birth)) for birth in joiners}
        said = dict(zip(members, await asyncio.gather(*members.values()), strict=True))
        for birth, (is_released, used, births) in said.items():
            assert is_released == (birth not in left)
            if not is_released:
                assert (used, births) == ({1.0}, left)
