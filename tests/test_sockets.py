"""Accepting connections, also when nothing is left to accept them with."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kfcomm.common.sockets import FLOOD_PAUSE_S, USED_UP, accept_all


@contextmanager
def no_descriptors() -> Iterator[None]:
    """No descriptor can be opened in the block."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = max(map(int, os.listdir("/proc/self/fd"))) + 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (used, limits[1]))
    filled = []
    try:
        while True:
            try:
                filled.append(os.open(os.devnull, os.O_RDONLY))
            except OSError:
                break
        yield
    finally:
        for descriptor in filled:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.asyncio
async def test_connection_without_a_free_descriptor_is_told_why() -> None:
    loop = asyncio.get_running_loop()
    accepted: asyncio.Queue[socket.socket] = asyncio.Queue()
    errors: list[OSError] = []

    def begin(sock: socket.socket) -> bool:
        accepted.put_nowait(sock)
        return False

    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as early, socket.socket() as late:
        listener.setblocking(False)
        for sock in (early, late):
            sock.setblocking(False)
        task = loop.create_task(
            accept_all(listener, begin, turn_away=lambda sock: sock.send(b"used up"), failed=errors.append)
        )
        await loop.sock_connect(early, listener.getsockname())
        (await accepted.get()).close()
        with no_descriptors():
            await loop.sock_connect(late, listener.getsockname())
            assert await loop.sock_recv(late, 100) == b"used up"
            assert await loop.sock_recv(late, 100) == b""
        assert {error.errno for error in errors} <= USED_UP
        with socket.socket() as again:
            again.setblocking(False)
            await loop.sock_connect(again, listener.getsockname())
            (await accepted.get()).close()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.mark.asyncio
async def test_after_each_one_too_many_is_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    sleep = asyncio.sleep

    async def slept(seconds: float) -> None:
        pauses.append(seconds)
        await sleep(0)

    monkeypatch.setattr(asyncio, "sleep", slept)
    accepted: list[socket.socket] = []
    errors: list[OSError] = []
    loop, enough = asyncio.get_running_loop(), asyncio.Event()

    def begin(sock: socket.socket) -> bool:
        accepted.append(sock)
        if len(accepted) == 4:
            enough.set()
        return len(accepted) > 2

    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        came = [socket.create_connection(listener.getsockname()) for _ in range(4)]
        task = loop.create_task(accept_all(listener, begin, turn_away=accepted.append, failed=errors.append))
        await enough.wait()
        await sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    for sock in (*came, *accepted):
        sock.close()
    assert not errors
    assert pauses == [0, 0, FLOOD_PAUSE_S, FLOOD_PAUSE_S]
