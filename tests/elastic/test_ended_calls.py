"""Calls that one rank ends: they fail on every rank where they have not finished, and the job goes on."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kfcomm.elastic import Elastic, ElasticSampler, State
from kfcomm.elastic.call_log import Entry, Standing
from kfcomm.elastic.runner import CallRunner
from kfcomm.errors import CollectiveAborted, CollectiveError, CollectiveTimeout, ConfigError, EpochChanged, KfcommError
from kfcomm.testing import run_ranks, run_threads, sync_world, world
from tests.elastic import programs
from tests.elastic.support import die, leave_unheard
from tests.elastic.test_finish import heard, train

SHORT_S = 0.05


def begin(comm: Any, verb: str, number: int = 0, **more: Any) -> Any:
    """The call of a rank."""
    return programs.begin(comm, comm.births[comm.rank], 1, number, (verb, 7, 1), name="c", **more)


async def outcome(handle: Any) -> Any:
    """Its result, or its error."""
    try:
        return await handle
    except (KfcommError, asyncio.CancelledError) as error:
        return error


def held_back(monkeypatch: pytest.MonkeyPatch, birth: int) -> None:
    """On one rank no call ``c`` is ever over, so that those which have results of their own wait for it."""
    real = CallRunner._ended

    def ended(self: CallRunner, entry: Entry, handle: Any) -> None:
        if (
            self.log.comm.births[self.log.comm.rank] != birth
            or entry.name != "c"
            or handle.cancelled()
            or handle.exception()
        ):
            real(self, entry, handle)

    monkeypatch.setattr(CallRunner, "_ended", ended)


async def stands(comm: Any, standing: Standing) -> None:
    """The call ``c`` of this rank stands so."""
    calls = comm._calls

    def is_so() -> bool:
        return any(one.name == "c" and one.standing is standing for one in calls.log.entries.values())

    while not is_so():  # noqa: ASYNC110 - there is no event for it
        await asyncio.sleep(0)


@pytest.mark.parametrize("verb", programs.VERBS)
@pytest.mark.asyncio
async def test_a_cancelled_call_ends_on_all_ranks(verb: str) -> None:
    """Whether they have begun it or not; then the same name is used again."""
    async with world(4, elastic=True) as comms:
        is_begun, is_over = asyncio.Event(), asyncio.Event()

        async def body(comm: Any, step: Any) -> Any:
            if step.number != 1:
                return await outcome(begin(comm, verb))
            if comm.rank == 0:
                handle = begin(comm, verb)
                is_begun.set()
                found = await outcome(handle)
            elif comm.rank == 2:
                await is_begun.wait()
                handle = begin(comm, verb)
                assert handle.cancel()
                assert handle.cancelled()
                assert not handle.cancel()
                is_over.set()
                return None
            else:
                await is_over.wait()
                found = await outcome(begin(comm, verb))
            assert type(found) is CollectiveAborted
            assert found.key == "c"
            assert "'c'" in str(found)
            assert "rank 2" in str(found)
            return None

        for found in await train(comms, body):
            assert len(found) == 3
            assert not isinstance(found[2], BaseException)


@pytest.mark.parametrize("how", ["wait_for", "timeout", "task", "group"])
@pytest.mark.asyncio
async def test_cancel_or_timeout_on_one_rank_ends_the_call_everywhere(how: str) -> None:
    """The others may have it by then, or hear of it."""

    async def give_up(handle: Any) -> None:
        if how == "wait_for":
            await asyncio.wait_for(handle, 0)
        elif how == "timeout":
            async with asyncio.timeout(0):
                await handle
        elif how == "task":
            task = asyncio.ensure_future(outcome(handle))
            await asyncio.sleep(0)
            task.cancel()
            await task
        else:
            async with asyncio.TaskGroup() as group:
                group.create_task(outcome(handle))
                await asyncio.sleep(0)
                raise TimeoutError

    async with world(3, elastic=True) as comms:

        async def body(comm: Any, step: Any) -> Any:
            if step.number == 1 and comm.rank == 1:
                handle = begin(comm, "gather")
                with pytest.raises((TimeoutError, ExceptionGroup)) if how != "task" else _nothing():
                    await give_up(handle)
                return handle.cancelled()
            found = await outcome(begin(comm, "gather"))
            assert step.number == 1 or not isinstance(found, BaseException)
            return type(found) is CollectiveAborted

        one, two, three = await train(comms, body)
        assert two == [False, True, False]
        assert one == three == [False, True, False]


class _nothing:  # noqa: N801 - as contextlib has it
    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


@pytest.mark.parametrize("verb", programs.OWN)
@pytest.mark.asyncio
async def test_cancellation_reaches_ranks_that_have_their_result(monkeypatch: pytest.MonkeyPatch, verb: str) -> None:
    held_back(monkeypatch, 2)
    async with world(3, elastic=True) as comms:

        async def body(comm: Any, step: Any) -> Any:
            if step.number != 1:
                return None
            handle = begin(comm, verb)
            if comm.rank == 2:
                for other in comms:
                    await stands(by_rank[other.rank], Standing.HELD if other.rank != 2 else Standing.POSTED)
                assert handle.cancel()
                return None
            found = await outcome(handle)
            assert type(found) is CollectiveAborted
            assert found.key == "c"
            assert "'c'" in str(found)
            assert "rank 2 cancelled" in str(found)
            return None

        by_rank: dict[int, Any] = {}

        async def main(comm: Any) -> int:
            by_rank[comm.rank] = comm
            count = 0
            async with Elastic(comm, State()) as elastic:
                async for step in elastic.steps(ElasticSampler(12, 4)):
                    await body(comm, step)
                    count += 1
            return count

        assert await run_ranks(comms, main) == [3, 3, 3]


@pytest.mark.parametrize("verb", programs.OWN)
@pytest.mark.asyncio
async def test_a_call_keeps_its_timeout_while_it_waits_for_the_results_of_others(
    monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    held_back(monkeypatch, 2)
    async with world(3, elastic=True) as comms:

        async def body(comm: Any, step: Any) -> Any:
            if step.number != 1:
                return None
            handle = begin(comm, verb, timeout=60 if comm.rank == 2 else SHORT_S)
            if comm.rank == 2:
                await comm.barrier("later")
                handle.cancel()
                return None
            found = await outcome(handle)
            assert isinstance(found, CollectiveError)
            assert found.key == "c"
            assert "'c'" in str(found)
            await comm.barrier("later")
            return type(found)

        found = await train(comms, body)
        assert CollectiveTimeout in {one[1] for one in found}


@pytest.mark.asyncio
async def test_a_call_cancelled_in_the_midst_of_a_change_leaves_the_next_of_its_name_in_place() -> None:
    """The ranks have told each other how it stands by then; the second use must not meet the first of another."""
    async with world(3, elastic=True) as comms:

        async def body(comm: Any, step: Any) -> Any:
            if step.number != 1:
                return None
            birth = comm.births[comm.rank]
            if birth == 0:
                die(comms, comm)
            calls = comm._calls
            while not calls.log.is_changing:  # noqa: ASYNC110 - there is no event for it
                await asyncio.sleep(0)
            first = comm.all_reduce(np.full(3, 10.0 + birth), "c")
            if birth == 1:
                while calls.log.is_changing and comm.current.epoch == 0:  # noqa: ASYNC110 - as above
                    await asyncio.sleep(0)
                assert first.cancel()
            found = await outcome(first)
            return [found, (await comm.all_reduce(np.full(3, 100.0 + birth), "c")).tolist()]

        _, one, two = await train(comms, body)
        assert one[1][1] == two[1][1] == [203.0] * 3
        assert isinstance(one[1][0], asyncio.CancelledError)
        assert isinstance(two[1][0], CollectiveAborted)
        assert "rank 0 (by the numbers of epoch 1: these are ranks [1, 2] of the step)" in str(two[1][0])


@pytest.mark.asyncio
async def test_a_call_keeps_its_timeout_while_the_ranks_agree_on_who_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    real, go_on = CallRunner.wait_until_quiet, asyncio.Event()

    async def wait(self: CallRunner) -> None:
        if self.log.comm.births[self.log.comm.rank] == 2:
            await go_on.wait()
        await real(self)

    monkeypatch.setattr(CallRunner, "wait_until_quiet", wait)
    async with world(3, elastic=True) as comms:

        async def body(comm: Any, step: Any) -> Any:
            if step.number != 1:
                return None
            birth = comm.births[comm.rank]
            if birth == 0:
                die(comms, comm)
            found = await outcome(comm.all_reduce(np.ones(3), "c", timeout=SHORT_S if birth == 1 else None))
            if birth == 1:
                assert isinstance(found, CollectiveTimeout)
                assert "while the ranks agreed on the survivors of a loss" in str(found)
                go_on.set()
            return found, (await comm.all_reduce(np.full(3, 1.0 + birth), "c")).tolist()

        _, one, two = await train(comms, body)
        assert one[1][1] == two[1][1] == [5.0] * 3
        assert isinstance(two[1][0], CollectiveAborted)


@pytest.mark.asyncio
async def test_result_is_forwarded_through_a_rank_that_cancelled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 1 has the result, rank 2 has cancelled, and rank 3 not yet: rank 3 gets it when rank 0 dies."""
    leave_unheard(
        monkeypatch,
        lambda log, entry, handle: (
            log.comm.epoch == 0 and log.comm.rank in (2, 3) and entry.name == "c" and not handle.cancelled()
        ),
    )
    async with world(4, elastic=True) as comms:
        is_there, is_cancelled = asyncio.Event(), asyncio.Event()

        async def body(comm: Any, step: Any) -> Any:
            if step.number != 1:
                return None
            birth = comm.births[comm.rank]
            handle = comm.all_reduce(np.full(3, birth + 1.0), "c")
            if birth == 0:
                await is_cancelled.wait()
                die(comms, comm)
            if birth == 1:
                await handle
                is_there.set()
            if birth == 2:
                await is_there.wait()
                handle.cancel()
                is_cancelled.set()
            found = await outcome(handle)
            return found, await comm.all_gather_object(birth, "after")

        _, *others = await train(comms, body)
        (one, after), (two, _), (three, _) = (found[1] for found in others)
        assert one.tolist() == three.tolist() == [10.0] * 3
        assert isinstance(two, asyncio.CancelledError)
        assert after == [1, 2, 3]


