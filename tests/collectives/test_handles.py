"""Handles: futures of collectives under way, with everything that asyncio does with futures."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import numpy as np
import pytest

from kfcomm.collectives import calling
from kfcomm.errors import CollectiveAborted, CollectiveError, CollectiveMismatch, ConfigError, KfcommError
from tests.collectives.calls import CALLS, TAKE_ARRAYS
from tests.conformance.worlds import assert_kinds, ends, everywhere, turns, works, world
from tests.stubs import Broken, broken

SHORT_S = 0.05
X = np.ones(3)


@pytest.mark.asyncio
async def test_it_is_under_way_before_anybody_awaits_it() -> None:
    async with world(2) as comms:
        handles = [comm.all_reduce(X) for comm in comms]
        assert not any(handle.done() for handle in handles)
        await turns()
        assert all(handle.done() for handle in handles)
        assert handles[0].result().tolist() == [2.0] * 3


@pytest.mark.asyncio
async def test_awaited_twice_gathered_and_shielded() -> None:
    async with world(2) as comms:
        handles = [comm.all_reduce(X) for comm in comms]
        first = await handles[0]
        assert first is await handles[0]
        assert [one is first for one in await asyncio.gather(handles[0], handles[0], handles[1])] == [True, True, False]
        done, pending = await asyncio.wait([comm.all_gather(X, concat=True) for comm in comms])
        assert (len(done), pending) == (2, set())
        for one in asyncio.as_completed([comm.all_gather_object(comm.rank) for comm in comms]):
            assert await one == [0, 1]
        kept = comms[0].all_reduce(X)
        waiting = asyncio.ensure_future(asyncio.wait_for(asyncio.shield(kept), SHORT_S))
        with pytest.raises(TimeoutError):
            await waiting
        assert not kept.done()
        assert (await comms[1].all_reduce(X)).tolist() == (await kept).tolist() == [2.0] * 3


@pytest.mark.asyncio
async def test_an_error_can_be_asked_for_again_and_again() -> None:
    async with world(2) as comms:
        handles = [comms[0].all_reduce(X), comms[1].all_reduce(X, op="max")]
        for _ in range(2):
            assert_kinds(await asyncio.gather(*handles, return_exceptions=True), CollectiveMismatch)
        error = handles[0].exception()
        assert isinstance(error, CollectiveError)
        assert error.key == "unnamed"
        assert handles[0].exception() is error
        assert not handles[0].cancel()
        named = await ends(comms, lambda comm: comm.all_reduce(X, "grad/0", op="max" if comm.rank else "sum"))
        assert {one.key for one in named} == {"grad/0"}


@pytest.mark.asyncio
async def test_cancel_after_the_end_does_nothing() -> None:
    async with world(2) as comms:
        for verb in ("all_reduce", "all_gather_object", "consensus"):
            handles = [getattr(comm, verb)(X.tolist()) for comm in comms]
            await asyncio.gather(*handles)
            assert not any(handle.cancel() for handle in handles)
            assert not any(handle.cancelled() for handle in handles)
        await works(comms)


@pytest.mark.asyncio
async def test_a_group_of_tasks_that_fails_cancels_its_calls() -> None:
    async with world(2) as comms:

        async def main(comm: Any) -> None:
            await comm.all_reduce(X, "k")

        async def fails() -> None:
            raise OSError("disk full")

        with pytest.raises(ExceptionGroup):
            await _in_a_group(main(comms[0]), fails())
        with pytest.raises(CollectiveAborted, match="cancelled on rank 0"):
            await comms[1].all_reduce(X, "k")
        await works(comms, "k")


async def _in_a_group(*coros: Any) -> None:
    async with asyncio.TaskGroup() as tasks:
        for coro in coros:
            tasks.create_task(coro)


def test_an_error_never_retrieved_is_reported_once_by_asyncio() -> None:
    heard: list[dict[str, Any]] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: heard.append(context))
        async with world(2) as comms:
            comms[0].all_reduce(X)
            other = comms[1].all_reduce(X, op="max")
            comms[0].all_gather(X, concat=True).cancel()
            with pytest.raises(CollectiveMismatch):
                await other
            with pytest.raises(CollectiveAborted):
                await comms[1].all_gather(X, concat=True)
            gc.collect()
            await turns()

    asyncio.run(main())
    assert [type(one.get("exception")) for one in heard] == [CollectiveMismatch]


def test_errors_that_were_heard_leave_nothing_to_report() -> None:
    """Not of a call, and not of any of its parts."""
    heard: list[dict[str, Any]] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: heard.append(context))
        async with world(2) as comms:
            for number, call in enumerate(
                (
                    lambda comm: comm.all_gather(X, concat=bool(comm.rank)),
                    lambda comm: comm.gather_object(1, comm.rank),
                    lambda comm: comm.all_reduce_many({"a": X, "b": X[comm.rank :], "c": X[comm.rank :]}),
                    lambda comm: comm.set_strategy("ring" if comm.rank else "star"),
                    lambda comm: comm.send(X, 1, synchronous=True) if comm.rank == 0 else comm.recv(out=np.zeros(1)),
                    lambda comm: comm.scatter(np.ones(4), comm.rank),
                )
            ):
                outcomes = await ends(comms, call)
                assert all(isinstance(one, KfcommError) for one in outcomes), number
            many = [comm.all_reduce_many({"a": X, "b": X[comm.rank :]}) for comm in comms]
            await turns()
            for one in many:
                one.cancel()
            await asyncio.gather(*many, return_exceptions=True)
        gc.collect()

    asyncio.run(main())
    assert heard == []


# ---------------------------------------------------------------- what goes wrong on one rank


class _NoMemory:
    """Allocations of more than ``limit`` elements fail."""

    def __init__(self, limit: int) -> None:
        self.limit = limit

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    def empty(self, count: Any, *args: Any) -> Any:
        if np.prod(count) > self.limit:
            raise MemoryError(f"no memory for {count}")
        return np.empty(count, *args)


@pytest.mark.asyncio
@pytest.mark.parametrize("waits", [False, True])
async def test_no_memory_for_a_result(waits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller gets MemoryError and the others an abort; also for calls that waited for a strategy."""
    async with world(2) as comms:
        cut = comms[0].set_strategy("ring") if waits else None
        if not waits:
            monkeypatch.setattr(calling, "np", _NoMemory(5))
        one = comms[0].all_gather(X)
        two = comms[0].all_gather(X, "c", concat=True)
        small = comms[0].all_reduce(X, "s")
        monkeypatch.setattr(calling, "np", _NoMemory(5))
        if cut is not None:
            await asyncio.gather(cut, comms[1].set_strategy("ring"))
        await turns()
        monkeypatch.setattr(calling, "np", np)
        outcomes = await asyncio.gather(
            one,
            two,
            comms[1].all_gather(X),
            comms[1].all_gather(X, "c", concat=True),
            return_exceptions=True,
        )
        assert_kinds(outcomes, MemoryError, MemoryError, CollectiveAborted, CollectiveAborted)
        assert (await comms[1].all_reduce(X, "s")).tolist() == (await small).tolist()
        await everywhere(comms, lambda comm: comm.all_gather(X))
        await everywhere(comms, lambda comm: comm.all_gather(X, "c", concat=True))


