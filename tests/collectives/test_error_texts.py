"""Ranks and names in errors, stall reports and warnings: one rule for the world, groups and messages.

Texts name world ranks; if the rank has another number in the group, that number follows in brackets. Calls, tags,
queues and blobs have the names that the user gave them, never those of the library's own pairs and steps.
"""

from __future__ import annotations

import asyncio
import logging
import re
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kfcomm.errors import (
    CollectiveAborted,
    CollectiveError,
    CollectiveMismatch,
    CollectiveTimeout,
    ConfigError,
    EpochChanged,
    Partitioned,
    PeerLost,
    SessionClosed,
    WouldDeadlock,
)
from kfcomm.testing import Partition, run_in_virtual_time, sync_world
from tests.conformance.worlds import turns, until, world

X = np.arange(5)
SOON_S = 0.05
MEMBERS = [1, 3]
"""World ranks of the group."""
CALLED = {"world": ("rank 0", "rank 1"), "group": ("rank 1 (group rank 0)", "rank 3 (group rank 1)")}
WORLD_RANKS = {"world": (0, 1), "group": (1, 3)}
INTERNAL = ("\\x00", "\0", "group of 2): a message", "blob answer", "blob question", "pair")


def assert_plain(text: str, *said: str) -> None:
    """It says so much, and nothing of the library's own."""
    for one in said:
        assert one in text, text
    for one in INTERNAL:
        assert one not in text, text


Both = tuple[Any, Any]
Case = Callable[[Any, Any], Any]
"""What two ranks call, ``a`` the first and ``b`` the second of their group."""


async def _both(a: Any, b: Any) -> Both:
    first, second = await asyncio.gather(a, b, return_exceptions=True)
    return first, second


async def _refused_send(a: Any, b: Any) -> Both:
    with pytest.raises(ConfigError) as refused:
        a.send_object({1}, 1, "t")
    return refused.value, (await _both(b.recv_object(0, "t"), asyncio.sleep(0)))[0]


async def _cancelled_send(a: Any, b: Any) -> Both:
    sent = a.send(X, 1, "t", synchronous=True)
    await turns()
    sent.cancel()
    await turns()
    return None, (await _both(b.recv(0, "t"), asyncio.sleep(0)))[0]


async def _cancelled_call(a: Any, b: Any) -> Both:
    call = a.all_reduce(X, "grad")
    call.cancel()
    await turns()
    return None, (await _both(b.all_reduce(X, "grad"), asyncio.sleep(0)))[0]


async def _refused_call(a: Any, b: Any) -> Both:
    with pytest.raises(ConfigError):
        a.all_reduce(np.array(["x"]), "grad")
    await turns()
    return None, (await _both(b.all_reduce(X, "grad"), asyncio.sleep(0)))[0]


CASES: dict[str, tuple[Case, tuple[type[Any], type[Any]], Callable[[str, str], tuple[str, ...]]]] = {
    "mismatch of a call": (
        lambda a, b: _both(a.all_reduce(X, "grad"), b.all_reduce(X[:2], "grad")),
        (CollectiveMismatch, CollectiveMismatch), lambda a, b: ("'grad'", f"{a} has", f"{b} has"),
    ),
    "mismatch of lists": (
        lambda a, b: _both(a.gather(X, 0, "rows", concat=True), b.gather(X * 1.0, 0, "rows", concat=True)),
        (CollectiveMismatch, CollectiveMismatch), lambda a, b: ("'rows'", f"{a} has", f"{b} has"),
    ),
    "mismatch of a message": (
        lambda a, b: _both(a.send(X, 1, "t", synchronous=True), b.recv(0, "t", out=np.zeros(3))),
        (CollectiveMismatch, CollectiveMismatch),
        lambda a, b: (f"a message with tag 't' from {a} to {b}", f"{a} has send of int64", f"{b} has send of float64"),
    ),
    "timeout of a call": (
        lambda a, b: _both(a.all_reduce(X, "grad", timeout=SOON_S), asyncio.sleep(0)),
        (CollectiveTimeout, type(None)), lambda a, b: (f"'grad' did not finish on {a}", "missing ", f"; {b} "),
    ),
    "timeout of a send": (
        lambda a, b: _both(a.send(X, 1, "t", synchronous=True, timeout=SOON_S), asyncio.sleep(0)),
        (CollectiveTimeout, type(None)),
        lambda a, b: (f"a message with tag 't' from {a} to {b} did not finish on {a}", "missing ", f"; {b} "),
    ),
    "timeout of a receive": (
        lambda a, b: _both(a.recv(1, "t", timeout=SOON_S), asyncio.sleep(0)),
        (CollectiveTimeout, type(None)), lambda a, b: (f"no message with tag 't' came from {b}",),
    ),
    "timeout of an object": (
        lambda a, b: _both(a.recv_object(1, 7, timeout=SOON_S), asyncio.sleep(0)),
        (CollectiveTimeout, type(None)), lambda a, b: (f"no message with object tag 7 came from {b}",),
    ),
    "timeout of a queue": (
        lambda a, b: _both(a.queue("jobs", 1, 0).get(timeout=SOON_S), asyncio.sleep(0)),
        (CollectiveTimeout, type(None)), lambda a, b: (f"no message with queue 'jobs' came from {b}",),
    ),
    "other end of a queue": (
        lambda a, b: _both(a.queue("jobs", 0, 1).get(), b.queue("jobs", 0, 1).put(X)),
        (ConfigError, ConfigError), lambda a, b: ("queue 'jobs'", a, b),
    ),
    "blob that is not there": (
        lambda a, b: _both(a.request("weights", 1), asyncio.sleep(0)),
        (CollectiveError, type(None)), lambda a, b: (f"{b} has saved nothing as 'weights'",),
    ),
    "refused message": (_refused_send, (ConfigError, CollectiveAborted), lambda a, b: (a, "object tag 't'", "set")),
    "cancelled message": (
        _cancelled_send, (type(None), CollectiveAborted),
        lambda a, b: (f"a message with tag 't' from {a} to {b} was cancelled on {a}",),
    ),
    "cancelled call": (_cancelled_call, (type(None), CollectiveAborted), lambda a, _: (f"was cancelled on {a}",)),
    "refused call": (_refused_call, (type(None), CollectiveAborted), lambda a, b: (f"{a} refused its call of 'grad'",)),
}  # fmt: skip


