"""Changes of strategy without a place in the order of calls: each use of a name has the graphs of one strategy."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from kfcomm import strategies
from kfcomm.collectives.transition import first_uses
from kfcomm.strategies import AnyStrategy
from tests.collectives.mixed_programs import MixedProgram
from tests.conformance.worlds import same_bits, turns, world

GENERATION = 1 << 20
NAMES = ["star", "ring", "binary_tree", "clique", "auto", "halving_doubling"]


async def _change(comms: Any, strategy: AnyStrategy, number: int, pause: Callable[[], Awaitable[None]]) -> bool:
    """Change as a program would that directs all ranks: rank 0 does not wait, the others do from their turn on."""
    told = []
    for comm in comms[1:]:
        told.append(comm._group.hold())
        await pause()
    is_wanted = None not in told and not comms[0]._group.is_set
    first = first_uses([comms[0]._group.uses(), *[one for one in told if one is not None]])
    for comm, uses in zip(comms, [{}, *told], strict=True):
        if is_wanted:
            comm._group.change(strategy, comm.layout, GENERATION + number, first)
        if comm is not comms[0] and uses is not None:
            comm._group.release()
        await pause()
    return is_wanted


@pytest.mark.asyncio
@pytest.mark.parametrize("seed", range(30))
async def test_random_programs_while_the_graphs_change(seed: int) -> None:
    """Results are the same bits on all ranks, for each use, and near the sum; cancelled uses end everywhere."""
    shared = random.Random(seed)
    size = shared.randint(2, 6)
    program = MixedProgram(seed, size)
    async with world(size, hosts=shared.randint(1, size), strategy=shared.choice(NAMES)) as comms:

        async def changes() -> int:
            count = 0
            for number in range(shared.randint(1, 6)):
                await turns(shared.randrange(40))
                chosen = strategies.build(shared.choice(NAMES), comms[0].layout)
                order = [comms[0], *shared.sample(list(comms)[1:], size - 1)]
                count += await _change(order, chosen, number, lambda: turns(shared.randrange(6)))
                assert {comm.strategy.digest for comm in comms} == {chosen.digest}
            return count

        changing = asyncio.ensure_future(changes())
        mine = [random.Random(100 * seed + rank) for rank in range(size)]
        results = await asyncio.gather(*(program.run(comm, mine[comm.rank]) for comm in comms))
        assert await changing
        program.check(results)


@pytest.mark.asyncio
@pytest.mark.parametrize("seed", range(10))
async def test_program_that_sets_a_strategy_meanwhile_keeps_it(seed: int) -> None:
    """Changes end where ``set_strategy`` was called; until then each is before it, on all ranks."""
    shared = random.Random(seed)
    names = ["~a", "~b", "~c"]  # of which several uses may be in flight
    async with world(3, hosts=3, strategy="auto") as comms:
        counts = [shared.randrange(1, 8) for _ in range(3)]

        async def main(comm: Any) -> list[Any]:
            mine, found = random.Random(seed * 10 + comm.rank), []
            for name in mine.sample(names, 3):
                for _ in range(counts[names.index(name)]):
                    await turns(mine.randrange(10))
                    found.append((name, comm.all_reduce(np.ones(50) / (comm.rank + 3), name)))
                    await turns(mine.randrange(30))
            setting = comm.set_strategy("binary_tree")
            found += [(name, comm.all_reduce(np.ones(50), name)) for name in mine.sample(names, 3)]
            await setting
            return [(name, await one) for name, one in found]

        changing = asyncio.ensure_future(
            _change(comms, strategies.build("star", comms[0].layout), 1, lambda: turns(shared.randrange(12)))
        )
        results = [sorted(one, key=lambda pair: pair[0]) for one in await asyncio.gather(*map(main, comms))]
        await changing
        for one in results[1:]:
            assert all(same_bits(a[1], b[1]) for a, b in zip(results[0], one, strict=True))
        assert {comm.strategy.name for comm in comms} == {"binary_tree"}


@pytest.mark.asyncio
async def test_names_change_at_the_first_use_that_no_rank_has_begun() -> None:
    """Two ranks are at unlike uses of two names: messages of each use go along the graphs of its own time."""
    async with world(2, hosts=2, strategy="star") as comms:
        ahead = [comms[0].all_reduce(np.ones(3), "a"), comms[1].all_reduce(np.ones(3), "b")]
        await turns()
        await _change(comms, strategies.build("ring", comms[0].layout), 0, turns)
        behind = [comms[1].all_reduce(np.ones(3), "a"), comms[0].all_reduce(np.ones(3), "b")]
        assert [one.tolist() for one in await asyncio.gather(*ahead, *behind)] == [[2.0] * 3] * 4
        later = [comm.all_reduce(np.ones(3), name) for name in "ab" for comm in comms]
        assert [one.tolist() for one in await asyncio.gather(*later)] == [[2.0] * 3] * 4
        assert {comm.strategy.name for comm in comms} == {"ring"}
