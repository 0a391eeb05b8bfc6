"""Calls that outlive a rank: what each verb gives, what is refused, and who joins or leaves between steps."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

import kfcomm
from kfcomm.elastic import Elastic, ElasticCommunicator, ElasticSampler, State
from kfcomm.elastic.call_log import CallOutcome, Entry
from kfcomm.elastic.results import ResultTransfer
from kfcomm.errors import CollectiveMismatch, ConfigError, EpochChanged, PeerLost, SessionClosed
from kfcomm.testing import run_ranks, world
from tests.elastic.support import Died, die, leave_unheard

Body = Callable[[Any, Any], Awaitable[Any]]


async def train(comms: Any, body: Body, *, length: int = 12, batch: int = 4, **options: Any) -> list[Any]:
    """Each rank goes through one pass with ``body(comm, step)``; what the bodies returned, None for who died."""

    async def main(comm: Any) -> Any:
        found = []
        try:
            async with Elastic(comm, State(x=np.zeros(2))) as elastic:
                async for step in elastic.steps(ElasticSampler(length, batch), **options):
                    found.append(await body(comm, step))  # noqa: PERF401 - one after the other
        except Died:
            return None
        return found

    return await run_ranks(comms, main)


async def heard(comm: Any) -> None:
    """The loss has been heard of, and the ranks that live have gone on."""
    before = comm.current.epoch
    while comm.current.epoch == before:  # noqa: ASYNC110 - there is no event for it
        await asyncio.sleep(0)


@pytest.mark.asyncio
async def test_results_are_read_only_until_the_next_step_is_over() -> None:
    async with world(2, elastic=True) as comms:
        kept: dict[int, list[Any]] = {0: [], 1: []}

        async def body(comm: Any, step: Any) -> None:
            assert all(one.flags.writeable for one in kept[comm.rank][:-1])
            result = await comm.all_reduce(np.ones(3))
            with pytest.raises(ValueError, match="read-only"):
                result += 1
            kept[comm.rank].append(result)

        await train(comms, body, length=20)


@pytest.mark.asyncio
async def test_result_in_the_state_can_be_written_to_when_its_step_is_over() -> None:
    async with world(2, elastic=True) as comms:

        async def main(comm: Any) -> Any:
            state = State(parts={"model": np.zeros(3)})
            async with Elastic(comm, state) as elastic:
                async for step in elastic.steps(ElasticSampler(20, 2)):
                    state.parts["model"] += step.number
                    mean = await comm.all_reduce(state.parts["model"], op="avg")
                    state.parts["model"] = mean
            return state.parts["model"].tolist()

        assert await run_ranks(comms, main) == [[45.0] * 3] * 2


@pytest.mark.asyncio
async def test_out_has_the_shape_that_mpi_gives_it() -> None:
    async with world(2, elastic=True) as comms:

        async def body(comm: Any, step: Any) -> None:
            rows = np.arange(8).reshape(2, 4)
            out, flat = np.zeros(4, np.int64), np.zeros(16, np.int64)
            assert await comm.reduce_scatter(rows, out=out) is out
            assert (out == 2 * rows[comm.rank]).all()
            assert await comm.scatter(rows, out=out) is out
            assert (out == rows[comm.rank]).all()
            assert await comm.all_gather(rows, out=flat) is flat
            assert (flat.reshape(2, 2, 4) == rows).all()

        await train(comms, body)


@pytest.mark.asyncio
async def test_input_stays_intact_for_results_in_place() -> None:
    async with world(3, elastic=True, strategy="ring") as comms:

        async def body(comm: Any, step: Any) -> None:
            x = np.full(50_000, comm.births[comm.rank] + 1.0)
            y = x.copy()
            if step.number == 1 and comm.rank == 2:
                die(comms, comm)
            handle = comm.all_reduce(x, "x", out=x)
            assert await handle is x
            many = {"a": y}
            assert (await comm.all_reduce_many(many, "many", out=many))["a"] is y
            expected = sum(birth + 1 for birth in handle.contributors)
            assert (x == expected).all()
            assert (y == expected).all()
            assert handle.contributors == ((0, 1, 2) if step.number < 1 else (0, 1))

        await train(comms, body)


@pytest.mark.asyncio
async def test_averages_are_those_of_the_contributors() -> None:
    async with world(3, elastic=True) as comms:

        async def body(comm: Any, step: Any) -> Any:
            if step.number == 1 and comm.rank == 0:
                die(comms, comm)
            me = comm.births[comm.rank]
            alike = await comm.all_reduce(3.0 * me, "alike", op="avg")
            one = await comm.all_reduce(np.full(2, 3.0 * me), "a", op="avg", weight=me + 1)
            many = await comm.all_reduce_many({"a": np.full(2, 3.0 * me)}, op="avg", weight=me + 1)
            assert (one == many["a"]).all()
            return float(alike), float(one[0])

        # (0·1 + 3·2 + 6·3) / 6, and without the first / 5
        lived = [(3.0, 4.0), *[(4.5, 4.8)] * 3]
        assert await train(comms, body) == [None, lived, lived]


@pytest.mark.asyncio
async def test_lists_of_one_rank_are_sent_to_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 dies when it has the result and rank 1, too, and rank 2 has not heard of it."""
    leave_unheard(monkeypatch, lambda log, entry, _: log.comm.epoch == 0 and log.comm.rank == 2 and entry.key[0] == "b")
    async with world(3, elastic=True) as comms:

        async def body(comm: Any, step: Any) -> Any:
            if step.number != 1:
                return None
            x = np.full(9, comm.births[comm.rank] + 1.0)
            handle = comm.all_reduce([x, x[:1]], "b")
            result = await handle
            if comm.births[comm.rank] == 0:
                die(comms, comm)
            return handle.contributors, [one.tolist() for one in result]

        _, one, two = await train(comms, body)
        assert one[1] == two[1] == ((0, 1, 2), [[6.0] * 9, [6.0]])


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.asyncio
async def test_call_is_repeated_if_the_sender_of_its_result_dies(
    monkeypatch: pytest.MonkeyPatch, is_late: bool
) -> None:
    """Rank 1 alone has the result when rank 0 dies, and dies when it is to give it: the others do it again."""
    real_part = ResultTransfer.take_part
    leave_unheard(monkeypatch, lambda log, entry, _: log.comm.epoch == 0 and log.comm.rank > 1 and entry.key[0] == "b")

    async with world(4, elastic=True) as comms:

        def take_part(self: ResultTransfer, entry: Entry, outcome: CallOutcome) -> None:
            if self._log.comm.births[self._log.comm.rank] == 1:
                comms.kill(1)
            else:
                real_part(self, entry, outcome)

        monkeypatch.setattr(ResultTransfer, "take_part", take_part)

        async def body(comm: Any, step: Any) -> Any:
            if step.number != 1:
                return None
            birth = comm.births[comm.rank]
            handle = comm.all_reduce(np.full(9, birth + 1.0), "b")
            if birth < 2:
                await handle
            if birth == 0:
                die(comms, comm)
            if birth == 1:
                while 1 not in comms.dead:  # noqa: ASYNC110 - there is no event for it
                    await asyncio.sleep(0)
                raise Died
            if is_late:
                await heard(comm)
            return handle.contributors if is_late else None, (await handle).tolist(), handle.contributors

        _, _, two, three = await train(comms, body)
        assert two[1][1:] == three[1][1:] == ([7.0] * 9, (2, 3))