@pytest.mark.asyncio
async def test_a_call_that_is_refused_on_one_rank_fails_on_those_that_have_their_result() -> None:
    async with world(3, elastic=True) as comms:

        async def body(comm: Any, step: Any) -> Any:
            if step.number != 1:
                return None
            for verb in programs.VERBS:
                if comm.rank == 2:
                    with pytest.raises(ConfigError, match="a timeout is"):
                        await begin(comm, verb, timeout="soon")
                    continue
                found = await outcome(begin(comm, verb))
                assert isinstance(found, CollectiveAborted), verb
                assert "rank 2 refused" in str(found)
            if comm.rank == 1:
                comm.refuse("r", ValueError("no gradient"))
            else:
                with pytest.raises(CollectiveAborted, match="rank 1 refused its call of 'r': no gradient"):
                    await comm.all_reduce(np.ones(2), "r")
            return None

        assert [len(found) for found in await train(comms, body)] == [3, 3, 3]


class Name(enum.StrEnum):
    """Of calls."""

    A = "a"
    B = "b"


KINDS: tuple[Callable[[str], Any], ...] = (Name, np.str_, str)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.asyncio
async def test_calls_are_told_apart_by_names_of_any_kind(monkeypatch: pytest.MonkeyPatch, kind: Any) -> None:
    """The result of one call is never given as the result of another."""
    leave_unheard(
        monkeypatch, lambda log, entry, _: log.comm.epoch == 0 and log.comm.rank == 2 and entry.name in ("a", "b")
    )
    async with world(3, elastic=True) as comms:

        async def body(comm: Any, step: Any) -> Any:
            if step.number != 1:
                return None
            names = [("a", 1.0), ("b", 100.0)]
            if comm.rank == 2:
                names.reverse()
            handles = {name: comm.all_reduce(np.full(2, value), kind(name)) for name, value in names}
            if comm.rank < 2:
                await asyncio.gather(*handles.values())
            if comm.rank == 0:
                die(comms, comm)
            return [(await handles[name]).tolist() for name in ("a", "b")]

        _, one, two = await train(comms, body)
        assert one[1] == two[1] == [[3.0, 3.0], [300.0, 300.0]]


