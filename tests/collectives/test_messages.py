"""Messages between two ranks: tags, order, sizes, and all the ways in which they end."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import numpy as np
import pytest

from kfcomm.collectives import plans
from kfcomm.core.frame import Kind
from kfcomm.core.signature import Signature
from kfcomm.errors import (
    CollectiveAborted,
    CollectiveError,
    CollectiveMismatch,
    CollectiveTimeout,
    ConfigError,
    PeerLost,
)
from tests.conformance import oracle
from tests.conformance.worlds import assert_kinds, heard_of_the_end, same_bits, turns, world

SHORT_S = 0.05
X = np.arange(5)


@pytest.mark.asyncio
async def test_tags_sources_and_order() -> None:
    async with world(3) as comms:
        a, b, c = comms
        sent = [
            sender.send(np.array([number, sender.rank]), 2, tag)
            for number in range(5)
            for sender in (a, b)
            for tag in (0, "t", -1)
        ]
        await turns()
        for tag in ("t", -1, 0):
            for source in (1, 0):
                got = [(await c.recv(source, tag)).tolist() for _ in range(5)]
                assert got == [[number, source] for number in range(5)]
        await asyncio.gather(*sent)
        # Receives that wait are served in their order; those of any source by whoever comes.
        waiting = [c.recv_any(tag=1), c.recv(1, 1), c.recv_any(tag=1)]
        await turns()
        sent = [b.send(X, 2, 1), b.send(X + 1, 2, 1), a.send(X + 2, 2, 1)]
        (first, one), second, (third, three) = await asyncio.gather(*waiting)
        from_b = {int(second[0]), *(int(x[0]) for x, source in ((first, one), (third, three)) if source == 1)}
        assert (from_b, {one, three}) == ({0, 1}, {0, 1})
        assert sorted(int(x[0]) for x in (first, second, third)) == [0, 1, 2]
        await asyncio.gather(*sent)


@pytest.mark.asyncio
async def test_tags_of_different_kinds_do_not_meet() -> None:
    async with world(2) as comms:
        tags: list[Any] = [0, "0", "tag 0", "#0", "object tag 0", "queue", 2**40, -3, "ü"]
        sent = [comms[0].send(np.array([place]), 1, tag) for place, tag in enumerate(tags)]
        sent += [comms[0].send_object(("object", place), 1, tag) for place, tag in enumerate(tags)]
        for place, tag in reversed(list(enumerate(tags))):
            assert (await comms[1].recv_object(0, tag)) == ["object", place]
            assert (await comms[1].recv(0, tag)).tolist() == [place]
        await asyncio.gather(*sent)
        for bad in ("", "a\0b", None, 1.5, b"x", "x" * 1025, "\ud800"):
            for call in (lambda bad=bad: comms[0].send(X, 1, bad), lambda bad=bad: comms[0].recv(1, bad)):
                with pytest.raises(ConfigError):
                    call()


@pytest.mark.asyncio
async def test_ranks_have_two_names_and_times_two_kinds() -> None:
    minute = timedelta(minutes=1)
    async with world(2) as comms:
        sent = [comms[0].send(X, dest=1, timeout=minute), comms[0].send_object("a", dest=1, timeout=minute)]
        assert same_bits(await comms[1].recv(src=0, timeout=minute), X)
        assert await comms[1].recv_object(src=0) == "a"
        sent.append(comms[0].send(X, 1))
        array, source = await comms[1].recv_any(src=0)
        assert same_bits(array, X)
        assert source == 0
        await asyncio.gather(*sent)
        await asyncio.gather(*(comm.all_reduce(X, timeout=minute) for comm in comms))
        await asyncio.gather(*(comm.scatter(X, timeout=minute) for comm in comms))
        await asyncio.gather(*(comm.set_strategy("ring", timeout=minute) for comm in comms))
        with pytest.raises(CollectiveTimeout):
            await comms[1].recv(0, timeout=timedelta(milliseconds=1))
        for call in (
            lambda: comms[0].send(X, 1, dest=1),
            lambda: comms[0].send(X),
            lambda: comms[0].send_object("a", 1, dest=1),
            lambda: comms[1].recv(0, src=0),
            lambda: comms[1].recv(0, out=np.zeros(5, int), like=X),
            lambda: comms[1].recv(0, timeout=timedelta(-1)),
        ):
            with pytest.raises(ConfigError):
                call()


@pytest.mark.asyncio
@pytest.mark.parametrize("early", [True, False], ids=["sent first", "received first"])
@pytest.mark.parametrize("nbytes", [24, 1 << 19])
async def test_shapes_and_sizes(early: bool, nbytes: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plans, "CHUNK_NBYTES", nbytes)
        async with world(2) as comms:
            for shape in ((), (0,), (3, 0, 2), (1,), (7, 3), (40, 5)):
                for dtype in ("float64", "bool", "complex64", "uint8"):
                    x = oracle.data(dtype, shape, 1)
                    outs = [None, np.empty(shape, dtype), np.empty((*shape, 2), dtype)[..., 0]]
                    for out in outs:
                        handles = []
                        for sends in (early, not early):
                            handles.append(comms[0].send(x, 1) if sends else comms[1].recv(0, out=out))
                            await turns(5)
                        results = await asyncio.gather(*handles)
                        got = results[1] if early else results[0]
                        assert out is None or got is out
                        assert same_bits(got, x)
                        assert got.flags.writeable


@pytest.mark.asyncio
async def test_a_message_larger_than_all_credit() -> None:
    async with world(2) as comms:
        x = oracle.data("float64", 3_000_000, 0)
        sent = [comms[0].send(x, 1, tag) for tag in range(3)]
        await turns(200)
        assert not any(one.done() for one in sent)
        assert all([same_bits(await comms[1].recv(0, tag), x) for tag in (2, 0, 1)])
        await asyncio.gather(*sent)


@pytest.mark.asyncio
@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("out", [np.zeros(4, int), np.zeros(5, np.float32), np.zeros((2, 3), int)], ids=str)
async def test_an_out_that_does_not_fit(out: Any, early: bool) -> None:
    async with world(2) as comms:
        handles = []
        for sends in (early, not early):
            handles.append(comms[0].send(X, 1, synchronous=True) if sends else comms[1].recv(out=out))
            await turns()
        outcomes = await asyncio.gather(*handles, return_exceptions=True)
        assert_kinds(outcomes, CollectiveMismatch)
        assert all("(5,)" in str(one) and "int64" in str(one) for one in outcomes)
        sent = comms[0].send(X, 1, synchronous=True)
        assert same_bits(await comms[1].recv(0, out=np.zeros(5, int)), X)
        await sent


@pytest.mark.asyncio
@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("shape", [(12,), (1, 4, 3), (4, 3, 1), (2, 2, 3)], ids=str)
async def test_an_out_may_join_or_split_axes(shape: tuple[int, ...], early: bool) -> None:
    x = np.arange(12).reshape(4, 3)
    async with world(2) as comms:
        for out in (np.zeros(shape, int), np.zeros((*shape, 2), int)[..., 0]):
            for wide in (x, np.broadcast_to(x[:, :, None], (4, 3, 1)).copy()):
                handles = []
                for sends in (early, not early):
                    handles.append(comms[0].send(wide, 1) if sends else comms[1].recv(0, out=out))
                    await turns()
                found = await asyncio.gather(*handles)
                assert found[early] is out
                assert np.array_equal(out.reshape(-1), x.reshape(-1))
                out[:] = 0
        transposed = np.zeros((3, 4), int)
        handles = []
        for sends in (early, not early):
            handles.append(comms[0].send(x, 1, synchronous=True) if sends else comms[1].recv(0, out=transposed))
            await turns()
        assert_kinds(await asyncio.gather(*handles, return_exceptions=True), CollectiveMismatch)


@pytest.mark.asyncio
async def test_calls_that_cannot_work() -> None:
    async with world(3) as comms:
        frozen = np.zeros(5, int)
        frozen.flags.writeable = False
        for call in (
            lambda: comms[0].send(X, 0),
            lambda: comms[0].recv(0),
            lambda: comms[0].send(X, 3),
            lambda: comms[0].recv(-1),
            lambda: comms[0].send(X, None),  # type: ignore[arg-type]
            lambda: comms[0].recv(1, out=frozen),
            lambda: comms[0].recv(1, out=b"abc"),
            lambda: comms[0].send(X, 1, timeout=-2),
            lambda: comms[0].recv(1, timeout="soon"),  # type: ignore[arg-type]
            lambda: comms[0].queue("q", 1, 1),
            lambda: comms[0].queue("q", 1, 5),
            lambda: comms[0].queue("q", 1, 2, capacity=0),
            lambda: comms[0].queue("", 1, 2),
            lambda: comms[0].save("", X),
            lambda: comms[0].save("b", {}),
            lambda: comms[0].save("b", X, version=-1),
            lambda: comms[0].save("b", X, version=2**63),
            lambda: comms[0].save("b", X, version=1.0),  # type: ignore[arg-type]
        ):
            with pytest.raises(ConfigError):
                call()
        with pytest.raises(ConfigError):
            await comms[0].request("b", 7)
        with pytest.raises(ConfigError):
            await comms[0].request("b", 1, version=-1)


@pytest.mark.asyncio
@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize(
    "announced",
    [
        Signature("send", "float32", (-1,), chunk_elements=1 << 17),
        Signature("send", "float32", (1 << 62,), chunk_elements=1 << 17),
        Signature("send", "float32", (1,) * 65, chunk_elements=1 << 17),
        Signature("send", "float32", ("x",), chunk_elements=1 << 17),  # type: ignore[arg-type]
        Signature("send", "object", (5,), chunk_elements=1 << 17),
        Signature("reduce", "float32", (5,), chunk_elements=1 << 17),
        ("send",),
        (),
    ],
    ids=str,
)
async def test_a_message_that_makes_no_sense(announced: Any, early: bool) -> None:
    """A peer's word is never trusted: its receive fails, the sender hears of it, and no memory is taken for it."""
    async with world(2) as comms:
        waiting = None if early else comms[1].recv(0)
        sent = comms[0].send(X, 1, synchronous=True)
        collective = next(iter(comms[0]._session.engine.router.live))
        collective.series.signature = announced
        sender = comms[0]._session.engine.links.by_peer[1]
        sender._backlog = [
            ((*header[:2], list(announced)) if header[0] == Kind.SIGNATURE else header, *rest)
            for header, *rest in sender._backlog
        ]
        await turns()
        outcomes = await asyncio.gather(sent, comms[1].recv(0) if waiting is None else waiting, return_exceptions=True)
        assert_kinds(outcomes, CollectiveAborted, CollectiveError)
        assert "cannot take" in str(outcomes[1])