@pytest.mark.asyncio
async def test_call_with_a_lost_root_fails_on_all_ranks() -> None:
    async with world(3, elastic=True) as comms:

        async def body(comm: Any, step: Any) -> Any:
            if step.number != 1:
                assert (await comm.reduce_scatter(np.ones(6), "ok")).size == 6 // comm.size
                return None
            if comm.rank == 0:
                die(comms, comm)
            with pytest.raises(PeerLost, match=r"its root, rank 0, is lost|rank 0 is lost"):
                await comm.broadcast(np.ones(2), 0, "b")
            with pytest.raises(EpochChanged, match="cannot be done by fewer ranks") as failure:
                await comm.all_to_all(np.ones(3), "t")
            assert failure.value.members == (1, 2)
            assert (comm.rank, comm.size, comm.births) == (comm.births.index(comm.births[comm.rank]), 3, (0, 1, 2))
            gathered = await comm.gather(np.full(2, comm.rank), 1, "g")
            return None if gathered is None else gathered.tolist()

        _, one, two = await train(comms, body)
        assert one[1] == [[1, 1], [2, 2]]
        assert two[1] is None


@pytest.mark.asyncio
async def test_a_loss_may_be_raised_on_all() -> None:
    """Also by calls that begin after it; the samples are given again, and the next step succeeds."""
    async with world(3, elastic=True) as comms:
        kept: list[Any] = []

        async def main(comm: Any) -> Any:
            used = []
            async with Elastic(comm, State(), on_loss="raise") as elastic:
                async for step in elastic.steps(ElasticSampler(24, 6, seed=None)):
                    birth = comm.births[comm.rank]
                    if birth == 0 and step.number == 1:
                        die(comms, comm)
                    if birth == 2 and step.number == 1:
                        await heard(comm)
                    try:
                        await comm.all_reduce(np.ones(2), "g")
                        used.append(step.batch.tolist())
                    except EpochChanged as error:
                        kept.append((error.members, comm.size, step.number, "no rank had finished it" in str(error)))
                        with pytest.raises(EpochChanged, match="'later' failed"):
                            await comm.all_reduce(np.ones(2), "later")
            return used

        async def mortal(comm: Any) -> Any:
            with contextlib.suppress(Died):
                return await main(comm)

        _, one, two = await run_ranks(comms, mortal)
        assert one == two == [list(range(6)), list(range(12, 18)), list(range(18, 24)), list(range(6, 12))]
        assert kept == [((1, 2), 3, 1, True)] * 2


