"""Averages in pairs by hand and over communicators; draws of peers are as likely as they should be (chi-squared)."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kfcomm import Communicator, sync
from kfcomm.errors import CollectiveMismatch, ConfigError, PeerLost
from kfcomm.testing import run_ranks, run_threads, sync_world, world
from kfcomm.train import Agreement, PairAveraging, Peers, RoundRobin, swapped
from kfcomm.train.packing import Packing


@pytest.mark.asyncio
async def test_two_ranks_by_hand() -> None:
    async with world(2) as comms:
        ways = [PairAveraging(comm, {"w": np.zeros(3)}) for comm in comms]
        await asyncio.gather(*(way.parameters({"w": np.zeros(3)}) for way in ways))
        found = await ways[0].parameters({"w": np.full(3, 10.0)})  # with rank 1's of the step before
        assert np.array_equal(found["w"], np.full(3, 5.0))
        assert (ways[0].age, ways[0].staleness) == (0.5, 1.0)
        found = await ways[1].parameters({"w": np.full(3, 20.0)})  # with what rank 0 has published: 10
        assert np.array_equal(found["w"], np.full(3, 15.0))
        assert (ways[1].age, ways[1].staleness) == (1.0, 0.0)


@pytest.mark.asyncio
@pytest.mark.parametrize("ahead", [None, True])
async def test_model_of_another_host_comes_a_step_ahead(ahead: bool | None) -> None:
    async with world(2, hosts=1 if ahead else 2) as comms:
        ways = [PairAveraging(comm, np.zeros(3), ahead=ahead) for comm in comms]
        await asyncio.gather(*(way.parameters(np.zeros(3)) for way in ways))
        await asyncio.gather(*(comm.request("pair-averaging/model", 1 - comm.rank) for comm in comms))
        # by now, later than what was asked for before, each has the model of the other's first step
        found = await ways[0].parameters(np.full(3, 10.0))
        assert np.array_equal(found, np.full(3, 5.0))
        assert (ways[0].age, ways[0].staleness) == (0.5, 1.0)
        found = await ways[1].parameters(np.full(3, 20.0))  # not with 10, which was published since
        assert np.array_equal(found, np.full(3, 10.0))
        assert (ways[1].age, ways[1].staleness) == (0.5, 1.0)
        found = await ways[1].parameters(np.full(3, 30.0))
        assert np.array_equal(found, np.full(3, 20.0))
        assert (ways[1].age, ways[1].staleness) == (1.25, 0.5)


@pytest.mark.asyncio
async def test_same_peers_are_asked_ahead_or_not() -> None:
    async with world(4) as comms:
        models, found = [np.full(1, 10.0**comm.rank) for comm in comms], []
        for ahead in (False, True):
            ways = [
                PairAveraging(comm, model, ahead=ahead, seed=5, name=f"{ahead}")
                for comm, model in zip(comms, models, strict=True)
            ]
            means = [
                await asyncio.gather(*(way.parameters(model) for way, model in zip(ways, models, strict=True)))
                for _ in range(10)
            ]
            found.append(np.array(means))
            assert [way.state_dict()["num_drawn"] for way in ways] == [10] * 4
        assert np.array_equal(*found)
        assert len(np.unique(found[0])) > 4


@pytest.mark.asyncio
async def test_error_of_a_model_asked_ahead_is_raised_by_the_next_step(caplog: pytest.LogCaptureFixture) -> None:
    async with world(2) as comms:
        ways = [PairAveraging(comm, np.zeros(3), ahead=True) for comm in comms]
        await asyncio.gather(*(way.parameters(np.zeros(3)) for way in ways))
        await asyncio.gather(*(comm.request("pair-averaging/model", 1 - comm.rank) for comm in comms))
        comms.kill(1)
        await ways[0].parameters(np.zeros(3))  # with what has come before
        with pytest.raises(PeerLost, match="rank 1"):
            await ways[0].parameters(np.zeros(3))
    assert "never retrieved" not in caplog.text


@pytest.mark.asyncio
async def test_a_rank_goes_on_alone_while_the_others_do_nothing() -> None:
    async with world(3) as comms:
        ways = [PairAveraging(comm, np.zeros(4)) for comm in comms]
        await asyncio.gather(*(way.parameters(np.zeros(4)) for way in ways))
        x: Any = np.zeros(4)
        for _ in range(20):
            x = await ways[0].parameters(x) + 1.0
        assert ways[0].num_steps == 21
        assert [way.num_steps for way in ways[1:]] == [1, 1]
        # with halves from peers at 0 the age a goes to (a + 1) / 2, which is 1 in the end
        assert ways[0].age == pytest.approx(1.0, abs=1e-4)
        assert ways[0].staleness == pytest.approx(2.0, abs=1e-4)
        assert x[0] == pytest.approx(2.0, abs=1e-4)


@pytest.mark.asyncio
async def test_stale_model_is_skipped_and_counted() -> None:
    async with world(2) as comms:
        ways = [PairAveraging(comm, np.zeros(4), max_staleness=0.6) for comm in comms]
        await asyncio.gather(*(way.parameters(np.zeros(4)) for way in ways))
        found = await ways[0].parameters(np.full(4, 8.0))
        assert np.array_equal(found, np.full(4, 8.0))
        assert (ways[0].num_left_out, ways[0].staleness, ways[0].age) == (1, 1.0, 1.0)


def test_blocking_ranks_come_to_a_consensus() -> None:
    def main(comm: sync.Communicator) -> Any:
        x: Any = [np.full(5, float(comm.rank), np.float32)]
        way = PairAveraging(comm, x, seed=1)
        for _ in range(30):
            pending = way.parameters(x)
            x = pending.wait()
        comm.barrier()
        return x[0]

    with sync_world(4) as comms:
        found = np.array(run_threads(comms, main))
    assert found.dtype == np.float32
    assert np.ptp(found) < 0.01
    assert 0 < found.mean() < 3


@pytest.mark.asyncio
async def test_one_rank_is_alone_with_its_model() -> None:
    async with world(1) as comms:
        x = np.ones(2)
        assert await PairAveraging(comms[0], x).parameters(x) is x


def test_a_model_of_another_form_is_refused() -> None:
    packing = Packing({"a": np.zeros(2), "b": np.zeros(3, np.float32)}, num_head=2)
    tree = {"b": np.arange(3, dtype=np.float32), "a": np.array([1.5, 2.5])}
    blob = packing.pack(tree, [7.0, 8.0])
    assert blob.nbytes == packing.nbytes
    found, head = packing.unpack(blob, tree)
    assert head == [7.0, 8.0]
    assert np.array_equal(found["a"], tree["a"])
    assert np.array_equal(found["b"], tree["b"])
    other = Packing({"a": np.zeros(2), "b": np.zeros((3, 1), np.float32)}, num_head=2)
    with pytest.raises(CollectiveMismatch, match="other names, shapes or dtypes"):
        other.unpack(blob, tree)


DRAWS = 100_000
CRITICAL = {3: 21.11, 4: 23.51, 7: 29.88}
"""Of the chi-squared distribution, by degrees of freedom: exceeded by chance once in 10,000 times."""


def chi_squared(peers: Peers, expected: Sequence[float]) -> float:
    counts = Counter(peers.draw() for _ in range(DRAWS))
    whole = sum(expected)
    return sum(
        (counts[rank] - DRAWS * one / whole) ** 2 / (DRAWS * one / whole) for rank, one in enumerate(expected) if one
    )


@pytest.mark.parametrize("rank", [0, 2, 4])
def test_all_others_are_equally_likely(rank: int) -> None:
    expected = [float(peer != rank) for peer in range(5)]
    assert chi_squared(Peers(rank, 5, seed=7), expected) < CRITICAL[3]


def test_weights_are_probabilities() -> None:
    weights = [5.0, 100.0, 1.0, 2.0, 3.0]
    expected = [5.0, 0.0, 1.0, 2.0, 3.0]
    assert chi_squared(Peers(1, 5, seed=3, weights=weights), expected) < CRITICAL[3]
    without = Peers(0, 3, weights=[1.0, 0.0, 2.0])
    assert {without.draw() for _ in range(100)} == {2}


@given(st.integers(2, 20), st.integers(0, 1000), st.data())
def test_ranks_never_draw_themselves_and_a_seed_repeats_the_draws(size: int, seed: int, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, size - 1))
    one, other = Peers(rank, size, seed=seed), Peers(rank, size, seed=seed)
    drawn = [one.draw() for _ in range(50)]
    assert drawn == [other.draw() for _ in range(50)]
    assert rank not in drawn
    assert all(0 <= peer < size for peer in drawn)


def test_peers_without_others_or_with_bad_weights_are_refused() -> None:
    with pytest.raises(ConfigError, match="no peers"):
        Peers(0, 1)
    for weights in ([1.0, 1.0], [1.0, 0.0, 0.0], [0.0, -1.0, 2.0], [0.0, float("nan"), 1.0]):
        with pytest.raises(ConfigError, match="weights"):
            Peers(0, 3, weights=weights)


@given(st.integers(2, 9), st.integers(0, 50), st.booleans())
def test_draws_can_be_left_out(size: int, drawn: int, has_weights: bool) -> None:
    weights = [1.0 + rank for rank in range(size)] if has_weights else None
    whole, rest = Peers(1, size, seed=5, weights=weights), Peers(1, size, seed=5, weights=weights, drawn=drawn)
    assert [whole.draw() for _ in range(drawn + 20)][drawn:] == [rest.draw() for _ in range(20)]


@given(st.integers(2, 9), st.integers(0, 50), st.data())
def test_round_robin_asks_each_of_the_others_before_any_again(size: int, drawn: int, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, size - 1))
    whole, rest = RoundRobin(rank, size), RoundRobin(rank, size, drawn=drawn)
    asked = [whole.draw() for _ in range(drawn + 3 * size)]
    assert asked[drawn:] == [rest.draw() for _ in range(3 * size)]
    for first in range(len(asked) - size + 1):
        assert set(asked[first : first + size - 1]) == set(range(size)) - {rank}


@pytest.mark.asyncio
async def test_round_robin_peers_of_ranks_in_lockstep() -> None:
    async with world(3) as comms:
        ways = [PairAveraging(comm, np.zeros(1), peers="round-robin") for comm in comms]
        models: list[Any] = [np.full(1, float(rank)) for rank in range(3)]
        await asyncio.gather(*(way.parameters(x) for way, x in zip(ways, models, strict=True)))
        assert (await ways[0].parameters(models[0])).tolist() == [1.0], "rank 0 has asked rank 1, and asks rank 2"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"peers": "ring"}, "peers is one of random, round-robin, not 'ring'"),
        ({"peers": "round-robin", "weights": [1.0, 1.0]}, "weights are of random peers"),
    ],
)
@pytest.mark.asyncio
async def test_peers_that_cannot_be(options: dict[str, Any], says: str) -> None:
    async def main(comm: Communicator) -> None:
        with pytest.raises(ConfigError, match=says):
            PairAveraging(comm, np.zeros(2), **options)

    async with world(2) as comms:
        await run_ranks(comms, main)


class Swap(Agreement):
    """Continue with the model of the other one of two ranks."""

    default_name = "swap"

    def __init__(self, comm: Any) -> None:
        super().__init__(comm, None, {})

    def _parameters(self, tree: Any) -> Any:
        return (yield from swapped(self.comm, tree, 1 - self.comm.rank, "swap"))


@pytest.mark.asyncio
async def test_swapped_trees_are_alike_or_refused() -> None:
    async def main(comm: Communicator) -> Any:
        way = Swap(comm)
        found = await way.parameters({"a": np.full(2, comm.rank, np.float32), "b": [np.full(3, comm.rank)]})
        with pytest.raises(CollectiveMismatch, match="other names, shapes or dtypes"):
            await way.parameters(np.zeros(2 + comm.rank))
        return found

    async with world(2) as comms:
        for rank, found in enumerate(await run_ranks(comms, main)):
            assert found["a"].tolist() == [1 - rank] * 2
            assert found["b"][0].tolist() == [1 - rank] * 3


@pytest.mark.asyncio
async def test_swap_with_a_lost_rank_is_an_error_outside_of_elastic_jobs() -> None:
    async with world(2, timeout=20) as comms:
        ways = [Swap(comm) for comm in comms]
        await asyncio.gather(*(way.parameters(np.zeros(1)) for way in ways))
        comms.kill(1)
        with pytest.raises(PeerLost):
            await ways[0].parameters(np.zeros(1))
