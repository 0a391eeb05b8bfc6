"""One rank of a job under test: a process that does what the test tells it, and says how that ended.

It is started as ``python -m tests.processes.actor`` and connects to the Unix socket that ``STAGE`` names. Both sides
speak lines of JSON: the test sends ``{"id", "do", "args"}``, where ``do`` names a coroutine function (a *role*) by
module and name; the actor answers ``{"id", "ok"}`` or ``{"id", "error"}``, in the order in which the roles end.
Roles begin in the order in which they were sent. When the test closes the socket, the actor ends.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import json
import logging
import os
import socket
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

import uvloop

if TYPE_CHECKING:
    from kfcomm import Communicator, sync

MAX_LINE_NBYTES = 1 << 24


class Actor:
    """State that a role may use.

    Attributes:
        label: the name under which the test knows this process: its rank, unless the test gave another.
        comm: the communicator, once the role `join` has made one.
        blocking: the blocking communicator, once `join_blocking` has.
        failing: an error set here is one that the program does not handle.
        kept: what roles keep for later ones.
    """

    comm: Communicator
    blocking: sync.Communicator

    def __init__(self, label: str, writer: asyncio.StreamWriter) -> None:
        self.label = label
        self.loop = asyncio.get_running_loop()
        self.failing: asyncio.Future[None] = self.loop.create_future()
        self.kept: dict[str, Any] = {}
        self._writer = writer

    def tell(self, **message: Any) -> None:
        """Send a line to the test. On the loop's thread only."""
        self._writer.write(json.dumps(message).encode() + b"\n")


def meet(label: str) -> socket.socket:
    """A blocking connection of its own to the test, which calls its `Stage.meet` with the same label."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(os.environ["STAGE"])
    connection.sendall(json.dumps({"label": label, "pid": os.getpid()}).encode() + b"\n")
    connection.recv(1)  # the test has hold of this process: from now on it may end
    return connection


class _ToTheTest(logging.Handler):
    """Log records become lines ``{"log"}``."""

    def __init__(self, actor: Actor) -> None:
        super().__init__()
        self._actor = actor

    def emit(self, record: logging.LogRecord) -> None:
        tell = functools.partial(self._actor.tell, log=self.format(record))
        self._actor.loop.call_soon_threadsafe(tell)


async def main() -> None:
    label = os.environ.get("LABEL") or os.environ["KFCOMM_RANK"]
    connection = meet(label)
    reader, writer = await asyncio.open_unix_connection(sock=connection, limit=MAX_LINE_NBYTES)
    actor = Actor(label, writer)
    logger = logging.getLogger("kfcomm")
    logger.addHandler(_ToTheTest(actor))
    logger.propagate = False
    obeying = asyncio.ensure_future(_obey(actor, reader))
    try:
        await asyncio.wait((obeying, actor.failing), return_when=asyncio.FIRST_COMPLETED)
        if actor.failing.done():
            actor.failing.result()
        await obeying
    finally:
        writer.close()


async def _obey(actor: Actor, reader: asyncio.StreamReader) -> None:
    async with asyncio.TaskGroup() as tasks:
        while line := await reader.readline():
            order = json.loads(line)
            if order["do"] == "end":
                return
            tasks.create_task(_act(actor, order))
    os._exit(0)


async def _act(actor: Actor, order: dict[str, Any]) -> None:
    module, _, name = order["do"].partition(":")
    role: Callable[..., Coroutine[Any, Any, Any]] = getattr(importlib.import_module(module), name)
    try:
        actor.tell(id=order["id"], ok=await role(actor, **order["args"]))
    except Exception as error:  # noqa: BLE001  the test judges it
        actor.tell(id=order["id"], error=_described(error))


def _described(error: Exception) -> dict[str, Any]:
    fields = {name: getattr(error, name) for name in ("key", "rank", "arrived", "missing") if hasattr(error, name)}
    kinds = [kind.__name__ for kind in type(error).__mro__]
    return {"kinds": kinds, "message": str(error), "fields": fields}


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