@pytest.mark.asyncio
async def test_a_step_may_run_again_from_the_state_with_which_it_began() -> None:
    """The calls that were begun do not matter, nor how far the body came on each rank."""
    async with world(3, elastic=True) as comms:

        async def main(comm: Any) -> Any:
            seen = []
            state = State(x=np.zeros(2), few=[], small={"n": 0})
            async with Elastic(comm, state, on_loss="restart_step") as elastic:
                async for step in elastic.steps(ElasticSampler(24, 6, seed=None)):
                    with step:
                        birth = comm.births[comm.rank]
                        seen.append((step.number, step.batch[0].item(), len(step.indices)))
                        state.x += 1
                        state.few.append(step.number)
                        state.small = {"n": state.small["n"] + 1}
                        for number in range(birth):
                            comm.all_reduce(np.ones(3), f"more/{number}")
                        if birth == 0 and step.number == 1:
                            die(comms, comm)
                        for number in range(birth, 3):
                            comm.all_reduce(np.ones(3), f"more/{number}")
                        await comm.all_reduce(np.ones(2), "g")
            return seen, state.x.tolist(), state.few, state.small

        async def mortal(comm: Any) -> Any:
            with contextlib.suppress(Died):
                return await main(comm)

        _, one, two = await run_ranks(comms, mortal)
        assert one == two
        assert one == ([(0, 0, 2), (1, 6, 2), (2, 6, 3), (3, 12, 3), (4, 18, 3)], [4.0, 4.0], [0, 2, 3, 4], {"n": 4})


@pytest.mark.asyncio
async def test_ways_to_meet_a_loss_that_there_are_not() -> None:
    async with world(1, elastic=True) as comms:
        with pytest.raises(ConfigError, match="on_loss is one of finish, raise, restart_step, not 'retry'"):
            Elastic(comms[0], State(), on_loss="retry")
        async with Elastic(comms[0], State()) as elastic:
            async for step in elastic.steps(ElasticSampler(2, 1)):
                assert repr(step) == f"<Step {step.number}: 1 of 1 samples>"
                with pytest.raises(ConfigError, match='on_loss="restart_step"'), step:
                    raise AssertionError


