"""Real processes over every transport, with every strategy, kind of array and API."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kfcomm import testing
from kfcomm.core.links import credit_of
from kfcomm.errors import CollectiveError
from tests.processes import roles
from tests.processes.covering import STRATEGIES, TRANSPORTS
from tests.processes.stage import Call, World, do, launched, start

SIZE = 4
BOOKS_NBYTES = 40 << 20
"""For what a thousand collectives in flight take besides their data: their machines, futures, frames and blocks, and
what the allocator cannot use between chunks that came early, 4 to 16 MiB, depending on which end first."""


@pytest.fixture(scope="module", params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> str:
    """One of the transports."""
    return str(request.param)


@pytest.fixture(scope="module")
def world(transport: str) -> Iterator[World]:
    """A job under the launcher, shared by the tests of this module: each leaves it usable."""
    with launched("-n", str(SIZE), "--transport", transport, size=SIZE) as made:
        made.do(roles.join)
        yield made
        made.finish()


@pytest.mark.parametrize(("strategy", "num_waiting"), [("ring", 0), ("auto", SIZE - 2)])
def test_a_thousand_names_in_different_orders_at_once(world: World, strategy: str, num_waiting: int) -> None:
    """Memory is bounded: by what is given and comes out, by credit, and by what waits for its turn to be added.

    A rank adds contributions in the order of the ranks, and keeps the others' until then; in a ring none waits.
    """
    names, elements = 1000, 16384
    world.do(roles.strategy, name=strategy)
    world.do(roles.show, seed=0, names=10, elements=elements)
    before = world.do(roles.memory, reset=True)
    assert world.do(roles.show, seed=1, names=names, elements=elements) == [0] * SIZE
    early = (SIZE - 1) * credit_of(SIZE).nbytes
    inputs_and_results = 2 * names * elements * 4
    waiting = num_waiting * names * elements * 4
    for rank, after in enumerate(world.do(roles.memory)):
        grown = after["peak"] - before[rank]["now"]
        assert grown < inputs_and_results + early + waiting + BOOKS_NBYTES, rank


async def sums_in_memory(elements: int) -> list[str]:
    async with testing.world(SIZE) as comms:
        return [
            (await testing.run_ranks(comms, lambda comm, name=name: roles.digest_under(comm, name, elements)))[0]
            for name in STRATEGIES
        ]


@pytest.mark.asyncio
@pytest.mark.parametrize("elements", [5, 100_000])
async def test_the_same_bits_over_every_transport(world: World, elements: int) -> None:
    expected = await sums_in_memory(elements)
    assert world.do(roles.sums, strategies=STRATEGIES, elements=elements) == [expected] * SIZE


@pytest.mark.parametrize(("strategy", "elements"), [("star", 8), ("ring", 1 << 20)])
def test_a_broken_link_fails_what_it_carried_and_is_opened_anew(world: World, strategy: str, elements: int) -> None:
    world.do(roles.strategy, name=strategy)
    world.do(roles.all_reduce, name="before", elements=elements)
    calls = start(world[:3], roles.all_reduce, name="x", elements=elements)
    assert all(do(world[:3], roles.has_posted, name="x"))  # by now rank 1 has sent some of it
    assert world[1].do(roles.unplug).result() >= 2
    for call in calls:
        link_broke(call)
    link_broke(world[3].do(roles.all_reduce, name="x", elements=elements))  # which needs what rank 0 has given up
    for name in ("x", "y", "x"):
        assert len(set(world.do(roles.all_reduce, name=name, elements=elements))) == 1


def link_broke(call: Call) -> None:
    """It failed by a broken link, and says so."""
    failure = call.failure(CollectiveError)
    assert "PeerLost" not in failure.kinds
    assert "the link between ranks" in failure.message
