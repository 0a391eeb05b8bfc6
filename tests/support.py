"""What tests share: running a coroutine on a loop that must end with nothing left on it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

# Turns of the loop that closing transports and finishing callbacks may still take. A count, not a time: a task that
# is about to end needs no more, and one that waits for something will not end however long one looks.
CLOSING_TURNS = 20


class LeftOnLoop(AssertionError):
    """A coroutine returned while tasks of its loop were pending, or errors went unheard in its callbacks."""


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    """uvloop's loops where uvloop exists, asyncio's elsewhere: as ``kfcomm run`` has it."""
    if sys.platform == "win32":
        return asyncio.new_event_loop
    import uvloop

    return uvloop.new_event_loop


def run(coro: Coroutine[Any, Any, T], *, plain: bool = False) -> T:
    """Runs ``coro`` on a new loop and returns its result; ``plain`` takes asyncio's own loop.

    Raises:
        LeftOnLoop: tasks were pending when ``coro`` returned, or a callback or a forgotten task had raised.
    """
    factory = asyncio.new_event_loop if plain else loop_factory()
    unheard: list[str] = []
    with asyncio.Runner(debug=False, loop_factory=factory) as runner:
        runner.get_loop().set_exception_handler(lambda _, context: unheard.append(_describe(context)))
        result = runner.run(_to_the_end(coro))
    if unheard:
        raise LeftOnLoop("errors that nobody awaited:\n  " + "\n  ".join(unheard))
    return result


async def _to_the_end(coro: Coroutine[Any, Any, T]) -> T:
    result = await coro
    for _ in range(CLOSING_TURNS):
        if len(asyncio.all_tasks()) == 1:
            return result
        await asyncio.sleep(0)
    left = asyncio.all_tasks() - {asyncio.current_task()}
    raise LeftOnLoop("tasks left pending:\n  " + "\n  ".join(sorted(map(repr, left))))


def half_close(sock: socket.socket) -> None:
    """Says that nothing more will be sent; the other end may have been quicker to hang up, with or without a reset."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_WR)


def _describe(context: dict[str, Any]) -> str:
    return f"{context.get('message')}: {context.get('exception')!r}"
