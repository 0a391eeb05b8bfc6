"""A world of control planes in one process, with engines that only take notes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kfcomm.core.handshake import Purpose
from kfcomm.engine.control import ControlPlane, World
from kfcomm.engine.control.thread import ControlThread
from kfcomm.transports.handshake import HandshakeOptions, dial
from kfcomm.transports.sockets import Connection, Listener

TOKEN = b"a token that only this world knows"
EPOCH = 3
ABORT = (b"group", "grad/0", 7, ["timeout", 0, "too late", [0], []])
LEAVE_S = 60.0
"""Longer than any leave takes; one that ends by it ends with what the test asserts being false."""


@dataclass(frozen=True)
class Info:
    rank: int
    uid: str
    address: str
    port: int
    unix: str | None
    host: str


class Notes:
    """Events so far; `until` waits for more."""

    def __init__(self) -> None:
        self._news = asyncio.Event()

    def changed(self) -> None:
        self._news.set()

    async def until(self, condition: Callable[[], Any]) -> None:
        while not condition():
            self._news.clear()
            await self._news.wait()


@dataclass
class Engine:
    """Notes what it hears; ``pending`` is what it asks a leaving rank about."""

    rank: int
    notes: Notes
    plane: ControlPlane | None = None
    posted: set[tuple[bytes, str, int]] = field(default_factory=set)
    pending: list[tuple[bytes, str, int]] = field(default_factory=list)
    aborts: list[tuple] = field(default_factory=list)
    lost: Counter[int] = field(default_factory=Counter)
    reasons: list[str] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)
    agreements: list[tuple] = field(default_factory=list)
    left: list[int] = field(default_factory=list)
    answers: list[tuple[int, list[bool], str]] = field(default_factory=list)
    adopted: list[tuple[Connection, int]] = field(default_factory=list)
    say: Callable[[bytes], bytes] = bytes  # to an observer elsewhere

    def adopt(self, connection: Connection, rank: int, purpose: Purpose) -> None:
        self.adopted.append((connection, rank))
        self.notes.changed()

    def on_abort(self, group: bytes, key: str, seq: int, cause: list[Any]) -> None:
        self.aborts.append((group, key, seq, cause))
        self.notes.changed()

    def on_peer_lost(self, rank: int, reason: str) -> None:
        self.lost[rank] += 1
        self.reasons.append(reason)
        self.notes.changed()

    def on_ended(self, rank: int) -> None:
        self.ended.append(rank)
        self.notes.changed()

    def on_agreement(self, rank: int, number: int, message: tuple) -> None:
        self.agreements.append((rank, number, message))
        self.notes.changed()

    def on_leaving(self, rank: int) -> None:
        self.left.append(rank)
        self.plane.query(self.pending, rank, self.answered)
        self.notes.changed()

    def answered(self, rank: int, posted: list[bool], activity: str) -> None:
        self.answers.append((rank, posted, activity))
        self.notes.changed()

    def is_posted(self, group: bytes, key: str, seq: int) -> bool:
        return (group, key, seq) in self.posted

    def activity(self) -> str:
        return f"rank {self.rank} is thinking"

    def answer_observer(self, question: bytes) -> bytes:
        return b"%d says %b" % (self.rank, self.say(question))


class Records(logging.Handler):
    """Log of the control planes, as a condition to wait for."""

    def __init__(self, notes: Notes) -> None:
        super().__init__(logging.DEBUG)
        self.lines: list[str] = []
        self._notes = notes
        self._loop = asyncio.get_running_loop()

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._notes.changed)

    def has(self, text: str) -> bool:
        return any(text in line for line in self.lines)


@dataclass
class Planes:
    """A running world: engines and control threads by rank."""

    notes: Notes
    records: Records
    infos: list[Info]
    engines: list[Engine]
    threads: list[ControlThread]
    adopters: list[asyncio.AbstractEventLoop]

    async def until(self, condition: Callable[[], Any]) -> None:
        await self.notes.until(condition)

    def world(self, rank: int, **changes: Any) -> World:
        return World(rank, self.infos, changes.get("token", TOKEN), changes.get("epoch", EPOCH))

    async def dial(self, rank: int, to: int, purpose: Purpose, **changes: Any) -> socket.socket:
        """A connection as ``rank`` would make it, or one with something wrong in it."""
        world = self.world(rank, **changes)
        info = self.infos[to]
        peer = changes.get("peer", world.identity(to))
        me = changes.get("me", world.identity(rank))
        addresses = [(info.address, info.port)]
        return await dial(addresses, peer, purpose, HandshakeOptions(me, world.epoch, world.token))

    def die(self, rank: int) -> None:
        """The control thread of ``rank`` fails: its listener and links close without a goodbye."""
        thread = self.threads[rank]

        async def fail() -> None:
            raise RuntimeError("scripted death")

        thread._post(lambda: thread._node.links._tasks.create_task(fail()))

    def everybody_but(self, *ranks: int) -> list[Engine]:
        return [engine for engine in self.engines if engine.rank not in ranks]


@contextlib.asynccontextmanager
async def planes(
    size: int,
    *,
    unix: bool = False,
    handshake_timeout_s: float = 10.0,
    lost_after_s: Sequence[float] = (),
    started: bool = True,
    loops: dict[int, asyncio.AbstractEventLoop] | None = None,
) -> AsyncIterator[Planes]:
    """A world on loopback; every thread is stopped in the end. ``lost_after_s``: of the first ranks."""
    here = asyncio.get_running_loop()
    notes = Notes()
    names = [f"@kfcomm-test-{os.getpid()}-{id(notes)}-{rank}" if unix else None for rank in range(size)]
    listeners = [Listener("127.0.0.1", unix=name) for name in names]
    infos = [
        Info(rank, f"uid {rank}", "127.0.0.1", listener.port, names[rank], "host")
        for rank, listener in enumerate(listeners)
    ]
    engines = [Engine(rank, notes) for rank in range(size)]
    records = Records(notes)
    log = logging.getLogger("kfcomm.control")
    log.addHandler(records)
    level = log.level
    log.setLevel(logging.DEBUG)
    adopters = [(loops or {}).get(rank, here) for rank in range(size)]
    threads = []
    for rank, engine in enumerate(engines):
        patience_s = lost_after_s[rank] if rank < len(lost_after_s) else math.inf
        world = World(rank, infos, TOKEN, EPOCH, handshake_timeout_s=handshake_timeout_s, lost_after_s=patience_s)
        thread = ControlThread(world, listeners[rank], adopters[rank], engine, engine)
        engine.plane = thread
        threads.append(thread)
    try:
        if started:
            for thread in threads:
                thread.start()
        yield Planes(notes, records, infos, engines, threads, adopters)
    finally:
        for thread in threads:
            thread.stop()
        for engine in engines:
            for connection, _ in engine.adopted:
                connection.close()
        log.removeHandler(records)
        log.setLevel(level)