@pytest.mark.asyncio
@pytest.mark.parametrize("call", TAKE_ARRAYS)
@pytest.mark.parametrize("where", ["__array__", "__cuda_array_interface__", "__dlpack_device__", "*"])
async def test_an_array_that_breaks_while_it_is_read(where: str, call: str) -> None:
    """If an object raises anything, anywhere, the other rank gets an abort, and the names stay in step."""
    verb = CALLS[call]
    async with world(2) as comms:
        outcomes = await ends(comms, lambda comm: verb(comm, x=broken(where)) if comm.rank else verb(comm))
        assert isinstance(outcomes[1], (Broken, ConfigError))
        assert_kinds(outcomes[:1], CollectiveAborted)
        assert "rank 1 refused its call of" in str(outcomes[0])
        await everywhere(comms, verb)


class _Mapping(dict[str, Any]):
    """A mapping that fails in its own way."""

    def __getitem__(self, key: str) -> Any:
        raise Broken("the device is on fire")


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "call",
    [
        lambda comm, is_bad: comm.all_reduce(broken("*") if is_bad else X),
        lambda comm, is_bad: comm.all_reduce_many(_Mapping(k=X) if is_bad else {"k": X}),
    ],
    ids=["unnamed", "a mapping"],
)
async def test_an_unnamed_array_or_a_mapping_that_breaks(call: Any) -> None:
    async with world(2) as comms:
        assert_kinds(await ends(comms, lambda comm: call(comm, comm.rank == 0)), Broken, CollectiveAborted)
        await everywhere(comms, lambda comm: call(comm, False))