@pytest.mark.asyncio
@pytest.mark.parametrize("early", [True, False])
async def test_a_send_that_is_refused_is_told_to_its_receiver(early: bool) -> None:
    async with world(2) as comms:
        waiting = None if early else comms[1].recv(0)
        await turns()
        with pytest.raises(ConfigError):
            comms[0].send(np.array(["x"]), 1)
        await turns()
        with pytest.raises(CollectiveAborted, match="rank 0 could not send"):
            await (comms[1].recv(0) if waiting is None else waiting)
        sent = comms[0].send(X, 1)
        assert same_bits(await comms[1].recv(), X)
        await sent


@pytest.mark.asyncio
async def test_receive_from_any_rank_names_the_lost_ranks():
    async with world(3) as comms:
        await comms[2].close()
        with pytest.raises(CollectiveTimeout, match=r"came from any rank \(rank 2 has left .*\) within"):
            await comms[0].recv(timeout=0.05)


@pytest.mark.asyncio
async def test_timeouts() -> None:
    async with world(2) as comms:
        with pytest.raises(CollectiveTimeout, match="tag 3 came from rank 1") as caught:
            await comms[0].recv(1, 3, timeout=SHORT_S)
        assert (caught.value.arrived, caught.value.missing) == ((0,), (1,))
        with pytest.raises(CollectiveTimeout, match="any rank"):
            await comms[0].recv(tag=3, timeout=0)
        # Nothing was used up: the next message is received.
        sent = comms[1].send(X, 0, 3, synchronous=True)
        assert same_bits(await comms[0].recv(1, 3), X)
        await sent
        # A message that nobody takes in time is given up: its receiver is told, then the next one comes.
        with pytest.raises(CollectiveTimeout):
            await comms[1].send(X, 0, 3, timeout=SHORT_S, synchronous=True)
        await heard_of_the_end(comms[0])
        with pytest.raises(CollectiveTimeout):
            await comms[0].recv(1, 3)
        sent = comms[1].send(X, 0, 3, synchronous=True)
        assert same_bits(await comms[0].recv(1, 3, timeout=30.0), X)
        await sent
        # A limit holds for the message and its data; after it nothing is left to end or report the wait.
        receive = comms[0].recv(1, 4, timeout=30.0)
        (waiting,) = comms[0]._mailbox._waiting
        assert waiting.timers
        big = np.arange(1_000_000)
        sent = comms[1].send(big, 0, 4, synchronous=True)
        assert same_bits(await receive, big)
        assert not waiting.timers
        await sent


