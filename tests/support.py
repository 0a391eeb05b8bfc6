"""Helpers of tests: event loops to run on, and the check for tasks left on a loop."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
import sys
from collections.abc import Callable, Coroutine
from random import Random
from typing import Any, TypeVar

import pytest

on_every_loop = pytest.mark.asyncio(loop_factories=["uvloop", "asyncio", "debug"])
"""Marks a test of a coroutine that is to hold on each kind of loop, and in asyncio's debug mode."""

PORTS = (10_000, 32_000)
"""Linux gives those from 32768 on."""

T = TypeVar("T")
LoopFactory = Callable[[], asyncio.AbstractEventLoop]

# Turns of the loop that closing transports and finishing callbacks may still take. A count, not a time: a task that
# is about to end needs no more, and one that waits for something will not end however long one looks.
CLOSING_TURNS = 20


class LeftOnLoop(AssertionError):
    """A coroutine returned while tasks of its loop were pending, or errors went unheard in its callbacks."""


class DebuggedLoop(asyncio.SelectorEventLoop):
    """asyncio's own loop in debug mode, also where a runner says otherwise."""

    def set_debug(self, enabled: bool) -> None:
        super().set_debug(True)


def loop_factories() -> dict[str, LoopFactory]:
    """The loops on which a test may run, by name; the first is the one of ``kfcomm run``."""
    own: dict[str, LoopFactory] = {"asyncio": asyncio.new_event_loop, "debug": DebuggedLoop}
    if sys.platform == "win32":
        return own
    import uvloop

    return {"uvloop": uvloop.new_event_loop} | own


class Watch:
    """Leftovers on the running loop: tasks begun since, and unretrieved errors."""

    def __init__(self) -> None:
        self._before = asyncio.all_tasks()
        self._unheard: list[str] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: self._unheard.append(_describe(context)))

    async def settle(self) -> None:
        """Gives what is about to end the turns for it, and reports the rest once.

        Raises:
            LeftOnLoop: tasks are pending still, or a callback or a forgotten task has raised.
        """
        here = {asyncio.current_task()}
        for _ in range(CLOSING_TURNS):
            if not asyncio.all_tasks() - self._before - here:
                break
            await asyncio.sleep(0)
        left = asyncio.all_tasks() - self._before - here
        self._before |= left
        unheard, self._unheard = self._unheard, []
        if left:
            raise LeftOnLoop("tasks left pending:\n  " + "\n  ".join(sorted(map(repr, left))))
        if unheard:
            raise LeftOnLoop("errors that were never awaited:\n  " + "\n  ".join(unheard))

    def around(self, test: Callable[..., Coroutine[Any, Any, T]]) -> Callable[..., Coroutine[Any, Any, T]]:
        """``test``, with a look at the loop after each of its runs: that of an example of hypothesis."""

        @functools.wraps(test)
        async def watched(*args: Any, **kwargs: Any) -> T:
            self._before = asyncio.all_tasks()  # what an example that failed has left is not its successor's
            result = await test(*args, **kwargs)
            await self.settle()
            return result

        return watched


def half_close(sock: socket.socket) -> None:
    """Says that nothing more will be sent; the other end may have been quicker to hang up, with or without a reset."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_WR)


def _describe(context: dict[str, Any]) -> str:
    return f"{context.get('message')}: {context.get('exception')!r}"


def free_port(count: int = 1) -> int:
    """A free port, followed by free ports: ``count - 1``.

    It is below those that the system gives to connections and to listeners that ask for any port: one of these would be
    taken by another process, sooner or later, between now and when it is used.
    """
    random = Random()
    while True:
        port = random.randrange(*PORTS)
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for number in range(count):
                stack.enter_context(socket.create_server(("127.0.0.1", port + number)))
            return port
