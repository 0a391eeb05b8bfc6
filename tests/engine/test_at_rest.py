"""Nothing grows: after thousands of rounds of everything, the tables are as they were after the first."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from kfcomm.collectives import plans
from kfcomm.core.links import credit_of
from kfcomm.errors import CollectiveAborted, CollectiveTimeout, ConfigError
from tests.conformance.worlds import assert_kinds, ends, everywhere, settled, turns, works, world

X = np.ones(40, np.float32)


def _sizes(comms: Any) -> list[dict[str, int]]:
    """How much each rank remembers."""
    return [
        {
            "keys": comm._session.engine.router.num_keys,
            "groups": len(comm._session.engine.router._groups),
            "early listeners": len(comm._session.engine.early_listeners),
            "loss listeners": len(comm._session.engine.loss_listeners),
            "end listeners": len(comm._session.engine.end_listeners),
            "plans": len(comm._group.plans._plans) + len(comm._group.plans._ways),
            "turns": len(comm._group.turns),
            "wanted": len(comm._mailbox._waiting),
            "serving": len(comm._mailbox._serving),
            "pairs": len(comm._mailbox._pairs),
            "slots": comm._blobs._num_slots,
            "senders": len(comm._session.engine.links.by_peer),
            "incoming": len(comm._session.engine.links.incoming),
            "links": len(comms._first.links._network._links),
        }
        for comm in comms
    ]


async def _round(comm: Any, number: int) -> None:
    """A little of everything, named and unnamed; in three of four rounds something fails."""
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    comm.save("b", X)
    handles: list[Any] = [
        comm.all_reduce(X, "a"),
        comm.all_reduce(X),
        comm.all_gather(X[: comm.rank], "g", concat=True),
        comm.broadcast_object([number], number % comm.size),
        comm.scatter(X, 0, "s"),
        comm.all_to_all([X] * comm.size, "t"),
        comm.reduce_scatter(X, "r"),
        comm.consensus(X),
        comm.send(X, right),
        comm.recv(left),
        comm.barrier(),
    ]
    match number % 4:
        case 1:
            handles.append(comm.all_reduce(X[: 1 + (comm.rank == 1)], "mismatch"))
        case 2 if comm.rank == 0:
            handles[2].cancel()
        case 3:
            handles.append(comm.request("nothing", right))
    outcomes = await asyncio.gather(*handles, return_exceptions=True)
    assert len([one for one in outcomes if isinstance(one, BaseException)]) <= 2
    await comm.request("b", right)


@pytest.mark.asyncio
async def test_two_thousand_rounds_leave_nothing() -> None:
    size = 3
    async with world(size) as comms:

        async def main(comm: Any, rounds: range) -> None:
            for number in rounds:
                await comm.all_reduce(X, f"step/{number % 7}")
                await comm.all_gather(X[: number % 3], "c", concat=True)

        await everywhere(comms, lambda comm: main(comm, range(21)))
        await settled(comms)
        before = _sizes(comms)
        await everywhere(comms, lambda comm: main(comm, range(2000)))
        await settled(comms)
        assert _sizes(comms) == before


@pytest.mark.asyncio
async def test_rounds_of_everything_and_of_failures_leave_nothing() -> None:
    async with world(3) as comms:
        sizes = []
        for rounds in (8, 120):

            async def main(comm: Any, rounds: int = rounds) -> None:
                for number in range(rounds):
                    await _round(comm, number)

            await everywhere(comms, main)
            await settled(comms)
            sizes.append(_sizes(comms))
        assert sizes[0] == sizes[1]


@pytest.mark.asyncio
async def test_credit_is_whole_after_posts_that_came_too_early() -> None:
    """Spent to the last byte, kept back, aborted half-way: all of it comes back. See ``settled``."""
    async with world(2, strategy="star", timeout_s=60.0) as comms:
        big = np.ones(2_000_000)
        assert big.nbytes * 6 > credit_of(2).nbytes
        for number in range(6):
            early = [comms[1].all_reduce(big, f"k{place}") for place in range(6)]
            await turns(30)
            if number % 2:
                early[number].cancel()
                early[0].cancel()
            await turns(number)
            late = [comms[0].all_reduce(big, f"k{place}") for place in reversed(range(6))]
            await asyncio.gather(*early, *late, return_exceptions=True)
            await settled(comms)
        await works(comms, "k0")


@pytest.mark.asyncio
async def test_credit_is_whole_after_timeouts_and_refusals() -> None:
    async with world(3) as comms:
        big = np.ones(300_000)
        for number in range(4):
            calls = [comm.all_reduce(big, "k", timeout=0.05 if comm.rank == 1 else None) for comm in comms[1:]]
            outcomes = await asyncio.gather(*calls, return_exceptions=True)
            assert_kinds(outcomes, CollectiveTimeout)
            if number % 2:
                with pytest.raises(ConfigError):
                    comms[0].all_reduce(np.array(["x"]), "k")
            else:
                assert_kinds(await ends(comms[:1], lambda comm: comm.all_reduce(big, "k")), CollectiveTimeout)
            await settled(comms)
        waiting = [comm.all_reduce(big, "k") for comm in comms[1:]]
        await turns(3)
        with pytest.raises(ConfigError):
            comms[0].all_reduce(np.array(["x"]), "k")
        assert_kinds(await asyncio.gather(*waiting, return_exceptions=True), CollectiveAborted)
        await works(comms, "k")


@pytest.mark.asyncio
async def test_groups_that_were_closed_are_forgotten_by_their_listeners() -> None:
    async with world(3) as comms:
        engines = [comm._session.engine for comm in comms]
        before = [(len(one.early_listeners), len(one.loss_listeners), len(one.end_listeners)) for one in engines]
        for _ in range(5):
            groups = await everywhere(comms, lambda comm: comm.group([0, 1, 2]))
            await works(groups)
            await everywhere(groups, lambda comm: comm.close())
        after = [(len(one.early_listeners), len(one.loss_listeners), len(one.end_listeners)) for one in engines]
        assert before == after


@pytest.mark.asyncio
async def test_plans_are_made_once_and_bounded() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plans, "MAX_PLANS", 8)
        async with world(2) as comms:
            for count in range(40):
                await everywhere(comms, lambda comm, count=count: comm.all_reduce(np.ones(count)))
                await everywhere(comms, lambda comm, count=count: comm.broadcast(np.ones(count)))
            assert len(comms[0]._group.plans._ways) <= 8
            assert len(comms[0]._group.plans._plans) <= 8