@pytest.mark.asyncio
async def test_a_rank_that_fails_is_a_rank_that_is_lost() -> None:
    async with world(3, elastic=True) as comms:

        async def main(comm: Any) -> Any:
            number = 0
            try:
                async with comm, Elastic(comm, State()) as elastic:
                    async for step in elastic.steps(ElasticSampler(12, 3)):
                        pending = comm.all_reduce(np.ones(2), "before")
                        if comm.births[comm.rank] == 1 and step.number == 2:
                            raise Died
                        await pending
                        number += int((await comm.all_reduce(np.ones(1), "n"))[0])
            except Died:
                return None
            return number

        first, none, last = await run_ranks(comms, main)
        assert none is None
        assert first == last


@pytest.mark.asyncio
async def test_states_that_differ_are_refused_on_all() -> None:
    async with world(2, elastic=True) as comms:

        async def main(comm: Any) -> None:
            with pytest.raises(
                ConfigError, match=r"states of the ranks differ: x is float64\(\d,\) here and float64\(\d,\)"
            ):
                async with Elastic(comm, State(x=np.zeros(2 + comm.rank))):
                    raise AssertionError
            # nothing is left of it
            async with Elastic(comm, State(x=np.full(2, comm.rank))) as elastic:
                assert (elastic.num_changes, elastic.paused_s, elastic.is_released) == (0, 0.0, False)

        await run_ranks(comms, main)


@pytest.mark.asyncio
async def test_ranks_at_different_positions_raise_mismatch() -> None:
    async with world(2, elastic=True) as comms:

        async def main(comm: Any) -> None:
            async with Elastic(comm, State()) as elastic:
                steps = elastic.steps(ElasticSampler(10, 2, seed=comm.rank))
                with pytest.raises(CollectiveMismatch, match="at different positions"):
                    await anext(steps)

        await run_ranks(comms, main)


@pytest.mark.asyncio
async def test_invalid_uses_of_elastic_are_refused() -> None:
    async with world(1, elastic=True) as comms, world(1) as others:
        comm = comms[0]
        with pytest.raises(ConfigError, match=r"kfcomm.init\(elastic=True\)"):
            Elastic(others[0], State())
        with pytest.raises(ConfigError, match=r"keeps a kfcomm\.elastic\.State, not dict"):
            Elastic(comm, {})  # type: ignore[arg-type]
        elastic = Elastic(comm, State())
        with pytest.raises(ConfigError, match="use Elastic in a with block"):
            await anext(elastic.steps(ElasticSampler(1, 1)))
        async with elastic:
            for wrong in (comm.agree(True), comm.shrink()):
                with pytest.raises(ConfigError, match="while an Elastic is open"):
                    await wrong
            with pytest.raises(ConfigError, match="open on this communicator already"):
                async with Elastic(comm, State()):
                    raise AssertionError
            with pytest.raises(ConfigError):
                comm.all_reduce(np.ones(2), op="no such")
        assert await comm.agree(True)
        assert (await comm.shrink()).epoch == 1
        for size in (0, True, 1.5, "2"):
            with pytest.raises(ConfigError, match="a size is a whole number"):
                await comm.propose_size(size)
        await comm.close()
        with pytest.raises(SessionClosed):
            comm.begin()


@pytest.mark.asyncio
async def test_joining_rank_has_the_state_and_released_rank_ends_its_loop() -> None:
    async with world(2, elastic=True) as comms:
        comers: list[asyncio.Task[Any]] = []

        async def main(comm: Any, weight: float) -> Any:
            births: list[Any] = []
            state = State(w=np.full(2, weight), step=0)
            async with Elastic(comm, state) as elastic:
                async for step in elastic.steps(ElasticSampler(6 << 20, 6)):
                    births.append(comm.births)
                    count = await comm.all_reduce(np.ones(2), "n")
                    assert (count == comm.size).all()
                    assert state.step == step.number
                    state.w += 1
                    state.step += 1
                    if step.number == 3 and comm.rank == 0:
                        comers.append(asyncio.create_task(join(2)))
                    if births.count((0, 1, 2)) == 2 and comm.size > 1 and comm.rank == 0:
                        await comm.propose_size(1)
                    await asyncio.sleep(0)
                    if births.count((0,)) == 2:
                        break
            return births, elastic.is_released, state.w.tolist()

        async def join(birth: int) -> Any:
            return await main(await comms.join(birth), -100.0)

        first, second = await asyncio.gather(*(main(comm, float(comm.rank)) for comm in list(comms)))
        third = await comers[0]
        assert first[1:] == (False, [len(first[0])] * 2)
        assert second[1]
        assert third[1]
        assert first[0][-1] == (0,)
        assert third[0]
        assert set(third[0]) == {(0, 1, 2)}
        assert second[2] == third[2] == [len(second[0])] * 2