@pytest.mark.asyncio
@pytest.mark.parametrize("where", ["world", "group"])
@pytest.mark.parametrize("case", CASES)
async def test_errors_name_ranks_of_the_world_and_what_the_user_has_named(case: str, where: str) -> None:
    provoke, kinds, said = CASES[case]
    async with world(2 if where == "world" else 4, aborted=True, quiet=False) as comms:
        a, b = comms if where == "world" else await _group(comms)
        outcomes = await provoke(a, b)
        assert [type(one) for one in outcomes] == list(kinds), outcomes
        words = said(*CALLED[where])
        for one in outcomes:
            if isinstance(one, CollectiveError):
                assert_plain(str(one), *words)
                assert "\0" not in one.key
        if case == "refused message":
            assert "rank" not in str(outcomes[0])


async def _group(comms: Any) -> tuple[Any, Any]:
    a, b = await asyncio.gather(*(comms[rank].group(MEMBERS, "tp") for rank in MEMBERS))
    return a, b


LOST: dict[str, Case] = {
    "'grad' failed": lambda a, _: a.all_reduce(X, "grad"),
    "a message with tag 't'": lambda a, _: a.send(X, 1, "t", synchronous=True),
    "a message with tag 'u'": lambda a, _: a.recv(1, "u"),
    "a message with queue 'jobs'": lambda a, _: a.queue("jobs", 1, 0).get(),
    "the request for 'weights'": lambda a, _: a.request("weights", 1),
}


@pytest.mark.asyncio
@pytest.mark.parametrize("where", ["world", "group"])
@pytest.mark.parametrize("title", LOST)
async def test_a_lost_rank_is_named_by_its_rank_in_the_world(title: str, where: str) -> None:
    async with world(2 if where == "world" else 4, aborted=True, quiet=False) as comms:
        a, b = comms if where == "world" else await _group(comms)
        for is_posted_before in (True, False):
            if "request" in title or not is_posted_before:
                comms.kill(WORLD_RANKS[where][1])
                await turns()
            call = asyncio.ensure_future(LOST[title](a, b))
            await turns()
            comms.kill(WORLD_RANKS[where][1])
            (error,) = await asyncio.gather(call, return_exceptions=True)
            assert isinstance(error, PeerLost)
            assert error.rank == WORLD_RANKS[where][1]
            assert_plain(str(error), title, f"rank {error.rank} is lost")


@pytest.mark.asyncio
@pytest.mark.parametrize("where", ["world", "group"])
async def test_stall_reports_and_warnings_follow_the_same_rule(where: str, caplog: pytest.LogCaptureFixture) -> None:
    first, second = CALLED[where]
    size = 2 if where == "world" else 4
    async with world(size, aborted=True, quiet=False, stall_after=SOON_S) as comms:
        a, b = comms if where == "world" else await _group(comms)
        calls = [a.all_reduce(X, "grad"), a.send(X, 1, "t", synchronous=True), a.recv(1, "u")]
        said = (
            rf"{re.escape(first)} has waited .* for 'grad' \(#0, group of 2\): .*; {re.escape(second)} ",
            rf"{re.escape(first)} has waited .* a message with tag 't' from .* to {re.escape(second)} \(#0\)",
            rf"{re.escape(first)} has waited .* for a message with tag 'u' from {re.escape(second)}",
        )
        with caplog.at_level(logging.WARNING, "kfcomm"):
            await until(lambda: all(re.search(one, caplog.text) for one in said))
        await asyncio.gather(b.all_reduce(X, "grad"), b.recv(0, "t"), b.send(X, 0, "u"), *calls)
        caplog.clear()
        copied = a.send(X, 1, "copied")
        await copied
        with pytest.raises(CollectiveMismatch):
            await b.recv(0, "copied", out=np.zeros(2))
        with caplog.at_level(logging.WARNING, "kfcomm"):
            await until(lambda: f"a message with tag 'copied' to {second} was sent and not received" in caplog.text)
        assert_plain(caplog.text)


