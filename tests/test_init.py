"""Refusals of ``init`` before it opens anything, and what it sets up."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kfcomm


@pytest.mark.parametrize("init", [kfcomm.init, kfcomm.sync.init], ids=["async", "sync"])
def test_an_unknown_strategy_is_refused_at_once(init) -> None:
    # nobody serves this store: whoever tried to join would wait for it
    with pytest.raises(kfcomm.ConfigError, match="did you mean ring"):
        init(rank=1, size=2, store="http://127.0.0.1:1", token="0123456789abcdef" * 2, strategy="rign")


@pytest.mark.asyncio
async def test_shared_memory_is_refused_where_it_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")

    with pytest.raises(kfcomm.ConfigError, match="'shm' cannot work here: this system has no memfd_create"):
        # nobody serves this store either
        await kfcomm.init(rank=1, size=2, store="http://127.0.0.1:1", token="0123456789abcdef" * 2, transport="shm")


@pytest.fixture
def own_signal() -> Iterator[None]:
    """SIGUSR1 as a fresh process has it."""
    before = signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGUSR1, before)


def dumped(folder: Path) -> list[str]:
    """Ask this process for a dump, as a person would; the names under which collectives are recorded."""
    os.kill(os.getpid(), signal.SIGUSR1)
    (path,) = folder.iterdir()
    (record,) = json.loads(path.read_text())
    return [str(event) for event in record["events"]]


@pytest.mark.asyncio
async def test_a_signal_is_answered(own_signal: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KFCOMM_DUMP_DIR", str(tmp_path))

    async def main() -> list[str]:
        async with kfcomm.init() as comm:
            await comm.barrier("here")
            return dumped(tmp_path)

    assert any("here" in event for event in await main())


def test_a_signal_is_answered_by_the_blocking_interface_too(
    own_signal: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KFCOMM_DUMP_DIR", str(tmp_path))
    with kfcomm.sync.init() as comm:
        comm.barrier("here")
        assert any("here" in event for event in dumped(tmp_path))


def test_a_communicator_that_was_not_awaited_says_so_at_the_first_attribute() -> None:
    comm: Any = kfcomm.init()
    for name in ("rank", "size", "all_reduce", "close"):
        with pytest.raises(
            AttributeError, match=rf"no communicator has a .{name}. yet: write comm = await kfcomm\.init"
        ):
            getattr(comm, name)
    with pytest.raises(AttributeError, match="'Init' object has no attribute 'rnak'"):
        comm.rnak  # noqa: B018
    with pytest.raises(TypeError, match=r"write comm = await kfcomm\.init"), comm:
        pass
    assert not hasattr(comm, "rank")