@pytest.mark.asyncio
async def test_mappings_without_a_name_are_told_apart_by_the_names_of_their_arrays() -> None:
    """Ranks may begin them in any order, also where they are done again without a rank that dies."""
    async with world(4, elastic=True) as comms:

        async def body(comm: Any, step: Any) -> Any:
            if step.number != 1:
                return None
            birth = comm.births[comm.rank]
            given = [("a", 1.0), ("b", 10.0), ("c", 100.0)]
            if birth % 2:
                given.reverse()
            if birth == 0:
                die(comms, comm)
            handles = {name: comm.all_reduce_many({name: np.full(2, value)}) for name, value in given}
            alone = comm.all_reduce(np.full(2, 1000.0), "a")
            found = [float((await handles[name])[name][0]) for name in ("a", "b", "c")]
            return found, float((await alone)[0])

        _, *others = await train(comms, body)
        assert [found[1] for found in others] == [([3.0, 30.0, 300.0], 3000.0)] * 3


@pytest.mark.asyncio
async def test_unfinishable_calls_fail_until_the_step_ends() -> None:
    """Else a rank that comes to it late would wait alone in the next epoch, or talk to others than it means."""
    async with world(3, elastic=True) as comms:

        async def body(comm: Any, step: Any) -> Any:
            if step.number == 1:
                if comm.rank == 0:
                    die(comms, comm)
                await heard(comm)
                assert comm.size == 3
                for call in (
                    lambda: comm.set_strategy("ring"),
                    lambda: comm.send(np.ones(1), 2 if comm.rank == 1 else 1),
                    lambda: comm.recv_object(1 if comm.rank == 2 else 2),
                    lambda: comm.group([1, 2]),
                    lambda: comm.split(0),
                    lambda: comm.all_reduce_init(np.ones(1), "p").start(),
                    lambda: comm.queue("q", 1, 2),
                ):
                    with pytest.raises(EpochChanged):
                        await call()
                return None
            await comm.set_strategy("ring")
            return (await comm.all_reduce(np.ones(1)))[0]

        _, one, two = await train(comms, body)
        assert one == two == [3.0, None, 2.0, *one[3:]]


