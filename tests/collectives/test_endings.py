"""Every wait ends: timeouts, cancelled calls, lost peers, broken links, and ranks that leave."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kfcomm.engine import deadlines
from kfcomm.errors import (
    CollectiveAborted,
    CollectiveError,
    CollectiveTimeout,
    PeerLost,
    SessionClosed,
)
from kfcomm.transports.memory import MemoryLink
from tests.collectives.calls import SINGLE, X
from tests.conformance.worlds import (
    assert_kinds,
    ends,
    everywhere,
    heard_of_the_end,
    turns,
    until,
    works,
    world,
)

SHORT_S = 0.05


@pytest.mark.asyncio
@pytest.mark.parametrize("verb", SINGLE)
@pytest.mark.parametrize("missing", [0, 1, 3])
async def test_timeout(verb: str, missing: int) -> None:
    """Every rank that waits gets the same story; the one that comes late gets it, too; then the name works."""
    size = 4
    before = X.tobytes()
    async with world(size) as comms:
        present = [comm for comm in comms if comm.rank != missing]
        # One rank waits for a short time: its timeout ends the call everywhere.
        impatient = present[0].rank
        outcomes = await ends(
            present, lambda comm: SINGLE[verb](comm, timeout=SHORT_S if comm.rank == impatient else None)
        )
        late = await ends([comms[missing]], SINGLE[verb])
        assert_kinds([*outcomes, *late], CollectiveTimeout)
        for outcome in (*outcomes, *late):
            assert isinstance(outcome, TimeoutError)
            assert outcome.missing == (missing,)
            assert outcome.arrived == tuple(comm.rank for comm in present)
            assert "'k'" in str(outcome)
            assert f"rank {missing} last" in str(outcome) or f"rank {missing} has not posted" in str(outcome)
        assert X.tobytes() == before
        await everywhere(comms, SINGLE[verb])
        await works(comms, "k")


@pytest.mark.asyncio
async def test_error_names_the_last_act_of_the_missing_rank() -> None:
    async with world(2) as comms:
        await works(comms, "earlier")
        with pytest.raises(CollectiveTimeout, match=r"missing ranks \[1\]; rank 1 last completed 'earlier' #0"):
            await comms[0].all_reduce(X, "k", timeout=SHORT_S)
        await heard_of_the_end(comms[1])
        with pytest.raises(CollectiveTimeout):
            await comms[1].all_reduce(X, "k")


@pytest.mark.asyncio
async def test_a_rank_that_has_done_nothing_yet_has_not_posted() -> None:
    async with world(2) as comms:
        with pytest.raises(CollectiveTimeout, match=r"missing ranks \[1\]; rank 1 has not posted anything yet"):
            await comms[0].all_reduce(X, "k", timeout=SHORT_S)
        await heard_of_the_end(comms[1])
        assert_kinds(await ends(comms[1:], lambda comm: comm.all_reduce(X, "k")), CollectiveTimeout)


@pytest.mark.asyncio
async def test_a_timeout_of_nothing_still_asks_the_others() -> None:
    async with world(3) as comms:
        await works(comms, "k")
        comms[2].all_reduce(X, "k").add_done_callback(lambda done: done.exception())
        with pytest.raises(CollectiveTimeout, match="rank 1 last completed 'k' #0") as caught:
            await comms[0].all_reduce(X, "k", timeout=0)
        assert (caught.value.arrived, caught.value.missing) == ((0, 2), (1,))
        await heard_of_the_end(comms[1])
        assert_kinds(await ends(comms[1:2], lambda comm: comm.all_reduce(X, "k")), CollectiveTimeout)
        await works(comms, "k")


@pytest.mark.asyncio
async def test_the_default_timeout_is_the_communicators() -> None:
    async with world(2, timeout_s=SHORT_S) as comms:
        with pytest.raises(CollectiveTimeout, match=r"within \d\.\d s"):
            await comms[0].barrier("k")
        with pytest.raises(CollectiveTimeout, match="tag 5"):
            await comms[0].recv(1, 5)
        await heard_of_the_end(comms[1])
        with pytest.raises(CollectiveTimeout):
            await comms[1].barrier("k")


@pytest.mark.asyncio
async def test_a_stall_is_reported_once_in_one_line(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deadlines, "ANSWER_WITHIN_S", SHORT_S)

    with caplog.at_level(logging.WARNING, "kfcomm"):
        async with world(4, stall_after=SHORT_S) as comms:
            await works(comms, "earlier")
            handles = [comm.all_reduce(X, "slow") for comm in comms if comm.rank in (0, 2)]
            await until(lambda: len(_reports(caplog)) >= 2)
            handles += [comm.all_reduce(X, "slow") for comm in comms if comm.rank in (1, 3)]
            await asyncio.gather(*handles)
            await works(comms)
    reports = _reports(caplog)
    assert sorted(report[:6] for report in reports) == ["rank 0", "rank 2"]
    for report in reports:
        assert "\n" not in report
        assert "'slow'" in report
        assert "arrived ranks [0, 2], missing ranks [1, 3]" in report
        assert "rank 1 last completed 'earlier' #0" in report
        assert "rank 3 last completed 'earlier' #0" in report


@pytest.mark.asyncio
async def test_of_very_many_that_wait_few_are_reported_one_by_one(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deadlines, "ANSWER_WITHIN_S", SHORT_S)
    monkeypatch.setattr(deadlines, "REPORTS_AT_ONCE", 3)

    with caplog.at_level(logging.WARNING, "kfcomm"):
        async with world(2, stall_after=SHORT_S) as comms:
            names = [f"slow {number}" for number in range(20)]
            handles = [comms[0].all_reduce(X, name) for name in names]
            await until(lambda: sum(map(_told_of, _reports(caplog))) == len(names))
            await asyncio.gather(*handles, *(comms[1].all_reduce(X, name) for name in names))
    assert len(_reports(caplog)) < 20


def _told_of(report: str) -> int:
    """Of how many collectives a report tells."""
    more = re.search("as long for ([0-9]+) more", report)
    return int(more[1]) if more else 1


def _reports(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "has waited" in record.getMessage()]


@pytest.mark.asyncio
async def test_calls_that_end_in_time_are_not_reported(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "kfcomm"):
        async with world(3) as comms:
            await works(comms)
    assert not caplog.records


@pytest.mark.asyncio
async def test_a_receive_that_waits_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "kfcomm"):
        async with world(2, stall_after=SHORT_S) as comms:
            waiting = comms[0].recv(1, "t")
            await until(lambda: _reports(caplog))
            await asyncio.gather(waiting, comms[1].send(X, 0, "t"))
    (report,) = _reports(caplog)
    assert report.endswith("for a message with tag 't' from rank 1")


# ---------------------------------------------------------------- cancelled calls


@pytest.mark.asyncio
@pytest.mark.parametrize("verb", SINGLE)
@pytest.mark.parametrize("when", ["before the others", "after some", "last but one"])
async def test_cancelled_on_one_rank(verb: str, when: str) -> None:
    """CancelledError there, CollectiveAborted elsewhere: for those that wait, and for those that are still to post."""
    size = 3
    async with world(size) as comms:
        others: list[Any] = []
        if when == "after some":
            others.append(SINGLE[verb](comms[1]))
            await turns()
        mine = SINGLE[verb](comms[0])
        if when == "last but one":
            others.append(SINGLE[verb](comms[1]))
            await turns()
        assert mine.cancel()
        assert mine.cancelled()
        assert not mine.cancel()
        await turns()
        others += [SINGLE[verb](comm) for comm in comms[1 + len(others) :]]
        outcomes = await asyncio.gather(mine, *others, return_exceptions=True)
        assert_kinds(outcomes, asyncio.CancelledError, CollectiveAborted, CollectiveAborted)
        assert all("cancelled" in str(one) and "rank 0" in str(one) for one in outcomes[1:])
        await everywhere(comms, SINGLE[verb])


@pytest.mark.asyncio
@pytest.mark.parametrize("verb", SINGLE)
async def test_cancelling_the_task_that_awaits(verb: str) -> None:
    async with world(3) as comms:
        tasks = [asyncio.ensure_future(_awaited(SINGLE[verb], comm)) for comm in comms[:2]]
        await turns()
        tasks[1].cancel()
        outcomes = await asyncio.gather(*tasks, SINGLE[verb](comms[2]), return_exceptions=True)
        assert_kinds(outcomes, CollectiveAborted, asyncio.CancelledError, CollectiveAborted)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(SINGLE[verb](comms[0]), SHORT_S)
        assert_kinds(await ends(comms[1:], SINGLE[verb]), CollectiveAborted)
        await everywhere(comms, SINGLE[verb])


async def _awaited(call: Callable[..., Any], comm: Any) -> Any:
    return await call(comm)


@pytest.mark.asyncio
async def test_everything_cancelled_at_any_moment_comes_to_rest() -> None:
    """After any number of turns of the loop one rank cancels: every rank ends, and the next use works."""
    async with world(3, strategy="ring") as comms:
        for verb, call in SINGLE.items():
            for count in range(0, 30, 3):
                handles = [call(comm) for comm in comms]
                await turns(count)
                cancelled = handles[count % 3].cancel()
                outcomes = await asyncio.gather(*handles, return_exceptions=True)
                allowed = (asyncio.CancelledError, CollectiveAborted) if cancelled else ()
                failed = [one for one in outcomes if isinstance(one, BaseException)]
                assert all(isinstance(one, allowed) for one in failed), f"{verb} after {count} turns: {outcomes}"
        await works(comms, "k")


# ---------------------------------------------------------------- lost peers, broken links


@pytest.mark.asyncio
@pytest.mark.parametrize("verb", SINGLE)
@pytest.mark.parametrize("strategy", ["ring", "star", "clique"])
async def test_a_peer_is_killed(verb: str, strategy: str) -> None:
    size, dead = 4, 2
    async with world(size, strategy=strategy, aborted=True) as comms:
        await works(comms)
        sub, other = [comm for comm in comms if comm.rank != dead], comms[dead]
        groups = await everywhere(sub, lambda comm: comm.group([0, 1, 3]))
        pair = await everywhere([comms[2], comms[3]], lambda comm: comm.group([2, 3], "pair"))
        waiting = [asyncio.ensure_future(_awaited(SINGLE[verb], comm)) for comm in (comms[0], comms[3])]
        # The dead rank has posted, and some may have completed a step.
        last = SINGLE[verb](other)
        await turns(3)
        comms.kill(dead)
        outcomes = await asyncio.gather(*waiting, return_exceptions=True)
        outcomes += await ends([comms[1]], SINGLE[verb])
        assert_kinds(outcomes, PeerLost)
        for outcome in outcomes:
            assert isinstance(outcome, ConnectionError)
            assert outcome.rank == dead
        assert_kinds(await ends(sub, lambda comm: comm.all_reduce(X)), PeerLost)
        assert_kinds(await ends(sub, SINGLE[verb]), PeerLost)
        assert_kinds(await ends(pair[1:], lambda comm: comm.barrier()), PeerLost)
        await works(groups, "k")
        await everywhere(groups, SINGLE[verb])
        last.cancel()


@pytest.mark.asyncio
async def test_a_peer_is_killed_while_much_is_in_flight() -> None:
    size, count = 4, 100
    async with world(size, strategy="ring", aborted=True) as comms:
        big = np.ones(30_000)
        handles = [comm.all_reduce(big, f"k{number}") for comm in comms for number in range(count)]
        await turns(4)
        comms.kill(1)
        ended = await asyncio.gather(
            *(one for place, one in enumerate(handles) if place // count != 1), return_exceptions=True
        )
        assert {type(one) for one in ended} <= {PeerLost, np.ndarray}
        for handle in handles[count : 2 * count]:
            handle.cancel()


@pytest.mark.asyncio
async def test_a_link_breaks() -> None:
    """Calls over it fail with that reason; the peers live, so the next use of the name works, over a new link."""
    async with world(3, strategy="ring", aborted=True) as comms:
        await works(comms, "k")
        handles = [comm.all_reduce(X, "k") for comm in comms[:2]]
        await turns()
        comms.unplug(0)
        outcomes = await asyncio.gather(*handles, return_exceptions=True)
        outcomes += await ends([comms[2]], lambda comm: comm.all_reduce(X, "k"))
        assert_kinds(outcomes, CollectiveError)
        assert all("link between ranks" in str(one) for one in outcomes)
        for _ in range(3):
            await works(comms, "k")


@pytest.mark.asyncio
async def test_a_rank_that_is_unplugged_again_and_again() -> None:
    async with world(3, aborted=True) as comms:
        for count in range(12):
            handles = [comm.all_reduce(np.ones(1, np.int64), f"k{number}") for comm in comms for number in range(20)]
            await turns(count)
            comms.unplug(count % 3)
            outcomes = await asyncio.gather(*handles, return_exceptions=True)
            assert {type(one) for one in outcomes} <= {CollectiveError, np.ndarray}
            assert all(one.tolist() == [3] for one in outcomes if isinstance(one, np.ndarray))
        await works(comms)


# ---------------------------------------------------------------- leaving and closing


@pytest.mark.asyncio
@pytest.mark.parametrize("verb", SINGLE)
async def test_a_rank_leaves_while_others_wait(verb: str) -> None:
    async with world(3, aborted=True) as comms:
        await works(comms)
        waiting = [asyncio.ensure_future(_awaited(SINGLE[verb], comm)) for comm in comms[:2]]
        await turns()
        with pytest.MonkeyPatch.context() as patch:
            cut_off: list[int] = []
            patch.setattr(MemoryLink, "abort", lambda link: cut_off.append(link.peer) or link.end(None))
            await comms[2].close()
            assert not cut_off, "the others have said goodbye, so no link had to be broken"
        outcomes = await asyncio.gather(*waiting, return_exceptions=True)
        assert_kinds(outcomes, PeerLost)
        assert all("has left" in str(one) for one in outcomes)
        assert_kinds(await ends(comms[:2], SINGLE[verb]), PeerLost)


@pytest.mark.asyncio
async def test_posts_of_a_leaving_rank_complete_or_fail() -> None:
    """A close does not outrun the data: a rank that has completed may leave at once."""
    async with world(3, strategy="star", aborted=True) as comms:

        async def last(comm: Any) -> Any:
            result = await comm.all_reduce(np.ones(1, np.int64), "last")
            await comm.close()
            return result.tolist()

        assert await everywhere(comms, last) == [[3]] * 3


@pytest.mark.asyncio
@pytest.mark.parametrize("verb", SINGLE)
async def test_closed_with_things_in_flight(verb: str) -> None:
    async with world(2, aborted=True) as comms:
        mine = SINGLE[verb](comms[0])
        receive = comms[0].recv(1)
        await comms[0].close()
        outcomes = await asyncio.gather(mine, receive, return_exceptions=True)
        assert_kinds(outcomes, CollectiveAborted, SessionClosed)
        for call in SINGLE.values():
            with pytest.raises(SessionClosed, match="rank 0 is closed"):
                call(comms[0])
        await comms[0].close()
        outcomes = await ends([comms[1]], SINGLE[verb])
        assert type(outcomes[0]) in (CollectiveAborted, PeerLost)


@pytest.mark.asyncio
async def test_everything_says_that_it_is_closed() -> None:
    async with world(2) as comms:
        queue = comms[0].queue("q", 0, 1)
        await asyncio.gather(*(comm.close() for comm in comms for _ in range(2)))
        assert "closed" in repr(comms[0])
        for call in (
            lambda comm: comm.send(X, 1),
            lambda comm: comm.recv(),
            lambda comm: comm.recv_any(),
            lambda comm: comm.send_object(1, 1),
            lambda comm: comm.recv_object(),
            lambda comm: comm.queue("q", 0, 1),
            lambda comm: comm.save("b", X),
            lambda comm: comm.request("b", 1),
            lambda comm: comm.set_strategy("ring"),
            lambda comm: comm.group([0, 1]),
            lambda comm: comm.split(1),
            lambda comm: comm.all_reduce_many({"a": X}),
            lambda comm: queue.put(X),
        ):
            with pytest.raises(SessionClosed):
                await call(comms[0])


@pytest.mark.asyncio
@pytest.mark.parametrize("turns_before", range(12))
async def test_closed_just_as_a_question_comes(turns_before: int) -> None:
    async with world(2, quiet=False) as comms:
        asked = asyncio.ensure_future(comms[0].request("name", 1, timeout=5.0))
        await turns(turns_before)
        await comms[1].close()
        (answer,) = await asyncio.gather(asked, return_exceptions=True)
        assert isinstance(answer, CollectiveError)
