"""The parameter server: every push is applied once, by its owner; waits between ranks, and staleness of pulls."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kfcomm import Communicator, sync
from kfcomm.elastic import Elastic, ElasticSampler, State
from kfcomm.errors import CollectiveMismatch, ConfigError
from kfcomm.testing import run_ranks, run_threads, sync_world, world
from kfcomm.train import ParameterServer, leaves, shards
from tests.elastic.support import Died, die
from tests.train.merging import converted

MODEL = {"a": np.zeros((4, 4), np.float32), "b": [np.zeros(3), np.zeros(7, np.float32)], "c": np.zeros(1)}


def descend(arrays: dict[str, Any], gradients: dict[str, Any]) -> dict[str, Any]:
    return {name: x - 0.5 * gradients[name] for name, x in arrays.items()}


def ones(factor: float) -> Any:
    return {
        "a": np.full((4, 4), factor, np.float32), "b": [np.full(3, factor), np.full(7, factor, np.float32)],
        "c": np.full(1, factor),
    }  # fmt: skip


@given(st.dictionaries(st.text(min_size=1), st.integers(0, 10**6), max_size=30), st.integers(1, 9))
def test_parts_are_even(nbytes: dict[str, int], size: int) -> None:
    of = shards(nbytes, size)
    assert of.keys() == nbytes.keys()
    loads = [sum(nbytes[name] for name, rank in of.items() if rank == mine) for mine in range(size)]
    assert max(loads) <= sum(loads) / size + max(nbytes.values(), default=0)


async def work(comm: Communicator, pushes: int) -> tuple[Any, ParameterServer]:
    server = ParameterServer(comm, MODEL, descend)
    serving = server.serve()
    for _ in range(pushes):
        await server.pull()
        await server.push(ones(comm.rank + 1.0))
    await server.finish()
    await serving
    await comm.barrier()
    return await server.pull(), server


@pytest.mark.asyncio
@pytest.mark.parametrize("size", [1, 3, 6])
async def test_every_push_is_applied_once(size: int) -> None:
    """With gradients that do not depend on the model the order does not matter."""
    async with world(size) as comms:
        found = await run_ranks(comms, lambda comm: work(comm, 5))
    expected = -0.5 * 5 * sum(range(1, size + 1))
    for model, server in found:
        assert model["a"].shape == (4, 4)
        assert isinstance(model["b"], list)
        for one in (model["a"], *model["b"], model["c"]):
            assert one == pytest.approx(np.full(one.shape, expected))
        assert server.num_applied == (5 * size if server.comm.rank in server.owners.values() else 0)
        assert server.staleness == 0


def test_blocking_ranks_serve_on_a_thread() -> None:
    def main(comm: sync.Communicator) -> Any:
        server = ParameterServer(comm, MODEL, descend)
        serving = threading.Thread(target=lambda: server.serve().wait())
        serving.start()
        for _ in range(5):
            server.pull().wait()
            server.push(ones(comm.rank + 1.0)).wait()
        server.finish().wait()
        serving.join()
        comm.barrier()
        return server.pull().wait()

    with sync_world(3) as comms:
        for model in run_threads(comms, main):
            assert model["a"] == pytest.approx(np.full((4, 4), -15.0))


@pytest.mark.asyncio
async def test_a_model_can_be_pulled_before_the_other_ranks_have_made_their_servers() -> None:
    async with world(2) as comms:
        early = ParameterServer(comms[0], MODEL, descend)
        pulled = early.pull()
        for _ in range(200):
            await asyncio.sleep(0)
        assert not pulled.done(), "rank 1 has saved nothing yet"
        late = ParameterServer(comms[1], MODEL, descend)
        for model in (await pulled, await late.pull()):
            assert model["a"] == pytest.approx(MODEL["a"])


@pytest.mark.asyncio
async def test_giving_up_a_pull_leaves_the_servers_to_meet() -> None:
    async with world(2) as comms:
        first = ParameterServer(comms[0], MODEL, descend)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(first.pull(), 0.01)  # the other has no server to pull from
        second = ParameterServer(comms[1], MODEL, descend)
        for pulled in await asyncio.gather(first.pull(), second.pull()):
            np.testing.assert_array_equal(pulled["a"], MODEL["a"])


@pytest.mark.asyncio
async def test_a_worker_is_so_many_pushes_ahead_of_an_owner_and_no_more() -> None:
    async with world(2) as comms:
        ahead, owner = (ParameterServer(comm, MODEL, descend, staleness=2) for comm in comms)
        for _ in range(2):
            await ahead.push(ones(1.0))
        await ahead.pull()
        assert ahead.staleness == 2
        assert comms[0].statistics().gauges["staleness"] == 2
        third = ahead.push(ones(1.0))
        for _ in range(200):
            await asyncio.sleep(0)
        assert not third.done(), "the owner has taken nothing yet"
        serving = [owner.serve(), ahead.serve()]
        await third
        await asyncio.gather(ahead.finish(), owner.finish())
        await asyncio.gather(*serving)
        await ahead.pull()
        assert ahead.staleness == 0


@pytest.mark.asyncio
async def test_servers_that_differ_see_both_sides() -> None:
    async def main(comm: Communicator) -> None:
        server = ParameterServer(comm, MODEL, descend, staleness=2 + comm.rank)
        with pytest.raises(CollectiveMismatch, match=r"rank 0 has ParameterServer\(staleness=2\); rank 1 has"):
            await server.serve()

    async with world(2) as comms:
        await run_ranks(comms, main)


@pytest.mark.asyncio
async def test_a_number_that_cannot_be_is_an_error_on_all_ranks() -> None:
    async def main(comm: Communicator) -> str:
        with pytest.raises(ConfigError) as caught:
            await ParameterServer(comm, MODEL, descend, staleness=0 if comm.rank else 3).serve()
        return str(caught.value)

    async with world(2) as comms:
        other, bad = await run_ranks(comms, main)
    assert bad == "ParameterServer(staleness=0): staleness is a whole number, at least 1, not 0"
    assert other == f"rank 1 has {bad}; rank 0 has ParameterServer(staleness=3)"


@pytest.mark.asyncio
async def test_state_spreads_the_model_anew_over_other_ranks() -> None:
    async with world(3) as comms:
        states = [server.state_dict() for _, server in await run_ranks(comms, lambda comm: work(comm, 5))]
    expected = leaves(ones(-0.5 * 5 * 6))
    for state in states:
        assert all(np.array_equal(state["known"][name], x) for name, x in expected.items())
    async with world(2) as comms:

        async def main(comm: Communicator) -> Any:
            server = ParameterServer(comm, MODEL, descend)
            with pytest.raises(ConfigError, match=r"known of ParameterServer.*: arrays of one side only: d"):
                server.load_state_dict(states[0] | {"known": states[0]["known"] | {"d": np.ones(1)}})
            (state, *_) = converted(states, server.merging(), 2)
            server.load_state_dict(state)
            serving = server.serve()
            await server.push(ones(1.0))
            await server.finish()
            await serving
            await comm.barrier()
            return await server.pull()

        for model in await run_ranks(comms, main):
            assert all(np.allclose(leaves(model)[name], x - 0.5 * 2) for name, x in expected.items())


@pytest.mark.asyncio
async def test_parts_move_to_the_ranks_of_each_step() -> None:
    """A rank joins, and one is lost: no push of a living rank is lost, and all see one model after each step."""
    async with world(3, elastic=True, timeout=60) as comms:
        tasks: list[asyncio.Task[None]] = []
        ended: list[Any] = []

        async def train(comm: Any) -> None:
            server = ParameterServer(comm, MODEL, descend)
            state = State(server=server, number=0, total=0.0, since=0)
            async with Elastic(comm, state) as elastic:
                async for _ in elastic.steps(ElasticSampler(1 << 12, 1)):
                    if comm.rank == 0 and state.number == 2:
                        tasks.append(asyncio.ensure_future(join()))
                    if comm.births[comm.rank] == 1 and state.since == 3:
                        die(comms, comm)
                    if 1 in comm.births and state.since == 3:
                        assert (await comm.all_reduce(np.ones(1), "lives"))[0] == 3
                        state.since += 1
                        continue
                    serving = server.serve()
                    await server.push(ones(1.0))
                    await server.finish()
                    await serving
                    await comm.all_reduce(np.ones(1), "pushed")
                    model = leaves(await server.pull())
                    state.total += comm.size
                    assert all(np.allclose(model[one], x) for one, x in leaves(ones(-0.5 * state.total)).items())
                    state.number += 1
                    state.since += 9 in comm.births
                    if state.since == 7:
                        ended.append(comm.births)
                        return

        async def join() -> None:
            await train(await comms.join(9))

        tasks += [asyncio.ensure_future(train(comm)) for comm in comms]
        while tasks:
            with contextlib.suppress(Died):
                await tasks.pop()
        assert ended == [(0, 2, 9)] * 3