@pytest.mark.asyncio
async def test_a_timeout_that_was_set_holds_in_the_epochs_that_follow() -> None:
    async with world(3, elastic=True) as comms:

        async def body(comm: Any, step: Any) -> Any:
            if step.number == 0:
                comm.set_timeout(77)
            if step.number == 1:
                if comm.rank == 0:
                    die(comms, comm)
                await heard(comm)
            return comm.current._group.timeout_s

        _, one, two = await train(comms, body)
        assert set(one) == set(two) == {77.0}


def test_a_blocking_call_that_is_cancelled_ends_on_all_ranks() -> None:
    with sync_world(3, elastic=True) as comms:

        def main(comm: Any) -> list[Any]:
            ends = []
            with Elastic(comm, State()) as elastic:
                for step in elastic.steps(ElasticSampler(12, 4)):
                    for verb in programs.OWN:
                        name = {"all_to_all": "all_to_all_async"}.get(verb, f"{verb}_async")
                        x: Any = [np.ones(2)] * 3 if verb in ("scatter", "reduce_scatter", "all_to_all") else np.ones(2)
                        x = 1 if verb == "gather_object" else x
                        handle = getattr(comm, name)(x, name="c")
                        if step.number == 1 and comm.rank == 2 and handle.cancel():
                            ends.append(verb)
                            continue
                        try:
                            handle.wait()
                        except CollectiveAborted as error:
                            assert "rank 2" in str(error)  # noqa: PT017
                            ends.append(verb)
            return ends

        one, two, three = run_threads(list(comms), main)
        assert set(one) | set(two) <= set(three)
