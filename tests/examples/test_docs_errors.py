"""The documentation names the error that is raised, and quotes messages as they are."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kfcomm
from kfcomm.errors import (
    CollectiveAborted,
    CollectiveMismatch,
    CollectiveTimeout,
    ConfigError,
    PeerLost,
    SessionClosed,
    WouldDeadlock,
)
from kfcomm.testing import run_threads, sync_world, world
from tests.conformance.worlds import ends, until
from tests.examples.pages import ALL_PAGES, name_of
from tests.launch.launched import ROOT

X = np.ones(4, np.float32)
READ_ONLY = np.broadcast_to(np.float32(0), 4)


async def _first(comm: kfcomm.Communicator, call: Callable[[], Any], other: Callable[[], Any]) -> Any:
    """Return the result of ``call`` on rank 0, and of ``other`` on the other ranks."""
    return await (call() if comm.rank == 0 else other())


async def _closed(comm: kfcomm.Communicator) -> Any:
    if comm.rank == 0:
        return await comm.close()
    return await comm.all_reduce(X, "a")


async def _cancelled(comm: kfcomm.Communicator) -> Any:
    handle = comm.all_reduce(X, "a")
    if comm.rank == 0:
        handle.cancel()
    return await handle


async def _after_close(comm: kfcomm.Communicator) -> Any:
    await comm.close()
    return await comm.all_reduce(X, "a")


async def _twice(comm: kfcomm.Communicator) -> Any:
    first = comm.all_reduce(X, "a")
    second = comm.all_reduce(X, "a")
    await first
    return await second


async def _started_twice(comm: kfcomm.Communicator) -> Any:
    exchange = comm.all_reduce_init(X, "a")
    exchange.start()
    try:
        return exchange.start() if comm.rank == 0 else None
    finally:
        await exchange


async def _task(comm: kfcomm.Communicator) -> Any:
    handle = comm.all_reduce(X, "a")
    try:
        return asyncio.create_task(handle)  # type: ignore[arg-type]
    finally:
        await handle


async def _wait(comm: kfcomm.Communicator) -> Any:
    handle = comm.all_reduce(X, "a")
    try:
        return handle.wait()  # type: ignore[attr-defined]
    finally:
        await handle


CLAIMS: dict[str, tuple[str, str, Callable[[Any], Any], type[BaseException], type[BaseException]]] = {
    "a dead process": (
        "howto/timeouts.md", "A process that is dead: `PeerLost`", lambda comm: comm.all_reduce(X, "a"), PeerLost,
        PeerLost,
    ),
    "a closed communicator": (
        "howto/timeouts.md", "A rank that closed its communicator: `PeerLost`", _closed, type(None), PeerLost
    ),
    "a cancelled call": (
        "howto/timeouts.md", "cancelled or refused: `CollectiveAborted`", _cancelled, asyncio.CancelledError,
        CollectiveAborted,
    ),
    "a refused call": (
        "howto/timeouts.md", "cancelled or refused: `CollectiveAborted`",
        lambda comm: _first(comm, lambda: comm.all_reduce(object(), "a"), lambda: comm.all_reduce(X, "a")),
        ConfigError, CollectiveAborted,
    ),
    "time is up": (
        "howto/timeouts.md", "When time is up, `CollectiveTimeout` is raised",
        lambda comm: _first(comm, lambda: comm.barrier("b", timeout=0.05), lambda: comm.barrier("c", timeout=0.05)),
        CollectiveTimeout, CollectiveTimeout,
    ),
    "an unsupported dtype": (
        "topics/errors.md", "an unsupported dtype", lambda comm: comm.all_reduce(X.astype(object), "a"), ConfigError,
        ConfigError,
    ),
    "a read-only out": (
        "topics/errors.md", "a read-only `out`", lambda comm: comm.all_reduce(X, "a", out=READ_ONLY), ConfigError,
        ConfigError,
    ),
    "avg of integers": (
        "topics/errors.md", "`avg` of integers", lambda comm: comm.all_reduce([1, 2], "a", op="avg"), ConfigError,
        ConfigError,
    ),
    "an unknown strategy": (
        "topics/errors.md", "an unknown strategy", lambda comm: comm.set_strategy("rings"), ConfigError, ConfigError
    ),
    "a closed communicator's calls": (
        "topics/errors.md", "the communicator was closed", _after_close, SessionClosed, SessionClosed
    ),
    "unlike shapes": (
        "topics/errors.md", "ranks disagree on shape", lambda comm: comm.all_reduce(np.ones(3 + comm.rank), "a"),
        CollectiveMismatch, CollectiveMismatch,
    ),
    "a name in use": (
        "howto/names.md", "is an error for the second use, on every", _twice, kfcomm.CollectiveError,
        kfcomm.CollectiveError,
    ),
    "a start in flight": (
        "howto/persistent.md", "still in flight raises `ConfigError`, here alone", _started_twice, ConfigError,
        type(None),
    ),
    "a task of a handle": (
        "howto/asyncio.md", "| `asyncio.create_task(handle)` | no: `TypeError` |", _task, TypeError, TypeError
    ),
    "a wait on the loop": (
        "howto/asyncio.md", "| `handle.wait()` | no: `ConfigError` |", _wait, ConfigError, ConfigError
    ),
}  # fmt: skip
"""A page, its words, what each of three ranks does, and the ends of rank 0 and of the others."""


@pytest.mark.asyncio
@pytest.mark.parametrize("case", CLAIMS)
async def test_the_error_that_a_page_names_is_raised(case: str) -> None:
    page, words, call, first, others = CLAIMS[case]
    assert words in " ".join((ROOT / "docs" / page).read_text("utf-8").split())
    async with world(3) as comms:
        if case == "a dead process":
            comms.kill(0)
            await until(lambda: all(0 in comm._session.engine.router.lost for comm in list(comms)[1:]))
        found = await ends(list(comms)[1:] if case == "a dead process" else comms, call)
    if case != "a dead process":
        assert isinstance(found.pop(0), first)
    for one in found:
        assert isinstance(one, others)


def test_a_call_on_the_io_thread_is_refused() -> None:
    assert "a blocking call of `kfcomm.sync` on its own I/O thread" in (ROOT / "docs/topics/errors.md").read_text(
        "utf-8"
    )
    found: list[BaseException] = []

    def rank(comm: kfcomm.sync.Communicator) -> None:
        handle = comm.all_reduce_async(X, "a")

        def over(_: Any) -> None:
            try:
                comm.barrier()
            except WouldDeadlock as error:
                found.append(error)

        handle.add_done_callback(over)
        handle.wait()
        comm.barrier("end")

    with sync_world(2) as comms:
        run_threads(comms, rank)
    assert found


# ---------------------------------------------------------------- messages


@cache
def source() -> str:
    text = "\n".join(path.read_text("utf-8") for path in (ROOT / "kfcomm").rglob("*.py"))
    return re.sub(r'"\s*\n\s*f?"', "", text)  # literals that go on in the next line


def pieces(message: str) -> list[str]:
    """Constant parts of such a message, without names, numbers and dots."""
    found = re.split(r"'[^']*'|[\w./:-]*\d[\w./:-]*|…|\.\.\.|`[^`]*`", message)
    return [one.strip(" ,.;:()") for one in found if len(one.strip(" ,.;:()")) > 6]


@pytest.mark.parametrize("page", ALL_PAGES, ids=name_of)
def test_messages_that_a_page_quotes_are_in_the_source(page: Path) -> None:
    text = page.read_text("utf-8")
    quoted = [
        one for row in re.findall(r"^\| (\*[^|]*\*) \|", text, re.MULTILINE) for one in re.findall(r"\*([^*]+)\*", row)
    ]
    quoted += re.findall(r"^- \*\*\"([^\"]+)\"\*\*", text, re.MULTILINE)
    assert {piece for one in quoted for piece in pieces(one) if piece not in source()} == set()


def test_a_message_that_is_not_in_the_source_is_found() -> None:
    assert pieces("on cuda:0 cannot be exchanged: this rank uses cuda:1") == ["cannot be exchanged: this rank uses"]
    assert "no such message at all" not in source()