ENDED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "call": (lambda a: a.all_reduce(X, "grad"), "'grad' failed: "),
    "rows": (lambda a: a.gather(X, 0, "rows", concat=True), "'rows' failed: "),
    "send": (lambda a: a.send(X, 1, "t", synchronous=True), "a message with tag 't' from {a} to {b} failed: "),
    "receive": (lambda a: a.recv(1, "u"), "a message with tag 'u' from {b} to {a} failed: "),
    "object": (lambda a: a.recv_object(1, 7), "a message with object tag 7 from {b} to {a} failed: "),
    "queue": (lambda a: a.queue("jobs", 1, 0).get(), "a message with queue 'jobs' from {b} to {a} failed: "),
}
"""What is under way when the communicator ends, and what it is called then."""


@pytest.mark.asyncio
@pytest.mark.parametrize("where", ["world", "group"])
@pytest.mark.parametrize("title", ENDED)
async def test_call_in_flight_at_the_end_of_an_epoch_names_the_ranks_of_the_next(title: str, where: str) -> None:
    async with world(2 if where == "world" else 4, quiet=False) as comms:
        a, _ = comms if where == "world" else await _group(comms)
        begin, said = ENDED[title]
        call = asyncio.ensure_future(begin(a))
        await turns()
        await asyncio.gather(*(comm.shrink() for comm in comms))
        (error,) = await asyncio.gather(call, return_exceptions=True)
        assert type(error) is EpochChanged
        assert (error.epoch, error.members) == (1, tuple(range(len(comms))))
        first, second = CALLED[where]
        over = f"epoch 0 is over: ranks {list(error.members)} go on as epoch 1; use the communicator of that one"
        assert_plain(str(error), said.format(a=first, b=second) + over)
        with pytest.raises(EpochChanged) as later:
            await begin(a)
        assert str(later.value) == over


@pytest.mark.asyncio
@pytest.mark.parametrize("where", ["world", "group"])
@pytest.mark.parametrize("title", ENDED)
async def test_call_in_flight_at_a_close_names_the_rank_that_closed(title: str, where: str) -> None:
    async with world(2 if where == "world" else 4, aborted=True, quiet=False) as comms:
        a, b = comms if where == "world" else await _group(comms)
        begin, said = ENDED[title]
        call = asyncio.ensure_future(begin(a))
        await turns()
        await a.close()
        (error,) = await asyncio.gather(call, return_exceptions=True)
        assert isinstance(error, (CollectiveAborted, SessionClosed))
        first, second = CALLED[where]
        who = "the communicator of rank 0 is closed" if where == "world" else f"{first} has closed group 'tp'"
        assert_plain(str(error), said.format(a=first, b=second) + who)
        with pytest.raises(SessionClosed) as later:
            await begin(a)
        assert str(later.value) == who
        if title == "call":
            (other,) = await asyncio.gather(b.all_reduce(X, "grad"), return_exceptions=True)
            assert isinstance(other, (CollectiveAborted, PeerLost))
            assert_plain(str(other), "'grad' failed: ", who if where == "group" else "rank 0")


@pytest.mark.asyncio
async def test_errors_of_what_all_ranks_of_an_epoch_agree_on_name_ranks_of_the_world() -> None:
    async with world(4, quiet=False) as comms:
        a, _ = await _group(comms)
        for call in (a.shrink, lambda: a.agree(value=True)):
            with pytest.raises(ConfigError, match="is for all ranks of an epoch: call it on the communicator of the"):
                await call()
        with pytest.raises(CollectiveTimeout, match=r"ranks \[0, 2, 3\] have not called it"):
            await comms[1].shrink(timeout=SOON_S)


def test_a_rank_that_is_cut_off_says_with_whom_and_of_how_many() -> None:
    async def main(comm: Any) -> Any:
        call = comm.all_reduce(X, "grad")
        if comm.rank:
            await asyncio.sleep(1000)
        try:
            await call
        except PeerLost:
            return await comm.shrink()
        return None

    events = [Partition(((0,), (1, 2)), at_s=0.001, for_s=500.0)]
    error = run_in_virtual_time(main, 3, seed=1, events=events, timeout=30.0, within_s=2000.0).failed[0]
    assert isinstance(error, Partitioned)
    assert error.members == (0,)
    assert_plain(str(error), "ranks [0] cannot go on: they are 1 of 3", "shrink() may succeed when more")


def test_a_blocking_call_that_would_wait_for_itself_says_what_to_call() -> None:
    with sync_world(1) as comms:
        errors: list[Exception] = []
        is_called = threading.Event()

        def blocks(_: Any) -> None:
            try:
                comms[0].all_reduce(X, name="grad")
            except WouldDeadlock as error:
                errors.append(error)
            finally:
                is_called.set()

        comms[0].all_reduce_async(X, name="first").add_done_callback(blocks)
        assert is_called.wait(60)
        assert_plain(str(errors[0]), "use the *_async verbs, or hand the work to another thread")