@pytest.mark.asyncio
@pytest.mark.parametrize("when", range(0, 12, 2))
async def test_cancelled_on_either_side(when: int) -> None:
    async with world(2) as comms:
        for who in (0, 1):
            for first in (0, 1):
                handles: list[Any] = [None, None]
                for side in (first, 1 - first):
                    handles[side] = comms[0].send(X, 1, synchronous=True) if side == 0 else comms[1].recv(0)
                    if side == first:
                        await turns(when)
                await turns(when // 3)
                cancelled = handles[who].cancel()
                if cancelled and who == 1:  # the message is left for the next receive
                    assert same_bits(await comms[1].recv(0), X)
                outcomes = await asyncio.gather(*handles, return_exceptions=True)
                if cancelled:
                    assert isinstance(outcomes[who], asyncio.CancelledError)
                if isinstance(outcomes[1], CollectiveAborted):
                    assert who == 0
        sent = comms[0].send(X + 1, 1, synchronous=True)
        assert same_bits(await comms[1].recv(0), X + 1)
        await sent


@pytest.mark.asyncio
async def test_a_cancelled_message_is_told_to_the_receive_that_waits_for_it() -> None:
    async with world(2) as comms:
        sent = comms[0].send(X, 1, synchronous=True)
        sent.cancel()
        await turns()
        with pytest.raises(CollectiveAborted, match="cancelled"):
            await comms[1].recv(0)
        waiting = comms[1].recv(0)
        big = comms[0].send(np.ones(3_000_000), 1)
        await turns(2)
        big.cancel()
        with pytest.raises(CollectiveAborted, match="cancelled"):
            await waiting


@pytest.mark.asyncio
async def test_a_lost_sender_and_a_lost_receiver() -> None:
    async with world(3, aborted=True) as comms:
        receive = [comms[0].recv(1), comms[0].recv_any(1, "t")]
        anyone = comms[0].recv(tag="any")
        send = comms[2].send(X, 1, synchronous=True)
        await turns()
        comms.kill(1)
        outcomes = await asyncio.gather(*receive, send, return_exceptions=True)
        assert_kinds(outcomes, PeerLost)
        assert {one.rank for one in outcomes} == {1}
        assert not anyone.done()
        for call in (
            lambda: comms[0].recv(1),
            lambda: comms[0].send(X, 1, synchronous=True),
            lambda: comms[0].request("b", 1),
        ):
            with pytest.raises(PeerLost):
                await call()
        sent = comms[2].send(X, 0, "any", synchronous=True)
        assert same_bits(await anyone, X)
        await sent
        last = comms[0].recv()
        await comms[2].close()
        with pytest.raises(PeerLost):
            await last
        with pytest.raises(PeerLost):
            await comms[0].recv()
