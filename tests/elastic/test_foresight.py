"""Graphs that surviving ranks need after a loss are built before it, while training continues."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from kfcomm.elastic import Elastic, ElasticSampler, State
from kfcomm.strategies import auto
from kfcomm.testing import world
from kfcomm.types import Layout
from tests.elastic.support import Died, die


@pytest.mark.parametrize("strategy", [None, "ring"])
@pytest.mark.asyncio
async def test_no_graph_is_chosen_in_the_pause_after_a_loss(strategy: str | None, monkeypatch: Any) -> None:
    chosen: list[int] = []
    plain = auto.auto

    def counted(layout: Layout, *args: Any) -> Any:
        chosen.append(layout.size)
        return plain(layout, *args)

    auto.auto_before.cache_clear()
    monkeypatch.setattr(auto, "auto", counted)
    options = {} if strategy is None else {"strategy": strategy}
    async with world(3, elastic=True, **options) as comms:

        async def train(comm: Any) -> tuple[int, list[int]]:
            async with Elastic(comm, State(step=0)) as elastic:
                async for _ in elastic.steps(ElasticSampler(1 << 20, 1, seed=None)):
                    is_ahead = np.array([strategy is not None or 2 in chosen])
                    if (await comm.all_reduce(is_ahead, name="all are", op="and"))[0]:
                        if comm.size == 2:
                            break
                        if comm.rank == 1:
                            die(comms, comm)
            return comm.size, list(chosen)

        found = await asyncio.gather(*(train(comm) for comm in comms), return_exceptions=True)
    assert isinstance(found[1], Died)
    for size, counts in (found[0], found[2]):
        assert size == 2
        # Each layout once; perhaps by now also that of one rank, which may be needed next.
        assert counts[:2] == [3, 2] if strategy is None else not counts
        assert counts[2:] in ([], [1])
