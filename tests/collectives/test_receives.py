"""A message is consumed only by a receive that returns it: whatever else ends a receive leaves it to the next one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from kfcomm.collectives import plans
from kfcomm.errors import CollectiveAborted, CollectiveMismatch, CollectiveTimeout, PeerLost
from tests.conformance.worlds import same_bits, turns, world

X = np.arange(5)
BIG = np.arange(20_000)
"""Sent in chunks of 16 KiB: many turns of the loop pass during the transfer."""
AT_ONCE = 1e-9


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "CHUNK_NBYTES", 1 << 14)


def nothing_is_left(comm: Any) -> bool:
    return not comm._mailbox._streams and not comm._mailbox._waiting


RECEIVES: dict[str, Callable[[Any], Awaitable[Any]]] = {
    "recv": lambda comm: comm.recv(1),
    "recv of any rank": lambda comm: comm.recv(),
    "recv_any": lambda comm: comm.recv_any(),
    "out": lambda comm: comm.recv(1, out=np.zeros_like(BIG)),
    "queue": lambda comm: comm.queue("q", 1, 0).get(),
    "recv_object": lambda comm: comm.recv_object(1),
    "recv_init": lambda comm: comm.recv_init(1).start(),
}


async def give(comm: Any, form: str, x: Any) -> None:
    if form == "queue":
        await comm.queue("q", 1, 0).put(x)
    elif form == "recv_object":
        await comm.send_object(x.tolist(), 0)
    else:
        await comm.send(x, 0)


def taken(form: str, result: Any) -> Any:
    return np.asarray(result[0] if form == "recv_any" else result)


@pytest.mark.asyncio
@pytest.mark.parametrize("form", RECEIVES)
async def test_a_receive_that_was_cancelled_leaves_what_comes_to_the_next_one(form: str) -> None:
    async with world(2) as (a, b):
        for when in range(0, 60, 3):
            first = asyncio.ensure_future(RECEIVES[form](a)) if form == "queue" else RECEIVES[form](a)
            giving = asyncio.ensure_future(give(b, form, BIG))
            await turns(when)
            was_cancelled = first.cancel()  # type: ignore[attr-defined]
            assert same_bits(taken(form, await (RECEIVES[form](a) if was_cancelled else first)), BIG)
            await giving
            assert nothing_is_left(a)


@pytest.mark.asyncio
@pytest.mark.parametrize("form", [form for form in RECEIVES if form != "recv_init"])
async def test_polling_takes_every_message_once_and_in_order(form: str) -> None:
    polls: dict[str, Callable[[Any], Awaitable[Any]]] = {
        "recv": lambda comm: comm.recv(1, timeout=AT_ONCE),
        "recv of any rank": lambda comm: comm.recv(timeout=AT_ONCE),
        "recv_any": lambda comm: comm.recv_any(timeout=AT_ONCE),
        "out": lambda comm: comm.recv(1, out=np.zeros_like(BIG), timeout=AT_ONCE),
        "queue": lambda comm: comm.queue("q", 1, 0).get(timeout=AT_ONCE),
        "recv_object": lambda comm: comm.recv_object(1, timeout=AT_ONCE),
    }
    async with world(2) as (a, b):

        async def give_all() -> None:
            for number in range(20):
                await give(b, form, np.full_like(BIG, number))
                await turns(number)

        giving, got, late = asyncio.ensure_future(give_all()), [], 0
        while len(got) < 20:
            try:
                got.append(taken(form, await polls[form](a)))
            except CollectiveTimeout:
                late += 1
        assert [x.tolist() for x in got] == [[number] * len(BIG) for number in range(20)]
        assert late
        await giving
        assert nothing_is_left(a)


@pytest.mark.asyncio
@pytest.mark.parametrize("end", ["cancel", "timeout"])
async def test_memory_of_a_receive_that_has_ended_is_the_callers_again(end: str) -> None:
    async with world(2) as (a, b):
        for when in range(0, 60, 3):
            out = np.zeros_like(BIG)
            first = a.recv(1, out=out, timeout=AT_ONCE if end == "timeout" else None)
            sent = b.send(BIG, 0, synchronous=True)
            await turns(when)
            first.cancel()
            if isinstance(await _end(first), np.ndarray):
                await sent
                continue
            out[:] = -1
            assert same_bits(await a.recv(1), BIG)
            await sent
            assert (out == -1).all()


async def _end(handle: Any) -> Any:
    return (await asyncio.gather(handle, return_exceptions=True))[0]


@pytest.mark.asyncio
@pytest.mark.parametrize("outs", [False, True])
async def test_receives_that_were_posted_after_one_that_ends_move_up_by_one_message(outs: bool) -> None:
    async with world(2) as (a, b):
        for when in range(0, 60, 3):
            for first_ends in range(3):
                waiting = [a.recv(1, out=np.zeros_like(BIG) if outs else None) for _ in range(3)]
                sent = [b.send(np.full_like(BIG, number), 0) for number in range(4)]
                await turns(when)
                was_cancelled = waiting[first_ends].cancel()
                got = [await one for one in waiting if not one.cancelled()]
                got += [await a.recv(1) for _ in range(1 + was_cancelled)]
                assert [int(x[0]) for x in got] == [0, 1, 2, 3]
                assert all((x == x[0]).all() for x in got)
                await asyncio.gather(*sent)
                assert nothing_is_left(a)


@pytest.mark.asyncio
async def test_a_message_that_has_overtaken_another_waits_for_it() -> None:
    async with world(2) as (a, b):
        first, second = a.recv(1), a.recv(1)
        sent = [b.send(BIG, 0), b.send(X, 0, priority=9)]
        await turns(4)
        first.cancel()
        assert same_bits(await second, BIG)
        assert same_bits(await a.recv(1), X)
        await asyncio.gather(*sent)


@pytest.mark.asyncio
@pytest.mark.parametrize("form", ["recv", "recv_any", "queue", "recv_object"])
async def test_a_task_that_is_cancelled_when_its_message_is_here_hands_it_back(form: str) -> None:
    """Its handle is done and the task has not run since: as when ``asyncio.timeout`` expires in the same turn."""
    async with world(2) as (a, b):

        async def wait() -> Any:
            return await RECEIVES[form](a)

        for when in range(40):
            task = asyncio.create_task(wait())
            await turns(2)
            giving = asyncio.ensure_future(give(b, form, X))
            await turns(when)
            task.cancel()
            outcome = await _end(task)
            if isinstance(outcome, asyncio.CancelledError):
                outcome = await RECEIVES[form](a)
            assert same_bits(taken(form, outcome), X)
            await giving
            assert nothing_is_left(a)


@pytest.mark.asyncio
async def test_a_handle_whose_message_was_handed_back_is_cancelled() -> None:
    async with world(2) as (a, b):
        out = np.zeros_like(X)
        handle = a.recv(1, out=out)
        handle.add_done_callback(lambda _: task.cancel())

        async def wait() -> Any:
            return await handle

        task = asyncio.create_task(wait())
        await turns()
        await b.send(X, 0, synchronous=True)
        assert isinstance(await _end(task), asyncio.CancelledError)
        assert handle.done()
        assert handle.cancelled()
        for look in (handle.result, handle.exception):
            with pytest.raises(asyncio.CancelledError):
                look()
        assert not handle.cancel()
        out[:] = -1
        assert same_bits(await a.recv(1), X)
        assert (out == -1).all()


@pytest.mark.asyncio
async def test_left_messages_precede_announced_ones_and_recv_any_prefers_arrived_ones() -> None:
    async with world(3) as (a, b, c):
        first = a.recv_any()
        stuck = b.send(np.ones(3_000_000), 0)
        await turns(6)
        assert first.cancel()
        small = c.send(X, 0)
        await turns()
        _, source = await a.recv_any()
        assert source in (1, 2)
        _, other = await a.recv_any()
        assert {source, other} == {1, 2}
        await asyncio.gather(stuck, small)


@pytest.mark.asyncio
@pytest.mark.parametrize("when", [8, 60])
async def test_left_message_of_wrong_shape_fails_its_receive(when: int) -> None:
    async with world(2) as (a, b):
        first = a.recv(1)
        sent = b.send(BIG, 0, synchronous=True)
        await turns(2)
        first.cancel()
        await turns(when)
        with pytest.raises(CollectiveMismatch, match=r"(?s)\(20000,\).*\(5,\)"):
            await a.recv(1, out=np.zeros_like(X))
        outcome = await _end(sent)
        assert outcome is None or isinstance(outcome, CollectiveMismatch)
        sent = b.send(X, 0, synchronous=True)
        assert same_bits(await a.recv(1), X)
        await sent


@pytest.mark.asyncio
@pytest.mark.parametrize("when", range(0, 40, 4))
async def test_of_a_sender_that_is_lost_what_was_here_is_received(when: int) -> None:
    async with world(3, aborted=True, quiet=False) as comms:
        a, b, _ = comms
        first = a.recv(1)
        sent = b.send(BIG, 0, synchronous=True)
        await turns(2)
        was_cancelled = first.cancel()
        await turns(when)
        is_here = sent.done()
        comms.kill(1)
        await turns()
        outcome = await _end(a.recv(1)) if was_cancelled else await _end(first)
        assert same_bits(outcome, BIG) if is_here else isinstance(outcome, PeerLost)
        with pytest.raises(PeerLost):
            await a.recv(1)
        sent.cancel()


@pytest.mark.asyncio
async def test_a_sender_that_gives_up_amid_a_message_tells_the_next_receive() -> None:
    async with world(2) as (a, b):
        first = a.recv(1)
        sent = b.send(np.ones(3_000_000), 0)
        await turns(6)
        assert first.cancel()
        sent.cancel()
        with pytest.raises(CollectiveAborted, match="cancelled"):
            await a.recv(1)
        sent = b.send(X, 0)
        assert same_bits(await a.recv(1), X)
        await sent


@pytest.mark.asyncio
async def test_a_message_in_a_group_is_left_in_that_group() -> None:
    async with world(3) as comms:
        two, one = await asyncio.gather(*(comms[rank].group([2, 1], "pair") for rank in (2, 1)))
        first = one.recv(two.rank)
        sent = two.send(BIG, one.rank, synchronous=True)
        assert first.cancel()
        with pytest.raises(CollectiveTimeout):
            await comms[1].recv(2, timeout=AT_ONCE)
        assert same_bits(await one.recv(two.rank), BIG)
        await sent
        await asyncio.gather(one.close(), two.close())


@pytest.mark.asyncio
async def test_a_caller_who_is_interrupted_gives_up_what_his_receive_has_or_waits_for() -> None:
    async with world(2) as (a, b):
        first, second = a.recv(1), a.recv(1)
        first.give_up()
        await b.send(X, 0, synchronous=True)
        assert second.done()
        second.give_up()
        assert first.cancelled()
        assert second.cancelled()
        assert same_bits(await a.recv(1), X)