@pytest.mark.parametrize(
    ("rows", "length", "why"),
    [
        (3, 40, r"w is float64\(3,\) here and float64\(2,\) on rank 0"),
        (2, 44, "length of this sampler is 44, that of the state 40"),
    ],
)
@pytest.mark.asyncio
async def test_joining_rank_that_does_not_fit_is_refused(rows: int, length: int, why: str) -> None:
    async with world(2, elastic=True) as comms:
        comers: list[asyncio.Task[Any]] = []

        async def join() -> None:
            comm = await comms.join(2)
            async with comm, Elastic(comm, State(w=np.zeros(rows))) as elastic:
                async for _ in elastic.steps(ElasticSampler(length, 4)):
                    raise AssertionError

        async def main(comm: Any) -> int:
            steps = 0
            async with Elastic(comm, State(w=np.zeros(2))) as elastic:
                async for step in elastic.steps(ElasticSampler(40, 4)):
                    if step.number == 2 and comm.rank == 0:
                        comers.append(asyncio.create_task(join()))
                    steps += int((await comm.all_reduce(np.ones(1), "n"))[0]) > 0
                    await asyncio.sleep(0.001)
            return steps

        # what it would have trained on in the step in which it left is given again
        assert await run_ranks(list(comms), main) in ([10, 10], [11, 11])
        with pytest.raises(ConfigError, match=why):
            await comers[0]


@pytest.mark.asyncio
async def test_it_is_a_communicator_in_all_else() -> None:
    async with world(2, elastic=True) as comms:
        comm = comms[0]
        assert isinstance(comm, ElasticCommunicator)
        assert repr(comm) == "<ElasticCommunicator 'world', rank 0 of 2, open>"
        assert (comm.rank, comm.size, comm.epoch, comm.births, comm.local_rank, comm.local_size) == (
            0,
            2,
            0,
            (0, 1),
            0,
            2,
        )
        assert comm.layout.size == 2
        assert {name for name in dir(kfcomm.Communicator) if not name.startswith("_")} <= {
            *dir(comm), *(name for name in dir(comm.current)),
        }  # fmt: skip
        await asyncio.gather(*(one.set_strategy("ring") for one in comms))
        assert comm.strategy.name == "ring"
        handle = comms[0].all_reduce(np.ones(2))
        await comms[1].all_reduce(np.ones(2))
        assert handle.contributors is None
        sent = comms[0].send(np.ones(2), 1)
        assert (await comms[1].recv(0)).sum() == 2
        await sent


@pytest.mark.asyncio
async def test_other_calls_of_a_void_step_need_not_be_awaited() -> None:
    async with world(3, elastic=True) as comms:

        async def main(comm: Any) -> int:
            num_left = 0
            with contextlib.suppress(Died):
                async with Elastic(comm, State(x=np.zeros(2)), on_loss="raise") as elastic:
                    async for step in elastic.steps(ElasticSampler(8, 4)):
                        with contextlib.suppress(EpochChanged):
                            left = comm.all_reduce(np.ones(1 + comm.rank), "differs") if step.number == 0 else None
                            if left is not None:
                                await asyncio.wait([left])
                            if comm.births[comm.rank] == 2:
                                if left is not None:
                                    left.exception()
                                die(comms, comm)
                            await comm.all_reduce(np.ones(3))
                            left = None
                        num_left += left is not None
                        del left
                        gc.collect()
            return num_left

        assert (await run_ranks(comms, main))[:2] == [1, 1]
