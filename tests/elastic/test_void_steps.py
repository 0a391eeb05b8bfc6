"""Steps that count for nothing, samples that are set aside, and returns to a copy in memory."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from kfcomm.elastic import Elastic, ElasticCommunicator, ElasticSampler, PerRank, State
from kfcomm.errors import CollectiveMismatch, ConfigError
from kfcomm.testing import Join, Kill, Resize, run_in_virtual_time, run_ranks, run_threads, sync_world, world

LENGTH, BATCH = 60, 4


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.asyncio
async def test_samples_of_a_void_step_are_given_again_in_the_pass(size: int) -> None:
    async with world(size, elastic=True) as comms:

        async def main(comm: Any) -> Any:
            state, void = State(used=np.zeros(LENGTH)), []
            async with Elastic(comm, state) as elastic:
                async for step in elastic.steps(ElasticSampler(LENGTH, BATCH), passes=2, used_in="used"):
                    mask = np.zeros(LENGTH)
                    mask[step.indices] = 1
                    total = await comm.all_reduce(mask, "used")
                    if step.number % 5 == 3:
                        void.append(step.batch.tolist())
                        step.void()
                        assert not step.counts
                    else:
                        state.used += total
            return state.used.tolist(), void

        found = await run_ranks(comms, main)
        assert found == [([2.0] * LENGTH, found[0][1])] * size
        assert len(found[0][1]) > 6


@pytest.mark.parametrize("ranks", [(1,), (0, 2)])
@pytest.mark.asyncio
async def test_step_that_is_void_on_some_ranks_raises_on_all(ranks: tuple[int, ...]) -> None:
    async with world(3, elastic=True) as comms:
        numbers = []

        async def train(comm: Any) -> None:
            async with Elastic(comm, State()) as elastic:
                async for step in elastic.steps(ElasticSampler(LENGTH, BATCH)):
                    numbers.append(step.number)
                    await comm.barrier()
                    if step.number == 3 and comm.rank in ranks:
                        step.void()

        async def main(comm: Any) -> None:
            named = "rank 1" if ranks == (1,) else "ranks 0, 2"
            with pytest.raises(ConfigError, match=rf"Step.void was called in step 3 on {named} only, of 3"):
                await train(comm)

        await run_ranks(comms, main)
        assert max(numbers) <= 4


@pytest.mark.asyncio
async def test_void_after_the_step_is_refused() -> None:
    async with world(1, elastic=True) as comms, Elastic(comms[0], State()) as elastic:
        last: Any = None
        async for step in elastic.steps(ElasticSampler(8, BATCH)):
            if last is not None:
                with pytest.raises(ConfigError, match="step 0 is over"):
                    last.void()
            last = step


def test_samples_set_aside_are_never_given_again() -> None:
    random = Random(5)
    for _ in range(200):
        length, batch = random.randrange(1, 30), random.randrange(1, 9)
        sampler = ElasticSampler(length, batch, seed=random.choice([None, 3]))
        aside: set[int] = set()
        for number in range(3):
            given: Counter[int] = Counter()
            fresh = aside.copy()
            while len(taken := sampler.take()):
                assert len(taken) == min(batch, len(taken) + sampler.left)
                assert not aside & set(taken.tolist())
                given.update(taken.tolist())
                if random.random() < 0.3:
                    sampler.give_back(taken)
                    given.subtract(taken.tolist())
                if random.random() < 0.3:
                    some = random.sample(range(length), random.randrange(min(3, length + 1)))
                    sampler.set_aside(some)
                    aside |= set(some)
                    assert sampler.aside == sorted(aside)
                if random.random() < 0.5:
                    other = ElasticSampler(length, batch, seed=sampler.seed)
                    other.load_state_dict(sampler.state_dict())
                    assert other.left == sampler.left
                    sampler = other
            assert sampler.left == 0
            assert all(given[one] == 1 for one in set(range(length)) - aside)
            assert not any(given[one] for one in fresh)
            assert sampler.passes == number
            sampler.end_pass()


def test_wrong_indices_are_not_set_aside() -> None:
    sampler = ElasticSampler(10, 2)
    for wrong, text in (
        (10, "is below 10, not 10"),
        (-1, "whole number from 0"),
        (1.5, "whole number"),
        ("1", "whole"),
    ):
        with pytest.raises(ConfigError, match=text):
            sampler.set_aside([0, wrong])  # type: ignore[list-item]
    assert sampler.aside == []
    sampler.set_aside(np.array([3, 3]))
    sampler.set_aside([])
    assert (sampler.aside, sampler.left) == ([3], 9)
    assert "1 set aside" in repr(sampler)
    sampler.set_aside(range(10))
    assert (sampler.left, len(sampler.take_until(2)), sampler.passes) == (0, 0, 2)


@pytest.mark.asyncio
async def test_ranks_that_set_aside_unlike_samples_raise() -> None:
    async with world(2, elastic=True) as comms:

        async def train(comm: Any) -> None:
            async with Elastic(comm, State()) as elastic:
                async for step in elastic.steps(ElasticSampler(LENGTH, BATCH)):
                    if step.number == 2 and comm.rank:
                        step.sampler.set_aside([1])
                    await comm.barrier()

        async def main(comm: Any) -> None:
            with pytest.raises(CollectiveMismatch, match="1 set aside"):
                await train(comm)

        await run_ranks(comms, main)


class Moving:
    """Object with state that counts."""

    def __init__(self) -> None:
        self.tree: dict[str, Any] = {"n": 0, "x": np.zeros(2)}

    def state_dict(self) -> dict[str, Any]:
        return self.tree

    def load_state_dict(self, tree: dict[str, Any]) -> None:
        self.tree = tree


def test_blocking_program_rolls_back_to_its_copy() -> None:
    with sync_world(2, elastic=True) as comms:

        def main(comm: Any) -> Any:
            own = np.full(2, float(comm.rank))
            state, seen = State(used=np.zeros(LENGTH), own=PerRank(own, "mean"), moving=Moving()), []
            sampler = ElasticSampler(LENGTH, BATCH)
            with Elastic(comm, state) as elastic:
                with pytest.raises(ConfigError, match=r"keep\(\) is called within a step"):
                    elastic.keep()
                for step in elastic.steps(sampler, used_in="used"):
                    seen.append((step.number, state.moving.tree["n"]))
                    mask = np.zeros(LENGTH)
                    mask[step.indices] = 1
                    state.used += comm.all_reduce(mask, name="used")
                    state.own += 1 + comm.rank
                    state.moving.tree["n"] += 1
                    state.moving.tree["x"] += 1
                    if step.number == 0:
                        with pytest.raises(ConfigError, match=r"needs a copy: call keep\(\) in an earlier step"):
                            elastic.roll_back()
                    if step.number == 3:
                        elastic.keep()
                    if step.number in (6, 9):
                        sampler.set_aside([int(step.batch[0])])
                        elastic.roll_back()
            assert (state.moving.tree["x"] == state.moving.tree["n"]).all()
            return seen, state.used.tolist(), state.own.tolist(), sampler.aside

        found = run_threads(list(comms), main)
        (seen, used, _, aside), other = found
        assert (seen, used, aside) == (other[0], other[1], other[3])
        assert [n for _, n in seen[:13]] == [0, 1, 2, 3, 4, 5, 6, 4, 5, 6, 4, 5, 6]
        assert [number for number, _ in seen] == list(range(len(seen)))
        assert len(aside) == 2
        assert used == [float(one not in aside) for one in range(LENGTH)]
        # exact, not converted: the ranks are the same as when it was kept
        last = seen[-1][1] + 1
        assert [one[2] for one in found] == [[0.5 + last] * 2, [0.5 + 2 * last] * 2]


@pytest.mark.parametrize("num_loops", [1, 2])
@pytest.mark.asyncio
async def test_copy_of_a_loop_that_is_left_is_made_and_returned_to(num_loops: int) -> None:
    async with world(2, elastic=True) as comms:

        async def main(comm: Any) -> Any:
            state, found = State(count=0), []
            sampler = ElasticSampler(LENGTH, BATCH, seed=None)
            async with Elastic(comm, state) as elastic:
                for keeps in (True, False, False)[: num_loops + 1]:
                    async for step in elastic.steps(sampler, passes=1 << 30):
                        found.append(int(step.batch[0]) // BATCH)
                        await comm.barrier()
                        state.count += 1
                        if keeps and state.count == 3:
                            elastic.keep()
                            break
                        if state.count == 5:
                            elastic.roll_back()
                            break
            return found, state.count, sampler.state_dict()["position"]

        batches = [0, 1, 2, 3, 4, 3, 4]
        assert await run_ranks(comms, main) == [(batches[: 3 + 2 * num_loops], 3, 3 * BATCH)] * 2


@pytest.mark.asyncio
async def test_copy_that_only_some_ranks_return_to_raises() -> None:
    async with world(2, elastic=True) as comms:

        async def train(comm: Any) -> None:
            async with Elastic(comm, State()) as elastic:
                async for step in elastic.steps(ElasticSampler(LENGTH, BATCH)):
                    await comm.barrier()
                    if step.number == 1:
                        elastic.keep()
                    if step.number == 4 and comm.rank:
                        elastic.roll_back()

        async def main(comm: Any) -> None:
            with pytest.raises(CollectiveMismatch, match=r"rank 1 begins step 5 with .*, after roll_back\(\)"):
                await train(comm)

        await run_ranks(comms, main)


@pytest.mark.asyncio
async def test_joining_rank_gets_the_copy_with_the_state() -> None:
    async with world(2, elastic=True) as comms:

        async def main(comm: Any) -> Any:
            uid = comm.births[comm.rank]
            state = State(n=0, own=PerRank(np.full(3, float(uid)), "sum"), moving=Moving())
            seen = []
            async with Elastic(comm, state) as elastic:
                async for step in elastic.steps(ElasticSampler(LENGTH, 2), used_in="x"):
                    await comm.all_reduce(np.ones(1), "x")
                    seen.append((step.number, state.n, state.own[0], state.moving.tree["n"], comm.size))
                    state.n += 1
                    state.moving.tree["n"] += 1
                    state.own += 1
                    if state.n == 3 and comm.size == 2:
                        elastic.keep()
                        comms.store.set_size(3, ())
                        if comm.rank == 0:
                            joined.set_result(None)
                    if comm.size == 3 and state.n >= 8 and uid not in rolled:
                        rolled.append(uid)
                        elastic.roll_back()
            return seen

        joined: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        rolled: list[int] = []

        async def new() -> Any:
            await joined
            return await main(await comms.join(2))

        members = [asyncio.ensure_future(main(comm)) for comm in comms]
        found = await asyncio.wait_for(asyncio.gather(*members, new()), 60)
        assert set(rolled) == {0, 1, 2}
        # at the copy each of the first two had 3.5 (0.5 on entering): a total of 7, of which each of three has a third
        for seen in found:
            back = [one for one, last in zip(seen[1:], seen, strict=False) if one[1] < last[1]]
            assert back
            assert all((n, moving) == (3, 3) and own == pytest.approx(7 / 3) for _, n, own, moving, _ in back)


async def guarded(comm: Any, seed: int, on_loss: str) -> Any:
    """Train two passes; steps are void, samples set aside, and copies returned to, as chance has it."""
    elastic_comm = ElasticCommunicator(comm)
    state = State(used=np.zeros(LENGTH), moving=Moving(), own=PerRank(np.zeros(2), "sum"))
    sampler = ElasticSampler(LENGTH, BATCH)
    async with Elastic(elastic_comm, state, on_loss=on_loss) as elastic:
        async for step in elastic.steps(sampler, passes=2, used_in="used"):
            with step if on_loss == "restart_step" else contextlib.nullcontext():
                chance = Random(f"{seed} {step.number}")
                mask = np.zeros(LENGTH)
                mask[step.indices] = 1
                total = await elastic_comm.all_reduce(mask, "used")
                await elastic_comm.barrier("end")
                state.own += 1
                if chance.random() < 0.2:
                    step.void()
                    if chance.random() < 0.3:
                        sampler.set_aside(step.batch[:1])
                else:
                    state.used += total
                    state.moving.tree["n"] += 1
                    state.moving.tree["x"] += 1
                what = chance.random()
                if what < 0.15:
                    elastic.keep()
                elif what < 0.25 and step.number < 60:
                    with contextlib.suppress(ConfigError):
                        elastic.roll_back()
    tree = state.moving.tree
    assert (tree["x"] == tree["n"]).all()
    return elastic_comm.births, state.used.tolist(), sampler.aside, tree["n"], state.own.tolist()


@pytest.mark.parametrize("on_loss", ["finish", "restart_step"])
@pytest.mark.parametrize("seed", range(6))
def test_each_sample_counts_once_or_is_on_the_list(seed: int, on_loss: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    check_guarded(seed, on_loss)


@pytest.mark.slow
@pytest.mark.parametrize("on_loss", ["finish", "restart_step"])
def test_each_sample_counts_once_or_is_on_the_list_for_many_seeds(
    on_loss: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    for seed in range(100, 160):
        check_guarded(seed, on_loss)


def check_guarded(seed: int, on_loss: str) -> None:
    random = Random(seed)
    size = random.choice([2, 3, 4])
    events: list[Any] = [Kill(rank, random.uniform(0.005, 0.1)) for rank in random.sample(range(size), size - 2)]
    events += [Join(rank, random.uniform(0, 0.1)) for rank in range(size, size + random.randrange(3))]
    events += [Resize(random.choice([2, 3, 4]), random.uniform(0, 0.1))]

    async def main(comm: Any) -> Any:
        return await guarded(comm, seed, on_loss)

    run = run_in_virtual_time(main, size, seed=seed, events=events, timeout=30.0)
    assert not run.failed, (seed, run.failed)
    births = next(iter(run.results.values()))[0]
    found = [run.results[uid] for uid in births]
    assert all(one[:4] == found[0][:4] for one in found)
    _, used, aside, _, _ = found[0]
    for sample in range(LENGTH):
        assert used[sample] == 2 or (sample in aside and used[sample] < 2), (seed, sample, used[sample])


@pytest.mark.parametrize("num_after", [1, 2, 4])
@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.asyncio
async def test_checkpoint_holds_values_of_ranks_as_one_rank_has_them(
    tmp_path: Path, every: int, num_after: int
) -> None:
    path = tmp_path / "c.npz"

    async def train(size: int, last: int | None) -> list[Any]:
        async def main(comm: Any) -> Any:
            state = State(own=PerRank(np.zeros(2, np.float32), "mean"), bank=PerRank([0.0], "sum"), moving=Moving())
            entered = None
            async with Elastic(comm, state, checkpoint=path, checkpoint_every=every) as elastic:
                async for step in elastic.steps(ElasticSampler(LENGTH, BATCH)):
                    n = state.moving.tree["n"]
                    entered = (n, state.own.tolist(), [*state.bank]) if entered is None else entered
                    await comm.barrier()
                    state.own += comm.rank
                    state.bank[0] += comm.rank
                    state.moving.tree["n"] += 1
                    if step.number == last:
                        return None
            return entered

        async with world(size, elastic=True) as comms:
            return await run_ranks(comms, main)

    await train(3, 9)
    with np.load(path) as file:
        mean = float(file["own"][0])
    n = mean  # of 0, 1 and 2 in each step
    assert n >= 1
    assert n == int(n)
    assert await train(num_after, None) == [(n, [n, n], [3 * n / num_after])] * num_after
